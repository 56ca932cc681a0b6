"""Measure every figure that is asked of a GPU: throughput, shares of the device, recompiles, waits, memory. Print tables.

    python scripts/benchmark_gpu.py --device cuda --json gpu.json [--table NAME ...] [--repeats N]
    python scripts/benchmark_gpu.py --device cpu --quick          # every table, very small

Tables: *populations* (E from 1 to 1,024 with two live seeds in every environment, beside the bare stack of baddbmm and torch's
fused AdamW, and the plain loop), *processes* (one process per model, all at the same time), *images* (a host for 3 x 32 x 32
pixels beside the plain loop on one stream), *cifar* (steps a second with three live seeds at the full work of CIFAR-10: 50,000
training images in batches of 128, and 10,000 probe images), *shares* (of the speed of large products and copies on the same
device), *compiled* (graphs and recompiles over an episode of births and prunes), *waits* (`profile_gpu_sync.py`) and *memory*
(after 1,000 births and prunes). Figures are written after every table. Medians by the clock, until the device has done the work;
the ways of a table take turns. A dash is what was not measured.
"""

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import profile_gpu_sync
import torch
from benchmark_hot_path import Case, engine_in, measure, population_mib, take_turns
from benchmark_images import bare_step, engine_step
from floors import carry_out, plain_step
from machine import machine
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from esper.leyline.config.tree import build_config
from esper.leyline.data.task import Split, Task
from esper.leyline.lifecycle.vocabulary import LIVE, Actions, Op, among
from esper.leyline.messages import InputError
from esper.tamiyo.rules.base import RandomValid
from esper.tasks.catalog import get_task
from esper.tasks.hosts import CNN, MAP_MENU
from esper.tasks.images import read_cifar10, standardizing
from esper.tasks.objectives import Classification
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import multiplies_bfloat16

Row = dict[str, Any]
SEED = "bypass-conv-3x3"
FULL = (50_000, 10_000, 128)
"""Training images, probe images and the batch of the full work of CIFAR-10."""


class Traffic(TorchDispatchMode):
    """Sums up the bytes that operators read and write: the traffic of memory if nothing stayed in a cache. Views are free."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count its tensors."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
            self.bytes += sum(
                each.numel() * each.element_size() for each in {id(each): each for each in tensors}.values()
            )
        return result


def synchronize(device: str) -> None:
    """Wait until the device has done all work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def populations(quick: bool, device: str, repeats: int) -> list[Row]:
    """Measure EPS of every way at each E, with two live seeds in every environment."""
    sizes = (2,) if quick else (1, 8, 64, 256, 1024)
    rows = []
    for envs in sizes:
        ways = ("auto", "compiled") if envs in (64, 256) else ("auto",)
        result = measure(Case("gpu", envs=envs, live=2, ways=ways), repeats, device)
        plain = result["table"]["plain loop"]["eps"]
        rows += [
            {
                "E": envs,
                "way": name,
                "ms a step": each["median_seconds"] * 1e3,
                "p95": each["p95_seconds"] * 1e3,
                "EPS": each["eps"],
                "of bare": each["of_floor"],
                "times the plain loop": each["eps"] / plain,
                "population [MiB]": result["memory"]["population_mib"],
            }
            for name, each in result["table"].items()
        ]
    return rows


def _one_model(place: int, gate: Any, steps: int, device: str, found: Any) -> None:
    """Train a network alone, as a script does, at the same time as the other processes."""
    torch.set_num_threads(1)
    task = get_task("digits-narrow")
    step = plain_step(task, engine_in(Case("gpu", envs=2, live=2), task, "auto", 10**6, device), 1)
    step()
    gate.wait()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    found.put((place, (time.perf_counter() - begin) / steps))


def processes(quick: bool, device: str, repeats: int) -> list[Row]:
    """Measure EPS of one process per model, by the number of processes; more models would take their turns."""
    context, rows = multiprocessing.get_context("spawn"), []
    for count in (2,) if quick else (1, 4, 16):
        gate, found = context.Barrier(count), context.Queue()
        running = [
            context.Process(target=_one_model, args=(place, gate, repeats, device, found)) for place in range(count)
        ]
        for each in running:
            each.start()
        seconds = [found.get(timeout=600)[1] for _ in running]
        for each in running:
            each.join()
        rows.append(
            {"processes": count, "s a step": float(np.median(seconds)), "EPS": sum(1 / each for each in seconds)}
        )
    return rows


