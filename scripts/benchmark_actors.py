"""What actors cost and bring: two workers beside one, the parts of a round, and whether the learner keeps up with more.

    python scripts/benchmark_actors.py ratio [--task repair] [--envs 64] [--shards 2] [--rounds 4] [--turns 3]
    python scripts/benchmark_actors.py parts [--task repair] [--envs 64] [--shards 2]
    python scripts/benchmark_actors.py sleep [--actors 8,64,512]
    python scripts/benchmark_actors.py eval [--task repair] [--instances 8] [--seeds 2]
        [--turns 3]

`ratio` trains without actors, with one worker and with two in turns, and prints the median seconds of a round of each, without
the first round of a training, in which populations are made, and without the last, which validates.

`parts` measures what a round is made of:
bytes sent and received, processor seconds of a part and of an update. From these it works out a round of 8, 64 and 512 actors,
each with one shard of that size. `sleep` lets threads that only sleep answer with rollouts of the same size, and measures how
long the learner needs, beyond the sleep, to hand out the parts and to read the rollouts; the update is not part of it.

`eval` runs `esper eval` with the rules, with one worker and with two in
turns, as commands that start with nothing stored. It compares their records, and prints the wall and the processor seconds of
each, those of all of its processes together.
"""

import argparse
import ctypes
import json
import os
import queue
import resource
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from esper.leyline.progress import Silent
from esper.runs.configuration import training_configs
from esper.runs.training.cohort import TrainingPlayer
from esper.runs.training.train import train
from esper.runs.workers.workers import SentTask, WorkerOptions, Workers
from esper.simic.rewards import get_reward
from esper.simic.rollout import Rollout
from esper.store.tensors import pack, unpack
from esper.tasks.catalog import get_task

MANY = (8, 64, 512)


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("ratio", "parts", "sleep", "eval"))
    parser.add_argument("--task", default="repair")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sleep", type=float, default=2.0, help="seconds of a part of a sleeping actor")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--actors", default=",".join(map(str, MANY)))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    {"ratio": ratio, "parts": parts, "sleep": sleep, "eval": evaluations}[arguments.command](arguments)


def config_of(asked: argparse.Namespace, shards: int | None = None) -> Any:
    """Return the config of the training that is measured, with its own number of shards or another."""
    ppo = {"rounds": asked.rounds, "imitation_rounds": 0, "validate_every": 10**6}
    over = {"envs": asked.envs, "shards": shards or asked.shards, "ppo": ppo, "telemetry": {"level": "off"}}
    return training_configs([get_task(asked.task)], "quick", over)[0]


class Clock(Silent):
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def round(self, number: int, rounds: int, figures: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())


def seconds_of_rounds(asked: argparse.Namespace, workers: int | None) -> float:
    """Return the median duration of the rounds of a training but the first and the last, which validates.

    workers: number of actors; None trains in this process, in one population.
    """
    clock, task = Clock(), get_task(asked.task)
    config = config_of(asked, 1 if workers is None else None)
    train([task], [config], None, clock, asked=WorkerOptions(workers, find=get_task))
    lasted = [after - before for before, after in zip(clock.ends, clock.ends[1:-1], strict=False)]
    return median(lasted)


