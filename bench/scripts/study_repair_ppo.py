"""What PPO alone, without a teacher, reaches on `repair` in an hour, by episodes and by seconds.

    python bench/scripts/study_repair_ppo.py OUT --seeds 1 --rounds 400 --page FILE

Hosts of `repair` are damaged before they are trained, and seeds grow while they train. A training draws new instances in every
round and validates on 96 instances every ten rounds; the best of these controllers is evaluated on fresh instances beside the
rule `heuristic`. Trainings that are in OUT are not made again.
"""

from typing import Any

import numpy as np
import torch
from study_heal_ppo import curve_table, opponents_table, read_arguments, train

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
    arguments, settings = read_arguments(__doc__, 1, 400, 200), SETTINGS
    if arguments.quick:
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
