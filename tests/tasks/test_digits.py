from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from esper.kasmina.host import check_host
from esper.leyline.config.tree import build_config
from esper.leyline.data.task import Task
from esper.leyline.messages import InputError
from esper.tasks.small import digits, digits_narrow


@pytest.fixture(scope="module")
def task() -> Task:
    return digits()


def test_every_digit_is_in_one_split(task: Task) -> None:
    assert task.test is not None
    splits = (task.train, task.probe, task.validation, task.test)
    assert [len(part.x) for part in splits] == [1024, 256, 128, 389]
    counts = torch.cat([part.y for part in splits]).bincount()
    assert counts.tolist() == torch.from_numpy(load_digits().target).bincount().tolist()


def test_every_split_has_nearly_its_share_of_every_digit(task: Task) -> None:
    assert task.test is not None
    for part in (task.train, task.probe, task.validation, task.test):
        assert (part.y.bincount(minlength=10) / len(part.y) - 0.1).abs().max() < 0.01


def test_the_data_are_the_same_in_every_call(task: Task) -> None:
    again = digits()
    for name in ("train", "probe", "validation", "test"):
        assert torch.equal(getattr(again, name).x, getattr(task, name).x)
        assert torch.equal(getattr(again, name).y, getattr(task, name).y)


def test_a_step_of_the_defaults_is_one_epoch(task: Task) -> None:
    data = build_config(task.defaults).data
    assert data.batch_size * data.batches_per_step == len(task.train.x)


@pytest.mark.parametrize("build", [digits, digits_narrow])
def test_the_host_fits_the_data(build: Callable[[], Task]) -> None:
    task = build()
    check_host(task.host(), task.train.x[:2], task.objective.outputs)


def test_features_have_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert digits().train.x.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_width_of_zero_is_refused() -> None:
    with pytest.raises(InputError, match="hidden"):
        digits_narrow(hidden=(4, 0))


def test_the_host_learns(task: Task) -> None:
    torch.manual_seed(0)
    host = task.host()
    optimizer = torch.optim.AdamW(host.parameters(), lr=5e-3)
    for _ in range(8):
        for index in torch.randperm(len(task.train.x)).split(64):
            loss = F.cross_entropy(host(task.read(task.train.x[index])), task.train.y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = task.objective.score(host(task.read(task.probe.x))[None], task.probe.y[None]).mean().item()
    assert accuracy > 0.45  # chance is 0.1
