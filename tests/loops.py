"""What tests of growth in somebody else's loop have in common: a script, and equality to the last bit."""

import torch

from esper.leyline.lifecycle.actions import Op
from esper.leyline.lifecycle.stages import Stage

LIFE = {  # one seed is kept; one is removed and leaves its site under embargo
    (0, 0): (Op.GERMINATE, 0, 1, 0, 1, 3),
    (2, 0): (Op.ADVANCE, 0),
    (4, 0): (Op.FOSSILIZE, 0),
    (5, 0): (Op.GERMINATE, 1, 2, 1, 2, 3),
    (7, 0): (Op.ADVANCE, 1),
    (10, 0): (Op.PRUNE, 1, 0, 0, 2, 0),
}
STAGES = ["TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "EMBARGOED"]
"""Stages that seeds are in behind some decision of this life."""
SETTINGS = {
    "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1},
    "lifecycle": {"embargo": 2},
}


def stages(growth):
    """The stage of every slot."""
    return [Stage(int(stage)).name for stage in growth.engine.state.seeds.stage[0]]


def equal(one, other):
    """Whether two trees hold the same, bit for bit; modules are compared by their tensors."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.nn.Module):
        return equal(one.state_dict(), other.state_dict())
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(nan=7.5), other.nan_to_num(nan=7.5))
    return one == other
