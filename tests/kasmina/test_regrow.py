"""Test the growth of a grown network: the same function to begin with, free slots, and what is saved and loaded again."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import esper
from esper.kasmina.blueprints import count, get_blueprint
from esper.kasmina.network.grown_network import Graft, GrownNetwork, RegrownHost, as_host, lost_slots
from esper.kasmina.stack.body import Seed
from esper.leyline.data.task import Interface, Scaling
from esper.leyline.lifecycle.slots import Kind, Tap
from esper.leyline.lifecycle.vocabulary import Blend, Op
from esper.tasks.hosts import MLP
from esper.tolaria.engine import VectorizedEngine
from populations import Script, blobs, small_config

GROW = {(1, 0): (Op.GERMINATE, 0, 0, 0, 1, 3), (4, 0): (Op.ADVANCE,), (7, 0): (Op.FOSSILIZE,)}
PERMISSIVE = {
    "envs": 1,
    "steps": 9,
    "baselines": [],
    "data": {"batch_size": 12, "batches_per_step": 3},
    "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1},
    "lifecycle": {"tempos": (0, 1)},
    "early_stopping": {"enabled": False},
}


def trained(module):
    """Draw all weights of a module, so that no seed is nothing, and return it."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return module


def grown(*seeds, scaling=None):
    """Build a network of four segments with seeds of (segment, blueprint, blend) in it."""
    host = MLP(inputs=6, width=8, hidden=(3, 5), outputs=3)()
    modules, grafts = [], []
    for after, name, blend in seeds:
        entry = get_blueprint(name)
        reads = {Tap.HERE: 8, Tap.BEFORE: 8, Tap.INPUT: 6}[entry.tap]
        seed = Seed(entry.build(reads, 8), reads)
        if blend != Blend.GATE:
            del seed.gate
        modules.append(seed)
        grafts.append(Graft(after, entry.tap, blend, 0.75, Kind.VECTOR))
    return trained(GrownNetwork(host, modules, grafts, Interface((6,), scaling, ("a", "b", "c")))).eval()


X = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("blend", list(Blend))
@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("name", ["bypass-mlp", "mlp-small", "skip-mlp"])
def test_a_regrown_host_computes_what_the_network_did(name, after, blend):
    network = grown((after, name, blend))
    host = as_host(network)
    torch.testing.assert_close(host(X), network(X), rtol=0, atol=0)
    assert [slot.width for slot in host.slots] == [8] * len(host.slots)


def test_seeds_become_part_of_their_segments_and_slots_stay_where_they_were():
    network = grown((1, "mlp-small", Blend.ADD), (2, "bypass-mlp", Blend.GATE))
    host = as_host(network)
    assert [slot.after for slot in host.slots] == [slot.after for slot in network.slots]
    assert [slot.name for slot in host.slots] == [slot.name for slot in network.slots]
    assert len(host.segments) == len(network.segments)


def test_a_seed_that_reads_the_input_makes_one_segment_of_those_before_it_and_says_so():
    network = grown((2, "skip-mlp", Blend.ADD))
    host = as_host(network)
    assert len(host.segments) == len(network.segments) - 2
    assert [(slot.name, slot.after) for slot in host.slots] == [(network.slots[1].name, 0)]
    assert lost_slots(network) == [network.slots[0].name]
    x, y = torch.randn(60, 6), torch.arange(60) % 3
    words = f"the slot {network.slots[0].name} of the grown network cannot be used again"
    with pytest.warns(UserWarning, match=words) as told:
        esper.task("again", x, y, host=lambda: grown((2, "skip-mlp", Blend.ADD)))
    assert [warning.filename for warning in told] == [__file__]


def test_a_stack_of_regrown_hosts_computes_what_each_of_them_does():
    network = grown((1, "bypass-mlp", Blend.GATE), (2, "mlp-small", Blend.MULTIPLY))
    x, y = torch.randn(160, 6, generator=torch.Generator().manual_seed(2)), torch.arange(160) % 3
    task = esper.task("again", x, y, host=lambda: network, menu=["bypass-mlp"])
    engine = VectorizedEngine(task.sealed(), small_config(steps=2))
    engine.reset()
    metric, _ = engine.evaluate(task.validation)
    right = network(task.validation.x).argmax(1) == task.validation.y
    np.testing.assert_allclose(metric, right.float().mean(), atol=1e-6)
    assert isinstance(engine.export(2)[0], nn.Module)


def test_a_grown_network_is_grown_further_saved_and_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = blobs()
    first = esper.grow(task, PERMISSIVE, controller=Script(GROW), run="first")
    assert first["grown"] == [{"block0": "bypass-linear"}]
    once = "first/models/env-000"
    again = blobs_on(lambda: esper.load(once, host=task.host))
    second = esper.grow(again, PERMISSIVE, controller=Script(GROW), run="second")
    assert second["host_params"] == first["grown_params"][0]
    assert second["grown"] == [{"block0": "bypass-linear"}]
    network = esper.load("second/models/env-000", host=lambda: esper.load(once, host=task.host))
    right = (network(again.test.x).argmax(1) == again.test.y).float().mean()
    assert float(right) == pytest.approx(second["test_accuracy"]["grown"][0])
    program = torch.export.load(Path("second/models/env-000/model.pt2")).module()
    torch.testing.assert_close(program(task.test.x), network(task.test.x))


# The static network `plain` beside a regrown host.


def own_host():
    """Build a host of one's own: 6 -> 8, a bottleneck of 8 -> 2 -> 8, and 8 -> 3 features."""
    segments = [nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8)), nn.Linear(8, 3)]
    slots = [esper.SlotSpec("first", after=0, width=8), esper.SlotSpec("middle", after=1, width=8)]
    return esper.SegmentedHost(segments, slots)


