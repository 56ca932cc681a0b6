"""What of a person's labels and host is probably not meant so: sentences for errors, and warnings."""

from collections.abc import Sequence

import torch
from torch import nn

from esper.kasmina.host import SegmentedHost
from esper.leyline.errors import DataWarning, warn
from esper.leyline.task import Label
from esper.leyline.text import counted
from esper.tasks.splits import Splits

LISTED = 8
"""Classes that a sentence names with their counts."""


def wanted_outputs(four: Splits, classes: Sequence[Label] | None, outputs: int) -> str:
    """Why a host is to have so many outputs: the classes with how many examples each has, or the targets."""
    if classes is None:
        targets = counted(outputs, "floating-point target")
        return f"y holds {targets} per example (for classes give whole numbers or text, or kind='classification')"
    counts = _counts(four, len(classes))
    order = sorted(range(len(classes)), key=lambda index: counts[index])[:LISTED]  # a stray label is rare
    listed = ", ".join(f"{repr(classes[index])[:40]} ({counted(counts[index], 'example')})" for index in order)
    which = "" if len(classes) <= LISTED else ", the rarest of them"
    return f"y has {len(classes)} classes{which}: {listed}"


def warn_of_single_examples(four: Splits, classes: Sequence[Label]) -> None:
    """A DataWarning where a class has a single example, which is in one split alone."""
    counts = _counts(four, len(classes))
    single = [repr(name)[:40] for name, count in zip(classes, counts, strict=True) if count == 1]
    if single:
        listed = ", ".join(single[:LISTED]) + (", ..." if len(single) > LISTED else "")
        has = f"the class {listed} has" if len(single) == 1 else f"the classes {listed} have"
        warn(
            f"{has} a single example, which is in one split alone, so that what is learnt of it cannot be tested; bring more "
            "examples, or mend the label if it is stray",
            DataWarning,
        )


def warn_of_softmax(host: SegmentedHost) -> None:
    """A DataWarning where a host of classes, trained by cross-entropy, ends with a softmax."""
    last: nn.Module = host.segments[-1]
    while isinstance(last, nn.Sequential) and len(last):
        last = last[-1]
    if isinstance(last, nn.Softmax):
        warn(
            "the host ends with a Softmax, but the loss, the cross-entropy, takes the softmax of its outputs itself, so that "
            "it is taken twice and the host learns slowly; end the host with the layer before it",
            DataWarning,
        )


def _counts(four: Splits, classes: int) -> list[int]:
    counts: list[int] = torch.bincount(torch.cat([split.y for split in four]), minlength=classes).tolist()
    return counts
