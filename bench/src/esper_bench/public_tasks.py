"""Make tasks of the public data sets that Debian packages bring: `letter` and `fashion-mnist`."""

import string
from collections.abc import Callable

import numpy as np
import torch

import esper
from esper.leyline.data.task import Task
from esper.leyline.messages import InputError
from esper_bench.public_sets import fashion_mnist as read_fashion_mnist
from esper_bench.public_sets import letter_recognition

TRAIN, HELD = 12_000, 1_000
"""Images of Fashion-MNIST in the train split, and in the probe and the validation split each."""
CLOTHES = (
    *("T-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)


def letter() -> Task:
    """Classify printed letters, 16 numbers each, into 26 classes, from the Debian package r-cran-mlbench; a residual MLP.

    1,332 of the 20,000 rows repeat another, which would be in two splits; they are left out. InputError if the file is not there.
    """
    x, y = letter_recognition()
    rows = np.unique(np.column_stack([x, y]), axis=0)
    return esper.task(
        "letter",
        rows[:, :-1],
        rows[:, -1].astype(np.int64),
        host=esper.mlp(inputs=16, width=32, classes=26),
        classes=list(string.ascii_uppercase),
        standardize=True,
        summary=_summary(letter),
        defaults={"steps": 24, "data": {"batch_size": 64, "batches_per_step": 128}, "optimizer": {"lr": 3e-3}},
    )


def fashion_mnist(train: int = TRAIN) -> Task:
    """Classify images of clothes, 28 x 28 pixels, into 10 classes, from the Debian package dataset-fashion-mnist; a residual CNN.

    The first `train` of the published training images are the train split, and those behind them probe and validation. All
    10,000 published test images are the test split. InputError if the files are not there, or `train` leaves too few behind.
    """
    published, test = read_fashion_mnist()
    most = len(published[1]) - 2 * HELD
    if not 1 <= train <= most:
        raise InputError(f"train is {train:,}; give a number of images from 1 to {most:,}")
    parts = [np.split(values, [train, train + HELD, train + 2 * HELD])[:3] for values in published]
    splits = dict(zip(("train", "probe", "validation", "test"), (*zip(*parts, strict=True), test), strict=True))
    return esper.task(
        "fashion-mnist",
        splits={name: (torch.from_numpy(images[:, None]), labels) for name, (images, labels) in splits.items()},
        host=esper.cnn(inputs=(1, 28, 28), width=8, classes=10),
        classes=list(CLOTHES),
        summary=_summary(fashion_mnist),
        defaults={"steps": 24, "data": {"batch_size": 64, "batches_per_step": 42}, "optimizer": {"lr": 1e-2}},
    )


def _summary(of: Callable[..., Task]) -> str:
    """Return the first line of a docstring, which `esper tasks` shows too where the files are missing."""
    return (of.__doc__ or "").partition("\n")[0]
