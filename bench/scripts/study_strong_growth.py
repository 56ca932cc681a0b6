"""Compare growing networks with what a person would do without growth, at equal steps, equal seconds and equal compute.

    python bench/scripts/study_strong_growth.py --out figures/strong          # 8 seeds of 12 settings, an hour
    python bench/scripts/study_strong_growth.py --out figures/strong digits letter

A network grows in three ways, with the defaults of each: by seeds (`esper.Growth`), as a whole (`esper.AnytimeGrowth`), and as a
whole where seconds count (the same with cost="seconds", which begins at the knee of the seconds of a step on the machine).
The budget of the seeds is that of the setting, and there are 50 decisions in a training. Beside them, on the same data:

- untouched: the network as it is, for equal steps and for the seconds of the growing run
- static: the smallest network with at least the parameters of the grown one, all hidden widths multiplied alike, for both
- sweep: networks of three sizes share half of the parameter-steps of the growing run, or of its seconds, and the one with the
  lowest loss on the probe trains on with the other half

AdamW at a constant rate; what is read is the average of the weights over about the last tenth of the steps, for every arm. Each
arm and each size of the sweep has the best of four rates, by its loss on the probe with another seed, which counts for nothing
else; static has the rate of the nearest size of the sweep. So the sweep does not pay for rates out of its budget. Seconds are
those of the processor, one thread, without those of measuring. In `frozen body` seeds are compared with LoRA and a bypass from
the input around the body, of at least their size, and with training all of it. `letter` and `fashion` need the Debian packages
r-cran-mlbench (with `rdata`) and dataset-fashion-mnist; they are left out, with a sentence, where these are not installed.
Figures of each seed are kept in the folder, so that a run that is broken off goes on. Prints the tables in Markdown;
differences are in points (a hundredth of the accuracy, or 1 % of the loss), with paired 95 % t intervals, and above 0 where the
grown network is better.
"""

import argparse
import copy
import io
import itertools
import math
import sysconfig
import time
import tokenize
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from keyword import iskeyword
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from unittest.mock import patch

import numpy as np
import torch
from study_anytime import ByteModel
from study_narrow_places import mlp
from study_nominations import PROBLEMS, Pair, Problem, ViT
from study_widening import cnn, fashion
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

import esper
from esper.leyline.intervals import t_interval
from esper.leyline.messages import InputError
from esper.runs.healing.training import LowRankAdapter
from esper.runs.live import anytime
from esper.runs.live.anytime import BEGINNING, WINDOW, Cost
from esper_bench.records import load_record, run_script, save_record

Way = Literal["seeds", "whole", "whole, by seconds"]
WAYS = get_args(Way)
Axis = Literal["steps", "seconds", "compute"]
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
TUNING = 400
"""The seed on which rates are chosen."""
LOOKS = 12
"""Measurements on the probe and the test in as many steps as a setting has."""
DECISIONS = 50
ARMS = (
    "untouched, steps",
    "untouched, seconds",
    "static, steps",
    "static, seconds",
    "sweep, compute",
    "sweep, seconds",
)


class Setting(NamedTuple):
    """Describes data and networks of any width.

    build: a network by width and seed. first: the width at which networks grow; sizes: widths of the sweep, as multiples of it.
    unit: widths are multiples of it. budget: of `esper.Growth`. keeps: whether a training counts as the network with its lowest
    loss on the probe.
    """

    problem: Callable[[int], Problem]
    build: Callable[[int, int], nn.Module]
    first: int
    steps: int
    budget: float
    sizes: tuple[int, ...] = (1, 4, 16)
    unit: int = 1
    batch: int = 64
    keeps: bool = False


