"""Build hosts whose blocks have a skip connection or none, for vectors and for images: what the tasks `heal` damage."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from esper.kasmina.host import SegmentedHost
from esper.kasmina.stack.layers import PositionMean
from esper.leyline.lifecycle.slots import Kind, SlotSpec
from esper.leyline.messages import InputError
from esper.tasks.hosts import HOSTS, MLP, SCALE, HostFactory, checked_flags, conv, linear


class Bridged(nn.Sequential):
    """Computes y = skip * x + f(x): without a path around f at skip 0, residual at skip 1. f is the modules in order.

    The skip is a buffer, so the rows of one stack can have different skips. Padded features stay 0. It stacks unless f
    has convolutions.
    """

    skip: Tensor  # (1, 1); stacked (E, 1, 1)

    def __init__(self, *branch: nn.Module, skip: bool) -> None:
        super().__init__(*branch)
        self.stacks = not any(isinstance(module, nn.Conv2d) for module in branch)
        self.register_buffer("skip", torch.full((1, 1), float(skip)))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, ...) -> (B, ...), or (E, B, D) -> (E, B, D)."""
        h = x
        for module in self:
            h = module(h)
        y: Tensor = self.skip * x + h
        return y


@dataclass(frozen=True)
class BridgedMLP:
    """Makes networks whose blocks have a skip connection or have none, and which may be frozen.

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
        object.__setattr__(self, "skips", checked_flags(called, "skips", self.skips, len(self.hidden)))
        for name in ("frozen", "entry", "exit"):
            check_bool(called, name, getattr(self, name))

    def __call__(self) -> SegmentedHost:
        """Build a host with freshly drawn weights."""
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
        """Return the network of the same depth without skips, of the smallest width with at least `parameters` parameters."""
        return self._plain().plain(parameters)

    def _plain(self) -> MLP:
        return MLP(self.inputs, self.width, self.hidden, self.outputs)


@dataclass(frozen=True)
class BridgedCNN(HostFactory):
    """Makes convolutional networks (B, C, H, W) -> (B, outputs) of one resolution, with and without skip connections.

        segment 0:      Conv 3x3 (C -> width), MaxPool 2                                               then slot "embed"
        segment k + 1:  skips[k] * x + f(x),
                        f = Conv 3x3 (width -> hidden[k]), ReLU, Conv 1x1 (hidden[k] -> width)         then slot "block<k>"
        last segment:   mean over positions, Linear(width -> outputs)

    It is to images what `BridgedMLP` with an entry is to vectors. Weights are drawn from torch's global generator, normal with
    standard deviation sqrt(2 / fan in) in front of a ReLU, SCALE / sqrt(fan in) in the last layer of a block with a skip, and
    1 / sqrt(fan in) elsewhere; biases are 0. No parameter requires a gradient where `frozen` is true.

    Raises InputError if a size is not a positive integer, there is no block, an image has fewer than 2 x 2 pixels, `skips` does
    not have one bool per block, or `frozen` is not a bool.
    """

    name: ClassVar[str] = "bridged-cnn"
    called: ClassVar[str] = "a bridged CNN host"

    inputs: tuple[int, int, int]  # channels, height and width of an image
    width: int  # channels of the stream
    hidden: tuple[int, ...]  # inner channels of each block
    outputs: int
    skips: tuple[bool, ...]  # blocks with a skip connection
    frozen: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.inputs) != 3 or min(self.inputs[1:]) < 2:
            raise InputError(
                f"inputs of {self.called} is {self.inputs!r}; give channels, height and width of an image of 2 x 2 pixels or more"
            )
        if not self.hidden:
            raise InputError(f"hidden of {self.called} is {self.hidden!r}; give at least one block")
        object.__setattr__(self, "skips", checked_flags(self.called, "skips", self.skips, len(self.hidden)))
        check_bool(self.called, "frozen", self.frozen)

    def __call__(self) -> SegmentedHost:
        """Build a host with freshly drawn weights."""
        reads, width = self.inputs[0], self.width
        embed = nn.Sequential(conv(reads, width, 3, variance=1 / (9 * reads)), nn.MaxPool2d(2))
        blocks = [
            Bridged(
                conv(width, inner, 3, variance=2 / (9 * width)),
                nn.ReLU(),
                conv(inner, width, 1, variance=(SCALE**2 if skip else 1) / inner),
                skip=skip,
            )
            for inner, skip in zip(self.hidden, self.skips, strict=True)
        ]
        head = nn.Sequential(PositionMean(), linear(width, self.outputs, variance=1 / width))
        slots = [SlotSpec("embed", after=0, width=width, kind=Kind.MAP)]
        slots += [SlotSpec(f"block{k}", after=k + 1, width=width, kind=Kind.MAP, inner=2) for k in range(len(blocks))]
        host = SegmentedHost([embed, *blocks, head], slots)
        host.draws = False
        host.requires_grad_(not self.frozen)
        return host

    def _even(self, width: int) -> Self:
        """Return the network of the same depth and of this width throughout, without skips."""
        blocks = len(self.hidden)
        return replace(self, width=width, hidden=(width,) * blocks, skips=(False,) * blocks, frozen=False)


def check_bool(of: str, name: str, value: Any) -> None:
    """Raise InputError if a value is not a bool. `of` names the host in the message."""
    if not isinstance(value, bool):
        raise InputError(f"{name} of {of} is {value!r}; give True or False")


HOSTS.update({factory.name: factory for factory in (BridgedMLP, BridgedCNN)})
