"""Leave some environments to the rule `heuristic`, which decides over time. E environments, S slots."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config.tree import GatesConfig, HeuristicConfig
from esper.leyline.lifecycle.gates import judge
from esper.leyline.lifecycle.masks import complete, defaults, only_wait
from esper.leyline.lifecycle.view import Bools, Outcome, View, choose
from esper.leyline.lifecycle.vocabulary import Actions, Head, Op
from esper.tamiyo.policy.packages import indices
from esper.tamiyo.rules.base import Rule
from esper.tamiyo.rules.heuristic import Heuristic, progress_of, relative_metric
from esper_bench.controllers.placement import Picks, Placement
from esper_bench.controllers.plans import SKIP, Plan, stream_slots

HANDED = Plan("heuristic")
"""A placement that picks it for an environment leaves that environment to its rule."""


class SkipWhereWeak(Rule):
    """Decides as `heuristic`, but a `skip-mlp` at the last slot comes first where the menu and budget allow it.

    Nothing is planted there for `wait` steps. If the relative metric is then below `plant_below`, the skip is planted. From then
    on `heuristic` decides, and judges the skip like any other seed. Where the skip is not allowed, or a seed that is planted
    after the wait could not be kept before the run ends, `heuristic` decides from the first step on.
    """

    def __init__(self, config: HeuristicConfig, gates: GatesConfig, wait: int) -> None:
        """wait: steps before the skip [steps]. The gates apply even if `gates.permissive` is true."""
        self.rule = Heuristic(config, gates)
        self.gates = gates.model_copy(update={"permissive": False})
        self.wait = wait
        self._why: list[str | None] = []

    def act(self, view: View) -> Actions:
        """Return one decision per environment, from its row of the view alone."""
        first = self._skips_first(view)
        share = relative_metric(view.measurements.metric, view.space.floor, view.space.ceiling)
        below = self.rule.config.plant_below
        weak = first & (share < below) & (view.step == self.wait)
        actions = self.rule.act(only_waiting(self._gated(view), weak if view.step == self.wait else first))
        self._why = list(self.rule.reasons())
        if not weak.any():
            return actions
        last, skip = stream_slots(view.space) - 1, indices(view.space, SKIP.here)[0]
        wanted: Mapping[Head, int] = {**defaults(view.space), Head.BLUEPRINT: skip}
        planted = complete(view.masks, np.full(len(first), Op.GERMINATE), np.full(len(first), last), wanted)
        for env in np.flatnonzero(weak).tolist():
            self._why[env] = (
                f"after {view.step} steps {progress_of(share[env])}, under "
                f"{below:.0%} (heuristic.plant_below), so a skip goes around all blocks at once"
            )
        merged: Actions = choose(weak, planted, actions)
        return merged

    def store(self, outcome: Outcome) -> None:
        """Record where a seed was planted."""
        self.rule.store(outcome)

    def reasons(self) -> Sequence[str | None]:
        """Return what `Heuristic.reasons` does, and why a skip was planted."""
        return self._why

    def explain(self) -> list[str]:
        """Return what `Heuristic.explain` does."""
        return self.rule.explain()

    def state(self) -> dict[str, Any]:
        """Return the state of `heuristic`; the steps of the wait are counted in the view."""
        return self.rule.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self.rule.load_state(state)

    def _skips_first(self, view: View) -> Bools:
        """Return (E,) whether the skip is still to come: nothing was planted, and it may be."""
        skip = indices(view.space, SKIP.here)
        if view.step > self.wait or not skip or not self.rule.timely(view, self.wait):
            return np.zeros(len(view.masks.op), bool)
        return np.array(view.masks.blueprint[:, stream_slots(view.space) - 1, skip[0]])

    def _gated(self, view: View) -> View:
        """Return the view with ADVANCE and FOSSILIZE valid only where the gates pass, whatever the engine asks of a seed."""
        gates, slot = judge(view.seeds, view.measurements, self.gates), view.masks.slot.copy()
        slot[:, Op.ADVANCE] &= gates.advance.passed()
        slot[:, Op.FOSSILIZE] &= gates.fossilize.passed()
        return view._replace(masks=view.masks._replace(slot=slot))


class Handover(Placement):
    """Picks HANDED for some environments, which `rule` then decides for in every step: a base of placements.

    The rule sees the other environments as ones where nothing is allowed but to wait, and so does the placement with those of
    the rule. Without a rule it is a placement like any other.
    """

    def __init__(self, rule: SkipWhereWeak | None = None) -> None:
        super().__init__()
        self.rule = rule
        self._handed: Bools | None = None  # (E,) environments of the rule
        if rule is not None:
            self.sensors_every = Heuristic.sensors_every
            self.sensors_read = Heuristic.sensors_read

    def act(self, view: View) -> Actions:
        """Return the decisions of the placement, and those of the rule in the environments that it has."""
        actions = super().act(view)
        if self.rule is None or self._handed is None or not self._handed.any():
            return actions
        ruled = self.rule.act(only_waiting(view, ~self._handed))
        both = zip(self._handed.tolist(), self.rule.reasons(), self._why, strict=True)
        self._why = [theirs if handed else own for handed, theirs, own in both]
        merged: Actions = choose(self._handed, ruled, actions)
        return merged

    def unplaced(self, view: View) -> Picks:
        """Pick HANDED in every environment if there is a rule, and UNIFORM otherwise."""
        envs = len(view.masks.op)
        handed = Picks([HANDED] * envs, np.full(envs, -1), [""] * envs)
        return super().unplaced(view) if self.rule is None else handed

    def sensing(self) -> bool:
        """Return whether the rule has an environment; the placement itself reads sensors at the first decision alone."""
        return self._handed is None or bool(self._handed.any())

    def store(self, outcome: Outcome) -> None:
        """Tell both what became of the decisions."""
        super().store(outcome)
        if self.rule is not None and self._handed is not None and self._handed.any():
            self.rule.store(outcome)

    def explain(self) -> list[str]:
        """Return why nothing was planted, by the placement and by the rule."""
        return [*super().explain(), *(self.rule.explain() if self.rule is not None else [])]

    def state(self) -> dict[str, Any]:
        """Return the states of the placement and the rule, and which environments the rule has."""
        ours = {} if self.rule is None else {"handed": self._handed, "rule": self.rule.state()}
        return {**super().state(), **ours}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        super().load_state(state)
        self._handed = state.get("handed")
        if self.rule is not None:
            self.rule.load_state(state.get("rule", {}))

    def _begin(self, view: View, picks: Picks) -> None:
        super()._begin(view, picks)
        self._handed = np.array([plan == HANDED for plan in picks.plans])

    def _decide(self, view: View) -> Actions:
        return super()._decide(view if self._handed is None else only_waiting(view, self._handed))


def only_waiting(view: View, rows: Bools) -> View:
    """Return the view with nothing allowed but to wait in some rows (E,)."""
    masks = only_wait(view.masks, rows)
    open_: NDArray[np.bool_] = ~rows[:, None, None]
    return view._replace(masks=masks._replace(slot=masks.slot & open_, blueprint=masks.blueprint & open_))
