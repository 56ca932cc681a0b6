"""The programs that a run can be exported to, one class each, and the table and the image that they get at its end."""

import glob
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from esper.karn.terminal.console import can_print, comparison_table
from esper.leyline.errors import InputError
from esper.leyline.text import counted, printable, rounded
from esper.store.lock import Lock

PROJECT = "esper"  # the name of the project, or the experiment, in every target
KEPT = ".esper"  # the folder of the records in a folder of exports; no program that shows runs looks into it

Values = Mapping[str, float]
Facts = Mapping[str, str | int]
Pixels = NDArray[np.uint8]


class FinalTable(NamedTuple):
    """A table of texts; the first column names the rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Target(Protocol):
    """A store of runs that another program shows. x never decreases from call to call."""

    session: str | None = None
    """The folder, in that of the exports, which holds what was written since `open`, if a process that is killed may leave it
    without points that were flushed; None if they are on the disk then."""

    def open(self, name: str, known: str | None, facts: Facts) -> str:
        """Begin the run `name`, or continue the one that an earlier `open` returned as `known`. Returns what identifies it."""

    def scalars(self, x: int, time: float, values: Values) -> None:
        """The values of curves at x. time: when they were measured [seconds since 1970]."""

    def image(self, name: str, pixels: Pixels, x: int) -> None:
        """An image (H, W, 3)."""

    def table(self, name: str, table: FinalTable, x: int) -> None:
        """A table."""

    def flush(self) -> None:
        """Put on the disk what was written so far, unless the target has a session."""

    def held(self, name: str) -> set[int]:
        """The x at which the run that was opened has values of the curve `name` on the disk; asked only without a session."""
        return set()

    def close(self) -> None:
        """Finish the run; everything is on the disk afterwards."""


class TensorBoard(Target):
    """Writes event files, a folder for each run. Numbers keep their double precision."""

    def __init__(self, folder: Path) -> None:
        import tensorboard  # noqa: F401  # torch names neither the package nor the extra when it is missing
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self._make = folder, SummaryWriter

    def open(self, name: str, known: str | None, facts: Facts) -> str:
        """A further event file in the folder of a known run continues it."""
        before = set(self.folder.glob(f"{glob.escape(name)}/*"))
        self._writer = self._make(str(self.folder / name))
        (made,) = set(self.folder.glob(f"{glob.escape(name)}/*")) - before
        self.session = os.path.relpath(made, self.folder)
        if known is None:
            about = FinalTable(("run", name), [(key, str(value)) for key, value in facts.items()])
            self._writer.add_text("run", as_markdown(about), 0)
        return name

    def scalars(self, x: int, time: float, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, x, time, new_style=True, double_precision=True)

    def image(self, name: str, pixels: Pixels, x: int) -> None:
        self._writer.add_image(name, pixels, x, dataformats="HWC")

    def table(self, name: str, table: FinalTable, x: int) -> None:
        self._writer.add_text(name, as_markdown(table), x)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Target):
    """Writes a folder `wandb/offline-run-...`; a run that continues has one more folder with the same id.

    Runs are offline unless WANDB_MODE says otherwise; `wandb sync` uploads them if the user wants that. A process of its own
    writes the file, some seconds later, and ends unsaved with the process that it belongs to, so there is nothing to flush.
    """

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else it may report errors to its makers
        import wandb

        self.folder, self._wandb = folder, wandb

    def open(self, name: str, known: str | None, facts: Facts) -> str:
        """The id of the run is drawn by wandb."""
        wandb = self._wandb
        self._run = wandb.init(
            project=PROJECT,
            name=name,
            id=known,
            dir=str(self.folder),
            config=dict(facts),
            resume="allow" if os.environ["WANDB_MODE"] == "online" else None,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
            ),
        )
        self.session = os.path.relpath(Path(self._run.dir).parent, self.folder.absolute())
        return str(self._run.id)

    def scalars(self, x: int, time: float, values: Values) -> None:
        self._run.log({**values, "_timestamp": time}, step=x)

    def image(self, name: str, pixels: Pixels, x: int) -> None:
        self._run.log({name: self._wandb.Image(pixels)}, step=x)

    def table(self, name: str, table: FinalTable, x: int) -> None:
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

    def open(self, name: str, known: str | None, facts: Facts) -> str:
        """The id of the run is drawn by MLflow. Facts are tags, because parameters could not change when a run is resumed.

        MLflow makes a store in many steps, and one that was killed on the way, or that two processes make at once, cannot be
        used. So one process makes it under another name, and it gets its own when it is whole.
        """
        store = self.folder / "mlflow.db"
        part = store.with_suffix(".part")
        (self.folder / KEPT).mkdir(exist_ok=True)
        lock = Lock(self.folder / KEPT, lambda line: None)
        wait_for(lock, 60.0)
        try:
            if not store.exists():
                part.unlink(missing_ok=True)
                self._connect(part).search_experiments()
                part.replace(store)
            client = self._connect(store)
            found = client.get_experiment_by_name(PROJECT)
            place = (self.folder / "artifacts").as_uri()
            experiment = found.experiment_id if found else client.create_experiment(PROJECT, place)
        finally:
            lock.release()
        if known is None:
            known = str(client.create_run(experiment, run_name=name).info.run_id)
        for key, value in facts.items():
            client.set_tag(known, key, value)
        client.update_run(known, status="RUNNING")
        self._client, self._id = client, known
        return known

    def scalars(self, x: int, time: float, values: Values) -> None:
        if len(self._waiting) + len(values) > self.MOST:
            self.flush()
        self._waiting += [self._metric(name, value, round(1000 * time), x) for name, value in values.items()]

    def image(self, name: str, pixels: Pixels, x: int) -> None:
        self._client.log_image(self._id, pixels, f"{name}.png")

    def table(self, name: str, table: FinalTable, x: int) -> None:
        # log_table would append to the table that an earlier end of the run has written
        self._client.log_dict(self._id, {"columns": table.columns, "data": table.rows}, f"{name}.json")
        self._client.log_text(self._id, as_markdown(table) + "\n", f"{name}.md")

    def flush(self) -> None:
        if self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting)
            self._waiting = []

    def held(self, name: str) -> set[int]:
        return {each.step for each in self._client.get_metric_history(self._id, name)}

    def close(self) -> None:
        self.flush()
        self._client.set_terminated(self._id)


class Trackio(Target):
    """Writes the project `esper` of the store in a folder. Runs are continued by their names."""

    PATIENCE = 10.0  # that a flush waits [seconds]
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

        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "trackio":  # else it prints to stdout, among what the run prints
                vars(module)["print"] = lambda *words, **options: None
        self._trackio = trackio

    def open(self, name: str, known: str | None, facts: Facts) -> str:
        resume = "never" if known is None else "allow"  # a killed process may have left nothing
        options = {"resume": resume, "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = self._trackio.init(PROJECT, name, config=dict(facts), **options)
        self._logged = self._stored()
        return name

    def scalars(self, x: int, time: float, values: Values) -> None:
        self._log(dict(values), x)

    def image(self, name: str, pixels: Pixels, x: int) -> None:
        self._log({name: self._trackio.Image(pixels)}, x)

    def table(self, name: str, table: FinalTable, x: int) -> None:
        cells = self._trackio.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self._log({name: cells}, x)

    def flush(self) -> None:
        """A thread of its own writes the store, twice a second; `close` raises an error where it did not."""
        until = time.monotonic() + self.PATIENCE
        while self._stored() != self._logged and time.monotonic() < until:
            time.sleep(0.02)

    def held(self, name: str) -> set[int]:
        from trackio.sqlite_storage import SQLiteStorage

        logs = SQLiteStorage.get_logs(PROJECT, self._run.name, run_id=self._run.id)
        return {each["step"] for each in logs if name in each}

    def close(self) -> None:
        self._trackio.finish()
        if self._stored() != self._logged:  # trackio only warns where it cannot write
            raise OSError(f"trackio stored {self._stored()} of {self._logged} entries in {os.environ[self.FOLDER]}")

    def _stored(self) -> int:
        from trackio.sqlite_storage import SQLiteStorage

        return int(SQLiteStorage.get_log_count(PROJECT, self._run.name, run_id=self._run.id))

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


def wait_for(lock: Lock, patience: float) -> None:
    """Take a lock. InputError if another process still holds it after `patience` seconds."""
    until = time.monotonic() + patience
    while True:
        try:
            return lock.take()
        except InputError:
            if time.monotonic() >= until:
                raise
        time.sleep(0.2)


def as_markdown(table: FinalTable) -> str:
    """A table as Markdown, in which texts are neither markup nor HTML."""
    signs = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", **{sign: f"\\{sign}" for sign in "|`*["}})
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(printable(cell.translate(signs)) for cell in line)} |" for line in lines)


def final_table(summary: Mapping[str, Any]) -> FinalTable | None:
    """The table that a run prints at its end; of a training, the figures of its last rounds. None if the run failed early."""
    training = "rounds_done" in summary
    if not can_print(summary, training):
        return None
    if not training:
        columns = comparison_table(summary).columns
        texts = ((column.header, *column.cells) for column in columns)
        cells = [[cell.plain if isinstance(cell, Text) else str(cell) for cell in column] for column in texts]
        heads, *rows = zip(*cells, strict=True)
        return FinalTable(["network", *heads[1:]], rows)
    figures: Mapping[str, float | None] = summary["last_rounds"]
    known = [(name, f"{value:.3g}") for name, value in figures.items() if value is not None]
    best = summary["best_validation_objective"]
    if best is not None:
        first = [("best_validation_objective", rounded(best, ".4f")), ("best_round", str(summary["best_round"]))]
        known = [*first, *known]
    return FinalTable(["figure", "value"], known) if known else None


class Box(NamedTuple):
    """A part of a network."""

    kind: Literal["input", "host", "seed", "output"]
    head: str  # what it is
    foot: str  # more about it


def boxes_of(summary: Mapping[str, Any], slots: Sequence[str]) -> Iterator[Box]:
    """The best network of a summary as boxes, one for each slot, where the network itself cannot be loaded."""
    env, hosts = summary["best"]["env"], summary["host_params"]
    params = hosts[env] if isinstance(hosts, list) else hosts
    yield Box("input", "host", f"{params:,} parameters, {counted(len(slots), 'slot')}")
    for slot in slots:
        yield Box("host", f"slot {slot}", "")
        if slot in summary["grown"][env]:
            yield Box("seed", summary["grown"][env][slot], "")
    yield Box("output", "output", f"{summary['grown_params'][env]:,} parameters with seeds")


def title_of(summary: Mapping[str, Any]) -> str:
    """A line with the network that is drawn, and how many others have seeds in the same slots."""
    env, grown = summary["best"]["env"], summary["grown"]
    same = sum(each == grown[env] for each in grown)
    return (
        f"{summary['task']}, {summary['controller']}: environment {env}, the best; {same} of {len(grown)} grew the same"
    )


TITLE, DPI = 0.7, 100  # height of the title [inches], resolution
WIDTH, ROW, BOX = 10.0, 0.62, 0.44  # of the image, of a row and of the box in it [inches]
CHARACTERS = (58, 78)  # of the lines of a box, head and foot; a longer one is cut
MOST_BOXES = 100  # of an image; the last of more are left out


def drawing(title: str, boxes: Sequence[Box]) -> Pixels:
    """An image (H, W, 3) of a network: the host from top to bottom, each seed beside the part in front of it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported here because it takes 1 s
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    rows: list[list[Box]] = []
    for box in boxes[:MOST_BOXES]:
        if box.kind == "seed" and rows:
            rows[-1].append(box)
        else:
            rows.append([box])
    height = TITLE + ROW * sum(max(1, len(row) - 1) for row in rows)
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")
    axes.text(0.2, TITLE / 2, _cut(title, 120), fontsize=10, weight="bold", va="center", parse_math=False)

    def draw(box: Box, x: float, y: float) -> None:
        face, edge = ("#e5f3ea", "#14733c") if box.kind == "seed" else ("#f5f7f9", "#9aa4b0")
        axes.add_patch(Rectangle((x, y), 4.4, BOX, facecolor=face, edgecolor=edge))
        lines = [(box.head, 8.5, "#1c2024"), (box.foot, 6.5, "#5b6470")]
        for index, ((line, size, colour), most) in enumerate(zip(lines, CHARACTERS, strict=True)):
            down = BOX / 2 if not box.foot else BOX * (0.3 + 0.42 * index)
            axes.text(x + 0.08, y + down, _cut(line, most), fontsize=size, color=colour, va="center", parse_math=False)

    y = below = TITLE
    for place, (part, *seeds) in enumerate(rows):
        if place:
            axes.annotate("", (2.4, y), (2.4, below), arrowprops={"arrowstyle": "->", "color": "#5b6470"})
        draw(part, 0.2, y)
        for index, seed in enumerate(seeds):
            draw(seed, 5.4, y + index * ROW)
            ends = (4.6, y + BOX / 2), (5.4, y + index * ROW + BOX / 2)
            axes.annotate("", *ends, arrowprops={"arrowstyle": "->", "color": "#14733c"})
        below = y + BOX
        y += ROW * max(1, len(seeds))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a letter that the font does not have is drawn as a box
        canvas.draw()  # type: ignore[no-untyped-call]
    return np.array(canvas.buffer_rgba(), np.uint8)[:, :, :3]  # type: ignore[no-untyped-call]


def _cut(line: str, most: int) -> str:
    shown = printable(line)
    return shown if len(shown) <= most else shown[: most - 1] + "…"
