"""Define the public functions grow, train, resume, evaluate, show, load and check_rows."""

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from torch import nn

from esper.karn.evaluation import draw_evaluation, print_evaluation
from esper.karn.reader import is_whole, open_run
from esper.karn.report.page import report_at_end
from esper.karn.terminal.console import print_lines, print_summary, print_training
from esper.karn.terminal.progress import Shown, evaluation_progress, run_progress
from esper.kasmina.blueprints import BLUEPRINTS, count, drawn_with
from esper.kasmina.host import drawn_host, dtype_of
from esper.kasmina.network.export import TOPOLOGY, check_size, load_network, read_topology
from esper.kasmina.network.grown_network import GrownNetwork
from esper.kasmina.stack.invariance import blends_that_vary, segments_that_vary
from esper.leyline.config import arguments
from esper.leyline.config.input import dotted
from esper.leyline.config.input import show as show_value
from esper.leyline.config.tree import BASELINES, Config, RewardConfig, build_config, parse_setting
from esper.leyline.data.batches import picked
from esper.leyline.data.task import AnyTask, Mixture, Task, with_steps
from esper.leyline.lifecycle.slots import CONVOLVED
from esper.leyline.messages import InputError, RunWarning, amended, kind_of, printable, warn
from esper.leyline.protocols import Controller, Reward
from esper.leyline.reference import is_own_controller, is_reference, resume_call, resume_command
from esper.nissa.hub import Output
from esper.nissa.recovery import check_events
from esper.runs.configuration import growth_config, training_configs
from esper.runs.evaluation.contenders import Contender, of_object, trainings, unheard
from esper.runs.evaluation.evaluation import FIGURE, Rivals, disk_retry, evaluation_folder, run_evaluation
from esper.runs.folder.interrupt import ended_by_signals
from esper.runs.folder.resume import Opening, changed, cohort_configs, finished, is_training, read_config, reward_of
from esper.runs.grow import grow as grow_run
from esper.runs.train import train as train_run
from esper.runs.workers.transports import WORKER
from esper.runs.workers.workers import worker_options
from esper.simic.rewards import get_reward, load_reward
from esper.store.disk import find_folder, write_atomic
from esper.store.files import BEST, EVALUATION, MODELS, check_links, is_run, to_json
from esper.tamiyo.catalog import controller_names, find_controller
from esper.tasks.catalog import get_task, is_named_task
from esper.tasks.hosts import host_from
from esper.tolaria.stacked.data import Format, stack_splits

OnInterrupt = Literal["raise", "return"]
"""What a call does after Ctrl-C, when the run folder is complete: raise KeyboardInterrupt, or return the summary."""
CHECKED = 64  # number of examples with which `check_rows` runs a host


