"""Export runs: rows become points, which go to a target in order, and a run gets a table and an image at its end.

An export replaces the earlier ones of its run. Each program has a class of targets.
"""

import hashlib
import io
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from esper.karn.reader import OpenRun, Tail, open_run
from esper.karn.report.drawing import Figure, Shape, paint
from esper.karn.run_model import RunModel
from esper.karn.terminal.console import Table, comparison_table
from esper.leyline.distribution import check_installed
from esper.leyline.messages import InputError, counted, first_line, printable, rounded, system_in_words, typed_line
from esper.nissa.rows import Row
from esper.store.disk import read_kept, write_atomic, write_once
from esper.store.files import ENVIRONMENT, EVENTS
from esper.store.lock import locked_folder

PROJECT = "esper"  # the name of the project, or the experiment, in every target
KEPT = ".esper"  # the folder of the records in a folder of exports; no program that shows runs looks into it

Values = Mapping[str, float]
Facts = Mapping[str, str | int]
Pixels = NDArray[np.uint8]


class Target(Protocol):
    """Stores runs where another program shows them. x never decreases from call to call."""

    def open(self, name: str, identity: str, facts: Facts) -> None:
        """Begin the run `name`, in place of one of that name. `identity` (16 letters and digits) is that of the run folder."""

    def scalars(self, x: int, time: float, values: Values) -> None:
        """Write the values of curves at x. time: when they were measured [seconds since 1970]."""

    def image(self, name: str, pixels: Pixels, x: int) -> None:
        """Write an image (H, W, 3)."""

    def table(self, name: str, table: Table, x: int) -> None:
        """Write a table."""

    def flush(self) -> None:
        """Put on the disk what was written so far, where the program shows it."""

    def close(self) -> None:
        """Finish the run; everything is on the disk afterwards."""


class TensorBoard(Target):
    """Writes event files, a folder for each run. Numbers keep their double precision."""

    def __init__(self, folder: Path) -> None:
        import tensorboard  # noqa: F401  # torch names neither the package nor the extra when it is missing
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self._make = folder, SummaryWriter

    def open(self, name: str, identity: str, facts: Facts) -> None:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        self._writer = self._make(str(self.folder / name))
        about = Table("", ("run", name), [(key, str(value)) for key, value in facts.items()])
        self._writer.add_text("run", as_markdown(about), 0)

    def scalars(self, x: int, time: float, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, x, time, new_style=True, double_precision=True)

    def image(self, name: str, pixels: Pixels, x: int) -> None:
        self._writer.add_image(name, pixels, x, dataformats="HWC")

    def table(self, name: str, table: Table, x: int) -> None:
        self._writer.add_text(name, as_markdown(table), x)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Target):
    """Writes a folder `wandb/offline-run-...`, or to a server, where a run that is exported again goes on.

    Runs are offline unless WANDB_MODE says otherwise; `wandb sync` uploads them if the user wants that. A process of its own
    writes the file, some seconds later, so there is nothing to flush.
    """

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else it may report errors to its makers
        import wandb

        self.folder, self._wandb = folder, wandb

    def open(self, name: str, identity: str, facts: Facts) -> None:
        wandb = self._wandb
        for earlier in self.folder.glob(f"wandb/offline-run-*-{identity}"):
            shutil.rmtree(earlier, ignore_errors=True)
        self._run = wandb.init(
            project=PROJECT,
            name=name,
            id=identity,
            dir=str(self.folder),
            config=dict(facts),
            resume="allow" if os.environ["WANDB_MODE"] == "online" else None,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
            ),
        )

    def scalars(self, x: int, time: float, values: Values) -> None:
        self._run.log({**values, "_timestamp": time}, step=x)

    def image(self, name: str, pixels: Pixels, x: int) -> None:
        self._run.log({name: self._wandb.Image(pixels)}, step=x)

    def table(self, name: str, table: Table, x: int) -> None:
        cells = self._wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self._run.log({name: cells}, step=x)

    def close(self) -> None:
        self._run.finish()


