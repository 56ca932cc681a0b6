"""Build transformers whose ends can grow, the hosts of `heal-bytes`."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from esper.kasmina.host import SegmentedHost
from esper.kasmina.stack.layers import Embedding
from esper.leyline.lifecycle.slots import Kind, SlotSpec
from esper.leyline.messages import InputError
from esper.tasks.hosts import HOSTS, TiedHead, Transformer


class OneHotTokens(nn.Module):
    """Makes a one-hot vector of each token: (B, L) int64 -> (B, L, vocabulary), of torch's default dtype or that of `unit`."""

    stacks = True
    unit: Tensor  # (1,), of the dtype of the host; stacked (E, 1)

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.register_buffer("unit", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, L) -> (B, L, vocabulary), or (E, B, L) -> (E, B, L, vocabulary)."""
        return (x.unsqueeze(-1) == torch.arange(self.vocabulary, device=x.device)).to(self.unit.dtype)


class TokenMap(nn.Module):
    """Computes what `Embedding` does, for tokens that are given as `OneHotTokens`: their vectors, and one of each position."""

    stacks = True

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(vocabulary, width))
        self.positions = nn.Parameter(torch.empty(length, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, L, vocabulary) -> (B, L, C), or with stacked parameters (E, B, L, vocabulary) -> (E, B, L, C)."""
        positions = self.positions[..., : x.shape[-2], :]
        if self.tokens.dim() == 2:
            return x @ self.tokens + positions
        tokens: Tensor = torch.bmm(x.flatten(1, -2), self.tokens).unflatten(1, x.shape[1:-1])
        return tokens + positions.unsqueeze(1)


@dataclass(frozen=True)
class OpenTransformer(Transformer):
    """Makes `Transformer` hosts with slots at both ends, which may be frozen. Positions are learned.

        segment 0:      a vector of one 1 for each token
        segment 1:      the learned vector of each token, + one of each position                 then slot "embed"
        segment k + 2:  the layers of `Transformer`                                              then slot "block<k>"
        segment K + 2:  norm, and the product with the vectors of the tokens                     then slot "head"
        last segment:   the logits as they are

    A seed that reads what enters the segment of slot "embed" reads tokens, and one at slot "head" changes logits. The function
    and the initial weights are those of a `Transformer`. No parameter requires a gradient if `frozen` is true.
    """

    name: ClassVar[str] = "open-transformer"

    frozen: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions != "learned" or not isinstance(self.frozen, bool):
            raise InputError(
                f"an open transformer host was given positions {self.positions!r} and frozen {self.frozen!r}; give 'learned', "
                "and True or False"
            )

    def __call__(self) -> SegmentedHost:
        closed = super().__call__()
        embed, *blocks, head = closed.segments
        assert isinstance(embed, Embedding)
        assert isinstance(head, TiedHead)
        tokens = TokenMap(self.vocabulary, self.length, self.width)
        tokens.tokens = embed.tokens
        assert embed.positions is not None
        tokens.positions = embed.positions
        last = self.layers + 2
        slots = [
            SlotSpec("embed", after=1, width=self.width, kind=Kind.SEQUENCE, causal=True),
            *(replace(slot, after=slot.after + 1) for slot in closed.slots),
            SlotSpec("head", after=last, width=self.vocabulary, kind=Kind.SEQUENCE, causal=True),
        ]
        host = SegmentedHost([OneHotTokens(self.vocabulary), tokens, *blocks, head, nn.Identity()], slots)
        host.stacks = True
        host.requires_grad_(not self.frozen)
        return host

    def _even(self, width: int) -> Self:
        return replace(super()._even(width), frozen=False)


HOSTS[OpenTransformer.name] = OpenTransformer
