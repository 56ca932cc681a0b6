"""`esper serve`: runs in a browser."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from esper.commands.options import say


def serve(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUNS]...", help="Run folders, or folders that hold some; runs by default."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Other machines reach one that is not loopback, with a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen on; 0 takes any free one.")] = 8712,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File that holds the token that every request must bring. Without it, a token is made and printed if the host "
            "is not loopback, and none is needed if it is.",
        ),
    ] = None,
) -> None:
    """Show runs in a browser: a list, a page of each that follows it, comparisons, decisions and downloads. Ctrl-C ends it."""
    import threading

    from esper.karn.serve.access import Door, new_token, read_token
    from esper.karn.serve.app import create_app
    from esper.karn.serve.library import Library
    from esper.karn.serve.server import Server, address_of, is_loopback, listen

    library = Library(runs or [Path("runs")])
    token = None if token_file is None else read_token(token_file)
    with listen(host, port) as listening:
        loopback = is_loopback(listening)
        say(f"serving at {address_of(host, listening)} until Ctrl-C")
        if token is None and not loopback:
            token = new_token()
            say(f"token: {token}")
        sys.stdout.flush()
        stop = threading.Event()
        door = Door(token, host, loopback, listening.getsockname()[1])
        with suppress(KeyboardInterrupt):  # how the server passes on Ctrl-C after it has ended
            Server(create_app(library, door, stop), stop).run([listening])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a page that is being made in a thread would hold up the regular exit
