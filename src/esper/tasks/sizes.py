"""Shared parts of the host factories: checks of sizes, layers with scaled initial weights, and the search for a width."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from esper.kasmina.blueprints import count, drawn_with
from esper.kasmina.host import SegmentedHost
from esper.kasmina.layers import Linear
from esper.leyline.errors import InputError


def is_size(value: Any) -> bool:
    """Whether a value is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_sizes(of: str, sizes: dict[str, Any]) -> None:
    """Raise InputError for the first size that is not a positive integer. `of` names the host in the message."""
    for name, size in sizes.items():
        if not is_size(size):
            raise InputError(f"{name} of {of} is {size!r}; give a whole number from 1 on")


def linear(inputs: int, outputs: int, *, variance: float) -> Linear:
    """A linear layer whose weights are normal with the given variance and whose biases are 0."""
    layer = Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=variance**0.5)
    nn.init.zeros_(layer.bias)
    return layer


def conv(reads: int, writes: int, size: int, *, variance: float) -> nn.Conv2d:
    """A size x size convolution that keeps the resolution; its weights are normal with the given variance, its biases 0."""
    layer = nn.Conv2d(reads, writes, size, padding=size // 2)
    nn.init.normal_(layer.weight, std=variance**0.5)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def smallest(build: Callable[[int], Callable[[], SegmentedHost]], parameters: int) -> int:
    """The smallest width for which `build(width)` makes hosts of at least `parameters` parameters, by bisection."""

    def size(width: int) -> int:
        with torch.device("meta"), drawn_with(0):  # parameters are counted without allocating them
            return count(build(width)())

    high = 1
    while size(high) < parameters:
        high *= 2
    return bisect_left(range(high), parameters, lo=high // 2 + 1, key=size)
