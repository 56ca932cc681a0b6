"""Test controllers on the real lifecycle, with measurements written by hand: what they ask for is done, and when."""

import numpy as np
import pytest

from esper.kasmina.lifecycle import apply, dormant, legal, tick
from esper.leyline.config.tree import Config
from esper.leyline.lifecycle.gates import judge
from esper.leyline.lifecycle.view import Estimate
from esper.leyline.lifecycle.vocabulary import Op, Stage
from esper.tamiyo.rules.base import RandomValid
from esper.tamiyo.rules.heuristic import Heuristic
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry


def episode(controller, view, config, *, envs=1, slots=3, steps=24, worth=0.1):
    """Play an episode where every seed is measured to be worth `worth`: (step, op, slot) of what env 0 did, and seeds."""
    base = view(np.zeros((envs, slots)), steps=steps, participation=np.linspace(0.1, 0.2, slots))
    base = base._replace(space=base.space._replace(max_seeds=config.lifecycle.max_seeds))
    known = np.full((envs, slots), worth)
    found = Estimate(known, known * 0 + 0.01, known > -np.inf)
    measured = base.measurements._replace(contribution=found, gain=found, seed_gradient_finite=known > -np.inf)
    seeds, log = dormant(envs, slots), []
    for step in range(steps):
        masks = legal(seeds, judge(seeds, measured, config.gates), base.space, config.lifecycle)
        now = base._replace(step=step, seeds=seeds, masks=masks, measurements=measured)
        actions = controller.act(now)
        seeds, _, accepted = apply(seeds, actions, masks, base.space, config.lifecycle)
        assert accepted.all()
        if actions.op[0] != Op.WAIT:
            log.append((step, Op(actions.op[0]), int(actions.slot[0])))
        seeds = tick(seeds, judge(seeds, measured, config.gates), config.lifecycle)
    return log, seeds


@pytest.fixture
def config():
    return Config.model_validate({"heuristic": {"tie_ratio": 1.0, "holding_patience": 6, "training_patience": 6}})


def test_the_heuristic_grows_the_two_thinnest_slots_and_keeps_them(view, config):
    log, seeds = episode(Heuristic(config.heuristic, config.gates), view, config)
    assert log == [
        (0, Op.GERMINATE, 0),
        (3, Op.ADVANCE, 0),
        (4, Op.GERMINATE, 1),
        (7, Op.FOSSILIZE, 0),
        (8, Op.ADVANCE, 1),
        (12, Op.FOSSILIZE, 1),
    ]
    assert seeds.stage.tolist() == [[Stage.FOSSILIZED, Stage.FOSSILIZED, Stage.DORMANT]]


def test_the_shortest_life_that_the_heuristic_counts_with_is_just_enough(view, config):
    enough = episode(Heuristic(config.heuristic, config.gates), view, config, steps=8)[0]
    assert enough == [(0, Op.GERMINATE, 0), (3, Op.ADVANCE, 0), (7, Op.FOSSILIZE, 0)]
    assert episode(Heuristic(config.heuristic, config.gates), view, config, steps=7)[0] == []


def test_the_heuristic_prunes_a_seed_without_gain_and_tries_again(view, config):
    log, _ = episode(Heuristic(config.heuristic, config.gates), view, config, worth=-0.1)
    assert log[:3] == [(0, Op.GERMINATE, 0), (8, Op.PRUNE, 0), (9, Op.GERMINATE, 1)]


def test_a_schedule_with_keep_plants_and_keeps_one_seed_after_the_other(view, config):
    entries = [
        ScheduleEntry(at=2, op="germinate", slot=slot, blueprint="bypass-mlp", keep=True) for slot in ("s2", "s0")
    ]
    log, seeds = episode(Schedule(entries), view, config)
    assert [(op, slot) for _, op, slot in log] == [
        (Op.GERMINATE, 2),
        (Op.ADVANCE, 2),
        (Op.GERMINATE, 0),
        (Op.FOSSILIZE, 2),
        (Op.ADVANCE, 0),
        (Op.FOSSILIZE, 0),
    ]
    assert log[0][0] == 2
    assert seeds.stage.tolist() == [[Stage.FOSSILIZED, Stage.DORMANT, Stage.FOSSILIZED]]


def test_random_valid_is_never_refused(view, config):
    log, _ = episode(RandomValid(), view, config, envs=32, steps=60)  # asserts that every decision was accepted
    assert {op for _, op, _ in log} >= {Op.GERMINATE, Op.ADVANCE, Op.PRUNE}
