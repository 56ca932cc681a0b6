"""Define tasks: data in four splits, a host to grow, and what counts as good. E rows, B examples, C outputs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.leyline.config.tree import LARGE, Config
from esper.leyline.data.arrays import as_tensor, select_columns
from esper.leyline.data.batches import Batch, Shapes, cast, leaves, named_leaves, picked, shapes
from esper.leyline.data.preprocess import Preprocess
from esper.leyline.messages import DataWarning, InputError, counted, kind_of, warn
from esper.leyline.records import brief

SENSED = 256
"""Training examples that the growth sensors are measured on, the first of the train split [examples]."""


@brief
class Split(NamedTuple):
    """Holds examples that are used together.

    Attributes:
        x ((N, ...) tensor, or a tuple or a dict of them): inputs, each tensor floating point, which is cast to the dtype of the
            host, or of whole numbers or truth values, which stay what they are; uint8 where the task has `pixels`
        y ((N, ...) tensor): int64 class labels, (N,) or one for each position of an example, or floating-point targets
    """

    x: Batch
    y: Tensor


class Source(Protocol):
    """Reads the examples of a train split by their place in it, batch by batch. A place always holds the same example.

    One thread of a process calls `read` at a time, and not always the same one.
    """

    @property
    def workers(self) -> int:
        """Processes that read the batches of a training ahead of it; with 0 a thread of its process does."""

    @property
    def name(self) -> str:
        """What messages call the examples."""

    def __len__(self) -> int:
        """Return the number of training examples."""

    def read(self, places: NDArray[np.int64]) -> Split:
        """Return the examples at these places (n,), all finite, in the shapes and dtypes of the task's `train`."""


def nonfinite(split: Split) -> Tensor:
    """Return (N,) bool: which examples hold NaN or an infinite value. Bytes and labels are always finite."""
    bad = torch.zeros(len(split.y), dtype=torch.bool, device=split.y.device)
    for values in (*leaves(split.x), split.y):
        if values.is_floating_point() and not values.isfinite().all():
            bad |= ~values.flatten(1).isfinite().all(1) if values.dim() > 1 else ~values.isfinite()
    return bad


def which(bad: Tensor) -> str:
    """Return the first few of the examples that are marked in bad (N,) bool, and how many of how many, in words."""
    rows = bad.nonzero().flatten().tolist()
    listed = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
    return f"example{'s' if len(rows) > 1 else ''} {listed} ({len(rows)} of {len(bad)})"


def check_finite(bad: Tensor, what: str, mend: str) -> None:
    """Raise InputError if an example is marked in bad (N,) bool. `mend`: what to do about it."""
    if bad.any():
        raise InputError(f"{what} holds NaN or infinite values, in {which(bad)}; {mend}")


def finite(split: Split, name: str, action: Literal["stop", "skip"]) -> Split:
    """Return the split where all of it is finite; else InputError at 'stop', and at 'skip' the rest of it, with a DataWarning."""
    bad = nonfinite(split)
    if not bad.any():
        return split
    if action == "stop":
        out = "--set data.nonfinite=skip ({'data': {'nonfinite': 'skip'}} in Python)"
        check_finite(bad, name, f"fill them in, or leave those examples out with {out}")
    if bad.all():
        raise InputError(f"{name} holds NaN or infinite values in every example; bring other data")
    warn(f"{name} holds NaN or infinite values, left out with {which(bad)}", DataWarning)
    return Split(picked(split.x, ~bad), split.y[~bad])


@brief
@dataclass(frozen=True)
class Pixels:
    """Says how images that are kept as bytes become what a host reads, and how training images are varied.

        x = (bytes - mean) / deviation,     channel by channel

    A training image is cut out of itself with `pad` pixels of the mean around it, at a drawn place, and mirrored left to
    right in half of the draws where `flip` is set. What measures never varies an image.

    Attributes:
        mean (C floats): mean of each channel [bytes]
        deviation (C floats): standard deviation of each channel [bytes]
        pad (int): pixels of the mean around a training image, out of which it is cut
        flip (bool): whether half of the draws of a training image are mirrored
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    pad: int = 0
    flip: bool = False

    @property
    def varies(self) -> bool:
        """Whether training images are varied at all."""
        return self.pad > 0 or self.flip

    def read(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Map x (..., C, H, W) uint8 -> the same in a dtype, or in torch's default one, with channels last in memory."""
        assert x.dtype == torch.uint8, x.dtype
        mean, scale = _row_of(self, x.shape[-1], x.device, dtype or torch.get_default_dtype())
        lines = x.movedim(-3, -1).flatten(-2)  # (..., H, W C): arithmetic on runs of C numbers alone would be slow
        read: Tensor = lines.to(mean.dtype).sub_(mean).mul_(scale).unflatten(-1, (x.shape[-1], -1))
        return read.movedim(-1, -3)


