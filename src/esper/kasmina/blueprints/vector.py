"""Seeds for vector streams (B, D). Each returns the change, and ends in a zero-initialised linear map.

The modules act on trailing axes, so they run alone or stacked. In the counts, r and w are the widths read and written.
"""

import math

import torch
from torch import Tensor, nn

from esper.kasmina.blending import sigmoid
from esper.kasmina.fused import ReLU
from esper.kasmina.layers import Linear


def zero_linear(reads: int, writes: int) -> Linear:
    """Make a linear map that starts at exactly 0."""
    layer = Linear(reads, writes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Affine(nn.Module):
    """delta = u * a + b, a and b zero at initialisation; 2 w parameters."""

    stacks = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1, width))
        self.shift = nn.Parameter(torch.zeros(1, width))

    def forward(self, u: Tensor) -> Tensor:
        """(B, D) -> (B, D)."""
        delta: Tensor = u * self.scale + self.shift
        return delta


class LinearMap(nn.Module):
    """delta = W u + b, zero at initialisation; r w + w parameters."""

    stacks = True
    in_order = ("out",)

    def __init__(self, reads: int, writes: int) -> None:
        super().__init__()
        self.out = zero_linear(reads, writes)

    def forward(self, u: Tensor) -> Tensor:
        """(B, reads) -> (B, writes)."""
        delta: Tensor = self.out(u)
        return delta


class LowRank(nn.Module):
    """delta = W (V u) + b of rank k; k (r + w) + w parameters (LoRA: Hu et al., 2021, equation 3)."""

    stacks = True
    pads = True
    in_order = ("inner", "out")

    def __init__(self, reads: int, writes: int, rank: int) -> None:
        super().__init__()
        self.inner = Linear(reads, rank, bias=False)
        nn.init.normal_(self.inner.weight, std=1 / math.sqrt(reads))
        self.out = zero_linear(rank, writes)

    def forward(self, u: Tensor) -> Tensor:
        """(B, reads) -> (B, writes)."""
        delta: Tensor = self.out(self.inner(u))
        return delta


class Factored(nn.Module):
    """delta = W (V u) of rank k, without a bias; k (r + w) parameters (LoRA: Hu et al., 2021, equation 3).

    Seeds of different ranks share one stack: a unit whose weights are all 0 stays 0, because its output and gradients are 0.
    """

    stacks = True
    pads = True
    in_order = ("inner", "out")

    def __init__(self, reads: int, writes: int, rank: int) -> None:
        super().__init__()
        self.inner = Linear(reads, rank, bias=False)
        nn.init.normal_(self.inner.weight, std=1 / math.sqrt(reads))
        self.out = Linear(rank, writes, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, u: Tensor) -> Tensor:
        """(B, reads) -> (B, writes)."""
        delta: Tensor = self.out(self.inner(u))
        return delta


class MLP(nn.Module):
    """delta = W relu(V u + c) + b with k hidden units; k (r + 1) + w (k + 1) parameters.

    Seeds of different hidden widths share one stack: a unit whose weights are all 0 stays 0, because relu(0) and its
    gradient there are 0.
    """

    stacks = True
    pads = True
    in_order = ("inner", ReLU, "out")

    def __init__(self, reads: int, writes: int, hidden: int) -> None:
        super().__init__()
        self.inner = Linear(reads, hidden)
        nn.init.normal_(self.inner.weight, std=math.sqrt(2 / reads))
        nn.init.zeros_(self.inner.bias)
        self.out = zero_linear(hidden, writes)

    def forward(self, u: Tensor) -> Tensor:
        """(B, reads) -> (B, writes)."""
        delta: Tensor = self.out(torch.relu(self.inner(u)))
        return delta


class Gated(nn.Module):
    """delta = (W u + b) * sigmoid(V u + c), W and b zero at initialisation; 2 (r w + w) parameters."""

    stacks = True

    def __init__(self, reads: int, writes: int) -> None:
        super().__init__()
        self.gate = Linear(reads, writes)
        nn.init.normal_(self.gate.weight, std=1 / math.sqrt(reads))
        nn.init.zeros_(self.gate.bias)
        self.out = zero_linear(reads, writes)

    def forward(self, u: Tensor) -> Tensor:
        """(B, reads) -> (B, writes)."""
        delta: Tensor = self.out(u) * sigmoid(self.gate(u))
        return delta
