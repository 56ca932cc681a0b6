"""Train the network without one of its seeds beside it: what the network would be if that seed had not been planted."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.kasmina.graft.grafted import planted_at
from esper.kasmina.graft.planted import Mode
from esper.kasmina.graft.recording import call
from esper.tolaria.live.groups import Groups, placed_moments
from esper.tolaria.live.probe import Probe


class Twin:
    """Copies the parameters and buffers that a network has beside one seed, and takes the steps of the loop on the copies.

    Calling it runs the network on the copies, without that seed. Removing a seed from a network that was trained with it
    overstates the worth of the seed, because the rest has come to rely on it.

    site: of the seed that is left out. tensors: the copies by name. Clipping of gradients and a GradScaler are not repeated.
    """

    def __init__(self, network: nn.Module, groups: Groups, site: str, prefix: str) -> None:
        """prefix: with which the names of the seed begin."""
        self.network, self.site = network, site
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
        assert planted is not None, "a twin lives as long as its seed is on trial"
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
        if not trained:  # beside the seed everything is frozen
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

    def forget(self, prefix: str) -> None:
        """Leave out another seed too, which was removed."""
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
        """Restore a `state`."""
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name in state["tensors"]}
        for name, own in self.tensors.items():
            own.copy_(state["tensors"][name])
            self.optimizer.state.pop(own, None)
            if name in state["moments"]:
                self.optimizer.state[own] = placed_moments(state["moments"][name], own)
