"""Check that digests of examples are equal where the bytes are, and different elsewhere."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.data.duplicates import Overlap, example_digests, repeated


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
def test_examples_have_one_digest_if_and_only_if_they_are_equal(dtype):
    every = torch.tensor(list(itertools.product((0, 1), repeat=9))).to(dtype)  # an odd number of values
    x = torch.cat([every, every.flip(0)])
    digests = example_digests(x, torch.zeros(len(x)))
    assert torch.equal(digests[: len(every)], digests[len(every) :].flip(0))
    assert len(digests.unique()) == len(every)


def test_signs_that_cancel_in_a_sum_change_the_digest():
    x = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=8)), dtype=torch.float64)
    assert len(example_digests(x, torch.zeros(len(x))).unique()) == len(x)


@given(count=st.integers(0, 5), width=st.integers(0, 3))
def test_the_digest_of_an_example_does_not_depend_on_the_others(count, width):
    x = torch.arange(count * width * 2.0).view(count, width, 2)
    y = torch.arange(count)
    alone = [example_digests(x[at : at + 1], y[at : at + 1]) for at in range(count)]
    assert torch.equal(example_digests(x, y), torch.cat([torch.zeros(0, dtype=torch.int64), *alone]))


def test_the_target_and_every_leaf_belong_to_the_example():
    x = {"a": torch.tensor([1.0, 1, 2, 1]), "b": torch.tensor([1.0, 2, 1, 1])}
    assert len(example_digests(x, torch.tensor([0, 0, 0, 1])).unique()) == 4


def test_copies_in_later_sets_are_counted_once_for_each():
    sets = [torch.tensor(values) for values in ([1, 2, 3], [3, 4], [4, 4, 5])]
    assert repeated(sets) == [1, 2]


def test_an_overlap_counts_the_fixed_examples_that_were_shown():
    x, y = torch.randn(12, 3), torch.arange(12) % 2
    x[7], y[7] = x[1], y[1]
    overlap = Overlap([(x[:8], y[:8]), (x[8:], y[8:])])
    assert overlap.examples == 12
    overlap.show((torch.randn(5, 3), torch.zeros(5, dtype=torch.int64)))
    assert overlap.count() == 0
    for _ in range(2):
        overlap.show((x[[1, 9]], y[[1, 9]]))
    assert overlap.count() == 3  # example 7 is a copy of example 1
