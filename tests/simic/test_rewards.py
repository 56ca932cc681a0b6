import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from esper.kasmina.lifecycle import dormant
from esper.leyline.config.tree import RewardConfig
from esper.leyline.lifecycle.view import Estimate, Outcome, Scores
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, LIVE, Actions, Op, Refusal, Stage
from esper.leyline.messages import InputError
from esper.leyline.protocols import Reward
from esper.simic.rewards import (
    Delta,
    Escrow,
    Sparse,
    StatefulReward,
    delta,
    get_reward,
    make_reward,
    objective,
    paid,
    total,
    worth,
)
from esper.tamiyo.rules.base import Never, RandomValid
from esper.tolaria.engine import VectorizedEngine
from populations import blobs, small_config

NAMES = ("delta", "sparse", "escrow")
STATEFUL = ("sparse", "escrow")
counts = st.integers(0, 10_000)
fractions = st.floats(0, 1)
HOSTS = np.array([100, 250])
ENVS, SLOTS = 2, 3


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (
            3.0,
            "the reward pay returned a float; return a dict from names to arrays of shape (2,), one finite number for each",
        ),
        ({}, "the reward pay returned no components; return a dict"),
        ({1: np.zeros(2)}, "the reward pay returned a dict; return a dict from names"),
        ({"rise": 0.5}, "the reward pay returned 'rise' of shape (); return"),
        ({"rise": np.zeros((2, 1))}, "the reward pay returned 'rise' of shape (2, 1); return"),
        ({"rise": [1.0, None]}, "the reward pay returned 'rise' as nan for environment 1 at step 0; return"),
        ({"rise": ["a", "b"]}, "the reward pay returned 'rise' as a list; return"),
        ({"rise": np.array([np.inf, 0])}, "the reward pay returned 'rise' as inf for environment 0 at step 0; return"),
        ({"governor": np.zeros(2)}, "the reward pay returned a component 'governor', the name of the penalty for"),
    ],
    ids=str,
)
def test_what_a_reward_of_ones_own_returns_is_checked_at_every_step(returned, sentence):
    def pay(outcome):
        return returned

    pay.__qualname__ = "pay"
    with pytest.raises(InputError) as caught:
        paid(pay, outcome(scores([0.1, 0.2]), scores([0.3, 0.2])), 0.5)
    assert str(caught.value).startswith(sentence)


@given(fractions, st.integers(1, 10_000), fractions)
def test_a_host_that_added_nothing_is_worth_its_metric(metric, host, rent):
    assert objective(metric, 0, host, rent, 0) == metric


@given(fractions, counts, st.integers(1, 10_000))
def test_without_rent_parameters_are_free(metric, added, host):
    assert objective(metric, added, host, 0.0, 0) == metric


def test_doubling_the_network_costs_rent_times_the_logarithm_of_two():
    assert objective(0.9, 100, 100, 0.1, 0) == pytest.approx(0.9 - 0.1 * math.log(2))


@given(fractions, counts, counts, st.integers(1, 10_000))
def test_of_two_equal_networks_the_smaller_is_worth_more(metric, first, second, host):
    small, large = sorted((first, second))
    assert objective(metric, small, host, 0.1, 0) >= objective(metric, large, host, 0.1, 0)


def test_environments_do_not_touch():
    metric, added, host = np.array([0.5, 0.9, np.nan]), np.array([0, 50, 7]), np.array([10, 100, 10])
    whole = objective(metric, added, host, 0.1, 0)
    alone = [float(objective(m, a, h, 0.1, 0)) for m, a, h in zip(metric, added, host, strict=True)]
    np.testing.assert_array_equal(whole, alone)
    assert np.isnan(whole[2])


# Rewards of outcomes made by hand.


def scores(metric, added=(0, 0), loss=None):
    metric = np.array(metric, np.float64)
    return Scores(metric, 1 - metric if loss is None else np.array(loss, np.float64), np.array(added))


