"""Measure environment steps per second of the engine beside its floors, in one process for each case.

Two floors (scripts/floors.py): the *bare stack*, the same stacked arithmetic written by hand with baddbmm and torch's fused
AdamW and nothing else, once with the engine's cross-entropy and once with torch's own, which is slower; and the *plain loop*,
ordinary PyTorch over one network after another with a DataLoader and `.item()`. The ways of a case take turns, step by step,
so that a machine whose speed drifts slows all of them alike. Medians, 95th percentiles and EPS are by the clock; ratios are
medians over turns of the seconds that the process itself ran, which a shared machine disturbs less (on a GPU, by the clock).

    python scripts/benchmark_hot_path.py [--quick] [--json FILE] [--repeats N] [--device cpu]
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import benchmark_training
import numpy as np
import torch
from device_reads import counted_reads
from floors import BareStack, carry_out, plain_step, torch_loss
from machine import machine

from esper.leyline.config.tree import build_config
from esper.leyline.data.task import AnyTask
from esper.leyline.lifecycle.vocabulary import LIVE, Actions, Op, Stage, among
from esper.tasks.catalog import get_task
from esper.tasks.small import digits_narrow
from esper.tolaria.engine import VectorizedEngine

BATCHES, BATCH = 16, 64
SELDOM = 10**6
"""A cadence that does not come up: complete attribution is measured in a table of its own."""
PLAIN = 4
"""Networks of the plain loop that are timed; its cost is proportional to their number by construction."""
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Describes a population in a given state, and the ways of running it that are compared."""

    table: str
    task: str = "digits-narrow"
    envs: int = 64
    live: int = 0  # seeds blended into every environment, at the first slots
    incubating: str = "none"  # environments with a seed that incubates, at the second slot: none, a quarter or all
    slots: int | None = None  # of a host of that many equal blocks; None is the task's own host
    width: int = 16  # of the stream and of the blocks of such a host
    ways: tuple[str, ...] = ("auto",)  # mappings of the engine, or "compiled"
    plain: bool = True
    cadences: tuple[int, ...] = ()  # of complete attribution; compared with each other alone

    def build(self) -> AnyTask:
        """Make the task of the case."""
        if self.slots is None:
            return get_task(self.task)
        return digits_narrow(hidden=(self.width,) * self.slots, width=self.width)

    def title(self) -> str:
        """Name what differs from the other cases of a table."""
        host = "" if self.slots is None else f", {self.slots} slots of width {self.width}"
        return f"{self.task}, E = {self.envs}{host}, {self.live} live, {self.incubating} incubating"


def cases(quick: bool) -> list[Case]:
    """List the cases of all tables."""
    if quick:
        return [
            Case("states", envs=4, live=2, ways=("auto", "vmap", "loop")),
            Case("states", "repair", envs=8, incubating="quarter", plain=False),
            Case("coalitions", envs=4, live=2, cadences=(SELDOM, 1), plain=False),
            Case("scale-parameters", envs=4, slots=2, width=1, plain=False),
        ]
    states = ((0, "none"), (2, "none"), (0, "all"), (0, "quarter"))
    tasks = ("digits-narrow", "repair")
    return [
        *(Case("states", task, live=live, incubating=part) for task in tasks for live, part in states),
        *(Case("envs", envs=envs, ways=("auto", "vmap", "loop") if envs <= 64 else ("auto", "vmap"))
          for envs in (1, 8, 64, 256)),
        *(Case("slots", slots=slots, live=live, plain=False) for slots in (1, 2, 4, 8) for live in (0, min(slots, 2))),
        *(Case("parameters", slots=4, width=width, plain=False) for width in (8, 16, 32, 64, 128)),
        *(Case("coalitions", task, live=live, cadences=(SELDOM, 4, 1)) for task in tasks for live in (2, 3)),
        *(Case("compiled", task, live=live, ways=("auto", "compiled"), plain=False) for task in tasks for live in (0, 2)),
        Case("compiled", envs=8, slots=4, width=128, ways=("auto", "compiled"), plain=False),
        *scales(),
    ]  # fmt: skip


def scales() -> list[Case]:
    """List the cases that show how a step grows: one quantity after another, on otherwise equal populations."""
    case = partial(Case, plain=False)
    return [
        *(case("scale-envs", envs=envs) for envs in (1, 8, 64, 256, 1024)),
        *(case("scale-slots", slots=slots) for slots in (1, 2, 4, 8, 16)),
        *(case("scale-parameters", envs=8, slots=4, width=width) for width in (1, 8, 32, 128, 350, 1120)),
        *(case("scale-live", live=live) for live in (0, 1, 2, 3)),
    ]