def photographs(train: int, probe: int, batch: int, batches: int) -> tuple[Task, str]:
    """Make a task of CIFAR-10's shape with that many images; also return where the images are from."""
    try:
        published, test = read_cifar10()
        x, y, origin = torch.cat([published.x, test.x]), torch.cat([published.y, test.y]), "CIFAR-10"
    except InputError:
        generator, count = torch.Generator().manual_seed(0), train + probe
        x = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
        y = torch.randint(0, 10, (count,), generator=generator)
        origin = "random bytes of that shape, as the files of CIFAR-10 are not there"
    ends = (0, train, train + probe)
    splits = [Split(x[start:stop], y[start:stop]) for start, stop in itertools.pairwise(ends)]
    task = Task(
        name="photographs",
        summary="images of 32 x 32 pixels in three channels",
        host=CNN(inputs=(3, 32, 32), channels=(8, 16, 32), outputs=10),
        train=splits[0],
        probe=splits[1],
        validation=splits[1],  # which nothing reads here
        test=None,
        objective=Classification(10),
        menu=MAP_MENU,
        defaults={"data": {"batch_size": batch, "batches_per_step": batches}},
        pixels=standardizing(splits[0].x),
    )
    return task, origin


def images(quick: bool, device: str, repeats: int) -> list[Row]:
    """Time a host for CIFAR-10's shape without seeds beside the plain loop: one stream, channels last, torch's foreach AdamW."""
    task, origin = photographs(*((96, 32, 32, 1) if quick else (2048, 256, 64, 16)))
    envs, rows = 2 if quick else 64, []
    steps = {"plain loop": bare_step(task, envs, device)}
    steps["engine"], engine = engine_step(task, envs, device)
    steps["engine, loop over the rows"] = engine_step(task, envs, device, mapping="loop")[0]
    if multiplies_bfloat16(torch.device(device)):
        steps["engine, bf16"] = engine_step(task, envs, device, "bf16")[0]
    taken = take_turns(steps, repeats, device, [engine])
    plain = float(np.median(taken["plain loop"][:, 0]))
    for name, turns in taken.items():
        seconds = float(np.median(turns[:, 0]))
        rows.append({"E": envs, "way": name, "ms a step": seconds * 1e3, "EPS": envs / seconds})
        rows[-1] |= {"times the plain loop": plain / seconds, "images": origin}
    return rows


def grown(task: Task, envs: int, device: str, settings: Mapping[str, Any]) -> VectorizedEngine:
    """Return an engine with a live seed in every slot of every environment, without twins."""
    everything = {"envs": envs, "twin": False, "device": device, "steps": 10**6, "probe": {"coalitions_every": 10**6}}
    everything |= {"lifecycle": {"max_seeds": 4, "max_training_seeds": 4}}
    config = build_config(task.defaults, everything, {"gates": {"permissive": True, "min_training_steps": 0}}, settings)
    engine = VectorizedEngine(task, config)
    engine.reset()
    for slot in range(len(engine.space.slots)):
        for op in (Op.GERMINATE, Op.ADVANCE):
            carry_out(engine, op, slot, np.arange(envs), SEED)
    assert among(engine.state.seeds.stage, LIVE).all()
    return engine


