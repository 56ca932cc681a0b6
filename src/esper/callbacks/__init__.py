"""Grows networks in the trainers of Lightning and Hugging Face: callbacks around `esper.Growth` and `esper.AnytimeGrowth`.

The attribute `growth` of a callback is that of the training, once it has begun, and None before. A callback raises InputError, in
one sentence, where the trainer or an argument cannot be used; mostly when the training begins.
"""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from esper.leyline.config.arguments import check_names
from esper.leyline.messages import InputError, kind_of

if TYPE_CHECKING:
    from esper.callbacks.hugging_face import HuggingFaceAnytimeGrowth, HuggingFaceGrowth
    from esper.callbacks.lightning import LightningAnytimeGrowth, LightningGrowth

__all__ = ["HuggingFaceAnytimeGrowth", "HuggingFaceGrowth", "LightningAnytimeGrowth", "LightningGrowth"]

ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(
        ("model", "optimizer", "scheduler", "ema", "scaler", "shared"), "the trainer gives it; leave it out"
    ),
    "plan": "to widen the network as a whole, take LightningAnytimeGrowth or HuggingFaceAnytimeGrowth",
    "shard": "a network that fully_shard has in parts grows in a loop of your own (`esper docs sharding`)",
}
"""Arguments of `esper.Growth` and `esper.AnytimeGrowth` that a callback does not have, each with what to do."""


def __getattr__(name: str) -> Any:
    """Return a callback, which imports its trainer. InputError if the package of the trainer is not installed."""
    if name in __all__:
        from importlib import import_module

        return getattr(
            import_module("esper.callbacks." + ("lightning" if name.startswith("L") else "hugging_face")), name
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


class GrowthCallback:
    """Holds the arguments of a growth and the growth of one training: the base of the callbacks."""

    growth: Any = None

    def __init__(self, kind: type[Any], options: Mapping[str, Any]) -> None:
        """kind: `esper.Growth` or `esper.AnytimeGrowth`. InputError if an option is no argument of it, or is in `ELSEWHERE`."""
        known = [name for name in inspect.signature(kind).parameters if name not in ELSEWHERE]
        check_names(type(self).__name__, options, known, ELSEWHERE)
        self._options = options

    @property
    def network(self) -> nn.Module:
        """The network that grows. InputError before the training has begun."""
        if self.growth is None:
            raise InputError("nothing has grown yet; let the trainer train first")
        return self.growth.model

    def check_first(self) -> None:
        """Raise InputError if a training has begun already."""
        if self.growth is not None:
            raise InputError(
                "this callback has grown a network already; call its growth.finish() and give the trainer another callback"
            )


def count_targets(batch: Any) -> int:
    """Count the targets of an (input, target) pair, or the 'labels' that are not -100. InputError for any other batch."""
    if isinstance(batch, Mapping) and isinstance(labels := batch.get("labels"), Tensor):
        return int((labels != -100).sum())  # -100 is what losses of torch and of transformers leave out
    if isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[1].numel()
    raise InputError(
        f"a batch is {kind_of(batch)} that is no (input, target) pair and has no 'labels'; give targets=, a function "
        "that returns the number of targets of a batch"
    )


class LargerWeights:
    """Keeps the weights of a checkpoint that are larger than those of a network, until the network is as large.

    Trainers load weights before a callback can make the network larger. `weights` are those that were kept.
    """

    def __init__(self, network: nn.Module) -> None:
        self.weights: dict[str, Any] = {}

        def keep(module: nn.Module, state: dict[str, Any], *rest: Any) -> None:
            if module is not network:  # a copy of it
                return
            own = module.state_dict()
            tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and name in own}
            if any(own[name].shape != value.shape for name, value in tensors.items()):
                self.weights.update(state)
                state.update({name: own[name] for name in state if name in own})

        # A function, as a method would be copied, with all that it holds, by each copy of the network.
        self._hook = network.register_load_state_dict_pre_hook(keep)

    def remove(self) -> None:
        """Let weights be loaded as ever."""
        self._hook.remove()
