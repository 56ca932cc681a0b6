"""Seeds for sequences (B, L, C). Each returns the change, and ends in a zero-initialised linear map.

Position-wise seeds are those of vectors, whose modules act on the last axis. In the counts, r and w are the widths read
and written. Every module here is causal: the change at a position does not depend on later positions. No module here
draws random numbers in forward.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints.vector import zero_linear
from esper.kasmina.layers import Linear, causal_attention


class Norm(nn.Module):
    """delta = a * (u - mean(u)) / sqrt(var(u) + eps) + b, a and b zero at initialisation; 2 w parameters.

    Mean and variance are those of the features of one position (Ba et al., "Layer Normalization", 2016, equation 4).
    """

    stacks = True
    eps = 1e-5

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1, 1, width))
        self.shift = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, u: Tensor) -> Tensor:
        """(B, L, C) -> (B, L, C), or (E, B, L, C) -> (E, B, L, C)."""
        delta: Tensor = F.layer_norm(u, u.shape[-1:], eps=self.eps) * self.scale + self.shift
        return delta


class CausalConv(nn.Module):
    """delta_t = sum_j a_j * u_(t-j) + b over the last k positions, for each feature; k w + w parameters.

    A causal depthwise convolution, zero at initialisation; positions in front of the first count as 0.
    """

    stacks = True

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(size, 1, 1, width))
        self.shift = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, u: Tensor) -> Tensor:
        """(B, L, C) -> (B, L, C), or (E, B, L, C) -> (E, B, L, C)."""
        length, size = u.shape[-2], self.taps.shape[-4]
        earlier = F.pad(u, (0, 0, size - 1, 0))
        delta: Tensor = self.shift
        for j in range(size):
            start = size - 1 - j
            delta = delta + self.taps.select(-4, j) * earlier[..., start : start + length, :]
        return delta


class Attention(nn.Module):
    """delta = W softmax(q k^T / sqrt(d)) v + b with one head of d features; 3 d r + w (d + 1) parameters.

    W and b are zero at initialisation. q, k and v are linear maps of u without biases; a position attends to itself and
    to earlier ones (Vaswani et al., "Attention Is All You Need", 2017, equation 1). A bias of k would have no effect on
    the softmax, and a bias of v would act as b does.
    """

    stacks = True

    def __init__(self, reads: int, writes: int, head: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (Linear(reads, head, bias=False) for _ in range(3))
        for part in (self.query, self.key, self.value):
            nn.init.normal_(part.weight, std=1 / math.sqrt(reads))
        self.out = zero_linear(head, writes)

    def forward(self, u: Tensor) -> Tensor:
        """(B, L, reads) -> (B, L, writes), or (E, B, L, reads) -> (E, B, L, writes)."""
        delta: Tensor = self.out(causal_attention(self.query(u), self.key(u), self.value(u)))
        return delta


class FullHead(nn.Module):
    """delta = W n(u) + b, with n(u) normalised over the features of a position; r w + w parameters, zero at initialisation.

    Around a last layer that normalises and maps, as of `Transformer`, it can turn the map into any other. n is that of `Norm`.
    """

    stacks = True

    def __init__(self, reads: int, writes: int) -> None:
        super().__init__()
        self.out = zero_linear(reads, writes)

    def forward(self, u: Tensor) -> Tensor:
        """(B, L, reads) -> (B, L, writes), or (E, B, L, reads) -> (E, B, L, writes)."""
        delta: Tensor = self.out(F.layer_norm(u, u.shape[-1:], eps=Norm.eps))
        return delta


class SparseRows(nn.Module):
    """delta = sum_(i in chosen) u_i a_i: k rows of a map from the features of u, as an embedding has rows; k w parameters.

    Where u is a token as a vector of one 1, the rows are additions to the vectors of k tokens. `choose` fixes which; before it,
    they are the first. The rows are zero at initialisation.
    """

    stacks = True
    chosen: Tensor  # (k,) int64; stacked (E, k)

    def __init__(self, reads: int, writes: int, rows: int) -> None:
        super().__init__()
        self.out = Linear(min(rows, reads), writes, bias=False)
        nn.init.zeros_(self.out.weight)
        self.register_buffer("chosen", torch.arange(min(rows, reads)))

    def choose(self, u: Tensor, gradient: Tensor) -> None:
        """Choose the rows with the largest gradient: u (N, reads), gradient of the loss for the stream (N, writes).

        The gradient of row i of a map that is 0 is sum_n u_ni g_n; the k rows where its norm is largest are chosen. Equal norms
        are decided by the order of the rows.
        """
        self.chosen.copy_(_largest((u.mT @ gradient).norm(dim=1), len(self.chosen)))

    def forward(self, u: Tensor) -> Tensor:
        """(B, L, reads) -> (B, L, writes), or (E, B, L, reads) -> (E, B, L, writes)."""
        delta: Tensor = self.out(u.gather(-1, _spread(self.chosen, u)))
        return delta


class SparseHead(nn.Module):
    """delta_o = a_o n(u) + b_o for k chosen outputs o, and 0 for the others; k (r + 1) parameters, zero at initialisation.

    These are rows of `FullHead`, as a last layer has a row for each token. `choose` fixes which; before it, they are the first.
    """

    stacks = True
    chosen: Tensor  # (k,) int64; stacked (E, k)

    def __init__(self, reads: int, writes: int, rows: int) -> None:
        super().__init__()
        self.writes = writes
        self.out = zero_linear(reads, min(rows, writes))
        self.register_buffer("chosen", torch.arange(min(rows, writes)))

    def choose(self, u: Tensor, gradient: Tensor) -> None:
        """Choose the outputs with the largest gradient of their weights and bias: u (N, reads), gradient (N, writes)."""
        read = F.layer_norm(u, u.shape[-1:], eps=Norm.eps)
        norms = torch.cat([read, read.new_ones(len(read), 1)], 1).mT @ gradient
        self.chosen.copy_(_largest(norms.norm(dim=0), len(self.chosen)))

    def forward(self, u: Tensor) -> Tensor:
        """(B, L, reads) -> (B, L, writes), or (E, B, L, reads) -> (E, B, L, writes)."""
        y = self.out(F.layer_norm(u, u.shape[-1:], eps=Norm.eps))
        delta: Tensor = y.new_zeros(*u.shape[:-1], self.writes).scatter(-1, _spread(self.chosen, y), y)
        return delta


def _largest(norms: Tensor, count: int) -> Tensor:
    """The indices of the largest norms (n,), in order: (count,) int64."""
    return norms.argsort(descending=True, stable=True)[:count].sort().values


def _spread(chosen: Tensor, like: Tensor) -> Tensor:
    """Indices (k,), or stacked (E, k), for every position of a stream (..., B, L, C): (..., B, L, k)."""
    places = chosen if chosen.dim() == 1 else chosen[:, None, None]
    return places.expand(*like.shape[:-1], -1)
