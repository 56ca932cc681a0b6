"""Compare the seconds of an eager and of a compiled pass of a population without seeds, and time the compiling.

    python scripts/benchmark_compile.py [--tasks digits-narrow:64,repair:64,wide:8,stdlib-text:4] [--turns 30] [--probe]

The two ways take turns, and the medians are of processor seconds. A training pass is the forward and backward pass of one batch
of all environments; the optimizer and the probe are not part of it. With --probe, the probe is compiled in the same way and
measured instead, which `compile` itself does not do. `wide` is digits-narrow with a host of four blocks of width 128.
The time of compiling is that of the processor, with the C++ compiler in it, for a machine that has compiled other graphs before.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from machine import machine_line

from esper.kasmina.lifecycle import doses
from esper.leyline.config.tree import build_config
from esper.tasks.catalog import get_task
from esper.tasks.small import digits_narrow
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.measure.coalitions import coalitions
from esper.tolaria.measure.probe import probe
from esper.tolaria.stacked.compiling import CompiledInputs, PassBatch, compiled, traced
from esper.tolaria.stacked.data import RowExamples

Way = Callable[[], torch.Tensor]
"""Runs a pass and returns losses."""


def main() -> None:
    """Measure each task and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="digits-narrow:64,repair:64,wide:8,stdlib-text:4")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--probe", action="store_true", help="measure the probe instead of the training pass")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the seconds of workers would not be counted
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        measure_all(asked)


def measure_all(asked: argparse.Namespace) -> None:
    """Measure the tasks that were asked for."""
    # looks for the instructions of the processor
    compiled(torch.fx.symbolic_trace(lambda x: (x.sin(),)), [torch.zeros(8)])
    for text in asked.tasks.split(","):
        name, envs = text.split(":")
        engine = engine_of(name, int(envs))
        measure(text, asked.turns, *(probes if asked.probe else training_passes)(engine))
    print(machine_line())


def engine_of(name: str, envs: int) -> VectorizedEngine:
    """Return an engine of a task at the start of an episode."""
    task = digits_narrow(hidden=(128,) * 4, width=128) if name == "wide" else get_task(name)
    config = {"envs": envs, "twin": False, "telemetry": {"level": "off"}, "compile": "on", "device": "cpu"}
    engine = VectorizedEngine(task, build_config(task.defaults, config))
    engine.reset()
    return engine


def training_passes(engine: VectorizedEngine) -> tuple[Way, Way, float]:
    """Return an eager and a compiled training pass over one batch, and the seconds that compiling took."""
    seeds, population = engine.state.seeds, engine.population
    body, passes, feed = population.body, population.passes, population.feed
    route = body.route(doses(seeds), seeds, part=body.parts[0], train=True)
    body.train(True)
    feed.advance()
    batch = PassBatch(*feed.of(route.part))

    def run(mode: str) -> torch.Tensor:
        passes.mode = mode
        return passes.forward_backward(route, batch)

    begin = processor_seconds()
    run("on")
    return lambda: run("off"), lambda: run("on"), processor_seconds() - begin


def probes(engine: VectorizedEngine) -> tuple[Way, Way, float]:
    """Return an eager and a compiled pass of the probe, and the seconds that compiling took."""
    seeds, population = engine.state.seeds, engine.population
    body, examples = population.body, population.data.probe
    asked = coalitions(seeds, None, terminal=False).branches

    def run(*of: Any) -> list[torch.Tensor]:
        return list(probe(body, seeds, RowExamples(*of), population.objective, asked, signs=True).values())

    inputs = CompiledInputs.of(body, [body.host], *examples)
    begin = processor_seconds()
    with torch.no_grad():
        fast = compiled(traced(inputs, run), inputs.tensors)
    return lambda: run(*examples)[0], lambda: fast(*inputs.tensors)[0], processor_seconds() - begin


def measure(name: str, turns: int, eager: Way, fast: Way, seconds: float) -> None:
    """Print the medians of one task, and the largest difference between the losses of the two ways."""
    times: dict[Way, list[float]] = {eager: [], fast: []}
    losses = {}
    for turn in range(turns + 1):
        for way, spent in times.items():
            begin = time.process_time()
            losses[way] = way()
            if turn:
                spent.append(time.process_time() - begin)
    slow, quick = (median(spent) for spent in times.values())
    ratio = median(a / b for a, b in zip(*times.values(), strict=True))
    apart = (losses[eager] - losses[fast]).abs().max().item()
    print(
        f"{name}: eager {slow * 1e3:.2f} ms, compiled {quick * 1e3:.2f} ms, eager / compiled {ratio:.2f}, compiling "
        f"{seconds:.1f} s, paid back after {seconds / max(slow - quick, 1e-9):,.0f} passes, losses apart {apart:.1e}, "
        f"load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def processor_seconds() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


if __name__ == "__main__":
    main()
