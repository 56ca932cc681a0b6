"""What becomes of a decision and of a row: why an edit was refused, and what was wrong with a network."""

from enum import IntEnum


class Refusal(IntEnum):
    """Why a decision was not carried out. NONE is that of every decision that was."""

    NONE = 0
    MASKED = 1  # the masks forbade it
    SEED_CAP = 2  # lifecycle.max_seeds seeds are in the environment's budget already
    PARAM_BUDGET = 3  # its parameters would exceed governor.param_limit
    MEMORY = 4  # its modules would not fit into the memory that is there


class Vital(IntEnum):
    """What was found of a row after a step. GOOD is that of every row that was not rolled back."""

    GOOD = 0
    BATCH = 1  # examples that it trained on are not finite
    LOSS = 2  # a training loss, or the loss on the probe split, is not finite
    GRADIENT = 3  # a gradient of the host or of a seed is not finite
    PARAMETER = 4  # a parameter of the host or of a seed is not finite
    RISE = 5  # the loss is far above its own history
    COLLAPSE = 6  # all examples get one output
    FALL = 7  # the metric is far below its best
    METRIC = 8  # the metric on the probe split is not finite
