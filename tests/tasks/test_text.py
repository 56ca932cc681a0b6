"""Test the next byte of Python's own text: what the splits hold, the metric, and runs from the command line."""

import json
import math
import re
import sysconfig
from pathlib import Path

import pytest
import torch

import esper
from esper.cli import main
from esper.leyline.data.task import Split
from esper.leyline.messages import InputError
from esper.tasks.catalog import task_names
from esper.tasks.hosts import Transformer
from esper.tasks.objectives import Classification, NextByte
from esper.tasks.splits import Splits
from esper.tasks.text import HOST, LENGTH, SIZES, sources, stdlib_text, text_splits, topics
from esper.tolaria.measure.bounds import bounds

FOLDER = Path(sysconfig.get_path("stdlib"))
TINY = Transformer(vocabulary=256, width=8, layers=2, heads=2, length=16)


def tiny():
    """Make the task on a host and splits that train in milliseconds."""
    return stdlib_text(TINY, (256, 32, 32, 32))


def test_the_target_of_every_position_is_the_byte_behind_it():
    task = stdlib_text()
    for name, size in zip(Splits._fields, SIZES, strict=True):
        part = getattr(task, name)
        assert part.x.shape == part.y.shape == (size, LENGTH)
        assert part.x.dtype == part.y.dtype == torch.int64
        assert torch.equal(part.x[:, 1:], part.y[:, :-1])
    assert task.host is HOST
    assert "stdlib-text" in task_names()


def test_every_sequence_is_of_one_file_and_no_file_is_in_two_splits():
    files = {f"{k}.py": bytes([k]) * 200 for k in range(60)}
    splits = text_splits(files, 8, (24, 6, 6, 6), "here")
    for part in splits:
        assert torch.equal(part.x, part.x[:, :1].expand_as(part.x))
    letters = [set(part.x.flatten().tolist()) for part in splits]
    assert len(set.union(*letters)) == sum(map(len, letters)) > 20


def test_the_sequences_of_a_file_follow_one_another_to_its_end():
    files = {f"{k}.py": bytes(range(100)) for k in range(60)}
    train = text_splits(files, 16, (12, 6, 6, 6), "here").train
    assert {tuple(x.tolist()) for x in train.x} == {tuple(range(k, k + 16)) for k in range(0, 96, 16)}


def test_the_files_are_the_sources_of_a_folder_and_the_pages_of_help():
    pages, names = topics(), list(sources(FOLDER))
    assert names == sorted(path.name for path in FOLDER.glob("*.py"))
    assert pages["topics/assert"].decode().startswith('The "assert" statement')
    assert sum(map(len, pages.values())) > 100_000


def test_every_split_of_the_task_holds_help_in_english():
    task, pages = stdlib_text(), b"\0".join(topics().values())
    for name in Splits._fields:
        assert any(bytes(x.tolist()) in pages for x in getattr(task, name).x[-64:]), name


def test_a_folder_without_enough_sources_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(
        InputError, match=r"has 0 sequences of 16 bytes for the train split, which needs 256; give a Python"
    ):
        text_splits(sources(tmp_path), TINY.length, (256, 32, 32, 32), str(tmp_path))


# The metric.


def test_the_metric_is_minus_the_bits_of_a_byte():
    output, target = torch.randn(2, 3, 5, 7), torch.randint(0, 7, (2, 3, 5))
    objective = NextByte(7)
    torch.testing.assert_close(objective.loss(output, target), Classification(7).loss(output, target))
    expected = output.softmax(-1).gather(-1, target[..., None])[..., 0].log2().mean(-1)
    torch.testing.assert_close(objective.score(output, target), expected)
    assert objective.metric == "neg_bits_per_byte"


def test_the_best_constant_prediction_of_bytes_is_their_shares_at_each_position():
    y = torch.tensor([[0, 1], [0, 1], [1, 1], [2, 1]])
    floor, ceiling = bounds(NextByte(4), Split(y, y))
    shares = [0.5, 0.5, 0.25, 0.25]
    assert floor == pytest.approx(sum(map(math.log2, shares)) / 8, abs=1e-6)
    assert ceiling == pytest.approx(0, abs=1e-6)


# Runs.


def test_text_is_grown_and_the_network_takes_and_returns_tokens(tmp_path):
    settings = {"envs": 2, "steps": 9, "data": {"batch_size": 8, "batches_per_step": 2}, "gates": {"permissive": True}}
    task = tiny()
    summary = esper.grow(task, settings, controller="random-valid", run=tmp_path / "run", progress=False)
    assert summary["status"] == "finished"
    assert summary["metric"] == "neg_bits_per_byte"
    grown = summary["test_neg_bits_per_byte"]["grown"]
    assert all(-8 < value < 0 for value in grown)
    network = esper.load(tmp_path / "run" / "models" / "env-000")
    logits = network(task.test.x)
    assert logits.shape == (32, 16, 256)
    score = task.objective.score(logits[None], task.test.y[None]).mean()
    assert float(score) == pytest.approx(grown[0], abs=1e-4)
    assert (network.predict(task.test.x) == logits.argmax(-1).numpy()).all()


def test_the_task_is_grown_from_the_command_line_which_prints_bits_per_byte(tmp_path, capsys):
    small = ["--envs", "2", "--set", "data.batch_size=4", "--set", "data.batches_per_step=1", "--steps", "2"]
    with pytest.raises(SystemExit, match="0"):
        main(["grow", "stdlib-text", *small, "--baselines", "none", "--models", "none", "--run", str(tmp_path / "run")])
    printed = capsys.readouterr().out
    assert "test neg_bits_per_byte" in printed
    assert re.search(r"grown +-[0-9]\.[0-9]+", printed)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["metric"]) == ("finished", "neg_bits_per_byte")


@pytest.mark.slow
def test_a_controller_is_trained_on_the_task_from_the_command_line(tmp_path, capsys):
    small = {"data": "{batch_size: 4, batches_per_step: 1}", "reward.group_size": 2, "steps": 2}
    small["ppo"] = "{imitation_rounds: 0, validate_envs: 1}"
    options = [each for key, value in small.items() for each in ("--set", f"{key}={value}")]
    with pytest.raises(SystemExit, match="0"):
        main(
            ["train", "stdlib-text", "--envs", "2", "--rounds", "1", *options, "--run", str(tmp_path / "run"), "--json"]
        )
    summary = json.loads(capsys.readouterr().out)
    assert (summary["status"], summary["rounds_done"], summary["tasks"]) == ("finished", 1, ["stdlib-text"])