def cifar(quick: bool, device: str, repeats: int) -> list[Row]:
    """Measure steps a second with three live seeds; a step is all batches of an epoch and the whole probe split."""
    train, probe, batch = (64, 32, 32) if quick else FULL
    task, origin = photographs(train, probe, batch, train // batch)
    rows = []
    for amp in ("off", "bf16") if multiplies_bfloat16(torch.device(device)) and not quick else ("off",):
        for envs in (2,) if quick else (16, 64):
            engine = grown(task, envs, device, {"amp": amp})
            step = partial(engine.step, Actions.wait(envs))
            seconds = float(np.median(take_turns({"engine": step}, min(repeats, 3), device, [])["engine"][:, 0]))
            rows.append({"E": envs, "amp": amp, "training images": train, "probe images": probe, "batch": batch})
            rows[-1] |= {"s a step": seconds, "steps of an environment a second": envs / seconds, "images": origin}
    return rows


def peaks(device: str, quick: bool) -> Row:
    """Measure the device: large products by type [FLOP/s], and a copy of a large tensor [bytes/s, read and written]."""
    size, count = (256, 2**20) if quick else (8192, 2**28)
    found: Row = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        found[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds_of(partial(torch.mm, a, b), device)
    source = torch.empty(count, dtype=torch.float32, device=device)
    found["copy"] = 8 * count / seconds_of(partial(torch.empty_like(source).copy_, source), device)
    return found


def seconds_of(run: Callable[[], object], device: str, repeats: int = 7) -> float:
    """Return the median seconds of a call, until the device has done its work."""
    run()
    times = []
    for _ in range(repeats):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def shares(quick: bool, device: str, repeats: int) -> list[Row]:
    """Count the operations and bytes of a step operator by operator, and their share of the device's own speed."""
    best, digits = peaks(device, quick), get_task("digits-narrow")
    task, _ = photographs(*((96, 32, 32, 1) if quick else (2048, 256, 128, 16)))
    sizes = (2, 2) if quick else (256, 64)
    engines = {
        "digits-narrow": engine_in(Case("gpu", envs=sizes[0], live=2), digits, "auto", 10**6, device),
        "photographs": grown(task, sizes[1], device, {}),
    }
    rows = []
    for (name, engine), envs in zip(engines.items(), sizes, strict=True):
        step = partial(engine.step, Actions.wait(envs))
        seconds = seconds_of(step, device, repeats)
        with FlopCounterMode(display=False) as operations:
            step()
        with Traffic() as traffic:
            step()
        rows.append({"task": name, "E": envs, "ms a step": seconds * 1e3})
        rows[-1] |= {"TFLOP/s": operations.get_total_flops() / seconds / 1e12, "GB/s": traffic.bytes / seconds / 1e9}
        rows[-1] |= {"of the float32 product": operations.get_total_flops() / seconds / best["float32"]}
        rows[-1] |= {"of the copy": traffic.bytes / seconds / best["copy"]}
        rows[-1] |= {f"{kind} [T/s]": value / 1e12 for kind, value in best.items()}
    return rows


def compiled(quick: bool, device: str, repeats: int) -> list[Row]:
    """Count graphs and recompiles over an episode of random births, blends and prunes, with every pass compiled."""
    task, steps = get_task("iris" if quick else "digits-narrow"), 1 if quick else 8  # a plan takes seconds to compile
    settings: Row = {"envs": 8, "twin": False, "device": device, "steps": steps, "compile": "on"}
    config = build_config(task.defaults, settings, {"gates": {"permissive": True}})
    engine, client = VectorizedEngine(task, config), RandomValid()
    view = engine.reset()
    for _ in range(steps):
        view, _ = engine.step(client.act(view))
    passes = engine.population.passes
    counts = passes.counts
    row = {"steps": steps, "plans": counts.plans, "compiled passes": counts.passes, "eager passes": counts.eager}
    return [row | {"recompiles": passes.recompiled, "compiling [s]": counts.seconds}]


def waits(quick: bool, device: str, repeats: int) -> list[Row]:
    """Count the waits for the device by step, in every case of `profile_gpu_sync.py`."""
    cuda = device.startswith("cuda")
    chosen = (
        profile_gpu_sync.CASES[:1] if quick else (*profile_gpu_sync.CASES, *(profile_gpu_sync.ON_CUDA if cuda else ()))
    )
    rows = []
    for task, envs, settings in chosen:
        found = profile_gpu_sync.measure(task, envs, settings, 4 if quick else 12, device)
        profile_gpu_sync.show(found)
        rows.append({"task": task, "E": envs, "settings": json.dumps(dict(settings)), **found["reads_per_step"]})
        rows[-1] |= {"waits that CUDA names": found["cuda_waits_per_step"]}
    return rows


def memory(quick: bool, device: str, repeats: int) -> list[Row]:
    """Measure the memory that is allocated before and after births and prunes."""
    task, envs = get_task("digits-narrow"), 4 if quick else 50
    settings: Row = {"envs": envs, "twin": False, "device": device, "steps": 10**6}
    settings |= {"data": {"batches_per_step": 1}, "gates": {"permissive": True, "min_training_steps": 0}}
    engine, rows = VectorizedEngine(task, build_config(task.defaults, settings)), []
    engine.reset()
    for births in range(2 if quick else 21):
        if births:
            for op in (Op.GERMINATE, Op.PRUNE):
                carry_out(engine, op, births % len(engine.space.slots), np.arange(envs))
        synchronize(device)
        held = torch.cuda.memory_allocated(device) / 2**20 if device.startswith("cuda") else None
        rows.append(
            {"births and prunes": births * envs, "allocated [MiB]": held, "population [MiB]": population_mib(engine)}
        )
    return rows if quick else [rows[0], rows[4], rows[-1]]


TABLES: Mapping[str, Callable[[bool, str, int], list[Row]]] = {
    each.__name__: each for each in (populations, processes, images, cifar, shares, compiled, waits, memory)
}


def show(name: str, rows: Sequence[Row]) -> None:
    """Print a table in Markdown."""
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)

    print(f"\n## {name}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print("| " + " | ".join(cell(row.get(column)) for column in columns) + " |", flush=True)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="very small, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file, after every table")
    parser.add_argument("--table", nargs="+", choices=list(TABLES), default=list(TABLES), help="these tables alone")
    parser.add_argument("--repeats", type=int, help="turns of each way; 7, or 1 with --quick")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:i, or cpu for a trial")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = machine(arguments.device) | {"tables": {}}
    print(f"{report['device']}, torch {report['torch']}, load {report['load_average_before']:.1f}")
    for name in arguments.table:
        rows = TABLES[name](arguments.quick, arguments.device, arguments.repeats or (1 if arguments.quick else 7))
        report["tables"][name] = rows
        show(name, rows)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
