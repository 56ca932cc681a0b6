"""Test `--set` of a run that goes on: what may be changed, what is recorded of it, and where it comes to."""

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from crashes import Leaving, Left, at_every_call
from esper.leyline.messages import InputError
from esper.nissa.events import decode
from esper.nissa.rows import RunRow
from esper.runs.configuration import training_configs
from esper.runs.folder.resume import (
    FIXED,
    Opening,
    change_config,
    changed,
    cohort_configs,
    finished,
    read_config,
)
from esper.runs.grow import grow
from esper.runs.train import train
from esper.store.changes import read_trail
from esper.store.checkpoint import Checkpoints
from esper.store.tensors import flatten
from esper.tamiyo.catalog import get_controller
from populations import blobs, small_config

EVERY = {"every_steps": 1, "every_seconds": 0, "keep": 2}


def config_of(steps=8, **over):
    return small_config({"steps": steps, "models": "none", "checkpoint": EVERY, "controller": "random-valid"}, over)


def run(folder, config, after=None, **how):
    return grow(blobs(), config, get_controller(config.controller, config), folder, after and Leaving(after), **how)


def set_(folder, *settings, after=None):
    """Continue a run as `esper resume --set` does."""
    before = read_config(folder)
    config = changed(before, settings)
    return run(folder, config, after, opening=Opening(resume=True, before=before, settings=settings))


