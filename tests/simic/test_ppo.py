"""Test the update: its gradient by finite differences, what it learns, when it stops, and what it leaves when it fails."""

import copy

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from esper.leyline.config.tree import PPOConfig
from esper.leyline.lifecycle.vocabulary import RELEVANT, Head, Op
from esper.simic.ppo import PPO, LearningError, advantages, anneal, policy_loss, value_loss
from esper.simic.rollout import ShardedRollout, TamiyoRolloutBuffer
from esper.tamiyo.policy.actor import Learned
from esper.tamiyo.policy.controller import Language, Policy
from esper.tamiyo.policy.network import Batch, FactoredRecurrentActorCritic, judge
from esper.tamiyo.policy.observation import PROSPECTS
from esper.tolaria.engine import VectorizedEngine
from populations import blobs, small_config

ENVS = 16
SLOTS, MENU = 3, 3
SHARES = {head: 0.05 + 0.05 * head for head in Head}


@pytest.fixture(scope="module")
def view():
    """Return environments that are all alike: fresh hosts of one data set, before anything was planted."""
    return VectorizedEngine(blobs(), small_config(envs=ENVS)).reset()


@pytest.fixture
def doubles():
    """Set float64 everywhere: central differences need it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def a_learner(view, seed=0, group=None, **settings):
    return PPO(Policy.fresh(Language.of([view.space]), seed), PPOConfig(**settings), seed, group)


def planted(actions):
    """Pay 1 for a seed in slot 1."""
    return ((actions.op == Op.GERMINATE) & (actions.slot == 1)).astype(np.float64)


class Exploring(Learned):
    """Samples with the exploration of a learner, and records nothing."""

    greedy = False

    def __init__(self, learner):
        super().__init__(learner.policy)
        self.learner = learner

    @property
    def exploration(self):
        return self.learner.exploration


def a_rollout(learner, view, pay=planted, steps=1, forget=None):
    """Play some steps at one and the same state, paid by what was decided; `forget` maps steps to rows that end before them."""
    mind, buffer, forget = Exploring(learner), TamiyoRolloutBuffer(), forget or {}
    for t in range(steps):
        if t in forget:
            mind.reset(forget[t])
        made = mind.act(view._replace(step=t, episode=learner.round))
        buffer.add(mind.output, steps)
        ends = np.full(ENVS, t == steps - 1) | forget.get(t + 1, np.zeros(ENVS, bool))
        buffer.close(pay(made), ends)
    return buffer.rollout()


def rows_of(rollout, envs):
    """Return the whole sequences of some environments."""
    return pytree.tree_map(lambda field: field[:, envs], rollout)


def menu(view):
    return [info.name for info in view.space.blueprints]


def updated(learner, view, rollout):
    return learner.update([ShardedRollout.whole(rollout, menu(view))])


def everything(learner):
    """Copy all that an update may change."""
    policy = learner.policy
    return copy.deepcopy(
        (policy.network.state_dict(), learner.optimizer.state_dict(), policy.normaliser, learner.round)
    )


def alike(one, other):
    """Return whether two nested records are equal bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(alike(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return np.array_equal(one, other)


def a_problem():
    """Make a network with opinions, and decisions of every operation by masks that are often tight, in float64."""
    steps, envs = 4, 6
    network = FactoredRecurrentActorCritic(env=4, slot=5, blueprints=3, tempos=5, targets=4, hidden=12, code=6)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("head.2.weight"):
                parameter.mul_(50)
    batch = Batch(
        torch.randn(steps, envs, 4),
        torch.randn(steps, envs, SLOTS, 5),
        torch.randint(4, (steps, envs, SLOTS)),
        torch.rand(steps, envs, SLOTS, MENU),
        torch.randn(steps, envs, SLOTS, MENU, 2 * len(PROSPECTS)),
        torch.arange(MENU),
    )
    choices = (len(Op), SLOTS, MENU, 3, 5, 4)
    actions = [torch.randint(n, (steps, envs)) for n in choices]
    actions[Head.OP] = torch.arange(steps * envs).view(steps, envs) % len(Op)
    valid = []
    for head, n in zip(Head, choices, strict=True):
        may = torch.rand(steps, envs, n) < 0.6
        may.scatter_(-1, actions[head].unsqueeze(-1), True)
        valid.append(may | ~torch.from_numpy(RELEVANT.copy())[actions[Head.OP], head].unsqueeze(-1))
    starts = torch.zeros(steps, envs, dtype=torch.bool)
    starts[0], starts[2, 1] = True, True
    advantage, target = torch.randn(steps, envs), torch.randn(steps, envs)
    weight = (torch.rand(steps, envs) < 0.8).double()
    with torch.no_grad():
        encoded, _, _ = network(batch, network.initial(envs), starts)
        old = judge(network, encoded, actions, valid, SHARES).log_prob + 0.3 * torch.randn(steps, envs)

    def loss():
        encoded, value, _ = network(batch, network.initial(envs), starts)
        judged = judge(network, encoded, actions, valid, SHARES)
        entropy = (judged.entropy.sum(-1) * weight).sum() / weight.sum()
        fit = value_loss(value, target, torch.tensor(0.7)) / value.numel()
        policy = policy_loss(judged.log_prob, old, advantage, weight, 0.2) / weight.sum()
        return policy + 0.5 * fit - 0.01 * entropy

    return network, loss


@pytest.mark.parametrize(
    "part",
    ["op_head", "slot_head", "blueprint_head", "blend_head", "tempo_head", "target_head", "value_head"]
    + ["encoder", "pooled", "lstm", "op", "blueprint"],
)
@pytest.mark.usefixtures("doubles")
def test_the_gradient_of_the_loss_is_that_of_finite_differences(part):
    network, loss = a_problem()
    loss().backward()
    step = 1e-6
    for name, parameter in getattr(network, part).named_parameters():
        flat, gradient = parameter.detach().view(-1), parameter.grad.view(-1)
        assert gradient.any(), name
        for index in (int(gradient.abs().argmax()), *torch.randint(len(flat), (2,)).tolist()):
            kept, sides = float(flat[index]), []
            for sign in (1, -1):
                flat[index] = kept + sign * step
                sides.append(float(loss().detach()))
            flat[index] = kept
            assert float(gradient[index]) == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-5, abs=1e-8), name


def test_the_policy_loss_takes_the_smaller_of_the_plain_and_the_clipped_gain():
    log_prob, old, advantage = (torch.randn(5, 4) for _ in range(3))
    weight = (torch.rand(5, 4) < 0.6).float()
    gains = []
    for t in range(5):
        for e in range(4):
            ratio, a = float((log_prob - old).exp()[t, e]), float(advantage[t, e])
            if weight[t, e]:
                gains.append(min(ratio * a, min(max(ratio, 0.8), 1.2) * a))
    assert float(policy_loss(log_prob, old, advantage, weight, 0.2)) == pytest.approx(-np.sum(gains), rel=1e-5)


def test_where_the_policy_has_not_moved_the_loss_is_minus_the_sum_of_the_advantages():
    log_prob, advantage = torch.randn(5, 4), torch.randn(5, 4)
    loss = policy_loss(log_prob, log_prob, advantage, torch.ones(5, 4), 0.2)
    assert float(loss) == pytest.approx(-float(advantage.sum()), abs=1e-5)


def test_the_loss_of_the_critic_counts_in_units_of_the_returns():
    value, target = torch.randn(5, 4), torch.randn(5, 4)
    loss = value_loss(value, target, torch.tensor(1.0))
    assert float(loss) == pytest.approx(float(((value - target) ** 2).sum()) / 2)
    torch.testing.assert_close(value_loss(7 * value, 7 * target, torch.tensor(7.0)), loss)


def test_a_critic_that_is_right_explains_all_variance_one_that_is_flat_none_and_flat_returns_have_none(view):
    learner = a_learner(view)
    rollout = a_rollout(learner, view, lambda actions: 3.0 * planted(actions) + np.arange(ENVS))

    def explained(value, rollout=rollout):
        played = [ShardedRollout.whole(rollout._replace(value=value), menu(view))]
        return learner._statistics(played, learner._prepare(played)).figures()["explained_variance"]

    assert explained(rollout.reward + 2) == pytest.approx(1)
    assert explained(torch.zeros_like(rollout.value)) == pytest.approx(0)
    assert np.isnan(explained(rollout.value, rollout._replace(reward=torch.full_like(rollout.reward, 0.3))))


def test_annealing_is_linear_and_stays_between_its_ends():
    assert [anneal(1.0, p, 0.5) for p in (-1, 0, 0.5, 1, 2)] == [1.0, 1.0, 0.75, 0.5, 0.5]


def test_exploration_falls_from_the_configured_shares_to_none_in_the_last_round(view):
    learner = a_learner(view, rounds=3, exploration=0.2, op_exploration=0.1)
    learner.begun, found = 0, []
    for learner.round in range(3):
        found.append((learner.exploration[Head.OP], learner.exploration[Head.SLOT]))
    assert found == [(0.1, 0.2), (0.05, 0.1), (0.0, 0.0)]


def test_an_action_that_pays_becomes_probable(view):
    learner = a_learner(view, rounds=30, lr=3e-3, target_kl=0.3, minibatches=2)
    rates = [updated(learner, view, a_rollout(learner, view))["return"] for _ in range(20)]
    assert np.mean(rates[:4]) < 0.5
    assert np.mean(rates[-4:]) > 0.9


def test_an_action_that_costs_becomes_rare(view):
    learner = a_learner(view, rounds=30, lr=3e-3, target_kl=0.3, minibatches=2)
    figures = [
        updated(learner, view, a_rollout(learner, view, lambda a: -1.0 * (a.op == Op.GERMINATE))) for _ in range(20)
    ]
    assert np.mean([f["wait"] for f in figures[:4]]) < 0.8
    assert np.mean([f["wait"] for f in figures[-4:]]) > 0.9


def test_decisions_of_other_policies_can_be_learnt_by_imitation(view):
    learner = a_learner(view, lr=3e-3)
    rollout = a_rollout(learner, view, steps=2)
    found = [learner.imitate([ShardedRollout.whole(rollout, menu(view))])["log_likelihood"] for _ in range(4)]
    assert found == sorted(found)
    assert found[-1] > found[0] + 0.1


def test_an_update_ends_where_the_policy_has_moved_far_enough(view):
    ended = a_learner(view, update_epochs=6, lr=1e-2, target_kl=1e-4)
    whole = a_learner(view, update_epochs=6, lr=1e-2, target_kl=1e6)
    first, second = (updated(learner, view, a_rollout(learner, view)) for learner in (ended, whole))
    assert first["epochs"] < 3
    assert first["kl"] > 1e-4
    assert second["epochs"] == 6


def test_log_probabilities_are_those_of_the_rollout_where_the_weights_are_the_same(view):
    learner, rows = a_learner(view), np.arange(ENVS) % 3 == 0
    updated(learner, view, a_rollout(learner, view, steps=4))  # the normaliser and the weights are not those of a start
    rollout = a_rollout(learner, view, steps=4, forget={2: rows})
    policy = learner.policy
    batch = policy.batch(rollout.observations(), menu(view))
    encoded, value, _ = policy.network(batch, policy.network.initial(ENVS), rollout.starts)
    judged = judge(policy.network, encoded, rollout.actions, rollout.valid, learner.exploration)
    torch.testing.assert_close(judged.log_prob, rollout.log_prob, rtol=0, atol=1e-5)
    torch.testing.assert_close(value, rollout.value, rtol=0, atol=1e-5)


def test_an_update_over_sequences_that_begin_in_mid_rollout_is_taken(view):
    learner, rows = a_learner(view), np.arange(ENVS) % 3 == 0
    assert updated(learner, view, a_rollout(learner, view, steps=4, forget={2: rows}))["epochs"] > 0


def damaged(rollout, field, value, at=(0, 3)):
    changed = getattr(rollout, field).clone()
    changed[at] = value
    return rollout._replace(**{field: changed})


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("reward", float("nan"), "advantage of environment 3 is not finite at step 1: its reward is nan"),
        ("reward", float("inf"), "its reward is inf"),
        ("value", float("nan"), "its value nan"),
        ("reward", 1e30, "the returns of the round reach 1e\\+30, whose square is not finite; check the reward"),
        ("log_prob", -3.0, "log-probabilities of the rollout are off by"),
        ("log_prob", float("nan"), "log-probabilities of the rollout are off by nan"),
    ],
)
def test_an_update_that_cannot_be_trusted_keeps_everything_and_names_the_cause(view, field, value, words):
    learner = a_learner(view)
    updated(learner, view, a_rollout(learner, view, steps=2))
    rollout, before = a_rollout(learner, view, steps=2), everything(learner)
    with pytest.raises(LearningError, match=words):
        updated(learner, view, damaged(rollout, field, value, (1, 3)))
    assert alike(everything(learner), before)