class MLflow(Target):
    """Writes `mlflow.db` and `artifacts`. Metrics are written in batches, because each call is a transaction."""

    MOST = 900  # metrics that wait to be written; a batch of MLflow's holds at most 1000

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # else it reports its use to its makers
        import mlflow
        from mlflow.entities import Metric

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)  # else making a store prints 60 lines beside the run
        self.folder, self._metric = folder.absolute(), Metric
        self._connect: Callable[[Path], Any] = lambda path: mlflow.MlflowClient(f"sqlite:///{path}")
        self._waiting: list[Any] = []

    def open(self, name: str, identity: str, facts: Facts) -> None:
        """Begin a run. Facts are tags, because parameters would be compared as settings.

        MLflow makes a store in many steps, and one that was killed on the way, or that two processes make at once, cannot be
        used. So one process makes it under another name, and it gets its own when it is whole.
        """
        store = self.folder / "mlflow.db"
        part = store.with_suffix(".part")
        with locked_folder(self.folder / KEPT, lambda line: None, write_once, 60.0, "(--into)"):
            if not store.exists():
                part.unlink(missing_ok=True)
                self._connect(part).search_experiments()
                part.replace(store)
            client = self._connect(store)
            found = client.get_experiment_by_name(PROJECT)
            place = (self.folder / "artifacts").as_uri()
            experiment = found.experiment_id if found else client.create_experiment(PROJECT, place)
        for earlier in client.search_runs([experiment], f"attributes.run_name = '{name}'"):
            client.delete_run(earlier.info.run_id)
        tags = {key: str(value) for key, value in facts.items()}
        self._client, self._id = client, str(client.create_run(experiment, run_name=name, tags=tags).info.run_id)

    def scalars(self, x: int, time: float, values: Values) -> None:
        if len(self._waiting) + len(values) > self.MOST:
            self.flush()
        self._waiting += [self._metric(name, value, round(1000 * time), x) for name, value in values.items()]

    def image(self, name: str, pixels: Pixels, x: int) -> None:
        self._client.log_image(self._id, pixels, f"{name}.png")

    def table(self, name: str, table: Table, x: int) -> None:
        self._client.log_dict(self._id, {"columns": table.columns, "data": table.rows}, f"{name}.json")
        self._client.log_text(self._id, as_markdown(table) + "\n", f"{name}.md")

    def flush(self) -> None:
        if self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting)
            self._waiting = []

    def close(self) -> None:
        self.flush()
        self._client.set_terminated(self._id)


