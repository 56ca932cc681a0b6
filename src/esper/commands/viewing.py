"""Show runs: `esper report`, `compare`, `watch` and `serve`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from esper.commands.options import Json, PictureFormat, PicturesFolder, fail, say, say_pictures
from esper.leyline.messages import InputError, amended


def report(
    run: Annotated[Path, Argument(help="A run folder, or the folder of an evaluation.")],
    out: Annotated[Path | None, Option(metavar="FILE", help="File to write; report.html in the folder.")] = None,
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


def compare(
    runs: Annotated[list[Path], Argument(metavar="RUN RUN...", help="Two run folders or more.")],
    out: Annotated[
        Path | None,
        Option(metavar="FILE", help="HTML file to write, with curves and the settings that differ; none by default."),
    ] = None,
    png: PicturesFolder = None,
    form: PictureFormat = "png",
    json_: Json = False,
) -> None:
    """Compare runs: how every pair differs on the test split, with 95 % intervals.

    Differences are paired over the environments that two runs share: those of the same task, run seed and number, which have the
    same host and data. Where no two of the runs can be compared, the command says why and exits with 2.
    """
    from rich.console import Console

    from esper.karn import comparison
    from esper.karn.report.frame import write_pictures
    from esper.karn.terminal.console import print_lines, print_table
    from esper.store.files import to_json

    found = comparison.compare(*runs, out=out)
    apart = all(verdict.metric is None for verdict in found.verdicts)
    sentences = [verdict.sentence for verdict in found.verdicts]
    drawn = None if png is None else write_pictures(comparison.content_of(found), png, form)
    if json_:
        typer.echo(to_json({"verdicts": [comparison.as_record(verdict) for verdict in found.verdicts]}), nl=False)
    else:
        console = Console()
        print_table(console, comparison.result_table(found.runs))
        print_lines(console, *(() if apart else sentences), *comparison.notes(found))
        if out is not None:
            say(f"page: {out}")
        if drawn is not None and png is not None:
            say_pictures(drawn, png)
    if apart:
        fail(" ".join(sentences), 2)


Watched = Annotated[bool, Option("--watch", help="Open `esper watch` on the run until you leave it with q.")]


def watch(
    run: Annotated[Path, Argument(help="A run folder, of a run that goes on or has ended.")],
    every: Annotated[float, Option(metavar="SECONDS", min=0.05, help="Seconds between two looks at the folder.")] = 0.5,
    wait: Annotated[bool, Option("--wait", help="Wait for the run to begin if the folder is not a run yet.")] = False,
) -> None:
    """Show a run in the terminal: the stage of every slot, curves, and the chosen environment with its events and reasons.

    The window reads the run folder alone: it can be opened and closed at any time, and the run does not notice. Press ? for an
    explanation of what is under the cursor and q to leave.
    """
    from esper.karn.terminal.watch import Watch
    from esper.store.files import check_is_run

    if not wait:
        with amended(after=", or wait for it with --wait"):
            check_is_run(run)
    if not sys.stdout.isatty():
        raise InputError("esper watch needs a terminal, and stdout is none; use esper events RUN or esper report RUN")
    Watch(run, every).run()


@contextmanager
def open_window(folder: Path, wanted: bool) -> Iterator[None]:
    """Open the window on a run folder in a process of its own while the block runs, and wait for it to be closed at the end."""
    if not wanted:
        yield
        return
    import esper.karn.terminal.watch  # noqa: F401  # its InputError, if the package of the window is not installed

    if not sys.stdout.isatty():
        raise InputError("--watch needs a terminal, and stdout is none; leave it out")
    with subprocess.Popen([sys.executable, "-m", "esper", "watch", str(folder), "--wait"]) as window:
        try:
            yield
        except BaseException:
            window.terminate()
            raise


def serve(
    runs: Annotated[
        list[Path] | None,
        Argument(metavar="[RUNS]...", help="Run folders, or folders that hold some; runs by default."),
    ] = None,
    host: Annotated[
        str, Option(help="Address to listen on. Other machines reach one that is not loopback, with a token.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(metavar="N", help="Port to listen on; 0 takes any free one.")] = 8712,
    token_file: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="File that holds the token that every request must bring. Without it, a token is made and printed if the host "
            "is not loopback, and none is needed if it is.",
        ),
    ] = None,
) -> None:
    """Show runs in a browser: a list, a page of each that follows it, comparisons, decisions and downloads. Ctrl-C ends it."""
    import secrets

    from esper.karn.serve.access import Door, read_token
    from esper.karn.serve.app import create_app
    from esper.karn.serve.library import Library
    from esper.karn.serve.server import Server, address_of, is_loopback, listen

    library = Library(runs or [Path("runs")])
    token = None if token_file is None else read_token(token_file)
    with listen(host, port) as listening:
        loopback = is_loopback(listening)
        say(f"serving at {address_of(host, listening)} until Ctrl-C")
        if token is None and not loopback:
            token = secrets.token_urlsafe(32)
            say(f"token: {token}")
        sys.stdout.flush()
        door = Door(token, host, loopback, listening.getsockname()[1])
        with suppress(KeyboardInterrupt):  # how the server passes on Ctrl-C after it has ended
            Server(create_app(library, door)).run([listening])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a page that is being made in a thread would hold up the regular exit
