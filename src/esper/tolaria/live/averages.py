"""Save and restore a moving average of a network that grows: the module with averaged weights, and the object around it."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.graft.grown import is_grafted, sites_of
from esper.kasmina.graft.sharding import is_sharded, placed
from esper.leyline.errors import InputError

_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has


class Average:
    """Handles a moving average, as torch.optim.swa_utils.AveragedModel or a class of a person's own.

    module: the grafted module with the averaged weights.
    """

    def __init__(self, holder: Any, network: nn.Module) -> None:
        """holder: what the loop updates, with the average as its attribute `module`, or the average itself.

        Raises InputError if it is no average of this grafted network.
        """
        module = getattr(holder, "module", holder)
        if (
            not isinstance(module, nn.Module)
            or not is_grafted(module)
            or dict(sites_of(module)) != dict(sites_of(network))
        ):
            raise InputError(
                "ema has no sites of its own; make it after esper.graft(model), so that it can get the seeds as well"
            )
        if is_sharded(module) != is_sharded(network):
            names = ("the model", "ema") if is_sharded(module) else ("ema", "the model")
            raise InputError(
                f"{names[0]} is whole where {names[1]} is sharded; make ema before fully_shard, and call fully_shard on "
                "ema.module as on the model"
            )
        self.module = module
        self._holder = holder

    def state(self) -> dict[str, Any]:
        """Return copies of the tensors and numbers that are not the module's, by name, such as the number of updates."""
        return {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, _, _, value in self._attributes()
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise InputError if a state is that of another kind of average."""
        own = {name for name, _, _, _ in self._attributes()}
        for name in sorted(own ^ set(state)):
            have = ("has", "lacks") if name in own else ("lacks", "has")
            raise InputError(
                f"ema {have[0]} {name!r}, which the moving average of the saved state {have[1]}; make ema as it was made then"
            )

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        for name, part, attribute, value in list(self._attributes()):
            saved = state[name]
            if isinstance(value, Tensor) and isinstance(saved, Tensor) and value.shape == saved.shape:
                value.copy_(placed(saved, value))
            else:
                setattr(part, attribute, copy.deepcopy(saved))

    def _attributes(self) -> Iterator[tuple[str, Any, str, Any]]:
        """Yield name, owner, attribute and value of each tensor and number around the module; None is a value not set yet."""
        inside = set(self.module.modules())
        parts = self._holder.named_modules() if isinstance(self._holder, nn.Module) else [("", self._holder)]
        for path, part in parts:
            if part in inside:
                continue
            attributes = {name: value for name, value in vars(part).items() if name not in _OF_MODULES}
            if isinstance(part, nn.Module):
                attributes |= part._parameters | part._buffers
            for name, value in attributes.items():
                if value is None or isinstance(value, Tensor | bool | int | float):
                    yield f"{path}.{name}" if path else name, part, name, value
