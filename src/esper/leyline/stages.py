"""The stages of a slot, and which of them may follow which."""

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Stage(IntEnum):
    """What a slot holds. The values are stored in arrays and in files, so they never change meaning.

    Attributes:
        DORMANT: the slot is empty
        GERMINATED: built in this step, not yet run
        TRAINING: incubates behind the host, whose output it does not touch
        BLENDING: alpha ramps toward its target
        HOLDING: alpha rests at its target, on trial
        FOSSILIZED: part of the network for good
        PRUNED: removed in this step
        EMBARGOED: the slot rests before it may be planted again
    """

    DORMANT = 0
    GERMINATED = 1
    TRAINING = 2
    BLENDING = 3
    HOLDING = 4
    FOSSILIZED = 5
    PRUNED = 6
    EMBARGOED = 7


LIVE = frozenset({Stage.BLENDING, Stage.HOLDING})
IN_BUDGET = frozenset({Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED})
ADDED = frozenset({Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED})
"""The stages whose parameters count as added to the network, whole, whatever their alpha."""

EDGES: frozenset[tuple[Stage, Stage]] = frozenset(
    {
        (Stage.DORMANT, Stage.GERMINATED),
        (Stage.GERMINATED, Stage.TRAINING),
        (Stage.TRAINING, Stage.BLENDING),
        (Stage.TRAINING, Stage.PRUNED),
        (Stage.BLENDING, Stage.HOLDING),
        (Stage.BLENDING, Stage.PRUNED),
        (Stage.HOLDING, Stage.BLENDING),
        (Stage.HOLDING, Stage.FOSSILIZED),
        (Stage.HOLDING, Stage.PRUNED),
        (Stage.PRUNED, Stage.EMBARGOED),
        (Stage.PRUNED, Stage.DORMANT),  # only where the embargo is 0 steps
        (Stage.EMBARGOED, Stage.DORMANT),
    }
)
"""Every transition that may be named. HOLDING -> BLENDING is a new ramp: SET_ALPHA, or a PRUNE that takes its time."""


def among(stage: NDArray[Any], stages: frozenset[Stage]) -> NDArray[np.bool_]:
    """Which entries of an array of stages, of any shape, are one of `stages`; the same shape, bool."""
    table = np.zeros(len(Stage), bool)
    table[list(stages)] = True
    chosen: NDArray[np.bool_] = table[stage]
    return chosen
