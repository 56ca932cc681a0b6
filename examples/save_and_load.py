"""Save a network that grew, load it into a fresh copy of its class, and write a program that needs neither the class nor Esper.

python examples/save_and_load.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import esper

x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
loss = nn.CrossEntropyLoss()


def build():
    """Build the network as it is before it grows."""
    return nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 10))


torch.manual_seed(0)
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
growth = esper.Growth(model, optimizer, probe=[(x[1100:1400], y[1100:1400])], loss=loss, budget=4.0, every=20)
for _ in range(500):
    batch = torch.randint(0, 1100, (64,))
    loss(model(x[batch]), y[batch]).backward()
    optimizer.step()
    optimizer.zero_grad()
    growth.step(x[batch], y[batch])
network = growth.finish().eval()
print("kept", [keep["blueprint"] for keep in growth.summary()["keeps"]])

growth.save("grown")  # weights and seeds, without a pickle
loaded = esper.load_grown("grown", build())
print("loaded network computes the same:", torch.equal(loaded(x), network(x)))

# For a server: torch.export.load reads it without this file; torch.onnx.export takes the same arguments (esper docs saving).
program = torch.export.export(network, (x[:2],), dynamic_shapes=({0: torch.export.Dim("rows", min=1)},))
torch.export.save(program, "grown.pt2")
served = torch.export.load("grown.pt2").module()
print("exported program differs by at most", f"{(served(x) - network(x)).abs().max().item():.0e}")
