"""Find where LoRA should go, and with which rank: ranks from the gradient beside one rank for all, at equal size.

    python bench/scripts/study_lora_ranks.py                    # 5 seeds of 2 transformers
    python bench/scripts/study_lora_ranks.py digits --seeds 10
    python bench/scripts/study_lora_ranks.py digits --arms uniform AdaLoRA    # with PEFT installed

`bytes` is a causal transformer of two blocks, pretrained on the sources of Python's standard library and adapted to its help
topics; `digits` one of three blocks that reads an image row by row, adapted to images that are turned by a quarter. Only LoRA
trains, at the linear layers of the blocks, with a scale of 1: W + B A. Arms:

- `uniform`: one rank at every layer.
- `query, value`: one rank at these two alone, so that the size is that of `uniform` or up to a ninth less.
- `gradient`: `esper.lora_ranks`. A direction of rank 1 in a layer with outputs o and inputs i costs o + i parameters. In the
  first step of LoRA-GA (arXiv 2407.05000) it lowers the loss by the square of its singular value s_k of the mean gradient of
  W, so the directions with the largest s_k^2 / (o + i) are bought until the size is reached.
- `gradient, relative`: the same with s_k^2 divided by the mean square of the gradient of a batch of 32, because Adam takes steps
  whose length does not depend on that of the gradient.
- `AdaLoRA` (arXiv 2303.10512), as PEFT has it: from half as many directions again, rounded up, it drops the least important
  ones while it trains, until as many are left as `uniform` has. It counts directions, which cost more at some layers than at
  others, so its size is printed.

The rate of each arm and size is the best of three on seed 100, of four for `AdaLoRA`. Prints a table in Markdown: test loss, and
paired differences from `uniform` with 95 % intervals.
"""

import argparse
import copy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data import topics
from types import SimpleNamespace
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import esper
from esper.leyline.intervals import t_interval
from esper.runs.healing.training import LowRankAdapter

Pair = tuple[Tensor, Tensor]
Ranks = Mapping[str, int]
STEPS, BATCH = 250, 16
UNIFORM = (1, 4)
"""Ranks of `uniform`, which give the sizes."""
TUNING = 100
"""A seed on which the rates are chosen, and which is not reported."""
RATES = (3e-3, 1e-2, 3e-2)
ADALORA = "AdaLoRA"
ADALORA_RATES = (*RATES, 1e-1)
WARMUP, COOLDOWN = 25, 100
"""Steps before the first direction of AdaLoRA is dropped, and after the last one."""


