"""Controllers by name, for a command line and a config."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from esper.leyline.config import Config
from esper.leyline.errors import InputError
from esper.leyline.protocols import PolicyClient
from esper.tamiyo.baselines import Never, RandomValid
from esper.tamiyo.heuristic import Heuristic
from esper.tamiyo.schedule import load_schedule

CONTROLLERS: Mapping[str, str] = MappingProxyType(
    {
        "never": "waits: the host alone",
        "random-valid": "draws uniformly from what the masks allow",
        "heuristic": "plants bypasses early at the slots of lowest participation, and keeps what pays",
    }
)
"""Name and summary of each; the path of a schedule (.yaml or .yml) is a controller too."""


def get_controller(name_or_path: str, config: Config) -> PolicyClient:
    """A fresh controller, by name or from a schedule file. InputError where it is neither."""
    match name_or_path:
        case "never":
            return Never()
        case "random-valid":
            return RandomValid()
        case "heuristic":
            return Heuristic(config.heuristic, config.gates)
    if Path(name_or_path).suffix in (".yaml", ".yml") and Path(name_or_path).is_file():
        return load_schedule(name_or_path)
    raise InputError(
        f"unknown controller {name_or_path!r}; give one of {', '.join(CONTROLLERS)}, or the path of a schedule file "
        "(.yaml or .yml), which must exist"
    )
