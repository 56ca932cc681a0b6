"""Controllers by name, for a command line and a config."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from esper.leyline.config import Config
from esper.leyline.config_input import show
from esper.leyline.errors import InputError
from esper.leyline.protocols import PolicyClient, Senses
from esper.tamiyo.baselines import Never, RandomValid
from esper.tamiyo.controller import FACTS, Learned, is_controller, load_policy, read_settings
from esper.tamiyo.heuristic import Heuristic
from esper.tamiyo.schedule import load_schedule

FOLDER = "controller"
"""Where a run folder holds the controller that was trained in it."""

CONTROLLERS: Mapping[str, str] = MappingProxyType(
    {
        "never": "waits: the host alone",
        "random-valid": "draws uniformly from what the masks allow",
        "heuristic": "plants bypasses early where the host is narrow, and keeps what brings in more than it costs",
    }
)
"""Name and summary of each; the path of a schedule (.yaml or .yml), or of the run folder of a trained one, is one too."""


def get_controller(name_or_path: str, config: Config) -> PolicyClient:
    """A fresh controller, by name, from a schedule file, or from a folder that holds a trained one. InputError if neither."""
    if not isinstance(name_or_path, str):
        raise InputError(f"the controller is {show(name_or_path)}; give a name or a path as text")
    match name_or_path:
        case "never":
            return Never()
        case "random-valid":
            return RandomValid()
        case "heuristic":
            return Heuristic(config.heuristic, config.gates)
    if Path(name_or_path).suffix in (".yaml", ".yml") and Path(name_or_path).is_file():
        return load_schedule(name_or_path)
    if (folder := trained(name_or_path)) is not None:
        return Learned(load_policy(folder))
    if name_or_path and Path(name_or_path).is_dir():
        raise InputError(
            f"the folder {name_or_path!r} holds no trained controller, as it has no file {FOLDER}/{FACTS}; name a folder "
            "that `esper train` wrote, once its first validation is done"
        )
    raise InputError(
        f"unknown controller {name_or_path!r}; give one of {', '.join(CONTROLLERS)}, the path of a schedule file "
        "(.yaml or .yml), or the run folder of a trained controller, which must exist"
    )


def settings_of(name_or_path: str) -> Mapping[str, Any]:
    """The config that a controller brings along, over the task's own: what a trained one was trained under."""
    folder = trained(name_or_path)
    return {} if folder is None else read_settings(folder)


def with_sensors(config: Config, client: PolicyClient) -> Config:
    """The config with the cadence of the growth sensors that the controller needs, where `probe.sensors_every` is null."""
    if config.probe.sensors_every is not None:
        return config
    every = client.sensors_every if isinstance(client, Senses) else 0
    return config.model_copy(update={"probe": config.probe.model_copy(update={"sensors_every": every})})


def trained(name_or_path: str) -> Path | None:
    """The folder of a trained controller: a run folder, or what `esper train` wrote in it; None where it is none."""
    if name_or_path in CONTROLLERS:
        return None
    inner = Path(name_or_path) / FOLDER
    if inner.is_symlink():
        raise InputError(f"{inner} is a link, which is not followed; name the folder that it leads to, if you trust it")
    return next((path for path in (inner, Path(name_or_path)) if is_controller(path)), None)
