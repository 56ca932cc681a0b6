"""Compare training on examples in memory with training on examples that are read batch by batch.

    python scripts/benchmark_reading.py --out docs/benchmarks/reading.md
    python scripts/benchmark_reading.py --quick    # to see that it runs

Examples of a Dataset cost some tenth of a millisecond each: `waits` sleeps, as for a disk or a network; `decodes` decompresses
bytes in C, which lets other threads run; `computes` counts in Python, which does not. `windows` are windows of tokens of a
memmap, which cost a microsecond. Each is trained on in memory (A), read when a batch is needed, read ahead by a thread, and
read ahead by workers (B). All populations take turns within a round, so that a machine that is busy for a while is busy for all;
a ratio compares a population with the one in memory of the same round, and medians are over rounds. The processor time of the
thread that trains, unlike the time that passes, hardly depends on what else the machine does: where it is that in memory and the
waits are short, training is as fast as in memory on a machine with a core for reading. As in a run, the state of a population
that reads is copied once a step, and the copy is part of its time.
"""

import argparse
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

import esper
from esper.leyline.config.tree import Config, build_config
from esper.leyline.data.task import Task
from esper.leyline.text import counted
from esper.store.tensors import StateCopy
from esper.tamiyo.rules.baselines import Never
from esper.tasks.hosts.factories import MLP, Transformer
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import Waits, describe_gpu

EXAMPLES, INPUTS, BATCH, BATCHES = 4096, 64, 64, 16  # batches and their size as by default
LENGTH, VOCABULARY = 64, 256
HEAD = """# Benchmark: examples that are read while others train

What training takes on examples that [stay in a Dataset or a memmap](../tasks.md#data-that-do-not-fit-into-memory), compared
with the same examples in memory. `scripts/benchmark_reading.py` measures it and explains the method.

"""


def wait() -> None:
    time.sleep(1e-4)


PACKED = zlib.compress(np.random.default_rng(0).integers(0, 200, 40_000).astype(np.uint8).tobytes())


def decode() -> None:
    zlib.decompress(PACKED)


def compute() -> None:
    for _ in range(4000):
        pass


class Costly(Dataset[tuple[torch.Tensor, int]]):
    """Examples of which each costs a call of a function."""

    def __init__(self, cost: Callable[[], None]) -> None:
        self.x = torch.randn(EXAMPLES, INPUTS, generator=torch.Generator().manual_seed(0))
        self.y = self.x[:, :10].argmax(1).tolist()
        self.cost = cost

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.cost()
        return self.x[index], self.y[index]


class Mode(NamedTuple):
    """How batches come to the training."""

    name: str
    stream: bool = True
    read_ahead: int = 2
    workers: int = 0


def modes(workers: int) -> list[Mode]:
    """The ways that are compared; the first is examples in memory."""
    return [
        Mode("in memory", stream=False),
        Mode("read when needed", read_ahead=0),
        Mode("read ahead by a thread"),
        Mode(f"read ahead by {counted(workers, 'worker')}", workers=workers),
    ]


def populations(workers: int, width: int, envs: int, device: str) -> dict[str, dict[str, VectorizedEngine]]:
    """A population of each kind of examples and each way to read them."""
    folder = Path(tempfile.mkdtemp())
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, EXAMPLES * LENGTH * 2).astype(np.uint16)
    tokens.tofile(folder / "tokens.bin")

    def costly(cost: Callable[[], None]) -> Callable[[Mode], Task]:
        host = MLP(INPUTS, width, (width, width), 10)
        data = Costly(cost)
        return lambda mode: esper.task(
            "costly", data, host=host, classes=10, stream=mode.stream, workers=mode.workers if mode.stream else 0
        )

    def windows(mode: Mode) -> Task:
        file = np.memmap(folder / "tokens.bin", np.uint16, "r")
        host = Transformer(VOCABULARY, 32, 2, 2, LENGTH)
        return esper.task("windows", file, host=host, stream=mode.stream, workers=mode.workers)

    kinds = {"waits": costly(wait), "decodes": costly(decode), "computes": costly(compute), "windows": windows}
    made: dict[str, dict[str, VectorizedEngine]] = {}
    for kind, task_for in kinds.items():
        made[kind] = {}
        for mode in modes(workers):
            task = task_for(mode)
            data = {"batch_size": BATCH, "batches_per_step": BATCHES, "read_ahead": mode.read_ahead}
            settings = {"envs": envs, "steps": 10**6, "baselines": [], "device": device, "data": data}
            made[kind][mode.name] = VectorizedEngine(task, build_config(task.defaults, settings))
    return made


def played(engine: VectorizedEngine, steps: int, copied: StateCopy) -> NDArray[np.float64]:
    """(3,) of a batch: the time that passes, the processor time of this thread, and the wait for reading [ms].

    As in a run, the state is copied before each step where examples are read, into `copied`, in case reading fails.
    """

    def clocks() -> NDArray[np.float64]:
        return np.array([time.perf_counter(), time.thread_time(), engine.timer.seconds.get("reading", 0.0)])

    client, begin = Never(), clocks()
    for _ in range(steps):
        if engine.population.data.problems[0].source is not None:
            copied.take(engine.snapshot())
        engine.step(client.act(engine.view()))
    return (clocks() - begin) / steps / BATCHES * 1000


