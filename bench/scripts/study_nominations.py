"""Compare where to plant and how to begin: blind incubation, nominations by gradients, and by what layers cannot reach.

    python bench/scripts/study_nominations.py               # 8 seeds of 9 settings, an hour on one core
    python bench/scripts/study_nominations.py --rankings    # a minute
    python bench/scripts/study_nominations.py --seeds 2 moons --arms blind remainder

Every arm of a seed has the same first weights and batches, AdamW at 3e-3. `blind` lets seeds incubate at all sites, as
`settings={"probe": {"sensors_every": 0}}` does. `remainder` is the default: at most two sites are nominated by what the present
layers cannot follow (`esper.tolaria.live.missing`). `product` nominates by the norm of the product of the gradient and what a
seed reads (GradMax). `+ vectors` draws the inner weights of each seed from the singular vectors of the remainder. `oracle` has
the narrow place as its only site. `remainder, 4 units` (or 2, 8, 32) plants seeds of that many units in place of 16, and
`remainder, units by need` the fewest of these that are twice the rank at which a map explains 90 % of what it explains at most
on other examples. Prints the test loss at equal steps, and at the seconds of `blind` (`--beside`) or of the arm, whichever takes
fewer, less that of `blind`, with paired 95 % intervals: a negative difference is a better arm. The last column counts the seeds
in which the first seed was planted behind the narrow place.
"""

import argparse
import sysconfig
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from sklearn.datasets import make_moons
from study_narrow_places import SETTINGS, mlp, split
from torch import Tensor, nn

import esper
from esper.kasmina.blueprints.vector import MLPSeed
from esper.kasmina.graft.grafted import planted_at
from esper.leyline.config.tree import GatesConfig, HeuristicConfig
from esper.leyline.intervals import t_interval
from esper.tamiyo.rules.heuristic import Heuristic
from esper.tolaria.live import population
from esper.tolaria.live.missing import Read, energy, missing, read_sites, ridge, with_ones
from esper_bench.public_sets import letter_recognition

Pair = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class Problem(NamedTuple):
    """Holds a network that is narrow somewhere, and its data.

    place: the site behind the narrow place; empty where nobody knows. budget: as that of `esper.Growth`.
    """

    network: nn.Module
    train: Pair
    probe: Pair
    test: Pair
    loss: Loss
    place: str
    steps: int = 1500
    budget: float = 4.0


def _table(name: str, place: str) -> Callable[[int], Problem]:
    """Return a setting of `study_narrow_places.py` as a function of the seed."""

    def made(seed: int) -> Problem:
        setting = SETTINGS[name]
        data = split(setting)
        y = data.train[1]
        torch.manual_seed(seed)
        outputs = y.shape[1] if y.is_floating_point() else int(y.max()) + 1
        network = mlp((data.train[0].shape[1], *setting.hidden, outputs))
        loss = nn.MSELoss() if y.is_floating_point() else nn.CrossEntropyLoss()
        return Problem(network, *data, loss, place, budget=setting.budget)

    return made


