"""Compare what to do when more data came: to train a network on, to grow it on, or to train it anew, at equal steps.

    python bench/scripts/study_more_data.py                     # 5 seeds of digits and letter, two minutes on one core
    python bench/scripts/study_more_data.py letter --seeds 2

A network of two hidden layers was trained on the first examples; then the others come. Every arm
trains on all of them, but for `the new alone`, for the same number of steps: AdamW at the rate of the first training, which
falls linearly to 0 in the second half; batches of 64. `shrunk` multiplies the weights by .4 and adds .1 of a fresh network
(Ash and Adams, 2020, arXiv 1910.08475, shrink and perturb, with factors that were not tuned here). `grown on` makes the
hidden layers four times as wide (`esper.widen`) before it trains on. `letter` needs the Debian package r-cran-mlbench (with
`rdata`). Prints a table in Markdown: test accuracy, and how much better than training on, paired, with 95 % intervals.
"""

import argparse
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.preprocessing import StandardScaler
from study_narrow_places import mlp
from torch import Tensor, nn

import esper
from esper.leyline.intervals import t_interval
from esper_bench.public_sets import letter_recognition

Pair = tuple[Tensor, Tensor]
RATE, BATCH, FACTOR = 3e-3, 64, 4


class Setting(NamedTuple):
    """Describes a data set; the examples at first, and those that are there later; the units of a hidden layer; the steps.

    stops: numbers of steps behind the arrival, each with a schedule of its own.
    """

    load: Callable[[], tuple[NDArray[Any], NDArray[Any]]]
    first: int
    all: int
    units: int
    steps: int
    stops: tuple[int, int]


SETTINGS: Mapping[str, Setting] = {
    "digits": Setting(lambda: load_digits(return_X_y=True), 150, 1300, 16, 500, (100, 1000)),
    "letter": Setting(letter_recognition, 1000, 16_000, 32, 1000, (300, 2000)),
}
ARMS = ("trained on", "the new alone", "shrunk, trained on", "grown on", "anew, as large", "anew, as large as grown")


def learn(network: nn.Module, data: Pair, steps: int, generator: torch.Generator) -> None:
    """Train all weights."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / steps)))
    for _ in range(steps):
        index = torch.randint(len(data[0]), (BATCH,), generator=generator)
        nn.functional.cross_entropy(network(data[0][index]), data[1][index]).backward()
        optimizer.step(), optimizer.zero_grad(), schedule.step()


@torch.no_grad()
def shrunk(network: nn.Module, fresh: nn.Module) -> nn.Module:
    """Return a copy with .4 of the weights and .1 of those of a fresh network."""
    network = copy.deepcopy(network)
    for parameter, new in zip(network.parameters(), fresh.parameters(), strict=True):
        parameter.mul_(0.4).add_(new, alpha=0.1)
    return network


def run(setting: Setting, seed: int) -> dict[tuple[int, str], tuple[float, float]]:
    """Return test accuracy and CPU seconds behind the arrival, by stop and arm; stop 0 is the network before."""
    x, y = setting.load()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    scaled = StandardScaler().fit(x[order[: setting.first].numpy()]).transform(x)  # by what was known at first
    inputs, labels = torch.tensor(scaled, dtype=torch.float32)[order], torch.tensor(y)[order]
    parts = [slice(setting.first), slice(setting.first, setting.all), slice(setting.all), slice(setting.all, None)]
    first, new, both, test = ((inputs[part], labels[part]) for part in parts)
    classes = int(labels.max()) + 1

    def fresh(units: int, key: int) -> nn.Module:
        torch.manual_seed(key)
        return mlp((inputs.shape[1], units, units, classes))

    def accuracy(network: nn.Module) -> float:
        with torch.no_grad():
            return float((network(test[0]).argmax(1) == test[1]).double().mean())

    before = fresh(setting.units, seed)
    learn(before, first, setting.steps, torch.Generator().manual_seed(seed))
    grown = copy.deepcopy(before)
    esper.widen(grown, float(FACTOR), example=first[0][:2], seed=seed)
    other = 1000 + seed  # a start that the first network did not have
    networks = {
        "trained on": before,
        "the new alone": before,
        "shrunk, trained on": shrunk(before, fresh(setting.units, other)),
        "grown on": grown,
        "anew, as large": fresh(setting.units, other),
        "anew, as large as grown": fresh(FACTOR * setting.units, other),
    }
    found = {(0, "before"): (accuracy(before), 0.0)}
    for stop in setting.stops:
        for arm in ARMS:
            network, begin = copy.deepcopy(networks[arm]), time.process_time()
            learn(network, new if arm == "the new alone" else both, stop, torch.Generator().manual_seed(seed + 1))
            found[stop, arm] = accuracy(network), time.process_time() - begin
    return found


def study(name: str, seeds: Sequence[int]) -> None:
    """Print the rows of a setting."""
    setting = SETTINGS[name]
    runs = [run(setting, seed) for seed in seeds]
    print(f"# {name}, before: {t_interval([each[0, 'before'][0] for each in runs]):.3f}")
    for arm in ARMS:
        cells = []
        for stop in setting.stops:
            ours = [each[stop, arm][0] for each in runs]
            less = [own - each[stop, "trained on"][0] for own, each in zip(ours, runs, strict=True)]
            cells += [f"{sum(ours) / len(ours):.3f}", "" if arm == "trained on" else f"{t_interval(less):+.3f}"]
        seconds = sum(each[setting.stops[-1], arm][1] for each in runs) / len(runs)
        print(f"| {name} | {arm} | {' | '.join(cells)} | {seconds:.1f} |", flush=True)
    for stop in setting.stops:
        less = [each[stop, "grown on"][0] - each[stop, "anew, as large as grown"][0] for each in runs]
        print(f"# {name}, {stop} steps: grown on less anew, as large as grown: {t_interval(less):+.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "settings", nargs="*", default=[], metavar="SETTING", help=f"of {', '.join(SETTINGS)}; default all"
    )
    parser.add_argument("--seeds", type=int, default=5, help="seeds from 0 on")
    arguments = parser.parse_args()
    for name in arguments.settings or SETTINGS:
        study(name, range(arguments.seeds))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
