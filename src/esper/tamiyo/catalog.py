"""Controllers by name or path."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from esper.leyline.config import Config
from esper.leyline.config_input import show
from esper.leyline.errors import InputError
from esper.leyline.protocols import PolicyClient, SelectsSensors, Senses
from esper.leyline.reference import load_reference, unnamed_function
from esper.leyline.resuming import TRIALS, is_own_controller
from esper.tamiyo import bandit
from esper.tamiyo.baselines import Never, RandomValid
from esper.tamiyo.controller import FACTS, Learned, is_controller, load_policy, read_origin, read_settings
from esper.tamiyo.heuristic import Heuristic
from esper.tamiyo.placement import Collapse, DriftRise, InnerUse, ParticipationDrop, Placement, Uniform
from esper.tamiyo.schedule import load_schedule
from esper.tamiyo.several import Sites
from esper.tamiyo.shipped import Shipped, episodes_of_version, is_shipped, resolved
from esper.tamiyo.trees import SHIPPED, Trees, load_trees
from esper.tamiyo.trials import Trials

FOLDER = "controller"
"""Name of the folder, within a run folder, of the controller that was trained in the run."""

CONTROLLERS: Mapping[str, str] = MappingProxyType(
    {
        "never": "always waits, so the host is trained without growth",
        "random-valid": "draws decisions uniformly from the valid ones",
        "uniform": "plants a bypass of rank 1 at every slot in the first step, and keeps all of them",
        "participation": "plants a bypass where the participation of the stream drops by more than half, else as uniform does",
        "collapse": "plants a bypass around a block of dead units, else as participation does",
        "sites": "plants a bypass around every block that stands out where several do, else as collapse or drift does",
        "inner-use": "plants a bypass around a narrow or dead block, else as uniform does",
        "drift": "plants a bypass where the activations leave those of the intact network, where the task has one (heal-taught)",
        "tree": "plants what trees fitted on damaged networks expect most of, from sensors before the first step",
        "shipped": "does what heuristic does, under a small budget what collapse or fitted trees do; card: `esper docs shipped`",
        "heuristic": "plants bypasses early where the host is narrow, and keeps seeds that contribute more than they cost",
    }
)
"""Names and summaries of the built-in controllers. Paths of schedules and of trained controllers, and references to functions
that make one, are accepted as well.
"""


PLACEMENTS: Mapping[str, type[Placement]] = MappingProxyType(
    {
        "uniform": Uniform,
        "participation": ParticipationDrop,
        "collapse": Collapse,
        "sites": Sites,
        "inner-use": InnerUse,
        "drift": DriftRise,
    }
)
TREES = ".safetensors"
"""Suffix of a file of trees."""
KEEPS: Mapping[str, Any] = MappingProxyType({"gates": {"permissive": True}})
"""The settings of a placement, which take precedence over the config of a task: it keeps what it planted."""


def get_controller(name_or_path: str, config: Config | None = None) -> PolicyClient:
    """A new controller, by name, from a schedule file, from the folder of a trained controller, or from a function or class of
    your own, "path.py:function".

    `config` has the settings of the rule `heuristic`; None takes the defaults. Raises InputError if there is no such name, file,
    folder or function.
    """
    config = Config() if config is None else config
    if not isinstance(name_or_path, str):
        raise InputError(f"the controller is {show(name_or_path)}; give a name or a path as text")
    match name_or_path:
        case "never":
            return Never()
        case "random-valid":
            return RandomValid()
        case "heuristic":
            return Heuristic(config.heuristic, config.gates)
        case "tree":
            return Trees()
        case _ if is_shipped(resolved(name_or_path)):
            return Shipped(name_or_path, config)
        case _ if name_or_path in PLACEMENTS:
            return PLACEMENTS[name_or_path]()
        case _ if name_or_path.startswith(TRIALS):
            name = name_or_path.removeprefix(TRIALS)
            rule = None if is_own_controller(name) else get_controller(name, config)
            if not isinstance(rule, Placement):
                raise InputError(f"{name_or_path} would try candidates of {name}, which ranks none; name another rule")
            return Trials(rule, name, config.trials)
    if Path(name_or_path).suffix == TREES and Path(name_or_path).is_file():
        return Trees(Path(name_or_path))
    if Path(name_or_path).suffix == bandit.SUFFIX and Path(name_or_path).is_file():
        return bandit.load_bandit(Path(name_or_path))
    if Path(name_or_path).suffix in (".yaml", ".yml") and Path(name_or_path).is_file():
        return load_schedule(name_or_path)
    if (folder := trained(name_or_path)) is not None:
        return Learned(load_policy(folder))
    if name_or_path and Path(name_or_path).is_dir():
        raise InputError(
            f"the folder {name_or_path!r} holds no trained controller, because it has no file {FOLDER}/{FACTS}; name a folder "
            "that `esper train` wrote; the file is there after the first validation"
        )
    if is_own_controller(name_or_path):
        return load_controller(name_or_path)
    if name_or_path.endswith(".py"):
        raise InputError(unnamed_function(name_or_path, "controller"))
    raise InputError(
        f"unknown controller {name_or_path!r}; give one of {', '.join(CONTROLLERS)}, {TRIALS}NAME of one that ranks places, the "
        "path of a schedule file (.yaml or .yml), of trees (.safetensors) or of a bandit (.bandit), the run folder of a trained "
        "controller, which must exist, or path.py:function for one of your own"
    )


def load_controller(reference: str) -> PolicyClient:
    """Call the function or class at `path.py:function` or `module:function`, and return the controller that it makes.

    Raises InputError if what it returns is no controller, and as `load_reference` does.
    """
    made = load_reference(reference, "controller", "a controller")
    if (flaw := flaw_of_controller(made)) is not None:
        raise InputError(
            f"{reference} returned {flaw}; return an object with the methods act(view), store(outcome) and update()"
        )
    controller: PolicyClient = made
    return controller


def flaw_of_controller(made: Any) -> str | None:
    """Say what an object is that is no controller; None for a controller."""
    if isinstance(made, type):
        return "a class"
    lacking = [name for name in ("act", "store", "update") if not callable(getattr(made, name, None))]
    return f"a {type(made).__name__} without {' and '.join(lacking)}" if lacking else None


def settings_of(name_or_path: str) -> Mapping[str, Any]:
    """The settings of a trained controller or a placement, which take precedence over the config of a task; else empty."""
    name_or_path = name_or_path.removeprefix(TRIALS)
    folder = trained(name_or_path)
    if folder is not None:
        return read_settings(folder)
    suffixed = Path(name_or_path).suffix in (TREES, bandit.SUFFIX)
    return KEEPS if suffixed or name_or_path in (*PLACEMENTS, "tree") or is_shipped(name_or_path) else {}


def episodes_of(name_or_path: str) -> int | None:
    """The number of episodes that a controller was trained with: 0 for a rule; None where its file does not say."""
    name_or_path = name_or_path.removeprefix(TRIALS)
    if name_or_path == "tree":
        return load_trees(SHIPPED).episodes
    if is_shipped(resolved(name_or_path)):
        return episodes_of_version(resolved(name_or_path))
    if name_or_path in CONTROLLERS:
        return 0
    if Path(name_or_path).suffix == TREES and Path(name_or_path).is_file():
        return load_trees(Path(name_or_path)).episodes
    folder = trained(name_or_path)
    episodes = read_origin(folder).get("episodes") if folder is not None else None
    return episodes if isinstance(episodes, int) and episodes > 0 else None


def with_sensors(config: Config, client: PolicyClient) -> Config:
    """The config, with `probe.sensors_every` and then `probe.sensors` set to what the controller needs where they are null."""
    if config.probe.sensors_every is not None:
        return config
    needs: dict[str, Any] = {"sensors_every": client.sensors_every if isinstance(client, Senses) else 0}
    if config.probe.sensors is None and isinstance(client, SelectsSensors) and client.sensor_families:
        needs["sensors"] = tuple(client.sensor_families)
    return config.model_copy(update={"probe": config.probe.model_copy(update=needs)})


def trained(name_or_path: str) -> Path | None:
    """The folder of a trained controller, given it or its run folder; None where the path is neither."""
    if name_or_path in CONTROLLERS or is_shipped(name_or_path):
        return None
    inner = Path(name_or_path) / FOLDER
    if inner.is_symlink():
        raise InputError(f"{inner} is a link, which is not followed; name the folder that it leads to, if you trust it")
    return next((path for path in (inner, Path(name_or_path)) if is_controller(path)), None)
