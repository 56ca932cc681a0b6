"""Test several decisions in one step: how likely they are, how they are recorded and learnt, and what a teacher teaches."""

import copy
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from esper.leyline.lifecycle.masks import allowed_of, every_decision, offered
from esper.leyline.lifecycle.vocabulary import Actions, Head, Op, Refusal, Stage
from esper.leyline.messages import InputError
from esper.runs.configuration import training_configs
from esper.runs.train import Trainer, cohorts_of
from esper.simic.client import Apprentice, SimicClient
from esper.simic.ppo import PPO, _rows, advantages
from esper.simic.rewards import get_reward
from esper.simic.rollout import Rollout, ShardedRollout
from esper.tamiyo.policy.actor import Learned
from esper.tamiyo.policy.controller import Language, Policy, load_policy, save_policy
from esper.tamiyo.policy.network import GREEDY, Batch, judge
from esper.tolaria.engine import Observer, Until, VectorizedEngine, play
from populations import blobs, small_config
from teachers import Everywhere

ENVS, STEPS, MANY = 4, 4, 3
MENU = ("bypass-rank-1", "bypass-linear", "mlp-small")
SEVERAL: Mapping[str, object] = {"ppo": {"decisions_per_step": MANY, "minibatches": 2}}


class Lesson:
    """Holds an engine, and a client with or without a teacher."""

    def __init__(self, led: float | None = None, envs: int = ENVS, first: int = 0):
        config = small_config(SEVERAL, envs=envs, steps=STEPS, first_instance=first)
        self.engine = VectorizedEngine(blobs(menu=MENU), config)
        policy = Policy.fresh(Language.of([self.engine.space]), 0, decisions_per_step=MANY)
        self.learner, reward = PPO(policy, config.ppo, 0), get_reward(config.reward)
        self.client = (
            SimicClient(self.learner, reward) if led is None else Apprentice(self.learner, reward, Everywhere(), led)
        )

    def played(self, *observers: Observer) -> "Lesson":
        self.engine.reset()
        play(self.engine, self.client, *observers)
        return self


def alike(one: Rollout, other: Rollout) -> bool:
    pairs = zip(
        [*one.observation, *one.actions, *one[3:]], [*other.observation, *other.actions, *other[3:]], strict=True
    )
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def decided(rollout: Rollout, row: int) -> list[torch.Tensor]:
    """Return what a row decided, without the entries at which it was idle."""
    keep = ~rollout.idle[:, row]
    return [field[keep, row] for field in (*rollout.actions, rollout.log_prob, rollout.reward, rollout.value)]


@pytest.fixture(scope="module")
def own() -> Lesson:
    return Lesson().played()


def test_some_rows_decide_more_often_than_others_and_none_more_than_the_limit(own):
    rollout = own.client.rollout()
    counts = (~rollout.idle).sum(0)
    assert STEPS < len(rollout.value) <= STEPS * MANY
    assert counts.min() < counts.max()


def test_the_probabilities_of_a_further_decision_sum_to_one():
    lesson = Lesson()
    view, found = lesson.engine.reset(), []
    policy = lesson.learner.policy

    class Planting(Learned):
        """Says that it has planted, so that it decides again, and keeps its last decision."""

        def carried(self, view, output):
            self.latest = output
            return super().carried(view, output)._replace(op=np.full(ENVS, Op.GERMINATE))

    client = Planting(policy)

    def further(view, refused):
        actions = client.further(view, refused)
        output = client.latest
        if actions is not None and not found:
            table = every_decision(view.space)
            valid = allowed_of(view.masks, table)[0]
            batch = policy.batch(type(output.observation)(*(field[None] for field in output.observation)), MENU)
            with torch.no_grad():
                encoded, _, _ = policy.network(batch, before)
                for row in table[valid]:
                    actions = Actions(*(np.full(ENVS, choice) for choice in row))
                    masks = offered(view.masks, actions)
                    tensors = ([torch.from_numpy(x)[None] for x in part] for part in (actions, masks))
                    found.append(float(judge(policy.network, encoded, *tensors, GREEDY).log_prob[0, 0].exp()))

    client.act(view)
    before = client.hidden
    lesson.engine.step(client.output.decision.actions, None, further)
    assert len(found) > 1
    assert sum(found) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("greedy", [False, True])
