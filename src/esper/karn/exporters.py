"""Export of a run: its rows become points, and these go to a target, once each and in order."""

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from esper.karn.export_targets import KEPT, MAKE, Box, Target, boxes_of, drawing, final_table, title_of, wait_for
from esper.karn.reader import OpenRun, Tail, open_run
from esper.karn.run_model import CurvePoint, RunModel, unused_name
from esper.leyline.distribution import check_installed
from esper.leyline.errors import InputError, RunWarning, first_line, typed_line, warn
from esper.leyline.text import printable
from esper.nissa.rows import Row
from esper.store.background import Background
from esper.store.disk import file_name, read_kept, write_atomic
from esper.store.files import ENVIRONMENT, EVENTS
from esper.store.lock import Lock

EXPORTS = "exports"  # the folder beside the run folders that exporters write to unless another one is named
TARGET, RECORD = "target", "record.json"
CHUNK = 2**20  # events that are read at once, and written at once [bytes]
EVERY = 0.5  # least time between two looks of an exporter at the run that it belongs to [seconds]
PATIENCE = 120.0  # how long a run that has ended waits for an exporter to finish [seconds]
_LONGEST = 80  # characters of a run's name
_LARGEST = 2**20  # bytes of a record that are read
_MEND = "remove the folder of exports, and export again"

Draw = Callable[[OpenRun, Mapping[str, Any]], Sequence[Box] | None]
"""The boxes of the network of a run with a summary; None if the network cannot be loaded."""


class ExportError(RuntimeError):
    """A target raised an error: one sentence. The command line exits with 1."""


class Record(msgspec.Struct):
    """What was exported of one run to one target."""

    name: str  # name of the run in the target
    began: int  # which run it is: when the first file of it was written [ns]
    known: str | None = None  # what identifies it in the target; None before it was opened
    last: dict[str, int] = {}  # x of the last point, by kind of row
    session: str | None = None  # that of the target while it is open
    safe: dict[str, int] = {}  # `last` before that session, or, without one, after the last flush
    ended: float | None = None  # time of the last row of the run whose table and image were written; None if none were
    failed: bool = False  # whether the target failed, so that it is not known what it has

    @property
    def x(self) -> int:
        """Of the last point; -1 before the first."""
        return max(self.last.values(), default=-1)


class Exports:
    """The records of runs in a folder of exports to one target."""

    def __init__(self, folder: Path, target: str, run: Path) -> None:
        """InputError if `folder` holds anything but exports to `target`; nothing is changed."""
        self.folder, self.target, self._run = folder, target, run.resolve()
        try:
            names = [path.name for path in folder.iterdir()] if folder.exists() else []
        except OSError as error:
            raise InputError(
                f"{folder} cannot be read as a folder: {error.strerror}; name another one (--into)"
            ) from None
        marked = folder / KEPT / TARGET
        if marked.exists():
            held = read_kept(marked, _LARGEST, _MEND).decode(errors="replace").strip()
            if held != target:
                raise InputError(f"{folder} holds exports to {held}, not to {target}; name another folder (--into)")
        elif names and names != [KEPT]:  # a crash may leave the folder of the records without the name of the target
            raise InputError(f"{folder} holds other files and no exports; name a new or an empty folder (--into)")
        place = hashlib.sha256(str(self._run).encode(errors="surrogateescape")).hexdigest()[:12]
        self._own = folder / KEPT / f"{file_name(self._run.name)}-{place}"
        self.lock = Lock(self._own, lambda line: None)

    def make(self) -> None:
        """Make the folder. InputError if that is not possible."""
        try:
            self._own.mkdir(parents=True, exist_ok=True)
            write_atomic(self.folder / KEPT / TARGET, f"{self.target}\n")
        except OSError as error:
            raise InputError(
                f"{self.folder} cannot be written: {error.strerror}; name another folder (--into)"
            ) from None

    def read(self, began: int) -> Record:
        """The record of a run; a new one, under a name of its own, if there is none, or of another run or a failed export."""
        path = self._own / RECORD
        found = _read(path) if path.exists() else None
        if found is not None and found.began == began and not found.failed:
            return found
        taken = {_read(path).name for path in (self.folder / KEPT).glob(f"*/{RECORD}")}
        base = re.sub(r"[^\w.+-]+", "-", self._run.name)[:_LONGEST].strip("-.") or "run"
        return Record(unused_name(base, taken), began)

    def remove(self, session: str) -> None:
        """Remove the file or the folder of a session. InputError if a record that was edited names a folder elsewhere."""
        path = (self.folder / session).resolve()
        if self.folder.resolve() not in path.parents:
            raise InputError(
                f"{self._own / RECORD} is damaged (its session {session!r} is not in {self.folder}); {_MEND}"
            )
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def write(self, record: Record) -> None:
        write_atomic(self._own / RECORD, msgspec.json.encode(record))


