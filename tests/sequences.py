"""Make small sequences for tests: causal hosts of three widths, and a body of them."""

from dataclasses import dataclass

import torch
from torch import nn

from bodies import planted_body
from esper.kasmina.blueprints import BLUEPRINTS
from esper.kasmina.host import SegmentedHost
from esper.kasmina.stack.layers import Linear
from esper.leyline.lifecycle.slots import Kind, SlotSpec

SEQUENCES = tuple(name for kind, name in BLUEPRINTS if kind == Kind.SEQUENCE)
LENGTH = 7


class RunningMean(nn.Module):
    """Computes the mean over this and earlier positions: causal, and without parameters."""

    stacks = True

    def forward(self, x):
        return x.cumsum(-2) / torch.arange(1, x.shape[-2] + 1, dtype=x.dtype, device=x.device)[:, None]


class LastPosition(nn.Module):
    """Takes the last position: (B, L, C) -> (B, C)."""

    stacks = True

    def forward(self, x):
        return x[..., -1, :]


@dataclass(frozen=True)
class CausalHost:
    """Makes hosts (B, L, 2) -> (B, 3) with slots of 4 and 5 features behind the first two segments."""

    inputs: tuple[int, ...] = (LENGTH, 2)
    outputs: int = 3
    causal: bool = True

    def __call__(self):
        first = nn.Sequential(Linear(2, 4), RunningMean())
        second = nn.Sequential(Linear(4, 6), nn.ReLU(), Linear(6, 5))
        last = nn.Sequential(RunningMean(), LastPosition(), Linear(5, self.outputs))
        slots = [SlotSpec(f"block{k}", k, width, "sequence", causal=self.causal) for k, width in enumerate((4, 5))]
        host = SegmentedHost([first, second, last], slots)
        host.stacks = True
        return host


HOST = CausalHost()


def sequence_body(rows=3, menu=SEQUENCES, *, host=HOST, dtype=torch.float32, **options):
    """Build a body of freshly drawn hosts; row r is drawn with key r."""
    return planted_body(host, Kind.SEQUENCE, rows, menu, dtype, **options)