def test_no_seed_of_as_many_parameters_follows_one_that_was_refused_in_the_step(greedy):
    config = small_config(SEVERAL, {"governor": {"param_limit": 0.1}}, envs=ENVS, steps=STEPS)
    engine = VectorizedEngine(blobs(menu=MENU), config)
    policy = Policy.fresh(Language.of([engine.space]), 0, decisions_per_step=MANY)
    policy.network.bias_ops({Op.GERMINATE: 10.0})
    client = Learned(policy) if greedy else SimicClient(PPO(policy, config.ppo, 0), get_reward(config.reward))
    many = 0

    class Watch(Observer):
        def stepped(self, step):
            nonlocal many
            smallest = np.full(ENVS, np.inf)
            cost = np.broadcast_to(step.view.space.cost, step.view.masks.blueprint.shape)
            for actions, refused in ((step.outcome.actions, step.outcome.refused), *step.further):
                price = cost[np.arange(ENVS), actions.slot, actions.blueprint]
                plants = actions.op == Op.GERMINATE
                assert (price < smallest)[plants].all()
                denied = plants & (refused == Refusal.PARAM_BUDGET)
                smallest = np.where(denied, price, smallest)
                many += int(denied.sum())

    engine.reset()
    play(engine, client, Watch())
    assert many > 0


