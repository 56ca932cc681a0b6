"""Check that trainings by workers give the same results for any number of them, also if some are killed."""

import itertools
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import ClassVar

import numpy as np
import pytest
import torch

import esper
from crews import SHY, Beside
from esper.leyline.config.tree import build_config
from esper.leyline.messages import InputError, UserCodeError, WorkerError
from esper.leyline.progress import Progress
from esper.nissa.events import decode
from esper.nissa.rows import EpisodeRow, PlayedRow
from esper.runs.configuration import training_configs
from esper.runs.folder.resume import Opening, cohort_configs, read_config
from esper.runs.train import Trainer, cohorts_of, train, with_shards
from esper.runs.workers import transports
from esper.runs.workers.workers import (
    ALONE,
    TRIES,
    WorkerOptions,
    WorkerPool,
    check_facts,
    worker_options,
)
from esper.simic.rewards import get_reward
from esper.store.checkpoint import LATEST, TENSORS
from esper.store.files import CHECKPOINTS
from esper.store.tensors import pack, unpack
from esper.tamiyo.policy.controller import WEIGHTS
from esper.tasks.catalog import get_task

SMALL = {
    "envs": 6,
    "shards": 3,
    "steps": 3,
    "data": {"batch_size": 12, "batches_per_step": 1},
    "reward": {"group_size": 2},
    "ppo": {"rounds": 1, "imitation_rounds": 1, "update_epochs": 1, "validate_envs": 4, "validate_every": 1},
}
CLOCKED = ("env_steps_per_second", "controller_share", "seconds")


class Watching(Progress):
    """Calls something after every round."""

    def __init__(self, then=lambda number: None):
        self.then, self.notes, self.shares = then, [], []

    def round(self, number, rounds, figures):
        self.shares.append([figures.get(name) for name in ("playing_share", "gradients_share", "waiting_seconds")])
        self.then(number)

    def note(self, text):
        self.notes.append(text)


def trained(folder, asked=ALONE, then=lambda number: None, **over):
    task = get_task("iris")
    watch = Watching(then)
    return train([task], training_configs([task], "quick", SMALL, over), folder, watch, asked=asked), watch


def resumed(folder, asked=ALONE):
    return train(
        [get_task("iris")], cohort_configs(read_config(folder)), folder, Progress(), Opening(resume=True), asked=asked
    )


def content(folder):
    """Return the controller, and the rows without what a clock says."""
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] not in ("checkpoint", "environment", "phases")]
    for row in rows:
        del row["seq"]
        for each in (row, row.get("figures", {})):
            for name in ("playing_share", "gradients_share", "waiting_seconds"):  # with several workers alone
                each.pop(name, None)
            each |= {name: 0 for name in ("time", *CLOCKED) if name in each}
    return (folder / "controller" / WEIGHTS).read_bytes(), rows


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the content of a training without workers."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    trained(folder)
    return content(folder)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_results_do_not_depend_on_the_number_of_workers(alone, tmp_path, workers):
    summary, watch = trained(tmp_path / "run", WorkerOptions(workers))
    assert content(tmp_path / "run") == alone
    if workers > 1:
        playing, gradients, waits = (np.array(each) for each in zip(*watch.shares, strict=True))
        assert summary["workers"] == {
            "number": workers,
            "lost": 0,
            "waiting_seconds": pytest.approx(waits.sum(), abs=1e-3),
        }
        assert (playing > 0).all()
        assert (gradients > 0).all()
        assert (playing + gradients <= 1).all()
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_two_tasks_and_their_shards_are_divided_among_any_number_of_workers(tmp_path):
    tasks = [get_task("iris"), get_task("wine")]
    configs = training_configs(tasks, "quick", SMALL, {"envs": 8, "shards": 4, "ppo": {"update_epochs": 2}})
    contents = []
    for workers in (1, 2, 4, 8):
        folder = tmp_path / str(workers)
        train(tasks, configs, folder, Progress(), asked=WorkerOptions(workers))
        contents.append(content(folder))
    assert all(each == contents[0] for each in contents)


