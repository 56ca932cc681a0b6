"""The computation of a slot, for one network and for populations alike."""

from typing import Protocol

from torch import Tensor, nn

from esper.kasmina.blending import blend_change
from esper.kasmina.blueprints.vector import zero_linear
from esper.leyline.actions import Blend
from esper.leyline.streams import Stream


class Seed(nn.Module):
    """The content of a slot: the change of a blueprint, and the map of the GATE blend, which starts at g = 1/2."""

    def __init__(self, delta: nn.Module, reads: int) -> None:
        super().__init__()
        self.delta = delta
        self.gate = zero_linear(reads, 1)
        self.draws = getattr(delta, "draws", True)


class Seedlike(Protocol):
    """An object that computes as a `Seed` does: a module, or rows of a stack of modules."""

    def delta(self, u: Tensor) -> Tensor:
        """Return the change, computed from what the seed reads, in the shape of the stream."""
        ...

    def gate(self, u: Tensor) -> Tensor:
        """Return one number for each feature vector: (..., C) -> (..., 1)."""
        ...


def slot_change(
    stream: type[Stream],
    h: Tensor,
    u: Tensor,
    seed: Seedlike,
    alpha: Tensor | float | None,
    blend: Tensor | Blend | None,
    *,
    gated: bool,
) -> Tensor:
    """Compute the change c of a slot, as `blend_change` defines it.

    h: the stream at the slot, (B, ...) of one network or (n, B, ...) of rows of a population; u: what the seed reads,
    of the same kind and resolution. alpha, blend: numbers, or tensors (n, 1, ...); None for alpha 1 and for ADD.
    `gated` says whether a row has blend GATE, for which the gate of the seed is run.
    """
    delta = seed.delta(u)
    gate = stream.spread(seed.gate(stream.gated(u))) if gated else None
    return blend_change(h, delta, gate, alpha, blend)


def slot_output(
    stream: type[Stream], h: Tensor, u: Tensor, seed: Seedlike, alpha: Tensor | float, blend: Blend
) -> Tensor:
    """Compute y = h + c, with the change c of `slot_change`, for one network: h and u (B, ...).

    u is fitted to the resolution of h. alpha: a number, or a tensor ().
    """
    u = stream.fitted(u, h)
    return h + slot_change(stream, h, u, seed, alpha, blend, gated=blend == Blend.GATE)
