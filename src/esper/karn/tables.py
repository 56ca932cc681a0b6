"""Tables of figures, which no terminal is too narrow for."""

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_table(console: Console, table: Table) -> None:
    """Print a table whose columns without wrapping are never cut; where the terminal is narrower, its lines go on below.

    rich would replace the end of a figure by an ellipsis.
    """
    for column in table.columns:
        if column.no_wrap:
            texts = [column.header, *column.cells]
            column.min_width = max(text.cell_len if isinstance(text, Text) else cell_len(str(text)) for text in texts)
    console.print(table, crop=False, no_wrap=True, overflow="ignore")
