"""Test batches that are read ahead: the same bits however they are read, a sentence for what goes wrong, nothing left behind."""

import gc
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import esper
from esper.karn.run_model import RunModel
from esper.leyline.data.workers import read_by_workers
from esper.leyline.messages import InputError, RunWarning, UserCodeError
from esper.leyline.protocols import Proposed
from esper.nissa.rows import PhasesRow
from esper.store.tensors import flatten, unflatten
from esper.tamiyo.rules.base import RandomValid
from esper.tasks.hosts import MLP, Transformer
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import Waits
from esper.tolaria.stacked import data, reading
from populations import Journalled, small_config

HOST = MLP(inputs=6, width=8, hidden=(3, 5), outputs=3)
SETTINGS = {
    "envs": 2,
    "steps": 6,
    "data": {"batch_size": 32, "batches_per_step": 4},
    "gates": {"permissive": True},
    "models": "none",
    "baselines": [],
}
SAME = ("test_accuracy", "test_loss", "plantings", "grown", "steps_done")
SLOW = pytest.mark.slow
AHEAD = [(0, 0), (5, 0), (2, 2), *(pytest.param(*each, marks=SLOW) for each in ((1, 0), (0, 2), (2, 1)))]
"""Batches read ahead, and workers."""


class Examples(Dataset):
    """Gives examples, of which one is what `event` returns: that after `after` others of a process that reads batches."""

    def __init__(self):
        self.x = torch.randn(1200, 6, generator=torch.Generator().manual_seed(0))
        self.event, self.after = None, 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.event is not None:
            self.after -= 1
            if self.after < 0:
                event, self.event = self.event, None
                if (example := event()) is not None:
                    return example
        return self.x[index], self.x[index, :3].argmax().item()


def task_of(dataset, workers=0, event=None, after=0):
    task = esper.task("t", dataset, host=HOST, classes=3, stream=True, workers=workers)
    dataset.event, dataset.after = event, after
    return task


def played(engine, steps):
    """Play so many steps, and return the state without the counters of all episodes."""
    client = RandomValid()
    for _ in range(steps):
        engine.step(client.act(engine.view()))
    tensors = flatten(engine.snapshot())[0]
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items() if "governor.record" not in name}


def config_of(ahead, **more):
    return small_config(envs=3, steps=9, data={"batch_size": 48, "batches_per_step": 5, "read_ahead": ahead}, **more)


@pytest.fixture(scope="module")
def straight():
    """Return a population after eight steps, and its state after three, with batches that are read when they are needed."""
    engine = VectorizedEngine(task_of(Examples()), config_of(0))
    engine.reset()
    played(engine, 3)
    middle = flatten(engine.snapshot())
    return played(engine, 5), middle


@pytest.mark.parametrize(("ahead", "workers"), AHEAD)
def test_what_is_read_ahead_or_by_workers_or_after_a_resume_trains_to_the_same_bits(straight, ahead, workers):
    end, middle = straight
    engine = VectorizedEngine(task_of(Examples(), workers), config_of(ahead))
    engine.reset()
    assert played(engine, 8) == end  # 40 batches: nearly three epochs of 15
    engine.restore(unflatten(*middle))  # back to an earlier batch
    assert played(engine, 5) == end
    engine.reset(episode=0)
    assert played(engine, 8) == end


