"""Fully connected hosts: with and without skip connections, and with damaged blocks."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from esper.kasmina import fused
from esper.kasmina.host import SegmentedHost
from esper.kasmina.layers import Residual
from esper.leyline.errors import InputError
from esper.leyline.slots import SlotSpec
from esper.leyline.task import Room
from esper.tasks.sizes import check_sizes, linear, smallest

SCALE = 0.5
"""Initial scale of the last layers of all residual blocks together, chosen on validation data (`esper docs hosts`)."""


@dataclass(frozen=True)
class _Dense(ABC):
    """Base of the hosts for vectors: an embedding, blocks of one hidden layer with a slot behind each, and a last layer."""

    name: ClassVar[str]
    called: ClassVar[str]  # in messages

    inputs: int
    width: int
    hidden: tuple[int, ...]  # inner width of each block
    outputs: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", _hidden(self.called, self.hidden))
        sizes: dict[str, Any] = {"inputs": self.inputs, "width": self.width, "outputs": self.outputs}
        check_sizes(self.called, sizes | {f"hidden[{k}]": size for k, size in enumerate(self.hidden)})

    def __call__(self) -> SegmentedHost:
        """A freshly drawn host."""
        blocks = [self._block(inner) for inner in self.hidden]
        embed = linear(self.inputs, self.width, variance=1 / self.inputs)
        head = linear(self.width, self.outputs, variance=1 / self.width)
        slots = [SlotSpec(f"block{k}", after=k + 1, width=self.width, inner=2) for k in range(len(blocks))]
        host = SegmentedHost([embed, *blocks, head], slots)
        host.stacks = True
        return host

    def plain(self, parameters: int) -> Self:
        """The network of the same depth, without narrow blocks, of the smallest width with at least `parameters` parameters."""
        return self._even(smallest(self._even, parameters))

    def room(self, hosts: Sequence["MLP | ResidualMLP"], outputs: int) -> Room:
        """The layout of rows that hold `hosts`, all of the depth of this one, with at least `outputs` outputs."""
        return room_for(*hosts, outputs=outputs)

    def _even(self, width: int) -> Self:
        return replace(self, width=width, hidden=(width,) * len(self.hidden))

    @abstractmethod
    def _block(self, inner: int) -> nn.Module:
        """A segment of one hidden layer of `inner` units."""

    def _layers(self, inner: int, last: float) -> tuple[nn.Module, ...]:
        """The layers of a block. `last` is the initial variance of the weights of the last layer."""
        first = linear(self.width, inner, variance=2 / self.width)
        return first, nn.ReLU(), linear(inner, self.width, variance=last)


@dataclass(frozen=True)
class MLP(_Dense):
    """A factory of multilayer perceptrons (B, inputs) -> (B, outputs) on a stream of `width` features.

        segment 0:      Linear(inputs -> width)
        segment k + 1:  Linear(width -> hidden[k]), ReLU, Linear(hidden[k] -> width)     then slot "block<k>"
        last segment:   Linear(width -> outputs)

    There is no skip connection, so only a bypass can restore the information that a narrow segment loses. Weights are drawn
    from torch's global generator, normal with standard deviation sqrt(2 / fan in) in front of a ReLU, and 1 / sqrt(fan in)
    elsewhere; biases are 0.

    Raises InputError if a size is not a positive integer, or there is no hidden size.
    """

    name: ClassVar[str] = "mlp"
    called: ClassVar[str] = "an MLP host"

    def _block(self, inner: int) -> nn.Module:
        return nn.Sequential(*self._layers(inner, 1 / inner))


@dataclass(frozen=True)
class ResidualMLP(_Dense):
    """A factory of residual networks (B, inputs) -> (B, outputs) on a stream of `width` features.

        segment 0:      Linear(inputs -> width)
        segment k + 1:  x + f(x),  f = Linear(width -> hidden[k]), ReLU, Linear(hidden[k] -> width)    then slot "block<k>"
        last segment:   Linear(width -> outputs)

    There is no batch normalization, so no example depends on another. Weights are drawn from torch's global generator, normal
    with standard deviation sqrt(2 / fan in) in front of a ReLU, SCALE / sqrt(fan in * blocks) in the last layer of a block,
    and 1 / sqrt(fan in) elsewhere; biases are 0.

    Raises InputError if a size is not a positive integer, or there is no hidden size.
    """

    name: ClassVar[str] = "residual-mlp"
    called: ClassVar[str] = "a residual MLP host"

    def _block(self, inner: int) -> nn.Module:
        return Residual(*self._layers(inner, SCALE**2 / (inner * len(self.hidden))))


class Floor(nn.Module):
    """max(z, floor), elementwise: the ReLU at floor 0, and the identity at minus infinity.

    The floor is a buffer, so the rows of one stack can have different floors. Padded units are 0 and stay 0 at both floors.
    """

    stacks = True
    fused = fused.Floor
    floor: Tensor  # (1, 1); stacked (E, 1, 1)

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.register_buffer("floor", torch.full((1, 1), -torch.inf if linear else 0.0))

    def forward(self, z: Tensor) -> Tensor:
        """(B, H) -> (B, H), or (E, B, H) -> (E, B, H)."""
        return torch.clamp(z, min=self.floor)


@dataclass(frozen=True)
class DamagedMLP:
    """A factory of the networks of `MLP` in which some blocks have no nonlinearity or are never trained.

        segment k + 1:  Linear(width -> hidden[k]), Floor(linear[k]), Linear(hidden[k] -> width)

    The parameters of block k do not require a gradient where frozen[k]. The initial weights are those of the MLP.

    Raises InputError if a size is not a positive integer, or `linear` or `frozen` does not have one bool per block.
    """

    name: ClassVar[str] = "damaged-mlp"

    inputs: int
    width: int
    hidden: tuple[int, ...]  # inner width of each block
    outputs: int
    linear: tuple[bool, ...]  # blocks without a nonlinearity
    frozen: tuple[bool, ...]  # blocks that keep their initial weights

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", self._undamaged().hidden)
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
        host = self._undamaged()()
        for block, is_linear, frozen in zip(host.segments[1:-1], self.linear, self.frozen, strict=True):
            assert isinstance(block, nn.Sequential)
            block[1] = Floor(is_linear)
            block.requires_grad_(not frozen)
        return host

    def plain(self, parameters: int) -> MLP:
        """The undamaged network of the same depth, of the smallest width with at least `parameters` parameters."""
        return self._undamaged().plain(parameters)

    def _undamaged(self) -> MLP:
        return MLP(self.inputs, self.width, self.hidden, self.outputs)


class Bridged(nn.Sequential):
    """y = skip * x + f(x): without a path around f at skip 0, and residual at skip 1. f is the modules in order.

    The skip is a buffer, so the rows of one stack can have different skips. Padded features stay 0. It stacks unless f
    has convolutions.
    """

    skip: Tensor  # (1, 1); stacked (E, 1, 1)

    def __init__(self, *branch: nn.Module, skip: bool) -> None:
        super().__init__(*branch)
        self.stacks = not any(isinstance(module, nn.Conv2d) for module in branch)
        self.register_buffer("skip", torch.full((1, 1), float(skip)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, ...), or (E, B, D) -> (E, B, D)."""
        h = x
        for module in self:
            h = module(h)
        y: Tensor = self.skip * x + h
        return y


