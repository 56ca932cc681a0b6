"""Write the rows of the hub: to a file of JSON lines, and to outputs of the user's."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from esper.leyline.errors import RunWarning, typed_line, warn
from esper.nissa.events import encode
from esper.nissa.recovery import Mark, free_path
from esper.nissa.rows import Row
from esper.store.background import Backlog
from esper.store.disk import DiskFull, Retry, Unwritable, write_atomic, write_once


class Output(Protocol):
    """Takes numbered rows, in order."""

    def write(self, row: Row) -> None:
        """Keep the row."""

    def close(self) -> None:
        """Free resources; no row follows."""


QUEUED = 4096
"""How many rows may wait for an output of the user's before the training waits for it [rows]."""
_PATIENCE = 2.0  # how long an output may take for its last rows before a line says what the run waits for [seconds]


class Guarded:
    """Calls an output of the user's in a thread of its own, so that a step does not wait for it.

    The thread hands over the rows in order, each once. `wait_for_room` lets the training wait while more than `most` rows are
    in the queue, and `close` until all rows and the output's `close` are done; a KeyboardInterrupt leaves the rest to the
    thread. When the output raises an error, it is not called again, and the next call here issues a RunWarning: in the thread
    that trains, whose stack names the line of the user's code. `note` is told of a long wait in `close`.
    """

    def __init__(self, output: Output, note: Callable[[str], None] | None = None, most: int = QUEUED) -> None:
        self.output: Output | None = output
        self.backlog = Backlog(most)
        self._name, self._note = type(output).__name__, note
        self._failure: str | None = None  # set by the thread

    def write_all(self, rows: Sequence[Row]) -> None:
        if self.output is not None:
            self.backlog.submit(partial(self._call, "write", [(row,) for row in rows]), len(rows))

    def wait_for_room(self) -> None:
        """Wait while the queue is full, and report an error of the output."""
        self.backlog.wait_for_room()
        self._report()

    def close(self) -> None:
        """Wait until the output has all rows, and close it."""
        self.backlog.submit(partial(self._call, "close", [()]), 0)
        try:
            self.backlog.finish(_PATIENCE)
        except TimeoutError:
            if self._note is not None:
                self._note(f"waiting for the output {self._name}, which has {self.backlog.size:,} rows to take")
            self.backlog.finish()
        finally:
            self.backlog.close()
        self._report()

    def _call(self, name: str, calls: Sequence[tuple[Row, ...]]) -> None:
        """Call a method of the output with each of these arguments, in the thread."""
        try:
            for arguments in calls if self.output is not None else ():
                getattr(self.output, name)(*arguments)
        except Exception as error:  # whatever the user's code raises
            self.output, said = None, f"{name} of the output {self._name} raised {typed_line(error)}"
            self._failure = f"{said}; the run goes on without this output"

    def _report(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            warn(failure, RunWarning)


class JsonLines:
    """Appends each row to a file as one line of JSON. The file is opened at the first row.

    Rows are not buffered, so a killed run keeps every row; rows that are given together are written by one call of the system.
    If the disk is full, `retry` decides how long to wait; rows that cannot be written are removed completely. If another process
    removes or replaces the file, its rows are written again, from the file that is still open. If another process changes the
    length of the file, the run goes on. `note` is told of each.
    """

    def __init__(self, path: Path, retry: Retry = write_once, note: Callable[[str], None] | None = None) -> None:
        self.path, self.retry, self.note = path, retry, note
        self._file: int | None = None
        self._length = 0  # expected length of the file [bytes]
        self._digest = hashlib.sha256()  # of the rows
        self._changed = False  # whether another process changed the file

    def write_all(self, rows: Sequence[Row]) -> None:
        """Append a line for each row, or none if that fails."""
        lines = b"".join(map(encode, rows))
        rest = memoryview(lines)

        def put() -> None:
            nonlocal rest
            while rest:  # a nearly full disk writes a part first, and the rest when there is room
                rest = rest[os.write(file, rest) :]

        with self._in_words():
            if os.fstat(self._open()).st_size != self._length:
                self._check()
            file = self._open()
            try:
                self.retry(self.path, put)
            except BaseException:
                os.ftruncate(file, self._length)
                raise
        self._digest.update(lines)
        self._length += len(lines)

    def flush(self) -> None:
        """Flush to the disk, and check that the file still exists."""
        if self._file is not None:
            with self._in_words():
                self._check()
                self.retry(self.path, lambda: os.fsync(self._open()))

    def mark(self) -> Mark | None:
        """Return the length and sha256 of the rows; None before the first row, or if another process changed the file."""
        if self._file is None or self._changed:
            return None
        return {"bytes": self._length, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        """Close the file; a further row would open it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        def open_() -> None:
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

        if self._file is None:
            self.retry(self.path, open_)
            assert self._file is not None
            with open(self._file, "rb", closefd=False) as known:
                self._digest, self._length = hashlib.file_digest(known, "sha256"), known.tell()
        return self._file

    def _check(self) -> None:
        """Check that the path names the open file, and that its length is as expected. Repair what another process changed."""
        assert self._file is not None
        mine = os.fstat(self._file)
        if mine.st_size != self._length:
            self._tell(f"was changed by another process: it has {mine.st_size:,} bytes instead of {self._length:,}")
            self._changed, self._length = True, mine.st_size
            # so that the next row starts a line
            if mine.st_size and os.pread(self._file, 1, mine.st_size - 1) != b"\n":
                self._length += os.write(self._file, b"\n")
        lost = ""
        try:
            if not os.path.samestat(os.stat(self.path, follow_symlinks=False), mine):
                side = free_path(self.path.parent, "damaged")
                os.rename(self.path, side)
                lost = f"was replaced by another process; its rows were written again, and the other file is {side}"
        except FileNotFoundError:
            lost = "was removed by another process; its rows were written again"
        if lost:
            with open(self._file, "rb", closefd=False) as known:
                known.seek(0)
                content = known.read()
            self.retry(self.path, lambda: write_atomic(self.path, content))
            self.close()
            self._open()
            self._tell(lost)

    def _tell(self, what: str) -> None:
        if self.note is not None:
            self.note(f"{self.path} {what}; the run goes on")

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except (DiskFull, Unwritable):
            raise
        except OSError as error:
            raise Unwritable(f"cannot write {self.path}: {error.strerror}; repair that and resume the run") from error
