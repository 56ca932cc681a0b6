"""What workers bring: two beside one, what their time goes to, and many workers whose environments sleep.

    python scripts/benchmark_workers.py ratio [--task repair] [--envs 64] [--shards 2] [--rounds 4]
    python scripts/benchmark_workers.py sleep [--task repair] [--workers 8,64] [--steps 6] [--sleep 4]
    python scripts/benchmark_workers.py eval [--task repair] [--instances 8] [--seeds 2] [--turns 3]
    python scripts/benchmark_workers.py grow [--task digits-image] [--envs 64] [--steps 20] [--turns 3]

`ratio` trains with one worker and with two in turns, on the same shards, and prints the median seconds of a round of each,
without the first round of a training, in which populations are made, and without the last, which validates. On a machine that
other programs use, the processor seconds of the first worker say more: their ratio is what two free cores would come to.

`sleep` trains with many workers, which are processes with one shard each. Their environments sleep for so many seconds a step in
place of growing; the policy decides, and all else of a training is done. It prints the shares of the time of all workers in which
they played, computed gradients, and waited or exchanged. Where there are more workers than cores, they compute one after
another, so it also prints what follows from the processor seconds: the share of playing where each worker has a core.

`eval` runs `esper eval` with the rules, with one worker and with two; `grow` runs `esper grow` without workers and with two; in
turns, as commands that start with nothing stored. They compare the results, and print the wall and the processor seconds of each
command, those of all of its processes together.
"""

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch

from esper.leyline.progress import Silent
from esper.runs.configuration import training_configs
from esper.runs.training import cohort
from esper.runs.training.train import train
from esper.runs.workers.workers import WorkerOptions
from esper.tasks.catalog import get_task
from esper.tolaria.engine import VectorizedEngine

SLEEP = "ESPER_BENCHMARK_SLEEP"
"""The variable that tells the processes of `sleep` how long a step sleeps [seconds]."""


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("ratio", "sleep", "eval", "grow"))
    parser.add_argument("--task", default="repair")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, help="steps of an episode; by default those of the task")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workers", default="8,64")
    parser.add_argument("--envs-of-shard", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=1.0, help="seconds of a step of an environment that sleeps")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    {"ratio": ratio, "sleep": sleep, "eval": commands, "grow": commands}[arguments.command](arguments)


class Clock(Silent):
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
    over = {"envs": envs, "shards": shards, "ppo": ppo, "telemetry": {"level": "off"}}
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
    """A population that grows in its first episode, and in later ones sleeps and shows the same again."""

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
        """Sleep, or grow in the first episode."""
        if not self.grown:
            self.shown.append(super().step(actions, reasons, further))
            return self.shown[-1]
        time.sleep(float(os.environ[SLEEP]))
        self.state.step += 1
        if self.over:
            self.deciding.append(time.process_time() - self.begun)
        return self.shown[self.state.step]


if SLEEP in os.environ:  # set in `sleep` before the workers start, which import this file
    vars(cohort)["VectorizedEngine"] = SleepingEngine


def sleep(asked: argparse.Namespace) -> None:
    """Print what the time of many workers goes to."""
    os.environ[SLEEP] = str(asked.sleep)
    vars(cohort)["VectorizedEngine"] = SleepingEngine
    steps = asked.steps or training_configs([get_task(asked.task)], "quick", {})[0].steps
    for workers in map(int, asked.workers.split(",")):
        clock = trained(asked, workers * asked.envs_of_shard, workers, workers)
        playing, gradients = clock.share("playing_share"), clock.share("gradients_share")
        slept, busy = steps * asked.sleep, clock.whole(clock.busy)
        deciding = median(SleepingEngine.deciding[:-1])
        print(
            f"{workers} workers, {asked.envs_of_shard} environments each that sleep {asked.sleep:g} s a step, on "
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}: a round takes {clock.whole(clock.walls):.1f} s, of which "
            f"they play {playing:.1%}, compute gradients {gradients:.1%}, and wait or exchange {1 - playing - gradients:.1%}. "
            f"In a round a worker sleeps {slept:.1f} s, decides for {deciding:.2f} s of processor time, and learns and exchanges "
            f"for {busy - deciding:.2f} s: with a core for each, {(slept + deciding) / (slept + busy):.1%} is playing",
            flush=True,
        )
        SleepingEngine.deciding.clear()


def commanded(asked: argparse.Namespace, workers: int) -> tuple[float, float, Any]:
    """Return the wall and the processor seconds of an evaluation or a growth in a command of its own, and its results."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "esper", asked.command]
        if asked.command == "eval":
            command += ["--tasks", asked.task, "--out", f"{folder}/out", "--baselines", "none"]
            command += ["--instances", str(asked.instances), "--seeds", str(asked.seeds)]
        else:
            command += [asked.task, "--run", f"{folder}/out", "--envs", str(asked.envs), "--baselines", "none"]
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
    ctypes.CDLL(None).prctl(
        36, 1
    )  # PR_SET_CHILD_SUBREAPER: the fork server of a command becomes a child of this process
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
