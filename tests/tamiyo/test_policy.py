"""Test decisions: every one counted, sampled as often as said, and judged as they were made."""

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from esper.leyline.data.keys import key, uniform
from esper.leyline.lifecycle.masks import choices
from esper.leyline.lifecycle.view import take
from esper.leyline.lifecycle.vocabulary import RELEVANT, Actions, Head, Op, Stage
from esper.tamiyo.policy.network import (
    GREEDY,
    Batch,
    Encoded,
    FactoredRecurrentActorCritic,
    decide,
    judge,
    probabilities,
)
from esper.tamiyo.policy.observation import PROSPECTS

SHAPES = {"env": 5, "slot": 7, "blueprints": 3, "tempos": 5, "targets": 4}
SOME = {head: 0.05 + 0.05 * head for head in Head}
"""Another share of the uniform in every head."""

either = pytest.mark.parametrize("exploration", [GREEDY, SOME], ids=["without exploration", "with exploration"])


@pytest.fixture
def network():
    """Make a network whose heads have opinions: as drawn, they are nearly uniform."""
    made = FactoredRecurrentActorCritic(**SHAPES)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("head.2.weight"):
                parameter.mul_(50)
    return made


def encode(network, envs, slots):
    data = Batch(
        torch.randn(1, envs, SHAPES["env"]),
        torch.randn(1, envs, slots, SHAPES["slot"]),
        torch.randint(4, (1, envs, slots)),
        torch.rand(1, envs, slots, 3),
        torch.randn(1, envs, slots, 3, 2 * len(PROSPECTS)),
        torch.arange(3),
    )
    with torch.no_grad():
        encoded: Encoded = network(data, network.initial(envs))[0]
    return encoded


def only(encoded, env, times):
    """Repeat one environment."""
    return Encoded(*(x[:, env : env + 1].expand(1, times, *x.shape[2:]) for x in encoded))


def draws(envs, seed=0):
    return uniform(key(seed, np.arange(envs)[None], np.array(list(Head))[:, None]))


def every_decision(masks):
    """List all that masks of one environment allow, each once, as (heads, n); a head that does not matter is 0."""
    found = []
    for op in np.flatnonzero(masks.op[0]):
        for slot in np.flatnonzero(masks.slot[0, op]) if op != Op.WAIT else [0]:
            rows = [(op, slot)]
            for head, mask in (
                (Head.BLUEPRINT, masks.blueprint[0, slot]),
                (Head.BLEND, masks.blend[0, slot]),
                (Head.TEMPO, masks.tempo[0, op, slot]),
                (Head.TARGET, masks.target[0, op, slot]),
            ):
                rows = [(*row, c) for row in rows for c in (np.flatnonzero(mask) if RELEVANT[op, head] else [0])]
            found += rows
    return np.array(found).T


def judged(network, encoded, masks, decisions, exploration):
    """Judge (heads, n) decisions by a network, by the masks of as many environments."""
    op, slot = decisions[:2]
    valid = [torch.from_numpy(choices(masks, head, op, slot))[None] for head in Head]
    return judge(network, encoded, [torch.from_numpy(x)[None] for x in decisions], valid, exploration)


def repeated(masks, env, times):
    return type(masks)(*(np.repeat(field, times, 0) for field in take(masks, slice(env, env + 1))))


@pytest.mark.parametrize("exploration", [0.0, 0.3])
def test_a_probability_is_the_mixture_of_the_softmax_and_the_uniform_over_what_is_valid(exploration):
    rng = np.random.default_rng(0)
    logits, valid = rng.normal(size=(20, 6)), rng.random((20, 6)) < 0.5
    valid[:, 2] = True
    found = probabilities(torch.from_numpy(logits), torch.from_numpy(valid), exploration).numpy()
    for row in range(20):
        total = sum(np.exp(logits[row, c]) for c in range(6) if valid[row, c])
        for c in range(6):
            share = (1 - exploration) * np.exp(logits[row, c]) / total + exploration / valid[row].sum()
            assert found[row, c] == pytest.approx(share if valid[row, c] else 0, abs=1e-7)


