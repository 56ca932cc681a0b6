"""Train the learner on a ladder of problems whose optimum is known, and print its score by episodes.

    python scripts/ladder.py                              # every rung, 5 seeds, 40 rounds (60 where a step has eight decisions)
    python scripts/ladder.py --rung full --seeds 5        # 6 slots, 7 blueprints, 5 tempos, 4 targets, one decision a step
    python scripts/ladder.py --rung blueprint --set ppo.advantage_floor=1e-6   # an ablation: any key of the config

A score is the sum of the returns of the greedy policy / that of the best plans, which brute force finds, on problems that it was
not trained on. A round is 64 episodes. The problems are formulas, so that a training takes 15 to 90 seconds of one core.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bench" / "src"))  # the bench need not be installed

from esper.commands.options import fail
from esper.leyline.config.tree import parse_setting
from esper.leyline.intervals import t_interval
from esper.leyline.messages import InputError
from esper_bench.lab.ladder import RUNGS, Climbed, train

MARKS = (5, 11, 20, 30, 40, 60)
"""Numbers of rounds after which a policy is scored."""


def climb(job: tuple[str, int, int, list[Mapping[str, object]]]) -> Climbed:
    """Train with one seed, on one thread."""
    torch.set_num_threads(1)
    name, seed, rounds, layers = job
    return train(name, seed, rounds, MARKS, *layers)


def main() -> None:
    """Train on the rungs that the command line names, and print their scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rung", action="append", metavar="NAME", help=f"one of {', '.join(RUNGS)}; may be repeated")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="trainings of a rung (5)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="S", help="seed of the first training (0)")
    parser.add_argument(
        "--rounds", type=int, metavar="R", help="rounds of a training (40; 60 with eight decisions a step)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the config")
    parser.add_argument("--processes", type=int, default=1, metavar="P", help="trainings at the same time (1)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the scores and the diagnostics of each round"
    )
    arguments = parser.parse_args()
    names = arguments.rung or list(RUNGS)
    if unknown := [name for name in names if name not in RUNGS]:
        parser.error(f"there is no rung {unknown[0]!r}; the rungs are {', '.join(RUNGS)}")
    if min(arguments.seeds, arguments.processes, arguments.first_seed + 1, arguments.rounds or 1) < 1:
        parser.error("--seeds, --processes and --rounds are at least 1, and --first-seed is at least 0")
    result = {}
    try:
        layers = [parse_setting(setting) for setting in arguments.set]
        for name in names:
            result[name] = measured(name, arguments, layers)
            if arguments.json:
                whole = result[name] if len(names) == 1 else {"rungs": result}
                arguments.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    except InputError as error:
        fail(error, 2)


def measured(name: str, arguments: argparse.Namespace, layers: list[Mapping[str, object]]) -> dict[str, object]:
    """Train a rung with every seed, and print a table of its scores."""
    rung = RUNGS[name]
    several = dict(rung.process.settings["ppo"]).get("decisions_per_step", 1) > 1
    rounds = arguments.rounds or (60 if several else 40)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    jobs = [(name, seed, rounds, layers) for seed in seeds]
    with get_context("spawn").Pool(min(arguments.processes, len(jobs))) as pool:
        climbed = pool.map(climb, jobs, chunksize=1)
    marks = sorted({*(mark for mark in MARKS if mark < rounds), rounds})
    print(f"\n{name}: {rung.meaning}\n\n| seed | " + " | ".join(f"{64 * mark:,} episodes" for mark in marks), end="")
    print(" | earned at first | seconds |\n|---|" + "---|" * (len(marks) + 2))
    for seed, each in zip(seeds, climbed, strict=True):
        cells = " | ".join(f"{each.curve[mark]:.2f}" for mark in marks)
        print(f"| {seed} | {cells} | {each.met:.1%} | {each.seconds:.0f} |")
    if len(climbed) > 1:
        intervals = (t_interval([each.curve[mark] for each in climbed]) for mark in marks)
        print("| mean | " + " | ".join(f"{interval:.2f}" for interval in intervals) + " | | |", flush=True)
    return {
        "rung": name,
        "rounds": rounds,
        "seeds": list(seeds),
        "scores": [each.score for each in climbed],
        "curves": [each.curve for each in climbed],
        "earned_at_first": [each.met for each in climbed],
        "seconds": [each.seconds for each in climbed],
        "diagnostics": [each.rows for each in climbed],
    }


if __name__ == "__main__":
    main()
