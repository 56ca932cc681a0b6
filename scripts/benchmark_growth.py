"""Measure what growing costs a training loop: between decisions, at one, while a seed incubates, and in compilations.

    python scripts/benchmark_growth.py
    python scripts/benchmark_growth.py --sizes 128x5 --steps 200

A size is the width and the number of layers of a transformer. Steps of the plain and of the grafted models alternate. Each is
compared with the plain one beside it, and the median over `--steps` of these ratios is shown, with its quartiles where it is
small. Seconds are those of the processor, of one thread, so that other work on the machine counts little. A decision measures
the network on `--probe` batches of the size of a training batch. At the end, a small compiled network grows by a fixed schedule
in both modes, and the graphs that torch.compile makes are counted. Before all that, a linear network and the first example of
docs/growth.md are trained from the first to the last step, `--turns` times, in turns with the same loop without growth. Without
sizes that is all:

    python scripts/benchmark_growth.py --sizes --turns 9
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from machine import machine_line
from sklearn.datasets import load_digits
from torch import Tensor, nn

import esper
from esper.leyline.lifecycle.vocabulary import Actions, Op

VOCABULARY, LENGTH, HEAD = 256, 64, 32
SIZES = ("64x2", "128x2", "128x5", "256x4", "384x6")
WORK = 20_000_000
"""Steps of a model are at most this number divided by its parameters, and at least 4."""
WARM = 2
"""Steps that are not timed."""
LIFE = {  # by decision: operation, slot, blueprint, blend, tempo index, target index
    0: (Op.GERMINATE, 0, 0, 0, 1, 3),
    2: (Op.ADVANCE, 0, 0, 0, 0, 0),
    4: (Op.FOSSILIZE, 0, 0, 0, 0, 0),
    5: (Op.GERMINATE, 1, 0, 0, 2, 3),
    7: (Op.ADVANCE, 1, 0, 0, 0, 0),
    10: (Op.PRUNE, 1, 0, 0, 2, 0),
    14: (Op.GERMINATE, 2, 0, 0, 1, 3),
    16: (Op.ADVANCE, 2, 0, 0, 0, 0),
    18: (Op.FOSSILIZE, 2, 0, 0, 0, 0),
}
"""Three seeds: one is kept, one is blended slowly and removed slowly, and one is kept again."""


class Block(nn.Module):
    """Computes a pre-norm block with causal attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L, C) to (B, L, C)."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(read.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    """Reads tokens and scores the next one at each position."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token numbers (B, L) int64 to logits (B, L, V)."""
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy over all positions."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Schedule(esper.Controller):
    """Carries out the decisions that a script gives by step number, and waits in the other steps."""

    def __init__(self, script: Mapping[int, tuple[int, ...]]) -> None:
        self.script = script

    def act(self, view: esper.View) -> Actions:
        """Return the decision of the script for this step."""
        actions = Actions.wait(1)
        if view.step in self.script:
            for head, value in zip(actions, self.script[view.step], strict=True):
                head[:] = value
        return actions


class Trainer:
    """Holds a model with its optimizer, and times its steps."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        self.model, self.batch = model, batch
        self.call: Callable[[Tensor], Tensor] = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.growth: esper.Growth | None = None
        self.seconds: list[float] = []

    def step(self, shadow: bool = False) -> None:
        """Train for one step, growth included, and record its processor seconds."""
        ids = torch.randint(0, VOCABULARY, (self.batch, LENGTH + 1))
        begin = time.process_time()
        loss(self.call(ids[:, :-1]), ids[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.growth is not None:
            self.growth.step(*((ids[:, :-1], ids[:, 1:]) if shadow else ()))
        self.seconds.append(time.process_time() - begin)


def ratio(trainer: Trainer, base: Trainer) -> list[float]:
    """Return quartiles of the ratios of `trainer`'s seconds to those of `base`, step by step, without the first WARM steps."""
    ratios = [one / other for one, other in zip(trainer.seconds[WARM:], base.seconds[WARM:], strict=True)]
    return statistics.quantiles(ratios, n=4)


