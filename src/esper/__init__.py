"""Esper trains neural networks that grow.

    import esper
    summary = esper.grow(esper.get_task("digits"), esper.build_config({"task": "digits"}))
    network = esper.load("runs/demo/models/env-000")

Names are imported when they are first used, so that `esper --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from esper.leyline.distribution import installed_version, warn_of_another

if TYPE_CHECKING:
    from esper.api import check_rows as check_rows
    from esper.api import grow as grow
    from esper.api import load as load
    from esper.api import train as train
    from esper.kasmina.blueprints import blueprint as blueprint
    from esper.kasmina.host import SegmentedHost as SegmentedHost
    from esper.kasmina.layers import Linear as Linear
    from esper.leyline.actions import Actions as Actions
    from esper.leyline.actions import Op as Op
    from esper.leyline.config import Config as Config
    from esper.leyline.config import build_config as build_config
    from esper.leyline.errors import InputError as InputError
    from esper.leyline.slots import SlotSpec as SlotSpec
    from esper.leyline.task import Task as Task
    from esper.runs import evaluate as evaluate
    from esper.runs import resume as resume
    from esper.tamiyo.catalog import get_controller as get_controller
    from esper.tasks.catalog import get_task as get_task
    from esper.tasks.custom import task_from as task  # noqa: F401
    from esper.tolaria.engine import VectorizedEngine as VectorizedEngine

_HOME = {
    "Actions": "leyline.actions",
    "Config": "leyline.config",
    "InputError": "leyline.errors",
    "Linear": "kasmina.layers",
    "Op": "leyline.actions",
    "SegmentedHost": "kasmina.host",
    "SlotSpec": "leyline.slots",
    "Task": "leyline.task",
    "VectorizedEngine": "tolaria.engine",
    "blueprint": "kasmina.blueprints",
    "check_rows": "api",
    "build_config": "leyline.config",
    "evaluate": "runs",
    "get_controller": "tamiyo.catalog",
    "get_task": "tasks.catalog",
    "grow": "api",
    "load": "api",
    "resume": "runs",
    "task": "tasks.custom",
    "train": "api",
}
__all__ = sorted(_HOME)


warn_of_another()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return installed_version() or "unknown"
    if name not in _HOME:
        raise AttributeError(f"module 'esper' has no attribute {name!r}")
    found = getattr(import_module(f"esper.{_HOME[name]}"), "task_from" if name == "task" else name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
