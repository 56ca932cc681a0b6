"""Test packages: one decision of a policy that plants a blueprint in every slot, how likely it is, and how it is learnt."""

import copy
import json

import numpy as np
import pytest
import torch

from esper.leyline.lifecycle.masks import allowed_of, every_decision, offered
from esper.leyline.lifecycle.vocabulary import Actions, Head, Op, Refusal
from esper.leyline.messages import InputError
from esper.simic.client import Apprentice, SimicClient
from esper.simic.ppo import PPO
from esper.simic.rewards import get_reward
from esper.simic.rollout import ShardedRollout
from esper.tamiyo.policy.actor import Learned
from esper.tamiyo.policy.controller import FACTS, Language, Policy, load_policy, save_policy
from esper.tamiyo.policy.network import EMBEDDING, GREEDY, judge
from esper.tolaria.engine import Until, VectorizedEngine, play
from populations import blobs, small_config
from teachers import Everywhere

ENVS, STEPS, WIDTH = 4, 4, (3, 5, 4)
MENU = ("bypass-rank-1", "mlp-small")
RANK_1 = ("bypass-rank-1",)


def engine_of(**settings) -> VectorizedEngine:
    layers = {
        "ppo": {"minibatches": 2, "exploration": 0, "op_exploration": 0},
        "lifecycle": {"max_training_seeds": 3, "max_seeds": 3},
        **settings,
    }
    return VectorizedEngine(blobs(menu=MENU, hidden=WIDTH), small_config(layers, envs=ENVS, steps=STEPS))


def policy_of(engine, keen=True, decisions=1, packages=RANK_1) -> Policy:
    """Make a policy; a keen one plants the package as soon as it can."""
    policy = Policy.fresh(Language.of([engine.space], packages), 0, decisions_per_step=decisions)
    if keen:
        policy.network.bias_ops({Op.GERMINATE: 50.0})
        network = policy.network
        # a unit of the pair and one of the head read one number of the embedding, which the package has
        with torch.no_grad():
            network.blueprint.weight[:, 0] = 0
            network.blueprint.weight[-1, 0] = 100
            network.pair[0].weight[0] = 0
            network.pair[0].weight[0, -EMBEDDING] = 1
            network.blueprint_head[0].weight[0] = 0
            network.blueprint_head[0].weight[0, network.lstm.hidden_size + network.encoder[2].out_features] = 1
            network.blueprint_head[2].weight[0, 0] = 100
    return policy


class Taught:
    """Holds an engine, and a client that samples, or follows a teacher in a share of the environments."""

    def __init__(self, led=None, keen=False, decisions=2):
        self.engine = engine_of()
        config = self.engine.config
        self.learner = PPO(policy_of(self.engine, keen, decisions), config.ppo, 0)
        parts = self.learner, get_reward(config.reward)
        self.client = SimicClient(*parts) if led is None else Apprentice(*parts, Everywhere(), led)

    def played(self, *observers):
        self.engine.reset()
        play(self.engine, self.client, *observers)
        return self


def after(steps):
    count = iter(range(steps + 1))
    return Until(lambda: next(count) == steps)


def first_step(client, **settings):
    engine = engine_of(**settings)
    engine.reset()
    play(engine, client, after(1))
    return engine


@pytest.mark.parametrize("decisions", [1, 2])
def test_a_package_plants_in_one_step_what_a_rule_plants_in_several_decisions(decisions):
    policy = policy_of(engine_of(), decisions=decisions)
    mine, theirs = (first_step(client).view().seeds for client in (Learned(policy), Everywhere()))
    assert (theirs.blueprint >= 0).sum(1).min() > decisions  # the package is not limited by the decisions of a step
    for name in ("stage", "blueprint", "alpha"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))


def test_the_budget_refuses_the_rest_of_a_package_by_name():
    client = Learned(policy_of(engine_of()))
    engine = first_step(client, governor={"param_limit": 0.12})
    planted = (engine.view().seeds.blueprint >= 0).sum(1)
    assert 0 < planted.min() <= planted.max() < len(WIDTH)
    assert engine.governor.record.refused[Refusal.PARAM_BUDGET] == (len(WIDTH) - planted).sum()


def test_the_plantings_of_a_package_say_what_they_belong_to():
    reasons = [entry["reason"] for entry in first_step(Learned(policy_of(engine_of()))).seed_history.lists["plantings"]]
    assert sum("the first seed of the package bypass-rank-1" in reason for reason in reasons) == ENVS
    assert sum("a further seed of the package bypass-rank-1" in reason for reason in reasons) == ENVS * (len(WIDTH) - 1)


def test_a_package_is_one_entry_of_the_rollout_as_likely_as_one_decision():
    taught = Taught(keen=True, decisions=1).played(after(1))
    rollout = taught.client.rollout()
    assert len(rollout.value) == 1
    assert (rollout.actions[Head.BLUEPRINT] == len(MENU)).all()
    policy = taught.learner.policy
    with torch.no_grad():
        encoded, _, _ = policy.network(policy.batch(rollout.observations(), MENU), policy.network.initial(ENVS))
        shares = {head: rollout.exploration[..., head, None] for head in Head}
        judged = judge(policy.network, encoded, rollout.actions, rollout.valid, shares)
    torch.testing.assert_close(judged.log_prob, rollout.log_prob)