@dataclass(frozen=True)
class BridgedMLP:
    """A factory of networks whose blocks have a skip connection or have none, and which may be frozen.

        segment k + 1:  skips[k] * x + f(x),  f = Linear(width -> hidden[k]), ReLU, Linear(hidden[k] -> width)

    Without a skip the initial weights are those of an `MLP`. The last layer of a block with a skip starts at SCALE times that.
    No parameter requires a gradient where `frozen` is true. Where `entry` is true, a slot "embed" lies behind the embedding.
    Where `exit` is true, a slot "head" lies behind the last segment, and one more segment returns the outputs as they are.

    Raises InputError if a size is not a positive integer, `skips` does not have one bool per block, or `frozen`, `entry` or
    `exit` is not a bool.
    """

    name: ClassVar[str] = "bridged-mlp"

    inputs: int
    width: int
    hidden: tuple[int, ...]  # inner width of each block
    outputs: int
    skips: tuple[bool, ...]  # blocks with a skip connection
    frozen: bool = False
    entry: bool = False  # whether there is a slot behind the embedding
    exit: bool = False  # whether there is a slot behind the last layer

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", self._plain().hidden)
        called = "a bridged MLP host"
        object.__setattr__(self, "skips", checked_skips(called, self.skips, len(self.hidden)))
        for name in ("frozen", "entry", "exit"):
            check_bool(called, name, getattr(self, name))

    def __call__(self) -> SegmentedHost:
        """A freshly drawn host."""
        host = self._plain()()
        for k, skip in enumerate(self.skips):
            block = host.segments[k + 1]
            assert isinstance(block, nn.Sequential)
            last = block[2]
            assert isinstance(last, nn.Linear)
            if skip:
                with torch.no_grad():
                    last.weight.mul_(SCALE)
            host.segments[k + 1] = Bridged(*block, skip=skip)
        embed = [SlotSpec("embed", after=0, width=self.width)] * self.entry
        head = [SlotSpec("head", after=len(self.hidden) + 1, width=self.outputs, head=True)] * self.exit
        if embed or head:
            identity = [nn.Identity()] * self.exit
            host = SegmentedHost([*host.segments, *identity], [*embed, *host.slots, *head])
            host.stacks = True
        host.requires_grad_(not self.frozen)
        return host

    def plain(self, parameters: int) -> MLP:
        """The network of the same depth without skips, of the smallest width with at least `parameters` parameters."""
        return self._plain().plain(parameters)

    def _plain(self) -> MLP:
        return MLP(self.inputs, self.width, self.hidden, self.outputs)