def grow(
    task: AnyTask | str,
    config: Config | Mapping[str, Any] | None = None,
    *,
    controller: Controller | str | None = None,
    run: str | PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Shown = "auto",
    on_interrupt: OnInterrupt = "raise",
    outputs: Sequence[Output] = (),
    workers: int | None = None,
    devices: Sequence[str] = (),
) -> dict[str, Any]:
    """Grow a population on a task, evaluate it on the test split, and write a run folder if `run` names one.

    `task` is a task, the name of one of `esper tasks`, or "path.py:function". If `config` is a mapping of config keys, it
    overrides the defaults of the task; a `Config` is used unchanged, except for the name of the task. `controller` is a name, a
    schedule file, "path.py:function" or a `Controller` (`esper docs own-controller`); None takes the one of the config, which
    is `heuristic` where nothing sets it. Returns the summary, the object that `esper grow --json` prints. Raises InputError on
    bad input, before anything is written.

    `progress` shows the steps on stderr: True always, False never, and "auto" in a terminal and in a notebook.
    After Ctrl-C (SIGINT or SIGTERM) the run finishes its step, evaluates the networks and writes the folder. Then it raises
    KeyboardInterrupt, or, with `on_interrupt="return"`, returns the summary with the status "interrupted".
    If every environment was rolled back in every step, the summary has the status "failed" and an `error`, and a
    `RunWarning` is issued.

    `outputs` are objects with the methods `write(row)` and `close()`, which get every row of the events that `telemetry.level`
    keeps, also without `run`. A thread calls each of them, so that a step does not wait; the run ends when they have all rows.
    If one raises an error, a `RunWarning` is issued, and the run goes on without it.

    With `workers`, the environments are divided among that many processes, and with `devices`, such as ("cuda:0", "cuda:1"),
    one process is on each (`esper docs workers`). Results do not depend on the number of workers.
    """
    hired = worker_options(workers, devices, None, get_task)
    task = to_task(task)
    arguments.check_outputs(outputs)
    arguments.check_switch(overwrite, "overwrite")
    folder = None if run is None else arguments.to_path(run, "run")
    arguments.check_choice(on_interrupt, "on_interrupt", ("raise", "return"))
    if isinstance(config, Config):
        found = find_controller(config.controller if controller is None else controller)
        config = with_steps(config.model_copy(update={"task": task.name, "controller": found.name}), task)
    else:
        asked = {} if config is None else config
        arguments.check_settings(asked, [task])
        config, found = growth_config(task, asked, controller=controller)
    client = found.make(config)
    with run_progress(progress, config.steps, task.objective.metric) as watch:
        summary = grow_run(task, config, client, folder, watch, Opening(overwrite=overwrite), outputs, hired)
    return end_of(summary, folder, on_interrupt)


def train(
    tasks: AnyTask | str | Sequence[AnyTask | str],
    config: Mapping[str, Any] | list[Config] | None = None,
    *,
    preset: str = "quick",
    reward: Callable[[RewardConfig], Reward] | str = get_reward,
    run: str | PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Shown = "auto",
    on_interrupt: OnInterrupt = "raise",
    outputs: Sequence[Output] = (),
    workers: int | None = None,
    devices: Sequence[str] = (),
    cluster: str | None = None,
) -> dict[str, Any]:
    """Train a controller by growing populations of one task or several, and write a run folder if `run` names one.

    `tasks` are tasks or names of tasks, as in `grow`. A mapping of config keys overrides the defaults of the tasks, of training
    and of the preset; a list with the `Config` of each task is used unchanged. `reward` is called with the `RewardConfig` of
    each task and returns its reward, a function from an `Outcome` to named components, arrays of shape (E,); or it is the place
    of such a function, "path.py:function" (`esper docs own-controller`). Returns the summary; `esper.grow(task,
    controller=run)` uses the trained controller. Raises InputError on bad input, before anything is written, and
    `esper.LearningError` if an update of the policy fails.
    `progress`, `on_interrupt` and `outputs` are as in `grow`.

    With `workers`, that many processes play the environments, and with `devices`, such as ("cuda:0", "cuda:1"), one on each;
    `cluster` is "ray", a "ray://" address, or "torchrun" (`esper docs workers`). Results do not depend on the number of workers.
    """
    arguments.check_outputs(outputs)
    hired = worker_options(workers, devices, cluster, get_task)
    chosen = [to_task(task) for task in (tasks if isinstance(tasks, list | tuple) else [tasks])]
    arguments.check_switch(overwrite, "overwrite")
    if isinstance(reward, str):
        reward = load_reward(reward)
    arguments.check_callable(
        reward, "reward", "a function from a RewardConfig to what pays the controller, or path.py:function"
    )
    arguments.check_choice(on_interrupt, "on_interrupt", ("raise", "return"))
    folder = None if run is None else arguments.to_path(run, "run")
    if isinstance(config, list) and [type(each) for each in config] == [Config] * len(chosen):
        configs: list[Config] = config
    else:
        asked: Any = {} if config is None else config
        if chosen:
            arguments.check_settings(asked, chosen)
        configs = training_configs(chosen, preset, asked)
    with run_progress(progress) as watch:
        summary = train_run(
            chosen, configs, folder, watch, Opening(overwrite=overwrite), reward=reward, outputs=outputs, asked=hired
        )
    return end_of(summary, folder, on_interrupt)


