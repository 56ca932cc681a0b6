"""Measure growth in networks with a narrow place, in one's own loop, with and without sites that span the place.

    python bench/scripts/study_narrow_places.py             # 8 seeds of 6 settings, about 10 minutes on one core
    python bench/scripts/study_narrow_places.py --seeds 2 diabetes
    python bench/scripts/study_narrow_places.py --first-seed 400 --growth '{"gates": {"twins": true}}'

Every arm of a seed has the same first weights and batches: 1,500 steps of AdamW at 3e-3 of 64 examples. `longer` is the network
without growth for the CPU seconds that growth took; `as large` has one width in all hidden layers, the smallest with at
least the parameters of the grown network. `--growth` are settings of the grown arm. Scores are accuracies, and minus the loss
for diabetes. Prints a table in Markdown.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits, make_classification, make_moons
from torch import Tensor, nn

import esper
from esper.leyline.intervals import t_interval

STEPS = 1500


class Setting(NamedTuple):
    """Describes a data set, the widths of the hidden layers, and the budget of growth, as a multiple of the parameters."""

    load: Callable[[], tuple[np.ndarray, np.ndarray]]
    hidden: tuple[int, ...]
    budget: float


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Load 1,797 images of 8 by 8 pixels, 10 classes."""
    x, y = load_digits(return_X_y=True)
    return x / 16, y


def diabetes() -> tuple[np.ndarray, np.ndarray]:
    """Load 442 patients, 10 columns, one number; all scaled to a standard deviation of 1."""
    x, y = load_diabetes(return_X_y=True)
    return x / x.std(0), ((y - y.mean()) / y.std())[:, None].astype(np.float32)


def moons() -> tuple[np.ndarray, np.ndarray]:
    """Draw two classes in the plane, 2,000 examples."""
    x, y = make_moons(2000, noise=0.2, random_state=0)
    return x.astype(np.float32), y


SETTINGS = {
    "digits, 4-32": Setting(digits, (4, 32), 4.0),
    "digits, 32-3-32": Setting(digits, (32, 3, 32), 4.0),
    "digits, 2-2": Setting(digits, (2, 2), 16.0),
    "classes, 2-2": Setting(
        lambda: make_classification(4000, 20, n_informative=12, n_classes=6, n_clusters_per_class=3, random_state=0),
        (2, 2),
        16.0,
    ),
    "diabetes, 1": Setting(diabetes, (1,), 64.0),
    "moons, 4-4": Setting(moons, (4, 4), 16.0),
}


class Split(NamedTuple):
    """Holds training, probe and test data, each x and y."""

    train: tuple[Tensor, Tensor]
    probe: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def split(setting: Setting) -> Split:
    """Divide the examples in a fixed order: 60 % train, 17 % are the probe, and the others test."""
    x, y = setting.load()
    order = np.random.default_rng(0).permutation(len(x))
    x, y = torch.tensor(x[order], dtype=torch.float32), torch.tensor(y[order])
    ends = [int(share * len(x)) for share in (0.0, 0.6, 0.77, 1.0)]
    return Split(*((x[a:b], y[a:b]) for a, b in pairwise(ends)))


