"""`esper watch`: a window on a run in the terminal, by itself or beside a run that begins."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esper.leyline.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

Watched = Annotated[bool, typer.Option("--watch", help="Open `esper watch` on the run until you leave it with q.")]


def watch(
    run: Annotated[Path, typer.Argument(help="A run folder, of a run that goes on or has ended.")],
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.05, help="Seconds between two looks at the folder.")
    ] = 0.5,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the run to begin if the folder is not a run yet.")
    ] = False,
) -> None:
    """Show a run in the terminal: the stage of every slot, curves, and the chosen environment with its events and reasons.

    The window reads the run folder alone: it can be opened and closed at any time, and the run does not notice. Press ? for an
    explanation of what is under the cursor and q to leave.
    """
    from esper.karn.watch import Watch
    from esper.store.files import CONFIG, is_run

    if not wait and not is_run(run):
        raise InputError(
            f"{run} is not a run folder: it has no {CONFIG}; name one that esper grow or train writes, or wait for it with --wait"
        )
    if not sys.stdout.isatty():
        raise InputError("esper watch needs a terminal, and stdout is none; use esper events RUN or esper report RUN")
    Watch(run, every).run()


@contextmanager
def beside(folder: Path, wanted: bool) -> Iterator[None]:
    """Open the window on a run folder in a process of its own while the block runs, and wait for it to be closed at the end."""
    if not wanted:
        yield
        return
    import esper.karn.watch  # noqa: F401  # its InputError, if the package of the window is not installed

    if not sys.stdout.isatty():
        raise InputError("--watch needs a terminal, and stdout is none; leave it out")
    with subprocess.Popen([sys.executable, "-m", "esper", "watch", str(folder), "--wait"]) as window:
        try:
            yield
        except BaseException:
            window.terminate()
            raise


def console_beside(watched: bool) -> "Console":
    """The console of the progress bar: stderr, or nowhere while the window has the terminal."""
    import io

    from rich.console import Console

    return Console(file=io.StringIO()) if watched else Console(stderr=True)