def grown(
    plain: nn.Module, batch: int, probe: int, *, every: int, script: Mapping[int, tuple[int, ...]], mode: Any = "live"
) -> Trainer:
    """Return a trainer of a grafted copy of a model, whose controller follows a script."""
    trainer = Trainer(copy.deepcopy(plain), batch)
    ids = torch.randint(0, VOCABULARY, (probe, batch, LENGTH + 1))
    batches = [(each[:, :-1], each[:, 1:]) for each in ids]
    gates = {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1}
    trainer.growth = esper.Growth(
        trainer.model, trainer.optimizer, probe=batches, loss=loss, controller=Schedule(script), every=every, budget=1.0,
        mode=mode, settings={"gates": gates, "blueprints": ["bypass-mlp"]},
    )  # fmt: skip
    return trainer


def measure(width: int, layers: int, batch: int, steps: int, probe: int) -> None:
    """Print the figures of one model, as a row of a table."""
    plain = Decoder(width, layers)
    size = sum(parameter.numel() for parameter in plain.parameters())
    steps = min(steps, max(4, WORK // size))
    birth = {0: LIFE[0]}
    trainers = {
        "plain": Trainer(copy.deepcopy(plain), batch),
        "idle": grown(plain, batch, probe, every=10**6, script={}),
        "straight": grown(plain, batch, probe, every=10**6, script=birth),
        "shadow": grown(plain, batch, probe, every=10**6, script=birth),
        "reserve": grown(plain, batch, probe, every=10**6, script={}, mode="reserve"),
        "decision": grown(plain, batch, probe, every=1, script={}),
    }
    for name in ("straight", "shadow"):
        growth = trainers[name].growth
        assert growth is not None
        growth.engine.finish_step()  # the seed has germinated, and incubates from here on
        growth.engine.begin_step(Actions.wait(1))
    for _ in range(steps + WARM):
        for name, trainer in trainers.items():
            trainer.step(shadow=name == "shadow")
    base, growth = trainers["plain"], trainers["idle"].growth
    assert growth is not None
    idle, straight, shadow, reserve = (
        ratio(trainers[name], base) for name in ("idle", "straight", "shadow", "reserve")
    )
    step = 1e3 * statistics.median(base.seconds[WARM:])
    print(
        f"| {width} x {layers} | {size:,} | {len(growth.population.sites)} | {step:.1f} | "
        f"{idle[1] - 1:+.1%} ({idle[0] - 1:+.1%} to {idle[2] - 1:+.1%}) | {straight[1] - 1:+.0%} | {shadow[1] - 1:+.0%} | "
        f"{reserve[1] - 1:+.0%} | {ratio(trainers['decision'], base)[1] - 1:.2f} |",
        flush=True,
    )


def rest(width: int, layers: int, batch: int, steps: int, probe: int) -> None:
    """Print what a grafted model costs between decisions, beside a second copy of the plain one, which costs nothing."""
    plain = Decoder(width, layers)
    base, again = (Trainer(copy.deepcopy(plain), batch) for _ in range(2))
    idle = grown(plain, batch, probe, every=10**6, script={})
    for _ in range(steps + WARM):
        for trainer in (base, again, idle):
            trainer.step()
    for name, trainer in (("the plain model again", again), ("grafted, between decisions", idle)):
        low, middle, high = ratio(trainer, base)
        total = sum(trainer.seconds[WARM:]) / sum(base.seconds[WARM:])
        print(f"| {name} | {middle - 1:+.1%} | {low - 1:+.1%} to {high - 1:+.1%} | {total - 1:+.1%} |", flush=True)


def count(mode: str, backend: str) -> None:
    """Print what torch.compile makes of a network that grows by LIFE, as a row of a table."""
    torch.compiler.reset()
    trainer = grown(Decoder(64, 2), 4, 2, every=1, script=LIFE, mode=mode)
    growth = trainer.growth
    assert growth is not None
    trainer.call = torch.compile(trainer.model, backend=backend, fullgraph=True)
    trainer.step()
    first = growth.compilations["graphs"]
    for _ in range(21):
        trainer.step()
    found, summary = growth.compilations, growth.summary()
    lives = " | ".join(str(len(summary[name])) for name in ("plantings", "keeps", "prunes"))
    print(f"| {mode} | {lives} | {first} | {found['graphs'] - first} | {found['changes']} | {found['emptied']} |")


def example(shadow: bool) -> tuple[nn.Module, Tensor, Tensor, range, dict[str, Any], int]:
    """Make the linear network that tells digits above 4, or with `shadow` the first example of docs/growth.md.

    Returns a model, its data, the indices of the examples that it trains on, the arguments of Growth, and the number of steps.
    """
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    x, probe = x.float() / 16, slice(1100, 1400)
    if shadow:
        model = nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 10))
        return model, x, y, range(1100), {"probe": [(x[probe], y[probe])], "budget": 4.0, "every": 30}, 1500
    y = (y > 4).long()
    model = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 2))
    return model, x, y, range(1000), {"probe": [(x[probe], y[probe])], "budget": 2.0, "every": 20}, 600


