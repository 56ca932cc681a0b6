"""Growth in the trainers of Lightning and Hugging Face: callbacks around `esper.Growth`."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from esper.leyline.errors import InputError
from esper.leyline.text import did_you_mean

if TYPE_CHECKING:
    from torch import nn

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


class GrowthCallback:
    """Base of the callbacks: the arguments of `esper.Growth`, and the growth of one training."""

    begins: ClassVar[str]  # the call of the trainer that begins to grow

    def __init__(self, probe: Any, loss: Any, changed: Sequence[str], options: Mapping[str, Any]) -> None:
        """InputError if an option is no argument of `esper.Growth`, or one that the trainer gives."""
        from esper.runs.live.growth import Growth  # takes long to import

        known = [name for name in inspect.signature(Growth).parameters if name not in FROM_THE_TRAINER]
        for name in options:
            if name in FROM_THE_TRAINER:
                raise InputError(f"{type(self).__name__} takes {name} from the trainer; leave it out")
            if name not in known:
                hint = did_you_mean(name, known) or f"it takes {', '.join(known)}"
                raise InputError(f"{type(self).__name__} has no argument {name!r}; {hint}")
        self.growth: Growth | None = None
        self._probe, self._loss, self._options = probe, loss, options
        self._changed = [*changed, *(() if "steps" in options else ("steps",))]  # as long as the trainer trains now

    @property
    def network(self) -> "nn.Module":
        """The network that grows. InputError before the training has begun."""
        if self.growth is None:
            raise InputError(f"nothing has grown yet; call {self.begins} first")
        return self.growth.model

    def check_first(self) -> None:
        """InputError if a training has begun already."""
        if self.growth is not None:
            raise InputError(
                "this callback has grown a network already; call its growth.finish() and give the trainer another callback"
            )
