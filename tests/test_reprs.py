"""Check that what objects show of themselves is short, on one line, and prints no tensor and no large array."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import esper
from esper.leyline.lifecycle.view import Scores
from esper.tamiyo.policy.actor import Learned
from esper.tamiyo.policy.controller import Language, Policy


class Watching(esper.Controller):
    """Waits, and keeps what it saw."""

    def act(self, view):
        self.view = view
        return esper.Actions.wait(2)

    def store(self, outcome):
        self.outcome = outcome


def host():
    return esper.SegmentedHost([nn.Linear(4, 8), nn.Linear(8, 2)], [esper.SlotSpec("m", after=0, width=8)])


@pytest.fixture(scope="module")
def objects():
    iris, client = esper.get_task("iris"), Watching()
    config = esper.build_config(iris.defaults, {"envs": 2, "steps": 1, "models": "none"})
    engine = esper.VectorizedEngine(iris, config)
    engine.run(client)
    policy = Policy.fresh(Language((), ("mlp-small",), (0, 1), (1.0,)), 0)
    named = ("heuristic", "never", "random-valid")
    return {
        "task": iris,
        "own task": esper.task("mine", torch.rand(60, 4), torch.arange(60) % 2, host=host, classes=2),
        "mixture": esper.get_task("repair"),
        "instance": iris.instance(0),
        "split": iris.train,
        "config": config,
        "engine": engine,
        "state": engine.state,
        "policy": policy,
        "learned": Learned(policy),
        "view": client.view,
        "outcome": client.outcome,
        **{name: getattr(client.view, name) for name in ("space", "seeds", "masks", "measurements")},
        **{name: esper.get_controller(name, config) for name in named},
    }


NAMES = (
    *("task", "own task", "mixture", "instance", "split", "config", "engine", "state", "policy", "learned", "view"),
    *("outcome", "space", "seeds", "masks", "measurements", "heuristic", "never", "random-valid"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_repr_is_one_short_line_without_tensors_and_arrays(objects, name):
    shown = repr(objects[name])
    assert shown.startswith(type(objects[name]).__name__)
    assert "\n" not in shown
    assert "tensor(" not in shown
    assert "array(" not in shown
    assert "0x" not in shown
    assert len(shown) < 1000


def test_arrays_are_shown_by_dtype_and_shape_and_a_few_numbers_as_they_are():
    assert repr(esper.Split(torch.zeros(90, 4), torch.zeros(90).long())) == "Split(x=float32 (90, 4), y=int64 (90,))"
    few = Scores(np.array([1 / 3, np.nan]), np.zeros(9), np.array([1, 2]))
    assert repr(few) == "Scores(metric=[0.3333, nan], loss=float64 (9,), added_params=[1, 2])"


def test_a_config_shows_what_differs_from_the_defaults():
    config = esper.build_config({"steps": 3, "optimizer.lr": 0.1, "data": {}})
    assert repr(config) == str(config) == "Config(steps=3, optimizer=OptimizerConfig(lr=0.1))"


def test_a_config_and_a_decision_need_no_torch():
    code = "import sys, esper\nprint(esper.build_config({}), esper.Op.WAIT)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
