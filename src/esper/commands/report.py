"""`esper report`: one page about a run."""

from pathlib import Path
from typing import Annotated

import typer

from esper.commands.options import say


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; report.html in the run folder.")
    ] = None,
) -> None:
    """Write one self-contained HTML page about a run, whether it goes on or has ended, and print its path."""
    from esper.karn.report.page import write_report

    say(str(write_report(run, out)))
