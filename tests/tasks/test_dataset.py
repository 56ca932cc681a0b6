"""Check that real workers read a Dataset as one process does; what raises in one, or ends it, is one sentence."""

import os
import signal
import subprocess
import sys
import traceback

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import esper
from esper.leyline.messages import InputError, UserCodeError
from esper.tasks.hosts import MLP
from esper.tasks.own.custom import task_from
from esper.tasks.own.examples import CHUNK, read_dataset

N = 2 * CHUNK + 9
HOST = MLP(4, 8, (2,), 3)


class Numbered(Dataset):
    """Holds examples in other dtypes and layouts than they end up in, and an event at one of them."""

    def __init__(self, at=None, event=None):
        self.at, self.event = at, event
        self.x = torch.randn(4, N, generator=torch.Generator().manual_seed(0)).T  # a row of it has a stride

    def __len__(self):
        return N

    def __getitem__(self, index):
        if index == self.at:
            return self.event(index)
        return self.x[index], np.int64(index % 3)


def raises(index):
    raise LookupError(f"no picture {index}\nand a second line")


def raises_nothing_said(index):
    raise ZeroDivisionError


def leaves(index):
    os._exit(3)


def leaves_as_if_well(index):
    os._exit(0)


def is_killed(index):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_read_the_same_task_bit_for_bit(workers):
    mine, theirs = (task_from("t", Numbered(), host=HOST, workers=count) for count in (0, workers))
    for part in ("train", "probe", "validation", "test"):
        for a, b in zip(getattr(mine, part), getattr(theirs, part), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
            assert a.stride() == b.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8, torch.bool])
def test_workers_hand_over_every_dtype(dtype):
    x = torch.randn(9, 2, 3).to(dtype)
    data = TensorDataset(x, torch.arange(9))
    for a, b in zip(read_dataset(data, 2), (x, torch.arange(9)), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_what_workers_read_is_converted_to_the_default_dtype_of_the_caller():
    data = list(zip(np.zeros((5, 2)), range(5), strict=True))
    try:
        torch.set_default_dtype(torch.float64)
        read = [read_dataset(Listed(data), workers)[0].dtype for workers in (0, 1)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert read == [torch.float64] * 2
    assert [read_dataset(Listed(data), workers)[0].dtype for workers in (0, 1)] == [torch.float32] * 2


class Listed(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def test_reading_by_workers_draws_nothing_from_the_callers_generator():
    before = torch.get_rng_state()
    task_from("t", Numbered(), host=HOST, workers=2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("event", "words"),
    [
        (raises, "LookupError: no picture 70"),
        (raises_nothing_said, "ZeroDivisionError"),
    ],
)
def test_an_example_that_raises_is_named_with_what_it_raised(workers, event, words):
    with pytest.raises(UserCodeError) as raised:
        task_from("t", Numbered(70, event), host=HOST, workers=workers)
    assert str(raised.value) == (
        f"example 70 of the Numbered cannot be read: {words}; correct the Dataset, or leave the example out "
        "with torch.utils.data.Subset"
    )
    trace = "".join(traceback.format_exception(raised.value.__cause__))
    assert f"in {event.__name__}" in trace, "the traceback leads to the line of the Dataset"
    assert words.split(":")[0] in trace


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("event", "words"),
    [
        (lambda index: 3, "example 70 of the Dataset is an int, not a pair"),
        (lambda index: (torch.zeros(4), lambda: 0), "the label or target of example 70 is a function"),
        (lambda index: (torch.zeros(5), 0), "example 70 has features of shape (5,) and example 0 of shape (4,)"),
    ],
)
def test_an_example_that_cannot_be_used_is_named_by_workers_too(workers, event, words):
    with pytest.raises(InputError) as raised:
        task_from("t", Numbered(70, event), host=HOST, workers=workers)
    assert str(raised.value).startswith(words)
    del raised  # and the workers with it, for which the garbage collector would wait for 10 s


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("event", "end"), [(leaves, "exit code 3"), (leaves_as_if_well, "exit code 0"), (is_killed, "signal 9 (SIGKILL)")]
)
def test_a_worker_that_dies_is_one_sentence(event, end, monkeypatch):
    # torch looks every 5 s whether its workers live; one that left as if well is noticed in no other way
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.5,))
    with pytest.raises(InputError) as raised:
        task_from("t", Numbered(70, event), host=HOST, workers=2)
    sentence = str(raised.value)
    assert sentence.startswith("a worker ended while it read the Numbered, ")
    assert sentence.endswith(
        f": {end}; give workers=0 to see which example it is, or fewer workers where memory ran out"
    )
    assert "\n" not in sentence


@pytest.mark.campaign
def test_no_worker_is_left_behind_where_one_fails():
    code = (
        "import os, sys, torch\nsys.path.insert(0, 'tests/tasks')\n"
        "from test_dataset import HOST, Numbered, UserCodeError, raises, task_from\n"
        "try: task_from('t', Numbered(70, raises), host=HOST, workers=2)\n"
        "except UserCodeError: print(len(torch.multiprocessing.active_children()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "0\n"


@pytest.mark.parametrize(
    ("data", "workers", "words"),
    [
        (Numbered(), -1, "workers is -1; give a number of processes"),
        (Numbered(), True, "workers is True; give a number of processes"),
        (Numbered(), 1.5, "workers is 1.5; give a number of processes"),
        (torch.zeros(3, 4), 2, "workers is 2, but x is a Tensor, and workers read a Dataset only; leave workers out"),
        (DataLoader(Numbered()), 2, "x is a DataLoader; give its data set"),
    ],
)
def test_what_are_no_workers_is_refused_in_a_sentence(data, workers, words):
    with pytest.raises(InputError, match=f"^{words}"):
        task_from("t", data, torch.arange(3) if isinstance(data, torch.Tensor) else None, host=HOST, workers=workers)


@pytest.mark.parametrize("stream", [False, True])
def test_labels_beside_a_dataset_are_refused(stream):
    data = TensorDataset(torch.randn(12, 4), torch.arange(12) % 2)
    labels = torch.zeros(12, dtype=torch.long)
    names = ("train", "probe", "validation", "test")
    given = {"stream": stream, "host": esper.mlp(4, classes=2), **({"classes": 2} if stream else {})}
    with pytest.raises(InputError, match="x is a Dataset, which contains its own labels, and y was given too"):
        esper.task("own", data, labels, **given)
    with pytest.raises(InputError, match="y was given without x; leave y out"):
        esper.task("own", y=labels, splits=dict.fromkeys(names, data), **given)
    if not stream:
        with pytest.raises(
            InputError, match="the train split is a Dataset, which contains its own labels, beside others"
        ):
            esper.task("own", splits=dict.fromkeys(names, (data, labels)), **given)
