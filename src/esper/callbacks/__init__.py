"""Growth in the trainers of Lightning and Hugging Face: callbacks around `esper.Growth`."""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from esper.leyline.errors import InputError
from esper.leyline.text import did_you_mean

if TYPE_CHECKING:
    from esper.callbacks.hugging_face import HuggingFaceGrowth
    from esper.callbacks.lightning import LightningGrowth

__all__ = ["HuggingFaceGrowth", "LightningGrowth"]

FROM_THE_TRAINER = ("model", "optimizer", "scheduler", "ema", "scaler", "shared")
"""Arguments of `esper.Growth` that a callback takes from its trainer."""


def __getattr__(name: str) -> Any:
    """A callback, which imports its trainer. InputError if the package of the trainer is not installed."""
    if name == "LightningGrowth":
        from esper.callbacks.lightning import LightningGrowth

        return LightningGrowth
    if name == "HuggingFaceGrowth":
        from esper.callbacks.hugging_face import HuggingFaceGrowth

        return HuggingFaceGrowth
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def check_options(callback: str, options: Mapping[str, Any]) -> None:
    """InputError if an argument of a callback is none of `esper.Growth`, or one that the trainer gives."""
    from esper.runs.live.growth import Growth  # takes long to import

    known = [name for name in inspect.signature(Growth).parameters if name not in FROM_THE_TRAINER]
    for name in options:
        if name in FROM_THE_TRAINER:
            raise InputError(f"{callback} takes {name} from the trainer; leave it out")
        if name not in known:
            hint = did_you_mean(name, known) or f"it takes {', '.join(known)}"
            raise InputError(f"{callback} has no argument {name!r}; {hint}")
