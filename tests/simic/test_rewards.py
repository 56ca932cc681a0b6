import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.simic.rewards import objective

counts = st.integers(0, 10_000)
fractions = st.floats(0, 1)


@given(fractions, st.integers(1, 10_000), fractions)
def test_a_host_that_added_nothing_is_worth_its_metric(metric, host, rent):
    assert objective(metric, 0, host, rent) == metric


@given(fractions, counts, st.integers(1, 10_000))
def test_without_rent_parameters_are_free(metric, added, host):
    assert objective(metric, added, host, 0.0) == metric


def test_doubling_the_network_costs_rent_times_the_logarithm_of_two():
    assert objective(0.9, 100, 100, 0.1) == pytest.approx(0.9 - 0.1 * math.log(2))


@given(fractions, counts, counts, st.integers(1, 10_000))
def test_of_two_equal_networks_the_smaller_is_worth_more(metric, first, second, host):
    small, large = sorted((first, second))
    assert objective(metric, small, host, 0.1) >= objective(metric, large, host, 0.1)


def test_environments_do_not_touch():
    metric, added, host = np.array([0.5, 0.9, np.nan]), np.array([0, 50, 7]), np.array([10, 100, 10])
    whole = objective(metric, added, host, 0.1)
    alone = [float(objective(m, a, h, 0.1)) for m, a, h in zip(metric, added, host, strict=True)]
    np.testing.assert_array_equal(whole, alone)
    assert np.isnan(whole[2])
