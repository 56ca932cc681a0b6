"""Export of a run: its rows become points, and these go to a target, once each and in order."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from esper.karn.exporters.curves import Curves, Point
from esper.karn.exporters.final import Box, boxes_of, drawing, final_table, fingerprint, title_of
from esper.karn.exporters.store import EXPORTS, PATIENCE, Exports, Ledger, Record, wait_for
from esper.karn.exporters.targets import Target, check_target, make_target
from esper.karn.reader import OpenRun, Status, Tail
from esper.leyline.errors import InputError, typed_line
from esper.leyline.text import printable
from esper.nissa.rows import Row, RunRow
from esper.store.files import EVENTS

CHUNK = 2**20  # bytes of the events that are read at once

More = Callable[[], bool]
"""Waits a little while. False if the run has ended, so that no rows follow those that are in the file by now."""
Draw = Callable[[OpenRun, Mapping[str, Any]], Sequence[Box] | None]
"""The boxes of the network of a run with a summary; None if the network cannot be loaded."""


class ExportError(RuntimeError):
    """A target raised an error: one sentence. The command line exits with 1."""


class Exported(NamedTuple):
    """What an export did.

    Attributes:
        name (str): name of the run in the target
        folder (Path): the folder of the exports
        status (Status): of the run
        points (int): points that were added
        x (int): of the last point that the target has; -1 if it has none
        final (bool): whether the target has the final table
    """

    name: str
    folder: Path
    status: Status
    points: int
    x: int
    final: bool


class _Differs(Exception):
    """The rows are not those of which the exported values were made."""


def export_run(
    run: OpenRun,
    target: str,
    into: Path | None = None,
    *,
    more: More | None = None,
    draw: Draw = lambda run, summary: None,
) -> Exported:
    """Write the curves of a run, and its final table and image if it has ended, to a target.

    What an earlier export has written is not written again. If the rows have changed since then, a new run begins in the
    target, and the old one stays. `into` is the folder of the exports, by default the one named like the target in `exports`
    beside the run. With `more`, the rows to come are exported too. Raises InputError on bad input, before anything is written,
    and ExportError if the target fails.
    """
    check_target(target)
    folder = into if into is not None else run.folder.absolute().parent / EXPORTS / target
    if run.config.get("telemetry", {}).get("level") == "off":
        raise InputError(f"{run.folder} has no events, because telemetry.level was off; there is nothing to export")
    if folder.resolve().is_relative_to(run.folder.resolve()):
        raise InputError(
            f"{folder} is in the run folder {run.folder}, which holds files of the run alone; name another (--into)"
        )
    exports = Exports(folder, target, run.folder)
    made = make_target(target, folder)
    exports.make()
    wait_for(exports.lock, PATIENCE if more is not None else 0.0)
    try:
        return Transfer(run, exports, made, draw).all(more)
    finally:
        exports.lock.release()


class Transfer:
    """One export. The rows are read from the first; values that the record counts are compared and not written again."""

    def __init__(self, run: OpenRun, exports: Exports, target: Target, draw: Draw) -> None:
        self.run, self.exports, self.target, self.draw = run, exports, target, draw
        self.record = exports.read()
        self.points = 0
        self.is_open = False
        if not self.record.closed:  # its exporter was killed, and how much it wrote is unknown
            self.record = Record(exports.free_name())
        self._begin()

    def _begin(self) -> None:
        self.curves, self.ledger = Curves(), Ledger()
        self.head: RunRow | None = None
        self.last: RunRow | None = None

    def all(self, more: More | None) -> Exported:
        """Export the rows that are there, and with `more` those to come, and then the end of the run."""
        try:
            while True:
                try:
                    self._rows(more)
                    status = self.run.status_after(self.last.status if self.last is not None else None)
                    self._end(status)
                    break
                except _Differs:
                    self._close()
                    self.record = Record(self.exports.free_name())
                    self._begin()
        except BaseException as error:
            if not isinstance(error, ExportError):
                self._close()  # an interrupt: what was written is whole
            raise
        self._close()
        record = self.record
        return Exported(record.name, self.exports.folder, status, self.points, record.x, record.final is not None)

    def _rows(self, more: More | None) -> None:
        tail = Tail(self.run.folder / EVENTS)
        going = True
        while going:
            going = more is not None and more()
            restarts = tail.restarts
            while rows := tail.read(CHUNK):
                if tail.restarts != restarts:  # rows were cut off, and come again from the first
                    self._begin()
                    restarts = tail.restarts
                for row in rows:
                    self._row(row)
            if self.is_open:
                self._call("flush")

    def _row(self, row: Row) -> None:
        if isinstance(row, RunRow):
            self.head, self.last = self.head or row, row
        for point in self.curves.points(row):
            self._point(point)

    def _point(self, point: Point) -> None:
        record, ledger = self.record, self.ledger
        new = {}
        for name, value in point.values.items():
            ledger.add(point.x, name, value)
            if ledger.values > record.values:
                new[name] = value
            elif ledger.values == record.values and ledger.digest != record.digest:
                raise _Differs
        if new:
            assert point.x >= record.x, (point.x, record.x)
            self._call("scalars", point.x, point.time, new)
            record.values, record.digest, record.x = ledger.values, ledger.digest, point.x
            self.points += 1

    def _end(self, status: Status) -> None:
        """Write the table and the image of a run that has ended."""
        summary = self.run.summary
        if status in ("running", "killed") or not isinstance(summary, Mapping) or self.head is None:
            return
        table = final_table(summary)
        if table is None:
            return
        boxes = list(self._boxes(summary))
        final = hashlib.sha256(fingerprint(table, boxes).encode()).hexdigest()
        if final == self.record.final:
            return
        x = max(self.record.x, 0)
        if boxes:
            self._call("image", "architecture", drawing(title_of(summary), boxes), x)
        self._call("table", "final_table", table, x)
        self.record.final = final

    def _boxes(self, summary: Mapping[str, Any]) -> Sequence[Box]:
        if "rounds_done" in summary:
            return ()  # a training grows other networks in every round
        assert self.head is not None
        return self.draw(self.run, summary) or list(boxes_of(summary, self.head.slots))

    def _call(self, method: str, *values: Any) -> None:
        if not self.is_open:
            self._open()
        self._guarded(lambda: getattr(self.target, method)(*values))

    def _open(self) -> None:
        record, head = self.record, self.head
        facts: dict[str, str | int] = {"folder": printable(self.run.folder.absolute())}
        if head is not None:
            facts |= {name: getattr(head, name) for name in ("envs", "steps", "seed")}
            facts |= {name: printable(getattr(head, name)) for name in ("task", "controller", "device")}
        record.closed = False
        self.exports.write(record)
        record.known = self._guarded(lambda: self.target.open(record.name, record.known, facts))
        self.is_open = True

    def _close(self) -> None:
        if self.is_open:
            self._guarded(self.target.close)
            self.is_open = False
        self.record.closed = True
        self.exports.write(self.record)

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # whatever the package of the target raises
            raise ExportError(
                f"the export of {self.run.folder} to {self.exports.target} in {self.exports.folder} stopped: {typed_line(error)}"
            ) from error
