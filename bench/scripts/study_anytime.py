"""One growing network at every stop, beside the static width that hindsight would choose for that stop.

    python bench/scripts/study_anytime.py                      # 8 seeds, two texts: two hours
    python bench/scripts/study_anytime.py --seeds 2 stdlib

A byte transformer with one block (RMSNorm, heads of 16, a squared ReLU) on the sources of the standard library or the C++ headers
of torch: batches of 4 x 64 bytes, Adam, a constant rate, and the average of the weights over about the last tenth of the compute,
read at 12 stops over a 30-fold range of budgets. `esper.AnytimeGrowth` starts with 16 features and doubles by its defaults, up to
64; the static ones have 16, 32 and 64. Each arm has the best of three rates by its mean over the stops, found on the first text
and seed 99. Also in the table: restarts (each width anew for its share, the best so far kept) and halving.

Gap: bits per byte above the best static width for each stop, mean over stops (in FLOPs, and in CPU seconds by interpolation).
"""

import argparse
import json
import math
import sysconfig
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import esper
from esper.leyline.intervals import t_interval

LENGTH, BATCH, HEAD = 64, 4, 16
STOPS = np.geomspace(10e9, 300e9, 12)
WIDTHS = (16, 32, 64)
RATES = (2e-3, 4e-3, 8e-3)


class Block(nn.Module):
    """Attention and a feed-forward, each behind a norm and added to the stream; their last layers begin at 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_dim = HEAD
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        for layer in (self.qkv, self.up):
            nn.init.normal_(layer.weight, std=width**-0.5)
        for layer in (self.out, self.down):
            nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, L, C)."""
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm_2(x))).square())


class ByteModel(nn.Module):
    """Logits (B, L, 128) of the next byte, from bytes (B, L)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(128, width), nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.block, self.norm, self.head = Block(width), nn.RMSNorm(width, eps=1e-6), nn.Linear(width, 128, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.5)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, L)."""
        logits: Tensor = self.head(self.norm(self.block(self.bytes(x) + self.positions[: x.shape[1]])))
        return logits


class Point(NamedTuple):
    """A stop: FLOPs and CPU seconds of training, bits per byte of the averaged network on held-out text, its width."""

    flops: float
    seconds: float
    bits: float
    width: int


