"""A grown network as one plain module that takes raw features and predicts labels as the task had them. B examples, C outputs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.kasmina.asked import read_examples
from esper.kasmina.chain import Chain, calling
from esper.kasmina.host import SegmentedHost
from esper.kasmina.slot import Seed, slot_output
from esper.leyline.actions import Blend
from esper.leyline.batches import Batch, batch_of, first, map_leaves, run
from esper.leyline.errors import InputError
from esper.leyline.sites import Taps
from esper.leyline.slots import Tap
from esper.leyline.streams import STREAMS, Kind
from esper.leyline.task import Interface, Scaling

CHUNK = 4096
"""Largest number of examples in one pass of `predict`."""


class Graft(NamedTuple):
    """A fossilized seed of one network.

    Attributes:
        after (int): index of the segment whose output it changes
        tap (Tap): what it reads
        blend (Blend): how its change enters the stream
        alpha (float): the dose that it has for good
        kind (Kind): the kind of the stream
        blueprint (str): name of its blueprint; empty if it is not known
    """

    after: int
    tap: Tap
    blend: Blend
    alpha: float
    kind: Kind
    blueprint: str = ""


class _Scaled(nn.Module):
    """A mean and a standard deviation as buffers."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        self.register_buffer("mean", scaling.mean.detach().clone())
        self.register_buffer("deviation", scaling.deviation.detach().clone())

    @property
    def scaling(self) -> Scaling:
        """The mean and the deviation, on the device that they are on."""
        return Scaling(self.mean, self.deviation)


class Standardize(_Scaled):
    """(x - mean) / deviation of examples x (B, ...) of any dtype, in the dtype of its buffers."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, ...)."""
        return self.scaling.read(x)


class Restore(_Scaled):
    """z * deviation + mean of outputs z (B, ...), whose mean and deviation have the shape of one example's y."""

    def forward(self, z: Tensor) -> Tensor:
        """(B, ...) -> (B, ...)."""
        return self.scaling.restore(z)


class GrownNetwork(nn.Module):
    """A host with the seeds that were kept, as one plain module: (B, ...) -> (B, ..., C).

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
        self.standardize = None if interface.scaling is None else Standardize(interface.scaling)
        self.segments = host.segments
        self.slots, self.stacks, self.draws = host.slots, host.stacks, host.draws  # to grow it further
        self.seeds = nn.ModuleList(seeds)
        self.grafts = tuple(grafts)
        self.restore = None if interface.target_scaling is None else Restore(interface.target_scaling)
        self.interface, self.inputs = interface, interface.inputs
        self.classes = interface.classes
        self.target = interface.target
        self.columns = interface.columns
        self.original = original

    def forward(self, x: Tensor | None = None, /, *others: Tensor, **named: Tensor) -> Tensor:
        """(B, ...) -> (B, ..., C): the logit of every class, or the value of every target."""
        batch = batch_of(() if x is None else (x, *others), named)
        if self.standardize is not None:
            assert isinstance(batch, Tensor), "only a single tensor is standardized"
            batch = self.standardize(batch)
        y = run_segments(batch, self.segments, self.seeds, self.grafts)
        return y if self.restore is None else self.restore(y)

    def describe(self) -> str:
        """Return the segments and the seeds as text, a line each in the order in which they run, with layers and parameters."""
        from esper.kasmina.drawing import describe  # which imports this module

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
            labels: NDArray[Any] = np.array(self.classes)[output.argmax(-1)]
            return labels
        return output if self.target else output.reshape(len(output))

    def predict_proba(self, x: Any) -> NDArray[Any]:
        """Predict (B, ..., C) the probability of each class, in the order of `classes`: the softmax of the outputs.

        x: as for `predict`. Raises InputError if x does not fit the network or is not finite, or if the network does
        not predict classes.
        """
        if self.classes is None:
            raise InputError("the network predicts values, which have no probabilities; use predict(x)")
        found: NDArray[Any] = torch.from_numpy(self._outputs(x)).softmax(-1).numpy()
        return found

    @torch.no_grad()
    def _outputs(self, x: Any) -> NDArray[Any]:
        """Compute (B, ..., C) outputs in evaluation mode, on the CPU."""
        weight = next((value for value in self.state_dict().values() if value.is_floating_point()), torch.zeros(()))
        examples = read_examples(x, self.interface, weight.dtype)
        count = len(first(examples))
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            parts = [run(self, _piece(examples, start, weight.device)).cpu() for start in range(0, count, CHUNK)]
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


def _piece(examples: Batch, start: int, device: torch.device) -> Batch:
    """Return at most `CHUNK` examples from index `start` on, on a device."""
    piece: Batch = map_leaves(lambda leaf: leaf[start : start + CHUNK].to(device), examples)
    return piece


def run_segments(x: Batch, segments: nn.ModuleList, seeds: nn.ModuleList, grafts: Sequence[Graft]) -> Tensor:
    """Run segments one after the other, each with the seed that is grafted behind it: (B, ...) -> (B, ...)."""

    def grown(site: int, taps: Taps[Batch]) -> Batch:
        graft, seed = grafts[site], cast(Seed, seeds[site])
        read = {Tap.HERE: taps.here, Tap.BEFORE: taps.before, Tap.INPUT: taps.input}[graft.tap]
        stream, h, u = STREAMS[graft.kind], cast(Tensor, taps.here), cast(Tensor, read)
        return slot_output(stream, h, u, seed, graft.alpha, graft.blend)

    return cast(Tensor, Chain(len(segments), [graft.after for graft in grafts]).run(calling(segments), x, grown))
