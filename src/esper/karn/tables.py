"""Tables of figures, which no terminal is too narrow for."""

from itertools import chain

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from esper.leyline.text import printable


def print_table(console: Console, table: Table) -> None:
    """Print a table whose columns without wrapping are never cut; where the terminal is narrower, its lines go on below.

    rich would replace the end of a figure by an ellipsis, or leave a column out.
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
    """Print text as it stands, control characters escaped; where the terminal is narrower, it goes on below."""
    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