def outcome(before, after, *, step=0, ops=(0, 0), accepted=(True, True), exported=None, twin=None):
    nothing = Actions.wait(ENVS)
    absent = Estimate.absent(ENVS, SLOTS)
    return Outcome(
        episode=0,
        step=step,
        actions=nothing._replace(op=np.array(ops)),
        refused=np.where(accepted, Refusal.NONE, Refusal.MASKED).astype(np.int8),
        vital=np.zeros(ENVS, np.int8),
        before=before,
        after=after,
        host_params=HOSTS,
        terminal=exported is not None,
        exported=exported,
        seeds=dormant(ENVS, SLOTS),
        contribution=absent,
        contribution_loss=absent,
        twin=twin,
    )


def episode(path, twins, ops, accepted):
    """Make outcomes of scores at 0 .. T, the last of which are those of the exported networks."""
    live = [*path[:-1], path[0]]  # what the live network is worth at the end must not matter
    return [
        outcome(
            live[t],
            live[t + 1],
            step=t,
            ops=ops[t],
            accepted=accepted[t],
            exported=path[-1] if t == len(path) - 2 else None,
            twin=(twins[t], twins[t + 1]),
        )
        for t in range(len(path) - 1)
    ]


def played(reward, outcomes):
    return [reward(each) for each in outcomes]


paths = st.integers(1, 6).flatmap(
    lambda steps: st.tuples(
        st.lists(st.tuples(*[fractions] * 4, *[counts] * 2), min_size=steps + 1, max_size=steps + 1),
        arrays(np.int64, (steps, ENVS), elements=st.integers(0, len(Op) - 1)),
        arrays(bool, (steps, ENVS)),
    )
)
reward_configs = st.builds(
    RewardConfig,
    objective=st.sampled_from(("metric", "log_loss")),
    rent=fractions,
    relative_to=st.sampled_from(("none", "twin", "group")),
    param_budget=st.none() | st.floats(0, 3),
    sparse_reward_scale=st.just(1.0),
    fees=st.dictionaries(st.sampled_from([op.name.lower() for op in Op]), fractions),
)


@given(paths, reward_configs)
@settings(deadline=None)
def test_rewards_telescope_to_the_rise_of_the_worth_less_the_fees(drawn, config):
    rows, ops, accepted = drawn
    path = [scores(row[0:2], row[4:6]) for row in rows]
    twins = [scores(row[2:4]) for row in rows]
    first, last = (total(worth(path[end], HOSTS, config)) for end in (0, -1))
    expected = last - first
    if config.relative_to == "twin":
        expected -= total(worth(twins[-1], HOSTS, config)) - total(worth(twins[0], HOSTS, config))
    for op, price in config.fees.items():
        expected -= price * ((ops == Op[op.upper()]) & accepted).sum(0)
    outcomes = episode(path, twins, ops, accepted)
    for name in NAMES:  # no seed is kept here, so that escrow pays nothing
        earned = sum(map(total, played(get_reward(config.model_copy(update={"name": name})), outcomes)))
        np.testing.assert_allclose(earned, expected, atol=1e-9)


@functools.cache
def random_run(seed, episodes=1):
    """Play random valid decisions through the engine, and return the outcomes."""
    quick = {"lifecycle": {"auto_advance": True, "tempos": [0, 1], "embargo": 0}, "gates": {"min_holding_steps": 0}}
    config = small_config(quick, seed=seed, twin=True, steps=12)
    engine, client, outcomes = VectorizedEngine(blobs(), config), RandomValid(), []
    for _ in range(episodes):
        view = engine.reset()
        while view.step < config.steps:
            view, result = engine.step(client.act(view))
            outcomes.append(result)
    return outcomes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("objective_name", ["metric", "log_loss"])
