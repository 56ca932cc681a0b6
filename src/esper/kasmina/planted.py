"""The seed at a site of a grafted module: what it reads, how it acts now, and how it incubates. B examples."""

from enum import StrEnum

import torch
from torch import Tensor, nn

from esper.kasmina.blending import Proximal, Straight
from esper.kasmina.slot import Seed, slot_change, slot_output
from esper.leyline.actions import Blend
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


class Planted(nn.Module):
    """A seed in a network, with its dose.

    The dose is a buffer, so that a compiled network reads it anew in every pass. What a compiled network is specialised to are
    `mode` and `attached`.

    mode: how the seed takes part in a pass.
    attached: whether the gradient of the seed reaches what it reads.
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
        self.tap, self.blend, self.kind = tap, blend, kind
        self.mode, self.attached = Mode.OFF, True
        self.register_buffer("alpha", like.detach().new_zeros(()))
        self.register_buffer("pull", like.detach().new_zeros(()), persistent=False)

    def forward(self, h: Tensor, u: Tensor) -> Tensor:
        """The stream behind the site: h (B, ...) in front of the seed, u (B, ...) what the seed reads."""
        stream = STREAMS[self.kind]
        if self.mode == Mode.ON:
            read = u if self.attached else u.detach()
            return slot_output(stream, h, read, self.seed, self.alpha, self.blend).to(h.dtype)
        if self.mode == Mode.OFF or not torch.is_grad_enabled():
            return h
        base = h.detach()
        read = stream.fitted(u.detach(), base)
        change = slot_change(stream, base, read, self.seed, None, self.blend, gated=self.blend == Blend.GATE)
        change = Proximal.apply(change.to(h.dtype), base, self.pull)  # type: ignore[no-untyped-call]
        same: Tensor = Straight.apply(h, change, torch.arange(len(h), device=h.device))  # type: ignore[no-untyped-call]
        return same.clone()  # a module behind it may work in place, which the view of a Function does not allow

    def extra_repr(self) -> str:
        """What `print` shows beside the seed."""
        return f"tap={self.tap.value}, blend={self.blend.name}, mode={self.mode.value}"