def test_a_row_decides_the_same_whether_others_decide_more_or_not(own):
    alone = Lesson(envs=1, first=2).played().client.rollout()
    for mine, theirs in zip(decided(alone, 0), decided(own.client.rollout(), 2), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_rewards_of_a_step_stand_at_the_last_decision_of_each_row(own):
    rollout = own.client.rollout()
    assert not rollout.reward[rollout.idle].any()
    assert (rollout.end.sum(0) == 1).all()
    assert not rollout.end[rollout.idle].any()


def test_advantages_and_returns_are_those_without_the_idle_entries():
    generator = torch.Generator().manual_seed(1)
    reward, value = (torch.randn(6, 2, generator=generator) for _ in range(2))
    end = torch.zeros(6, 2, dtype=torch.bool)
    idle = torch.tensor([[0, 0], [0, 1], [0, 1], [0, 0], [0, 0], [0, 1]], dtype=torch.bool)
    end[5, 0] = end[4, 1] = True
    reward = reward.masked_fill(idle, 0.0)
    found = advantages(reward, value, end, 0.9, 0.8, idle)
    for row in (0, 1):
        keep = ~idle[:, row]
        parts = (x[keep, row, None] for x in (reward, value, end))
        for whole, single in zip(found, advantages(*parts, 0.9, 0.8), strict=True):
            torch.testing.assert_close(whole[keep, row, None], single)


def test_ppo_learns_from_further_decisions(own):
    learner = copy.deepcopy(own.learner)
    # raises if the log-probabilities are not those of the rollout
    figures = learner.update([ShardedRollout.whole(own.client.rollout(), MENU)])
    assert np.isfinite([figures["policy_loss"], figures["value_loss"], figures["kl"]]).all()


def test_the_gradient_of_packed_sequences_is_that_of_the_whole_rollout(own):
    learner, rollout = own.learner, own.client.rollout()
    data = learner._batch(rollout, MENU)
    assert len(data.weight) == (~rollout.idle).sum(0).max() < len(rollout.value)
    network = learner.policy.network

    def step_by_step(batch, rollout):
        """Compute encodings and values, where the state of a row is held at the entries at which it is idle."""
        state, found = network.initial(ENVS), []
        for t in range(len(rollout.value)):
            one = Batch(*(field[t : t + 1] for field in batch[:5]), batch.menu)
            encoded, value, after = network(one, state, rollout.starts[t : t + 1])
            hold = rollout.idle[t, :, None]
            state = tuple(torch.where(hold, *pair) for pair in zip(state, after, strict=True))
            found.append((encoded, value))
        return pytree.tree_map(lambda *parts: torch.cat(parts), *found)

    def gradient(encoded, value, rollout):
        weight = (~rollout.idle).float()
        judged = judge(network, encoded, rollout.actions, rollout.valid, GREEDY)
        loss = ((judged.log_prob + value) * weight).sum()
        return torch.autograd.grad(loss, list(network.parameters()))

    packed, value, _ = network(data.batch, network.initial(ENVS), data.rollout.starts)
    slow = step_by_step(learner.policy.batch(rollout.observations(), MENU), rollout)
    for mine, theirs in zip(gradient(packed, value, data.rollout), gradient(*slow, rollout), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_minibatch_has_the_whole_sequences_of_its_rows_in_their_order(own):
    data, index = own.learner._batch(own.client.rollout(), MENU), torch.tensor([2, 0])
    part = _rows(data, index)
    stop = len(part.weight)
    assert data.rollout.idle[stop:, index].all()
    assert not part.rollout.idle[-1].all()
    assert torch.equal(part.batch.menu, data.batch.menu)
    whole = pytree.tree_leaves(data._replace(batch=data.batch[:5]))
    for mine, field in zip(pytree.tree_leaves(part._replace(batch=part.batch[:5])), whole, strict=True):
        assert torch.equal(mine.nan_to_num(), field[:stop, index].nan_to_num())


def test_idle_entries_are_not_learnt_from(own):
    rollout = own.client.rollout()
    learners = copy.deepcopy(own.learner), copy.deepcopy(own.learner)
    longer = pytree.tree_map(lambda field: torch.cat([field, field.new_zeros(5, *field.shape[1:])]), rollout)
    longer.idle[-5:] = True
    for may in longer.valid:
        may[-5:] = True
    longer.valid[Head.OP][-5:] = torch.arange(len(Op)) == Op.WAIT
    for learner, each in zip(learners, (rollout, longer), strict=True):
        learner.update([ShardedRollout.whole(each, MENU)])
    for one, other in zip(*(each.policy.network.parameters() for each in learners), strict=True):
        torch.testing.assert_close(one, other)


def test_a_teacher_that_plants_all_seeds_in_one_step_is_imitated():
    lesson = Lesson(led=1.0).played()
    rollout, learner = lesson.client.rollout(), lesson.learner
    planted = (rollout.actions[Head.OP] == Op.GERMINATE) & (torch.arange(len(rollout.value)) < MANY)[:, None]
    assert (planted.sum(0) == 2).all()  # both slots, in the first step
    likely = [learner.imitate([ShardedRollout.whole(rollout, MENU)])["log_likelihood"] for _ in range(25)]
    assert likely[-1] > likely[0] / 2  # a log-likelihood is negative
    student = Learned(learner.policy)
    lesson.engine.reset()
    play(lesson.engine, student, _After(1))
    assert (lesson.engine.view().seeds.stage != Stage.DORMANT).all()


def _After(steps: int) -> Until:
    count = iter(range(steps + 1))
    return Until(lambda: next(count) == steps)


def test_a_teacher_goes_on_where_the_policy_did_not_follow_it():
    lesson = Lesson(led=0.0).played()
    rollout = lesson.client.rollout()
    op, slot = rollout.actions[Head.OP], rollout.actions[Head.SLOT]
    empty = rollout.observation[4] < 0  # (T, E, S)
    germinates = (op == Op.GERMINATE) & ~rollout.idle
    assert germinates.any()
    assert empty.gather(2, slot[..., None])[..., 0][germinates].all()


def test_an_episode_of_imitation_that_was_interrupted_goes_on_as_if_it_was_not():
    whole, first, second = Lesson(led=0.5).played(), Lesson(led=0.5), Lesson(led=0.5)
    first.played(_After(2))
    state, engine = copy.deepcopy(first.client.state()), first.engine.snapshot()
    second.engine.reset()
    second.engine.restore(engine)
    second.client.load_state(state)
    play(second.engine, second.client)
    assert alike(whole.client.rollout(), second.client.rollout())


def test_a_saved_policy_makes_as_many_decisions_as_it_was_trained_to(tmp_path):
    for number in (1, MANY):
        policy = Policy.fresh(Language.of([Lesson().engine.space]), 0, decisions_per_step=number)
        save_policy(policy, tmp_path / str(number))
        assert load_policy(tmp_path / str(number)).decisions_per_step == number


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ppo": {"teacher": "nobody", "imitation_rounds": 1}}, "ppo.teacher: unknown controller 'nobody'"),
        ({"ppo": {"rounds": 0, "imitation_rounds": 0}}, "so nothing would be learnt"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused(settings, says):
    (config,) = training_configs([blobs()], "quick", settings)
    with pytest.raises(InputError, match=says):
        Trainer(cohorts_of(blobs(), config), Policy.fresh(Language.of([Lesson().engine.space]), 0), config)