class Trackio(Target):
    """Writes the project `esper` of the store in a folder. A thread of trackio does so twice a second, without being flushed."""

    FOLDER = "TRACKIO_DIR"
    REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")  # variables with which trackio would write elsewhere

    def __init__(self, folder: Path) -> None:
        place = str(folder.absolute())
        if "trackio" in sys.modules and os.environ.get(self.FOLDER) != place:
            raise InputError(
                f"trackio is imported already, and it takes its folder when it is imported; set {self.FOLDER} to {place} before "
                "that, or export in a process of its own"
            )
        os.environ[self.FOLDER] = place
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        for name in self.REMOTE:
            os.environ.pop(name, None)
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "trackio":  # else it prints to stdout, among what the run prints
                vars(module)["print"] = lambda *words, **options: None
        self._trackio, self._store = trackio, SQLiteStorage

    def open(self, name: str, identity: str, facts: Facts) -> None:
        self._store.delete_run(PROJECT, name)
        options = {"resume": "never", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run, self._logged = self._trackio.init(PROJECT, name, config=dict(facts), **options), 0

    def scalars(self, x: int, time: float, values: Values) -> None:
        self._log(dict(values), x)

    def image(self, name: str, pixels: Pixels, x: int) -> None:
        self._log({name: self._trackio.Image(pixels)}, x)

    def table(self, name: str, table: Table, x: int) -> None:
        cells = self._trackio.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self._log({name: cells}, x)

    def close(self) -> None:
        self._trackio.finish()
        stored = self._store.get_log_count(PROJECT, self._run.name, run_id=self._run.id)
        if stored != self._logged:  # trackio only warns where it cannot write
            raise OSError(f"trackio stored {stored} of {self._logged} entries in {os.environ[self.FOLDER]}")

    def _log(self, values: Mapping[str, object], x: int) -> None:
        self._run.log(values, step=x)
        self._logged += 1


MAKE: Mapping[str, Callable[[Path], Target]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""The targets by name; each writes into a folder."""


def as_markdown(table: Table) -> str:
    """Return a table as Markdown, in which texts are neither markup nor HTML."""
    signs = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", **{sign: f"\\{sign}" for sign in "|`*["}})
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(printable(cell.translate(signs)) for cell in line)} |" for line in lines)


def final_table(summary: Mapping[str, Any]) -> Table | None:
    """Return the table that a run prints at its end; of a training, the figures of its last rounds. None if it failed early."""
    if "grown_params" in summary:
        shown = comparison_table(summary)
        return shown._replace(columns=["network", *shown.columns[1:]])
    if "rounds_done" not in summary:
        return None
    figures: Mapping[str, float | None] = summary["last_rounds"]
    known = [(name, f"{value:.3g}") for name, value in figures.items() if value is not None]
    best = summary["best_validation_objective"]
    if best is not None:
        first = [("best_validation_objective", rounded(best, ".4f")), ("best_round", str(summary["best_round"]))]
        known = [*first, *known]
    return Table("", ["figure", "value"], known) if known else None


class Box(NamedTuple):
    """Describes a part of a network in the picture of it."""

    kind: Literal["input", "host", "seed", "output"]
    head: str  # what it is
    foot: str  # more about it


def boxes_of(summary: Mapping[str, Any], slots: Sequence[str]) -> Iterator[Box]:
    """Yield the best network of a summary as boxes, one for each slot, where the network itself cannot be loaded."""
    env, hosts = summary["best"]["env"], summary["host_params"]
    params = hosts[env] if isinstance(hosts, list) else hosts
    yield Box("input", "host", f"{params:,} parameters, {counted(len(slots), 'slot')}")
    for slot in slots:
        yield Box("host", f"slot {slot}", "")
        if slot in summary["grown"][env]:
            yield Box("seed", summary["grown"][env][slot], "")
    yield Box("output", "output", f"{summary['grown_params'][env]:,} parameters with seeds")


ROW, BOX, WIDE = 44, 32, 330  # height of a row and of the box in it, width of a box [px]
LONGEST = 100  # characters of a line; a longer one is cut
MOST_BOXES = 100  # of an image; the last of more are left out


def drawing(title: str, boxes: Sequence[Box]) -> Pixels:
    """Return an image (H, W, 3) of a network: the host from top to bottom, each seed beside the part in front of it."""
    from matplotlib.image import imread  # imported here because it takes 1 s

    def cut(line: str) -> str:
        shown = printable(line)
        return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"

    shapes: list[Shape] = []
    row, host, behind_seed = -1, 0, False  # `host` is the top of the last part of the host
    for box in boxes[:MOST_BOXES]:
        is_seed = box.kind == "seed"
        row += behind_seed or not is_seed
        behind_seed, x, y = is_seed, 384 if is_seed else 4, ROW * max(row, 0)
        style = "kept" if is_seed else "stage1"
        shapes.append(Shape("rect", [(x, y), (x + WIDE, y + BOX)], style, opacity=0.15))
        shapes.append(Shape("text", [(x + 6, y + 14)], "name", cut(box.head), room=WIDE - 12))
        shapes.append(Shape("text", [(x + 6, y + 27)], "tick", cut(box.foot), room=WIDE - 12))
        if is_seed:
            shapes.append(Shape("line", [(4 + WIDE, host + BOX / 2), (x, y + BOX / 2)], style))
        else:
            shapes.append(Shape("line", [(x + WIDE / 2, host + BOX * (row > 0)), (x + WIDE / 2, y)], style))
            host = y
    figure = Figure(cut(title), height=ROW * (row + 1), shapes=shapes)
    return (255 * imread(io.BytesIO(paint(figure, "png")))[:, :, :3]).astype(np.uint8)


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
