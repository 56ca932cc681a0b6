"""Test examples that are not finite: found when they are loaded, named, or left out; and found in a row that went wrong."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.api import grow
from esper.cli import main
from esper.leyline.data.task import Instance, Lengths, Mixture, Room, Split, finite
from esper.leyline.messages import DataWarning, InputError
from esper.tasks.catalog import TASKS, get_task
from esper.tasks.hosts import MLP
from esper.tasks.objectives import Classification
from esper.tasks.own.custom import task_from
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.stacked.data import Format, SharedBatchIterator
from populations import MENU, small_config

PARTS = ("train", "probe", "validation", "test")
HOST = MLP(4, 8, (4, 4), 3)


def damaged(split, *rows, value=torch.nan):
    x = split.x.clone()
    x[list(rows), 0] = value
    return Split(x, split.y)


def without(split, *rows):
    keep = [row for row in range(len(split.y)) if row not in rows]
    return Split(split.x[keep], split.y[keep])


def asked(action="stop", **changes):
    return small_config({"data": {"nonfinite": action, "batch_size": 16}}, task="iris", steps=3, **changes)


def figures(task, action="stop"):
    summary = grow(task, asked(action), controller="random-valid")
    return {name: value for name, value in summary.items() if name.startswith(("test", "validation", "grown"))}


@pytest.mark.parametrize("part", PARTS)
def test_examples_that_are_not_finite_are_named_with_their_split_and_the_mend_before_anything_is_written(
    tmp_path, part
):
    task = get_task("iris")
    task = replace(task, **{part: damaged(getattr(task, part), 3, 5)})
    name = f"the {part} split of task iris" if part != "test" else "a held-out split of iris"
    count = len(getattr(task, part).y)
    sentence = f"{name} holds NaN or infinite values, in examples 3, 5 (2 of {count}); fill them in, or leave those "
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}.*--set data.nonfinite=skip \\(.*in Python\\)$"):
        grow(task, asked(), controller="never", run=tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("part", PARTS)
def test_skipping_is_as_if_the_examples_had_not_been_there(part):
    task = get_task("iris")
    split = getattr(task, part)
    with pytest.warns(DataWarning, match=r"left out with examples 0, 7 \(2 of "):
        skipped = figures(replace(task, **{part: damaged(split, 0, 7, value=-torch.inf)}), "skip")
    assert skipped == figures(replace(task, **{part: without(split, 0, 7)}))


def test_what_is_finite_is_the_very_same_under_both():
    split = get_task("iris").train
    assert finite(split, "x", "stop") is split
    assert finite(split, "x", "skip") is split
    pixels = Split(torch.full((3, 1, 2, 2), 255, dtype=torch.uint8), torch.arange(3))
    assert finite(pixels, "x", "stop") is pixels


def test_targets_are_looked_at_too():
    split = Split(torch.zeros(4, 2), torch.tensor([[0.0, 1.0], [0.0, torch.inf], [1.0, 0.0], [torch.nan, 0.0]]))
    with pytest.raises(InputError, match=r"in examples 1, 3 \(2 of 4\)"):
        finite(split, "x", "stop")
    with pytest.warns(DataWarning):
        assert finite(split, "x", "skip").y.tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_a_split_of_which_nothing_would_be_left_is_refused():
    with pytest.raises(InputError, match="in every example; bring other data"):
        finite(Split(torch.full((3, 2), torch.nan), torch.arange(3)), "x", "skip")


def test_examples_that_rows_share_are_still_held_once_when_some_are_left_out():
    task = get_task("iris")
    with pytest.warns(DataWarning) as told:
        engine = VectorizedEngine(replace(task, train=damaged(task.train, 2)).sealed(), asked("skip", envs=5))
    assert len(told) == 1
    assert engine.population.feed.x.shape[0] == len(task.train.y) - 1


def mixture():
    """Make a mixture of instances of one host; that of key 2 has an example that is not finite."""

    def sample(key):
        generator = torch.Generator().manual_seed(key)
        train, probe, validation = (
            Split(torch.randn(n, 4, generator=generator), torch.arange(n) % 3) for n in (40, 20, 20)
        )
        return Instance(HOST, damaged(train, 6) if key == 2 else train, probe, validation, 3)

    return Mixture(
        name="three",
        summary="",
        room=Room(HOST, (4,), Lengths(probe=20, held=20)),
        sample=sample,
        test=None,
        ranges={"training": range(3), "validation": range(3, 3), "heldout": range(3, 3)},
        objective=Classification(3),
        menu=MENU,
    )


def test_of_a_mixture_the_instance_is_named_and_loses_its_example_alone():
    with pytest.raises(InputError, match=r"^the train split of instance 2 of three holds"):
        VectorizedEngine(mixture(), asked())
    with pytest.warns(DataWarning, match=r"^the train split of instance 2 of three holds"):
        engine = VectorizedEngine(mixture(), asked("skip"))
    assert engine.population.feed.orders.sizes.tolist() == [40, 40, 39]


def test_a_task_of_ones_own_leaves_them_out_where_its_defaults_say_so():
    task = get_task("iris")
    x, y = torch.cat([task.train.x, task.test.x]), torch.cat([task.train.y, task.test.y])
    bad = damaged(Split(x, y), 1, 4)
    with pytest.raises(InputError, match=r"in examples 1, 4 .*defaults=\{'data': \{'nonfinite': 'skip'\}\}"):
        task_from("mine", *bad, host=HOST)
    with pytest.warns(DataWarning, match="x or y holds NaN or infinite values, left out with examples 1, 4"):
        mine = task_from("mine", *bad, host=HOST, defaults={"data": {"nonfinite": "skip"}}, standardize=True)
    clean = task_from("mine", *without(Split(x, y), 1, 4), host=HOST, standardize=True)
    for part in PARTS:
        for mended, usual in zip(getattr(mine, part), getattr(clean, part), strict=True):
            assert torch.equal(mended, usual)


def test_the_command_says_in_one_line_what_it_leaves_out(tmp_path, monkeypatch, capsys):
    task = get_task("iris")
    bad = replace(task, probe=damaged(task.probe, 9))
    monkeypatch.setattr("esper.tasks.catalog.TASKS", {**TASKS, "iris": lambda: bad})
    monkeypatch.chdir(tmp_path)
    arguments = ["grow", "iris", "--envs", "2", "--steps", "2", "--controller", "never", "--models", "none"]
    arguments += ["--baselines", "none"]
    with pytest.raises(SystemExit) as left:
        main([*arguments, "--set", "data.nonfinite=skip", "--run", "r"])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert left.value.code == 0
    assert lines == [
        "warning: the probe split of task iris holds NaN or infinite values, left out with example 9 (1 of 40)"
    ]
    with pytest.raises(SystemExit) as left:
        main([*arguments, "--run", "s"])
    assert left.value.code == 2


@pytest.mark.parametrize("batches", [1, 3, 7])
@pytest.mark.parametrize("taken", [0, 1, 5, 9, 20])
def test_the_examples_of_the_last_batches_that_are_not_finite_are_found_as_by_looking_at_each(taken, batches):
    sizes, row, instance = (23, 16), np.array([0, 1, 0, 1]), np.array([4, 5, 6, 5])
    splits = [Split(torch.arange(n)[:, None].expand(n, 2).clone().float(), torch.arange(n)) for n in sizes]
    feed = SharedBatchIterator(splits, row, instance, 0, 5, Format((2,), torch.device("cpu")))
    feed.reset(3)
    seen = [next(feed)[1] for _ in range(taken)]
    for number, rows in enumerate(([1, 8, 20], [0, 3])):  # what was loaded is damaged afterwards
        feed.x[number * 23 + torch.tensor(rows), 1] = torch.nan
    slow = {}
    for e, bad in enumerate([{1, 8, 20}, {0, 3}, {1, 8, 20}, {0, 3}]):
        shown = {example for batch in seen[-batches:] for example in batch[e].tolist()}
        slow[e] = sorted(shown & bad)
    found = feed.nonfinite(np.arange(4), batches)
    assert {e: examples.tolist() for e, examples in found} == {e: examples for e, examples in slow.items() if examples}
    assert feed.nonfinite(np.array([2]), batches) == [] or feed.nonfinite(np.array([2]), batches)[0][0] == 2


def test_the_feed_goes_on_as_if_nobody_had_asked():
    def feed():
        made = SharedBatchIterator(
            [Split(torch.arange(23)[:, None].float(), torch.arange(23))],
            np.zeros(2, np.int64),
            np.arange(2),
            0,
            5,
            Format((1,), torch.device("cpu")),
        )
        made.reset(0)
        return made

    asked, quiet = feed(), feed()
    for _ in range(9):
        assert torch.equal(next(asked)[1], next(quiet)[1])
        assert asked.nonfinite(np.arange(2), 6) == []
