"""Test what a training keeps of its rounds."""

import json

import numpy as np
import pytest

from esper.leyline.config.tree import PPOConfig
from esper.runs.configuration import training_configs
from esper.runs.train import LAST, SHOWN, RoundHistory, train
from populations import blobs


def figures(number):
    known = {"kl": 0.1, "controller_share": 1 / (number + 2), "value_loss": 0.5, "clip_fraction": 0.1, "rewarded": 1.0}
    return {**dict.fromkeys(SHOWN, number / 3), **known, "epochs": 4.0, "episodes": 8.0}


def after(rounds):
    history = RoundHistory()
    for number in range(rounds):
        history.add(number, figures(number), PPOConfig())
    return history


def test_the_state_is_as_large_after_1000_rounds_as_after_20():
    sizes = [len(json.dumps(vars(after(rounds)))) for rounds in (20, 1000)]
    assert abs(sizes[1] - sizes[0]) < 100  # digits


def test_the_summary_is_of_the_last_rounds_of_learning_and_of_the_time_of_all():
    history = after(30)
    history.add(-1, {"controller_share": 0.5, "log_likelihood": 1.0}, PPOConfig())  # of imitation
    summary = history.summary()
    assert summary["last_rounds"]["kept"] == pytest.approx(np.mean([number / 3 for number in range(30 - LAST, 30)]))
    assert summary["controller_share"] == pytest.approx(np.mean([*(1 / (n + 2) for n in range(30)), 0.5]))
    assert RoundHistory().summary() == {
        "last_rounds": dict.fromkeys(SHOWN),
        "anomalies": {},
        "controller_share": None,
    }


def test_a_state_gives_the_same_summary():
    history = after(30)
    assert RoundHistory(**json.loads(json.dumps(vars(history)))).summary() == history.summary()


def test_checkpoints_of_a_training_do_not_grow_with_its_rounds(tmp_path):
    short = {"envs": 2, "steps": 1, "data": {"batch_size": 12, "batches_per_step": 1}, "reward": {"group_size": 2}}
    often = {"checkpoint": {"keep": 40}, "telemetry": {"level": "off"}}
    ppo = {"ppo": {"rounds": 15, "update_epochs": 1, "imitation_rounds": 0, "validate_envs": 1, "validate_every": 100}}
    train([blobs()], training_configs([blobs()], "quick", short, often, ppo), tmp_path)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("checkpoints/step-*/state.json"))]
    assert len(sizes) == 15
    assert sizes[-1] < 1.02 * sizes[LAST]
