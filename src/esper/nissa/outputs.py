"""Where rows go: a file of JSON lines, or a list."""

import os
from pathlib import Path
from typing import Protocol

from esper.nissa.events import Row, encode


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

    A row is handed to the operating system at once, so a killed run keeps every row that it wrote.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def write(self, row: Row) -> None:
        """Append one line."""
        rest = memoryview(encode(row))
        try:
            if self._file is None:
                self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            while rest:  # a nearly full disk takes a part of it first
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise self._failure(error) from error

    def flush(self) -> None:
        """Flush to the disk; what cannot be flushed, as a pipe, is left."""
        if self._file is not None and os.path.isfile(self.path):
            try:
                os.fsync(self._file)
            except OSError as error:
                raise self._failure(error) from error

    def close(self) -> None:
        """Close the file; a further row would open it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _failure(self, error: OSError) -> OutputError:
        return OutputError(f"cannot write {self.path}: {error.strerror}; mend that and start the run again")


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