def _read(path: Path) -> Record:
    data = read_kept(path, _LARGEST, _MEND)
    try:
        return msgspec.json.decode(data, type=Record)
    except msgspec.DecodeError as error:
        raise InputError(f"{path} is damaged ({error}); {_MEND}") from None


class Export:
    """The export of one run to one target, which goes on where an earlier one ended."""

    def __init__(self, run: OpenRun, exports: Exports, target: Target, draw: Draw) -> None:
        """The caller holds the lock of the exports, which `close` releases."""
        self.run, self.exports, self.target, self.draw = run, exports, target, draw
        self.points = 0
        self.is_open = False
        self.record: Record
        self._doubtful: dict[str, int] = {}  # x up to which a killed process may have written or not, by kind of row
        self._held: dict[str, set[int]] = {}  # x of the values that the target has, by curve, where they are in doubt
        self._tail = Tail(run.folder / EVENTS)
        self._begin()

    def _begin(self) -> None:
        self.model = RunModel(history=False)
        path = self.run.folder / ENVIRONMENT  # written once for a run, however often it is resumed
        began = path.stat().st_mtime_ns if path.exists() else 0
        if self.is_open and self.record.began != began:
            self._close()
        if not self.is_open:
            self.record = self.exports.read(began)
            # A process that was killed: how many of its last points are there is not known.
            self._doubtful, self._held = {}, {}
            if self.record.session is not None:
                self.exports.remove(self.record.session)
                self.record.session = None
            else:
                self._doubtful = self.record.last
            self.record.last = self.record.safe

    def update(self) -> None:
        """Write the points of the rows that have come since the last time."""
        restarts = self._tail.restarts
        while rows := self._tail.read(CHUNK):
            if self._tail.restarts != restarts:  # rows were cut off, and come again from the first
                self._begin()
                restarts = self._tail.restarts
            found = [point for row in rows if (point := self.model.write(row)) is not None]
            self._write([point for point in found if self._is_new(point)])

    def _is_new(self, point: CurvePoint) -> bool:
        """Whether the target lacks a point; it is counted, so that it is not new any more."""
        last = self.record.last
        if point.x <= last.get(point.kind, -1) or point.x < self.record.x or not point.values:
            return False
        self.record.last = {**last, point.kind: point.x}
        if point.x > self._doubtful.get(point.kind, -1):
            return True
        name = next(iter(point.values))
        if name not in self._held:
            self._open()
            self._held[name] = self._call(lambda: self.target.held(name))
        return point.x not in self._held[name]

    def _write(self, points: Sequence[CurvePoint]) -> None:
        if not points:
            return
        self._open()
        # Before the target has them: after a kill in between the next export asks the target for each of these points, or, where
        # the target has a session, writes that session again.
        self.exports.write(self.record)
        for point in points:
            self._call(lambda point=point: self.target.scalars(point.x, point.time, point.values))  # type: ignore[misc]
        self._call(self.target.flush)
        if self.record.session is None:
            self.record.safe = self.record.last
            self.exports.write(self.record)
        self.points += len(points)

    def end(self) -> str:
        """Write the rest, and the table and the image of a run that has ended. Returns the status of the run."""
        self.update()
        record, last, summary = self.record, self.model.last, self.run.summary
        status = self.run.status_after(None if last is None else last.status)
        done = status not in ("running", "killed") and last is not None and isinstance(summary, Mapping)
        table = final_table(summary) if done else None
        if table is not None and last is not None and record.ended != last.time:
            x = max(record.x, 0)
            self._open()
            if "rounds_done" not in summary:  # a training grows other networks in every round
                boxes = self.draw(self.run, summary) or list(boxes_of(summary, self.model.slots))
                pixels = drawing(title_of(summary), boxes)
                self._call(lambda: self.target.image("architecture", pixels, x))
            self._call(lambda: self.target.table("final_table", table, x))
            record.ended = last.time
        return status

    def close(self) -> None:
        """Close the target, also after an interrupt, as what was written is whole, and release the lock."""
        try:
            self._close()
        finally:
            self.exports.lock.release()

    def _open(self) -> None:
        if self.is_open:
            return
        head = self.model.head
        facts: dict[str, str | int] = {"folder": printable(self.run.folder.absolute())}
        if head is not None:
            facts |= {name: getattr(head, name) for name in ("envs", "steps", "seed")}
            facts |= {name: printable(getattr(head, name)) for name in ("task", "controller", "device")}
        self.record.known = self._call(lambda: self.target.open(self.record.name, self.record.known, facts))
        self.record.session = self.target.session
        self.is_open = True

    def _close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._call(self.target.close)
            self.record.session, self.record.safe = None, self.record.last
            self.exports.write(self.record)

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # whatever the package of the target raises
            self.is_open, self.record.failed = False, True
            self.exports.write(self.record)
            raise ExportError(
                f"the export of {self.run.folder} to {self.exports.target} in {self.exports.folder} stopped: {typed_line(error)}"
            ) from error


