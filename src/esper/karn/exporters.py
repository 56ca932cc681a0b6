"""Export runs: rows become points, which go to a target in order. An export replaces the earlier ones of its run."""

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from esper.karn.export_targets import KEPT, MAKE, Box, Target, boxes_of, drawing, final_table
from esper.karn.reader import OpenRun, Tail, open_run
from esper.karn.run_model import RunModel
from esper.leyline.distribution import check_installed
from esper.leyline.messages import InputError, first_line, printable, system_in_words, typed_line
from esper.nissa.rows import Row
from esper.store.disk import read_kept, write_atomic, write_once
from esper.store.files import ENVIRONMENT, EVENTS
from esper.store.lock import locked_folder

EXPORTS = "exports"  # the folder beside the run folders that exporters write to unless another one is named
TARGET = "target"  # the file that names the target of a folder of exports
CHUNK = 2**20  # events that are read at once [bytes]
EVERY = 0.5  # least time between two looks of an exporter at the run [seconds]
PATIENCE = 60.0  # how long an exporter of a run waits for another export of the same run [seconds]
_LONGEST = 80  # characters of a run's name
_LARGEST = 2**10  # bytes of `TARGET` that are read

Draw = Callable[[OpenRun, Mapping[str, Any]], Sequence[Box] | None]
"""The boxes of the network of a run with a summary; None if the network cannot be loaded."""


class ExportError(RuntimeError):
    """Says in one sentence which error a target raised. The command line exits with 1."""


