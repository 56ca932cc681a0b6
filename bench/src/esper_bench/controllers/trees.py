"""Plant what fitted trees expect most of, from sensors before the first step. E environments."""

from pathlib import Path

import numpy as np

from esper.leyline.lifecycle.view import Floats, View
from esper.leyline.messages import InputError
from esper_bench.controllers.forest import Forests, load_forests
from esper_bench.controllers.healing_features import FEATURES, TAUGHT_FEATURES, slot_features, table
from esper_bench.controllers.placement import Choice, Picks, Placement, Ranking, first
from esper_bench.controllers.plans import FURTHER, PLACED, UNIFORM, Plan, places

SHIPPED = Path(__file__).parent / "trees.safetensors"
"""The trees of the controller `tree`, fitted on training instances of `heal` by bench/scripts/fit_trees.py."""


class Trees(Placement):
    """Plants the plan with the largest expected gain over `uniform`, at the slot with the largest.

    A model of the file has the name of a plan, and predicts the gain in J of that plan at a slot from the features of the slot.
    The features are free of the size of the host. UNIFORM has the gain 0.
    """

    def __init__(self, trees: Path | Forests = SHIPPED) -> None:
        super().__init__()
        self.forests: Forests = load_trees(trees) if isinstance(trees, Path) else trees

    def pick(self, view: View) -> Picks:
        """Pick the plan of the largest expected gain; UNIFORM where none is above 0."""
        return first(self.ranking(view))

    def ranking(self, view: View) -> Ranking:
        """Rank all plans by their expected gains, the largest first."""
        options, gains = self.gains(view)
        places = ["the most", *(f"number {number}" for number in range(2, len(options) + 1))]
        why = "the trees expect {:+.3f} in J over a bypass around every block, {} of {} plans"
        return [
            [
                Choice(options[at][0], options[at][1], why.format(row[at], place, len(options)))
                for at, place in zip(order, places, strict=True)
            ]
            for row, order in zip(gains.tolist(), (-gains).argsort(1, kind="stable").tolist(), strict=True)
        ]

    def gains(self, view: View) -> tuple[list[tuple[Plan, int]], Floats]:
        """Return the plans with their slots, and the expected gain in J of each over UNIFORM, (E, plans)."""
        taught = any(name not in FEATURES for name in self.forests.features)
        return options_of(self.forests, table(slot_features(view, taught), self.forests.features), view.space.heads)


def options_of(forests: Forests, x: Floats, heads: int = 0) -> tuple[list[tuple[Plan, int]], Floats]:
    """Return the plans and slots that trees choose from, UNIFORM first, and the expected gain in J of each over it, (E, plans).

    x: (E, S, F) features of the slots in front of the last layer, as `forests.features` names them. heads: slots behind it. A
    plan without a slot, or for one behind the last layer, has the features of the last of the S.
    """
    slots = x.shape[1]
    options, columns = [(UNIFORM, -1)], [np.zeros(len(x))]
    for plan in (*PLACED, *FURTHER):
        if plan.name not in forests.models:
            continue
        expected = forests.models[plan.name].predict(x)
        for slot in places(plan, slots, heads):
            options.append((plan, slot))
            columns.append(expected[:, slot if slot < slots else -1])
    return options, np.stack(columns, 1)


def load_trees(path: Path) -> Forests:
    """Read the trees of a file. InputError if they are not trees of known plans, or read unknown features."""
    forests = load_forests(path, TAUGHT_FEATURES)
    known = [plan.name for plan in (*PLACED, *FURTHER)]
    unknown = [name for name in forests.models if name not in known]
    if unknown:
        raise InputError(f"the trees of {path} are for the plan {unknown[0]!r}; the plans are {', '.join(known)}")
    return forests
