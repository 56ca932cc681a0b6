"""Measure what PPO reaches on trained hosts with damage, alone or after imitation of the trees, by episodes and by seconds.

    python bench/scripts/study_heal_ppo.py OUT --seeds 5 --rounds 60 --page FILE
    python bench/scripts/study_heal_ppo.py OUT --seeds 5 --taught 5 --rounds 60 --first 96

A training draws new instances of `heal` in every round, of all kinds of damage, on the first 128 training hosts. Its settings are
those of `esper train` but for the ones of SETTINGS, and of TAUGHT where it imitates the trees first. It validates on 96
validation instances after imitation and every ten rounds, and the best of these controllers is evaluated on fresh instances
beside the trees and the rules. Trainings that are in OUT are not made again.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import esper
from esper.leyline.data.task import Mixture
from esper.leyline.intervals import t_interval
from esper.leyline.messages import counted
from esper.runs.configuration import training_configs
from esper.runs.folder.interrupt import Interrupt
from esper.runs.train import Trainer, cohorts_of, settings_of_policy
from esper.tamiyo.catalog import FOLDER
from esper.tamiyo.policy.controller import Language, Policy, save_policy
from esper_bench.healing import heal
from esper_bench.healing.data import FINAL
from esper_bench.healing.hosts import VECTORS
from esper_bench.records import load_record, run_script, save_record

SHORT: Mapping[str, Any] = {"steps": 10, "data": {"batches_per_step": 8}}
"""Episodes with as many updates as those of the task, in a quarter of the steps."""
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
TAUGHT: dict[str, Any] = {**SETTINGS, "ppo": {**SETTINGS["ppo"], "imitation_rounds": 3, "imitation_passes": 24}}
"""Three rounds imitate `tree` first, by DAgger, with 24 passes in the last of them over all that was seen."""
ARMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ppo": ("PPO alone", SETTINGS),
    "taught": ("imitation, then PPO", TAUGHT),
}
"""What a kind of training is called, and its settings."""
TEACHER = {"taught": " + the teacher's"}
"""What the episodes of a kind of training leave out."""
HOSTS = 128
"""Training hosts that the instances have; more of them take longer to train than the policy."""
FRESH = FINAL[16_384:]
"""Keys of the evaluation, with hosts and problems of their own, of which no other study uses any."""
OPPONENTS = ("tree", "collapse", "uniform", "heuristic", "never")
COST = {"tree": 7_200, "best-fixed-plan": 1_052}
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


def read_arguments(
    about: str | None, seeds: int, rounds: int, instances: int, more: Sequence[tuple[str, int | bool, str]] = ()
) -> argparse.Namespace:
    """Return the arguments of a study of PPO, with these defaults and `more` options; with --quick there is little of all."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the trainings and of the evaluation")
    for name, default, what in (
        ("--seeds", seeds, "trainings"),
        ("--rounds", rounds, "rounds of 64 episodes of each"),
        ("--instances", instances, "fresh instances"),
        *more,
    ):
        if default is False:
            parser.add_argument(name, action="store_true", help=what)
        else:
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
    more = (
        ("--taught", 0, "further trainings that imitate the trees first"),
        ("--first", 0, "the first fresh instance"),
    )
    arguments = read_arguments(__doc__, 5, 60, 96, more)
    torch.set_num_threads(1)
    if arguments.quick:
        arguments.taught = min(arguments.taught, 1)
    task, lines = few_hosts(), list[str]()
    folders = {
        arm: [arguments.out / f"{arm}-s{seed}" for seed in range(count)]
        for arm, count in (("ppo", arguments.seeds), ("taught", arguments.taught))
        if count
    }
    episodes = {}
    for arm, trainings in folders.items():
        label, settings = ARMS[arm]
        each = [train(folder, task, seed, arguments.rounds, settings) for seed, folder in enumerate(trainings)]
        lines += [f"{label}, {counted(len(trainings), 'training')}:", "", *curve_table(np.array(each)), ""]
        episodes[arm] = int(each[0][-1][0])
    record = esper.evaluate(
        [*(f"{arm}={','.join(map(str, trainings))}" for arm, trainings in folders.items()), *OPPONENTS[:3]],
        replace(heal.heal(), ranges={**heal.RANGES, "heldout": FRESH}),
        instances=arguments.instances,
        first=arguments.first,
        seeds=1,
        settings=SHORT,
        baselines=(),
        out=arguments.out / "evaluation",
        overwrite=True,
        progress=False,
    )
    lines += opponents_table(record["tasks"][0], episodes)
    print("\n".join(lines))
    if arguments.page:
        arguments.page.write_text("\n".join([*head(arguments), *lines]) + "\n", encoding="utf-8")


def curve_table(curves: np.ndarray) -> list[str]:
    """Return a table of the validation J of N trainings (N, V, 3) by episodes and seconds."""
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


def opponents_table(
    found: dict[str, Any], episodes: Mapping[str, int], opponents: Sequence[str] = OPPONENTS
) -> list[str]:
    """Return J on fresh instances, and what the mean of the trainings of each kind has above each, paired by instance.

    Args:
        found: the task of a record of `esper.evaluate`, whose learned controllers have the names of `ARMS`
        episodes: episodes that a training had, by kind of training
        opponents: further controllers of the record
    """
    worth = {name: np.array(runs["objective"]).mean(-1) for name, runs in found["runs"].items()}
    learned = {arm: [values for name, values in worth.items() if name.startswith(f"{arm}: ")] for arm in episodes}
    mine = {ARMS[arm][0]: np.mean(values, axis=0) for arm, values in learned.items()}
    lines = [
        f"| controller | episodes to learn | J on {len(next(iter(mine.values())))} fresh instances "
        f"|{''.join(f' {label} above it, points [95 %] |' for label in mine)}",
        f"|---|---|---|{'---|' * len(mine)}",
    ]
    rows = [
        (
            f"{ARMS[arm][0]}, {counted(len(values), 'training')}",
            f"{episodes[arm]:,}{TEACHER.get(arm, '')}",
            mine[ARMS[arm][0]],
        )
        for arm, values in learned.items()
    ]
    rows += [(stem := Path(name).stem, f"{COST.get(stem, 0):,}", worth[name]) for name in opponents]
    for name, cost, theirs in rows:
        gains = [
            t_interval((100 * (values - theirs)).tolist()) if values is not theirs else None for values in mine.values()
        ]
        shown = "".join(f" {gain:+.1f} |" if gain else " |" for gain in gains)
        lines.append(f"| {name} | {cost} | {theirs.mean():.3f} |{shown}")
    for arm, values in learned.items():
        if len(values) > 1:
            lines += ["", f"{ARMS[arm][0]}, J of each training: {', '.join(f'{each.mean():.3f}' for each in values)}."]
    return lines


def head(arguments: argparse.Namespace) -> list[str]:
    """Return the lines above the tables."""
    command = f"python bench/scripts/study_heal_ppo.py OUT --seeds {arguments.seeds} --taught {arguments.taught}"
    return [
        "# PPO on trained hosts",
        "",
        f"    {command} --rounds {arguments.rounds} --first {arguments.first}",
        "",
        "Two shared cores of a virtual machine with an Intel Xeon processor, torch 2.13.0+cpu, one thread. PPO learns",
        "from instances of `heal` that are new in every round, on the first 128 training hosts, with up to six",
        "decisions a step; everything else is said by the script. Seconds are those of the processor.",
        "Intervals of the last table are over instances, of the mean of all trainings.",
        "",
    ]


if __name__ == "__main__":
    run_script(main)
