"""Test examples that are several tensors, or whole numbers: real data, grown, exported, loaded and asked."""

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import esper
from esper.kasmina.host import SegmentedHost
from esper.leyline.lifecycle.slots import SlotSpec
from esper.leyline.messages import InputError

LENGTH, AHEAD = 12, 2
SETTINGS = {
    "envs": 2,
    "steps": 6,
    "optimizer": {"lr": 1e-2},
    "data": {"batch_size": 32, "batches_per_step": 8},
    "controller": "random-valid",
}


class Reader(nn.Module):
    """Reads bytes (B, L) into one vector."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 6)
        self.linear = nn.Linear(6 * LENGTH, 32)

    def forward(self, ids):
        return self.linear(self.embed(ids).flatten(-2))


class Head(nn.Module):
    """Maps one vector to the logits of the next bytes, (B, AHEAD, 256)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 256 * AHEAD)

    def forward(self, h):
        return self.linear(h).unflatten(-1, (AHEAD, 256))


def byte_host():
    return SegmentedHost(
        [Reader(), nn.Sequential(nn.ReLU(), nn.Linear(32, 32)), Head()],
        [SlotSpec("read", 0, 32), SlotSpec("mixed", 1, 32)],
    )


@pytest.fixture(scope="module")
def text():
    """Return windows of the source of a module of the standard library: bytes (N, LENGTH), and the bytes that follow."""
    source = (Path(sysconfig.get_path("stdlib")) / "textwrap.py").read_bytes()
    windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(source, np.uint8), LENGTH + AHEAD)[:6000:3]
    return windows[:, :LENGTH], windows[:, LENGTH:]


@pytest.mark.parametrize("mapping", ["auto", pytest.param("loop", marks=pytest.mark.slow)])
def test_a_model_of_bytes_learns_to_predict_the_next_ones(text, tmp_path, mapping):
    x, y = text
    task = esper.task("bytes", x, y, host=byte_host, kind="classification", classes=256)
    assert task.train.x.dtype == torch.int64
    summary = esper.grow(task, {**SETTINGS, "mapping": mapping}, run=tmp_path)
    space = np.bincount(y.flatten()).max() / y.size
    assert summary["test_accuracy"]["grown"][0] > space  # more than the most frequent byte alone
    folder = next((tmp_path / "models").iterdir())
    topology = json.loads((folder / "topology.json").read_text())
    assert (topology["format"], topology["input"], topology["example"], topology["target"]) == (
        3,
        [LENGTH],
        "int64",
        [AHEAD],
    )
    assert all(seed["blueprint"].startswith("bypass") is False for seed in topology["seeds"] if seed["slot"] == "read")
    network = esper.load(folder, host=byte_host)
    ids = torch.from_numpy(x[:50].astype(np.int64))
    assert np.array_equal(network.predict(x[:50]), network(ids).argmax(-1).numpy())
    program = torch.export.load(folder / "model.pt2").module()
    torch.testing.assert_close(program(ids), network(ids))
    with pytest.raises(InputError, match=r"^x has dtype torch.float32, but the network takes whole numbers there"):
        network.predict(x[:50] + np.float32(0.5))


