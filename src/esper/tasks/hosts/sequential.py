"""Hosts for sequences of tokens: a decoder transformer, and a recurrent network."""

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn

from esper.kasmina.host import SegmentedHost
from esper.kasmina.stack.layers import CausalAttention, Embedding, Linear, PositionNorm
from esper.leyline.errors import InputError
from esper.leyline.lifecycle.slots import SlotSpec
from esper.leyline.lifecycle.streams import Kind
from esper.tasks.hosts.feedforward import HostFactory, check_sizes, linear

Positions = Literal["learned", "rotary"]
"""Where a transformer has the positions of its tokens: as learned vectors beside theirs, or in its attention."""


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + f(norm(x)) with one hidden layer f of four times the width."""

    stacks = True

    def __init__(self, width: int, heads: int, layers: int, *, rotary: bool = False) -> None:
        super().__init__()
        self.attention_norm, self.hidden_norm = PositionNorm(width), PositionNorm(width)
        self.attention = CausalAttention(width, heads, rotary=rotary)
        self.inner = linear(width, 4 * width, variance=2 / width)
        self.out = linear(4 * width, width, variance=1 / (4 * width) / (2 * layers))
        nn.init.normal_(self.attention.read.weight, std=width**-0.5)
        nn.init.normal_(self.attention.out.weight, std=(width * 2 * layers) ** -0.5)
        nn.init.zeros_(self.attention.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, C) -> (B, L, C), or (E, B, L, C) -> (E, B, L, C)."""
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.out(torch.relu(self.inner(self.hidden_norm(x))))
        return y


