"""A forward pass, worked out: which seeds run where at given doses, and which further evaluations leave it at which slot.

E environments, S slots, B examples, X branches. A pass goes over a *part* of the population, n of its rows.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.stack import Rows, Stack
from esper.leyline.slots import Tap

Indices = NDArray[np.int64]


class Branches(NamedTuple):
    """Further evaluations that leave the pass of their environment at a slot and run on from there at doses of their own.

    Sorted by `slot`. What comes before the slot is shared with the environment's own pass.
    """

    env: Indices  # (X,)
    slot: Indices  # (X,) the first slot whose dose differs
    dose: NDArray[np.float32]  # (X, S)

    @classmethod
    def at(cls, env: Indices, slot: Indices, dose: NDArray[np.float32]) -> tuple["Branches", Indices]:
        """Branches from unsorted arrays, and the order that sorts them: row i of the result is row order[i] of the input."""
        order = np.lexsort((env, slot))
        return cls(env[order], slot[order], dose[order]), order

    def within(self, part: slice) -> tuple["Branches", Indices]:
        """The branches of a part of the environments, and where among all branches they are."""
        chosen = np.flatnonzero((self.env >= part.start) & (self.env < part.stop))
        return Branches(self.env[chosen], self.slot[chosen], self.dose[chosen]), chosen


class Call(NamedTuple):
    """One form of one slot, run over the rows of a pass that carry it (n of them).

    A column (n, 1, ...) has as many dimensions as the stream.
    """

    stack: Stack
    rows: Rows  # rows of the stack
    where: Tensor | None  # (n,) rows of the pass; None when they are all of them, in order
    places: Indices  # (n,) the same on the host
    taps: tuple[Tap, ...]  # what the rows read, one or more
    tap: dict[Tap, Tensor]  # (n, 1, ...) bool, the rows that read a tap, for all taps but the first
    alpha: Tensor | None  # (n, 1, ...); None when it is 1 in every row, as of seeds that have arrived
    blend: Tensor | None  # (n, 1, ...); None when every row is ADD
    gated: bool  # some row blends by GATE
    attached: Tensor | None  # (n, 1, ...) bool, rows whose read passes a gradient on; None when all do
    frozen: bool
    straight: bool


class Join(NamedTuple):
    """What a pass does with branches at one segment."""

    host: Rows  # rows of the host for the branches that run already
    env: Tensor | None  # rows of the pass whose branches leave it at the slot behind the segment


class Route(NamedTuple):
    """A forward pass at given doses, worked out once and run for as many batches as the doses hold."""

    part: slice  # the environments that it goes over
    base: tuple[tuple[Call, ...], ...]  # a tuple of calls for each slot
    branch: tuple[tuple[Call, ...], ...]
    joins: tuple[Join, ...]  # one for each segment; empty without branches
    origin: Tensor | None  # (X,) the row of the pass that each branch leaves
    owners: Indices  # (X,) the same on the host

    @property
    def bare(self) -> bool:
        """Whether the hosts run alone: no seed acts on them, and nothing leaves them."""
        return not any(self.base) and not self.joins


class Streams(NamedTuple):
    """What one slot sees of a pass; features D may be maps (C, H, W)."""

    here: Tensor  # (n, B, D) in front of any seed
    before: Tensor  # (n, B, Db) as it entered the segment
    inner: Tensor | None  # (n, B, R) inside the segment, where the host offers it and it was asked for


class Pass(NamedTuple):
    """What a forward pass returns."""

    output: Tensor  # (n, B, C)
    branches: Tensor | None  # (X, B, C), in the order of the branches
    streams: tuple[Streams, ...]  # one for each slot, where asked for
    proximal: Tensor | None  # () sum over straight-through seeds of |c|^2 / |h|^2
