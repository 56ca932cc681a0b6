"""Esper trains neural networks that grow.

    import esper
    summary = esper.grow(esper.get_task("digits"), esper.build_config({"task": "digits"}))
    network = esper.load("runs/demo")

Names are imported when they are first used, so that `esper --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from esper.leyline.distribution import installed_version, warn_of_conflict
from esper.leyline.public_names import HOMES as _HOMES

if TYPE_CHECKING:  # written out, as type checkers run nothing; tests/test_public_names.py holds it to the table
    from esper.api import check_rows, grow, load, train
    from esper.calls import evaluate, resume, show
    from esper.karn.reader import open_run
    from esper.karn.report.compared import compare
    from esper.karn.report.page import draw_report
    from esper.karn.report.page import write_report as report
    from esper.kasmina.adapter import attach
    from esper.kasmina.blueprints import blueprint
    from esper.kasmina.drawing import draw
    from esper.kasmina.find_sites import FoundSites, find_sites
    from esper.kasmina.grafted import graft, ungraft
    from esper.kasmina.host import SegmentedHost
    from esper.kasmina.layers import Linear
    from esper.kasmina.network import GrownNetwork
    from esper.kasmina.saving import load_grown
    from esper.leyline.actions import Actions, Blend, Head, Op
    from esper.leyline.config import Config, RewardConfig, build_config
    from esper.leyline.errors import DataFault, InputError, LearningError, OutOfMemory, UserCodeError
    from esper.leyline.protocols import Cites, Explains, PolicyClient, Resumable, Reward, SelectsSensors, Senses
    from esper.leyline.sites import Site
    from esper.leyline.slots import SlotSpec, Tap
    from esper.leyline.stages import Stage
    from esper.leyline.streams import Kind, Map, Sequence, Stream, Vector
    from esper.leyline.task import Instance, Interface, Lengths, Mixture, Objective, Pixels, Room, Scaling, Split, Task
    from esper.leyline.verdicts import Refusal, Vital
    from esper.leyline.view import (
        BlueprintInfo,
        CoalitionValues,
        ComputeShares,
        Estimate,
        Masks,
        Measurements,
        Outcome,
        Scores,
        Seeds,
        Space,
        View,
    )
    from esper.runs.growth import Growth
    from esper.runs.healed import Healed
    from esper.runs.healing import heal
    from esper.runs.streaming import stream
    from esper.tamiyo.catalog import get_controller
    from esper.tasks.catalog import get_task
    from esper.tasks.custom import task_from as task
    from esper.tasks.hosts import cnn, gru, mlp, transformer
    from esper.tolaria.engine import VectorizedEngine

    __version__: str

__all__ = [  # written out, as type checkers run nothing; tests/test_public_names.py holds it to the table
    "Actions",
    "Blend",
    "BlueprintInfo",
    "Cites",
    "CoalitionValues",
    "ComputeShares",
    "Config",
    "DataFault",
    "Estimate",
    "Explains",
    "FoundSites",
    "GrownNetwork",
    "Growth",
    "Head",
    "Healed",
    "InputError",
    "Instance",
    "Interface",
    "Kind",
    "LearningError",
    "Lengths",
    "Linear",
    "Map",
    "Masks",
    "Measurements",
    "Mixture",
    "Objective",
    "Op",
    "OutOfMemory",
    "Outcome",
    "Pixels",
    "PolicyClient",
    "Refusal",
    "Resumable",
    "Reward",
    "RewardConfig",
    "Room",
    "Scaling",
    "Scores",
    "Seeds",
    "SegmentedHost",
    "SelectsSensors",
    "Senses",
    "Sequence",
    "Site",
    "SlotSpec",
    "Space",
    "Split",
    "Stage",
    "Stream",
    "Tap",
    "Task",
    "UserCodeError",
    "Vector",
    "VectorizedEngine",
    "View",
    "Vital",
    "attach",
    "blueprint",
    "build_config",
    "check_rows",
    "cnn",
    "compare",
    "draw",
    "draw_report",
    "evaluate",
    "find_sites",
    "get_controller",
    "get_task",
    "graft",
    "grow",
    "gru",
    "heal",
    "load",
    "load_grown",
    "mlp",
    "open_run",
    "report",
    "resume",
    "show",
    "stream",
    "task",
    "train",
    "transformer",
    "ungraft",
]

warn_of_conflict()


if not TYPE_CHECKING:  # a type checker would take every name for one that is there

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return installed_version() or "unknown"
        if name not in _HOMES:
            raise AttributeError(f"module 'esper' has no attribute {name!r}")
        module, attribute = _HOMES[name]
        found = getattr(import_module(f"esper.{module}"), attribute)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