def engine_in(case: Case, task: AnyTask, mapping: str, cadence: int, device: str) -> VectorizedEngine:
    """Return an engine whose population is in the state of the case, without twins."""
    config = build_config(
        task.defaults,
        {"envs": case.envs, "twin": False, "device": device, "steps": SELDOM},
        {"compile": "on"} if mapping == "compiled" else {"mapping": mapping},
        {"data": {"batch_size": BATCH, "batches_per_step": BATCHES}, "probe": {"coalitions_every": cadence}},
        {
            "lifecycle": {"max_seeds": 4, "max_training_seeds": 4},
            "gates": {"permissive": True, "min_training_steps": 0},
        },
    )
    engine = VectorizedEngine(task, config)
    engine.reset()
    passes, everyone = engine.population.passes, np.arange(case.envs)
    wanted, passes.mode = passes.mode, "off"  # plans on the way to the state of the case are not compiled
    for slot in range(case.live):
        carry_out(engine, Op.GERMINATE, slot, everyone)
        carry_out(engine, Op.ADVANCE, slot, everyone)
    chosen = {"none": everyone[:0], "quarter": everyone[::4], "all": everyone}[case.incubating]
    if len(chosen):
        carry_out(engine, Op.GERMINATE, 1, chosen)
    stage = engine.state.seeds.stage
    assert among(stage, LIVE).sum() == case.live * case.envs
    assert (stage == Stage.TRAINING).sum() == len(chosen)
    passes.mode = wanted
    return engine


def measure(case: Case, repeats: int, device: str) -> dict[str, Any]:
    """Time every way of a case in turn, `repeats` times each, and return the case, its memory and a table by way."""
    torch.set_num_threads(1)
    task = case.build()
    before = peak_mib()
    engines = {f"engine {way}": engine_in(case, task, way, SELDOM, device) for way in case.ways[:1]}
    first = next(iter(engines.values()))
    memory = {"population_mib": population_mib(first), "peak_rss_mib": peak_mib(), "peak_rss_before_mib": before}
    engines |= {f"engine {way}": engine_in(case, task, way, SELDOM, device) for way in case.ways[1:]}
    if case.cadences:
        engines = {f"every {n}": engine_in(case, task, "auto", n, device) for n in case.cadences}
    wait = Actions.wait(case.envs)
    steps: dict[str, Step] = {name: partial(engine.step, wait) for name, engine in engines.items()}
    scale = dict.fromkeys(steps, 1.0)
    if not case.cadences:
        bare = BareStack(task, first, task.objective.loss)
        check_same_work(bare, first)
        floors: dict[str, Step] = {"bare stack": bare.step}
        if not case.table.startswith("scale-"):
            floors["bare, torch's loss"] = BareStack(task, first, torch_loss).step
        steps = floors | steps
        if case.plain:
            steps["plain loop"] = plain_step(task, first, min(case.envs, PLAIN))
            scale["plain loop"] = case.envs / min(case.envs, PLAIN)
    taken = take_turns(steps, repeats, device, list(engines.values()))
    base, *_ = taken
    table = {}
    for name, turns in taken.items():
        clock, own = (turns * scale.get(name, 1.0)).T
        table[name] = {
            "median_seconds": float(np.median(clock)),
            "p95_seconds": float(np.quantile(clock, 0.95)),
            "eps": case.envs / float(np.median(clock)),
            "own_eps": case.envs / float(np.median(own)),
            "of_floor": float(np.median(taken[base][:, 1] / own)),
        }
    return {
        "title": case.title(),
        "case": asdict(case),
        "host_params": int(first.population.body.table.host_params.max()),
        "slots": len(first.space.slots),
        "table": table,
        "phases": {name: shares(engine) for name, engine in engines.items()},
        "reads": reads_of([engine for engine in engines.values() if engine.config.compile == "off"][-1], wait),
        "memory": memory,
    }


