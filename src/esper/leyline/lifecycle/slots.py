"""Say where a host, or any network, can grow, what flows there, and what a seed may read. n rows, B examples.

A tensor of one network begins with the batch axis (B, ...), one of a population with a row axis in front of it (n, B, ...). The
methods count axes from the last, so that they take both.

Each kind has one order of axes, in which seeds are written. A network of a person's own may have the axes of a stream in another
order, such as (B, C, L) of `nn.Conv1d`: what a seed reads there is transposed in front of it, and its change behind it.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.leyline.messages import InputError

GRID = 4
"""Most positions along each side of a map, and the square root of the most positions of a sequence, whose features are measured:
neighbouring positions are alike, and a fit costs by the position."""


class Kind(StrEnum):
    """Names the kinds of streams, by the shape of one example.

    Attributes:
        VECTOR: (C,)
        MAP: (C, H, W)
        SEQUENCE: (L, C)
        VOLUME: (C, D, H, W)
    """

    VECTOR = "vector"
    MAP = "map"
    SEQUENCE = "sequence"
    VOLUME = "volume"


@dataclass(frozen=True)
class Stream:
    """Describes the stream at a site; use `Vector`, `Map`, `Sequence` or `Volume`.

    Attributes:
        width (int): features of a vector, channels of a map or volume, features of every position of a sequence
        order (str): the axes of its tensors in one network, a letter each, one of `orders`; the first of these is that of seeds
    """

    width: int
    order: str = ""

    kind: ClassVar[Kind]
    axes: ClassVar[int]  # axes of one example
    features: ClassVar[int]  # the axis of the features, counted from the last
    _sides: ClassVar[slice] = slice(0, 0)  # the axes of the positions, counted from the last
    _grid: ClassVar[int] = GRID  # most positions along each side whose features are measured
    orders: ClassVar[tuple[str, ...]] = ("",)

    def __post_init__(self) -> None:
        if self.order == "":
            object.__setattr__(self, "order", self.orders[0])
        elif self.order not in self.orders:
            raise InputError(
                f"the axes of a {self.kind} are in order {self.order!r}; give one of {', '.join(map(repr, self.orders))}"
            )

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.width}{f', {self.order}' if self.permutation else ''})"

    def __repr__(self) -> str:
        """Leave out the usual order: states of a growth that were saved before streams had one are compared by this text."""
        return f"{type(self).__name__}(width={self.width}{f', order={self.order!r}' if self.permutation else ''})"

    @property
    def permutation(self) -> tuple[int, ...]:
        """The axes of a tensor (B, ...) in the order in which seeds are written; empty where they are in that order."""
        if self.order in ("", self.orders[0]):  # "" in a network that was pickled before streams had an order
            return ()
        return tuple(self.order.index(axis) for axis in self.orders[0])

    def arranged(self, x: Tensor) -> Tensor:
        """Return a tensor of one network with its axes in the order in which seeds are written."""
        return arranged(x, self.permutation)

    def width_at(self, x: object) -> int:
        """Return the width of one network's tensor x, whose axes are in `order`; 0 where x is no such floating-point stream."""
        if not isinstance(x, torch.Tensor) or x.dim() != len(self.orders[0]):
            return 0
        return self.width_of(self.arranged(x))

    @classmethod
    def width_of(cls, x: object) -> int:
        """Return the width of one network's tensor x (B, ...), or 0 where x is not a floating-point stream of this kind."""
        if not isinstance(x, torch.Tensor) or x.dim() != 1 + cls.axes or not x.is_floating_point():
            return 0
        return x.shape[cls.features]

    @classmethod
    def column(cls, values: Tensor) -> Tensor:
        """Return one number for each row, (n,), in a shape that broadcasts over a population's stream: (n, 1, 1, ...)."""
        return values.view(-1, *(1,) * (1 + cls.axes))

    @classmethod
    def fitted(cls, u: Tensor, h: Tensor) -> Tensor:
        """Average u (..., B, ...) to the resolution of the stream h: each position is the mean of those of u that it covers.

        This is adaptive average pooling, which looks ahead in a sequence where the lengths differ.
        """
        size = h.shape[cls._sides]
        if u.shape[cls._sides] == size:
            return u
        pool: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[len(size) - 1]
        channels = -1 - len(size)  # the axis of the features where pooling wants them
        maps = u.movedim(cls.features, channels)
        pooled: Tensor = pool(maps.flatten(0, channels - 1), size).unflatten(0, maps.shape[:channels])
        return pooled.movedim(channels, cls.features)

    @classmethod
    def gated(cls, u: Tensor) -> Tensor:
        """Return what the GATE blend reads of u: features in the last axis, (..., B, C) or (..., B, L, C)."""
        return u

    @classmethod
    def spread(cls, gate: Tensor) -> Tensor:
        """Return the values of gates (..., B, 1) or (..., B, L, 1) in a shape that broadcasts over the stream."""
        return gate

    @classmethod
    def positions(cls, h: Tensor, like: Tensor | None = None) -> Tensor:
        """Take features by example, (n, B, ...) -> (n, B P, C), at P positions evenly apart: as many as `like` has, or h.

        There are at most `GRID` positions along each side of a map or volume, and GRID^2 of a sequence.
        """
        chosen = h.movedim(cls.features, -1)
        wanted = (h if like is None else like).shape[cls._sides]
        for axis, (size, side) in enumerate(zip(h.shape[cls._sides], wanted, strict=True), 2):
            chosen = chosen.index_select(axis, _middles(size, min(cls._grid, side), h.device))
        return chosen.flatten(1, -2)


