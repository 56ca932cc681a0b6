"""Run a grown network as one plain module: it takes raw features and predicts the task's labels. B examples, C outputs."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.kasmina.host import SegmentedHost
from esper.kasmina.slot import Seed, slot_output
from esper.leyline.data.batches import Batch, batch_of, first, map_leaves, picked, run
from esper.leyline.data.task import Interface, Scaling
from esper.leyline.lifecycle.slots import STREAMS, Kind, Tap
from esper.leyline.lifecycle.vocabulary import Blend
from esper.leyline.messages import InputError

CHUNK = 4096
"""Largest number of examples in one pass of `predict`."""


class Graft(NamedTuple):
    """Describes a fossilized seed of one network."""

    after: int  # index of the segment whose output it changes
    tap: Tap  # what it reads
    blend: Blend  # how its change enters the stream
    alpha: float  # the dose that it has for good
    kind: Kind  # the kind of the stream
    blueprint: str = ""  # name of its blueprint; empty if it is not known
    around: int | None = None  # index of the segment whose input a bypass reads; None is `after`

    @property
    def start(self) -> int:
        """The index of the first segment whose input the seed needs, or of the one in front of it if it needs none."""
        bypassed = self.after if self.around is None else self.around
        return {Tap.HERE: self.after, Tap.BEFORE: bypassed, Tap.INPUT: 0}[self.tap]


class Standardization(nn.Module):
    """Holds the mean and the standard deviation of features or targets as buffers, in whose dtype `scaling` computes."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        self.register_buffer("mean", scaling.mean.detach().clone())
        self.register_buffer("deviation", scaling.deviation.detach().clone())

    @property
    def scaling(self) -> Scaling:
        return Scaling(self.mean, self.deviation)


