"""Test the learner on the real engine: what it saw, what it was paid, and that one seed gives one training."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from faults.poison import poisoned
from torch.utils import _pytree as pytree

from esper.leyline.lifecycle.vocabulary import Head, Op
from esper.leyline.protocols import Controller
from esper.simic.client import Apprentice, SimicClient
from esper.simic.ppo import PPO
from esper.simic.rewards import get_reward, total, worths
from esper.simic.rollout import ShardedRollout
from esper.tamiyo.catalog import get_controller
from esper.tamiyo.policy.controller import Language, Policy
from esper.tamiyo.policy.network import judge
from esper.tolaria.engine import VectorizedEngine
from populations import MENU, blobs, small_config

ENVS, STEPS = 4, 4


class Recorded:
    """Keeps what a reward paid and which outcomes it saw."""

    def __init__(self, config):
        self.inner, self.paid, self.outcomes = get_reward(config), [], []

    def __call__(self, outcome):
        components = self.inner(outcome)
        self.paid.append(total(components))
        self.outcomes.append(outcome)
        return components


def a_run(seed=0, slots=2, menu=MENU, **reward):
    """Make an engine, and a client that learns on it."""
    layers = {"data": {"batches_per_step": 2}, "ppo": {"minibatches": 2, "rounds": 4}, "reward": reward, "seed": seed}
    config = small_config(layers, envs=ENVS, steps=STEPS)
    engine = VectorizedEngine(blobs(hidden=tuple(range(3, 3 + slots)), menu=menu), config)
    policy = Policy.fresh(Language.of([engine.space]), seed)
    return engine, SimicClient(PPO(policy, config.ppo, seed), Recorded(config.reward))


def play(engine, client, steps=STEPS):
    view = engine.reset()
    for _ in range(steps):
        view, outcome = engine.step(client.act(view))
        client.store(outcome)
    return view


def play_broken(engine, client, row, step):
    """Play an episode in which one row is rolled back in one step."""
    view = engine.reset()
    while view.step < STEPS:
        with poisoned(engine, row, "gradient") if view.step == step else nullcontext():
            view, outcome = engine.step(client.act(view))
        client.store(outcome)


def judged_again(client):
    """Return log-probabilities and values of the client's rollout under the policy as it is now."""
    policy, rollout = client.learner.policy, client.rollout()
    batch = policy.batch(rollout.observations(), client.menu)
    encoded, value, _ = policy.network(batch, policy.network.initial(rollout.value.shape[1]), rollout.starts)
    judged = judge(policy.network, encoded, rollout.actions, rollout.valid, client.learner.exploration)
    return judged.log_prob.detach(), value.detach()


def weights(client):
    return client.learner.policy.network.state_dict()


def test_the_learner_is_a_controller():
    assert isinstance(a_run()[1], Controller)


def test_log_probabilities_of_a_rollout_come_out_again_at_unchanged_weights():
    engine, client = a_run()
    engine.run(client)  # so that neither the normaliser nor the weights are those of the start
    play(engine, client)
    log_prob, value = judged_again(client)
    rollout = client.rollout()
    assert (rollout.log_prob < -0.5).any()
    torch.testing.assert_close(log_prob, rollout.log_prob, rtol=0, atol=1e-5)
    torch.testing.assert_close(value, rollout.value, rtol=0, atol=1e-5)


def test_two_trainings_with_one_seed_are_equal_and_with_another_they_are_not():
    found = []
    for seed in (0, 0, 1):
        engine, client = a_run(seed)
        engine.run(client, rounds=2)
        found.append(
            (weights(client), client.learner.policy.normaliser, client.learner.optimizer.state_dict()["state"])
        )
    (first, moments, adam), (second, same, too), (other, _, _) = found
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(
        np.array_equal(a, b) for one, two in zip(moments, same, strict=True) for a, b in zip(one, two, strict=True)
    )
    assert all(torch.equal(adam[i][name], too[i][name]) for i in adam for name in adam[i])
    assert not torch.equal(first["op_head.2.bias"], other["op_head.2.bias"])


def test_a_rollback_is_a_terminal_that_costs_the_penalty_and_the_rest_of_the_episode_is_a_sequence_of_its_own():
    engine, client = a_run()
    play_broken(engine, client, row=2, step=1)
    rollout = client.rollout()
    assert rollout.end[:, 2].tolist() == [False, True, False, True]
    assert rollout.starts[:, 2].tolist() == [True, False, True, False]
    assert rollout.end[:, [0, 1, 3]].sum() == rollout.starts[:, [0, 1, 3]].sum() == 3
    assert rollout.reward[1, 2] == -client.penalty
    last = rollout.observations().env_flags
    assert not last[2, 2, : len(Op)].any()  # nothing was decided before, as at the start
    np.testing.assert_array_equal(last[2, 2, -1], last[0, 2, -1])


