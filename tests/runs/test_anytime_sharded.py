"""Check that a sharded network of one process grows as a plain one does.

These tests come last: where a network was sharded, torch 2.13 ends a process that a thread forks later, or lets it hang, as the
workers are that read ahead.
"""

import pytest
import torch
import torch.distributed as dist
from tests.tolaria.test_widening_networks import GPT, TOKENS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import esper
from esper.kasmina.blueprints import count
from esper.leyline.messages import GrowthWarning, InputError
from loops import equal

pytestmark = pytest.mark.campaign


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(network):
    for block in network.h:
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    fully_shard(network, mesh=init_device_mesh("cpu", (1,)))


def loop(stop, given=None, state=None, spoilt=None, **settings):
    """Train a small network up to a step; return its growth, its optimizer, and its state behind step 15."""
    torch.manual_seed(0)
    model = GPT().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"sizes": [1, 2], "ratio": 0.2, "warmup": 4, "fresh": 0.2, **settings}
    settings |= {"probe": [(TOKENS, TOKENS)], "loss": lambda output, y: 1 + 0 * output.sum(-1)}
    growth = esper.AnytimeGrowth(model, optimizer, example=TOKENS, shard=given, **settings)
    if state is not None:
        growth.load_state_dict(state)
    kept = None
    for step in range(growth.steps, stop):
        texts = torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(growth.model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == spoilt:
            with torch.no_grad():
                next(growth.model.parameters()).mul_(torch.nan)
        growth.step(texts[:, 1:])
        with torch.no_grad():  # an evaluation leaves some parameters whole
            growth.model(texts[:, :-1])
            growth.average(texts[:, :-1])
        kept = growth.state_dict() if growth.steps == 15 else kept
    return growth, optimizer, kept


def test_a_sharded_network_of_one_process_is_a_plain_one_bit_for_bit_and_each_goes_on_from_the_state_of_the_other(
    group,
):
    plain, optimizer, state = loop(30)
    sharded, _, whole = loop(30, shard)
    assert plain.growths == sharded.growths != []
    assert plain.growths[0]["step"] < 15
    assert repr(sharded) == repr(plain)
    states = [each.state_dict() for each in (plain, sharded, loop(30, shard, whole)[0], loop(30, None, whole)[0])]
    assert all(equal(states[0][name], each[name]) for each in states for name in ("average", "before"))
    assert all(equal(states[1][name], states[2][name]) for name in ("model", "optimizers"))
    assert type(sharded.snapshot()) is GPT
    assert equal(sharded.snapshot(), plain.snapshot())
    assert count(sharded.snapshot()) < sharded.parameters  # that of before the growth, as the wider one is not better
    with pytest.raises(InputError, match="the state is of a run without shard=, and holds no network"):
        loop(30, shard, state)
    moved = {**states[0], "model": plain.model.state_dict(), "optimizers": [optimizer.state_dict()]}
    ends = [loop(32, shard, each)[0].state_dict() for each in (moved, states[1])]
    assert all(equal(ends[0][name], ends[1][name]) for name in ("average", "before", "model", "optimizers"))


def test_a_sharded_network_that_is_not_finite_is_restored_and_one_that_was_outgrown_refuses_to_run(group):
    with pytest.warns(GrowthWarning, match="are those of step 13 again"):
        growth, *_ = loop(100, shard, spoilt=98)
    assert growth.rollbacks == [{"step": 100, "restored": 13}]
    assert all(bool(each.isfinite().all()) for each in growth.snapshot().parameters())
    torch.manual_seed(0)
    model = GPT().double()
    growth = esper.AnytimeGrowth(
        model, torch.optim.SGD(model.parameters(), 0.1), example=TOKENS, shard=shard, ratio=1e-3
    )
    assert growth.model is model
    assert growth.step(100)
    with pytest.raises(InputError, match=r"this GPT is trained no more, .*; run growth\.model"):
        model(TOKENS)


@pytest.mark.parametrize(
    ("given", "settings", "said"),
    [
        (True, {}, "shard is a bool; give a function that calls fully_shard"),
        (shard, {"cost": "seconds"}, "cost='seconds' times whole networks"),
        (lambda network: None, {}, "shard leaves the GPT whole, or returns another module"),
        (lambda network: nn.Sequential(fully_shard(network)), {}, "shard leaves the .*, or returns another module"),
        (lambda network: fully_shard(network.h[0]) and None, {}, "call fully_shard on the whole model too"),
        (lambda network: [fully_shard(network.lm_head), fully_shard(network)][-1], {}, "takes tied parameters apart"),
    ],
)
def test_what_cannot_be_sharded_is_refused_in_a_sentence(given, settings, said, group):
    with pytest.raises(InputError, match=said):
        loop(1, given, **settings)


def test_a_network_in_parts_is_refused_by_name_before_and_after_the_growth_is_made(group):
    x, models = torch.randn(2, 4), [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2)]
    optimizer = torch.optim.SGD(models[0].parameters(), 0.1)
    growth = esper.AnytimeGrowth(models[0], optimizer, example=x, shared=True)
    for model in models:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(InputError, match="Sequential is sharded by fully_shard, and parts of parameters cannot"):
        esper.AnytimeGrowth(models[1], torch.optim.SGD(models[1].parameters(), 0.1), example=x)
    with pytest.raises(InputError, match="is sharded by fully_shard"):
        growth.step(4)
    assert (growth.steps, growth.seen) == (0, 0)
