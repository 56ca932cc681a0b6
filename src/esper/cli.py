"""The `esper` command: reads arguments, calls the library, prints. torch is loaded by the commands that need it."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from esper.karn.streams import lost_output, plug_closed_streams, steady_output
from esper.leyline.distribution import DISTRIBUTION, EXTRAS, installed_version, pip_install, warn_of_conflict
from esper.leyline.errors import (
    DataFault,
    DataWarning,
    InputError,
    OutOfMemory,
    RunWarning,
    UserCodeError,
    asked_for,
    in_user_code,
    in_users_words,
    is_shortage,
)
from esper.leyline.text import printable

warn_of_conflict()  # esper/__init__.py, which warns too, may be that of the other library

app = typer.Typer(
    name="esper",
    help="Grow neural networks: a population of small hosts, seeds planted in their slots, and the rule that decides.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

PLACE = "path.py:function or module:function, whose return is a task"
"""How the help names a task of one's own."""

ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "grow": dict.fromkeys(("task", "tasks"), "give the task as the argument"),
    "train": {
        **dict.fromkeys(("task", "tasks"), "give the tasks as the arguments"),
        "controller": "it makes its own; leave that out",
        **dict.fromkeys(("instances", "first_instance"), "it draws from all instances for training; leave that out"),
        "models": "it keeps the controller and no networks; grow some with it",
    },
}
"""Keys of the config that a command does not take from --set, and what to do instead."""


WRITING = ("grow", "train", "resume", "eval")
"""Commands whose result is a folder, so that an output that takes nothing costs nothing."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and leave with its exit code: 0, 1 (failed), 2 (bad input) or 130 (interrupted).

    Output that cannot be written does not change that, but for commands whose result is what they print: those fail.
    """
    with steady_output():
        try:
            _run(arguments)
        except SystemExit as leaving:
            lost = lost_output()
            if lost is not None and not leaving.code:
                named = (sys.argv[1:] if arguments is None else arguments)[:1]
                if not set(named) & set(WRITING):
                    _fail(OSError(f"the output could not be written: {lost.strerror}"), 1)
                typer.echo(
                    f"warning: the output could not be written: {lost.strerror}; the folder has it all", err=True
                )
            raise


