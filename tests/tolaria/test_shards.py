"""Check that environments that are split over several populations each grow as they do in one population of all."""

import numpy as np
import pytest

from esper.runs.train import cohorts_of, sample_instances
from esper.simic.client import SimicClient
from esper.simic.ppo import PPO
from esper.simic.rewards import get_reward
from esper.tamiyo.policy.controller import Language, Policy
from esper.tamiyo.rules.base import RandomValid
from esper.tamiyo.rules.heuristic import Heuristic
from esper.tasks.repair import repair
from esper.tolaria.engine import VectorizedEngine
from populations import blobs, small_config

STEPS = 8
EAGER = {"plant_below": 2.0, "weak_below": 2.0, "holding_patience": 1, "training_patience": 1}


def sampling(engine, config):
    """Make a policy that has learnt nothing, and draws its decisions."""
    learner = PPO(Policy.fresh(Language.of([engine.space]), 3), config.ppo, config.seed)
    return SimicClient(learner, get_reward(config.reward))


CLIENTS = {
    "heuristic": lambda engine, config: Heuristic(config.heuristic, config.gates),
    "random-valid": lambda engine, config: RandomValid(),
    "sampled": sampling,
}


def grown(task, client, first, envs, **over):
    """Return by step: decisions (heads, E), stages and metrics of the environments first, first + 1, ..."""
    config = small_config({"heuristic": EAGER}, envs=envs, first_instance=first, steps=STEPS, **over)
    engine = VectorizedEngine(task, config)
    chosen, view, seen = CLIENTS[client](engine, config), engine.reset(), []
    assert view.space.number.tolist() == list(range(first, first + envs))
    for _ in range(STEPS):
        view, outcome = engine.step(chosen.act(view))
        chosen.store(outcome)
        seen.append(
            (np.stack(outcome.actions, 1), view.seeds.stage, outcome.after.metric[:, None], outcome.after.loss[:, None])
        )
    return [np.stack(part, 1) for part in zip(*seen, strict=True)]


@pytest.mark.parametrize(
    ("task", "client"),
    [
        pytest.param(task, client, marks=() if task == (blobs, repair)[place % 2] else pytest.mark.slow)
        for task in (blobs, repair)
        for place, client in enumerate(CLIENTS)
    ],
)
def test_two_halves_grow_as_the_whole_does(task, client):
    whole = grown(task(), client, 0, 8)
    halves = [grown(task(), client, first, 4) for first in (0, 4)]
    for together, one, other in zip(whole, *halves, strict=True):
        assert np.array_equal(together, np.concatenate([one, other]))
    decided = whole[0]
    assert len(np.unique(decided.reshape(8, -1), axis=0)) > (1 if client == "heuristic" else 7)


def test_a_twin_has_the_number_of_its_environment():
    engine = VectorizedEngine(blobs(), small_config(envs=3, first_instance=5, twin=True))
    assert engine.population.space.number.tolist() == [5, 6, 7, 5, 6, 7]
    assert engine.space.number.tolist() == [5, 6, 7]


@pytest.mark.parametrize("number", [-2, 0, 5])
def test_two_halves_of_a_training_grow_the_instances_of_the_whole(number):
    over = {"reward": {"group_size": 4}, "ppo": {"validate_envs": 2}}

    def drawn(first, envs):
        return sample_instances(cohorts_of(repair(), small_config(over, envs=envs, first_instance=first))[0], number, 4)

    whole = drawn(0, 16)
    assert np.array_equal(whole, np.concatenate([drawn(0, 8), drawn(8, 8)]))
    assert len(np.unique(whole)) == 4
