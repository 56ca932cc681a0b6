"""Test what an episode pays where steps were rolled back: the rise that is left, and a penalty for each."""

from contextlib import ExitStack

import numpy as np
import pytest
from faults.poison import poisoned

from esper.leyline.lifecycle.vocabulary import IN_BUDGET, Op, among
from esper.simic.rewards import fees, get_reward, paid, total, worths
from esper.tamiyo.rules.base import RandomValid
from esper.tolaria.engine import VectorizedEngine
from populations import blobs, small_config
from thinning import thinned

ENVS, STEPS, PENALTY, SCALE = 3, 10, 0.25, 2.0
FEES = {"germinate": 0.01, "advance": 0.02, "prune": 0.03, "fossilize": 0.04}


def episode(cadence, seed, names=("delta", "sparse", "escrow")):
    """Play random decisions under random poison; return the outcomes, and by reward the components of every step."""
    config = small_config(
        envs=ENVS,
        steps=STEPS,
        seed=seed,
        governor={"snapshot_every": cadence, "penalty": PENALTY},
        reward={"fees": FEES, "sparse_reward_scale": SCALE},
    )
    rewards = {name: get_reward(config.reward.model_copy(update={"name": name})) for name in names}
    engine, client, rng = VectorizedEngine(blobs(), config), RandomValid(), np.random.default_rng(seed)
    view, outcomes, parts = engine.reset(), [], {name: [] for name in names}
    for _ in range(STEPS):
        with ExitStack() as stack:
            for row in np.flatnonzero(rng.random(ENVS) < 0.25).tolist():
                stack.enter_context(poisoned(engine, row, "parameter"))
            view, outcome = engine.step(client.act(view))
        outcomes.append(outcome)
        for name, reward in rewards.items():
            parts[name].append(paid(reward, outcome, PENALTY))
    return config, outcomes, parts


def summed(steps):
    """Sum the components of every step to (E,)."""
    return np.sum([total(step) for step in steps], axis=0)


@pytest.fixture(scope="module", params=thinned([1, 3, 20, 4], 2), ids=lambda cadence: f"every {cadence}")
def poisoned_episodes(request):
    found = [episode(request.param, seed) for seed in range(3)]
    assert sum(int(outcome.rolled_back.sum()) for _, outcomes, _ in found for outcome in outcomes) > 12
    if request.param > 1:
        lost = [o.before.metric - o.after.metric for _, outcomes, _ in found for o in outcomes if o.rolled_back.any()]
        assert np.abs(np.concatenate(lost)).max() > 0.05, "no rollback lost anything that was gained before"
    return found


@pytest.mark.parametrize(("name", "scale"), [("delta", 1.0), ("sparse", SCALE), ("escrow", 1.0)])
def test_an_episode_pays_its_rise_less_fees_and_a_penalty_for_each_rollback(poisoned_episodes, name, scale):
    for config, outcomes, parts in poisoned_episodes:
        rise = total(worths(outcomes[-1], config.reward)[1]) - total(worths(outcomes[0], config.reward)[0])
        charged = np.sum([fees(outcome, config.reward) for outcome in outcomes], axis=0)
        penalties = PENALTY * np.sum([outcome.rolled_back for outcome in outcomes], axis=0)
        escrow = np.sum([step.get("escrow", np.zeros(ENVS)) for step in parts[name]], axis=0)
        np.testing.assert_allclose(summed(parts[name]), scale * rise + charged - penalties + escrow, atol=1e-12)


def test_escrow_pays_no_rise_twice_whatever_is_rolled_back(poisoned_episodes):
    for config, outcomes, parts in poisoned_episodes:
        path = [total(worths(outcomes[0], config.reward)[0])]
        path += [total(worths(outcome, config.reward)[1]) for outcome in outcomes]
        given = np.sum([np.maximum(step["escrow"], 0.0) for step in parts["escrow"]], axis=0)
        assert (given <= np.max(path, axis=0) - path[0] + 1e-12).all()


def test_an_operation_that_a_rollback_undoes_is_free(poisoned_episodes):
    undone = 0
    for config, outcomes, _ in poisoned_episodes:
        for outcome in outcomes:
            acted = outcome.rolled_back & outcome.accepted & (outcome.actions.op != Op.WAIT)
            assert not fees(outcome, config.reward)[acted].any()
            assert not (among(outcome.seeds.stage[acted], IN_BUDGET) & (outcome.seeds.age[acted] == 0)).any()
            undone += int(acted.sum())
    assert undone > 3