def test_the_first_update_leaves_no_trace_when_it_fails(view):
    learner = a_learner(view)
    rollout, before = a_rollout(learner, view), everything(learner)
    with pytest.raises(LearningError):
        updated(learner, view, damaged(rollout, "reward", 1e30))
    assert learner.begun == -1
    assert alike(everything(learner), before)
    twin = a_learner(view)
    assert updated(learner, view, rollout) == updated(twin, view, rollout)


def test_imitation_that_cannot_be_trusted_keeps_everything(view):
    learner = a_learner(view)
    rollout = a_rollout(learner, view)
    learner.imitate([ShardedRollout.whole(rollout, menu(view))])
    before = everything(learner)
    with pytest.raises(LearningError, match="the returns of the round reach"):
        learner.imitate([ShardedRollout.whole(damaged(rollout, "reward", 1e30), menu(view))])
    assert alike(everything(learner), before)


def test_a_rollout_of_another_policy_is_refused(view):
    learner, other = a_learner(view, 0), a_learner(view, 1)
    with pytest.raises(LearningError, match="another policy"):
        updated(learner, view, a_rollout(other, view))


def test_a_round_without_a_choice_is_refused(view):
    learner, op = a_learner(view), np.zeros_like(view.masks.op)
    op[:, Op.WAIT] = True
    waiting = view._replace(masks=view.masks._replace(op=op))
    with pytest.raises(LearningError, match="only WAIT was valid"):
        updated(learner, view, a_rollout(learner, waiting))


