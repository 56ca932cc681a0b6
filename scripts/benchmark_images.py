"""Measure environment steps per second of the engine on image hosts, beside a bare, well written loop, in one process.

The *bare loop* trains one network after another and does nothing else: channels-last maps, images resident as bytes, the
multi-tensor (foreach) AdamW, gradients set to None, no `.item()` but one read of the probe's figures at the end. It runs the
same host modules on the same number of batches and probe images. Both take turns, step by step, so that a machine whose
speed drifts slows them alike; medians and the median of the ratio over turns are printed, of wall-clock time and of the
processor time of the one thread, which does not count how long others held the processor. No seeds, no twins. If the device
multiplies bfloat16, the engine also runs with `amp: bf16`; the bare loop always computes in float32. The first line says whether
the processor has AMX, whose tiles multiply bfloat16 many times as fast as its vectors. `--seeds N` compares the accuracies of N
networks of `digits-image-narrow` that are trained in either precision from the same weights on the same batches.

    python scripts/benchmark_images.py [--quick] [--json FILE] [--envs E ...] [--repeats N] [--seeds N] [--device cpu]
"""

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from device_reads import counted_reads
from scipy.special import stdtrit  # type: ignore[import-untyped]
from torch import Tensor, nn

from esper.leyline.config.tree import Config, build_config
from esper.leyline.data.task import Split, Task
from esper.leyline.lifecycle.vocabulary import Actions
from esper.tasks.hosts import CNN, MAP_MENU
from esper.tasks.images import digits_image_narrow, standardizing
from esper.tasks.objectives import Classification
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import describe_gpu, hold_freed_memory, multiplies_bfloat16

BATCH, LR = 64, 5e-3


