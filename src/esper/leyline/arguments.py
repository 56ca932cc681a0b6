"""Arguments of the Python calls: each is taken as it is meant, or refused in one sentence."""

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from esper.leyline.config_input import show
from esper.leyline.errors import InputError
from esper.leyline.task import AnyTask, Mixture, Task


def to_path(value: str | PathLike[str], name: str) -> Path:
    """A path that a person gives. InputError where it is none, or empty."""
    path = fspath(value) if isinstance(value, str | PathLike) else None
    if not isinstance(path, str) or not path:
        raise InputError(f"{name} is {show(value)}; give the path of a folder, such as 'runs/first'")
    return Path(path)


def check_switch(value: Any, name: str) -> None:
    """InputError where a value is neither True nor False."""
    if not isinstance(value, bool):
        raise InputError(f"{name} is {show(value)}; give True or False")


def check_choice(value: Any, name: str, choices: Sequence[str]) -> None:
    """InputError where a value is none of the choices."""
    if value not in choices:
        raise InputError(f"{name} is {show(value)}; give one of {', '.join(map(repr, choices))}")


def check_callable(value: Any, name: str, what: str) -> None:
    """InputError where a value cannot be called; `what` says what it should be."""
    if not callable(value):
        raise InputError(f"{name} is {show(value)}; give {what}")


def check_task(task: Any) -> None:
    """InputError where a task is none."""
    if not isinstance(task, Task | Mixture):
        raise InputError(
            f"the task is {show(task)}; give the name of one of `esper tasks`, or make one with esper.task(...)"
        )


def check_settings(settings: Any, tasks: Sequence[AnyTask]) -> None:
    """InputError where settings are no mapping, or name another task than those that are given."""
    if not isinstance(settings, Mapping):
        raise InputError(f"config is {show(settings)}; give a mapping of keys to values, such as {{'steps': 24}}")
    names = [task.name for task in tasks]
    if settings.get("task", names[0]) not in names:
        raise InputError(
            f"config names the task {show(settings['task'])}, but the task that is given is {', '.join(map(repr, names))}; "
            "leave the key out"
        )
