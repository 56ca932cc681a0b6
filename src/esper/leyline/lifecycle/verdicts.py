"""Say why a decision was refused, and why a network was rolled back."""

from esper.leyline.lifecycle.stages import MeantNumber


class Refusal(MeantNumber):
    """Says why a decision was not carried out; NONE if it was."""

    NONE = 0, "the decision was carried out"
    MASKED = 1, "the masks forbade it, as it was not open at that time"
    SEED_CAP = 2, "the environment had lifecycle.max_seeds seeds already"
    PARAM_BUDGET = 3, "the seed's parameters would exceed governor.param_limit"
    MEMORY = 4, "the seed's modules would not fit into the free memory"


class Vital(MeantNumber):
    """Says why a row was rolled back after a step; GOOD if it was not."""

    GOOD = 0, "the row was not rolled back"
    BATCH = 1, "examples of a batch are not finite"
    LOSS = 2, "a training loss, or the loss on the probe split, is not finite"
    GRADIENT = 3, "a gradient of the host or of a seed is not finite"
    PARAMETER = 4, "a parameter is not finite"
    RISE = 5, "the loss rose far above its past values"
    COLLAPSE = 6, "the outputs hardly differ between examples"
    FALL = 7, "the metric fell far below its best value"
    METRIC = 8, "the metric on the probe split is not finite"
