"""The training of seeds behind a host that the user's own loop trains; the host's numbers stay the same, bit for bit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.kasmina.arena import Seat
from esper.kasmina.grafted import planted_at
from esper.kasmina.planted import Mode, Planted
from esper.kasmina.sharding import gather, in_parts, reshard
from esper.kasmina.survey import call, undisturbed
from esper.leyline.errors import InputError
from esper.tolaria.groups import Groups
from esper.tolaria.live_probe import Probe
from esper.tolaria.ranks import Ranks

Scale = Callable[[Tensor], Tensor]


class Incubation:
    """Train the seeds of one network that are in stage TRAINING.

    Straight-through: the host's own backward pass computes the gradients. They are taken off the parameters at once, so
    that gradient clipping, a GradScaler and the optimizer's step do not see them. Shadow: a second forward and backward
    pass, in which the seed acts at dose 1, on the weights from which the loop's step began: what the optimizer is about to
    replace is kept until then. In both cases the optimizer then steps only the groups of these seeds.

    straight: whether seeds train straight-through.
    """

    def __init__(self, network: nn.Module, groups: Groups, probe: Probe, proximal: float, ranks: Ranks) -> None:
        """proximal: weight of |change|^2 / |stream|^2 in the straight-through objective."""
        self.network, self.groups, self.probe, self.proximal, self.ranks = network, groups, probe, proximal, ranks
        self.scale: Scale | None = None  # multiplies a loss as the loop's GradScaler does
        self.straight = True
        self.names: tuple[str, ...] = ()
        self._gradients: dict[str, dict[int, Tensor]] = {}  # by site and index among the seed's parameters
        self._handles: dict[str, list[RemovableHandle]] = {}
        self._passes: dict[
            tuple[str, int], int
        ] = {}  # by parameter: number of backward passes since the last optimizer step
        self._usual = 1  # number of backward passes between two optimizer steps
        self._norms: dict[str, tuple[Tensor, int]] = {}  # sum of the norms, and their number
        self._watch: RemovableHandle | None = None  # of the optimizer's steps
        self._before: list[tuple[nn.Parameter, Tensor]] = []  # parameters as they were before the last optimizer step

    def follow(self, names: Sequence[str]) -> None:
        """Train these seeds from now on, and no others."""
        for name in self.names:
            if name not in names or not self.straight:
                self._release(name)
        self.names = tuple(names)
        for name in names if self.straight else ():
            if name not in self._handles:
                self._handles[name] = [
                    parameter.register_post_accumulate_grad_hook(partial(self._take, name, place))
                    for place, parameter in enumerate(self._seed(name).trained())
                ]
        self._set_pull()
        self._watch_steps(bool(names) and not self.straight)

    def forget(self, name: str) -> None:
        """Drop a seed that was removed."""
        self._release(name)
        self._norms.pop(name, None)
        self.names = tuple(each for each in self.names if each != name)
        self._watch_steps(bool(self.names) and not self.straight)

    def train(self, batch: tuple[Any, Any] | None) -> None:
        """Take one step of every seed, with the gradients of the loop's backward passes, or in a pass of its own on a batch."""
        with self._as_before():
            found = {name: self._gradients_of(name, batch) for name in self.names}
        self.ranks.average([gradient for each in found.values() for gradient in each if gradient is not None])
        for name, gradients in found.items():
            self._step(name, self._seed(name), gradients)
        if batch is None and self._passes:
            self._usual = max(self._passes.values())
            self._passes.clear()
        self._set_pull()

    def norms(self) -> dict[str, Tensor]:
        """Return by site the mean gradient norm since the last call, for seeds that were trained."""
        found = {name: total / number for name, (total, number) in self._norms.items()}
        self._norms.clear()
        return found

    def state(self) -> dict[str, Any]:
        """Return the state between two steps."""
        norms = {name: {"sum": total.clone(), "count": number} for name, (total, number) in self._norms.items()}
        return {"straight": self.straight, "passes": self._usual, "norms": norms}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.straight, self._usual = bool(state["straight"]), int(state["passes"])
        self._norms = {name: (entry["sum"].clone(), int(entry["count"])) for name, entry in state["norms"].items()}

    def _seed(self, name: str) -> Planted | Seat:
        planted = planted_at(self.network, name)
        assert planted is not None, "an incubating seed must be in the network"
        return planted

    def _gradients_of(self, name: str, batch: tuple[Any, Any] | None) -> list[Tensor | None]:
        """Return the gradients of a seed, one for each parameter; None if no pass called the site in any process."""
        seed = self._seed(name)
        if batch is not None:
            gradients = self._shadow(name, seed, *batch)
        else:
            kept = self._gradients.pop(name, {})
            gradients = [kept.get(place) for place in range(len(seed.trained()))]
        if self.ranks.size > 1:
            owners = zip(gradients, seed.trained(), strict=True)
            return [torch.zeros_like(parameter) if each is None else each for each, parameter in owners]
        return gradients

    def _take(self, name: str, place: int, parameter: Tensor) -> None:
        """Take a gradient off its parameter as soon as it is computed."""
        gradient = parameter.grad
        assert gradient is not None, "the hook runs after the gradient is computed"
        parameter.grad = None
        if self.scale is not None:
            gradient = gradient / self.scale(gradient.new_ones(()))
        kept = self._gradients.setdefault(name, {})
        kept[place] = gradient if place not in kept else kept[place] + gradient
        self._passes[name, place] = self._passes.get((name, place), 0) + 1

    def _release(self, name: str) -> None:
        for handle in self._handles.pop(name, ()):
            handle.remove()
        self._gradients.pop(name, None)
        self._passes = {owner: number for owner, number in self._passes.items() if owner[0] != name}

    def _watch_steps(self, watch: bool) -> None:
        """Keep what each step of the optimizer replaces from now on, or no more."""
        if watch == (self._watch is not None):
            return
        if self._watch is not None:
            self._watch.remove()
            self._watch, self._before = None, []
        else:
            self._watch = self.groups.optimizer.register_step_pre_hook(lambda *_: self._keep())

    @torch.no_grad()
    def _keep(self) -> None:
        """Keep the weights that a step of the loop's optimizer is about to replace."""
        held = (p for group in self.groups.optimizer.param_groups for p in group["params"])
        self._before = [(parameter, parameter.clone()) for parameter in held if parameter.requires_grad]

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Set every weight to its value before the last optimizer step, if that is known, and restore it afterwards."""
        with torch.no_grad():
            now = [(parameter, parameter.clone()) for parameter, _ in self._before]
            for parameter, value in self._before:
                parameter.copy_(value)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in now:
                    parameter.copy_(value)
            self._before = []

    def _set_pull(self) -> None:
        """Scale the proximal term as the loop scales its loss, and divide it by the number of backward passes in a step."""
        for name in self.names:
            pull = self._seed(name).pull
            weight = pull.new_tensor(self.proximal / self._usual)
            pull.copy_(weight if self.scale is None else self.scale(weight))

    def _shadow(self, name: str, planted: Planted | Seat, x: Any, y: Any) -> list[Tensor | None]:
        """Compute the gradients of the network's loss with this one seed at dose 1, in evaluation mode."""
        parameters = planted.trained()
        others = [p for p in self.network.parameters() if p.requires_grad and not any(p is mine for mine in parameters)]
        mode, alpha = planted.mode, planted.alpha.clone()
        seen: list[bool] = []  # for every call of the seed, whether gradients were recorded
        watch = planted.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
        with undisturbed(self.network), torch.enable_grad():
            for parameter in others:
                parameter.requires_grad_(False)
            try:
                planted.mode = Mode.ON
                planted.alpha.fill_(1)
                loss = self.probe.mean(call(self.network, x), y)
                gradients: list[Tensor | None] = [None] * len(parameters)
                if loss.requires_grad:  # the pass called the site
                    gradients = _gradients(loss, parameters)
            finally:
                watch.remove()
                planted.mode = mode
                planted.alpha.copy_(alpha)
                for parameter in others:
                    parameter.requires_grad_(True)
                reshard(self.network)  # what is still whole would go on without a gradient
        if seen and not any(seen):
            raise InputError(
                f"site {name!r} runs without gradients in evaluation mode, as within torch.no_grad or a reentrant checkpoint, so "
                "its seed cannot learn in a pass of its own; call growth.step() without a batch, or use_reentrant=False"
            )
        return gradients

    def _step(self, name: str, planted: Planted | Seat, gradients: Sequence[Tensor | None]) -> None:
        """Take an optimizer step of one seed."""
        known = [gradient for gradient in gradients if gradient is not None]
        if not known:  # no pass called the site
            return
        norm = torch.linalg.vector_norm(torch.stack([gather(torch.linalg.vector_norm(each)) for each in known]))
        if self.scale is not None and not bool(torch.isfinite(norm)):  # a GradScaler skips such a step too
            return
        total, number = self._norms.get(name, (torch.zeros_like(norm), 0))
        self._norms[name] = total + norm, number + 1
        parameters = planted.trained()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with self.groups.only([name]) as optimizer:
            optimizer.step()
        self._before = []  # of the seed alone
        for parameter in parameters:
            parameter.grad = None


def _gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """The gradients of a seed, which has none yet; None for a parameter that the loss does not depend on."""
    if not any(map(in_parts, parameters)):
        return list(torch.autograd.grad(loss, parameters, allow_unused=True))
    loss.backward()  # the graph has whole parameters, whose gradients FSDP brings to the parts
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients
