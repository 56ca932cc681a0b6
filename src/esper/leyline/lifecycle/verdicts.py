"""Say why a decision was refused, and why a network was rolled back."""

from enum import IntEnum


class Refusal(IntEnum):
    """Says why a decision was not carried out; NONE if it was.

    Attributes:
        NONE: the decision was carried out
        MASKED: the masks forbade it
        SEED_CAP: the environment has lifecycle.max_seeds seeds already
        PARAM_BUDGET: the seed's parameters would exceed governor.param_limit
        MEMORY: the seed's modules would not fit into the free memory
    """

    NONE = 0
    MASKED = 1
    SEED_CAP = 2
    PARAM_BUDGET = 3
    MEMORY = 4


class Vital(IntEnum):
    """Says why a row was rolled back after a step; GOOD if it was not.

    Attributes:
        GOOD: the row was not rolled back
        BATCH: examples that the row trained on are not finite
        LOSS: a training loss, or the loss on the probe split, is not finite
        GRADIENT: a gradient of the host or of a seed is not finite
        PARAMETER: a parameter of the host or of a seed is not finite
        RISE: the loss is far above the past losses of the row
        COLLAPSE: the outputs hardly differ between examples
        FALL: the metric is far below its best value
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
