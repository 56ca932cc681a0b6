"""Runs that an error of the user's code ends, and runs in which nothing was trained."""

import json
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import esper
from esper.leyline.lifecycle.vocabulary import Actions
from esper.leyline.messages import OutOfMemory, RunWarning, UserCodeError
from esper.leyline.progress import Progress
from esper.nissa.events import decode
from esper.nissa.rows import RunRow
from esper.runs.configuration import training_configs
from esper.runs.folder.resume import Opening
from esper.runs.grow import grow
from esper.runs.train import train
from esper.simic.rewards import get_reward
from esper.store.checkpoint import Checkpoints
from esper.store.lock import Lock
from esper.tamiyo.rules.base import Never, RandomValid
from journals import events
from populations import Lost, blobs, small_config, streamed

ENVS, STEPS = 3, 6


class Broken(Exception):
    """Reports an error of the user's own."""


class Raising(Never):
    """Waits, and raises as it decides on a step, or as it is told of one."""

    def __init__(self, error=None, at=3, where="act"):
        self.error, self.at, self.where, self.decided = error, at, where, 0

    def act(self, view):
        if self.error is not None and (self.where, view.step) == ("act", self.at):
            raise self.error
        self.decided += 1
        return Actions.wait(len(view.host_params))

    def store(self, outcome):
        if self.error is not None and (self.where, outcome.step) == ("store", self.at):
            raise self.error

    def state(self):
        return {"decided": self.decided}

    def load_state(self, state):
        self.decided = state["decided"]


class Failing:
    """Replaces one function of a task's objective by one that goes wrong from its call number `at` on."""

    def __init__(self, objective, name, at, value=None, error=None):
        self.metric, self.outputs = objective.metric, objective.outputs
        self._objective, self._name, self._left, self._value = objective, name, at, value
        self._error = error or Broken(f"the {name} is broken")

    def _call(self, name, output, target):
        found = getattr(self._objective, name)(output, target)
        if name != self._name:
            return found
        self._left -= 1
        if self._left >= 0:
            return found
        if self._value is None:
            raise self._error
        return torch.full_like(found, self._value)

    def loss(self, output, target):
        return self._call("loss", output, target)

    def score(self, output, target):
        return self._call("score", output, target)


def config_of(**over):
    return small_config({"envs": ENVS, "steps": STEPS, "models": "none", "checkpoint": {"every_seconds": 0}}, over)


