"""Printing tables and lines that are never cut, however narrow the terminal is."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from esper.leyline.text import counted, printable


def print_table(console: Console, table: Table) -> None:
    """Print a table. Columns with `no_wrap` are never cut; in a narrower terminal, long lines continue on the next line.

    rich itself would replace the end of a number by an ellipsis, or leave out a column.
    """
    for column in table.columns:
        if column.no_wrap:
            texts = [column.header, *column.cells]
            column.min_width = max(text.cell_len if isinstance(text, Text) else cell_len(str(text)) for text in texts)
    least = Measurement.get(console, console.options.update(width=10_000), table).minimum
    options = console.options.update(width=max(console.width, least))
    lines = console.render_lines(table, options, pad=False, new_lines=True)
    console.print(Segments(chain.from_iterable(lines)), crop=False, no_wrap=True, overflow="ignore", end="")


def print_line(console: Console, line: str) -> None:
    """Print text without markup, with control characters escaped; in a narrower terminal it continues on the next line."""
    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def actor_lines(summary: Mapping[str, Any]) -> list[str]:
    """How many actors played for the summary of a training or the record of an evaluation, and the time that they waited."""
    actors = summary.get("actors")
    if actors is None:
        return []
    lost = f", {actors['lost']} lost and replaced" if actors["lost"] else ""
    return [
        f"{counted(actors['workers'], 'actor')}{lost}, {actors['waiting_seconds']:,.1f} s lost in waiting, together"
    ]
