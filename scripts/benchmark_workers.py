"""Measure what workers bring: two beside one, what their time goes to, and many workers whose environments sleep.

    python scripts/benchmark_workers.py ratio [--task repair] [--envs 64] [--shards 2] [--rounds 4]
    python scripts/benchmark_workers.py simulate [--task repair] [--workers 8,64,512] [--check 2,8] [--steps 6] [--sleep 4]
    python scripts/benchmark_workers.py sleep [--task repair] [--workers 8,64] [--steps 6] [--sleep 4]
    python scripts/benchmark_workers.py eval [--task repair] [--instances 8] [--seeds 2] [--turns 3]
    python scripts/benchmark_workers.py grow [--task digits-image] [--envs 64] [--steps 20] [--turns 3]

Everything is computed on the CPU, also where there is a GPU.

`ratio` trains with one worker and with two in turns, on the same shards, and prints the median seconds of a round of each,
without the first round of a training, in which populations are made, and without the last, which validates. On a machine that
other programs use, the processor seconds of the first worker say more: their ratio is what two free cores would come to.

`sleep` trains with many workers, which are processes with one shard each. Their environments sleep for so many seconds a step in
place of growing; the policy decides, and all else of a training is done. It prints the shares of the time of all workers in which
they played, computed gradients, and waited or exchanged. Where there are more workers than cores, they compute one after another.

`simulate` predicts such trainings for any number of workers with a core each. It measures what one worker computes (deciding in a
step, preparing an update, a step of the optimizer), and how long a message between two processes takes over the loopback
interface, by its size; then it simulates rounds event by event, with times that are drawn by key from the measured ones. For the
numbers of `--check` it also runs the real training on the cores of this machine, and prints it beside the prediction for as many
cores. `--uneven` repeats the simulation with playing times as unequal as those of shards that grow.

`eval` runs `esper eval` with the rules, with one worker and with two; `grow` runs `esper grow` without workers and with two; in
turns, as commands that start with nothing stored. They compare the results, and print the wall and the processor seconds of each
command, those of all of its processes together.
"""

import argparse
import ctypes
import heapq
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import FileStore

from esper.leyline.data.keys import Purpose, key
from esper.leyline.progress import Progress
from esper.runs import train as training
from esper.runs.configuration import training_configs
from esper.runs.train import Trainer, train
from esper.runs.workers.workers import WorkerOptions
from esper.simic.exchange import Exchange
from esper.simic.ppo import PPO
from esper.store.tensors import pack
from esper.tamiyo.policy.controller import Language, Policy
from esper.tasks.catalog import get_task
from esper.tolaria.engine import VectorizedEngine

SLEEP = "ESPER_BENCHMARK_SLEEP"
"""The variable that tells the processes of `sleep` how long a step sleeps [seconds]."""


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("ratio", "sleep", "simulate", "eval", "grow"))
    parser.add_argument("--task", default="repair")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, help="steps of an episode; by default those of the task")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workers", default="8,64", help="numbers of workers")
    parser.add_argument("--check", default="2,8", help="numbers of workers of the real trainings beside the simulation")
    parser.add_argument(
        "--uneven", action="store_true", help="simulate playing times as unequal as those of growing shards"
    )
    parser.add_argument("--envs-of-shard", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=1.0, help="seconds of a step of an environment that sleeps")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = {"ratio": ratio, "sleep": sleep, "simulate": simulate, "eval": commands, "grow": commands}
    parts[arguments.command](arguments)


class Clock(Progress):
    """Notes when rounds end, the processor seconds of this process until then, and their figures."""

    def __init__(self) -> None:
        self.walls: list[float] = []
        self.busy: list[float] = []
        self.figures: list[Any] = []

    def round(self, number: int, rounds: int, figures: Any) -> None:
        """Note a round."""
        self.walls.append(time.perf_counter())
        self.busy.append(time.process_time())
        self.figures.append(figures)

    def whole(self, moments: list[float]) -> float:
        """Return the median from one round to the next, without the first and the last."""
        return median(after - before for before, after in pairwise(moments[:-1]))

    def share(self, name: str) -> float:
        """Return the median of a figure of these rounds."""
        return median(figures[name] for figures in self.figures[1:-1])


