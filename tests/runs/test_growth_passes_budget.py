"""Check that where growing reaches its share of the passes of a run, nothing is planted and nothing incubates."""

import pytest
import torch

from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import InputError
from loops import equal, growth_at_two_sites, repeatable, stages, train_two_classes, two_class_data
from populations import Script

EVERY, BATCH, PROBE = 4, 20, 40
SETTINGS = {
    "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1},
    "probe": {"sensors_every": 0},
}
PLANTED = {(0, 0): (Op.GERMINATE, 0, 1, 0, 1, 3)}


def growth(script=PLANTED, settings=None, **options):
    """Make a growth of a network with two sites."""
    usual = {"every": EVERY, "budget": 9.0, "controller": Script(script), "settings": {**SETTINGS, **(settings or {})}}
    return growth_at_two_sites(PROBE, **{**usual, **options})


def train(growing, steps, *, batch=True):
    """Train for some steps; returns for each whether a decision was made."""
    return train_two_classes(growing, steps, BATCH, batch=batch)


def share(growing):
    return growing.passes["growth"] / sum(growing.passes.values())


def seed_of(growing):
    return [parameter.detach().clone() for parameter in growing.population.at("0").parameters()]


def test_passes_are_counted_by_examples():
    """Check eight steps: the probe three times, from the second on with the seed at dose 1 too; the seed's own in the last 4."""
    growing = growth(budget_passes=None)
    train(growing, 2 * EVERY)
    assert growing.passes == {"loop": 3 * 2 * EVERY * BATCH, "growth": PROBE + 2 * 2 * PROBE + 2 * EVERY * BATCH}
    straight = growth(budget_passes=None)
    train(straight, 2 * EVERY, batch=False)
    assert straight.passes == {"loop": 3 * 2 * EVERY * PROBE, "growth": PROBE + 2 * 2 * PROBE}


def test_a_measurement_of_what_is_missing_counts_two_passes_of_the_probe():
    growing = growth({}, settings={"probe": {"sensors_every": 1}}, controller="heuristic", budget_passes=None)
    assert growing.passes["growth"] == PROBE + 2 * PROBE


def test_a_seed_rests_where_the_share_is_reached_and_goes_on_once_it_has_fallen():
    growing = growth(budget_passes=0.05)
    made, moved, rests = train(growing, EVERY), [], []
    for _ in range(400 - EVERY):
        rests.append(growing.population.resting)
        before = seed_of(growing)
        made += train(growing, 1)
        moved.append(not equal(before, seed_of(growing)))
    assert moved == [not resting for resting in rests]
    assert rests[0] is False
    assert rests.index(True) < len(rests) - rests[::-1].index(False)
    assert sum(made) < 400 // EVERY
    assert growing.engine.state.step == 400 // EVERY  # of which a controller may know the last one
    assert stages(growing) == ["TRAINING", "DORMANT"]


def test_the_share_of_a_run_stays_within_its_limit_but_for_one_decision():
    for limit in (0.02, 0.05, 0.2):
        growing = growth(steps=200, budget_passes=limit)
        train(growing, 200)
        between = 2 * EVERY * BATCH + 2 * PROBE
        assert growing.passes["growth"] <= limit * sum(growing.passes.values()) + between
    unlimited = growth(steps=200, budget_passes=None)
    train(unlimited, 200)
    assert share(unlimited) > 0.3


def test_the_summary_says_at_how_many_decisions_the_share_was_reached():
    growing = growth(steps=400, budget_passes=0.05)
    train(growing, 200)
    said = [each for each in growing.summary()["explanations"] if "budget_passes" in each]
    assert len(said) == 1
    assert said[0].startswith("growing had taken its share of the forward and backward passes (budget_passes=0.05) at ")
    assert "of 50 decisions, so nothing was planted or incubated" in said[0]
    free = growth(budget_passes=None)
    train(free, 200)
    assert not any("budget_passes" in each for each in free.summary()["explanations"])