class Vector(Stream):
    """Describes (B, C): one vector of features for each example."""

    kind = Kind.VECTOR
    orders = ("BC",)
    axes = 1
    features = -1


class Map(Stream):
    """Describes (B, C, H, W): channels at the positions of an image. A gate reads the mean over positions.

    The axes of a single network may also be (B, H, W, C), channels last.
    """

    kind = Kind.MAP
    orders = ("BCHW", "BHWC")
    axes = 3
    features = -3
    _sides = slice(-2, None)

    @classmethod
    def gated(cls, u: Tensor) -> Tensor:
        """Map (..., B, C, H, W) -> (..., B, C), the mean over positions."""
        return u.mean(tuple(range(1 - cls.axes, 0)))

    @classmethod
    def spread(cls, gate: Tensor) -> Tensor:
        """Map (..., B, 1) -> (..., B, 1, 1, 1)."""
        return gate[(..., *(None,) * (cls.axes - 1))]


class Volume(Map):
    """Describes (B, C, D, H, W): channels at positions of a volume, as of `nn.Conv3d`. A gate reads the mean over positions.

    The axes of a single network may also be (B, D, H, W, C), channels last.
    """

    kind = Kind.VOLUME
    orders = ("BCDHW", "BDHWC")
    axes = 4
    features = -4
    _sides = slice(-3, None)


class Sequence(Stream):
    """Describes (B, L, C): one vector of features for each of L positions. A gate is computed for each position by itself.

    The axes of a single network may also be (B, C, L), as for `nn.Conv1d`, or (L, B, C), as for layers with batch_first=False.
    """

    kind = Kind.SEQUENCE
    orders = ("BLC", "BCL", "LBC")
    axes = 2
    features = -1
    _sides = slice(-2, -1)
    _grid = GRID**2


CONVOLVED = (Kind.MAP, Kind.VOLUME)
"""Kinds whose seeds have convolutions, which run row by row in a population."""


