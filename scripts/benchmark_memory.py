"""Measure memory and time of a training step with pieces of a batch and with activations that are computed again.

    python scripts/benchmark_memory.py [--layers 8] [--width 128] [--batch 16] [--turns 3]
    python scripts/benchmark_memory.py --steps 20000     # of a whole growth, as its steps go by, instead

The host is a transformer on the bytes of the standard library, in one environment. Every way runs in a process of its
own. Memory is the largest resident set within the second training step of one batch, less that in front of it, as Linux reports
it (VmHWM, reset by /proc/self/clear_refs); meanwhile the C library returns every freed block at once, so that the figure is what
is in use. Time is the median of processor seconds of further steps, for which the C library keeps freed blocks.

With `--steps`, `esper grow iris` with four environments writes its folder, with a row for each step, and
resident memory and the processor milliseconds of a step are printed as steps go by.
"""

import argparse
import ctypes
import multiprocessing
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from machine import machine_line

import esper
from esper.leyline.config.tree import build_config
from esper.leyline.data.task import Split
from esper.nissa.rows import Row, StepRow
from esper.tolaria.engine import VectorizedEngine

LENGTH = 64
MMAP_THRESHOLD = -3
"""The parameter of mallopt(3) from whose size on a block is returned to the system when it is freed."""


def main() -> None:
    """Measure each way and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 8), ("width", 128), ("batch", 16), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, help="steps of a whole growth, whose memory is measured instead")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.steps:
        long_growth(asked.steps)
        return
    print("| `data.microbatch` | `activation_checkpointing` | memory | | processor time | |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    first = None
    for again in (False, True):
        for size in (0, asked.batch // 2, asked.batch // 4, asked.batch // 8):
            settings = {"data.microbatch": size, "activation_checkpointing": again}
            with multiprocessing.get_context("fork").Pool(1) as pool:
                memory, seconds = pool.apply(measure, (asked, settings))
            first = first or (memory, seconds)
            print(
                f"| {size} | {str(again).lower()} | {memory / 2**20:,.0f} MiB | {memory / first[0]:.2f} | "
                f"{seconds:.2f} s | {seconds / first[1]:.2f} |",
                flush=True,
            )
    print(machine_line())


def measure(asked: argparse.Namespace, settings: dict[str, object]) -> tuple[int, float]:
    """Return the bytes and the processor seconds of a step."""
    task = esper.get_task("stdlib-text")
    host = esper.transformer(vocabulary=256, width=asked.width, layers=asked.layers, length=LENGTH)
    population = {"envs": 1, "steps": 10**6, "baselines": [], "governor.enabled": False, "device": "cpu"}
    data = {"data.batch_size": asked.batch, "data.batches_per_step": 1}
    config = build_config(population, data, settings)
    engine = VectorizedEngine(replace(task, host=host, probe=Split(task.probe.x[:4], task.probe.y[:4])), config)
    engine.reset()
    seeds = engine.state.seeds
    malloc = ctypes.CDLL(None)
    malloc.mallopt(MMAP_THRESHOLD, 2**16)
    engine.population.train(seeds)  # loads code, and makes what is made once
    malloc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    engine.population.train(seeds)
    memory = _status("VmHWM") - before
    malloc.mallopt(MMAP_THRESHOLD, 2**25)
    times = []
    for _ in range(asked.turns):
        begin = time.process_time()
        engine.population.train(seeds)
        times.append(time.process_time() - begin)
    return memory, median(times)


class Resident:
    """Prints the resident memory as rows of steps arrive: after a tenth of the steps first, then each tenth."""

    def __init__(self, steps: int) -> None:
        self.every, self.begin = max(steps // 10, 1), time.process_time()

    def write(self, row: Row) -> None:
        """Take a row; those of steps count."""
        if isinstance(row, StepRow) and row.step % self.every == self.every - 1:
            now = time.process_time()
            spent, self.begin = (now - self.begin) / self.every * 1e3, now
            print(f"| {row.step + 1:,} | {_status('VmRSS') / 2**20:,.1f} MiB | {spent:.2f} ms |", flush=True)

    def close(self) -> None:
        """Do nothing: every line is printed."""


def long_growth(steps: int) -> None:
    """Grow for many steps, and print the memory as they go by."""
    print("| steps | resident | processor time of a step |", flush=True)
    print("|---|---|---|", flush=True)
    settings = {"envs": 4, "steps": steps, "data.batches_per_step": 2, "baselines": [], "device": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        esper.grow("iris", settings, run=f"{folder}/run", outputs=[Resident(steps)], progress=False)
    print(machine_line())


def _status(name: str) -> int:
    """Return a figure of this process from /proc [bytes]."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
