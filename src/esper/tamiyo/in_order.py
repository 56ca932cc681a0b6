"""A rule that plants a list of seeds in order, and keeps those that pass their gates. One environment."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from esper.leyline.actions import Actions, Head, Op
from esper.leyline.masks import complete, defaults
from esper.leyline.stages import Stage
from esper.leyline.view import View
from esper.tamiyo.baselines import Rule


class Planting(NamedTuple):
    """A seed to plant: the name of a slot, the name of a blueprint, and the reason in words."""

    slot: str
    blueprint: str
    why: str


class InOrder(Rule):
    """Plants each seed of a list once, as soon as it may; keeps it as soon as its gate allows, and else removes it.

    patience: steps for which a gate may refuse a seed before the seed is removed.
    """

    def __init__(self, plantings: Sequence[Planting], patience: int = 4) -> None:
        self.plantings, self.patience = tuple(plantings), patience
        self.planted = 0
        self._why: str | None = None

    def act(self, view: View) -> Actions:
        """FOSSILIZE before ADVANCE before PRUNE before GERMINATE, at the first slot where it is valid."""
        self._why = None
        seeds, valid = view.seeds, view.masks.slot[0]
        stuck = (seeds.stage == Stage.TRAINING) | ((seeds.stage == Stage.HOLDING) & ~seeds.doomed)
        old = stuck[0] & (seeds.age[0] > self.patience)
        choices = defaults(view.space)
        late = f"it did not pass its gate in {self.patience} decisions"
        for op, where, why in (
            (Op.FOSSILIZE, True, "it passed its gates"),
            (Op.ADVANCE, True, None),
            (Op.PRUNE, old, late),
        ):
            able = valid[op] & where
            if able.any():
                self._why = why
                return complete(view.masks, np.array([op]), np.array([able.argmax()]), choices)
        if self.planted < len(self.plantings):
            slot, blueprint, why = self.plantings[self.planted]
            at, kind = (
                view.space.slots.index(slot),
                [entry.name for entry in view.space.blueprints].index(blueprint),
            )
            if valid[Op.GERMINATE, at] and view.masks.blueprint[0, at, kind]:
                self.planted, self._why = self.planted + 1, why
                return complete(view.masks, np.array([Op.GERMINATE]), np.array([at]), {**choices, Head.BLUEPRINT: kind})
        return Actions.wait(1)

    def reasons(self) -> list[str | None]:
        """Why the last decision planted, kept or removed a seed; None if it did none of these."""
        return [self._why]

    def explain(self) -> list[str]:
        """What was not planted."""
        left = self.plantings[self.planted :]
        return [f"{seed.blueprint} was not planted at {seed.slot}: no decision was left" for seed in left]

    def state(self) -> dict[str, Any]:
        """How many seeds were planted."""
        return {"planted": self.planted}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self.planted = int(state.get("planted", 0))
