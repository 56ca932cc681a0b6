"""Define seeds for maps (B, C, H, W) and volumes (B, C, D, H, W), which have 2 and 3 sides.

Each returns the change, and ends in a zero-initialised linear map.

The input of a seed has the resolution of its slot (`streams.fitted`). Nothing but a product with u follows the last
map: a ReLU behind it would leave no gradient at initialisation, and a normalisation there would multiply its first step
by 1 / sqrt(eps). In the counts, r and w are the channels read and written, and s the number of sides. 3x3 stands for 3x3x3 in a
volume. No module here draws random numbers in forward.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.functions import Pointwise, apply
from esper.kasmina.stack.layers import StackedModule, zero_linear

_CONVOLUTIONS: dict[int, type[nn.Conv2d] | type[nn.Conv3d]] = {2: nn.Conv2d, 3: nn.Conv3d}
"""By the number of sides."""


def zero_conv(reads: int, writes: int, size: int, *, groups: int = 1, sides: int = 2) -> nn.Conv2d | nn.Conv3d:
    """Make a convolution that keeps the resolution and starts at exactly 0."""
    layer = _CONVOLUTIONS[sides](reads, writes, size, padding=size // 2, groups=groups)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def conv(reads: int, writes: int, size: int, *, groups: int = 1, sides: int = 2) -> nn.Conv2d | nn.Conv3d:
    """Make a convolution that keeps the resolution: weights normal with variance 2 / fan in, for a ReLU behind it, biases 0."""
    layer = zero_conv(reads, writes, size, groups=groups, sides=sides)
    nn.init.normal_(layer.weight, std=math.sqrt(2 / (reads // groups * size**sides)))
    return layer


class Norm(nn.Module):
    """Computes delta = a * (u - mean(u)) / sqrt(var(u) + eps) + b, a and b zero at initialisation; 2 w parameters.

    Mean and variance are those of one example over all its channels and positions (Wu and He, "Group Normalization",
    2018, with one group), so that no example depends on its batch.
    """

    draws = False
    eps = 1e-5

    def __init__(self, width: int, sides: int = 2) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width, *(1,) * sides))
        self.shift = nn.Parameter(torch.zeros(width, *(1,) * sides))

    def forward(self, u: Tensor) -> Tensor:
        variance, mean = torch.var_mean(u, tuple(range(1, u.dim())), correction=0, keepdim=True)
        return (u - mean) * torch.rsqrt(variance + self.eps) * self.scale + self.shift


class SqueezeExcite(nn.Module):
    """Computes delta = u * (W relu(V mean(u) + c) + b), W and b zero at initialisation; k (r + 1) + w (k + 1) parameters.

    The factor of every channel is computed from the means of all (Hu et al., "Squeeze-and-Excitation Networks", 2018,
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
        factor = self.out(torch.relu(self.inner(u.mean(tuple(range(2, u.dim()))))))
        return u * factor[(..., *(None,) * (u.dim() - 2))]


class Activation(nn.Module):
    """Applies a function of each feature."""

    draws = False

    def __init__(self, function: Pointwise) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return apply(self.function, x)


class Convolutions(nn.Sequential):
    """Runs convolutions with a ReLU after each but the last, which is zero at initialisation."""

    draws = False

    def __init__(self, *layers: nn.Conv2d | nn.Conv3d) -> None:
        parts = [part for layer in layers[:-1] for part in (layer, nn.ReLU())]
        super().__init__(*parts, layers[-1])


def depthwise_separable(reads: int, writes: int, *, sides: int = 2) -> Convolutions:
    """Build 3x3 within each channel, ReLU, 1x1 across; (3^s + 1) r + r w + w parameters (Howard et al., "MobileNets", 2017)."""
    return Convolutions(conv(reads, reads, 3, groups=reads, sides=sides), zero_conv(reads, writes, 1, sides=sides))


def convolutions(
    reads: int, writes: int, sizes: Sequence[int], hidden: Sequence[int] = (), *, sides: int = 2
) -> Convolutions:
    """Build a convolution of each size k, of r channels to w and by the hidden numbers of channels between.

    Each has w' (k^s r' + 1) parameters, where it maps r' channels to w'. Sizes 1, 3, 1 are a bottleneck (He et al., 2016,
    figure 5).
    """
    *inner, (r, w, last) = zip((reads, *hidden), (*hidden, writes), sizes, strict=True)
    return Convolutions(*(conv(*each, sides=sides) for each in inner), zero_conv(r, w, last, sides=sides))


class Channelwise(StackedModule):
    """Runs a seed for vectors, which `build` makes, at each position of a map, with the channels as features.

    It has the parameters of that seed.
    """

    draws = False

    def __init__(self, build: Callable[[int, int], nn.Module], reads: int, writes: int, *, sides: int = 2) -> None:
        super().__init__()
        self.seed, self.sides = build(reads, writes), sides

    def forward(self, u: Tensor) -> Tensor:
        """Return (B, reads, H, W) -> (B, writes, H, W), or (E, B, reads, H, W) -> (E, B, writes, H, W)."""
        features = -1 - self.sides
        return self.seed(u.movedim(features, -1)).movedim(-1, features)
