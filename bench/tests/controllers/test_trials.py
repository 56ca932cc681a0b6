"""Test trials of candidates in copies of the rows, and the price of their compute."""

import copy
import itertools
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

import esper
from esper.leyline.config.tree import Config, build_config
from esper.leyline.data.objective import objective
from esper.leyline.lifecycle.view import Outcome, take
from esper.leyline.lifecycle.vocabulary import IN_BUDGET
from esper.leyline.messages import InputError
from esper.simic.rewards import get_reward, total
from esper.tamiyo.catalog import find_controller, get_controller, with_sensors
from esper.tamiyo.rules.base import RandomValid
from esper.tolaria.engine import Observer, Step, Until, VectorizedEngine, play
from esper_bench.controllers.placement import Placement
from esper_bench.controllers.plans import NONE
from esper_bench.controllers.trials import Trials
from esper_bench.evaluation.plan_search import probe_objective
from esper_bench.healing.damage import DamageKind
from esper_bench.healing.heal import heal
from quick_healing import facts_of_first_hosts, quick_hosts


@pytest.fixture(autouse=True, scope="module")
def _quick_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_hosts(tmp_path_factory.mktemp("cache")):
        yield


@lru_cache
def keys_of(count: int) -> np.ndarray:
    """Find plain hosts that are trained together, with pruned units in one block or two."""
    fit = (f.key for f in facts_of_first_hosts() if f.plain and f.damage.kind == DamageKind.PRUNED)
    return np.array(list(itertools.islice(fit, count)))


def engine_for(name: str, envs: int = 2, steps: int = 5, **settings: object) -> tuple[VectorizedEngine, Placement]:
    task = heal()
    own = {
        "task": task.name,
        "envs": envs,
        "baselines": [],
        "steps": steps,
        "trials": {"candidates": 3, "trial_steps": 3},
    }
    config = build_config(task.defaults, find_controller(name).settings, own, settings)
    client = get_controller(name, config)
    assert isinstance(client, Placement)
    engine = VectorizedEngine(task.sealed(), with_sensors(config, client))
    engine.reset(keys_of(envs))
    return engine, client


