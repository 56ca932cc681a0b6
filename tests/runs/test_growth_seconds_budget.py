"""Test what growing may take of the seconds of a run, beside what it may take of its passes."""

import time

import pytest
import torch.nn.functional as F

from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import InputError
from loops import equal, growth_at_two_sites, repeatable, train_two_classes
from populations import Script

EVERY, BATCH, PROBE = 4, 20, 40
STEP, LOSS = 10.0, 2.0
"""Seconds of a step of the loop, and of a loss that growth computes."""
NOW = [0.0]
SETTINGS = {
    "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1},
    "probe": {"sensors_every": 0},
}


@pytest.fixture
def clock(monkeypatch):
    """Set a clock that stands still but where it is moved: [seconds]."""
    monkeypatch.setattr(time, "perf_counter", lambda: NOW[0])
    return NOW


def loss(output, target):
    NOW[0] += LOSS
    return F.cross_entropy(output, target)


def growth(clock, **options):
    """Make a growth whose loss takes two seconds, with a seed that incubates from the first decision on."""
    usual = {
        "every": EVERY,
        "budget": 9.0,
        "budget_passes": None,
        "controller": Script({(0, 0): (Op.GERMINATE, 0, 1, 0, 1, 3)}),
        "settings": SETTINGS,
        "loss": loss,
    }
    return growth_at_two_sites(PROBE, **{**usual, **options})


def train(growing, clock, steps):
    """Train for some steps of ten seconds each; returns after which of them seeds rested."""
    rests = []
    for _ in range(steps):
        clock[0] += STEP
        train_two_classes(growing, 1, BATCH, batch=True)
        rests.append(growing.population.resting)
    return rests


def share(growing):
    """Return the share of the seconds of its run that growing took."""
    calls, growing_seconds, rest = growing._spent()
    assert rest == pytest.approx(STEP * calls)
    return growing_seconds / (growing_seconds + rest)


def test_a_seed_rests_where_growing_has_taken_its_share_of_the_seconds_and_goes_on_once_it_has_fallen(clock):
    growing = growth(clock, budget_seconds=0.05)
    rests = train(growing, clock, 400)
    assert rests[0] is False
    assert rests.index(True) < len(rests) - rests[::-1].index(False)
    between = 2 * LOSS * EVERY + 4 * LOSS
    assert share(growing) <= 0.05 + between / (400 * STEP)
    unlimited = growth(clock, steps=400)
    assert not any(train(unlimited, clock, 400))
    assert share(unlimited) > 0.1


def test_the_summary_says_at_how_many_decisions_the_share_was_reached_and_where_the_seconds_went(clock):
    growing = growth(clock, steps=400, budget_seconds=0.05)
    train(growing, clock, 200)
    summary = growing.summary()
    (said,) = (each for each in summary["explanations"] if "budget_" in each)
    assert said.startswith("growing had taken its share of the seconds of the run (budget_seconds=0.05) at ")
    assert "of 50 decisions, so nothing was planted or incubated" in said
    assert "raise budget_seconds or every" in said
    assert summary["seconds"]["rest"] == pytest.approx(200 * STEP)
    assert summary["seconds"]["incubation"] > 0
    assert summary["seconds"]["probe"] > 0
    both = growth(clock, steps=400, budget_seconds=0.9, budget_passes=0.02)
    train(both, clock, 40)
    assert any("(budget_passes=0.02)" in each for each in both.summary()["explanations"])


def test_the_host_has_the_bits_of_one_whose_seed_never_rests(clock):
    one, other = growth(clock, steps=400, budget_seconds=0.05), growth(clock, steps=400)
    assert any(train(one, clock, 100))
    train(other, clock, 100)
    hosts = [{k: v for k, v in g.model.state_dict().items() if ".esper" not in k} for g in (one, other)]
    assert equal(*hosts)


def test_a_resumed_growth_goes_on_with_the_share_that_was_taken(clock):
    whole = growth(clock, budget_seconds=0.05)
    train(whole, clock, 50)
    state = whole.state_dict()
    clock[0] += 1e6  # the process was away
    resumed = growth(clock, budget_seconds=0.05)
    clock[0] += 500.0
    resumed.load_state_dict(state)
    assert share(resumed) == state["spent"][1] / sum(state["spent"][1:])
    rests = train(resumed, clock, 200)
    whole = growth(clock, budget_seconds=0.05)
    whole.load_state_dict(state)
    assert train(whole, clock, 200) == rests
    assert {True, False} == set(rests)
    assert equal(whole.state_dict()["tensors"], resumed.state_dict()["tensors"])
    assert repeatable(whole) == repeatable(resumed)


def test_a_limit_that_is_set_on_resume_counts_seconds_from_there(clock):
    free = growth(clock, steps=400)
    train(free, clock, 100)
    limited = growth(clock, steps=400, budget_seconds=0.05)
    limited.load_state_dict(free.state_dict(), changed=["budget_seconds"])
    assert limited._spent() == (0, 0.0, 0.0)
    assert not any(train(limited, clock, EVERY))
    assert any(train(limited, clock, 100))


@pytest.mark.parametrize("limit", [0, -0.1, 1.5, True, "0.25", float("nan")])
def test_a_limit_that_is_no_share_is_refused(clock, limit):
    with pytest.raises(
        InputError, match=r"^budget_seconds is .*; give a number above 0 and at most 1, .* or None for no limit$"
    ):
        growth(clock, budget_seconds=limit)
