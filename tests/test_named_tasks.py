"""Test tasks of one's own on the command line, as path.py:function or module:function, and runs that go on from Python."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import esper
from esper.cli import main
from esper.leyline.messages import InputError, UserCodeError
from esper.tasks.catalog import get_task
from populations import Script, blobs
from processes import begun

SOURCE = """
import torch
import esper
from esper.tasks.hosts import MLP

touched = open("touched", "a").write("x")

def clusters():
    y, drawn = torch.arange(160) % 3, torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, generator=drawn)[y] + 0.5 * torch.randn(160, 6, generator=drawn)
    return esper.task("clusters", x, y, host=MLP(inputs=6, width=8, hidden=(3, 5), outputs=3))

def written():
    x, host = torch.rand(160, 6, generator=torch.Generator().manual_seed(0)), MLP(6, 8, (3, 5), 3)
    return esper.task("written", x, torch.arange(160) % 3, host=lambda: host())

def broken():
    return [][1]

def sized(rows):
    return None

def nothing():
    return 3

def unlabelled():
    return esper.task("none", torch.zeros(20, 2), torch.zeros(19), host=esper.mlp(2, classes=2))

prepared = clusters()
number = 5
"""
SMALL = {"envs": 2, "steps": 3, "baselines": [], "data": {"batch_size": 12, "batches_per_step": 2}, "models": "none"}
QUICK = ["--envs", "2", "--steps", "3", "--set", "data={batch_size: 12, batches_per_step: 2}", "--baselines", "none"]
QUICK += ["--models", "none"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    Path("mine").mkdir()
    Path("mine/own_task.py").write_text(SOURCE)
    yield
    for name in [each for each in sys.modules if each.startswith(("own_task", "halfway", "script"))]:
        del sys.modules[name]


@pytest.fixture
def command(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return run


def test_a_function_in_a_file_names_a_task_for_grow_and_for_resume(command):
    code, out, _ = command("grow", "mine/own_task.py:clusters", *QUICK, "--json")
    assert code == 0
    folder = str(next(Path("runs").iterdir()))
    assert yaml.safe_load(Path(folder, "config.yaml").read_text())["task"] == "mine/own_task.py:clusters"
    assert json.loads(out)["task"] == "mine/own_task.py:clusters"
    code, out, _ = command("resume", folder, "--task", "mine/own_task.py:clusters", "--set", "steps=5", "--json")
    assert (code, json.loads(out)["steps_done"]) == (0, 5)


def test_the_folder_of_such_a_run_has_a_plain_name(command):
    assert command("grow", "./mine/own_task.py:clusters", *QUICK)[0] == 0
    assert [path.name for path in Path("runs").iterdir()] == ["mine-own_task.py-clusters-heuristic-s0"]


def test_a_run_folder_starts_no_code_that_it_names_until_the_user_names_it_too(command):
    assert command("grow", "mine/own_task.py:clusters", *QUICK, "--run", "r")[0] == 0
    Path("touched").unlink()
    place = Path("mine/own_task.py")
    place.write_text(place.read_text() + "\n")  # a file that was not edited runs once in a process
    code, _, err = command("resume", "r", "--set", "steps=4")
    assert code == 2
    assert "esper resume r --task mine/own_task.py:clusters" in err
    assert not Path("touched").exists()
    assert command("resume", "r", "--set", "steps=4", "--task", "mine/own_task.py:clusters")[0] == 0
    assert Path("touched").exists()


def test_a_module_that_lies_in_the_current_folder_names_a_task(monkeypatch):
    monkeypatch.chdir("mine")
    assert get_task("own_task:clusters").name == "own_task:clusters"


def test_a_task_that_a_module_holds_is_named_without_a_function():
    assert get_task("mine/own_task.py:prepared").train.x.shape == (96, 6)


def test_eval_train_and_tasks_take_such_a_task(command):
    place = "mine/own_task.py:clusters"
    settings = ["--set", "steps=3", "--set", "data={batch_size: 12, batches_per_step: 1}"]
    code, out, _ = command(
        "eval",
        "never",
        "--tasks",
        place,
        "--instances",
        "2",
        "--seeds",
        "1",
        *settings,
        "--json",
        "--baselines",
        "none",
    )
    assert (code, json.loads(out)["tasks"][0]["task"]) == (0, place)
    code, out, _ = command(
        *("train", place, "--envs", "2", "--rounds", "1", *settings, "--json"),
        *("--set", "reward.group_size=2", "--set", "ppo={imitation_rounds: 0, validate_envs: 1}"),
    )
    assert (code, json.loads(out)["tasks"]) == (0, [place])
    code, out, _ = command("tasks", place)
    assert code == 0
    assert out.startswith(f"{place}: 160 examples of your own")


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("mine/no_such.py:clusters", "there is no file mine/no_such.py"),
        ("no_such_module:clusters", "there is no module 'no_such_module'"),
        ("mine/own_task.py:cluster", "did you mean 'clusters'?"),
        ("mine/own_task.py:", "names no function"),
        ("mine/own_task.py:sized", "needs the argument 'rows'"),
        ("mine/own_task.py:nothing", "returned an int; return what esper.task(...) returns"),
        ("mine/own_task.py:number", "is an int; name a function"),
        ("mine/own_task.py:unlabelled", "20"),
    ],
)
def test_a_place_that_makes_no_task_is_one_sentence_and_exit_code_2(command, reference, said):
    code, _, err = command("grow", reference, *QUICK, "--run", "r")
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1
    assert not Path("r").exists()


def test_an_error_of_the_users_code_keeps_its_traceback_and_exits_with_1(command):
    code, _, err = command("grow", "mine/own_task.py:broken", *QUICK)
    assert code == 1
    lines = err.splitlines()
    assert "return [][1]" in err
    assert lines[-1] == "error: the task mine/own_task.py:broken raised IndexError: list index out of range"
    assert not any("esper/tasks" in line for line in lines)


def test_from_python_an_error_of_the_users_code_is_the_cause():
    with pytest.raises(UserCodeError) as raised:
        get_task("mine/own_task.py:broken")
    assert isinstance(raised.value.__cause__, IndexError)


def test_a_module_that_imports_a_missing_one_is_not_called_missing_itself(monkeypatch):
    Path("halfway.py").write_text("import no_such_module_at_all\n")
    with pytest.raises(UserCodeError, match="no_such_module_at_all"):
        get_task("halfway:task")


def test_a_script_that_leaves_the_interpreter_is_said_to():
    Path("script.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(InputError, match="__main__"):
        get_task("script.py:task")


def test_a_run_on_an_object_goes_on_from_python_with_the_object():
    task = blobs()
    straight = esper.grow(task, SMALL | {"steps": 5}, controller="random-valid", run="straight", progress=False)
    esper.grow(task, SMALL, controller="random-valid", run="r", progress=False)
    with pytest.raises(InputError, match=r"esper\.resume\('r', task=\.\.\.\)"):
        esper.resume("r", settings={"steps": 5})
    summary = esper.resume("r", task=task, settings={"steps": 5}, progress=False)
    assert summary["validation_accuracy"] == straight["validation_accuracy"]
    assert esper.resume("r", task=task) == summary


@pytest.mark.slow
def test_a_run_on_an_object_goes_on_from_the_command_line_with_the_place_of_its_task(command):
    task = get_task("mine/own_task.py:clusters")
    esper.grow(replace(task, name="clusters"), SMALL, controller="never", run="r", progress=False)
    code, _, err = command("resume", "r", "--set", "steps=4")
    assert code == 2
    assert "'clusters', which was made in Python" in err
    assert (
        "as esper.resume('r', task=...) in Python, or as esper resume r --task path.py:function, where the function"
        in err
    )
    code, out, _ = command("resume", "r", "--set", "steps=4", "--task", "mine/own_task.py:clusters", "--json")
    assert (code, json.loads(out)["steps_done"], json.loads(out)["task"]) == (0, 4, "clusters")
    code, _, err = command("resume", "r", "--set", "steps=5", "--task", "iris")
    assert code == 2
    assert "a run on the task 'clusters', not on 'iris', which was made in Python" in err


def test_export_names_the_place_of_the_task_that_was_grown(command):
    code, _, _ = command("grow", "mine/own_task.py:written", *QUICK[:-2], "--run", "r", "--controller", "never")
    assert code == 0
    code, _, err = command("export", "r", "--env", "0", "--out", "plain")
    assert code == 0
    mend = "esper export r --env 0 --out plain --overwrite --task mine/own_task.py:written"
    place = f"if you trust it, give {mend}"
    assert f"its host is code of your own, which a run folder may not start; {place}, or read" in err
    code, _, err = command(*mend.split()[1:])
    assert (code, err, Path("plain/model.pt2").is_file()) == (0, "", True)


class Counting(Script):
    """Plays a script as a controller that a run can be resumed with."""

    def state(self):
        return {}

    def load_state(self, state):
        assert state == {}


@pytest.mark.slow
def test_a_controller_object_goes_on_from_python_too():
    task = blobs()
    esper.grow(task, SMALL, controller=Counting({}), run="r", progress=False)
    with pytest.raises(InputError, match="controller="):
        esper.resume("r", task=task, settings={"steps": 5})
    summary = esper.resume("r", task=task, controller=Counting({}), settings={"steps": 5}, progress=False)
    assert summary["steps_done"] == 5


def test_a_training_on_an_object_goes_on_from_python():
    task = blobs()
    settings = {"envs": 2, "steps": 3, "data": {"batch_size": 12, "batches_per_step": 1}, "reward": {"group_size": 2}}
    settings |= {"ppo": {"rounds": 1, "imitation_rounds": 0, "validate_envs": 1}}
    esper.train(task, settings, run="t", progress=False)
    summary = esper.resume("t", task=task, settings={"ppo": {"rounds": 2}}, progress=False)
    assert (summary["status"], summary["rounds_done"]) == ("finished", 2)
    with pytest.raises(InputError, match="makes its own controller"):
        esper.resume("t", task=task, controller="never", settings={"ppo.rounds": 3})


def test_a_task_that_is_not_the_runs_is_refused():
    esper.grow(esper.get_task("iris"), SMALL, controller="never", run="r", progress=False)
    with pytest.raises(InputError, match="a run on iris, not on blobs"):
        esper.resume("r", task=blobs(), settings={"steps": 4})


def test_evaluate_from_python_is_the_record_that_the_command_prints(command):
    arguments = [
        "--instances",
        "2",
        "--seeds",
        "1",
        "--baselines",
        "none",
        "--set",
        "data.batches_per_step=1",
    ]
    code, out, _ = command("eval", "--tasks", "iris", *arguments, "--set", "steps=2", "--json")
    assert code == 0
    settings = {"data": {"batches_per_step": 1}, "steps": 2}
    record = esper.evaluate(
        tasks="iris",
        instances=2,
        seeds=1,
        settings=settings,
        baselines=(),
        out="out",
        progress=False,
    )
    printed = json.loads(out)
    runs = [each["tasks"][0]["runs"]["heuristic"]["objective"] for each in (record, printed)]
    assert runs[0] == runs[1]
    assert json.loads(Path("out/evaluation.json").read_text()) == record


class Interrupting(Script):
    """Asks for an end at its second decision, as Ctrl-C does."""

    def act(self, view):
        if view.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return super().act(view)


def test_ctrl_c_is_raised_again_when_the_folder_is_in_order():
    with pytest.raises(
        KeyboardInterrupt, match=r"continue it with esper\.resume\('r', task=\.\.\., controller=\.\.\.\)$"
    ):
        esper.grow(blobs(), SMALL, controller=Interrupting({}), run="r", progress=False)
    assert json.loads(Path("r/summary.json").read_text())["status"] == "interrupted"
    summary = esper.grow(blobs(), SMALL, controller=Interrupting({}), progress=False, on_interrupt="return")
    assert (summary["status"], summary["steps_done"]) == ("interrupted", 2)


def test_what_ctrl_c_leads_to_is_said_without_a_terminal_too_unless_progress_is_off(capsys):
    baselines = {**SMALL, "twin": True, "baselines": ["twin", "plain"]}
    for progress in ("auto", False):
        summary = esper.grow(blobs(), baselines, controller=Interrupting({}), progress=progress, on_interrupt="return")
        assert summary["status"] == "interrupted"
        err = capsys.readouterr().err
        said = "interrupted after 2 of 3 steps: the networks are evaluated and exported as they are, then the static networks"
        assert err.startswith(f"{said} (plain)") == (progress == "auto")
        assert err.count("\n") == (progress == "auto")


@pytest.mark.campaign
def test_an_interrupted_run_on_a_task_of_ones_own_ends_with_the_command_that_resumes_it():
    long = ["--envs", "2", "--steps", "1000000", "--models", "none", "--baselines", "none", "--run", "r"]
    with begun([sys.executable, "-m", "esper", "grow", "mine/own_task.py:written", *long]) as process:
        assert process.stderr.readline().startswith("step 1/")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted; continue with esper resume r --task mine/own_task.py:written"


def test_a_file_without_a_function_is_refused_with_the_functions_that_it_has(command):
    code, _, err = command("grow", "mine/own_task.py")
    assert code == 2
    assert "mine/own_task.py is a file; name the function that returns the task: mine/own_task.py:clusters, " in err
    assert "own_task.py:sized" not in err, "which takes an argument"
    assert not Path("touched").exists(), "nothing of it was run"
    Path("one.py").write_text("def only(): pass\n")
    assert "returns the task, as in one.py:only\n" in command("grow", "one.py")[2]
    assert "none.py names no function; give path.py:function" in command("grow", "none.py")[2]


FAILING = """
import torch
import esper
from esper.tasks.hosts import MLP

