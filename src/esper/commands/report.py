"""`esper report`: one page about a run, and its figures for papers."""

from pathlib import Path
from typing import Annotated

import typer

from esper.commands.options import PictureFormat, PicturesFolder, say, say_pictures


def report(
    run: Annotated[Path, typer.Argument(help="A run folder, or the folder of an evaluation.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write; report.html in the folder.")] = None,
    png: PicturesFolder = None,
    form: PictureFormat = "png",
) -> None:
    """Write one self-contained HTML page about a run, whether it goes on or has ended, and print its path.

    With --png, its figures are written as pictures as well, one file each. Figures that the run has no data for are named.
    """
    from esper.karn.report.page import draw_report, write_report

    say(str(write_report(run, out)))
    if png is not None:
        say_pictures(draw_report(run, png, form), png)
