"""What an exporter writes to, one adapter each."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import InputError
from esper.leyline.exporters import TARGETS, check_installed
from esper.leyline.text import printable


class FinalTable(NamedTuple):
    """A table of texts; the first column names the rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Target(Protocol):
    """A store of runs that another program shows. x never decreases from call to call."""

    def open(self, name: str, known: str | None, facts: Mapping[str, str | int]) -> str:
        """Begin the run `name`, or continue the one that an earlier `open` returned as `known`. Returns what identifies it."""
        ...

    def scalars(self, x: int, time: float, values: Mapping[str, float]) -> None:
        """The values of curves at x. time: when they were measured [seconds since 1970]."""
        ...

    def image(self, name: str, pixels: NDArray[np.uint8], x: int) -> None:
        """An image (H, W, 3)."""
        ...

    def table(self, name: str, table: FinalTable, x: int) -> None:
        """A table."""
        ...

    def flush(self) -> None:
        """Let the target's own program see what was written so far, if the target can."""
        ...

    def close(self) -> None:
        """Finish the run; everything is on the disk afterwards."""
        ...


def check_target(name: str) -> None:
    """InputError if a name is not one of `TARGETS`, or if its package is not installed."""
    if name not in TARGETS:
        raise InputError(f"unknown target {name!r}; choose one of {', '.join(TARGETS)}")
    check_installed(name)


def make_target(name: str, folder: Path) -> Target:
    """The target of a name, which writes into `folder`."""
    make: Callable[[Path], Target] = import_module(f"esper.karn.exporters.to_{name}").make
    return make(folder)


def as_markdown(table: FinalTable) -> str:
    """A table as Markdown, in which texts are neither markup nor HTML."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    for sign, name in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ("|", "\\|"),
        ("`", "\\`"),
        ("*", "\\*"),
        ("[", "\\["),
    ):
        text = text.replace(sign, name)
    return printable(text)