def test_the_probabilities_of_all_decisions_with_packages_sum_to_one():
    engine = engine_of()
    view, policy = engine.reset(), policy_of(engine, keen=False)
    actor, space = Learned(policy), view.space
    actor.act(view)
    seen, masks = actor.output.observation, actor.masks(view)
    wider = space._replace(blueprints=(*space.blueprints, space.blueprints[0]), fits=space.fits[:, [0, 1, 0]])
    table = every_decision(wider)
    total, packages = 0.0, 0
    with torch.no_grad():
        batch = policy.batch(type(seen)(*(field[None] for field in seen)), MENU)
        encoded, _, _ = policy.network(batch, policy.network.initial(ENVS))
        for row in table[allowed_of(masks, table)[0]]:
            actions = Actions(*(np.full(ENVS, choice) for choice in row))
            tensors = ([torch.from_numpy(x)[None] for x in part] for part in (actions, offered(masks, actions)))
            total += float(judge(policy.network, encoded, *tensors, GREEDY).log_prob[0, 0].exp())
            packages += row[Head.BLUEPRINT] == len(MENU)
    assert packages
    assert total == pytest.approx(1, abs=1e-5)


def test_ppo_learns_from_packages_beside_single_plantings():
    taught = Taught().played()
    rollout = taught.client.rollout()
    packs = (rollout.actions[Head.BLUEPRINT] == len(MENU)) & ~rollout.idle
    assert packs.any()
    assert not packs.all()
    figures = taught.learner.update([ShardedRollout.whole(rollout, MENU)])  # raises if the log-probabilities differ
    assert np.isfinite([figures["policy_loss"], figures["value_loss"]]).all()


@pytest.mark.campaign
def test_a_teacher_that_plants_everywhere_teaches_the_package():
    taught = Taught(led=1.0).played()
    rollout, learner = taught.client.rollout(), taught.learner
    planted = (rollout.actions[Head.OP] == Op.GERMINATE) & ~rollout.idle
    assert (planted.sum(0) == 1).all()
    assert (rollout.actions[Head.BLUEPRINT][planted] == len(MENU)).all()
    assert (taught.engine.view().seeds.blueprint >= 0).all()
    for _ in range(25):
        learner.imitate([ShardedRollout.whole(rollout, MENU)])
    planting = first_step(Learned(learner.policy)).view().seeds
    assert (planting.blueprint == 0).all()


@pytest.mark.parametrize("led", [None, 0.5])
def test_a_training_with_packages_that_was_interrupted_goes_on_as_if_it_was_not(led):
    whole, first, second = (Taught(led=led) for _ in range(3))
    whole.played()
    first.played(after(2))
    state, engine = copy.deepcopy(first.client.state()), first.engine.snapshot()
    second.engine.reset()
    second.engine.restore(engine)
    second.client.load_state(state)
    play(second.engine, second.client)
    mine, theirs = whole.client.rollout(), second.client.rollout()
    for a, b in zip(
        (*mine.actions, mine.log_prob, mine.reward), (*theirs.actions, theirs.log_prob, theirs.reward), strict=True
    ):
        assert torch.equal(a, b)


def test_a_loop_that_asks_for_one_decision_a_step_plants_one_seed_of_a_package_a_step():
    engine = engine_of()
    view, client = engine.reset(), Learned(policy_of(engine))
    for planted in range(1, len(WIDTH) + 1):
        view, outcome = engine.step(client.act(view), client.reasons())
        client.store(outcome)
        assert ((view.seeds.blueprint >= 0).sum(1) == planted).all()
        state, client = client.state(), Learned(client.policy)
        client.load_state(state)


def test_a_file_keeps_packages_and_has_no_word_of_them_without(tmp_path):
    engine = engine_of()
    for packages in ((), RANK_1):
        policy = policy_of(engine, keen=False, packages=packages)
        save_policy(policy, tmp_path / "controller")
        found = load_policy(tmp_path / "controller")
        assert found.language == policy.language
        for name, tensor in policy.network.state_dict().items():
            assert torch.equal(found.network.state_dict()[name], tensor)
        facts = json.loads((tmp_path / "controller" / FACTS).read_text())
        assert facts["language"].get("packages") == (list(packages) or None)


def test_a_policy_without_packages_has_the_weights_that_it_had_before_there_were_any():
    engine = engine_of()
    one, other = (policy_of(engine, keen=False, packages=names).network.state_dict() for names in ((), RANK_1))
    assert one["blueprint.weight"].shape[0] == len(MENU) + 1
    assert [name for name in one if one[name].shape != other[name].shape] == ["blueprint.weight"]


@pytest.mark.parametrize(
    ("packages", "lacks"), [(("bypass-rank-9",), "bypass-rank-9"), (("mlp-small",), "bypass-rank-1")]
)
def test_a_package_that_the_menu_lacks_is_refused(packages, lacks):
    engine = VectorizedEngine(blobs(menu=("mlp-small", "bypass-linear")), small_config())
    with pytest.raises(InputError, match=rf"ppo.packages\) need {lacks}, which the menu lacks: add it with --set"):
        Language.of([engine.space], packages)


def test_a_new_policy_rarely_undoes_what_it_planted_if_it_is_told_to():
    language = Language.of([engine_of().space])
    plain, biased = (Policy.fresh(language, 0, undo_bias=bias).network for bias in (0.0, -4.0))
    change = (biased.op_head[-1].bias - plain.op_head[-1].bias).tolist()
    assert change == [-4.0 if op in (Op.PRUNE, Op.SET_ALPHA) else 0.0 for op in Op]
