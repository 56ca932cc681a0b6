"""A seed whose change is linear becomes part of its nn.Linear: the folded network computes what the grown one did."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from esper.kasmina.blueprints import BLUEPRINTS, drawn_with
from esper.kasmina.folding import fold
from esper.kasmina.grafted import graft, plant, ungraft
from esper.kasmina.planted import Mode, Planted
from esper.kasmina.slot import Seed
from esper.leyline.actions import Blend
from esper.leyline.sites import Site
from esper.leyline.slots import Tap
from esper.leyline.streams import STREAMS, Kind

READS, WRITES = 5, 8
KINDS = (Kind.VECTOR, Kind.SEQUENCE)
NAMES = [key for key, entry in BLUEPRINTS.items() if key[0] in KINDS and entry.tap != Tap.INPUT]
FOLDS = {
    (Kind.VECTOR, name)
    for name in (
        "affine",
        "low-rank",
        "bypass-linear",
        "bypass-rank-1",
        "bypass-rank-2",
        "bypass-rank-4",
        "bypass-rank-8",
        "full-head",
        "sparse-rows",
        "sparse-head",
    )
} | {
    (Kind.SEQUENCE, name)
    for name in (
        "low-rank",
        "bypass-linear",
        "bypass-rank-1",
        "bypass-rank-2",
        "bypass-rank-4",
        "bypass-rank-8",
        "sparse-rows",
    )
}


def grown(kind, name, blend=Blend.ADD, *, bias=True, change=lambda model: None):
    """A network with a seed of random weights at dose 0.6 behind its second layer, and an input."""
    entry = BLUEPRINTS[kind, name]
    with drawn_with(0):
        model = nn.Sequential(nn.Linear(3, READS), nn.Linear(READS, WRITES, bias=bias), nn.Tanh())
        x = torch.randn(4, 3) if kind == Kind.VECTOR else torch.randn(4, 6, 3)
        change(model)
        graft(model, {"a": Site("a", "1", "1", STREAMS[kind](WRITES), kind == Kind.SEQUENCE)})
        reads = READS if entry.tap == Tap.BEFORE else WRITES
        made = Seed(entry.build(reads, WRITES), reads)
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
    planted = Planted(made, entry.tap, blend, kind)
    planted.mode = Mode.ON
    planted.alpha.fill_(0.6)
    plant(model, "a", planted)
    return model, x


def is_linear(delta, kind, reads):
    """Whether the change at every position is one linear map of what is read there, and a constant."""
    with drawn_with(3), torch.no_grad():
        shape = (2, reads) if kind == Kind.VECTOR else (2, 6, reads)
        u, v = torch.randn(shape), torch.randn(shape)
        zero = delta(torch.zeros(shape))
        straight = torch.allclose(delta(u + 2 * v) - zero, delta(u) + 2 * delta(v) - 3 * zero, atol=1e-4)
        return straight and (kind == Kind.VECTOR or torch.allclose(delta(u), delta(u.flip(1)).flip(1), atol=1e-5))


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_just_the_seeds_whose_change_is_linear_fold_and_folded_equals_unfolded(kind, name):
    model, x = grown(kind, name)
    before = model(x)
    folded = fold(model, "a")
    reads = READS if BLUEPRINTS[kind, name].tap == Tap.BEFORE else WRITES
    assert folded == is_linear(model[1].esper.seed.delta, kind, reads) == ((kind, name) in FOLDS)
    ungraft(model)
    assert torch.allclose(model(x), before, atol=1e-6) == folded


@pytest.mark.parametrize("blend", [Blend.GATE, Blend.MULTIPLY])
@pytest.mark.parametrize(("kind", "name"), sorted(FOLDS))
def test_a_blend_that_depends_on_the_stream_does_not_fold(kind, name, blend):
    model, _ = grown(kind, name, blend)
    before = copy.deepcopy(model.state_dict())
    assert not fold(model, "a")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["low-rank", "bypass-rank-2", "bypass-linear"])
def test_a_layer_without_a_bias_takes_what_needs_none(name):
    model, x = grown(Kind.VECTOR, name, bias=False)
    before = model(x)
    assert fold(model, "a") == (name == "bypass-rank-2")
    if name == "bypass-rank-2":
        ungraft(model)
        assert torch.allclose(model(x), before, atol=1e-6)


def freeze(model):
    model[1].requires_grad_(False)


def tie(model):
    model[0].twin = model[1].weight


@pytest.mark.parametrize("change", [freeze, tie, lambda model: parametrizations.weight_norm(model[1])])
def test_a_layer_that_is_frozen_or_shares_or_computes_its_weight_keeps_its_seed_apart(change):
    model, _ = grown(Kind.VECTOR, "bypass-linear", change=change)
    assert not fold(model, "a")
