"""`esper compare`: runs compared with each other."""

from pathlib import Path
from typing import Annotated

import typer

from esper.commands.options import Json, PictureFormat, PicturesFolder, say, say_pictures


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Two run folders or more.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="HTML file to write, with curves and the settings that differ; none by default."
        ),
    ] = None,
    png: PicturesFolder = None,
    form: PictureFormat = "png",
    json_: Json = False,
) -> None:
    """Compare runs: how every pair differs on the test split, with 95 % intervals.

    Differences are paired over the environments that two runs share: those of the same task, run seed and number, which have the
    same host and data.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from esper.karn import comparison
    from esper.karn.report import compared
    from esper.karn.report.pictures import write_pictures
    from esper.karn.tables import print_line, print_table
    from esper.leyline.text import printable
    from esper.store.files import to_json

    found = compared.compare(*runs, out=out)
    drawn = None if png is None else write_pictures(compared.content_of(found), png, form)
    if json_:
        typer.echo(to_json({"verdicts": [comparison.as_record(verdict) for verdict in found.verdicts]}), nl=False)
        return
    console = Console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(comparison.RESULT_COLUMNS):
        table.add_column(Text(name), justify="right" if index > 1 else "left", no_wrap=True)
    for row in comparison.result_rows(found.runs):
        table.add_row(*(Text(printable(cell)) for cell in row))
    print_table(console, table)
    for line in (*(verdict.sentence for verdict in found.verdicts), *comparison.notes(found)):
        print_line(console, line)
    if out is not None:
        say(f"page: {out}")
    if drawn is not None and png is not None:
        say_pictures(drawn, png)
