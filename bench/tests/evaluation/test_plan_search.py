"""Test the search for the best fixed plan, by successive halving on training instances."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from esper.leyline.messages import InputError
from esper.runs.evaluation.contenders import named
from esper.runs.evaluation.evaluation import Runner
from esper.tasks.catalog import get_task
from esper.tasks.repair import repair
from esper_bench.controllers.plans import NONE, Placed, choices_of, plans_of, wished
from esper_bench.evaluation.one_task import evaluate
from esper_bench.evaluation.plan_menu import PERMISSIVE, candidate_plans, space_of
from esper_bench.evaluation.plan_search import QUARTER, grow_abreast, halve, promising, rungs, search_plans
from esper_bench.tasks import repair_full
from populations import blobs

SHORT = {"steps": 6, "data": {"batch_size": 12, "batches_per_step": 1}, "blueprints": ["bypass-linear"]}
LONG = {"steps": 10, "data": {"batch_size": 12, "batches_per_step": 6}}


@pytest.fixture(scope="module")
def slim():
    """Make a data set whose host loses everything but one number in its first block."""
    return blobs(hidden=(1, 6))


@pytest.fixture(scope="module")
def mixture():
    return repair()


@pytest.fixture(scope="module")
def found(slim):
    return search_plans(slim.sealed(), [LONG], episodes=120)


@given(st.integers(1, 400), st.integers(1, 5000), st.integers(1, 5))
@example(17, 41, 2)
def test_the_rungs_of_a_search_spend_every_episode(candidates, episodes, last):
    steps = rungs(candidates, episodes, 2**20, last)
    spent = sum(count * more for count, more in steps)
    assert spent == episodes if last == 1 else episodes - max(count for count, _ in steps) < spent <= episodes
    for (before, some), (after, more) in pairwise(steps):
        assert after in (1, max(-(-before // QUARTER), last))
        assert more >= some or after == 1
    assert steps[0][0] <= candidates


def test_the_first_rung_of_a_search_has_about_half_of_the_episodes():
    assert rungs(62, 512, 2**20) == [(62, 5), (16, 8), (4, 18), (1, 2)]
    assert rungs(62, 256, 2**20, 4) == [(62, 3), (16, 4)], "2.7 instances are rounded"


def test_where_instances_come_to_an_end_the_search_ends_with_them():
    steps = rungs(8, 1000, 10)
    assert sum(more for _, more in steps) == 10


def test_plans_that_share_the_noise_of_instances_are_ranked_without_it():
    noise = np.random.default_rng(0).normal(0, 100, 1000)
    asked = []

    def grow(alive, done, more):
        asked.append((len(alive), done, more))
        return alive * more + noise[done : done + more].sum()

    found = halve(np.arange(40)[::-1], [(40, 2), (10, 4), (3, 8), (1, 5)], grow)
    order = found.order
    assert order[:3].tolist() == [39, 38, 37]
    assert sorted(order.tolist()) == list(range(40))
    assert found.objective == pytest.approx(39 + noise[:19].mean())
    assert (found.instances, found.episodes) == (19, 80 + 40 + 24 + 5)
    assert asked == [(40, 0, 2), (10, 2, 4), (3, 6, 8), (1, 14, 5)]


def test_equal_plans_keep_their_order_and_plans_that_failed_come_last():
    score = {0: np.nan, 1: 1.0, 2: 1.0, 3: 0.0}
    found = halve(np.arange(4), [(4, 1)], lambda alive, done, more: np.array([score[index] for index in alive]))
    assert found.order.tolist() == [1, 2, 3, 0]


def test_the_search_grows_its_budget_on_training_instances_alone(mixture, monkeypatch):
    drawn = []
    sample = mixture.sample
    object.__setattr__(mixture, "sample", lambda key: drawn.append(key) or sample(key))
    grown = []
    monkeypatch.setattr(
        "esper_bench.evaluation.plan_search.grow_contender",
        lambda *given: grown.append(given[2].envs) or grow(*given),
    )
    found = search_plans(mixture.sealed(), [SHORT], episodes=50)
    object.__setattr__(mixture, "sample", sample)
    assert (sum(grown), found.episodes) == (50, 50)
    assert set(drawn) <= set(mixture.keys("training"))


def grow(*given):
    from esper.runs.evaluation.contenders import grow_contender

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


def test_the_second_stage_has_the_finalists_and_plans_made_of_their_seeds_on_further_instances(slim, monkeypatch):
    lines, keys, plans = [], [], []
    grown = grow_abreast
    monkeypatch.setattr(
        "esper_bench.evaluation.plan_search.grow_abreast",
        lambda task, asked, *given: noted(asked) or grown(task, asked, *given),
    )

    def noted(asked):
        keys.append({key for _, block in asked for key in block.tolist()})
        plans.append({each.content for group, _ in asked for each in group})

    found = search_plans(slim, [SHORT], episodes=64, runner=Runner(watch=lines.append))
    every = candidate_plans(slim, [SHORT])
    singles = sum(each.first for each in every)
    first, second = rungs(singles, 32, 2**20), rungs(2, 32, 2**20)
    said = [line.split("search for the best fixed plan, ")[1] for line in lines]
    assert said == [*_said([*first, *second], len(every))]
    assert not set.union(*keys[: len(first)]) & set.union(*keys[len(first) :])
    assert len(plans[len(first)] & plans[0]) == 1, "one finalist, and one further plan"
    assert found.tried == singles + 1


def _said(steps, every):
    for index, (count, more) in enumerate(steps):
        of = "" if index else f" of {every}"
        yield f"{count} plan{'s' * (count > 1)}{of} on {more} {'further ' * (index > 0)}training instance{'s' * (more > 1)}"


def test_the_most_promising_plans_are_made_of_the_best_single_seeds():
    every = candidate_plans(repair_full())
    place = {each.name: index for index, each in enumerate(every) if each.first}
    best = ["skip-mlp at block3", "uniform", "gated at block0", "affine at block1"]
    order = np.array([place.pop(name) for name in best] + list(place.values()))
    names = [every[index].name for index in promising(every, order)]
    assert len(names) == len(every) - len(order)
    assert names[:3] == ["skip-mlp everywhere", *["skip-mlp at block3 in step 2"] * 2], "the second plan is of a rule"
    assert names[3:7] == [
        "gated everywhere",
        "gated at block0 and skip-mlp at block3 in step 0",
        *["gated at block0 in step 2"] * 2,
    ]
    assert "gated at block0 and affine at block1 in step 0" in names[7:12]


def test_a_plan_says_what_it_plants_where():
    says = {each.name: each.plants for each in candidate_plans(repair_full())}
    assert says["none"] == "nothing"
    assert says["uniform"] == "bypass-rank-1 at every slot that keeps the width of the stream"
    assert says["gated everywhere"] == "gated at every slot that it fits"
    assert says["bypass and uniform at block1"].endswith(
        "bypass-rank-1 at block1, and bypass-rank-1 at the other slots"
    )


def test_without_enough_episodes_there_is_one_stage_with_every_blueprint_at_every_slot():
    every = candidate_plans(repair_full())
    singles = {(blueprint, slot) for blueprint in range(13) for slot in range(4)}
    assert {each.parts[0] for each in every if each.first and each.parts} == singles
    assert [each.first for each in every] == sorted((each.first for each in every), reverse=True)
    first = sum(each.first for each in every)
    assert rungs(first, 256, 2**20)[0] == (first, 2)


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
        (together,) = grow_abreast(mixture, [(some, keys)], [SHORT], "training", Runner())
        alone = grow_abreast(mixture, [([each], keys) for each in some], [SHORT], "training", Runner())
        np.testing.assert_array_equal(together, np.concatenate(alone))
        assert len(np.unique(together, axis=0)) > 1 or not different


def test_a_search_that_was_interrupted_goes_on_to_the_same_plan(slim, tmp_path, monkeypatch):
    whole = search_plans(slim, [SHORT], episodes=64)
    grown, rest = [], []

    def until(*given):
        if len(grown) == 2:
            raise KeyboardInterrupt
        grown.append(given[2].envs)
        return grow(*given)

    monkeypatch.setattr("esper_bench.evaluation.plan_search.grow_contender", until)
    with pytest.raises(KeyboardInterrupt):
        search_plans(slim, [SHORT], episodes=64, runner=Runner(tmp_path))
    monkeypatch.setattr(
        "esper_bench.evaluation.plan_search.grow_contender", lambda *given: rest.append(given[2].envs) or grow(*given)
    )
    again = search_plans(slim, [SHORT], episodes=64, runner=Runner(tmp_path))
    assert again._replace(seconds=0.0) == whole._replace(seconds=0.0)
    assert sum(grown) + sum(rest) == 64
    monkeypatch.setattr("esper_bench.evaluation.plan_search.grow_contender", None)
    assert search_plans(slim, [SHORT], episodes=64, runner=Runner(tmp_path))._replace(seconds=0.0) == whole._replace(
        seconds=0.0
    )


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