def last_row(folder):
    rows = [decode(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]
    assert isinstance(rows[-1], RunRow)
    return rows[-1]


def assert_failed(folder, kind, message):
    """Check what a run that failed leaves, and return its summary."""
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", {"type": kind, "message": message})
    assert (last_row(folder).status, last_row(folder).error) == ("failed", f"{kind}: {message}")
    assert not (folder / "lock").exists()
    lock = Lock(folder, pytest.fail)
    lock.take()
    lock.release()
    return summary


@pytest.mark.parametrize("error", [Broken("no"), MemoryError("mine"), RuntimeError("out of memory"), OSError("lost")])
@pytest.mark.parametrize("where", ["act", "store"])
def test_an_error_of_a_controller_ends_the_run_as_failed_and_comes_out_as_it_is(tmp_path, error, where):
    config = config_of()
    with pytest.raises(type(error)) as raised:
        grow(blobs(), config, Raising(error, where=where), tmp_path / "run")
    assert raised.value is error
    assert "in store" in "".join(traceback.format_exception(error)) or where == "act"
    assert f"esper resume {tmp_path / 'run'}" in error.__notes__[-1]
    assert_failed(tmp_path / "run", type(error).__name__, str(error))


def test_a_run_whose_controller_failed_goes_on_behind_its_last_whole_step(tmp_path):
    config = config_of()
    with pytest.raises(Broken):
        grow(blobs(), config, Raising(Broken("no"), at=3), tmp_path / "run")
    assert Checkpoints(tmp_path / "run", config.checkpoint).read(pytest.fail).number == 3
    resumed, whole = Raising(), Raising()
    summary = grow(blobs(), config, resumed, tmp_path / "run", opening=Opening(resume=True))
    straight = grow(blobs(), config, whole, tmp_path / "straight")
    assert (summary["status"], resumed.decided) == ("finished", whole.decided)
    assert summary["test_accuracy"] == straight["test_accuracy"]
    assert last_row(tmp_path / "run").error is None


@pytest.mark.parametrize(
    ("where", "every", "place"),
    [
        ("act", 2, "continues after step 3,"),
        ("store", 2, "continues after step 2,"),
        ("store", 0, "starts again with the first step,"),
    ],
)
def test_a_failure_says_after_which_step_the_resumed_run_goes_on(tmp_path, where, every, place):
    config, told = config_of(checkpoint={"every_steps": every}), []
    with pytest.raises(Broken) as raised:
        grow(blobs(), config, Raising(Broken("no"), where=where), tmp_path / "run")
    assert f"`esper resume {tmp_path / 'run'}` {place}" in raised.value.__notes__[-1]

    class Told(Progress):
        def note(self, text):
            told.append(text)

    grow(blobs(), config, Raising(), tmp_path / "run", Told(), opening=Opening(resume=True))
    went_on = next(text for text in told if text.startswith(("going on", "no complete checkpoint")))
    assert (
        went_on
        == {2: "going on after step " + place[-2], 0: "no complete checkpoint: starting again from config.yaml"}[every]
    )


@pytest.mark.parametrize(("name", "at"), [("loss", 12), ("score", 3)])
def test_an_error_of_a_loss_or_a_metric_ends_the_run_as_failed_and_it_can_be_resumed(tmp_path, name, at):
    config, task = config_of(), blobs()
    broken = replace(task, objective=Failing(task.objective, name, at))
    with pytest.raises(Broken, match=f"the {name} is broken"):
        grow(broken, config, Never(), tmp_path / "run")
    assert assert_failed(tmp_path / "run", "Broken", f"the {name} is broken")["steps_done"] < STEPS
    mended = grow(task, config, Never(), tmp_path / "run", opening=Opening(resume=True, other_data=True))
    assert mended["status"] == "finished"


def test_an_error_of_a_hosts_forward_ends_the_run_as_failed(tmp_path):
    task, left = blobs(), [60]

    def host():
        made, forward = task.host(), torch.nn.Module.forward

        def counted(module, arguments):
            left[0] -= 1
            if left[0] == 0:
                raise Broken("forward")

        assert forward is not None
        made.segments[0].register_forward_pre_hook(counted)
        return made

    with pytest.raises(Broken):
        grow(replace(task, host=host), config_of(mapping="loop"), Never(), tmp_path / "run")
    assert_failed(tmp_path / "run", "Broken", "forward")


def test_memory_that_runs_out_at_set_up_is_named_and_the_run_is_resumed_when_there_is_room(tmp_path):
    task, config = blobs(), config_of()
    starved = replace(task, host=lambda: torch.empty(2**60))
    with pytest.raises(
        OutOfMemory, match="memory ran out while the data and the networks were set up, with 3 networks"
    ) as e:
        grow(starved, config, Never(), tmp_path / "run")
    assert "lower envs, give fewer examples, or a Dataset with stream=True; esper resume" in str(e.value)
    assert_failed(tmp_path / "run", "OutOfMemory", str(e.value).partition("; esper resume")[0])
    assert grow(task, config, Never(), tmp_path / "run", opening=Opening(resume=True))["status"] == "finished"


def test_an_error_of_a_dataset_leaves_a_checkpoint_of_the_last_whole_step_and_the_message_names_it(tmp_path):
    data = Lost()
    task, config = streamed(data), config_of(task="mine", checkpoint={"every_steps": 0, "every_seconds": 0})
    straight = grow(task, config, RandomValid(), tmp_path / "straight")
    data.left = 500
    with pytest.raises(UserCodeError) as raised:
        grow(task, config, RandomValid(), tmp_path / "run")
    store = Checkpoints(tmp_path / "run", config.checkpoint)
    step = store.read(pytest.fail).number
    assert 0 < step < STEPS
    assert f"; esper resume {tmp_path / 'run'} continues after step {step}, that of the last checkpoint" in str(
        raised.value
    )
    assert "example " in str(raised.value)
    assert_failed(tmp_path / "run", "UserCodeError", str(raised.value).partition("; esper resume")[0])
    data.left = None
    resumed = grow(task, config, RandomValid(), tmp_path / "run", opening=Opening(resume=True))
    assert {name: resumed[name] for name in ("test_accuracy", "plantings", "grown")} == {
        name: straight[name] for name in ("test_accuracy", "plantings", "grown")
    }


def test_a_folder_that_is_renamed_in_mid_run_is_named_and_continued_under_its_new_name(tmp_path):
    class Renaming(RandomValid):
        def act(self, view):
            if view.step == 4 and not (tmp_path / "new").exists():
                (tmp_path / "run").rename(tmp_path / "new")
            return super().act(view)

    config = config_of(checkpoint={"every_steps": 2, "every_seconds": 0})
    with pytest.raises(OSError, match=r"the folder \S+/run was renamed or removed; .* its new name to `esper resume`"):
        grow(blobs(), config, Renaming(), tmp_path / "run")
    resumed = grow(blobs(), config, RandomValid(), tmp_path / "new", opening=Opening(resume=True))
    assert resumed["test_accuracy"] == grow(blobs(), config, RandomValid())["test_accuracy"]


def test_a_shortage_within_a_phase_is_one_sentence_with_its_cause(tmp_path):
    task = blobs()
    broken = replace(task, objective=Failing(task.objective, "loss", 12, error=MemoryError("Unable to allocate 1 GiB")))
    with pytest.raises(OutOfMemory, match=r"memory ran out in the phase .*: 1 GiB were asked for") as raised:
        grow(broken, config_of(), Never(), tmp_path / "run")
    assert isinstance(raised.value.__cause__, MemoryError)


@pytest.mark.parametrize("twin", [True, False])
def test_a_run_in_which_every_environment_was_rolled_back_in_every_step_has_failed(tmp_path, twin):
    summary = grow(blobs(), config_of(optimizer={"lr": 1e6}, twin=twin), Never(), tmp_path / "run")
    assert summary["status"] == "failed"
    assert summary["error"]["message"].startswith("every environment was rolled back in every step (")
    assert summary["error"]["message"].endswith("so nothing was trained: lower optimizer.lr, or check the loss")
    assert_failed(tmp_path / "run", "RolledBack", summary["error"]["message"])


def test_a_failed_run_is_warned_of_in_python_and_shown_with_its_error_and_no_other_explanation(capsys):
    config = {"envs": ENVS, "steps": STEPS, "optimizer": {"lr": 1e6}, "data": {"batch_size": 12}, "baselines": []}
    with pytest.warns(RunWarning, match="the run has failed: every environment was rolled back in every step"):
        summary = esper.grow(blobs(), config, controller="never", progress=False)
    assert summary["explanations"] == []
    esper.show(summary)
    out = capsys.readouterr().out
    assert f"error: {summary['error']['message']}" in out
    assert "nothing was planted" not in out


def test_a_failure_names_the_place_of_the_task_in_the_command_that_resumes_the_run(tmp_path):
    task = replace(blobs(), name="bad.py:badloss")
    with pytest.raises(Broken) as raised:
        grow(task, config_of(task="bad.py:badloss"), Raising(Broken("no")), tmp_path / "run")
    assert f"`esper resume {tmp_path / 'run'} --task bad.py:badloss` continues" in raised.value.__notes__[-1]


def test_a_metric_that_is_nan_is_found_in_every_row_and_named(tmp_path):
    task = blobs()
    nan = replace(task, objective=Failing(task.objective, "score", 0, float("nan")))
    summary = grow(nan, config_of(), Never(), tmp_path / "run")
    assert summary["rollbacks"] == {"metric": ENVS * STEPS}
    assert summary["error"]["message"].endswith("(18 for metric), so nothing was trained: check the metric of the task")


def test_a_metric_that_is_nan_in_one_step_is_rolled_back_there_and_the_run_is_finished(tmp_path):
    task = blobs()

    class Once(Failing):
        def _call(self, name, output, target):
            found = super()._call(name, output, target)
            self._value, self._left = (None, 10**9) if self._left < 0 else (self._value, self._left)
            return found

    summary = grow(replace(task, objective=Once(task.objective, "score", 3, float("nan"))), config_of(), Never())
    assert summary["status"] == "finished"
    assert summary["rollbacks"] == {"metric": ENVS}


# Trainings.

SHORT = {
    "envs": 4,
    "steps": 4,
    "data": {"batch_size": 12, "batches_per_step": 1},
    "reward": {"group_size": 2},
    "ppo": {"rounds": 2, "imitation_rounds": 0, "update_epochs": 1, "validate_envs": 2, "validate_every": 1},
}


class Payer:
    """Makes rewards that are broken from a step on."""

    __name__ = "payer"

    def __init__(self, left):
        self.left = left

    def __call__(self, config):
        real = get_reward(config)

        def reward(outcome):
            self.left -= 1
            if self.left < 0:
                raise Broken("the reward is broken")
            return real(outcome)

        return reward


def test_an_error_of_a_reward_ends_the_training_as_failed_and_it_can_be_resumed(tmp_path):
    tasks = [blobs()]
    configs = training_configs(tasks, "quick", SHORT, {"checkpoint": {"every_steps": 1, "every_seconds": 0}})
    with pytest.raises(Broken):
        train(tasks, configs, tmp_path / "run", reward=Payer(5))
    assert_failed(tmp_path / "run", "Broken", "the reward is broken")
    resumed = train(tasks, configs, tmp_path / "run", opening=Opening(resume=True), reward=Payer(10**9))
    assert (resumed["status"], resumed["rounds_done"]) == ("finished", 2)


def streamed_training(folder, left=None, **opening):
    """Train one round of imitation and two of learning, each with a validation; reading fails after so many examples."""
    data = Lost()
    data.left = left
    tasks, ppo = [streamed(data)], {**SHORT["ppo"], "imitation_rounds": 1}
    over = {"ppo": ppo, "data": {**SHORT["data"], "read_ahead": 0}, "checkpoint": {"every_seconds": 0}}
    return train(tasks, training_configs(tasks, "quick", SHORT, over), folder, opening=Opening(**opening))


@pytest.fixture(scope="module")
def streamed_straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streamed") / "run"
    streamed_training(folder)
    return folder


@pytest.mark.parametrize(
    ("left", "step"),
    [
        pytest.param(366, 1, id="imitating"),
        pytest.param(498, 3, id="validating imitation", marks=pytest.mark.slow),
        pytest.param(630, 6, id="learning"),
        pytest.param(696, 7, id="validating", marks=pytest.mark.slow),
        pytest.param(894, 11, id="validating at the end", marks=pytest.mark.slow),
    ],
)
def test_a_training_goes_on_behind_its_last_whole_step_where_reading_failed(streamed_straight, tmp_path, left, step):
    with pytest.raises(UserCodeError, match=f"continues after step {step}, that of the last checkpoint"):
        streamed_training(tmp_path / "run", left)
    streamed_training(tmp_path / "run", resume=True)
    for path in (streamed_straight / "controller").iterdir():
        assert (tmp_path / "run" / "controller" / path.name).read_bytes() == path.read_bytes()
    assert events(tmp_path / "run") == events(streamed_straight)


def test_a_training_in_which_every_row_was_rolled_back_in_every_step_ends_behind_its_first_round(tmp_path):
    tasks = [blobs()]
    configs = training_configs(tasks, "quick", SHORT, {"optimizer": {"lr": 1e30}, "data": {"batches_per_step": 3}})
    summary = train(tasks, configs, tmp_path / "run")
    assert (summary["status"], summary["rounds_done"]) == ("failed", 1)
    assert (
        "every environment was rolled back in every step"
        in assert_failed(tmp_path / "run", "RolledBack", summary["error"]["message"])["error"]["message"]
    )
    assert np.sum(list(summary["rollbacks"].values())) == 16
    assert not Path(tmp_path / "run" / "controller").exists()