class Outcomes(Observer):
    """Keeps the outcomes of the steps."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def stepped(self, step: Step) -> None:
        self.outcomes.append(step.outcome)


def test_a_copy_becomes_under_the_same_decisions_bit_for_bit_what_its_row_becomes() -> None:
    task = esper.get_task("iris")
    config = build_config(
        task.defaults,
        {"envs": 3, "steps": 10, "baselines": [], "gates": {"permissive": True}, "data": {"batches_per_step": 2}},
    )
    engine, rule = VectorizedEngine(task, config), RandomValid()
    engine.reset()
    for _ in range(5):
        engine.step(rule.act(engine.view()))
    env = np.array([2, 0, 2, 1])
    copies = engine.copies(env)
    assert (engine.view().seeds.stage > 0).any()
    for _ in range(3):
        actions = rule.act(engine.view())
        view, outcome = engine.step(actions)
        copied, other = copies.step(take(actions, env))
        for mine, its in ((outcome.after, other.after), (view.seeds, copied.seeds)):
            for name in mine._fields:
                np.testing.assert_array_equal(getattr(mine, name)[env], getattr(its, name), err_msg=name)


def test_the_candidate_of_the_best_copy_is_planted_if_it_is_better_and_its_row_becomes_that_copy() -> None:
    engine, client = engine_for("trials:participation")
    assert isinstance(client, Trials)
    before = engine.snapshot()["body"]["host"]["columns"]["value"].clone()
    proposed = client.proposals(engine.view())
    assert proposed is not None
    worth = engine.trial(proposed).reshape(2, 3)
    assert proposed.env.tolist() == [0, 0, 0, 1, 1, 1]
    assert (engine.snapshot()["body"]["host"]["columns"]["value"] == before).all()
    ranking = client.rule.ranking(engine.view())
    client.tried(np.array([0.0, 0, 0, 0.1, np.nan, 2.0]))
    picks = client.pick(engine.view())
    assert picks.plans == (NONE, ranking[1][2].plan)
    assert "none of 3 candidates tried for 3 steps raised J" in picks.reasons[0]
    seen, space = Outcomes(), engine.space
    play(engine, client, seen)
    picks = client.pick(engine.view())
    for env, best in enumerate(worth.argmax(1)):
        assert (picks.plans[env], picks.slot[env]) == ranking[env][best][:2]
        assert f"the highest J of 3 candidates tried for 3 steps, {worth[env, best]:.3f}" in picks.reasons[env]
    after = seen.outcomes[2].after
    own = objective(after.metric, after.added_params, seen.outcomes[2].host_params, space.rent, space.rent_size)
    np.testing.assert_array_equal(own, worth.max(1))


def test_the_prices_of_the_steps_sum_to_the_price_of_the_compute_and_to_what_J_lost() -> None:
    price = 0.25
    engine, client = engine_for("trials:participation", reward={"compute_price": price})
    seen = Outcomes()
    play(engine, client, seen)
    outcomes, compute, config = seen.outcomes, engine.state.compute, engine.config
    free = config.model_copy(update={"reward": config.reward.model_copy(update={"compute_price": 0.0})})
    assert (compute.forks >= 3 * 3).all()  # 3 copies of 3 steps, and their seeds
    added = [engine.population.table.added_params(outcome.seeds, IN_BUDGET) for outcome in outcomes]
    np.testing.assert_allclose(compute.seeds, sum(added) / outcomes[0].host_params)  # nothing was pruned here
    assert (compute.seeds > 0).all()
    expected = price * (compute.seeds + compute.forks) / config.steps
    np.testing.assert_allclose(engine.state.compute.price(engine.config), expected)
    priced, unpriced = ([get_reward(each.reward)(outcome) for outcome in outcomes] for each in (config, free))
    np.testing.assert_allclose(-np.sum([reward["compute"] for reward in priced], axis=0), expected)
    lost = np.sum([total(mine) - total(other) for mine, other in zip(unpriced, priced, strict=True)], axis=0)
    np.testing.assert_allclose(lost, expected)
    np.testing.assert_allclose(probe_objective(outcomes[-1], free) - probe_objective(outcomes[-1], config), expected)
    assert "compute" not in unpriced[0]


def test_a_run_with_trials_resumes_with_the_figures_of_one_without_a_break(tmp_path: Path) -> None:
    engine, client = engine_for("trials:participation")
    play(engine, client, Until(lambda: engine.state.step == 2))
    saved, known = copy.deepcopy(engine.snapshot()), copy.deepcopy(client.state())
    whole = play(engine, client)
    other, later = engine_for("trials:participation")
    other.restore(saved)
    later.load_state(known)
    resumed = play(other, later)
    for mine, its in ((whole.after, resumed.after), (whole.exported, resumed.exported)):
        np.testing.assert_array_equal(mine.metric, its.metric)
        np.testing.assert_array_equal(mine.added_params, its.added_params)
    for mine, its in zip(engine.state.compute, other.state.compute, strict=True):
        np.testing.assert_array_equal(mine, its)


def test_the_summary_of_a_run_says_what_its_trials_took() -> None:
    task = heal()
    settings = {"envs": 2, "steps": 3, "baselines": [], "models": "none", "trials": {"candidates": 2, "trial_steps": 2}}
    compute = esper.grow(task, settings, controller="trials:participation")["compute"]
    assert compute["host_row_steps"] == 2 * 3
    assert compute["trial_row_steps"] >= 2 * 2 * 2
    assert compute["share"] == pytest.approx((compute["seed_row_steps"] + compute["trial_row_steps"]) / 6, abs=1e-4)
    assert compute["paid"] == [0, 0]


def test_an_evaluation_grows_trials_beside_other_controllers() -> None:
    settings = {"steps": 4, "trials": {"candidates": 2, "trial_steps": 1}}
    record = esper.evaluate(
        ["trials:collapse"], heal(), instances=2, seeds=1, settings=settings, baselines=(), progress=False
    )
    assert np.isfinite(record["tasks"][0]["runs"]["trials:collapse"]["objective"]).all()


def test_what_cannot_be_tried_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match="uniform ranks no places; give trials: with participation"):
        get_controller("trials:uniform", Config())
    with pytest.raises(InputError, match="would try candidates of never, which ranks none"):
        get_controller("trials:never", Config())
    engine, client = engine_for("trials:participation")
    with pytest.raises(InputError, match=r"only a run of a population makes \(esper grow, esper eval\)"):
        client.act(engine.view())
    task = esper.get_task("digits")
    certified = VectorizedEngine(task, build_config(task.defaults, {"envs": 2, "gates": {"certify": 0.1}}))
    with pytest.raises(InputError, match=r"gates\.certify is 0\.1, but a trial would use up fresh examples"):
        certified.copies(np.array([0, 1]))