def test_what_is_not_valid_has_probability_exactly_0():
    logits = torch.tensor([[50.0, 0.0, -50.0]])
    found = probabilities(logits, torch.tensor([[False, True, True]]), 0.1)
    assert float(found[0, 0]) == 0


@either
@pytest.mark.parametrize("seed", range(4))
def test_the_probabilities_of_all_decisions_add_up_to_1(network, random_view, seed, exploration):
    view, encoded = random_view(2, seed), encode(network, 2, 4)
    for env in range(2):
        decisions = every_decision(take(view.masks, slice(env, env + 1)))
        n = decisions.shape[1]
        found = judged(network, only(encoded, env, n), repeated(view.masks, env, n), decisions, exploration)
        assert float(found.log_prob.detach().double().exp().sum()) == pytest.approx(1, abs=1e-5)


@either
def test_a_decision_is_judged_as_it_was_made(network, random_view, exploration):
    view, encoded = random_view(200, 3), encode(network, 200, 4)
    made = decide(network, encoded, view.masks, draws(200), exploration)
    found = judge(
        network,
        encoded,
        [torch.from_numpy(head)[None] for head in made.actions],
        [torch.from_numpy(may)[None] for may in made.valid],
        exploration,
    )
    torch.testing.assert_close(found.log_prob[0], made.log_prob, rtol=0, atol=1e-5)


def test_what_was_valid_is_kept_with_the_decision(network, random_view):
    view = random_view(50, 1)
    made = decide(network, encode(network, 50, 4), view.masks, draws(50), SOME)
    for head in Head:
        np.testing.assert_array_equal(made.valid[head], choices(view.masks, head, made.actions.op, made.actions.slot))


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_decision_is_allowed(network, random_view, allowed, seed, greedy):
    view = random_view(100, seed)
    made = decide(network, encode(network, 100, 4), view.masks, None if greedy else draws(100), SOME)
    assert allowed(view.masks, made.actions)


def test_a_head_that_does_not_matter_is_0_and_adds_neither_probability_nor_entropy(network, random_view):
    view, encoded = random_view(100, 4), encode(network, 100, 4)
    made = decide(network, encoded, view.masks, draws(100), SOME)
    decisions = np.stack(made.actions)
    found = judged(network, encoded, view.masks, decisions, SOME)
    idle = ~RELEVANT[made.actions.op]
    assert not decisions.T[idle].any()
    assert not found.entropy[0].detach().numpy()[idle].any()
    assert not found.log_prob[0].detach().numpy()[~view.masks.op[:, 1:].any(1)].any()


def test_a_greedy_decision_is_the_most_probable_choice_of_every_head(network, random_view):
    view, encoded = random_view(60, 2), encode(network, 60, 4)
    actions = decide(network, encoded, view.masks, None, GREEDY).actions
    op, slot = (torch.from_numpy(x)[None] for x in actions[:2])
    for head in Head:
        logits = network.logits(head, encoded, op, slot)[0].detach().numpy()
        valid = choices(view.masks, head, actions.op, actions.slot)
        for env in range(60):
            if RELEVANT[actions.op[env], head]:
                open_ = np.flatnonzero(valid[env])
                assert actions[head][env] == open_[logits[env, open_].argmax()]


