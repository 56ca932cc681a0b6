"""Define the stages of a slot, and the transitions between them."""

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Stage(IntEnum):
    """Names the stages of a slot. The values are stored in arrays and in files, so their meaning never changes.

    Attributes:
        DORMANT: the slot is empty
        GERMINATED: the seed was built in this step and has not run yet
        TRAINING: the seed trains, and does not change the output of the host
        BLENDING: alpha moves along a ramp to its target
        HOLDING: alpha is at its target, and the seed is on trial
        FOSSILIZED: the seed is a permanent part of the network
        PRUNED: the seed was removed in this step
        EMBARGOED: the slot is empty and cannot be planted yet
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
"""The stages of seeds whose parameters all count as added to the network, whatever their alpha."""
SETTLED = frozenset({Stage.DORMANT, Stage.FOSSILIZED, Stage.EMBARGOED})
"""The stages of slots without a seed that is under way."""


def among(stage: NDArray[Any], stages: frozenset[Stage]) -> NDArray[np.bool_]:
    """Return whether each entry of an array of stages is one of `stages`; bool, of the same shape."""
    table = np.zeros(len(Stage), bool)
    table[list(stages)] = True
    return table[stage]
