"""How often a step makes the host wait for the device, and which line asks for it.

Counted by intercepting the calls that would wait, on any device; on CUDA `torch.cuda.set_sync_debug_mode` counts as well.

    python scripts/profile_gpu_sync.py [--quick] [--json FILE] [--device cpu]
"""

import argparse
import json
import platform
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from esper.leyline.config import build_config
from esper.tamiyo.baselines import RandomValid
from esper.tasks.catalog import get_task
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.reads import counted_reads


def measure(task: str, envs: int, steps: int, device: str) -> dict[str, Any]:
    """Reads of every step of one episode under random valid decisions, sensors measured at every second step."""
    chosen = get_task(task)
    config = build_config(
        chosen.defaults,
        {"task": task, "envs": envs, "steps": steps, "device": device, "twin": False},
        {"gates": {"permissive": True}, "probe": {"sensors_every": 2}},
    )
    engine, client = VectorizedEngine(chosen, config), RandomValid()
    view = engine.reset()
    cuda = device.startswith("cuda")
    counts, sites, waits = [], Counter[str](), 0
    for _ in range(steps):
        actions = client.act(view)
        with counted_reads() as reads, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if cuda:
                torch.cuda.set_sync_debug_mode("warn")
            view, _ = engine.step(actions)
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
        waits += sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
        counts.append(len(reads))
        sites.update(f"{read.site} ({read.what})" for read in reads)
    return {
        "task": task,
        "envs": envs,
        "slots": len(view.space.slots),
        "reads_per_step": {"least": min(counts), "most": max(counts)},
        "sites": dict(sites),
        "cuda_waits_per_step": waits / steps if cuda else None,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small population, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = (
        [("digits-narrow", 4)] if arguments.quick else [(t, e) for t in ("digits-narrow", "repair") for e in (1, 8, 64)]
    )
    results = [measure(task, envs, 6 if arguments.quick else 24, arguments.device) for task, envs in cases]
    for result in results:
        reads = result["reads_per_step"]
        print(f"{result['task']:8} E={result['envs']:<4} reads a step: {reads['least']} to {reads['most']}")
        for site, count in result["sites"].items():
            print(f"    {count:5} x {site}")
        if result["cuda_waits_per_step"] is not None:
            print(f"    torch.cuda.set_sync_debug_mode: {result['cuda_waits_per_step']:.2f} waits a step")
    if arguments.json:
        report = {
            "device": arguments.device,
            "machine": platform.machine(),
            "torch": torch.__version__,
            "results": results,
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