class Block(nn.Module):
    """Computes attention of four heads and a feed-forward, each behind a LayerNorm and added to the stream."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.norms, self.causal = nn.ModuleList(nn.LayerNorm(width) for _ in range(2)), causal
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L, width) to (B, L, width)."""
        h = self.norms[0](x)
        parts = (layer(h).unflatten(2, (4, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        heads = F.scaled_dot_product_attention(*parts, is_causal=self.causal)  # (B, 4, L, width / 4)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Computes blocks on embeddings with learned places; outputs at each place if causal, and otherwise of the mean."""

    def __init__(self, embed: nn.Module, length: int, width: int, classes: int, blocks: int, causal: bool) -> None:
        super().__init__()
        self.embed, self.places = embed, nn.Parameter(torch.randn(length, width) / 10)
        self.blocks = nn.Sequential(*(Block(width, causal) for _ in range(blocks)))
        self.norm, self.head, self.causal = nn.LayerNorm(width), nn.Linear(width, classes), causal

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L) bytes or (B, L, features) to (B, L, classes) if causal, else to (B, classes)."""
        h = self.norm(self.blocks(self.embed(x) + self.places))
        outputs: Tensor = self.head(h if self.causal else h.mean(1))
        return outputs


class Problem(NamedTuple):
    """Holds a network, the data that it is pretrained on, and those that it is adapted to."""

    network: nn.Module
    steps: int
    before: Pair
    train: Pair
    test: Pair


def byte_problem() -> Problem:
    """Load sources, then help topics: 4,500 rows of 64 bytes for training, and a fourth of those after row 5,500 for the test."""
    sources, helps = (
        torch.tensor(list("".join(texts).encode("ascii", "replace"))).unfold(0, 65, 64)
        for texts in (
            [path.read_text("utf-8") for path in sorted(Path(topics.__file__).parents[1].glob("*.py"))],
            [topics.topics[name] for name in sorted(topics.topics)],
        )
    )
    parts = [(rows[:, :-1], rows[:, 1:]) for rows in (sources, helps[:4500], helps[5500::4])]
    return Problem(Transformer(nn.Embedding(128, 48), 64, 48, 128, 2, causal=True), 500, *parts)


def digit_problem() -> Problem:
    """Load 600 upright digits, then 600 others that are turned, and the other 597, turned, for the test."""
    x, y = (torch.tensor(each) for each in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order].float().unflatten(1, (8, 8)) / 16, y[order]
    turned = x.transpose(1, 2).flip(1)
    parts = (x[:600], y[:600]), (turned[600:1200], y[600:1200]), (turned[1200:], y[1200:])
    return Problem(Transformer(nn.Linear(8, 32), 8, 32, 10, 3, causal=False), 400, *parts)


PROBLEMS = {"bytes": byte_problem, "digits": digit_problem}


def loss_of(network: nn.Module, data: Pair) -> Tensor:
    """Return the cross-entropy of a batch [nats], a scalar."""
    return F.cross_entropy(network(data[0]).flatten(0, -2), data[1].flatten())


def learn(network: nn.Module, data: Pair, steps: int, rate: float, seed: int) -> None:
    """Train what requires a gradient by AdamW; the rate falls linearly to 0 in the second half."""
    optimizer = torch.optim.AdamW([each for each in network.parameters() if each.requires_grad], lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / steps)))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        index = torch.randint(len(data[0]), (BATCH,), generator=generator)
        loss_of(network, (data[0][index], data[1][index])).backward()
        optimizer.step(), optimizer.zero_grad(), schedule.step()


def layers_of(network: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of the blocks, by name."""
    return {
        name: part
        for name, part in network.named_modules()
        if name.startswith("blocks") and isinstance(part, nn.Linear)
    }


def ranks_by_gradient(network: nn.Module, data: Pair, size: int, seed: int, *, relative: bool) -> Ranks:
    """Return the ranks that a size buys by the singular values of the mean gradient over up to 1,024 examples."""
    index = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed))[:1024]
    if not relative:
        budget = (size + 0.5) / sum(each.numel() for each in network.parameters())
        chosen = esper.lora_ranks(network, (data[0][index], data[1][index]), budget=budget, layers=["blocks.*"])
        return dict(chosen["rank_pattern"])
    layers = layers_of(network)
    sums = [torch.zeros_like(layer.weight) for layer in layers.values()]
    squares = [0.0] * len(layers)
    for part in index.split(32):
        loss = loss_of(network, (data[0][part], data[1][part]))
        for at, gradient in enumerate(torch.autograd.grad(loss, [layer.weight for layer in layers.values()])):
            sums[at] += gradient
            squares[at] += float(gradient.square().sum())
    offers = []  # (gain a parameter, name, parameters); singular values fall, so a layer sells its directions in order
    for (name, layer), gradient, square in zip(layers.items(), sums, squares, strict=True):
        cost = sum(layer.weight.shape)
        offers += [(float(gain) / cost, name, cost) for gain in torch.linalg.svdvals(gradient).square() / square]
    ranks = dict.fromkeys(layers, 0)
    for _, name, cost in sorted(offers, reverse=True):
        if cost <= size:
            size -= cost
            ranks[name] += 1
    return ranks


