"""Measure hidden layers that double from two units, in one's own loop, beside networks of the first and of the final size.

    python bench/scripts/study_widening.py                     # 8 seeds of 5 settings, about an hour on one core
    python bench/scripts/study_widening.py --seeds 2 digits

Two hidden layers of 2 units become 32, or 256, and two convolutions of 4 channels 32 (`esper.widen`), by doubling at equal
distances in the first fifth of the steps.
AdamW at `--rate`, held for 70 % of the steps and then linearly to 0; batches of 64. Arms: without growth; grown; grown with what
the optimizer remembered of the old elements, where the squares of new ones begin at the mean of the old ones, or at 0; grown in
the first half of the steps; as large from the start; that for the seconds of the grown one. `letter` and `fashion` need the
Debian packages r-cran-mlbench (with `rdata`) and dataset-fashion-mnist. Prints a table in Markdown.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits, make_classification
from sklearn.model_selection import train_test_split
from study_narrow_places import mlp
from torch import nn

import esper
from esper.leyline.intervals import t_interval
from esper_bench.public_sets import fashion_mnist, letter_recognition

Data = tuple[NDArray[Any], NDArray[Any]]


class Setting(NamedTuple):
    """Describes a data set, the first and the last width of the hidden layers, the steps, and whether layers are convolutions."""

    load: Callable[[], Data]
    widths: tuple[int, int]
    steps: int
    convolutions: bool = False


def classes() -> Data:
    """Draw 4,000 examples of 6 classes with 20 features."""
    return make_classification(4000, 20, n_informative=12, n_classes=6, n_clusters_per_class=3, random_state=0)


def fashion() -> Data:
    """Load the first 20,000 training images of Fashion-MNIST, as rows of pixels."""
    (x, y), _ = fashion_mnist()
    return x[:20_000].reshape(20_000, -1), y[:20_000]


SETTINGS: Mapping[str, Setting] = {
    "digits": Setting(lambda: load_digits(return_X_y=True), (2, 32), 1000),
    "classes": Setting(classes, (2, 32), 1000),
    "letter": Setting(letter_recognition, (2, 32), 4000),
    "letter, 256": Setting(letter_recognition, (2, 256), 4000),
    "fashion, CNN": Setting(fashion, (4, 32), 1000, convolutions=True),
}


def cnn(width: int, outputs: int) -> nn.Sequential:
    """Return two convolutions of 3 x 3 with pooling, for rows of 28 x 28 pixels."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(49 * width, outputs),
    )


class Arm(NamedTuple):
    """Holds what an arm of one seed reached: test accuracy, test loss, CPU seconds."""

    accuracy: float
    loss: float
    seconds: float


def train(
    data: list[torch.Tensor],
    setting: Setting,
    widths: tuple[int, int],
    seed: int,
    rate: float,
    steps: int = 0,
    share: float = 0.2,
    moments: str = "forgotten",
) -> Arm:
    """Train hidden layers of the first width, which double until they have the second one, in a share of the steps."""
    x, x_test, y, y_test = data
    steps, outputs = steps or setting.steps, int(y.max()) + 1
    torch.manual_seed(seed)
    network = cnn(widths[0], outputs) if setting.convolutions else mlp((x.shape[1], widths[0], widths[0], outputs))
    optimizer = torch.optim.AdamW(network.parameters(), rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (1 - step / steps) / 0.3))
    batches = torch.Generator().manual_seed(seed)
    times = int(np.log2(widths[1] / widths[0]))
    moves = {round(share * steps * (number + 1) / times) for number in range(times)}
    begun = time.process_time()
    for step in range(steps):
        batch = torch.randint(len(x), (64,), generator=batches)
        nn.functional.cross_entropy(network(x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step + 1 in moves:
            before = [optimizer.state[parameter] for parameter in network.parameters()]
            esper.widen(network, 2.0, example=x[:2], optimizer=optimizer, seed=seed * steps + step)
            for parameter, state in zip(network.parameters(), before, strict=True) if moments != "forgotten" else ():
                optimizer.state[parameter] = longer(state, parameter.shape, moments)
    seconds = time.process_time() - begun
    with torch.no_grad():
        output = network(x_test)
        accuracy = (output.argmax(1) == y_test).float().mean()
        return Arm(float(accuracy), float(nn.functional.cross_entropy(output, y_test)), seconds)


def longer(state: Mapping[str, torch.Tensor], shape: torch.Size, squares: str) -> dict[str, torch.Tensor]:
    """Return what AdamW remembers of a parameter, for a larger shape: new elements begin at 0, or their squares at the mean."""
    found = {"step": state["step"]}
    for key in ("exp_avg", "exp_avg_sq"):
        first = state[key].mean() if (key, squares) == ("exp_avg_sq", "mean") else state[key].new_zeros(())
        found[key] = first.expand(shape).clone()
        found[key][tuple(map(slice, state[key].shape))] = state[key]
    return found


def study(name: str, seeds: int, rate: float) -> str:
    """Run all arms of a setting; returns the lines of the table."""
    setting = SETTINGS[name]
    x, y = setting.load()
    grown = setting.widths
    small, large = (grown[0], grown[0]), (grown[1], grown[1])
    arms: dict[str, list[Arm]] = {}
    for seed in range(seeds):
        parts = train_test_split(x, y, test_size=0.25, random_state=seed, stratify=y)
        center, scale = parts[0].mean(0), parts[0].std(0)
        scale[scale == 0] = 1
        data = [torch.tensor((part - center) / scale, dtype=torch.float32) for part in parts[:2]]
        data += [torch.tensor(part) for part in parts[2:]]
        found = {"grown": train(data, setting, grown, seed, rate)}
        found["without growth"] = train(data, setting, small, seed, rate)
        for shown, moments in (("at the mean", "mean"), ("at 0", "zero")):
            found[f"grown, moments kept, new squares {shown}"] = train(
                data, setting, grown, seed, rate, moments=moments
            )
        found["grown until half of the steps"] = train(data, setting, grown, seed, rate, share=0.5)
        found["as large from the start"] = train(data, setting, large, seed, rate)
        ratio = found["grown"].seconds / found["as large from the start"].seconds
        steps = max(round(setting.steps * ratio), 10)
        found["as large, for the seconds of grown"] = train(data, setting, large, seed, rate, steps)
        for arm, one in found.items():
            arms.setdefault(arm, []).append(one)
    lines = []
    for arm, results in arms.items():
        mean = np.mean(results, 0)
        shown = [name, arm, f"{mean[0]:.4f}", f"{mean[1]:.3f}"]
        pairs = list(zip(arms["grown"], results, strict=True))
        if arm == "grown" or seeds < 2:
            shown.append("")
        else:
            gain = t_interval([mine.accuracy - other.accuracy for mine, other in pairs])
            shown.append(f"{gain:+.4f}")
        shown.append(f"{np.median([mine.seconds / other.seconds for mine, other in pairs]):.2f}")
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"part of a name: {', '.join(SETTINGS)}; all")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rate", type=float, default=3e-3, help="the largest learning rate, default %(default)s")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| setting | arm | accuracy | loss | grown is better by | seconds of grown, as a multiple |")
    print("|---|---|---|---|---|---|")
    for name in SETTINGS:
        if not asked.settings or any(part in name for part in asked.settings):
            print(study(name, asked.seeds, asked.rate), flush=True)


if __name__ == "__main__":
    main()
