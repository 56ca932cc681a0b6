"""Number the rows of the events, and hand each of them to every output: the file of JSON lines, and outputs of the user's."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from esper.leyline.messages import RunWarning, typed_line, warn
from esper.nissa.events import encode
from esper.nissa.recovery import Mark, free_path
from esper.nissa.rows import GateRow, GradientsRow, MeasurementRow, PhasesRow, RewardRow, Row, SensorsRow, StepRow
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


Level = Literal["off", "run", "step", "debug"]

_OF_STEPS = (StepRow, GateRow, MeasurementRow, SensorsRow, RewardRow, PhasesRow, GradientsRow)
_HIGHER: dict[Level, Level] = {"run": "step", "step": "debug"}


class Hub:
    """Takes the rows that the engine and the run write.

    When `emit` returns, every output has the row, so a run that is killed loses none in its file, and `emit` raises the error
    of an output. Only a `Guarded` output, one of the user's, has the row in its queue instead; `emit` waits while that is
    full. `seconds` is the time that all this took, for which the training waited. `seq` is the number of the next row. `level`
    says which rows are kept. After a restoration the level 'run' counts as 'step', and 'step' as 'debug', for `raise_steps`
    steps, of which `raised` are left.
    """

    def __init__(
        self, outputs: Sequence[Output | JsonLines | Guarded] = (), level: Level = "step", raise_steps: int = 0
    ) -> None:
        self.outputs = tuple(outputs)
        self._file = next((output for output in self.outputs if isinstance(output, JsonLines)), None)
        self._queued = [output for output in self.outputs if isinstance(output, Guarded)]
        self.asked: Level = level if outputs else "off"  # as nobody would have the rows
        self.seq = 0
        self.raise_steps, self.raised = raise_steps, 0
        self.seconds = 0.0

    @property
    def level(self) -> Level:
        return _HIGHER.get(self.asked, self.asked) if self.raised else self.asked

    def wants(self, kind: type[Row]) -> bool:
        """Return whether rows of this kind are kept: none at level 'off', all but those of every step at 'run', all above."""
        return self.level != "off" and (self.level != "run" or not issubclass(kind, _OF_STEPS))

    def begin_step(self, *, restored: bool) -> None:
        """Begin the rows of a step. restored: whether a network was restored in the step, which raises the level."""
        if restored:
            self.raised = self.raise_steps

    def end_step(self) -> None:
        self.raised = max(self.raised - 1, 0)

    def emit(self, row: Row) -> None:
        """Set number and time of a row and hand it to every output, if the level keeps it."""
        self.extend((row,))

    def extend(self, rows: Iterable[Row]) -> None:
        """Emit several rows, which an output that has a file writes at once: a call of the system costs more than a row."""
        self.take([row for row in rows if self.wants(type(row))])

    def take(self, kept: Sequence[Row]) -> None:
        """Set number and time of rows that a hub of this level kept, and hand them to every output."""
        if not kept:
            return
        now = round(time.time(), 3)
        for place, row in enumerate(kept):
            row.seq, row.time = self.seq + place, now
        begin = time.perf_counter()
        for output in self.outputs:
            if isinstance(output, JsonLines | Guarded):
                output.write_all(kept)
            else:
                for row in kept:
                    output.write(row)
        self.seq += len(kept)  # before the wait, which an interrupt may end
        for queued in self._queued:
            queued.wait_for_room()
        self.seconds += time.perf_counter() - begin

    def waits(self) -> dict[str, Any] | None:
        """Return how often and how long the run has waited for full queues, as in its summary; None if no output has a queue."""
        if not self._queued:
            return None
        backlogs = [output.backlog for output in self._queued]
        seconds = sum(backlog.waited for backlog in backlogs)
        return {"waits": sum(backlog.waits for backlog in backlogs), "waiting_seconds": round(seconds, 3)}

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def state(self) -> dict[str, Any]:
        """Return for a checkpoint the number of rows, the mark of the file, and steps of a raised level."""
        return {"seq": self.seq, "events": self._file and self._file.mark(), "raised": self.raised}

    def close(self) -> None:
        for output in self.outputs:
            output.close()