def _divided(x: Tensor, y: Tensor, counts: Sequence[int], seed: int) -> list[Pair]:
    """Divide examples at random: `counts` for training, for the probe and for the test."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    ends = np.cumsum([0, *counts])
    return [(x[order[a:b]], y[order[a:b]]) for a, b in pairwise(ends)]


def unknown_place(seed: int) -> Problem:
    """Draw classes of a random network, for five hidden layers of 64 units, one of which has 3."""
    torch.manual_seed(1000 + seed)
    teacher = mlp((16, 32, 8))
    x = torch.randn(10000, 16)
    with torch.no_grad():
        y = (2 * teacher(2 * x)).argmax(1)
    narrow = seed % 4
    torch.manual_seed(seed)
    network = mlp((16, *(3 if depth == narrow else 64 for depth in range(5)), 8))
    pairs = _divided(x, y, (8000, 500, 1500), seed)
    return Problem(network, *pairs, nn.CrossEntropyLoss(), str(2 * narrow + 2), 1200, 0.5)


def moons(seed: int) -> Problem:
    """Draw two classes in the plane, for two hidden layers of two units."""
    x, y = make_moons(2000, noise=0.2, random_state=seed)
    pairs = _divided(torch.tensor(x, dtype=torch.float32), torch.tensor(y), (1000, 300, 700), seed)
    torch.manual_seed(seed)
    network = mlp((2, 2, 2, 2))
    while float(network(pairs[0][0]).std(0).max()) < 0.05:  # no unit of a layer is active
        network = mlp((2, 2, 2, 2))
    return Problem(network, *pairs, nn.CrossEntropyLoss(), "", 1000, 16.0)


def frozen_body(seed: int) -> Problem:
    """Train a body of 32-3-32 units to tell odd digits from even ones, freeze it, and add a new head for the ten digits."""
    data = split(SETTINGS["digits, 4-32"])
    torch.manual_seed(seed)
    body, head = mlp((64, 32, 3, 32)), nn.Linear(32, 2)
    before = nn.Sequential(*body, nn.ReLU(), head)
    optimizer = torch.optim.AdamW(before.parameters(), 3e-3)
    for _ in range(500):
        batch = torch.randint(len(data.train[0]), (64,))
        nn.functional.cross_entropy(before(data.train[0][batch]), data.train[1][batch] % 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    body.requires_grad_(False)
    return Problem(nn.Sequential(*body, nn.ReLU(), nn.Linear(32, 10)), *data, nn.CrossEntropyLoss(), "", 1000, 4.0)


class Block(nn.Module):
    """Computes a block of a transformer with few hidden units."""

    def __init__(self, width: int, hidden: int, *, causal: bool, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.other, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        read = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(read.transpose(1, 2).flatten(2))
        h: Tensor = x + self.down(torch.relu(self.up(self.other(x))))
        return h


class ViT(nn.Module):
    """Classifies four patches of a digit: two blocks of 16 features with 2 hidden units and 2 heads, or `scale` times as many."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        width = 16 * scale
        self.embed, self.place = nn.Linear(16, width), nn.Parameter(0.1 * torch.randn(4, width))
        self.blocks = nn.Sequential(*(Block(width, 2 * scale, causal=False, heads=2 * scale) for _ in range(2)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.view(-1, 2, 4, 2, 4).transpose(2, 3).reshape(-1, 4, 16)
        y: Tensor = self.head(self.blocks(self.embed(patches) + self.place).mean(1))
        return y


class Bytes(nn.Module):
    """Computes two causal blocks of 32 features with 4 hidden units on 32 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(128, 32), nn.Parameter(0.1 * torch.randn(32, 32))
        self.blocks = nn.Sequential(*(Block(32, 4, causal=True) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 128)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.blocks(self.embed(x) + self.place)))
        return y


def vit(seed: int) -> Problem:
    data = split(SETTINGS["digits, 4-32"])
    torch.manual_seed(seed)
    return Problem(ViT(), *data, nn.CrossEntropyLoss(), "", 1000, 0.5)


def byte_text(seed: int) -> Problem:
    """Load the bytes of Python's standard library, for a transformer."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("[a-f]*.py")))
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp_max(127).unfold(0, 33, 33)
    pairs = _divided(rows[:, :-1], rows[:, 1:], (12000, 128, 512), seed)
    torch.manual_seed(seed)
    return Problem(Bytes(), *pairs, lambda z, y: nn.functional.cross_entropy(z.mT, y), "", 600, 0.5)


def letter(seed: int) -> Problem:
    """Load Letter Recognition, for two hidden layers of 4 units."""
    x, y = letter_recognition()
    x = (x - x.mean(0)) / x.std(0)
    pairs = _divided(torch.tensor(x), torch.tensor(y), (10000, 1000, 4000), seed)
    torch.manual_seed(seed)
    return Problem(mlp((16, 4, 4, 26)), *pairs, nn.CrossEntropyLoss(), "", 1500, 16.0)


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "unknown place": unknown_place,
    "digits, 2-2": _table("digits, 2-2", "4"),
    "digits, 4-32": _table("digits, 4-32", "2"),
    "frozen body": frozen_body,
    "diabetes, 1": _table("diabetes, 1", "2"),
    "moons, 2-2": moons,
    "letter, 4-4": letter,
    "ViT": vit,
    "bytes": byte_text,
}

SIZES = {"bypass-mlp-2": 2, "bypass-mlp-small": 4, "bypass-mlp-8": 8, "bypass-mlp": 16, "bypass-mlp-32": 32}
"""Units of the seeds of each blueprint; the last one is registered here."""
esper.blueprint("bypass-mlp-32", tap="before", parameters=lambda r, w: 32 * (r + 1) + w * 33)(
    lambda r, w: MLPSeed(r, w, 32)
)
ARMS = ("plain", "blind", "product", "remainder", "remainder + vectors", "oracle")


def product(read: Read) -> Tensor:
    """Return the norm of the product of the gradient and what a bypass reads (GradMax)."""
    return ((read.source - read.source.mean(0)).mT @ read.gradient / len(read.gradient)).norm()


def directions(read: Read) -> tuple[Tensor, Tensor]:
    """Return directions (r, U) of what a bypass reads, and the energies (r,) of the remainder that they explain, falling.

    They are C^(-1/2) v for the singular vectors v of C^(-1/2) (u - mean u)^T R / N, with C the covariance of u.
    """
    u, b, g = (part.double() for part in read[:3])
    present, centred = with_ones(b), u - u.mean(0)
    remainder = g - present @ ridge(present, g, 1e-4 * energy(present))
    covariance = centred.mT @ centred / len(u)
    penalty = 1e-2 * covariance.diagonal().mean() + 1e-12
    factor = torch.linalg.cholesky(covariance + penalty * torch.eye(len(covariance)))
    whitened = torch.linalg.solve_triangular(factor, centred.mT @ remainder / len(u), upper=False)
    left, values, _ = torch.linalg.svd(whitened, full_matrices=False)
    return torch.linalg.solve_triangular(factor.mT, left, upper=True).mT, values.square()


def inform(seed: MLPSeed, read: Read) -> None:
    """Let the inner weights be the most important directions with both signs, at preactivations of mean 0 and variance 2."""
    (rows, values), u = directions(read), read.source.double()
    count = min((len(seed.inner.weight) + 1) // 2, int((values > 0.01 * values[0]).sum()))
    rows = rows[:count] * (2**0.5 / (u @ rows[:count].mT).std(0).clamp_min(1e-6))[:, None]
    both = torch.cat([rows, -rows])[: len(seed.inner.weight)]
    with torch.no_grad():
        seed.inner.weight[: len(both)] = both.to(seed.inner.weight.dtype)
        seed.inner.bias[: len(both)] = -(both @ u.mean(0)).to(seed.inner.bias.dtype)


def units_needed(read: Read) -> int:
    """Return twice the rank, as a ReLU has one sign, at which a map explains 90 % of the most that it explains of the remainder.

    The map is fitted on every other example, its rank is cut by the singular vectors of what it gives there, and what it
    explains is measured as by `missing` on the rest.
    """
    present, bypass, g = with_ones(read.inputs), with_ones(read.source), read.gradient
    odd = torch.arange(len(g)) // read.positions % 2 == 1
    p = ridge(present[~odd], g[~odd], 1e-4 * energy(present[~odd]))
    w = ridge(bypass[~odd], g[~odd] - present[~odd] @ p, 1e-2 * energy(bypass[~odd]))
    vectors = torch.linalg.svd(bypass[~odd] @ w, full_matrices=False).Vh
    left, given, shares = g[odd] - present[odd] @ p, bypass[odd] @ w, []
    for rank in range(1, len(vectors) + 1):
        explained = given @ vectors[:rank].T @ vectors[:rank]
        shares.append((left * explained).sum().clamp_min(0).square() / explained.square().sum().clamp_min(1e-30))
    enough = torch.stack(shares) >= 0.9 * max(shares)
    return 2 * (int(enough.nonzero()[0]) + 1)


READ: dict[str, Read] = {}
"""What was read at the last measurement, by site."""


def read_and_note(*given: Any) -> dict[str, Read]:
    """Call `read_sites`, and keep in READ what it returns."""
    READ.clear()
    READ.update(read_sites(*given))
    return READ


class ByNeed(Heuristic):
    """Plays the default rule with seeds of the smallest number of units that the remainder at their site asks for."""

    def _plan(self, view: esper.View) -> Any:
        plan, fits = super()._plan(view), view.masks.blueprint
        blueprint = plan[2]
        for slot, name in enumerate(view.space.slots):
            sizes = {k: SIZES[each.name] for k, each in enumerate(view.space.blueprints) if fits[0, slot, k]}
            if name in READ and sizes:
                need = units_needed(READ[name])
                enough = [k for k, size in sizes.items() if size >= need]
                blueprint[0, slot] = min(enough, key=sizes.get) if enough else max(sizes, key=sizes.get)
        return plan


class Run(NamedTuple):
    """Holds what an arm reached: test loss, its trace by CPU seconds, the share of right answers, the first site, the size."""

    loss: float
    trace: list[tuple[float, float]]
    accuracy: float
    first: str
    parameters: int

    def at(self, seconds: float) -> float:
        """Return the test loss at so many seconds."""
        return float(np.interp(seconds, *zip(*self.trace, strict=True)))


def run(problem: Problem, arm: str, seed: int) -> Run:
    """Train one network."""
    network, loss = problem.network, problem.loss
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], 3e-3)
    batches = torch.Generator().manual_seed(seed)
    base, _, birth = arm.partition(" + ")
    base, _, size = base.partition(", ")
    spent, growth, born = 0.0, None, {}
    begun = time.process_time()
    if base != "plain":
        found = esper.find_sites(network, problem.probe[0][:8])
        esper.graft(network, {problem.place: found[problem.place]} if base == "oracle" else found)

        settings: dict[str, Any] = {"probe": {"sensors_every": 0}} if base in ("blind", "oracle") else {}
        rule: Any = "heuristic"
        if size == "units by need":
            settings["blueprints"] = list(SIZES)
            rule = ByNeed(HeuristicConfig(), GatesConfig(), problem.budget)
        elif size:
            name = next(name for name, units in SIZES.items() if size == f"{units} units")
            settings |= {"blueprints": [name], "heuristic": {"weak_blueprints": [name]}}
        growth = esper.Growth(
            network,
            optimizer,
            controller=rule,
            probe=[problem.probe],
            loss=loss,
            budget=problem.budget,
            every=30,
            settings=settings,
        )
        born = _inform_new(growth, problem, {}) if birth else {}
    trace = []
    for step in range(problem.steps):
        batch = torch.randint(len(problem.train[0]), (64,), generator=batches)
        x, y = (part[batch] for part in problem.train)
        loss(network(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if growth is not None and growth.step(x, y) and birth:
            born = _inform_new(growth, problem, born)
        if step % 50 == 49:
            now = time.process_time()
            trace.append((now - begun - spent, _test(network, problem)[0]))
            spent += time.process_time() - now
    if growth is not None:
        network = growth.finish()
    ended = time.process_time() - begun - spent
    value, accuracy = _test(network, problem)
    trace.append((ended, value))
    plantings = [] if growth is None else growth.summary()["plantings"]
    first = plantings[0]["site"] if plantings else ""
    return Run(value, trace, accuracy, first, sum(p.numel() for p in network.parameters()))


def _inform_new(growth: esper.Growth, problem: Problem, born: dict[str, int]) -> dict[str, int]:
    """Set the inner weights of the seeds that were not there before, by `inform`; returns those that are there, by site."""
    now = {}
    for name in growth.population.planted():
        seed = planted_at(growth.model, name).seed.delta
        now[name] = id(seed)
        if born.get(name) != id(seed) and isinstance(seed, MLPSeed):
            batch = problem.train[0][:512], problem.train[1][:512]
            read = read_sites(growth.model, [name], [batch], problem.loss)
            if name in read:
                inform(seed, read[name])
    return now


@torch.no_grad()
def _test(network: nn.Module, problem: Problem) -> tuple[float, float]:
    """Return the loss and the accuracy on the test data; nan where the targets are numbers."""
    x, y = problem.test
    network.eval()
    output = network(x)
    network.train()
    right = torch.nan if y.is_floating_point() else float((output.argmax(-1) == y).float().mean())
    return float(problem.loss(output, y)), right


def study(name: str, seeds: range, arms: Sequence[str], beside: str) -> None:
    """Print the rows of a setting."""
    runs: dict[str, list[Run]] = {arm: [] for arm in arms}
    places = []
    for seed in seeds:
        for arm in arms:
            problem = PROBLEMS[name](seed)
            if arm != "oracle" or problem.place:
                score = product if arm.startswith("product") else missing
                with patch.object(population, "missing", score), patch.object(population, "read_sites", read_and_note):
                    runs[arm].append(run(problem, arm, seed))
        places.append(problem.place)
    for arm, mine in runs.items():
        if not mine:
            continue
        cells = [name, arm, f"{np.mean([r.loss for r in mine]):.3f}", f"{np.mean([r.accuracy for r in mine]):.3f}"]
        if arm != beside and beside in runs:
            pairs = list(zip(mine, runs[beside], strict=True))
            ends = [min(a.trace[-1][0], b.trace[-1][0]) for a, b in pairs]
            cells.append(f"{t_interval([a.loss - b.loss for a, b in pairs]):+.3f}")
            cells.append(f"{t_interval([a.at(end) - b.at(end) for (a, b), end in zip(pairs, ends, strict=True)]):+.3f}")
        else:
            cells += ["", ""]
        cells.append(f"{np.median([r.trace[-1][0] for r in mine]):.2f}")
        cells.append(f"{np.mean([r.parameters for r in mine]):.0f}")
        hits = sum(r.first == place for r, place in zip(mine, places, strict=True))
        cells.append(f"{hits} of {len(mine)}" if mine[0].first and places[0] else "")
        print(f"| {' | '.join(cells)} |", flush=True)


def rankings(seeds: range) -> None:
    """Print for `unknown place`, without growth, in how many seeds each ranking has the narrow place first after some steps."""
    hits: dict[tuple[int, str], int] = {}
    for seed in seeds:
        problem = unknown_place(seed)
        network, batches = problem.network, torch.Generator().manual_seed(seed)
        esper.graft(network, example=problem.probe[0][:8])
        optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
        for step in range(301):
            if step in (0, 30, 90, 300):
                read = read_sites(network, list(network.sites), [problem.probe], problem.loss)
                for score in (product, missing):
                    first = max(read, key=lambda name, score=score: float(score(read[name])))
                    hits[step, score.__name__] = hits.get((step, score.__name__), 0) + (first == problem.place)
            batch = torch.randint(len(problem.train[0]), (64,), generator=batches)
            problem.loss(network(problem.train[0][batch]), problem.train[1][batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (step, name), count in hits.items():
        print(f"step {step}, {name}: {count} of {len(seeds)}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"part of a name: {', '.join(PROBLEMS)}; all")
    parser.add_argument("--seeds", type=int, default=8, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--beside", default="blind", metavar="ARM", help="with which the arms are compared")
    parser.add_argument(
        "--rankings", action="store_true", help="only which site each ranking has first, without growth"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    if asked.rankings:
        rankings(seeds)
        return
    print(
        f"| setting | arm | loss | accuracy | less {asked.beside}, equal steps | equal seconds | seconds | parameters | "
        "place first |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in PROBLEMS:
        if not asked.settings or any(part in name for part in asked.settings):
            study(name, seeds, asked.arms, asked.beside)


if __name__ == "__main__":
    main()
