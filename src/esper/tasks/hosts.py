"""Hosts of our own: slim networks whose narrow segments leave a seed something to repair."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from esper.kasmina.host import SegmentedHost
from esper.kasmina.layers import Linear, PositionMean
from esper.leyline.errors import InputError
from esper.leyline.slots import Kind, SlotSpec
from esper.leyline.task import Room

VECTOR_MENU = ("bypass-linear", "bypass-mlp", "mlp-small")
"""The default menu where the stream is a vector. A skip from the input is not in it: it leaves nothing to decide."""
MAP_MENU = ("bypass-conv-3x3", "bypass-conv-1x1", "conv-light", "squeeze-excite")
"""The default menu where the stream is a map."""


@dataclass(frozen=True)
class MLP:
    """A factory of multilayer perceptrons (B, inputs) -> (B, outputs) on a stream of `width` features.

        segment 0:      Linear(inputs -> width)
        segment k + 1:  Linear(width -> hidden[k]), ReLU, Linear(hidden[k] -> width)     then slot "block<k>"
        last segment:   Linear(width -> outputs)

    Segments have no residual path, so what a narrow one loses only a bypass can bring back. Weights are drawn from
    torch's global generator, normal with the scale 1 / sqrt(fan in), or sqrt(2 / fan in) in front of a ReLU; biases
    are 0.

    Raises InputError where a size is not an integer from 1 on, or there is no hidden size.
    """

    name: ClassVar[str] = "mlp"

    inputs: int
    width: int
    hidden: tuple[int, ...]  # inner width of each block
    outputs: int

    def __post_init__(self) -> None:
        if not isinstance(self.hidden, list | tuple) or not self.hidden:
            raise InputError(
                f"hidden of an MLP host is {self.hidden!r}; give the inner widths of its blocks, as (4, 12)"
            )
        object.__setattr__(self, "hidden", tuple(self.hidden))  # JSON has no tuples
        sizes: dict[str, Any] = {"inputs": self.inputs, "width": self.width, "outputs": self.outputs}
        sizes |= {f"hidden[{k}]": size for k, size in enumerate(self.hidden)}
        for name, size in sizes.items():
            if not _is_size(size):
                raise InputError(f"{name} of an MLP host is {size!r}; give a whole number from 1 on")

    def __call__(self) -> SegmentedHost:
        """A freshly drawn host."""
        blocks = [
            nn.Sequential(
                _linear(self.width, inner, variance=2 / self.width),
                nn.ReLU(),
                _linear(inner, self.width, variance=1 / inner),
            )
            for inner in self.hidden
        ]
        embed = _linear(self.inputs, self.width, variance=1 / self.inputs)
        head = _linear(self.width, self.outputs, variance=1 / self.width)
        slots = [SlotSpec(f"block{k}", after=k + 1, width=self.width, inner=2) for k in range(len(blocks))]
        host = SegmentedHost([embed, *blocks, head], slots)
        host.stacks = True
        return host


class Floor(nn.Module):
    """max(z, floor), elementwise: the ReLU at floor 0, and the identity at minus infinity.

    The floor is a buffer, so that rows of one stack differ in it. A padded unit, exactly 0, stays 0 under either.
    """

    stacks = True
    floor: Tensor  # (1, 1); stacked (E, 1, 1)

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.register_buffer("floor", torch.full((1, 1), -torch.inf if linear else 0.0))

    def forward(self, z: Tensor) -> Tensor:
        """(B, H) -> (B, H), or (E, B, H) -> (E, B, H)."""
        return torch.clamp(z, min=self.floor)


@dataclass(frozen=True)
class DamagedMLP:
    """A factory of hosts as `MLP` makes them, some of whose blocks have no nonlinearity or never train.

        segment k + 1:  Linear(width -> hidden[k]), Floor(linear[k]), Linear(hidden[k] -> width)

    The parameters of block k do not require a gradient where frozen[k]. All of them are drawn as those of the MLP.

    Raises InputError where a size is not an integer from 1 on, or there is not one truth value of each kind a block.
    """

    name: ClassVar[str] = "damaged-mlp"

    inputs: int
    width: int
    hidden: tuple[int, ...]  # inner width of each block
    outputs: int
    linear: tuple[bool, ...]  # blocks without a nonlinearity
    frozen: tuple[bool, ...]  # blocks that stay as they were drawn

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", self._sound().hidden)
        for name in ("linear", "frozen"):
            flags = getattr(self, name)
            if (
                not isinstance(flags, list | tuple)
                or len(flags) != len(self.hidden)
                or not all(isinstance(flag, bool) for flag in flags)
            ):
                raise InputError(
                    f"{name} of a damaged MLP host is {flags!r}; give True or False for each of its "
                    f"{len(self.hidden)} blocks"
                )
            object.__setattr__(self, name, tuple(flags))

    def __call__(self) -> SegmentedHost:
        """A freshly drawn host."""
        host = self._sound()()
        for block, linear, frozen in zip(host.segments[1:-1], self.linear, self.frozen, strict=True):
            assert isinstance(block, nn.Sequential)
            block[1] = Floor(linear)
            block.requires_grad_(not frozen)
        return host

    def _sound(self) -> MLP:
        return MLP(self.inputs, self.width, self.hidden, self.outputs)


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
            sizes = getattr(self, name)
            if not isinstance(sizes, list | tuple) or any(not _is_size(size) for size in sizes):
                raise InputError(f"{name} of a CNN host is {sizes!r}; give whole numbers from 1 on, as (8, 16)")
            object.__setattr__(self, name, tuple(sizes))  # JSON has no tuples
        if len(self.inputs) != 3:
            raise InputError(f"inputs of a CNN host is {self.inputs!r}; give channels, height and width of an image")
        if not self.channels or len(self.hidden) not in (0, len(self.channels)):
            raise InputError(
                f"a CNN host has channels {self.channels} and hidden {self.hidden}; give at least one block, and either no "
                "hidden sizes or one a block"
            )
        if not _is_size(self.outputs):
            raise InputError(f"outputs of a CNN host is {self.outputs!r}; give a whole number from 1 on")
        if min(self.inputs[1:]) < 2 ** len(self.channels):
            raise InputError(
                f"an image of {self.inputs[1]} x {self.inputs[2]} pixels cannot be halved in {len(self.channels)} blocks; "
                "give fewer blocks or larger images"
            )

    def __call__(self) -> SegmentedHost:
        """A freshly drawn host."""
        before = (self.inputs[0], *self.channels[:-1])
        inner = self.hidden or self.channels
        blocks = []
        for reads, width, writes in zip(before, inner, self.channels, strict=True):
            layers: list[nn.Module] = [_conv(reads, width, 3, variance=2 / (9 * reads)), nn.MaxPool2d(2), nn.ReLU()]
            if self.hidden:
                layers.append(_conv(width, writes, 1, variance=1 / width))
            blocks.append(nn.Sequential(*layers))
        head = nn.Sequential(PositionMean(), _linear(self.channels[-1], self.outputs, variance=1 / self.channels[-1]))
        slots = [
            SlotSpec(f"block{k}", after=k, width=width, kind=Kind.MAP, inner=3) for k, width in enumerate(self.channels)
        ]
        host = SegmentedHost([*blocks, head], slots)
        host.draws = False
        return host


def roomy(host: MLP) -> Room:
    """The layout of rows for an MLP whose widths are rounded up to multiples of 4.

    The last bit of a product can depend on whether a row's result lies on a multiple of 16 bytes, so on where the row stands
    in the population. With such widths every row does, and a row is bitwise the same wherever it stands.
    """

    def up(width: int) -> int:
        return -(-width // 4) * 4

    layout = MLP(up(host.inputs), up(host.width), tuple(map(up, host.hidden)), host.outputs)
    return Room(layout, (layout.inputs,))


MOST_BLOCKS, WIDEST = 1024, 2**24
"""What a file may ask of a host that it names; one that is built from Python may be larger."""

Host = MLP | DamagedMLP | CNN
HOSTS: Mapping[str, type[Host]] = MappingProxyType({MLP.name: MLP, DamagedMLP.name: DamagedMLP, CNN.name: CNN})
"""The hosts that a saved network can name; their arguments are what `dataclasses.asdict` gives."""


def host_from(name: str, arguments: Mapping[str, Any]) -> Host:
    """The host factory that a saved network names, from its JSON arguments. InputError where either is not known."""
    if name not in HOSTS:
        raise InputError(f"unknown host {name!r}; the hosts that can be rebuilt by name are {', '.join(HOSTS)}")
    wanted = [field.name for field in fields(HOSTS[name])]
    if set(arguments) != set(wanted):
        raise InputError(f"host {name!r} was given the arguments {sorted(arguments)}; give exactly {wanted}")
    for argument, value in arguments.items():
        numbers = value if isinstance(value, list | tuple) else (value,)
        if len(numbers) > MOST_BLOCKS or any(isinstance(number, int) and number > WIDEST for number in numbers):
            raise InputError(
                f"{argument} of host {name!r} asks for a size over {WIDEST:,} or more than {MOST_BLOCKS:,} of them; "
                "give the file of a network that was grown"
            )
    return HOSTS[name](**arguments)


def _linear(inputs: int, outputs: int, *, variance: float) -> Linear:
    layer = Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=variance**0.5)
    nn.init.zeros_(layer.bias)
    return layer


def _conv(reads: int, writes: int, size: int, *, variance: float) -> nn.Conv2d:
    layer = nn.Conv2d(reads, writes, size, padding=size // 2)
    nn.init.normal_(layer.weight, std=variance**0.5)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
