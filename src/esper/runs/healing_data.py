"""The examples that a damaged network is healed with: read from arrays, batches or a file, and split in three. N examples."""

import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.leyline.errors import InputError, typed_line
from esper.leyline.keys import Purpose, key, permutations

SHARES = {"train": 0.7, "probe": 0.15}
"""Share of the examples that train, and that choose among what was trained; the table is measured on the rest."""
LEAST = 20
"""Fewest examples that can be split: the probe and the rest get three each."""
IGNORED = -100
"""Label of a position that does not count, as in torch.nn.functional.cross_entropy."""
BATCH = 256
"""Examples in one pass that measures."""


class Examples(NamedTuple):
    """Inputs and targets, trees of tensors (N, ...). An input that is a tuple or a mapping is the arguments of a model."""

    x: Any
    y: Any

    def __len__(self) -> int:
        return _count((self.x, self.y))

    def at(self, index: Tensor | slice) -> "Examples":
        """The examples of an index."""
        return Examples(*pytree.tree_map_only(Tensor, lambda leaf: leaf[index], (self.x, self.y)))

    def like(self, network: nn.Module) -> "Examples":
        """The examples with floating-point inputs of the dtype of the network's parameters."""
        dtype = next((own.dtype for own in network.parameters() if own.is_floating_point()), torch.get_default_dtype())
        x = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, self.x)
        return Examples(x, self.y)

    def batches(self, least: int = 2) -> list[tuple[Any, Any]]:
        """All examples as at least `least` (input, target) pairs of about equal length, each of at most `BATCH` examples."""
        count = max(math.ceil(len(self) / BATCH), min(least, len(self)))
        cuts = np.linspace(0, len(self), count + 1).round().astype(int).tolist()
        return [(part.x, part.y) for part in (self.at(slice(*cut)) for cut in itertools.pairwise(cuts))]


class Parts(NamedTuple):
    """Examples of a healing: `train` trains, `probe` ranks places, opens gates and chooses rates, `held` is for the table."""

    train: Examples
    probe: Examples
    held: Examples


