"""Build hosts for sequences of tokens: a decoder transformer, and a recurrent network."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn

from esper.kasmina.host import SegmentedHost
from esper.kasmina.stack.layers import CausalAttention, Embedding, Linear, PositionNorm
from esper.leyline.lifecycle.slots import Kind, SlotSpec
from esper.leyline.messages import InputError
from esper.tasks.hosts.feedforward import HostFactory, linear

Positions = Literal["learned", "rotary"]
"""Where a transformer has the positions of its tokens: as learned vectors beside theirs, or in its attention."""


class TransformerBlock(nn.Module):
    """Computes x + attention(norm(x)), then x + f(norm(x)) with one hidden layer f of four times the width."""

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
        """Return (B, L, C) -> (B, L, C), or (E, B, L, C) -> (E, B, L, C)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.out(torch.relu(self.inner(self.hidden_norm(x))))


class TiedHead(nn.Module):
    """Computes the logit of each token: a norm, then the product with the vectors by which the tokens were embedded."""

    stacks = True

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        vocabulary, width = embedding.tokens.shape
        self.norm = PositionNorm(width)
        self.read = Linear(width, vocabulary, bias=False)
        self.read.weight = embedding.tokens

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, L, C) -> (B, L, vocabulary), or (E, B, L, C) -> (E, B, L, vocabulary)."""
        return self.read(self.norm(x))


@dataclass(frozen=True)
class _Sequential(HostFactory):
    """Makes hosts for tokens: an embedding, layers with a slot behind each, and a last layer."""

    vocabulary: int
    width: int = 64
    layers: int = 1

    def _even(self, width: int) -> Self:
        return replace(self, width=width)

    def _slots(self) -> list[SlotSpec]:
        return [
            SlotSpec(f"block{k}", after=k + 1, width=self.width, kind=Kind.SEQUENCE, causal=True)
            for k in range(self.layers)
        ]


@dataclass(frozen=True)
class Transformer(_Sequential):
    """Makes hosts for tokens, in one line: esper.task("mine", x, y, host=esper.transformer(vocabulary=256), classes=256).

    A call returns a decoder transformer, which predicts the next token at every position: (B, L) int64 -> (B, L, vocabulary).
    Behind each layer is a causal slot for sequences.

        segment 0:      a learned vector of each token, and with learned positions + one of each position
        segment k + 1:  x + attention(norm(x)),  then x + Linear(ReLU(Linear(norm(x)))) with 4 width units    then slot "block<k>"
        last segment:   norm, and the product with the vectors of the tokens (tied to segment 0)

    No position sees a later one. The standard deviation of initial weights is divided by sqrt(2 layers) in layers that return to
    the stream, and is .02 for the vectors of tokens and positions.

    Raises InputError if a size is not a positive integer, the heads do not divide the width, or rotary positions meet heads
    with an odd number of features.

    Attributes:
        vocabulary (int): number of tokens, which are whole numbers from 0 on
        width (int): features of every position, a multiple of `heads`; 64 by default
        layers (int): number of layers, whose slots are named "block0", "block1" and so on; 2 by default
        heads (int): heads of attention in each layer; 4 by default
        length (int): most positions of a sequence where they are learned; 128 by default
        positions ('learned' or 'rotary'): 'learned', the default, adds a learned vector of each position to that of the token.
            'rotary' rotates queries and keys by their positions (Su et al., "RoFormer", 2021), which adds no parameters and has
            no longest sequence
    """

    name: ClassVar[str] = "transformer"
    called: ClassVar[str] = "a transformer host"

    layers: int = 2
    heads: int = 4
    length: int = 128
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


class GRULayer(nn.Module):
    """Computes x + GRU(x), over the positions of each example."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, L, C) -> (B, L, C)."""
        return x + self.recurrent(x)[0]


@dataclass(frozen=True)
class GRU(_Sequential):
    """Makes recurrent hosts for tokens, in one line: esper.task("mine", x, y, host=esper.gru(vocabulary=256), classes=256).

    A call returns a gated recurrent network (Cho et al., 2014), which predicts the next token at every position: (B, L) int64 ->
    (B, L, vocabulary). Behind each layer is a causal slot for sequences.

        segment 0:      a learned vector of each token
        segment k + 1:  x + GRU(x)                          then slot "block<k>"
        last segment:   Linear(width -> vocabulary)

    The networks of a population run one after the other, because vmap has no rule for a recurrence, so a transformer of as many
    parameters is faster where there are many. Weights of a GRU are those of torch. Raises InputError if a size is not a positive
    integer.

    Attributes:
        vocabulary (int): number of tokens, which are whole numbers from 0 on
        width (int): features of every position; 64 by default
        layers (int): number of residual GRU layers, whose slots are named "block0", "block1" and so on; 1 by default
    """

    name: ClassVar[str] = "gru"
    called: ClassVar[str] = "a GRU host"

    def __call__(self) -> SegmentedHost:
        embed = nn.Embedding(self.vocabulary, self.width)
        head = linear(self.width, self.vocabulary, variance=1 / self.width)
        host = SegmentedHost([embed, *(GRULayer(self.width) for _ in range(self.layers)), head], self._slots())
        host.draws = False
        return host
