"""Test a policy on a device of its own: a second logical device here, as there need not be a GPU."""

import json
import signal
from contextlib import nullcontext

import pytest
import torch

from esper.leyline.config.tree import build_config
from esper.leyline.messages import InputError
from esper.leyline.progress import Progress
from esper.runs import train as training
from esper.runs.configuration import training_configs
from esper.runs.folder.resume import Opening, cohort_configs, read_config
from esper.runs.train import check_exchange, policy_device
from esper.runs.workers.workers import check_facts, worker_options
from esper.simic.ppo import PPO
from esper.tamiyo.policy.actor import Learned
from esper.tamiyo.policy.controller import WEIGHTS, load_policy
from esper.tasks.catalog import get_task
from logical import DEVICE, Far, Logical

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of the context that turns oneDNN off

SMALL = {
    "envs": 4,
    "steps": 4,
    "data": {"batch_size": 12, "batches_per_step": 1},
    "reward": {"group_size": 2},
    "blueprints": ["affine", "bypass-linear", "skip-mlp"],
    "ppo": {"rounds": 2, "imitation_rounds": 1, "update_epochs": 2, "validate_envs": 2, "validate_every": 1},
}


class Interrupting(Progress):
    def round(self, number, rounds, figures):
        if number == 0:
            signal.raise_signal(signal.SIGINT)


def trained(folder, watch=None, resume=False):
    task = get_task("iris")
    configs = cohort_configs(read_config(folder)) if resume else training_configs([task], "quick", SMALL)
    # the LSTM of oneDNN, which is for the CPU alone, rounds in another way
    with torch.backends.mkldnn.flags(enabled=False):
        return training.train([task], configs, folder, watch or Progress(), Opening(resume=resume))


def content(folder):
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    figures = [row["figures"] for row in rows if row["kind"] == "round"]
    clocked = ("env_steps_per_second", "controller_share")
    figures = [{name: value for name, value in each.items() if name not in clocked} for each in figures]
    return (folder / "controller" / WEIGHTS).read_bytes(), figures


@pytest.fixture(scope="module")
def near(tmp_path_factory):
    """Return the content of a training whose policy is on the CPU."""
    folder = tmp_path_factory.mktemp("near") / "run"
    trained(folder)
    return content(folder)


@pytest.fixture
def far(monkeypatch):
    """Put policies on the logical device, and return the devices of those that act and learn."""
    seen = set()

    def watched(method):
        def watching(self, *arguments, **how):
            seen.update((type(self).__name__, type(each)) for each in self.policy.network.parameters())
            return method(self, *arguments, **how)

        return watching

    for kind, name in ((PPO, "_descend"), (Learned, "_decide")):
        monkeypatch.setattr(kind, name, watched(getattr(kind, name)))
    monkeypatch.setattr(training, "policy_device", lambda config, devices=(): DEVICE)
    with Logical():
        yield seen


@pytest.mark.campaign
def test_a_training_has_the_same_results_wherever_the_policy_lives(near, far, tmp_path):
    trained(tmp_path / "run")
    assert content(tmp_path / "run") == near
    assert far == {(name, Far) for name in ("PPO", "SimicClient", "Apprentice", "Learned")}
    assert load_policy(tmp_path / "run" / "controller").device == torch.device("cpu")


@pytest.mark.slow
def test_a_training_is_resumed_with_its_policy_on_another_device(near, far, tmp_path, monkeypatch):
    assert trained(tmp_path / "run", Interrupting())["status"] == "interrupted"
    assert far
    far.clear()
    monkeypatch.undo()
    assert trained(tmp_path / "run", resume=True)["status"] == "finished"
    assert not far
    assert content(tmp_path / "run") == near


@pytest.mark.slow
def test_a_training_on_the_cpu_is_resumed_with_its_policy_on_a_device(near, tmp_path, request):
    assert trained(tmp_path / "run", Interrupting())["status"] == "interrupted"
    far = request.getfixturevalue("far")
    assert trained(tmp_path / "run", resume=True)["status"] == "finished"
    assert far == {(name, Far) for name in ("PPO", "SimicClient", "Learned")}  # the imitation was over
    assert content(tmp_path / "run") == near


@pytest.mark.parametrize(
    ("device", "devices", "said"),
    [
        ("tpu", (), "ppo.device is 'tpu'; give cpu, cuda, cuda:i, or same"),
        ("cuda:77", (), "ppo.device is cuda:77, but torch sees .* CUDA devices?; give cpu, or same"),
        (
            "cuda:0",
            ("cuda:0", "cuda:1"),
            "ppo.device is cuda:0, but the devices of the workers are cuda:0,cuda:1; give same",
        ),
    ],
)
def test_a_device_that_the_policy_cannot_have_is_refused(monkeypatch, device, devices, said):
    if devices:  # as on a machine with two GPUs
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match=said):
        policy_device(build_config({"ppo": {"device": device}}), devices)


def test_the_policy_is_on_the_cpu_or_where_the_networks_are():
    assert policy_device(build_config({})) == torch.device("cpu")
    assert policy_device(build_config({"device": "cpu", "ppo": {"device": "same"}})) == torch.device("cpu")


def test_a_worker_whose_policy_is_on_another_kind_of_device_is_refused():
    own = {"data": {}, "versions": {}, "policy": "cpu"}
    with pytest.raises(InputError, match="the policy of a worker is on NVIDIA H100, that of this process on cpu"):
        check_facts(own, {**own, "policy": "NVIDIA H100"})


@pytest.mark.parametrize(
    ("nccl", "device", "devices", "said"),
    [
        (False, "same", ["cuda:0", "cuda:1"], "ppo.exchange is nccl, but this build of torch has no NCCL; give gloo"),
        (True, "cpu", ["cuda:0", "cuda:1"], "a GPU for each of 2 workers; give them in devices, with ppo.device=same"),
        (True, "same", ["cuda", "cuda:0"], "a GPU for each of 2 workers; give them in devices, with ppo.device=same"),
        (True, "same", ["cuda:0", "cuda:1"], None),
    ],
)
def test_gradients_go_through_nccl_only_where_each_worker_has_a_gpu(monkeypatch, nccl, device, devices, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    config = build_config({"device": devices[0], "ppo": {"device": device, "exchange": "nccl"}})
    asked = worker_options(2, devices)
    with nullcontext() if said is None else pytest.raises(InputError, match=said):
        check_exchange(config, policy_device(config, devices), asked)
    check_exchange(config, policy_device(config), worker_options(1))  # one alone exchanges nothing


def test_a_training_whose_policy_has_no_device_writes_nothing(tmp_path):
    task = get_task("iris")
    configs = training_configs([task], "quick", SMALL, {"ppo": {"device": "cuda:77"}})
    with pytest.raises(InputError, match="give cpu, or same, the device of the networks"):
        training.train([task], configs, tmp_path / "run", Progress())
    assert not (tmp_path / "run").exists()
