"""The public functions grow, train, load and check_rows."""

import sys
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from esper.calls import OnInterrupt, end_of
from esper.karn.reader import open_run
from esper.karn.terminal.progress import Shown, growth_progress, training_progress
from esper.kasmina.blueprints import BLUEPRINTS, count, drawn_with
from esper.kasmina.host import SegmentedHost, dtype_of
from esper.kasmina.network.export import TOPOLOGY, check_size, load_network, read_topology
from esper.kasmina.network.grown_network import GrownNetwork
from esper.kasmina.stack.invariance import blends_that_vary, segments_that_vary
from esper.leyline.config.arguments import (
    check_callable,
    check_choice,
    check_outputs,
    check_settings,
    check_switch,
    check_task,
    to_path,
)
from esper.leyline.config.tree import Config, RewardConfig
from esper.leyline.data.batches import picked
from esper.leyline.data.task import AnyTask, Mixture, Task, with_steps
from esper.leyline.errors import InputError
from esper.leyline.lifecycle.streams import Kind
from esper.leyline.protocols import Controller, Reward
from esper.leyline.text import printable
from esper.nissa.outputs import Output
from esper.runs.configuration import growth_config, training_configs
from esper.runs.folder.resume import Opening, is_training, read_config
from esper.runs.grow import grow as grow_run
from esper.runs.training.train import train as train_run
from esper.runs.workers.workers import worker_options
from esper.simic.rewards import get_reward, load_reward
from esper.store.disk import find_folder
from esper.store.files import BEST, MODELS, check_links, is_run
from esper.tamiyo.catalog import find_controller
from esper.tasks.catalog import get_task
from esper.tasks.hosts.factories import host_from
from esper.tolaria.stacked.data import stack_splits

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
    keeps, also without `run`. If one raises an error, a `RunWarning` is issued, and the run goes on without it.
    """
    task = to_task(task)
    check_outputs(outputs)
    check_switch(overwrite, "overwrite")
    folder = None if run is None else to_path(run, "run")
    check_choice(on_interrupt, "on_interrupt", ("raise", "return"))
    if isinstance(config, Config):
        found = find_controller(config.controller if controller is None else controller)
        config = with_steps(config.model_copy(update={"task": task.name, "controller": found.name}), task)
    else:
        asked = {} if config is None else config
        check_settings(asked, [task])
        config, found = growth_config(task, asked, controller=controller)
    client = found.make(config)
    with growth_progress(progress, config.steps, task.objective.metric) as watch:
        summary = grow_run(task, config, client, folder, watch, Opening(overwrite=overwrite), outputs)
    return end_of(summary, folder, on_interrupt)


def train(
    tasks: AnyTask | str | Sequence[AnyTask | str],
    config: Mapping[str, Any] | None = None,
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
    and of the preset. `reward` is called with the `RewardConfig` of each task and returns its reward, a function from an
    `Outcome` to named components, arrays of shape (E,); or it is the place of such a function, "path.py:function"
    (`esper docs own-controller`). Returns the summary; `esper.grow(task, controller=run)` uses the trained controller. Raises
    InputError on bad input, before anything is written, and `esper.LearningError` if an update of the policy fails.
    `progress`, `on_interrupt` and `outputs` are as in `grow`.

    With `workers`, that many processes play the environments, and with `devices`, such as ("cuda:0", "cuda:1"), one on each;
    `cluster` is "ray", a "ray://" address, or "torchrun" (`esper docs actors`). Results do not depend on the number of workers.
    """
    check_outputs(outputs)
    actors = worker_options(workers, devices, cluster, get_task)
    chosen = [to_task(task) for task in (tasks if isinstance(tasks, list | tuple) else [tasks])]
    check_switch(overwrite, "overwrite")
    if isinstance(reward, str):
        reward = load_reward(reward)
    check_callable(reward, "reward", "a function from a RewardConfig to what pays the controller, or path.py:function")
    check_choice(on_interrupt, "on_interrupt", ("raise", "return"))
    folder = None if run is None else to_path(run, "run")
    asked = {} if config is None else config
    if chosen:
        check_settings(asked, chosen)
    configs = training_configs(chosen, preset, asked)
    with training_progress(progress) as watch:
        summary = train_run(
            chosen, configs, folder, watch, Opening(overwrite=overwrite), reward=reward, outputs=outputs, asked=actors
        )
    return end_of(summary, folder, on_interrupt)


def to_task(task: Any) -> AnyTask:
    """The task itself, or the task of a name. InputError if it is neither."""
    found = get_task(task) if isinstance(task, str) else task
    check_task(found)
    assert isinstance(found, Task | Mixture)
    return found


def load(folder: str | PathLike[str], host: Callable[[], nn.Module] | None = None) -> GrownNetwork:
    """A grown network, in evaluation mode, from a folder that a run or `esper export` wrote: (B, ...) -> (B, C).

    `folder` is a run folder, such as "runs/x", or that of one network, such as "runs/x/models/env-000". A run gives the network
    of its best environment, chosen on the validation split; a line on stderr says which. The network
    takes features, and `predict` returns labels, in the form in which the task got them.

    `host` is the factory of the host that the task was made with; None for hosts of Esper's own tasks. Nothing in the folder is
    executed. Raises InputError if a file is missing or damaged, or does not fit the host.
    """
    path = to_path(folder, "folder")
    if host is not None:
        check_callable(host, "host", "the function that makes the host")
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
    """The folder of the network of a run's best environment. A line on stderr says which environment that is.

    InputError if the run has not ended, or holds no such network.
    """
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
    """The modules of a task whose results for one environment depend on the other environments, if only in the last bit.

    Keys are segments of the host ("segments.1") and blueprints of the menu with a blend ("wide, GATE"); values say where the
    difference shows. An empty dict means that every environment is bitwise the same in any population on the CPU of this
    machine. The check runs stacks of one to five rows and a few batch sizes, and may miss other differences.
    """
    check_task(task)
    instance = task.instance(task.keys("training").start)
    with drawn_with(0):
        host = task.largest()
    assert isinstance(host, SegmentedHost)
    splits, row, dtype = [instance.train], np.zeros(1, np.int64), dtype_of(host)
    examples = stack_splits(splits, row, task.inputs, torch.device("cpu"), scaling=instance.scaling, dtype=dtype)
    found = segments_that_vary(task.largest, picked(examples.x, (0, slice(CHECKED))))
    # Modules on maps run row by row, in separate calls.
    streams = sorted({(slot.kind, slot.width) for slot in host.slots if slot.kind != Kind.MAP})
    for kind, width in streams:
        for name in task.menu:
            entry = BLUEPRINTS.get((kind, name))
            for blend, where in blends_that_vary(entry, width).items() if entry is not None else ():
                found.setdefault(f"{name}, {blend}", f"{where}, width {width}")
    return found