calls = []

def loss(outputs, y):
    calls.append(1)
    if len(calls) > 8:
        raise ValueError("no more")
    return torch.nn.functional.cross_entropy(outputs, y, reduction="none")

def failing():
    x = torch.rand(160, 6, generator=torch.Generator().manual_seed(0))
    return esper.task("failing", x, torch.arange(160) % 3, host=MLP(6, 8, (3, 5), 3), loss=loss)
"""


def test_a_loss_that_fails_is_printed_from_the_users_own_frame_on_with_the_command_that_resumes(command):
    Path("script_loss.py").write_text(FAILING)
    code, _, err = command("grow", "script_loss.py:failing", *QUICK, "--run", "r")
    assert code == 1
    frames = [line for line in err.splitlines() if line.strip().startswith("File ")]
    assert len(frames) == 1
    assert "script_loss.py" in frames[0]
    assert "ValueError: no more" in err
    assert "then `esper resume r --task script_loss.py:failing` " in err


@pytest.mark.parametrize(
    ("argument", "said"),
    [({"on_interrupt": "no"}, "give one of 'raise', 'return'"), ({"progress": "yes"}, "give 'auto', True or False")],
)
def test_a_bad_choice_is_one_sentence(argument, said):
    with pytest.raises(InputError, match=said):
        esper.grow(blobs(), SMALL, controller="never", run="r", **argument)
    assert not Path("r").exists()


def test_progress_is_shown_on_request_and_not_into_a_pipe(capsys):
    esper.grow(blobs(), SMALL, controller="never", progress=True)
    assert "step 3/3" in capsys.readouterr().err
    esper.grow(blobs(), SMALL, controller="never", progress="auto")
    esper.grow(blobs(), SMALL, controller="never", progress=False)
    assert capsys.readouterr().err == ""
