"""Check examples, and split them in four. N examples, D features."""

from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline.data import keys
from esper.leyline.data.batches import Batch, check_lengths, named_leaves, picked
from esper.leyline.data.task import Scaling, Split, check_finite, nonfinite, one_tensor, which
from esper.leyline.messages import InputError, counted


class Splits(NamedTuple):
    """Holds the four splits of a task. No two splits share an example or storage."""

    train: Split
    probe: Split
    validation: Split
    test: Split


def check_examples(x: Batch, y: Tensor, classes: int | None) -> None:
    """Raise InputError if features x (N, ...) and labels y (N, ...) int64, or targets where `classes` is None, cannot be used."""
    skip = "give the task defaults={'data': {'nonfinite': 'skip'}}"
    fill = "preprocess=SimpleImputer().fit(the training rows of x) of scikit-learn (`esper docs tasks`)"
    for name, leaf in named_leaves(x).items():
        if leaf.dim():
            check_lengths(name, len(leaf), len(y))
        # beside other tensors, one may hold a single number for each example
        if not leaf.dim() or (leaf.dim() == 1 and isinstance(x, Tensor)) or leaf[0].numel() == 0:
            raise InputError(
                f"{name} has shape {tuple(leaf.shape)}; give at least one feature per example, as in (N, D)"
            )
    for name, leaf in named_leaves(x).items():
        bad = nonfinite(Split(leaf, torch.zeros(len(y))))
        check_finite(bad, name, f"drop those examples, fill in the values with {fill}, or {skip}")
    if classes is None:
        if y[0].numel() == 0:
            raise InputError(
                f"y has shape {tuple(y.shape)}; give one target per example, as in (N,), or several, as (N, C)"
            )
        check_finite(nonfinite(Split(y, y)), "y", f"drop those examples, fill in the values, or {skip}")
        return
    outside = ((y < 0) | (y >= classes)).reshape(len(y), -1).any(1)
    if outside.any():
        raise InputError(
            f"y holds labels below 0 or over {classes - 1}, in {which(outside)}; number the classes from 0, or raise classes"
        )


def sizes_of(fractions: Sequence[float], examples: int) -> tuple[int, int, int, int]:
    """Return the numbers of examples in train, probe, validation and test, which sum to `examples`."""
    numbers = isinstance(fractions, Sequence) and all(isinstance(f, Real) for f in fractions)
    if not numbers or len(fractions) != 4 or not all(f > 0 for f in fractions) or abs(sum(fractions) - 1) > 1e-6:
        raise InputError(
            f"fractions is {tuple(fractions) if numbers else fractions!r}; give four positive numbers that sum to 1, for "
            "train, probe, validation and test"
        )
    cuts = [round(float(c) * examples) for c in np.cumsum(fractions)]
    return cuts[0], cuts[1] - cuts[0], cuts[2] - cuts[1], examples - cuts[2]


def cut(x: Batch, y: Tensor, parts: Sequence[Tensor]) -> Splits:
    """Return the splits with the examples of these indices, each a copy. InputError if a split has fewer than two examples."""
    for name, part in zip(Splits._fields, parts, strict=True):
        if len(part) < 2:
            raise InputError(
                f"the {name} split would hold {len(part)} of {counted(len(y), 'example')}; give more examples or raise its "
                "fraction, so that it holds at least 2"
            )
    return Splits(*(Split(picked(x, part), y[part]) for part in parts))


def check_targets(splits: Splits) -> None:
    """Raise InputError if a target is constant in a split, and therefore has no R2."""
    for name, part in zip(Splits._fields, splits, strict=True):
        if part.y.is_floating_point():
            constant = (part.y == part.y[0]).reshape(len(part.y), -1).all(0).nonzero().flatten().tolist()
            if constant:
                raise InputError(
                    f"target {constant[0]} is the same in all {len(part.y)} examples of the {name} split, so it has no "
                    "R2; drop that target, or give more examples"
                )


def dealt(y: Tensor, sizes: Sequence[int], seed: int) -> tuple[Tensor, ...]:
    """Return the indices of the examples in random parts of the given sizes, stratified by class: a function of the arguments.

    The i-th of the n examples of a class, in random order, gets the position (i + 1/2) / n; all examples are sorted by position
    and cut into the parts. Every part therefore has nearly the same share of every class. Examples with several labels, and
    those with targets, are not stratified.
    """
    assert sum(sizes) == len(y), (sizes, y.shape)
    order = keys.permutations(keys.key(keys.Purpose.SPLIT, seed), np.array([len(y)]), torch.device("cpu"))[0]
    if not y.is_floating_point() and y.dim() == 1:
        labels, positions = y[order], torch.empty(len(y), dtype=torch.float64)
        for label in labels.unique():  # (i + 1/2) / n for the i-th of the n examples of a class
            of_class = labels == label
            count = int(of_class.sum())
            positions[of_class] = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        order = order[positions.argsort(stable=True)]
    return order.split(list(sizes))


def scaling_of(x: Batch) -> Scaling:
    """Return mean and standard deviation of every feature of x (N, ...). A feature that is constant in x gets the deviation 1."""
    x = one_tensor(x, "standardize")
    mean, deviation = x.mean(0), x.std(0, correction=0)
    return Scaling(mean, torch.where(x.amax(0) > x.amin(0), deviation, torch.ones_like(deviation)))