def trained(shadow: bool, seed: int, *, grows: bool, model: nn.Module | None = None) -> tuple[float, Any, nn.Module]:
    """Train an example, or another model in its place; returns the seconds of the processor, the growth and the network."""
    torch.manual_seed(seed)
    own, x, y, known, arguments, steps = example(shadow)
    model = own if model is None else model
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=3e-3)
    begin = time.process_time()
    growth = esper.Growth(model, optimizer, loss=criterion, **arguments) if grows else None
    for _ in range(steps):
        batch = torch.randint(len(known), (64,))
        criterion(model(x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if growth is not None:
            growth.step(*((x[batch], y[batch]) if shadow else ()))
    network = model if growth is None else growth.finish()
    return time.process_time() - begin, growth, network


def whole(turns: int) -> None:
    """Print what both examples cost in all, as rows of a table: medians over turns, each with a seed of its own."""
    for page, shadow in (("linear network", False), ("docs/growth.md", True)):
        ratios, parts = [], []
        for seed in range(turns):
            plain, _, _ = trained(shadow, seed, grows=False)
            seconds, growth, network = trained(shadow, seed, grows=True)
            kept, _, _ = trained(shadow, seed, grows=False, model=copy.deepcopy(network))
            ratios.append((seconds / plain, kept / plain, plain))
            spent = growth.seconds
            counted = growth.passes["growth"] / sum(growth.passes.values())
            parts.append([*(part / sum(spent.values()) for part in spent.values()), counted])
        times, floor, plain = (statistics.median(column) for column in zip(*ratios, strict=True))
        shares = " | ".join(f"{statistics.median(column):.0%}" for column in zip(*parts, strict=True))
        print(f"| {page} | {plain:.2f} | {times:.2f} | {shares} | {floor:.2f} |", flush=True)


def main() -> None:
    """Read the arguments and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), help=f"width x layers (default: {' '.join(SIZES)})")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a batch (default: 8)")
    parser.add_argument("--steps", type=int, default=30, help="most steps of each kind (default: 30)")
    parser.add_argument("--probe", type=int, default=4, help="batches of the probe (default: 4)")
    parser.add_argument("--idle", default="128x5", help="size at which rest is measured (default: 128x5)")
    parser.add_argument("--idle-steps", type=int, default=60, help="steps of that (default: 60)")
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile (default: aot_eager)")
    parser.add_argument("--turns", type=int, default=9, help="how often the examples are trained (default: 9)")
    parser.add_argument("--quick", action="store_true", help="one small model and few steps")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.sizes, arguments.batch, arguments.steps, arguments.probe = ["32x1"], 2, 4, 2
        arguments.idle_steps, arguments.turns = 4, 1
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(
        "| example | plain [s] | with growth, times plain | setup | incubation | probe | folds | decisions | rest | "
        "growth, by passes | what was kept from the start, times plain |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    whole(arguments.turns)
    if arguments.sizes:
        transformers(arguments)


def transformers(arguments: argparse.Namespace) -> None:
    """Print the tables of decoder transformers."""
    print(
        "\n| width x layers | parameters | sites | step [ms] | idle (quartiles) | straight | shadow | reserve | "
        "decision [steps] |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for size in arguments.sizes:
        width, layers = map(int, size.split("x"))
        measure(width, layers, arguments.batch, arguments.steps, arguments.probe)
    width, layers = map(int, (arguments.sizes[0] if arguments.quick else arguments.idle).split("x"))
    print(f"\n| {width} x {layers}, {arguments.idle_steps} steps | median | quartiles | sum |\n|---|---|---|---|")
    rest(width, layers, arguments.batch, arguments.idle_steps, arguments.probe)
    print(
        "\n| mode | planted | kept | removed | graphs of the first step | graphs after it | changes | caches emptied |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for mode in ("live", "reserve"):
        count(mode, arguments.backend)
    print(f"\n{machine_line()}")


if __name__ == "__main__":
    main()