class TiedHead(nn.Module):
    """The logit of each token: a norm, then the product with the vectors by which the tokens were embedded."""

    stacks = True

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        vocabulary, width = embedding.tokens.shape
        self.norm = PositionNorm(width)
        self.read = Linear(width, vocabulary, bias=False)
        self.read.weight = embedding.tokens

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, C) -> (B, L, vocabulary), or (E, B, L, C) -> (E, B, L, vocabulary)."""
        logits: Tensor = self.read(self.norm(x))
        return logits


@dataclass(frozen=True)
class _Sequential(HostFactory):
    """Base of the hosts for tokens: an embedding, layers with a slot behind each, and a last layer."""

    vocabulary: int  # tokens are whole numbers from 0 to vocabulary - 1
    width: int  # features of every position
    layers: int

    def __post_init__(self) -> None:
        check_sizes(self.called, {each.name: getattr(self, each.name) for each in fields(self) if each.type is int})

    def _even(self, width: int) -> Self:
        return replace(self, width=width)

    def _slots(self) -> list[SlotSpec]:
        return [
            SlotSpec(f"block{k}", after=k + 1, width=self.width, kind=Kind.SEQUENCE, causal=True)
            for k in range(self.layers)
        ]


@dataclass(frozen=True)
class Transformer(_Sequential):
    """A factory of decoder transformers, tokens (B, L) int64 -> logits (B, L, vocabulary), for L up to `length`.

        segment 0:      a learned vector of each token, and with learned positions + one of each position
        segment k + 1:  x + attention(norm(x)),  then x + Linear(ReLU(Linear(norm(x)))) with 4 width units    then slot "block<k>"
        last segment:   norm, and the product with the vectors of the tokens (tied to segment 0)

    The logits at a position are those of the next token: no position sees a later one. With rotary positions the attention
    rotates its queries and keys (`esper.kasmina.stack.layers.rotated`), and sequences may be longer than `length`.

    Weights are drawn from torch's global generator, normal with standard deviation 1 / sqrt(fan in), sqrt(2 / fan in) in front
    of the ReLU, divided by sqrt(2 layers) in layers that return to the stream, and .02 for the vectors of tokens and positions;
    biases are 0.
    """

    name: ClassVar[str] = "transformer"
    called: ClassVar[str] = "a transformer host"

    heads: int
    length: int  # most positions
    positions: Positions = "learned"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions not in get_args(Positions):
            raise InputError(f"positions of {self.called} is {self.positions!r}; give 'learned' or 'rotary'")
        if self.width % self.heads:
            raise InputError(
                f"width of {self.called} is {self.width} and heads is {self.heads}; give a width that is a multiple of heads"
            )
        if self.positions == "rotary" and self.width // self.heads % 2:
            raise InputError(
                f"width of {self.called} is {self.width} and heads is {self.heads}, so a head has {self.width // self.heads} "
                "features, but rotary positions turn pairs of features; give a width that is an even multiple of heads"
            )

    def __call__(self) -> SegmentedHost:
        rotary = self.positions == "rotary"
        embed = Embedding(self.vocabulary, None if rotary else self.length, self.width)
        nn.init.normal_(embed.tokens, std=0.02)
        if embed.positions is not None:
            nn.init.normal_(embed.positions, std=0.02)
        blocks = [TransformerBlock(self.width, self.heads, self.layers, rotary=rotary) for _ in range(self.layers)]
        host = SegmentedHost([embed, *blocks, TiedHead(embed)], self._slots())
        host.stacks = True
        return host

    def _even(self, width: int) -> Self:
        step = self.heads * (2 if self.positions == "rotary" else 1)
        return replace(self, width=-(-width // step) * step)


class OneHotTokens(nn.Module):
    """A vector of one 1 for each token: (B, L) int64 -> (B, L, vocabulary), of torch's default dtype or that of `unit`."""

    stacks = True
    unit: Tensor  # (1,), of the dtype of the host; stacked (E, 1)

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.register_buffer("unit", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, L) -> (B, L, vocabulary), or (E, B, L) -> (E, B, L, vocabulary)."""
        return (x.unsqueeze(-1) == torch.arange(self.vocabulary, device=x.device)).to(self.unit.dtype)


class TokenMap(nn.Module):
    """The vectors of tokens that are given as `OneHotTokens`, and a vector of each position: what `Embedding` computes."""

    stacks = True

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(vocabulary, width))
        self.positions = nn.Parameter(torch.empty(length, width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, vocabulary) -> (B, L, C), or with stacked parameters (E, B, L, vocabulary) -> (E, B, L, C)."""
        positions = self.positions[..., : x.shape[-2], :]
        if self.tokens.dim() == 2:
            return x @ self.tokens + positions
        tokens: Tensor = torch.bmm(x.flatten(1, -2), self.tokens).unflatten(1, x.shape[1:-1])
        return tokens + positions.unsqueeze(1)


@dataclass(frozen=True)
class OpenTransformer(Transformer):
    """A factory of `Transformer` hosts with slots at both ends, which may be frozen. Positions are learned.

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


class GRULayer(nn.Module):
    """x + GRU(x), over the positions of each example."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, C) -> (B, L, C)."""
        y: Tensor = x + self.recurrent(x)[0]
        return y


@dataclass(frozen=True)
class GRU(_Sequential):
    """A factory of gated recurrent networks (Cho et al., 2014), tokens (B, L) int64 -> logits (B, L, vocabulary).

        segment 0:      a learned vector of each token
        segment k + 1:  x + GRU(x)                          then slot "block<k>"
        last segment:   Linear(width -> vocabulary)

    The logits at a position are those of the next token. Rows of a population run one after the other, because vmap has no rule
    for a recurrence. Weights of a GRU are those of torch.
    """

    name: ClassVar[str] = "gru"
    called: ClassVar[str] = "a GRU host"

    def __call__(self) -> SegmentedHost:
        embed = nn.Embedding(self.vocabulary, self.width)
        head = linear(self.width, self.vocabulary, variance=1 / self.width)
        host = SegmentedHost([embed, *(GRULayer(self.width) for _ in range(self.layers)), head], self._slots())
        host.draws = False
        return host
