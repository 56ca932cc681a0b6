"""Compare growth at the sites that `esper.find_sites` chooses with growth at its further spans.

    python bench/scripts/study_spans.py                  # 8 seeds of 5 networks, half an hour on one core
    python bench/scripts/study_spans.py --seeds 2 "residual network" --arms default "any source"

Every arm of a seed has the same first weights and batches, AdamW at 3e-3. `default` has the sites as they are found. `any source`
chooses for each free site, whenever it is measured what is missing, between its own source and those of all spans that end there:
the one from which most is missing, if that is a tenth more. `heads` has the pairs that widen in place of the sites behind their
second layers, a head too. `pairs` has these pairs alone. `farther` has behind each block the longest of its spans. Prints the
test loss, that less the loss of `default` with paired 95 % intervals, accuracy, parameters and CPU seconds.
"""

import argparse
import sysconfig
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits, make_moons
from torch import Tensor, nn

import esper
from esper.kasmina.graft.grown import root_of, swap, wire_between
from esper.leyline.intervals import t_interval
from esper.leyline.messages import GrowthWarning
from esper.tolaria.live import missing as measuring
from esper.tolaria.live.population import LivePopulation

Pair = tuple[Tensor, Tensor]


class Problem(NamedTuple):
    """Holds a network, its data, and how it is trained."""

    network: nn.Module
    train: Pair
    probe: Pair
    test: Pair
    steps: int
    batch: int
    budget: float
    every: int


