import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from esper.leyline.messages import InputError
from esper.tasks.splits import Splits, check_examples, check_targets, cut, dealt, scaling_of, sizes_of

N, SIZES = 120, (60, 25, 15, 20)


def examples(count: int = N) -> tuple[Tensor, Tensor]:
    """Make examples whose first feature numbers them, of three classes in unequal shares."""
    x = torch.stack([torch.arange(float(count)), torch.randn(count)], 1)
    return x, torch.arange(count) % 6 % 5 % 3


def split(x: Tensor, y: Tensor, *, sizes: Sequence[int], seed: int) -> Splits:
    return cut(x, y, dealt(y, sizes, seed))


def test_splits_are_disjoint_and_cover_every_example() -> None:
    x, y = examples()
    splits = split(x, y, sizes=SIZES, seed=0)
    numbers = torch.cat([part.x[:, 0] for part in splits])
    assert torch.equal(numbers.sort().values, x[:, 0])
    assert tuple(len(part.x) for part in splits) == SIZES


def test_an_example_keeps_its_label() -> None:
    x, y = examples()
    for part in split(x, y, sizes=SIZES, seed=0):
        assert torch.equal(part.y, y[part.x[:, 0].long()])


def test_splits_share_no_storage_with_each_other_or_their_source() -> None:
    x, y = examples()
    splits = split(x, y, sizes=SIZES, seed=0)
    held = [t.untyped_storage() for t in (x, y, *(t for part in splits for t in part))]
    spans = sorted((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in {s.data_ptr(): s for s in held}.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for part in splits:  # no split's storage holds more than the split
        assert part.x.untyped_storage().nbytes() == part.x.numel() * part.x.element_size()
        assert part.y.untyped_storage().nbytes() == part.y.numel() * part.y.element_size()


def test_one_seed_gives_one_split_and_another_seed_another() -> None:
    x, y = examples()
    first, again, other = (split(x, y, sizes=SIZES, seed=seed) for seed in (4, 4, 5))
    assert all(torch.equal(a.x, b.x) and torch.equal(a.y, b.y) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.train.x, other.train.x)


@settings(max_examples=30, deadline=None)
@given(labels=st.lists(st.integers(0, 3), min_size=40, max_size=90), seed=st.integers(0, 2**62))
def test_every_split_has_its_share_of_every_class(labels: list[int], seed: int) -> None:
    y = torch.tensor(labels)
    sizes = sizes_of((0.5, 0.2, 0.1, 0.2), len(y))
    whole = np.bincount(labels, minlength=4) / len(y)
    for part in split(torch.randn(len(y), 1), y, sizes=sizes, seed=seed):
        assert np.abs(np.bincount(part.y, minlength=4) - whole * len(part.y)).max() <= 3


@given(parts=st.lists(st.integers(1, 50), min_size=4, max_size=4), count=st.integers(0, 10_000))
def test_sizes_sum_to_the_examples_and_are_within_one_of_their_fraction(parts: list[int], count: int) -> None:
    fractions = [part / sum(parts) for part in parts]
    sizes = sizes_of(fractions, count)
    assert sum(sizes) == count
    assert all(abs(size - fraction * count) <= 1 for size, fraction in zip(sizes, fractions, strict=True))


def test_scaling_is_that_of_scikit_learns_standard_scaler() -> None:
    x, y = examples()
    splits = split(x, y, sizes=SIZES, seed=0)
    scaler, scaling = StandardScaler().fit(splits.train.x.numpy()), scaling_of(splits.train.x)
    for part in splits:
        np.testing.assert_allclose(scaling.read(part.x), scaler.transform(part.x.numpy()), rtol=1e-4, atol=1e-5)


def test_a_feature_that_is_constant_in_the_train_split_is_only_centred() -> None:
    x, y = examples()
    x[:, 1] = 0.1
    splits = split(x, y, sizes=SIZES, seed=0)
    splits.test.x[0, 1] = 2.1
    scaling = scaling_of(splits.train.x)
    torch.testing.assert_close(scaling.read(splits.train.x)[:, 1], torch.zeros(SIZES[0]), rtol=0, atol=1e-6)
    assert scaling.read(splits.test.x)[0, 1].item() == pytest.approx(2.0)


def nan_at(*rows: int) -> Tensor:
    x, _ = examples()
    x[list(rows), 1] = torch.nan
    return x


X, Y = examples()
T = X[:, :1].clone()


@pytest.mark.parametrize(
    ("x", "y", "classes", "sentence"),
    [
        (X, Y[:50], 3, "x holds 120 examples and y 50; give one label or target per example"),
        (X[0, 0], Y, 3, "x has shape (); give at least one feature per example, as in (N, D)"),
        (X[:, 0], Y, 3, "x has shape (120,); give at least one feature per example, as in (N, D)"),
        (X[:, :0], Y, 3, "x has shape (120, 0); give at least one feature per example, as in (N, D)"),
        (
            nan_at(7),
            Y,
            3,
            "x holds NaN or infinite values, in example 7 (1 of 120); drop those examples, fill in the values with "
            "preprocess=SimpleImputer().fit(the training rows of x) of scikit-learn (`esper docs tasks`), or",
        ),
        (
            nan_at(*range(3, 10)),
            Y,
            3,
            "x holds NaN or infinite values, in examples 3, 4, 5, 6, 7, ... (7 of 120); "
            "drop those examples, fill in the values with preprocess=SimpleImputer().fit(the training rows of x) of scikit-learn",
        ),
        (
            X,
            T / T,
            None,
            "y holds NaN or infinite values, in example 0 (1 of 120); drop those examples, fill in the values, or",
        ),
        (
            X,
            Y,
            2,
            "y holds labels below 0 or over 1, in examples 2, 8, 14, 20, 26, ... (20 of 120); "
            "number the classes from 0, or raise classes",
        ),
        (X, Y - 1, 3, "y holds labels below 0 or over 2, in examples"),
        (
            X,
            T[:, :, None][:, :, :0],
            None,
            "y has shape (120, 1, 0); give one target per example, as in (N,), or several, as (N, C)",
        ),
    ],
)
def test_bad_examples_are_refused_in_a_sentence(x: Tensor, y: Tensor, classes: int | None, sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        check_examples(x, y, classes)


def test_good_examples_pass() -> None:
    check_examples(X, Y, 3)
    check_examples(X, T, None)


@pytest.mark.parametrize("fractions", [(0.5, 0.5), (0.6, 0.2, 0.2, 0.0), (0.6, 0.2, 0.2, 0.2), (1.2, -0.2, 0.5, -0.5)])
def test_fractions_that_do_not_make_a_whole_are_refused(fractions: Any) -> None:
    with pytest.raises(InputError, match=r"^fractions is \(.*\); give four positive numbers that sum to 1"):
        sizes_of(fractions, N)


def test_a_probe_of_one_example_is_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"^the probe split would hold 1 of 120 examples; .* so that it holds at least 2$",
    ):
        split(X, Y, sizes=(90, 1, 9, 20), seed=0)


def test_a_target_that_does_not_vary_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"^target 1 is the same in all 60 examples of the train split, so it has no R2"
    ):
        check_targets(split(X, torch.cat([T, 0 * T + 0.1], 1), sizes=SIZES, seed=0))
