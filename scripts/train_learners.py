"""Train policies over single decisions on the training cases of scripts/study_learners.py, by imitation, by PPO and by both."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from collect_healing import VECTOR

from esper.leyline.task import Mixture
from esper.runs.cohort import cohorts_of, settings_of_policy
from esper.runs.configuration import training_configs
from esper.runs.interrupt import Interrupt
from esper.runs.school import School
from esper.tamiyo.controller import Language, Policy, load_policy, save_policy

TRAINING, VALIDATION, ENVS = 480, 32, 64
SHORT: Mapping[str, Any] = {"steps": 10, "data": {"batches_per_step": 8}}
"""Episodes with as many updates as those of the task, in a quarter of the steps."""
SETTINGS: Mapping[str, Any] = {
    **SHORT,
    "envs": ENVS,
    "probe": {"sensors_every": 1000, "coalitions_every": 1000},
    "reward": {"name": "sparse", "group_size": 4},
    "telemetry": {"level": "off"},
    "ppo": {"gae_lambda": 1.0, "validate_envs": VALIDATION, "lr": 0.003},
}
IMITATION, ROUNDS, ALONE = 3, 3, 11
"""Rounds of imitation, of PPO after it, and of PPO alone."""
PASSES = 24
"""Passes over all that the teacher has shown, in the last round of imitation; the other rounds have `ppo.update_epochs`."""


def restricted() -> Mixture:
    """`heal` with the training cases of the trees, and as validation the cases that follow them."""
    whole = VECTOR.task()
    keys = [facts.key for facts in VECTOR.cases("training", TRAINING + VALIDATION)]
    return replace(
        whole,
        sample=lambda number: whole.sample(keys[number]),
        test=lambda number: whole.test(keys[number]),
        ranges={
            "training": range(TRAINING),
            "validation": range(TRAINING, len(keys)),
            "heldout": range(len(keys), len(keys) + 1),
        },
    )


def school_of(task: Mixture, imitation: int, rounds: int, seed: int) -> School:
    lengths = {"ppo": {"imitation_rounds": imitation, "rounds": rounds}, "seed": seed}
    (config,) = training_configs([task], "quick", SETTINGS, lengths)
    cohorts = cohorts_of(task.sealed(), config)
    language = Language.of([cohorts[0].engine.space])
    policy = Policy.fresh(language, seed, settings_of_policy(config), config.ppo.decisions_per_step)
    return School(cohorts, policy, config)


def schooled(out: Path, task: Mixture, imitation: int, rounds: int, seed: int) -> None:
    """Train a policy, and keep it after imitation and at the end; of the two, the end keeps the better by validation."""
    name = "both" if imitation else "ppo"
    if (out / f"{name}-s{seed}").is_dir():
        return
    school, begin, figures = school_of(task, imitation, rounds, seed), time.process_time(), {}
    few = school.learner.config
    with Interrupt() as interrupt:
        for number in range(-imitation, rounds):
            school.learner.config = few.model_copy(update={"update_epochs": PASSES}) if number == -1 else few
            figures = (school.imitate if number < 0 else school.learn)(number, interrupt)
            better = number in (-1, rounds - 1) and school.validate(number, figures)
            kept = ("log_likelihood", "return", "decisions", "kept", "kl", "validation_objective")
            said = {key: round(figures[key], 3) for key in kept if key in figures}
            print(name, seed, number, f"{time.process_time() - begin:.0f} s", said, flush=True)
            if number == -1:
                save_policy(school.best_policy(), out / f"imitation-s{seed}")
    if not better:
        school.policy.load_state(load_policy(out / f"imitation-s{seed}").state())
    save_policy(school.best_policy(), out / f"{name}-s{seed}")


def train_all(out: Path, seeds: Sequence[int]) -> None:
    task = restricted()
    for imitation, rounds in ((IMITATION, ROUNDS), (0, ALONE)):
        for seed in seeds:
            schooled(out, task, imitation, rounds, seed)
