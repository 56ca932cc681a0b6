"""Environment steps per second of the engine beside its floors, in one process.

Two floors: the *bare stack*, the same arithmetic written by hand with baddbmm and torch's fused AdamW and nothing else,
and the *plain loop*, ordinary PyTorch over one network after another with a DataLoader and `.item()`. Each measurement
takes turns with the others, so that a machine whose speed drifts slows all of them alike; medians and ratios are printed.

    python scripts/benchmark_hot_path.py [--quick] [--json FILE] [--envs E ...] [--device cpu]
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
from torch import Tensor, nn

from esper.leyline.actions import Actions
from esper.leyline.config import build_config
from esper.leyline.keys import permutations
from esper.leyline.task import Task
from esper.tasks.digits import digits
from esper.tolaria.engine import VectorizedEngine

BATCHES, BATCH, LR = 16, 64, 5e-3


def engine_step(task: Task, envs: int, mapping: str, device: str) -> tuple[Callable[[], None], VectorizedEngine]:
    """One step of the engine under the never controller, without twins."""
    config = build_config(
        {"envs": envs, "twin": False, "mapping": mapping, "device": device, "steps": 10**6, "optimizer": {"lr": LR}},
        {"data": {"batch": BATCH, "batches_per_step": BATCHES}},
    )
    engine = VectorizedEngine(task, config)
    engine.reset()
    wait = Actions.wait(envs)

    def step() -> None:
        engine.step(wait)

    return step, engine


def bare_step(task: Task, envs: int, device: str) -> Callable[[], None]:
    """The same batches, updates and probe, by hand: stacked parameters, baddbmm, fused AdamW, one read."""
    torch.manual_seed(0)
    rows = max(envs, 2)
    names = [(tuple(p.shape), p.dim()) for p in task.host().parameters()]
    params = [(torch.randn(rows, *shape, device=device) * 0.2).requires_grad_() for shape, _ in names]
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=0.0, fused=True)
    x, y = task.train.x.to(device), task.train.y.to(device)
    px, py = task.probe.x.to(device), task.probe.y.to(device)
    classes = task.objective.outputs
    layers = list(zip(params[::2], params[1::2], strict=True))
    per_epoch = len(y) // BATCH

    def forward(h: Tensor) -> Tensor:
        for index, (weight, bias) in enumerate(layers):
            h = torch.baddbmm(bias.unsqueeze(1), h, weight.mT)
            if index % 2 == 1 and index < len(layers) - 1:
                h = torch.relu(h)
        return h

    generator = np.random.default_rng(0)

    def step() -> None:
        order = permutations(generator.integers(2**62, size=rows), np.full(rows, len(y)), torch.device(device))
        for batch in range(BATCHES):
            start = batch % per_epoch * BATCH
            index = order[:, start : start + BATCH].reshape(-1)
            output = forward(x.index_select(0, index).view(rows, BATCH, -1))
            loss = F.cross_entropy(output.view(-1, classes), y.index_select(0, index), reduction="sum") / BATCH
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            output = forward(px.expand(rows, *px.shape))
            target = py.expand(rows, *py.shape)
            loss = F.cross_entropy(output.reshape(-1, classes), target.reshape(-1), reduction="none").view(target.shape)
            torch.stack([loss.mean(1), (output.argmax(-1) == target).float().mean(1)]).cpu()

    return step


def plain_step(task: Task, envs: int, device: str) -> Callable[[], None]:
    """What a training script does: a DataLoader, one network after another, `.item()` for the running figures."""
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    hosts = [task.host().to(device) for _ in range(envs)]
    optimizers = [torch.optim.AdamW(host.parameters(), lr=LR, weight_decay=0.0) for host in hosts]
    train = DataLoader(TensorDataset(*task.train), batch_size=BATCH, shuffle=True, drop_last=True)
    probe = DataLoader(TensorDataset(*task.probe), batch_size=256)
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        for host, optimizer in zip(hosts, optimizers, strict=True):
            host.train()
            running, done = 0.0, 0
            while done < BATCHES:
                for x, y in train:
                    optimizer.zero_grad()
                    loss = criterion(host(x.to(device)), y.to(device))
                    loss.backward()
                    optimizer.step()
                    running += loss.item()
                    done += 1
                    if done == BATCHES:
                        break
            host.eval()
            correct = 0
            with torch.no_grad():
                for x, y in probe:
                    correct += (host(x.to(device)).argmax(1) == y.to(device)).sum().item()

    return step


def timed(step: Callable[[], None], device: str) -> float:
    """Seconds of one call, the device waited for."""
    begin = time.perf_counter()
    step()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def compare(task: Task, envs: int, device: str, repeats: int, ways: list[str]) -> dict[str, Any]:
    """Every way in turn, `repeats` times; seconds per step, EPS and the ratio to the bare stack, pair by pair."""
    engines: dict[str, VectorizedEngine] = {}
    steps: dict[str, Callable[[], None]] = {"bare stack": bare_step(task, envs, device)}
    for way in ways:
        steps[f"engine {way}"], engines[way] = engine_step(task, envs, way, device)
    plain_envs = min(envs, 4)  # its cost is proportional to E by construction; four are enough to know one
    steps["plain loop"] = plain_step(task, plain_envs, device)
    for step in steps.values():
        step()
    for engine in engines.values():
        engine.timer.seconds.clear()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            taken = timed(step, device)
            seconds[name].append(taken * envs / plain_envs if name == "plain loop" else taken)
    table = {}
    for name, values in seconds.items():
        ordered = sorted(values)
        table[name] = {
            "median_seconds": statistics.median(values),
            "p95_seconds": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
            "eps": envs / statistics.median(values),
            "of_bare_stack": statistics.median(b / v for b, v in zip(seconds["bare stack"], values, strict=True)),
        }
    phases = {}
    for way, engine in engines.items():
        total = sum(engine.timer.seconds.values())
        phases[way] = {name: value / total for name, value in engine.timer.seconds.items()}
    return {"envs": envs, "table": table, "phases": phases}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats of a small population, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--envs", type=int, nargs="+", default=[1, 8, 64, 256], help="population sizes")
    parser.add_argument("--hidden", type=int, default=16, help="inner width of the host's four segments")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = digits(hidden=(arguments.hidden,) * 4, width=16)
    sizes, repeats = ([4], 2) if arguments.quick else (arguments.envs, 15)
    results = []
    for envs in sizes:
        ways = ["auto", "vmap", "loop"] if envs <= 64 else ["auto", "vmap"]
        result = compare(task, envs, arguments.device, repeats, ways)
        results.append(result)
        print(
            f"\nE = {envs}, {BATCHES} batches of {BATCH}, hidden {arguments.hidden}, a probe of {len(task.probe.y)} a step"
        )
        print(f"{'':16}{'ms/step':>10}{'p95':>10}{'EPS':>10}{'of bare':>10}")
        for name, row in result["table"].items():
            print(
                f"{name:16}{row['median_seconds'] * 1e3:10.1f}{row['p95_seconds'] * 1e3:10.1f}"
                f"{row['eps']:10.0f}{row['of_bare_stack']:10.2f}"
            )
        for way, shares in result["phases"].items():
            print(f"phases, engine {way}: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()))
    report = {
        "machine": platform.processor() or platform.machine(),
        "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu, one thread",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "results": results,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