def take_turns(
    steps: dict[str, Step], repeats: int, device: str, engines: Sequence[VectorizedEngine]
) -> dict[str, np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
    """Return seconds of each call of each way, (repeats, 2): by the clock and of the process. First calls are left out."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        if turn == 1:
            for engine in engines:
                engine.timer.seconds.clear()
        for name, step in steps.items():
            begin, own = time.perf_counter(), time.process_time()
            step()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            clock = time.perf_counter() - begin
            if turn:
                seconds[name].append((clock, clock if device.startswith("cuda") else time.process_time() - own))
    return {name: np.array(turns) for name, turns in seconds.items()}


def check_same_work(bare: BareStack, engine: VectorizedEngine) -> None:
    """Check that the floor does the same work: on the same parameters its probe measures what the engine measured."""
    flat, measured = bare.probe(), engine.state.measurements
    rows = len(measured.loss)
    own = flat[: 2 * rows].reshape(2, rows)
    assert np.allclose(own, [measured.loss, measured.metric], atol=1e-4), "the bare stack is another network"
    slots = bare.live or bare.incubating
    for slot, part in zip(slots, np.array_split(flat[2 * rows :], max(len(slots), 1)), strict=len(slots) > 0):
        centre, error = part.reshape(2, 2, -1)
        change, estimate = centre[0], measured.contribution_loss if bare.live else measured.gain
        seen = estimate.measured[:, slot]
        sign = 1 if bare.live else -1
        assert np.allclose(sign * change, estimate.mean[seen, slot], atol=1e-4), "another pass beside the network's own"
        assert np.allclose(error[0], estimate.se[seen, slot], atol=1e-4), "another error of its mean"


def shares(engine: VectorizedEngine) -> dict[str, float]:
    """Return the share of each phase in the time of the steps."""
    total = sum(engine.timer.seconds.values())
    return {name: value / total for name, value in engine.timer.seconds.items()}


def reads_of(engine: VectorizedEngine, actions: Actions) -> dict[str, Any]:
    """Count the device reads of one step by call site."""
    with counted_reads() as reads:
        engine.step(actions)
    return {"count": len(reads), "sites": dict(Counter(f"{read.site} ({read.what})" for read in reads))}


def population_mib(engine: VectorizedEngine) -> float:
    """Sum the tensors of all hosts and seeds: values, gradients, moments and buffers [MiB]."""
    body = engine.population.body
    stacks = [body.host, *body.stacks.values()]
    return sum(column.nbytes for stack in stacks for column in stack.columns.values()) / 2**20


def copy_gib_per_second() -> dict[str, float]:
    """Measure the speed of a copy within memory [GiB/s] by the size of source and target [MiB]: what caches and memory reach."""
    found = {}
    for mib in (0.5, 4, 16, 64, 512):
        source = torch.zeros(int(mib * 2**20) // 8)
        target, seconds = torch.zeros_like(source), []
        for _ in range(max(5, int(256 / mib))):
            begin = time.process_time_ns()
            target.copy_(source)
            seconds.append((time.process_time_ns() - begin) / 1e9)
        found[f"{mib:g}"] = mib / 1024 / float(np.median(seconds))
    return found


def peak_mib() -> float:
    """Return the largest resident size of this process so far [MiB]."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if platform.system() == "Darwin" else 2**10)


def show(result: dict[str, Any]) -> None:
    """Print one case."""
    memory, reads = result["memory"], result["reads"]
    print(
        f"\n{result['title']}: {result['host_params']:,} parameters a host, {memory['population_mib']:.1f} MiB of tensors, "
        f"{memory['peak_rss_mib']:.0f} MiB resident, {reads['count']} device reads a step"
    )
    print(f"{'':20}{'ms/step':>10}{'p95':>10}{'EPS':>10}{'own EPS':>10}{'of floor':>10}")
    for name, row in result["table"].items():
        times = f"{row['median_seconds'] * 1e3:10.1f}{row['p95_seconds'] * 1e3:10.1f}"
        print(f"{name:20}{times}{row['eps']:10.0f}{row['own_eps']:10.0f}{row['of_floor']:10.2f}")
    for way, parts in result["phases"].items():
        print(f"phases, {way}: " + ", ".join(f"{name} {share:.1%}" for name, share in parts.items()), flush=True)


def main() -> None:
    """Measure, print and write; each case in a process of its own, so that its memory is its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small populations, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--table",
        help="the cases of this table alone: states, envs, slots, parameters, coalitions, compiled or scale; or training, the "
        "whole loop with a policy that learns (scripts/benchmark_training.py)",
    )
    parser.add_argument("--page", type=Path, help="with --table training, the page to write")
    parser.add_argument("--repeats", type=int, help="turns of each case; 21, or 2 with --quick")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    chosen: list[Any] = [
        case for case in cases(arguments.quick) if arguments.table in (None, case.table, case.table.split("-")[0])
    ]
    training = arguments.table == "training"
    if training:
        chosen = list(benchmark_training.cases(arguments.quick))
    if not chosen:
        parser.error(f"there is no table {arguments.table!r}")
    if arguments.page is not None and not training:
        parser.error(
            "--page goes with --table training; scripts/write_engine_page.py writes the page of the other tables"
        )
    repeats = arguments.repeats or (2 if arguments.quick else 5 if training else 21)
    report = machine(arguments.device) | {"batches": BATCHES, "batch": BATCH, "repeats": repeats, "results": []}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for case in chosen:
            result = pool.apply(benchmark_training.measure if training else measure, (case, repeats, arguments.device))
            report["results"].append(result)
            if training:
                print("\n".join(benchmark_training.show([result])[2 * (len(report["results"]) > 1) :]), flush=True)
            else:
                show(result)
    # last, because a process begins with the peak memory of its parent
    report["copy_gib_per_second"] = copy_gib_per_second()
    report["load_average_after"] = os.getloadavg()[0]
    if arguments.page is not None:
        arguments.page.write_text(benchmark_training.page(report), encoding="utf-8")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
