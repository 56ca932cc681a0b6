"""Show the progress of a run: a bar in a terminal, plain lines elsewhere, and the argument `progress` of Python calls."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from esper.karn.standard_output import steady
from esper.karn.terminal.console import print_lines
from esper.leyline.lifecycle.view import View
from esper.leyline.lifecycle.vocabulary import Stage
from esper.leyline.messages import InputError, counted, printable
from esper.leyline.progress import Pace, Progress
from esper.store.background import Backlog

Shown = Literal["auto"] | bool
"""Whether progress is shown on stderr: "auto" shows it where stderr is a terminal, and in a notebook."""


class AnswersOnly(Progress):
    """Shows only the answer to Ctrl-C, which explains why the run does not end at once."""

    def __init__(self, console: Console) -> None:
        if not console.is_jupyter:
            console.file = steady(console.file)  # what cannot be written is dropped
        self._console = console

    def answer(self, text: str) -> None:
        print_lines(self._console, text)


def run_progress(shown: Any, steps: int | None = None, metric: str = "") -> Progress:
    """Return the progress display of a population that takes `steps`, or of a training, to be entered while the run lasts."""
    console = Console(stderr=True)
    if is_shown(shown, console):
        return Aside(Display(console, steps, metric))
    return Progress() if shown is False else AnswersOnly(console)


def evaluation_progress(shown: Any) -> Callable[[str], None] | None:
    """Return a function that prints a line of an evaluation; None if nothing is shown.

    It prints in the thread of the caller and not in one aside: there is a line for a population and not for a step, and all
    of them are to be there before the record is printed.
    """
    console = Console(stderr=True)
    return AnswersOnly(console).answer if is_shown(shown, console) else None


def is_shown(shown: Any, console: Console) -> bool:
    """Return whether progress is shown on this console. InputError if `shown` is neither "auto" nor a bool."""
    if isinstance(shown, bool):
        return shown
    if shown != "auto":
        raise InputError(f"progress is {shown!r}; give 'auto', True or False")
    return console.is_jupyter or bool(console.file.isatty())


SHOWN = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)


OF_ROUNDS = (
    ("return", "return", ".3f"),
    ("env_steps_per_second", "environment steps per second", ",.0f"),
    ("explained_variance", "explained variance", ".2f"),
    ("entropy", "entropy", ".2f"),
    ("log_likelihood", "log-likelihood", ".2f"),
    ("kept", "seeds kept", ".2f"),
    ("validation_objective", "validation J", ".4f"),
    ("waiting_seconds", "seconds lost in waiting", ".1f"),
)
"""The figures of a round that are shown, with their labels and formats."""


class Display(AnswersOnly):
    """Shows progress on a line that a terminal or a notebook draws anew, and as plain lines in a file or a pipe.

    Of the steps of a population, a file gets the first, the last, and one every few `seconds` between them; of the rounds of a
    training, every one. In a terminal, the line of a validated round stays.
    """

    def __init__(self, console: Console, steps: int | None = None, metric: str = "", seconds: float = 5.0) -> None:
        """steps: of the population; None for a training."""
        super().__init__(console)
        self._steps, self._metric, self._seconds = steps, metric, seconds
        self._due = -math.inf
        self._pace: Pace | None = None
        self.drawn: RichProgress | None = None  # the line; None where the cursor cannot be moved
        if console.is_jupyter or (console.file.isatty() and not console.is_dumb_terminal):
            trains, bar = steps is None, [TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24)]
            shown = TextColumn("{task.fields[shown]}", markup=False, table_column=Column(no_wrap=not trains))
            columns = *([SpinnerColumn()] if trains else bar), shown
            self.drawn = RichProgress(*columns, console=console, transient=trains)
            self._task = self.drawn.add_task("", total=steps, shown="growing the first round" if trains else "")

    def step(self, view: View, speed: float, rollbacks: int) -> None:
        now = time.monotonic()
        if self.drawn is None and now < self._due and view.step != self._steps:
            return
        self._due, line = now + self._seconds, figures(view, speed, self._metric, rollbacks)
        if self.drawn is None:
            self.note(f"step {view.step}/{self._steps}  {line}")
        else:
            self.drawn.update(self._task, completed=view.step, shown=line)

    def round(self, number: int, rounds: int, figures: Mapping[str, float]) -> None:
        parts = [f"round {number + 1}/{rounds}" if number >= 0 else f"imitation, {-number - 1} to go"]
        parts += [f"{label} {format(figures[name], form)}" for name, label, form in OF_ROUNDS if name in figures]
        if figures.get("rollbacks"):
            parts.append(f"{figures['rollbacks']:.0f} rolled back")
        line = "  ".join(parts)
        if self.drawn is None or "validation_objective" in figures:
            self.note(line)
        if self.drawn is not None:
            self.drawn.update(self._task, shown=line)
        if self._pace is None:
            self._pace = Pace(rounds - number, "rounds", self.note)
            self._pace.add(1, time.monotonic() - self._started)

    note = AnswersOnly.answer

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self.drawn is not None:
            self.drawn.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.drawn is not None:
            self.drawn.stop()


class Aside(Progress):
    """Shows progress in a thread, so that a step does not wait for a terminal that is slow or stopped.

    Of the steps that come while another is shown, the thread shows the newest. It shows every line and every round; where more
    than `LINES` of them are not shown yet, the run waits, which its summary says.
    """

    LINES = 1000

    def __init__(self, shown: Progress) -> None:
        self.shown = shown
        self._backlog = Backlog(self.LINES)
        self._left: Callable[[], None] | None = None  # shows the newest step, if it came while another was shown
        self._lock = threading.Lock()  # the thread that answers Ctrl-C shows lines too

    def step(self, view: View, speed: float, rollbacks: int) -> None:
        show = partial(self.shown.step, view, speed, rollbacks)
        with self._lock:
            self._backlog.wait_for_room()
            if self._backlog.size:
                self._left = show
            else:
                self._left = None
                self._backlog.submit(show)

    def round(self, number: int, rounds: int, figures: Mapping[str, float]) -> None:
        self._show(partial(self.shown.round, number, rounds, dict(figures)))

    def note(self, text: str) -> None:
        self._show(partial(self.shown.note, text))

    answer = note

    def waits(self) -> dict[str, Any] | None:
        known = self._backlog
        return {"waits": known.waits, "waiting_seconds": round(known.waited, 3)} if known.waits else None

    def _show(self, *jobs: Callable[[], None]) -> None:
        with self._lock:
            left, self._left = self._left, None
            for job in (*([] if left is None else [left]), *jobs):
                self._backlog.submit(job)
            self._backlog.wait_for_room()

    def __enter__(self) -> Self:
        self.shown.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._show()
            self._backlog.finish()
        finally:
            self._backlog.close()
            self.shown.__exit__(*error)


def figures(view: View, speed: float, metric: str, rollbacks: int = 0) -> str:
    """Return one line with speed, mean metric on the probe split, number of seeds by stage, and rollbacks, if any."""
    mean = float(np.mean(view.measurements.metric))
    counts = np.bincount(view.seeds.stage.ravel(), minlength=len(Stage)).tolist()
    seeds = ", ".join(f"{counts[stage]} {stage.name.lower()}" for stage in SHOWN if counts[stage]) or "none"
    broken = f"  {counted(rollbacks, 'rollback')}" if rollbacks else ""
    return f"{speed:,.0f} env steps/s  {printable(metric)} {mean:.4f}  seeds: {seeds}{broken}"