def content(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def rows(folder):
    found = [decode(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]
    assert [row.seq for row in found] == list(range(len(found)))
    return found


def run_rows(folder):
    return [(row.status, list(row.changed)) for row in rows(folder) if isinstance(row, RunRow)]


def tensors(folder):
    found = Checkpoints(folder, config_of().checkpoint).read(lambda text: None)
    return {name: tensor.numpy().tobytes() for name, tensor in flatten(found.state)[0].items()}


@pytest.fixture
def left(tmp_path):
    """Make a run that was killed after its fifth step, behind four checkpoints."""
    with pytest.raises(Left):
        run(tmp_path / "run", config_of(), 5)
    return tmp_path / "run"


def test_a_run_folder_with_a_key_of_another_version_is_refused_with_the_nearest_one(left):
    path = left / "config.yaml"
    path.write_text(path.read_text().replace("gae_lambda:", "lam:"))
    with pytest.raises(
        InputError,
        match=r"config\.yaml: unknown config key 'ppo\.lam'; did you mean 'ppo\.gae_lambda'\?; .*or start a new run$",
    ):
        read_config(left)


def test_a_change_is_recorded_in_the_config_its_changes_and_the_events(left):
    set_(left, "optimizer.lr=0.001", "models=best")
    config = read_config(left)
    assert (config.optimizer.lr, config.models) == (0.001, "best")
    (entry,) = read_trail(left).entries
    assert (entry.steps, entry.settings) == (4, ("optimizer.lr=0.001", "models=best"))
    assert run_rows(left) == [
        ("running", []),
        ("running", ["optimizer.lr=0.001", "models=best"]),
        ("finished", []),
    ]


def test_a_change_that_changes_nothing_of_what_is_computed_comes_to_the_same(left, tmp_path):
    run(tmp_path / "straight", config_of())
    set_(left, "checkpoint.keep=1")
    assert tensors(left) == tensors(tmp_path / "straight")


def test_a_changed_run_goes_on_without_set_and_tells_of_the_change_once(left):
    with pytest.raises(Left):
        set_(left, "optimizer.lr=0.001", after=1)  # killed before a checkpoint holds the row of the change
    with pytest.raises(Left):
        run(left, read_config(left), 2, opening=Opening(resume=True))
    run(left, read_config(left), opening=Opening(resume=True))
    assert run_rows(left) == [("running", []), ("running", ["optimizer.lr=0.001"]), ("finished", [])]


def test_a_run_that_begins_again_from_a_changed_config_tells_so_in_its_first_row(left):
    shutil.rmtree(left / "checkpoints")
    set_(left, "optimizer.lr=0.001")
    assert run_rows(left) == [("running", ["optimizer.lr=0.001"]), ("finished", [])]


def test_a_changed_config_is_still_guarded_against_an_editor(left):
    with pytest.raises(Left):
        set_(left, "optimizer.lr=0.001", after=2)
    path = left / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.001", "lr: 0.002"))
    with pytest.raises(InputError, match=r"config\.yaml was changed since"):
        run(left, read_config(left), opening=Opening(resume=True))


def test_a_finished_run_is_lengthened_to_the_state_of_a_longer_one(tmp_path):
    """Check with the rule `never`, which does not wait for the end: nothing that it does depends on where that is."""
    never = {"controller": "never"}
    run(tmp_path / "run", config_of(5, **never))
    summary = set_(tmp_path / "run", "steps=8")
    assert (summary["status"], summary["steps_done"]) == ("finished", 8)
    straight = run(tmp_path / "straight", config_of(8, **never))
    assert tensors(tmp_path / "run") == tensors(tmp_path / "straight")
    assert summary["test_accuracy"] == straight["test_accuracy"]
    assert run_rows(tmp_path / "run") == [("running", []), ("running", ["steps=8"]), ("finished", [])]


def test_of_a_finished_run_networks_may_still_be_asked_for(tmp_path):
    run(tmp_path / "run", config_of())
    summary = set_(tmp_path / "run", "models=all")
    assert summary["exported"] == [0, 1, 2]
    assert (tmp_path / "run" / "models" / "env-002" / "topology.json").is_file()


@pytest.mark.parametrize("controller", ["heuristic", "random-valid", "never"])
def test_a_run_may_be_lengthened_under_any_rule(tmp_path, controller):
    run(tmp_path / "run", config_of(5, controller=controller))
    assert set_(tmp_path / "run", "steps=7")["steps_done"] == 7


VALUES = {
    "early_stopping.enabled": "true",
    "governor.enabled": "false",
    "governor.loss_window": "8",
    "task": "iris",
    "tasks": "[iris]",
    "cohorts": "{iris: {}}",
    "controller": "never",
    "envs": 5,
    "shards": 2,
    "seed": 9,
    "twin": "false",
    "slots": "[block0]",
    "blueprints": "[affine]",
    "instances": "validation",
    "first_instance": 2,
    "lifecycle.tempos": "[0, 3]",
    "lifecycle.targets": "[1.0]",
    "reward.group_size": 2,
    "ppo.packages": "[bypass-rank-1]",
    "ppo.undo_bias": -2,
    "ppo.advantage_floor": 0.1,
    "widen": "{at: [1]}",
}


@pytest.mark.parametrize("key", FIXED)
def test_what_makes_a_run_another_one_is_refused(key):
    config = config_of(twin=True)
    with pytest.raises(InputError, match=f"changing {key} would make this another run") as refused:
        changed(config, [f"{key}={VALUES[key]}"])
    assert "\n" not in str(refused.value)


def test_what_is_named_but_stays_as_it_is_is_no_change():
    config = config_of()
    assert changed(config, [f"envs={config.envs}", f"optimizer.lr={config.optimizer.lr}"]) == config


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("optimizer.name=sgd", "does not fit"),
        ("steps=3", "the run has taken 4; give 4 or more"),
    ],
)
def test_what_does_not_fit_the_state_is_refused_and_nothing_is_changed(left, setting, sentence):
    before = content(left)
    with pytest.raises(InputError, match=sentence):
        set_(left, setting)
    assert content(left) == before


def test_a_finished_run_without_a_checkpoint_is_not_begun_again(tmp_path):
    run(tmp_path / "run", config_of())
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = content(tmp_path / "run")
    with pytest.raises(InputError, match="no checkpoint from which it could go on"):
        set_(tmp_path / "run", "steps=9")
    assert content(tmp_path / "run") == before


def test_a_crash_between_any_two_system_calls_leaves_the_run_with_one_config_or_the_other(tmp_path, monkeypatch):
    folder, start = tmp_path / "run", tmp_path / "start"
    run(start, config_of(5))
    before = read_config(start)
    config, found = changed(before, ["steps=7"]), []
    identity = read_trail(start).run

    def prepare():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)

    for _ in at_every_call(monkeypatch, prepare, lambda: change_config(folder, config, ("steps=7",), 5)):
        found.append(read_config(folder).steps)
        assert read_trail(folder).run == identity
        assert Checkpoints(folder, config.checkpoint).read(found.append).number == 5
        assert found[-1] == 5 or finished(folder) is None
    assert found == sorted(found)
    assert set(found) == {5, 7}


# Trainings.