def test_a_step_without_a_choice_teaches_the_policy_nothing(view):
    op = view.masks.op.copy()
    op[0], op[0, Op.WAIT] = False, True
    some = view._replace(masks=view.masks._replace(op=op))
    found = []
    for pay in (0.0, 5.0):
        learner = a_learner(view, value_weight=0.0)
        updated(learner, view, damaged(a_rollout(learner, some), "reward", pay, (0, 0)))
        found.append(learner.policy.network.op_head[2].weight)
    assert torch.equal(*found)


def test_what_a_group_has_in_common_teaches_nothing_under_the_baseline_of_the_group(view):
    luck = np.repeat(np.arange(ENVS / 2), 2)
    learner = a_learner(view, group=2, value_weight=0.0, entropy_weight=0.0)
    before = copy.deepcopy(learner.policy.network.op_head.state_dict())
    rollout = a_rollout(learner, view, lambda _: luck)
    updated(learner, view, rollout._replace(value=torch.zeros_like(rollout.value)))
    assert alike(dict(learner.policy.network.op_head.state_dict()), dict(before))


def test_the_normaliser_takes_a_round_in_after_its_update(view):
    learner = a_learner(view)
    rollout, before = a_rollout(learner, view, steps=2), learner.policy.normaliser
    updated(learner, view, rollout)
    assert alike(learner.policy.normaliser, before.merged(type(before).of(rollout.observations())))