def text(name: str) -> tuple[Tensor, Tensor]:
    """Bytes below 128 for training, and every 20th block of 4,096 of them for the test."""
    if name == "stdlib":
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    else:
        files = sorted((Path(torch.__file__).parent / "include" / "ATen").rglob("*.h"))
    raw = b"".join(file.read_bytes() for file in files)[:4_000_000]
    blocks = (
        torch.frombuffer(bytearray(raw[: len(raw) // 4096 * 4096]), dtype=torch.uint8)
        .long()
        .clamp(max=127)
        .view(-1, 4096)
    )
    held = torch.arange(len(blocks)) % 20 == 7
    return blocks[~held].flatten(), blocks[held].flatten()


def cost(model: nn.Module) -> float:
    """FLOPs of a step: 6 for each weight that multiplies, and for each pair of features of a position and one before it."""
    width = model.positions.shape[-1]
    weights = sum(
        each.numel() for name, each in model.named_parameters() if "bytes" not in name and "positions" not in name
    )
    return 6.0 * (weights + LENGTH * width) * LENGTH * BATCH


def train(
    data: tuple[Tensor, Tensor], width: int, most_width: int, rate: float, seed: int, stops: Sequence[float] = STOPS
) -> list[Point]:
    """Train one network, which grows up to a width; returns its stops."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    train_text, test_text = data
    model = ByteModel(width)
    named = dict(model.named_parameters())
    tables = [named.pop("bytes.weight"), named.pop("positions")]
    optimizer = torch.optim.Adam(
        [{"params": tables, "lr": 2 * rate}, {"params": list(named.values())}], rate, (0.9, 0.98)
    )
    most = sum(each.numel() for each in ByteModel(most_width).parameters())
    growth = esper.AnytimeGrowth(
        model, optimizer, example=train_text[: 2 * LENGTH].view(2, LENGTH), most_parameters=most, seed=seed
    )
    window = torch.arange(LENGTH + 1)
    test = test_text[(torch.arange(192) * ((len(test_text) - LENGTH - 1) // 192))[:, None] + window]
    flops = seconds = 0.0
    found: list[Point] = []
    for stop in stops:
        begun = time.process_time()
        while flops < stop:
            batch = train_text[torch.randint(len(train_text) - LENGTH - 1, (BATCH, 1), generator=generator) + window]
            F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
            flops += cost(model)
            optimizer.step()
            optimizer.zero_grad()
            growth.step(batch[:, 1:])
        seconds += time.process_time() - begun
        with torch.no_grad():
            loss = F.cross_entropy(growth.average(test[:, :-1]).flatten(0, 1), test[:, 1:].flatten())
        found.append(Point(flops, seconds, float(loss) / math.log(2), int(model.positions.shape[-1])))
    return found


def bits(points: Sequence[Point]) -> NDArray[np.float64]:
    """(stops,) bits."""
    return np.array([point.bits for point in points])


def restarts(runs: Mapping[int, list[Point]]) -> NDArray[np.float64]:
    """(stops,) bits of the best network so far, where each width begins anew when as much compute was used as by all before."""
    shares, used = {}, 0.0
    for number, width in enumerate(WIDTHS):
        shares[width] = (used, STOPS[0] * 2.0 if number == 0 else 4.0 * max(used, STOPS[0]))
        used += shares[width][1]
    best = []
    for stop in STOPS:
        seen = [math.inf]
        for width, (start, length) in shares.items():
            own = min(stop - start, length if width != WIDTHS[-1] else math.inf)
            if own >= runs[width][0].flops:
                seen.append(float(np.interp(math.log(own), np.log([p.flops for p in runs[width]]), bits(runs[width]))))
        best.append(min(seen) if min(seen) < math.inf else bits(runs[WIDTHS[0]])[0])
    return np.array(best)


def halving(runs: Mapping[int, list[Point]]) -> NDArray[np.float64]:
    """(stops,) bits of the width that is best after a quarter of the compute was shared by all, trained on with the rest."""
    found = []
    for stop in STOPS:
        share = stop / 4 / len(WIDTHS)
        early = {
            w: float(np.interp(math.log(share), np.log([p.flops for p in runs[w]]), bits(runs[w]))) for w in WIDTHS
        }
        width = min(early, key=lambda each: early[each])
        own = math.log(stop * 3 / 4 + share)
        found.append(float(np.interp(own, np.log([p.flops for p in runs[width]]), bits(runs[width]))))
    return np.array(found)


def gaps(runs: Mapping[int, list[Point]], grown: Sequence[Point]) -> Iterator[tuple[str, NDArray[np.float64], float]]:
    """Yield each arm, its (stops,) bits and its gap at equal seconds (nan where that has no meaning), one seed."""
    arms = {"grown": grown, **{f"width {width}": runs[width] for width in WIDTHS}}
    low = max(points[0].seconds for points in arms.values())
    high = min(points[-1].seconds for points in arms.values())
    at = np.geomspace(low, max(high, 1.01 * low), 12)
    timed = {
        arm: np.interp(np.log(at), np.log([p.seconds for p in points]), bits(points)) for arm, points in arms.items()
    }
    static = np.min([timed[f"width {width}"] for width in WIDTHS], 0)
    for arm, points in arms.items():
        yield arm, bits(points), float((timed[arm] - static).mean())
    yield "restarts", restarts(runs), math.nan
    yield "halving", halving(runs), math.nan


def study(name: str, seeds: int, rates: Mapping[int, float]) -> dict[str, list[list[float]]]:
    """Print the table of a text. rates: by width, and of the grown network by 0. Returns the bits of each arm and seed."""
    data = text(name)
    arms: dict[str, list[NDArray[np.float64]]] = {}
    timed: dict[str, list[float]] = {}
    for seed in range(100, 100 + seeds):
        runs = {width: train(data, width, width, rates[width], seed) for width in WIDTHS}
        for arm, found, seconds in gaps(runs, train(data, WIDTHS[0], WIDTHS[-1], rates[0], seed)):
            arms.setdefault(arm, []).append(found)
            timed.setdefault(arm, []).append(seconds)
    hindsight = np.min([np.mean(arms[f"width {width}"], 0) for width in WIDTHS], 0)  # for each stop, over seeds
    for arm, found in arms.items():
        shown = [name, arm, *(f"{value:.3f}" for value in np.mean(found, 0)[::2])]
        over = [float((each - hindsight).mean()) for each in found]
        behind = [float((each - mine).mean()) for each, mine in zip(found, arms["grown"], strict=True)]
        shown += [f"{t_interval(over):+.3f}", "" if arm == "grown" else f"{t_interval(behind):+.3f}"]
        shown += ["" if math.isnan(timed[arm][0]) else f"{t_interval(timed[arm]):+.3f}"]
        print(f"| {' | '.join(shown)} |", flush=True)
    return {arm: [list(map(float, each)) for each in found] for arm, found in arms.items()}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="stdlib, headers; both")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rates", type=float, nargs=4, metavar="RATE", help="of grown, 16, 32 and 64; tuned without")
    parser.add_argument("--json", type=Path, help="writes the bits of each arm, seed and stop")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if asked.rates:
        rates = dict(zip((0, *WIDTHS), asked.rates, strict=True))
    else:
        data, rates = text("stdlib"), {}
        for width in (0, *WIDTHS):
            tried = {
                rate: float(bits(train(data, width or WIDTHS[0], width or WIDTHS[-1], rate, 99)).mean())
                for rate in RATES
            }
            rates[width] = min(tried, key=lambda rate: tried[rate])
            print(
                f"{'width ' + str(width) if width else 'grown'}: "
                + ", ".join(f"{rate:g} {own:.3f}" for rate, own in tried.items()),
                flush=True,
            )
    print(
        "| text | arm |"
        + "".join(f" {stop / 1e9:.0f} GF |" for stop in STOPS[::2])
        + " above the best for each stop | behind grown | in seconds |"
    )
    print("|---|---|" + "---|" * len(STOPS[::2]) + "---|---|---|")
    results = {name: study(name, asked.seeds, rates) for name in asked.texts or ("stdlib", "headers")}
    if asked.json:
        asked.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
