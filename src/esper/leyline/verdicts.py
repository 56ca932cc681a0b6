"""What becomes of a decision and of a row: why an edit was refused, and what was wrong with a network."""

from enum import IntEnum


class Refusal(IntEnum):
    """Why a decision was not carried out. NONE is that of every decision that was.

    Attributes:
        NONE: the decision was carried out
        MASKED: the masks forbade it
        SEED_CAP: lifecycle.max_seeds seeds are in the environment's budget already
        PARAM_BUDGET: its parameters would exceed governor.param_limit
        MEMORY: its modules would not fit into the memory that is there
    """

    NONE = 0
    MASKED = 1
    SEED_CAP = 2
    PARAM_BUDGET = 3
    MEMORY = 4


class Vital(IntEnum):
    """What was found of a row after a step. GOOD is that of every row that was not rolled back.

    Attributes:
        GOOD: nothing; the row was not rolled back
        BATCH: examples that it trained on are not finite
        LOSS: a training loss, or the loss on the probe split, is not finite
        GRADIENT: a gradient of the host or of a seed is not finite
        PARAMETER: a parameter of the host or of a seed is not finite
        RISE: the loss is far above its own history
        COLLAPSE: all examples get one output
        FALL: the metric is far below its best
        METRIC: the metric on the probe split is not finite
    """

    GOOD = 0
    BATCH = 1
    LOSS = 2
    GRADIENT = 3
    PARAMETER = 4
    RISE = 5
    COLLAPSE = 6
    FALL = 7
    METRIC = 8
