"""Profile where the time of a training step goes, operator by operator, on steps of a policy that acts.

    python scripts/profile_hot_path_operations.py [--quick] [--json FILE] [--envs 64] [--live 2] [--device cpu]

A step is a decision of the policy for every environment, the step of the engine, and the storing of rewards. On CUDA the kernels
are listed too, with the share of the step in which the device worked. Seeds neither come nor go.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from benchmark_training import Loop, TrainingCase
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from esper.leyline.config.tree import Config
from esper.tasks.catalog import get_task
from esper.tolaria.runtime import describe_gpu


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
    cuda = arguments.device.startswith("cuda")
    with TemporaryDirectory() as folder:
        case = TrainingCase(envs, live=arguments.live, steps=steps + 1)
        loop = Loop(case, get_task("digits-narrow"), "eager", "off", arguments.device, Path(folder) / "rows")
        loop.begin()
        engine, client = loop.engine, loop.client

        def step() -> None:
            _, outcome = engine.step(client.act(engine.view()))
            client.store(outcome)

        step()
        engine.timer.seconds.clear()
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as recorded:
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            if cuda:
                torch.cuda.synchronize()
            seconds = (time.perf_counter() - begin) / steps
    events = recorded.key_averages()
    report = {"machine": platform.machine(), "torch": torch.__version__, "envs": envs, "live": arguments.live}
    report |= describe_gpu(torch.device(arguments.device), Config())
    report["phases"] = {name: spent / steps for name, spent in engine.timer.seconds.items()}
    print(
        f"E = {envs}, {arguments.live} live seeds: {seconds:.4f} seconds a step, under the profiler; of them by phase"
    )
    print("  " + ", ".join(f"{name} {spent:.4f}" for name, spent in report["phases"].items()))
    own = [event for event in events if event.device_type == DeviceType.CPU]
    report["calls_per_step"] = sum(event.count for event in own) / steps
    report["operators"] = listed("operator", [(e.key, e.count, e.self_cpu_time_total) for e in own], steps)
    print(f"{report['calls_per_step']:.0f} operator calls a step in all")
    if cuda:
        kernels = [event for event in events if event.device_type == DeviceType.CUDA]
        busy = sum(event.self_device_time_total for event in kernels) / 1e6 / steps
        report["kernels"] = listed("kernel", [(e.key, e.count, e.self_device_time_total) for e in kernels], steps)
        report["device_share"] = busy / seconds
        count = sum(event.count for event in kernels) / steps
        print(f"{count:.0f} kernels and copies a step, which take {busy / seconds:.1%} of it")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def listed(kind: str, found: list[tuple[str, int, float]], steps: int) -> list[dict[str, float | str]]:
    """Print the 25 that take the most time; found: name, calls and microseconds of each."""
    total = sum(spent for *_, spent in found)
    rows = sorted(found, key=lambda row: -row[2])[:25]
    table: list[dict[str, float | str]] = []
    for name, count, spent in rows:
        table.append({kind: name, "calls_per_step": count / steps, "self_ms_per_step": spent / 1e3 / steps})
        table[-1]["share"] = spent / total
        print(f"{name[:64]:64}{count / steps:9.1f}{spent / 1e3 / steps:9.2f} ms{spent / total:8.1%}")
    return table


if __name__ == "__main__":
    main()
