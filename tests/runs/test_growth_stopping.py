"""Check that growth stops measuring where nothing can happen any more, and says so; what it kept, and its bits, stay."""

import pytest
import torch

from esper.leyline.lifecycle.vocabulary import Op
from loops import equal, growth_at_two_sites, repeatable, stages, train_two_classes
from populations import Script

EVERY = 2
ONE = {(0, 0): (Op.GERMINATE, 0, 1, 0, 1, 3), (2, 0): (Op.ADVANCE, 0), (4, 0): (Op.FOSSILIZE, 0)}
BOTH = ONE | {(6, 0): (Op.GERMINATE, 1, 1, 0, 1, 3), (8, 0): (Op.ADVANCE, 1), (10, 0): (Op.FOSSILIZE, 1)}
SETTINGS = {"gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1}}
HOST, COST = 98, 214  # parameters of the network, and of its seed in these scripts
SPENT = {"budget": COST / HOST}


def growth(script=ONE, *, budget=9.0, settings=None, **options):
    """Make a growth of a network with two sites."""
    usual = {
        "every": EVERY,
        "controller": Script(script),
        "budget": budget,
        "settings": {**SETTINGS, **(settings or {})},
    }
    return growth_at_two_sites(40, **{**usual, **options})


def train(growing, steps):
    """Train for some steps; returns for each whether a decision was made."""
    return train_two_classes(growing, steps, 40, batch=False)


@pytest.mark.parametrize(
    ("options", "since", "said"),
    [
        (
            SPENT,
            10,
            "the budget of parameters is spent: the seeds have 214 of 214, and the smallest that Script may still plant ",
        ),
        ({"script": BOTH}, 22, "every site has a seed that is kept"),
        ({"settings": {"lifecycle": {"max_seeds": 1}}}, 10, "as many seeds are kept as lifecycle.max_seeds allows (1)"),
        ({"controller": "never"}, 0, "the controller (Never) plants no more seeds"),
    ],
)
def test_growth_stops_where_nothing_can_happen_and_says_since_when_and_why(options, since, said):
    growing = growth(**options)
    made = train(growing, 24)
    assert made == [step <= since and step % EVERY == 0 for step in range(1, 25)]
    summary = growing.summary()
    assert summary["stopped"].startswith(f"growth stopped measuring at step {since}, as {said}")
    assert (summary["decisions"], summary["steps"]) == (since // EVERY, 24)
    assert f"stopped={since}" in repr(growing)


def test_a_growth_that_stopped_is_bit_for_bit_one_that_went_on_measuring():
    """Check against a growth that has room for a further seed, which its script does not plant."""
    stopped, went_on = growth(**SPENT), growth()
    assert not any(train(stopped, 30)[10:])
    assert sum(train(went_on, 30)) == 15
    assert went_on.summary()["stopped"] is None
    optimizers = [each.population.groups.optimizer.state_dict() for each in (stopped, went_on)]
    assert equal(*optimizers)
    assert equal(stopped.finish(), went_on.finish())
    assert stopped.summary()["keeps"] == went_on.summary()["keeps"]


def test_the_heuristic_stops_where_its_own_choice_no_longer_fits_though_a_smaller_seed_would():
    """Check a blueprint of 214 parameters where the smallest has 42, of which a script may still plant one."""
    options = {"budget": (COST + 43) / HOST, "settings": {"heuristic": {"keep_above": -1e9}}}
    growing = growth(controller="heuristic", **options)
    train(growing, 30)
    assert growing.summary()["stopped"].startswith(
        "growth stopped measuring at step 12, as the budget of parameters is spent: the seeds have 214 of 257, and the smallest "
        "that Heuristic may still plant has 214"
    )
    scripted = growth(**options)
    assert sum(train(scripted, 30)) == 15


def test_the_heuristic_stops_where_too_few_decisions_are_left_and_says_that_nothing_was_planted():
    growing = growth(controller="heuristic", steps=5 * EVERY)
    assert train(growing, 10) == [False] * 10
    summary = growing.summary()
    assert summary["stopped"].startswith(
        "growth stopped measuring at step 0, as the controller (Heuristic) plants no more"
    )
    assert "too few to plant, train and keep a seed" in summary["explanations"][0]


@pytest.mark.parametrize("enabled", [True, False])
def test_parameters_are_restored_also_behind_the_stop_unless_the_governor_is_off(enabled):
    growing = growth(**SPENT, settings={"governor": {"enabled": enabled}})
    train(growing, 20)
    before = [p.detach().clone() for p in growing.model.parameters()]
    with torch.no_grad():
        growing.model[0].weight[0, 0] = torch.nan
    assert train(growing, 2) == [False, enabled]
    after = list(growing.model.parameters())
    assert equal(before, [p.detach() for p in after]) == enabled
    assert growing.summary()["rollbacks"] == ({"loss": 1} if enabled else {})
    assert stages(growing) == ["FOSSILIZED", "DORMANT"]
    assert growing.stopped.startswith(f"growth stopped measuring at step {22 if enabled else 10}, ")
    assert train(growing, 2) == [False, False]


def test_a_growth_that_stopped_goes_on_as_it_was_and_measures_again_with_a_larger_budget():
    whole = growth(**SPENT)
    train(whole, 20)
    state = whole.state_dict()
    resumed, richer = growth(**SPENT), growth(BOTH)
    resumed.load_state_dict(state)
    richer.load_state_dict(state, changed=["budget", "controller"])
    assert repeatable(resumed)["stopped"] == repeatable(whole)["stopped"]
    assert richer.summary()["stopped"] is None
    train(whole, 10)
    assert not any(train(resumed, 10))
    assert equal(whole.finish(), resumed.finish())
    assert sum(train(richer, 12)) == 6
    assert stages(richer)[1] == "FOSSILIZED"


def test_seconds_are_told_by_part_and_end_with_the_growth():
    growing = growth()
    train(growing, 12)
    growing.finish()
    seconds = growing.seconds
    assert list(seconds) == ["setup", "incubation", "probe", "folds", "decisions", "rest"]
    assert min(seconds.values()) > 0
    assert growing.seconds == seconds