def _run(arguments: Sequence[str] | None) -> None:
    """Run the command; what a person can mend is one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _shown_by(warnings.showwarning)
            app(arguments)
    except InputError as error:
        _fail(error, 2)
    except UserCodeError as error:
        _print_cause(error)
        _fail(error, 1)
    except (OutOfMemory, DataFault) as error:
        _fail(error, 1)
    except Exception as error:  # outside a run, which says more, or of the user's code
        if in_user_code(error):
            typer.echo(in_users_words(error), err=True, nl=False)
            raise SystemExit(1) from error
        if isinstance(error, OSError):
            _fail(error, 1)
        if not is_shortage(error):
            raise
        asked = asked_for(error)
        _fail(OutOfMemory(f"memory ran out{f': {asked} were asked for' if asked else ''}; free some, or lower envs"), 1)


def command() -> None:
    """What the shell calls: `main`, whose interrupted end does not wait for that of the interpreter.

    That takes half a second with torch, and aborts the process where it finds the thread of a checkpoint within torch.
    """
    plug_closed_streams()
    try:
        main()
    except (KeyboardInterrupt, SystemExit) as leaving:
        if isinstance(leaving, SystemExit) and leaving.code != 130:
            raise
        with suppress(OSError):  # nobody may read there any more
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
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@app.command()
def grow(
    task: Annotated[str, typer.Argument(help=f"A task of `esper tasks`, or {PLACE}.")],
    controller: Annotated[
        str | None, typer.Option(help="never, random-valid, heuristic, a schedule file, or the run of a trained one.")
    ] = None,
    # numbers are taken as text, so that the config alone says what is accepted
    envs: Annotated[str | None, typer.Option(metavar="E", help="Environments, twins not counted.")] = None,
    steps: Annotated[str | None, typer.Option(metavar="T", help="Steps in an episode.")] = None,
    epochs: Annotated[
        str | None, typer.Option(metavar="N", help="Length as passes over the train split, in place of --steps.")
    ] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Run seed.")] = None,
    device: Annotated[str | None, typer.Option(metavar="auto|cpu|cuda[:i]", help="Where to run.")] = None,
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="Run folder; runs/TASK-CONTROLLER-sSEED.")] = None,
    config_file: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="YAML to start from.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of `esper config`; may be repeated.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that is in the folder.")] = False,
    models: Annotated[str | None, typer.Option(metavar="all|best|none", help="Which networks to export.")] = None,
    slots: Annotated[str | None, typer.Option(metavar="NAME,...", help="Slots that may be used.")] = None,
    baselines: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Static networks beside: twin, same-size, plain, skips, or none."),
    ] = None,
    twin: Annotated[bool | None, typer.Option("--twin/--no-twin", help="With or without that baseline.")] = None,
) -> None:
    """Grow a population on a task, compare it with static networks (docs/baselines.md), and export the networks.

    Settings are taken from the task, a trained controller, FILE, --set and the other options; a later one of these overrides
    an earlier one.
    """
    import torch

    from esper.runs.configuration import growth_config, load_config_file
    from esper.runs.grow import grow as run_population
    from esper.runs.resume import Opening
    from esper.store.disk import file_name
    from esper.tamiyo.catalog import get_controller
    from esper.tasks.catalog import get_task

    torch.set_num_threads(1)  # sums then come in one order, and the arrays are too small to gain from more
    chosen = get_task(task)
    from_file = {} if config_file is None else load_config_file(str(config_file))
    if from_file.get("task", task) != task:
        raise InputError(
            f"--config {config_file} is of task {from_file['task']!r}, not {task!r}; name the one you mean"
        )
    options = {
        "controller": controller,
        "envs": envs,
        "steps": steps,
        "epochs": epochs,
        "seed": seed,
        "device": device,
        "models": models,
        "slots": None if slots is None else [name.strip() for name in slots.split(",")],
        "baselines": baselines,
        "twin": twin,
    }
    asked = [
        from_file,
        *_settings("grow", settings),
        {name: value for name, value in options.items() if value is not None} | {"task": task},
    ]
    _check_length(asked[1:])
    config = growth_config(chosen, *asked)
    client = get_controller(config.controller, config)
    folder = run or Path("runs") / f"{file_name(task)}-{file_name(Path(config.controller).stem)}-s{config.seed}"

    from rich.console import Console

    from esper.karn.bars import live
    from esper.karn.console import print_summary

    with live(Console(stderr=True), config.steps, chosen.objective.metric) as watch:
        summary = run_population(chosen, config, client, folder, watch, Opening(overwrite=overwrite))
    if json_:
        typer.echo(json.dumps(summary, indent=2, allow_nan=False))
    else:
        print_summary(summary, Console(), str(folder))
    _leave_by(summary, folder)


@app.command()
def train(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TASK]...", help=f"Tasks of `esper tasks`, or {PLACE}; repair.", show_default=False),
    ] = None,
    preset: Annotated[str, typer.Option(metavar="quick|standard", help="Length of the training.")] = "quick",
    rounds: Annotated[str | None, typer.Option(metavar="N", help="Rounds: an episode of all, and an update.")] = None,
    envs: Annotated[str | None, typer.Option(metavar="E", help="Environments of each task.")] = None,
    steps: Annotated[str | None, typer.Option(metavar="T", help="Steps in an episode.")] = None,
    epochs: Annotated[
        str | None, typer.Option(metavar="N", help="Length as passes over the train split, in place of --steps.")
    ] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Run seed.")] = None,
    device: Annotated[str | None, typer.Option(metavar="auto|cpu|cuda[:i]", help="Where to run.")] = None,
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="Run folder; runs/train-TASKS-sSEED.")] = None,
    config_file: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="YAML to start from.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of `esper config`; may be repeated.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that is in the folder.")] = False,
    twin: Annotated[bool | None, typer.Option("--twin/--no-twin", help="Train never-grow twins beside.")] = None,
) -> None:
    """Train a controller by growing populations of hosts; `esper grow TASK --controller DIR` then uses it.

    Settings are taken from the task, the defaults of training, the preset, FILE, --set and the other options; a later one of
    these overrides an earlier one.
    """
    import torch
    from rich.console import Console

    from esper.karn.bars import training
    from esper.karn.console import print_training
    from esper.runs.configuration import load_config_file, training_configs
    from esper.runs.resume import Opening
    from esper.runs.train import train as train_controller
    from esper.simic.ppo import LearningError
    from esper.store.disk import file_name
    from esper.tasks.catalog import get_task

    torch.set_num_threads(1)  # sums then come in one order, and the arrays are too small to gain from more
    from_file = {} if config_file is None else dict(load_config_file(str(config_file)))
    listed = from_file.pop("tasks", None) or ([from_file["task"]] if "task" in from_file else None)
    if listed is not None and (not isinstance(listed, list) or not all(isinstance(name, str) for name in listed)):
        raise InputError(
            f"--config {config_file} names the tasks {listed!r}; give a list of names, as [repair, digits]"
        )
    names = list(tasks or listed or ("repair",))
    if listed is not None and names != list(listed):
        raise InputError(
            f"--config {config_file} is of {', '.join(map(str, listed))}, not {', '.join(names)}; name the ones you mean"
        )
    chosen = [get_task(name) for name in names]
    options = {"envs": envs, "steps": steps, "epochs": epochs, "seed": seed, "device": device, "twin": twin}
    asked: list[Mapping[str, Any]] = [
        from_file,
        *_settings("train", settings),
        {name: value for name, value in options.items() if value is not None},
        {"ppo": {"rounds": rounds}} if rounds is not None else {},
    ]
    _check_length(asked[1:])
    configs = training_configs(chosen, preset, *asked)
    folder = run or Path("runs") / f"train-{'+'.join(map(file_name, names))}-s{configs[0].seed}"
    with training(Console(stderr=True)) as watch:
        try:
            summary = train_controller(chosen, configs, folder, watch, Opening(overwrite=overwrite))
        except LearningError as error:
            _fail(error, 1)
    if json_:
        typer.echo(json.dumps(summary, indent=2, allow_nan=False))
    else:
        print_training(summary, Console(), str(folder))
    _leave_by(summary, folder)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="The run folder of `esper grow` or `esper train`.")],
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="PLACE",
            help="path.py:function or module:function that makes the run's task, if it is your own.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the config, on record; may be repeated."),
    ] = None,
    other_data: Annotated[
        bool,
        typer.Option("--other-data", help="Go on though the data are not those that the run began with, on record."),
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")] = False,
) -> None:
    """Go on with a run that was interrupted or killed, to the very numbers it would have had (docs/checkpoints.md).

    It goes on at its last checkpoint, or begins again from its config.yaml where it has none; of a finished run the summary
    is printed. With --set, as steps=48 or ppo.rounds=200, a finished run goes on too. A run on a task of your own needs --task,
    since no code that a run folder names is started without your word. A controller that was an object made in Python is given
    again in Python: esper.resume(RUN, controller=...).
    """
    import torch
    from rich.console import Console

    from esper.calls import go_on
    from esper.karn.console import print_summary, print_training
    from esper.runs.resume import is_training, read_config
    from esper.simic.ppo import LearningError

    torch.set_num_threads(1)  # sums then come in one order, and the arrays are too small to gain from more
    try:
        summary = go_on(run, tasks or None, None, settings or (), other_data, True)
    except LearningError as error:
        _fail(error, 1)
    if json_:
        typer.echo(json.dumps(summary, indent=2, allow_nan=False))
    else:
        (print_training if is_training(read_config(run)) else print_summary)(summary, Console(), str(run))
    _leave_by(summary, run)


@app.command("eval")
def evaluate(
    controllers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONTROLLER]...", help="Names, schedule files, or runs of trained controllers.", show_default=False
        ),
    ] = None,
    tasks: Annotated[str, typer.Option(metavar="NAME,...", help=f"Tasks of `esper tasks`, or {PLACE}.")] = "repair",
    instances: Annotated[int, typer.Option(metavar="N", help="Held-out instances of each task.")] = 200,
    seeds: Annotated[
        int,
        typer.Option(metavar="N", help="Runs of each instance, with N seeds that count up from `seed` of the config."),
    ] = 3,
    first: Annotated[int, typer.Option(metavar="N", help="Number of the first held-out instance.")] = 0,
    searched: Annotated[
        int,
        typer.Option(
            metavar="N", help="Training instances on which the best fixed schedule is searched for; fewer is faster."
        ),
    ] = 64,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where record, figure and what was grown go; runs/evaluation/TASKS-HASH."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of `esper config`, for all of them.")
    ] = None,
    baselines: Annotated[
        str, typer.Option(metavar="NAME,...", help="Static networks beside: same-size, plain, skips, or none.")
    ] = "same-size,plain,skips",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the record that is in DIR.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the record as JSON, and nothing else.")] = False,
) -> None:
    """Compare controllers with the rules and the best fixed schedule, on the same held-out instances with the same seeds.

    The rules never, random-valid and heuristic, and the best fixed schedule, which is searched for, always take part.
    They are compared by J on the test split: the metric, less rent for added parameters. Networks that an earlier call with
    the same settings has grown are not grown again. Without DIR, every set of arguments has a folder of its own.
    """
    import torch
    from rich.console import Console

    from esper.calls import evaluate as compare
    from esper.karn.evaluation import print_evaluation
    from esper.leyline.config import parse_setting
    from esper.runs.contenders import named
    from esper.runs.evaluation_folder import FIGURE, RECORD, default_folder
    from esper.store.files import to_json

    torch.set_num_threads(1)  # sums then come in one order, and the arrays are too small to gain from more
    names = [name.strip() for name in tasks.split(",")]
    numbers = {"instances": instances, "seeds": seeds, "first": first, "searched": searched}
    contenders = [named(controller) for controller in controllers or ()]
    static = [] if baselines == "none" else [name.strip() for name in baselines.split(",")]
    if out is None:
        layers: list[Mapping[str, Any]] = [parse_setting(setting) for setting in settings or ()]
        out = default_folder(contenders, names, [*layers, {"baselines": static}], **numbers)
    asked = {"settings": settings or (), "baselines": static, "out": out, "overwrite": overwrite}
    record = compare(contenders, names, **numbers, **asked, progress=True)  # type: ignore[arg-type]
    if json_:
        typer.echo(to_json(record), nl=False)
        return
    print_evaluation(record, Console())
    _say(f"record and figure: {out / RECORD}, {out / FIGURE}")


@app.command()
def tasks(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TASK]...", help=f"These tasks alone, {PLACE} among them.", show_default=False),
    ] = None,
) -> None:
    """List the tasks, or those that are named, with their slots and menus."""
    from esper.leyline.task import Mixture
    from esper.tasks.catalog import TASKS, get_task, task_names

    for name in names or TASKS:
        try:
            task = get_task(name)
        except InputError as error:  # its files are not here
            if names:
                raise
            _say(f"{name}: {task_names()[name]}")
            _say(f"  missing   {error}")
            continue
        _say(f"{name}: {task.summary}")
        _say(f"  metric    {task.objective.metric}")
        if isinstance(task, Mixture):
            _say(f"  instances {', '.join(f'{part} {len(keys):,}' for part, keys in task.ranges.items())}")
        else:
            splits = {"train": task.train, "probe": task.probe, "validation": task.validation, "test": task.test}
            sizes = [f"{split} {len(part.x):,}" for split, part in splits.items() if part is not None]
            _say(f"  examples  {', '.join(sizes)}")
        _say(f"  slots     {', '.join(f'{slot.name} (width {slot.width})' for slot in _slots(task))}")
        _say(f"  menu      {', '.join(task.menu)}")


@app.command()
def blueprints() -> None:
    """List the blueprints: what each reads, and what it costs between two streams of width 16."""
    from esper.kasmina.blueprints import BLUEPRINTS

    rows = [("blueprint", "kind", "reads", "parameters", "summary")]
    rows += [
        (name, str(kind), str(blueprint.tap), f"{blueprint.parameters(16, 16):,}", blueprint.summary)
        for (kind, name), blueprint in BLUEPRINTS.items()
    ]
    _print_columns(rows)


@app.command()
def config(
    yaml: Annotated[bool, typer.Option("--yaml", help="Print the defaults as YAML, to start a file from.")] = False,
) -> None:
    """Print every configuration key with its default, its type and its meaning."""
    from esper.leyline.config import Config
    from esper.leyline.config_text import dump_config, reference

    if yaml:
        typer.echo(dump_config(Config()), nl=False)
        return
    rows = [("key", "default", "type", "meaning")]
    rows += [(key, default, kind, meaning) for key, kind, default, meaning in reference()]
    _print_columns(rows)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    env: Annotated[int | None, typer.Option(help="The network of this environment alone, straight into DIR.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to; RUN-networks in this folder.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace networks that are in DIR.")] = False,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The task that was grown, by name or path.py:function; a host of your own gets model.pt2 only with it.",
        ),
    ] = None,
) -> None:
    """Write the grown networks of a run elsewhere, each with a new model.pt2 made from its verified weights."""
    from esper.exporting import export_networks, how_to_name, networks_of
    from esper.tasks.catalog import get_task

    sources = networks_of(run, env)
    target = out or Path(f"{run.resolve().name}-networks")
    host = None if task is None else get_task(task)
    topologies = export_networks(
        sources, target, overwrite, host, lambda line: _say(line, err=True), how_to_name(run, target, env)
    )
    for name, topology in topologies.items():
        grew = ", ".join(f"{seed['blueprint']} at {seed['slot']}" for seed in topology["seeds"]) or "nothing grew"
        _say(f"{target / name}: {topology['parameters']:,} parameters, {grew}")


@app.command()
def doctor() -> None:
    """Check that Esper can run here; the exit code is 1 where something is broken."""
    failures = 0
    for good, text in _checks():
        failures += good is False
        _say(f"{'--' if good is None else 'ok' if good else 'FAIL':<5}{text}")
    if failures:
        raise typer.Exit(1)


def _checks() -> Iterator[tuple[bool | None, str]]:
    """(whether it is well, or None for what may be missing; what was looked at)."""
    yield (3, 11) <= sys.version_info < (3, 14), f"python {platform.python_version()} (3.11 to 3.13)"
    import torch

    for name in ("torch", "numpy", "safetensors", "scikit-learn"):
        yield True, f"{name} {importlib.metadata.version(name)}"
    yield True, f"{torch.get_num_threads()} threads (`esper grow` takes one)"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield True, f"cuda:{index} {torch.cuda.get_device_name(index)}"
    else:
        yield None, "CUDA: torch sees no device; runs take the CPU"
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        yield None if missing else True, f"extra {extra}" + (f": {pip_install(extra)}" if missing else "")
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "probe").write_text("probe")
        yield True, f"can write to {tempfile.gettempdir()}"
    except OSError as error:
        yield False, f"cannot write to a temporary folder: {error.strerror}"
    from esper.kasmina.blueprints import BLUEPRINTS, check

    for (kind, name), blueprint in BLUEPRINTS.items():
        try:
            check(blueprint)
            yield True, f"{kind} blueprint {name} passes its birth checks"
        except InputError as error:
            yield False, f"{kind} blueprint {name}: {error}"
    yield from _rows()


def _rows() -> Iterator[tuple[bool, str]]:
    """Whether an environment is bitwise the same in any population, for every host, blueprint and blend of ours."""
    import torch

    from esper.kasmina.blueprints import BLUEPRINTS
    from esper.kasmina.invariance import blends_that_vary, segments_that_vary
    from esper.leyline.streams import Kind
    from esper.tasks.catalog import TASKS, get_task

    torch.set_num_threads(1)
    for name in TASKS:
        try:
            task = get_task(name)
        except InputError:  # its files are not here
            continue
        x = torch.randn(64, *task.inputs, generator=torch.Generator().manual_seed(0))
        yield _row(f"host of {name}", segments_that_vary(task.largest, x))
    for (kind, name), blueprint in BLUEPRINTS.items():
        if kind == Kind.VECTOR:  # maps run row by row, each in calls of its own
            yield _row(f"blueprint {name}", blends_that_vary(blueprint, 8) | blends_that_vary(blueprint, 2))


def _row(what: str, found: Mapping[str, str]) -> tuple[bool, str]:
    where = "; ".join(f"{part}: {text}" for part, text in found.items())
    return not found, f"{what}: rows depend on their neighbours ({where})" if found else f"{what}: rows stand alone"


def _slots(task: Any) -> Any:
    import torch

    with torch.random.fork_rng(devices=[]):
        return task.largest().slots


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Rows of cells as aligned columns; the last column is as long as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        _say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _shown_by(usual: Callable[..., None]) -> Callable[..., None]:
    """What shows a warning: of data or a run a line, and of anything else what usually does."""

    def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if issubclass(category, DataWarning | RunWarning):
            _say(f"warning: {message}", err=True)
        else:
            usual(message, category, *where)

    return show


def _settings(command: str, settings: Sequence[str] | None) -> list[dict[str, Any]]:
    """Each --set as a nested mapping. InputError where the command has another way to say that, or no use for it."""
    from esper.leyline.config import parse_setting

    parsed = [parse_setting(setting) for setting in settings or ()]
    for setting in parsed:
        for name in setting:
            if name in ELSEWHERE[command]:
                raise InputError(f"--set {name} is not for `esper {command}`: {ELSEWHERE[command][name]}")
    return parsed


def _check_length(asked: Sequence[Mapping[str, Any]]) -> None:
    """InputError where a length is given in steps and in epochs too."""
    if all(any(layer.get(name) is not None for layer in asked) for name in ("steps", "epochs")):
        raise InputError("steps and epochs are both given; give one of the two")


def _print_cause(error: UserCodeError) -> None:
    """The traceback of what the user's code raised, from its first frame there on."""
    assert error.__cause__ is not None, "it is raised from what the code raised"
    typer.echo(in_users_words(error.__cause__), err=True, nl=False)


def _say(line: str, err: bool = False) -> None:
    """Print a line, whose parts may come from the files of others."""
    typer.echo(printable(line), err=err)


def _fail(error: Exception, code: int) -> None:
    _say(f"error: {' '.join(str(error).split())}", err=True)
    raise SystemExit(code)


def _leave_by(summary: Mapping[str, Any], folder: Path) -> None:
    """Exit with 130, and how the run goes on, where it was interrupted, and with 1, and its error, where it failed."""
    if summary["status"] == "interrupted":
        from esper.calls import names_of
        from esper.leyline.resuming import resume_command

        _say(f"interrupted; {resume_command(folder, names_of(summary))} goes on", err=True)
        raise typer.Exit(130)
    if summary["status"] == "failed":
        _fail(RuntimeError(summary["error"]["message"]), 1)
