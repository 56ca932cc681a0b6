"""Training examples that stay in a Dataset and are read when a batch needs them. N examples."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from esper.leyline.batches import Batch, leaf_names, leaves, map_leaves, shapes
from esper.leyline.errors import InputError
from esper.leyline.task import Label, Split, nonfinite
from esper.tasks.dataset import read_chosen
from esper.tasks.examples import dtype_of_targets, in_one_of_three_dtypes
from esper.tasks.labels import Kind, read_target, read_y
from esper.tasks.tokens import Windows

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DatasetSource:
    """Examples of a map-style Dataset by their place in a split; implements `leyline.task.Source`.

    Attributes:
        dataset (Dataset): of pairs of features and a label or target
        indices ((N,) int64 tensor): the example of the Dataset at each place
        kind (str): 'classification' or 'regression'
        classes (int or names or None): of a classification, the number of classes or their names, as in `esper.task`
        like (Split or None): examples in the shapes and dtypes that `read` returns; None returns those of the Dataset
    """

    dataset: Dataset[Any]
    indices: Tensor
    kind: Kind
    classes: int | tuple[Label, ...] | None
    like: Split | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, places: Indices) -> Split:
        """The examples at these places (n,), checked. InputError if one cannot be used, UserCodeError if reading it raises."""
        index = self.indices.numpy()[places]
        if isinstance(self.dataset, Windows):
            windows = Split(*self.dataset.stacked(index))
            return windows if self.like is None else self._as_like(*windows, self.like, index)
        features, y = read_chosen(self.dataset, index.tolist())
        x: Batch = map_leaves(in_one_of_three_dtypes, features)
        labels = read_y(y)
        # A few rows of labels for positions can look one-hot, which the first examples did not.
        positions = self.classes is not None and self.like is not None and self.like.y.dim() > 1
        values, names = read_target(labels.reshape(-1) if positions else labels, self.kind, self.classes)
        values = values.reshape(labels.shape) if positions else values
        bad = nonfinite(Split(x, values))
        self._refuse(bad, index, "holds a NaN or infinite number; replace it in the Dataset, or leave the example out")
        if names is not None:
            outside = ((values < 0) | (values >= len(names))).reshape(len(values), -1).any(1)
            self._refuse(
                outside, index, f"has a label that is not from 0 to {len(names) - 1}; correct it, or raise classes"
            )
        y = values.to(torch.int64 if names is not None else dtype_of_targets(x))
        return Split(x, y) if self.like is None else self._as_like(x, y, self.like, index)

    def _refuse(self, bad: Tensor, index: Indices, reason: str) -> None:
        """Raise InputError for the first example that is marked in bad (n,) bool."""
        if bad.any():
            raise InputError(f"example {index[int(bad.nonzero()[0])]} of the {type(self.dataset).__name__} {reason}")

    def _as_like(self, x: Batch, y: Tensor, like: Split, index: Indices) -> Split:
        """Examples in the dtypes of others. InputError if shapes differ, or fractions would be whole numbers."""
        of = f"example {index[0]} of the {type(self.dataset).__name__}"
        if shapes(x) != shapes(like.x) or y.shape[1:] != like.y.shape[1:]:
            raise InputError(
                f"{of} has features of shape {shapes(x)} and y of shape {tuple(y.shape[1:])}, and others have {shapes(like.x)} "
                f"and {tuple(like.y.shape[1:])}; give every example one shape"
            )
        for name, leaf, wanted in zip(leaf_names(shapes(x)), leaves(x), leaves(like.x), strict=True):
            if leaf.is_floating_point() and not wanted.is_floating_point():
                raise InputError(
                    f"{of} has {leaf.dtype} in {name}, and others have {wanted.dtype}; give every example one dtype"
                )
        cast: Batch = map_leaves(lambda leaf, wanted: leaf.to(wanted.dtype), x, like.x)
        return Split(cast, y.to(like.y.dtype))
