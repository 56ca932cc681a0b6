"""Plan passes over a body: which rows of which stacks run at given doses, and where branches join.

E environments, S slots, X branches.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.layout import TAPS
from esper.kasmina.plan import (
    Branches,
    CallDoses,
    CallPlan,
    Doses,
    Indices,
    JoinDoses,
    JoinPlan,
    Plan,
    Route,
    Run,
)
from esper.leyline.actions import Blend
from esper.leyline.stages import Stage
from esper.leyline.view import Seeds

if TYPE_CHECKING:
    from esper.kasmina.body import Body

Call = tuple[CallPlan, CallDoses]
OneDose = NDArray[np.float32]


class Planner:
    """Plan the passes over a body.

    With `train`, a branch is a shadow: only the one seed that it adds at its slot learns, and everything else is
    constant. With `straight`, incubating seeds run behind the host in the pass itself. With `frozen`, the parameters of
    seeds get no gradients.
    """

    def __init__(self, body: "Body", seeds: Seeds, *, train: bool, straight: bool, frozen: bool) -> None:
        self.body, self.layout, self.seeds = body, body.layout, seeds
        self.train, self.straight, self.frozen = train, straight, frozen

    def route(self, dose: OneDose, branches: Branches | None, part: slice) -> Route:
        """Plan a pass over a part of the rows at doses (E, S); `branches` are those of the part alone."""
        base = _split([self._base(slot, dose, part) for slot in range(len(self.layout.slots))])
        bounds = part.start, part.stop
        if branches is None or not len(branches.env):
            return Route(Plan(bounds, base[0], (), ()), Doses(base[1], (), (), None, np.zeros(0, np.int64)))
        joins = [self._join(segment, branches, part) for segment in range(len(self.layout.chain.paths))]
        branch = _split([self._branch(slot, branches) for slot in range(len(self.layout.slots))])
        owners = branches.env - part.start
        plan = Plan(bounds, base[0], branch[0], tuple(join for join, _ in joins))
        return Route(plan, Doses(base[1], branch[1], tuple(d for _, d in joins), self._send(owners), owners))

    def _base(self, slot: int, dose: OneDose, part: slice) -> list[Call]:
        envs = np.arange(part.start, part.stop)
        calls = self._calls(slot, envs, dose[envs, slot], frozen=self.frozen)
        if self.straight:
            incubating = np.where(self.seeds.stage[envs, slot] == Stage.TRAINING, np.float32(1), np.float32(0))
            calls += self._calls(slot, envs, incubating, frozen=False, straight=True)
        return calls

    def _join(self, segment: int, branches: Branches, part: slice) -> tuple[JoinPlan, JoinDoses]:
        """Plan the branches at a segment: those that run through it, and those that join behind it."""
        slots = self.layout.slots
        first = sum(slot.after < segment for slot in slots)  # the first slot behind the segment
        owners = branches.env[: np.searchsorted(branches.slot, first)]
        here = first < len(slots) and slots[first].after == segment
        joining = branches.env[branches.slot == first] - part.start if here else np.zeros(0, np.int64)
        env = self._send(joining) if len(joining) else None
        if np.array_equal(owners, np.arange(part.start, part.stop)):
            return JoinPlan((part.start, part.stop), len(joining)), JoinDoses(None, env)
        return JoinPlan(len(owners), len(joining)), JoinDoses(owners, env)

    def _branch(self, slot: int, branches: Branches) -> list[Call]:
        """Plan the calls at a slot for the branches that run through it or join there."""
        there = int(np.searchsorted(branches.slot, slot, side="right"))
        envs, doses = branches.env[:there], branches.dose[:there, slot]
        if not self.train:
            return self._calls(slot, envs, doses, frozen=True)
        joined = branches.slot[:there] == slot
        old, new = np.where(joined, np.float32(0), doses), np.where(joined, doses, np.float32(0))
        return self._calls(slot, envs, old, frozen=True) + self._calls(slot, envs, new, frozen=False)

    def _calls(self, slot: int, envs: Indices, dose: OneDose, *, frozen: bool, straight: bool = False) -> list[Call]:
        """Plan the forms that run at a slot, over rows of a pass whose environments are `envs` (n,) and doses `dose` (n,)."""
        body, seeds, column = self.body, self.seeds, self._column(slot)
        calls = []
        for (at, form), owners in body.envs.items():
            if at != slot or not len(owners):
                continue
            row_of = np.full(len(seeds.stage), -1, np.int64)
            row_of[owners] = np.arange(len(owners))
            where = np.flatnonzero((dose > 0) & (row_of[envs] >= 0))
            if not len(where):
                continue
            # In the order of the stack's rows, so that a pass over the environments reads them in one contiguous run.
            where = where[np.argsort(row_of[envs[where]], kind="stable")]
            rows, env = row_of[envs[where]], envs[where]
            contiguous = np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows)))
            run: Run = (int(rows[0]), int(rows[0]) + len(rows)) if contiguous else len(rows)
            whole = np.array_equal(where, np.arange(len(envs)))
            blend, taps = seeds.blend[env, slot], self.layout.tap_of[seeds.blueprint[env, slot]]
            used = np.unique(taps).tolist()
            attenuated, gated = bool((dose[where] < 1).any()), bool((blend == Blend.GATE).any())
            detached = np.zeros(len(env), bool)
            if body.isolated:
                detached = seeds.stage[env, slot] != Stage.FOSSILIZED
            plan = CallPlan(
                slot,
                form,
                run,
                whole,
                tuple(TAPS[tap] for tap in used),
                attenuated,
                bool(blend.any()),
                gated,
                bool(detached.any()),
                frozen,
                straight,
            )
            doses = CallDoses(
                rows=None if contiguous else rows,
                where=None if whole else self._send(where),
                places=where,
                tap={TAPS[tap]: column(taps == tap) for tap in used[1:]},
                alpha=column(dose[where].astype(np.float64)).to(body.dtype) if attenuated else None,
                blend=column(blend.astype(np.int64)) if plan.blended else None,
                attached=column(~detached) if plan.detached else None,
            )
            calls.append((plan, doses))
        return calls

    def _send(self, rows: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(rows)).to(self.body.device, non_blocking=True)

    def _column(self, slot: int) -> Callable[[NDArray[np.generic]], Tensor]:
        """Move numbers (n,) from the host to a column of a slot's stream on the device."""
        stream = self.layout.streams[slot]
        return lambda values: stream.column(self._send(values))


def _split(slots: list[list[Call]]) -> tuple[tuple[tuple[CallPlan, ...], ...], tuple[tuple[CallDoses, ...], ...]]:
    """Split the calls of each slot into plans and doses."""
    plans = tuple(tuple(plan for plan, _ in calls) for calls in slots)
    return plans, tuple(tuple(doses for _, doses in calls) for calls in slots)