@either
def test_decisions_are_sampled_as_often_as_their_probability_says(network, view, exploration):
    envs = 8000
    masks = view([[Stage.HOLDING, Stage.DORMANT]], {Op.SET_ALPHA: [True, False], Op.GERMINATE: [False, True]}).masks
    encoded = encode(network, 1, 2)
    decisions = every_decision(masks)
    n = decisions.shape[1]
    expected = judged(network, only(encoded, 0, n), repeated(masks, 0, n), decisions, exploration).log_prob[0].exp()
    made = decide(network, only(encoded, 0, envs), repeated(masks, 0, envs), draws(envs), exploration).actions
    drawn, counts = np.unique(np.stack(made), axis=1, return_counts=True)
    count = {tuple(d): c for d, c in zip(drawn.T.tolist(), counts.tolist(), strict=True)}
    assert set(count) <= {tuple(d) for d in decisions.T.tolist()}
    seen = np.array([count.get(tuple(d), 0) for d in decisions.T.tolist()])
    hoped = envs * expected.double().detach().numpy()
    rare = hoped < 10  # too few for the limit law, so they are one cell
    seen, hoped = (np.append(x[~rare], x[rare].sum()) for x in (seen, hoped))
    assert ((seen - hoped) ** 2 / np.maximum(hoped, 1e-9)).sum() < chi2.ppf(0.999, len(hoped) - 1)


def test_the_smallest_draw_takes_the_first_valid_choice_and_the_largest_the_last(network, view):
    masks = view([[Stage.HOLDING] * 3], {Op.SET_ALPHA: [False, True, True]}).masks
    encoded = encode(network, 1, 3)
    for draw, last in ((0.0, False), (1 - 2.0**-53, True)):
        actions = decide(network, encoded, masks, np.full((len(Head), 1), draw), SOME).actions
        expected = Actions(*np.array([[Op.SET_ALPHA], [2], [0], [0], [4], [3]])) if last else Actions.wait(1)
        np.testing.assert_array_equal(np.stack(actions), np.stack(expected))


def test_the_smallest_draw_passes_over_what_is_not_valid(network, view):
    masks = view([[Stage.HOLDING] * 3], {Op.PRUNE: [False, True, True]}, doomed=True).masks
    op = masks.op.copy()
    op[0, Op.WAIT] = False
    actions = decide(network, encode(network, 1, 3), masks._replace(op=op), np.zeros((len(Head), 1)), SOME).actions
    assert (actions.op[0], actions.slot[0]) == (Op.PRUNE, 1)


def test_an_entropy_is_minus_the_sum_of_p_ln_p(network, random_view):
    view, encoded = random_view(30, 5), encode(network, 30, 4)
    made = decide(network, encoded, view.masks, draws(30), SOME)
    found = judged(network, encoded, view.masks, np.stack(made.actions), SOME).entropy[0].detach().numpy()
    op, slot = (torch.from_numpy(x)[None] for x in made.actions[:2])
    for head in Head:
        p = probabilities(network.logits(head, encoded, op, slot)[0], torch.from_numpy(made.valid[head]), SOME[head])
        for env, row in enumerate(p.detach().double().numpy()):
            if RELEVANT[made.actions.op[env], head]:
                assert found[env, head] == pytest.approx(-sum(x * np.log(x) for x in row if x > 0), abs=1e-5)


def test_gradients_are_finite_where_choices_are_not_valid_or_have_probability_0(network, random_view):
    view, encoded = random_view(40, 6), encode(network, 40, 4)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("head.2.weight"):
                parameter.mul_(1e4)
    made = decide(network, encoded, view.masks, None, GREEDY)
    found = judged(network, encoded, view.masks, np.stack(made.actions), GREEDY)
    (found.log_prob.sum() + found.entropy.sum()).backward()
    assert all(p.grad.isfinite().all() for p in network.parameters() if p.grad is not None)


def test_what_an_environment_decides_does_not_depend_on_the_others(network, random_view):
    view, encoded = random_view(20, 7), encode(network, 20, 4)
    together = decide(network, encoded, view.masks, draws(20), SOME)
    for env in (0, 7, 19):
        masks, drawn = take(view.masks, slice(env, env + 1)), draws(20)[:, env : env + 1]
        alone = decide(network, only(encoded, env, 1), masks, drawn, SOME)
        assert [head[0] for head in alone.actions] == [head[env] for head in together.actions]
        torch.testing.assert_close(alone.log_prob[0], together.log_prob[env], rtol=0, atol=1e-5)
