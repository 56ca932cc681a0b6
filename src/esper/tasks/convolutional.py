"""Convolutional hosts: with and without skips."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from torch import nn

from esper.kasmina.host import SegmentedHost
from esper.kasmina.layers import PositionMean, Residual
from esper.leyline.errors import InputError
from esper.leyline.slots import Kind, SlotSpec
from esper.tasks.dense import SCALE
from esper.tasks.sizes import check_sizes, conv, is_size, linear, smallest


@dataclass(frozen=True)
class CNN:
    """A factory of convolutional networks (B, C, H, W) -> (B, outputs), whose blocks halve the resolution.

        segment k:      Conv 3x3 (channels[k-1] -> channels[k]), MaxPool 2, ReLU                    then slot "block<k>"
        or, narrow:     Conv 3x3 (channels[k-1] -> hidden[k]), MaxPool 2, ReLU, Conv 1x1 (hidden[k] -> channels[k])
        last segment:   mean over positions, Linear(channels[-1] -> outputs)

    with channels[-1] of block 0 the input's. There is no normalisation over the batch, so that no example depends on others.
    What a narrow block loses only a bypass can bring back, as in `MLP`. Weights are drawn from torch's global generator,
    normal with the scale sqrt(2 / fan in) in front of a ReLU, or 1 / sqrt(fan in); biases are 0.

    Raises InputError where a size is not an integer from 1 on, there are not as many hidden sizes as blocks, or none, or the
    input is too small to be halved in every block.
    """

    name: ClassVar[str] = "cnn"

    inputs: tuple[int, int, int]  # channels, height and width of an image
    channels: tuple[int, ...]  # of the stream behind each block
    outputs: int
    hidden: tuple[int, ...] = ()  # inner channels of each block; none makes every block plain

    def __post_init__(self) -> None:
        for name in ("inputs", "channels", "hidden"):
            object.__setattr__(self, name, _sizes("a CNN host", name, getattr(self, name)))
        if self.channels and len(self.hidden) not in (0, len(self.channels)):
            raise InputError(
                f"a CNN host has channels {self.channels} and hidden {self.hidden}; give either no hidden sizes or one a block"
            )
        _check_images("a CNN host", self.inputs, self.channels, self.outputs)

    def __call__(self) -> SegmentedHost:
        """A freshly drawn host."""
        before = (self.inputs[0], *self.channels[:-1])
        inner = self.hidden or self.channels
        blocks = []
        for reads, width, writes in zip(before, inner, self.channels, strict=True):
            layers: list[nn.Module] = [conv(reads, width, 3, variance=2 / (9 * reads)), nn.MaxPool2d(2), nn.ReLU()]
            if self.hidden:
                layers.append(conv(width, writes, 1, variance=1 / width))
            blocks.append(nn.Sequential(*layers))
        return _host(blocks, self.channels, self.outputs)

    def plain(self, parameters: int) -> "CNN":
        """The network without narrow blocks, its channels scaled by the smallest factor with at least so many parameters."""

        def scaled(width: int) -> CNN:
            return replace(self, channels=scaled_to(self.channels, width), hidden=())

        return scaled(smallest(scaled, parameters))


@dataclass(frozen=True)
class ResidualCNN:
    """A factory of residual convolutional networks (B, C, H, W) -> (B, outputs), whose blocks halve the resolution.

        segment k:      s(x) + f(x)                                                                    then slot "block<k>"
                        f = Conv 3x3 (channels[k-1] -> channels[k]), MaxPool 2, ReLU, Conv 3x3 (channels[k] -> channels[k])
                        s = AvgPool 2, Conv 1x1 (channels[k-1] -> channels[k])
        last segment:   mean over positions, Linear(channels[-1] -> outputs)

    with channels[-1] of block 0 the input's. There is no normalisation over the batch, so that no example depends on others.
    Weights are drawn from torch's global generator, normal with the scale sqrt(2 / fan in) in front of a ReLU, or
    1 / sqrt(fan in), except for the last layer of f, which is SCALE / sqrt(fan in blocks); biases are 0.

    Raises InputError where a size is not an integer from 1 on, there is no block, or the input is too small to be halved in
    every block.
    """

    name: ClassVar[str] = "residual-cnn"

    inputs: tuple[int, int, int]  # channels, height and width of an image
    channels: tuple[int, ...]  # of the stream behind each block
    outputs: int

    def __post_init__(self) -> None:
        for name in ("inputs", "channels"):
            object.__setattr__(self, name, _sizes("a residual CNN host", name, getattr(self, name)))
        _check_images("a residual CNN host", self.inputs, self.channels, self.outputs)

    def __call__(self) -> SegmentedHost:
        """A freshly drawn host."""
        blocks = []
        for reads, writes in pairwise((self.inputs[0], *self.channels)):
            branch = [
                conv(reads, writes, 3, variance=2 / (9 * reads)),
                nn.MaxPool2d(2),
                nn.ReLU(),
                conv(writes, writes, 3, variance=SCALE**2 / (9 * writes * len(self.channels))),
            ]
            blocks.append(
                Residual(*branch, shortcut=nn.Sequential(nn.AvgPool2d(2), conv(reads, writes, 1, variance=1 / reads)))
            )
        return _host(blocks, self.channels, self.outputs)

    def plain(self, parameters: int) -> "ResidualCNN":
        """The residual network of as many blocks, its channels scaled by the smallest factor with so many parameters."""

        def scaled(width: int) -> ResidualCNN:
            return replace(self, channels=scaled_to(self.channels, width))

        return scaled(smallest(scaled, parameters))


def _host(blocks: Sequence[nn.Module], channels: Sequence[int], outputs: int) -> SegmentedHost:
    """A host of blocks with a slot behind each, and a freshly drawn last segment: mean over positions, and a linear layer."""
    head = nn.Sequential(PositionMean(), linear(channels[-1], outputs, variance=1 / channels[-1]))
    slots = [SlotSpec(f"block{k}", after=k, width=width, kind=Kind.MAP, inner=3) for k, width in enumerate(channels)]
    host = SegmentedHost([*blocks, head], slots)
    host.draws = False
    return host


def scaled_to(channels: Sequence[int], widest: int) -> tuple[int, ...]:
    """Channels in the same proportions, rounded up, of which the largest is `widest`."""
    return tuple(-(-size * widest // max(channels)) for size in channels)


def _sizes(of: str, name: str, sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, list | tuple) or any(not is_size(size) for size in sizes):
        raise InputError(f"{name} of {of} is {sizes!r}; give whole numbers from 1 on, as (8, 16)")
    return tuple(sizes)  # JSON has no tuples


def _check_images(of: str, inputs: Sequence[int], channels: Sequence[int], outputs: Any) -> None:
    if len(inputs) != 3:
        raise InputError(f"inputs of {of} is {inputs!r}; give channels, height and width of an image")
    if not channels:
        raise InputError(f"channels of {of} is {channels!r}; give at least one block")
    check_sizes(of, {"outputs": outputs})
    if min(inputs[1:]) < 2 ** len(channels):
        raise InputError(
            f"an image of {inputs[1]} x {inputs[2]} pixels cannot be halved in {len(channels)} blocks; "
            "give fewer blocks or larger images"
        )
