"""Plan forward passes: a hashable plan says what runs, and doses are the tensors that vary within a plan.

E environments, S slots, B examples, X branches. A pass goes over a *part* of the population, n of its rows.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.lifecycle.slots import Tap

Indices = NDArray[np.int64]
Run = tuple[int, int] | int
"""Rows of a stack that a call runs: (first, one past the last) if they are contiguous, else the number of rows to gather."""


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


class CallPlan(NamedTuple):
    """Plans how one form at one slot runs over some rows of a pass."""

    slot: int  # index of the slot
    form: int  # index of the form among those of the slot
    run: Run  # rows of the stack
    whole: bool  # whether the rows are all of the pass, in order
    taps: tuple[Tap, ...]  # what the rows read, one or more
    attenuated: bool  # whether a row has an alpha below 1
    blended: bool  # whether a row has another blend than ADD
    gated: bool  # whether a row has blend GATE
    detached: bool  # whether no gradient flows back through what a row reads
    frozen: bool  # whether the parameters of the seeds are constants
    straight: bool  # whether the seeds incubate behind the host in the pass itself (`kasmina.slot.Straight`)


class Join(NamedTuple):
    """Says which branches run through a segment of the host, and how many join behind it."""

    run: Run  # rows of the host for the branches that run through it
    joining: int  # how many branches join behind it
    whole: bool  # whether these leave the rows of the pass, each once and in order
    grown: bool  # whether a seed behind the segment acts on a branch that joins there


class Plan(NamedTuple):
    """Describes the structure of a pass. Passes with one plan differ only in their doses and share what is prepared."""

    part: tuple[int, int]  # the first environment of the pass, and one past the last
    base: tuple[tuple[CallPlan, ...], ...]  # by slot: calls of each slot for the environments themselves
    branch: tuple[tuple[CallPlan, ...], ...]  # by slot: calls of each slot for branches; empty without branches
    joins: tuple[Join, ...]  # by segment; empty without branches

    @property
    def bare(self) -> bool:
        """Whether the hosts run alone: no seed acts on them, and no branch leaves them."""
        return not any(self.base) and not self.joins


class CallDoses(NamedTuple):
    """Holds the tensors that vary in a call over n rows. A column has the shape (n, 1, ...) with as many axes as the stream."""

    rows: Indices | None  # (n,) rows of the stack; None if they are contiguous
    where: Tensor | None  # (n,) rows of the pass; None if they are all of them, in order
    places: Indices  # (n,) the same on the host
    tap: dict[Tap, Tensor]  # for every tap of the plan but the first, a bool column: the rows that read it
    alpha: Tensor | None  # None if it is 1 in every row
    blend: Tensor | None  # None if every row is ADD
    attached: Tensor | None  # bool, rows through whose input a gradient flows back; None if all are


class Doses(NamedTuple):
    """Holds the tensors that vary within a plan; the tuples are those of `Plan`."""

    base: tuple[tuple[CallDoses, ...], ...]  # by slot: doses of the calls for the environments themselves
    branch: tuple[tuple[CallDoses, ...], ...]  # by slot: doses of the calls for branches
    # rows (n,) of the host that are gathered for the branches that run already, and of the pass (m,) that the joining ones
    # leave; None for rows that need not be gathered
    joins: tuple[tuple[Indices | None, Tensor | None], ...]
    origin: Tensor | None  # (X,) the row of the pass that each branch leaves
    owners: Indices  # (X,) the same on the host


class Route(NamedTuple):
    """Pairs a plan with its doses, computed once and run for as many batches as the doses hold."""

    plan: Plan
    doses: Doses

    @property
    def part(self) -> slice:
        return slice(*self.plan.part)


Planned = TypeVar("Planned", bound=Hashable)
Prepared = TypeVar("Prepared")


class PlanCache(Generic[Planned, Prepared]):
    """Caches what is prepared for plans, or for plans with shapes, for the `bound` of them that were used last."""

    def __init__(self, bound: int) -> None:
        assert bound > 0, bound
        self.bound = bound
        # how often something was prepared, found, and dropped for lack of room
        self.built = self.reused = self.evicted = 0
        self._known: OrderedDict[Planned, Prepared] = OrderedDict()

    def get(self, plan: Planned, prepare: Callable[[Planned], Prepared]) -> Prepared:
        if plan in self._known:
            self.reused += 1
            self._known.move_to_end(plan)
            return self._known[plan]
        self.built += 1
        made = self._known[plan] = prepare(plan)
        if len(self._known) > self.bound:
            self._known.popitem(last=False)
            self.evicted += 1
        return made
