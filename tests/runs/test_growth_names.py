"""Test growth beside torch.distributed.checkpoint, whose state dicts name parameters and groups as the model does."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import graft
from esper.leyline.lifecycle.slots import Site, Vector
from esper.runs.live.growth import Growth
from loops import LIFE, SETTINGS, equal, stages
from populations import Script

EVERY, STEPS = 2, 20


def training():
    """Make a model with two rates, and its growth."""
    with drawn_with(0):
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        probe = torch.randn(12, 4), torch.arange(12) % 3
    graft(model, {name: Site(name, name, name, Vector(6)) for name in ("0", "2")})
    slow, fast = [*model[0].parameters()], [p for layer in (model[2], model[4]) for p in layer.parameters()]
    optimizer = torch.optim.AdamW([{"params": slow, "lr": 0.001}, {"params": fast, "lr": 0.03}])
    growth = Growth(
        model, optimizer, probe=[probe], loss=F.cross_entropy, controller=Script(LIFE), every=EVERY, budget=9.0,
        settings=SETTINGS,
    )  # fmt: skip
    return model, optimizer, growth


def run(model, optimizer, growth, first, last):
    for step in range(first, last):
        with drawn_with(100 + step):
            x, y = torch.randn(12, 4), torch.randint(0, 3, (12,))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step()


def test_a_state_dict_by_names_goes_on_with_moments_and_rates_once_growth_has_rebuilt_the_groups():
    model, optimizer, growth = training()
    run(model, optimizer, growth, 0, 15)
    assert stages(growth) == ["FOSSILIZED", "BLENDING"]
    state, (weights, moments) = growth.state_dict(), copy.deepcopy(get_state_dict(model, optimizer))
    run(model, optimizer, growth, 15, STEPS)

    again, other, resumed = training()
    resumed.load_state_dict(state)
    rebuilt = get_optimizer_state_dict(again, other)
    set_state_dict(again, other, model_state_dict=weights, optim_state_dict=moments)
    assert equal(get_optimizer_state_dict(again, other), rebuilt)
    assert [group["lr"] for group in other.param_groups] == [0.001, 0.03, 0.001, 0.03]
    run(again, other, resumed, 15, STEPS)
    assert equal(again.state_dict(), model.state_dict())
    assert equal(other.state_dict(), optimizer.state_dict())