@pytest.mark.slow
def test_a_worker_killed_at_a_random_moment_changes_nothing(alone, tmp_path):
    moment = random.random() * 0.5
    print(f"{moment=}")  # shown if the test fails

    def kill():
        time.sleep(moment)
        for each in multiprocessing.active_children():  # none if the training is over
            os.kill(each.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    summary, watch = trained(
        tmp_path / "run", WorkerOptions(2), lambda number: thread.start() if number == -1 else None
    )
    thread.join()
    assert content(tmp_path / "run") == alone
    assert summary["workers"]["lost"] == len([note for note in watch.notes if "worker 1 was lost" in note]) <= 1


class Killing(Trainer):
    """Kills its worker when that comes to a phase of a round for the first time."""

    killed = ""

    def come(self, phase):
        if phase == self.phase and self.exchange.rank == 0 and self.exchange.size > 1 and self.killed != phase:
            type(self).killed = phase
            (worker,) = multiprocessing.active_children()
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()

    def _play(self, first, *how):
        self.come(first.kind)
        self.come(first.number)
        return super()._play(first, *how)

    def _divided(self, rollouts):
        self.come("update" if self.number == 0 else "imitate")
        return super()._divided(rollouts)

    def validate(self, number, *how):
        self.come("validation" if number == 0 else "first validation")
        return super().validate(number, *how)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["imitation", "imitate", "first validation", "training", "update", "validation"])
def test_a_worker_that_is_lost_in_any_phase_of_a_round_changes_nothing(alone, tmp_path, monkeypatch, phase):
    monkeypatch.setattr(Killing, "phase", phase, raising=False)
    monkeypatch.setattr(Killing, "killed", "")
    monkeypatch.setattr("esper.runs.train.Trainer", Killing)
    summary, watch = trained(tmp_path / "run", WorkerOptions(2))
    assert Killing.killed == phase
    assert watch.notes == ["worker 1 was lost; the workers are started again, and the round is played again"]
    assert summary["workers"]["lost"] == 1
    assert content(tmp_path / "run") == alone


@pytest.mark.campaign
def test_what_a_teacher_has_shown_is_played_again_where_its_rollouts_are_lost(tmp_path, monkeypatch):
    """Check rollouts lost by a worker that dies, or that leaves the training, in the last of three rounds of imitation."""
    rounds = {"ppo": {**SMALL["ppo"], "imitation_rounds": 3}}
    trained(tmp_path / "alone", **rounds)
    monkeypatch.setattr(Killing, "phase", -1, raising=False)
    monkeypatch.setattr(Killing, "killed", "")
    with monkeypatch.context() as killing:
        killing.setattr("esper.runs.train.Trainer", Killing)
        _, watch = trained(tmp_path / "killed", WorkerOptions(2), **rounds)
    assert Killing.killed == -1
    lost, again = watch.notes
    assert lost.startswith("worker 1 was lost")
    assert (
        again == "playing 2 episodes of imitation again, whose rollouts another worker had; the results stay the same"
    )
    assert content(tmp_path / "killed") == content(tmp_path / "alone")

    def interrupt(number):
        if number == -2:
            signal.raise_signal(signal.SIGINT)

    trained(tmp_path / "left", WorkerOptions(2), interrupt, **rounds)
    resumed(tmp_path / "left")
    assert content(tmp_path / "left") == content(tmp_path / "alone")


class Stopping(Killing):
    """Stops its worker when that comes to a phase, as a debugger does or a machine that hangs."""

    def come(self, phase):
        if phase == self.phase and self.exchange.rank == 0 and self.exchange.size > 1 and self.killed != phase:
            type(self).killed = phase
            (worker,) = multiprocessing.active_children()
            os.kill(worker.pid, signal.SIGSTOP)


