"""Test a task of one's own from tokens: windows of a stream, splits that do not overlap, and sentences for what is wrong."""

import numpy as np
import pytest
import torch

import esper
from esper.leyline.messages import InputError
from esper.tasks.hosts import GRU, Transformer
from esper.tasks.objectives import NextByte, NextToken
from esper.tasks.splits import Splits

HOST = Transformer(vocabulary=50, width=8, layers=1, heads=2, length=8)
STREAM = torch.arange(50).repeat(40)


def parts_of(task):
    return [getattr(task, name) for name in Splits._fields]


def test_a_stream_is_cut_into_windows_and_its_splits_follow_one_another():
    task = esper.task("t", STREAM, host=HOST)
    x, y = (torch.cat([getattr(part, name) for part in parts_of(task)]) for name in ("x", "y"))
    assert torch.equal(x.flatten(), STREAM[: 249 * 8])
    assert torch.equal(y.flatten(), STREAM[1 : 249 * 8 + 1])
    assert [len(part.y) for part in parts_of(task)] == [149, 38, 25, 37]
    assert isinstance(task.objective, NextToken)
    assert (task.objective.metric, task.objective.outputs) == ("neg_bits_per_token", 50)


def test_a_large_vocabulary_leaves_fewer_windows_to_the_splits_that_are_measured():
    task = esper.task("t", torch.arange(128_001) % 20_000, host=Transformer(20_000, 2, 1, 1, 128))
    assert [len(part.y) for part in parts_of(task)] == [692, 104, 100, 104]


def test_windows_are_dealt_at_random_and_predict_the_next_token_too():
    windows = torch.arange(900).reshape(100, 9) % 50
    task = esper.task("t", windows, host=HOST)
    assert all(torch.equal((part.x + 1) % 50, part.y) for part in parts_of(task))
    assert sorted(torch.cat([part.x for part in parts_of(task)]).tolist()) == sorted(windows[:, :-1].tolist())


def test_every_split_may_be_a_stream_and_bytes_are_counted_in_bits_per_byte():
    text = {name: (name * 80).encode() for name in Splits._fields}
    task = esper.task("t", host=GRU(256, 8, 1), splits=text, length=10)
    for name, part in zip(Splits._fields, parts_of(task), strict=True):
        assert bytes(part.x.flatten().tolist()) in text[name]
    assert isinstance(task.objective, NextByte)


GROWN = [HOST, pytest.param(GRU(vocabulary=50, width=8, layers=1), marks=pytest.mark.slow)]


@pytest.mark.parametrize("host", GROWN, ids=["transformer", "gru"])
def test_tokens_are_grown_and_the_network_predicts_the_next(host, tmp_path):
    settings = {
        "envs": 2, "steps": 12, "data": {"batch_size": 16, "batches_per_step": 4}, "optimizer": {"lr": 0.02},
        "baselines": [], "gates": {"permissive": True}, "controller": "random-valid",
    }  # fmt: skip
    task = esper.task("t", STREAM.to(torch.uint8), host=host, length=8)
    summary = esper.grow(task, settings, run=tmp_path / "run", progress=False)
    assert summary["test_neg_bits_per_byte"]["grown"][0] > -4  # of log2(50) = 5.6 bits
    network = esper.load(tmp_path / "run" / "models" / "env-000")
    assert network.predict(task.test.x).shape == (37, 8)


@pytest.mark.parametrize(
    ("tokens", "options", "words"),
    [
        (
            STREAM,
            {"host": GRU(50, 8, 1)},
            "x holds tokens, and length is None; give the number of positions of a window",
        ),
        (STREAM, {"length": 0}, "x holds tokens, and length is 0; give the number of positions"),
        (STREAM[:8], {}, "x holds 8 tokens, too few for a window of 8 positions and the token behind it; give more"),
        (STREAM + 9, {}, "the tokens hold 50, but the vocabulary has 50, numbered from 0; give a host with a larger"),
        (STREAM - 1, {}, "the tokens hold -1, but the vocabulary has 50"),
        (STREAM, {"classes": "ab"}, "x holds tokens, and classes is 'ab'; give the size of the vocabulary"),
        (STREAM, {"host": lambda: HOST(), "length": 8}, "x holds tokens, and classes is 'None'; give the size of the"),
        (
            torch.zeros(90, 9, dtype=torch.int64),
            {"length": 9},
            "length is 9, but the windows of x hold 9 tokens, of which 8",
        ),
        (STREAM, {"sample_weights": np.ones(249)}, "sample_weights was given, but windows of tokens and"),
        (STREAM, {"workers": 2}, "workers is 2, but windows of tokens in memory need none; leave workers out"),
        (STREAM[:30], {}, "the probe split "),
    ],
)
def test_tokens_that_make_no_task_are_refused_in_a_sentence(tokens, options, words):
    with pytest.raises(InputError) as raised:
        esper.task("t", tokens, **{"host": HOST, **options})
    assert str(raised.value).startswith(words)
    assert "\n" not in str(raised.value)
