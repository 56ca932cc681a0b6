"""Fully connected hosts: with and without skips, and with blocks that are damaged."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from esper.kasmina.host import SegmentedHost
from esper.kasmina.layers import Residual
from esper.leyline.errors import InputError
from esper.leyline.slots import SlotSpec
from esper.leyline.task import Room
from esper.tasks.sizes import check_sizes, linear, smallest

SCALE = 0.5
"""What the last layer of all residual blocks together is scaled by at birth, chosen on validation data: docs/hosts.md."""


@dataclass(frozen=True)
class _Dense(ABC):
    """What hosts for vectors share: an embedding, blocks of one hidden layer with a slot behind each, and a last layer."""

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
        """The network of as many blocks, none of them narrow, of the smallest width with at least so many parameters."""
        return self._even(smallest(self._even, parameters))

    def room(self, others: Sequence["MLP | ResidualMLP"], outputs: int) -> Room:
        """The layout of rows in which others of as many blocks, with up to so many outputs, stand side by side."""
        return roomy(*others, outputs=outputs)

    def _even(self, width: int) -> Self:
        return replace(self, width=width, hidden=(width,) * len(self.hidden))

    @abstractmethod
    def _block(self, inner: int) -> nn.Module:
        """A segment of one hidden layer of `inner` units."""

    def _layers(self, inner: int, last: float) -> tuple[nn.Module, ...]:
        """The layers of a block whose last one is drawn with a variance of `last`."""
        first = linear(self.width, inner, variance=2 / self.width)
        return first, nn.ReLU(), linear(inner, self.width, variance=last)


@dataclass(frozen=True)
class MLP(_Dense):
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
    called: ClassVar[str] = "an MLP host"

    def _block(self, inner: int) -> nn.Module:
        return nn.Sequential(*self._layers(inner, 1 / inner))


@dataclass(frozen=True)
class ResidualMLP(_Dense):
    """A factory of residual networks (B, inputs) -> (B, outputs) on a stream of `width` features.

        segment 0:      Linear(inputs -> width)
        segment k + 1:  x + f(x),  f = Linear(width -> hidden[k]), ReLU, Linear(hidden[k] -> width)    then slot "block<k>"
        last segment:   Linear(width -> outputs)

    There is no normalisation over the batch, so that no example depends on others. Weights are drawn from torch's global
    generator, normal with the scale 1 / sqrt(fan in), or sqrt(2 / fan in) in front of a ReLU, except for the last layer of a
    block, which is SCALE / sqrt(fan in blocks); biases are 0.

    Raises InputError where a size is not an integer from 1 on, or there is no hidden size.
    """

    name: ClassVar[str] = "residual-mlp"
    called: ClassVar[str] = "a residual MLP host"

    def _block(self, inner: int) -> nn.Module:
        return Residual(*self._layers(inner, SCALE**2 / (inner * len(self.hidden))))


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
        """The undamaged network of as many blocks, none narrow, of the smallest width with at least so many parameters."""
        return self._undamaged().plain(parameters)

    def _undamaged(self) -> MLP:
        return MLP(self.inputs, self.width, self.hidden, self.outputs)


def roomy(*hosts: MLP | ResidualMLP, outputs: int = 1) -> Room:
    """The layout of rows for hosts of one kind and one number of blocks, whose widths are rounded up to multiples of 4.

    It has at least so many outputs.

    The last bit of a product can depend on whether a row's result lies on a multiple of 16 bytes, so on where the row stands
    in the population. With such widths every row does, and a row is bitwise the same wherever it stands.
    """

    def up(widths: Iterable[int]) -> int:
        return -(-max(widths) // 4) * 4

    hidden = tuple(up(inner) for inner in zip(*(host.hidden for host in hosts), strict=True))
    sizes = {name: up(getattr(host, name) for host in hosts) for name in ("inputs", "width")}
    layout = replace(hosts[0], **sizes, hidden=hidden, outputs=max(outputs, *(host.outputs for host in hosts)))
    return Room(layout, (layout.inputs,))


def _hidden(of: str, hidden: Any) -> tuple[Any, ...]:
    if not isinstance(hidden, list | tuple) or not hidden:
        raise InputError(f"hidden of {of} is {hidden!r}; give the inner widths of its blocks, as (4, 12)")
    return tuple(hidden)  # JSON has no tuples
