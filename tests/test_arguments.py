"""Check that arguments that are not what they should be are refused in one sentence, before anything is written."""

from pathlib import Path

import pytest

import esper
from esper.cli import main

QUICK = {"envs": 1, "steps": 1, "models": "none"}


@pytest.fixture(scope="module")
def iris():
    return esper.get_task("iris")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda task: esper.grow(task, QUICK, run=5), "run is 5; give the path of a folder, such as 'runs/first'"),
        (lambda task: esper.grow(task, QUICK, run=""), "run is ''; give the path of a folder"),
        (lambda task: esper.grow(task, QUICK, run=b"x"), "run is b'x'; give the path of a folder"),
        (lambda task: esper.grow(task, QUICK, run="x", overwrite="no"), "overwrite is 'no'; give True or False"),
        (lambda task: esper.grow(task, 5), "config is 5; give a mapping of keys to values, such as {'steps': 24}"),
        (lambda task: esper.grow(task, "x"), "config is 'x'; give a mapping of keys to values"),
        (lambda task: esper.grow("irises", QUICK), "unknown task 'irises'"),
        (
            lambda task: esper.grow(task, QUICK | {"task": "digits"}, run="x"),
            "config names the task 'digits', but the given task is 'iris'; leave the key out",
        ),
        (lambda task: esper.grow(task, QUICK | {"seed": 1.5}, run="x"), "seed is 1.5; give a whole number"),
        (lambda task: esper.load(5), "folder is 5; give the path of a folder"),
        (lambda task: esper.load(None), "folder is None; give the path of a folder"),
        (lambda task: esper.load("x", host=5), "host is 5; give the function that makes the host"),
        (lambda task: esper.train(5), "the task is 5; give the name of one"),
        (lambda task: esper.train(["iris", "irises"]), "unknown task 'irises'"),
        (lambda task: esper.train([task, 5]), "the task is 5; give the name of one"),
        (lambda task: esper.train([]), "the tasks are none; name one or more"),
        (lambda task: esper.train(task, 5), "config is 5; give a mapping of keys to values"),
        (lambda task: esper.train(task, {"task": "digits"}), "config names the task 'digits', but the given task"),
        (lambda task: esper.train(task, reward=5), "reward is 5; give a function"),
        (lambda task: esper.train(task, run=5), "run is 5; give the path of a folder"),
        (lambda task: esper.grow(task, QUICK, run="x", outputs=print), "outputs is "),
        (
            lambda task: esper.grow(task, QUICK, run="x", outputs=["x"]),
            "outputs[0] is 'x'; give an object with the methods write(row) and close()",
        ),
        (lambda task: esper.train(task, run="x", outputs=[5]), "outputs[0] is 5; give an object with the methods"),
        (lambda task: esper.evaluate([]), "controllers is []; name one or more, or leave it out to compare the rules"),
        (lambda task: esper.evaluate((), "iris"), "controllers is (); name one or more"),
        (lambda task: esper.task("mine", [[0.0]], [0]), "esper.task was given no host; give a function that makes"),
        (lambda task: esper.check_rows(5), "the task is 5; give the name of one"),
        (
            lambda task: esper.get_controller(5, esper.Config()),
            "controller is an int without act and store and update; give an object",
        ),
    ],
)
def test_a_bad_argument_is_one_sentence_and_nothing_is_written(iris, tmp_path, monkeypatch, call, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(esper.InputError) as refused:
        call(iris)
    assert str(refused.value).startswith(words)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["grow", "iris", "--slots", "blok0"], "the host has no slot 'blok0'; it has block0, block1"),
        (["grow", "iris", "--device", "cuda:99"], "device 'cuda:99' was asked for, but torch sees"),
        (["train", "iris", "--device", "cuda:99"], "device 'cuda:99' was asked for, but torch sees"),
        (["train", "iris", "--set", "slots=[blok0]"], "the host has no slot 'blok0'; it has block0, block1"),
    ],
)
def test_slots_and_devices_are_looked_at_before_the_folder(tmp_path, capsys, command, words):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.yaml").write_text("steps: 1")
    with pytest.raises(SystemExit) as ended:
        main([*command, "--run", str(tmp_path / "full")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {words}")


def test_a_mapping_may_name_the_task_that_is_given(iris):
    summary = esper.grow(iris, QUICK | {"task": "iris", "data.batches_per_step": 1}, controller="never")
    assert summary["task"] == "iris"


def test_a_task_by_name_and_the_command_come_to_one_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = {"envs": 1, "steps": 1, "models": "none", "baselines": ["none"], "optimizer": {"lr": 0.01}}
    esper.grow("iris", asked, controller="never", run="called", progress=False)
    command = ["grow", "iris", "--controller", "never", "--envs", "1", "--steps", "1", "--models", "none"]
    command += ["--baselines", "none", "--set", "optimizer.lr=0.01", "--run", "commanded", "--json"]
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code in (0, None)
    assert Path("called/config.yaml").read_text() == Path("commanded/config.yaml").read_text()