@pytest.mark.parametrize(("ahead", "workers"), [(0, 0), (2, 0), (2, 2)])
def test_windows_of_a_file_are_read_ahead_to_the_bits_of_those_in_memory(tmp_path, ahead, workers):
    tokens = np.random.default_rng(0).integers(0, 50, 9_000).astype(np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    host = Transformer(50, 8, 1, 2, 8)
    engines = [
        VectorizedEngine(
            esper.task("t", given, host=host, **options),
            small_config(envs=2, steps=4, data={"batch_size": 8, "batches_per_step": 2, "read_ahead": ahead}),
        )
        for given, options in (
            (tokens, {}),
            (np.memmap(tmp_path / "tokens.bin", np.uint16, "r"), {"stream": True, "workers": workers}),
        )
    ]
    for engine in engines:
        engine.reset()
    kept, streamed = (played(engine, 3) for engine in engines)
    assert kept == streamed


ALONE = """
import hashlib, sys
from pathlib import Path
sys.path[:0] = {paths}
import esper
from test_reading import Examples, task_of

ppo = {{"rounds": 2, "imitation_rounds": 0, "update_epochs": 1, "validate_envs": 2, "validate_every": 1}}
settings = {{"envs": 4, "steps": 3, "shards": 2, "reward": {{"group_size": 2}}, "ppo": ppo}}
for name, workers, processes, ahead in (("alone", 0, None, 0), ("thread", 0, None, 2), ("both", 2, 2, 2)):
    config = {{**settings, "data": {{"batch_size": 16, "batches_per_step": 2, "read_ahead": ahead}}}}
    esper.train(task_of(Examples(), workers), config, run=name, workers=processes, progress=False)
    (controller,) = Path(name, "controller").glob("*.safetensors")
    print(hashlib.sha256(controller.read_bytes()).hexdigest())
"""


@pytest.mark.campaign
def test_a_training_by_two_processes_that_read_by_workers_has_the_controller_of_one_in_one_thread(tmp_path):
    # A process of its own: where a network was sharded before, torch 2.13 ends a process that a thread forks, or lets it hang.
    here = Path(__file__).parent
    code = ALONE.format(paths=[str(here), str(here.parent), str(here.parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(digests := done.stdout.split()) == 3
    assert len(set(digests)) == 1


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=SLOW)])
def test_a_trial_in_copies_of_rows_reads_the_same_batches_and_changes_none(straight, workers):
    worth = []
    for ahead, processes in ((0, 0), (2, workers)):
        engine = VectorizedEngine(task_of(Examples(), processes), config_of(ahead))
        engine.reset()
        played(engine, 3)
        worth.append(engine.trial(Proposed(np.array([0, 1, 1]), RandomValid(), 3)).tolist())
        engine.state.forks = None  # the compute of the copies, which is part of the state
        assert played(engine, 5) == straight[0]
    assert worth[0] == worth[1]


def test_no_batch_behind_the_end_is_read_and_no_thread_is_left():
    class Counted(Examples):
        read = 0

        def __getitem__(self, index):
            Counted.read += 1
            return super().__getitem__(index)

    before = threading.active_count()
    task = task_of(Counted())
    Counted.read = 0
    settings = {**SETTINGS, "envs": 1, "data": {"batch_size": 32, "batches_per_step": 4, "read_ahead": 7}}
    esper.grow(task, settings, controller="never", progress=False)
    assert Counted.read == 6 * 4 * 32
    for _ in range(100):  # the threads end by themselves, not before the call returns
        if threading.active_count() <= before:
            break
        time.sleep(0.05)
    assert threading.active_count() <= before


@pytest.mark.campaign
@pytest.mark.parametrize("workers", [0, 2])
def test_a_process_ends_well_while_a_batch_is_read_within_torch(workers):
    code = (
        "import sys, torch\nsys.path[:0] = ['tests', 'tests/tolaria']\n"
        "from test_reading import *\n"
        "class Busy(Examples):\n"
        "    def __getitem__(self, index):\n"
        "        torch.ones(200, 200) @ torch.ones(200, 200)\n"
        "        return super().__getitem__(index)\n"
        "torch.set_num_threads(1)\n"
        f"engine = VectorizedEngine(task_of(Busy(), {workers}), config_of(5))\n"
        "engine.reset()\nplayed(engine, 2)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def with_workers(steps):
    """Run an engine for some steps, and return it with the two workers that read for it."""
    gc.collect()
    before = multiprocessing.active_children()
    engine = VectorizedEngine(task_of(Examples(), 2), config_of(2))
    engine.reset()
    played(engine, steps)
    workers = [each for each in multiprocessing.active_children() if each not in before]
    assert len(workers) == 2
    return engine, workers


def ended(workers):
    """Return whether the workers end within a minute; asked again, as one that the thread has just waited for counts as alive."""
    end = time.monotonic() + 60
    while (alive := any(worker.is_alive() for worker in workers)) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive


def test_what_a_worker_sends_has_the_values_the_type_and_the_layout_of_what_was_read():
    sent = {
        "rows": torch.randn(3, 4),
        "images with the channels last": torch.randn(2, 5, 6, 3).movedim(-1, 1),
        "a number": torch.tensor(3),
        "none": torch.zeros(0, 3),
        "a type that NumPy lacks": torch.randn(2, 5, 3).bfloat16().movedim(-1, 0),
        "truth values": torch.tensor([True, False]),
    }
    (found,) = read_by_workers(lambda _: sent, [0], 1, "Examples", str)
    for name, tensor in sent.items():
        assert (found[name].dtype, found[name].stride()) == (tensor.dtype, tensor.stride()), name
        assert torch.equal(found[name], tensor), name


def test_the_workers_end_with_the_last_batch_of_an_episode():
    engine, workers = with_workers(8)
    played(engine, 1)
    assert engine.over
    assert ended(workers)
    engine.reset()
    played(engine, 1)


def test_a_population_that_is_dropped_in_mid_run_ends_its_workers():
    engine, workers = with_workers(2)
    del engine
    gc.collect()
    assert ended(workers)


def test_rows_and_summary_and_window_say_how_long_batches_were_waited_for(tmp_path):
    def slow():
        time.sleep(0.5)

    task = task_of(Examples(), event=slow, after=200)
    engine = Journalled(task, small_config(envs=1, steps=3, data={"batch_size": 32, "batches_per_step": 4}))
    engine.reset()
    played(engine, 3)
    rows = [row for row in engine.rows_of_events if isinstance(row, PhasesRow)]
    waited = sum(row.phase_seconds["reading"] for row in rows)
    assert waited == pytest.approx(engine.timer.seconds["reading"], rel=1e-3)
    assert waited > 0.1
    assert all(row.phase_seconds["train"] > 0 and row.reading_p95 > 0 for row in rows)
    assert max(row.reading_p95 for row in rows) > 0.1
    summary = esper.grow(task_of(Examples()), SETTINGS, run=tmp_path / "run", progress=False)
    assert 0 < summary["reading_p95"] < 60
    assert summary["phase_seconds"]["reading"] > 0
    model = RunModel(history=False).update(esper.open_run(tmp_path / "run").rows())
    share, p95 = model.reading
    assert 0 <= share < 1
    assert p95 > 0


def test_a_run_whose_examples_are_in_memory_waits_for_none():
    summary = esper.grow("iris", {**SETTINGS, "steps": 2}, progress=False)
    assert "reading" not in summary["phase_seconds"]
    assert "reading_p95" not in summary


def test_waits_are_counted_by_their_length():
    waits = Waits()
    lengths = np.random.default_rng(0).lognormal(-6, 2, 2000)
    for length in lengths:
        waits.add(length)
    assert waits.seconds == pytest.approx(lengths.sum())
    exact = np.sort(lengths)[1899]
    assert exact <= Waits.p95(waits.counts) <= 1.051 * exact
    waits.add(0.0)
    waits.add(1e9)
    assert waits.counts[[0, -1]].tolist() == [1, 1]


# Orders that are computed and not held.


@pytest.mark.parametrize("sizes", [(700, 700), (700, 90)])
def test_an_order_that_is_computed_gives_every_example_once_an_epoch(monkeypatch, sizes):
    monkeypatch.setattr(data, "LISTED", 100)
    orders = data.Orders(np.array(sizes), np.array([3, 4]), 5, 30, torch.device("cpu"))
    batches = torch.stack([orders.at(batch).clone() for batch in range(50)], 1)  # (2, 50, 30)
    for row, size in enumerate(sizes):
        per_epoch = size // 30
        epochs = batches[row, : 50 // per_epoch * per_epoch].reshape(-1, per_epoch * 30)
        assert all(len(set(epoch.tolist())) == per_epoch * 30 for epoch in epochs)
        assert 0 <= epochs.min() <= epochs.max() < size
        assert len({tuple(epoch.tolist()) for epoch in epochs}) == len(epochs)
        alone = data.Orders(np.array(sizes[row : row + 1]), np.array([3 + row]), 5, 30, torch.device("cpu"))
        later = alone.at(37)[0]  # without those before it
        assert torch.equal(later, batches[row, 37])
        assert torch.equal(orders.of(np.array([row]), np.array([[37, 2]]))[0], batches[row, [37, 2]])


def test_a_computed_order_takes_no_memory_for_each_example_and_no_time_to_begin():
    orders = data.Orders(np.full(3, 10**12), np.arange(3), 0, 64, torch.device("cpu"))
    assert len(set(orders.at(10**9).flatten().tolist())) == 3 * 64


def test_examples_in_memory_have_the_computed_order_of_streamed_ones(monkeypatch):
    monkeypatch.setattr(data, "LISTED", 100)
    parts = dict(
        zip(
            ("train", "probe", "validation", "test"),
            torch.randperm(1200, generator=torch.Generator().manual_seed(3)).split([900, 100, 100, 100]),
            strict=True,
        )
    )
    tasks = [esper.task("t", Examples(), host=HOST, classes=3, splits=parts, stream=stream) for stream in (False, True)]
    ends = []
    for task in tasks:
        engine = VectorizedEngine(task, config_of(2))
        engine.reset()
        ends.append(played(engine, 5))
    assert ends[0] == ends[1]


# What goes wrong.


def raises():
    raise OSError("the disk with the examples is gone")


@pytest.fixture(scope="module")
def grown():
    """Return the summary of a run whose examples can all be read."""
    return esper.grow(task_of(Examples()), SETTINGS, controller="random-valid", progress=False)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("event", "kind", "words"),
    [
        (
            raises,
            UserCodeError,
            " of the Examples cannot be read: OSError: the disk with the examples is gone; correct",
        ),
        (lambda: (torch.zeros(5), 0), InputError, " has features of shape (5,) and example "),
        (lambda: (torch.zeros(6), 0.5), InputError, ": classes is 3, but y holds values of dtype float64; give whole"),
        *(
            pytest.param(event, InputError, words, marks=SLOW)
            for event, words in (
                (lambda: ({"a": torch.zeros(6)}, 0), " has features of shape {'a': (6,)} and example "),
                (lambda: (torch.full((6,), torch.inf), 0), " holds a NaN or infinite number; replace it"),
                (lambda: (torch.zeros(6), "cat"), " is the text 'cat'; give whole numbers from 0 on"),
            )
        ),
    ],
    ids=["raises", "shape", "label", "structure", "infinite", "text"],
)
def test_what_goes_wrong_in_mid_run_is_a_sentence_and_the_run_is_resumed_to_the_same_bits(
    grown, tmp_path, event, kind, words, workers
):
    with pytest.raises(kind) as raised:
        esper.grow(
            task_of(Examples(), workers, event, after=420),
            SETTINGS,
            controller="random-valid",
            run=tmp_path / "run",
            progress=False,
        )
    sentence = str(raised.value)
    assert "example " in sentence
    assert words in sentence
    assert "\n" not in sentence
    assert f"; esper resume {tmp_path / 'run'} continues after step " in sentence
    resumed = esper.resume(tmp_path / "run", task=task_of(Examples()), progress=False)
    assert {name: resumed[name] for name in SAME} == {name: grown[name] for name in SAME}


@pytest.mark.campaign
@pytest.mark.parametrize("code", [-signal.SIGKILL, 0])
def test_a_worker_that_dies_ends_the_run_with_a_sentence_and_it_is_resumed_to_the_same_bits(
    grown, tmp_path, monkeypatch, code
):
    # torch looks every 5 s whether its workers live; one that left as if well is noticed in no other way
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.5,))

    def dies():
        os._exit(code) if code >= 0 else os.kill(os.getpid(), -code)

    with pytest.raises(InputError) as raised:
        esper.grow(
            task_of(Examples(), 2, dies, after=420),
            SETTINGS,
            controller="random-valid",
            run=tmp_path / "run",
            progress=False,
        )
    sentence = str(raised.value)
    assert sentence.startswith("a worker ended while it read the Examples, after ")
    assert "give workers=0 to see which example it is, or fewer workers where memory ran out; esper resume " in sentence
    assert "\n" not in sentence
    resumed = esper.resume(tmp_path / "run", task=task_of(Examples()), progress=False)
    assert {name: resumed[name] for name in SAME} == {name: grown[name] for name in SAME}


