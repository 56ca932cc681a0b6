"""Measure what size is worth: static networks of five sizes on the tasks `letter` and `fashion-mnist`, for equal steps.

    python bench/scripts/study_frontier.py             # 5 seeds of both sets, twelve minutes of a core
    python bench/scripts/study_frontier.py letter

The splits are those of the tasks, so that what `esper grow letter` reaches can be read beside the table. On letter the networks
have two hidden layers of so many units, on fashion-mnist two convolutions of so many channels with pooling behind each. AdamW,
batches of 64; the rate falls linearly to 0 over the last 30 % of the steps. Each size has the best of three rates, by its loss
on the validation split with a seed that counts for nothing else. Seconds are those of the processor for one training, one
thread. A set whose files are not there is left out, with a sentence. Prints a table in Markdown; "better by" is paired with the
size above it, in points.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from study_narrow_places import mlp
from study_widening import cnn
from torch import Tensor, nn

from esper.leyline.data.task import Task
from esper.leyline.intervals import t_interval
from esper.leyline.messages import InputError
from esper_bench.public_tasks import fashion_mnist, letter
from esper_bench.records import run_script

RATES = (1e-3, 3e-3, 1e-2)
TUNING = 400
"""The seed with which rates are chosen."""
BATCH = 64
Pair = tuple[Tensor, Tensor]


class Setting(NamedTuple):
    """Describes a task; networks of a width; the widths, from the smallest on; and the steps of every training."""

    task: Callable[[], Task]
    build: Callable[[int], nn.Module]
    widths: Sequence[int]
    steps: int


SETTINGS: Mapping[str, Setting] = {
    "letter": Setting(letter, lambda width: mlp((16, width, width, 26)), (4, 16, 64, 256, 1024), 3000),
    "fashion-mnist": Setting(fashion_mnist, lambda width: cnn(width, 10), (2, 4, 8, 16, 32), 1000),
}


class TrainingResult(NamedTuple):
    """Holds what a training reached: loss on the validation split, accuracy on the test split, seconds, and parameters."""

    loss: float
    accuracy: float
    seconds: float
    parameters: int


def splits(task: Task) -> dict[str, Pair]:
    """Train, validation and test examples as networks read them, each a row of numbers."""
    assert task.test is not None
    named = {"train": task.train, "validation": task.validation, "test": task.test}
    return {name: (task.read(split.x).flatten(1), split.y) for name, split in named.items()}


def trained(
    data: Mapping[str, Pair], setting: Setting, width: int, rate: float, seed: int, steps: int
) -> TrainingResult:
    """Train a network of a width, and measure it."""
    torch.manual_seed(seed)
    network = setting.build(width)
    optimizer = torch.optim.AdamW(network.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (1 - step / steps) / 0.3))
    batches, (x, y) = torch.Generator().manual_seed(seed), data["train"]
    begun = time.process_time()
    for _ in range(steps):
        batch = torch.randint(len(x), (BATCH,), generator=batches)
        nn.functional.cross_entropy(network(x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    seconds = time.process_time() - begun
    with torch.no_grad():
        validation, test = (
            torch.cat([network(part) for part in data[name][0].split(500)]) for name in ("validation", "test")
        )
    loss = float(nn.functional.cross_entropy(validation, data["validation"][1]))
    accuracy = float((test.argmax(1) == data["test"][1]).double().mean())
    return TrainingResult(loss, accuracy, seconds, sum(each.numel() for each in network.parameters()))


def frontier(name: str, seeds: Sequence[int], quick: bool) -> str:
    """Train the networks of a set, and return its lines of the table. InputError if its files are not there."""
    setting = SETTINGS[name]
    data, steps = splits(setting.task()), 20 if quick else setting.steps
    lines: list[str] = []
    smaller: list[float] = []
    for width in setting.widths[: 2 if quick else None]:
        loss = {rate: trained(data, setting, width, rate, TUNING, steps).loss for rate in RATES}
        rate = min(loss, key=loss.__getitem__)
        runs = [trained(data, setting, width, rate, seed, steps) for seed in seeds]
        accuracy = [run.accuracy for run in runs]
        gain = [100 * (mine - other) for mine, other in zip(accuracy, smaller, strict=bool(smaller))]
        seconds = sum(run.seconds for run in runs) / len(runs)
        cells = [name, f"{width:,}", f"{runs[0].parameters:,}", f"{t_interval(accuracy):.4f}"]
        cells += [f"{t_interval(gain):+.1f}" if gain else "", f"{seconds:.1f}", f"{rate:g}"]
        lines.append(f"| {' | '.join(cells)} |")
        smaller = accuracy
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"names: {', '.join(SETTINGS)}; all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few steps of two sizes, to show that the script runs")
    asked = parser.parse_args()
    if unknown := set(asked.sets) - set(SETTINGS):
        raise InputError(f"there is no set {min(unknown)!r}; give names out of {', '.join(SETTINGS)}")
    torch.set_num_threads(1)
    print("| set | units or channels | parameters | test accuracy | better by | seconds | rate |")
    print("|---|---|---|---|---|---|---|")
    for name in asked.sets or SETTINGS:
        try:
            print(frontier(name, range(2 if asked.quick else asked.seeds), asked.quick), flush=True)
        except InputError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)


if __name__ == "__main__":
    run_script(main)
