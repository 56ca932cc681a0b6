"""What PPO alone, without a teacher, reaches on trained hosts with damage, by episodes and by seconds.

    python bench/scripts/study_heal_ppo.py OUT --seeds 5 --rounds 60 --page FILE

A training draws new instances of `heal` in every round, of all kinds of damage, on the first 128 training hosts. Its settings are
those of `esper train` but for the ones of SETTINGS. It validates on 96 validation instances every ten rounds, and the best of
these controllers is evaluated on fresh instances beside the trees and the rules. Trainings that are in OUT are not made again.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_learners import SHORT

import esper
from esper.leyline.data.task import Mixture
from esper.leyline.intervals import t_interval
from esper.leyline.text import counted
from esper.runs.configuration import training_configs
from esper.runs.folder.interrupt import Interrupt
from esper.runs.train import Trainer, cohorts_of, settings_of_policy
from esper.tamiyo.catalog import FOLDER
from esper.tamiyo.policy.controller import Language, Policy, save_policy
from esper_bench.healing import heal
from esper_bench.healing.data import FINAL
from esper_bench.healing.hosts import VECTORS
from esper_bench.records import load_record, run_script, save_record

LEARNER: dict[str, Any] = {
    "envs": 64,
    "probe": {"sensors_every": 1000, "coalitions_every": 1000},
    "reward": {"group_size": 4},
    "telemetry": {"level": "off"},
    "ppo": {
        "gae_lambda": 0.8,
        "update_epochs": 8,
        "lr": 0.003,
        "imitation_rounds": 0,
        "decisions_per_step": 6,
        "validate_envs": 96,
    },
}
"""Up to six decisions a step, as the trees plant at several places at once. lambda counts decisions, not steps."""
SETTINGS: dict[str, Any] = {**SHORT, **LEARNER}
HOSTS = 128
"""Training hosts that the instances have; more of them take longer to train than the policy."""
FRESH = FINAL[16_384:]
"""Keys of the evaluation, with hosts and problems of their own, of which no other study uses any."""
OPPONENTS = ("tree", "collapse", "uniform", "heuristic", "never")
COST = {"tree": "7,200"}
"""Episodes that fitting a controller took."""
EVERY = 10
"""Rounds between validations."""


def few_hosts() -> Mixture:
    """Return `heal` with those of its training instances whose host is one of the first `HOSTS`."""
    whole, part, hosts = heal.heal(), heal.RANGES["training"], VECTORS.count

    def key(number: int) -> int:
        return number if number not in part else part.start + number // HOSTS * hosts + number % HOSTS

    return replace(
        whole,
        sample=lambda number: whole.sample(key(number)),
        test=lambda number: whole.test(key(number)),
        ranges={**whole.ranges, "training": range(len(part) // hosts * HOSTS)},
    )


def train(
    folder: Path, task: Mixture, seed: int, rounds: int, settings: Mapping[str, Any] = SETTINGS
) -> list[list[float]]:
    """Train with one seed, and return a row for each validation: episodes, seconds of one core, J."""
    curve = folder / "curve.json"
    if curve.is_file():
        kept: list[list[float]] = load_record(curve)["validations"]
        return kept
    (config,) = training_configs([task], "quick", settings, {"seed": seed, "ppo": {"rounds": rounds}})
    cohorts = cohorts_of(task.sealed(), config)
    ppo, own = config.ppo, settings_of_policy(config)
    language = Language.of([cohorts[0].engine.space])
    trainer = Trainer(cohorts, Policy.fresh(language, seed, own, ppo.decisions_per_step, ppo.undo_bias), config)
    folder.mkdir(parents=True, exist_ok=True)
    begin, rows = time.process_time(), []
    with Interrupt() as interrupt:
        for number in range(-ppo.imitation_rounds, rounds):
            figures = (trainer.imitate if number < 0 else trainer.learn)(number, interrupt)
            if (number + 1) % EVERY == 0 or number + 1 == rounds:
                seconds = time.process_time() - begin
                if trainer.validate(number, figures):
                    save_policy(trainer.best_policy(), folder / FOLDER)
                episodes = (ppo.imitation_rounds + number + 1) * config.envs
                rows.append([float(episodes), seconds, figures["validation_objective"]])
                print(f"seed {seed}, round {number + 1}: J {rows[-1][2]:.3f} after {seconds:,.0f} s", flush=True)
    save_record(curve, {"validations": rows})
    return rows


def read_arguments(about: str | None, seeds: int, rounds: int, instances: int) -> argparse.Namespace:
    """Return the arguments of a study of PPO alone, with these defaults; with --quick there is little of everything."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the trainings and of the evaluation")
    for name, default, what in (
        ("--seeds", seeds, "trainings"),
        ("--rounds", rounds, "rounds of 64 episodes of each"),
        ("--instances", instances, "fresh instances"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{what} ({default})")
    parser.add_argument(
        "--quick", action="store_true", help="one training of two rounds and 4 instances, to see that all runs"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the tables to a Markdown file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.rounds, arguments.instances = 1, 2, 4
    return arguments


def main() -> None:
    """Train, evaluate and print the tables."""
    arguments = read_arguments(__doc__, 5, 60, 96)
    torch.set_num_threads(1)
    task = few_hosts()
    folders = [arguments.out / f"ppo-s{seed}" for seed in range(arguments.seeds)]
    curves = np.array([train(folder, task, seed, arguments.rounds) for seed, folder in enumerate(folders)])
    record = esper.evaluate(
        [f"ppo={','.join(map(str, folders))}", *OPPONENTS[:3]],
        replace(heal.heal(), ranges={**heal.RANGES, "heldout": FRESH}),
        instances=arguments.instances,
        seeds=1,
        settings=SHORT,
        baselines=(),
        out=arguments.out / "evaluation",
        overwrite=True,
        progress=False,
    )
    lines = [*curve_table(curves), "", *opponents_table(record["tasks"][0], int(curves[0, -1, 0]))]
    print("\n".join(lines))
    if arguments.page:
        arguments.page.write_text("\n".join([*head(arguments), *lines]) + "\n", encoding="utf-8")


def curve_table(curves: np.ndarray) -> list[str]:
    """The validation J of N trainings (N, V, 3) by episodes and seconds."""
    lines = [
        "| episodes | seconds of one core, median | J on validation, mean [95 %] | lowest | highest |",
        "|---|---|---|---|---|",
    ]
    for at in range(curves.shape[1]):
        worth = curves[:, at, 2]
        shown = f"{t_interval(worth.tolist()):.3f}" if len(worth) > 1 else f"{worth[0]:.3f}"
        seconds = np.median(curves[:, at, 1])
        lines.append(f"| {curves[0, at, 0]:,.0f} | {seconds:,.0f} | {shown} | {worth.min():.3f} | {worth.max():.3f} |")
    return lines


def opponents_table(found: dict[str, Any], episodes: int, opponents: Sequence[str] = OPPONENTS) -> list[str]:
    """J on fresh instances, and the difference of PPO to each opponent, paired by instance, of the mean over trainings."""
    worth = {name: np.array(runs["objective"]) for name, runs in found["runs"].items()}
    trainings = [values for name, values in worth.items() if name.startswith("ppo: ")]
    mine = np.mean(trainings, axis=0).mean(-1)
    many = len(mine)
    lines = [
        f"| controller | episodes to learn | J on {many} fresh instances | PPO above it, points [95 %] |",
        "|---|---|---|---|",
    ]
    lines.append(f"| PPO alone, {counted(len(trainings), 'training')} | {episodes:,} | {mine.mean():.3f} | |")
    for name in opponents:
        theirs = worth[name].mean(-1)
        gain = t_interval((100 * (mine - theirs)).tolist())
        lines.append(f"| {name} | {COST.get(name, 0)} | {theirs.mean():.3f} | {gain:+.1f} |")
    return lines


def head(arguments: argparse.Namespace) -> list[str]:
    """The lines above the tables."""
    return [
        "# PPO alone on trained hosts",
        "",
        f"    python bench/scripts/study_heal_ppo.py OUT --seeds {arguments.seeds} --rounds {arguments.rounds}",
        "",
        "Two shared cores of a virtual machine with an Intel Xeon processor, torch 2.13.0+cpu, one thread. PPO learns",
        "without a teacher from instances of `heal` that are new in every round, on the first 128 training hosts, with up to six",
        "decisions a step; everything else is said by the script. Seconds are those of the processor.",
        "Intervals of the second table are over instances, of the mean of all trainings.",
        "",
    ]


if __name__ == "__main__":
    run_script(main)
