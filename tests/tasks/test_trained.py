"""Test hosts that were trained before a run begins."""

import pytest
import torch

import esper
from esper.kasmina.blueprints import drawn_with
from esper.tasks.hosts import ResidualMLP
from esper.tasks.spirals import SMALL, Trained, spirals_trained


@pytest.fixture(scope="module")
def task():
    return spirals_trained()


def metric(task, host):
    with torch.no_grad():
        return float(task.objective.score(host(task.read(task.probe.x))[None], task.probe.y[None]).mean())


def test_every_environment_starts_from_a_trained_host(task):
    hosts = []
    for key in range(6):
        with drawn_with(key):
            hosts.append(task.host())
    assert min(metric(task, host) for host in hosts) > 0.75
    with drawn_with(0):
        assert metric(task, SMALL()) < 0.65
    assert len({host.segments[0].weight.sum().item() for host in hosts}) > 2


def test_the_pool_is_the_same_in_every_task_and_leaves_torchs_generator_alone(task):
    with drawn_with(3):
        first = task.host().state_dict()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    again = Trained(SMALL, esper.get_task("spirals"))
    again._weights  # noqa: B018
    assert torch.equal(torch.rand(3), expected)
    with drawn_with(3):
        second = again().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_plain_opponent_of_a_trained_host_is_not_trained(task):
    plain = task.plain(500)
    assert isinstance(plain, ResidualMLP)


def test_a_network_grown_on_a_trained_host_is_loaded_by_the_name_of_its_architecture(task, tmp_path):
    settings = {"envs": 2, "steps": 1, "data": {"batches_per_step": 1}}
    summary = esper.grow(task, settings, controller="never", run=tmp_path / "run")
    network = esper.load(tmp_path / "run" / "models" / "env-000")
    with torch.no_grad():
        accuracy = (network(task.test.x).argmax(1) == task.test.y).double().mean().item()
    assert accuracy == pytest.approx(summary["test_accuracy"]["grown"][0], abs=1e-6)
    assert accuracy > 0.7
