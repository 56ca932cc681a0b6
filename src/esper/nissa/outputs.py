"""Where rows go: a file of JSON lines, or a list."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from esper.nissa.events import Row, encode
from esper.nissa.recovery import Mark, beside
from esper.store.disk import Patient, at_once, write_atomic
from esper.store.patience import DiskFull, Unwritable


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

    def mark(self) -> Mark | None:
        """By what the rows are known; None where they are in no file."""
        ...

    def close(self) -> None:
        """No row follows."""
        ...


class JsonLines:
    """Appends each row to a file as one line of JSON. The file is opened at the first row.

    A row is handed to the operating system at once, so a killed run keeps every row that it wrote. Where the disk is full,
    `patience` decides how long that is waited for; a row that cannot be written leaves no part of itself. Where someone
    removes or replaces the file it is written again, as the open one still holds its rows, and `note` is told so; where
    someone changes its length, `note` is told that too.
    """

    def __init__(self, path: Path, patience: Patient = at_once, note: Callable[[str], None] | None = None) -> None:
        self.path, self.patience, self.note = path, patience, note
        self._file: int | None = None
        self._length: int | None = None  # of the file as it should be [bytes]; none of a pipe
        self._digest = hashlib.sha256()  # of the rows
        self._changed = False  # whether the file holds something else

    def write(self, row: Row) -> None:
        """Append one line."""
        line = encode(row)
        rest = memoryview(line)

        def put() -> None:
            nonlocal rest
            while rest:  # a nearly full disk takes a part of it first, and the rest when there is room
                rest = rest[os.write(file, rest) :]

        try:
            file = self._open()
            before = os.fstat(file)
            if self._length not in (None, before.st_size):
                self._look()
                before = os.fstat(file)
            try:
                self.patience(self.path, put)
            except BaseException:
                if self._length is not None:
                    os.ftruncate(file, before.st_size)
                raise
        except OSError as error:
            raise self._failure(error) from error
        if self._length is not None:
            self._digest.update(line)
            self._length += len(line)

    def flush(self) -> None:
        """Flush to the disk, and see that the file is there; what cannot be flushed, as a pipe, is left."""
        if self._file is not None and self._length is not None:
            try:
                self._look()
                file = self._file
                self.patience(self.path, lambda: os.fsync(file))
            except OSError as error:
                raise self._failure(error) from error

    def mark(self) -> Mark | None:
        """Length and sha256 of the rows; None where there is no such file, or it holds something else."""
        if self._length is None or self._changed:
            return None
        return {"bytes": self._length, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        """Close the file; a further row would open it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        regular = not os.path.lexists(self.path) or os.path.isfile(self.path)

        def open_() -> None:
            flags = os.O_RDWR if regular else os.O_WRONLY
            self._file = os.open(self.path, flags | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

        if self._file is None:
            self.patience(self.path, open_)
            assert self._file is not None
            self._digest, self._length = hashlib.sha256(), 0 if regular else None
            for block in _blocks(self._file) if regular else ():
                self._digest.update(block)
                self._length = (self._length or 0) + len(block)
        return self._file

    def _look(self) -> None:
        """See that the open file stands under its name, and has the length of what was written."""
        assert self._file is not None
        mine = os.fstat(self._file)
        if mine.st_size != self._length:
            self._tell(f"was changed by another process: it has {mine.st_size:,} bytes instead of {self._length:,}")
            self._changed, self._length = True, mine.st_size
            if mine.st_size and os.pread(self._file, 1, mine.st_size - 1) != b"\n":  # the next row is a line of its own
                self._length += os.write(self._file, b"\n")
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            self._write_again()
            self._tell("was removed by another process; its rows were written again")
            return
        if not os.path.samestat(there, mine):
            side = beside(self.path.parent, "damaged")
            os.rename(self.path, side)
            self._write_again()
            self._tell(f"was replaced by another process; its rows were written again, and the other file is {side}")

    def _write_again(self) -> None:
        """A file of the same content under the name."""
        assert self._file is not None
        content = b"".join(_blocks(self._file))
        self.patience(self.path, lambda: write_atomic(self.path, content))
        self.close()
        self._open()

    def _tell(self, what: str) -> None:
        if self.note is not None:
            self.note(f"{self.path} {what}; the run goes on")

    def _failure(self, error: OSError) -> OSError:
        if isinstance(error, DiskFull | Unwritable):
            return error
        return OutputError(f"cannot write {self.path}: {error.strerror}; mend that and resume the run")


def _blocks(file: int) -> Iterator[bytes]:
    """The content of a file, a megabyte at a time, wherever it is written to."""
    place = 0
    while block := os.pread(file, 2**20, place):
        yield block
        place += len(block)


class Memory:
    """Keeps rows in a list."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def write(self, row: Row) -> None:
        """Append to `rows`."""
        self.rows.append(row)

    def flush(self) -> None:
        """Nothing is pending."""

    def mark(self) -> Mark | None:
        """They are in no file."""
        return None

    def close(self) -> None:
        """Nothing is open."""
