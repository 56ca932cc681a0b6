"""What PPO alone, without a teacher, reaches on `repair` in an hour, by episodes and by seconds.

    python bench/scripts/study_repair_ppo.py OUT --seeds 1 --rounds 400 --page FILE

Hosts of `repair` are damaged before they are trained, and seeds grow while they train. A training draws new instances in every
round and validates on 96 instances every ten rounds; the best of these controllers is evaluated on fresh instances beside the
rule `heuristic`. Trainings that are in OUT are not made again.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from study_heal_ppo import curve_table, opponents_table, train

import esper
from esper.tasks.repair import repair
from esper_bench.records import run_script

SETTINGS: dict[str, Any] = {
    "envs": 64,
    "reward": {"group_size": 4},
    "telemetry": {"level": "off"},
    "ppo": {
        "gae_lambda": 0.9,
        "update_epochs": 8,
        "lr": 0.003,
        "imitation_rounds": 0,
        "decisions_per_step": 2,
        "validate_envs": 96,
    },
}
"""Chosen on `heal`, but for lambda and for two decisions a step, as `repair` holds two seeds; none was tried on `repair`."""
FIRST = 8192
"""First held-out instance of the evaluation, of a range that no other study uses."""
OPPONENTS = ("heuristic", "never")


def main() -> None:
    """Train, evaluate and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the trainings and of the evaluation")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="trainings (1)")
    parser.add_argument("--rounds", type=int, default=400, metavar="R", help="rounds of 64 episodes of each (400)")
    parser.add_argument("--instances", type=int, default=200, metavar="I", help="fresh instances (200)")
    parser.add_argument(
        "--quick", action="store_true", help="one training of two rounds and 2 instances, to see that all runs"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the tables to a Markdown file")
    arguments = parser.parse_args()
    settings = SETTINGS
    if arguments.quick:
        arguments.seeds, arguments.rounds, arguments.instances = 1, 2, 2
        settings = {**SETTINGS, "envs": 8, "ppo": {**SETTINGS["ppo"], "validate_envs": 4}}
    torch.set_num_threads(1)
    folders = [arguments.out / f"ppo-s{seed}" for seed in range(arguments.seeds)]
    curves = np.array([train(path, repair(), seed, arguments.rounds, settings) for seed, path in enumerate(folders)])
    record = esper.evaluate(
        [f"ppo={','.join(map(str, folders))}"],
        "repair",
        instances=arguments.instances,
        seeds=1,
        first=FIRST,
        baselines=(),
        out=arguments.out / "evaluation",
        overwrite=True,
        progress=False,
    )
    lines = [*curve_table(curves), "", *opponents_table(record["tasks"][0], int(curves[0, -1, 0]), OPPONENTS)]
    print("\n".join(lines))
    if arguments.page:
        arguments.page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
