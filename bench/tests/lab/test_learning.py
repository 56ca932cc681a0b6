"""Test that the learner learns where the optimum is known. One seed each; `scripts/study_sandbox.py` runs ten."""

import numpy as np
import pytest

from esper.simic.client import SimicClient
from esper.simic.ppo import PPO
from esper.simic.rewards import get_reward
from esper.tamiyo.policy.actor import Learned
from esper.tamiyo.policy.controller import Language, Policy
from esper.tamiyo.rules.base import RandomValid
from esper_bench.lab.optimum import solve
from esper_bench.lab.sandbox import CHAIN, GROWTH, Blindfolded, Sandbox, arms, bandit, blindfolded, play

SEED = 1


def learner(sandbox: Sandbox) -> tuple[Policy, SimicClient]:
    config = sandbox.config
    policy = Policy.fresh(Language.of([sandbox.space]), config.seed)
    return policy, SimicClient(PPO(policy, config.ppo, config.seed), get_reward(config.reward))


def train(sandbox: Sandbox, client, rounds: int) -> None:
    for _ in range(rounds):
        play(sandbox, client)
        client.update()


@pytest.fixture(scope="module")
def solution():
    return solve(Sandbox(GROWTH))


def score(solution, client) -> float:
    """Score a client on other draws than those of training."""
    other = Sandbox(GROWTH, {"seed": SEED + 1000})
    return solution.score(play(other, client), other.space.instance % GROWTH.kinds)


def test_a_learner_reaches_the_optimum_of_the_sandbox_within_five_percent(solution):
    sandbox = Sandbox(GROWTH, {"seed": SEED})
    policy, client = learner(sandbox)
    reached = 0.0
    while reached < 0.95 and client.learner.round < sandbox.config.ppo.rounds:
        train(sandbox, client, 5)
        reached = score(solution, Learned(policy))
    assert reached >= 0.95


def test_a_learner_that_cannot_see_the_sandbox_gets_less_than_half_of_the_optimum(solution):
    sandbox = Sandbox(GROWTH, {"seed": SEED})
    policy, client = learner(sandbox)
    train(sandbox, Blindfolded(client), 20)
    assert score(solution, Blindfolded(Learned(policy))) < 0.5


def test_a_learner_puts_its_mass_on_the_best_arm_of_a_bandit():
    best = 3
    sandbox = Sandbox(bandit(best), {"seed": SEED})
    policy, client = learner(sandbox)
    train(sandbox, client, sandbox.config.ppo.rounds // 2)
    view = Sandbox(bandit(best), {"seed": SEED + 1000, "envs": 4096}).reset()
    sampler = Learned(policy)
    sampler.greedy = False
    assert np.mean(arms(sampler.act(view)) == best) > 0.9


def test_a_learner_solves_the_chain_that_pays_only_at_its_end():
    sandbox = Sandbox(CHAIN, {"seed": SEED})
    policy, client = learner(sandbox)
    solved = False
    while not solved and client.learner.round < sandbox.config.ppo.rounds:
        train(sandbox, client, 5)
        solved = bool((play(Sandbox(CHAIN), Learned(policy)) == 1).all())
    assert solved


def test_two_trainings_in_the_sandbox_with_one_seed_are_bitwise_equal():
    weights = []
    for _ in range(2):
        sandbox = Sandbox(GROWTH, {"seed": SEED, "envs": 12})
        policy, client = learner(sandbox)
        train(sandbox, client, 3)
        weights.append(policy.network.state_dict())
    first, second = weights
    assert all(first[name].equal(second[name]) for name in first)
    fresh = Policy.fresh(policy.language, SEED).network.state_dict()
    assert not all(first[name].equal(fresh[name]) for name in fresh)


def test_a_blindfolded_client_is_shown_the_sandbox_without_measurements_and_told_its_outcomes():
    seen, told = [], []

    class Watching(RandomValid):
        def act(self, view):
            seen.append(view)
            return super().act(view)

        def store(self, outcome):
            told.append(outcome)

    sandbox = Sandbox(GROWTH, {"envs": 6})
    play(sandbox, Blindfolded(Watching()))
    assert len(seen) == len(told) == sandbox.config.steps
    assert all(np.isnan(view.measurements.metric).all() and not view.space.instance.any() for view in seen)
    assert np.isnan(blindfolded(sandbox.reset()).measurements.participation).all()


def test_the_arms_of_a_bandit_in_the_sandbox_are_wait_and_the_slots():
    sandbox = Sandbox(bandit(0), {"envs": 64})
    actions = RandomValid().act(sandbox.reset())
    pulled = arms(actions)
    sandbox.step(actions)
    planted = sandbox.state.seeds.blueprint >= 0
    assert set(pulled) == set(range(7))
    assert np.array_equal(pulled, np.where(planted.any(1), 1 + planted.argmax(1), 0))
