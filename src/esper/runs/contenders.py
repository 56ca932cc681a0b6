"""Controllers that take part in an evaluation, and the populations that they grow. E environments."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config import Config, build_config
from esper.leyline.controller_settings import check_controller_settings
from esper.leyline.length import with_steps
from esper.leyline.protocols import PolicyClient
from esper.leyline.task import AnyTask
from esper.leyline.view import Floats, Outcome
from esper.simic.rewards import objective
from esper.store.reading import read_named
from esper.tamiyo.catalog import CONTROLLERS, get_controller, settings_of, trained, with_sensors
from esper.tamiyo.controller import FACTS, WEIGHTS
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.play import play

ROWS = 64
"""Environments that are grown together; the speed of a step is flat beyond, and memory is not [environments]."""

RULES = ("never", "random-valid", "heuristic")

BEST = "best schedule"
"""What every evaluation compares with, the fixed schedule found by a search among them."""

Say = Callable[[str], None]


class Contender(NamedTuple):
    """A controller that takes part."""

    name: str
    settings: Mapping[
        str, Any
    ]  # over the task's and the evaluation's: its controller, and keys of `leyline.controller_settings`
    make: Callable[[Config], PolicyClient]  # a fresh controller for a population, which must not learn
    content: str = ""  # what `make` reads beside the config; kept results of other content are not taken for its own


def named(name_or_path: str) -> Contender:
    """A contender by the name of its controller, or from a schedule file or the folder of a trained one.

    What is read of the latter two is part of who it is; whatever else a folder holds is not looked at.
    """
    path, folder, content = Path(name_or_path), trained(name_or_path), hashlib.sha256()
    parts = [Path(FACTS), Path(WEIGHTS)] if folder is not None else [Path()]
    for part in [] if name_or_path in CONTROLLERS else parts:
        file = (folder or path) / part
        if file.is_file():
            data = read_named(file, 64 * 2**20, "give a schedule file, or the folder of a trained controller")
            content.update(f"{part} {len(data)} ".encode() + data)
    return Contender(
        name_or_path,
        {**settings_of(name_or_path), "controller": name_or_path},
        lambda config: get_controller(name_or_path, config),
        content.hexdigest(),
    )


def grow_contender(
    task: AnyTask, contender: Contender, config: Config, instance: NDArray[np.int64] | None = None
) -> tuple[VectorizedEngine, Outcome, float]:
    """Grow one population for an episode; returns it with its last outcome, and how long the steps took [s].

    instance (E,) names its instances; without it they are those of the config.
    """
    client = contender.make(config)
    engine = VectorizedEngine(task, with_sensors(config, client))
    engine.reset(instance)
    begin = time.perf_counter()
    outcome = play(engine, client)
    assert outcome is not None, "an episode has a step"
    exported = engine.finish()
    if exported is not None:
        outcome = outcome._replace(exported=exported, seeds=engine.view().seeds)
    return engine, outcome, time.perf_counter() - begin


def probe_objective(outcome: Outcome, config: Config) -> Floats:
    """(E,) J on the probe split, of the networks that would be exported."""
    assert outcome.exported is not None, "the episode is not over"
    metric, loss, added = outcome.exported
    value = metric if config.reward.objective == "metric" else -loss
    return objective(value, added, outcome.host_params, config.reward.rent, config.reward.rent_size)


def contender_config(
    task: AnyTask,
    contender: Contender,
    settings: Sequence[Mapping[str, Any]],
    seed: int,
    part: str,
    first: int,
    envs: int,
) -> Config:
    """The run of a contender on some instances. InputError where it brings a key that all contenders must share."""
    ours = {
        "task": task.name,
        "seed": seed,
        "baselines": [],
        "envs": envs,
        "instances": part,
        "first_instance": first,
        "telemetry": {"level": "off"},
        "models": "none",
    }
    check_controller_settings(
        {name: value for name, value in contender.settings.items() if name != "controller"}, contender.name
    )
    return with_steps(build_config(task.defaults, *settings, contender.settings, ours), task)


def tell(watch: Say | None, text: str) -> None:
    """Say a line to whoever listens."""
    if watch is not None:
        watch(text)
