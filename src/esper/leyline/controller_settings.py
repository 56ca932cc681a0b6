"""The config keys that a controller may set: keys of gates, measurements and decisions, but none that changes the problem."""

from collections.abc import Iterator, Mapping
from typing import Any

from esper.leyline.config import RENAMED
from esper.leyline.errors import InputError

ALLOWED = (
    "gates",
    "probe.coalitions_every",
    "probe.sensors",
    "probe.sensors_every",
    "lifecycle.tempos",
    "lifecycle.targets",
)
"""The keys; the name of a section stands for all keys of that section."""


def check_controller_settings(settings: Mapping[str, Any], who: str) -> None:
    """InputError if the settings of a controller hold a key that controllers may not set; `who` names the controller's file."""
    for key in _dotted(settings):
        if key in RENAMED:
            raise InputError(
                f"{key} is now {RENAMED[key]}, but {who} sets it under the old name; give the new name there, or train the "
                "controller again"
            )
        if not any(key == allowed or key.startswith(f"{allowed}.") for allowed in ALLOWED):
            raise InputError(
                f"{who} sets {key}, which a controller may not set; it may set {', '.join(ALLOWED)}: leave {key} out "
                "there, and set it for the whole run or evaluation (--set, or the config; settings= of esper.evaluate)"
            )


def _dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted name of every value in nested mappings."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