def mlp(widths: tuple[int, ...]) -> nn.Sequential:
    """Return linear layers with a ReLU behind each but the last."""
    layers: list[nn.Module] = []
    for reads, writes in pairwise(widths):
        layers += [nn.Linear(reads, writes), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Arm(NamedTuple):
    """Holds what an arm reached: the score on the test data, CPU seconds and parameters."""

    score: float
    seconds: float
    parameters: int


def train(
    data: Split,
    widths: tuple[int, ...],
    seed: int,
    steps: int,
    budget: float = 0.0,
    spans: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> Arm:
    """Train a network, and grow it if there is a budget."""
    torch.manual_seed(seed)
    network: nn.Module = mlp(widths)
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    loss = nn.MSELoss() if data.train[1].is_floating_point() else nn.CrossEntropyLoss()
    batches = torch.Generator().manual_seed(seed)
    begun = time.process_time()
    growth = None
    if budget:
        if not spans:  # what every site read before spans: the input of its own submodule; heads were no sites
            found = esper.find_sites(network, data.probe[0][:4])
            own = {name: replace(site, around=name) for name, site in found.items() if name != str(len(network) - 1)}
            if not own:
                return Arm(float("nan"), float("nan"), 0)
            esper.graft(network, own)
        growth = esper.Growth(
            network, optimizer, probe=[data.probe], loss=loss, budget=budget, every=30, settings=settings
        )
    for _ in range(steps):
        batch = torch.randint(len(data.train[0]), (64,), generator=batches)
        x, y = (part[batch] for part in data.train)
        loss(network(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if growth is not None:
            growth.step(x, y)
    if growth is not None:
        network = growth.finish()
    seconds = time.process_time() - begun
    with torch.no_grad():
        output, wanted = network(data.test[0]), data.test[1]
        score = -loss(output, wanted) if wanted.is_floating_point() else (output.argmax(1) == wanted).float().mean()
    return Arm(float(score), seconds, sum(p.numel() for p in network.parameters()))


def as_large(ends: tuple[int, int], layers: int, parameters: int) -> tuple[int, ...]:
    """Return the widths of the smallest network of equal hidden layers with at least so many parameters."""
    width = 1
    while sum(p.numel() for p in mlp((ends[0], *(width,) * layers, ends[1])).parameters()) < parameters:
        width += 1
    return ends[0], *(width,) * layers, ends[1]


def study(name: str, seeds: range, settings: Mapping[str, Any]) -> str:
    """Run all arms of a setting; returns a row of the table."""
    setting = SETTINGS[name]
    data = split(setting)
    outputs = data.train[1].shape[1] if data.train[1].is_floating_point() else int(data.train[1].max()) + 1
    widths = (data.train[0].shape[1], *setting.hidden, outputs)
    arms: dict[str, list[Arm]] = {"plain": [], "longer": [], "own": [], "grown": [], "as large": []}
    for seed in seeds:
        plain = train(data, widths, seed, STEPS)
        grown = train(data, widths, seed, STEPS, setting.budget, settings=settings)
        arms["plain"].append(plain)
        arms["grown"].append(grown)
        arms["own"].append(train(data, widths, seed, STEPS, setting.budget, spans=False))
        arms["longer"].append(train(data, widths, seed, round(STEPS * grown.seconds / plain.seconds)))
        large = as_large((widths[0], outputs), len(setting.hidden), grown.parameters)
        arms["as large"].append(train(data, large, seed, STEPS))
    cells = [name]
    for arm, results in arms.items():
        score = np.mean([result.score for result in results])
        cells.append("no site" if np.isnan(score) else f"{score:.3f}")
        if arm != "grown" and not np.isnan(score):
            pairs = zip(arms["grown"], results, strict=True)
            difference = t_interval([mine.score - other.score for mine, other in pairs])
            cells[-1] += f" ({difference:+.3f})"
    ratio = np.median([mine.seconds / other.seconds for mine, other in zip(arms["grown"], arms["plain"], strict=True)])
    cells += [f"{ratio:.1f}", f"{arms['plain'][0].parameters} to {int(np.mean([g.parameters for g in arms['grown']]))}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"part of a name: {', '.join(SETTINGS)}; all")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--growth", type=json.loads, default={}, help="of esper.Growth, as JSON")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)
    print("| setting | plain | longer | grown, own sites | grown | as large | seconds | parameters |")
    print("|---|---|---|---|---|---|---|---|")
    for name in SETTINGS:
        if not asked.settings or any(part in name for part in asked.settings):
            seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
            print(study(name, seeds, asked.growth), flush=True)


if __name__ == "__main__":
    main()
