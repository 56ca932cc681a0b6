"""Repair a network that was pruned, which itself stays as it is, and compare that with the usual remedies.

python examples/heal.py
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils import prune

import esper

x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)

torch.manual_seed(0)
intact = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.Adam(intact.parameters(), lr=1e-2)
for _ in range(100):
    nn.functional.cross_entropy(intact(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()

pruned = copy.deepcopy(intact)
prune.ln_structured(pruned[2], "weight", amount=0.8, n=2, dim=0)  # four units of five of the middle layer are lost

healed = esper.heal(pruned, (x, y), intact=intact, budget=0.3, steps=48)
print(healed)  # every network on examples that were held back, what was planted and why, and the verdict
network = healed.network  # the best one that keeps the weights; healed.save("folder") writes it
