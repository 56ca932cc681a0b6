"""The seed at a site of a grafted module: what it reads, how it acts now, and how it incubates. B examples."""

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.blending import Proximal, Straight
from esper.kasmina.slot import Seed, slot_change, slot_output
from esper.leyline.actions import Blend
from esper.leyline.sites import Site
from esper.leyline.slots import Tap
from esper.leyline.streams import STREAMS, Kind


class Mode(StrEnum):
    """How a seed takes part in a forward pass.

    Attributes:
        OFF: the seed does not run; the output of the site is the very tensor that the submodule returned
        STRAIGHT: the output has the values that the submodule returned, and the gradient reaches the seed as well
        ON: the seed acts at its dose `alpha`
    """

    OFF = "off"
    STRAIGHT = "straight"
    ON = "on"


class Recipe(NamedTuple):
    """What a seed is built from again when its network is loaded.

    Attributes:
        site (Site): the site that it was planted at, in the network that was grafted
        blueprint (str): name of its blueprint
        reads (int): width of what it reads
    """

    site: Site
    blueprint: str
    reads: int


_BLENDS = {blend.name: blend for blend in Blend}


class Planted(nn.Module):
    """A seed in a network, with its dose.

    The dose is a buffer, so that a compiled network reads it anew in every pass. What a compiled network is specialised to are
    `mode`, `attached`, `tap` and `blend`. A pass reads them as plain strings: torch.compile takes two members of an enumeration
    that are the same object for one thing, and does not notice when one of the two places gets another member.

    reads: the value of the tap. kind: of the stream. attached: whether the gradient of the seed reaches what it reads.
    recipe: what it is built from again; None where nobody knows.
    alpha (): the dose in mode ON, a buffer.
    pull (): weight of |c|^2 / |h|^2 in the objective of a seed in mode STRAIGHT, a buffer that is not saved.
    """

    alpha: Tensor
    pull: Tensor

    def __init__(self, seed: Seed, tap: Tap, blend: Blend, kind: Kind) -> None:
        super().__init__()
        like = next(seed.parameters())
        self.seed = seed
        if blend != Blend.GATE:
            del self.seed.gate  # a parameter that no loss depends on
        self.kind, self.attached = kind, True
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

    def forward(self, h: Tensor, u: Tensor) -> Tensor:
        """The stream behind the site: h (B, ...) in front of the seed, u (B, ...) what the seed reads."""
        stream, blend = STREAMS[self.kind], _BLENDS[self._blend]
        if self._mode == "on":
            read = u if self.attached else u.detach()
            return slot_output(stream, h, read, self.seed, self.alpha, blend).to(h.dtype)
        if self._mode == "off" or not torch.is_grad_enabled():
            return h
        base = h.detach()
        read = stream.fitted(u.detach(), base)
        change = slot_change(stream, base, read, self.seed, None, blend, gated=blend == Blend.GATE)
        change = Proximal.of(change.to(h.dtype), base, self.pull)
        same = Straight.of(h, change, torch.arange(len(h), device=h.device))
        return same.clone()  # a module behind it may work in place, which the view of a Function does not allow

    def trained(self) -> list[nn.Parameter]:
        """The parameters that an optimizer moves, in their order."""
        return list(self.parameters())

    def weights(self) -> dict[str, Tensor]:
        """The tensors of the seed by name, the gate only where it is used."""
        weights: dict[str, Tensor] = self.seed.state_dict()
        return weights

    @property
    def learns(self) -> bool:
        """Whether gradients reach its parameters."""
        return next(self.parameters()).requires_grad

    def learn(self, learns: bool) -> None:
        """Whether gradients reach its parameters from now on; where they do not, those that are there are dropped."""
        self.requires_grad_(learns)
        if not learns:
            self.zero_grad()

    def extra_repr(self) -> str:
        """What `print` shows beside the seed."""
        return f"tap={self.tap.value}, blend={self.blend.name}, mode={self.mode.value}"
