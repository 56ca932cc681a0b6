"""Make hosts for tests whose slots go around several segments: vectors, sequences and maps with a narrow place, and tasks."""

from dataclasses import dataclass

import torch
from torch import nn

from esper.kasmina.host import SegmentedHost
from esper.kasmina.stack.layers import Linear, PositionMean
from esper.leyline.lifecycle.slots import Kind, SlotSpec
from esper.tasks.own.custom import task_from
from sequences import LastPosition, RunningMean

MENUS = {
    Kind.VECTOR: ("bypass-linear", "bypass-mlp", "mlp-small", "skip-mlp"),
    Kind.SEQUENCE: ("bypass-mlp", "bypass-linear", "mlp-small", "causal-conv"),
    Kind.MAP: ("bypass-conv-3x3", "bypass-conv-1x1", "conv-light", "skip-conv"),
}


def linear(reads, writes):
    return nn.Sequential(Linear(reads, writes), nn.ReLU(), Linear(writes, writes))


def conv(reads, writes):
    return nn.Sequential(nn.Conv2d(reads, writes, 3, padding=1), nn.ReLU(), nn.Conv2d(writes, writes, 1))


@dataclass(frozen=True)
class SpannedHost:
    """Makes hosts (B, ...) -> (B, 3) with 5, 2, 6, 7 and 4 features behind the first segments; the second has no slot."""

    kind: Kind = Kind.VECTOR
    outputs: int = 3
    around: bool = True
    names: tuple[str, ...] = ("first", "wide", "late", "last")

    @property
    def inputs(self):
        return {Kind.VECTOR: (6,), Kind.SEQUENCE: (7, 3), Kind.MAP: (2, 9, 8)}[self.kind]

    def __call__(self):
        if self.kind == Kind.MAP:
            halved = nn.Sequential(*conv(2, 6), nn.MaxPool2d(2))
            segments = [
                conv(2, 5),
                conv(5, 2),
                halved,
                conv(6, 7),
                conv(7, 4),
                nn.Sequential(PositionMean(), Linear(4, 3)),
            ]
        else:
            of_host = self.inputs[-1]
            segments = [linear(a, b) for a, b in ((of_host, 5), (5, 2), (2, 6), (6, 7), (7, 4))]
            sums = [RunningMean(), LastPosition()] if self.kind == Kind.SEQUENCE else []
            segments = [*segments, nn.Sequential(*sums, Linear(4, 3))]
        causal = self.kind == Kind.SEQUENCE
        slots = [
            SlotSpec(name, after, width, self.kind, causal=causal, around=around if self.around else None)
            for name, after, width, around in (
                ("first", 0, 5, None),
                ("wide", 2, 6, 1),
                ("late", 3, 7, 0),
                ("last", 4, 4, 4),
            )
        ]
        host = SegmentedHost(segments, [slot for slot in slots if slot.name in self.names])
        host.stacks = self.kind != Kind.MAP
        host.draws = False
        return host


BYPASSES = {
    Kind.VECTOR: ("mlp-small", "bypass-mlp", "bypass-linear"),
    Kind.SEQUENCE: ("causal-conv", "bypass-mlp", "bypass-linear"),
    Kind.MAP: ("conv-light", "bypass-conv-3x3", "bypass-conv-1x1"),
}
"""Menus whose second and third blueprint read what enters the segments that they go around."""


def spanned_task(kind=Kind.VECTOR, *, host=None, menu=None, examples=160):
    """Make a task of three classes on a host with two slots around several segments, which trains in milliseconds."""
    made = host or SpannedHost(kind, names=("wide", "late"))
    generator = torch.Generator().manual_seed(5)
    y = torch.arange(examples) % 3
    x = torch.randn(examples, *SpannedHost(kind).inputs, generator=generator)
    x[..., 0] += y.view(-1, *(1,) * (x.dim() - 2))
    return task_from("spans", x, y, host=made, classes=3, menu=menu or BYPASSES[kind])