@lru_cache
def _row_of(pixels: Pixels, width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / deviation of every number in a line of pixels, (W C,), brought to the device once."""
    mean, deviation = (torch.tensor(values, dtype=dtype) for values in (pixels.mean, pixels.deviation))
    return mean.repeat(width).to(device), deviation.reciprocal().repeat(width).to(device)


@brief
class Scaling(NamedTuple):
    """Holds the mean and standard deviation of features, by which a network reads them, or of targets, which it returns by them.

    (x - mean) / deviation

    Attributes:
        mean (tensor): floating point, of the shape of one example or of one that broadcasts to it
        deviation (tensor): standard deviation, of the same shape
    """

    mean: Tensor
    deviation: Tensor

    def read(self, x: Tensor) -> Tensor:
        """Map x (N, ...) of any dtype -> the same in the dtype of the mean."""
        return (x.to(self.mean.dtype) - self.mean) / self.deviation

    def restore(self, z: Tensor) -> Tensor:
        """Map z (N, ...), as `read` returns it -> z * deviation + mean, in the units of x."""
        return z * self.deviation + self.mean


Label = str | int | float | bool
"""What a class is called."""


class Interface(NamedTuple):
    """Says what a network takes, and what its outputs stand for.

    Attributes:
        inputs (shape, or a tuple or a dict of shapes): shape of one example, or of each of its leaves
        scaling (Scaling or None): applied by the network itself, so that it takes features as they came
        classes (C labels or None): the class of each output; None where outputs are values
        target (shape): shape of one example's y
        columns (names or None): names of the features, where they came in a frame
        target_scaling (Scaling or None): undone by the network itself, so that it returns targets as they came
        whole (dtypes or None): of each leaf in order, its dtype where it holds whole numbers or truth values, and None where it
            is floating point; None where all are
        preprocess (Preprocess or None): what `predict` does with raw features first, to make the inputs
    """

    inputs: Shapes
    scaling: Scaling | None = None
    classes: tuple[Label, ...] | None = None
    target: tuple[int, ...] = ()
    columns: tuple[str, ...] | None = None
    target_scaling: Scaling | None = None
    whole: tuple[torch.dtype | None, ...] | None = None
    preprocess: Preprocess | None = None

    def read(self, x: Any, dtype: torch.dtype) -> Batch:
        """Convert a person's features to the tensors (B, ...) that the network takes.

        dtype: that of its floating-point parameters. Byte tensors stay bytes where the network standardizes its input itself.

        Raises InputError if the features have another structure, shape or kind of number than the network takes, hold no
        example, or are not finite.
        """
        x = x if self.preprocess is None else self.preprocess.apply(x)
        inputs, shapes = self.inputs, named_leaves(self.inputs)
        if isinstance(inputs, dict):
            if not isinstance(x, Mapping) or set(x) != set(inputs):
                keyed = isinstance(x, Mapping)
                given = f"has the keys {', '.join(map(str, x))}" if keyed else f"is {kind_of(x)}"
                raise InputError(
                    f"x {given}, but the network takes a mapping with the keys {', '.join(inputs)}; give that"
                )
            values = [x[name] for name in inputs]
        elif list(shapes) != ["x"]:
            if not isinstance(x, tuple | list) or len(x) != len(inputs):
                given = f"has {len(x)} tensors" if isinstance(x, tuple | list) else f"is {kind_of(x)}"
                raise InputError(f"x {given}, but the network takes a tuple of {len(inputs)} tensors; give that")
            values = list(x)
        else:
            values = [select_columns(x, self.columns, "x")]
        read = []
        dtypes = self.whole or (None,) * len(shapes)
        for value, (name, shape), whole in zip(values, shapes.items(), dtypes, strict=True):
            examples = as_tensor(value, name, dtype)
            if examples.shape == shape:
                batch = "predict([x])" if name == "x" else "predict of a batch"
                raise InputError(
                    f"{name} has shape {shape}, which is one example and not a batch; give a batch of one, as {batch}"
                )
            if examples.shape[1:] != shape or not examples.dim() or not len(examples):
                mend = f"give at least one example, as (B, {', '.join(map(str, shape))})"
                raise InputError(
                    f"{name} has shape {tuple(examples.shape)}, but the network takes examples of {shape}; {mend}"
                )
            if whole is not None and self.scaling is None:
                if examples.is_floating_point():
                    raise InputError(
                        f"{name} has dtype {examples.dtype}, but the network takes whole numbers there, such as token ids; "
                        f"give them as {whole}"
                    )
                examples = examples.to(whole)
            elif self.scaling is None or examples.is_floating_point():
                examples = examples.to(dtype)
            bad = nonfinite(Split(examples, torch.zeros(len(examples))))
            check_finite(bad, name, "fill them in, or leave those examples out")
            read.append(examples)
        if len(set(map(len, read))) > 1:
            counts = " and ".join(f"{len(leaf):,} in {name}" for leaf, name in zip(read, shapes, strict=True))
            raise InputError(f"x holds different numbers of examples, {counts}; give every tensor one row per example")
        if isinstance(inputs, dict):
            return dict(zip(inputs, read, strict=True))
        return read[0] if list(shapes) == ["x"] else tuple(read)


Differentiated = tuple[Tensor, Callable[[Tensor], Tensor]]
"""Losses (E, B), and a function from their gradient (E, B) to that of the output."""


class Objective(Protocol):
    """Defines what is minimised and what is reported, per example and for a stack of rows at once.

    It says what outputs a host may have: any shape (B, ...) that it takes beside the targets. A host of a mixture may have fewer
    outputs than others along the last axis.
    """

    metric: str  # name of the mean of `score`: 'accuracy', 'r2'
    outputs: int  # C, the length of the last axis of outputs

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Map output (E, B, ...), target (E, B, ...) -> (E, B) losses to minimise."""

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """Map output (E, B, ...), target (E, B, ...), a whole split -> (E, B) whose mean over B is the metric."""


@brief
@dataclass(frozen=True)
class Instance:
    """Holds one problem to grow a network for: what the rows of one instance share.

    Attributes:
        host (callable): returns a freshly initialised `SegmentedHost`, drawn from torch's generator
        train (Split): read by the optimizer
        probe (Split): read by gates, rewards and attribution
        validation (Split): read by the selection of models and policies
        outputs (int): classes or targets of this instance, the last axis of outputs, at most those of the task's objective
        pixels (Pixels or None): how images that are kept as bytes are read, where an example is one tensor
        scaling (Scaling or None): of features that a host reads standardized, where an example is one tensor; the splits hold
            them as they came
        classes (labels or None): the class of each output; None numbers them from 0
        weights ((N,) tensor or None): weights of the train split's examples in the training loss; None counts all alike
        columns (names or None): names of the features, where they came in a frame
        target_scaling (Scaling or None): of targets that a host returns standardized; the splits hold them as they came
        source (Source or None): what the optimizer reads instead of `train`, which then holds the first `SENSED` of its examples
        intact (callable or None): returns a network of the host's shape before it was damaged, and the inputs of the train split
            as that network reads them; the sensor `drift` compares the host with it
        preprocess (Preprocess or None): what made the splits of raw features, and is saved with grown networks
        plain (callable or None): from a number of parameters to a function that returns a plain host of at least that many
    """

    host: Callable[[], nn.Module]
    train: Split
    probe: Split
    validation: Split
    outputs: int
    pixels: Pixels | None = None
    scaling: Scaling | None = None
    classes: tuple[Label, ...] | None = None
    weights: Tensor | None = None
    columns: tuple[str, ...] | None = None
    target_scaling: Scaling | None = None
    source: Source | None = None
    intact: Callable[[], tuple[nn.Module, Batch]] | None = None
    preprocess: Preprocess | None = None
    plain: Callable[[int], Callable[[], nn.Module]] | None = None

    def __init_subclass__(cls) -> None:
        """Describe the fields of an instance behind those that the docstring of a subclass describes."""
        listed = (Instance.__doc__ or "").partition("Attributes:\n")[2]
        cls.__doc__ = f"{(cls.__doc__ or '').rstrip()}\n{listed}"

    def read(self, x: Batch, dtype: torch.dtype | None = None) -> Batch:
        """Read examples of a split as a host does: leaves (N, ...), the floating-point ones in a dtype where it is given."""
        if self.pixels is not None:
            return self.pixels.read(one_tensor(x, "pixels"), dtype)
        x = x if self.scaling is None else self.scaling.read(one_tensor(x, "scaling"))
        return x if dtype is None else cast(x, dtype)

    @property
    def interface(self) -> Interface:
        """What a network that was grown on this problem takes and returns."""
        scaling, y = self.scaling, self.train.y
        if self.pixels is not None:
            of_channels = torch.tensor([self.pixels.mean, self.pixels.deviation], dtype=torch.get_default_dtype())
            scaling = Scaling(*of_channels[:, :, None, None])
        classes = None if y.is_floating_point() else self.classes or tuple(range(self.outputs))
        whole = tuple(None if leaf.is_floating_point() else leaf.dtype for leaf in leaves(self.train.x))
        dtypes, inputs, target = whole if any(whole) else None, shapes(self.train.x), tuple(y.shape[1:])
        return Interface(inputs, scaling, classes, target, self.columns, self.target_scaling, dtypes, self.preprocess)


class Lengths(NamedTuple):
    """Says for how many examples every row has room; shorter splits are padded to that, whatever the other rows hold.

    The last bit of a sum depends on how many numbers are summed, zeros included.

    Attributes:
        probe (int): most examples of a probe split
        held (int): most examples of a validation or a test split
    """

    probe: int
    held: int


class Room(NamedTuple):
    """Says what the rows of a population are laid out for: a host in whose leading corner every row's host fits.

    Attributes:
        host (callable): returns the largest host
        inputs (shape, or a tuple or a dict of shapes): of one input of the largest host, or of each of its leaves
        lengths (Lengths or None): lengths of splits; a mixture has them, and None is for rows that share every split
    """

    host: Callable[[], nn.Module]
    inputs: Shapes
    lengths: Lengths | None = None


@dataclass(frozen=True, kw_only=True)
class _Problems:
    """Holds what a `Task` and a `Mixture` have alike; their docstrings describe the fields."""

    name: str
    summary: str
    test: Any
    objective: Objective
    menu: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    room: Room | None = None

    def sealed(self) -> Self:
        """Return the same without its test data: all that an engine is given."""
        return replace(self, test=None)

    @property
    def _layout(self) -> Room:
        assert self.room is not None, "a mixture names the largest host, and a task has a host"
        return self.room

    @property
    def inputs(self) -> Shapes:
        """Shape of one input of the largest host, or of each of its leaves."""
        return self._layout.inputs

    @property
    def lengths(self) -> Lengths | None:
        """What every row's splits are padded to; None where rows share every split, and none is padded."""
        return self._layout.lengths

    def largest(self) -> nn.Module:
        """Return a host in whose leading corner every instance's host fits."""
        return self._layout.host()


@brief
@dataclass(frozen=True, kw_only=True)
class Task(Instance, _Problems):
    """Pairs one data set with one host: every environment is the same problem from another start.

    It is its own `Instance`, the same for every key, and has the fields of one. Fields are given by name, and `outputs`, those of
    the objective, is not given.

    Attributes:
        name (str): name of the task
        summary (str): one line for `esper tasks`
        test (Split or None): read by the final evaluation alone; None in the copy that an engine holds
        objective (Objective): loss, metric and number of outputs
        menu (names): names of the blueprints that may be planted
        defaults (mapping): config that the task sets, under the user's own
        room (Room or None): layout of a row; None lays it out for the host itself
    """

    outputs: int = field(init=False, repr=False)
    test: Split | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "outputs", self.objective.outputs)

    @property
    def _layout(self) -> Room:
        return self.room or Room(self.host, shapes(self.train.x))

    @property
    def examples(self) -> int:
        """The number of training examples."""
        return len(self.train.y) if self.source is None else len(self.source)

    def instance(self, key: int) -> Instance:
        """Return the same for every key."""
        return self

    def test_split(self, key: int) -> Split | None:
        """Return what the final evaluation of an instance reads; None in a sealed task."""
        return self.test

    def keys(self, part: str) -> range:
        """Return the keys of instances, of which there is one kind here: any number of starts."""
        return range(2**31)


