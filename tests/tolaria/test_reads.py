"""Check that a step reads the device once, whatever the population is."""

import pytest
import torch
from device_reads import counted_reads
from profile_gpu_sync import counted_waits
from torch.utils.data import TensorDataset

import esper
from esper.leyline.lifecycle.vocabulary import Actions, Op
from esper.tasks.hosts import MLP
from esper.tolaria.engine import VectorizedEngine
from populations import Journalled, Script, blobs, small_config
from thinning import thinned


def grown(envs, slots, live, incubation="shadow", device="cpu"):
    """Make an engine whose environments have `live` seeds each at the next decision, and a client that waits."""
    menu = ("bypass-mlp", "mlp-small", "bypass-linear")
    lifecycle = {"max_seeds": 8, "max_training_seeds": 8, "incubation": incubation}
    config = small_config(envs=envs, steps=40, lifecycle=lifecycle, probe={"sensors_every": 1}, device=device)
    engine = Journalled(blobs(hidden=(3,) * slots, menu=menu), config)
    decisions = {}
    for env in range(envs):
        for seed in range(live):
            decisions[seed, env] = (Op.GERMINATE, seed, (env + seed) % 3, (env + seed) % 3, 2, 3)
            if seed % 2 == 0:
                decisions[seed + 3 + live, env] = (Op.ADVANCE, seed)
    client = Script(decisions)
    view = engine.reset()
    for _ in range(2 * live + 5):
        view, _ = engine.step(client.act(view))
    return engine, client, view


@pytest.mark.parametrize(
    ("envs", "slots", "live", "incubation"),
    thinned([(1, 1, 0, "shadow"), (4, 2, 2, "ste"), (16, 2, 2, "shadow"), (3, 6, 5, "shadow"), (1, 6, 5, "ste")], 2),
)
def test_a_step_reads_the_device_once_for_any_population(envs, slots, live, incubation):
    engine, client, view = grown(envs, slots, live, incubation)
    actions = client.act(view)
    with counted_reads() as reads:
        engine.step(actions)
    assert len(reads) <= 2, reads
    assert [site for _, site in reads] == ["runtime.py:read_packet"]


def test_a_step_that_germinates_prunes_and_ends_the_episode_reads_no_more():
    engine, client, view = grown(4, 3, 2)
    client.decisions = {
        (view.step, 0): (Op.PRUNE, 0, 0, 0, 0, 0),
        (view.step, 1): (Op.GERMINATE, 2, 1, 0, 2, 3),
        (view.step, 2): (Op.PRUNE, 0, 0, 0, 3, 0),
    }
    engine.config = engine.config.model_copy(update={"steps": view.step + 1})
    actions = client.act(view)
    with counted_reads() as reads:
        _, outcome = engine.step(actions)
    assert outcome.terminal
    assert outcome.accepted.all()
    assert [site for _, site in reads] == ["runtime.py:read_packet"]


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch sees")
        ),
    ],
)
def test_a_steady_step_reads_the_device_in_one_place_and_on_a_gpu_waits_nowhere_else(device):
    engine, client, view = grown(4, 2, 2, device=device)
    view, _ = engine.step(client.act(view))  # brings constants to the device
    actions = client.act(view)
    with counted_reads() as reads, counted_waits(device == "cuda", "error"):
        engine.step(actions)
    assert {site for _, site in reads} == {"runtime.py:read_packet"}


def test_the_counter_sees_a_read():
    with counted_reads() as reads:
        torch.arange(4).nonzero()
        float(torch.ones(()))
    assert {"nonzero", "__float__"} <= {what for what, _ in reads}


def test_the_counter_sees_a_copy_to_a_device_that_blocks_and_none_that_does_not():
    held = torch.empty(4, device="meta")
    with counted_reads() as reads:
        torch.ones(4).to("meta", non_blocking=True)
        held.copy_(torch.ones(4), non_blocking=True)
    assert reads == []
    with counted_reads() as reads:
        torch.ones(4).to("meta")
        held.copy_(torch.ones(4))
    assert [what for what, _ in reads] == ["copy to the device that blocks"] * 2


def test_a_step_on_examples_that_are_read_ahead_reads_the_device_once():
    x = torch.randn(700, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(1))
    task = esper.task("t", data, host=MLP(6, 8, (3, 5), 3), classes=3, stream=True)
    engine = VectorizedEngine(task, small_config())
    engine.reset()
    for _ in range(2):  # more batches than are read ahead
        with counted_reads() as reads:
            engine.step(Actions.wait(3))
        assert [site for _, site in reads] == ["runtime.py:read_packet"]