def examples_of(data: Any) -> Examples:
    """Read (x, y), a mapping with x and y, an iterable of (x, y) batches, or the path of a .npz, .pt or .safetensors file.

    Floating-point arrays become torch's default dtype. Raises InputError if there are no examples, or x and y differ in length.
    """
    found = _read(Path(data)) if isinstance(data, str | Path) else data
    if isinstance(found, Mapping):
        if missing := {"x", "y"} - set(found):
            raise InputError(f"data has no {' and no '.join(sorted(missing))}; give arrays named x and y")
        found = (found["x"], found["y"])
    pair = isinstance(found, tuple) and len(found) == 2
    if pair or isinstance(found, Examples):
        examples = Examples(*pytree.tree_map(_tensor, tuple(found)))
    elif isinstance(found, Iterable):
        examples = _joined(found)
    else:
        raise InputError(
            f"data is a {type(data).__name__}; give (x, y), batches of them, or a .npz, .pt or .safetensors file"
        )
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(tuple(examples))):
        raise InputError("data holds no arrays; give x and y as tensors or NumPy arrays")
    lengths = {len(leaf) for leaf in pytree.tree_leaves(tuple(examples)) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(lengths) > 1:
        raise InputError(
            f"x and y hold {' and '.join(map(str, sorted(lengths)))} examples; give one target per example"
        )
    if len(examples) < LEAST:
        raise InputError(
            f"data has {len(examples)} examples; healing needs {LEAST} or more, of which it holds some back"
        )
    _check_finite(examples)
    return examples


def split(examples: Examples, seed: int) -> Parts:
    """Split at random: `SHARES` to train and probe, the rest held back."""
    order = permutations(key(Purpose.SPLIT, seed), np.array([len(examples)]), torch.device("cpu"))[0]
    first, second = (round(share * len(examples)) for share in np.cumsum(list(SHARES.values())))
    return Parts(*(examples.at(part) for part in (order[:first], order[first:second], order[second:])))


def usual_loss(output: Any, target: Any) -> Tensor:
    """(B,) the cross-entropy of output (B, ..., C) for whole numbers (B, ...) [nats], the squared error for other targets.

    Each is the mean over the positions of an example that count.
    """
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        raise InputError(
            f"the model returns a {type(output).__name__}, and the target is a {type(target).__name__}; give loss(output, target)"
        )
    if not target.is_floating_point() and output.shape[:-1] == target.shape:
        _check_labels(target, output.shape[-1])
        flat = output.flatten(0, -2), target.flatten().long()
        losses = nn.functional.cross_entropy(*flat, ignore_index=IGNORED, reduction="none").reshape(len(target), -1)
        return losses.sum(1) / (target != IGNORED).reshape(len(target), -1).sum(1).clamp_min(1)
    if target.is_floating_point() and output.numel() == target.numel():
        return (output - target.view_as(output)).square().reshape(len(output), -1).mean(1)
    kind, shape = str(target.dtype).removeprefix("torch."), tuple(output.shape)
    raise InputError(
        f"the output of a batch is {shape}, and its y is {kind} {tuple(target.shape)}; give labels as whole numbers "
        f"{shape[:-1]}, targets as floating-point numbers {shape}, or from Python loss(output, target)"
    )


def _check_finite(examples: Examples) -> None:
    """Raise InputError if an input is NaN, or a target NaN or infinite. Inputs may be infinite, as masks of attention are."""
    for name, tree, is_wrong in (("x", examples.x, torch.isnan), ("y", examples.y, lambda y: ~torch.isfinite(y))):
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim():
                found = is_wrong(leaf).flatten(1).any(1) if leaf.dim() > 1 else is_wrong(leaf)
                if found.any():
                    wrong = found.nonzero().flatten().tolist()
                    raise InputError(
                        f"{name} is not finite in {len(wrong)} of {len(leaf)} examples, the first of which is {wrong[0]}; leave "
                        "them out"
                    )


def _check_labels(target: Tensor, classes: int) -> None:
    """Raise InputError if a label is no class; IGNORED marks positions without one."""
    wrong = target[(target != IGNORED) & ((target < 0) | (target >= classes))]
    if len(wrong) and classes == 1:
        raise InputError(
            f"y holds the label {int(wrong[0])}, and the model has one output; give floating-point targets, or from Python "
            "loss(output, target)"
        )
    if len(wrong):
        raise InputError(
            f"y holds the label {int(wrong[0])}, and the model has {classes} outputs; give labels from 0 to {classes - 1}"
        )


def _read(path: Path) -> Any:
    if not path.is_file():
        found = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
        raise InputError(f"{found}; give healing data, such as a .npz file with arrays x and y")
    try:
        match path.suffix:
            case ".npz":
                with np.load(path, allow_pickle=False) as arrays:
                    return dict(arrays)
            case ".pt" | ".pth":
                return torch.load(path, weights_only=True)
            case ".safetensors":
                return load_file(path)
    except Exception as error:  # each library has errors of its own for a damaged file
        raise InputError(f"{path} cannot be read as {path.suffix}: {typed_line(error)}; write it again") from error
    raise InputError(f"{path} ends in {path.suffix!r}; give a .npz, .pt or .safetensors file with x and y")


def _joined(batches: Iterable[Any]) -> Examples:
    found = list(batches)
    if not found:
        raise InputError("data has no batches; give at least one (x, y) pair")
    for pair in found:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InputError(f"a batch of data is a {type(pair).__name__}; give (x, y) pairs")
    trees = [pytree.tree_map(_tensor, tuple(pair)) for pair in found]
    leaves, shapes = zip(*(pytree.tree_flatten(tree) for tree in trees), strict=True)
    first = [leaf.shape[1:] if isinstance(leaf, Tensor) else None for leaf in leaves[0]]
    for number, (own, shape) in enumerate(zip(leaves, shapes, strict=True)):
        if shape != shapes[0] or [leaf.shape[1:] if isinstance(leaf, Tensor) else None for leaf in own] != first:
            raise InputError(f"batch {number} of data has examples of another shape than batch 0; give all one shape")
    joined = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in zip(*leaves, strict=True)]
    return Examples(*pytree.tree_unflatten(joined, shapes[0]))


def _tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray | Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind not in "fiub":
        raise InputError(
            f"data has an array of {value.dtype}; give numbers, for labels the whole numbers of the classes"
        )
    found = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
    if found.dtype in (torch.uint16, torch.uint32, torch.uint64):  # which torch indexes and compares with few others
        signed = found.long()
        if found.dtype == torch.uint64 and (signed < 0).any():
            largest = int(signed[signed < 0].max()) + 2**64
            raise InputError(f"data holds {largest:,}, which no label is; give whole numbers below {2**63:,}")
        return signed
    return found.to(torch.get_default_dtype()) if found.is_floating_point() else found


def _count(tree: Any) -> int:
    return next((len(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()), 0)
