"""Time training steps of a byte-level transformer: the engine beside a bare, well written loop, in one process.

The *bare loop* is plain PyTorch: nn.Linear, F.layer_norm, scaled_dot_product_attention, F.cross_entropy, torch's fused AdamW,
gradients set to None, no read of the device, one network after another. It begins with the engine's own weights, trains on the
same batches and must come to the same losses. Both take turns, step by step,
and change who is first; medians, and the median over turns of the ratio, are of the seconds that the process itself ran. A step
is a few batches; the engine's is one call of its training pass, without probe. No seeds, no twins.

    python scripts/benchmark_transformer.py [--quick] [--envs 1 4] [--mapping auto loop] [--precision off bf16] [--turns 7]
"""

import argparse
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.leyline.config.tree import build_config
from esper.leyline.data.keys import Purpose, key, permutations
from esper.leyline.data.task import Task
from esper.tasks.hosts import Transformer
from esper.tasks.text import SIZES, stdlib_text
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import multiplies_bfloat16

LR = 1e-3


class Block(nn.Module):
    """Computes a layer of `Transformer`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.hidden_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.mix = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.inner, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L, C) to (B, L, C)."""
        batch, length, width = x.shape
        q, k, v = self.read(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + self.out(F.relu(self.inner(self.hidden_norm(x))))
        return y


class Bare(nn.Module):
    """Computes the network of `Transformer`, as a script would write it; it takes the weights of a host."""

    def __init__(self, shape: Transformer, host: nn.Module) -> None:
        super().__init__()
        width = shape.width
        self.tokens, self.positions = nn.Embedding(shape.vocabulary, width), nn.Embedding(shape.length, width)
        self.blocks = nn.ModuleList(Block(width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(width)
        own = list(self.parameters())
        given = list(host.parameters())
        assert sum(p.numel() for p in own) == sum(p.numel() for p in given), "another network"
        with torch.no_grad():
            for (name, parameter), value in zip(self._in_order(), given, strict=True):
                assert parameter.numel() == value.numel(), name
                parameter.copy_(value.view_as(parameter))

    def _in_order(self) -> list[tuple[str, nn.Parameter]]:
        """List the parameters in the order of the host."""
        found = [("tokens", self.tokens.weight), ("positions", self.positions.weight)]
        for block in self.blocks:
            modules = (block.attention_norm, block.hidden_norm, block.read, block.mix, block.inner, block.out)
            found += [pair for module in modules for pair in module.named_parameters()]
        return [*found, *self.norm.named_parameters()]

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, L) to logits (B, L, vocabulary)."""
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return F.linear(self.norm(h), self.tokens.weight)


class Loop:
    """Trains networks that begin as the hosts of an engine, in the bare loop."""

    def __init__(self, engine: VectorizedEngine, task: Task, shape: Transformer, precision: str, batches: int) -> None:
        self.envs, self.batches = engine.rows, batches
        body = engine.population.body
        self.networks = [Bare(shape, body.host.read(env, task.host())) for env in range(self.envs)]
        self.optimizers = [
            torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=0.0, fused=True) for network in self.networks
        ]
        self.x, self.y, self.size = task.train.x, task.train.y, engine.config.data.batch_size
        keys = key(engine.config.seed, Purpose.ORDER, engine.state.instance[: self.envs], engine.state.episode, 0)
        self.order = permutations(keys, np.full(self.envs, len(self.y)), torch.device("cpu"))
        self.batch, self.precision = 0, precision

    def step(self) -> Tensor:
        """Train every network on the batches of a step; returns the mean losses (E,)."""
        losses = []
        start = self.batch * self.size
        for network, optimizer, order in zip(self.networks, self.optimizers, self.order, strict=True):
            own = []
            for index in order[start : start + self.batches * self.size].split(self.size):
                x, y = self.x[index], self.y[index]
                with torch.autocast("cpu", torch.bfloat16) if self.precision == "bf16" else nullcontext():
                    logits = network(x)
                loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                own.append(loss.detach())
            losses.append(torch.stack(own).mean())
        self.batch += self.batches
        return torch.stack(losses)


def compare(shape: Transformer, envs: int, mapping: str, precision: str, sizes: tuple[int, int], turns: int) -> None:
    """Measure one population size in one precision, and print a line."""
    batch, batches = sizes
    task = stdlib_text(shape, (max(SIZES[0] // 2, (turns + 1) * batch * batches), 16, 16, 16))
    settings = {
        "envs": envs, "twin": False, "steps": 10**6, "amp": precision, "mapping": mapping, "telemetry": {"level": "off"},
        "data": {"batch_size": batch, "batches_per_step": batches},
        "optimizer": {"lr": LR},
    }  # fmt: skip
    engine = VectorizedEngine(task, build_config(task.defaults, settings))
    engine.reset()
    seeds = engine.state.seeds
    loop, population = Loop(engine, task, shape, precision, batches), engine.population

    def trained() -> Tensor:
        population.train(seeds)
        assert population._trained is not None
        return population._trained[0][:envs]

    steps: dict[str, Callable[[], Tensor]] = {"bare": loop.step, "engine": trained}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    apart = 0.0
    for turn in range(turns + 1):
        losses = {}
        for name in sorted(steps, reverse=turn % 2 == 0):
            begin = time.process_time()
            losses[name] = steps[name]()
            if turn:
                seconds[name].append(time.process_time() - begin)
        apart = max(apart, float((losses["bare"] - losses["engine"]).abs().max()))
    assert apart < (0.05 if precision == "bf16" else 1e-3), f"the losses are {apart} apart"
    per = {name: statistics.median(values) / (envs * batches) for name, values in seconds.items()}
    ratios = sorted(b / e for b, e in zip(seconds["bare"], seconds["engine"], strict=True))
    parameters = sum(p.numel() for p in task.host().parameters())
    print(
        f"E = {envs}, {mapping}, {precision}, {parameters:,} parameters, {batch} x {shape.length} bytes a batch: bare "
        f"{per['bare'] * 1e3:.0f} ms, engine {per['engine'] * 1e3:.0f} ms a batch and network, bare / engine "
        f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}), losses apart {apart:.1e}, load "
        f"{os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    """Measure every population size in every precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny network and two turns, to see that it runs")
    parser.add_argument("--envs", type=int, nargs="+", default=[1, 4], help="population sizes")
    parser.add_argument(
        "--precision", nargs="+", choices=["off", "bf16"], help="off is float32; default: what is native"
    )
    parser.add_argument("--mapping", nargs="+", choices=["auto", "loop"], default=["auto", "loop"])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--batch", type=int, default=16, help="sequences a batch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    native = multiplies_bfloat16(torch.device("cpu"))
    precisions = arguments.precision or (["off", "bf16"] if native else ["off"])
    shape = Transformer(vocabulary=256, width=192, layers=4, heads=6, length=128)
    turns, batch = arguments.turns, arguments.batch
    if arguments.quick:
        shape, turns, batch = Transformer(vocabulary=256, width=32, layers=1, heads=2, length=32), 2, 4
    print(f"{platform.machine()}, one thread, torch {torch.__version__}, Python {platform.python_version()}")
    for precision in precisions:
        for envs, mapping in itertools.product(arguments.envs, arguments.mapping):
            compare(shape, envs, mapping, precision, (batch, 2), turns)


if __name__ == "__main__":
    main()
