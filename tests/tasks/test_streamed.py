"""Check that a Dataset read batch by batch gives the numbers of one in memory, in bounded memory, or says what is wrong."""

import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import esper
from esper.leyline.data.task import SENSED
from esper.leyline.messages import InputError, RunWarning, UserCodeError
from esper.store.checkpoint import flatten, unflatten
from esper.tamiyo.rules.base import RandomValid
from esper.tasks.hosts import MLP, Transformer
from esper.tasks.own import examples as own_examples
from esper.tasks.own.examples import HELD
from esper.tasks.splits import Splits
from esper.tolaria.engine import VectorizedEngine
from populations import small_config

HOST = MLP(inputs=6, width=8, hidden=(3, 5), outputs=3)
PARTS = dict(
    zip(
        Splits._fields,
        torch.randperm(700, generator=torch.Generator().manual_seed(3)).split([520, 60, 60, 60]),
        strict=True,
    )
)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(2, 8)

    def forward(self, first, second):
        return self.a(first) + self.b(second)


def both():
    return esper.SegmentedHost([Both(), nn.Sequential(nn.ReLU(), nn.Linear(8, 3))], [esper.SlotSpec("fused", 0, 8)])


class Named(Dataset):
    """Gives examples of two tensors."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return {"first": x[:4], "second": x[4:]}, y


def labelled():
    x = torch.randn(700, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, :3].argmax(1) + (x[:, 5] > 1)) % 3)


def targets():
    data = labelled()
    return TensorDataset(data.tensors[0], data.tensors[0][:, :2].sum(1, keepdim=True))


def played(engine, steps):
    client = RandomValid()
    for _ in range(steps):
        engine.step(client.act(engine.view()))
    return {name: tensor.numpy().tobytes() for name, tensor in flatten(engine.snapshot())[0].items()}


TASKS = {
    "labels": (labelled, {"classes": 3, "splits": PARTS}, HOST),
    "mappings": (lambda: Named(labelled()), {"classes": 3, "splits": PARTS}, both),
    "targets": (targets, {"kind": "regression"}, MLP(inputs=6, width=8, hidden=(3, 5), outputs=1)),
}


@pytest.mark.parametrize(
    "name", ["mappings", *(pytest.param(name, marks=pytest.mark.slow) for name in ("labels", "targets"))]
)
def test_a_streamed_dataset_trains_to_the_same_bits_as_in_memory_and_resumes_there(name):
    make, options, host = TASKS[name]
    kept, streamed = (esper.task("t", make(), host=host, stream=each, **options) for each in (False, True))
    assert kept.examples == streamed.examples > len(streamed.train.y) == SENSED
    for part in Splits._fields[1:]:
        assert torch.equal(getattr(kept, part).y, getattr(streamed, part).y)
    config = small_config(steps=9, envs=3, baselines=["twin"], data={"batch_size": 48, "batches_per_step": 4})
    engines = [VectorizedEngine(task, config) for task in (kept, streamed, streamed)]
    for engine in engines:
        engine.reset()
    straight, other = (played(engine, 6) for engine in engines[:2])  # 24 batches: more than an epoch of 10
    assert straight == other
    middle = engines[0].snapshot()
    engines[2].restore(unflatten(*flatten(middle)))
    ends = [played(engine, 2) for engine in (engines[1], engines[2])]
    assert ends[0] == ends[1]


class Large(Dataset):
    """Makes 800 MB in examples of 4 KB when they are asked for; counts how many of them are alive."""

    def __init__(self):
        self.alive = self.most = self.reads = 0

    def __len__(self):
        return 200_000

    def __getitem__(self, index):
        self.reads += 1
        self.alive += 1
        self.most = max(self.most, self.alive)
        x = torch.randn(1000, generator=torch.Generator().manual_seed(index))
        weakref.finalize(x, self.freed)
        return x, int(x[0] > 0)

    def freed(self):
        self.alive -= 1


def test_few_examples_of_a_large_dataset_are_alive_at_a_time(tmp_path):
    data = Large()
    parts = dict(zip(Splits._fields, torch.arange(200_000).split([199_700, 100, 100, 100]), strict=True))
    task = esper.task("large", data, host=MLP(1000, 4, (2,), 2), classes=2, splits=parts, stream=True)
    assert data.reads == SENSED + 300
    data.most = data.alive
    settings = {
        "envs": 2,
        "steps": 2,
        "data": {"batch_size": 16, "batches_per_step": 3},
        "models": "none",
        "baselines": [],
    }
    summary = esper.grow(task, settings, run=tmp_path / "run", progress=False)
    assert summary["status"] == "finished"
    assert data.most <= 2 * 16  # both environments' batch
    assert data.reads <= SENSED + 300 + 2 * 2 * 3 * 16
    assert summary["examples"]["train"] == 199_700


def test_a_run_on_a_streamed_dataset_is_resumed_and_other_examples_are_refused(tmp_path):
    def task(parts):
        return esper.task("t", labelled(), host=HOST, classes=3, stream=True, splits=parts)

    settings = {
        "envs": 2,
        "steps": 5,
        "data": {"batch_size": 32, "batches_per_step": 4},
        "models": "none",
        "baselines": [],
    }
    straight = esper.grow(task(PARTS), settings, run=tmp_path / "straight", progress=False)
    esper.grow(task(PARTS), {**settings, "steps": 3}, run=tmp_path / "run", progress=False)
    other = {**PARTS, "train": PARTS["train"].flip(0)}
    with pytest.raises(InputError, match=r"the data differ, by sha256, .*: train, source of task t"):
        esper.resume(tmp_path / "run", task=task(other), settings={"steps": 5})
    resumed = esper.resume(tmp_path / "run", task=task(PARTS), settings={"steps": 5}, progress=False)
    assert resumed["test_accuracy"] == straight["test_accuracy"]
    assert resumed["test_loss"] == straight["test_loss"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_dataset_that_blocks_before_anything_is_trained_is_named(stream, monkeypatch):
    told = threading.Event()

    class Blocks(TensorDataset):
        def __getitem__(self, index):
            assert told.wait(60), "a warning comes while it blocks"
            return super().__getitem__(index)

    def warn(*arguments, of=own_examples.warn):
        of(*arguments)
        told.set()

    monkeypatch.setattr(own_examples, "SLOW", 0.0)
    monkeypatch.setattr(own_examples, "warn", warn)
    held = 700 if stream else 1000  # with stream, the first 256 of train, and the three other splits
    examples = Blocks(torch.randn(1000, 6), torch.arange(1000) % 3)
    splits = {"train": range(544), "probe": range(544, 700), "validation": range(700, 850), "test": range(850, 988)}
    words = rf"^reading {held} examples of the Blocks into memory has taken 0 seconds so far and goes on; nothing is trained"
    with pytest.warns(RunWarning, match=words if stream else words.replace("1000", "1,000")):
        esper.task("t", examples, host=HOST, classes=3, stream=stream, splits=splits)


def test_splits_by_fractions_hold_a_bounded_number_of_examples():
    data = TensorDataset(torch.zeros(40_000, 1).bernoulli_(0.5), torch.arange(40_000) % 2)
    task = esper.task("t", data, host=MLP(1, 4, (2,), 2), classes=2, stream=True)
    assert [len(getattr(task, part).y) for part in Splits._fields] == [SENSED, HELD, HELD, HELD]
    assert task.examples == 40_000 - 3 * HELD


def test_labels_of_positions_are_read_as_such_where_those_of_one_example_look_one_hot():
    y = torch.randint(0, 2, (700, 2), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(torch.randn(700, 6), y)

    def host():
        last = nn.Sequential(nn.Linear(8, 4), nn.Unflatten(-1, (2, 2)))
        return esper.SegmentedHost([nn.Linear(6, 8), last], [esper.SlotSpec("only", 0, 8)])

    task = esper.task("t", data, host=host, classes=2, stream=True, splits=PARTS)
    place = int((y[PARTS["train"]].sum(1) == 1).nonzero()[0])
    assert torch.equal(task.source.read(np.array([place])).y, y[PARTS["train"]][[place]])


def test_every_split_may_be_a_dataset_of_its_own():
    data = labelled()
    splits = {name: torch.utils.data.Subset(data, part.tolist()) for name, part in PARTS.items()}
    one, other = (
        esper.task("t", *given, host=HOST, classes=3, stream=True, splits=each)
        for given, each in (((), splits), ((data,), PARTS))
    )
    for part in Splits._fields:
        assert torch.equal(getattr(one, part).x, getattr(other, part).x)


def test_tokens_of_a_file_are_streamed_to_the_same_batches(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50, 9_000).astype(np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    file = np.memmap(tmp_path / "tokens.bin", np.uint16, "r")
    host = Transformer(50, 8, 1, 2, 8)
    config = small_config(envs=2, steps=4, data={"batch_size": 8, "batches_per_step": 2})
    engines = [
        VectorizedEngine(esper.task("t", given, host=host, stream=stream), config)
        for given, stream in ((torch.from_numpy(tokens.astype(np.int64)), False), (file, True))
    ]
    for engine in engines:
        engine.reset()
    kept, streamed = (played(engine, 3) for engine in engines)
    assert kept == streamed


# What is wrong.


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


class Bad(Dataset):
    """Gives examples that are sound up to one of them."""

    def __init__(self, event):
        self.event = event

    def __len__(self):
        return 700

    def __getitem__(self, index):
        return self.event() if index == 690 else (torch.zeros(6), index % 3)


def fails():
    raise OSError("disk gone")


@pytest.mark.parametrize(
    ("event", "kind", "words"),
    [
        (fails, UserCodeError, "example 690 of the Bad cannot be read: OSError: disk gone; correct the Dataset"),
        (lambda: (torch.full((6,), torch.nan), 0), InputError, "example 690 of the Bad holds a NaN or infinite number"),
        (lambda: (torch.zeros(6), 3), InputError, "example 690 of the Bad has a label that is not from 0 to 2"),
        (lambda: (torch.zeros(5), 0), InputError, "example 690 has features of shape (5,) and example "),
    ],
)
def test_an_example_that_cannot_be_used_is_named_when_it_is_read(event, kind, words):
    splits = {
        name: torch.arange(start, stop)
        for name, start, stop in (("probe", 0, 50), ("validation", 50, 99), ("test", 99, 150))
    }
    splits["train"] = torch.cat([torch.arange(150, 690), torch.tensor([690])])
    task = esper.task("t", Bad(event), host=HOST, classes=3, stream=True, splits=splits)
    engine = VectorizedEngine(task, small_config(envs=1, steps=24, data={"batch_size": 180, "batches_per_step": 3}))
    engine.reset()
    with pytest.raises(kind) as raised:
        played(engine, 1)
    assert str(raised.value).startswith(words)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (Endless(), {"classes": 3}, "x is an Endless, an IterableDataset, whose examples have no index"),
        (
            torch.zeros(9, 6),
            {"classes": 3},
            "stream is True, but examples are a Tensor, which is in memory; give a torch",
        ),
        (labelled(), {}, "stream is True, so the labels are not all read beforehand; give classes"),
        (
            labelled(),
            {"classes": 3, "standardize": True},
            "standardize is True, but the training examples are read batch by",
        ),
        (
            labelled(),
            {"classes": 3, "class_weights": "balanced"},
            "class_weights was given, but the training examples are",
        ),
        (
            labelled(),
            {"classes": 3, "workers": -1},
            "workers is -1; give a number of processes, or 0 to read in this one",
        ),
        (labelled(), {"classes": 3, "stream": 1}, "stream is 1; give True or False"),
        (labelled(), {"classes": 3, "length": 8}, "length is 8, but no tokens are cut into windows; leave length out"),
    ],
)
def test_what_cannot_be_streamed_is_refused_in_a_sentence(given, options, words):
    with pytest.raises(InputError) as raised:
        esper.task("t", given, host=HOST, **{"stream": True, **options})
    assert str(raised.value).startswith(words)
    assert "\n" not in str(raised.value)


def test_examples_that_are_read_later_cannot_be_skipped_beforehand():
    task = esper.task("t", labelled(), host=HOST, classes=3, stream=True)
    with pytest.raises(InputError, match=r"data.nonfinite is skip, but t reads its training examples batch by batch"):
        VectorizedEngine(task, small_config(data={"nonfinite": "skip", "batch_size": 8}))
