"""Test streams of a person's own data."""

import numpy as np
import pytest
import torch

from esper.leyline.messages import InputError
from esper_bench.streams.comparison import stream
from esper_bench.streams.data import Segment
from esper_bench.streams.own import own_streams

RANDOM = np.random.default_rng(1)
COUNT = 300
ARRAYS = {
    "features": RANDOM.normal(3, 2, (COUNT, 4, 2)),
    "labels": RANDOM.choice(["cat", "dog", "eel"], COUNT),
    "contexts": np.repeat(["a", "b", "a"], 100),
}


def test_runs_of_equal_contexts_are_segments_and_their_examples_keep_their_order():
    streams = own_streams(ARRAYS, [4, 5])
    assert streams.segments == ((Segment(0, 2, 0), Segment(2, 4, 1), Segment(4, 6, 0)),) * 2
    assert (streams.updates, streams.inputs, streams.classes) == (6, 8, 3)
    x, y = streams.batch(0)
    kept = [index for index in range(40) if index % 5 != 4][:32]
    wide = ARRAYS["features"].reshape(COUNT, 8)
    np.testing.assert_allclose(x[1], (wide[kept] - wide.mean()) / wide.std(), atol=1e-5)
    assert [("cat", "dog", "eel")[label] for label in y[0]] == ARRAYS["labels"][kept].tolist()


def test_test_examples_are_of_the_context_and_in_no_batch():
    streams = own_streams(ARRAYS, [4])
    x, _ = streams.test(np.array([1]), 160)
    own = streams.x[104:200:5]  # of the second segment, every fifth
    assert all((own == example).all(1).any() for example in x[0])
    support, tested = ({tuple(example.tolist()) for example in each} for each in (x[0, :32], x[0, 32:]))
    assert not support & tested


def test_a_file_is_played_as_its_arrays_and_lengths_as_contexts(tmp_path):
    np.savez(tmp_path / "own.npz", **{**ARRAYS, "labels": ARRAYS["labels"].astype("U8")})
    record = stream(["adamw", "shipped"], data=tmp_path / "own.npz", streams=2)
    assert (record["change"], record["updates"]) == ("data", 6)
    assert stream(["adamw", "shipped"], data=ARRAYS, streams=2) == record
    one = own_streams({**{k: v for k, v in ARRAYS.items() if k != "contexts"}, "segments": [100, 100, 100]}, [4])
    assert [segment.context for segment in one.segments[0]] == [0, 1, 2]
    assert torch.equal(one.x, own_streams(ARRAYS, [4]).x)


def without(name, **arrays):
    return {key: value for key, value in {**ARRAYS, **arrays}.items() if key != name}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (without("contexts"), "the data have no segments and no contexts; give features"),
        (without("", segments=[300]), "the data have both contexts and segments"),
        (without("labels"), "the data have no labels; give features"),
        (without("features"), "the data have no features; give features"),
        (without("", labels=[1, 2]), r"labels have the shape \(2,\), but there are 300 features"),
        (without("", labels=[1] * 300), "all labels are 1; give at least two classes"),
        (without("", contexts=[1, 2]), r"contexts have the shape \(2,\), but there are 300 features"),
        (without("contexts", segments=[100, 100]), "give lengths of at least 1 that add up to 300"),
        (without("", contexts=[0] * 290 + [1] * 10), "segment 1 has 10 examples; give at least 40"),
        (without("", features=np.zeros(300)), r"features have the shape \(300,\) and the dtype float64; give numbers"),
        (without("", features=np.full((300, 2), np.nan)), "features hold nan or infinite numbers"),
        (without("", features=np.ones((300, 2))), "all features are equal"),
        (without("", labels=np.array([{}] * 300)), "labels are Python objects"),
        (without("", labels=np.full(300, np.nan)), "labels hold nan; give each example one of the labels"),
        (without("", contexts=np.full(300, np.nan)), "contexts hold nan; give each example one of the contexts"),
        (without("", features=1e300 * np.arange(600.0).reshape(300, 2)), "features hold numbers beyond the range"),
        ("missing.npz", "missing.npz cannot be read: No such file or directory"),
    ],
)
def test_bad_data_are_one_sentence(data, said):
    with pytest.raises(InputError, match=said):
        stream("adamw", data=data, streams=1)


def test_other_bad_input_is_one_sentence(tmp_path):
    (tmp_path / "own.npz").write_text("no")
    with pytest.raises(InputError, match=r"own.npz cannot be read: it is no .npz file of plain arrays"):
        stream("adamw", data=tmp_path / "own.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"one.npy is a single array, not a .npz file; give features"):
        stream("adamw", data=tmp_path / "one.npy")
    with pytest.raises(InputError, match="updates is 7, but the data have 6 batches of 32"):
        stream("adamw", data=ARRAYS, updates=7)
    with pytest.raises(InputError, match="change is 'novel', but data are given, too; give one of them"):
        stream("adamw", "novel", data=ARRAYS)
