"""Check that BatchNorm in a host of one's own has batch statistics and running statistics for each environment apart."""

import numpy as np
import pytest
import torch
from torch import nn

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.host import SegmentedHost
from esper.leyline.data.keys import Purpose, scalar
from esper.leyline.lifecycle.slots import Kind, SlotSpec
from esper.leyline.lifecycle.vocabulary import Actions, Op
from esper.tasks.own.custom import task_from
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.stacked.data import Format, SharedBatchIterator
from populations import Script, small_config

STEPS = 3


# A bias in front of a BatchNorm has a gradient of 0 but for rounding, of which Adam makes whole steps: these have none.


def vector_host():
    segments = [
        nn.Linear(6, 8, bias=False),
        nn.Sequential(nn.Linear(8, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 8, bias=False)),
        nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)),
    ]
    return SegmentedHost(segments, [SlotSpec("a", after=0, width=8), SlotSpec("b", after=1, width=8)])


def map_host():
    segments = [
        nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)),
    ]
    return SegmentedHost(segments, [SlotSpec("a", after=0, width=4, kind=Kind.MAP)])


HOSTS = {"vectors": (vector_host, (6,)), "maps": (map_host, (2, 6, 6))}


def engine_of(kind, envs=3, **settings):
    host, shape = HOSTS[kind]
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(160) % 3
    x = torch.randn(160, *shape, generator=generator) + y.view(-1, *(1,) * len(shape))
    task = task_from("normed", x, y, host=host)
    return task, VectorizedEngine(task.sealed(), small_config(settings, envs=envs, steps=8))


def buffers(engine, env):
    columns = engine.population.body.host.columns
    return {name: column[env].clone() for name, column in columns.items() if name.startswith("buffer.")}


@pytest.mark.parametrize("kind", HOSTS)
def test_each_environment_trains_as_one_network_does_in_a_plain_loop(kind):
    task, engine = engine_of(kind)
    engine.reset()
    for _ in range(STEPS):
        engine.step(Actions.wait(3))
    config = engine.config
    for env, key in enumerate(engine.space.instance.tolist()):
        with drawn_with(scalar(config.seed, Purpose.HOST, key, 0)):
            alone = task.host().train()
        optimizer = torch.optim.AdamW(alone.parameters(), lr=config.optimizer.lr, weight_decay=0)
        feed = SharedBatchIterator(
            [task.train],
            np.zeros(1, np.int64),
            np.array([key]),
            config.seed,
            config.data.batch_size,
            Format(task.inputs, torch.device("cpu")),
        )
        feed.reset(0)
        for _ in range(STEPS * config.data.batches_per_step):
            x, y = next(feed)
            loss = nn.functional.cross_entropy(alone(x[0]), y[0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        network = engine.export(env)[0]
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(network.state_dict()[name], value, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(network(task.test.x), alone.eval()(task.test.x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", HOSTS)
def test_running_statistics_do_not_depend_on_other_environments(kind):
    statistics = []
    for envs in (1, 4):
        _, engine = engine_of(kind, envs)
        engine.reset(np.arange(7, 7 + envs))
        for _ in range(STEPS):
            engine.step(Actions.wait(envs))
        statistics.append(buffers(engine, 0))
    for name, value in statistics[0].items():
        torch.testing.assert_close(statistics[1][name], value, rtol=1e-4, atol=1e-6)
    assert any(value.is_floating_point() and value.count_nonzero() for value in statistics[0].values())


@pytest.mark.parametrize("kind", HOSTS)
def test_an_incubating_seed_and_measuring_leave_running_statistics_as_they_are(kind):
    germinate = {(0, 0): (Op.GERMINATE, 0, 0, 0, 1, 3)}
    found = []
    for decided in ({}, germinate):
        _, engine = engine_of(kind, 1, probe={"sensors_every": 1 if decided else 0})
        view, client = engine.reset(np.array([7])), Script(decided)
        for _ in range(STEPS):
            view, _ = engine.step(client.act(view))
        found.append(buffers(engine, 0))
    assert view.seeds.stage[0, 0] != 0
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-7)
