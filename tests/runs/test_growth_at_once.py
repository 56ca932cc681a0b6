"""Check that what is plainly missing is planted at step 0, becomes units, and is judged beside a network without it."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import esper
from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import planted_at
from esper.leyline.lifecycle.slots import Vector
from esper.leyline.messages import GrowthWarning
from loops import equal, repeatable, stages

EVERY = 10


def data(rows=slice(None)):
    with drawn_with(0):
        x, teacher = torch.randn(900, 12), nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))
        y = teacher(x).argmax(1)
    return x[rows], y[rows]


def host():
    with drawn_with(1):
        return nn.Sequential(nn.Linear(12, 2), nn.ReLU(), nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))


DIRECT = {"lifecycle": {"direct": True, "absorb": True}, "gates": {"twins": True}}


def grow(model, optimizer, settings=DIRECT, **options):
    return esper.Growth(
        model,
        optimizer,
        probe=[data(slice(600, 900))],
        loss=F.cross_entropy,
        budget=12.0,
        every=EVERY,
        settings=settings,
        **options,
    )


def growing(*, ema=False, settings=DIRECT, **options):
    """Make a network with a narrow first layer, its optimizer, the growth, and a moving average if asked for."""
    model = host()
    esper.graft(model, ["2"], example=data(slice(600, 900))[0])
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if ema else None
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return model, optimizer, grow(model, optimizer, settings, ema=average, **options), average


def train(model, optimizer, growth, average, steps, after=lambda: None):
    for _ in range(steps):
        begin = growth.calls * 60 % 600
        x, y = data(slice(begin, begin + 60))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.update_parameters(model)
        growth.step(x, y)
        after()


def until_absorbed(**options):
    made = growing(**options)
    while not made[2].folded:
        assert made[2].calls < 200
        train(*made, EVERY)
    return made


def test_what_is_plainly_missing_is_planted_at_full_dose_at_step_0_and_changes_no_output():
    model, optimizer, growth, _ = growing()
    assert stages(growth) == ["HOLDING"]
    x = data()[0]
    assert torch.equal(model(x), host()(x))
    assert not growth.population.incubation.names
    train(model, optimizer, growth, None, EVERY)
    seed = planted_at(model, "2")
    assert float(seed.alpha) == 1
    assert seed.seed.delta.out.weight.any()
    assert [each["decision"] for each in growth.summary()["plantings"]] == [0]


@pytest.mark.parametrize(
    "options",
    [
        {"settings": {"lifecycle": {"direct": False}}},
        {"settings": DIRECT | {"probe": {"sensors_every": 0}}},
        {"controller": "random-valid"},
    ],
    ids=["direct is false", "nothing is measured", "another controller"],
)
def test_no_other_seed_acts_at_step_0(options):
    growth = growing(**options)[2]
    assert stages(growth) in (["GERMINATED"], ["DORMANT"])


def test_a_kept_seed_becomes_units_of_its_layers_while_the_network_trains_on_and_its_place_grows_again():
    model, optimizer, growth, average = until_absorbed(ema=True)
    assert planted_at(model, "2") is planted_at(average.module, "2") is None
    assert (model[0].out_features, model[2].in_features) == tuple(average.module[0].weight.shape[:1] * 2) == (18, 18)
    assert growth.summary()["widened"] == {"0": [2, 18]}
    # 12 + 1 weights to, and 16 from, each of 16 units
    assert growth.summary()["added_params"] == 16 * (12 + 1 + 16)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters()}
    weight = model[0].weight.detach().clone()
    train(model, optimizer, growth, average, 6 * EVERY)
    assert (model[0].weight != weight).any(1).all()
    assert [each["site"] for each in growth.summary()["plantings"]][:2] == ["2", "2"]
    network = growth.finish()
    assert growth.summary()["keeps"]
    ordinary = nn.Sequential(
        nn.Linear(12, network[0].out_features),
        nn.ReLU(),
        nn.Linear(network[2].in_features, 16),
        nn.ReLU(),
        nn.Linear(16, 4),
    )
    if not growth.beside:
        ordinary.load_state_dict(network.state_dict())


def test_the_outputs_stay_when_a_kept_seed_becomes_units():
    model, optimizer, growth, _ = growing()
    x, before = data()[0], []
    original = growth.population.absorb

    def absorb(slot):
        before.append(model(x).detach())
        return original(slot)

    growth.population.absorb = absorb
    while not growth.folded:
        assert growth.calls < 200
        train(model, optimizer, growth, None, EVERY)
    assert torch.allclose(before[-1], model(x), atol=1e-5)


def test_sites_of_a_layer_that_became_wider_have_its_width():
    model = host()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    growth = grow(model, optimizer)
    while not growth.folded:
        assert growth.calls < 200
        train(model, optimizer, growth, None, EVERY)
    wider = model[0].out_features
    assert model.sites["0"].stream == Vector(wider)
    space = growth.population.space
    slot = space.slots.index("0")
    name = next(k for k, entry in enumerate(space.blueprints) if entry.name == "bypass-linear")
    assert space.cost[0, slot, name] == 13 * wider


def test_a_growth_goes_on_to_the_same_bits_behind_a_widening_and_in_the_middle_of_a_trial():
    for steps in (EVERY + 3, 4 * EVERY + 3, 7 * EVERY):
        whole, resumed = growing(ema=True), growing(ema=True)
        train(*whole, steps)
        state, optimizer = copy.deepcopy(whole[2].state_dict()), resumed[1]
        resumed[2].load_state_dict(state)
        assert repeatable(resumed[2]) == repeatable(whole[2])
        for each in (whole, resumed):
            train(*each, 8 * EVERY)
        assert equal(whole[0], resumed[0])
        assert equal(whole[3], resumed[3])
        assert equal(whole[1].state_dict(), optimizer.state_dict())
        assert repeatable(resumed[2]) == repeatable(whole[2])


def test_a_state_that_is_refused_leaves_the_widths_as_they_were():
    state = until_absorbed()[2].state_dict()
    model = host()
    esper.graft(model, ["2"], example=data(slice(600, 900))[0])
    groups = [{"params": model[:3].parameters()}, {"params": model[3:].parameters()}]
    optimizer = torch.optim.AdamW(groups, 0.01)
    growth = grow(model, optimizer)
    train(model, optimizer, growth, None, 3)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    with pytest.raises(esper.InputError, match="optimizer"):
        growth.load_state_dict(state)
    assert equal(before, [model.state_dict(), optimizer.state_dict()])
    assert model.sites["2"].stream == Vector(16)
    train(model, optimizer, growth, None, EVERY)


def test_a_rollback_behind_a_widening_restores_the_wider_network():
    model, optimizer, growth, _ = until_absorbed()
    train(model, optimizer, growth, None, 2 * EVERY)
    width = model[0].out_features
    with torch.no_grad():
        model[4].weight[0, 0] = torch.nan
    train(model, optimizer, growth, None, EVERY)
    assert growth.summary()["rollbacks"]
    assert model[0].out_features == width
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_the_network_beside_a_seed_on_trial_is_bit_for_bit_the_one_that_was_never_grown():
    model, optimizer, growth, _ = growing()
    plain = host()
    others = torch.optim.AdamW(plain.parameters(), 0.01)
    train(model, optimizer, growth, None, EVERY)
    seedless = growth.population.seedless["2"]
    for step in range(EVERY):
        x, y = data(slice(step * 60 % 600, step * 60 % 600 + 60))
        F.cross_entropy(plain(x), y).backward()
        others.step()
        others.zero_grad()
    assert all(torch.equal(parameter, seedless.tensors[name]) for name, parameter in plain.named_parameters())
    x, y = data(slice(600, 900))
    difference = (F.cross_entropy(plain(x), y) - F.cross_entropy(model(x), y)).item()
    contribution = growth.engine.state.measurements.contribution_loss
    assert contribution.mean[0, 0] == pytest.approx(difference, rel=1e-4)
    assert difference > 0


def test_beside_the_seed_of_a_frozen_model_stands_the_model_itself():
    model, optimizer, growth, _ = growing(freeze="host")
    train(model, optimizer, growth, None, EVERY)
    x, y = data(slice(600, 900))
    with torch.no_grad():
        difference = (F.cross_entropy(host()(x), y) - F.cross_entropy(model(x), y)).item()
    assert growth.engine.state.measurements.contribution_loss.mean[0, 0] == pytest.approx(difference, rel=1e-4)
    assert difference > 0


def test_without_batches_a_seed_is_judged_by_what_the_network_loses_without_it():
    model, optimizer, growth, _ = growing()
    for _ in range(EVERY):
        x, y = data(slice(60))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step()
    assert growth.population.seedless == {"2": None}
    assert growth.engine.state.measurements.contribution.measured.all()


def test_the_random_numbers_of_the_loop_are_those_without_a_network_beside():
    def drawn(twins):
        with drawn_with(3):
            model = nn.Sequential(
                nn.Linear(12, 2), nn.ReLU(), nn.Dropout(0.5), nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4)
            )
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            growth = grow(model, optimizer, DIRECT | {"gates": {"twins": twins}})
            train(model, optimizer, growth, None, EVERY)
            assert any(growth.population.seedless.values()) == twins
            return torch.rand(3), model.state_dict()

    assert equal(drawn(True), drawn(False))


def test_where_growth_stops_it_says_how_far_the_loss_still_fell():
    model, optimizer, growth, _ = growing()
    while growth.stopped is None:
        assert growth.calls < 1000
        train(model, optimizer, growth, None, EVERY)
    assert re.search(
        r"the loss on the probe (still falls by \S+% a (minute|second)|did not fall in steps)", growth.stopped
    )


def test_what_another_controller_leaves_out_of_the_settings_is_said():
    with pytest.warns(
        GrowthWarning, match=r"sets lifecycle\.direct, lifecycle\.absorb, gates\.twins, which RandomValid"
    ):
        growing(controller="random-valid")