def ranks_of(arm: str, network: nn.Module, data: Pair, uniform: int, seed: int) -> Ranks:
    """Return the rank of each layer."""
    costs = {name: sum(layer.weight.shape) for name, layer in layers_of(network).items()}
    size = uniform * sum(costs.values())
    if arm == "uniform":
        return dict.fromkeys(costs, uniform)
    if arm == "query, value":
        chosen = [name for name in costs if name.endswith(("query", "value"))]
        return dict.fromkeys(chosen, size // sum(costs[name] for name in chosen))
    return ranks_by_gradient(network, data, size, seed, relative=arm == "gradient, relative")


ARMS = ("uniform", "query, value", "gradient", "gradient, relative", ADALORA)


def adapted(network: nn.Module, ranks: Ranks, data: Pair, rate: float, seed: int) -> nn.Module:
    """Return a frozen copy in which LoRA of these ranks was trained."""
    network = copy.deepcopy(network).requires_grad_(False)
    torch.manual_seed(seed)
    for name, rank in ranks.items():
        layer = network.get_submodule(name)
        if rank:
            parametrize.register_parametrization(layer, "weight", LowRankAdapter(layer.weight, rank))
    learn(network, data, STEPS, rate, seed)
    return network


class WithLoss(nn.Module):
    """Returns the loss as an attribute, to which PEFT adds the orthogonal regularisation of AdaLoRA."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=loss_of(self.network, (x, y)))


def score_adalora(made: Problem, uniform: int, rate: float, seed: int) -> tuple[float, int]:
    """Return the test loss after AdaLoRA, and the parameters of the directions that are left."""
    import peft

    torch.manual_seed(seed)
    first = uniform + (uniform + 1) // 2
    config = peft.AdaLoraConfig(
        target_modules=list(layers_of(made.network)),
        target_r=uniform,
        init_r=first,
        lora_alpha=first,  # PEFT divides by the first rank, so the scale is 1, as in the other arms
        tinit=WARMUP,
        tfinal=COOLDOWN,
        total_step=STEPS,
    )
    network = peft.get_peft_model(WithLoss(copy.deepcopy(made.network)), config)
    optimizer = torch.optim.AdamW([each for each in network.parameters() if each.requires_grad], lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / STEPS)))
    generator = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        index = torch.randint(len(made.train[0]), (BATCH,), generator=generator)
        network(made.train[0][index], made.train[1][index]).loss.backward()
        optimizer.step()
        network.base_model.update_and_allocate(step)  # reads the gradients
        optimizer.zero_grad(), schedule.step()
    size = 0
    for part in network.modules():
        if hasattr(part, "lora_E"):
            left = int((part.lora_E["default"] != 0).sum())
            size += left * (1 + sum(part.base_layer.weight.shape))
    with torch.no_grad():
        network.eval()
        return float(network(*made.test).loss), size


def pretrained(problem: str, seed: int) -> Problem:
    """Return the problem with its network after the pretraining."""
    torch.manual_seed(seed)
    made = PROBLEMS[problem]()
    learn(made.network, made.before, made.steps, 3e-3, seed)
    return made


@torch.no_grad()
def test_loss(network: nn.Module, data: Pair) -> float:
    """Return the loss on all test data [nats]."""
    return float(loss_of(network, data))


def score(made: Problem, ranks: Ranks, rate: float, seed: int) -> float:
    """Return the test loss of the network with LoRA of these ranks."""
    return test_loss(adapted(made.network, ranks, made.train, rate, seed), made.test)


def study(problem: str, seeds: Sequence[int], names: Sequence[str]) -> None:
    """Print the rows of a problem."""
    begin = time.process_time()
    arms = [(uniform, arm) for uniform in UNIFORM for arm in names]
    sizes: dict[int, list[int]] = {uniform: [] for uniform in UNIFORM}  # of AdaLoRA

    def measure(made: Problem, uniform: int, arm: str, rate: float, seed: int) -> float:
        if arm == ADALORA:
            loss, size = score_adalora(made, uniform, rate, seed)
            if seed != TUNING:
                sizes[uniform].append(size)
            return loss
        ranks = ranks_of(arm, made.network, made.train, uniform, seed)
        if seed == seeds[-1] and arm.startswith("gradient"):
            print(f"# {problem}, {arm}, seed {seed}: {' '.join(map(str, ranks.values()))}", flush=True)
        return score(made, ranks, rate, seed)

    made = pretrained(problem, TUNING)
    rates = {}
    for uniform, arm in arms:
        tried = {
            rate: measure(made, uniform, arm, rate, TUNING) for rate in (ADALORA_RATES if arm == ADALORA else RATES)
        }
        rates[uniform, arm] = min(tried, key=tried.__getitem__)
    losses: dict[tuple[int, str], list[float]] = {each: [] for each in arms}
    frozen = []
    for seed in seeds:
        made = pretrained(problem, seed)
        frozen.append(test_loss(made.network, made.test))
        for uniform, arm in arms:
            losses[uniform, arm].append(measure(made, uniform, arm, rates[uniform, arm], seed))
    cost = sum(sum(layer.weight.shape) for layer in layers_of(made.network).values())
    for (uniform, arm), found in losses.items():
        less = [base - loss for base, loss in zip(losses[uniform, "uniform"], found, strict=True)]
        better = "" if arm == "uniform" else f"{t_interval(less):+.3f}"
        mean, rate = sum(found) / len(found), rates[uniform, arm]
        print(f"| {problem} | {uniform} | {arm} | {mean:.3f} | {better} | {rate:g} |", flush=True)
        if arm == ADALORA:
            lowest, highest = min(sizes[uniform]), max(sizes[uniform])
            print(f"# parameters left: {lowest:,} to {highest:,}; uniform has {uniform * cost:,}", flush=True)
    print(
        f"# {problem}: frozen {sum(frozen) / len(frozen):.3f}; {time.process_time() - begin:.0f} CPU seconds",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "problems", nargs="*", default=[], metavar="PROBLEM", help=f"of {', '.join(PROBLEMS)}; default all"
    )
    parser.add_argument("--seeds", type=int, default=5, help="seeds from 0 on")
    parser.add_argument(
        "--arms", nargs="+", default=ARMS[:-1], choices=ARMS, help=f"uniform is one of them; default all but {ADALORA}"
    )
    arguments = parser.parse_args()
    if "uniform" not in arguments.arms:
        parser.error("--arms lacks uniform, with which the others are compared; add it")
    for problem in arguments.problems or PROBLEMS:
        study(problem, range(arguments.seeds), arguments.arms)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