def test_rewards_of_random_decisions_telescope_through_the_engine(seed, objective_name):
    outcomes = random_run(seed)
    config = RewardConfig(objective=objective_name, fees={"germinate": 0.01, "prune": 0.02})
    first, last = (
        total(worth(s, outcomes[0].host_params, config)) for s in (outcomes[0].before, outcomes[-1].exported)
    )
    ops = np.array([each.actions.op * each.accepted for each in outcomes])
    expected = last - first - 0.01 * (ops == Op.GERMINATE).sum(0) - 0.02 * (ops == Op.PRUNE).sum(0)
    assert (ops == Op.FOSSILIZE).any(), "or this shows little"
    assert (ops == Op.PRUNE).any(), "or this shows little"
    for reward in (Delta(config), Sparse(config)):
        np.testing.assert_allclose(sum(map(total, played(reward, outcomes))), expected, atol=1e-12)
    parts = played(Escrow(config), outcomes)
    paid = sum(part["escrow"] for part in parts)
    assert paid.any() or objective_name == "metric", "or this shows little"
    np.testing.assert_allclose(sum(map(total, parts)), expected + paid, atol=1e-12)


@given(fractions, counts, st.integers(1, 10_000), fractions)
def test_without_a_budget_the_parts_of_a_worth_sum_to_the_objective(metric, added, host, rent):
    config = RewardConfig(rent=rent)
    parts = worth(scores([metric], [added]), np.array([host]), config)
    assert set(parts) == {"metric", "rent", "budget"}
    np.testing.assert_allclose(total(parts), objective(metric, added, host, rent, config.rent_size), atol=1e-15)


def test_a_reward_names_its_components():
    step = outcome(scores([0.1, 0.2]), scores([0.3, 0.2]), twin=(scores([0.1, 0.1]), scores([0.1, 0.2])))
    plain = {"metric", "rent", "budget", "fees"}
    assert set(get_reward(RewardConfig())(step)) == plain
    assert set(get_reward(RewardConfig(name="sparse"))(step)) == plain
    assert set(get_reward(RewardConfig(name="escrow", relative_to="twin"))(step)) == plain | {"twin", "escrow"}


@pytest.mark.parametrize("name", NAMES)
def test_every_reward_keeps_the_protocol(name):
    reward: Reward = get_reward(RewardConfig(name=name))
    assert isinstance(reward, StatefulReward) == (name in STATEFUL)


def test_log_loss_pays_for_minus_the_loss():
    step = outcome(scores([0.5, 0.5], loss=[2.0, 1.0]), scores([0.5, 0.5], loss=[1.5, 1.25]))
    np.testing.assert_array_equal(delta(step, RewardConfig(objective="log_loss"))["metric"], [0.5, -0.25])


def test_parameters_cost_their_rent_when_they_come_and_give_it_back_when_they_go():
    config = RewardConfig(rent=0.2)
    come = delta(outcome(scores([0.5, 0.5]), scores([0.5, 0.5], [100, 0])), config)["rent"]
    go = delta(outcome(scores([0.5, 0.5], [100, 0]), scores([0.5, 0.5])), config)["rent"]
    np.testing.assert_allclose(come, [-0.2 * math.log(2), 0])
    np.testing.assert_array_equal(come, -go)


def test_parameters_above_the_budget_cost_in_proportion():
    config = RewardConfig(rent=0, param_budget=0.5, param_penalty_weight=0.3)
    for added, penalty in ((0, 0), (50, 0), (100, 0.15), (150, 0.3)):
        assert total(worth(scores([0.0], [added]), HOSTS[:1], config))[0] == pytest.approx(-penalty)


def test_a_fee_is_charged_for_what_was_accepted_alone():
    config = RewardConfig(fees={"prune": 0.1, "wait": 0.01})
    same = scores([0.5, 0.5])
    np.testing.assert_array_equal(delta(outcome(same, same, ops=(Op.PRUNE, Op.WAIT)), config)["fees"], [-0.1, -0.01])
    refused = outcome(same, same, ops=(Op.PRUNE, 99), accepted=(False, False))
    np.testing.assert_array_equal(delta(refused, config)["fees"], [0, 0])


