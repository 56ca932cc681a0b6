"""Compare a step of the engine with one of the bare stack (scripts/floors.py): seconds of each part of both.

Both take turns, step by step. Every figure is the median over turns of the seconds that the process itself ran; the share is
that of what the engine takes more in the whole step of the bare stack.

    python scripts/profile_floor_gap.py [--quick] [--tasks digits-narrow repair] [--envs 64] [--live 0] [--incubating none]
        [--turns 41] [--json FILE]
"""

import argparse
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmark_hot_path import SELDOM, Case, engine_in
from floors import BareStack
from machine import machine_line

from esper.kasmina.stack.tape import PassTape
from esper.leyline.lifecycle.vocabulary import Actions
from esper.tolaria.stacked.compiling import Passes
from esper.tolaria.stacked.data import SharedBatchIterator
from esper.tolaria.stacked.optimizer import Updates
from esper.tolaria.stacked.population import StackedPopulation

SPENT: dict[str, float] = defaultdict(float)
"""Seconds by part since the last reset."""

TIMED = (
    (torch.Tensor, "backward", "backward"),
    (PassTape, "backward", "backward"),
    (Passes, "forward_backward", "pass"),
    (SharedBatchIterator, "advance", "batches"),
    (SharedBatchIterator, "of", "batches"),
    (Updates, "step", "updates"),
    (StackedPopulation, "train", "train"),
    (StackedPopulation, "probe", "probe"),
    (torch.optim.AdamW, "step", "updates"),
    (torch.optim.AdamW, "zero_grad", "updates"),
    (BareStack, "train", "train"),
    (BareStack, "probe", "probe"),
)
"""The methods that are timed, and the parts that they belong to."""


def timed(owner: type, name: str, part: str) -> None:
    """Add the seconds of a method's calls to a part."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        try:
            return method(*args, **kwargs)
        finally:
            SPENT[part] += time.process_time() - begin

    setattr(owner, name, call)


def parts(step: Any) -> dict[str, float]:
    """Return the seconds of the parts of one step, which add up to it."""
    SPENT.clear()
    begin = time.process_time()
    step()
    whole, spent = time.process_time() - begin, defaultdict(float, SPENT)
    # The bare stack draws its orders and gathers its batches between its forward passes.
    forward = spent["train"] - spent["backward"] - spent["updates"]
    rest = spent["train"] - spent["pass"] - spent["batches"] - spent["updates"] if spent["pass"] else 0.0
    return {
        "backward": spent["backward"],
        "forward, loss and batches": forward - rest,
        "updates": spent["updates"],
        "rest of the training": rest,
        "probe": spent["probe"],
        "rest of the step": whole - spent["train"] - spent["probe"],
        "whole step": whole,
    }


def measure(case: Case, turns: int) -> dict[str, Any]:
    """Print the table of one case; return the milliseconds of every part of both."""
    task = case.build()
    engine = engine_in(case, task, "auto", SELDOM, "cpu")
    bare, wait = BareStack(task, engine, task.objective.loss), Actions.wait(case.envs)
    seen: dict[str, list[dict[str, float]]] = {"bare": [], "engine": []}
    for _ in range(turns + 1):
        seen["bare"].append(parts(bare.step))
        seen["engine"].append(parts(lambda: engine.step(wait)))
    middle = {
        way: {part: float(np.median([turn[part] for turn in found[1:]])) * 1e3 for part in found[0]}
        for way, found in seen.items()
    }
    whole = middle["bare"]["whole step"]
    print(f"\n{case.title()}: {machine_line()}")
    print(f"{'':28}{'bare [ms]':>10}{'engine':>10}{'more':>8}{'of the step':>13}")
    for part, own in middle["bare"].items():
        more = middle["engine"][part] - own
        print(f"{part:28}{own:10.2f}{own + more:10.2f}{more:8.2f}{more / whole:13.0%}", flush=True)
    return {"case": case.title(), "turns": turns, "load": os.getloadavg()[0], "milliseconds": middle}


def main() -> None:
    """Measure each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small population and two turns, to see that it runs")
    parser.add_argument("--tasks", nargs="+", default=["digits-narrow", "repair"])
    parser.add_argument("--envs", nargs="+", type=int, default=[64])
    parser.add_argument("--live", type=int, default=0, help="seeds blended into every environment")
    parser.add_argument("--incubating", default="none", choices=["none", "quarter", "all"])
    parser.add_argument("--turns", type=int, default=41)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for entry in TIMED:
        timed(*entry)
    turns, sizes = (2, [4]) if arguments.quick else (arguments.turns, arguments.envs)
    state = {"live": arguments.live, "incubating": arguments.incubating}
    report = [measure(Case("states", name, envs=envs, **state), turns) for name in arguments.tasks for envs in sizes]
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