def test_a_dataset_that_cannot_be_sent_to_workers_is_a_sentence(tmp_path):
    method = multiprocessing.get_start_method()
    dataset = Examples()
    dataset.lock = threading.Lock()
    try:
        multiprocessing.set_start_method("spawn", force=True)
        with pytest.raises(InputError) as raised:
            esper.grow(task_of(dataset, 2), SETTINGS, run=tmp_path / "run", progress=False)
    finally:
        multiprocessing.set_start_method(method, force=True)
    assert str(raised.value).startswith(
        "the workers for the Examples could not be started: TypeError: cannot pickle '_thread.lock' object; define the "
        "Dataset at the top of a module and open its files in __getitem__, or give workers=0; esper resume "
    )
    dataset.lock = None
    resumed = esper.resume(tmp_path / "run", task=task_of(dataset), progress=False)
    assert resumed["status"] == "finished"


def test_a_dataset_that_must_stay_in_its_thread_is_told_how_and_trains_there(straight):
    class Table(Examples):
        def __init__(self):
            super().__init__()
            self.table = sqlite3.connect(":memory:")
            self.table.execute("CREATE TABLE examples (place INTEGER PRIMARY KEY)")
            self.table.executemany("INSERT INTO examples VALUES (?)", [(place,) for place in range(len(self.x))])

        def __getitem__(self, index):
            ((place,),) = self.table.execute("SELECT place FROM examples WHERE place = ?", (int(index),)).fetchall()
            return super().__getitem__(place)

    engine = VectorizedEngine(task_of(Table()), config_of(2))
    engine.reset()
    with pytest.raises(
        UserCodeError, match=r"; set data\.read_ahead to 0 if it must be read in the thread that made it$"
    ):
        played(engine, 1)
    engine = VectorizedEngine(task_of(Table()), config_of(0))
    engine.reset()
    assert played(engine, 8) == straight[0]


