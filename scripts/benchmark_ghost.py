"""Time a network that grows alone, with a copy of it beside it and without.

    python scripts/benchmark_ghost.py [--turns 60 | --quick]

Where a product of one row could be rounded differently from one of several rows, as on a GPU, a network alone runs beside a copy
of itself, whose results are ignored. On a CPU these networks need none. Three engines take turns, step by step: one has a copy
all the same, one has none, and one has `mapping: loop`. Prints the medians of the processor time of a step, no seeds and no twin,
and the ratio of the first to each of the others.
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
from esper.tamiyo.rules.base import Never
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.stacked import population

WARMUP = 10
"""Steps of each engine that are not counted, but with --quick."""

WAYS = {"with the copy": (True, "auto"), "without": (False, "auto"), "in a loop": (False, "loop")}
"""Whether the copy runs too, and the key `mapping`."""


def alone(name: str, *, ghost: bool, mapping: str) -> VectorizedEngine:
    """Return an engine of one network of a task, or of an MLP of the width that `name` gives, with a copy of it or without."""
    task = vectors(int(name)) if name.isdigit() else esper.get_task(name)
    settings = {"envs": 1, "twin": False, "baselines": [], "steps": 10**6, "device": "cpu", "mapping": mapping}
    # There is no setting for it: the copy changes no bit of these networks, and is of no use but to be timed.
    with patch.object(population, "needs_ghost", lambda task, config: ghost):
        engine = VectorizedEngine(task, build_config(task.defaults, settings))
        engine.reset()
    return engine


def seconds(name: str, warmup: int, turns: int) -> list[float]:
    """Return the median processor seconds of a step of each way, after the warm-up; the ways take turns."""
    engines, client = [alone(name, ghost=ghost, mapping=mapping) for ghost, mapping in WAYS.values()], Never()
    times: list[list[float]] = [[] for _ in WAYS]
    for turn in range(warmup + turns):
        for engine, taken in zip(engines, times, strict=True):
            begin = time.process_time()
            engine.step(client.act(engine.view()))
            if turn >= warmup:
                taken.append(time.process_time() - begin)
    return [statistics.median(taken) for taken in times]


def main() -> None:
    """Print a line for each task, and for MLPs of some widths on noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="one turn, to see that it runs")
    arguments = parser.parse_args()
    warmup, turns = (0, 1) if arguments.quick else (WARMUP, arguments.turns)
    torch.set_num_threads(1)
    for name in ("digits-narrow", "repair", "16", "64", "128", "256", "384"):
        beside, *others = (1000 * each for each in seconds(name, warmup, turns))
        said = f"MLP of width {name}" if name.isdigit() else name
        rest = (f"{own:.1f} ms {way} ({beside / own:.2f})" for way, own in zip([*WAYS][1:], others, strict=True))
        print(f"{said}: {beside:.1f} ms with the copy, {', '.join(rest)}", flush=True)
    print(machine_line())


if __name__ == "__main__":
    main()
