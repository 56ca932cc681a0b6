"""Define seeds for vector streams (B, D). Each returns the change, and ends in a zero-initialised linear map.

The modules act on trailing axes, so they run alone or stacked. In the counts, r and w are the widths read and written.
"""

import math

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.functions import RELU, Pointwise, apply
from esper.kasmina.slot import sigmoid
from esper.kasmina.stack.fused import ReLU
from esper.kasmina.stack.layers import Linear, StackedModule, zero_linear


class Affine(StackedModule):
    """Computes delta = u * a + b, a and b zero at initialisation; 2 w parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1, width))
        self.shift = nn.Parameter(torch.zeros(1, width))

    def forward(self, u: Tensor) -> Tensor:
        return u * self.scale + self.shift


class LearnedScale(nn.Module):
    """Computes delta = s * u with one number s, zero at initialisation; for streams of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, u: Tensor) -> Tensor:
        return u * self.scale


class LinearMap(StackedModule):
    """Computes delta = W u + b, zero at initialisation; r w + w parameters."""

    in_order = ("out",)

    def __init__(self, reads: int, writes: int) -> None:
        super().__init__()
        self.out = zero_linear(reads, writes)

    def forward(self, u: Tensor) -> Tensor:
        return self.out(u)


class LowRank(StackedModule):
    """Computes delta = W (V u) + b of rank k; k (r + w) + w parameters (LoRA: Hu et al., 2021, equation 3)."""

    in_order = ("inner", "out")
    biased = True

    def __init__(self, reads: int, writes: int, rank: int) -> None:
        super().__init__()
        self.inner = Linear(reads, rank, bias=False)
        nn.init.normal_(self.inner.weight, std=1 / math.sqrt(reads))
        self.out = zero_linear(rank, writes, bias=self.biased)

    def forward(self, u: Tensor) -> Tensor:
        return self.out(self.inner(u))


class Factored(LowRank):
    """Computes delta = W (V u) of rank k, without a bias; k (r + w) parameters.

    Seeds of different ranks share one stack: a unit whose weights are all 0 stays 0, because its output and gradients are 0.
    """

    in_order = ("inner", "out")  # read from the class itself, not from a base
    biased = False


class MLPSeed(StackedModule):
    """Computes delta = W f(V u + c) + b with k hidden units; k (r + 1) + w (k + 1) parameters. f is the ReLU in a stack.

    Seeds of different hidden widths share one stack: a unit whose weights are all 0 stays 0, because relu(0) and its
    gradient there are 0. In a network of a person's own f is that of the layers which the seed spans (`LivePopulation.made`).
    """

    in_order = ("inner", ReLU, "out")
    function: Pointwise = RELU

    def __init__(self, reads: int, writes: int, hidden: int) -> None:
        super().__init__()
        self.inner = Linear(reads, hidden)
        nn.init.normal_(self.inner.weight, std=math.sqrt(2 / reads))
        nn.init.zeros_(self.inner.bias)
        self.out = zero_linear(hidden, writes)

    def forward(self, u: Tensor) -> Tensor:
        return self.out(apply(self.function, self.inner(u)))


PADDED = (LowRank, Factored, MLPSeed)
"""Modules of which those of different hidden widths share a stack."""


class Gated(StackedModule):
    """Computes delta = (W u + b) * sigmoid(V u + c), W and b zero at initialisation; 2 (r w + w) parameters."""

    def __init__(self, reads: int, writes: int) -> None:
        super().__init__()
        self.gate = Linear(reads, writes)
        nn.init.normal_(self.gate.weight, std=1 / math.sqrt(reads))
        nn.init.zeros_(self.gate.bias)
        self.out = zero_linear(reads, writes)

    def forward(self, u: Tensor) -> Tensor:
        return self.out(u) * sigmoid(self.gate(u))


class SparseRows(StackedModule):
    """Computes delta = sum_(i in chosen) u_i a_i: k rows of a map from the features of u, as an embedding has; k w parameters.

    Where u is a one-hot token, the rows are added to the vectors of k tokens. `choose` selects the tokens; until then they are
    the first k. The rows are zero at initialisation.
    """

    chosen: Tensor  # (k,) int64 in increasing order; stacked (E, k)

    def __init__(self, reads: int, writes: int, rows: int) -> None:
        super().__init__()
        self.out = zero_linear(min(rows, reads), writes, bias=False)
        self.register_buffer("chosen", torch.arange(min(rows, reads)))

    def choose(self, u: Tensor, gradient: Tensor) -> None:
        """Choose the rows with the largest gradient: u (N, reads), gradient of the loss for the stream (N, writes).

        The gradient of row i of a map that is 0 is sum_n u_ni g_n; the k rows where its norm is largest are chosen. Equal norms
        are decided by the order of the rows.
        """
        self.chosen.copy_(largest((u.mT @ gradient).norm(dim=1), len(self.chosen)))

    def forward(self, u: Tensor) -> Tensor:
        """Return (B, ..., reads) -> (B, ..., writes), or (E, B, ..., reads) -> (E, B, ..., writes)."""
        return self.out(u.gather(-1, _places(self.chosen, u)))


class SparseHead(StackedModule):
    """Computes delta_o = a_o u + b_o for k chosen outputs o, 0 for the others: k rows of `LinearMap`, as a last layer has.

    It has k (r + 1) parameters, zero at initialisation. `choose` selects the outputs; until then they are the first k. A subclass
    may normalise u.
    """

    chosen: Tensor  # (k,) int64 in increasing order; stacked (E, k)

    def __init__(self, reads: int, writes: int, rows: int) -> None:
        super().__init__()
        self.writes = writes
        self.out = zero_linear(reads, min(rows, writes))
        self.register_buffer("chosen", torch.arange(min(rows, writes)))

    def read(self, u: Tensor) -> Tensor:
        """Return what the outputs are maps of, (..., reads) -> (..., reads)."""
        return u

    def choose(self, u: Tensor, gradient: Tensor) -> None:
        """Choose the outputs with the largest gradient of their weights and bias: u (N, reads), gradient (N, writes)."""
        read = self.read(u)
        norms = torch.cat([read, read.new_ones(len(read), 1)], 1).mT @ gradient
        self.chosen.copy_(largest(norms.norm(dim=0), len(self.chosen)))

    def forward(self, u: Tensor) -> Tensor:
        """Return (B, ..., reads) -> (B, ..., writes), or (E, B, ..., reads) -> (E, B, ..., writes)."""
        y = self.out(self.read(u))
        return y.new_zeros(*u.shape[:-1], self.writes).scatter(-1, _places(self.chosen, y), y)


def largest(norms: Tensor, count: int) -> Tensor:
    """Return the indices of the largest norms (n,), in order: (count,) int64."""
    return norms.argsort(descending=True, stable=True)[:count].sort().values


def _places(chosen: Tensor, like: Tensor) -> Tensor:
    """Expand indices (k,), or stacked (E, k), to every position of a stream (..., B, C) or (..., B, L, C), with k for C.

    A stack pads the indices of a module of fewer than k rows with 0. Such a module has all of its rows, 0 to n - 1, so place i of
    the padding stands for feature i, which is padding too: it is 0, and so are the gradients there. Otherwise place i has an
    index of at least i, because the indices increase.
    """
    index = chosen.maximum(torch.arange(chosen.shape[-1], device=chosen.device))
    axes = like.dim() - index.dim()
    return index.view(*index.shape[:-1], *(1,) * axes, -1).expand(*like.shape[:-1], -1)