class Export:
    """Exports one run to one target, where it replaces the run of that name."""

    def __init__(self, run: OpenRun, name: str, target: Target) -> None:
        self.run, self.name, self.target = run, name, target
        self.is_open = False
        self._tail = Tail(run.folder / EVENTS, self._begin)
        self._begin()

    def _begin(self) -> None:
        self.close()
        self.model = RunModel(history=False)
        self.points, self.x = 0, -1  # points so far, and x of the last one
        self.is_final = False  # whether the table and the image are written

    def update(self) -> None:
        """Write the points of the rows that have come since the last time."""
        for rows in self._tail.parts(CHUNK):
            for row in rows:
                point = self.model.write(row)
                if point is not None and point.values:
                    self._open()
                    self._call(self.target.scalars, point.x, point.time, point.values)
                    self.points, self.x = self.points + 1, point.x
        if self.is_open:
            self._call(self.target.flush)

    def end(self, draw: Draw) -> str:
        """Write the rest, and the table and the image of a run that has ended. Returns the status of the run."""
        self.update()
        summary, status = self.run.summary, self.run.status
        table = None if summary is None else final_table(summary)
        if table is not None:
            x = max(self.x, 0)
            self._open()
            if "rounds_done" not in summary:  # a training grows other networks in every round
                boxes = draw(self.run, summary) or list(boxes_of(summary, self.model.slots))
                env, grown = summary["best"]["env"], summary["grown"]
                best = f"{summary['task']}, {summary['controller']}: environment {env}, the best"
                pixels = drawing(f"{best}; {grown.count(grown[env])} of {len(grown)} grew the same", boxes)
                self._call(self.target.image, "architecture", pixels, x)
            self._call(self.target.table, "final_table", table, x)
            self.is_final = True
        return status

    def close(self) -> None:
        """Close the target, also after an interrupt, as what was written is whole."""
        if self.is_open:
            self.is_open = False
            self._call(self.target.close)

    def _open(self) -> None:
        if self.is_open:
            return
        head = self.model.head
        facts: dict[str, str | int] = {"folder": printable(self.run.folder.absolute())}
        if head is not None:
            facts |= {name: getattr(head, name) for name in ("envs", "steps", "seed")}
            facts |= {name: printable(getattr(head, name)) for name in ("task", "controller", "device")}
        path = self.run.folder / ENVIRONMENT  # written once for a run, however often it is resumed
        began = path.stat().st_mtime_ns if path.exists() else 0
        identity = hashlib.sha256(f"{self.name} {began}".encode()).hexdigest()[:16]
        self._call(self.target.open, self.name, identity, facts)
        self.is_open = True

    def _call(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # whatever the package of the target raises
            self.is_open = False
            raise ExportError(f"the export of {self.run.folder} stopped: {typed_line(error)}") from error


@contextmanager
def export_of(
    run: OpenRun, target: str, into: Path | None = None, *, patience: float = 0.0
) -> Iterator[tuple[Export, Path]]:
    """Give the export of a run to a target, and the folder to which it is exported; in the end it is closed.

    `into` is that folder, by default the one named like the target in `exports` beside the run. Raises InputError on bad input,
    before anything is written, and if another export of the run is not done after `patience` seconds.
    """
    if target not in MAKE:
        raise InputError(f"unknown target {target!r}; choose one of {', '.join(MAKE)}")
    check_installed(target)
    place, folder = run.folder.resolve(), into or run.folder.absolute().parent / EXPORTS / target
    if run.config.get("telemetry", {}).get("level") == "off":
        raise InputError(f"{run.folder} has no events, because telemetry.level was off; there is nothing to export")
    if folder.resolve().is_relative_to(place):
        raise InputError(
            f"{folder} is in the run folder {run.folder}, which holds files of the run alone; name another (--into)"
        )
    name = re.sub(r"[^\w.+-]+", "-", place.name)[:_LONGEST].strip("-.") or "run"
    if into is not None or name != place.name:  # runs of several places, or several names, may have this one
        name += f"-{hashlib.sha256(str(place).encode(errors='surrogateescape')).hexdigest()[:6]}"
    # A target may replace files of its own in the folder, which therefore holds nothing but exports to it.
    with system_in_words(f"{folder} cannot be read as a folder", "name another one (--into)"):
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
    marked = folder / KEPT / TARGET
    if marked.exists():
        kept_for = read_kept(marked, _LARGEST, "remove the folder of exports, and export again").decode(
            errors="replace"
        )
        if kept_for.strip() != target:
            raise InputError(
                f"{folder} holds exports to {kept_for.strip()}, not to {target}; name another folder (--into)"
            )
    elif names and names != [KEPT]:  # a crash may leave the folder of the locks without the name of the target
        raise InputError(f"{folder} holds other files and no exports; name a new or an empty folder (--into)")
    made = MAKE[target](folder)
    with system_in_words(f"{folder} cannot be written", "name another folder (--into)"):
        marked.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(marked, f"{target}\n")
    with (
        locked_folder(folder / KEPT / name, lambda line: None, write_once, patience, "(--into)"),
        closing(Export(run, name, made)) as export,
    ):
        yield export, folder


class Exporter:
    """Exports a run while it goes on, as an output of it. It reads the file of events, which has the rows before a resume too."""

    def __init__(self, folder: Path, target: str, draw: Draw) -> None:
        self.folder, self.target, self.draw = folder, target, draw
        self._held = ExitStack()
        self._export: Export | None = None
        self._due = float("-inf")

    def write(self, row: Row) -> None:
        """Look at the file, if that was not done lately."""
        if time.monotonic() < self._due:
            return
        with self._explained():
            if self._export is None:
                opened = export_of(open_run(self.folder), self.target, patience=PATIENCE)
                self._export, _ = self._held.enter_context(opened)
            self._export.update()
        self._due = time.monotonic() + EVERY

    def close(self) -> None:
        """Write the rest, the table and the image of a run that has ended, and close the target."""
        with self._explained(), self._held:
            if self._export is not None:
                self._export.end(self.draw)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Close the target if the body fails, and say how the run is exported nevertheless."""
        try:
            yield
        except Exception as error:
            with suppress(Exception):
                self._held.close()
            raise ExportError(
                f"the exporter to {self.target} failed, and the run is not affected: {first_line(error)}; `esper export-events "
                f"{self.folder} --to {self.target}` exports the run afterwards"
            ) from error
