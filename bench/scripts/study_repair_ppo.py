"""Measure what PPO alone, without a teacher, reaches on `repair` in an hour, by episodes and by seconds.

    python bench/scripts/study_repair_ppo.py OUT --seeds 1 --rounds 400 --page FILE
    python bench/scripts/study_repair_ppo.py OUT --seeds 5 --rounds 80 --full-menu
    python bench/scripts/study_repair_ppo.py OUT --seeds 3 --rounds 80 --full-menu --partial-menus

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
from esper_bench.tasks import repair_full

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
PARTIAL: dict[str, Any] = {**SETTINGS, "ppo": {**SETTINGS["ppo"], "partial_menus": 0.75}}
"""With a part of the menu, drawn anew in each episode, in three environments out of four."""
FIRST = 8192
"""First held-out instance of the evaluation, of a range that no other study uses."""
OPPONENTS = ("heuristic", "never")
BEST_PLAN = "[{at: 0, op: germinate, slot: block3, blueprint: skip-mlp, keep: true}]\n"
"""The best fixed plan with the full menu, found by 1,052 episodes on training instances (bench/docs/repair.md)."""


def main() -> None:
    """Train, evaluate and print the tables."""
    more = (
        ("--full-menu", False, "choose from the 13 blueprints of `repair-full`, and not from the 3 of `repair`"),
        ("--partial-menus", False, "three environments out of four have a part of the menu, drawn anew"),
    )
    arguments = read_arguments(__doc__, 1, 400, 200, more)
    settings = PARTIAL if arguments.partial_menus else SETTINGS
    task = repair_full() if arguments.full_menu else repair()
    if arguments.quick:
        settings = {**settings, "envs": 8, "ppo": {**settings["ppo"], "validate_envs": 4}}
    torch.set_num_threads(1)
    folders = [arguments.out / f"ppo-s{seed}" for seed in range(arguments.seeds)]
    curves = np.array([train(path, task, seed, arguments.rounds, settings) for seed, path in enumerate(folders)])
    plan = arguments.out / "best-fixed-plan.yaml"
    plan.write_text(BEST_PLAN, encoding="utf-8")
    plans = [str(plan)] if arguments.full_menu else []
    record = esper.evaluate(
        [f"ppo={','.join(map(str, folders))}", *plans],
        task,
        instances=arguments.instances,
        seeds=1,
        first=FIRST,
        baselines=(),
        out=arguments.out / "evaluation",
        overwrite=True,
        progress=False,
    )
    lines = [
        *curve_table(curves),
        "",
        *opponents_table(record["tasks"][0], {"ppo": int(curves[0, -1, 0])}, [*plans, *OPPONENTS]),
    ]
    print("\n".join(lines))
    if arguments.page:
        arguments.page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
