"""Show a run in the terminal as it goes on: `esper watch`. It reads the run folder alone, so the run does not notice it."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.text import Text

from esper.karn.reader import OpenRun, Tail
from esper.karn.run_model import LISTED, RunModel
from esper.karn.terminal.console import output_lines
from esper.leyline.distribution import of_extra
from esper.leyline.lifecycle.vocabulary import ADDED, Stage
from esper.leyline.messages import counted, duration, printable
from esper.store.files import EVENTS, is_run

with of_extra("tui", "esper watch needs textual, which is"):
    from textual.app import App, ComposeResult
    from textual.binding import Binding, BindingType
    from textual.containers import Horizontal, Vertical, VerticalScroll
    from textual.coordinate import Coordinate
    from textual.widgets import DataTable, Footer, Static

SIGNS: Mapping[Stage, tuple[str, str]] = {
    Stage.DORMANT: (".", "grey62"),
    Stage.GERMINATED: ("g", "white"),
    Stage.TRAINING: ("t", "yellow"),
    Stage.BLENDING: ("b", "cyan"),
    Stage.HOLDING: ("h", "magenta"),
    Stage.FOSSILIZED: ("F", "green"),
    Stage.PRUNED: ("x", "red"),
    Stage.EMBARGOED: ("e", "grey62"),
}
"""The letter and the colour of each stage in the grid."""

CELL = 3  # width of a cell of the grid: the letter of the stage, the dose in tenths, a space [characters]
PART = 2**22  # events that are read at once [bytes]
MARGIN = 5  # width of the numbers of the environments in front of the grid [characters]
_FIRST = "validation objective", "return"  # curves of a training that come before its others


def text_of(stage: Stage, dose: str) -> Text:
    """Return a cell of the grid."""
    sign, colour = SIGNS[stage]
    return Text(sign + dose, colour)


def dose(stage: Stage, alpha: float) -> str:
    """Return a dose as one character: 0 to 9 for tenths, * for 1; a space where the seed does not act."""
    if stage not in ADDED or math.isnan(alpha):
        return " "
    return "*" if alpha >= 1 else str(min(int(alpha * 10), 9))


class Grid(DataTable[Text]):
    """Shows the population: a line for each environment, a cell for each slot."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home", "scroll_top", "first environment", show=False),
        Binding("end", "scroll_bottom", "last environment", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="grid", cell_padding=0)
        self._cells: list[list[tuple[Stage, str]]] = []  # stage and dose that each cell shows

    def show(self, model: RunModel) -> None:
        """Draw what differs between the state of a model and the screen."""
        states = [[model.state(env, slot) for slot in range(len(model.slots))] for env in range(model.envs)]
        cells = [[(stage, dose(stage, alpha)) for stage, alpha in row] for row in states]
        if (len(cells), len(model.slots)) != (self.row_count, len(self.columns)):
            self.clear(columns=True)
            for slot in range(len(model.slots)):
                self.add_column(str(slot % 100), width=CELL)
            for env, row in enumerate(cells):
                self.add_row(*starmap(text_of, row), label=f"{env:>{MARGIN - 1}} ")
        else:
            for env, (row, before) in enumerate(zip(cells, self._cells, strict=True)):
                for slot in range(len(row)) if row != before else ():
                    if row[slot] != before[slot]:
                        self.update_cell_at(Coordinate(env, slot), text_of(*row[slot]))
        self._cells = cells