class Tagger(nn.Module):
    """Classifies the bytes of a text, read from the left by a GRU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(128, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 7)

    def forward(self, x: Tensor) -> Tensor:
        """Map bytes (B, L) to scores of their kinds (B, L, 7)."""
        y: Tensor = self.head(self.gru(self.embed(x))[0])
        return y


class UNet(nn.Module):
    """Classifies the points of a signal: two levels, with a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.down = nn.Conv1d(1, width, 5, padding=2), nn.Conv1d(width, 2 * width, 5, padding=2)
        self.low, self.up = (
            nn.Conv1d(2 * width, 2 * width, 5, padding=2),
            nn.ConvTranspose1d(2 * width, width, 2, stride=2),
        )
        self.out, self.head = nn.Conv1d(2 * width, width, 5, padding=2), nn.Conv1d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map signals (B, 1, L) to scores (B, L, 4)."""
        high = torch.relu(self.into(x))
        low = torch.relu(self.low(torch.relu(self.down(nn.functional.max_pool1d(high, 2)))))
        y: Tensor = self.head(torch.relu(self.out(torch.cat([high, torch.relu(self.up(low))], 1))))
        return y.mT


def cross_entropy_by_position(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of logits (B, L, K) and classes (B, L)."""
    return nn.functional.cross_entropy(output.mT, target)


