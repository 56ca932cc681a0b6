"""Train policies over single decisions on the training cases of bench/scripts/study_learners.py, by imitation, PPO or both."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from collect_healing import VECTOR

from esper.leyline.data.task import Mixture
from esper.runs.configuration import training_configs
from esper.runs.folder.interrupt import Interrupt
from esper.runs.train import Trainer, cohorts_of, settings_of_policy
from esper.tamiyo.policy.controller import Language, Policy, load_policy, save_policy

TRAINING, VALIDATION, ENVS = 480, 32, 64
SHORT: Mapping[str, Any] = {"steps": 10, "data": {"batches_per_step": 8}}
"""Episodes with as many updates as those of the task, in a quarter of the steps."""
SETTINGS: Mapping[str, Any] = {
    **SHORT,
    "envs": ENVS,
    "probe": {"sensors_every": 1000, "coalitions_every": 1000},
    "reward": {"name": "sparse", "group_size": 4},
    "telemetry": {"level": "off"},
    "ppo": {"gae_lambda": 1.0, "validate_envs": VALIDATION, "lr": 0.003, "imitation_passes": 24},
}
IMITATION, ROUNDS, ALONE = 3, 3, 11
"""Rounds of imitation, of PPO after it, and of PPO alone."""
BIAS = -4.0
ARMS: Mapping[str, tuple[int, int, Mapping[str, Any]]] = {
    "both": (IMITATION, ROUNDS, {}),
    "ppo": (0, ALONE, {"undo_bias": 0.0}),
    "both-package": (IMITATION, ROUNDS, {"packages": ["bypass-rank-1"]}),
    "ppo-package": (0, ALONE, {"packages": ["bypass-rank-1"], "undo_bias": 0.0}),
    "ppo-bias": (0, ALONE, {"undo_bias": BIAS}),
    "ppo-package-bias": (0, ALONE, {"packages": ["bypass-rank-1"], "undo_bias": BIAS}),
}
"""Rounds of imitation, rounds of PPO, and further settings of `ppo`. An arm with imitation also keeps the policy after it."""


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


def trainer_of(task: Mixture, imitation: int, rounds: int, seed: int, more: Mapping[str, Any]) -> Trainer:
    lengths = {"ppo": {"imitation_rounds": imitation, "rounds": rounds, **more}, "seed": seed}
    (config,) = training_configs([task], "quick", SETTINGS, lengths)
    cohorts = cohorts_of(task.sealed(), config)
    language = Language.of([cohorts[0].engine.space], config.ppo.packages)
    policy = Policy.fresh(
        language, seed, settings_of_policy(config), config.ppo.decisions_per_step, config.ppo.undo_bias
    )
    return Trainer(cohorts, policy, config)


def train_learner(out: Path, task: Mixture, name: str, seed: int) -> None:
    """Train a policy, and keep it after imitation and at the end; of the two, the end keeps the better by validation."""
    if (out / f"{name}-s{seed}").is_dir():
        return
    imitation, rounds, more = ARMS[name]
    trainer, begin, figures = trainer_of(task, imitation, rounds, seed, more), time.process_time(), {}
    taught = out / f"{name.replace('both', 'imitation')}-s{seed}"
    with Interrupt() as interrupt:
        for number in range(-imitation, rounds):
            figures = (trainer.imitate if number < 0 else trainer.learn)(number, interrupt)
            better = number in (-1, rounds - 1) and trainer.validate(number, figures)
            kept = ("log_likelihood", "return", "decisions", "kept", "kl", "validation_objective")
            said = {key: round(figures[key], 3) for key in kept if key in figures}
            print(name, seed, number, f"{time.process_time() - begin:.0f} s", said, flush=True)
            if number == -1:
                save_policy(trainer.best_policy(), taught)
    if not better and imitation:
        trainer.policy.load_state(load_policy(taught).state())
    save_policy(trainer.best_policy(), out / f"{name}-s{seed}")


def train_all(out: Path, seeds: Sequence[int], arms: Sequence[str]) -> None:
    task = restricted()
    for seed in seeds:
        for name in arms:
            train_learner(out, task, name, seed)