class GrownNetwork(nn.Module):
    """Runs a host with the seeds that were kept, as one plain module: (B, ...) -> (B, ..., C).

    It is called as the first segment of its host is: network(x), network(*batch) or network(**batch), with the batches
    of the task. It takes features as the task was given them, or as its `preprocess` made them. If the task
    standardizes features, the first module, `standardize`, does so. It returns targets as the task was given them. If
    hosts return standardized targets, the last module, `restore`, undoes the standardization.

    inputs: shape of one example, or of each of its tensors if there are several.
    classes: the labels as the task was given them, in the order of the outputs; None if the outputs are values.
    target: shape of one example's y.
    columns: the names of the features if the task was given a data frame, else None.
    original: the factory of the host without any seed if a file can name it, else None.
    """

    def __init__(
        self,
        host: SegmentedHost,
        seeds: Sequence[nn.Module],
        grafts: Sequence[Graft],
        interface: Interface,
        original: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.standardize = None if interface.scaling is None else Standardization(interface.scaling)
        self.segments = host.segments
        self.slots, self.stacks, self.draws = host.slots, host.stacks, host.draws  # to grow it further
        self.seeds = nn.ModuleList(seeds)
        self.grafts = tuple(grafts)
        self.restore = None if interface.target_scaling is None else Standardization(interface.target_scaling)
        self.interface, self.inputs = interface, interface.inputs
        self.classes = interface.classes
        self.target = interface.target
        self.columns = interface.columns
        self.original = original

    def forward(self, x: Tensor | None = None, /, *others: Tensor, **named: Tensor) -> Tensor:
        """Return (B, ...) -> (B, ..., C): the logit of every class, or the value of every target."""
        batch = batch_of(() if x is None else (x, *others), named)
        if self.standardize is not None:
            assert isinstance(batch, Tensor), "only a single tensor is standardized"
            batch = self.standardize.scaling.read(batch)
        y = run_segments(batch, self.segments, self.seeds, self.grafts)
        return y if self.restore is None else self.restore.scaling.restore(y)

    def describe(self) -> str:
        """Return the segments and the seeds as text, a line each in the order in which they run, with layers and parameters."""
        from esper.kasmina.network.drawing import describe  # which imports this module

        return describe(self)

    def predict(self, x: Any) -> NDArray[Any]:
        """Predict the label (B,) of each example, or its labels (B, ...), as the task's y had them; for a regression,
        the targets.

        x: (B, ...) features as the task was given them, in a tensor, an array, a list or a data frame, whose columns
        are taken by name; a tuple or a mapping of these if the task's examples are one; raw where the task had a `preprocess`.
        Dropout is off, and the network stays in its mode.

        Raises InputError if x does not fit the network, or is not finite.
        """
        output = self._outputs(x)
        if self.classes is not None:
            return np.array(self.classes)[output.argmax(-1)]
        return output if self.target else output.reshape(len(output))

    def predict_proba(self, x: Any) -> NDArray[Any]:
        """Predict (B, ..., C) the probability of each class, in the order of `classes`: the softmax of the outputs.

        x: as for `predict`. Raises InputError if x does not fit the network or is not finite, or if the network does
        not predict classes.
        """
        if self.classes is None:
            raise InputError("the network predicts values, which have no probabilities; use predict(x)")
        return torch.from_numpy(self._outputs(x)).softmax(-1).numpy()

    @torch.no_grad()
    def _outputs(self, x: Any) -> NDArray[Any]:
        """Compute (B, ..., C) outputs in evaluation mode, on the CPU."""
        weight = next((value for value in self.state_dict().values() if value.is_floating_point()), torch.zeros(()))
        examples = self.interface.read(x, weight.dtype)
        count = len(first(examples))
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            pieces = (picked(examples, slice(start, start + CHUNK)) for start in range(0, count, CHUNK))
            parts = [run(self, map_leaves(lambda leaf: leaf.to(weight.device), piece)).cpu() for piece in pieces]
        finally:
            for module, training in modes.items():
                module.training = training
        joined = torch.cat(parts)
        output: NDArray[Any] = (joined.float() if joined.dtype == torch.bfloat16 else joined).numpy()
        if self.classes is not None and output.shape[1:] != (*self.target, len(self.classes)):
            raise InputError(
                f"the network has outputs of shape {output.shape[1:]}, but {len(self.classes)} classes; export it again"
            )
        return output


def run_segments(x: Batch, segments: nn.ModuleList, seeds: nn.ModuleList, grafts: Sequence[Graft]) -> Tensor:
    """Run segments one after the other, each with the seed that is grafted behind it: (B, ...) -> (B, ...)."""
    planted = {graft.after: (graft, cast(Seed, seed)) for graft, seed in zip(grafts, seeds, strict=True)}
    here: Any = x
    entered: dict[int, Any] = {}  # what entered the segments from which a seed reads
    starts = {graft.start for graft in grafts}
    for index, segment in enumerate(segments):
        if index in starts:
            entered[index] = here
        here = run(segment, here)
        if index in planted:
            graft, seed = planted[index]
            read = here if graft.tap == Tap.HERE else entered[graft.start]
            here = slot_output(STREAMS[graft.kind], here, read, seed, graft.alpha, graft.blend)
    return cast(Tensor, here)


class GraftedSegments(nn.Module):
    """Runs segments of a grown network with the seeds behind them, as one segment: leaves (B, ...) -> (B, ...)."""

    def __init__(self, segments: Sequence[nn.Module], seeds: Sequence[nn.Module], grafts: Sequence[Graft]) -> None:
        super().__init__()
        self.segments = nn.ModuleList(segments)
        self.seeds = nn.ModuleList(seeds)
        self.grafts = tuple(grafts)

    def forward(self, x: Tensor | None = None, /, *others: Tensor, **named: Tensor) -> Tensor:
        batch = batch_of(() if x is None else (x, *others), named)
        return run_segments(batch, self.segments, self.seeds, self.grafts)


class RegrownHost:
    """Makes copies of one grown network, loaded once, so that a run does not need the files of an earlier run."""

    def __init__(self, network: GrownNetwork) -> None:
        self._host = as_host(network)
        self.original = network.original
        # makes the host that was grown first, without any seed: the named factory, or one of the segments
        self.ungrown = network.original or partial(copy.deepcopy, _ungrown(network))
        # of the features that the host reads, and of the targets that it returns; None if they are raw
        self.scaling, self.target_scaling = (
            None if module is None else Scaling(*(values.clone() for values in module.scaling))
            for module in (network.standardize, network.restore)
        )

    def __call__(self) -> SegmentedHost:
        return copy.deepcopy(self._host)


def _ungrown(network: GrownNetwork) -> SegmentedHost:
    """Return the host that a network grew from, with its present weights, without any seed of this run or of earlier ones."""
    parts = [_flat(segment) for segment in network.segments]
    ends = np.cumsum([len(part) for part in parts])  # of each part, counted in segments of the first host
    slots = []
    for slot in network.slots:
        around = None if slot.around is None else int(ends[slot.around]) - len(parts[slot.around])
        slots.append(replace(slot, after=int(ends[slot.after]) - 1, around=around))
    host = SegmentedHost([segment for part in parts for segment in part], slots)
    host.stacks, host.draws = network.stacks, network.draws
    return host


def _flat(segment: nn.Module) -> list[nn.Module]:
    """Return the segments of the first host that are inside a segment of a regrown one, in order."""
    if isinstance(segment, GraftedSegments):
        return [part for inner in segment.segments for part in _flat(inner)]
    return [segment]


def as_host(network: GrownNetwork) -> SegmentedHost:
    """Return the network as a host with free slots, which reads and returns standardized values if the network does.

    A seed becomes part of the segment that it was grafted behind, which then offers no inner features. A seed that reads the
    input, or what entered an earlier segment, needs all segments from there on, which become one; the slots between them are gone
    (`lost_slots`). A slot behind them whose bypasses went around some of these is then around its own segment alone.
    """
    groups, planted = _groups(network), list(zip(network.seeds, network.grafts, strict=True))
    place = {index: at for at, group in enumerate(groups) for index in group}  # of each segment among those of the host
    segments, grafted = [], set[int]()
    for group in groups:
        seeds = [seed for seed, graft in planted if graft.after in group]
        grafts = []
        for graft in (graft for _, graft in planted if graft.after in group):
            around = None if graft.around is None else graft.around - group[0]
            grafts.append(graft._replace(after=graft.after - group[0], around=around))
        if len(group) == 1 and not seeds:
            segments.append(network.segments[group[0]])
        else:
            segments.append(GraftedSegments([network.segments[index] for index in group], seeds, grafts))
            grafted.add(group[-1])
    slots = []
    for slot in network.slots:
        at, around = place[slot.after], slot.around
        if slot.after < groups[at][-1]:
            continue
        if around is not None:  # what enters a segment in the middle of others can no longer be read behind them
            around = place[around] if around == groups[place[around]][0] else None
        slots.append(replace(slot, after=at, inner=None if slot.after in grafted else slot.inner, around=around))
    host = SegmentedHost(segments, slots)
    host.stacks = network.stacks and all(
        getattr(seed.get_submodule("delta"), "stacks", False) for seed in network.seeds
    )
    host.draws = network.draws or any(getattr(seed, "draws", True) for seed in network.seeds)
    return host


def lost_slots(network: GrownNetwork) -> list[str]:
    """Return the names of the slots that `as_host` has no place for."""
    last = {group[-1] for group in _groups(network)}
    return [slot.name for slot in network.slots if slot.after not in last]


def _groups(network: GrownNetwork) -> list[range]:
    """Return the segments of a network, in order, together where a seed behind the last of them reads what enters the first."""
    count, spans = len(network.segments), [range(graft.start, graft.after) for graft in network.grafts]
    ends = [index + 1 for index in range(count) if not any(index in span for span in spans)]
    return [range(*each) for each in zip([0, *ends], ends, strict=False)]