def divided(x: Tensor, y: Tensor, counts: Sequence[int], seed: int) -> list[Pair]:
    """Divide examples in an order of the seed: `counts` for training, for the probe and for the test."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: sum(counts)]
    return [(x[part], y[part]) for part in order.split(list(counts))]


@cache
def tagged_bytes() -> Pair:
    """Return rows (n, 32) of the standard library, and the kind of each byte.

    0 is space and the rest, 1 a keyword, 2 a name, 3 a number, 4 a string, 5 a comment, 6 an operator.
    """
    kinds = {tokenize.NUMBER: 3, tokenize.STRING: 4, tokenize.COMMENT: 5, tokenize.OP: 6}
    xs, ys = [], []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py")):
        text = path.read_text("utf-8")
        if not text.isascii() or "\f" in text:
            continue
        starts = np.cumsum([0, *(len(line) for line in text.splitlines(keepends=True))])
        tags = np.zeros(len(text), np.int64)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            kind = 1 + (not iskeyword(token.string)) if token.type == tokenize.NAME else kinds.get(token.type, 0)
            (row, column), (end_row, end_column) = token.start, token.end
            if kind:
                tags[starts[row - 1] + column : starts[end_row - 1] + end_column] = kind
        xs.append(np.frombuffer(text.encode(), np.uint8).astype(np.int64))
        ys.append(tags)
    x, y = (torch.tensor(np.concatenate(parts)) for parts in (xs, ys))
    return x.unfold(0, 32, 32), y.unfold(0, 32, 32)


def gru_tagger(seed: int) -> Problem:
    """Return the problem of the kinds of the bytes of Python."""
    pairs = divided(*tagged_bytes(), (8000, 256, 1000), seed)
    return Problem(nn.Identity(), *pairs, cross_entropy_by_position, "")


def signals(seed: int) -> Problem:
    """Draw noisy signals of 64 points: silence, a sine, a square wave or a sawtooth, changing to another at one place."""
    draw, count = np.random.default_rng(seed), 5000
    kinds, frequency, phase = (
        draw.integers(0, 4, (2, count, 1)),
        draw.uniform(3, 8, (2, count, 1)),
        draw.random((2, count, 1)),
    )
    turn = frequency * np.arange(64) / 64 + phase  # (2, n, 64), in periods
    sine = np.sin(2 * np.pi * turn)
    waves = np.select([kinds == 1, kinds == 2, kinds == 3], [sine, np.sign(sine), 2 * (turn % 1) - 1], 0.0)
    late = np.arange(64) >= draw.integers(10, 54, (count, 1))
    x = np.where(late, waves[1], waves[0]) + 0.5 * draw.normal(size=(count, 64))
    y = np.where(late, kinds[1], kinds[0])
    pairs = divided(torch.tensor(x[:, None], dtype=torch.float32), torch.tensor(y), (3500, 300, 1200), seed)
    return Problem(nn.Identity(), *pairs, cross_entropy_by_position, "")


@cache
def fashion_images() -> Pair:
    """Load 20,000 images as rows of pixels, and their classes."""
    x, y = fashion()
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def clothes(seed: int) -> Problem:
    """Return the problem of Fashion-MNIST."""
    return Problem(
        nn.Identity(), *divided(*fashion_images(), (12000, 300, 1000), seed), nn.functional.cross_entropy, ""
    )


def uneven(width: int, seed: int) -> nn.Module:
    """Return five hidden layers in the ratio of 64 to 3, of which one, at an unknown depth, is the narrow one."""
    return mlp((16, *(width if depth == seed % 4 else round(64 * width / 3) for depth in range(5)), 8))


def byte_model(width: int, seed: int) -> nn.Module:
    """Return a transformer of one block. Its head does not begin at 0, so that gradients reach the block and sites are found."""
    network = ByteModel(width)
    nn.init.normal_(network.head.weight, std=0.02)
    return network


SETTINGS: Mapping[str, Setting] = {
    "digits, 2-2": Setting(PROBLEMS["digits, 2-2"], lambda width, seed: mlp((64, width, width, 10)), 2, 1000, 16.0),
    "moons, 4-4": Setting(PROBLEMS["moons, 2-2"], lambda width, seed: mlp((2, width, width, 2)), 4, 400, 16.0),
    "diabetes, 1": Setting(PROBLEMS["diabetes, 1"], lambda width, seed: mlp((10, width, 1)), 1, 400, 64.0),
    "letter, 4-4": Setting(PROBLEMS["letter, 4-4"], lambda width, seed: mlp((16, width, width, 26)), 4, 1500, 16.0),
    "large batches of letter, 4-4": Setting(
        PROBLEMS["letter, 4-4"], lambda width, seed: mlp((16, width, width, 26)), 4, 1500, 16.0, (1, 8, 32), batch=1024
    ),
    "fashion, CNN of 4": Setting(clothes, lambda width, seed: cnn(width, 10), 4, 400, 4.0, (1, 4, 8)),
    "GRU tagger, 4": Setting(gru_tagger, lambda width, seed: Tagger(width), 4, 150, 4.0, batch=16),
    "ViT on digits, 16": Setting(PROBLEMS["ViT"], lambda width, seed: ViT(width), 1, 400, 4.0, (1, 2, 4)),
    "U-Net 1-D, 2": Setting(signals, lambda width, seed: UNet(width), 2, 150, 4.0, (1, 4, 8), batch=32),
    "bytes, 16": Setting(PROBLEMS["bytes"], byte_model, 16, 1000, 4.0, (1, 2, 4), 16, 16),
    "narrow layer of unknown place": Setting(PROBLEMS["unknown place"], uneven, 3, 800, 0.5, (1, 2, 4)),
}
"""All but the frozen body."""
FROZEN = "frozen body"


class Look(NamedTuple):
    """Holds what a training has reached after steps, seconds and parameter-steps."""

    steps: float
    seconds: float
    compute: float
    probe: float
    score: float


@torch.no_grad()
def measured(network: nn.Module, problem: Problem) -> tuple[float, float]:
    """Return the loss on the probe, and the score on the test: the accuracy, or minus the loss of numbers and of bytes."""
    network.eval()
    probe = float(problem.loss(network(problem.probe[0]), problem.probe[1]))
    x, y = problem.test
    output = network(x)
    if y.is_floating_point() or output.shape[-1] == 128:
        return probe, -float(problem.loss(output, y))
    return probe, float((output.argmax(-1) == y).float().mean())


def size(network: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(each.numel() for each in network.parameters())


def toward(averages: Any, now: Any, count: Any) -> None:
    """Move averages of weights so that they are of about the last tenth of the steps, as `esper.AnytimeGrowth` does."""
    torch._foreach_lerp_(averages, now, min(1.0, (WINDOW + 1) / (int(count) + 1 + WINDOW)))


class Training:
    """Trains a network, which grows perhaps, and measures it at equal distances; `at` trains as far as is asked.

    Raises:
        InputError: where Esper says that the network cannot grow this way
    """

    def __init__(
        self, setting: Setting, problem: Problem, network: nn.Module, rate: float, seed: int, way: Way | None = None
    ) -> None:
        self.setting, self.problem, self.network = setting, problem, network
        begun = time.process_time()
        self.optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], rate)
        self.growth: esper.Growth | esper.AnytimeGrowth | None = None
        example, loss = problem.probe[0][:8], problem.loss
        if way == "seeds":
            esper.graft(network, example=example)
        self.average = AveragedModel(network, multi_avg_fn=toward) if way in (None, "seeds") else None
        if way == "seeds":
            self.growth = esper.Growth(
                network,
                self.optimizer,
                ema=self.average,
                probe=[problem.probe],
                loss=loss,
                budget=setting.budget,
                every=setting.steps // DECISIONS,
            )
        elif way is not None:
            cost: Cost = "parameters" if way == "whole" else "seconds"
            batch = problem.train[0][: setting.batch]
            self.growth = esper.AnytimeGrowth(network, self.optimizer, example=batch, cost=cost, seed=seed)
        self.batches = torch.Generator().manual_seed(seed)
        self.steps, self.compute, self.parameters = 0, 0.0, size(network)
        self.seconds = time.process_time() - begun
        self.looks: list[Look] = []
        self.look()

    def look(self) -> None:
        """Measure the averaged network."""
        of = self.growth.average if isinstance(self.growth, esper.AnytimeGrowth) else self.average
        assert of is not None
        self.looks.append(Look(self.steps, self.seconds, self.compute, *measured(of, self.problem)))

    def train(self, steps: int) -> None:
        """Take so many steps."""
        x, y, loss, growth = *self.problem.train, self.problem.loss, self.growth
        begun = time.process_time()
        for _ in range(steps):
            batch = torch.randint(len(x), (self.setting.batch,), generator=self.batches)
            inputs, targets = x[batch], y[batch]
            loss(self.network(inputs), targets).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.average is not None:
                self.average.update_parameters(self.network)
            self.compute += self.parameters
            changed = (
                growth.step(targets)
                if isinstance(growth, esper.AnytimeGrowth)
                else growth is not None and growth.step(inputs, targets)
            )
            if changed:
                self.parameters = size(self.network)
        self.steps += steps
        self.seconds += time.process_time() - begun

    def at(self, axis: Axis, value: float) -> tuple[float, float]:
        """Return the loss on the probe and the score after so many steps, seconds or parameter-steps, between two looks by a
        line; of the look with the lowest loss on the probe until then where the setting `keeps` it.
        """
        while getattr(self, axis) < value:
            self.train(max(self.setting.steps // LOOKS, 1))
            self.look()
        along = [getattr(look, axis) for look in self.looks]
        if self.setting.keeps:
            best = min((look for look in self.looks if getattr(look, axis) <= value), key=lambda look: look.probe)
            return best.probe, best.score
        probe, score = (
            np.interp(value, along, [getattr(look, name) for look in self.looks]) for name in ("probe", "score")
        )
        return float(probe), float(score)

    def finish(self) -> None:
        """End the growth, whose time counts, and measure once more."""
        begun = time.process_time()
        if self.growth is not None:
            self.network = self.growth.finish()
        self.seconds += time.process_time() - begun
        self.parameters = size(self.network)
        self.look()


def started(setting: Setting, width: int, rate: float, seed: int, way: Way | None = None) -> Training:
    """Return the training of a network of a width at step 0."""
    problem = setting.problem(seed)
    torch.manual_seed(seed)
    return Training(setting, problem, setting.build(width, seed), rate, seed, way)


def grown(setting: Setting, way: Way, rate: float, seed: int) -> Training:
    """Grow a network for the steps of the setting, and return the training."""
    training = started(setting, setting.first, rate, seed, way)
    training.at("steps", setting.steps)
    training.finish()
    return training


def tuned(setting: Setting, ways: Sequence[Way]) -> dict[str, Any]:
    """Choose the best of the rates by the loss on the probe at the last step, for each way and size; or say why there is none."""
    found: dict[str, Any] = {}
    for arm in (*ways, *setting.sizes):
        losses = []
        try:
            for rate in RATES:
                if arm in WAYS:
                    run = grown(setting, arm, rate, TUNING)
                else:
                    run = static(setting, arm * setting.first, rate, TUNING)
                losses.append(least_finite(run.at("steps", setting.steps)[0] if setting.keeps else run.looks[-1].probe))
        except InputError as error:
            found[str(arm)] = str(error)
        else:
            found[str(arm)] = RATES[int(np.argmin(losses))]
    return found


def least_finite(loss: float) -> float:
    """Return a loss that can be compared: the largest of all where it is not finite."""
    return loss if math.isfinite(loss) else math.inf


def static(setting: Setting, width: int, rate: float, seed: int) -> Training:
    """Train a network of one width for the steps of the setting, and return the training."""
    training = started(setting, width, rate, seed)
    training.at("steps", setting.steps)
    return training


def as_large(setting: Setting, parameters: int, seed: int) -> int:
    """Return the smallest width with at least so many parameters."""
    width = setting.first
    while size(setting.build(width, seed)) < parameters:
        width += setting.unit
    return width


def study(setting: Setting, rates: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Run all arms of a seed for each way that has a rate; returns the scores by way and arm, with seconds and sizes."""
    trainings: dict[int, Training] = {}

    def of(width: int) -> Training:
        if width not in trainings:
            nearest = min(setting.sizes, key=lambda each: abs(math.log(width / (each * setting.first))))
            trainings[width] = started(setting, width, rates[str(nearest)], seed)
        return trainings[width]

    found: dict[str, Any] = {}
    for way in WAYS:
        if not isinstance(rates.get(way), float):
            continue
        mine = grown(setting, way, rates[way], seed)
        untouched, width = of(setting.first), as_large(setting, mine.parameters, seed)
        score = mine.at("steps", mine.steps)[1] if setting.keeps else mine.looks[-1].score
        record: dict[str, Any] = {"grown": score, "parameters": mine.parameters, "width": width}
        record["untouched, steps"] = untouched.at("steps", setting.steps)[1]
        record["untouched, seconds"] = untouched.at("seconds", mine.seconds)[1]
        large = of(width)
        record["static, steps"] = large.at("steps", setting.steps)[1]
        per_step = {
            name: each.looks[-1].seconds / each.looks[-1].steps for name, each in (("1", untouched), ("2", large))
        }
        record["static, seconds"] = large.at("seconds", mine.seconds)[1]
        record["seconds"] = mine.seconds
        record["times static"] = mine.seconds / (setting.steps * per_step["2"])
        record["times untouched"] = mine.seconds / (setting.steps * per_step["1"])
        record["step, last to first"] = per_step["2"] / per_step["1"]
        axes: tuple[tuple[Axis, float], ...] = (("compute", mine.compute), ("seconds", mine.seconds))
        for axis, whole in axes:
            widths = [each * setting.first for each in setting.sizes]
            share = whole / 2 / len(widths)
            best = min(widths, key=lambda each, axis=axis, share=share: of(each).at(axis, share)[0])
            record[f"sweep, {axis}"] = of(best).at(axis, share + whole / 2)[1]
            record[f"sweep, {axis}, chose"] = best
        if isinstance(mine.growth, esper.Growth):
            summary = mine.growth.summary()
            record |= {"says": [summary["verdict"], *summary["explanations"]], "kept": len(summary["keeps"])}
            record["stopped"] = summary["stopped"]
        elif mine.growth is not None:
            record |= {"says": [mine.growth.why], "kept": len(mine.growth.growths)}
        found[way] = record
    return found


