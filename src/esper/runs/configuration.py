"""The config of a run, merged from those of the task, of a trained controller and of the user."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from esper.leyline.config import Config, build_config
from esper.leyline.errors import InputError
from esper.leyline.length import with_steps
from esper.leyline.parsing import LARGEST_YAML, parse_yaml
from esper.leyline.task import AnyTask
from esper.runs.default_controller import default_controller
from esper.store.reading import read_named
from esper.tamiyo.catalog import settings_of
from esper.tamiyo.shipped import resolved


def growth_config(task: AnyTask, *asked: Mapping[str, Any], tell: Callable[[str], None] | None = None) -> Config:
    """Return the config of a growth: the defaults of the task, the settings of a trained controller, and the layers `asked`.

    Later layers take precedence. The controller is the one that the merged layers name, or else that of `default_controller`;
    where that is `shipped`, `tell` is called with one line that says why. `shipped` becomes the name of its latest version.
    Raises InputError for a bad key or value.
    """
    merged = build_config(task.defaults, *asked)
    if "controller" in merged.model_fields_set:
        named = resolved(merged.controller)
    else:
        choice = default_controller(task, merged)
        named = choice.controller
        if tell is not None and choice.why is not None:
            tell(choice.why)
    ours = {"task": task.name, "controller": named}
    return with_steps(build_config(task.defaults, settings_of(named), *asked, ours), task)


def load_config_file(path: str) -> dict[str, Any]:
    """Read a YAML file as a nested mapping. Raises InputError if it cannot be read or is not a mapping."""
    data = read_named(Path(path), LARGEST_YAML, "give a readable YAML file with --config")
    content = parse_yaml(data, f"--config {path}", "`esper config --yaml` prints one to start from")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"--config {path} holds a {type(content).__name__}, not a mapping of keys to values")
    return content


TRAINING: Mapping[str, Any] = MappingProxyType(
    {
        "envs": 64,
        "baselines": [],
        "models": "none",
        "gates": {"permissive": True, "min_holding_steps": 1},  # a policy learns which seeds to keep
        "probe": {"sensors_every": 4},
        "reward": {"relative_to": "group", "group_size": 8},
        "telemetry": {"level": "run"},
        "early_stopping": {"enabled": False},  # a policy learns from whole episodes
    }
)
"""Config of every training. It takes precedence over the defaults of a task, and the user's config over it."""

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "quick": {"ppo": {"rounds": 60, "imitation_rounds": 8}},
        "standard": {"ppo": {"rounds": 150, "imitation_rounds": 8}},
    }
)
"""Lengths of a training by name."""


def training_configs(tasks: Sequence[AnyTask], preset: str, *asked: Mapping[str, Any]) -> list[Config]:
    """Return the config of every task of a training: its defaults, TRAINING, the preset, and the layers `asked`.

    Later layers take precedence. Raises InputError for an unknown preset, a task that is named twice, and a bad key or
    value.
    """
    names = [task.name for task in tasks]
    if not names or len(set(names)) < len(names):
        raise InputError(f"the tasks are {', '.join(names) or 'none'}; name one or more, each once")
    if preset not in PRESETS:
        raise InputError(f"the preset {preset!r} is unknown; give one of {', '.join(PRESETS)}")
    named = {"tasks": names, "controller": "ppo"}
    return [
        with_steps(
            build_config(
                task.defaults, TRAINING, PRESETS[preset], *_of_task(asked, task.name), named | {"task": task.name}
            ),
            task,
        )
        for task in tasks
    ]


def _of_task(asked: Sequence[Mapping[str, Any]], task: str) -> list[Mapping[str, Any]]:
    """Return the layers for one task. Its entry in `cohorts` takes precedence over the rest of its layer."""
    layers: list[Mapping[str, Any]] = []
    for layer in asked:
        layers.append({name: value for name, value in layer.items() if name != "cohorts"})
        own = (layer.get("cohorts") or {}).get(task, {})
        layers.append({name: value for name, value in own.items() if name != "task"})
    return layers