def ratio(asked: argparse.Namespace) -> None:
    """Print the speed of two workers beside one, and beside a training without actors, in turns."""
    ratios = []
    for turn in range(asked.turns):
        none, one, two = (seconds_of_rounds(asked, workers) for workers in (None, 1, 2))
        ratios.append(one / two)
        print(
            f"turn {turn + 1}: without actors {none:.2f} s a round, one {one:.2f} s, two {two:.2f} s, one / two {one / two:.2f}, "
            f"without / two {none / two:.2f}, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    print(f"median ratio {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def measured(asked: argparse.Namespace) -> tuple[bytes, bytes, float, float]:
    """Return the weights and the result of a part as messages, the processor seconds of a part, and those of an update."""
    work = partial(
        TrainingPlayer,
        [SentTask.of(get_task(asked.task), get_task)],
        [config_of(asked)],
        get_reward,
        "off",
        asked.shards,
    )
    player: TrainingPlayer = work(None)
    learner = player.player.learner
    weights = pack({"weights": {"policy": learner.policy.state(), "round": 0}})
    player.load(unpack(weights)["weights"])
    lasted, results = [], []
    for turn in range(3):
        for cohort in range(asked.shards):
            part = {"kind": "training", "cohort": cohort, "number": turn, "episode": turn, "led": 0.0}
            begin = time.process_time()
            result = player.play(part)
            if turn:  # the first makes the population
                lasted.append(time.process_time() - begin)
        results.append(result)
    message = pack({"result": results[-1]})
    rollouts = [Rollout.of_tree(unpack(message)["result"]["rollout"])] * asked.shards
    begin = time.process_time()
    learner.update([Rollout.joined(rollouts)], [tuple(results[-1]["menu"])])
    return weights, message, median(lasted), time.process_time() - begin


def parts(asked: argparse.Namespace) -> None:
    """Print what a round is made of, and what follows for more actors."""
    weights, message, part, update = measured(asked)
    each = asked.envs // asked.shards
    print(f"{asked.task}, {asked.envs} environments in {asked.shards} shards of {each}, load {os.getloadavg()[0]:.1f}")
    print(f"weights {len(weights):,} bytes, rollout of a shard {len(message):,} bytes")
    print(f"part {part:.2f} s, update {update:.2f} s of processor time ({update / asked.shards * 1000:.1f} ms a shard)")
    begin = time.process_time()
    for _ in range(20):
        unpack(message)
    reading = (time.process_time() - begin) / 20
    print(f"reading a rollout {reading * 1000:.2f} ms")
    for actors in MANY:
        learner = actors * (reading + update / asked.shards)
        print(
            f"{actors} actors, one shard each: {actors * (len(weights) + len(message)) / 2**20:,.1f} MiB a round, "
            f"actors play {part:.2f} s, the learner works {learner:.2f} s: "
            f"{part / (part + learner):.0%} of the actors' time is playing"
        )


class Sleepers:
    """A crew of threads that sleep instead of playing, and answer with a rollout that was measured."""

    def __init__(self, size: int, seconds: float, answer: bytes) -> None:
        self.size, self.seconds, self.result = size, seconds, answer
        self.inboxes: list[queue.Queue[bytes | None]] = [queue.Queue() for _ in range(size)]
        self.outbox: queue.Queue[tuple[int, bytes | None]] = queue.Queue()

    def start(self, actor: int) -> None:
        """Start a thread."""
        threading.Thread(target=self._serve, args=(actor,), daemon=True).start()
        self.outbox.put((actor, pack({"ready": {}})))

    def _serve(self, actor: int) -> None:
        while (message := self.inboxes[actor].get()) is not None:
            if len(message) < 4096:  # a part, and not the weights
                time.sleep(self.seconds)
                self.outbox.put((actor, self.result))

    def send(self, actor: int, message: bytes) -> None:
        """Send a message."""
        self.inboxes[actor].put(message)

    def receive(self, seconds: float) -> list[tuple[int, bytes | None]]:
        """Wait for an answer."""
        try:
            return [self.outbox.get(timeout=seconds)]
        except queue.Empty:
            return []

    def close(self) -> None:
        """End the threads."""
        for inbox in self.inboxes:
            inbox.put(None)


def sleep(asked: argparse.Namespace) -> None:
    """Print how long the learner's side of a round takes beyond the sleep of the actors."""
    weights, message, _, _ = measured(asked)
    tree = unpack(weights)["weights"]
    for count in map(int, asked.actors.split(",")):
        actors = Workers(Sleepers(count, asked.sleep, message), print)
        jobs = [{"kind": "training", "cohort": place, "number": 0, "episode": 0, "led": 0.0} for place in range(count)]
        lasted = []
        for _ in range(3):
            begin, busy = time.perf_counter(), time.process_time()
            actors.play(tree, jobs)
            lasted.append((time.perf_counter() - begin, time.process_time() - busy))
        actors.close()
        wall, processor = median(wall for wall, _ in lasted), median(processor for _, processor in lasted)
        print(
            f"{count} sleeping actors: a round of {asked.sleep:.1f} s took {wall:.2f} s, "
            f"of which the learner computed {processor:.2f} s, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def evaluated(asked: argparse.Namespace, workers: int) -> tuple[float, float, dict[str, Any]]:
    """Return the wall and the processor seconds of an evaluation in a command of its own, and its record."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "esper", "eval", "--tasks", asked.task, "--out", f"{folder}/out"]
        command += ["--instances", str(asked.instances), "--seeds", str(asked.seeds)]
        command += ["--baselines", "none", "--workers", str(workers)]
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wall = time.perf_counter() - begin
        record = json.loads((Path(folder) / "out" / "evaluation.json").read_text())
    with suppress(ChildProcessError):
        while True:
            os.wait()  # for the fork server, which has waited for the actors
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, record


def evaluations(asked: argparse.Namespace) -> None:
    """Print what evaluations take with one worker and with two, in turns."""
    ctypes.CDLL(None).prctl(
        36, 1
    )  # PR_SET_CHILD_SUBREAPER: the fork server of a command becomes a child of this process
    names, ratios, runs = {1: "one worker", 2: "two workers"}, [], []
    for turn in range(asked.turns):
        walls = {}
        for workers, name in names.items():
            walls[workers], processor, record = evaluated(asked, workers)
            runs.append([{**each, "seconds": None} for each in record["tasks"][0]["runs"].values()])
            assert runs[-1] == runs[0], "the results depend on the number of workers"
            waited = record["actors"]["waiting_seconds"]
            print(
                f"turn {turn + 1}, {name}: {walls[workers]:.1f} s, {processor:.1f} s of processor time, {waited:.1f} s lost in "
                f"waiting, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        ratios.append(walls[1] / walls[2])
    print(f"one / two in wall time: median {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
