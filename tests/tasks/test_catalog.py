import pytest
import torch

from esper.leyline.config.tree import build_config
from esper.leyline.messages import InputError
from esper.tasks.catalog import TASKS, get_task, task_names
from esper.tasks.hosts import CNN, MLP, Host, ResidualCNN, ResidualMLP
from pictures import write_cifar
from stories import write_text


@pytest.fixture(autouse=True, scope="module")
def _data(tmp_path_factory):
    """Write a small CIFAR-10 and TinyStories, whose files a person brings."""
    folder = tmp_path_factory.mktemp("data")
    write_cifar(folder)
    write_text(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPER_DATA", str(folder))
        yield


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_the_name_and_the_summary_under_which_it_is_listed(name: str) -> None:
    task = get_task(name)
    assert task.name == name
    assert task.summary == task_names()[name]
    assert "\n" not in task.summary


@pytest.mark.parametrize("name", TASKS)
def test_the_defaults_of_a_task_are_a_config(name: str) -> None:
    assert build_config(get_task(name).defaults, {"task": name}).task == name


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("digits-narrow", MLP(inputs=64, width=16, hidden=(4, 12, 5), outputs=10)),
        ("spirals-narrow", MLP(inputs=2, width=16, hidden=(2, 12, 4), outputs=2)),
        ("iris-plain", MLP(inputs=4, width=16, hidden=(16, 16), outputs=3)),
        ("wine-plain", MLP(inputs=13, width=16, hidden=(16, 16), outputs=3)),
        ("breast-cancer-plain", MLP(inputs=30, width=16, hidden=(16, 16), outputs=2)),
        ("digits-image-narrow", CNN(inputs=(1, 8, 8), channels=(8, 16), hidden=(3, 4), outputs=10)),
    ],
)
def test_a_test_bench_has_the_data_of_its_task_on_a_host_without_skips(name: str, host: Host) -> None:
    bench, task = get_task(name), get_task(name.rpartition("-")[0])
    assert bench.host == host
    assert isinstance(task.host, ResidualMLP | ResidualCNN)
    for part in ("train", "probe", "validation", "test"):
        assert torch.equal(getattr(bench, part).x, getattr(task, part).x)
        assert torch.equal(getattr(bench, part).y, getattr(task, part).y)


def test_every_task_is_listed() -> None:
    assert set(task_names()) == set(TASKS)


def test_a_misspelt_task_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"^unknown task 'digit'; the tasks are .*; did you mean 'digits'\?$"):
        get_task("digit")


def test_a_task_that_is_like_none_is_refused_with_the_list() -> None:
    with pytest.raises(InputError, match=r"^unknown task 'mnist'; the tasks are breast-cancer, .*, cifar10, digits, "):
        get_task("mnist")


@pytest.mark.parametrize("name", TASKS)
def test_a_sealed_task_has_no_test_split(name: str) -> None:
    task = get_task(name)
    key = task.keys("training")[0]
    assert task.test_split(key) is not None
    assert task.sealed().test_split(key) is None