def test_the_first_round_gives_the_critic_the_moments_of_the_returns_and_leaves_its_values(view):
    learner = a_learner(view, lr=1e-30, update_epochs=1)
    rollout = a_rollout(learner, view, lambda a: 10 + 3.0 * planted(a), steps=2)
    updated(learner, view, rollout)
    learner.policy.normaliser = type(learner.policy.normaliser).prior(learner.policy.language.sensors)
    network, config = learner.policy.network, learner.config
    target = advantages(rollout.reward, rollout.value, rollout.end, config.gamma, config.gae_lambda).target
    assert float(network.value_mean) == pytest.approx(float(target.mean()), rel=1e-5)
    assert float(network.value_scale) == pytest.approx(float(target.std(correction=0)), rel=1e-5)
    again = Learned(learner.policy)
    again.act(view._replace(episode=0))
    torch.testing.assert_close(again.output.value, rollout.value[0], rtol=0, atol=1e-5)


def test_an_update_reports_what_the_round_was_like(view):
    learner = a_learner(view)
    rollout = a_rollout(learner, view, steps=2)
    figures = updated(learner, view, rollout)
    op = rollout.actions[Head.OP]
    assert figures["return"] == pytest.approx(float(rollout.reward.sum(0).mean()))
    assert figures["wait"] == pytest.approx(float((op == Op.WAIT).float().mean()))
    assert figures["decisions"] == pytest.approx(float((op != Op.WAIT).sum()) / ENVS)
    assert {f"entropy_{head.name.lower()}" for head in Head} <= set(figures)
    assert all(np.isfinite(value) for value in figures.values())


