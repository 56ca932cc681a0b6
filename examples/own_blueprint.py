"""Let networks grow modules of your own: a blueprint builds a seed, here a gated layer around a segment.

python examples/own_blueprint.py
"""

import torch
from torch import nn

import esper


class Gated(nn.Module):
    """Computes out(tanh(value(u)) * (1 + tanh(gate(u))))."""

    def __init__(self, reads, writes):
        super().__init__()
        self.value, self.gate, self.out = nn.Linear(reads, 16), nn.Linear(reads, 16), nn.Linear(16, writes)
        nn.init.zeros_(self.out.weight)  # a seed changes nothing at birth, and is checked for it
        nn.init.zeros_(self.out.bias)

    def forward(self, u):
        """Map (B, reads) -> (B, writes)."""
        return self.out(torch.tanh(self.value(u)) * (1 + torch.tanh(self.gate(u))))


@esper.blueprint("my-gated", tap="before", parameters=lambda reads, writes: 32 * (reads + 1) + writes * 17)
def my_gated(reads, writes):
    """Make a gated layer of 16 units around the segment."""
    return Gated(reads, writes)


torch.manual_seed(0)
x = torch.rand(1000, 4) * 2 - 1
y = (x[:, 0] * x[:, 1] > 0).long()


def host():
    """Build a network that is too narrow in the middle to tell the classes apart."""
    narrow = nn.Sequential(nn.Linear(8, 1), nn.ReLU(), nn.Linear(1, 8))
    return esper.SegmentedHost([nn.Linear(4, 8), narrow, nn.Linear(8, 2)], [esper.SlotSpec("middle", after=1, width=8)])


task = esper.task("signs", x, y, host=host, menu=["my-gated"])
summary = esper.grow(task, {"envs": 2, "baselines": ["twin"]})
print("grown", summary["grown"], [round(value, 2) for value in summary["test_accuracy"]["grown"]])
print("not grown", [round(value, 2) for value in summary["baselines"]["twin"]["test_accuracy"]])