class Fuse(nn.Module):
    """Maps an image and the sums of its rows to one vector."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(-3), nn.Linear(64, 16))
        self.sums = nn.Linear(8, 16)

    def forward(self, image, row_sums):
        return self.image(image / 16) + self.sums(row_sums / 64)


def fused_host():
    return SegmentedHost(
        [Fuse(), nn.Sequential(nn.ReLU(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 16)), nn.Linear(16, 10)],
        [SlotSpec("fused", 0, 16), SlotSpec("narrow", 1, 16)],
    )


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    return data.images[:, None], data.images.sum(2), data.target


@pytest.mark.parametrize(
    ("mapping", "as_tuple"),
    [
        ("auto", False),
        pytest.param("auto", True, marks=pytest.mark.slow),
        pytest.param("loop", False, marks=pytest.mark.slow),
    ],
)
def test_a_batch_of_several_tensors_is_trained_exported_and_asked_by_name_or_in_order(
    digits, tmp_path, mapping, as_tuple
):
    image, row_sums, y = digits
    x = (image, row_sums) if as_tuple else {"image": image, "row_sums": row_sums}
    task = esper.task("digits-both", x, y, host=fused_host)
    summary = esper.grow(task, {**SETTINGS, "mapping": mapping}, run=tmp_path)
    assert summary["test_accuracy"]["grown"][0] > 0.4
    folder = next((tmp_path / "models").iterdir())
    topology = json.loads((folder / "topology.json").read_text())
    assert topology["format"] == 3
    assert topology["input"] == ([[1, 8, 8], [8]] if as_tuple else {"image": [1, 8, 8], "row_sums": [8]})
    assert {seed["blueprint"] for seed in topology["seeds"] if seed["slot"] == "fused"} <= {
        "mlp-small",
        "mlp-large",
        "affine",
        "gated",
        "norm",
    }
    network, tensors = (
        esper.load(folder, host=fused_host),
        [torch.from_numpy(part[:40]).float() for part in (image, row_sums)],
    )
    program = torch.export.load(folder / "model.pt2").module()
    if as_tuple:
        expected = network(*tensors)
        torch.testing.assert_close(program(*tensors), expected)
        found = network.predict((image[:40], row_sums[:40]))
    else:
        expected = network(image=tensors[0], row_sums=tensors[1])
        torch.testing.assert_close(program(image=tensors[0], row_sums=tensors[1]), expected)
        torch.testing.assert_close(network(row_sums=tensors[1], image=tensors[0]), expected)
        found = network.predict({"row_sums": row_sums[:40], "image": image[:40]})
    assert np.array_equal(found, expected.argmax(1).numpy())


def test_a_grown_network_of_several_tensors_grows_further(digits, tmp_path):
    image, row_sums, y = digits
    x = {"image": image, "row_sums": row_sums}
    esper.grow(esper.task("first", x, y, host=fused_host), SETTINGS, run=tmp_path)
    folder = next((tmp_path / "models").iterdir())
    again = esper.task("again", x, y, host=lambda: esper.load(folder, host=fused_host))
    assert esper.grow(again, SETTINGS)["test_accuracy"]["grown"][0] > 0.4


def test_splits_of_several_tensors_are_taken_as_they_come(digits):
    image, row_sums, y = digits
    order = np.array_split(np.arange(len(y)), 4)
    splits = {
        name: ({"row_sums": row_sums[i], "image": image[i]}, y[i])
        for name, i in zip(("train", "probe", "validation", "test"), order, strict=True)
    }
    task = esper.task("splits", host=fused_host, splits=splits)
    assert task.inputs == {"row_sums": (8,), "image": (1, 8, 8)}
    assert torch.equal(task.probe.x["row_sums"], torch.from_numpy(row_sums[order[1]]).float())


def test_a_mask_of_truth_values_stays_one_and_counts_become_numbers():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 8)

        def forward(self, x, mask):
            return self.linear(x.masked_fill(mask, 0))

    def host():
        return SegmentedHost([Masked(), nn.Linear(8, 2)], [SlotSpec("only", 0, 8)])

    def plain():
        return SegmentedHost([nn.Linear(5, 8), nn.Linear(8, 2)], [SlotSpec("only", 0, 8)])

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(90, 5, generator=generator), torch.arange(90) % 2
    task = esper.task("masked", {"x": x, "mask": x > 1}, y, host=host)
    assert task.train.x["mask"].dtype == torch.bool
    assert esper.task("counts", torch.arange(450).view(90, 5), y, host=plain).train.x.dtype == torch.float32
    assert np.isfinite(esper.grow(task, {**SETTINGS, "data": {"batch_size": 8}})["test_accuracy"]["grown"][0])


@pytest.mark.parametrize(
    ("x", "options", "sentence"),
    [
        ({}, {}, "x is an empty mapping; give at least one tensor"),
        (
            {3: np.zeros((90, 2))},
            {},
            "x has the key 3, which no forward can take as a name; give names such as 'image'",
        ),
        (
            {"image": np.zeros((90, 1, 8, 8)), "row_sums": np.zeros((89, 8))},
            {},
            "x['row_sums'] holds 89 examples and y 90",
        ),
        (
            {"image": np.zeros((90, 1, 8, 8)), "row_sums": [[1.0], [2.0, 3.0]]},
            {},
            "x['row_sums'] is a list that cannot be read",
        ),
        (
            {"image": np.zeros((90, 1, 8, 8)), "row_sums": np.full((90, 8), "a")},
            {},
            "x['row_sums'] holds text, such as 'a'",
        ),
        (
            {"image": np.zeros((90, 1, 8, 8)), "row_sums": np.zeros((90, 0))},
            {},
            "x['row_sums'] has shape (90, 0); give at least",
        ),
        (
            {"image": np.zeros((90, 1, 8, 8)), "sums": np.zeros((90, 8))},
            {},
            "an example of the task holds the tensors 'image', 'sums', but segment 0 of "
            "the host has forward(image, row_sums), which does not take them: ",
        ),
        (
            (np.zeros((90, 1, 8, 8)), np.zeros((90, 8)), np.zeros((90, 2))),
            {},
            "an example of the task holds 3 tensors, but segment 0",
        ),
        (
            {"image": np.zeros((90, 1, 8, 8)), "row_sums": np.full((90, 8), np.nan)},
            {},
            "x['row_sums'] holds NaN or infinite values, in examples 0, 1, 2, 3, 4, ... (90 of 90)",
        ),
        (
            {"image": np.zeros((90, 1, 8, 8)), "row_sums": np.zeros((90, 8))},
            {"standardize": True},
            "the task has standardize, but its examples are 2 tensors; leave standardize out",
        ),
        (
            {"image": np.zeros((90, 1, 8, 8)), "row_sums": np.zeros((90, 7))},
            {},
            "segment 0 of the host cannot run on its input: ",
        ),
    ],
)
def test_bad_batches_are_refused_in_a_sentence(x, options, sentence):
    with pytest.raises(InputError) as error:
        esper.task("bad", x, np.arange(90) % 10, host=fused_host, classes=10, **options)
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (np.zeros((4, 8)), "x is an ndarray, but the network takes a mapping with the keys image, row_sums; give that"),
        (
            {"image": np.zeros((4, 1, 8, 8))},
            "x has the keys image, but the network takes a mapping with the keys image, row_sums",
        ),
        (
            {"image": np.zeros((4, 1, 8, 8)), "row_sums": np.zeros((3, 8))},
            "x holds different numbers of examples, 4 in x['image'] and 3 in x['row_sums']",
        ),
        (
            {"image": np.zeros((4, 1, 8, 8)), "row_sums": np.zeros((4, 7))},
            "x['row_sums'] has shape (4, 7), but the network takes examples of (8,)",
        ),
    ],
)
def test_a_network_refuses_what_it_cannot_take_in_a_sentence(digits, asked, x, sentence):
    with pytest.raises(InputError) as error:
        asked.predict(x)
    assert str(error.value).startswith(sentence)


@pytest.fixture(scope="module")
def asked(digits, tmp_path_factory):
    image, row_sums, y = digits
    folder = tmp_path_factory.mktemp("asked") / "run"
    task = esper.task("asked", {"image": image, "row_sums": row_sums}, y, host=fused_host)
    esper.grow(task, {**SETTINGS, "steps": 1}, run=folder)
    return esper.load(next((folder / "models").iterdir()), host=fused_host)