class Figures(NamedTuple):
    """Medians over rounds."""

    batch: float  # time of a batch [ms]
    ratio: float  # to that in memory
    cpu: float  # processor time of the thread that trains, for a batch [ms]
    cpu_ratio: float  # to that in memory
    waited: float  # for a batch to be read [ms]
    p95: float | None  # of these waits [ms]; None in memory


def measured(engines: Mapping[str, VectorizedEngine], rounds: int, steps: int) -> dict[str, Figures]:
    """Let the populations take turns. The first step of each, which starts its thread and its workers, is not counted."""
    copies = {name: StateCopy() for name in engines}
    for name, engine in engines.items():
        engine.reset()
        played(engine, 1, copies[name])
    before = {
        name: None if (waits := engine.population.waits) is None else waits.counts.copy()
        for name, engine in engines.items()
    }
    times = np.array(
        [[played(engine, steps, copies[name]) for name, engine in engines.items()] for _ in range(rounds)]
    )  # (rounds, modes, 3)
    ratios = np.median(times[..., :2] / times[:, :1, :2], axis=0)  # (modes, 2)
    found = {}
    for place, (name, engine) in enumerate(engines.items()):
        batch, cpu, waited = np.median(times[:, place], axis=0).tolist()
        waits, old = engine.population.waits, before[name]
        p95 = None if waits is None or old is None else 1000 * Waits.p95(waits.counts - old)
        found[name] = Figures(batch, float(ratios[place, 0]), cpu, float(ratios[place, 1]), waited, p95)
        engine.population.close()
    return found


def reading_alone(engine: VectorizedEngine, envs: int) -> float:
    """Time in which one thread reads the examples of a batch, with nothing beside it [ms]."""
    source = engine.population.data.problems[0].source
    assert source is not None
    times = []
    for batch in range(9):
        places = np.random.default_rng(batch).choice(len(source), envs * BATCH, replace=False)
        begin = time.perf_counter()
        source.read(np.sort(places))
        times.append((time.perf_counter() - begin) * 1000)
    return statistics.median(times)


def copied(engine: VectorizedEngine) -> float:
    """Processor time in which a run with streamed examples copies its state, once a step, in case reading fails [ms]."""
    times, memory = [], StateCopy()
    memory.take(engine.snapshot())
    for _ in range(9):
        begin = time.thread_time()
        memory.take(engine.snapshot())
        times.append((time.thread_time() - begin) * 1000)
    return statistics.median(times)


def page(arguments: argparse.Namespace, found: Mapping[str, tuple[float, float, Mapping[str, Figures]]]) -> str:
    """All figures in Markdown."""
    where = f"{arguments.machine}; " if arguments.machine else ""
    gpu = ", ".join(f"{name} {value}" for name, value in describe_gpu(torch.device(arguments.device), Config()).items())
    text = HEAD + (
        f"{arguments.envs} environments, batches of {BATCH}, {BATCHES} batches a step, hosts of width {arguments.width} (a "
        f"transformer of width 32 for the windows), one thread of torch on {len(os.sched_getaffinity(0))} cores;\n"
        f"{arguments.rounds} rounds of {arguments.steps} steps. Machine: {where}load average {os.getloadavg()[0]:.1f}. "
        f"{gpu or 'It has not run on a GPU.'}\n"
    )
    for kind, (alone, copy, ways) in found.items():
        train = next(iter(ways.values())).batch
        text += (
            f"\n## Examples: {kind}\n\nReading a batch takes {alone:.1f} ms alone, training on one in memory {train:.1f} ms. "
            f"The copy of the state that a run makes once a step, {copy:.2f} ms of processor time, is part of the times.\n\n"
            "| how | a batch [ms] | in memory = 1 | waiting [ms] | p95 of the waits [ms] | processor time of the training [ms] | "
            "in memory = 1 |\n|---|---|---|---|---|---|---|\n"
        )
        for name, each in ways.items():
            waits = " | " if each.p95 is None else f"{each.waited:.2f} | {each.p95:.2f}"
            text += (
                f"| {name} | {each.batch:.1f} | {each.ratio:.2f} | {waits} | {each.cpu:.1f} | {each.cpu_ratio:.2f} |\n"
            )
    return text


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of one step of narrow hosts")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps of a population in a round")
    parser.add_argument("--envs", type=int, default=2)
    parser.add_argument("--width", type=int, default=768, help="width of the hosts")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--kinds", nargs="+", default=["waits", "decodes", "computes", "windows"])
    parser.add_argument("--machine", default="", help="the machine in words, for the page")
    parser.add_argument("--out", type=Path, help="the page to write")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.width = 1, 1, 8
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    made = populations(arguments.workers, arguments.width, arguments.envs, arguments.device)
    for kind in arguments.kinds:
        ways = measured(made[kind], arguments.rounds, arguments.steps)
        streamed = made[kind]["read when needed"]
        found[kind] = reading_alone(streamed, arguments.envs), copied(streamed), ways
    text = page(arguments, found)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
