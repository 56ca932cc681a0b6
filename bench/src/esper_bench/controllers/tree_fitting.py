"""Fit the trees of the controller `tree`. n hosts, S slots, F features."""

from collections.abc import Mapping

import numpy as np

from esper.leyline.lifecycle.view import Floats
from esper_bench.controllers.forest import Forest, forest_of
from esper_bench.controllers.plans import FURTHER, PLACED, UNIFORM, Placed

TREES, LEAF, LEAVES = 32, 3, 96
"""Number of trees, fewest rows of a leaf, most leaves of a tree."""


def fit_trees(x: Floats, objective: Mapping[Placed, Floats], seed: int = 0) -> dict[str, Forest]:
    """Fit trees for every plan, which predict its gain in J over UNIFORM from the features of a slot.

    x: (n, S, F), of the slots in front of the last layer. objective: J (n,) of each plan at a slot, UNIFORM among them. A host
    has a row for each slot that a plan has; a plan without a slot, or for one behind the last layer, has the row of the last one.
    The trees are extremely randomized (Geurts, Ernst and Wehenkel, 2006).
    """
    from sklearn.ensemble import ExtraTreesRegressor  # a second of imports

    uniform = objective[Placed(UNIFORM)]
    found = {}
    for plan in (*PLACED, *FURTHER):
        own = {placed: value for placed, value in objective.items() if placed.plan == plan}
        if not own:
            continue
        model = ExtraTreesRegressor(
            TREES, min_samples_leaf=LEAF, max_leaf_nodes=LEAVES, max_features=0.5, random_state=seed, n_jobs=1
        )
        rows = np.concatenate([x[:, min(placed.slot, x.shape[1] - 1)] for placed in own])
        model.fit(rows, np.concatenate([value - uniform for value in own.values()]))
        found[plan.name] = forest_of(model)
    return found
