import pytest
import torch
import torch.nn.functional as F

from esper.kasmina.host import check_host
from esper.leyline.config.tree import build_config
from esper.leyline.data.task import Task
from esper.tasks.small import classical

FACTS = {"iris": (150, 4, 3), "wine": (178, 13, 3), "breast-cancer": (569, 30, 2)}


@pytest.fixture(scope="module", params=FACTS)
def task(request: pytest.FixtureRequest) -> Task:
    return classical(request.param)


def test_every_example_is_in_one_split(task: Task) -> None:
    examples, features, classes = FACTS[task.name]
    assert task.test is not None
    parts = (task.train, task.probe, task.validation, task.test)
    assert sum(len(part.y) for part in parts) == examples
    assert {part.x.shape[1] for part in parts} == {features}
    assert task.objective.outputs == classes
    assert len({tensor.untyped_storage().data_ptr() for part in parts for tensor in part}) == 8


def test_every_split_has_nearly_its_share_of_every_class(task: Task) -> None:
    assert task.test is not None
    parts = (task.train, task.probe, task.validation, task.test)
    shares = torch.cat([part.y for part in parts]).bincount() / sum(len(part.y) for part in parts)
    for part in parts:
        assert (part.y.bincount(minlength=len(shares)) - shares * len(part.y)).abs().max() < 1.5


def test_features_are_standardized_by_the_train_split(task: Task) -> None:
    x = task.read(task.train.x)
    torch.testing.assert_close(x.mean(0), torch.zeros(x.shape[1]), rtol=0, atol=1e-5)
    torch.testing.assert_close(x.std(0, correction=0), torch.ones(x.shape[1]))


def test_a_step_of_the_defaults_is_whole_epochs(task: Task) -> None:
    config = build_config(task.defaults)
    assert config.steps == 24
    assert len(task.train.y) % config.data.batch_size == 0


def test_the_host_fits_the_data(task: Task) -> None:
    check_host(task.host(), task.train.x[:2], task.objective.outputs)


def test_the_host_solves_the_task_in_two_steps_and_stays_there(task: Task) -> None:
    config = build_config(task.defaults)
    objective, batch = task.objective, config.data.batch_size
    torch.manual_seed(0)
    host = task.host()
    optimizer = torch.optim.AdamW(host.parameters(), lr=config.optimizer.lr, weight_decay=0)
    for step in range(8):
        index = torch.cat([torch.randperm(len(task.train.y)) for _ in range(9)])
        for taken in index.split(batch)[: config.data.batches_per_step]:
            loss = F.cross_entropy(host(task.read(task.train.x[taken])), task.train.y[taken])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = objective.score(host(task.read(task.probe.x))[None], task.probe.y[None]).mean().item()
        assert step < 1 or accuracy > 0.9
