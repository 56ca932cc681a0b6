"""Streams: what flows at a place of a network where a seed can be planted, and how it is treated. n rows, B examples.

A tensor of one network begins with the batch axis (B, ...), one of a population with a row axis in front of it (n, B, ...). The
methods count axes from the last, so that they take both.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

GRID = 4
"""Most positions along each side of a map, and the square root of the most positions of a sequence, whose features are measured:
neighbouring positions are alike, and a fit costs by the position."""


class Kind(StrEnum):
    """The kind of a stream, by the shape of one example.

    Attributes:
        VECTOR: (C,)
        MAP: (C, H, W)
        SEQUENCE: (L, C)
    """

    VECTOR = "vector"
    MAP = "map"
    SEQUENCE = "sequence"


@dataclass(frozen=True)
class Stream:
    """The stream at a site; use `Vector`, `Map` or `Sequence`.

    Attributes:
        width (int): features of a vector, channels of a map, features of every position of a sequence
    """

    width: int

    kind: ClassVar[Kind]
    axes: ClassVar[int]  # axes of one example
    features: ClassVar[int]  # the axis of the features, counted from the last

    @classmethod
    def width_of(cls, x: object) -> int:
        """The width of one network's tensor x (B, ...), or 0 where x is not a floating-point stream of this kind."""
        if not isinstance(x, torch.Tensor) or x.dim() != 1 + cls.axes or not x.is_floating_point():
            return 0
        return x.shape[cls.features]

    @classmethod
    def column(cls, values: Tensor) -> Tensor:
        """One number for each row, (n,), in a shape that broadcasts over a population's stream: (n, 1, 1, ...)."""
        return values.view(-1, *(1,) * (1 + cls.axes))

    @classmethod
    def fitted(cls, u: Tensor, h: Tensor) -> Tensor:
        """u (..., B, ...) at the resolution of the stream h: each position is the mean of those of u that it covers."""
        return u

    @classmethod
    def gated(cls, u: Tensor) -> Tensor:
        """What the GATE blend reads of u: features in the last axis, (..., B, C) or (..., B, L, C)."""
        return u

    @classmethod
    def spread(cls, gate: Tensor) -> Tensor:
        """The values of gates (..., B, 1) or (..., B, L, 1) in a shape that broadcasts over the stream."""
        return gate

    @classmethod
    def positions(cls, h: Tensor, like: Tensor | None = None) -> Tensor:
        """Features by example, (n, B, ...) -> (n, B P, C), at P fixed positions: as many as the stream `like` has, or h."""
        return h


class Vector(Stream):
    """(B, C): one vector of features for each example."""

    kind = Kind.VECTOR
    axes = 1
    features = -1


class Map(Stream):
    """(B, C, H, W): channels at the positions of an image. A gate reads the mean over positions."""

    kind = Kind.MAP
    axes = 3
    features = -3

    @classmethod
    def fitted(cls, u: Tensor, h: Tensor) -> Tensor:
        """u (..., B, Cu, Hu, Wu) -> (..., B, Cu, H, W), by adaptive average pooling."""
        if u.shape[-2:] == h.shape[-2:]:
            return u
        size = tuple(h.shape[-2:])
        if u.dim() == 4:
            pooled: Tensor = F.adaptive_avg_pool2d(u, size)  # type: ignore[arg-type]
        else:
            pooled = F.adaptive_avg_pool2d(u.flatten(0, 1), size).unflatten(0, u.shape[:2])  # type: ignore[arg-type]
        return pooled

    @classmethod
    def gated(cls, u: Tensor) -> Tensor:
        """(..., B, C, H, W) -> (..., B, C), the mean over positions."""
        return u.mean((-2, -1))

    @classmethod
    def spread(cls, gate: Tensor) -> Tensor:
        """(..., B, 1) -> (..., B, 1, 1, 1)."""
        return gate[..., None, None]

    @classmethod
    def positions(cls, h: Tensor, like: Tensor | None = None) -> Tensor:
        """(n, B, C, H, W) -> (n, B P, C) at an even grid of positions, at most `GRID` along each side."""
        sides = (like if like is not None else h).shape[3:]
        row, column = (_middles(size, min(GRID, side), h.device) for size, side in zip(h.shape[3:], sides, strict=True))
        return h.movedim(2, -1).index_select(2, row).index_select(3, column).flatten(1, 3)


class Sequence(Stream):
    """(B, L, C): one vector of features for each of L positions. A gate is worked out for each position by itself."""

    kind = Kind.SEQUENCE
    axes = 2
    features = -1

    @classmethod
    def fitted(cls, u: Tensor, h: Tensor) -> Tensor:
        """u (..., B, Lu, Cu) -> (..., B, L, Cu), by adaptive average pooling, which looks ahead where Lu and L differ."""
        if u.shape[-2] == h.shape[-2]:
            return u
        pooled: Tensor = F.adaptive_avg_pool1d(u.flatten(0, -3).mT, h.shape[-2]).mT
        return pooled.unflatten(0, u.shape[:-2])

    @classmethod
    def positions(cls, h: Tensor, like: Tensor | None = None) -> Tensor:
        """(n, B, L, C) -> (n, B P, C) at P <= GRID^2 positions, evenly apart."""
        length = (like if like is not None else h).shape[2]
        return h.index_select(2, _middles(h.shape[2], min(GRID**2, length), h.device)).flatten(1, 2)


STREAMS: dict[Kind, type[Stream]] = {stream.kind: stream for stream in (Vector, Map, Sequence)}


@lru_cache
def _middles(size: int, count: int, device: torch.device) -> Tensor:
    """(count,) the middles of `count` equal stretches of a side, sent to the device once."""
    return torch.tensor([(2 * k + 1) * size // (2 * count) for k in range(count)]).to(device)
