"""Evaluate regression trees as arrays: fitted with scikit-learn, kept in one safetensors file. T trees, N nodes.

A file holds no code and no pickle. `load_forests` checks that every path ends in a leaf.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from esper.leyline.lifecycle.view import Floats
from esper.leyline.messages import InputError
from esper.store.disk import read_named, write_atomic

LARGEST = 2**24  # bytes of a file
FEATURES = "features"
"""Name of the tensor that holds the names of the features, as UTF-8 of a JSON list."""
EPISODES = "episodes"
"""Name of the tensor that holds the number of episodes, where it is known."""


class Forest(NamedTuple):
    """Predicts by the mean of trees. A node sends a row to `left` where its feature is at most the threshold.

    Attributes:
        roots ((T,) int32): the first node of each tree
        feature ((N,) int32): index of the feature of a node; -1 at a leaf
        threshold ((N,) float32): of a node
        left ((N,) int32): next node; greater than the node itself
        right ((N,) int32): likewise
        value ((N,) float32): prediction of a leaf
    """

    roots: NDArray[np.int32]
    feature: NDArray[np.int32]
    threshold: NDArray[np.float32]
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    value: NDArray[np.float32]

    def predict(self, x: Floats) -> Floats:
        """Return the mean prediction of the trees, x (..., F) -> (...)."""
        rows = np.asarray(x, np.float32).reshape(-1, x.shape[-1])
        at = np.broadcast_to(self.roots, (len(rows), len(self.roots))).copy()
        each = np.arange(len(rows))[:, None]
        while (inner := self.feature[at] >= 0).any():
            low = rows[each, np.maximum(self.feature[at], 0)] <= self.threshold[at]
            at = np.where(inner, np.where(low, self.left[at], self.right[at]), at)
        mean: Floats = self.value[at].astype(np.float64).mean(1).reshape(x.shape[:-1])
        return mean


class Forests(NamedTuple):
    """Holds the content of a file.

    Attributes:
        features (F names): the columns that the trees read
        models (mapping): forests by name
        episodes (int or None): number of episodes whose figures the trees were fitted on; None if unknown
    """

    features: tuple[str, ...]
    models: Mapping[str, Forest]
    episodes: int | None = None


def forest_of(fitted: Any) -> Forest:
    """Convert a fitted scikit-learn forest of one output, such as ExtraTreesRegressor."""
    parts, roots, start = [], [], 0
    for estimator in fitted.estimators_:
        tree = estimator.tree_
        leaf = tree.children_left < 0
        left, right = (np.where(leaf, -1, start + child) for child in (tree.children_left, tree.children_right))
        feature = np.where(leaf, -1, tree.feature)
        parts.append((feature, np.where(leaf, 0, tree.threshold), left, right, tree.value[:, 0, 0]))
        roots.append(start)
        start += tree.node_count
    feature, threshold, left, right, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    ints, floats = np.int32, np.float32
    return Forest(
        np.array(roots, ints),
        feature.astype(ints),
        threshold.astype(floats),
        left.astype(ints),
        right.astype(ints),
        value.astype(floats),
    )


def save_forests(path: Path, forests: Forests) -> None:
    """Write a file; an interrupted write leaves the old one."""
    tensors = {
        f"{name}.{field}": getattr(own, field) for name, own in forests.models.items() for field in Forest._fields
    }
    names = np.frombuffer(json.dumps(forests.features).encode(), np.uint8)
    counted = {} if forests.episodes is None else {EPISODES: np.array(forests.episodes, np.int64)}
    write_atomic(path, save({**tensors, **counted, FEATURES: names}))


def load_forests(path: Path, known: Sequence[str]) -> Forests:
    """Read a file that `save_forests` wrote. InputError if it is not one, or reads a feature that is not `known`."""
    data = read_named(path, LARGEST, "give a file of trees that bench/scripts/fit_trees.py wrote")
    try:
        tensors = load(data)
        features = tuple(json.loads(bytes(tensors.pop(FEATURES))))
        episodes = int(tensors.pop(EPISODES)) if EPISODES in tensors else None
        names = sorted({name.rpartition(".")[0] for name in tensors})
        models = {name: Forest(*(tensors[f"{name}.{field}"] for field in Forest._fields)) for name in names}
    except (SafetensorError, KeyError, ValueError, TypeError):
        raise InputError(f"{path} is not a file of trees; give one that bench/scripts/fit_trees.py wrote") from None
    unknown = [name for name in features if name not in known]
    if unknown:
        raise InputError(
            f"the trees of {path} read the feature {unknown[0]!r}, which Esper does not have; fit them again"
        )
    for name, forest in models.items():
        if not _is_whole(forest, len(features)):
            raise InputError(f"the trees {name!r} of {path} are damaged; fit them again")
    return Forests(features, models, episodes)


def _is_whole(forest: Forest, features: int) -> bool:
    """Check that the arrays have one length, every index is in range, and every child comes after its parent."""
    nodes = len(forest.feature)
    arrays = forest[1:]
    if any(array.shape != (nodes,) for array in arrays) or forest.roots.ndim != 1 or not len(forest.roots) or not nodes:
        return False
    if any(array.dtype.kind != "i" for array in (forest.roots, forest.feature, forest.left, forest.right)):
        return False
    inner = forest.feature >= 0
    number = np.arange(nodes)[inner]
    children = [child[inner] for child in (forest.left, forest.right)]
    return bool(
        (forest.feature < features).all()
        and ((forest.roots >= 0) & (forest.roots < nodes)).all()
        and all(((child > number) & (child < nodes)).all() for child in children)
        and all(np.isfinite(array).all() for array in (forest.threshold, forest.value))
    )