def test_sparse_pays_nothing_before_the_end_and_then_the_scaled_rise():
    a, b, c = (scores([m, 0.5]) for m in (0.2, 0.9, 0.6))
    reward = Sparse(RewardConfig(name="sparse", sparse_reward_scale=10))
    parts = played(reward, [outcome(a, b), outcome(b, c, step=1), outcome(c, a, step=2, exported=b)])
    assert [total(part).tolist() for part in parts[:2]] == [[0, 0], [0, 0]]
    np.testing.assert_allclose(total(parts[2]), [7, 0])


def test_a_population_that_never_grows_earns_nothing_beyond_its_twins():
    config = small_config(twin=True)
    engine, client = VectorizedEngine(blobs(), config), Never()
    rewards = [get_reward(RewardConfig(name=name, relative_to="twin")) for name in NAMES]
    view = engine.reset()
    while view.step < config.steps:
        view, result = engine.step(client.act(view))
        for reward in rewards:
            np.testing.assert_array_equal(total(reward(result)), 0)


def test_the_twin_as_baseline_asks_for_twins():
    with pytest.raises(InputError, match="set twin to true"):
        delta(outcome(scores([0, 0]), scores([0, 0])), RewardConfig(relative_to="twin"))


def test_the_group_as_baseline_leaves_the_reward_alone():
    step = outcome(scores([0.1, 0.2]), scores([0.3, 0.2]))
    plain, group = (total(delta(step, RewardConfig(relative_to=name))) for name in ("none", "group"))
    np.testing.assert_array_equal(plain, group)


@pytest.mark.parametrize("name", NAMES)
def test_a_metric_that_was_not_measured_makes_that_environments_return_nan(name):
    a, b, c = scores([0.2, 0.2]), scores([np.nan, 0.4]), scores([0.3, 0.5])
    parts = played(get_reward(RewardConfig(name=name)), [outcome(a, b), outcome(b, c, step=1, exported=c)])
    earned = sum(map(total, parts))
    assert np.isnan(earned[0])
    assert earned[1] == pytest.approx(0.3)


