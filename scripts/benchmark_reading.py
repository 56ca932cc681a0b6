"""Compare training on examples in memory with training on examples that are read batch by batch.

    python scripts/benchmark_reading.py --out docs/benchmarks/reading.md
    python scripts/benchmark_reading.py --quick    # to see that it runs

Examples of a Dataset cost some tenth of a millisecond each: `waits` sleeps, as for a disk or a network; `decodes` decompresses
bytes in C, which lets other threads run; `computes` counts in Python, which does not. `windows` are windows of tokens of a
memmap, which cost a microsecond. Each is trained on in memory (A), read when a batch is needed, read ahead by a thread, and
read ahead by workers (B). One population trains in all these ways: two populations of the same networks differ in speed by some
percent, by where they lie in memory. The ways take turns in an order that is drawn for each round, so that a machine that is
busy for a while is so for all. A ratio compares a way with examples in memory in the same round; medians are over rounds, with
95 % intervals by order statistics where there are enough rounds.
As in a run, the state of a population that reads is copied once a step, and the copy is part of its time.

A core that works may slow the one beside it, as they share caches, memory and sometimes the core itself. So `in memory, another
process reads` trains on examples in memory while a process that has nothing to do with the training reads the same examples, a
batch in the time that training takes for one. What a way costs beyond this is Esper's.
"""

import argparse
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom  # type: ignore[import-untyped]
from torch.utils.data import Dataset

import esper
from esper.leyline.config.tree import Config, build_config
from esper.leyline.data.task import Source, Task
from esper.leyline.messages import counted
from esper.store.tensors import StateCopy
from esper.tamiyo.rules.base import Never
from esper.tasks.hosts import MLP, Transformer
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import Waits, describe_gpu
from esper.tolaria.stacked.data import SharedBatchIterator

EXAMPLES, INPUTS, BATCH, BATCHES = 4096, 64, 64, 16  # batches and their size as by default
LENGTH, VOCABULARY = 64, 256
PAUSE = 0.3
"""Between two turns: what is read ahead in the turn before would be read beside the next one [seconds]."""
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
    """Holds examples of which each costs a call of a function."""

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
    """Describes how batches come to the training."""

    name: str
    stream: bool = True
    read_ahead: int = 2
    workers: int = 0
    beside: bool = False  # whether another process reads meanwhile


def modes(workers: int) -> list[Mode]:
    """List the ways that are compared; the first is examples in memory."""
    return [
        Mode("in memory", stream=False),
        Mode("in memory, another process reads", stream=False, beside=True),
        Mode("read when needed", read_ahead=0),
        Mode("read ahead by a thread"),
        Mode(f"read ahead by {counted(workers, 'worker')}", workers=workers),
    ]


class Reader(NamedTuple):
    """Holds a population, and the batches that each way gives it."""

    engine: VectorizedEngine
    feeds: dict[Mode, SharedBatchIterator]  # of the same examples in the same order
    source: Source


def readers(workers: int, width: int, envs: int, device: str) -> dict[str, Reader]:
    """Make a population for each kind of examples."""
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
    made = {}
    for kind, task_for in kinds.items():
        feeds = {}
        for mode in modes(workers):
            task = task_for(mode)
            data = {"batch_size": BATCH, "batches_per_step": BATCHES, "read_ahead": mode.read_ahead}
            settings = {"envs": envs, "steps": 10**6, "baselines": [], "device": device, "data": data}
            engine = VectorizedEngine(task, build_config(task.defaults, settings))
            feeds[mode] = engine.population.feed
        source = engine.population.data.problems[0].source
        assert source is not None, "the last way reads"
        made[kind] = Reader(engine, feeds, source)
    return made


def played(engine: VectorizedEngine, steps: int, copied: StateCopy | None) -> NDArray[np.float64]:
    """Play steps and return means over batches (3,): clock time, processor time of this thread, wait for reading [ms].

    As in a run, the state is copied before each step where examples are read, into `copied`, in case reading fails.
    """

    def clocks() -> NDArray[np.float64]:
        return np.array([time.perf_counter(), time.thread_time(), engine.timer.seconds.get("reading", 0.0)])

    client, begin = Never(), clocks()
    for _ in range(steps):
        if copied is not None:
            copied.take(engine.snapshot())
        engine.step(client.act(engine.view()))
    return (clocks() - begin) / steps / BATCHES * 1000


class Figures(NamedTuple):
    """Holds medians over rounds."""

    batch: float  # time of a batch [ms]
    ratio: str  # to that in memory, with its 95 % interval
    beside: str  # to that in memory while another process reads, with its 95 % interval
    cpu: float  # processor time of the thread that trains, for a batch [ms]
    cpu_ratio: str  # to that in memory, with its 95 % interval
    waited: float  # for a batch to be read [ms]
    p95: float | None  # of these waits [ms]; None in memory


@contextmanager
def another_reads(source: Source, batch: int, seconds: float) -> Iterator[Callable[[bool], None]]:
    """Let another process read batches of a source, each within `seconds`; the function that is yielded lets it go on or stop."""

    def read() -> None:
        order = np.random.default_rng(0)
        while True:
            begin = time.perf_counter()
            source.read(np.sort(order.choice(len(source), batch, replace=False)))
            time.sleep(max(0.0, seconds - (time.perf_counter() - begin)))

    process = multiprocessing.get_context("fork").Process(target=read, daemon=True)
    process.start()
    assert process.pid is not None
    pid = process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield lambda on: os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP)
    finally:
        process.kill()
        process.join()