def untuned(setting: Setting, seeds: Sequence[int]) -> dict[str, Any]:
    """Return scores of growth by seconds at each rate and seed, where growths in the first steps leave the rate or scale it."""
    found: dict[str, Any] = {}
    for rate, seed in itertools.product(RATES, seeds):
        for kept, beginning in (("kept", BEGINNING), ("scaled", 0)):
            with patch.object(anytime, "BEGINNING", beginning):
                score = grown(setting, "whole, by seconds", rate, seed).looks[-1].score
            found.setdefault(f"{rate:g}", {}).setdefault(kept, []).append(score)
    return found


def report_untuned(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of scores at rates that were not tuned."""
    lines = [f"| setting | {' | '.join(f'rate {rate:g}: scaled | kept | better by' for rate in RATES)} |"]
    lines.append("|---|" + "---|---|---|" * len(RATES))
    gains: dict[str, list[list[float]]] = {}
    for name, found in figures.items():
        cells = [name]
        for rate, ways in found.items():
            gain = [points(one, other) for one, other in zip(ways["kept"], ways["scaled"], strict=True)]
            gains.setdefault(rate, []).append(gain)
            cells += [f"{np.mean(ways['scaled']):.3f}", f"{np.mean(ways['kept']):.3f}", f"{t_interval(gain):+.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    means = [f" | | {t_interval(np.mean(each, 0).tolist()):+.1f}" for each in gains.values()]
    return "\n".join([*lines, f"| mean |{' |'.join(means)} |"])


class Bypass(nn.Module):
    """Adds units to a frozen body, from the input into what it returns; their last weights begin at 0. A head reads the sum."""

    def __init__(self, network: nn.Sequential, units: int) -> None:
        super().__init__()
        self.body, self.head = network[:-1], network[-1]
        self.up, self.down = nn.Linear(64, units), nn.Linear(units, 32)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map digits (B, 64) to scores (B, 10)."""
        y: Tensor = self.head(self.body(x) + self.down(torch.relu(self.up(x))))
        return y


def adapted(network: nn.Sequential, arm: str, added: int) -> nn.Module:
    """Return the network of an arm, with at least so many parameters added where it adds some."""
    before = size(network)

    def of(units: int) -> nn.Module:
        mine = copy.deepcopy(network)
        if arm == "bypass":
            return Bypass(mine, units)
        for layer in mine[:-1]:
            if isinstance(layer, nn.Linear):
                parametrize.register_parametrization(layer, "weight", LowRankAdapter(layer.weight, units))
        return mine

    if arm in ("LoRA", "bypass"):
        return next(found for units in range(1, 10_000) if size(found := of(units)) - before >= added)
    mine = copy.deepcopy(network)
    return mine.requires_grad_(True) if arm == "all weights" else mine


FROZEN_ARMS = ("head", "LoRA", "bypass", "all weights")
FROZEN_SETTING = Setting(PROBLEMS["frozen body"], lambda width, seed: nn.Identity(), 3, 800, 4.0)


def study_frozen(setting: Setting, rates: Mapping[str, float], seed: int) -> dict[str, Any]:
    """Run all arms on the frozen body."""
    problem = setting.problem(seed)
    found: dict[str, Any] = {}
    added = 0
    for arm in ("seeds", *FROZEN_ARMS):
        torch.manual_seed(seed)
        network = copy.deepcopy(problem.network) if arm == "seeds" else adapted(problem.network, arm, added)
        training = Training(setting, problem, network, rates[arm], seed, way="seeds" if arm == "seeds" else None)
        training.at("steps", setting.steps)
        if arm == "seeds":
            training.finish()
            added = training.parameters - size(problem.network)
        look = training.looks[-1]
        found[arm] = {"score": look.score, "probe": look.probe, "seconds": look.seconds, "added": added}
        if arm != "seeds":
            found[arm]["as long"] = training.at("seconds", found["seeds"]["seconds"])[1]
    return found


def tuned_frozen(setting: Setting) -> dict[str, Any]:
    """Choose the best of the rates by the loss on the probe, for each arm."""
    arms = ("seeds", *FROZEN_ARMS)
    runs = [study_frozen(setting, dict.fromkeys(arms, rate), TUNING) for rate in RATES]
    return {arm: RATES[int(np.argmin([least_finite(run[arm]["probe"]) for run in runs]))] for arm in arms}


def kept(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a file holds, made first where it is not there."""
    if not path.exists():
        save_record(path, make())
    return load_record(path)


def points(mine: float, other: float) -> float:
    """Return how much better a score is, in hundredths of the accuracy, or in percent of the loss of the other."""
    return 100 * (mine - other) / (-other if other < 0 else 1)


def report(
    figures: Mapping[str, Sequence[Mapping[str, Any]]], ratios: Sequence[float] = (2.0,), without: str | None = None
) -> str:
    """Return the tables, of all settings whose figures are there.

    ratios: the settings in which a step takes at least so many times as long at the end have means of their own.
    without: part of the names of settings that one more mean leaves out.
    """
    lines = [
        "| setting | grows | untouched | grown | over untouched, steps | seconds | times its seconds | over static, steps "
        "| seconds | times its seconds | over sweep, compute | seconds | parameters | a step, last to first |",
        "|" + "---|" * 14,
    ]
    gains: dict[tuple[str, str], dict[str, list[float]]] = {}  # by way and arm: those of each seed, by setting
    lasts = dict[tuple[str, str], float]()  # by way and setting
    for name, records in figures.items():
        for way in WAYS:
            mine = [record[way] for record in records if way in record]
            if not mine:
                continue
            mean = {
                key: float(np.mean([one[key] for one in mine]))
                for key, value in mine[0].items()
                if isinstance(value, float)
            }
            times = {key: float(np.median([one[key] for one in mine])) for key in ("times untouched", "times static")}
            cells = [name, way, f"{mean['untouched, steps']:.3f}", f"{mean['grown']:.3f}"]
            lasts[way, name] = last = float(np.median([one["step, last to first"] for one in mine]))
            for arm in ("untouched", "static", "sweep"):
                for axis in ("compute" if arm == "sweep" else "steps", "seconds"):
                    key = f"{arm}, {axis}"
                    gain = [points(one["grown"], one[key]) for one in mine]
                    gains.setdefault((way, key), {})[name] = gain
                    cells.append(f"{t_interval(gain):+.1f}")
                if arm != "sweep":
                    cells.append(f"{times[f'times {arm}']:.2f}")
            sizes = [one["parameters"] for one in mine]
            cells += [f"{np.mean(sizes):.0f}", f"{last:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| mean over settings | grows | settings | " + " | ".join(ARMS) + " |",
        "|" + "---|" * (3 + len(ARMS)),
    ]
    kinds: dict[str, Callable[[str, str], bool]] = {
        f"a step takes at least {ratio:g} times as long at the end": lambda way, name, ratio=ratio: (
            lasts[way, name] >= ratio
        )
        for ratio in ratios
    }
    kinds["the others"] = lambda way, name: lasts[way, name] < min(ratios)
    if without is not None:
        kinds[f"all but {without}"] = lambda way, name: without not in name
    kinds["all"] = lambda way, name: True
    for (kind, holds), way in itertools.product(kinds.items(), WAYS):
        there = [[one for name, one in gains.get((way, key), {}).items() if holds(way, name)] for key in ARMS]
        if there[0]:
            shared = min(len(one) for one in there[0])
            cells = [f"{t_interval(np.mean([one[:shared] for one in each], 0).tolist()):+.1f}" for each in there]
            lines.append(f"| {kind} | {way} | {len(there[0])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report_frozen(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the frozen body."""
    lines = [
        "| frozen body | accuracy | seeds are better by | for the seconds of seeds | added | seconds |",
        "|" + "---|" * 6,
    ]
    for arm in ("seeds", *FROZEN_ARMS):
        mine = [record[arm] for record in records]
        cells = [arm, f"{np.mean([one['score'] for one in mine]):.3f}"]
        for key in ("score", "as long"):
            there = arm != "seeds"
            pairs = zip(records, mine, strict=True)
            cells.append(
                f"{t_interval([points(r['seeds']['score'], one[key]) for r, one in pairs]):+.1f}" if there else ""
            )
        adds = arm in ("seeds", "LoRA", "bypass")
        cells += [
            f"{np.mean([one['added'] for one in mine]):.0f}" if adds else "",
            f"{np.median([one['seconds'] for one in mine]):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is not there yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*SETTINGS, FROZEN)
    parser.add_argument(
        "settings", nargs="*", metavar="SETTING", help=f"a name, or a part of names: {', '.join(names)}; all"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures of each seed")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="ways to grow in a new folder; all")
    parser.add_argument(
        "--sizes", type=int, nargs="+", help="sizes of the sweep, as multiples of the first width; 1 4 16"
    )
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=500)
    parser.add_argument(
        "--untuned", action="store_true", help="growth by seconds at each rate, with it kept or scaled at first"
    )
    parser.add_argument(
        "--keep", action="store_true", help="take of each training the network with the lowest loss on the probe"
    )
    parser.add_argument(
        "--ratios",
        nargs="+",
        type=float,
        default=(2.0,),
        help="means over the settings in which a step takes at least so many times as long at the end; 2",
    )
    parser.add_argument("--without", metavar="SETTING", help="part of the names that one more mean leaves out; none")
    parser.add_argument("--quick", action="store_true", help="50 steps and two seeds, to see that it runs")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    figures, frozen = dict[str, list[dict[str, Any]]](), list[dict[str, Any]]()
    given = dict[str, dict[str, Any]]()
    seeds = range(asked.first_seed, asked.first_seed + (2 if asked.quick else asked.seeds))
    for name in names:
        if asked.settings and not any(part == name if part in names else part in name for part in asked.settings):
            continue
        folder = (
            asked.out / ("quick" if asked.quick else "") / name.replace(" ", "-").replace("/", "-").replace(",", "")
        )
        setting = FROZEN_SETTING if name == FROZEN else SETTINGS[name]
        if asked.quick:
            setting = setting._replace(steps=DECISIONS)
        setting = setting._replace(keeps=asked.keep, sizes=tuple(asked.sizes or setting.sizes))
        if name == FROZEN and asked.untuned:
            continue
        if name == FROZEN:
            rates = kept(folder / "rates.json", partial(tuned_frozen, setting))
            frozen = [kept(folder / f"{seed}.json", partial(study_frozen, setting, rates, seed)) for seed in seeds]
            continue
        try:
            setting.problem(seeds[0])
        except InputError as error:
            print(f"{name} is left out: {error}")
            continue
        if asked.untuned:
            given[name] = kept(folder / "untuned.json", partial(untuned, setting, seeds))
            continue
        rates = kept(folder / "rates.json", partial(tuned, setting, asked.ways))
        for way in WAYS:
            if isinstance(rates.get(way), str):
                print(f"{name} does not grow by {way}: {rates[way]}")
        figures[name] = [kept(folder / f"{seed}.json", partial(study, setting, rates, seed)) for seed in seeds]
    if asked.untuned:
        print(report_untuned(given))
        return
    tables = [report(figures, asked.ratios, asked.without)] if figures else []
    print("\n\n".join([*tables, *([report_frozen(frozen)] if frozen else [])]))


if __name__ == "__main__":
    run_script(main)
