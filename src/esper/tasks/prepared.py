"""A user's examples in four splits: held in memory, or read batch by batch. N examples."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from esper.leyline.errors import InputError
from esper.leyline.source import SENSED
from esper.leyline.task import Label
from esper.leyline.text import counted
from esper.tasks.dataset import length_of
from esper.tasks.examples import (
    Examples,
    check_classes_train,
    check_split_names,
    drop_nonfinite,
    dtype_of_targets,
    indices_of,
    read_examples,
    train_weights,
)
from esper.tasks.labels import Kind, check_labels, class_names, read_target
from esper.tasks.splits import Splits, check_examples, cut, dealt, sizes_of
from esper.tasks.streamed import DatasetSource
from esper.tasks.tokens import Windows, are_tokens, runs, windows_of

HELD = 2048
"""Most examples in the probe, validation and test split of a Dataset that is read batch by batch and split by fractions."""


class Given(NamedTuple):
    """The arguments of `esper.task` that say what the examples are."""

    x: Any
    y: Any
    splits: Mapping[str, Any] | None
    fractions: Sequence[float]
    seed: int
    kind: Kind | None
    classes: int | Sequence[Label] | None
    sample_weights: Any
    workers: int
    stream: bool
    skip: bool  # leave out examples that are not finite


class Prepared(NamedTuple):
    """Checked examples.

    Attributes:
        splits (Splits): on the CPU; with a source, `train` holds the first examples of it
        classes (C labels or None): of a classification, in the order of the outputs
        examples (int): number of all examples
        weights ((n,) tensor or None): weights of the training examples
        columns (names or None): names of the features of a frame
        source (DatasetSource or None): what training examples are read from, batch by batch
        tokens (str or None): 'byte' or 'token' where each position's label is the next one
    """

    splits: Splits
    classes: tuple[Label, ...] | None
    examples: int
    weights: Tensor | None = None
    columns: tuple[str, ...] | None = None
    source: DatasetSource | None = None
    tokens: str | None = None


def prepare(given: Given, host: Any, length: int | None) -> Prepared:
    """Read, check and split examples. InputError if they cannot be used. Tokens without labels are cut into windows first."""
    if not isinstance(given.stream, bool):
        raise InputError(f"stream is {given.stream!r}; give True or False")
    if are_tokens(given.x, given.y, given.splits):
        return _of_tokens(given, host, length)
    if length is not None:
        raise InputError(f"length is {length!r}, but no tokens are cut into windows; leave length out")
    return _streamed(given) if given.stream else _in_memory(given)


def _in_memory(given: Given) -> Prepared:
    examples = read_examples(given.x, given.y, given.splits, given.sample_weights, given.workers)
    values, names = read_target(examples.y, given.kind, given.classes)
    if given.skip:
        examples, values = drop_nonfinite(examples, values)
    values = _check_values(examples, values, names)
    if examples.parts is None:
        parts: Sequence[Tensor] = dealt(values, sizes_of(given.fractions, len(values)), given.seed)
    else:
        parts = [torch.from_numpy(part) for part in examples.parts]
    splits = cut(examples.x, values, parts)
    if names is not None and given.splits is not None:
        check_classes_train(splits, names)
    weights = train_weights(examples, parts[0].numpy())
    return Prepared(splits, names, len(values), weights, examples.columns)


def _check_values(examples: Examples, values: Tensor, names: tuple[Label, ...] | None) -> Tensor:
    """y as int64 class indices, or as targets in the dtype of the features. InputError for examples that cannot be used."""
    if names is not None:
        check_labels(values)
    values = values.to(dtype_of_targets(examples.x) if names is None else torch.int64)
    check_examples(examples.x, values, None if names is None else len(names))
    return values


def _of_tokens(given: Given, host: Any, length: int | None) -> Prepared:
    """Windows of tokens. A stream that fractions split is cut into four runs, so that neighbouring windows share a split."""
    splits = given.splits
    if given.x is None:
        assert splits is not None, "tokens are in x or in the splits"
        check_split_names(splits)
        cuts: Mapping[str, Any] = {
            name: windows_of(tokens, f"the {name} split", host, length, given.classes)
            for name, tokens in splits.items()
        }
        data, splits = cuts["train"], cuts
    else:
        data = windows_of(given.x, "x", host, length, given.classes)
        if splits is None and data.tokens.ndim == 1:
            parts = runs(len(data), _sizes(given, data))
            splits = dict(zip(Splits._fields, parts, strict=True))
    given = given._replace(x=None if given.x is None else data, splits=splits, classes=data.vocabulary)
    tokens = "byte" if data.are_bytes else "token"
    for name, value in (("sample_weights", given.sample_weights), ("workers", given.workers or None)):
        if value is not None:
            raise InputError(f"{name} was given, but windows of tokens take none; leave {name} out")
    made = _streamed(given._replace(kind="classification"))
    if not given.stream:  # the windows are known to be whole, and there is nothing else to check
        assert made.source is not None
        whole = made.source.read(np.arange(len(made.source)))
        made = made._replace(splits=made.splits._replace(train=whole), source=None)
    return made._replace(tokens=tokens)


def _streamed(given: Given) -> Prepared:
    """Splits of Datasets, of which the train split stays in its Dataset."""
    kind, names = _kind_and_names(given)
    sources = _sources(given, kind, names)
    for name, source in zip(Splits._fields, sources, strict=True):
        if len(source) < 2:
            raise InputError(f"the {name} split holds {counted(len(source), 'example')}; give it at least 2")
    first = sources[0].read(np.arange(min(SENSED, len(sources[0]))))
    sources = [replace(source, like=first) for source in sources]
    held = [source.read(np.arange(len(source))) for source in sources[1:]]
    splits = Splits(first, *held)
    for split in splits:
        check_examples(split.x, split.y, None if names is None else len(names))
    return Prepared(splits, names, sum(map(len, sources)), source=sources[0])


def _kind_and_names(given: Given) -> tuple[Kind, tuple[Label, ...] | None]:
    """What the labels are. InputError for arguments that need all examples at once."""
    if given.sample_weights is not None or given.workers:
        name = "sample_weights" if given.sample_weights is not None else "workers"
        raise InputError(
            f"{name} was given, but a task with stream=True reads examples batch by batch; leave {name} out"
        )
    if given.kind == "regression" and given.classes is None:
        return "regression", None
    if given.classes is None:
        raise InputError(
            "stream is True, so the labels are not all read beforehand; give classes, the number of classes or their names, or "
            "kind='regression'"
        )
    return "classification", class_names(given.classes)


def _sources(given: Given, kind: Kind, names: tuple[Label, ...] | None) -> list[DatasetSource]:
    """The four splits in their Datasets."""
    count = len(names) if names is not None and isinstance(given.classes, int | np.integer) else None

    def source(dataset: Dataset[Any], indices: Tensor) -> DatasetSource:
        return DatasetSource(dataset, indices, kind, count if count is not None else names)

    if given.x is None and given.splits is not None:
        check_split_names(given.splits)
        datasets = [given.splits[name] for name in Splits._fields]
        return [source(_dataset(each), torch.arange(length_of(each))) for each in datasets]
    dataset = _dataset(given.x)
    if given.y is not None:
        raise InputError("x is a Dataset, which contains its own labels, and y was given too; leave y out")
    examples = length_of(dataset)
    if given.splits is not None:
        check_split_names(given.splits)
        return [source(dataset, torch.from_numpy(part)) for part in indices_of(given.splits, examples)]
    return [source(dataset, part) for part in dealt(torch.zeros(examples), _sizes(given, dataset), given.seed)]


def _sizes(given: Given, dataset: Dataset[Any]) -> tuple[int, int, int, int]:
    """Examples in each split by fractions, but at most so many in the last three as may be held; the train split has the rest."""
    examples = length_of(dataset)
    most = HELD if given.stream else examples
    if isinstance(dataset, Windows):
        most = min(most, dataset.most_held)
    probe, validation, test = (min(size, most) for size in sizes_of(given.fractions, examples)[1:])
    return examples - probe - validation - test, probe, validation, test


def _dataset(x: Any) -> Dataset[Any]:
    if isinstance(x, Dataset):
        return x
    raise InputError(
        f"stream is True, but examples are a {type(x).__name__}, which is in memory; give a torch.utils.data.Dataset or tokens, "
        "or leave stream out"
    )
