"""Test attribution: against all permutations, the axioms that name the values, and samples beside the exact values."""

from itertools import combinations, permutations
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.data.keys import scalar
from esper.leyline.lifecycle.view import CoalitionValues
from esper.tolaria.measure.coalitions import (
    SampledPermutations,
    attribute,
    banzhaf,
    half_width,
    interactions,
    sampled_coalitions,
    shapley,
    shapley_sampled,
)

PLAYERS = range(1, 7)


def game(n, envs=3, seed=0):
    """Draw values of every coalition, without structure."""
    return np.random.default_rng(seed + n).normal(size=(envs, 1 << n))


def mask(players):
    return sum(1 << i for i in players)


def without(n, *players):
    """List every coalition of the others."""
    others = [i for i in range(n) if i not in players]
    return [mask(some) for size in range(len(others) + 1) for some in combinations(others, size)]


def moved(values, n, change):
    """Reorder the players of a game: player i is now change[i]."""
    masks = [mask(change[i] for i in range(n) if coalition >> i & 1) for coalition in range(1 << n)]
    renamed = np.empty_like(values)
    renamed[:, masks] = values
    return renamed


@pytest.mark.parametrize("n", PLAYERS)
def test_a_shapley_value_is_what_a_player_adds_as_it_joins_averaged_over_all_orders(n):
    v = game(n)
    expected = np.zeros((len(v), n))
    for order in permutations(range(n)):
        for place, player in enumerate(order):
            before = mask(order[:place])
            expected[:, player] += (v[:, before | 1 << player] - v[:, before]) / factorial(n)
    np.testing.assert_allclose(shapley(v), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", PLAYERS)
def test_a_banzhaf_value_is_what_a_player_adds_averaged_over_all_coalitions_of_the_others(n):
    v = game(n)
    for i in range(n):
        expected = np.mean([v[:, t | 1 << i] - v[:, t] for t in without(n, i)], 0)
        np.testing.assert_allclose(banzhaf(v)[:, i], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", range(2, 6))
def test_an_interaction_is_what_a_pair_adds_beyond_its_parts_averaged_over_the_orders_in_which_it_joins_as_one(n):
    v = game(n)
    found = interactions(v)
    for i, j in combinations(range(n), 2):
        expected = np.zeros(len(v))
        pair = "pair"
        for order in permutations([pair, *(k for k in range(n) if k not in (i, j))]):
            t = mask(order[: order.index(pair)])
            both = v[:, t | 1 << i | 1 << j] - v[:, t | 1 << i] - v[:, t | 1 << j] + v[:, t]
            expected += both / factorial(n - 1)
        np.testing.assert_allclose(found[:, i, j], expected, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(found[:, j, i], found[:, i, j])


def test_the_interaction_of_two_players_is_what_both_add_beyond_each_alone():
    nothing, first, second, both = v = np.array([0.2, 0.3, 0.5, 0.9])
    found = interactions(v[None])[0]
    assert found[0, 1] == found[1, 0] == pytest.approx(both - first - second + nothing)
    assert np.isnan(np.diagonal(found)).all()


def test_one_player_alone_interacts_with_nobody():
    assert interactions(np.zeros((2, 2))).shape == (2, 1, 1)
    assert np.isnan(interactions(np.zeros((2, 2)))).all()


@pytest.mark.parametrize("n", [1, 2, 3, 6, 10])
def test_shapley_values_add_up_to_all_minus_none(n):
    v = game(n)
    np.testing.assert_allclose(shapley(v).sum(1), v[:, -1] - v[:, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("value", [shapley, banzhaf, interactions])
@given(n=st.integers(1, 6), data=st.data())
@settings(max_examples=30, deadline=None)
def test_renaming_the_players_renames_their_values(value, n, data):
    change = data.draw(st.permutations(range(n)))
    v = game(n)
    at = np.ix_(range(len(v)), *[change] * (value(v).ndim - 1))
    np.testing.assert_allclose(value(moved(v, n, change))[at], value(v), rtol=0, atol=1e-12)


@pytest.mark.parametrize("value", [shapley, banzhaf])
def test_players_that_do_the_same_are_worth_the_same(value):
    v = game(4)
    v = v + moved(v, 4, [0, 3, 2, 1])  # a game that does not change where 1 and 3 change places
    np.testing.assert_allclose(value(v)[:, 1], value(v)[:, 3], rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", range(2, 7))
def test_a_player_that_always_adds_the_same_is_worth_that_and_interacts_with_nobody(n):
    rest = game(n - 1)
    v = np.concatenate([rest, rest + 0.25], 1)  # the last player
    np.testing.assert_allclose(shapley(v)[:, -1], 0.25)
    np.testing.assert_allclose(banzhaf(v)[:, -1], 0.25)
    np.testing.assert_allclose(shapley(v)[:, :-1], shapley(rest), rtol=0, atol=1e-12)
    np.testing.assert_allclose(interactions(v)[:, -1, :-1], 0, atol=1e-12)


@pytest.mark.parametrize("value", [shapley, banzhaf, interactions])
@pytest.mark.parametrize("n", PLAYERS)
def test_values_are_linear_in_the_game(value, n):
    v, w = game(n), game(n, seed=50)
    np.testing.assert_allclose(value(2 * v - 3 * w), 2 * value(v) - 3 * value(w), rtol=0, atol=1e-11)


@pytest.mark.parametrize("value", [shapley, banzhaf, interactions])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_environments_do_not_touch(value, n):
    v = game(n, envs=7)
    v[3, 0] = np.nan
    whole = value(v)
    for e in range(len(v)):
        np.testing.assert_array_equal(value(v[e : e + 1])[0], whole[e])
    assert np.isnan(whole[3]).any()


def test_a_table_that_is_not_complete_is_refused():
    with pytest.raises(AssertionError, match="not complete"):
        shapley(np.zeros((2, 6)))


# Sampled.


@pytest.mark.parametrize("n", [2, 5, 8])
def test_each_coalition_is_asked_for_once_and_all_that_the_orders_pass_through_are(n):
    orders, masks = sampled_coalitions(n, 6, 4)
    everyone = (1 << n) - 1
    needed = {0, everyone} | {everyone ^ 1 << i for i in range(n)}
    for order in orders.tolist():
        assert sorted(order) == list(range(n))
        for direction in (order, order[::-1]):
            needed |= {mask(direction[:place]) for place in range(n + 1)}
    assert masks.tolist() == sorted(needed)


def test_orders_depend_on_the_key_alone_and_more_of_them_begin_with_fewer():
    few, many, other = (sampled_coalitions(7, pairs, draw).orders for pairs, draw in ((4, 1), (9, 1), (9, 2)))
    np.testing.assert_array_equal(many[:4], few)
    assert (many != other).any()


def estimate(v, n, pairs, draw):
    sampled = sampled_coalitions(n, pairs, draw)
    return shapley_sampled(v[:, sampled.masks], sampled)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_a_sampled_value_is_the_mean_over_the_orders_and_their_reverses(n):
    v, sampled = game(n), sampled_coalitions(n, 5, 3)
    found = shapley_sampled(v[:, sampled.masks], sampled)
    pairs = []
    for order in sampled.orders.tolist():
        added = np.zeros((2, len(v), n))
        for way, direction in enumerate((order, order[::-1])):
            for place, player in enumerate(direction):
                before = mask(direction[:place])
                added[way, :, player] = v[:, before | 1 << player] - v[:, before]
        pairs.append(added.mean(0))
    np.testing.assert_allclose(found.mean, np.mean(pairs, 0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.se, np.std(pairs, 0, ddof=1) / 5**0.5, rtol=0, atol=1e-12)
    assert found.measured.all()


@pytest.mark.parametrize("n", [5, 6, 10])
def test_sampled_values_add_up_to_all_minus_none(n):
    v = game(n)
    np.testing.assert_allclose(estimate(v, n, 8, 0).mean.sum(1), v[:, -1] - v[:, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [5, 6, 8])
def test_sampled_values_are_within_three_standard_errors_of_the_exact_ones(n):
    v = game(n, envs=40)
    found = estimate(v, n, 64, scalar(n))
    off = np.abs(found.mean - shapley(v)) / found.se
    assert (off < 3).mean() > 0.99
    assert np.median(off) == pytest.approx(0.67, abs=0.15)  # as far as a standard error says, and no nearer


@pytest.mark.parametrize("n", [5, 7])
def test_sampled_values_are_unbiased(n):
    v = game(n)
    means = np.stack([estimate(v, n, 4, draw).mean for draw in range(600)])
    error = np.abs(means.mean(0) - shapley(v)) / (means.std(0, ddof=1) / 600**0.5)
    assert (error < 4).all()


def test_where_players_do_not_interact_one_pair_of_orders_is_exact():
    worth = np.array([0.1, -0.2, 0.3, 0.0, 0.5])
    v = (np.arange(32)[:, None] >> np.arange(5) & 1) @ worth
    found = estimate(v[None], 5, 2, 0)
    np.testing.assert_allclose(found.mean[0], worth, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.se, 0, atol=1e-12)


def test_where_only_pairs_interact_an_order_and_its_reverse_are_exact():
    members = np.arange(64)[:, None] >> np.arange(6) & 1
    v = np.einsum("mi,ij,mj->m", members, np.random.default_rng(0).normal(size=(6, 6)), members)[None]
    np.testing.assert_allclose(estimate(v, 6, 2, 0).mean, shapley(v), rtol=0, atol=1e-12)


def test_environments_do_not_touch_when_sampled():
    v, sampled = game(6, envs=5), sampled_coalitions(6, 7, 2)
    v[2, sampled.masks[3]] = np.nan
    whole = shapley_sampled(v[:, sampled.masks], sampled)
    for e in range(5):
        alone = shapley_sampled(v[e : e + 1, sampled.masks], sampled)
        np.testing.assert_array_equal(alone.mean[0], whole.mean[e])
        np.testing.assert_array_equal(alone.se[0], whole.se[e])
    np.testing.assert_array_equal(whole.measured, ~np.isnan(whole.mean))
    assert not whole.measured[2].all()
    assert whole.measured[[0, 1, 3, 4]].all()


def test_a_sample_of_one_pair_has_no_standard_error_and_is_refused():
    with pytest.raises(AssertionError, match="two pairs"):
        sampled_coalitions(5, 1, 0)


def test_values_of_other_coalitions_than_those_asked_for_are_refused():
    sampled = sampled_coalitions(5, 2, 0)
    with pytest.raises(AssertionError):
        shapley_sampled(np.zeros((1, len(sampled.masks) + 1)), SampledPermutations(*sampled))


def saturating(n, envs=12, seed=0):
    """Make games in which every player mends a share of what the others leave wrong, as seeds that raise an accuracy do."""
    left = 1 - np.random.default_rng(seed + n).uniform(0, 0.5, size=(envs, 1, n))
    members = np.arange(1 << n)[:, None] >> np.arange(n) & 1
    return 1 - np.prod(np.where(members, left, 1.0), axis=2)


@pytest.mark.parametrize("make", [game, saturating])
@pytest.mark.parametrize("pairs", [2, 4, 8, 16])
def test_the_interval_of_a_sampled_value_covers_the_exact_one_in_95_percent(make, pairs):
    v = make(6, envs=12)
    exact, covered, two_errors = shapley(v), [], []
    for draw in range(120):
        found = estimate(v, 6, pairs, draw)
        off = np.abs(found.mean - exact) - 1e-12
        covered.append((off <= half_width(found.se, pairs)).mean())
        two_errors.append((off <= 2 * found.se).mean())
    assert np.mean(covered) > 0.94
    if pairs < 16:
        assert np.mean(two_errors) < 0.93, "two standard errors would do"
    if pairs >= 8:
        assert np.mean(covered) < 0.98, "wider than it says"


def test_an_attribution_has_its_half_width_from_the_standard_errors_and_none_where_it_is_exact():
    n, pairs, draw = 6, 5, 3
    sampled, full = sampled_coalitions(n, pairs, draw), game(n, envs=1)[0]
    few = np.array([0.0, 0.2, 0.1, 0.5])
    live = np.array([[True] * n, [True, True] + [False] * 4])
    table = CoalitionValues(
        step=1,
        draw=draw,
        live=live,
        env=np.repeat([0, 1], [len(sampled.masks), 4]),
        mask=np.concatenate([sampled.masks, np.arange(4)]),
        metric=np.concatenate([full[sampled.masks], few]),
        loss=np.zeros(len(sampled.masks) + 4),
    )
    found = attribute(table, pairs)
    np.testing.assert_array_equal(found.half_width[0], half_width(found.shapley.se[:1], pairs)[0])
    np.testing.assert_array_equal(found.half_width[1], [0, 0, np.nan, np.nan, np.nan, np.nan])
    quantile = 2.776  # of Student's t with 4 degrees of freedom
    np.testing.assert_allclose(half_width(np.full((1, 3), 0.1), 5), np.full((1, 3), quantile * 0.1), rtol=1e-3)