def begin_export(run: OpenRun, target: str, into: Path | None = None, *, patience: float = 0.0, draw: Draw) -> Export:
    """Begin an export, which the caller closes.

    What an earlier export has written is not written again. If another run has taken the folder since then, a new run begins in
    the target, and the old one stays. `into` is the folder of the exports, by default the one named like the target in `exports`
    beside the run. Raises InputError on bad input, before anything is written, and if another export of the run is not done
    after `patience` seconds.
    """
    if target not in MAKE:
        raise InputError(f"unknown target {target!r}; choose one of {', '.join(MAKE)}")
    check_installed(target)
    folder = into if into is not None else run.folder.absolute().parent / EXPORTS / target
    if run.config.get("telemetry", {}).get("level") == "off":
        raise InputError(f"{run.folder} has no events, because telemetry.level was off; there is nothing to export")
    if folder.resolve().is_relative_to(run.folder.resolve()):
        raise InputError(
            f"{folder} is in the run folder {run.folder}, which holds files of the run alone; name another (--into)"
        )
    exports = Exports(folder, target, run.folder)
    made = MAKE[target](folder)
    exports.make()
    wait_for(exports.lock, patience)
    try:
        return Export(run, exports, made, draw)
    except BaseException:
        exports.lock.release()
        raise


class Exporter:
    """An output of a run that exports its events to a target in a thread, so that no step waits for it.

    The thread reads the rows from the file, where a resumed run has those of before too. If it fails, one RunWarning is issued,
    and the run goes on without it.
    """

    def __init__(self, folder: Path, target: str, draw: Draw) -> None:
        self.folder, self.target, self.draw = folder, target, draw
        self._thread = Background()
        self._export: Export | None = None
        self._job: Future[None] | None = None  # the last one; None once the exporter was dropped
        self._due = float("-inf")

    def write(self, row: Row) -> None:
        """Let the thread look at the file if it has not done so lately; the row itself is there."""
        now = time.monotonic()
        if self._job is None and self._due == float("inf"):
            return
        if self._job is not None and self._job.done() and (error := self._job.exception()) is not None:
            self._drop(error)
        elif now >= self._due and (self._job is None or self._job.done()):
            self._due = now + EVERY
            self._job = self._thread.submit(self._update)

    def close(self) -> None:
        """Wait until the last rows, and the table and the image of a run that has ended, are written."""
        if self._job is None:
            return
        last = self._thread.submit(self._end)
        try:
            error = last.exception(PATIENCE)
        except TimeoutError:
            self._warn(f"is not done after {PATIENCE:.0f} seconds and is left behind")
            return
        if error is not None:
            self._drop(error)
        self._thread.close(lambda: None)

    def _update(self) -> None:
        if self._export is None:
            run = open_run(self.folder)
            self._export = begin_export(run, self.target, patience=PATIENCE / 2, draw=self.draw)
        self._export.update()

    def _end(self) -> None:
        assert self._job is not None
        if (error := self._job.exception()) is not None:
            raise error
        assert self._export is not None
        self._export.end()
        self._export.close()

    def _drop(self, error: BaseException) -> None:
        self._job, self._due = None, float("inf")
        if self._export is not None:
            with suppress(ExportError, OSError):
                self._export.close()
        self._warn(f"failed and was dropped, and the run is not affected: {first_line(error)}")

    def _warn(self, what: str) -> None:
        mend = f"`esper export-events {self.folder} --to {self.target}` exports the run afterwards"
        warn(f"the exporter to {self.target} {what}; {mend}", RunWarning)
