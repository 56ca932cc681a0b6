"""The config of a run: what a task, a trained controller and a person ask for, one over the other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.leyline.config import Config, build_config
from esper.leyline.errors import InputError
from esper.leyline.length import with_steps
from esper.leyline.parsing import LARGEST_YAML, parse_yaml
from esper.leyline.task import AnyTask
from esper.store.reading import read_named
from esper.tamiyo.catalog import settings_of


def growth_config(task: AnyTask, *asked: Mapping[str, Any]) -> Config:
    """The config of a growth: the task's defaults, the settings that a trained controller brings, and what is asked for.

    A later layer goes over an earlier one; the controller is the one that the layers come to. Raises InputError.
    """
    named = build_config(task.defaults, *asked).controller
    return with_steps(build_config(task.defaults, settings_of(named), *asked, {"task": task.name}), task)


def load_config_file(path: str) -> dict[str, Any]:
    """A YAML file as a nested mapping. InputError where it cannot be read or is no mapping."""
    data = read_named(Path(path), LARGEST_YAML, "give a readable YAML file with --config")
    content = parse_yaml(data, f"--config {path}", "`esper config --yaml` prints one to start from")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"--config {path} holds a {type(content).__name__}, not a mapping of keys to values")
    return content
