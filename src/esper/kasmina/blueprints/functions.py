"""Name the functions of single features that a hidden layer may have, and recognise one by its values."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Pointwise = tuple[str] | tuple[str, float]
"""A function by its name in `FUNCTIONS`, with its number if it has one: ("gelu",), ("leaky_relu", 0.2)."""

RELU: Pointwise = ("relu",)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),  # which models such as CLIP take for the GELU
    "silu": F.silu,
    "mish": F.mish,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "selu": F.selu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "squared_relu": lambda x: torch.relu(x).square(),
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
}
"""Functions by name."""

NUMBERED = ("leaky_relu", "elu")
"""Functions that have a number: the slope below 0, and minus the least value."""

REACH = 8.0
"""Values are compared from minus this to this: `relu6` and `hardswish` bend far from 0."""


def apply(function: Pointwise, x: Tensor) -> Tensor:
    """Return a function of each feature of x (...): (...)."""
    name, *numbers = function
    return FUNCTIONS[name](x, *numbers)


def named(function: Pointwise) -> str:
    """Return a function as it is said to a reader: 'gelu', 'leaky_relu(0.2)'."""
    name, *numbers = function
    return name + "".join(f"({number:g})" for number in numbers)


def recognised(x: Tensor, y: Tensor) -> Pointwise | None:
    """Return the function of single features by which y (N,) follows from x (N,), None if it is none of `FUNCTIONS`.

    x: spread from -REACH to REACH. Of several that fit to rounding, as the two forms of the GELU in 16 bits, the nearest is
    returned.
    """
    least = x.argmin()
    slope, bottom = (float((y[least] / way(x[least])).double()) for way in (lambda low: low, torch.expm1))
    found: list[Pointwise] = [(name,) for name in FUNCTIONS if name not in NUMBERED]
    for name, number in zip(NUMBERED, (slope, bottom), strict=True):
        number = float(f"{number:.5g}")  # as a person wrote it, without the rounding of y
        # A slope of 1 is no function; an ELU that ends at -1 is one.
        if math.isfinite(number) and number != 0 and (number != 1 or name == "elu"):
            found.append((name, number))
    allowed = 4 * torch.finfo(y.dtype).eps * max(1.0, float(y.abs().max()))
    misses = [(float((apply(each, x) - y).abs().max()), each) for each in found]
    near = [pair for pair in misses if pair[0] <= allowed]
    return min(near, key=lambda pair: pair[0])[1] if near else None
