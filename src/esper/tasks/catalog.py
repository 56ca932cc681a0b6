"""The built-in tasks by name, and tasks by reference."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from esper.leyline.errors import InputError
from esper.leyline.reference import load_reference, unnamed_function
from esper.leyline.resuming import is_reference
from esper.leyline.task import AnyTask, Mixture, Task
from esper.tasks import digits, heal, heal_bytes, images, repair, small, spirals, tables, text, tinystories, trained
from esper.tasks.healing_hosts import FULL, VECTORS
from esper.tasks.healing_images import IMAGES

_BUILT_IN: Mapping[str, tuple[Callable[[], AnyTask], str]] = {
    "repair": (repair.repair, repair.SUMMARY),
    "repair-full": (repair.repair_full, repair.FULL),
    "repair-tables": (tables.repair_tables, tables.SUMMARY),
    **{
        f"{hosts.name}{suffix}": (partial(build, hosts), summary.format(hosts))
        for hosts in (VECTORS, FULL, IMAGES)
        for suffix, build, summary in (
            ("", heal.heal, heal.FROZEN),
            ("-taught", heal.heal_taught, heal.TAUGHT),
            ("-unfrozen", heal.heal_unfrozen, heal.UNFROZEN),
            ("-scratch", heal.heal_scratch, heal.SCRATCH),
            ("-eora", heal.heal_eora, heal.EORA),
        )
    },
    "heal-bytes": (heal_bytes.heal_bytes, heal_bytes.SUMMARY),
    "heal-bytes-taught": (heal_bytes.heal_bytes_taught, heal_bytes.TAUGHT),
    "heal-bytes-unfrozen": (heal_bytes.heal_bytes_unfrozen, heal_bytes.UNFROZEN),
    "heal-bytes-scratch": (heal_bytes.heal_bytes_scratch, heal_bytes.SCRATCH),
    "heal-bytes-eora": (heal_bytes.heal_bytes_eora, heal_bytes.EORA),
    "digits": (digits.digits, digits.SUMMARY),
    "digits-narrow": (digits.digits_narrow, digits.NARROW),
    "spirals": (spirals.spirals, spirals.SUMMARY),
    "spirals-narrow": (spirals.spirals_narrow, spirals.NARROW),
    "spirals-trained": (trained.spirals_trained, trained.SUMMARY),
    "iris": (small.iris, small.SUMMARY.format(small.IRIS)),
    "iris-plain": (partial(small.plain, small.iris, small.IRIS), small.PLAIN.format(small.IRIS)),
    "wine": (small.wine, small.SUMMARY.format(small.WINE)),
    "wine-plain": (partial(small.plain, small.wine, small.WINE), small.PLAIN.format(small.WINE)),
    "breast-cancer": (small.breast_cancer, small.SUMMARY.format(small.BREAST_CANCER)),
    "breast-cancer-plain": (
        partial(small.plain, small.breast_cancer, small.BREAST_CANCER),
        small.PLAIN.format(small.BREAST_CANCER),
    ),
    "digits-image": (images.digits_image, images.DIGITS),
    "digits-image-narrow": (images.digits_image_narrow, images.DIGITS_NARROW),
    "cifar10": (images.cifar10, images.CIFAR10),
    "stdlib-text": (text.stdlib_text, text.SUMMARY),
    "tinystories": (tinystories.tinystories, tinystories.SUMMARY),
}

TASKS: Mapping[str, Callable[[], AnyTask]] = MappingProxyType({name: build for name, (build, _) in _BUILT_IN.items()})


def task_names() -> dict[str, str]:
    """Name and one-line summary of every built-in task. No data is read."""
    return {name: summary for name, (_, summary) in _BUILT_IN.items()}


def get_task(name: str) -> AnyTask:
    """Build the built-in task of this name, or the task that the function at `path.py:function` or `module:function` returns.

    Raises InputError for an unknown name, and UserCodeError if the referenced code raises an error of its own.
    """
    if is_reference(name):
        made = load_reference(name, "task", "what esper.task(...) returns", Task | Mixture)
        if not isinstance(made, Task | Mixture):
            raise InputError(f"{name} returned a {type(made).__name__}; return what esper.task(...) returns")
        return replace(made, name=name)
    if name not in TASKS:
        if name.endswith(".py"):
            raise InputError(unnamed_function(name, "task"))
        near = difflib.get_close_matches(str(name), TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"unknown task {name!r}; the tasks are {', '.join(sorted(TASKS))}, and path.py:function or module:function for one "
            f"of your own{hint}"
        )
    return TASKS[name]()