@pytest.mark.campaign
@pytest.mark.parametrize("phase", ["imitation", pytest.param("update", marks=pytest.mark.slow)])
def test_a_worker_that_is_stopped_is_ended_and_changes_nothing(alone, tmp_path, monkeypatch, phase):
    monkeypatch.setattr(Stopping, "phase", phase, raising=False)
    monkeypatch.setattr(Stopping, "killed", "")
    monkeypatch.setattr("esper.runs.train.Trainer", Stopping)
    monkeypatch.setattr("esper.runs.workers.workers.QUIET", 3.0)
    summary, watch = trained(tmp_path / "run", WorkerOptions(2), faults={"worker_seconds": 20})
    assert Stopping.killed == phase
    assert watch.notes[0].startswith("worker 1 has given no sign for 3 s: a step takes long, its process is stopped")
    lost = [note.split("; ")[0] for note in watch.notes if "has given no sign" not in note]  # also said of a slow start
    assert [note.split(" for ")[0] for note in lost] == ["worker 1 gave no sign", "worker 1 was lost"]
    assert summary["workers"]["lost"] == 1
    assert content(tmp_path / "run") == alone


class Blocking:
    """Makes rewards, which block in the process of another worker the first time."""

    def __init__(self, mark):
        self.mark, self.__name__ = mark, "blocking"

    def __call__(self, config):
        pay = get_reward(config)

        def paid(outcome):
            if multiprocessing.parent_process() is not None and not self.mark.exists():
                self.mark.touch()
                time.sleep(600)
            return pay(outcome)

        return paid


@pytest.mark.campaign
def test_a_worker_whose_environment_blocks_is_ended_and_changes_nothing(alone, tmp_path, monkeypatch):
    monkeypatch.setattr("esper.runs.workers.workers.QUIET", 3.0)
    task, watch, mark = get_task("iris"), Watching(), tmp_path / "blocked"
    configs = training_configs([task], "quick", SMALL, {"faults": {"worker_seconds": 20}})
    train([task], configs, tmp_path / "run", watch, reward=Blocking(mark), asked=WorkerOptions(2))
    assert mark.exists()
    assert watch.notes[0].startswith("worker 1 has given no sign for 3 s: a step takes long")
    assert len([note for note in watch.notes if "has given no sign" not in note]) == 2
    assert content(tmp_path / "run")[0] == alone[0]


@pytest.mark.slow
def test_workers_that_are_lost_for_good_stop_a_run_that_can_be_resumed(alone, tmp_path):
    ended, folder = threading.Event(), tmp_path / "run"

    def kill_all():
        while not ended.wait(0.02):
            for each in multiprocessing.active_children():
                each.kill()

    thread = threading.Thread(target=kill_all)
    try:
        with pytest.raises(WorkerError, match=f"was lost {TRIES} times.* give fewer workers, or lower envs"):
            trained(folder, WorkerOptions(2), lambda number: thread.start() if number == -1 else None)
    finally:
        ended.set()
        thread.join()
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert resumed(folder, WorkerOptions(1))["status"] == "finished"
    assert content(folder) == alone


@pytest.mark.campaign
def test_a_training_is_resumed_with_another_number_of_workers(alone, tmp_path):
    def interrupt(number):
        if number == -1:
            signal.raise_signal(signal.SIGINT)

    summary, _ = trained(tmp_path / "run", WorkerOptions(2), interrupt)
    assert summary["status"] == "interrupted"
    assert resumed(tmp_path / "run")["status"] == "finished"
    assert content(tmp_path / "run") == alone


@pytest.mark.slow
def test_a_training_that_is_resumed_with_its_workers_ends_with_the_arrays_of_the_one_that_was_not_interrupted(tmp_path):
    def interrupt(number):
        if number == -1:
            signal.raise_signal(signal.SIGINT)

    straight, left = tmp_path / "straight", tmp_path / "left"
    trained(straight, WorkerOptions(2))
    assert trained(left, WorkerOptions(2), interrupt)[0]["status"] == "interrupted"
    assert resumed(left, WorkerOptions(2))["status"] == "finished"
    assert content(left) == content(straight)
    last = [run / CHECKPOINTS / (run / CHECKPOINTS / LATEST).read_text().split()[0] for run in (left, straight)]
    assert last[0].name == last[1].name
    assert (last[0] / TENSORS).read_bytes() == (last[1] / TENSORS).read_bytes()


