"""How many examples the figures of a run rest on. E environments."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.task import AnyTask, Mixture, Split, nonfinite

PARTS = ("train", "probe", "validation", "test")


def split_sizes(task: AnyTask, instance: NDArray[np.int64]) -> dict[str, Any]:
    """Examples of each split, by its name: one number where all environments share their splits, (E,) numbers of a mixture.

    `instance` (E,) are the keys of the environments' instances. Examples that hold NaN or infinite values, which
    `data.nonfinite` may leave out, are not counted.
    """
    if not isinstance(task, Mixture):
        return _sizes(task, int(instance[0]))
    sizes = {key: _sizes(task, key) for key in set(instance.tolist())}
    return {part: [sizes[key][part] for key in instance.tolist()] for part in PARTS}


def _sizes(task: AnyTask, key: int) -> dict[str, int]:
    problem, test = task.instance(key), task.test_split(key)
    assert test is not None, "a run without a test split is refused"
    splits: tuple[Split, ...] = problem.train, problem.probe, problem.validation, test
    return {part: int((~nonfinite(split)).sum()) for part, split in zip(PARTS, splits, strict=True)}
