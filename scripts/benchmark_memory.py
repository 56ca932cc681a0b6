"""Memory and time of a training step with pieces of a batch and with activations that are computed again.

    python scripts/benchmark_memory.py [--layers 12] [--width 128] [--batch 32] [--turns 3]

The host is a transformer on the bytes of the standard library, one environment and its ghost. Every way runs in a process of its
own. Memory is the largest resident set within the steps, less that in front of the first of them, as Linux reports it
(VmHWM, reset by /proc/self/clear_refs). Time is the median of processor seconds of a batch, without the first.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

import esper
from esper.leyline.config import build_config
from esper.leyline.task import Split
from esper.tolaria.engine import VectorizedEngine

LENGTH = 64


def main() -> None:
    """Measure each way and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 12), ("width", 128), ("batch", 32), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", help="settings of one way as JSON, measured in this process")
    asked = parser.parse_args()
    if asked.only is not None:
        print(json.dumps(measure(asked, json.loads(asked.only))))
        return
    print("| `data.microbatch` | `activation_checkpointing` | memory | | processor time | |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    first = None
    for again in (False, True):
        for size in (0, asked.batch // 2, asked.batch // 4, asked.batch // 8):
            settings = {"data.microbatch": size, "activation_checkpointing": again}
            command = [sys.executable, __file__, *sys.argv[1:], "--only", json.dumps(settings)]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            first = first or found
            memory, seconds = found["memory"], found["seconds"]
            print(
                f"| {size} | {str(again).lower()} | {memory / 2**20:,.0f} MiB | {memory / first['memory']:.2f} | "
                f"{seconds:.2f} s | {seconds / first['seconds']:.2f} |",
                flush=True,
            )
    print(f"load {os.getloadavg()[0]:.1f}")


def measure(asked: argparse.Namespace, settings: dict[str, object]) -> dict[str, float]:
    """Return the bytes and the processor seconds of a step."""
    torch.set_num_threads(1)
    task = esper.get_task("stdlib-text")
    host = esper.transformer(vocabulary=256, width=asked.width, layers=asked.layers, length=LENGTH)
    population = {"envs": 1, "steps": 10**6, "baselines": [], "governor.enabled": False}
    data = {"data.batch_size": asked.batch, "data.batches_per_step": 1}
    config = build_config(population, data, settings)
    engine = VectorizedEngine(replace(task, host=host, probe=Split(task.probe.x[:4], task.probe.y[:4])), config)
    engine.reset()
    seeds = engine.state.seeds  # of the ghost too
    Path("/proc/self/clear_refs").write_text("5")
    before, times = _status("VmRSS"), []
    for _ in range(asked.turns + 1):
        begin = time.process_time()
        engine.population.train(seeds)
        times.append(time.process_time() - begin)
    return {"memory": _status("VmHWM") - before, "seconds": median(times[1:])}


def _status(name: str) -> int:
    """Return a figure of this process from /proc [bytes]."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