@pytest.mark.parametrize(("ahead", "workers"), [(0, 0), (2, 0), (2, 2)])
def test_a_dataset_that_blocks_is_said_once_and_changes_nothing(straight, monkeypatch, ahead, workers):
    monkeypatch.setattr(reading, "SLOW", 0.2)
    told, warn = multiprocessing.Event(), reading.warn

    def warned(*given):
        told.set()
        warn(*given)

    def blocked():
        assert told.wait(60)  # until it is said that training waits

    monkeypatch.setattr(reading, "warn", warned)
    engine = VectorizedEngine(task_of(Examples(), workers, blocked, after=700), config_of(ahead))
    engine.reset()
    with pytest.warns(RunWarning) as said:
        assert played(engine, 8) == straight[0]
    (sentence,) = [str(each.message) for each in said if "training has waited" in str(each.message)]
    assert sentence.endswith(
        " of the Examples, and goes on when it is read; if reading is slow throughout, give the task more workers"
    )


@pytest.mark.parametrize(("seconds", "is_said"), [(1.0, True), (0.0, False)])
def test_a_thread_that_takes_the_processor_of_python_is_said(recwarn, monkeypatch, seconds, is_said):
    """Check with a clock of the test's own: what a thread takes of a real processor depends on what else it does."""
    clock = count(0.0, seconds)
    monkeypatch.setattr(reading, "thread_time", lambda: next(clock))
    engine = VectorizedEngine(task_of(Examples()), config_of(2))
    engine.reset()
    played(engine, 8)
    said = [str(each.message) for each in recwarn if "a thread takes" in str(each.message)]
    assert len(said) == is_said
    assert all("of the Examples, beside the training" in each and "workers=2" in each for each in said)