KILLED = """
import os, signal, tempfile
from esper.runs.workers.transports import ProcessTransport

crew = ProcessTransport(range(1), "no work", [None])
crew.start(0)
while not crew.receive(1.0):
    pass
print(*os.listdir(tempfile.gettempdir()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A process that is killed while it has a worker, which has answered."""


@pytest.mark.campaign
def test_a_process_that_is_killed_leaves_no_folder_of_its_workers(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.startswith(b"pymp-")
    until = time.monotonic() + 60
    while any(tmp_path.iterdir()) and time.monotonic() < until:  # the worker and the fork server end after it
        time.sleep(0.02)
    assert not any(tmp_path.iterdir())


class Interrupting:
    """Stops a training as Ctrl-C does, at the end of its first shard."""

    def __init__(self):
        self.seen = 0

    def write(self, row):
        self.seen += isinstance(row, EpisodeRow)
        if self.seen == 2:
            signal.raise_signal(signal.SIGINT)
            self.seen += 1

    def close(self):
        pass


@pytest.mark.slow
def test_a_round_that_was_interrupted_without_workers_is_finished_when_there_are_some(alone, tmp_path):
    task = get_task("iris")
    configs = training_configs([task], "quick", SMALL)
    assert train([task], configs, tmp_path / "run", outputs=[Interrupting()])["status"] == "interrupted"
    assert resumed(tmp_path / "run", WorkerOptions(2))["status"] == "finished"
    assert content(tmp_path / "run") == alone


def test_rows_name_the_first_environment_of_their_shard(alone):
    rows = [decode(json.dumps(row)) for row in alone[1]]
    ends = [row for row in rows if isinstance(row, EpisodeRow) and row.cohort == "training" and row.round == 0]
    assert [row.first_env + row.env for row in ends] == list(range(6))
    watched = [row for row in rows if isinstance(row, EpisodeRow) and row.cohort == "validation" and row.round == 0]
    assert [row.first_env + row.env for row in watched] == list(range(4))
    assert all(isinstance(row.first_env, int) for row in rows if isinstance(row, PlayedRow))


# The parts of the machinery.


class Squares:
    """Computes work whose result is easily known."""

    facts: ClassVar = {}

    def __init__(self, device):
        pass

    def play(self, part, sign):
        return {"square": part["number"] ** 2}


def played(crew, note, count=3):
    results = dict(WorkerPool(crew, note).play([{"number": n} for n in range(count)]))
    return [results[place]["square"] for place in range(count)]


@pytest.mark.parametrize("losses", [(), (True,), (False, True, True)])
def test_results_come_in_the_order_of_the_parts_whoever_played_them(losses):
    crew, notes = Beside(2, Squares, losses), []
    assert played(crew, notes.append) == [0, 1, 4]
    assert len(notes) == crew.starts - 2 == sum(losses)


def test_a_part_is_played_a_bounded_number_of_times():
    crew = Beside(1, Squares, [True] * 10)
    with pytest.raises(WorkerError, match=f"lost {TRIES} times"):
        played(crew, lambda note: None)
    assert crew.starts == TRIES


def test_a_message_is_the_tree_that_was_sent():
    tree = {"a": [1, None, "x", float("inf")], "b": {"c": np.arange(3), "d": torch.randn(2, 3)}, "e": np.zeros((0, 2))}
    found = unpack(pack(tree))
    assert found["a"] == tree["a"]
    assert torch.equal(found["b"]["d"], tree["b"]["d"])
    assert np.array_equal(found["b"]["c"], tree["b"]["c"])
    assert found["e"].shape == (0, 2)


@pytest.mark.parametrize(("envs", "group", "shards"), [(64, 8, 2), (8, 4, 2), (4, 4, 1), (256, 8, 8), (40, 8, 2)])
def test_the_number_of_shards_follows_from_the_environments_alone(envs, group, shards):
    config = build_config({"envs": envs, "reward": {"group_size": group}})
    for workers in range(1, shards + 1):
        assert with_shards([config], WorkerOptions(workers), resumed=False)[0].shards == shards


def test_shards_hold_all_environments_once_in_whole_groups():
    config = training_configs([get_task("iris")], "quick", SMALL, {"envs": 10, "ppo": {"validate_envs": 2}})[0]
    cohorts = cohorts_of(get_task("iris").sealed(), config)
    numbers = [cohort.engine.space.number.tolist() for cohort in cohorts]
    assert list(itertools.chain(*numbers)) == list(range(10))
    assert [len(each) for each in numbers] == [4, 4, 2]
    assert [cohort.watched.envs for cohort in cohorts] == [1, 1, 0]


# Bad input.


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"workers": 0}, "workers is 0; give the number of workers"),
        ({"workers": "two"}, "workers is 'two'"),
        ({"workers": True}, "workers is True"),
        ({"devices": "cpu,cuda:77"}, "devices is 'cpu,cuda:77': device 'cuda:77' was asked for, but torch sees"),
        ({"devices": "tpu"}, "'tpu' is not a device"),
        ({"workers": 1, "devices": ("cpu", "cpu")}, "2 devices, but workers is 1"),
        ({"cluster": "slurm"}, "cluster is 'slurm'; give one of ray, ray://HOST:PORT, torchrun"),
        ({"cluster": "torchrun"}, "torchrun did not start this process"),
    ],
)
def test_workers_that_cannot_be_had_are_refused(monkeypatch, given, said):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError) as caught:
        worker_options(**given)
    assert said in str(caught.value)


