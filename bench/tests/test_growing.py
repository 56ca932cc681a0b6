"""Test the game `grow-unknown`: what its keys stand for, how its stops are counted, and what its rules plant."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from esper.leyline.config.tree import Config, build_config
from esper.leyline.lifecycle.view import sensor
from esper.leyline.messages import InputError
from esper.leyline.protocols import Controller
from esper.simic.rewards import total
from esper.tamiyo.catalog import with_sensors
from esper.tamiyo.rules.base import Never
from esper.tolaria.engine import Observer, Step, Until, VectorizedEngine, play
from esper_bench.controllers.widening import Planned, WidenByExamples, WidenByGradient, WidenBySlope, WidenNarrow
from esper_bench.growing import (
    BLOCKS,
    FIRST_STOP,
    KEYS,
    NARROW,
    STEPS,
    AtStops,
    StopScores,
    describe,
    grow_unknown,
    stop_share,
)
from esper_bench.healing.unknown import KEYS as KEYS_BEFORE

TASK = grow_unknown()
SMALL, LARGE, _ = TASK.menu
ALL = tuple(range(BLOCKS))


def engine_for(client: Controller, envs: int = 4, **settings: Any) -> tuple[VectorizedEngine, Config]:
    config = build_config(TASK.defaults, {"task": TASK.name, "envs": envs, "baselines": []}, settings)
    config = with_sensors(config, client)
    engine = VectorizedEngine(TASK.sealed(), config)
    engine.reset(np.array(TASK.keys("training")[:envs]))
    return engine, config


class Record(Observer):
    """Keeps the steps and the rewards of an episode."""

    def __init__(self, config: Config) -> None:
        self.reward, self.steps, self.paid = AtStops(config.reward), list[Step](), list[np.ndarray]()

    def stepped(self, step: Step) -> None:
        self.steps.append(step)
        self.paid.append(total(self.reward(step.outcome)))


def test_a_key_stands_for_the_same_network_and_examples_in_every_call() -> None:
    one, other = (TASK.instance(KEYS["training"][5]) for _ in range(2))
    assert torch.equal(one.train.x, other.train.x)
    assert torch.equal(one.probe.y, other.probe.y)
    assert len(one.train.y) == describe(KEYS["training"][5]).examples


def test_narrow_blocks_lie_anywhere_and_some_hosts_have_none() -> None:
    facts = [describe(key) for key in KEYS["training"][:300]]
    assert {len(each.narrow) for each in facts} == {0, 1, 2}
    assert {block for each in facts for block in each.narrow} == set(ALL)
    for each in facts:
        narrow = {block for block, hidden in enumerate(each.host.hidden) if hidden in NARROW}
        assert narrow == set(each.narrow)


def test_keys_are_those_of_no_other_task_and_of_one_part() -> None:
    assert KEYS["training"].start == max(keys.stop for keys in KEYS_BEFORE.values())
    assert KEYS["training"].stop == KEYS["validation"].start
    assert KEYS["validation"].stop == KEYS["heldout"].start
    with pytest.raises(InputError, match="key 0 is not an instance of 'grow-unknown'; the keys are training 1,"):
        describe(0)


def test_every_doubling_of_the_compute_holds_the_same_share_of_stops() -> None:
    begin = np.array([FIRST_STOP, 2 * FIRST_STOP, 4 * FIRST_STOP, 0.0, STEPS])
    end = np.array([2 * FIRST_STOP, 4 * FIRST_STOP, 8 * FIRST_STOP, FIRST_STOP, 2 * STEPS])
    np.testing.assert_allclose(stop_share(begin, end), [1 / 3, 1 / 3, 1 / 3, 0, 0])


def test_the_rewards_sum_to_the_mean_over_stops_of_what_each_network_is_worth() -> None:
    client = Planned(LARGE, (0, 3), at=2)
    engine, config = engine_for(client)
    record = Record(config)
    play(engine, client, record)

    # Slowly: at each of many computes, find the last network that was reached, and take its metric less its rent.
    stops = np.exp(np.linspace(np.log(FIRST_STOP), np.log(STEPS), 4001)[:-1] + np.log(STEPS / FIRST_STOP) / 8000)
    for env in range(4):
        reached, worth, compute = [], [], 0.0
        for step in record.steps:
            before, host = step.outcome.before, step.outcome.host_params[env]
            reached.append(compute)
            worth.append(before.metric[env] - config.reward.rent * np.log1p(before.added_params[env] / host))
            compute += 1 + step.after.added_params[env] / host
        found = np.array(worth)[np.searchsorted(reached, stops, side="right") - 1].mean()
        assert np.sum([paid[env] for paid in record.paid]) == pytest.approx(found, abs=2e-3)


def test_growth_takes_compute_so_a_grown_network_is_stopped_after_fewer_steps() -> None:
    def last(client: Controller) -> np.ndarray:
        engine, config = engine_for(client)
        record = Record(config)
        play(engine, client, record)
        return np.max(
            [np.where(paid != 0, step.outcome.step, 0) for paid, step in zip(record.paid, record.steps, strict=True)], 0
        )

    assert (last(Never()) == STEPS - 1).all()
    assert (last(Planned(LARGE, ALL, 0)) < STEPS - 1).all()


def test_an_episode_of_another_length_is_refused() -> None:
    engine, config = engine_for(Never(), steps=3)
    with pytest.raises(InputError, match=f"grow-unknown has {STEPS} steps"):
        play(engine, Never(), Record(config))


def test_scores_on_a_split_count_the_networks_as_they_stand() -> None:
    client = Planned(SMALL, ALL, at=1)
    engine, config = engine_for(client, gates={"min_holding_steps": STEPS})  # no seed is kept before the end
    record, keys = Record(config), TASK.keys("training")[:4]
    scores = StopScores(engine, [TASK.instance(key).probe for key in keys])
    play(engine, client, scores, record)
    np.testing.assert_allclose(scores.given, scores.probe, atol=1e-6)
    np.testing.assert_allclose(scores.probe, np.sum(record.paid, 0))


def test_a_planted_seed_acts_at_once_and_changes_no_output() -> None:
    client = Planned(SMALL, (1, 4), at=0)
    engine, _ = engine_for(client)
    splits = [TASK.instance(key).probe for key in TASK.keys("training")[:4]]
    before = engine.population.evaluate(engine.state.seeds, splits)[1][:4]
    actions = client.act(engine.view())
    while actions is not None:
        actions = client.further(engine.view(), engine.carry_out(actions))
    assert ((engine.view().seeds.alpha == 1) == np.isin(ALL, (1, 4))).all()
    np.testing.assert_array_equal(engine.population.evaluate(engine.state.seeds, splits)[1][:4], before)


def test_the_rule_by_sensors_plants_where_few_directions_are_left() -> None:
    rule = WidenNarrow(SMALL, below=0.4)
    engine, _ = engine_for(rule, envs=8)
    view = engine.view()
    left = sensor(view, "participation") / np.maximum(sensor(view, "participation_before"), 1e-9)
    play(engine, rule)
    assert (left < 0.4).any()
    np.testing.assert_array_equal(engine.view().seeds.blueprint >= 0, left < 0.4)


def test_the_rule_by_the_gradient_plants_one_seed_every_few_steps_where_it_is_largest() -> None:
    rule = WidenByGradient(SMALL, first=2, every=2, count=2)
    engine, config = engine_for(rule)
    record = Record(config)
    play(engine, rule, record)
    count = np.array([(step.after.seeds.blueprint >= 0).sum(1) for step in record.steps])
    assert (count[[0, 1, 2, 3, 4, 23]] == np.array([0, 0, 1, 1, 2, 2])[:, None]).all()
    steepest = sensor(record.steps[2].view, "map_gradient_before").argmax(1)
    assert (record.steps[2].after.seeds.blueprint[np.arange(4), steepest] >= 0).all()


def test_the_rule_by_examples_plants_once_enough_was_seen_for_each_parameter() -> None:
    rule = WidenByExamples(SMALL, per_parameter=0.5, examples_per_step=256)
    engine, config = engine_for(rule)
    record = Record(config)
    play(engine, rule, record)
    for step in record.steps:
        view, size = step.view, step.after.host_params + step.after.added_params
        behind = (step.after.seeds.blueprint < 0).any(1)
        assert (256 * view.step < 0.5 * size)[behind].all()


def test_the_rule_by_the_slope_leaves_every_seed_its_time() -> None:
    rule = WidenBySlope(SMALL, fall=2.0, patience=3)  # every loss counts as flat
    engine, config = engine_for(rule)
    record = Record(config)
    play(engine, rule, record)
    count = np.array([(step.after.seeds.blueprint >= 0).sum(1) for step in record.steps])
    assert (count[2] == 0).all()
    np.testing.assert_array_equal(count[[3, 5, 6, 9, 12, 15, 23], 0], [1, 1, 2, 3, 4, 5, 5])


@pytest.mark.parametrize("make", [lambda: WidenNarrow(SMALL), lambda: WidenBySlope(SMALL, 0.1)])
def test_a_rule_that_is_restored_goes_on_as_it_would_have(make: Any) -> None:
    rule = make()
    engine, _ = engine_for(rule, envs=2)
    play(engine, rule, Until(lambda: engine.state.step == STEPS // 2))
    tree, state = deepcopy((engine.snapshot(), rule.state()))  # a snapshot shares memory with its engine
    other, again = make(), engine_for(make(), envs=2)[0]
    again.restore(tree)
    other.load_state(state)
    play(engine, rule)
    play(again, other)
    np.testing.assert_array_equal(engine.view().seeds.blueprint, again.view().seeds.blueprint)
    np.testing.assert_array_equal(engine.state.scores.loss, again.state.scores.loss)