class FeedForward(nn.Module):
    """Computes x + down(relu(up(norm(x))))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Block(nn.Module):
    """Computes a block of a decoder: causal attention with two heads, and a feed-forward of GELU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.proj = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(self.ln1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.proj(F.gelu(self.fc(self.ln2(x))))


class Decoder(nn.Module):
    """Predicts the next of 128 bytes from at most 32."""

    def __init__(self, layers: int, width: int, inner: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(128, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for reads, writes in pairwise(widths):
        layers += [nn.Linear(reads, writes), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def table(network: nn.Module, x: Tensor, y: Tensor, steps: int, budget: float) -> Problem:
    """Divide the rows of a table: 60 % to train, 18 % for the probe, 22 % to test."""
    first, last = int(0.6 * len(x)), int(0.78 * len(x))
    parts = [(x[part], y[part]) for part in (slice(first), slice(first, last), slice(last, None))]
    return Problem(network, *parts, steps, 64, budget, 30)


def digits(network: nn.Module, steps: int, budget: float) -> Problem:
    """Load the digits of scikit-learn, in one order."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return table(network, torch.tensor(x[order], dtype=torch.float32) / 16, torch.tensor(y[order]), steps, budget)


def moons() -> Problem:
    """Draw two moons, for one hidden layer of four units."""
    x, y = make_moons(1500, noise=0.2, random_state=0)
    return table(mlp(2, 4, 2), torch.tensor(x, dtype=torch.float32), torch.tensor(y), 1000, 8.0)


def bytes_of_python() -> Problem:
    """Load lines of 33 bytes of the standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    text = torch.tensor([each if each < 128 else 0 for file in files for each in file.read_bytes()])
    lines = text[: len(text) // 33 * 33].view(-1, 33)
    lines = lines[torch.randperm(len(lines), generator=torch.Generator().manual_seed(0))]
    parts = [(lines[part, :-1], lines[part, 1:]) for part in (slice(6000), slice(6000, 6150), slice(7000, 8000))]
    return Problem(Decoder(4, 32, 64), *parts, 400, 16, 0.5, 15)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "digits, 4-32": lambda: digits(mlp(64, 4, 32, 10), 1500, 4.0),
    "four layers of 8": lambda: digits(mlp(64, 8, 8, 8, 8, 10), 1200, 2.0),
    "residual network": lambda: digits(
        nn.Sequential(nn.Linear(64, 8), *(FeedForward(8, 16) for _ in range(4)), nn.Linear(8, 10)), 1000, 1.0
    ),
    "moons": moons,
    "bytes": bytes_of_python,
}
ARMS = ("default", "any source", "heads", "pairs", "farther")


def chosen(sites: esper.FoundSites, arm: str) -> dict[str, esper.Site]:
    """Return the sites of an arm."""
    found = {} if arm == "pairs" else dict(sites)
    for (_, target), span in sites.spans.items():
        widens = span.why.startswith("the pair widens")
        own = target not in sites or sites[target].around == target
        if (arm == "pairs" and widens) or (arm == "heads" and widens and own):
            found[target] = span.site
        if arm == "farther" and not widens and target in sites:
            found[target] = span.site
    return found


def measuring_sources(sites: esper.FoundSites) -> AbstractContextManager[object]:
    """Let the population read each free site from the source of which most is missing, when it measures what is missing."""
    sources = {name: [site.around] for name, site in sites.items()}
    for source, target in sites.spans:
        sources.setdefault(target, []).append(source)

    def sense(live: LivePopulation) -> Tensor:
        free = [s for k, s in enumerate(live.sites) if live.space.fits[k].any() and live.at(s.name) is None]
        pairs = {
            (s.name, each): replace(s, around=each)
            for s in free
            for each in {s.around: 0, **dict.fromkeys(sources[s.name])}
        }
        with patch.object(measuring, "sites_of", lambda _: pairs):
            read = (
                measuring.read_sites(live.network, list(pairs), live._sensed(), live.probe_batches.mean)
                if pairs
                else {}
            )
        lacks = {pair: float(measuring.missing(each)) for pair, each in read.items()}
        found, root, moved = [], root_of(live.network), False
        for site in live.sites:
            own = {source: value for (name, source), value in lacks.items() if name == site.name}
            best = max(own, key=own.__getitem__, default=site.around)
            if own and own[best] <= 1.1 * own.get(site.around, 0.0):
                best = site.around
            found.append(own.get(best, float("nan")))
            if best != site.around:
                moved, root.sites = True, {**root.sites, site.name: replace(site, around=best)}
                after, around = live.network.get_submodule(site.after), live.network.get_submodule(best)
                source = swap(around)
                within = not best or site.after.startswith(f"{best}.")
                swap(after).sources.pop("before", None)
                if around is not after:
                    swap(after).sources["before"] = wire_between(source, source if within else root)
        if moved:
            live.resurvey()
        return torch.tensor(found)[None, :, None]

    return patch.object(LivePopulation, "sense", sense)


class Result(NamedTuple):
    """Holds what an arm reached."""

    loss: float
    accuracy: float
    parameters: int
    seconds: float


def run(name: str, arm: str, seed: int) -> Result:
    """Train one network."""
    torch.manual_seed(seed)
    problem = PROBLEMS[name]()
    network = problem.network

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())

    sites = esper.find_sites(network, problem.probe[0][:8])
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    batches, begun = torch.Generator().manual_seed(seed + 1000), time.process_time()
    with measuring_sources(sites) if arm == "any source" else nullcontext():
        esper.graft(network, chosen(sites, arm))
        growth = esper.Growth(
            network, optimizer, probe=[problem.probe], loss=loss, budget=problem.budget, every=problem.every
        )
        x, y = problem.train
        for _ in range(problem.steps):
            rows = torch.randint(0, len(x), (problem.batch,), generator=batches)
            loss(network(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            growth.step(x[rows], y[rows])
        network = growth.finish().eval()
    seconds = time.process_time() - begun
    with torch.no_grad():
        output, target = network(problem.test[0]), problem.test[1]
    accuracy = float((output.argmax(-1) == target).float().mean())
    return Result(float(loss(output, target)), accuracy, sum(p.numel() for p in network.parameters()), seconds)


def main() -> None:
    """Print a table for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", choices=[*PROBLEMS, []], default=list(PROBLEMS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", GrowthWarning)
    for name in options.networks:
        sites = esper.find_sites(PROBLEMS[name]().network, PROBLEMS[name]().probe[0][:8])
        known: list[Result] = []
        for arm in options.arms:
            if arm not in ("default", "any source") and chosen(sites, arm) in ({}, dict(sites)):
                continue
            results = [run(name, arm, seed) for seed in range(options.seeds)]
            known = known or results
            mean = Result(*map(float, np.mean(results, 0)))  # type: ignore[arg-type]
            less = t_interval([one.loss - other.loss for one, other in zip(results, known, strict=True)])
            figures = (
                f"{mean.loss:.4f} | {less:+.4f} | {mean.accuracy:.3f} | {mean.parameters:.0f} | {mean.seconds:.2f}"
            )
            print(f"{name} | {arm} | {figures}", flush=True)


if __name__ == "__main__":
    main()
