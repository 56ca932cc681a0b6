"""Sentences and warnings about splits, labels and hosts that are probably mistakes."""

from collections.abc import Sequence

import torch
from torch import nn

from esper.kasmina.host import SegmentedHost
from esper.leyline.duplicates import example_digests, repeated
from esper.leyline.errors import DataWarning, warn
from esper.leyline.task import Label
from esper.leyline.text import counted
from esper.tasks.splits import Splits

LISTED = 8
"""Largest number of classes that a message lists."""


def wanted_outputs(splits: Splits, classes: Sequence[Label] | None, outputs: int) -> str:
    """Why a host needs this number of outputs: the number of examples of each class, or the number of targets."""
    if classes is None:
        targets = counted(outputs, "floating-point target")
        return f"y holds {targets} per example (for classes give whole numbers or text, or kind='classification')"
    counts = _counts(splits, len(classes))
    order = sorted(range(len(classes)), key=lambda index: counts[index])[
        :LISTED
    ]  # rarest first: they may be typing errors
    listed = ", ".join(f"{repr(classes[index])[:40]} ({counted(counts[index], 'example')})" for index in order)
    which = "" if len(classes) <= LISTED else ", the rarest of them"
    return f"y has {len(classes)} classes{which}: {listed}"


def warn_of_single_examples(splits: Splits, classes: Sequence[Label]) -> None:
    """Issue a DataWarning where a class has a single example, which is then missing from three of the splits."""
    counts = _counts(splits, len(classes))
    single = [repr(name)[:40] for name, count in zip(classes, counts, strict=True) if count == 1]
    if single:
        listed = ", ".join(single[:LISTED]) + (", ..." if len(single) > LISTED else "")
        has = f"the class {listed} has" if len(single) == 1 else f"the classes {listed} have"
        warn(
            f"{has} a single example, which is in one split alone, so the class cannot be both learnt and tested; give more "
            "examples, or correct the label",
            DataWarning,
        )


def warn_of_duplicates(splits: Splits, *, sampled: bool) -> None:
    """Issue a DataWarning where examples of one split are equal, in x and y, to examples of another.

    sampled: whether the train split holds a part of its examples alone, as the others are read batch by batch.
    """
    copies = repeated([example_digests(*split) for split in splits])
    found = [
        f"{count} of {len(split.y)} in {name}"
        for name, split, count in zip(Splits._fields[1:], splits[1:], copies, strict=True)
        if count
    ]
    if found:
        part = f" (of train, the first {len(splits.train.y)} examples were compared)" if sampled else ""
        total, are = sum(copies), "is" if sum(copies) == 1 else "are"
        warn(
            f"{counted(total, 'example')} of one split {are} also in an earlier one of train, probe, validation and test, equal "
            f"in x and y: {', '.join(found)}{part}; what a network learns by heart raises the "
            "figures of these splits, so leave out the copies, or give splits= that keep equal examples together",
            DataWarning,
        )


def warn_of_softmax(host: SegmentedHost) -> None:
    """Issue a DataWarning where a host that is trained with cross-entropy ends with a softmax."""
    last: nn.Module = host.segments[-1]
    while isinstance(last, nn.Sequential) and len(last):
        last = last[-1]
    if isinstance(last, nn.Softmax):
        warn(
            "the host ends with a Softmax, but the loss, the cross-entropy, takes the softmax of the host's outputs itself, so "
            "the softmax is taken twice and the host learns slowly; end the host with the layer before the Softmax",
            DataWarning,
        )


def _counts(splits: Splits, classes: int) -> list[int]:
    counts: list[int] = torch.bincount(torch.cat([split.y.flatten() for split in splits]), minlength=classes).tolist()
    return counts