@brief
@dataclass(frozen=True, kw_only=True)
class Mixture(_Problems):
    """Samples problems by key: hosts of other widths, other data, one number of segments and slots.

    A row of a smaller host sits in the leading corner of the largest, and everything else of it is exactly 0. Fields are given
    by name.

    Attributes:
        name (str): name of the mixture
        summary (str): one line for `esper tasks`
        test (callable or None): from a key to its test `Split`; None in the copy that an engine holds
        objective (Objective): loss, metric and number of outputs
        menu (names): names of the blueprints that may be planted
        defaults (mapping): config that the mixture sets, under the user's own
        room (Room): layout of a row: the largest host and the longest splits
        sample (callable): from a key to its `Instance`
        ranges (mapping): disjoint ranges of keys, of 'training', 'validation' and 'heldout' instances
    """

    room: Room = field()  # without a default, unlike that of a task
    sample: Callable[[int], Instance]
    test: Callable[[int], Split] | None
    ranges: Mapping[str, range]

    def __post_init__(self) -> None:
        assert self.room.lengths is not None, "a row of a mixture is padded to lengths that its room names"

    def instance(self, key: int) -> Instance:
        """Return the instance of a key, the same in every run."""
        return self.sample(key)

    def test_split(self, key: int) -> Split | None:
        """Return what the final evaluation of an instance reads; None in a sealed mixture."""
        return self.test(key) if self.test is not None else None

    def keys(self, part: str) -> range:
        """Return the keys of the 'training', 'validation' or 'heldout' instances; no two parts share one."""
        return self.ranges[part]


