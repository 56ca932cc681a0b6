"""Which operators the time of a step goes to: calls and self time per step, by phase of the engine's own timer.

python scripts/profile_hot_path_operations.py [--quick] [--json FILE] [--envs E] [--live N]
"""

import argparse
import json
import platform
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from esper.leyline.config.tree import Config, build_config
from esper.leyline.lifecycle.actions import Actions, Op
from esper.leyline.lifecycle.stages import LIVE, among
from esper.tasks.catalog import get_task
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import describe_gpu


def grown(envs: int, live: int, device: str) -> VectorizedEngine:
    """An engine on `digits-narrow` whose environments have `live` seeds blended in."""
    task = get_task("digits-narrow")
    lifecycle = {"max_seeds": max(live, 1), "max_training_seeds": max(live, 1)}
    config = build_config(
        {
            "task": "digits-narrow",
            "envs": envs,
            "twin": False,
            "steps": 10**6,
            "device": device,
            "lifecycle": lifecycle,
        },
        {"gates": {"permissive": True, "min_training_steps": 0}},
    )
    engine = VectorizedEngine(task, config)
    view = engine.reset()
    for slot in range(live):
        for op in (Op.GERMINATE, Op.ADVANCE):
            actions = Actions.wait(envs)
            actions.op[:], actions.slot[:], actions.blueprint[:] = op, slot, 1
            actions.tempo[:], actions.target[:] = view.space.tempos.index(1), view.space.targets.index(1.0)
            view, _ = engine.step(actions)
    assert among(view.seeds.stage, LIVE).sum() == envs * live
    return engine


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small population, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--live", type=int, default=2, help="seeds blended into every environment")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    envs, steps = (4, 1) if arguments.quick else (arguments.envs, 5)
    engine = grown(envs, arguments.live, arguments.device)
    wait = Actions.wait(envs)
    engine.step(wait)
    engine.timer.seconds.clear()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            engine.step(wait)
    rows = sorted(recorded.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in rows)
    table = [
        {
            "operator": event.key,
            "calls_per_step": event.count / steps,
            "self_ms_per_step": event.self_cpu_time_total / 1e3 / steps,
            "share": event.self_cpu_time_total / total,
        }
        for event in rows[:25]
    ]
    phases = {name: seconds / steps for name, seconds in engine.timer.seconds.items()}
    print(f"E = {envs}, {arguments.live} live seeds: seconds a step by phase, under the profiler")
    print("  " + ", ".join(f"{name} {seconds:.4f}" for name, seconds in phases.items()))
    for row in table:
        print(
            f"{row['operator'][:44]:44}{row['calls_per_step']:9.1f}{row['self_ms_per_step']:9.2f} ms{row['share']:8.1%}"
        )
    calls = float(np.sum([event.count for event in rows])) / steps
    print(f"{calls:.0f} operator calls a step in all")
    if arguments.json:
        report = {"machine": platform.machine(), "torch": torch.__version__, "envs": envs, "live": arguments.live}
        report |= describe_gpu(torch.device(arguments.device), Config())
        report |= {"phases": phases, "operators": table, "calls_per_step": calls}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