def show(summary: Mapping[str, Any]) -> None:
    """Print the table of a summary of `grow`, `train` or `resume`, or of a record of `evaluate`, as commands do.

    Raises InputError if `summary` is none of these.
    """
    keys: dict[str, Callable[[Mapping[str, Any], Console], None]] = {
        "grown_params": print_summary,
        "rounds_done": print_training,
        "together": print_evaluation,
    }
    kind = next((key for key in keys if isinstance(summary, Mapping) and key in summary), None)
    if kind is None:
        raise InputError(
            f"show was given {kind_of(summary)} that is not a summary; give what esper.grow, esper.train, "
            "esper.resume or esper.evaluate returned"
        )
    console = Console()
    keys[kind](summary, console)
    if "error" in summary:
        print_lines(console, f"error: {summary['error']['message']}")


def resume(
    run: str | PathLike[str],
    *,
    task: AnyTask | str | Sequence[AnyTask | str] | None = None,
    controller: Controller | str | None = None,
    reward: str | None = None,
    settings: Mapping[str, Any] | Sequence[str] = (),
    other_data: bool = False,
    progress: Shown = "auto",
    on_interrupt: OnInterrupt = "raise",
    outputs: Sequence[Output] = (),
    workers: int | None = None,
    devices: Sequence[str] = (),
    cluster: str | None = None,
) -> dict[str, Any]:
    """Continue a run of `grow` or `train`, as `esper resume` does, and return its summary.

    The run gets the same numbers as without the break.

    `task` is needed if the task of the run was an object or a function, "path.py:function", because code that only the run
    folder names is not imported. A function may replace an object if it returns the same task. For a training on several
    tasks, give a list. `controller` is needed if it was an object, which must have `state` and `load_state`, or a function
    or class, "path.py:function". `reward` is needed if that of a training was "path.py:function"; a training whose reward
    was an object cannot be resumed. `settings` changes keys of the config, as {"steps": 48} or ["steps=48"]; the change is
    recorded, and a finished run then continues. Without changes the summary of a finished run is returned. Other versions
    of Esper, torch, numpy or Python than at the start cause a `RunWarning`; other data are refused unless `other_data` is
    set. Both are recorded. Raises InputError if the run, the task, its data and the controller do not fit together.
    `progress`, `on_interrupt`, `outputs` and failed runs are as in `grow`; outputs get the rows that the run writes from
    now on. `workers`, `devices` and `cluster` are as in `train`, and may differ from those that the run had before; a
    growth has no `cluster`.
    """
    arguments.check_choice(on_interrupt, "on_interrupt", ("raise", "return"))
    arguments.check_outputs(outputs)
    folder, asked = arguments.to_path(run, "run"), worker_options(workers, devices, cluster, get_task)
    changes = _as_settings(settings)
    before = read_config(folder)
    config = changed(before, changes) if changes else before
    known = finished(folder) if config == before else None
    if known is not None and is_whole(known, is_training(config)):  # a damaged summary is computed again
        wrong = check_events(folder) if config.telemetry.level != "off" else None
        if wrong is not None:
            warn(wrong, RunWarning)
        return end_of(known, folder, on_interrupt)
    opening = Opening(resume=True, other_data=other_data)
    if config != before:
        opening = opening._replace(before=before, settings=tuple(changes))
    given = [] if task is None else [task] if isinstance(task, Task | Mixture | str) else list(task)
    if is_training(config):
        if controller is not None:
            raise InputError(f"{folder} is a training, which makes its own controller; leave controller out")
        paid = reward_of(folder, config, reward)
        tasks = tasks_of(folder, config.tasks, given)
        with run_progress(progress) as watch:
            configs = cohort_configs(config)
            summary = train_run(tasks, configs, folder, watch, opening, reward=paid, outputs=outputs, asked=asked)
        return end_of(summary, folder, on_interrupt)
    if reward is not None:
        raise InputError(f"{folder} is a growth, in which no reward is paid; leave reward out")
    (chosen,) = tasks_of(folder, (config.task,), given)
    if controller is None and is_own_controller(config.controller):
        raise InputError(
            f"{folder} is a run of the controller {config.controller!r}, whose code a run folder may not start; if you trust it, "
            f"give {resume_command(folder, [config.task], config.controller)}"
        )
    mend = f"in Python give one like it, as esper.resume({str(folder)!r}, controller=...)"
    with amended(after=f"; where it was an object made in Python, no command can resume the run: {mend}"):
        client = find_controller(config.controller if controller is None else controller).make(config)
    if "steps" not in config.model_fields_set:  # the new settings give epochs instead of steps
        config = with_steps(config, chosen)
    with run_progress(progress, config.steps, chosen.objective.metric) as sight:
        summary = grow_run(chosen, config, client, folder, sight, opening, outputs, asked)
    return end_of(summary, folder, on_interrupt)


