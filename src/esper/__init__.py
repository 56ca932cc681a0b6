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
    from esper.api import check_rows, grow, load, train
    from esper.calls import evaluate, resume, show
    from esper.kasmina.blueprints import blueprint
    from esper.kasmina.host import SegmentedHost
    from esper.kasmina.layers import Linear
    from esper.kasmina.network import GrownNetwork
    from esper.leyline.actions import Actions, Blend, Op
    from esper.leyline.config import Config, RewardConfig, build_config
    from esper.leyline.errors import DataFault, InputError, OutOfMemory, UserCodeError
    from esper.leyline.protocols import PolicyClient, Reward
    from esper.leyline.slots import Kind, SlotSpec, Tap
    from esper.leyline.stages import Stage
    from esper.leyline.task import Mixture, Split, Task
    from esper.leyline.verdicts import Refusal
    from esper.leyline.view import Outcome, Space, View
    from esper.simic.ppo import LearningError
    from esper.tamiyo.catalog import get_controller
    from esper.tasks.catalog import get_task
    from esper.tasks.custom import task_from as task
    from esper.tasks.hosts import cnn, mlp
    from esper.tolaria.engine import VectorizedEngine

    __version__: str

_HOME = {
    "Actions": "leyline.actions",
    "Blend": "leyline.actions",
    "Config": "leyline.config",
    "DataFault": "leyline.errors",
    "GrownNetwork": "kasmina.network",
    "InputError": "leyline.errors",
    "Kind": "leyline.slots",
    "LearningError": "simic.ppo",
    "Linear": "kasmina.layers",
    "Mixture": "leyline.task",
    "Op": "leyline.actions",
    "OutOfMemory": "leyline.errors",
    "Outcome": "leyline.view",
    "PolicyClient": "leyline.protocols",
    "Refusal": "leyline.verdicts",
    "Reward": "leyline.protocols",
    "RewardConfig": "leyline.config",
    "SegmentedHost": "kasmina.host",
    "SlotSpec": "leyline.slots",
    "Space": "leyline.view",
    "Split": "leyline.task",
    "Stage": "leyline.stages",
    "Tap": "leyline.slots",
    "Task": "leyline.task",
    "UserCodeError": "leyline.errors",
    "VectorizedEngine": "tolaria.engine",
    "View": "leyline.view",
    "blueprint": "kasmina.blueprints",
    "build_config": "leyline.config",
    "check_rows": "api",
    "cnn": "tasks.hosts",
    "evaluate": "calls",
    "get_controller": "tamiyo.catalog",
    "get_task": "tasks.catalog",
    "grow": "api",
    "load": "api",
    "mlp": "tasks.hosts",
    "resume": "calls",
    "show": "calls",
    "task": "tasks.custom",
    "train": "api",
}
"""The module of every public name, without `esper`. `task` is called task_from there."""

__all__ = [  # written out, as type checkers run nothing
    "Actions",
    "Blend",
    "Config",
    "DataFault",
    "GrownNetwork",
    "InputError",
    "Kind",
    "LearningError",
    "Linear",
    "Mixture",
    "Op",
    "OutOfMemory",
    "Outcome",
    "PolicyClient",
    "Refusal",
    "Reward",
    "RewardConfig",
    "SegmentedHost",
    "SlotSpec",
    "Space",
    "Split",
    "Stage",
    "Tap",
    "Task",
    "UserCodeError",
    "VectorizedEngine",
    "View",
    "blueprint",
    "build_config",
    "check_rows",
    "cnn",
    "evaluate",
    "get_controller",
    "get_task",
    "grow",
    "load",
    "mlp",
    "resume",
    "show",
    "task",
    "train",
]

warn_of_another()


if not TYPE_CHECKING:  # a type checker would take every name for one that is there

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
