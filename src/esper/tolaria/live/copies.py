"""Hold copies of a network that a loop trains: moving averages, and networks that train without one of its seeds."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.kasmina.graft.grafted import planted_at
from esper.kasmina.graft.grown import is_grafted, prefix_behind, sites_of
from esper.kasmina.graft.planted import Mode
from esper.kasmina.graft.recording import call
from esper.kasmina.graft.sharding import is_sharded, placed
from esper.leyline.messages import InputError
from esper.tolaria.live.groups import Groups, placed_moments
from esper.tolaria.live.probe import Probe

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


class SeedlessCopy:
    """Copies the parameters and buffers of a network but those of one seed, and takes the steps of the loop on the copies.

    Calling it runs the network on the copies, without that seed. Removing a seed from a network that was trained with it
    overstates the worth of the seed, because the rest has come to rely on it.

    site: of the seed that is left out. tensors: the copies by name. Clipping of gradients and a GradScaler are not repeated.
    """

    def __init__(self, network: nn.Module, groups: Groups, site: str) -> None:
        self.network, self.site = network, site
        prefix = prefix_behind(sites_of(network)[site].after)
        held = {id(parameter) for group in groups.optimizer.param_groups for parameter in group["params"]}
        memo: dict[int, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad and id(tensor) in held
            if not name.startswith(prefix) and (trained or not isinstance(tensor, nn.Parameter)):
                own = self.tensors[name] = tensor.detach().clone().requires_grad_(trained)
                memo[id(tensor)] = own
        copies = {id(tensor) for tensor in self.tensors.values()}
        self.optimizer: torch.optim.Optimizer = copy.deepcopy(groups.optimizer, memo)
        self._groups = list(zip(self.optimizer.param_groups, groups.optimizer.param_groups, strict=True))
        for mine, _ in self._groups:
            mine.pop("param_names", None)
            mine["params"] = [parameter for parameter in mine["params"] if id(parameter) in copies]
        for parameter in [each for each in self.optimizer.state if id(each) not in copies]:
            del self.optimizer.state[parameter]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the network on the copies, without the seed."""
        planted = planted_at(self.network, self.site)
        assert planted is not None, "the copy is trained only while its seed is on trial"
        mode, planted.mode = planted.mode, Mode.OFF
        try:
            return functional_call(self.network, self.tensors, args, kwargs)
        finally:
            planted.mode = mode

    def train(self, batch: tuple[Any, Any], probe: Probe) -> None:
        """Take the step of the loop on its batch."""
        for mine, theirs in self._groups:  # a scheduler may have changed the rates
            mine.update({key: value for key, value in theirs.items() if key not in ("params", "param_names")})
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if not trained:  # all but the seed is frozen
            return
        devices = sorted({parameter.device.index for parameter in trained if parameter.is_cuda})
        with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"), torch.enable_grad():
            loss = probe.mean(call(self, batch[0]), batch[1])
            if not loss.requires_grad:
                return
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        maximizes = any(group.get("maximize", False) for group in self.optimizer.param_groups)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = -gradient if maximizes and gradient is not None else gradient
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forget(self, site: str) -> None:
        """Leave out the seed at another site too, which was removed."""
        prefix = prefix_behind(sites_of(self.network)[site].after)
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if not name.startswith(prefix)}

    def state(self) -> dict[str, Any]:
        """Return the copies and what the optimizer remembers of them, by name."""
        moments = self.optimizer.state
        return {
            "tensors": {name: tensor.detach().clone() for name, tensor in self.tensors.items()},
            "moments": {name: copy.deepcopy(moments[own]) for name, own in self.tensors.items() if own in moments},
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name in state["tensors"]}
        for name, own in self.tensors.items():
            own.copy_(state["tensors"][name])
            self.optimizer.state.pop(own, None)
            if name in state["moments"]:
                self.optimizer.state[own] = placed_moments(state["moments"][name], own)