def room_for(*hosts: MLP | ResidualMLP, outputs: int = 1) -> Room:
    """The layout of rows for hosts of one class and depth, with at least `outputs` outputs.

    Widths are rounded up to multiples of 4, which aligns every row of a stack to 16 bytes. The last bit of a matrix product
    can depend on the alignment of its result, so a row's numbers would otherwise depend on its index in the population.
    """

    def up(widths: Iterable[int]) -> int:
        return -(-max(widths) // 4) * 4

    hidden = tuple(up(inner) for inner in zip(*(host.hidden for host in hosts), strict=True))
    sizes = {name: up(getattr(host, name) for host in hosts) for name in ("inputs", "width")}
    layout = replace(hosts[0], **sizes, hidden=hidden, outputs=max(outputs, *(host.outputs for host in hosts)))
    return Room(layout, (layout.inputs,))


def checked_skips(of: str, skips: Any, blocks: int) -> tuple[bool, ...]:
    """The skips of a host. Raises InputError if they are not one bool for each block; `of` names the host in the message."""
    if not isinstance(skips, list | tuple) or len(skips) != blocks or not all(isinstance(skip, bool) for skip in skips):
        raise InputError(f"skips of {of} is {skips!r}; give True or False for each of its {blocks} blocks")
    return tuple(skips)  # JSON has no tuples


def check_bool(of: str, name: str, value: Any) -> None:
    """Raise InputError if a value is not a bool. `of` names the host in the message."""
    if not isinstance(value, bool):
        raise InputError(f"{name} of {of} is {value!r}; give True or False")


def _hidden(of: str, hidden: Any) -> tuple[Any, ...]:
    if not isinstance(hidden, list | tuple) or not hidden:
        raise InputError(f"hidden of {of} is {hidden!r}; give the inner widths of its blocks, as (4, 12)")
    return tuple(hidden)  # JSON has no tuples
