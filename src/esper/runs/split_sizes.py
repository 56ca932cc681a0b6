"""The numbers of examples in the splits of a run. E environments."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.task import AnyTask, Mixture, Split, nonfinite

PARTS = ("train", "probe", "validation", "test")


def split_sizes(task: AnyTask, instance: NDArray[np.int64]) -> dict[str, Any]:
    """Numbers of examples by split: one number where all environments share the split, and E numbers for a mixture.

    instance: (E,) keys of the instances. Examples with NaN or infinite values are not counted.
    """
    if not isinstance(task, Mixture):
        return _sizes(task, int(instance[0]))
    sizes = {key: _sizes(task, key) for key in set(instance.tolist())}
    return {part: [sizes[key][part] for key in instance.tolist()] for part in PARTS}


def _sizes(task: AnyTask, key: int) -> dict[str, int]:
    problem, test = task.instance(key), task.test_split(key)
    assert test is not None, "a run must have a test split"
    splits: tuple[Split, ...] = problem.train, problem.probe, problem.validation, test
    sizes = {part: int((~nonfinite(split)).sum()) for part, split in zip(PARTS, splits, strict=True)}
    return sizes if problem.source is None else {**sizes, "train": len(problem.source)}
