"""Grow a network in a training loop of your own: one object, one call behind each step of the optimizer.

python examples/own_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import esper

x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
probe = [(x[1100:1400], y[1100:1400])]  # by which seeds are judged; neither trained on nor tested on
loss = nn.CrossEntropyLoss()


def train(grows):
    """Train a network that is narrow on purpose, with growth or without, and return it with its accuracy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    growth = esper.Growth(model, optimizer, probe=probe, loss=loss, budget=4.0, every=30) if grows else None
    for _ in range(700):
        batch = torch.randint(0, 1100, (64,))
        loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if growth is not None:
            growth.step(x[batch], y[batch])
    if growth is not None:
        model = growth.finish()
        for keep in growth.summary()["keeps"]:
            print(f"kept a {keep['blueprint']} behind submodule {keep['site']}")
    return model, (model(x[1400:]).argmax(-1) == y[1400:]).float().mean().item()


for name, grows in (("without growth", False), ("with growth", True)):
    network, accuracy = train(grows)
    print(f"{name}: {sum(p.numel() for p in network.parameters()):,} parameters, test accuracy {accuracy:.3f}")