def trained(asked: argparse.Namespace, envs: int, shards: int, workers: int) -> Clock:
    """Train for a few rounds."""
    clock, task = Clock(), get_task(asked.task)
    ppo = {"rounds": asked.rounds, "imitation_rounds": 0, "validate_every": 10**6}
    # on the CPU, also beside a GPU, which the workers would share: each is to have a core of its own
    over = {"envs": envs, "shards": shards, "device": "cpu", "ppo": ppo, "telemetry": {"level": "off"}}
    if asked.steps is not None:
        over["steps"] = asked.steps
    config = training_configs([task], "quick", over)[0]
    train([task], [config], None, clock, asked=WorkerOptions(workers, find=get_task))
    return clock


def ratio(asked: argparse.Namespace) -> None:
    """Print the speed of two workers beside one, in turns."""
    walls, busy = [], []
    for turn in range(asked.turns):
        one, two = (trained(asked, asked.envs, asked.shards, workers) for workers in (1, 2))
        walls.append(one.whole(one.walls) / two.whole(two.walls))
        busy.append(one.whole(one.busy) / two.whole(two.busy))
        playing, gradients = two.share("playing_share"), two.share("gradients_share")
        print(
            f"turn {turn + 1}: one worker {one.whole(one.walls):.2f} s a round, two {two.whole(two.walls):.2f} s, ratio "
            f"{walls[-1]:.2f}; processor time {one.whole(one.busy):.2f} s and {two.whole(two.busy):.2f} s, ratio {busy[-1]:.2f}; "
            f"two workers play {playing:.1%}, compute gradients {gradients:.1%}, wait and exchange "
            f"{1 - playing - gradients:.1%}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    for name, found in (("wall", walls), ("processor", busy)):
        print(f"median ratio in {name} time {median(found):.2f} ({min(found):.2f} to {max(found):.2f})")


class SleepingEngine(VectorizedEngine):
    """Grows in its first episode; in later ones, sleeps and shows the same again."""

    deciding: ClassVar[list[float]] = []
    """Processor seconds of the policy in each episode of this process."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.shown: list[Any] = []  # the view at the beginning, and the view and the outcome of every step

    @property
    def grown(self) -> bool:
        """Whether the first episode is over."""
        return len(self.shown) > self.config.steps

    def reset(self, instance: Any = None, episode: int | None = None, planted: Any = None) -> Any:
        """Begin an episode."""
        if self.grown:
            self.state.step, self.begun = 0, time.process_time()
            return self.view()
        self.shown = [(super().reset(instance, episode, planted), None)]
        return self.shown[0][0]

    def view(self) -> Any:
        """Return the view for the next decision."""
        return self.shown[self.state.step][0] if self.grown else super().view()

    def step(self, actions: Any, reasons: Any = None, further: Any = None) -> Any:
        """Play a step of the first episode; in later ones, sleep and show the same step again."""
        if not self.grown:
            self.shown.append(super().step(actions, reasons, further))
            return self.shown[-1]
        time.sleep(float(os.environ[SLEEP]))
        self.state.step += 1
        if self.over:
            self.deciding.append(time.process_time() - self.begun)
        return self.shown[self.state.step]


if SLEEP in os.environ:  # set in `sleep` before the workers start, which import this file
    vars(training)["VectorizedEngine"] = SleepingEngine


def sleep(asked: argparse.Namespace) -> None:
    """Print what the time of many workers goes to."""
    os.environ[SLEEP] = str(asked.sleep)
    vars(training)["VectorizedEngine"] = SleepingEngine
    for workers in map(int, asked.workers.split(",")):
        clock = trained(asked, workers * asked.envs_of_shard, workers, workers)
        playing, gradients = clock.share("playing_share"), clock.share("gradients_share")
        print(
            f"{workers} workers, {asked.envs_of_shard} environments each that sleep {asked.sleep:g} s a step, on "
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}: a round takes {clock.whole(clock.walls):.1f} s, of which "
            f"they play {playing:.1%}, compute gradients {gradients:.1%}, and wait or exchange {1 - playing - gradients:.1%}",
            flush=True,
        )


class WorkerCosts(NamedTuple):
    """Holds what a worker computes and sends, measured on this machine; lists have one entry for each time it was measured."""

    steps: int  # of an episode
    sleep: float  # of a step [s]
    decide: list[float]  # processor seconds of the decisions of a step
    prepare: list[float]  # processor seconds of an update without its steps of the optimizer
    descend: list[float]  # processor seconds of a step of the optimizer, gradients included
    descents: int  # steps of the optimizer in a round
    statistics: int  # bytes of the statistics of a shard
    gradients: int  # bytes of the gradients
    latency: float  # seconds of a small message between two processes
    by_byte: float  # further seconds for each byte
    add: float  # seconds in which two vectors of gradients are added
    uneven: list[float]  # playing times of shards, over the mean of their round

    def message(self, size: int) -> float:
        return self.latency + self.by_byte * size


def measured(asked: argparse.Namespace) -> WorkerCosts:
    """Measure a worker whose environments sleep, and messages."""
    decide, prepare, descend, sizes = list[float](), list[float](), list[float](), list[int]()
    update, step, gather = PPO.update, PPO._descend, Exchange.gather

    def timed_step(self: PPO, *arguments: Any) -> Any:
        begin = time.process_time()
        found = step(self, *arguments)
        descend.append(time.process_time() - begin)
        return found

    def timed_update(self: PPO, *arguments: Any) -> Any:
        begin, before = time.process_time(), len(descend)
        found = update(self, *arguments)
        prepare.append(time.process_time() - begin - sum(descend[before:]))
        return found

    def sized_gather(self: Exchange, tree: Any) -> Any:
        sizes.extend(len(pack({"shard": each})) for each in tree["shards"])
        return gather(self, tree)

    vars(training)["VectorizedEngine"] = SleepingEngine
    with patched(PPO, update=timed_update, _descend=timed_step), patched(Exchange, gather=sized_gather):
        trained(asked, asked.envs_of_shard, 1, 1)
    steps = asked.steps or training_configs([get_task(asked.task)], "quick", {})[0].steps
    decide += [seconds / steps for seconds in SleepingEngine.deciding]
    SleepingEngine.deciding.clear()
    uneven = unequal_shards(asked) if asked.uneven else [1.0]
    gradients = gradient_bytes(asked)
    latency, by_byte, add = messages(gradients)
    descents = round(len(descend) / len(prepare))
    sleep = asked.sleep
    return WorkerCosts(
        steps, sleep, decide, prepare[1:], descend, descents, max(sizes), gradients, latency, by_byte, add, uneven
    )


@contextmanager
def patched(kind: type, **methods: Any) -> Iterator[None]:
    """Let a class have other methods for a while."""
    before = {name: getattr(kind, name) for name in methods}
    for name, method in methods.items():
        setattr(kind, name, method)
    yield
    for name, method in before.items():
        setattr(kind, name, method)


def gradient_bytes(asked: argparse.Namespace) -> int:
    """Return the bytes of a message of gradients: two numbers for each weight of the policy."""
    task = get_task(asked.task).sealed()
    config = training_configs([task], "quick", {"envs": asked.envs_of_shard, "device": "cpu"})[0]
    policy = Policy.fresh(Language.of([VectorizedEngine(task, config).space]), 0)
    return 8 * sum(parameter.numel() for parameter in policy.network.parameters())


def unequal_shards(asked: argparse.Namespace) -> list[float]:
    """Return the processor seconds in which shards grow in an episode, over the mean of their round."""
    taken, finish = list[float](), Trainer.finish

    def timed(self: Trainer, *arguments: Any, **named: Any) -> None:
        begin = time.process_time()
        finish(self, *arguments, **named)
        taken.append(time.process_time() - begin)

    vars(training)["VectorizedEngine"] = VectorizedEngine
    shards = 8
    with patched(Trainer, finish=timed):
        trained(asked, shards * asked.envs_of_shard, shards, 1)
    vars(training)["VectorizedEngine"] = SleepingEngine
    rounds = np.array(taken).reshape(-1, shards)[1:]  # networks are made in the first
    return (rounds / rounds.mean(1, keepdims=True)).ravel().tolist()


def messages(size: int) -> tuple[float, float, float]:
    """Return the seconds of a message of 4 bytes, those of each further byte, and those of the sum of two vectors."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        other = context.Process(target=exchanged, args=(f"{folder}/meeting", 1, size))
        other.start()
        small, large = exchanged(f"{folder}/meeting", 0, size)
        other.join()
    vectors, begin = [torch.ones(size // 4) for _ in range(2)], time.perf_counter()
    for _ in range(100):
        vectors[0] = vectors[0] + vectors[1]
    return small, (large - small) / size, (time.perf_counter() - begin) / 100


def exchanged(path: str, rank: int, size: int) -> tuple[float, float]:
    """Send messages to and fro between two processes; return the seconds of a small one and of one of `size` bytes."""
    torch.set_num_threads(1)
    exchange = Exchange.joined(FileStore(path, 2), [0, 1], rank, 2, "127.0.0.1")
    found = []
    for numbers in (1, size // 4):
        vector, taken = torch.ones(numbers), list[float]()
        for _ in range(200):
            begin = time.perf_counter()
            for sender in (0, 1):
                if sender == rank:
                    exchange._group.send([vector], 1 - rank, 0).wait()
                else:
                    exchange._group.recv([vector], 1 - rank, 0).wait()
            taken.append((time.perf_counter() - begin) / 2)
        # the fastest tenth, because the simulated workers have cores that no other program uses
        found.append(sorted(taken)[len(taken) // 10])
    exchange.close()
    return found[0], found[1]


class Simulation:
    """Simulates rounds of a training with a shard for each of N workers, on some cores. Times are arrays (N,) [s]."""

    def __init__(self, known: WorkerCosts, workers: int, cores: int, uneven: bool = False) -> None:
        self.known, self.workers, self.cores, self.uneven = known, workers, cores, uneven
        self._draws = 0

    def round(self) -> tuple[float, float, float]:
        """Return the seconds of a round, and the shares in which the workers play and compute for the update."""
        known, now = self.known, np.zeros(self.workers)
        stretch = self._drawn(known.uneven) if self.uneven else np.ones(self.workers)
        for _ in range(known.steps):
            now = self._computed(now + known.sleep * stretch, known.decide)
        played = now.sum()
        # All meet and gather their results; the first collects rows; the statistics of all shards are exchanged.
        now = self._ring(self._ring(self._ring(now, 4), 8 * self.workers), 2000 * self.workers)
        now[0] += (self.workers - 1) * known.message(1000)
        now, computed = self._computed(now, known.prepare), 0.0
        now = self._ring(now, known.statistics * self.workers)
        for _ in range(known.descents):
            ready = self._computed(now, known.descend)
            computed += (ready - now).sum()
            now = self._sent_to_all(self._summed(ready))
        seconds = now.max()
        return seconds, played / (self.workers * seconds), computed / (self.workers * seconds)

    def _drawn(self, times: Sequence[float]) -> NDArray[np.float64]:
        """Draw measured times by key, one for each worker."""
        self._draws += 1
        drawn = key(0, Purpose.SAMPLE, self.workers, self._draws, np.arange(self.workers)) & ((1 << 62) - 1)
        return np.array(times)[drawn % len(times)]

    def _computed(self, begin: NDArray[np.float64], times: Sequence[float]) -> NDArray[np.float64]:
        """Return when the workers have computed something that each can begin at a time, first come, first served."""
        seconds, end = self._drawn(times), begin.copy()
        if self.cores >= self.workers:
            return end + seconds
        free = [0.0] * self.cores
        for worker in np.argsort(begin, kind="stable"):
            end[worker] = max(heapq.heappop(free), begin[worker]) + seconds[worker]
            heapq.heappush(free, end[worker])
        return end

    def _ring(self, now: NDArray[np.float64], size: int) -> NDArray[np.float64]:
        """Return the end of an all-reduce of gloo, in which N parts go around a ring twice."""
        return np.full_like(now, now.max() + 2 * (self.workers - 1) * self.known.message(size // self.workers))

    def _summed(self, now: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the times after the sum in the tree over shards, in which each sends its part to one on its left."""
        message, stride = self.known.message(self.known.gradients), 1
        while stride < self.workers:
            for left in range(0, self.workers - stride, 2 * stride):
                arrived = max(now[left], now[left + stride]) + message
                now[left + stride], now[left] = arrived, arrived + self.known.add
            stride *= 2
        return now

    def _sent_to_all(self, now: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return when the workers have the sum, which every one that has it sends on, to the farthest first."""
        message, stride = self.known.message(self.known.gradients), 1 << (self.workers - 1).bit_length()
        now = np.maximum(now, 0.0)
        while stride > 1:
            stride //= 2
            for sender in range(0, self.workers - stride, 2 * stride):
                now[sender] += message
                now[sender + stride] = max(now[sender], now[sender + stride])
        return now


def simulate(asked: argparse.Namespace) -> None:
    """Print predictions for workers with a core each, and for those of `--check` beside the real training."""
    os.environ[SLEEP] = str(asked.sleep)
    known = measured(asked)
    message, decide, prepare, descend = known.message(known.gradients), known.decide, known.prepare, known.descend
    print(
        f"measured, load {os.getloadavg()[0]:.1f}: {asked.envs_of_shard} environments decide in {1000 * median(decide):.1f} ms "
        f"of processor time a step; an update takes {1000 * median(prepare):.0f} ms, and {known.descents} optimizer steps of "
        f"{1000 * median(descend):.1f} ms; a message takes {1e6 * known.latency:.0f} us, and {1000 * message:.2f} ms with "
        f"gradients of {known.gradients / 1e6:.1f} MB, which are added in {1000 * known.add:.2f} ms",
        flush=True,
    )
    for workers in map(int, asked.check.split(",")):
        clock = trained(asked, workers * asked.envs_of_shard, workers, workers)
        SleepingEngine.deciding.clear()
        seconds, playing, _ = simulated(known, workers, os.cpu_count() or 1)
        print(
            f"{workers} workers on {os.cpu_count()} cores: predicted {seconds:.2f} s a round, {playing:.1%} playing; measured "
            f"{clock.whole(clock.walls):.2f} s, {clock.share('playing_share'):.1%}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    for uneven in (False, True) if asked.uneven else (False,):
        for workers in map(int, asked.workers.split(",")):
            seconds, playing, computing = simulated(known, workers, workers, uneven)
            how, rest = ", as unequal as growing shards" if uneven else "", 1 - playing - computing
            print(
                f"{workers} workers with a core each{how}: {seconds:.2f} s a round, {playing:.1%} playing, "
                f"{computing:.1%} computing gradients, {rest:.1%} waiting and exchanging",
                flush=True,
            )


def simulated(known: WorkerCosts, workers: int, cores: int, uneven: bool = False) -> tuple[float, float, float]:
    """Return the medians over 20 rounds of a simulation."""
    simulation = Simulation(known, workers, cores, uneven)
    seconds, playing, computing = np.median([simulation.round() for _ in range(20)], axis=0).tolist()
    return seconds, playing, computing


def commanded(asked: argparse.Namespace, workers: int) -> tuple[float, float, Any]:
    """Return the wall and the processor seconds of an evaluation or a growth in a command of its own, and its results."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "esper", asked.command]
        if asked.command == "eval":
            command += ["--tasks", asked.task, "--out", f"{folder}/out", "--baselines", "none"]
            command += ["--instances", str(asked.instances), "--seeds", str(asked.seeds), "--set", "device=cpu"]
        else:
            command += [asked.task, "--run", f"{folder}/out", "--envs", str(asked.envs), "--baselines", "none"]
            command += ["--device", "cpu"]
            command += [] if asked.steps is None else ["--steps", str(asked.steps)]
        command += ["--workers", str(workers)] if workers else []
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wall = time.perf_counter() - begin
        if asked.command == "eval":
            record = json.loads((Path(folder) / "out" / "evaluation.json").read_text())
            found: Any = [{**each, "seconds": None} for each in record["tasks"][0]["runs"].values()]
        else:
            summary = json.loads((Path(folder) / "out" / "summary.json").read_text())
            found = {name: summary[name] for name in ("validation_objective", "test_accuracy", "grown", "grown_params")}
    with suppress(ChildProcessError):
        while True:
            os.wait()  # for the fork server, which has waited for the workers
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, found


def commands(asked: argparse.Namespace) -> None:
    """Print what evaluations or growths take with no, one and two workers, in turns."""
    # PR_SET_CHILD_SUBREAPER: the fork server of a command becomes a child of this process
    ctypes.CDLL(None).prctl(36, 1)
    names = {1: "one worker", 2: "two workers"} if asked.command == "eval" else {0: "no worker", 2: "two workers"}
    ratios, processors, runs = list[float](), list[float](), list[Any]()
    for turn in range(asked.turns):
        taken = []
        for workers, name in names.items():
            wall, processor, found = commanded(asked, workers)
            taken.append((wall, processor))
            runs.append(found)
            assert runs[-1] == runs[0], "the results depend on the number of workers"
            print(
                f"turn {turn + 1}, {name}: {wall:.1f} s, {processor:.1f} s of processor time, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        (wall, processor), (of_two, processor_of_two) = taken
        ratios.append(wall / of_two)
        processors.append(processor / processor_of_two)
    first = next(iter(names.values()))
    for name, each in (("wall", ratios), ("processor", processors)):
        print(f"{first} / two in {name} time: median {median(each):.2f} ({min(each):.2f} to {max(each):.2f})")


if __name__ == "__main__":
    main()