@pytest.mark.parametrize(("row", "begins"), [(2, 2), (1, 0)])
def test_what_was_gained_before_a_rollback_is_no_gain_of_the_sequence_behind_it(row, begins):
    engine, client = a_run(name="sparse")
    client.reward = get_reward(engine.config.reward)
    outcomes, store = [], client.store
    client.store = lambda outcome: (outcomes.append(outcome), store(outcome))
    play_broken(engine, client, row=2, step=1)
    first, last = (worths(outcomes[step], engine.config.reward) for step in (begins, -1))
    rise = total(last[1]) - total(first[0])
    np.testing.assert_allclose(client.rollout().reward[-1, row], rise[row], atol=1e-6)


def test_a_rollout_across_a_rollback_is_replayed_exactly():
    engine, client = a_run()
    engine.run(client)
    play_broken(engine, client, row=2, step=1)
    log_prob, value = judged_again(client)
    rollout = client.rollout()
    torch.testing.assert_close(log_prob, rollout.log_prob, rtol=0, atol=1e-5)
    torch.testing.assert_close(value, rollout.value, rtol=0, atol=1e-5)
    client.update()


def test_a_rollback_of_one_environment_leaves_what_the_others_saw_decided_and_earned():
    found = []
    for broken in (False, True):
        engine, client = a_run()
        play_broken(engine, client, row=2, step=1 if broken else -1)
        found.append(pytree.tree_map(lambda field: field[:, [0, 1, 3]], client.rollout()))
    whole, cut = found
    for one, other in zip(whole, cut, strict=True):
        for a, b in zip(one, other, strict=True) if isinstance(one, list) else [(one, other)]:
            np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_a_rollout_is_one_episode_of_every_environment_that_ends_for_good():
    engine, client = a_run()
    play(engine, client)
    rollout = client.rollout()
    assert rollout.reward.shape == (STEPS, ENVS)
    assert rollout.starts.tolist() == [[t == 0] * ENVS for t in range(STEPS)]
    assert rollout.end.tolist() == [[t == STEPS - 1] * ENVS for t in range(STEPS)]


@pytest.mark.parametrize("name", ["delta", "sparse", "escrow"])
def test_a_decision_is_paid_what_the_reward_says_of_its_outcome(name):
    engine, client = a_run(name=name, fees={"germinate": 0.01})
    play(engine, client)
    rollout = client.rollout()
    np.testing.assert_array_equal(rollout.reward.numpy(), np.array(client.reward.paid, np.float32))
    for t, outcome in enumerate(client.reward.outcomes):
        for head in Head:
            np.testing.assert_array_equal(rollout.actions[head][t].numpy(), outcome.actions[head])


def test_sampled_decisions_are_never_refused():
    engine, client = a_run()
    engine.run(client, rounds=2)
    assert all(outcome.accepted.all() for outcome in client.reward.outcomes)


def test_the_learner_sees_what_it_decided_last():
    engine, client = a_run()
    play(engine, client)
    rollout = client.rollout()
    last = rollout.observations().env_flags[..., : len(Op)]
    assert not last[0].any()
    np.testing.assert_array_equal(last[1:].argmax(-1), rollout.actions[Head.OP][:-1].numpy())
    assert (last[1:].sum(-1) == 1).all()


def test_an_update_learns_and_begins_the_next_round():
    engine, client = a_run()
    before = {name: value.clone() for name, value in weights(client).items()}
    play(engine, client)
    figures = client.update()
    assert client.learner.round == 1
    assert any(not torch.equal(before[name], value) for name, value in weights(client).items())
    assert figures["return"] == pytest.approx(np.sum(client.reward.paid, 0).mean(), abs=1e-5)
    play(engine, client)
    assert client.rollout().starts[0].all()


def test_cohorts_of_other_shapes_share_one_learner():
    engine, client = a_run()
    other, _ = a_run(slots=3, menu=MENU[1:])
    second = SimicClient(client.learner, Recorded(other.config.reward))
    for _ in range(2):
        play(engine, client)
        play(other, second)
        both = enumerate((client, second))
        figures = client.learner.update([ShardedRollout.whole(each.rollout(), each.menu, n) for n, each in both])
        assert all(np.isfinite(value) for value in figures.values())
        client.clear()
        second.clear()
    assert client.learner.round == 2


def test_a_group_has_one_part_of_the_menu_in_an_episode_and_another_one_later():
    engine, client = a_run()
    client.learner.config = engine.config.ppo.model_copy(update={"partial_menus": 1.0})
    client.learner.group = 2
    parts = set()
    for _ in range(8):
        view = engine.reset()
        part = client.masks(view).blueprint
        shown = part.any(1)  # (E, K)
        assert (shown[0::2] == shown[1::2]).all()
        assert set(shown.sum(1)) <= {1, 2}
        np.testing.assert_array_equal(part, view.masks.blueprint & shown[:, None])
        parts |= {tuple(row) for row in shown.tolist()}
        view, outcome = engine.step(client.act(view))
        client.store(outcome)
        client.clear()
        planted = np.flatnonzero(outcome.actions.op == Op.GERMINATE)
        assert shown[planted, outcome.actions.blueprint[planted]].all()
    assert len(parts) > 3
    teacher = get_controller("heuristic", engine.config)
    apprentice = Apprentice(client.learner, client.reward, teacher, 0.5)
    np.testing.assert_array_equal(apprentice.masks(view).blueprint, view.masks.blueprint)
