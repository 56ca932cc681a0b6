"""Test tasks of public data sets: what they hold, how they grow, and what is said where the files are missing."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import esper as library
from esper.leyline.data.task import Split
from esper.leyline.messages import InputError
from esper.tasks import catalog
from esper.tasks.catalog import get_task
from esper_bench import public_sets, public_tasks

with_letter = pytest.mark.skipif(
    find_spec("rdata") is None or not public_sets.LETTER.is_file(),
    reason="run apt-get install r-cran-mlbench and pip install rdata",
)
with_fashion = pytest.mark.skipif(not public_sets.FASHION.is_dir(), reason="run apt-get install dataset-fashion-mnist")
FEW = {"envs": 2, "steps": 2, "data": {"batch_size": 16, "batches_per_step": 2}, "baselines": ["twin"]}


def rows(task):
    """Return the rows of every split, x beside y."""
    splits = (task.train, task.probe, task.validation, task.test)
    return [np.column_stack([split.x.flatten(1).numpy(), split.y.numpy()]) for split in splits]


@with_letter
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.filterwarnings("error::esper.leyline.messages.DataWarning")
def test_no_row_of_letter_is_in_two_splits_and_the_task_grows_and_predicts_letters():
    task = get_task("letter")
    every = np.concatenate(rows(task))
    assert len(every) == len(np.unique(every, axis=0)) == 18_668
    summary = library.grow("letter", FEW, run="run")
    assert summary["status"] == "finished"
    assert set(library.load("run").predict(task.test.x[:50])) <= set(public_tasks.string.ascii_uppercase)


@with_fashion
@pytest.mark.filterwarnings("error::esper.leyline.messages.DataWarning")
def test_fashion_mnist_holds_the_published_images_and_grows():
    task = public_tasks.fashion_mnist(train=400)
    (x, y), (x_test, y_test) = public_sets.fashion_mnist()
    assert torch.equal(task.train.x[:, 0], torch.from_numpy(x[:400]))
    assert task.probe.y.tolist() == y[400:1400].tolist()
    assert torch.equal(task.test.x[:, 0], torch.from_numpy(x_test))
    assert task.test.y.tolist() == y_test.tolist()
    few = replace(task, test=Split(task.test.x[:100], task.test.y[:100]))
    assert library.grow(few, FEW)["status"] == "finished"


@with_fashion
@pytest.mark.parametrize("train", [0, 58_001])
def test_a_train_split_of_fashion_mnist_that_leaves_nothing_is_refused(train):
    with pytest.raises(InputError, match=rf"^train is {train:,}; give a number of images from 1 to 58,000$"):
        public_tasks.fashion_mnist(train)


def test_a_set_whose_files_are_missing_is_listed_with_the_package_that_has_them(esper, monkeypatch, tmp_path):
    for reader, path in ((public_sets.fashion_mnist, tmp_path), (public_sets.letter_recognition, tmp_path / "x.rda")):
        monkeypatch.setattr(reader, "__defaults__", (path,))
    packages = {"letter": "r-cran-mlbench", "fashion-mnist": "dataset-fashion-mnist"}
    known = {name: summary for name, summary in catalog.task_names().items() if name in packages}
    monkeypatch.setattr(catalog, "task_names", lambda: known)
    code, out, err = esper("tasks")
    assert (code, err) == (0, "")
    for name, package in packages.items():
        assert f"{name}: {known[name]}\n  missing   {tmp_path}" in out
        assert f"is not there; install the Debian package {package}, or give the path of the file" in out
    code, _, err = esper("grow", "letter")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "install the Debian package r-cran-mlbench" in err


@pytest.mark.slow
@with_letter
@with_fashion
def test_the_study_of_the_frontier_prints_a_row_for_each_size():
    script = Path(__file__).parents[1] / "scripts/study_frontier.py"
    done = subprocess.run(
        [sys.executable, str(script), "--quick"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = [line.split(" | ")[:2] for line in done.stdout.splitlines()[2:]]
    assert found == [["| letter", "4"], ["| letter", "16"], ["| fashion-mnist", "2"], ["| fashion-mnist", "4"]]
