"""Make the controllers of an evaluation, and the populations that they grow. E environments."""

import copy
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config.tree import Config
from esper.leyline.data.task import AnyTask
from esper.leyline.lifecycle.view import Outcome
from esper.leyline.messages import InputError, typed_line
from esper.leyline.protocols import Controller, as_controller
from esper.tamiyo.catalog import find_controller, get_controller, with_sensors
from esper.tolaria.engine import Observer, VectorizedEngine, play

ROWS = 64
"""Number of environments that are grown together. More would need more memory and would not be faster."""

RULES = ("never", "random-valid", "heuristic")
"""Every evaluation compares with them."""


class Contender(NamedTuple):
    """Describes a controller of an evaluation."""

    name: str  # name in the record
    # config of its runs, over that of the task and of the evaluation: keys of
    # `leyline.config.OF_CONTROLLERS`, and `controller`
    settings: Mapping[str, Any]
    make: Callable[[Config], Controller]  # from a config to a new controller, which must not learn
    content: str = ""  # digest of the files that `make` reads; stored results of another content are not reused
    group: str = ""  # name of the controller of which this is one of several trainings; empty for a single one
    # number of episodes that it was trained or searched with, 0 for a rule; None if unknown
    episodes: int | None = None


def trainings(text: str) -> list[Contender]:
    """Make contenders from a name or path, or of several trainings, by paths or patterns, from `NAME=PATH,PATH`."""
    group, given, rest = text.partition("=")
    if not given or Path(text).exists():
        return [named(text)]
    parts = [part.strip() for part in rest.split(",")]
    paths = [path for part in parts for path in (sorted(glob(part)) if has_magic(part) else [part])]
    if not group or not paths or "" in paths or len(set(paths)) < len(paths):
        found = f"names the trainings {', '.join(paths)}" if any(paths) else "names no training that is there"
        raise InputError(f"{text!r} {found}; give NAME=PATH,PATH with a name, and each training of it once")
    return [named(path)._replace(name=f"{group}: {path}", group=group) for path in paths]


def named(name_or_path: str) -> Contender:
    """Make a contender from the name of a controller, a schedule file, the folder of a trained controller, or a reference."""
    spec = find_controller(name_or_path)
    make = partial(get_controller, spec.name)  # by name, so that it can be sent to workers
    return Contender(
        spec.name, {**spec.settings, "controller": spec.name}, make, spec.content(), episodes=spec.episodes
    )


def of_object(controller: Any, taken: Sequence[str] = ()) -> Contender:
    """Make a contender of a controller object, of which every population gets a copy. taken: names of other contenders.

    Its stored results are not reused, because neither its code nor its state can be compared with those that made them.
    """
    as_controller(controller, "a controller of the evaluation is")
    name = type(controller).__name__
    number = 1 + sum(each == name or each.startswith(f"{name} ") for each in taken)
    try:
        copied = copy.deepcopy(controller)
    except Exception as error:  # of the user's class
        raise InputError(
            f"the controller {name} cannot be copied for every population ({typed_line(error)}); give it as path.py:function, "
            "where the function makes a new one"
        ) from None
    shown = name if number == 1 else f"{name} {number}"
    return Contender(shown, {"controller": shown}, partial(_copied, copied), secrets.token_hex(16), episodes=None)


def _copied(controller: Any, config: Config) -> Controller:
    return as_controller(copy.deepcopy(controller))


def grow_contender(
    task: AnyTask,
    contender: Contender,
    config: Config,
    instance: NDArray[np.int64] | None = None,
    observers: Sequence[Observer] = (),
) -> tuple[VectorizedEngine, Outcome, float]:
    """Grow one population for an episode. Returns the engine, the last outcome, and the duration of the steps [s].

    instance: (E,) keys of the instances; None takes those of the config.
    """
    client = contender.make(config)
    engine = VectorizedEngine(task, with_sensors(config, client))
    engine.reset(instance)
    begin = time.perf_counter()
    outcome = play(engine, client, *observers)
    assert outcome is not None, "an episode must have a step"
    exported = engine.finish()
    if exported is not None:
        outcome = outcome._replace(exported=exported, seeds=engine.view().seeds)
    return engine, outcome, time.perf_counter() - begin


def unheard(line: str) -> None:
    """Ignore a line of progress, where nobody asked for them."""
