"""Define layers that run one network, or a stack of them at once when their parameters carry a leading row axis."""

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.stack.fused import RowMap, mapped

# torch's fused attention has no rule for vmap; it runs row by row with a warning that a user can do nothing about.
warnings.filterwarnings("ignore", message=".*batching rule for aten::_scaled_dot_product_flash_attention_for_cpu")


class StackedModule(nn.Module):
    """Computes on trailing axes, each example by itself, so that a stack calls it once for all rows with stacked parameters."""

    stacks = True


class Linear(nn.Linear):
    """Applies nn.Linear over (B, ..., D); with stacked parameters (E, O, D), (E, O) over (E, B, ..., D)."""

    stacks = True
    fused = RowMap  # `esper.kasmina.stack.fused`

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, ..., D) -> (B, ..., O), or (E, B, ..., D) -> (E, B, ..., O)."""
        if self.weight.dim() == 2:
            return F.linear(x, self.weight, self.bias)
        return mapped(x, self.weight, self.bias)


def zero_linear(reads: int, writes: int, *, bias: bool = True) -> Linear:
    """Make a linear map that starts at exactly 0."""
    layer = Linear(reads, writes, bias)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


class Embedding(StackedModule):
    """Looks up a vector for each token, plus one for its position if `length` bounds L: (B, L) int64 -> (B, L, C)."""

    def __init__(self, vocabulary: int, length: int | None, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(vocabulary, width))
        self.positions = None if length is None else nn.Parameter(torch.empty(length, width))

    def forward(self, x: Tensor) -> Tensor:
        table: Tensor = self.tokens
        stacked, last = table.dim() == 3, x.shape[-1]
        if stacked:  # one table holds all rows; the tokens of each row are shifted to its own part
            rows, vocabulary, _ = table.shape
            x = x + vocabulary * torch.arange(rows, device=x.device)[:, None, None]
            table = table.flatten(0, 1)
        tokens = F.embedding(x, table)
        if self.positions is None:
            return tokens
        positions = self.positions[..., :last, :]
        return tokens + (positions.unsqueeze(1) if stacked else positions)


class PositionNorm(StackedModule):
    """Normalises each position over its features, then scales and shifts each feature, as nn.LayerNorm; it can run stacked."""

    eps = 1e-5

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 1, width))
        self.shift = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1:]
        if self.scale.dim() == 3:  # torch's kernel scales and shifts, but knows no row axis
            return F.layer_norm(x, width, self.scale.view(-1), self.shift.view(-1), self.eps)
        return F.layer_norm(x, width, eps=self.eps) * self.scale + self.shift


class CausalAttention(StackedModule):
    """Applies multi-head scaled dot-product attention over the same and earlier positions, then a linear map.

    With `rotary`, queries and keys are rotated by their positions, and the width of a head must be even.
    """

    def __init__(self, width: int, heads: int, *, rotary: bool = False) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.read = Linear(width, 3 * width, bias=False)  # queries, keys and values of all heads
        self.out = Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # The gradient of unbind is one stack; that of three indices would be three tensors of zeros and two sums.
        q, k, v = self.read(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3).unbind(0)
        if self.rotary:
            q, k = rotated(q), rotated(k)
        mixed = causal_attention(q, k, v)
        return self.out(mixed.transpose(-2, -3).flatten(-2))


def rotated(x: Tensor) -> Tensor:
    """Apply rotary positions (Su et al., "RoFormer", 2021, equation 34) to features i and i + d/2 of queries or keys (..., L, d).

        (a_i, b_i) -> (a_i cos(l t_i) - b_i sin(l t_i), a_i sin(l t_i) + b_i cos(l t_i)),   t_i = 10000^(-2 i / d)

    a and b are the first and the second half of the features, and l is the position, counted from 0. The product of a rotated
    query and a rotated key depends on their positions by the distance alone. d is even.
    """
    length, half = x.shape[-2], x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = torch.arange(length, device=x.device, dtype=torch.float64)[:, None] * rates
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cosine - b * sine, a * sine + b * cosine], -1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v over this and earlier positions: q, k, v (..., L, d) -> (..., L, d).

    On a GPU the formula is written out, because the gradient of torch's fused kernels for float32 can differ from run
    to run.
    """
    if q.device.type == "cpu" and q.dim() == 4:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if q.device.type == "cpu":
        q4, k4, v4 = (x.flatten(0, -3).unsqueeze(1) for x in (q, k, v))  # torch's fused kernel takes four axes
        fused: Tensor = F.scaled_dot_product_attention(q4, k4, v4, is_causal=True)
        return fused.view(q.shape)
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -torch.inf)
    return torch.softmax(scores, -1) @ v


class PositionMean(nn.Module):
    """Averages a map over its positions."""

    draws = False

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C, H, W) -> (B, C)."""
        return x.mean((-2, -1))


class Residual(nn.Sequential):
    """Computes y = shortcut(x) + branch(x): the last module is the shortcut, the ones in front of it are the branch in order.

    The shortcut is nn.Identity where the stream keeps its shape. A `SlotSpec.inner` of k counts modules of the branch.
    """

    stacks = True

    def __init__(self, *branch: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__(*branch, shortcut if shortcut is not None else nn.Identity())
        self.stacks = all(isinstance(m, nn.Identity | nn.ReLU) or getattr(m, "stacks", False) for m in self)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, ...) -> (B, ...), or (E, B, ...) -> (E, B, ...) where every module stacks."""
        *branch, shortcut = self
        h = x
        for module in branch:
            h = module(h)
        return shortcut(x) + h
