"""Move the budget of parameters from seed to seed: the rule `regrow`. E environments, S slots."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.lifecycle.masks import complete, defaults
from esper.leyline.lifecycle.view import Bools, Floats, View
from esper.leyline.lifecycle.vocabulary import Actions, Head, Op, Refusal, Stage
from esper.tamiyo.policy.packages import indices, inner_slots
from esper.tamiyo.rules.base import Rule
from esper_bench.controllers.plans import RANKS

SHARE = 0.5
"""A seed is blended in before all slots were tried if its gain is at least this share of the largest gain so far."""
LATEST = 0.7
"""Share of the episode after which nothing is planted again."""


class Regrow(Rule):
    """Plants small bypasses, reads what incubation says of them, prunes the losers, and plants again where the gain is.

    Bypasses of rank 1 incubate at as many slots as the cap allows: at every second one from the last but one, then at the others.
    After one step of training each has a gain (`Measurements.gain`). A seed whose gain is at least SHARE of the largest so far
    is blended in, and trains on in the network. The others are pruned, and what they free is planted where nothing was tried.
    The gains of later seeds are measured beside the seeds that were blended in. Once every slot was tried, the rest of the
    budget goes to the largest gains that were read.
    """

    def __init__(self) -> None:
        self._gain: Floats = np.zeros((0, 0))  # (E, S) the last gain that was read at a slot; nan where none was
        self._order: Floats = np.zeros((0, 0))
        self._full: Bools = np.zeros(0, bool)  # (E,) whether a planting was refused in this step
        self._last: Actions | None = None

    def order(self, view: View) -> Floats:
        """Return (E, S): the slot of the largest value is tried first. Called before the first step of an episode."""
        slots = np.arange(view.seeds.stage.shape[1])
        spread = ((slots[-1] - slots) % 2 == 1) & (slots > 0)
        return np.broadcast_to(slots + len(slots) * spread, view.seeds.stage.shape)

    def act(self, view: View) -> Actions:
        """Return the first decision of a step."""
        envs, slots = view.seeds.stage.shape
        if view.step == 0 or len(self._gain) != envs:
            self._gain, self._order = np.full((envs, slots), np.nan), self.order(view)
        self._full = np.zeros(envs, bool)
        return self._decide(view)

    def further(self, view: View, refused: NDArray[np.int8]) -> Actions | None:
        """Return the next decisions of the step; None where no environment has any."""
        if self._last is not None:
            self._full |= (self._last.op == Op.GERMINATE) & (refused != Refusal.NONE)
        actions = self._decide(view)
        return actions if (actions.op != Op.WAIT).any() else None

    def state(self) -> dict[str, Any]:
        """Return the gains that were read, and the order of the slots."""
        return {"gain": self._gain, "order": self._order}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self._gain, self._order = state["gain"], state["order"]

    def _decide(self, view: View) -> Actions:
        stage, may = view.seeds.stage, view.masks.slot
        small = indices(view.space, RANKS[-1:])
        inner = inner_slots(view.space)
        gain = view.measurements.gain.mean
        look = (stage == Stage.TRAINING) & (view.seeds.age >= 1) & np.isfinite(gain)
        self._gain = np.where(look, gain, self._gain)
        empty = inner & (stage == Stage.DORMANT)
        untried = empty & np.isnan(self._gain)
        searching = untried.any(1, keepdims=True)
        known = np.nan_to_num(self._gain, nan=-np.inf)
        largest = known.max(1, keepdims=True)
        outside = np.where(empty, known, -np.inf).max(1, keepdims=True)  # the largest gain where nothing stands
        advance = look & np.where(searching, gain >= SHARE * largest, gain >= outside) & may[:, Op.ADVANCE]
        prune = look & np.where(searching, gain < SHARE * largest, gain < outside) & may[:, Op.PRUNE]
        # While a seed is too young to be read, what is known of the others may change: nothing is planted again.
        young = ((stage == Stage.GERMINATED) | ((stage == Stage.TRAINING) & ~look)).any(1, keepdims=True)
        again = empty & ~searching & ~young & (view.step < LATEST * view.steps)
        plant = (untried | again) & ~self._full[:, None] & bool(small)
        op, slot = np.zeros((2, len(stage)), np.int64)
        for kind, where, score in (
            (Op.GERMINATE, plant, np.where(searching, self._order, known)),
            (Op.PRUNE, prune, -gain),
            (Op.ADVANCE, advance, gain),
            (Op.FOSSILIZE, may[:, Op.FOSSILIZE], np.zeros(stage.shape)),
        ):
            some = where.any(1)
            op, slot = np.where(some, kind, op), np.where(some, np.where(where, score, -np.inf).argmax(1), slot)
        self._last = complete(view.masks, op, slot, {**defaults(view.space), Head.BLUEPRINT: small[0] if small else 0})
        return self._last
