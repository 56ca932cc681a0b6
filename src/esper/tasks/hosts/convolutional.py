"""Convolutional hosts, with and without skip connections."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Self

from torch import nn

from esper.kasmina.host import SegmentedHost
from esper.kasmina.stack.layers import PositionMean, Residual
from esper.leyline.errors import InputError
from esper.leyline.lifecycle.slots import SlotSpec
from esper.leyline.lifecycle.streams import Kind
from esper.tasks.hosts.dense import SCALE, HostFactory, check_sizes, is_size, linear


def conv(reads: int, writes: int, size: int, *, variance: float) -> nn.Conv2d:
    """A size x size convolution that keeps the resolution; its weights are normal with the given variance, its biases 0."""
    layer = nn.Conv2d(reads, writes, size, padding=size // 2)
    nn.init.normal_(layer.weight, std=variance**0.5)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


@dataclass(frozen=True)
class _Convolutional(HostFactory):
    """Base of the hosts for images: blocks that halve the resolution, a slot behind each, and a last layer."""

    inputs: tuple[int, int, int]  # channels, height and width of an image
    channels: tuple[int, ...]  # of the stream behind each block
    outputs: int

    def __post_init__(self) -> None:
        for name in ("inputs", "channels"):
            object.__setattr__(self, name, checked_sizes(self.called, name, getattr(self, name)))
        if len(self.inputs) != 3:
            raise InputError(f"inputs of {self.called} is {self.inputs!r}; give channels, height and width of an image")
        if not self.channels:
            raise InputError(f"channels of {self.called} is {self.channels!r}; give at least one block")
        check_sizes(self.called, {"outputs": self.outputs})
        if min(self.inputs[1:]) < 2 ** len(self.channels):
            raise InputError(
                f"an image of {self.inputs[1]} x {self.inputs[2]} pixels cannot be halved in {len(self.channels)} blocks; "
                "give fewer blocks or larger images"
            )

    def __call__(self) -> SegmentedHost:
        blocks = [
            self._block(k, reads, writes)
            for k, (reads, writes) in enumerate(pairwise((self.inputs[0], *self.channels)))
        ]
        last = self.channels[-1]
        head = nn.Sequential(PositionMean(), linear(last, self.outputs, variance=1 / last))
        slots = [
            SlotSpec(f"block{k}", after=k, width=width, kind=Kind.MAP, inner=3) for k, width in enumerate(self.channels)
        ]
        host = SegmentedHost([*blocks, head], slots)
        host.draws = False
        return host

    def _even(self, width: int) -> Self:
        return replace(self, channels=scaled_to(self.channels, width))

    @abstractmethod
    def _block(self, index: int, reads: int, writes: int) -> nn.Module:
        """A segment that halves a map of `reads` channels and returns one of `writes` channels."""


@dataclass(frozen=True)
class CNN(_Convolutional):
    """A factory of convolutional networks (B, C, H, W) -> (B, outputs), whose blocks halve the resolution.

        segment k:        Conv 3x3 (channels[k-1] -> channels[k]), MaxPool 2, ReLU                  then slot "block<k>"
        with `hidden`:    Conv 3x3 (channels[k-1] -> hidden[k]), MaxPool 2, ReLU, Conv 1x1 (hidden[k] -> channels[k])
        last segment:     mean over positions, Linear(channels[-1] -> outputs)

    Block 0 reads the channels of the input. There is no batch normalization, so no example depends on another. There is no
    skip connection: only a bypass can restore the information that a narrow block loses, as in `MLP`. Weights are drawn from
    torch's global generator, normal with standard deviation sqrt(2 / fan in) in front of a ReLU, and 1 / sqrt(fan in)
    elsewhere; biases are 0.
    """

    name: ClassVar[str] = "cnn"
    called: ClassVar[str] = "a CNN host"

    hidden: tuple[int, ...] = ()  # inner channels of each block; an empty tuple leaves out the inner layers

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", checked_sizes(self.called, "hidden", self.hidden))
        super().__post_init__()
        if len(self.hidden) not in (0, len(self.channels)):
            raise InputError(
                f"a CNN host has channels {self.channels} and hidden {self.hidden}; give either no hidden sizes or one a block"
            )

    def _even(self, width: int) -> Self:
        return replace(super()._even(width), hidden=())

    def _block(self, index: int, reads: int, writes: int) -> nn.Module:
        width = self.hidden[index] if self.hidden else writes
        layers: list[nn.Module] = [conv(reads, width, 3, variance=2 / (9 * reads)), nn.MaxPool2d(2), nn.ReLU()]
        if self.hidden:
            layers.append(conv(width, writes, 1, variance=1 / width))
        return nn.Sequential(*layers)


@dataclass(frozen=True)
class ResidualCNN(_Convolutional):
    """A factory of residual convolutional networks (B, C, H, W) -> (B, outputs), whose blocks halve the resolution.

        segment k:      s(x) + f(x)                                                                    then slot "block<k>"
                        f = Conv 3x3 (channels[k-1] -> channels[k]), MaxPool 2, ReLU, Conv 3x3 (channels[k] -> channels[k])
                        s = AvgPool 2, Conv 1x1 (channels[k-1] -> channels[k])
        last segment:   mean over positions, Linear(channels[-1] -> outputs)

    Block 0 reads the channels of the input. There is no batch normalization, so no example depends on another. Weights are
    drawn from torch's global generator, normal with standard deviation sqrt(2 / fan in) in front of a ReLU,
    SCALE / sqrt(fan in * blocks) in the last layer of f, and 1 / sqrt(fan in) elsewhere; biases are 0.
    """

    name: ClassVar[str] = "residual-cnn"
    called: ClassVar[str] = "a residual CNN host"

    def _block(self, index: int, reads: int, writes: int) -> nn.Module:
        branch = [
            conv(reads, writes, 3, variance=2 / (9 * reads)),
            nn.MaxPool2d(2),
            nn.ReLU(),
            conv(writes, writes, 3, variance=SCALE**2 / (9 * writes * len(self.channels))),
        ]
        return Residual(*branch, shortcut=nn.Sequential(nn.AvgPool2d(2), conv(reads, writes, 1, variance=1 / reads)))


def scaled_to(channels: Sequence[int], widest: int) -> tuple[int, ...]:
    """Channels in the same proportions, rounded up, of which the largest is `widest`."""
    return tuple(-(-size * widest // max(channels)) for size in channels)


def checked_sizes(of: str, name: str, sizes: Any) -> tuple[int, ...]:
    """The sizes of a host. Raises InputError if they are not positive integers; `of` names the host in the message."""
    if not isinstance(sizes, list | tuple) or any(not is_size(size) for size in sizes):
        raise InputError(f"{name} of {of} is {sizes!r}; give whole numbers from 1 on, as (8, 16)")
    return tuple(sizes)  # JSON has no tuples
