"""Test loops on a GPU, where the model is. Runs take a GPU by themselves, so most other tests use one where torch sees it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from tests.tolaria.test_widening_networks import GPT
from torch import nn

import esper
from esper.tamiyo.policy.controller import WEIGHTS
from esper.tolaria.runtime import resolve_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch sees")
DEVICE = "cuda"
SMALL = {
    "envs": 6,
    "steps": 3,
    "shards": 3,
    "data": {"batch_size": 12, "batches_per_step": 1},
    "reward": {"group_size": 2},
    "ppo": {"rounds": 2, "update_epochs": 1, "validate_envs": 3, "validate_every": 1},
}


def digits():
    x, y = load_digits(return_X_y=True)
    return (torch.tensor(x) / 16).float().to(DEVICE), torch.tensor(y > 4).long().to(DEVICE)


def grown(x, y, steps, before=None, scaled=False):
    """Grow a linear network in a loop; return the growth and what the loop saves after so many steps; it begins from `before`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 2)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(DEVICE) if scaled else None
    settings = {"loss": F.cross_entropy, "budget": 2.0, "every": 20, "scaler": scaler}
    growth = esper.Growth(model, optimizer, probe=[(x[:300], y[:300])], **settings)
    if before is not None:
        growth.load_state_dict(before["growth"])
        model.load_state_dict(before["model"])
    for step in range(0 if before is None else before["step"], steps):
        batch = torch.randint(300, len(x), (64,), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        with torch.autocast(DEVICE, torch.float16, enabled=scaled):
            loss = F.cross_entropy(model(x[batch]), y[batch])
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        growth.step()
    return growth, copy.deepcopy({"growth": growth.state_dict(), "model": model.state_dict(), "step": steps})


@pytest.mark.parametrize("scaled", [False, True])
def test_a_network_grows_in_a_loop_and_stays_on_the_gpu(scaled):
    x, y = digits()
    growth, _ = grown(x, y, 600, scaled=scaled)
    network = growth.finish()
    assert growth.summary()["keeps"]
    assert {parameter.device.type for parameter in network.parameters()} == {DEVICE}
    assert float((network(x[:300]).argmax(1) == y[:300]).float().mean()) > 0.93
    network.cpu()(x[:3].cpu())


def test_a_resumed_loop_goes_on_with_the_same_bits():
    x, y = digits()
    straight, _ = grown(x, y, 240)
    _, half = grown(x, y, 130)
    again, _ = grown(x, y, 240, before=half)
    for one, other in zip(straight.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert straight.summary()["keeps"] == again.summary()["keeps"]


@pytest.mark.parametrize("cost", ["parameters", "seconds"])
def test_a_whole_network_becomes_wider_and_a_resumed_one_is_as_wide(cost):
    def made():
        torch.manual_seed(0)
        model = GPT().to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        example = torch.randint(20, (4, 8), device=DEVICE)
        growth = esper.AnytimeGrowth(model, optimizer, example=example, ratio=0.2, warmup=4, cost=cost)
        return model, optimizer, growth

    model, optimizer, growth = made()
    for step in range(60):
        batch = torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step(batch[:, 1:])
    assert growth.growths
    if cost == "seconds":
        assert all(each["slower"] >= 1 for each in growth.growths)
    assert {each.device.type for each in (*model.parameters(), *growth.average.parameters())} == {DEVICE}
    wide, other, again = made()
    again.load_state_dict(growth.state_dict())
    wide.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(wide(batch[:, :-1]), model(batch[:, :-1]))
    assert torch.equal(again.snapshot()(batch[:, :-1]), growth.snapshot()(batch[:, :-1]))


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.AdamW, torch.optim.SGD])
def test_wider_and_deeper_networks_compute_what_they_did_and_learn_on(optimizer):
    torch.manual_seed(0)
    model = GPT().to(DEVICE).double()
    made, tokens = optimizer(model.parameters(), lr=1e-3), torch.randint(20, (4, 8), device=DEVICE)
    before = model(tokens).detach()
    assert esper.widen(model, 2, example=tokens, optimizer=made)
    assert esper.deepen(model, 1, example=tokens, optimizer=made)
    assert torch.allclose(model(tokens), before, atol=1e-9)
    for _ in range(2):
        model(tokens).square().mean().backward()
        made.step()
        made.zero_grad()
    assert torch.isfinite(model(tokens)).all()


def test_a_damaged_network_on_the_gpu_is_healed_there():
    x, y = digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model[2].weight[4:] = 0
    healed = esper.heal(model, (x, y), budget=1.0, steps=80)
    accuracy = {row.network: row.accuracy for row in healed.table}
    assert accuracy["grown"] > accuracy["nothing"]


@pytest.mark.parametrize("place", ["cpu", "same"])
def test_workers_on_one_gpu_train_the_controller_that_one_worker_trains(tmp_path, place):
    small = SMALL | {"deterministic": place == "same", "ppo": SMALL["ppo"] | {"device": place}}
    assert resolve_device("auto").type == DEVICE
    for name, options in (("one", {"workers": 1}), ("two", {"workers": 2}), ("named", {"devices": "cuda:0,cuda:0"})):
        esper.train("iris", small, run=tmp_path / name, progress=False, **options)
    weights = [(tmp_path / name / "controller" / WEIGHTS).read_bytes() for name in ("one", "two", "named")]
    assert weights[0] == weights[1] == weights[2]