def test_two_updates_from_one_rollout_are_equal(view):
    learners = [a_learner(view) for _ in range(2)]
    rollout = a_rollout(learners[0], view, steps=2)
    assert updated(learners[0], view, rollout) == updated(learners[1], view, rollout)
    assert alike(*(everything(learner) for learner in learners))


def test_a_learner_goes_on_from_its_state_as_if_it_had_never_stopped(view):
    learner = a_learner(view)
    updated(learner, view, a_rollout(learner, view, steps=2))
    weights, state = copy.deepcopy(learner.policy.network.state_dict()), learner.state()
    resumed = a_learner(view, seed=0)
    resumed.policy.network.load_state_dict(weights)
    resumed.policy.normaliser = learner.policy.normaliser
    resumed.load_state(copy.deepcopy(state))
    assert alike(everything(resumed), everything(learner))
    rollout = a_rollout(learner, view, steps=2)
    assert updated(resumed, view, rollout) == updated(learner, view, rollout)
    assert alike(everything(resumed), everything(learner))


def test_a_state_that_was_taken_stays_what_it_is_while_learning_goes_on(view):
    learner = a_learner(view)
    updated(learner, view, a_rollout(learner, view))
    state = learner.state()
    before = copy.deepcopy(state)
    learner.load_state(state)
    updated(learner, view, a_rollout(learner, view))
    assert alike(state, before)


def test_cohorts_with_other_slots_and_menus_are_learnt_from_together(view):
    names = ("mlp-small", "bypass-linear")
    other = VectorizedEngine(blobs(hidden=(3, 4, 5), menu=names), small_config(envs=ENVS)).reset()
    learners = [a_learner(view) for _ in range(2)]
    rollouts = [a_rollout(learners[0], v, steps=2) for v in (view, other)]
    played = [ShardedRollout.whole(*each) for each in zip(rollouts, (menu(view), names), (0, 1), strict=True)]
    figures = [learner.update(played) for learner in learners]
    assert figures[0] == figures[1]
    assert figures[0]["return"] == pytest.approx(np.mean([float(r.reward.sum(0).mean()) for r in rollouts]))
    assert alike(*(everything(learner) for learner in learners))


def test_a_round_without_reward_moves_the_policy_by_its_entropy_alone(view):
    learner = a_learner(view, entropy_weight=0.0)
    nothing = a_rollout(learner, view, lambda actions: 0.0 * actions.op)
    noisy = nothing._replace(value=torch.randn_like(nothing.value))  # of a critic that knows nothing
    before = {name: weight.clone() for name, weight in learner.policy.network.state_dict().items()}
    figures = updated(learner, view, noisy)
    after = learner.policy.network.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if "op_head" in name or "slot_head" in name)
    assert figures["rewarded"] == 0
    assert learner.exploration[Head.SLOT] == learner.config.exploration


def scaled(learner, view, rollout):
    """Return the batch of a rollout, with normalised advantages."""
    played = [ShardedRollout.whole(rollout, menu(view))]
    data = learner._prepare(played)
    return learner._scaled(data, learner._statistics(played, data))[0][0]


