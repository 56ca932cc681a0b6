"""The search for the best fixed plan, by successive halving on training instances."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.errors import InputError
from esper.runs.contenders import named
from esper.runs.evaluation import evaluate
from esper.runs.kept import Kept
from esper.runs.plan_search import (
    PERMISSIVE,
    candidate_plans,
    grow_abreast,
    rungs,
    search_plans,
    space_of,
)
from esper.tamiyo.plans import NONE, Placed, choices_of, plans_of, wished
from esper.tasks.catalog import get_task
from esper.tasks.repair import repair
from populations import blobs

SHORT = {"steps": 6, "data": {"batch_size": 12, "batches_per_step": 1}, "blueprints": ["bypass-linear"]}
LONG = {"steps": 10, "data": {"batch_size": 12, "batches_per_step": 6}}


@pytest.fixture(scope="module")
def slim():
    """A data set whose host loses everything but one number in its first block."""
    return blobs(hidden=(1, 6))


@pytest.fixture(scope="module")
def mixture():
    return repair()


@pytest.fixture(scope="module")
def found(slim):
    return search_plans(slim.sealed(), [LONG], episodes=120)


@given(st.integers(1, 400), st.integers(1, 5000))
def test_the_steps_of_a_search_spend_every_episode(candidates, episodes):
    steps = rungs(candidates, episodes, 2**20)
    assert sum(count * more for count, more in steps) == episodes
    assert all(after <= -(-before // 2) for (before, _), (after, _) in pairwise(steps))
    assert steps[0][0] <= candidates
    assert steps[-1][0] == 1 or sum(count * more for count, more in steps) == episodes


def test_where_instances_come_to_an_end_the_search_ends_with_them():
    steps = rungs(8, 1000, 10)
    assert sum(more for _, more in steps) == 10


def test_the_search_grows_its_budget_on_training_instances_alone(mixture, monkeypatch):
    drawn = []
    sample = mixture.sample
    object.__setattr__(mixture, "sample", lambda key: drawn.append(key) or sample(key))
    grown = []
    monkeypatch.setattr(
        "esper.runs.plan_search.grow_contender",
        lambda *given: grown.append(given[2].envs) or grow(*given),
    )
    found = search_plans(mixture.sealed(), [SHORT], episodes=50)
    object.__setattr__(mixture, "sample", sample)
    assert (sum(grown), found.episodes) == (50, 50)
    assert set(drawn) <= set(mixture.keys("training"))


def grow(*given):
    from esper.runs.contenders import grow_contender

    return grow_contender(*given)


def test_the_search_finds_a_seed_at_the_slim_block_without_a_test_split(found):
    choice = found.best.choice
    assert not isinstance(choice, Placed) or choice.plan is not NONE
    assert (found.candidates, found.episodes) == (len(candidate_plans(blobs(hidden=(1, 6)), [LONG])), 120)
    assert found.tried < found.candidates
    assert found.contender.episodes == 120


def test_the_plan_that_was_found_pays_on_starts_that_were_not_searched_on(slim, found):
    never = named("never")
    figures = evaluate(slim, [never, found.contender], instances=8, seeds=1, settings=[LONG]).figures
    assert figures.objective[1].mean() > figures.objective[0].mean() + 0.05


def test_of_the_candidates_the_better_half_goes_on(slim):
    lines = []
    search_plans(slim, [SHORT], episodes=80, watch=lines.append)
    said = [line.split("search for the best fixed plan, ")[1] for line in lines]
    assert said == [f"{n} plan{'s' * (n > 1)} on {m} {w}" for n, m, w in _said(rungs(_count(slim), 80, 2**20))]


def _count(task):
    return len(candidate_plans(task, [SHORT]))


def _said(steps):
    for index, (count, more) in enumerate(steps):
        yield count, more, ("further " if index else "") + f"training instance{'s' * (more > 1)}"


@pytest.mark.parametrize("over", [{"lifecycle": {"max_seeds": 0}}, {"reward": {"rent": 10}}])
def test_where_no_seed_may_be_planted_or_parameters_are_dear_the_best_plan_plants_nothing(slim, over):
    found = search_plans(slim, [SHORT, over], episodes=40)
    assert found.best.name == "none"


def test_candidates_side_by_side_are_each_as_alone(mixture):
    keys = np.array(mixture.keys("training")[3:5])
    candidates = candidate_plans(mixture, [SHORT])
    plans = [each for each in candidates if isinstance(each.choice, Placed)][:4]
    schedules = [each for each in candidates if each.settings == PERMISSIVE][:3]
    for some, different in ((plans, True), (schedules, False)):
        kept = Kept(None, {})
        (together,) = grow_abreast(mixture, [(some, keys)], [SHORT], "training", kept)
        alone = grow_abreast(mixture, [([each], keys) for each in some], [SHORT], "training", kept)
        np.testing.assert_array_equal(together, np.concatenate(alone))
        assert len(np.unique(together, axis=0)) > 1 or not different


def test_what_a_search_grew_is_reused(slim, tmp_path, monkeypatch):
    first = search_plans(slim, [SHORT], episodes=12, kept=Kept(tmp_path, {}))
    monkeypatch.setattr("esper.runs.plan_search.grow_contender", None)
    again = search_plans(slim, [SHORT], episodes=12, kept=Kept(tmp_path, {}))
    assert (again.best, again.objective) == (first.best, first.objective)


def test_a_search_without_an_episode_is_refused(slim):
    with pytest.raises(InputError, match="was given 0 episodes; give 1 or more"):
        search_plans(slim, [SHORT], episodes=0)


def test_the_full_menu_has_each_blueprint_at_each_slot_and_at_every_slot_and_no_plan_twice():
    space = space_of(get_task("heal"), [])
    plans = plans_of(space)
    assert plans[: len(choices_of(space))] == choices_of(space)
    names = {placed.words(space) for placed in plans}
    assert {"none", "uniform", "bypass at embed", "low rank at block4", "mlp-small at block2"} <= names
    everywhere = {f"{blueprint.name} everywhere" for blueprint in space.blueprints}
    assert everywhere - names == {"bypass-rank-1 everywhere"}, "uniform plants the same"
    wishes = {wished(space, each.plan, np.full(len(space.width), each.slot)).tobytes() for each in plans}
    assert len(wishes) == len(plans)


def test_schedules_plant_one_seed_two_or_all_within_what_may_be_planted(mixture):
    for most, sizes in ((1, {1}), (2, {1, 2}), (3, {1, 2}), (4, {1, 2, 4})):
        candidates = candidate_plans(mixture, [SHORT, {"lifecycle": {"max_seeds": most}}])
        assert {len(each.choice) for each in candidates if not isinstance(each.choice, Placed)} == sizes