@pytest.mark.parametrize("name", STATEFUL)
def test_an_episode_begins_anew(name):
    outcomes = random_run(0, episodes=2)
    second = outcomes[len(outcomes) // 2 :]
    config = RewardConfig(name=name, objective="log_loss")
    after = played(get_reward(config), outcomes)[len(second) :]
    for got, fresh in zip(after, played(get_reward(config), second), strict=True):
        np.testing.assert_array_equal(total(got), total(fresh))


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("cut", [0, 5, 11])
def test_a_reward_that_is_saved_and_loaded_goes_on_as_if_nothing_had_been(name, cut):
    outcomes, config = random_run(1), RewardConfig(name=name, objective="log_loss")
    straight = played(get_reward(config), outcomes)
    first, second = get_reward(config), get_reward(config)
    assert isinstance(first, StatefulReward)
    assert isinstance(second, StatefulReward)
    played(first, outcomes[:cut])
    second.load_state(first.state())
    for got, expected in zip(played(second, outcomes[cut:]), straight[cut:], strict=True):
        np.testing.assert_array_equal(total(got), total(expected))


def test_a_restarted_environment_is_paid_from_there_on_and_the_others_as_before():
    a, b, c = (scores([m, m]) for m in (0.2, 0.5, 0.6))
    reward = Sparse(RewardConfig(name="sparse"))
    reward(outcome(a, b))
    reward.restart(np.array([True, False]))
    np.testing.assert_allclose(total(reward(outcome(b, c, step=1, exported=c))), [0.1, 0.4])


def test_a_nan_before_a_restart_is_forgotten():
    reward = Sparse(RewardConfig(name="sparse"))
    reward(outcome(scores([0.2, 0.2]), scores([np.nan, 0.3])))
    reward.restart(np.array([True, False]))
    last = scores([0.5, 0.5])
    np.testing.assert_allclose(total(reward(outcome(scores([0.4, 0.3]), last, step=1, exported=last))), [0.1, 0.3])


# Escrow.

T, G, N, B, H, F, D = (
    Stage.TRAINING,
    Stage.GERMINATED,
    Stage.DORMANT,
    Stage.BLENDING,
    Stage.HOLDING,
    Stage.FOSSILIZED,
    Stage.EMBARGOED,
)


def accounts(stages, contributions, path):
    """Return the last account and the pay of stages (steps, E, S), contributions likewise, and worths (steps + 1, E)."""
    stages, contributions, path = np.array(stages, np.int8), np.array(contributions, float), np.array(path, float)
    reward, pays = Escrow(RewardConfig(name="escrow")), []
    for t, stage in enumerate(stages):
        terminal = t == len(stages) - 1
        pays.append(reward.pay(stage, contributions[t], path[t], path[t + 1], terminal=terminal))
    return reward.state(), np.stack(pays)


def one_seed(stages, contributions, path):
    """Return what is paid for one slot of one environment."""
    _, paid = accounts(np.array(stages)[:, None, None], np.array(contributions)[:, None, None], np.array(path)[:, None])
    return float(paid.sum())


NOT = np.nan


def test_escrow_pays_the_contribution_of_a_seed_that_is_kept():
    paid = one_seed([T, B, H, F, F], [NOT, 0.1, 0.3, NOT, NOT], [0.1, 0.1, 0.3, 0.8, 0.8, 0.8])
    assert paid == pytest.approx(0.3)


def test_escrow_pays_at_most_the_rise_since_germination():
    paid = one_seed([N, T, B, H, F, F], [NOT, NOT, 0.1, 0.3, NOT, NOT], [0.1, 0.4, 0.4, 0.4, 0.5, 0.5, 0.9])
    assert paid == pytest.approx(0.1)


def test_escrow_pays_nothing_where_the_network_did_not_gain():
    assert one_seed([T, B, H, F], [NOT, 0.1, 0.3, NOT], [0.5, 0.5, 0.5, 0.4, 0.4]) == 0


def test_escrow_pays_nothing_for_a_pruned_seed():
    assert one_seed([T, B, H, D, N], [NOT, 0.1, 0.3, NOT, NOT], [0, 0.2, 0.4, 0.6, 0.8, 1]) == 0


def test_escrow_pays_nothing_for_a_seed_that_is_unfinished_at_the_end():
    assert one_seed([T, B, H, H], [NOT, 0.1, 0.3, 0.5], [0, 0.2, 0.4, 0.6, 0.8]) == 0


def test_escrow_charges_for_keeping_a_seed_that_harms():
    assert one_seed([T, B, H, F], [NOT, 0.1, -0.2, NOT], [0, 0.2, 0.4, 0.6, 0.8]) == pytest.approx(-0.2)


def test_a_live_seed_that_was_not_measured_keeps_its_credit():
    assert one_seed([T, B, H, F], [NOT, 0.2, NOT, NOT], [0, 0.2, 0.4, 0.6, 0.8]) == pytest.approx(0.2)


def test_two_seeds_that_came_together_are_not_both_paid_for_one_rise():
    stages = [[[T, T]], [[H, H]], [[F, H]], [[F, F]]]
    contributions = [[[NOT, NOT]], [[0.5, 0.5]], [[NOT, 0.5]], [[NOT, NOT]]]
    _, paid = accounts(stages, contributions, [[0.2], [0.2], [0.9], [0.9], [0.9]])
    np.testing.assert_allclose(paid.sum(0), [[0.5, 0.2]])


def test_a_rise_that_makes_up_for_a_fall_is_not_paid_for_again():
    stages = [T, H, F, N, T, H, F]
    _, paid = accounts(
        np.array([[[s, F if t > 2 else s] for t, s in enumerate(stages)]]).transpose(1, 0, 2),
        np.full((7, 1, 2), 0.6),
        np.array([[0.2, 0.2, 0.8, 0.8, 0.3, 0.3, 0.8, 0.8]]).T,
    )
    assert paid.sum() == pytest.approx(0.6)


stage_paths = st.integers(1, 12).flatmap(
    lambda steps: st.tuples(
        arrays(np.int8, (steps, ENVS, SLOTS), elements=st.sampled_from([N, G, T, B, H, F, D]).map(int)),
        arrays(np.float64, (steps, ENVS, SLOTS), elements=st.floats(-1, 1) | st.just(np.nan)),
        arrays(np.float64, (steps + 1, ENVS), elements=fractions),
    )
)


@given(stage_paths)
@settings(deadline=None)
def test_every_account_is_closed_at_the_end(drawn):
    account, _ = accounts(*drawn)
    assert not account["credit"].any()
    assert np.isnan(account["entry"]).all()


@given(stage_paths)
@settings(deadline=None)
def test_escrow_pays_no_more_than_the_largest_worth_less_the_first(drawn):
    _, paid = accounts(*drawn)
    assert (np.maximum(paid, 0).sum((0, 2)) <= drawn[2].max(0) - drawn[2][0] + 1e-12).all()


def slow_accounts(stages, contributions, path):
    """Compute the pay of one environment, by slot, from accounts as a person would keep them."""
    paid_up, books, paid = path[0], {}, [0.0] * stages.shape[1]
    for t, row in enumerate(stages):
        for slot, stage in enumerate(row):
            if slot not in books and stage in IN_BUDGET and stage != F:
                books[slot] = {"entry": path[t], "credit": 0.0, "new": True}
            book = books.get(slot)
            if book is None:
                continue
            if stage in LIVE and not math.isnan(contributions[t, slot]):
                book["credit"] = contributions[t, slot]
            if stage == F:
                base = max(book["entry"], paid_up)
                pay = min(book["credit"], max(path[t + 1] - base, 0.0))
                paid[slot] += pay
                paid_up = base + pay if pay > 0 else paid_up
            if stage == F or stage not in IN_BUDGET:
                del books[slot]
    return paid


@given(stage_paths)
@settings(deadline=None)
def test_escrow_is_the_accounts_of_each_environment_alone(drawn):
    _, paid = accounts(*drawn)
    for env in range(ENVS):
        expected = slow_accounts(drawn[0][:, env], drawn[1][:, env], drawn[2][:, env])
        np.testing.assert_allclose(paid[:, env].sum(0), expected, atol=1e-12)


def test_a_restarted_environment_has_no_account_left():
    live = dormant(ENVS, SLOTS)._replace(stage=np.full((ENVS, SLOTS), H, np.int8))
    kept = live._replace(stage=np.full((ENVS, SLOTS), F, np.int8))
    measured = Estimate(np.full((ENVS, SLOTS), 0.1), np.zeros((ENVS, SLOTS)), np.ones((ENVS, SLOTS), bool))
    reward = Escrow(RewardConfig(name="escrow"))
    reward(outcome(scores([0, 0]), scores([0.5, 0.5]))._replace(seeds=live, contribution=measured))
    reward.restart(np.array([True, False]))
    last = scores([0.9, 0.9])
    step = outcome(scores([0.5, 0.5]), last, step=1, exported=last)._replace(seeds=kept)
    np.testing.assert_allclose(reward(step)["escrow"], [0, 0.3])


def test_escrow_measures_contributions_in_the_unit_of_its_objective():
    live = dormant(ENVS, SLOTS)._replace(stage=np.full((ENVS, SLOTS), H, np.int8))
    shape = (ENVS, SLOTS)
    by_metric, by_loss = (Estimate(np.full(shape, c), np.zeros(shape), np.ones(shape, bool)) for c in (0.1, 0.7))
    step = outcome(scores([0, 0]), scores([0.5, 0.5]))._replace(
        seeds=live, contribution=by_metric, contribution_loss=by_loss
    )
    for name, credit in (("metric", 0.1), ("log_loss", 0.7)):
        reward = Escrow(RewardConfig(name="escrow", objective=name))
        reward(step)
        np.testing.assert_array_equal(reward.state()["credit"], np.full(shape, credit))


def test_a_function_that_takes_no_config_makes_no_reward():
    def nothing():
        raise AssertionError("it is not called")

    with pytest.raises(InputError, match="the reward nothing cannot be called with one argument; give a function that"):
        make_reward(nothing, RewardConfig())
