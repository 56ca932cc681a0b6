"""The calls that most programs need: grow a population, load a grown network, and check a host and seeds of one's own."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import nn

from esper.calls import OnInterrupt, end_of
from esper.karn.progress import Shown, growing, learning
from esper.kasmina.blueprints import count, drawn_with, get_blueprint
from esper.kasmina.export import check_size, load_network, read_topology
from esper.kasmina.host import SegmentedHost, dtype_of
from esper.kasmina.invariance import blends_that_vary, segments_that_vary
from esper.kasmina.network import GrownNetwork
from esper.leyline.arguments import check_callable, check_choice, check_settings, check_switch, check_task, to_path
from esper.leyline.batches import picked
from esper.leyline.config import Config, RewardConfig
from esper.leyline.errors import InputError
from esper.leyline.length import with_steps
from esper.leyline.protocols import PolicyClient, Reward
from esper.leyline.task import AnyTask, Mixture, Task
from esper.runs.configuration import growth_config, training_configs
from esper.runs.grow import grow as grow_run
from esper.runs.resume import Opening
from esper.runs.train import train as train_run
from esper.simic.rewards import get_reward
from esper.tamiyo.catalog import get_controller
from esper.tasks.catalog import get_task
from esper.tasks.hosts import host_from
from esper.tolaria.data import stack_splits

CHECKED = 64
"""Examples that `check_rows` runs a host on."""


def grow(
    task: AnyTask | str,
    config: Config | Mapping[str, Any] | None = None,
    *,
    controller: PolicyClient | str | None = None,
    run: str | PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Shown = "auto",
    on_interrupt: OnInterrupt = "raise",
) -> dict[str, Any]:
    """Grow a population on a task, evaluate it on the test split, and write the run folder where one is named.

    `task` is a task, the name of one of `esper tasks`, or "path.py:function". A mapping of config keys goes over the task's own
    defaults; a `Config` is taken as it is, but for the task's name. `controller` is a name, a schedule file or any
    `PolicyClient`; None takes the config's. Returns the summary, the object that `esper grow --json` prints. Raises InputError on
    bad input, before anything is written.

    `progress` shows the steps on stderr: "auto" where that is a terminal, and in a notebook; True anywhere; False nowhere.
    After Ctrl-C (SIGINT or SIGTERM) the run ends behind its step, evaluates what is done and writes the folder; then
    KeyboardInterrupt is raised, or, with `on_interrupt="return"`, the summary returned, whose status is "interrupted".
    Where every environment was rolled back in every step, the summary has the status "failed" and the `error`, which a
    `RunWarning` says too.
    """
    task = to_task(task)
    check_switch(overwrite, "overwrite")
    folder = None if run is None else to_path(run, "run")
    check_choice(on_interrupt, "on_interrupt", ("raise", "return"))
    if not isinstance(config, Config):
        asked = {} if config is None else config
        check_settings(asked, [task])
        config = growth_config(task, asked, {"controller": controller} if isinstance(controller, str) else {})
    named = {"task": task.name}
    if controller is not None:
        named["controller"] = controller if isinstance(controller, str) else type(controller).__name__
    config = with_steps(config.model_copy(update=named), task)
    if controller is None or isinstance(controller, str):
        controller = get_controller(config.controller, config)
    if not isinstance(controller, PolicyClient) or isinstance(controller, type):
        raise InputError("the controller has no act, store and update; give a name, a schedule file or a PolicyClient")
    with growing(progress, config.steps, task.objective.metric) as watch:
        summary = grow_run(task, config, controller, folder, watch, Opening(overwrite=overwrite))
    return end_of(summary, folder, on_interrupt)


def train(
    tasks: AnyTask | str | Sequence[AnyTask | str],
    config: Mapping[str, Any] | None = None,
    *,
    preset: str = "quick",
    reward: Callable[[RewardConfig], Reward] = get_reward,
    run: str | PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Shown = "auto",
    on_interrupt: OnInterrupt = "raise",
) -> dict[str, Any]:
    """Train a controller by growing populations of one task or several, and write the run folder where one is named.

    `tasks` are tasks or names of tasks, as in `grow`. A mapping of config keys goes over the tasks' own defaults and those of
    training and the preset. `reward` makes what the controller is paid by, one for each task: any callable from an `Outcome` to
    named components. Returns the summary; `esper.grow(task, controller=run)` uses what was trained. Raises InputError on bad
    input, before anything is written, and `esper.LearningError` where an update cannot be trusted. `progress` and
    `on_interrupt` are as in `grow`.
    """
    chosen = [to_task(task) for task in (tasks if isinstance(tasks, list | tuple) else [tasks])]
    check_switch(overwrite, "overwrite")
    check_callable(reward, "reward", "a function from a RewardConfig to what pays the controller")
    check_choice(on_interrupt, "on_interrupt", ("raise", "return"))
    folder = None if run is None else to_path(run, "run")
    asked = {} if config is None else config
    if chosen:
        check_settings(asked, chosen)
    configs = training_configs(chosen, preset, asked)
    with learning(progress) as watch:
        summary = train_run(chosen, configs, folder, watch, Opening(overwrite=overwrite), reward=reward)
    return end_of(summary, folder, on_interrupt)


def to_task(task: Any) -> AnyTask:
    """A task as it is, or by its name. InputError where it is neither."""
    found = get_task(task) if isinstance(task, str) else task
    check_task(found)
    assert isinstance(found, Task | Mixture)
    return found


def load(folder: str | PathLike[str], host: Callable[[], nn.Module] | None = None) -> GrownNetwork:
    """A grown network, in evaluation mode, from the folder that a run or `esper export` wrote: (B, ...) -> (B, C).

    It takes features as the task was given them; `predict` returns labels as the task was given them.

    `host` is the factory that the task was made with; hosts of Esper's own tasks are known by name. Nothing in the folder
    is executed. Raises InputError where a file is missing, damaged, or does not fit.
    """
    path = to_path(folder, "folder")
    if host is not None:
        check_callable(host, "host", "the function that makes the host")
    topology = read_topology(path)
    if host is None:
        named = topology["host"]
        if named is None:
            raise InputError(
                f"{path} holds a network on a host of your own; pass its factory: esper.load(folder, host=...)"
            )
        host = host_from(named["name"], named["arguments"])
        with torch.device("meta"), drawn_with(0):  # counted without room for a single number
            check_size(path, count(host()))
    return load_network(path, host)


def check_rows(task: AnyTask) -> dict[str, str]:
    """The modules of a task whose numbers for one environment depend, if only in the last bit, on the others beside it.

    Names segments of the host ("segments.1") and blueprints of the menu under a blend ("wide, GATE"), each with where that
    shows; empty where every environment is bitwise the same in any population on this machine's CPU. What it finds is only
    as much as stacks of one to five rows and a few batch sizes show.
    """
    check_task(task)
    instance = task.instance(task.keys("training").start)
    with drawn_with(0):
        host = task.largest()
    assert isinstance(host, SegmentedHost)
    splits, row, dtype = [instance.train], np.zeros(1, np.int64), dtype_of(host)
    examples = stack_splits(splits, row, task.inputs, torch.device("cpu"), scaling=instance.scaling, dtype=dtype)
    found = segments_that_vary(task.largest, picked(examples.x, (0, slice(CHECKED))))
    for width in sorted({slot.width for slot in host.slots}):
        for name in task.menu:
            for blend, where in blends_that_vary(get_blueprint(name), width).items():
                found.setdefault(f"{name}, {blend}", f"{where}, width {width}")
    return found
