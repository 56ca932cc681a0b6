"""Find the built-in tasks by name, and other tasks by reference."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from esper.leyline.data.task import AnyTask, Mixture, Task
from esper.leyline.messages import InputError, did_you_mean, kind_of
from esper.leyline.plugins import TASKS as GROUP
from esper.leyline.plugins import lacking, load_plugin, plugins
from esper.leyline.reference import is_reference, load_reference, unnamed_function
from esper.tasks import images, repair, small, spirals, text

_BUILT_IN: Mapping[str, tuple[Callable[[], AnyTask], str]] = {
    "repair": (repair.repair, repair.SUMMARY),
    "digits": (small.digits, small.SUMMARY),
    "digits-narrow": (small.digits_narrow, small.NARROW),
    "spirals": (spirals.spirals, spirals.SUMMARY),
    "spirals-narrow": (spirals.spirals_narrow, spirals.NARROW),
    "spirals-trained": (spirals.spirals_trained, spirals.TRAINED),
    **{name: (partial(small.classical, name), summary) for name, summary in small.CLASSICAL_SUMMARIES.items()},
    "digits-image": (images.digits_image, images.DIGITS),
    "digits-image-narrow": (images.digits_image_narrow, images.DIGITS_NARROW),
    "cifar10": (images.cifar10, images.CIFAR10),
    "stdlib-text": (text.stdlib_text, text.SUMMARY),
    "tinystories": (text.tinystories, text.STORIES),
}

TASKS: Mapping[str, Callable[[], AnyTask]] = MappingProxyType({name: build for name, (build, _) in _BUILT_IN.items()})
"""The built-in tasks."""


def task_names() -> dict[str, str]:
    """Return name and one-line summary of every task that has a name: built-in ones, then those of plug-ins. Reads no data."""
    added = {name: (inspect.getdoc(load_plugin(GROUP, name)) or "").partition("\n")[0] for name in plugins(GROUP)}
    return {name: summary for name, (_, summary) in _BUILT_IN.items()} | added


def is_named_task(name: str) -> bool:
    """Return whether `get_task` knows the name without being given code."""
    return name in TASKS or name in plugins(GROUP)


def get_task(name: str) -> AnyTask:
    """Build the task of this name, or the task that the function at `path.py:function` or `module:function` returns.

    A package adds names by entry points of the group `esper.tasks` (`esper docs plugins`). Raises InputError for an unknown
    name, and UserCodeError if the referenced code raises an error of its own.
    """
    if is_reference(name):
        made = load_reference(name, "task", "what esper.task(...) returns", Task | Mixture)
        if not isinstance(made, Task | Mixture):
            raise InputError(f"{name} returned {kind_of(made)}; return what esper.task(...) returns")
        return replace(made, name=name)
    if name in plugins(GROUP):
        build: Callable[[], AnyTask] = load_plugin(GROUP, name)
        return build()
    if name not in TASKS:
        if name.endswith(".py"):
            raise InputError(unnamed_function(name, "task"))
        known = (*TASKS, *plugins(GROUP))
        hint = did_you_mean(name, known) or lacking(str(name))
        raise InputError(
            f"unknown task {name!r}; the tasks are {', '.join(sorted(known))}, and path.py:function or module:function for one "
            "of your own" + (f"; {hint}" if hint else "")
        )
    return TASKS[name]()
