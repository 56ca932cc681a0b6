"""Help callbacks that widen a network: count the targets of a batch, and keep weights until the network is large enough."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from esper.leyline.errors import InputError
from esper.leyline.text import kind_of


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