def test_advantages_below_the_floor_are_not_scaled_up(view):
    learner = a_learner(view, advantage_floor=0.5)
    rollout = a_rollout(learner, view, lambda actions: 0.01 * (actions.op == Op.GERMINATE))
    part = scaled(learner, view, rollout)
    assert 0 < float(part.advantage.abs().max()) < 0.1
    whole = a_learner(view, advantage_floor=1e-6)
    part = scaled(whole, view, rollout)
    assert float(part.advantage.std(correction=0)) == pytest.approx(1, abs=0.05)


def test_the_scale_of_returns_rises_at_once_and_falls_slowly(view):
    learner, scales = a_learner(view), []
    for worth in (0.001, 1.0, 0.001):
        updated(
            learner, view, a_rollout(learner, view, lambda actions, worth=worth: worth * (actions.op == Op.GERMINATE))
        )
        scales.append(float(learner.policy.network.value_scale))
    assert scales[0] < 0.01
    assert scales[1] > 0.3
    assert scales[2] == pytest.approx(0.9 * scales[1], rel=0.02)


def test_a_critic_with_a_huge_gradient_leaves_the_step_of_the_policy_as_it_is(view):
    steps = []
    for weight in (0.0, 1e6):
        learner = a_learner(view, value_weight=weight)
        part, network = scaled(learner, view, a_rollout(learner, view)), learner.policy.network
        learner.optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
        before = network.op_head[2].weight.detach().clone()

        def losses(part, network=network):
            return network.op_head[2].weight.sum(), network.value_head[2].weight.square().sum(), []

        learner._descend(losses, {0: part}, [0], {0: torch.arange(ENVS)}, 0, 0)
        steps.append(network.op_head[2].weight.detach() - before)
    torch.testing.assert_close(*steps)
    assert steps[0].abs().sum() > 0


@pytest.mark.campaign
def test_a_head_with_an_entropy_weight_of_its_own_stays_more_uniform(view):
    entropies = []
    for weights in ({}, {"op": 1.0}):
        learner = a_learner(view, rounds=30, lr=3e-3, target_kl=0.3, minibatches=2, entropy_weights=weights)
        figures = [updated(learner, view, a_rollout(learner, view)) for _ in range(15)]
        entropies.append(figures[-1]["entropy_op"])
    assert entropies[1] > entropies[0] + 0.1


def test_a_rollout_in_shards_is_learnt_from_as_a_whole(view):
    rollout, learners = a_rollout(a_learner(view), view, steps=3), [a_learner(view, group=2) for _ in range(2)]
    for learner in learners:
        learner.config = learner.config.model_copy(update={"minibatches": 1})
    parts = {shard: rows_of(rollout, slice(*ends)) for shard, ends in enumerate(((0, 6), (6, 8), (8, ENVS)))}
    envs = {shard: part.value.shape[1] for shard, part in parts.items()}
    whole = updated(learners[0], view, rollout)
    divided = learners[1].update([ShardedRollout(menu(view), envs, parts)])
    assert divided == pytest.approx(whole, rel=1e-3, abs=1e-5)
    for one, other in zip(*(each.policy.network.parameters() for each in learners), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    for one, other in zip(*(each.policy.normaliser for each in learners), strict=True):
        assert all(np.allclose(a, b) for a, b in zip(one, other, strict=True))


def test_minibatches_of_shards_are_of_one_size_and_hold_every_sequence_once(view):
    learner, rollout = a_learner(view, minibatches=4), a_rollout(a_learner(view), view)
    bounds = [(0, 5), (5, 6), (6, 8), (8, ENVS)]
    parts = {shard: rows_of(rollout, slice(*ends)) for shard, ends in enumerate(bounds)}
    played = [ShardedRollout(menu(view), {shard: b - a for shard, (a, b) in enumerate(bounds)}, parts)]
    seen, sizes = [], []
    for _, shards, index in learner._minibatches(played, 0):
        assert shards == list(index)
        sizes.append(sum(map(len, index.values())))
        seen += [bounds[shard][0] + place for shard, rows in index.items() for place in rows.tolist()]
    assert sizes == [ENVS / 4] * 4
    assert sorted(seen) == list(range(ENVS))
