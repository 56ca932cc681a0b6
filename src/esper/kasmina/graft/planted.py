"""Run the seed at a site of a grafted module: what it reads, how it acts now, and how it incubates. B examples."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.catalog import Copies
from esper.kasmina.blueprints.functions import RELU, Pointwise
from esper.kasmina.slot import Proximal, Seed, Straight, blend_change, slot_change
from esper.leyline.lifecycle.slots import STREAMS, Kind, Site, Tap, arranged, restored
from esper.leyline.lifecycle.vocabulary import Blend


class Mode(StrEnum):
    """Says how a seed takes part in a forward pass."""

    OFF = "off"  # the seed does not run; the output of the site is the very tensor that the submodule returned
    # the output has the values that the submodule returned, and the gradient reaches the seed as well
    STRAIGHT = "straight"
    ON = "on"  # the seed acts at its dose `alpha`


class Recipe(NamedTuple):
    """Says from what a seed is rebuilt when its network is loaded."""

    site: Site  # the site that it was planted at, in the network that was grafted
    blueprint: str  # name of its blueprint
    reads: int  # width of what it reads
    function: Pointwise = RELU  # of its hidden layer, where it is a bypass with one
    counts: Mapping[str, Mapping[str, int]] = {}  # of its units, where it is a narrow copy


Run = Callable[[nn.Module, Tensor], Tensor]
"""Calls a block on a stream (B, ...), and returns what it adds."""


_BLENDS = {blend.name: blend for blend in Blend}


class Planted(nn.Module):
    """Holds a seed in a network, with its dose.

    The dose is a buffer, so that a compiled network reads it anew in every pass. What a compiled network is specialised to are
    `mode`, `attached`, `tap` and `blend`. A pass reads them as plain strings: torch.compile takes two members of an enumeration
    that are the same object for one thing, and does not notice when one of the two places gets another member.

    reads: the value of the tap. kind: of the stream. axes: `Stream.permutation`. attached: whether the gradient of the seed
    reaches what it reads. again: whether it reads what its submodule adds to the stream in a second run (`grown.called_on`).
    copies: as in `Blueprint`. fixed: names of parameters that never train.
    recipe: what it is built from again; None where nobody knows.
    alpha (): the dose in mode ON, a buffer.
    pull (): weight of |c|^2 / |h|^2 in the objective of a seed in mode STRAIGHT, a buffer that is not saved.
    """

    axes: tuple[int, ...] = ()
    again = False
    copies: Copies = ""
    units = 0  # those of a narrow copy
    fixed: frozenset[str] = frozenset()
    alpha: Tensor
    pull: Tensor

    def __init__(
        self,
        seed: Seed,
        tap: Tap,
        blend: Blend,
        kind: Kind,
        axes: tuple[int, ...] = (),
        *,
        again: bool = False,
        copies: Copies = "",
    ) -> None:
        super().__init__()
        like = next(seed.parameters())
        self.seed = seed
        if blend != Blend.GATE:
            del self.seed.gate  # a parameter that no loss depends on
        self.kind, self.axes, self.again, self.copies, self.attached = kind, axes, again, copies, True
        self.recipe: Recipe | None = None
        self.reads, self._blend, self._mode = tap.value, blend.name, Mode.OFF.value
        self.register_buffer("alpha", like.detach().new_zeros(()))
        self.register_buffer("pull", like.detach().new_zeros(()), persistent=False)

    @property
    def mode(self) -> Mode:
        """How the seed takes part in a pass."""
        return Mode(self._mode)

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._mode = mode.value

    @property
    def tap(self) -> Tap:
        """What the seed reads."""
        return Tap(self.reads)

    @property
    def blend(self) -> Blend:
        """How the change of the seed enters the stream."""
        return _BLENDS[self._blend]

    @property
    def runs(self) -> bool:
        """Whether the seed takes part in a pass at all."""
        return self._mode != "off"

    @property
    def acts(self) -> bool:
        """Whether the seed changes the stream."""
        return self._mode == "on"

    def forward(self, h: Tensor, u: Tensor, run: Run | None = None) -> Tensor:
        """Return the stream behind the site: h (B, ...) in front of the seed, u (B, ...) what the seed reads.

        run: for a seed that is a copy of its submodule, calls it and returns what it adds.
        """
        # a copy is called on a stream whose axes are in the order of its submodule
        further = () if run is None else (lambda b, u: arranged(run(b, restored(u, self.axes)), self.axes),)
        stream, blend = STREAMS[self.kind], _BLENDS[self._blend]
        if self._mode == "on":
            read = u if self.attached else u.detach()
            here, read = arranged(h, self.axes), arranged(read, self.axes)
            read = stream.fitted(read, here)
            change = slot_change(stream, here, read, self.seed, self.alpha, blend, *further)
            return (h + restored(change, self.axes)).to(h.dtype)
        if self._mode == "off" or not torch.is_grad_enabled():
            return h
        base = h.detach()
        here = arranged(base, self.axes)
        read = stream.fitted(arranged(u.detach(), self.axes), here)
        change = slot_change(stream, here, read, self.seed, None, blend, *further)
        change = Proximal.of(restored(change.to(h.dtype), self.axes), base, self.pull)
        # A clone, as a module behind it may work in place, which the view of a Function does not allow.
        return Straight.of(h, change, None).clone()

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that an optimizer moves, in their order."""
        return [parameter for name, parameter in self.named_parameters() if name not in self.fixed]

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of the seed by name, the gate only where it is used."""
        return self.seed.state_dict()

    @property
    def learns(self) -> bool:
        """Whether gradients reach its parameters."""
        return any(parameter.requires_grad for parameter in self.parameters())

    def learn(self, learns: bool) -> None:
        """Set whether gradients reach its parameters from now on; where they do not, those that are there are dropped."""
        for parameter in self.trained():
            parameter.requires_grad_(learns)
        if not learns:
            self.zero_grad()

    def extra_repr(self) -> str:
        """Return what `print` shows beside the seed."""
        return f"tap={self.tap.value}, blend={self.blend.name}, mode={self.mode.value}"


class Seat(Planted):
    """Holds the place of a seed of one blueprint. With equal weights it computes what a `Planted` does, value by value.

    taken: whether a seed is planted here; a seat that is free leaves the stream as it is. learns: whether gradients stay on its
    parameters.

    switch (4,): int8, whether the seed acts, whether it learns straight-through, whether its gradient reaches what it reads, and
    its blend; a buffer that is not saved, which follows these attributes.
    """

    taken = False
    learns = False
    switch: Tensor

    def __init__(self, seed: Seed, tap: Tap, kind: Kind, axes: tuple[int, ...] = ()) -> None:
        super().__init__(seed, tap, Blend.GATE, kind, axes)
        self.register_buffer("switch", torch.zeros(4, dtype=torch.int8, device=self.alpha.device), persistent=False)
        self._blend = Blend.ADD.name

    def __setattr__(self, name: str, value: Any) -> None:
        """Let `switch` follow: a pass reads it in place of the attributes, so that no graph depends on them."""
        changed = name in ("_mode", "_blend", "attached") and vars(self).get(name) != value
        super().__setattr__(name, value)
        if changed and "switch" in self._buffers:
            values = (self._mode == "on", self._mode == "straight", self.attached, _BLENDS[self._blend])
            with torch.no_grad():
                self.switch.copy_(torch.tensor(values, dtype=torch.int8))

    @torch.no_grad()
    def take(self, planted: Planted) -> None:
        """Let a seed of the same blueprint be planted here, with its weights."""
        own, theirs = (dict((*each.named_parameters(), *each.named_buffers())) for each in (self.seed, planted.seed))
        for name, tensor in own.items():
            if name in theirs:
                tensor.copy_(theirs[name])
            else:
                tensor.zero_()  # the gate of a seed that blends otherwise
        self._blend, self.taken, self.learns = planted.blend.name, True, True
        self.pull.zero_()

    @torch.no_grad()
    def free(self) -> None:
        """Let the seed do nothing from now on."""
        self.learn(False)
        self.taken, self.mode, self.attached, self._blend = False, Mode.OFF, True, Blend.ADD.name
        self.alpha.zero_()
        self.pull.zero_()

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that an optimizer moves, in their order: the gate only where it is used."""
        return list((self.seed if self.blend == Blend.GATE else self.seed.delta).parameters())

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of the seed by name, the gate only where it is used."""
        gated = self.blend == Blend.GATE
        return {name: own for name, own in super().weights().items() if gated or not name.startswith("gate.")}

    def learn(self, learns: bool) -> None:
        """Set whether gradients stay on its parameters from now on; where they do not, those that are there are dropped."""
        self.learns = learns
        if not learns:
            self.zero_grad()

    def drops(self, parameter: Tensor) -> bool:
        """Return whether a gradient of a parameter is of no use: an optimizer would move what it is for, or clip by it."""
        if not self.learns or self._mode == "off":
            return True
        return self.blend != Blend.GATE and any(parameter is p for p in self.seed.gate.parameters())

    def planted(self) -> Planted:
        """Return the seed on its own, with the same parameters."""
        planted = Planted(self.seed, self.tap, self.blend, self.kind, self.axes).train(self.training)
        planted.mode, planted.attached, planted.recipe = self.mode, self.attached, self.recipe
        planted.alpha.copy_(self.alpha)
        return planted

    def forward(self, y: Tensor, h: Tensor, u: Tensor) -> Tensor:  # type: ignore[override]
        """Return the stream (B, ...) behind this seat: y is behind the seat before, h in front of all seats, u what it reads."""
        stream = STREAMS[self.kind]
        on, straight, attached = self.switch[:3].bool().unbind()
        base = arranged(_passing(h, on), self.axes)
        read = stream.fitted(arranged(_passing(u, on & attached), self.axes), base)
        delta = self.seed.delta(read)
        gate = stream.spread(self.seed.gate(stream.gated(read)))
        dose = torch.where(straight, torch.ones_like(self.alpha), self.alpha)
        change, _ = blend_change(base, delta, gate, dose, self.switch[3])
        pull = torch.where(straight, self.pull, torch.zeros_like(self.pull))
        change = Proximal.of(restored(change.to(h.dtype), self.axes), h.detach(), pull)
        y = Straight.of(y, torch.where(straight, change, change.detach()), None)
        return torch.where(on, y + change, y)

    def extra_repr(self) -> str:
        """Return what `print` shows beside the seed."""
        return super().extra_repr() if self.taken else f"tap={self.tap.value}, free"


class Bank(nn.Module):
    """Holds the seats at one site, by the name of their blueprint; a seed is planted in at most one of them."""

    def __init__(self, seats: Mapping[str, Seat]) -> None:
        super().__init__()
        self.seats = nn.ModuleDict(seats)

    def all(self) -> list[Seat]:
        """Return every seat, in the order of the menu."""
        return [seat for seat in self.seats.values() if isinstance(seat, Seat)]

    def seat(self, blueprint: str) -> Seat:
        """Return the seat of a blueprint."""
        seat = self.seats[blueprint]
        assert isinstance(seat, Seat)
        return seat

    def taken(self) -> Seat | None:
        """Return the seat in which a seed is planted."""
        return next((seat for seat in self.all() if seat.taken), None)

    def runs(self) -> list[Seat]:
        """Return the seats that run in a pass: all of them, but for a pass without compilation or gradients those that act."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return self.all()
        return [seat for seat in self.all() if seat.mode == Mode.ON]


def _passing(value: Tensor, passes: Tensor) -> Tensor:
    """Return a tensor, bit for bit, whose gradient passes where `passes` () is true and is 0 elsewhere.

    The gradient is selected, and not multiplied, as 0 times nan is nan. Nothing reads what is selected in the forward pass, so
    that a compiled one leaves it out.
    """
    return Straight.of(value.detach(), torch.where(passes, value, value.detach()), None)
