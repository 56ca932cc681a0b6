"""Build fully connected and convolutional hosts, with and without skip connections, and the parts that all hosts share."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, Self, get_args, get_origin

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import count, drawn_with
from esper.kasmina.host import SegmentedHost
from esper.kasmina.stack import fused
from esper.kasmina.stack.layers import Linear, PositionMean, Residual
from esper.leyline.config.arguments import check_integer, is_number
from esper.leyline.data.task import Room
from esper.leyline.lifecycle.slots import Kind, SlotSpec
from esper.leyline.messages import InputError

SCALE = 0.5
"""Initial scale of the last layers of all residual blocks together, chosen on validation data (`esper docs hosts`)."""


def linear(inputs: int, outputs: int, *, variance: float) -> Linear:
    """Return a linear layer whose weights are normal with the given variance and whose biases are 0."""
    layer = Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=variance**0.5)
    nn.init.zeros_(layer.bias)
    return layer


def conv(reads: int, writes: int, size: int, *, variance: float) -> nn.Conv2d:
    """Make a size x size convolution that keeps the resolution; its weights are normal with a given variance, its biases 0."""
    layer = nn.Conv2d(reads, writes, size, padding=size // 2)
    nn.init.normal_(layer.weight, std=variance**0.5)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def checked_flags(of: str, name: str, flags: Any, blocks: int) -> tuple[bool, ...]:
    """Return one bool for each block. InputError if they are not; `of` names the host in the message."""
    if not isinstance(flags, list | tuple) or len(flags) != blocks or not all(isinstance(flag, bool) for flag in flags):
        raise InputError(f"{name} of {of} is {flags!r}; give True or False for each of its {blocks} blocks")
    return tuple(flags)  # JSON has no tuples


@dataclass(frozen=True)
class HostFactory(ABC):
    """Makes hosts from plain arguments; the base of the factories.

    Hosts have no batch normalization, so no example depends on another. Unless a class says otherwise, weights are drawn from
    torch's global generator, normal with standard deviation sqrt(2 / fan in) in front of a ReLU, and 1 / sqrt(fan in)
    elsewhere; biases are 0.
    """

    name: ClassVar[str]  # in files
    called: ClassVar[str]  # in messages

    def __post_init__(self) -> None:
        """Raise InputError if a size is not a positive integer, or a tuple of sizes does not hold these alone."""
        for each in fields(self):
            name, value = f"{each.name} of {self.called}", getattr(self, each.name)
            if each.type is int:
                check_integer(value, name)
            elif get_origin(each.type) is tuple and int in get_args(each.type):
                if not isinstance(value, list | tuple) or any(not is_number(size, int) or size < 1 for size in value):
                    raise InputError(f"{name} is {value!r}; give whole numbers from 1 on, as (8, 16)")
                object.__setattr__(self, each.name, tuple(value))  # JSON has no tuples

    @abstractmethod
    def __call__(self) -> SegmentedHost:
        """Return a freshly drawn host."""

    def plain(self, parameters: int) -> Self:
        """Return the network of the same depth, not narrow anywhere, of the least width with at least `parameters` parameters."""

        def size(width: int) -> int:
            with torch.device("meta"), drawn_with(0):  # parameters are counted without allocating them
                return count(self._even(width)())

        high = 1
        while size(high) < parameters:
            high *= 2
        return self._even(bisect_left(range(high), parameters, lo=high // 2 + 1, key=size))

    @abstractmethod
    def _even(self, width: int) -> Self:
        """Return the network of the same depth and of this width throughout."""


@dataclass(frozen=True)
class _Dense(HostFactory):
    """Makes hosts for vectors: an embedding, blocks of one hidden layer with a slot behind each, and a last layer."""

    inputs: int
    width: int
    hidden: tuple[int, ...]  # inner width of each block
    outputs: int

    residual: ClassVar[bool]  # whether a block adds to its input

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hidden:
            raise InputError(f"hidden of {self.called} is (); give the inner widths of its blocks, as (4, 12)")

    def __call__(self) -> SegmentedHost:
        blocks = [self._block(inner) for inner in self.hidden]
        embed = linear(self.inputs, self.width, variance=1 / self.inputs)
        head = linear(self.width, self.outputs, variance=1 / self.width)
        slots = [SlotSpec(f"block{k}", after=k + 1, width=self.width, inner=2) for k in range(len(blocks))]
        host = SegmentedHost([embed, *blocks, head], slots)
        host.stacks = True
        return host

    def room(self, others: Sequence["_Dense"] = (), outputs: int = 1) -> Room:
        """Return the layout of rows for this host and others of its class and depth, with at least `outputs` outputs.

        Widths are rounded up to multiples of 4, which aligns every row of a stack to 16 bytes. The last bit of a matrix product
        can depend on the alignment of its result, so a row's numbers would otherwise depend on its index in the population.
        """
        hosts = (self, *others)

        def up(widths: Iterable[int]) -> int:
            return -(-max(widths) // 4) * 4

        hidden = tuple(up(inner) for inner in zip(*(host.hidden for host in hosts), strict=True))
        sizes = {name: up(getattr(host, name) for host in hosts) for name in ("inputs", "width")}
        layout = replace(self, **sizes, hidden=hidden, outputs=max(outputs, *(host.outputs for host in hosts)))
        return Room(layout, (layout.inputs,))

    def _even(self, width: int) -> Self:
        return replace(self, width=width, hidden=(width,) * len(self.hidden))

    def _block(self, inner: int) -> nn.Module:
        """Return a segment of one hidden layer of `inner` units."""
        first = linear(self.width, inner, variance=2 / self.width)
        if self.residual:
            last = linear(inner, self.width, variance=SCALE**2 / (inner * len(self.hidden)))
            return Residual(first, nn.ReLU(), last)
        return nn.Sequential(first, nn.ReLU(), linear(inner, self.width, variance=1 / inner))


@dataclass(frozen=True)
class MLP(_Dense):
    """Makes multilayer perceptrons (B, inputs) -> (B, outputs) on a stream of `width` features.

        segment 0:      Linear(inputs -> width)
        segment k + 1:  Linear(width -> hidden[k]), ReLU, Linear(hidden[k] -> width)     then slot "block<k>"
        last segment:   Linear(width -> outputs)

    There is no skip connection, so only a bypass can restore the information that a narrow segment loses.
    """

    name: ClassVar[str] = "mlp"
    called: ClassVar[str] = "an MLP host"
    residual: ClassVar[bool] = False


@dataclass(frozen=True)
class ResidualMLP(_Dense):
    """Makes residual networks (B, inputs) -> (B, outputs) on a stream of `width` features.

        segment 0:      Linear(inputs -> width)
        segment k + 1:  x + f(x),  f = Linear(width -> hidden[k]), ReLU, Linear(hidden[k] -> width)    then slot "block<k>"
        last segment:   Linear(width -> outputs)

    The standard deviation in the last layer of a block is SCALE / sqrt(fan in * blocks).
    """

    name: ClassVar[str] = "residual-mlp"
    called: ClassVar[str] = "a residual MLP host"
    residual: ClassVar[bool] = True


class Floor(nn.Module):
    """Computes max(z, floor), elementwise: the ReLU at floor 0, and the identity at minus infinity.

    The floor is a buffer, so the rows of one stack can have different floors. Padded units are 0 and stay 0 at both floors.
    """

    stacks = True
    fused = fused.RowFloor
    floor: Tensor  # (1, 1); stacked (E, 1, 1)

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.register_buffer("floor", torch.full((1, 1), -torch.inf if linear else 0.0))

    def forward(self, z: Tensor) -> Tensor:
        """Return (B, H) -> (B, H), or (E, B, H) -> (E, B, H)."""
        return torch.clamp(z, min=self.floor)


@dataclass(frozen=True)
class DamagedMLP(MLP):
    """Makes the networks of `MLP`, of which some blocks have no nonlinearity or are never trained.

        segment k + 1:  Linear(width -> hidden[k]), Floor(linear[k]), Linear(hidden[k] -> width)

    The parameters of block k do not require a gradient where frozen[k]. The initial weights are those of the MLP.
    """

    name: ClassVar[str] = "damaged-mlp"

    linear: tuple[bool, ...]  # blocks without a nonlinearity
    frozen: tuple[bool, ...]  # blocks that keep their initial weights

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("linear", "frozen"):
            flags = checked_flags("a damaged MLP host", name, getattr(self, name), len(self.hidden))
            object.__setattr__(self, name, flags)

    def __call__(self) -> SegmentedHost:
        host = super().__call__()
        for block, is_linear, frozen in zip(host.segments[1:-1], self.linear, self.frozen, strict=True):
            assert isinstance(block, nn.Sequential)
            block[1] = Floor(is_linear)
            block.requires_grad_(not frozen)
        return host

    def _even(self, width: int) -> MLP:  # type: ignore[override]  # a plain network is undamaged
        return MLP(self.inputs, width, (width,) * len(self.hidden), self.outputs)


@dataclass(frozen=True)
class _Convolutional(HostFactory):
    """Makes hosts for images: blocks that halve the resolution, a slot behind each, and a last layer."""

    inputs: tuple[int, int, int]  # channels, height and width of an image
    channels: tuple[int, ...]  # of the stream behind each block
    outputs: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.inputs) != 3:
            raise InputError(f"inputs of {self.called} is {self.inputs!r}; give channels, height and width of an image")
        if not self.channels:
            raise InputError(f"channels of {self.called} is {self.channels!r}; give at least one block")
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
        widest = max(self.channels)  # the channels keep their proportions
        return replace(self, channels=tuple(-(-size * width // widest) for size in self.channels))

    @abstractmethod
    def _block(self, index: int, reads: int, writes: int) -> nn.Module:
        """Return a segment that halves a map of `reads` channels and returns one of `writes` channels."""


@dataclass(frozen=True)
class CNN(_Convolutional):
    """Makes convolutional networks (B, C, H, W) -> (B, outputs), whose blocks halve the resolution.

        segment k:        Conv 3x3 (channels[k-1] -> channels[k]), MaxPool 2, ReLU                  then slot "block<k>"
        with `hidden`:    Conv 3x3 (channels[k-1] -> hidden[k]), MaxPool 2, ReLU, Conv 1x1 (hidden[k] -> channels[k])
        last segment:     mean over positions, Linear(channels[-1] -> outputs)

    Block 0 reads the channels of the input. There is no skip connection, as in `MLP`.
    """

    name: ClassVar[str] = "cnn"
    called: ClassVar[str] = "a CNN host"

    hidden: tuple[int, ...] = ()  # inner channels of each block; an empty tuple leaves out the inner layers

    def __post_init__(self) -> None:
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
    """Makes residual convolutional networks (B, C, H, W) -> (B, outputs), whose blocks halve the resolution.

        segment k:      s(x) + f(x)                                                                    then slot "block<k>"
                        f = Conv 3x3 (channels[k-1] -> channels[k]), MaxPool 2, ReLU, Conv 3x3 (channels[k] -> channels[k])
                        s = AvgPool 2, Conv 1x1 (channels[k-1] -> channels[k])
        last segment:   mean over positions, Linear(channels[-1] -> outputs)

    Block 0 reads the channels of the input. The standard deviation in the last layer of f is SCALE / sqrt(fan in * blocks).
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
