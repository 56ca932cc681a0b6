"""Seconds of an eager and of a compiled training pass, and of compiling it, of a population without seeds.

    python scripts/benchmark_compile.py [--tasks digits-narrow:64,repair:64,stdlib-text:4] [--turns 30]

The two ways take turns, batch by batch, and the medians are of processor seconds. A pass is the forward and backward pass of
one batch of all environments; the optimizer and the probe are not part of it. Inductor's cache is switched off, so that the
time of compiling is that of a first run.
"""

import argparse
import os
import time
from statistics import median

import torch

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

from esper.leyline.config import build_config
from esper.tasks.catalog import get_task
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.training import doses


def main() -> None:
    """Measure each task and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="digits-narrow:64,repair:64,stdlib-text:4")
    parser.add_argument("--turns", type=int, default=30)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for text in asked.tasks.split(","):
        name, envs = text.split(":")
        measure(name, int(envs), asked.turns)


def measure(name: str, envs: int, turns: int) -> None:
    """Print the medians of one task, and the largest difference between the losses of the two ways."""
    task = get_task(name)
    engine = VectorizedEngine(
        task, build_config(task.defaults, {"envs": envs, "twin": False, "telemetry": {"level": "off"}, "compile": "on"})
    )
    seeds, population = engine.reset().seeds, engine.population
    body, passes, feed = population.body, population.passes, population.feed
    route = body.route(doses(seeds), seeds, part=body.parts[0], train=True)
    body.train(True)
    times: dict[str, list[float]] = {"eager": [], "on": []}
    losses, seconds = {}, 0.0
    for turn in range(turns + 1):
        feed.advance()
        x, y = feed.of(route.part)
        for mode, spent in times.items():
            passes.mode = "off" if mode == "eager" else mode
            begin = time.process_time()
            losses[mode] = passes.backward(route, x, y, None, None, None)
            if turn:
                spent.append(time.process_time() - begin)
            body.host.columns["gradient"].zero_()
        seconds = seconds or passes.counts.seconds
    eager, compiled = (median(spent) for spent in times.values())
    apart = (losses["eager"] - losses["on"]).abs().max().item()
    print(
        f"{name}, {envs} environments: eager {eager * 1e3:.2f} ms, compiled {compiled * 1e3:.2f} ms, eager / compiled "
        f"{eager / compiled:.2f}, compiling {seconds:.0f} s, losses apart {apart:.1e}, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
