"""Define seeds for sequences (B, L, C). Each returns the change, and ends in a zero-initialised linear map.

Position-wise seeds are those of vectors, whose modules act on the last axis. In the counts, r and w are the widths read
and written. Every module here is causal: the change at a position does not depend on later positions. No module here
draws random numbers in forward.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints.vector import SparseHead
from esper.kasmina.stack.layers import Linear, StackedModule, causal_attention, zero_linear


class NormSeed(StackedModule):
    """Computes delta = a * (u - mean(u)) / sqrt(var(u) + eps) + b, a and b zero at initialisation; 2 w parameters.

    Mean and variance are those of the features of one position (Ba et al., "Layer Normalization", 2016, equation 4).
    """

    eps = 1e-5

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1, 1, width))
        self.shift = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, u: Tensor) -> Tensor:
        return F.layer_norm(u, u.shape[-1:], eps=self.eps) * self.scale + self.shift


class CausalConv(StackedModule):
    """Computes delta_t = sum_j a_j * u_(t-j) + b over the last k positions, for each feature; k w + w parameters.

    This is a causal depthwise convolution, zero at initialisation; positions in front of the first count as 0.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(size, 1, 1, width))
        self.shift = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, u: Tensor) -> Tensor:
        length, size = u.shape[-2], self.taps.shape[-4]
        earlier = F.pad(u, (0, 0, size - 1, 0))
        delta: Tensor = self.shift
        for j in range(size):
            start = size - 1 - j
            delta = delta + self.taps.select(-4, j) * earlier[..., start : start + length, :]
        return delta


class Attention(StackedModule):
    """Computes delta = W softmax(q k^T / sqrt(d)) v + b with one head of d features; 3 d r + w (d + 1) parameters.

    W and b are zero at initialisation. q, k and v are linear maps of u without biases; a position attends to itself and
    to earlier ones (Vaswani et al., "Attention Is All You Need", 2017, equation 1). A bias of k would have no effect on
    the softmax, and a bias of v would act as b does.
    """

    def __init__(self, reads: int, writes: int, head: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (Linear(reads, head, bias=False) for _ in range(3))
        for part in (self.query, self.key, self.value):
            nn.init.normal_(part.weight, std=1 / math.sqrt(reads))
        self.out = zero_linear(head, writes)

    def forward(self, u: Tensor) -> Tensor:
        return self.out(causal_attention(self.query(u), self.key(u), self.value(u)))


class FullHead(StackedModule):
    """Computes delta = W n(u) + b, n(u) normalised over the features of a position; r w + w parameters, zero at initialisation.

    Around a last layer that normalises and maps, such as that of `Transformer`, it can turn the map into any other. n is
    the normalisation of `NormSeed`.
    """

    def __init__(self, reads: int, writes: int) -> None:
        super().__init__()
        self.out = zero_linear(reads, writes)

    def forward(self, u: Tensor) -> Tensor:
        return self.out(F.layer_norm(u, u.shape[-1:], eps=NormSeed.eps))


class NormedSparseHead(SparseHead):
    """Computes delta_o = a_o n(u) + b_o for k chosen outputs o, 0 for the others; k (r + 1) parameters, zero at initialisation.

    These are rows of `FullHead`, as a last layer has a row for each token.
    """

    def read(self, u: Tensor) -> Tensor:
        return F.layer_norm(u, u.shape[-1:], eps=NormSeed.eps)
