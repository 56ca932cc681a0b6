"""What the host factories share: checks of sizes, layers with scaled draws, and the search for a width."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from esper.kasmina.blueprints import count, drawn_with
from esper.kasmina.host import SegmentedHost
from esper.kasmina.layers import Linear
from esper.leyline.errors import InputError


def is_size(value: Any) -> bool:
    """Whether a value is a whole number from 1 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_sizes(of: str, sizes: dict[str, Any]) -> None:
    """InputError, naming the first argument that is no whole number from 1 on, where there is one."""
    for name, size in sizes.items():
        if not is_size(size):
            raise InputError(f"{name} of {of} is {size!r}; give a whole number from 1 on")


def linear(inputs: int, outputs: int, *, variance: float) -> Linear:
    """Weights normal with the given variance, biases 0."""
    layer = Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=variance**0.5)
    nn.init.zeros_(layer.bias)
    return layer


def conv(reads: int, writes: int, size: int, *, variance: float) -> nn.Conv2d:
    """A convolution of size x size that keeps the resolution; weights normal with the given variance, biases 0."""
    layer = nn.Conv2d(reads, writes, size, padding=size // 2)
    nn.init.normal_(layer.weight, std=variance**0.5)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def smallest(build: Callable[[int], Callable[[], SegmentedHost]], parameters: int) -> int:
    """The smallest width for which `build(width)` makes hosts of at least so many parameters; build is increasing in it."""

    def size(width: int) -> int:
        with torch.device("meta"), drawn_with(0):  # counted without room for a single number
            return count(build(width)())

    high = 1
    while size(high) < parameters:
        high *= 2
    low = high // 2  # too small, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if size(middle) >= parameters else (middle, high)
    return high