def measured(reader: Reader, envs: int, rounds: int, steps: int) -> tuple[float, float, dict[str, Figures]]:
    """Let the ways take turns; returns the time of reading a batch and of a copy of the state [ms], and the figures of each way.

    The first step of each way, which starts its thread and its workers, is not counted.
    """
    (engine, feeds, source), memory = reader, StateCopy()
    engine.reset()
    for mode, feed in feeds.items():
        engine.population.feed = feed
        seconds = played(engine, 1, memory if mode.stream else None)[0] / 1000
    before = {mode: None if feed.reader is None else feed.reader.waits.counts.copy() for mode, feed in feeds.items()}
    times, draw = np.empty((rounds, len(feeds), 3)), np.random.default_rng(0)
    with another_reads(source, envs * BATCH, seconds) as beside_it:
        for turn in range(rounds):
            engine.population.feed = next(iter(feeds.values()))  # that in memory, as a reader that is reset begins anew
            engine.reset()  # networks that have learned all by heart compute with numbers that are slow, as they are so small
            for place in draw.permutation(len(feeds)).tolist():
                mode, engine.population.feed = list(feeds.items())[place]
                time.sleep(PAUSE)
                beside_it(mode.beside)
                times[turn, place] = played(engine, steps, memory if mode.stream else None)
                beside_it(False)
    found = {}
    for place, (mode, feed) in enumerate(feeds.items()):
        batch, cpu, waited = np.median(times[:, place], axis=0).tolist()
        old, waits = before[mode], None if feed.reader is None else feed.reader.waits.counts
        p95 = None if waits is None or old is None else 1000 * Waits.p95(waits - old)
        ratio, beside, cpu_ratio = (
            median(times[:, place, clock] / times[:, other, clock]) for other, clock in ((0, 0), (1, 0), (0, 1))
        )
        found[mode.name] = Figures(batch, ratio, beside, cpu, cpu_ratio, waited, p95)
        feed.close()
    return reading_alone(source, envs), copied(engine, memory), found


def median(values: NDArray[np.float64]) -> str:
    """Format the median, with its 95 % interval by order statistics where there are enough values."""
    below = int(binom.ppf(0.025, len(values), 0.5))
    around = f" [{np.sort(values)[below - 1]:.2f}, {np.sort(values)[-below]:.2f}]" if below else ""
    return f"{np.median(values):.2f}{around}"


def reading_alone(source: Source, envs: int) -> float:
    """Measure the time in which one thread reads the examples of a batch, with nothing beside it [ms]."""
    times = []
    for batch in range(9):
        places = np.random.default_rng(batch).choice(len(source), envs * BATCH, replace=False)
        begin = time.perf_counter()
        source.read(np.sort(places))
        times.append((time.perf_counter() - begin) * 1000)
    return statistics.median(times)


def copied(engine: VectorizedEngine, memory: StateCopy) -> float:
    """Measure the processor time in which a run with streamed examples copies its state, once a step, for a retry [ms]."""
    times = []
    for _ in range(9):
        begin = time.thread_time()
        memory.take(engine.snapshot())
        times.append((time.thread_time() - begin) * 1000)
    return statistics.median(times)


def page(arguments: argparse.Namespace, found: Mapping[str, tuple[float, float, dict[str, Figures]]]) -> str:
    """Return all figures as Markdown."""
    where = f"{arguments.machine}; " if arguments.machine else ""
    gpu = ", ".join(f"{name} {value}" for name, value in describe_gpu(torch.device(arguments.device), Config()).items())
    text = HEAD + (
        f"{arguments.envs} environments, batches of {BATCH}, {BATCHES} batches a step, hosts of width {arguments.width} (a "
        f"transformer of width 32 for the windows), one thread of torch on {len(os.sched_getaffinity(0))} cores;\n"
        f"{counted(arguments.rounds, 'round')} of {counted(arguments.steps, 'step')} of each way. "
        f"Machine: {where}load average {os.getloadavg()[0]:.1f}. {gpu or 'It has not run on a GPU.'}\n"
    )
    for kind, (alone, copy, ways) in found.items():
        text += (
            f"\n## Examples: {kind}\n\nReading a batch takes {alone:.1f} ms alone, training on one in memory "
            f"{next(iter(ways.values())).batch:.1f} ms. The copy of the state that a run makes once a step, {copy:.2f} ms of "
            "processor time, is part of the times.\n\n"
            "| how | a batch [ms] | in memory = 1 | another process reads = 1 | waiting [ms] | p95 of the waits [ms] | "
            "processor time of the training [ms] | in memory = 1 |\n|---|---|---|---|---|---|---|---|\n"
        )
        for name, way in ways.items():
            waits = " | " if way.p95 is None else f"{way.waited:.2f} | {way.p95:.2f}"
            text += f"| {name} | {way.batch:.1f} | {way.ratio} | {way.beside} | {waits} | {way.cpu:.1f} | {way.cpu_ratio} |\n"
    return text


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of one step of narrow hosts")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps of each way in a round")
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
    made = readers(arguments.workers, arguments.width, arguments.envs, arguments.device)
    found = {kind: measured(made[kind], arguments.envs, arguments.rounds, arguments.steps) for kind in arguments.kinds}
    text = page(arguments, found)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
