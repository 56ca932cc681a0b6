"""Run the `esper` command: the table of its subcommands, and its exit codes. Subcommands import torch only if they need it."""

import errno
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from esper.commands.doctor import doctor
from esper.commands.evaluating import evaluate
from esper.commands.exporting import events, export, export_events
from esper.commands.healing import find_sites, heal
from esper.commands.listing import blueprints, config, controller, docs, tasks
from esper.commands.options import fail, say, spread_devices
from esper.commands.running import grow, resume, train
from esper.commands.viewing import compare, report, serve, watch
from esper.karn.standard_output import lost_output, plug_closed_streams, steady_output
from esper.leyline import messages
from esper.leyline.distribution import DISTRIBUTION, installed_version, warn_of_conflict
from esper.leyline.plugins import COMMANDS as PLUGIN_COMMANDS
from esper.leyline.plugins import load_plugin, plugins
from esper.store.disk import DiskFull, Unwritable

warn_of_conflict()  # again: esper/__init__.py may have been overwritten by the other library

app = typer.Typer(
    name="esper",
    help="Grow neural networks: a population of small hosts, seeds planted in their slots, and the rule that decides.",
    epilog="Examples:\n\n"
    "  esper grow spirals-trained --envs 8  # a first run, in half a minute\n\n"
    "  esper docs  # the pages of the documentation",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
GROW, LEARN, LOOK, LIST = "Grow networks", "Train and compare controllers", "Look at runs", "What Esper has"
ADDED = "Added by other packages"
"""The groups of subcommands in the help."""

COMMANDS: Mapping[str, tuple[Callable[..., None], str, str]] = {
    "grow": (grow, GROW, "runs"),
    "resume": (resume, GROW, "checkpoints"),
    "heal": (heal, GROW, "heal"),
    "find-sites": (find_sites, LIST, "lora-ranks"),
    "train": (train, LEARN, "training"),
    "eval": (evaluate, LEARN, "evaluation"),
    "watch": (watch, LOOK, "watch"),
    "report": (report, LOOK, "report"),
    "compare": (compare, LOOK, "report"),
    "serve": (serve, LOOK, "serve"),
    "events": (events, LOOK, "events"),
    "export-events": (export_events, LOOK, "exporters"),
    "export": (export, LOOK, "checkpoints"),
    "tasks": (tasks, LIST, "tasks"),
    "blueprints": (blueprints, LIST, "hosts"),
    "controller": (controller, LIST, "own-controller"),
    "config": (config, LIST, "config"),
    "docs": (docs, LIST, "glossary"),
    "doctor": (doctor, LIST, "versions"),
}
"""The subcommands, in the order of the help: a function, whose signature defines the options and whose docstring is the help, the
heading under which the help lists it, and its page of `esper docs`."""
EXAMPLES = """
esper grow digits --envs 16 --run runs/digits  # 16 networks and their never-grow twins
esper grow task.py:make_task --set lifecycle.max_seeds=1  # your own data, at most one seed each
esper resume runs/digits  # go on where it was interrupted or killed
esper resume runs/digits --set steps=48  # go on for longer than was asked at first
esper heal model.pt2 --data data.npz --out healed  # a network that was damaged, and labelled examples
esper heal net.py:pruned --data net.py:data --intact net.py:whole  # also learn from the intact network
esper find-sites net.py:model --data data.npz  # where seeds can be planted
esper find-sites net.py:model --data data.npz --as peft --budget 0.02  # layers and ranks for a LoraConfig
esper train repair --preset quick --run runs/learnt  # learn from damaged networks
esper train repair --workers 2 --rounds 100 --seed 1  # in two processes, with the same result
esper eval runs/learnt --tasks repair --instances 50  # a trained controller and the rules
esper eval plan.yaml --tasks digits --baselines none  # a schedule and the rules
esper watch runs/digits  # while it goes on, or afterwards
esper watch runs/later --wait  # open the window before the run begins
esper report runs/digits  # write report.html into the folder
esper report runs/digits --png figures --format pdf  # and its figures for a paper
esper compare runs/a runs/b  # a table of the difference with its interval
esper compare runs/a runs/b runs/c --out compared.html  # every pair, with curves
esper serve runs  # for this machine
esper serve runs --host 0.0.0.0 --port 8080  # for others too, with a token that is printed
esper events runs/digits --kind decision  # JSON lines of every decision
esper events runs/digits --kind episode --format csv --out episodes.csv  # a table
esper export-events runs/digits --to tensorboard  # all curves
esper export-events runs/digits --to mlflow --follow  # until the run ends
esper export runs/digits --out networks  # every network of the run
esper export runs/digits --env 0 --out network  # one of them
esper tasks  # every task of Esper
esper tasks task.py:make_task  # the slots and splits of your own
esper blueprints  # what seeds can be
esper blueprints | grep sequence  # those for sequences
esper controller  # every rule that can decide
esper controller heuristic  # what one of them does, and its settings
esper config | grep lifecycle  # the keys of one section
esper config --yaml > settings.yaml  # a file for --config
esper docs  # every page with its first sentence
esper docs growth  # growing in a training loop of your own
esper doctor  # this machine and this installation
esper doctor --all  # the longest check of results that must be equal to the bit
""".strip().splitlines()
"""The examples of their help."""
for _name, (_run_command, _group, _page) in COMMANDS.items():
    _examples = [f"  {line}" for line in EXAMPLES if line.split()[1] == _name]
    _epilog = "\n\n".join(["Examples:", *_examples, f"More: `esper docs {_page}`"])
    app.command(_name, rich_help_panel=_group, epilog=_epilog)(_run_command)
for _name in plugins(PLUGIN_COMMANDS):
    try:
        app.command(_name, rich_help_panel=ADDED)(load_plugin(PLUGIN_COMMANDS, _name))
    except messages.InputError as _error:  # one broken package takes no other command away
        say(f"warning: the command {_name} is left out: {_error}", err=True)

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
            usual = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
                if issubclass(category, messages.DataWarning | messages.RunWarning):  # of Esper: a line each
                    say(f"warning: {message}", err=True)
                else:
                    usual(message, category, *where)

            warnings.showwarning = show  # type: ignore[assignment]
            app(spread_devices(sys.argv[1:] if arguments is None else arguments))
    except messages.InputError as error:
        fail(error, 2)
    except messages.UserCodeError as error:
        typer.echo(messages.user_traceback(error.__cause__ or error), err=True, nl=False)
        fail(error, 1)
    except (messages.OutOfMemory, messages.DataFault, messages.LearningError, DiskFull, Unwritable) as error:
        fail(error, 1)
    except messages.WorkerError as error:
        for note in getattr(error, "__notes__", ()):  # the traceback of the worker, and how the run is resumed
            typer.echo(note, err=True)
        fail(error, 1)
    except Exception as error:  # outside a run, which says more, or of the user's code
        if messages.raised_in_user_code(error):
            typer.echo(messages.user_traceback(error), err=True, nl=False)
            raise SystemExit(1) from error
        if isinstance(error, OSError):
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or str(error).startswith("cannot write "):
                fail(error, 1)
            what = error.filename or "to a disk, such as that of the folder for temporary files (TMPDIR)"
            mend = "make room there, and give the same command again"
            fail(f"cannot write {what}: {os.strerror(error.errno)}; {mend}", 1)
        if not messages.is_out_of_memory(error):
            raise
        asked = messages.requested_memory(error)
        fail(f"memory ran out{f': {asked} were asked for' if asked else ''}; free some, or lower envs", 1)


def command() -> None:
    """Run `main` for the shell, and exit immediately if it was interrupted.

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