def evaluate(
    controllers: Sequence[str | Controller | Contender] | str | Controller | None = None,
    tasks: Sequence[AnyTask | str] | AnyTask | str = "repair",
    *,
    instances: int = 200,
    seeds: int = 3,
    first: int = 0,
    settings: Mapping[str, Any] | Sequence[str] = (),
    baselines: Sequence[str] = BASELINES[1:],
    out: str | PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Shown = "auto",
    workers: int | None = None,
    devices: Sequence[str] = (),
    cluster: str | None = None,
    ready: Callable[[dict[str, Any]], None] | None = None,
    rivals: Rivals | None = None,
) -> dict[str, Any]:
    """Compare controllers with the rules on held-out instances, as `esper eval` does.

    `controllers` are names, schedule files, run folders of trained controllers, "NAME=FOLDER,FOLDER" for several trainings
    of one controller, "path.py:function" for one of your own, or a `Controller`, of which every population gets a copy as it is
    now; None compares the rules alone. `tasks` are tasks or names. `settings` are config keys for all of them, as {"steps": 12}
    or ["steps=12"]. `baselines` are static networks to compare with (`esper docs baselines`), of the size that the first
    controller grew to, or the heuristic without controllers; () for none. `rivals` are further contenders, which a package adds.

    With `out`, the record, the figure, the report and the grown networks are written to that folder, and a later call uses the
    networks again; `overwrite` allows to replace a record there. `ready` gets the record before it is written, as a disk may be
    full. `workers`, `devices` and `cluster` are as in `train`. Returns the record, the object that `esper eval --json` prints.
    Raises InputError before anything is grown.
    """
    if isinstance(controllers, list | tuple) and not controllers:
        raise InputError(
            f"controllers is {controllers!r}; name one or more, or leave it out to compare the rules of every evaluation alone"
        )
    chosen = [tasks] if isinstance(tasks, Task | Mixture | str) else list(tasks)
    asked = worker_options(workers, devices, cluster, get_task)
    say = (None if asked.is_rank else evaluation_progress(progress)) or unheard
    layers = [*map(parse_setting, _as_settings(settings)), *({"device": device} for device in asked.devices[:1])]
    path = None if out is None or asked.is_rank else arguments.to_path(out, "out")
    with ExitStack() as stack:
        grown = None
        if path is not None:
            stack.enter_context(ended_by_signals())
            grown = stack.enter_context(evaluation_folder(path, say, overwrite=overwrite))
        found = [get_task(each) if isinstance(each, str) else each for each in chosen]
        many = isinstance(controllers, list | tuple) and not isinstance(controllers, Contender)
        listed: Sequence[Any] = [] if controllers is None else controllers if many else [controllers]  # type: ignore[assignment]
        made: list[Contender] = []
        for each in listed:
            if isinstance(each, str):
                made += trainings(each)
            else:
                made.append(each if isinstance(each, Contender) else of_object(each, [own.name for own in made]))
        record = run_evaluation(
            made,
            found,
            instances=instances,
            seeds=seeds,
            first=first,
            settings=layers,
            baselines=baselines,
            rivals=rivals,
            folder=grown,
            watch=say,
            workers=asked,
        )
        if ready is not None and not asked.is_rank:
            ready(record)
        if path is not None:
            config = build_config(found[0].defaults, *layers)
            retry = disk_retry(config, say, path)
            retry(path / FIGURE, lambda: write_atomic(path / FIGURE, draw_evaluation(record)))
            if config.report:
                report_at_end(path, record)
            # last, as a folder with a record is whole
            retry(path / EVALUATION, lambda: write_atomic(path / EVALUATION, to_json(record)))
    return record


