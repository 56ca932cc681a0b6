"""Seeds for maps (B, C, H, W). Each returns the change, and ends in a zero-initialised linear map.

The input of a seed has the resolution of its slot (`streams.fitted`). Nothing but a product with u follows the last
map: a ReLU behind it would leave no gradient at initialisation, and a normalisation there would multiply its first step
by 1 / sqrt(eps). In the counts, r and w are the channels read and written. No module here draws random numbers in
forward.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from esper.kasmina.stack.layers import zero_linear


def conv(reads: int, writes: int, size: int, *, groups: int = 1) -> nn.Conv2d:
    """Make a convolution that keeps the resolution: weights normal with variance 2 / fan in, for a ReLU behind it, biases 0."""
    layer = nn.Conv2d(reads, writes, size, padding=size // 2, groups=groups)
    nn.init.normal_(layer.weight, std=math.sqrt(2 / (reads // groups * size**2)))
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def zero_conv(reads: int, writes: int, size: int) -> nn.Conv2d:
    """Make a convolution that starts at exactly 0."""
    layer = nn.Conv2d(reads, writes, size, padding=size // 2)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


class Norm(nn.Module):
    """delta = a * (u - mean(u)) / sqrt(var(u) + eps) + b, a and b zero at initialisation; 2 w parameters.

    Mean and variance are those of one example over all its channels and positions (Wu and He, "Group Normalization",
    2018, with one group), so that no example depends on its batch.
    """

    draws = False
    eps = 1e-5

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width, 1, 1))
        self.shift = nn.Parameter(torch.zeros(width, 1, 1))

    def forward(self, u: Tensor) -> Tensor:
        variance, mean = torch.var_mean(u, (1, 2, 3), correction=0, keepdim=True)
        return (u - mean) * torch.rsqrt(variance + self.eps) * self.scale + self.shift


class SqueezeExcite(nn.Module):
    """delta = u * (W relu(V mean(u) + c) + b), W and b zero at initialisation; k (r + 1) + w (k + 1) parameters.

    Computes a factor for every channel from the means of all (Hu et al., "Squeeze-and-Excitation Networks", 2018,
    equations 2 to 4), here without the sigmoid, because the result is added and not multiplied.
    """

    draws = False

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, hidden)
        nn.init.normal_(self.inner.weight, std=math.sqrt(2 / width))
        nn.init.zeros_(self.inner.bias)
        self.out = zero_linear(hidden, width)

    def forward(self, u: Tensor) -> Tensor:
        factor = self.out(torch.relu(self.inner(u.mean((2, 3)))))
        return u * factor[:, :, None, None]


class Convolutions(nn.Sequential):
    """Convolutions with a ReLU after each but the last, which is zero at initialisation."""

    draws = False

    def __init__(self, *layers: nn.Conv2d) -> None:
        parts = [part for layer in layers[:-1] for part in (layer, nn.ReLU())]
        super().__init__(*parts, layers[-1])


def depthwise_separable(reads: int, writes: int) -> Convolutions:
    """3x3 within each channel, ReLU, 1x1 across them; 10 r + r w + w parameters (Howard et al., "MobileNets", 2017)."""
    return Convolutions(conv(reads, reads, 3, groups=reads), zero_conv(reads, writes, 1))


def bottleneck(reads: int, writes: int, hidden: int) -> Convolutions:
    """1x1 to k channels, 3x3, 1x1 back; k (r + 1) + k (9 k + 1) + w (k + 1) parameters (He et al., 2016, figure 5)."""
    return Convolutions(conv(reads, hidden, 1), conv(hidden, hidden, 3), zero_conv(hidden, writes, 1))


def two_convs(reads: int, writes: int, hidden: int, size: int) -> Convolutions:
    """3x3 to k channels, ReLU, then a convolution of the given size; k (9 r + 1) + w (size^2 k + 1) parameters."""
    return Convolutions(conv(reads, hidden, 3), zero_conv(hidden, writes, size))


def one_conv(reads: int, writes: int, size: int) -> Convolutions:
    """One linear convolution; w (size^2 r + 1) parameters."""
    return Convolutions(zero_conv(reads, writes, size))


class Channelwise(nn.Module):
    """A seed for vectors at each position of a map, with the channels as features. It has the parameters of that seed."""

    stacks = True
    draws = False

    def __init__(self, seed: nn.Module) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, u: Tensor) -> Tensor:
        """(B, reads, H, W) -> (B, writes, H, W), or (E, B, reads, H, W) -> (E, B, writes, H, W)."""
        return self.seed(u.movedim(-3, -1)).movedim(-1, -3)


def channelwise(build: Callable[[int, int], nn.Module], reads: int, writes: int) -> Channelwise:
    """A seed for vectors at each position of a map, as `build` makes it for these widths."""
    return Channelwise(build(reads, writes))