def photographs(channels: tuple[int, ...] = (8, 16, 32)) -> Task:
    """Make a task of random bytes of 32 x 32 pixels in three channels: 256 training and 128 probe images a step."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> Split:
        x = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
        return Split(x, torch.randint(0, 10, (count,), generator=generator))

    train = drawn(1024)
    return Task(
        name="photographs",
        summary="random bytes",
        host=CNN(inputs=(3, 32, 32), channels=channels, outputs=10),
        train=train,
        probe=drawn(128),
        validation=drawn(16),
        test=None,
        objective=Classification(10),
        menu=MAP_MENU,
        defaults={"data": {"batch_size": BATCH, "batches_per_step": 4}},
        pixels=standardizing(train.x),
    )


def engine_step(
    task: Task, envs: int, device: str, amp: str = "off", mapping: str = "auto"
) -> tuple[Callable[[], None], VectorizedEngine]:
    """Return one step of an engine without seeds and twins, and the engine."""
    settings = {"envs": envs, "twin": False, "device": device, "amp": amp, "steps": 10**6, "optimizer": {"lr": LR}}
    config = build_config(task.defaults, settings, {"mapping": mapping})
    engine = VectorizedEngine(task, config)
    engine.reset()
    wait = Actions.wait(envs)

    def step() -> None:
        engine.step(wait)

    return step, engine


def bare_step(task: Task, envs: int, device: str) -> Callable[[], None]:
    """Return a step of the same batches, updates and probe, written by hand, network by network."""
    torch.manual_seed(0)
    batches = int(task.defaults["data"]["batches_per_step"])
    hosts = [task.host().to(device, memory_format=torch.channels_last) for _ in range(envs)]
    optimizers = [torch.optim.AdamW(host.parameters(), lr=LR, weight_decay=0.0, foreach=True) for host in hosts]
    images = task.train.x.movedim(1, -1).contiguous().to(device)  # (N, H, W, C), a row of bytes an image
    y, px, py = task.train.y.to(device), task.read(task.probe.x).to(device), task.probe.y.to(device)
    px = px.contiguous(memory_format=torch.channels_last)
    per_epoch = len(y) // BATCH

    def read(index: Tensor) -> Tensor:
        return task.read(images.index_select(0, index).movedim(-1, 1))

    def train(host: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        order = torch.randperm(len(y), device=device)
        for batch in range(batches):
            start = batch % per_epoch * BATCH
            index = order[start : start + BATCH]
            loss = F.cross_entropy(host(read(index)), y.index_select(0, index))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def step() -> None:
        found = []
        for host, optimizer in zip(hosts, optimizers, strict=True):
            train(host, optimizer)
            with torch.no_grad():
                output = host(px)
                found += [F.cross_entropy(output, py), (output.argmax(1) == py).float().mean()]
        torch.stack(found).cpu()

    return step


def timed(step: Callable[[], None], device: str) -> tuple[float, float]:
    """Return the seconds of one call by the clock, until the device has done its work, and of the processor."""
    begin, used = time.perf_counter(), time.process_time()
    step()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - begin, time.process_time() - used


def figures(seconds: dict[str, list[float]], envs: int) -> dict[str, dict[str, float]]:
    """Return the median, the 95th percentile, EPS and throughput relative to the bare loop, turn by turn, of each way."""
    return {
        name: {
            "median_seconds": statistics.median(values),
            "p95_seconds": float(np.quantile(values, 0.95)),
            "eps": envs / statistics.median(values),
            "of_bare_loop": statistics.median(b / v for b, v in zip(seconds["bare loop"], values, strict=True)),
        }
        for name, values in seconds.items()
    }


def compare(task: Task, envs: int, device: str, repeats: int) -> dict[str, Any]:
    """Time engine and bare loop in turn: seconds, EPS, and throughput of the engine relative to the loop, turn by turn."""
    step, engine = engine_step(task, envs, device)
    steps = {"bare loop": bare_step(task, envs, device), "engine": step}
    if multiplies_bfloat16(torch.device(device)):
        steps["engine bf16"] = engine_step(task, envs, device, "bf16")[0]
    for warm in steps.values():
        warm()
    engine.timer.seconds.clear()
    wall: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats):
        for name in sorted(steps, reverse=turn % 2 == 0):  # neither always finds the caches as the other left them
            taken, used = timed(steps[name], device)
            wall[name].append(taken)
            processor[name].append(used)
    total = sum(engine.timer.seconds.values())
    phases = {name: value / total for name, value in engine.timer.seconds.items()}
    with counted_reads() as reads:
        step()
    data = task.defaults["data"]
    return {
        "task": task.name,
        "envs": envs,
        "training_images": data["batch_size"] * data["batches_per_step"],
        "probe_images": len(task.probe.y),
        "wall": figures(wall, envs),
        "processor": figures(processor, envs),
        "phases": phases,
        "reads_per_step": len(reads),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def accuracies(seeds: int, steps: int, device: str) -> dict[str, Any]:
    """Compare the probe accuracy of networks trained in float32 and in bfloat16: the mean difference with its 95 % interval."""
    task, found = digits_image_narrow(), {}
    for amp in ("off", "bf16"):
        step, engine = engine_step(task, seeds, device, amp)
        for _ in range(steps):
            step()
        found[amp] = engine.state.scores.metric
    change = found["bf16"] - found["off"]
    half = float(stdtrit(seeds - 1, 0.975) * change.std(ddof=1) / seeds**0.5)
    own = {amp: values.tolist() for amp, values in found.items()}
    return {"task": task.name, "steps": steps, "accuracy": own, "change": float(change.mean()), "half_width": half}


def amx() -> bool:
    """Return whether the processor multiplies tiles of bfloat16."""
    return bool(torch.cpu._is_amx_tile_supported())


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats of a small population, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--envs", type=int, nargs="+", default=[8, 64], help="population sizes")
    parser.add_argument("--repeats", type=int, default=15, help="turns")
    parser.add_argument(
        "--seeds", type=int, default=5, help="networks whose accuracies are compared; 0 leaves this out"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hold_freed_memory()  # for both alike
    sizes, repeats = ([2], 2) if arguments.quick else (arguments.envs, arguments.repeats)
    print(f"amx_bf16: {'yes' if amx() else 'no'}")
    results = []
    for task in (digits_image_narrow(), photographs()):
        for envs in sizes:
            result = compare(task, envs, arguments.device, repeats)
            results.append(result)
            print(
                f"\n{task.name}, E = {envs}, {result['training_images']} training and {result['probe_images']} probe images a "
                "step"
            )
            print(f"{'':26}{'ms/step':>10}{'p95':>10}{'EPS':>10}{'of bare':>10}")
            for clock in ("wall", "processor"):
                for name, row in result[clock].items():
                    print(
                        f"{f'{name}, {clock}':26}{row['median_seconds'] * 1e3:10.1f}{row['p95_seconds'] * 1e3:10.1f}"
                        f"{row['eps']:10.1f}{row['of_bare_loop']:10.3f}"
                    )
            print("phases: " + ", ".join(f"{name} {share:.1%}" for name, share in result["phases"].items()))
            print(f"device reads a step: {result['reads_per_step']}; peak memory {result['peak_memory_mib']:.0f} MiB")
    compared = None
    if arguments.seeds and multiplies_bfloat16(torch.device(arguments.device)):
        compared = accuracies(arguments.seeds, 2 if arguments.quick else 20, arguments.device)
        means = {amp: statistics.mean(values) for amp, values in compared["accuracy"].items()}
        print(
            f"\n{compared['task']}, {arguments.seeds} seeds, {compared['steps']} steps: accuracy {means['off']:.4f} in float32, "
            f"{means['bf16']:.4f} in bfloat16, change {compared['change']:+.4f} +/- {compared['half_width']:.4f} (95 %)"
        )
    report = {
        "amx_bf16": amx(),
        "accuracies": compared,
        "machine": platform.processor() or platform.machine(),
        "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu, one thread",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **describe_gpu(torch.device(arguments.device), Config()),  # a way says what it sets otherwise
        "results": results,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
