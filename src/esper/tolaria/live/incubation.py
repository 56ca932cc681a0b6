"""Train seeds behind a host that the user's own loop trains; the host's numbers stay the same, bit for bit."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.kasmina.graft.grafted import planted_at, undisturbed
from esper.kasmina.graft.planted import Mode, Planted
from esper.kasmina.graft.recording import call
from esper.kasmina.graft.sharding import gather, in_parts, own_part
from esper.leyline.messages import InputError, in_words, kind_of
from esper.tolaria.live.groups import Groups
from esper.tolaria.live.missing import frozen
from esper.tolaria.live.probe import Probe
from esper.tolaria.live.ranks import Ranks

Scale = Callable[[Tensor], Tensor]


class Incubation:
    """Trains the seeds of one network that are in stage TRAINING.

    Straight-through: the host's own backward passes compute the gradients. They are taken off the parameters at once, so that
    gradient clipping, a GradScaler and the optimizer's step do not see them. Shadow: a second forward and backward pass, in which
    the seed acts at dose 1, on the weights from which the loop's step began: what the optimizer is about to replace is kept until
    then. In both cases the optimizer then steps only the groups of these seeds, once for each step that the loop has taken.

    A loop throws a pass away by dropping the gradients of the host, in one of many ways: `optimizer.zero_grad`,
    `model.zero_grad`, `parameter.grad = None`, zeros in place. A hook on one of these would miss the others. So what seeds took
    is tied to the host's gradients themselves: where a backward pass or a step of the optimizer begins and the host holds no
    gradient, what was taken before is dropped as well. A step that the loop or its GradScaler skips does not reach the hook of
    the optimizer, and no seed learns from it.

    Where nothing of the host trains, there is nothing to protect and nothing to look at: the gradients of straight-through seeds
    then stay on their parameters, and the loop's own step trains them. Where parameters train that no pass of the seeds reaches,
    these show nothing either, and a seed learns from every pass since the last step.

    straight: whether seeds train straight-through. alone: the parameters of those that do, if nothing else trains. idle: calls of
    `train` since the loop's optimizer last took a step. calls, idle_calls: calls of `train`, and those of
    them with no step since the call before, since the caller last set both to 0.
    """

    def __init__(self, network: nn.Module, groups: Groups, probe: Probe, proximal: float, ranks: Ranks) -> None:
        """proximal: weight of |change|^2 / |stream|^2 in the straight-through objective."""
        self.network, self.groups, self.probe, self.proximal, self.ranks = network, groups, probe, proximal, ranks
        self.scale: Scale | None = None  # multiplies a loss as the loop's GradScaler does
        self.straight, self.idle, self.calls, self.idle_calls = True, 0, 0, 0
        self.alone: list[nn.Parameter] = []
        self.names: tuple[str, ...] = ()
        self._taken: dict[str, dict[int, Tensor]] = {}  # gradients by site and index among the seed's parameters
        self._used: dict[str, dict[int, Tensor]] = {}  # those that were there when the optimizer stepped
        self._handles: dict[str, list[RemovableHandle]] = {}
        self._passes: dict[tuple[str, int], int] = {}  # by parameter: number of backward passes that it was taken from
        self._usual = 1  # number of backward passes of an optimizer step
        self._norms: dict[str, tuple[Tensor, int]] = {}  # sum of the norms, and their number
        self._host: list[nn.Parameter] = []  # whose gradients show what the loop keeps
        self._reached: set[int] = set()  # ids of parameters that were seen with a gradient
        self._watch: list[Any] = []  # handles of the hooks that notice the beginning of a backward pass
        self._pass = -1  # number of the backward pass that last reached parameters in parts
        self._parts: dict[int, weakref.ref[Tensor]] = {}  # by id of a parameter in parts: its gradient after that pass
        self._kept: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # parameters, each with room for two of its values
        self._layouts: list[Any] = []  # of these parameters
        self._before = False  # whether the first of these are those before the last optimizer step
        self._stepped = False  # whether the optimizer took a step since the last call of `train`
        self._overflow: Tensor | None = None  # () above 0 if gradients overflowed, so that this step changed nothing
        self._steps = (
            groups.optimizer.register_step_pre_hook(lambda *_: self._on_step()),
            groups.optimizer.register_step_post_hook(lambda *_: self._on_stepped()),
        )

    def follow(self, names: Sequence[str]) -> None:
        """Train these seeds from now on, and no others."""
        for name in self.names:
            if name not in names or not self.straight:
                self._release(name)
        self.names = tuple(names)
        if not names or self.straight:
            self._kept, self._layouts, self._before = [], [], False
        for name in names if self.straight else ():
            if name not in self._handles:
                self._handles[name] = [
                    parameter.register_post_accumulate_grad_hook(partial(self._take, name, place))
                    for place, parameter in enumerate(self._seed(name).trained())
                ]
        self._set_pull()
        self._watch_passes()

    def forget(self, name: str) -> None:
        """Drop a seed that was removed."""
        self._release(name)
        self._norms.pop(name, None)
        self.names = tuple(each for each in self.names if each != name)
        self._watch_passes()

    def close(self) -> None:
        """Leave nothing on the optimizer."""
        for handle in self._steps:
            handle.remove()

    def train(self, batch: tuple[Any, Any] | None) -> bool:
        """Take one step of every seed, with the gradients of the loop's backward passes, or in a pass of its own on a batch.

        Nothing happens where the loop's optimizer has taken no step since the last call; returns whether it has.
        """
        stepped = self._stepped and not (self._overflow is not None and bool(self._overflow))
        self._stepped, self._overflow = False, None
        self.idle = 0 if stepped else self.idle + 1
        self.calls, self.idle_calls = self.calls + 1, self.idle_calls + (not stepped)
        if not stepped or not self.names or self.alone:
            self._before = False
            self._set_pull()
            return stepped
        trained = {name: self._seed(name).trained() for name in self.names}
        if batch is not None:
            found = self._shadows(trained, *batch)
        else:
            used = {name: self._used.pop(name, {}) for name in trained}
            found = {name: [used[name].get(place) for place in range(len(own))] for name, own in trained.items()}
        if self.ranks.size > 1:  # another process may have called the site
            for name, own in trained.items():
                pairs = zip(found[name], own, strict=True)
                found[name] = [torch.zeros_like(parameter) if each is None else each for each, parameter in pairs]
        self.ranks.average([gradient for each in found.values() for gradient in each if gradient is not None])
        stepping = [name for name in self.names if self._note_norm(name, found[name])]
        for name in stepping:
            for parameter, gradient in zip(trained[name], found[name], strict=True):
                parameter.grad = gradient
        self.groups.step(stepping)
        for name in stepping:
            for parameter in trained[name]:
                parameter.grad = None
        self._set_pull()
        return True

    def norms(self) -> dict[str, Tensor]:
        """Return by site the mean gradient norm since the last call, for seeds that were trained."""
        found = {name: total / number for name, (total, number) in self._norms.items()}
        self._norms.clear()
        return found

    def state(self) -> dict[str, Any]:
        norms = {name: {"sum": total.clone(), "count": number} for name, (total, number) in self._norms.items()}
        return {"straight": self.straight, "passes": self._usual, "norms": norms}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.straight, self._usual = bool(state["straight"]), int(state["passes"])
        self._norms = {name: (entry["sum"].clone(), int(entry["count"])) for name, entry in state["norms"].items()}

    def _seed(self, name: str) -> Planted:
        planted = planted_at(self.network, name)
        assert planted is not None, "an incubating seed must be in the network"
        return planted

    def _take(self, name: str, place: int, parameter: Tensor) -> None:
        """Take a gradient off its parameter as soon as it is computed."""
        if in_parts(parameter):
            self._part_arrived(parameter)
        self._passes[name, place] = self._passes.get((name, place), 0) + 1
        if not self._host_shows():
            self._note_reached(self._host)
        if self.alone:
            return
        assert parameter.grad is not None, "the hook runs after the gradient is computed"
        gradient = parameter.grad.detach()  # of a pass with create_graph=True, whose graph nothing here needs
        parameter.grad = None
        if self.scale is not None:
            gradient = gradient / self.scale(gradient.new_ones(()))
        taken = self._taken.setdefault(name, {})
        taken[place] = gradient if place not in taken else taken[place] + gradient

    def _release(self, name: str) -> None:
        for handle in self._handles.pop(name, ()):
            handle.remove()
        self._taken.pop(name, None)
        self._used.pop(name, None)
        self._passes = {owner: number for owner, number in self._passes.items() if owner[0] != name}

    def _watch_passes(self) -> None:
        """Look at the host's gradients at the beginning of each backward pass while seeds learn from these passes."""
        for handle in self._watch:
            handle.remove()
        self._watch, self.alone = [], []
        if not self.names or not self.straight:
            return
        own = [parameter for name in self.names for parameter in self._seed(name).trained()]
        network, seeds = {id(p) for p in self.network.parameters()}, {id(p) for p in own}
        held = (p for group in self.groups.optimizer.param_groups for p in group["params"])
        self._host = [p for p in held if p.requires_grad and id(p) in network and id(p) not in seeds]
        if not self._host:
            self._host = self.alone = own
        self._reached &= {id(parameter) for parameter in (*self._host, *own)}
        if any(map(in_parts, own)):
            self._watch = [p.register_post_accumulate_grad_hook(self._part_arrived) for p in self._host]
            return
        # The first gradient that a pass computes, before it is added to any parameter, finds what was there before the pass.
        hook = torch.autograd.graph.register_multi_grad_hook(
            [*self._host, *own], lambda _: self._drop_what_the_host_dropped(self._host), mode="any"
        )
        self._watch = [hook]

    def _part_arrived(self, parameter: Tensor) -> None:
        """Notice the beginning of a backward pass under FSDP, which computes no gradient of a part that a hook could wait for.

        FSDP adds to the gradient of a part, or makes a new one, and calls this. What was there before the pass is the same tensor
        still, except for this parameter, to which it has been added already.
        """
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass = current
            self._drop_what_the_host_dropped([p for p in self._host if p is not parameter] or self._host)
        if parameter.grad is not None:
            self._parts[id(parameter)] = weakref.ref(parameter.grad)

    def _drop_what_the_host_dropped(self, host: Sequence[nn.Parameter]) -> None:
        """Drop the gradients that were taken if the host holds none; reads the device where it holds some, if only zeros."""
        for parameter in host:
            gradient = parameter.grad
            if gradient is None or (
                in_parts(gradient) and self._parts.get(id(parameter), lambda: None)() is not gradient
            ):
                continue
            if own_part(gradient).any():
                return
        if self._host_shows():
            self._forget_passes()

    def _host_shows(self) -> bool:
        """Return whether passes reach any of the parameters whose gradients show what the loop keeps."""
        return any(id(parameter) in self._reached for parameter in self._host)

    def _note_reached(self, parameters: Iterable[nn.Parameter]) -> None:
        self._reached.update(id(parameter) for parameter in parameters if parameter.grad is not None)

    def _forget_passes(self) -> None:
        """Take what the next pass gives for the first."""
        self._taken.clear()
        self._passes.clear()

    def _on_step(self) -> None:
        """Keep what incubation needs of the state before the loop's optimizer steps."""
        if self.names and self.straight:
            self._drop_what_the_host_dropped(self._host)
        elif self.names:  # keep the weights that the step is about to replace
            held = [p for group in self.groups.optimizer.param_groups for p in group["params"] if p.requires_grad]
            if list(map(_layout, held)) != self._layouts:
                self._layouts = list(map(_layout, held))
                self._kept = [(p, torch.empty_like(p), torch.empty_like(p)) for p in held]
            _copy([first for _, first, _ in self._kept], held)
            self._before = True

    def _on_stepped(self) -> None:
        """Note what the loop's optimizer stepped on: a closure may have run its backward pass in between."""
        self._stepped = True
        # A GradScaler leaves it to a fused optimizer to skip a step, and tells it by this attribute.
        self._overflow = getattr(self.groups.optimizer, "found_inf", None)
        self._used = {name: dict(taken) for name, taken in self._taken.items()}
        self._usual = max(self._passes.values(), default=self._usual)
        self._note_reached(p for group in self.groups.optimizer.param_groups for p in group["params"])
        if not self._host_shows():
            self._forget_passes()
        for name in self.names if self.alone else ():
            self._note_norm(name, [parameter.grad for parameter in self._seed(name).trained()])

    def _set_pull(self) -> None:
        """Scale the proximal term as the loop scales its loss, and divide it by the number of backward passes in a step."""
        for name in self.names if self.straight else ():
            pull = self._seed(name).pull
            weight = pull.new_tensor((-1 if self.groups.maximizes(name) else 1) * self.proximal / self._usual)
            pull.copy_(weight if self.scale is None else self.scale(weight))

    def _shadows(self, trained: Mapping[str, Sequence[nn.Parameter]], x: Any, y: Any) -> dict[str, list[Tensor | None]]:
        """Compute by site the gradients of the network's loss with that one seed at dose 1, in evaluation mode.

        The pass of a batch is of the weights from which the loop's step began, where these are known.
        """
        parameters, first, now = zip(*self._kept, strict=True) if self._before else ((), (), ())
        _copy(now, parameters)
        _copy(parameters, first)
        try:
            with undisturbed(self.network), torch.enable_grad(), frozen(self.network):
                return {name: self._shadow(name, own, x, y) for name, own in trained.items()}
        finally:
            _copy(parameters, now)
            self._before = False

    def _shadow(self, name: str, parameters: Sequence[nn.Parameter], x: Any, y: Any) -> list[Tensor | None]:
        """Compute the gradients of the loss of a network that is in evaluation mode, with one seed at dose 1."""
        planted = self._seed(name)
        mode, alpha = planted.mode, planted.alpha.clone()
        seen: list[bool] = []  # for every call of the seed, whether gradients were recorded
        watch = planted.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
        try:
            for parameter in parameters:
                parameter.requires_grad_(True)
            planted.mode = Mode.ON
            planted.alpha.fill_(1)
            with in_words(
                f"growth.step(x, y) was given {_described(x)} as x and {_described(y)} as y, on which the model or the loss "
                "fails",
                "give the batch of this step as the loop gives it to the model and the loss, on the device of the model; a tuple "
                "or a mapping as x is the arguments of the model",
            ):
                loss = self.probe.mean(call(self.network, x), y)
            gradients: list[Tensor | None] = [None] * len(parameters)
            if loss.requires_grad:  # the pass called the site
                # The probe compares losses, of which less is better, whatever the loop's optimizer is told.
                gradients = _gradients(-loss if self.groups.maximizes(name) else loss, parameters)
        finally:
            watch.remove()
            planted.mode = mode
            planted.alpha.copy_(alpha)
            for parameter in parameters:
                parameter.requires_grad_(False)
        if seen and not any(seen):
            raise InputError(
                f"site {name!r} runs without gradients in evaluation mode, as within torch.no_grad or a reentrant checkpoint, so "
                "its seed cannot learn in a pass of its own; call growth.step() without a batch, or use_reentrant=False"
            )
        return gradients

    def _note_norm(self, name: str, gradients: Sequence[Tensor | None]) -> bool:
        """Add the norm of a seed's gradients to those since the last measurement; returns whether they are any to step by."""
        known = [gradient for gradient in gradients if gradient is not None]
        if not known:  # no pass called the site
            return False
        norm = torch.linalg.vector_norm(torch.stack([gather(torch.linalg.vector_norm(each)) for each in known]))
        if self.scale is not None and not bool(torch.isfinite(norm)):  # a GradScaler skips such a step too
            return False
        total, number = self._norms.get(name, (torch.zeros_like(norm), 0))
        self._norms[name] = total + norm, number + 1
        return True


def _layout(parameter: Tensor) -> tuple[Any, ...]:
    """Return what must be the same for a copy of a parameter to hold another of its values."""
    return id(parameter), parameter.shape, parameter.dtype, parameter.device


@torch.no_grad()
def _copy(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into tensors, in few calls: a call for each takes as long as the pass of a small network."""
    if targets and in_parts(targets[0]):  # as all of a model are, or none
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
    elif targets:
        torch._foreach_copy_(list(targets), list(values))


def _described(given: Any) -> str:
    """Return what a batch holds, in words; reads nothing from the device."""
    if not isinstance(given, Tensor):
        return kind_of(given)
    return f"a tensor of {given.dtype} and shape {tuple(given.shape)} on {given.device}"


def _gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Return the gradients of a seed, which has none yet; None for a parameter that the loss does not depend on."""
    if not any(map(in_parts, parameters)):
        return list(torch.autograd.grad(loss, parameters, allow_unused=True))
    loss.backward()  # the graph has whole parameters, whose gradients FSDP brings to the parts
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients
