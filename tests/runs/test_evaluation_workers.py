"""Check that an evaluation by workers gives the same record for any number of them, also if some are killed."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

import esper
from crews import SHY, Beside
from esper.cli import main
from esper.leyline.messages import InputError, WorkerError
from esper.runs.evaluation.contenders import Contender
from esper.runs.evaluation.evaluation import run_evaluation
from esper.runs.workers.workers import WorkerOptions, check_facts
from esper.store.files import EVALUATION
from esper.tamiyo.rules.base import Never
from esper.tasks.catalog import get_task

SHORT = {
    "steps": 2,
    "data": {"batches_per_step": 1, "batch_size": 12},
    "blueprints": ["bypass-linear", "bypass-rank-1"],
}
FEW = {"instances": 3, "seeds": 2, "settings": [SHORT]}


@pytest.fixture(scope="module")
def task():
    return get_task("iris")


def compare(task, **over):
    return run_evaluation([], [task], **(FEW | over))


def content(record):
    """Return a record without what a clock says."""
    kept = json.loads(json.dumps(record))
    kept.pop("workers", None)
    for each in kept["tasks"]:
        for part in (*each["controllers"], *each["runs"].values()):
            del part["seconds"]
    return kept


@pytest.fixture(scope="module")
def alone(task):
    """Return the record of an evaluation without workers."""
    return content(compare(task))


def beside(monkeypatch, losses=()):
    """Let workers be in this process, where they begin without waiting."""
    crews = []

    def start_workers(kind, asked, work, note, facts, *, mend, again, stop):
        assert again in mend
        crews.append(Beside(asked.size, work, losses))
        return kind(crews[-1], note, lambda ready: check_facts(facts, ready), mend)

    monkeypatch.setattr("esper.runs.evaluation.evaluation.start_workers", start_workers)
    return crews


@pytest.mark.campaign
@pytest.mark.parametrize(("workers", "losses"), [(1, ()), (2, (False, True, True, False, True)), (3, ())])
def test_the_record_does_not_depend_on_the_number_of_workers_or_on_losses(alone, task, monkeypatch, workers, losses):
    crews = beside(monkeypatch, losses)
    record = compare(task, workers=WorkerOptions(workers))
    assert content(record) == alone
    assert (record["workers"]["number"], record["workers"]["lost"]) == (workers, sum(losses))
    assert crews[0].starts == workers + sum(losses)


def test_what_was_grown_before_workers_were_lost_for_good_is_not_grown_again(alone, task, tmp_path, monkeypatch):
    beside(monkeypatch, [False] * 6 + [True] * 9)
    with pytest.raises(WorkerError, match=r"give fewer workers; what was grown is stored .* the same command goes on"):
        compare(task, workers=WorkerOptions(2), folder=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(before) >= 5
    assert content(compare(task, folder=tmp_path)) == alone
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
def test_processes_make_the_same_record_although_one_is_killed_at_a_random_moment(alone, task):
    moment, victim, lines = random.random(), random.randrange(2), []
    print(f"{moment=} {victim=}")  # shown if the test fails

    def kill():
        time.sleep(moment)
        workers = sorted(multiprocessing.active_children(), key=lambda each: each.name)
        if len(workers) == 2:  # else the evaluation is over
            os.kill(workers[victim].pid, signal.SIGKILL)

    def watch(line):
        lines.append(line)
        if len(lines) == 1:  # the workers have started
            thread.start()

    thread = threading.Thread(target=kill)
    record = compare(task, workers=WorkerOptions(2), watch=watch)
    thread.join()
    assert content(record) == alone
    assert record["workers"]["lost"] == len([line for line in lines if "was lost; another" in line]) <= 1
    assert not multiprocessing.active_children()


COMMAND = ["eval", "--tasks", "iris", "--instances", "2", "--seeds", "1", "--out", "out"]
COMMAND += ["--baselines", "none", "--set", "steps=1", "--set", "data.batch_size=12"]
COMMAND += ["--set", "blueprints=[bypass-linear]"]


def test_the_command_grows_on_each_device_and_says_what_was_lost_in_waiting(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as leaving:
        main([*COMMAND, "--devices", "cpu,cpu"])
    assert not leaving.value.code
    out = capsys.readouterr().out
    assert "2 workers, " in out
    assert "s lost in waiting, together" in out
    record = json.loads((tmp_path / "out" / EVALUATION).read_text())
    assert (record["workers"]["number"], record["settings"][-1]) == (2, {"device": "cpu"})


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            {"workers": 5},
            "workers is 5, but the evaluation has 3 populations to grow, each by one worker; give 3 or fewer",
        ),
        ({"devices": "cpu,cuda:77"}, "devices is 'cpu,cuda:77': device 'cuda:77' was asked for, but torch sees"),
        ({"devices": "tpu"}, "'tpu' is not a device"),
    ],
)
def test_workers_that_cannot_be_had_are_refused_before_anything_is_written(tmp_path, how, said):
    few = FEW | {"instances": 1, "seeds": 1, "settings": SHORT}
    with pytest.raises(InputError) as caught:
        esper.evaluate(tasks="iris", **few, out=tmp_path / "out", progress=False, **how)
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_controller_that_cannot_be_sent_is_refused_by_name(task):
    mine = Contender("mine", {}, lambda config: Never())
    with pytest.raises(InputError, match="the controller 'mine' cannot be sent to a worker"):
        run_evaluation([mine], [task], **FEW, workers=WorkerOptions(2))


@pytest.mark.slow
def test_a_worker_that_cannot_import_the_task_says_so_with_exit_code_2(tmp_path):
    (tmp_path / "shy.py").write_text(SHY)
    command = [sys.executable, "-m", "esper", *COMMAND, "--tasks", "shy.py:task", "--workers", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "could not be started: UserCodeError: the task shy.py:task raised OSError: the disk with the data" in line
    assert not (tmp_path / "out").exists()
