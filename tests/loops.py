"""Share what tests of growth in somebody else's loop have in common: a script, and equality to the last bit."""

import torch
import torch.nn.functional as F
from torch import nn

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import graft
from esper.leyline.lifecycle.slots import Site, Vector
from esper.leyline.lifecycle.vocabulary import Op, Stage
from esper.runs.live.growth import Growth

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
    """Name the stage of every slot."""
    return [Stage(int(stage)).name for stage in growth.engine.state.seeds.stage[0]]


def repeatable(growth):
    """Return the summary of a growth without what is in seconds, which differs between two runs that are equal otherwise."""
    summary = {name: value for name, value in growth.summary().items() if name not in ("seconds", "outlook")}
    cut = {name: summary[name] and summary[name].partition(";")[0] for name in ("stopped", "verdict")}
    return summary | cut


def equal(one, other):
    """Return whether two trees hold the same, bit for bit; modules are compared by their tensors."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.nn.Module):
        return equal(one.state_dict(), other.state_dict())
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(nan=7.5), other.nan_to_num(nan=7.5))
    return one == other


WIDTH = 6
"""Features of the network with two sites."""


def two_class_data(key, examples):
    """Draw examples (examples, WIDTH) of two classes, keyed by a number."""
    with drawn_with(key):
        x = torch.randn(examples, WIDTH)
        return x, (x.sum(1) > 0).long()


def growth_at_two_sites(probe, **options):
    """Make a growth of a network of 98 parameters, with so many examples in its probe, or with these batches."""
    with drawn_with(0):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    graft(model, {name: Site(name, name, name, Vector(WIDTH)) for name in ("0", "2")})
    batches = [two_class_data(1, probe)] if isinstance(probe, int) else probe
    given = {"probe": batches, "loss": F.cross_entropy, **options}
    return Growth(model, torch.optim.AdamW(model.parameters(), lr=0.01), **given)


def train_two_classes(growing, steps, examples, *, batch):
    """Train for some steps, whose batches are keyed by their number; returns for each whether a decision was made.

    batch: whether growth gets the batch.
    """
    optimizer, made = growing.population.groups.optimizer, []
    for _ in range(steps):
        x, y = two_class_data(100 + growing.calls, examples)
        F.cross_entropy(growing.model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        made.append(growing.step(*((x, y) if batch else ())))
    return made
