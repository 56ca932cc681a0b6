"""Compare the versions and the data of a run that goes on with those that it began with."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from esper.cli import main
from esper.leyline.data.task import Split
from esper.leyline.messages import InputError, RunWarning
from esper.nissa.events import decode
from esper.nissa.rows import RunRow
from esper.runs.configuration import training_configs
from esper.runs.folder.environment import fingerprint
from esper.runs.folder.resume import Opening
from esper.runs.grow import grow
from esper.runs.train import train
from esper.tamiyo.catalog import get_controller
from esper.tasks.catalog import get_task
from esper.tasks.objectives import Classification, CustomObjective
from populations import blobs, small_config

CONFIG = small_config({"controller": "random-valid"}, {"envs": 1, "steps": 4, "models": "none"})
SHORT = {"envs": 2, "steps": 2, "data": {"batch_size": 12, "batches_per_step": 1}, "reward": {"group_size": 2}}
PPO = {"ppo": {"rounds": 1, "update_epochs": 1, "imitation_rounds": 0, "validate_envs": 2}}


def other(task, name):
    """Return the task with one number of a split changed."""
    x, y = getattr(task, name)
    changed = x.clone()
    changed[3, 2] += 1
    return replace(task, **{name: Split(changed, y)})


def going_on(folder, task, **how):
    """Go on with a finished run that has lost its summary."""
    (folder / "summary.json").unlink(missing_ok=True)
    return grow(task, CONFIG, get_controller("random-valid", CONFIG), folder, opening=Opening(resume=True, **how))


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    grow(blobs(), CONFIG, get_controller("random-valid", CONFIG), folder)
    return folder


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_rows(folder):
    rows = [decode(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]
    return [row for row in rows if isinstance(row, RunRow)]


def test_the_same_versions_and_data_go_on_without_a_word(run, recwarn):
    going_on(run, blobs())
    assert [warning for warning in recwarn if warning.category is RunWarning] == []
    assert not (run / "changes.json").exists()


@pytest.mark.parametrize("split", ["train", "probe", "validation", "test"])
def test_other_data_are_refused_by_the_name_of_their_split_and_nothing_is_changed(run, split):
    (run / "summary.json").unlink()
    before = content(run)
    with pytest.raises(InputError, match=rf"the data differ, by sha256, .*: {split} of task blobs; .*--other-data"):
        going_on(run, other(blobs(), split))
    assert content(run) == before


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda task: replace(task, objective=replace(task.objective, outputs=3.0)), "objective"),
        (lambda task: replace(task, classes=("a", "b", "c")), "classes"),
    ],
)
def test_another_objective_and_other_classes_are_other_data(change, name):
    task = blobs()
    known, now = fingerprint(task), fingerprint(change(task))
    assert [each for each in now if known.get(each) != now[each]] == [name]


class Counting:
    """Counts its calls, as a loss."""

    calls = 0

    def __call__(self, output, target):
        self.calls += 1
        return output.square().mean(-1)


def test_an_objective_is_the_same_however_often_it_was_called_and_another_with_other_weights():
    def objective(loss):
        return replace(blobs(), objective=CustomObjective(Classification(3), loss, None, "accuracy", None, 3))

    counting = Counting()
    known = fingerprint(objective(counting))
    counting(torch.ones(2, 3), torch.ones(2))
    assert fingerprint(objective(counting)) == known
    ours, theirs = (fingerprint(objective(nn.CrossEntropyLoss(torch.tensor(w)))) for w in ([1.0, 1, 1], [1.0, 1, 2]))
    assert [name for name in ours if ours[name] != theirs[name]] == ["objective"]


def test_what_another_version_did_not_record_is_not_compared(run):
    path = run / "environment.json"
    environment = json.loads(path.read_text())
    del environment["data"]["blobs"]["scaling"]
    path.write_text(json.dumps(environment))
    assert going_on(run, blobs())["status"] == "finished"
    assert not (run / "changes.json").exists()  # which would name other data
    with pytest.raises(InputError, match="train of task blobs"):  # what was recorded is compared all the same
        going_on(run, other(blobs(), "train"))


def test_other_data_go_on_where_that_is_asked_for_and_are_recorded(run):
    going_on(run, other(blobs(), "train"), other_data=True)
    (entry,) = json.loads((run / "changes.json").read_text())
    assert (entry["set"], entry["noted"]) == ([], ["other data: train of task blobs"])
    assert [list(row.changed) for row in run_rows(run)] == [[], ["other data: train of task blobs"], []]
    going_on(run, other(blobs(), "train"))  # these are the data of the run from now on
    with pytest.raises(InputError, match="train of task blobs"):
        going_on(run, blobs())


def test_other_versions_are_warned_of_once_and_recorded(run):
    path = run / "environment.json"
    environment = json.loads(path.read_text())
    path.write_text(json.dumps({**environment, "torch": "1.13.0", "numpy": "1.0"}))
    with pytest.warns(RunWarning, match=r"torch 1\.13\.0 -> .*, numpy 1\.0 -> ") as told:
        going_on(run, blobs())
    assert [warning.filename for warning in told] == [__file__]
    (entry,) = json.loads((run / "changes.json").read_text())
    assert entry["noted"] == [
        f"{name} {old} -> {environment[name]}" for name, old in (("torch", "1.13.0"), ("numpy", "1.0"))
    ]
    assert list(run_rows(run)[1].changed) == entry["noted"]


@pytest.mark.filterwarnings("error")
def test_versions_that_were_recorded_are_not_warned_of_again(run):
    path = run / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "1.13.0"}))
    with pytest.warns(RunWarning, match="torch"):
        going_on(run, blobs())
    going_on(run, blobs())


@pytest.mark.parametrize("damaged", ["{", "[]", None])
def test_a_run_without_a_fingerprint_goes_on_with_a_warning(run, damaged):
    path = run / "environment.json"
    environment = json.loads(path.read_text())
    del environment["data"]
    path.write_text(json.dumps(environment) if damaged is None else damaged)
    words = "holds no fingerprint of the data of blobs" if damaged is None else "not compared"
    with pytest.warns(RunWarning, match=words):
        going_on(run, blobs())
    with pytest.raises(InputError, match="train of task blobs"):  # it has one from then on
        going_on(run, other(blobs(), "train"))


def test_a_training_compares_the_data_of_all_its_tasks(tmp_path):
    tasks = [blobs(), replace(blobs(), name="others")]
    configs = training_configs(tasks, "quick", SHORT, PPO)
    train(tasks, configs, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(InputError, match="validation of task others"):
        train([tasks[0], other(tasks[1], "validation")], configs, tmp_path / "run", opening=Opening(resume=True))
    # which no training reads
    train([tasks[0], other(tasks[1], "test")], configs, tmp_path / "run", opening=Opening(resume=True))


def test_a_mixture_is_known_by_an_instance_of_each_part():
    task = get_task("repair")
    known = fingerprint(task)
    assert {"training instances", "validation instances", "heldout instances"} <= known.keys()
    assert fingerprint(get_task("repair")) == known
    shifted = replace(task, sample=lambda key: task.sample(key + 1))
    assert known.keys() == {name for name, digest in fingerprint(shifted).items() if digest != known[name]} | {
        "objective"
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.bool])
def test_a_split_of_any_dtype_has_a_fingerprint(dtype):
    task = blobs()
    cast = replace(task, train=Split(task.train.x.to(dtype), task.train.y))
    assert fingerprint(cast)["train"] != fingerprint(task)["train"]


def test_the_command_goes_on_with_other_data_where_the_option_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def esper(*arguments):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        return int(end.value.code or 0), capsys.readouterr().err

    assert esper("grow", "iris", "--envs", "1", "--steps", "2", "--models", "none", "--run", "r")[0] == 0
    path = tmp_path / "r" / "environment.json"
    environment = json.loads(path.read_text())
    environment["data"]["iris"]["train"] = "0" * 16
    path.write_text(json.dumps(environment))
    (tmp_path / "r" / "summary.json").unlink()
    code, err = esper("resume", "r")
    assert (code, err.count("\n")) == (2, 2), err  # the checkpoint, and the sentence
    assert "train of task iris" in err
    assert esper("resume", "r", "--other-data")[0] == 0