def arranged(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Transpose a tensor to the order in which seeds are written, by `Stream.permutation`; x itself where that is empty."""
    return x.permute(axes) if axes else x


def restored(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the inverse of `arranged`."""
    return x.permute(tuple(axes.index(axis) for axis in range(len(axes)))) if axes else x


STREAMS: dict[Kind, type[Stream]] = {stream.kind: stream for stream in (Vector, Map, Sequence, Volume)}


@lru_cache
def _middles(size: int, count: int, device: torch.device) -> Tensor:
    """Return the middles (count,) of `count` equal stretches of a side, sent to the device once."""
    return torch.tensor([(2 * k + 1) * size // (2 * count) for k in range(count)]).to(device)


class Tap(StrEnum):
    """Says what a seed reads.

    Attributes:
        HERE: the stream at the slot: depth
        BEFORE: the stream as it entered the segment in front of the slot, or an earlier one that the slot names: a bypass
        INPUT: the input of the host: a skip
    """

    HERE = "here"
    BEFORE = "before"
    INPUT = "input"


@dataclass(frozen=True)
class SlotSpec:
    """Describes a place between two segments of a host where a seed may be planted.

    Attributes:
        name (str): name of the slot
        after (int): index of the segment whose output the slot changes
        width (int): features of the stream at the slot; channels of a map
        kind (Kind): shape of the stream at the slot, also by its name: 'vector', 'map', 'sequence' or 'volume'
        inner (int or None): number of modules at the start of that `nn.Sequential` that make its inner features; None lets the
            host find it
        causal (bool): whether no position of a sequence may depend on later ones, so that only causal blueprints fit
        head (bool): whether the slot lies behind the last layer, so that a seed changes the outputs. Rules and trees, which
            place seeds on the stream of the blocks, leave such slots out
        around (int or None): index of the segment whose input a bypass reads. An earlier one than `after` spans all segments from
            there on, for instance a narrow place between wide streams; None is `after` itself
    """

    name: str
    after: int
    width: int
    kind: Kind = Kind.VECTOR
    inner: int | None = None
    causal: bool = False
    head: bool = False
    around: int | None = None

    if TYPE_CHECKING:  # a type checker takes the kind by its name, too

        def __init__(
            self,
            name: str,
            after: int,
            width: int,
            kind: Kind | Literal["vector", "map", "sequence", "volume"] = Kind.VECTOR,
            inner: int | None = None,
            causal: bool = False,
            head: bool = False,
            around: int | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"the name of a slot is {self.name!r}; give it a name in quotes, as in 'middle'")
        for name, least, given, mend in (
            ("after", 0, "slot {!r} is after segment", "the index of a segment"),
            ("width", 1, "slot {!r} has width", "the features of the segment before it"),
            ("inner", 1, "inner of slot {!r} is", "how many modules of the segment make its inner features"),
            ("around", 0, "slot {!r} is around segment", "the index of the segment whose input its bypasses read"),
        ):
            value, none = getattr(self, name), "None, or " if name in ("inner", "around") else ""
            if none and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                told = f"{given.format(self.name)} {value!r}"
                raise InputError(f"{told}; give {none}{mend}, a whole number from {least} on")
            object.__setattr__(self, name, int(value))  # of NumPy's integers too
        if self.start > self.after:
            raise InputError(
                f"slot {self.name!r} is around segment {self.around}, but it lies behind segment {self.after}; give an earlier "
                "segment, or leave around out"
            )
        if self.kind not in list(Kind):
            raise InputError(f"slot {self.name!r} is of kind {self.kind!r}; choose one of {', '.join(Kind)}")
        object.__setattr__(self, "kind", Kind(self.kind))
        if self.causal and self.kind != Kind.SEQUENCE:
            raise InputError(
                f"slot {self.name!r} is causal and of kind {str(self.kind)!r}; leave causal out, because only a sequence has "
                "earlier and later positions"
            )

    @property
    def stream(self) -> Stream:
        """The stream at the slot."""
        return STREAMS[self.kind](self.width)

    @property
    def start(self) -> int:
        """The index of the first segment that a bypass goes around; the last one is `after`."""
        return self.after if self.around is None else self.around


@dataclass(frozen=True)
class Site:
    """Describes a place in a network where a seed can be planted: the output of a submodule.

    Attributes:
        name (str): name of the site
        after (str): dotted path of the submodule whose output the seed changes
        around (str): dotted path of the submodule whose input a bypass reads
        stream (Stream): the stream at the site: `Vector`, `Map`, `Sequence` or `Volume`
        causal (bool): whether no position of the stream may depend on later ones
    """

    name: str
    after: str
    around: str
    stream: Stream
    causal: bool = False