def network_on(host, after, name, original=None):
    """Build a grown network of a host with one seed, all weights drawn."""
    entry = get_blueprint(name)
    seed = Seed(entry.build(6 if entry.tap == Tap.INPUT else 8, 8), 8)
    del seed.gate
    graft = Graft(after, entry.tap, Blend.ADD, 1.0, Kind.VECTOR)
    return trained(GrownNetwork(host, [seed], [graft], Interface((6,)), original)).eval()


def test_plain_beside_a_regrown_named_host_is_the_plain_network_of_that_host(tmp_path):
    first = blobs_on(MLP(inputs=6, width=8, hidden=(3, 5), outputs=3))
    settings = {**PERMISSIVE, "baselines": ["plain"]}
    esper.grow(first, settings, controller=Script(GROW), run=tmp_path / "first")
    once = tmp_path / "first/models/env-000"
    assert esper.load(once).original == first.host
    again = blobs_on(lambda: esper.load(once))
    second = esper.grow(again, settings, controller=Script(GROW), run=tmp_path / "second")
    twice = esper.load(tmp_path / "second/models/env-000", host=lambda: esper.load(once))
    assert twice.original == first.host
    plain = count(first.host.plain(second["grown_params"][0])())
    assert second["baselines"]["plain"]["params"] == [plain]
    assert plain >= second["grown_params"][0] > second["host_params"]


@pytest.mark.parametrize("name", ["bypass-mlp", "skip-mlp"])
def test_plain_beside_a_regrown_host_of_ones_own_is_the_first_host_without_seeds_widened(name):
    network = network_on(own_host(), 1, name)
    once = as_host(network)
    host = network_on(once, once.slots[-1].after, "mlp-small")
    regrown = RegrownHost(host)
    bare = regrown.ungrown()
    assert [type(segment) for segment in bare.segments] == [nn.Linear, nn.Sequential, nn.Linear]
    torch.testing.assert_close(bare.segments[1](X @ torch.eye(6, 8)), network.segments[1](X @ torch.eye(6, 8)))
    assert all(slot.after < 2 for slot in bare.slots)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the slots that are gone
        task = blobs_on(lambda: host)
    summary = esper.grow(task, {**PERMISSIVE, "steps": 1, "baselines": ["plain"]}, controller="never")
    assert summary["host_params"] == count(host) > count(bare)
    assert summary["baselines"]["plain"]["params"][0] >= count(host)


def test_a_regrown_host_that_cannot_be_widened_names_the_users_segment_and_the_mend():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x * self.by

    def host():
        return esper.SegmentedHost(
            [nn.Linear(6, 8), Scaled(), nn.Linear(8, 3)], [esper.SlotSpec("a", after=1, width=8)]
        )

    task = blobs_on(lambda: network_on(host(), 1, "bypass-mlp"))
    summary = esper.grow(task, {**PERMISSIVE, "steps": 1, "baselines": ["plain"]}, controller="never")
    absent = summary["baselines"]["plain"]["absent"]
    assert absent.startswith("segment 1 of the host is a Scaled, whose width cannot be scaled; pass esper.task(")


def blobs_on(host):
    """Make a task of the examples of `blobs`, for another host."""
    task = blobs()
    x = torch.cat([task.train.x, task.probe.x, task.validation.x, task.test.x])
    y = torch.cat([task.train.y, task.probe.y, task.validation.y, task.test.y])
    return esper.task("again", x, y, host=host, menu=task.menu)


def test_every_environment_starts_from_the_weights_that_were_loaded():
    network = grown((1, "bypass-mlp", Blend.ADD))
    engine = VectorizedEngine(blobs_on(lambda: network).sealed(), small_config(steps=2))
    engine.reset()
    for env in range(3):
        torch.testing.assert_close(engine.export(env)[0](X), network(X), rtol=0, atol=1e-6)


def test_a_run_may_replace_the_run_whose_network_it_grows(tmp_path):
    task = blobs()
    esper.grow(task, PERMISSIVE, controller=Script(GROW), run=tmp_path / "r")
    again = blobs_on(lambda: esper.load(tmp_path / "r/models/env-000", host=task.host))
    summary = esper.grow(again, PERMISSIVE, controller="never", run=tmp_path / "r", overwrite=True)
    assert (summary["status"], summary["exported"]) == ("finished", [0])


def test_a_network_that_standardizes_is_grown_further_by_its_own_mean_and_deviation():
    scaling = Scaling(torch.full((6,), 5.0), torch.full((6,), 10.0))
    network = grown((1, "bypass-mlp", Blend.ADD), scaling=scaling)
    x = torch.randn(100, 6, generator=torch.Generator().manual_seed(3)) * 10 + 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task = esper.task("scaled", x, torch.arange(100) % 3, host=lambda: network, standardize=True)
    assert torch.equal(task.scaling.mean, scaling.mean)
    engine = VectorizedEngine(task.sealed(), small_config(steps=2))
    engine.reset()
    torch.testing.assert_close(engine.export(0)[0](x), network(x), rtol=0, atol=1e-5)


def test_maps_are_grown_further_too(tmp_path):
    task = esper.get_task("digits-image")
    settings = {"envs": 1, "steps": 1, "baselines": [], "data": {"batch_size": 16, "batches_per_step": 1}}
    esper.grow(task, settings, controller="never", run=tmp_path / "r")
    network = esper.load(tmp_path / "r/models/env-000")
    host = as_host(network)
    x = task.test.x[:4]
    torch.testing.assert_close(host(RegrownHost(network).scaling.read(x)), network(x))
