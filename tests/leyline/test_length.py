"""Test length in epochs and in steps: how they relate, and which of two that are given counts."""

import json

import pytest

import esper
from esper.cli import main
from esper.leyline.config.tree import build_config
from esper.leyline.data.task import with_steps
from esper.leyline.messages import InputError
from populations import blobs

DATA = {"data": {"batch_size": 12, "batches_per_step": 2}}  # 24 examples a step


@pytest.mark.parametrize(("epochs", "steps"), [(1, 4), (0.25, 1), (0.1, 1), (2.5, 10), (2.51, 11)])
def test_epochs_come_to_the_steps_that_show_as_many_examples(epochs, steps):
    task = blobs()
    assert len(task.train.y) == 96
    assert with_steps(build_config(DATA, {"epochs": epochs}), task).steps == steps


def test_a_later_layer_in_steps_goes_over_an_earlier_one_in_epochs_and_the_other_way_round():
    assert build_config({"epochs": 3}, {"steps": 5}).epochs is None
    assert with_steps(build_config(DATA, {"steps": 5}, {"epochs": 2}), blobs()).steps == 8


def test_both_lengths_are_refused_unless_they_agree():
    with pytest.raises(InputError, match="steps is 5 and epochs is 2, which is 8 steps of 24 examples; give one"):
        esper.grow(blobs(), DATA | {"epochs": 2, "steps": 5}, controller="never")
    assert with_steps(build_config(DATA, {"epochs": 2, "steps": 8}), blobs()).steps == 8


def test_epochs_of_a_mixture_are_refused():
    with pytest.raises(InputError, match="train splits of several sizes; give steps"):
        with_steps(build_config({"epochs": 2}), esper.get_task("repair"))


def test_a_run_in_epochs_goes_on_in_epochs_or_steps(tmp_path):
    task, settings = blobs(), DATA | {"envs": 1, "baselines": [], "models": "none", "report": False}
    settings |= {"early_stopping": {"enabled": False}}
    assert esper.grow(task, settings | {"epochs": 1}, controller="never", run=tmp_path / "r")["steps_done"] == 4
    assert esper.resume(tmp_path / "r", task=task)["steps_done"] == 4
    assert esper.resume(tmp_path / "r", task=task, settings={"epochs": 1.5})["steps_done"] == 6
    assert esper.resume(tmp_path / "r", task=task, settings={"steps": 7})["steps_done"] == 7


def test_the_command_takes_epochs_and_refuses_both(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    quick = ["grow", "iris", "--envs", "1", "--controller", "never", "--models", "none", "--json"]
    with pytest.raises(SystemExit) as left:
        main([*quick, "--epochs", "0.5", "--set", "data={batch_size: 15, batches_per_step: 1}"])
    assert (left.value.code or 0, json.loads(capsys.readouterr().out)["steps"]) == (0, 3)
    with pytest.raises(SystemExit) as left:
        main([*quick, "--epochs", "2", "--set", "steps=3"])
    assert left.value.code == 2
    assert "steps and epochs are both given; give one of the two" in capsys.readouterr().err
