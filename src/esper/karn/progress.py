"""Progress of calls from Python: shown in a terminal or a notebook, in plain lines on request, or not at all."""

import sys
from collections.abc import Callable
from typing import Any, Literal, Self

from rich.console import Console

from esper.karn.bars import Bar, Lines, Rounds, live, training
from esper.karn.streams import steady
from esper.leyline import progress
from esper.leyline.errors import InputError
from esper.leyline.text import printable

Shown = Literal["auto"] | bool
"""Whether progress is shown on stderr: "auto" shows it where stderr is a terminal, and in a notebook."""


class Silent(progress.Silent):
    """Shows neither the steps of a population nor the rounds of a training."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is open."""


class Answering(Silent):
    """Shows nothing but the answer to a Ctrl-C, without which nobody could tell why the run does not end at once."""

    def __init__(self, console: Console) -> None:
        console.file = steady(console.file)
        self._console = console

    def answer(self, text: str) -> None:
        """Print a line."""
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def growing(shown: Any, steps: int, metric: str) -> Bar | Lines | Silent:
    """What shows the steps of a population: a context manager, entered for as long as the run takes."""
    console = Console(stderr=True)
    if wanted(shown, console):
        return live(console, steps, metric)
    return Silent() if shown is False else Answering(console)


def learning(shown: Any) -> Rounds | Silent:
    """What shows the rounds of a training."""
    console = Console(stderr=True)
    return training(console) if wanted(shown, console) else Silent()


def telling(shown: Any) -> Callable[[str], None] | None:
    """What prints the lines of an evaluation; None where nothing is shown."""
    if not wanted(shown, Console(stderr=True)) or sys.stderr is None:
        return None
    stream = steady(sys.stderr)
    return lambda line: print(printable(line), file=stream)


def wanted(shown: Any, console: Console) -> bool:
    """Whether `progress` asks for output on this console. InputError where it is neither "auto" nor a bool."""
    if isinstance(shown, bool):
        return shown
    if shown != "auto":
        raise InputError(f"progress is {shown!r}; give 'auto', True or False")
    return console.is_jupyter or bool(console.file.isatty())
