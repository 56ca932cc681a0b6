"""The tasks that `esper run --task` knows by name."""

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from esper.leyline.errors import InputError
from esper.leyline.task import Task
from esper.tasks import digits, spirals

TASKS: Mapping[str, Callable[[], Task]] = MappingProxyType({"digits": digits.digits, "spirals": spirals.spirals})

_SUMMARIES = {"digits": digits.SUMMARY, "spirals": spirals.SUMMARY}


def task_names() -> dict[str, str]:
    """Name and one-line summary of every task, without reading any data."""
    return dict(_SUMMARIES)


def get_task(name: str) -> Task:
    """Build the task of that name. InputError where there is none."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"unknown task {name!r}; the tasks are {', '.join(sorted(TASKS))}{hint}")
    return TASKS[name]()
