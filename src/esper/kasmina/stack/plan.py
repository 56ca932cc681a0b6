"""Plan forward passes: a route says what runs, and holds the tensors in which passes of one plan differ.

E environments, S slots, B examples, X branches. A pass goes over a *part* of the population, n of its rows.
"""

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.lifecycle.slots import Tap

Indices = NDArray[np.int64]


class Branches(NamedTuple):
    """Lists further evaluations by `slot`: each leaves the pass of its environment there and runs on at doses of its own."""

    env: Indices  # (X,) the environment of each branch
    slot: Indices  # (X,) the first slot whose dose differs
    dose: NDArray[np.float32]  # (X, S) the dose of every slot

    @classmethod
    def none(cls, slots: int) -> "Branches":
        """Return no branches."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, slots), np.float32))

    @classmethod
    def at(cls, env: Indices, slot: Indices, dose: NDArray[np.float32]) -> tuple["Branches", Indices]:
        """Make branches from unsorted arrays; row i of the result is row order[i] of the input, and the order is returned too."""
        order = np.lexsort((env, slot))
        return cls(env[order], slot[order], dose[order]), order

    def within(self, part: slice) -> tuple["Branches", Indices]:
        """Return the branches of a part of the environments, and their indices among all branches."""
        chosen = np.flatnonzero((self.env >= part.start) & (self.env < part.stop))
        return Branches(self.env[chosen], self.slot[chosen], self.dose[chosen]), chosen


class SeedCall(NamedTuple):
    """Says how one form at one slot runs over n rows of a pass. Columns are (n, 1, ...) with as many axes as the stream."""

    slot: int  # index of the slot
    form: int  # index of the form among those of the slot
    taps: tuple[Tap, ...]  # what the rows read, one or more
    gated: bool  # whether a row has blend GATE
    frozen: bool  # whether the parameters of the seeds are constants
    straight: bool  # whether the seeds incubate behind the host in the pass itself (`kasmina.slot.Straight`)
    rows: slice | Indices  # rows of the stack: a run of them, or (n,) rows to gather
    where: Tensor | None  # (n,) rows of the pass; None if they are all of them, in order
    places: Indices  # (n,) the same on the CPU
    reads: tuple[Tensor, ...]  # for every tap but the first, a bool column: the rows that read it
    alpha: Tensor | None  # None if it is 1 in every row
    blend: Tensor | None  # None if every row is ADD
    attached: Tensor | None  # bool, rows through whose input a gradient flows back; None if all are


class Join(NamedTuple):
    """Says which branches run through a segment of the host, and which join behind it."""

    rows: slice | Indices  # rows of the host for the branches that run through it, as in `SeedCall`
    joining: int  # how many branches join behind it
    seeded: bool  # whether a seed behind the segment acts on a branch that joins there
    where: Tensor | None  # (m,) rows of the pass that these leave; None if they are all, each once and in order


class Route(NamedTuple):
    """Describes a pass, computed once and run for many batches."""

    part: slice  # the environments of the pass
    base: tuple[tuple[SeedCall, ...], ...]  # by slot: calls for the environments themselves
    branch: tuple[tuple[SeedCall, ...], ...] = ()  # by slot: calls for branches; empty without branches
    joins: tuple[Join, ...] = ()  # by segment; empty without branches
    origin: Tensor | None = None  # (X,) the row of the pass that each branch leaves
    owners: Indices = np.zeros(0, np.int64)  # (X,) the same on the CPU


def plan_of(tree: object) -> Hashable:
    """Return what routes have in common that differ only in their tensors, so that their passes can run as one compiled graph.

    It is a tree of tuples that has the length of each array of indices in its place, and `...` in that of each tensor.
    """
    if isinstance(tree, tuple):
        return tuple(map(plan_of, tree))
    if isinstance(tree, slice):
        return tree.start, tree.stop
    if isinstance(tree, np.ndarray):
        return len(tree)
    return ... if isinstance(tree, Tensor) else tree
