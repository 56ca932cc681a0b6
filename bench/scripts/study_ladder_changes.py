"""Show what each change of the learner is worth: trainings on a rung of the ladder, with one of them taken back at a time.

    python bench/scripts/study_ladder_changes.py OUT                     # full, 10 seeds, 40 rounds: about 20 minutes of a core
    python bench/scripts/study_ladder_changes.py OUT --rung several --seeds 5

The learner of `esper train` scales no advantages up from below a floor (A), lets the scale of the critic rise at once (B1), clips
the gradients of policy and critic each by itself (B2), and anneals from the first round whose returns differ (B3). Each arm takes
one of these back, or all four; others leave out the critic, or the bias against undoing. All arms have the same seeds. OUT gets a
file for each training, and a training whose file is there is not made again.
"""

import argparse
import json
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.leyline.intervals import t_interval
from esper.simic.ppo import PPO, Statistics
from esper_bench.lab import ladder

MARKS = (5, 11, 20, 30, 40, 60)
GOOD = 0.95


class SlowScale(PPO):
    """Lets the scale of the critic's targets follow slowly also where it rises (B1 taken back)."""

    def _rescale(self, statistics: Statistics) -> None:
        scale = float(self.policy.network.value_scale)
        if self.updates and statistics.spread["target"] > scale:
            slow = scale + 0.1 * (statistics.spread["target"] - scale)
            statistics = statistics._replace(spread={**statistics.spread, "target": slow})
        super()._rescale(statistics)


class JointClipping(PPO):
    """Clips the gradients of policy and critic by their common norm (B2 taken back)."""

    def _clipped(self, gradients: Tensor, norms: Tensor) -> Tensor:
        whole = gradients.sum(0)
        return whole * (self.config.max_grad_norm / (whole.norm() + 1e-6)).clamp(max=1)


class ByRounds(PPO):
    """Anneals from the first round on, whether a reward was met or not (B3 taken back)."""

    @property
    def _progress(self) -> float:
        return self.round / max(self.config.rounds - 1, 1)


class AllThree(SlowScale, JointClipping, ByRounds):
    """Takes B1, B2 and B3 back."""


NO_FLOOR: Mapping[str, Any] = {"ppo": {"advantage_floor": 1e-6}}
ARMS: Mapping[str, tuple[type[PPO], Mapping[str, Any]]] = {
    "as it is": (PPO, {}),
    "advantages scaled up from nothing (A)": (PPO, NO_FLOOR),
    "the scale of the critic rises slowly (B1)": (SlowScale, {}),
    "one clipping of both gradients (B2)": (JointClipping, {}),
    "annealed by rounds (B3)": (ByRounds, {}),
    "all four": (AllThree, NO_FLOOR),
    "without a critic": (PPO, {"ppo": {"value_weight": 0.0}}),
    "without the bias against undoing": (PPO, {"ppo": {"undo_bias": 0.0}}),
}


def climb(job: tuple[Path, str, str, int, int]) -> dict[str, float]:
    """Return the score after each number of rounds of `MARKS`, from the file of the training if it is there."""
    path, rung, arm, seed, rounds = job
    if not path.exists():
        torch.set_num_threads(1)
        learner, settings = ARMS[arm]
        vars(ladder)["PPO"] = learner
        climbed = ladder.train(rung, seed, rounds, MARKS, settings)
        path.write_text(json.dumps({"curve": climbed.curve, "seconds": climbed.seconds}) + "\n", encoding="utf-8")
    curve: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["curve"]
    return curve


def main() -> None:
    """Train every arm with every seed, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for a file of each training")
    parser.add_argument("--rung", default="full", choices=list(ladder.RUNGS), help="rung of the ladder (full)")
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="trainings of an arm (10)")
    parser.add_argument("--first-seed", type=int, default=100, metavar="S", help="seed of the first (100)")
    parser.add_argument("--rounds", type=int, default=40, metavar="R", help="rounds of a training (40)")
    parser.add_argument("--processes", type=int, default=1, metavar="P", help="trainings at the same time (1)")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    jobs = [
        (asked.out / f"{asked.rung}-{number}-{seed}-{asked.rounds}.json", asked.rung, arm, seed, asked.rounds)
        for seed in seeds
        for number, arm in enumerate(ARMS)
    ]
    with get_context("spawn").Pool(asked.processes) as pool:
        curves = pool.map(climb, jobs, chunksize=1)
    marks = sorted({*(mark for mark in MARKS if mark < asked.rounds), asked.rounds})
    table = np.array([[curve[str(mark)] for mark in marks] for curve in curves]).reshape(len(seeds), len(ARMS), -1)
    print(f"`{asked.rung}`, {len(seeds)} seeds from {asked.first_seed} on:\n")
    print("| | " + " | ".join(str(mark) for mark in marks) + " | mean score, less that of the first row |")
    print("|---|" + "---|" * (len(marks) + 1))
    mean = table.mean(2)  # (seeds, arms): over the marks, so of how fast and how well is learnt
    for number, arm in enumerate(ARMS):
        good = " | ".join(f"{count} of {len(seeds)}" for count in (table[:, number] >= GOOD).sum(0))
        less = f"{t_interval((mean[:, number] - mean[:, 0]).tolist()):+.2f}" if number and len(seeds) > 1 else ""
        print(f"| {arm} | {good} | {less} |", flush=True)


if __name__ == "__main__":
    main()
