"""The tasks that `esper grow` knows by name."""

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from esper.leyline.errors import InputError
from esper.leyline.resuming import is_reference
from esper.leyline.task import AnyTask
from esper.tasks import digits, images, repair, small, spirals, trained
from esper.tasks.reference import load_task, unnamed_function

TASKS: Mapping[str, Callable[[], AnyTask]] = MappingProxyType(
    {
        "repair": repair.repair,
        "digits": digits.digits,
        "digits-narrow": digits.digits_narrow,
        "spirals": spirals.spirals,
        "spirals-narrow": spirals.spirals_narrow,
        "spirals-trained": trained.spirals_trained,
        "iris": small.iris,
        "iris-plain": partial(small.plain, small.iris, small.IRIS),
        "wine": small.wine,
        "wine-plain": partial(small.plain, small.wine, small.WINE),
        "breast-cancer": small.breast_cancer,
        "breast-cancer-plain": partial(small.plain, small.breast_cancer, small.BREAST_CANCER),
        "digits-image": images.digits_image,
        "digits-image-narrow": images.digits_image_narrow,
        "cifar10": images.cifar10,
    }
)

_SUMMARIES = {
    "repair": repair.SUMMARY,
    "digits": digits.SUMMARY,
    "digits-narrow": digits.NARROW,
    "spirals": spirals.SUMMARY,
    "spirals-narrow": spirals.NARROW,
    "spirals-trained": trained.SUMMARY,
    **{
        name + end: summary.format(data)
        for name, data in {"iris": small.IRIS, "wine": small.WINE, "breast-cancer": small.BREAST_CANCER}.items()
        for end, summary in {"": small.SUMMARY, "-plain": small.PLAIN}.items()
    },
    "digits-image": images.DIGITS,
    "digits-image-narrow": images.DIGITS_NARROW,
    "cifar10": images.CIFAR10,
}


def task_names() -> dict[str, str]:
    """Name and one-line summary of every task, without reading any data."""
    return dict(_SUMMARIES)


def get_task(name: str) -> AnyTask:
    """Build the task of that name, or the one that the function at `path.py:function` or `module:function` returns.

    InputError where there is none; UserCodeError where that function raises another error.
    """
    if is_reference(name):
        return load_task(name)
    if name not in TASKS:
        if name.endswith(".py"):
            raise InputError(unnamed_function(name))
        near = difflib.get_close_matches(str(name), TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"unknown task {name!r}; the tasks are {', '.join(sorted(TASKS))}, and path.py:function or module:function for one "
            f"of your own{hint}"
        )
    return TASKS[name]()
