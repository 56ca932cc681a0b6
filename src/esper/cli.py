"""The `esper` command: the table of its subcommands, and its exit codes. Subcommands import torch only if they need it."""

import errno
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from esper.commands.comparing import compare
from esper.commands.doctor import doctor
from esper.commands.evaluating import evaluate
from esper.commands.events import events
from esper.commands.export import export
from esper.commands.exporting import export_events
from esper.commands.healing import heal
from esper.commands.listing import blueprints, config, controller, tasks
from esper.commands.options import fail, say
from esper.commands.report import report
from esper.commands.running import grow, resume, train
from esper.commands.serving import serve
from esper.commands.streaming import stream
from esper.commands.watching import watch
from esper.karn.streams import lost_output, plug_closed_streams, steady_output
from esper.leyline.distribution import DISTRIBUTION, installed_version, warn_of_conflict
from esper.leyline.errors import (
    ActorError,
    DataFault,
    DataWarning,
    InputError,
    LearningError,
    OutOfMemory,
    RunWarning,
    UserCodeError,
    is_out_of_memory,
    raised_in_user_code,
    requested_memory,
    user_traceback,
)

warn_of_conflict()  # again: esper/__init__.py may have been overwritten by the other library

app = typer.Typer(
    name="esper",
    help="Grow neural networks: a population of small hosts, seeds planted in their slots, and the rule that decides.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
COMMANDS: Mapping[str, Callable[..., None]] = {
    "grow": grow,
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "stream": stream,
    "heal": heal,
    "tasks": tasks,
    "blueprints": blueprints,
    "controller": controller,
    "config": config,
    "export": export,
    "events": events,
    "export-events": export_events,
    "watch": watch,
    "report": report,
    "compare": compare,
    "serve": serve,
    "doctor": doctor,
}
"""The subcommands, in the order of the help."""
for _name, _function in COMMANDS.items():
    app.command(_name)(_function)

WRITING = ("grow", "train", "resume", "eval")
"""Commands whose result is a folder: they succeed even if stdout cannot be written."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code: 0, 1 (failed), 2 (bad input) or 130 (interrupted).

    Output that cannot be written does not change the code of a command whose result is a folder; other commands then fail.
    """
    with steady_output():
        try:
            _run(arguments)
        except SystemExit as leaving:
            lost = lost_output()
            if lost is not None and not leaving.code:
                named = (sys.argv[1:] if arguments is None else arguments)[:1]
                if not set(named) & set(WRITING):
                    fail(f"the output could not be written: {lost.strerror}", 1)
                say(f"warning: the output could not be written: {lost.strerror}; the folder has it all", err=True)
            raise


def _run(arguments: Sequence[str] | None) -> None:
    """Run the command; an expected error is printed as one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _shown_by(warnings.showwarning)
            app(arguments)
    except InputError as error:
        fail(error, 2)
    except UserCodeError as error:
        typer.echo(user_traceback(error.__cause__ or error), err=True, nl=False)
        fail(error, 1)
    except (OutOfMemory, DataFault, LearningError) as error:
        fail(error, 1)
    except ActorError as error:
        for note in getattr(error, "__notes__", ()):  # the traceback of the actor, and how the run is resumed
            typer.echo(note, err=True)
        fail(error, 1)
    except Exception as error:  # outside a run, which says more, or of the user's code
        if raised_in_user_code(error):
            typer.echo(user_traceback(error), err=True, nl=False)
            raise SystemExit(1) from error
        if isinstance(error, OSError):
            fail(_of_a_disk(error), 1)
        if not is_out_of_memory(error):
            raise
        asked = requested_memory(error)
        fail(f"memory ran out{f': {asked} were asked for' if asked else ''}; free some, or lower envs", 1)


def _of_a_disk(error: OSError) -> OSError | str:
    """An error of the system, or the sentence of a run whose disk is full."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or str(error).startswith("cannot write "):
        return error
    what = error.filename or "to a disk, such as that of the folder for temporary files (TMPDIR)"
    return f"cannot write {what}: {os.strerror(error.errno)}; make room there, and give the same command again"


def command() -> None:
    """The entry point of the shell: `main`, which exits immediately if it was interrupted.

    The regular exit of the interpreter takes half a second with torch, and aborts if a thread is writing a checkpoint.
    """
    plug_closed_streams()
    try:
        main()
    except (KeyboardInterrupt, SystemExit) as leaving:
        if isinstance(leaving, SystemExit) and leaving.code != 130:
            raise
        with suppress(OSError):  # the reader of the output may be gone
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(130)


def _print_version(asked: bool) -> None:
    if asked:
        version = installed_version()
        typer.echo(f"{DISTRIBUTION} {version}" if version else "esper, run from its sources")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def _shown_by(usual: Callable[..., None]) -> Callable[..., None]:
    """A `warnings.showwarning` that prints warnings of Esper as one line each, and leaves others to `usual`."""

    def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if issubclass(category, DataWarning | RunWarning):
            say(f"warning: {message}", err=True)
        else:
            usual(message, category, *where)

    return show
