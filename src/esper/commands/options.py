"""Define the options that several commands share, and how commands read settings, print and exit.

Numbers of the config are taken as text, so that the config alone defines which values are accepted.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer import Option

from esper.leyline.messages import InputError, aligned, counted, printable

if TYPE_CHECKING:
    from esper.karn.report.frame import Pictures

SETTINGS, MACHINE, OUTPUT = "Settings", "Where it runs", "Output"
"""The groups of options in the help, below those that a command alone has."""
of_settings, of_machine, of_output = (partial(Option, rich_help_panel=group) for group in (SETTINGS, MACHINE, OUTPUT))
"""An option of each group."""
PLACE = "path.py:function or module:function, whose return is a task"  # how the help describes a task of the user's own


def of_place(made: str, *names: str) -> Any:
    """Return the option that names the function which makes something of a run, if it is the user's own."""
    return Option(
        *names, metavar="PLACE", help=f"path.py:function or module:function that makes {made}, if it is your own."
    )


Envs = Annotated[str | None, Option("--envs", metavar="E", help="Environments, twins not counted.")]
Steps = Annotated[str | None, Option("--steps", metavar="T", help="Steps in an episode.")]
Epochs = Annotated[
    str | None,
    Option("--epochs", metavar="N", help="Length of an episode as passes over the train split; replaces --steps."),
]
Seed = Annotated[str | None, Option("--seed", metavar="N", help="Seed of the run.")]
Device = Annotated[str | None, of_machine("--device", metavar="auto|cpu|cuda[:i]", help="Device of the networks.")]
Compile = Annotated[
    str | None,
    of_machine("--compile", metavar="off|on|auto", help="Compile the training passes (`esper docs compiling`)."),
]
ConfigFile = Annotated[
    Path | None,
    of_settings("--config", metavar="FILE", help="YAML file of settings; `esper config --yaml` prints one."),
]
Settings = Annotated[
    list[str] | None, of_settings("--set", metavar="KEY=VALUE", help="Set a key of `esper config`; may be repeated.")
]
Json = Annotated[bool, of_output("--json", help="Print the summary as JSON, and nothing else.")]
PicturesFolder = Annotated[
    Path | None,
    of_output("--png", metavar="DIR", help="Folder to which the figures are written as pictures, for papers."),
]
PictureFormat = Annotated[
    str, of_output("--format", metavar="png|pdf|svg", help="Format of the pictures that --png writes.")
]
Overwrite = Annotated[bool, of_output("--overwrite", help="Replace the run in the folder.")]

Workers = Annotated[
    str | None,
    of_machine(
        "--workers",
        metavar="N",
        help="Workers that play or grow, each a process with one thread (`esper docs workers`).",
    ),
]
Devices = Annotated[
    list[str] | None,
    of_machine(
        "--devices",
        metavar="NAME...",
        help="Devices of the workers, as cuda:0 cuda:1 or cuda:0,cuda:1, taken in turn: one worker on each, or --workers "
        "workers. Replaces the config key device (--device), which names the one device of a single worker. Names of devices "
        "that follow the option belong to it, and no other argument does.",
    ),
]
Cluster = Annotated[
    str | None,
    of_machine(
        "--cluster",
        metavar="ray|ray://HOST:PORT|torchrun",
        help="Where the workers run, if not as processes of this machine: on Ray, or as the ranks of torchrun.",
    ),
]

NOT_BY_SET: Mapping[str, Mapping[str, str]] = {
    "grow": {
        **dict.fromkeys(("task", "tasks"), "give the task as the argument"),
        "shards": "it divides the environments of a training; leave it out",
    },
    "train": {
        **dict.fromkeys(("task", "tasks"), "give the tasks as the arguments"),
        "controller": "it makes its own; leave that out",
        **dict.fromkeys(("instances", "first_instance"), "it draws from all instances for training; leave that out"),
        "models": "it keeps the controller and no networks; grow some with it",
    },
}
"""Config keys that a command refuses in --set, each with the reason and what to do instead."""


_DEVICE = r"(auto|cpu|cuda|mps|xpu|hpu|mtia|xla|tpu|meta)(:\d+)?"
# one or more; those that `resolve_device` does not know are for it to refuse, and no tasks
_DEVICES = re.compile(rf"{_DEVICE}(,{_DEVICE})*,?")


def spread_devices(arguments: Sequence[str]) -> list[str]:
    """Put `--devices` in front of every device that follows it, since click gives an option a fixed number of values."""
    found, follows = list[str](), False
    for place, argument in enumerate(arguments):
        if argument == "--":
            return [*found, *arguments[place:]]
        if follows and found[-1] != "--devices" and _DEVICES.fullmatch(argument):
            found.append("--devices")
        elif found[-1:] != ["--devices"]:
            follows = argument == "--devices" or argument.startswith("--devices=")
        found.append(argument)
    return found


def use_one_thread() -> None:
    """Let torch use one thread: sums then have one order, and the arrays are too small to gain from more."""
    import torch

    torch.set_num_threads(1)


def read_layers(
    command: str, from_file: Mapping[str, Any], settings: Sequence[str] | None, options: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Return layers of config, without options that are None. InputError for a refused key, or for both steps and epochs."""
    from esper.leyline.config.tree import parse_setting

    parsed = [parse_setting(setting) for setting in settings or ()]
    for name in (name for setting in parsed for name in setting):
        if name in NOT_BY_SET[command]:
            raise InputError(f"--set {name} is not for `esper {command}`: {NOT_BY_SET[command][name]}")
    asked = [*parsed, {name: value for name, value in options.items() if value is not None}]
    if all(any(layer.get(name) is not None for layer in asked) for name in ("steps", "epochs")):
        raise InputError("steps and epochs are both given; give one of the two")
    return [from_file, *asked]


def split_names(text: str | None) -> list[str] | None:
    """Return the names in a text with commas between them; None for None."""
    return None if text is None else [name.strip() for name in text.split(",")]


def say(line: str, err: bool = False) -> None:
    """Print a line; control characters in it are escaped, because parts of it may come from files of other people."""
    typer.echo(printable(line), err=err)


def say_pictures(drawn: "Pictures", folder: Path) -> None:
    """Say which pictures were written, and what there was nothing to draw of."""
    say(f"{counted(len(drawn.paths), 'picture')}: {folder}")
    for sentence in drawn.absent:
        say(f"not drawn: {sentence}")


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells as aligned columns; the last column is not wrapped."""
    for line in aligned(rows):
        say(line)


def fail(error: Exception | str, code: int) -> NoReturn:
    """Print an error on one line and exit with a code."""
    say(f"error: {' '.join(str(error).split())}", err=True)
    raise SystemExit(code)


def finish(summary: Mapping[str, Any], folder: Path, as_json: bool) -> None:
    """Print the summary, and exit with 130 if the run was interrupted, or with 1 if it failed; a warning has said why."""
    from rich.console import Console

    from esper.karn.terminal.console import print_summary, print_training
    from esper.runs.workers.transports import WORKER

    if summary["status"] == WORKER:
        return
    if as_json:
        typer.echo(json.dumps(summary, indent=2, allow_nan=False))
    else:
        print_table = print_training if "rounds_done" in summary else print_summary
        print_table(summary, Console(), str(folder))
    if summary["status"] == "interrupted":
        from esper.leyline.reference import resume_command
        from esper.runs.folder.resume import read_config

        config = read_config(folder)
        command = resume_command(folder, config.tasks or (config.task,), config.controller)
        say(f"interrupted; continue with {command}", err=True)
        raise typer.Exit(130)
    if summary["status"] == "failed":
        raise typer.Exit(1)
