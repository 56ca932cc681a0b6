"""The config keys that a controller may bring along: how it decides and what it sees, but not the problem that it is given."""

from collections.abc import Iterator, Mapping
from typing import Any

from esper.leyline.config import RENAMED
from esper.leyline.errors import InputError

BROUGHT = (
    "gates",
    "probe.coalitions_every",
    "probe.sensors_every",
    "lifecycle.tempos",
    "lifecycle.targets",
)
"""A section stands for all of its keys."""


def check_brought(settings: Mapping[str, Any], who: str) -> None:
    """InputError, naming the key, where settings hold one that a controller may not bring; `who` brings them."""
    for key in _dotted(settings):
        if key in RENAMED:
            raise InputError(
                f"{key} is now {RENAMED[key]}, but {who} sets it under the old name; give the new name there, or train the "
                "controller again"
            )
        if not any(key == allowed or key.startswith(f"{allowed}.") for allowed in BROUGHT):
            raise InputError(
                f"{who} sets {key}, which a controller may not bring along; it may bring {', '.join(BROUGHT)}: leave {key} out "
                "there, and set it for the whole run or evaluation (--set, or the config; settings= of esper.evaluate)"
            )


def _dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted name of every value in nested mappings."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
