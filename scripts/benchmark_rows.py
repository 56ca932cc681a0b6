"""Time training steps of networks of growing size, all rows at once beside one row after another, in one process.

Both ways take turns, and a turn is one call of the engine's training pass. The ratio is the median over turns, of the seconds
that the process itself ran. `esper.kasmina.stack.body.APART` has the sizes from which on a population runs one row after another.

    python scripts/benchmark_rows.py [--turns 9] [--envs 1 4 16]
"""

import argparse
import os
import statistics
import time

import numpy as np
import torch
from machine import machine_line

import esper
from esper.kasmina.stack.body import APART
from esper.leyline.config.tree import build_config
from esper.leyline.data.task import Task
from esper.tasks.hosts import Transformer
from esper.tasks.text import stdlib_text
from esper.tolaria.engine import VectorizedEngine

WAYS = {"at once": 2**62, "by row": 0}
"""The parameters from which on rows run one after another."""
BATCHES = 4


def vectors(width: int) -> Task:
    """Make a task of ten classes of noise, for an MLP of two blocks."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2000, 64)).astype("float32"), generator.integers(0, 10, 2000)
    task = esper.task(f"mlp of width {width}", x, y, host=esper.mlp(64, width, 10, blocks=2))
    assert isinstance(task, Task)
    return task


def tokens(width: int, layers: int) -> Task:
    """Make a task of the bytes of `stdlib-text`, for a transformer."""
    return stdlib_text(Transformer(vocabulary=256, width=width, layers=layers, heads=4, length=64), (512, 16, 16, 16))


def engine_of(task: Task, envs: int, batch: int, least: int) -> VectorizedEngine:
    """Return an engine that runs one row after another from `least` parameters on."""
    APART.update(dict.fromkeys(APART, least))
    settings = {
        "envs": envs, "twin": False, "steps": 10**6, "amp": "off", "device": "cpu", "telemetry": {"level": "off"},
        "data": {"batch_size": batch, "batches_per_step": BATCHES},
    }  # fmt: skip
    engine = VectorizedEngine(task, build_config(task.defaults, settings))
    engine.reset()
    return engine


def compare(name: str, task: Task, envs: int, batch: int, turns: int) -> None:
    """Measure one network at one population size, and print a line."""
    engines = {way: engine_of(task, envs, batch, least) for way, least in WAYS.items()}
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    for turn in range(turns + 1):
        for way in sorted(engines, reverse=turn % 2 == 0):
            begin = time.process_time()
            engines[way].population.train(engines[way].state.seeds)
            if turn:
                seconds[way].append(time.process_time() - begin)
    ratios = sorted(once / row for once, row in zip(seconds["at once"], seconds["by row"], strict=True))
    per = {way: 1e3 * statistics.median(values) / envs / BATCHES for way, values in seconds.items()}
    parameters = sum(parameter.numel() for parameter in task.host().parameters())
    print(
        f"{name}, {parameters:,} parameters, E = {envs}: at once {per['at once']:.2f} ms, by row {per['by row']:.2f} ms a batch "
        f"and network, at once / by row {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), load "
        f"{os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    """Measure every network at every population size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, nargs="+", default=[1, 4, 16], help="population sizes")
    parser.add_argument("--turns", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for envs in arguments.envs:
        for width in (128, 256, 384, 512):
            compare(f"MLP of width {width}", vectors(width), envs, 64, arguments.turns)
        for width, layers in ((32, 2), (64, 2), (96, 3), (128, 4)):
            compare(f"transformer of width {width}", tokens(width, layers), envs, 16, arguments.turns)
    print(machine_line())


if __name__ == "__main__":
    main()
