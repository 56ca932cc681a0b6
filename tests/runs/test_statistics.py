"""Estimates beside slow or independent versions of them; the golden numbers were computed with rliable 1.2.0."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu, trim_mean

from esper.runs.evaluation.statistics import (
    Interval,
    interquartile_mean,
    interval,
    mean,
    mean_difference,
    probability_of_improvement,
)

K = np.arange(20.0)
OURS = [
    (np.sin(K * K) * 0.1 + 0.5 + 0.02 * K)[None],
    (np.cos(3 * K + K * K) * 0.2 + 0.4)[None],
    (np.sin(K * 7 + 1) * 0.05 + 0.8)[None],
]
THEIRS = [
    (np.cos(K * K) * 0.12 + 0.55 + 0.015 * K)[None],
    (np.sin(5 * K + K * K) * 0.2 + 0.42)[None],
    np.round(np.sin(K * 7 + 1) * 0.05 + 0.78, 2)[None],
]
OURS[2][0, 3:6] = THEIRS[2][0, 3:6]
SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 5))


def scores(seed, *shape, decimals=8):
    return np.random.default_rng(seed).normal(size=shape).round(decimals)


def test_the_interquartile_mean_is_that_of_rliable():
    assert interquartile_mean(OURS) == pytest.approx(0.6633766984027659, abs=1e-12)


def test_the_probability_of_improvement_is_that_of_rliable():
    assert probability_of_improvement(OURS, THEIRS) == pytest.approx(0.5045833333333334, abs=1e-12)


def test_where_runs_are_resampled_the_interval_is_that_of_rliable_but_for_the_noise_of_drawing():
    found = interval(interquartile_mean, OURS, draws=20_000)
    assert found == pytest.approx(Interval(0.6633766984, 0.63139895, 0.69654597), abs=2e-3)


@given(SHAPES, st.integers(0, 2**31))
def test_the_interquartile_mean_is_a_mean_trimmed_by_a_quarter(shape, seed):
    values = [scores(seed, *shape), scores(seed + 1, *shape)]
    assert interquartile_mean(values) == pytest.approx(trim_mean(np.concatenate(values), 0.25, axis=None))


@given(SHAPES, st.integers(0, 2**31))
def test_the_probability_of_improvement_is_the_mann_whitney_statistic_averaged_over_problems(shape, seed):
    ours, theirs = scores(seed, *shape, decimals=1), scores(seed + 1, *shape, decimals=1)
    by_problem = [mannwhitneyu(a, b).statistic / len(a) ** 2 for a, b in zip(ours, theirs, strict=True)]
    assert probability_of_improvement([ours], [theirs]) == pytest.approx(np.mean(by_problem))


@given(SHAPES, st.integers(0, 2**31))
def test_one_of_two_is_better_or_they_are_level(shape, seed):
    a, b = [scores(seed, *shape, decimals=0)], [scores(seed + 1, *shape, decimals=0)]
    assert probability_of_improvement(a, b) + probability_of_improvement(b, a) == pytest.approx(1)
    assert probability_of_improvement(a, a) == 0.5


def test_every_task_has_the_same_weight():
    assert mean([np.zeros((2, 3)), np.ones((40, 2))]) == 0.5


def test_the_interval_of_a_mean_has_the_width_that_the_central_limit_gives_it():
    values = scores(0, 200, 3)
    low, high = interval(mean, [values])[1:]
    error = values.mean(1).std() / np.sqrt(200)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_of_several_tasks_the_variances_add():
    first, second = scores(0, 100, 2), 3 * scores(1, 60, 2)
    low, high = interval(mean, [first, second])[1:]
    error = np.sqrt(first.mean(1).var() / 100 + second.mean(1).var() / 60) / 2
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_runs_that_only_repeat_their_problem_add_no_certainty():
    once = scores(0, 30, 1)
    assert interval(mean, [np.tile(once, 4)]) == pytest.approx(interval(mean, [once]))


def test_of_one_problem_the_runs_are_resampled():
    runs = scores(0, 1, 30)
    assert interval(mean, [runs]) == pytest.approx(interval(mean, [runs.T]))


def test_the_bootstrap_is_that_of_a_loop_over_draws():
    values, random = scores(0, 7, 2), np.random.default_rng(5)
    drawn = [np.mean([values[index] for index in chosen]) for chosen in random.integers(7, size=(50, 7))]
    expected = Interval(values.mean(), *np.quantile(drawn, [0.025, 0.975]))
    assert interval(mean, [values], draws=50, seed=5) == pytest.approx(expected)


def test_controllers_are_resampled_together():
    values = scores(0, 20, 3)
    assert interval(mean_difference, [values + 0.5], [values]) == pytest.approx(Interval(0.5, 0.5, 0.5))


def test_of_what_was_not_measured_nothing_is_told():
    values = scores(0, 5, 2)
    values[3, 1] = np.nan
    assert np.isnan(interval(interquartile_mean, [values])).all()


def test_one_run_tells_nothing_of_its_spread():
    assert interval(mean, [np.ones((1, 1))]) == pytest.approx(Interval(1, np.nan, np.nan), nan_ok=True)


def test_controllers_that_were_not_grown_alike_are_not_compared():
    with pytest.raises(AssertionError, match="must be paired"):
        interval(mean_difference, [np.ones((3, 2))], [np.ones((2, 2))])


def test_statistics_of_many_draws_are_those_of_each():
    ours, theirs = scores(0, 4, 5, 3, decimals=1), scores(1, 4, 5, 3, decimals=1)
    for statistic, groups in (
        (mean, [ours]),
        (interquartile_mean, [ours]),
        (mean_difference, [ours, theirs]),
        (probability_of_improvement, [ours, theirs]),
    ):
        each = [statistic(*([group[draw]] for group in groups)) for draw in range(4)]
        np.testing.assert_allclose(statistic(*([group] for group in groups)), each)
