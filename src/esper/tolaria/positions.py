"""Positions of maps as examples, for what is measured on streams. n rows, B examples, P positions, D features."""

from functools import lru_cache

import torch
from torch import Tensor

GRID = 4
"""Positions that are looked at along each side of a map, at most: near ones say much the same, and a fit costs by the
example."""


def positions(stream: Tensor, like: Tensor | None = None) -> Tensor:
    """Features by example: maps (n, B, D, H, W) -> (n, B P, D) at a fixed even grid of positions; vectors as they are.

    The grid has as many positions as that of the maps `like` has, so that both tell of equally many examples.
    """
    if stream.dim() != 5:
        return stream
    grid = (like if like is not None else stream).shape[3:]
    row, column = (
        _places(size, min(GRID, side), stream.device) for size, side in zip(stream.shape[3:], grid, strict=True)
    )
    return stream.movedim(2, -1).index_select(2, row).index_select(3, column).flatten(1, 3)


def for_positions(real: Tensor | None, features: Tensor) -> Tensor | None:
    """(n, N) bool, which examples are real -> the same for every position of theirs, as features (n, N P, D) need it."""
    if real is None or real.shape[1] == features.shape[1]:
        return real
    return real.repeat_interleave(features.shape[1] // real.shape[1], 1)


@lru_cache
def _places(size: int, count: int, device: torch.device) -> Tensor:
    """(count,) the middles of so many equal stretches of a side, brought to the device once."""
    return torch.tensor([(2 * k + 1) * size // (2 * count) for k in range(count)]).to(device)