SHORT = {
    "envs": 4,
    "steps": 4,
    "data": {"batch_size": 12, "batches_per_step": 1},
    "reward": {"group_size": 2},
    "checkpoint": EVERY,
    "ppo": {"rounds": 2, "imitation_rounds": 0, "update_epochs": 1, "validate_envs": 2, "validate_every": 1},
}


def lengthened(tasks, folder, *settings):
    # the objective may be another one than that under which Ctrl-C was pressed
    before = read_config(folder)
    config = changed(before, settings)
    opening = Opening(resume=True, before=before, settings=settings, other_data=True)
    return train(tasks, cohort_configs(config), folder, opening=opening)


@pytest.fixture(scope="module")
def finished_training(tmp_path_factory):
    tasks, folder = [blobs(), replace(blobs(), name="others")], tmp_path_factory.mktemp("trained") / "run"
    train(tasks, training_configs(tasks, "quick", SHORT), folder)
    return tasks, folder


@pytest.fixture
def trained(finished_training, tmp_path):
    shutil.copytree(finished_training[1], tmp_path / "run")
    return finished_training[0], tmp_path / "run"


def test_a_finished_training_goes_on_for_more_rounds_and_every_cohort_hears_of_it(trained):
    tasks, folder = trained
    summary = lengthened(tasks, folder, "ppo.rounds=3", "optimizer.lr=0.002")
    assert (summary["status"], summary["rounds_done"]) == ("finished", 3)
    assert [config.optimizer.lr for config in cohort_configs(read_config(folder))] == [0.002, 0.002]
    assert [config.ppo.rounds for config in cohort_configs(read_config(folder))] == [3, 3]
    assert run_rows(folder) == [
        ("running", []),
        ("running", ["ppo.rounds=3", "optimizer.lr=0.002"]),
        ("finished", []),
    ]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("ppo.rounds=1", "the training has done 2 rounds"),
        ("steps=5", "changing steps would make this another run"),
    ],
)
def test_what_does_not_fit_a_training_is_refused_and_nothing_is_changed(trained, setting, sentence):
    tasks, folder = trained
    before = content(folder)
    with pytest.raises(InputError, match=sentence):
        lengthened(tasks, folder, setting)
    assert content(folder) == before


class Asking:
    """Sends Ctrl-C as a loss of the number `at` is computed."""

    def __init__(self, objective, at):
        self.metric, self.outputs, self.score = objective.metric, objective.outputs, objective.score
        self._objective, self._left = objective, at

    def loss(self, output, target):
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGINT)
        return self._objective.loss(output, target)


def interrupted_in_a_round(folder, at=46):
    """End a training by Ctrl-C inside a round of learning, with shares of exploration that are all above 0."""
    task = blobs()
    explores = {"rounds": 4, "exploration": 0.4, "op_exploration": 0.2}
    configs = training_configs([task], "quick", SHORT, {"ppo": explores})
    summary = train([replace(task, objective=Asking(task.objective, at))], configs, folder)
    assert summary["status"] == "interrupted"
    trainer = Checkpoints(folder, configs[0].checkpoint).read(pytest.fail).state["trainer"]
    assert trainer["episode"] is not None, "the signal came between two rounds"
    assert 0 < len(trainer["cohorts"][0]["client"]["rollout"]["value"]) < SHORT["steps"]
    return summary


@pytest.mark.parametrize(
    "setting",
    [
        "ppo.exploration=0.1",
        *(
            pytest.param(setting, marks=pytest.mark.slow)
            for setting in ("ppo.rounds=9", "ppo.op_exploration=0", "ppo.entropy_weight=0.1")
        ),
    ],
)
def test_a_training_that_was_interrupted_inside_a_round_goes_on_under_another_schedule(tmp_path, setting):
    assert interrupted_in_a_round(tmp_path / "run")["rounds_done"] < 4
    summary = lengthened([blobs()], tmp_path / "run", setting)
    rounds = 9 if setting == "ppo.rounds=9" else 4
    assert (summary["status"], summary["rounds_done"]) == ("finished", rounds)


def test_a_training_may_be_left_with_fewer_rounds_of_imitation_than_are_behind_it(tmp_path):
    task = blobs()
    configs = training_configs([task], "quick", SHORT, {"ppo": {"imitation_rounds": 6}})
    train([replace(task, objective=Asking(task.objective, 9))], configs, tmp_path / "run")
    summary = lengthened([task], tmp_path / "run", "ppo.imitation_rounds=0")
    assert (summary["status"], summary["rounds_done"]) == ("finished", 2)
