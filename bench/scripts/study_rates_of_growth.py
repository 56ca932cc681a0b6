"""Test whether a network that becomes wider as a whole diverges at learning rates at which networks of one size train.

    python bench/scripts/study_rates_of_growth.py              # 8 seeds, about twelve minutes on one core
    python bench/scripts/study_rates_of_growth.py --seeds 2

Two hidden layers with ReLU on scikit-learn's digits, 400 steps of 64 examples. Arms: 8 units; 32 units; 8 units that
`AnytimeGrowth` doubles twice, with its warm-up behind each growth and without. All arms but the last have a warm-up of 100 steps
at the start.
A run has failed if a parameter is not finite, or the running average of its training loss is above 90 % of ln 10, that of
guessing. Prints, for each optimizer and rate, how many runs of each arm failed, and the largest loss in the 100 steps behind a
growth over that in the 20 steps in front of it, as a Markdown table.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import esper

STEPS, BATCH = 400, 64
GUESSING = 0.9 * math.log(10)
OPTIMIZERS: Mapping[str, tuple[Callable[..., torch.optim.Optimizer], tuple[float, ...]]] = {
    "SGD": (torch.optim.SGD, (0.5, 1.0, 2.0, 4.0)),
    "SGD with momentum": (partial(torch.optim.SGD, momentum=0.9), (0.05, 0.1, 0.2, 0.4, 0.8)),
    "AdamW": (torch.optim.AdamW, (0.01, 0.03, 0.1, 0.3, 1.0)),
}
ARMS = {
    "8 units": (8, [1], 100),
    "32 units": (32, [1], 100),
    "grown": (8, [1, 2, 4], 100),
    "no warm-up": (8, [1, 2, 4], 0),
}


def train(
    x: Tensor, y: Tensor, arm: str, make: Callable[..., torch.optim.Optimizer], rate: float, seed: int
) -> tuple[bool, float]:
    """Return whether a run failed, and by how much its loss rose behind its growths at most; nan where it did not grow."""
    width, sizes, warmup = ARMS[arm]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = make(model.parameters(), lr=rate)
    parameters = sum(each.numel() for each in model.parameters())
    growth = esper.AnytimeGrowth(
        model, optimizer, example=x[:2], sizes=sizes, ratio=100 * BATCH / parameters, warmup=warmup
    )
    generator, losses = torch.Generator().manual_seed(seed), list[float]()
    for _ in range(STEPS):
        batch = torch.randint(len(x), (BATCH,), generator=generator)
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step(BATCH)
        losses.append(float(loss.detach()))
    mean = losses[0]
    for value in losses:
        mean = 0.9 * mean + 0.1 * value
    finite = all(bool(each.isfinite().all()) for each in model.parameters())
    rises = [max(losses[at : at + 100]) / max(losses[at - 20 : at]) for at in (each["step"] for each in growth.growths)]
    return not (finite and not growth.rollbacks and mean < GUESSING), max(rises, default=math.nan)


def rows(x: Tensor, y: Tensor, seeds: range) -> Iterator[list[str]]:
    """Yield a row of the table for each optimizer and rate."""
    for name, (make, rates) in OPTIMIZERS.items():
        for rate in rates:
            runs = {arm: [train(x, y, arm, make, rate, seed) for seed in seeds] for arm in ARMS}
            failed = [f"{sum(each for each, _ in found)} of {len(found)}" for found in runs.values()]
            rises = [f"{sorted(rise for _, rise in runs[arm])[len(seeds) // 2]:.2f}" for arm in ("grown", "no warm-up")]
            yield [name, f"{rate:g}", *failed, *rises]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, help="seeds of each arm; default 8")
    torch.set_num_threads(1)
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    columns = ["optimizer", "rate", *(f"{arm}: failed" for arm in ARMS), "median rise, grown", "no warm-up"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows(x.float() / 16, y, range(100, 100 + parser.parse_args().seeds)):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
