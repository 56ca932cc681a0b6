"""Compare functions of a seed's hidden units on the digits: that of the layers which it spans, or the ReLU.

    python scripts/measure_functions.py
    python scripts/measure_functions.py --seeds 12 --functions GELU Tanh

The network is that of docs/growth.md with another function. For each seed two networks begin with the same weights and see the
same batches. In one the hidden units have the function between the layers, in the other the ReLU. Loss and accuracy are those of
the 397 examples that are neither trained on nor in the probe.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import esper
from esper.leyline.intervals import t_interval
from esper.tolaria.live import population

STEPS = 1500


def grown(function: str, seed: int, own: bool) -> tuple[float, float, int]:
    """Return the loss and the accuracy of a grown network on held-out examples, and how many seeds became part of layers."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    between = population.functions_between
    if not own:
        population.functions_between = lambda network, run: {}
    try:
        torch.manual_seed(seed)
        kind = getattr(nn, function)
        model = nn.Sequential(nn.Linear(64, 4), kind(), nn.Linear(4, 32), kind(), nn.Linear(32, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        probe = [(x[1100:1400], y[1100:1400])]
        growth = esper.Growth(model, optimizer, probe=probe, loss=F.cross_entropy, budget=4.0, every=30)
        for _ in range(STEPS):
            batch = torch.randint(0, 1100, (64,))
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            growth.step(x[batch], y[batch])
        network = growth.finish().eval()
    finally:
        population.functions_between = between
    with torch.no_grad():
        scores = network(x[1400:])
    accuracy = (scores.argmax(1) == y[1400:]).double().mean()
    return float(F.cross_entropy(scores, y[1400:])), float(accuracy), len(growth.folded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--functions", nargs="+", default=["GELU", "SiLU", "Tanh"], help="names of modules of torch.nn")
    asked = parser.parse_args()
    print("| f | loss, units with f | with the ReLU | difference, paired, 95 % | difference of the accuracy | folded |")
    for function in asked.functions:
        own, relu = ([grown(function, seed, each) for seed in range(asked.seeds)] for each in (True, False))
        losses, accuracies = (torch.tensor([[r[at] for r in each] for each in (own, relu)]).double() for at in (0, 1))
        mean, low, high, _ = t_interval((losses[0] - losses[1]).tolist())
        folded = [sum(r[2] for r in each) for each in (own, relu)]
        cells = [function, *(f"{each.mean():.3f}" for each in losses), f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"]
        cells += [f"{(accuracies[0] - accuracies[1]).mean():+.3f}", f"{folded[0]}, with the ReLU {folded[1]}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
