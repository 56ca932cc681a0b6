"""The tasks that `esper grow` knows by name."""

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from esper.leyline.errors import InputError
from esper.leyline.task import AnyTask
from esper.tasks import digits, images, repair, small, spirals

TASKS: Mapping[str, Callable[[], AnyTask]] = MappingProxyType(
    {
        "repair": repair.repair,
        "digits": digits.digits,
        "spirals": spirals.spirals,
        "iris": small.iris,
        "wine": small.wine,
        "breast-cancer": small.breast_cancer,
        "digits-image": images.digits_image,
        "cifar10": images.cifar10,
    }
)

_SUMMARIES = {
    "repair": repair.SUMMARY,
    "digits": digits.SUMMARY,
    "spirals": spirals.SUMMARY,
    "iris": small.IRIS,
    "wine": small.WINE,
    "breast-cancer": small.BREAST_CANCER,
    "digits-image": images.DIGITS,
    "cifar10": images.CIFAR10,
}


def task_names() -> dict[str, str]:
    """Name and one-line summary of every task, without reading any data."""
    return dict(_SUMMARIES)


def get_task(name: str) -> AnyTask:
    """Build the task of that name. InputError where there is none."""
    if name not in TASKS:
        near = difflib.get_close_matches(str(name), TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"unknown task {name!r}; the tasks are {', '.join(sorted(TASKS))}{hint}")
    return TASKS[name]()