def test_a_cluster_of_one_worker_is_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"^cluster is ray, but one worker is this process itself; give workers, a number of 2"
    ):
        esper.train("iris", SMALL, cluster="ray", run=tmp_path / "run", progress=False)


def test_a_port_that_is_none_is_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=r"^MASTER_PORT is 'x'; give the number of a port that no other program uses"):
        transports._store()


def test_a_port_in_use_is_named(monkeypatch):
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            InputError, match=rf"^rank 0 cannot listen at localhost:{port} \(.*; give a MASTER_PORT that no "
        ):
            transports._store()


def test_an_address_that_is_none_is_refused_before_torch_looks_for_it(monkeypatch):
    # a name with a space is none, so that nothing is asked of a network
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "no host", "MASTER_PORT": "29511"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=r"^MASTER_ADDR is 'no host', which is no address of a machine \("):
        transports._store()


def test_one_worker_is_asked_for_by_each_device():
    assert worker_options(devices="cpu,cpu").size == 2
    assert worker_options(workers="3", devices=("cpu",)).size == 3


@pytest.mark.parametrize(
    ("over", "asked", "said"),
    [
        ({}, WorkerOptions(4), "workers is 4, but 6 environments in 3 shards give work to 3 workers; give 3 or fewer"),
        ({"shards": 7}, ALONE, "shards is 7, but 6 environments in groups of 2"),
        ({"envs": 1}, WorkerOptions(2), "reward.group_size is 2, which does not divide envs, 1; choose a divisor"),
    ],
)
def test_more_workers_than_shards_and_more_shards_than_groups_are_refused(tmp_path, over, asked, said):
    with pytest.raises(InputError, match=said):
        trained(tmp_path / "run", asked, **over)
    assert not (tmp_path / "run").exists()


def test_a_task_that_cannot_be_sent_is_refused_before_anything_is_written(tmp_path):
    x, y = torch.randn(60, 2), torch.arange(60) % 2
    task = esper.task("mine", x, y, host=lambda: esper.mlp(inputs=2, width=4, classes=2, blocks=1)())
    with pytest.raises(InputError, match="the task 'mine' cannot be sent to a worker"):
        esper.train(task, SMALL, run=tmp_path / "run", workers=2, progress=False)
    assert not (tmp_path / "run").exists()


def test_a_worker_that_cannot_make_its_task_is_one_sentence():
    def failing(device):
        raise UserCodeError("the task shy.py:task raised OSError: the disk is not mounted")

    with pytest.raises(InputError, match=r"could not be started: UserCodeError: the task shy.py:task raised OSError"):
        WorkerPool(Beside(1, failing), print)


