"""Where rows go: a file of JSON lines, or a list."""

import os
import stat
from pathlib import Path
from typing import Protocol

from esper.leyline.disk import Patient, at_once
from esper.nissa.events import Row, encode
from esper.nissa.patience import DiskFull, Unwritable


class OutputError(OSError):
    """A row could not be kept: the disk is full, the file is gone. A run stops rather than lose rows."""


class Output(Protocol):
    """Takes numbered rows, in order."""

    def write(self, row: Row) -> None:
        """Keep the row or raise OutputError."""
        ...

    def flush(self) -> None:
        """See that what was written survives a crash of the machine."""
        ...

    def close(self) -> None:
        """No row follows."""
        ...


class JsonLines:
    """Appends each row to a file as one line of JSON. The file is opened at the first row.

    A row is handed to the operating system at once, so a killed run keeps every row that it wrote. Where the disk is full,
    `patience` decides how long that is waited for; a row that cannot be written leaves no part of itself.
    """

    def __init__(self, path: Path, patience: Patient = at_once) -> None:
        self.path, self.patience = path, patience
        self._file: int | None = None

    def write(self, row: Row) -> None:
        """Append one line."""
        rest = memoryview(encode(row))

        def put() -> None:
            nonlocal rest
            while rest:  # a nearly full disk takes a part of it first, and the rest when there is room
                rest = rest[os.write(file, rest) :]

        try:
            file = self._open()
            before = os.fstat(file)
            try:
                self.patience(self.path, put)
            except BaseException:
                if stat.S_ISREG(before.st_mode):
                    os.ftruncate(file, before.st_size)
                raise
        except OSError as error:
            raise self._failure(error) from error

    def flush(self) -> None:
        """Flush to the disk; what cannot be flushed, as a pipe, is left."""
        if self._file is not None and os.path.isfile(self.path):
            file = self._file
            try:
                self.patience(self.path, lambda: os.fsync(file))
            except OSError as error:
                raise self._failure(error) from error

    def close(self) -> None:
        """Close the file; a further row would open it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        def open_() -> None:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

        if self._file is None:
            self.patience(self.path, open_)
        assert self._file is not None
        return self._file

    def _failure(self, error: OSError) -> OSError:
        if isinstance(error, DiskFull | Unwritable):
            return error
        return OutputError(f"cannot write {self.path}: {error.strerror}; mend that and resume the run")


class Memory:
    """Keeps rows in a list."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def write(self, row: Row) -> None:
        """Append to `rows`."""
        self.rows.append(row)

    def flush(self) -> None:
        """Nothing is pending."""

    def close(self) -> None:
        """Nothing is open."""
