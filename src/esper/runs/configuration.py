"""Merge the config of a run from those of the task, of a trained controller and of the user."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.leyline.config.parsing import LARGEST_YAML, parse_yaml
from esper.leyline.config.tree import Config, build_config
from esper.leyline.data.task import AnyTask, with_steps
from esper.leyline.messages import InputError, kind_of
from esper.leyline.protocols import Controller
from esper.store.disk import read_named
from esper.tamiyo.catalog import ControllerSpec, find_controller


def growth_config(
    task: AnyTask, *asked: Mapping[str, Any], controller: Controller | str | None = None
) -> tuple[Config, ControllerSpec]:
    """Return the config of a growth, and its controller; a controller of None is the one that the merged layers name.

    Layers are the defaults of the task, the settings of the controller, and `asked`; later ones take precedence.
    """
    spec = find_controller(build_config(task.defaults, *asked).controller if controller is None else controller)
    named = {"task": task.name, "controller": spec.name}
    return with_steps(build_config(task.defaults, spec.settings, *asked, named), task), spec


def load_config_file(path: str) -> dict[str, Any]:
    """Read a YAML file as a nested mapping. Raises InputError if it cannot be read or is not a mapping."""
    data = read_named(Path(path), LARGEST_YAML, "give a readable YAML file with --config")
    content = parse_yaml(data, f"--config {path}", "`esper config --yaml` prints one to start from")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"--config {path} holds {kind_of(content)}, not a mapping of keys to values")
    return content


TRAINING: Mapping[str, Any] = {
    "envs": 64,
    "baselines": [],
    "models": "none",
    "gates": {"permissive": True, "min_holding_steps": 1},  # a policy learns which seeds to keep
    "probe": {"sensors_every": 4},
    "reward": {"relative_to": "group", "group_size": 8},
    "telemetry": {"level": "run"},
    "early_stopping": {"enabled": False},  # a policy learns from whole episodes
}
"""Config of every training. It takes precedence over the defaults of a task, and the user's config over it."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quick": {"ppo": {"rounds": 30, "imitation_rounds": 8}},
    "standard": {"ppo": {"rounds": 470, "imitation_rounds": 8}},
    "long": {"ppo": {"rounds": 1500, "imitation_rounds": 8}},
}
"""Lengths of a training by name."""


def training_configs(tasks: Sequence[AnyTask], preset: str, *asked: Mapping[str, Any]) -> list[Config]:
    """Return the config of every task of a training: its defaults, TRAINING, the preset, and the layers `asked`."""
    names = [task.name for task in tasks]
    if not names or len(set(names)) < len(names):
        raise InputError(f"the tasks are {', '.join(names) or 'none'}; name one or more, each once")
    if preset not in PRESETS:
        raise InputError(f"the preset {preset!r} is unknown; give one of {', '.join(PRESETS)}")
    configs = []
    for task in tasks:
        layers: list[Mapping[str, Any]] = [task.defaults, TRAINING, PRESETS[preset]]
        for layer in asked:  # the entry of a task in `cohorts` takes precedence over the rest of its layer
            own = (layer.get("cohorts") or {}).get(task.name, {})
            layers.append({name: value for name, value in layer.items() if name != "cohorts"})
            layers.append({name: value for name, value in own.items() if name != "task"})
        named = {"tasks": names, "controller": "ppo", "task": task.name}
        configs.append(with_steps(build_config(*layers, named), task))
    return configs