def test_nothing_is_planted_where_the_share_is_reached():
    script = {(step, 1): (Op.GERMINATE, 1, 1, 0, 1, 3) for step in range(1, 100)} | PLANTED
    growing = growth(script, steps=400, budget_passes=0.01)
    train(growing, 200)
    assert stages(growing) == ["TRAINING", "DORMANT"]


def test_a_seed_on_trial_is_judged_though_the_share_is_reached():
    script = PLANTED | {(2, 0): (Op.ADVANCE, 0), (4, 0): (Op.FOSSILIZE, 0)}
    growing = growth(script, steps=400, budget_passes=0.015)
    train(growing, 3 * EVERY)
    assert growing.population.resting
    assert sum(train(growing, 2 * EVERY)) == 2
    assert stages(growing) == ["FOSSILIZED", "DORMANT"]
    assert not any(train(growing, 40))


def test_a_run_of_unknown_length_counts_as_fifty_decisions_at_least():
    known, unknown = growth(steps=50 * EVERY, budget_passes=0.05), growth(budget_passes=0.05)
    train(known, 100), train(unknown, 100)
    assert known.passes == unknown.passes
    assert equal(known.model, unknown.model)
    train(unknown, 600)
    assert 0.03 < share(unknown) < 0.06


@pytest.mark.parametrize("batch", [True, False])
def test_a_growth_that_rests_goes_on_to_the_same_bits_from_any_step(batch):
    limits = {"budget_passes": 0.06 if batch else 0.02}
    whole = growth(**limits)
    train(whole, 90, batch=batch)
    assert whole.population.resting
    for after in (3, 207):  # in the rest, and once seeds have gone on
        state = whole.state_dict()
        resumed = growth(**limits)
        resumed.load_state_dict(state)
        train(whole, after, batch=batch), train(resumed, after, batch=batch)
        assert equal(whole.state_dict()["tensors"], resumed.state_dict()["tensors"])
        assert whole.passes == resumed.passes
        assert repeatable(whole) == repeatable(resumed)


def test_the_rest_ends_under_a_larger_limit():
    whole = growth(steps=400, budget_passes=0.02)
    train(whole, 40)
    assert whole.population.resting
    richer = growth(steps=400, budget_passes=0.5)
    richer.load_state_dict(whole.state_dict(), changed=["budget_passes"])
    before = seed_of(richer)
    train(richer, 2 * EVERY)
    assert not equal(before, seed_of(richer))


def test_the_host_has_the_bits_of_one_whose_seed_never_rests():
    one, other = growth(steps=400, budget_passes=0.02), growth(steps=400, budget_passes=None)
    train(one, 60), train(other, 60)
    assert one.population.resting
    hosts = [{k: v for k, v in g.model.state_dict().items() if ".esper" not in k} for g in (one, other)]
    assert equal(*hosts)


def test_where_only_seeds_train_there_is_no_limit():
    growing = growth(steps=400, budget_passes=0.01, freeze="host")
    for _ in range(40):
        growing.model(two_class_data(1, BATCH)[0]).sum().backward()
        growing.population.groups.optimizer.step()
        growing.step(*two_class_data(100 + growing.calls, BATCH))
    assert not growing.population.resting
    assert share(growing) > 0.1


def test_parameters_that_are_not_finite_are_restored_while_seeds_rest():
    growing = growth(steps=400, budget_passes=0.02)
    train(growing, 40)
    assert growing.population.resting
    with torch.no_grad():
        growing.model[0].weight[0, 0] = torch.nan
    train(growing, EVERY)
    assert torch.isfinite(growing.model[0].weight).all()


@pytest.mark.parametrize("limit", [0, 1, -0.1, 1.5, True, "0.25", float("nan")])
def test_a_limit_that_is_no_share_is_refused(limit):
    with pytest.raises(
        InputError, match=r"^budget_passes is .*; give a number above 0 and below 1, .* or None for no limit$"
    ):
        growth(budget_passes=limit)