class Watch(App[None]):
    """Shows a run: a header, the population, curves, and the chosen environment in detail."""

    CSS = """
    #head { height: 3; padding: 0 1; }
    #left { width: 40%; min-width: 20; max-width: 60; }
    #curve { height: 45%; min-height: 6; padding: 0 1; }
    #detail { height: 1fr; padding: 0 1; border-top: solid $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("c", "next_curve", "next curve"),
        Binding("a", "show('troubles')", "rollbacks"),
        Binding("question_mark", "show('explain')", "explain", key_display="?"),
    ]
    TITLE = "esper watch"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, folder: Path, every: float = 0.5) -> None:
        super().__init__()
        self.folder, self.every = folder, every
        self.run_folder: OpenRun | None = None
        self.tail = Tail(folder / EVENTS, self._begin_model)
        self.model = RunModel(history=False)
        self.state: str = "waiting"
        self.view = "detail"  # or troubles, or explain
        self.figure = 0
        self._shown: dict[str, str] = {}  # the text of each part

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        with Horizontal():
            with Vertical(id="left"):
                yield Grid()
            with Vertical():
                yield Static(id="curve", markup=False)
                with VerticalScroll(id="detail", can_focus=False):
                    yield Static(id="words", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.grid.focus()
        self.look()
        self.set_interval(self.every, self.look)

    @property
    def grid(self) -> Grid:
        return self.query_one(Grid)

    def look(self) -> None:
        """Take in what was written since the last time."""
        if not self.query("#head"):  # the timer may fire while the window closes
            return
        if self.run_folder is None:
            if not is_run(self.folder):
                self.show(f"waiting for a run in {self.folder}")
                return
            self.run_folder = OpenRun(self.folder)
            self._begin_model()
        rows, before = self.tail.read(PART), self.state
        self.model.update(rows)
        self.state = self.run_folder.status
        if rows or self.state != before:
            self.grid.show(self.model)
            self.show(None)
        if rows:
            self.call_later(self.look)  # a long run is read in parts, and keys are answered between them

    def on_resize(self) -> None:
        if self.run_folder is not None:
            self.call_after_refresh(self.show, None)

    def _begin_model(self) -> None:
        assert self.run_folder is not None
        config, rounds = self.run_folder.config, None
        if config.get("tasks"):
            ppo: Mapping[str, Any] = config.get("ppo") or {}
            rounds = range(-int(ppo.get("imitation_rounds", 0)), int(ppo.get("rounds", 0)))
        self.model = RunModel(rounds, history=False)

    # What is shown.

    def show(self, waiting: str | None) -> None:
        self._say("#head", self.head() if waiting is None else [waiting])
        room = self.query_one("#curve", Static).content_size
        self._say("#curve", self.curve(room.width or 40, room.height or 8))
        self._say("#words", [*output_lines(self.model.waited, self.model.timed), *self.words()])

    def _say(self, part: str, lines: Sequence[str]) -> None:
        """Write lines if they have changed. Only the last part takes the height that its lines need."""
        words = "\n".join(map(printable, lines))
        if words != self._shown.get(part):
            self._shown[part] = words
            self.query_one(part, Static).update(Text(words), layout=part == "#words")

    def head(self) -> list[str]:
        """Return three lines: what runs, how far it is, and what became of the seeds."""
        model, head = self.model, self.model.head
        name = self.folder.resolve().name
        if head is None:
            return [f"{name}: {self.state}; no events yet (telemetry.level: off writes none)"]
        assert model.last is not None
        failed = f": {model.last.error}" if model.last.error else ""
        if model.sizes:
            last = model.sizes[-1]
            growths = sum(bool(row.widths) for row in model.sizes)
            return [
                f"{name}: {head.task}, widened as a whole, {head.device}: {self.state}{failed}",
                f"step {last.step:,}, {last.seen:,} targets",
                f"{last.params:,} parameters; {counted(growths, 'growth')}; {counted(len(model.rollbacks), 'rollback')}",
            ]
        done, whole = model.done()
        unit = "round" if model.planned is not None else "step"
        share = min(done / whole, 1.0) if whole else 0.0
        left = model.seconds_left()
        bar = "#" * round(20 * share) + "-" * (20 - round(20 * share))
        ahead = f", about {duration(left)} left" if left >= 0 and self.state == "running" else ""  # it may be nan
        reading = ""
        if model.reading is not None:
            share_of_time, p95 = model.reading
            reading = f"; reading {100 * share_of_time:.0f} %, p95 {1000 * p95:.3g} ms"
        planted, kept, pruned = (model.counts[f"seeds/{outcome}"] for outcome in ("planted", "kept", "pruned"))
        what = f"{head.task}, {head.controller}, {counted(head.envs, 'environment')}, {head.device}"
        troubles = counted(len(model.rollbacks), "rollback")
        return [
            f"{name}: {what}: {self.state}{failed}",
            f"[{bar}] {unit} {done} of {whole}{ahead}",
            f"seeds: {planted} planted, {kept} kept, {pruned} pruned; {troubles}{reading}",
            *model.widenings[-1:],
        ]

    def curve(self, width: int, height: int) -> list[str]:
        names = sorted(self.model.curves, key=lambda name: name not in _FIRST)
        if not names:
            return ["no figures yet"]
        self.figure %= len(names)
        name = names[self.figure]
        curve = self.model.curves[name]
        median = [y[1] for y in curve.y]
        lines, bands = [median], ""
        if self.model.planned is None and not self.model.sizes:
            lines += [y[0] for y in curve.y], [y[2] for y in curve.y]
            bands = " (median, 10th and 90th percentile)"
        title = f"{name}{bands}: {median[-1]:.4g}  {self.figure + 1}/{len(names)}"
        return [title[:width], *plot(curve.x, lines, width, max(height - 1, 3))]

    def words(self) -> list[str]:
        """Return the rollbacks, what a training or a growth as a whole has to say, or the chosen environment or cell."""
        model = self.model
        if self.view == "troubles":
            lines = [f"rollbacks: {len(model.rollbacks)}, the newest first"]
            for row in reversed(model.rollbacks[-LISTED:]):
                twin = " (twin)" if row.twin else ""
                lost = f", lost {', '.join(row.pruned)}" if row.pruned else ""
                lines.append(f"step {row.step}, environment {row.env}{twin}: {row.reason.replace('_', ' ')}{lost}")
            return lines
        if model.sizes:  # each growth of a network that becomes wider as a whole, the newest first
            growths = []
            for size in reversed(model.sizes):
                if size.widths:
                    widths = ", ".join(f"{layer} {pair[0]} to {pair[1]}" for layer, pair in size.widths.items())
                    growths.append(f"step {size.step:,}: {size.params:,} parameters, as {size.why} ({widths})")
            return [f"not larger, as {model.why_not_larger}", "", *(growths or ["nothing grew yet"])]
        if not model.envs and model.planned is not None:
            wrong = model.rounds[-1].anomalies if model.rounds else {}
            lines = [f"round {model.rounds[-1].round}: {sentence}" for sentence in wrong.values()]
            return [*lines, "A training shows its curves; c shows the next one."]
        if not model.envs:
            return ["No step yet. With telemetry.level: run there are no step rows, and so no grid."]
        env, chosen = self.grid.cursor_row, self.grid.cursor_column
        if self.view == "explain":
            stage, _ = model.state(env, chosen)
            return [
                f"environment {env}, slot {model.slots[chosen]}: {stage.name}: {stage.meaning}.",
                "",
                "A cell is the letter of the stage and the dose alpha in tenths (* is 1):",
                *(f"  {sign}  {stage.name}: {stage.meaning}" for stage, (sign, _) in SIGNS.items()),
                "",
                "contribution: the metric of the network minus that without the seed, with its standard error.",
                "A seed is kept (FOSSILIZED) or pruned by the controller; the events of an environment say why.",
                "Arrows move through the grid. Press ? again to return.",
            ]
        lines = [f"environment {env}, step {model.step}"]
        for slot, name in enumerate(model.slots):
            stage, alpha, seed, contribution, error = model.cell(env, slot)
            mark = ">" if slot == chosen else " "
            worth = "" if math.isnan(contribution) else f", contribution {contribution:+.4f} ± {error:.4f}"
            held = "" if seed is None else f", {seed}, alpha {alpha:.2g}{worth}"
            lines.append(f"{mark} {slot} {name}: {stage.name}{held}")
        return [*lines, "", *(model.log(env) or ["nothing happened here yet"])]

    # Keys.

    def on_data_table_cell_highlighted(self) -> None:
        self.show(None)

    def action_next_curve(self) -> None:
        self.figure += 1
        self.show(None)

    def action_show(self, view: str) -> None:
        """Show the rollbacks or the explanation of the chosen cell, or the environment again."""
        self.view = "detail" if self.view == view else view
        self.show(None)


DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
"""The bit of each dot of a braille character (Unicode, block U+2800)."""


def plot(x: Sequence[float], lines: Sequence[Sequence[float]], width: int, height: int) -> list[str]:
    """Draw curves over a common axis as `height` lines of at most `width` characters, with the ends of both axes.

    x (N), lines: values (N) each; nan where a line has none.
    """
    label = 9
    across, up = 2 * max(width - label - 1, 1), 4 * max(height - 1, 1)
    values = [np.asarray(line, np.float64) for line in lines]
    finite = np.concatenate([line[np.isfinite(line)] for line in values]) if values else np.zeros(0)
    if not len(x) or not finite.size:
        return ["nothing was measured yet".ljust(width)[:width], *[""] * (height - 1)]
    low, high = float(finite.min()), float(finite.max())
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    first, last = float(min(x)), float(max(x))
    cells = np.zeros((up // 4, across // 2), np.int64)
    for line in values:
        known = np.isfinite(line)
        places = (np.asarray(x, np.float64)[known] - first) / max(last - first, 1e-12) * (across - 1)
        levels = (high - line[known]) / (high - low) * (up - 1)
        for start, end in pairwise([0, *range(len(places))]):  # the dots of a line from each point to the next
            count = int(max(abs(places[end] - places[start]), abs(levels[end] - levels[start]))) + 2
            rows = np.rint(np.linspace(levels[start], levels[end], count)).astype(int)
            columns = np.rint(np.linspace(places[start], places[end], count)).astype(int)
            np.bitwise_or.at(cells, (rows // 4, columns // 2), DOTS[rows % 4, columns % 2])
    shown = ["".join(chr(0x2800 + int(cell)) for cell in row) for row in cells]
    names = [""] * len(shown)
    names[0], names[-1] = f"{high:.4g}", f"{low:.4g}"
    axis = f"{first:g}".ljust(across // 2 - len(f"{last:g}")) + f"{last:g}"
    return [*(f"{name:>{label}} {row}" for name, row in zip(names, shown, strict=True)), " " * (label + 1) + axis]