def tasks_of(folder: Path, names: Sequence[str], given: Sequence[AnyTask | str]) -> list[AnyTask]:
    """Return the tasks of a resumed run: the given ones, and Esper's by name. InputError if one is missing, or not of the run."""
    own = [get_task(each) if isinstance(each, str) else each for each in given]
    brought = {task.name: task for task in own}
    others = [name for name in brought if name not in names]
    chosen: list[AnyTask] = []
    for name in names:
        if name in brought:
            chosen.append(brought.pop(name))
        elif is_reference(name) or not is_named_task(name):
            if len(others) != 1 or not (is_reference(name) or is_reference(others[0])):
                given = f", not on {', '.join(map(repr, brought))}" if brought else ""
                said = f"{folder} is a run on the task {name!r}{given}"
                if is_reference(name):
                    mend = f"if you trust it, give {resume_command(folder, [name])}"
                    raise InputError(f"{said}, whose code a run folder may not start; {mend}")
                command = f"esper resume {shlex.quote(str(folder))} --task path.py:function"
                raise InputError(
                    f"{said}, which was made in Python and is not in the folder; give the same task again, as "
                    f"esper.resume({str(folder)!r}, task=...) in Python, or as {command}, where the function returns it"
                )
            chosen.append(replace(brought.pop(others.pop()), name=name))  # the same task from another source
        else:
            chosen.append(get_task(name))
    if brought:
        raise InputError(
            f"{folder} is a run on {', '.join(names)}, not on {', '.join(brought)}; give a task of the run"
        )
    return chosen


