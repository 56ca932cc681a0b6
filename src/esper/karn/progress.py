"""The argument `progress` of Python calls: where the progress is shown."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from rich.console import Console

from esper.karn.bars import live, training
from esper.karn.streams import steady
from esper.karn.tables import print_line
from esper.leyline.errors import InputError
from esper.leyline.progress import Progress, Silent, Watch
from esper.leyline.text import printable

Shown = Literal["auto"] | bool
"""Whether progress is shown on stderr: "auto" shows it where stderr is a terminal, and in a notebook."""


class AnswersOnly(Silent):
    """Shows only the answer to Ctrl-C, which explains why the run does not end at once."""

    def __init__(self, console: Console) -> None:
        console.file = steady(console.file)
        self._console = console

    def answer(self, text: str) -> None:
        """Print a line."""
        print_line(self._console, text)


def growth_progress(shown: Any, steps: int, metric: str) -> AbstractContextManager[Watch]:
    """The progress display of a population, to be entered while the run lasts."""
    console = Console(stderr=True)
    if is_shown(shown, console):
        return live(console, steps, metric)
    return nullcontext(Silent() if shown is False else AnswersOnly(console))


def training_progress(shown: Any) -> AbstractContextManager[Progress]:
    """The progress display of a training, to be entered while the run lasts."""
    console = Console(stderr=True)
    return training(console) if is_shown(shown, console) else nullcontext(Silent())


def evaluation_progress(shown: Any) -> Callable[[str], None] | None:
    """A function that prints a line of an evaluation; None if nothing is shown."""
    if not is_shown(shown, Console(stderr=True)) or sys.stderr is None:
        return None
    stream = steady(sys.stderr)
    return lambda line: print(printable(line), file=stream)


def is_shown(shown: Any, console: Console) -> bool:
    """Whether progress is shown on this console. InputError if `shown` is neither "auto" nor a bool."""
    if isinstance(shown, bool):
        return shown
    if shown != "auto":
        raise InputError(f"progress is {shown!r}; give 'auto', True or False")
    return console.is_jupyter or bool(console.file.isatty())
