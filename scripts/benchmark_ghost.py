"""Time a network that grows alone with and without the copy that runs beside it.

    python scripts/benchmark_ghost.py [--turns 60 | --quick]

A product of one row can be rounded differently from one of several rows, so a network alone runs beside a copy of itself, whose
results are ignored: it then has the bits that it has in a larger population. Two engines take turns, step by step, of which one
leaves the copy out. Prints the medians of the processor time of a step, no seeds and no twin, and their ratio.
"""

import argparse
import statistics
import time
from unittest.mock import patch

import torch
from benchmark_rows import vectors
from machine import machine_line

import esper
from esper.leyline.config.tree import build_config
from esper.tamiyo.rules.baselines import Never
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.stacked import population

WARMUP = 10
"""Steps of each engine that are not counted."""


def alone(name: str, *, ghost: bool) -> VectorizedEngine:
    """An engine of one network of a task, with a copy of it or without."""
    task = vectors(int(name)) if name.isdigit() else esper.get_task(name)
    settings = {"envs": 1, "twin": False, "baselines": [], "steps": 10**6, "device": "cpu"}
    # There is no setting for it: a network whose bits depend on what it runs beside is of no use but to be timed.
    with patch.object(population, "needs_ghost", lambda task, config: ghost):
        engine = VectorizedEngine(task, build_config(task.defaults, settings))
        engine.reset()
    return engine


def seconds(name: str, turns: int) -> tuple[float, float]:
    """The processor time of a step with the copy and without, medians over turns."""
    engines, client = [alone(name, ghost=ghost) for ghost in (True, False)], Never()
    times: list[list[float]] = [[], []]
    for turn in range(WARMUP + turns):
        for engine, taken in zip(engines, times, strict=True):
            begin = time.process_time()
            engine.step(client.act(engine.view()))
            if turn >= WARMUP:
                taken.append(time.process_time() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    """Print a line for each task, and for MLPs of some widths on noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="one turn, to see that it runs")
    arguments = parser.parse_args()
    turns = 1 if arguments.quick else arguments.turns
    torch.set_num_threads(1)
    for name in ("digits-narrow", "repair", "16", "64", "128", "256", "384"):
        beside, by_itself = (1000 * each for each in seconds(name, turns))
        said = f"MLP of width {name}" if name.isdigit() else name
        print(f"{said}: {beside:.1f} ms with the copy, {by_itself:.1f} ms without, {beside / by_itself:.2f} times")
    print(machine_line())


if __name__ == "__main__":
    main()