@pytest.mark.slow
def test_a_worker_that_cannot_import_the_task_says_so_with_exit_code_2(tmp_path):
    (tmp_path / "shy.py").write_text(SHY)
    (tmp_path / "small.yaml").write_text(json.dumps(SMALL))
    command = [
        sys.executable,
        "-m",
        "esper",
        "train",
        "shy.py:task",
        "--config",
        "small.yaml",
        "--run",
        "out",
        "--workers",
        "2",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "could not be started: UserCodeError: the task shy.py:task raised OSError: the disk with the data" in line
    assert not (tmp_path / "out").exists()


def test_a_worker_with_other_data_is_refused():
    own = {"data": {"iris": {"train": "1"}}, "versions": {"torch": "2"}}
    with pytest.raises(InputError, match="other data of task 'iris'"):
        check_facts(own, {**own, "data": {"iris": {"train": "2"}}})
    with pytest.raises(InputError, match="install the same versions"):
        check_facts(own, {**own, "versions": {"torch": "1"}})
    check_facts(own, dict(own))


class Quiet(Beside):
    """Hears nothing from its second worker for some times that are told."""

    def __init__(self, times):
        super().__init__(3, Squares)
        self.times, self.ended = times, []

    def silent(self):
        return {0: 5.0, 1: self.times.pop(0), 2: 100.0} if self.times else {}

    def end(self, worker):
        self.ended.append(worker)


def test_a_worker_that_gives_no_sign_is_named_once_until_it_gives_one_and_then_ended():
    crew, notes = Quiet([]), []
    pool = WorkerPool(crew, notes.append)
    pool.patience, crew.times = 150.0, [101.0, 102.0, 1.0, 103.0, 151.0]
    for _ in range(3):
        pool.hear(0.0)
    assert [note.split(":")[0] for note in notes] == [
        "worker 1 has given no sign for 101 s",
        "worker 2 has given no sign for 100 s",
    ]
    assert notes[0].endswith(
        "or its environment blocks; after 150 s it is ended, and another plays its part again (faults.worker_seconds)"
    )
    for _ in range(2):
        pool.hear(0.0)
    assert notes[2:] == [notes[0].replace("101", "103"), "worker 1 gave no sign for 151 s, and is ended"]
    assert crew.ended == [1]


def test_a_patience_of_less_than_a_minute_is_kept():
    crew, notes = Quiet([]), []
    pool = WorkerPool(crew, notes.append)
    pool.patience, crew.times = 5.0, [4.0, 6.0]
    crew.silent = lambda: {1: crew.times.pop(0)}
    for _ in range(2):
        pool.hear(0.0)
    assert notes == ["worker 1 gave no sign for 6 s, and is ended"]
    assert crew.ended == [1]


def test_a_worker_is_never_ended_where_patience_is_0():
    crew, notes = Quiet([]), []
    pool = WorkerPool(crew, notes.append)
    pool.patience, crew.times = 0.0, [1e6]
    pool.hear(0.0)
    assert notes[0].endswith("or its environment blocks (faults.worker_seconds)")
    assert not crew.ended


class Failing(Squares):
    """Raises an error in its work."""

    def play(self, part, sign):
        return part["missing"]


def test_an_error_in_a_worker_is_the_error_of_the_run():
    with pytest.raises(WorkerError, match="a worker failed: KeyError: 'missing'") as caught:
        played(Beside(1, Failing), lambda note: None)
    assert "play" in caught.value.__notes__[0]


def in_the_second_shard(config):
    """Make a reward whose code fails in a process beside the first."""

    def pay(outcome):
        if multiprocessing.parent_process() is not None:
            raise ZeroDivisionError("the reward is not defined")
        return {"reward": np.zeros(len(outcome.refused))}

    return pay


@pytest.mark.slow
def test_an_error_of_your_code_in_another_worker_ends_the_training_with_it(tmp_path):
    task = get_task("iris")
    with pytest.raises(WorkerError, match="a worker failed: ZeroDivisionError: the reward is not defined"):
        train(
            [task],
            training_configs([task], "quick", SMALL),
            tmp_path / "run",
            reward=in_the_second_shard,
            asked=WorkerOptions(2),
        )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert not multiprocessing.active_children()