def _as_settings(settings: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Write settings in the form of `--set`. Values of a mapping, nested or not, become JSON, which is valid YAML."""
    if isinstance(settings, Mapping):
        return [f"{key}={json.dumps(value)}" for key, value in dotted(settings)]
    return [settings] if isinstance(settings, str) else list(settings)


def end_of(summary: dict[str, Any], folder: Path | None, on_interrupt: OnInterrupt) -> dict[str, Any]:
    """Return the summary; write the report, warn of a failed run, and raise KeyboardInterrupt as `on_interrupt` says."""
    if summary["status"] == WORKER:
        return summary
    if folder is not None:
        report_at_end(folder)
    if summary["status"] == "failed":
        warn(f"the run has failed: {summary['error']['message']}", RunWarning)
    if summary["status"] != "interrupted" or on_interrupt == "return":
        return summary
    if folder is None:
        raise KeyboardInterrupt("the run was interrupted")
    config, client = read_config(folder), summary.get("controller")  # the summary of a training has no such key
    names = config.tasks or (config.task,)
    # those that were objects
    made = ["task"] * any(not is_reference(name) and not is_named_task(name) for name in names)
    if client is not None and not (
        is_own_controller(client) or client.partition(":")[0] in controller_names() or Path(client).exists()
    ):
        made.append("controller")
    call = resume_call(folder, names, made, config.controller)
    raise KeyboardInterrupt(f"the run was interrupted and its folder is complete; continue it with {call}")


def to_task(task: Any) -> AnyTask:
    """Return the task itself, or the task of a name. InputError if it is neither."""
    found = get_task(task) if isinstance(task, str) else task
    if not isinstance(found, Task | Mixture):
        raise InputError(
            f"the task is {show_value(found)}; give the name of one of `esper tasks`, or make one with esper.task(...)"
        )
    return found


def load(folder: str | PathLike[str], host: Callable[[], nn.Module] | None = None) -> GrownNetwork:
    """Return a grown network, in evaluation mode, from a folder that a run or `esper export` wrote: (B, ...) -> (B, C).

    `folder` is a run folder, such as "runs/x", or that of one network, such as "runs/x/models/env-000". A run gives the
    network of its best environment, chosen on the validation split; a line on stderr says which. The network takes
    features, and `predict` returns labels, in the form in which the task got them.

    `host` is the factory of the host that the task was made with; None for hosts of Esper's own tasks. Nothing in the folder is
    executed. Raises InputError if a file is missing or damaged, or does not fit the host.
    """
    path = arguments.to_path(folder, "folder")
    if host is not None:
        arguments.check_callable(host, "host", "the function that makes the host")
    if is_run(path):
        path = _best(path)
    topology = read_topology(path)
    if host is None:
        named = topology["host"]
        if named is None:
            raise InputError(
                f"{path} holds a network on a host of your own; pass its factory: esper.load(folder, host=...)"
            )
        host = host_from(named["name"], named["arguments"])
        with torch.device("meta"), drawn_with(0):  # counted without memory for the parameters
            check_size(path, count(host()))
    return load_network(path, host)


def _best(run: Path) -> Path:
    """Return the folder of the network of a run's best environment, and name it on stderr. InputError if there is none."""
    check_links(run)
    if is_training(read_config(run)):
        raise InputError(
            f"{run} is a training, which holds a controller and no networks; grow some with it, as "
            f"esper.grow(task, controller={str(run)!r})"
        )
    summary = open_run(run).summary
    if summary is None:
        raise InputError(
            f"{run} has not ended, so no environment is its best; continue it with esper.resume({str(run)!r})"
        )
    best = summary.get("best") if isinstance(summary, dict) else None
    env = best.get("env") if isinstance(best, dict) else None
    names = (BEST, f"env-{env:03d}") if isinstance(env, int) else ()
    found = [path for name in names if ((path := find_folder(run / MODELS / name)) / TOPOLOGY).is_file()]
    if not found or best is None:
        raise InputError(
            f"{run} holds no network of its best environment; grow it with models 'best' or 'all' (--models best), or load "
            f"another network by its folder, as esper.load({str(run / MODELS / 'env-000')!r})"
        )
    said = f"environment {env} of {run}, the best by {best.get('select')} on the validation split"
    print(printable(said), file=sys.stderr)
    return found[0]


def check_rows(task: AnyTask) -> dict[str, str]:
    """Return the modules of a task whose results for one environment depend on the other environments, if only in the last bit.

    Keys are segments of the host ("segments.1") and blueprints of the menu with a blend ("wide, GATE"); values say where the
    difference shows. An empty dict means that every environment is bitwise the same in any population on the CPU of this
    machine. The check runs stacks of one to five rows and a few batch sizes, and may miss other differences.
    """
    task = to_task(task)
    instance = task.instance(task.keys("training").start)
    host = drawn_host(task.largest)
    splits, row, dtype = [instance.train], np.zeros(1, np.int64), dtype_of(host)
    examples = stack_splits(splits, row, Format(task.inputs, torch.device("cpu"), dtype, scaling=instance.scaling))
    found = segments_that_vary(task.largest, picked(examples.x, (0, slice(CHECKED))))
    # Modules on maps and volumes run row by row, in separate calls.
    streams = sorted({(slot.kind, slot.width) for slot in host.slots if slot.kind not in CONVOLVED})
    for kind, width in streams:
        for name in task.menu:
            entry = BLUEPRINTS.get((kind, name))
            for blend, where in blends_that_vary(entry, width).items() if entry is not None else ():
                found.setdefault(f"{name}, {blend}", f"{where}, width {width}")
    return found
