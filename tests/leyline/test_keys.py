"""Test keyed randomness: the published hash, the same numbers in NumPy and torch, and what a key depends on."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.data.keys import Purpose, key, mix, permutations, permuted, scalar, uniform

CPU = torch.device("cpu")
GAMMA = 0x9E3779B97F4A7C15
INT64 = st.integers(-(2**63), 2**63 - 1)


def signed(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63


def obvious_mix(x: int) -> int:
    """Compute splitmix64 with Python's integers, cut to 64 bits."""
    z = (x + GAMMA) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_the_hash_gives_the_published_outputs_of_splitmix64_from_state_0():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]
    states = np.array([signed(k * GAMMA) for k in range(5)])
    assert mix(states).tolist() == [signed(x) for x in published]


@given(st.lists(INT64, min_size=1, max_size=50))
@settings(max_examples=100, deadline=None)
def test_the_hash_is_splitmix64_for_every_integer(values):
    assert mix(np.array(values)).tolist() == [signed(obvious_mix(value % 2**64)) for value in values]


@given(st.lists(INT64, min_size=1, max_size=50))
@settings(max_examples=100, deadline=None)
def test_numpy_and_torch_hash_alike(values):
    assert mix(np.array(values)).tolist() == mix(torch.tensor(values)).tolist()


def test_numpy_and_torch_sort_into_the_same_permutations():
    keys = key(0, Purpose.ORDER, np.arange(5))
    hashes = mix(torch.from_numpy(keys)[:, None] ^ mix(torch.arange(97))[None])
    assert torch.equal(permutations(keys, np.full(len(keys), 97), CPU), hashes.argsort(dim=1))


@given(keys=st.lists(INT64, min_size=1, max_size=5), length=st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_a_permutation_holds_every_index_once(keys, length):
    drawn = permutations(np.array(keys), np.full(len(keys), length), CPU)
    assert drawn.shape == (len(keys), length)
    assert drawn.dtype == torch.int64
    assert (drawn.sort(dim=1).values == torch.arange(length)).all()


def test_a_permutation_depends_on_its_own_key_alone():
    keys = key(3, np.arange(6))
    together = permutations(keys, np.full(6, 40), CPU)
    assert all(torch.equal(permutations(keys[i : i + 1], np.array([40]), CPU)[0], together[i]) for i in range(6))
    assert len({tuple(row.tolist()) for row in together}) == 6


def test_every_index_comes_first_about_equally_often():
    first = permutations(key(np.arange(8000)), np.full(8000, 8), CPU)[:, 0].bincount(minlength=8)
    assert (first - 1000).abs().max() < 150  # five standard deviations of a binomial


@given(st.integers(0, 2**40), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_a_key_depends_on_the_order_of_its_parts(a, b):
    assert (scalar(a, b) == scalar(b, a)) == (a == b)


def test_a_key_depends_on_every_part_and_on_how_many_there_are():
    drawn = [scalar(), scalar(0), scalar(0, 0), scalar(0, 0, 0), scalar(1, 0, 0), scalar(0, 1, 0), scalar(0, 0, 1)]
    assert len(set(drawn)) == len(drawn)


def test_a_key_of_arrays_is_the_key_of_each_of_their_elements():
    rows, columns = np.arange(3)[:, None], np.arange(4)
    table = key(7, rows, columns)
    assert table.shape == (3, 4)
    assert all(table[i, j] == key(7, i, j)[0] for i in range(3) for j in range(4))


def test_every_purpose_has_a_stream_of_its_own():
    assert len({scalar(0, purpose, 0) for purpose in Purpose}) == len(Purpose)


def test_the_values_of_purposes_are_those_that_keys_were_made_with():
    used = {"HOST": 1, "BIRTH": 2, "ORDER": 3, "POLICY": 4, "DROPOUT": 5, "SPLIT": 6, "SENSOR": 7}
    assert used.items() <= {purpose.name: purpose.value for purpose in Purpose}.items()


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_scalar_key_seeds_a_generator(parts):
    assert 0 <= scalar(*parts) < 2**63
    torch.Generator().manual_seed(scalar(*parts))


@given(st.lists(INT64, min_size=1, max_size=50))
@settings(max_examples=60, deadline=None)
def test_uniform_draws_lie_in_0_to_1_and_1_is_left_out(keys):
    drawn = uniform(np.array(keys))
    assert (drawn >= 0).all()
    assert (drawn < 1).all()


def test_a_uniform_draw_is_the_upper_53_bits_of_the_hash():
    assert uniform(np.arange(4)).tolist() == [(obvious_mix(i) >> 11) * 2.0**-53 for i in range(4)]


def test_uniform_draws_have_the_moments_of_a_uniform():
    drawn = uniform(key(11, np.arange(100_000)))
    assert drawn.mean() == pytest.approx(1 / 2, abs=0.005)
    assert drawn.var() == pytest.approx(1 / 12, abs=0.002)


def test_a_permutation_does_not_depend_on_how_long_others_are():
    keys = key(3, np.arange(4))
    mixed = permutations(keys, np.array([5, 40, 12, 1]), CPU)
    for row, size in enumerate((5, 40, 12, 1)):
        alone = permutations(keys[row : row + 1], np.array([size]), CPU)[0]
        assert torch.equal(mixed[row, :size], alone)
        assert sorted(alone.tolist()) == list(range(size))


@given(st.integers(1, 300), INT64)
@settings(max_examples=60, deadline=None)
def test_a_computed_permutation_takes_every_index_to_another(size, seed):
    assert sorted(permuted(key(seed), size, np.arange(size)).tolist()) == list(range(size))


def test_computed_permutations_are_those_of_each_key_and_index_alone():
    keys, index = key(np.arange(3))[:, None], np.array([0, 5, 99_999])
    together = permuted(keys, 100_000, index)
    assert all(together[i, j] == permuted(keys[i], 100_000, index[j : j + 1])[0] for i in range(3) for j in range(3))


def test_the_images_of_two_indices_are_uniform_and_independent_over_keys():
    keys, cells, size = key(np.arange(40_000)), 20, 70_000
    images = [permuted(keys, size, np.array(index)) for index in (0, 1, 264, 265, size - 1)]
    for one, other in itertools.combinations(images, 2):
        counts = np.histogram2d(one, other, bins=cells, range=[[0, size]] * 2)[0]
        expected = len(keys) / cells**2
        chi_square = ((counts - expected) ** 2 / expected).sum()  # 399 degrees of freedom: 399 +- 28
        assert 399 - 5 * 28 < chi_square < 399 + 5 * 28