def one_tensor(x: Batch, what: str) -> Tensor:
    """Return x. InputError if examples are several tensors, of which a task's `pixels` or `scaling` does not say which."""
    if isinstance(x, Tensor):
        return x
    raise InputError(
        f"the task has {what}, but its examples are {len(x)} tensors; leave {what} out, and let the host scale what it takes"
    )


AnyTask = Task | Mixture


def epochs_of(steps: int, config: Config, task: AnyTask) -> float | None:
    """Return the passes over the train split that the steps amount to; None for a mixture, whose train splits differ in size."""
    if isinstance(task, Mixture):
        return None
    return round(steps * config.data.batch_size * config.data.batches_per_step / task.examples, 4)


def with_steps(config: Config, task: AnyTask) -> Config:
    """Return the config with steps = ceil(epochs * N / (data.batch_size * data.batches_per_step)), unless `epochs` is None.

    N is the number of examples in the train split. InputError if the config also sets other `steps`, and for a mixture.
    """
    if config.epochs is None:
        return config
    if isinstance(task, Mixture):
        raise InputError(
            f"epochs is {config.epochs:g}, but the instances of {task.name} have train splits of several sizes; give steps"
        )
    seen, examples = config.data.batch_size * config.data.batches_per_step, task.examples
    # rounded first, so that 0.1 epochs of 10,240 examples are 1 step of 1,024
    steps = max(1, math.ceil(round(config.epochs * examples / seen, 9)))
    if steps > LARGE:
        raise InputError(
            f"epochs is {config.epochs:g}, which is {counted(steps, 'step')}; give a number that comes to {LARGE:,} or less"
        )
    if "steps" in config.model_fields_set and config.steps != steps:
        raise InputError(
            f"steps is {config.steps} and epochs is {config.epochs:g}, which is {counted(steps, 'step')} of "
            f"{counted(seen, 'example')}; give one of the two"
        )
    return config.model_copy(update={"steps": steps})
