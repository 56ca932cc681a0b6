"""Test the optimizer of a loop of one's own while a network grows: its groups, its hooks, its direction and its steps."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import graft, planted_at
from esper.leyline.lifecycle.slots import Site, Vector
from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import GrowthWarning
from esper.runs.live.growth import Growth
from loops import SETTINGS
from populations import Script

WIDTH = 6
INCUBATE = {(0, 0): (Op.GERMINATE, 0, 0, 0, 1, 3)}


class Normalised(nn.Module):
    """Reads tokens by a table that is not decayed, and has its only site behind a norm."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(5, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, ids):
        return self.head(self.norm(self.tokens(ids).mean(1)))


def host():
    with drawn_with(0):
        return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def data(key, examples=12):
    with drawn_with(key):
        x = torch.randn(examples, 4)
        return x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long()


def grow(optimizer, model, script=None, **options):
    """Make a growth of a host at its first layer, by a script that has a seed incubate where none is given."""
    settings = {**SETTINGS, "blueprints": ["bypass-mlp-small"]}
    usual = {"probe": [data(1), data(2)], "loss": F.cross_entropy, "every": 2, "budget": 9.0, "settings": settings}
    return Growth(model, optimizer, controller=Script(INCUBATE if script is None else script), **{**usual, **options})


def grafted():
    return graft(host(), {"0": Site("0", "0", "0", Vector(WIDTH))})


def test_the_matrices_of_a_seed_are_decayed_as_matrices_and_its_biases_as_biases():
    model = graft(Normalised(), {"norm": Site("norm", "norm", "norm", Vector(WIDTH))})
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": [*vectors, model.tokens.weight], "weight_decay": 0.0}, {"params": [model.head.weight]}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.3)
    with drawn_with(0):
        ids = torch.randint(0, 5, (8, 4))
    growth = grow(optimizer, model, probe=[(ids, ids[:, 0] % 3), (ids, ids[:, 1] % 3)])
    seed = dict(planted_at(model, "norm").named_parameters())
    of_site = [group for group in optimizer.param_groups if group.get("esper") == "norm"]
    decay = {id(p): group["weight_decay"] for group in of_site for p in group["params"]}
    assert {name: decay[id(parameter)] for name, parameter in seed.items()} == {
        name: 0.0 if name.endswith("bias") else 0.3 for name in seed
    }
    assert growth.finish() is model
    assert len(optimizer.param_groups) == 2


def train(model, optimizer, growth, first, last, *, batch=False, sign=1.0):
    """Do steps of a loop, whose batches are keyed by their number."""
    for step in range(first, last):
        x, y = data(100 + step)
        (sign * F.cross_entropy(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step(*((x, y) if batch else ()))


@pytest.mark.parametrize("batch", [False, True], ids=["straight-through", "shadow"])
def test_hooks_of_the_optimizer_run_once_a_step_while_seeds_incubate(batch):
    model = grafted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    growth, calls = grow(optimizer, model), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("behind"))
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append("any"))
    before = copy.deepcopy(planted_at(model, "0").state_dict())
    try:
        train(model, optimizer, growth, 0, 5, batch=batch)
    finally:
        everywhere.remove()
    assert calls == ["before", "behind", "any"] * 5
    assert any(not torch.equal(value, before[name]) for name, value in planted_at(model, "0").state_dict().items())


@pytest.mark.parametrize("batch", [False, True], ids=["straight-through", "shadow"])
def test_a_seed_learns_alike_whether_the_optimizer_minimizes_or_maximizes_the_negative(batch):
    seeds = []
    for maximize in (False, True):
        model = grafted()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, maximize=maximize)
        growth = grow(optimizer, model)
        train(model, optimizer, growth, 0, 9, batch=batch, sign=-1.0 if maximize else 1.0)
        assert growth.engine.state.measurements.gain.mean[0, 0] > 0
        seeds.append(planted_at(model, "0").state_dict())
    assert all(torch.equal(value, seeds[1][name]) for name, value in seeds[0].items())


def test_an_optimizer_that_the_loop_no_longer_steps_is_noticed_at_the_next_decision():
    model = grafted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    growth = grow(optimizer, model)
    train(model, optimizer, growth, 0, 4)
    replaced = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.warns(
        GrowthWarning,
        match=r"AdamW that Growth was given has taken no step in the last 2 calls of growth",
    ):
        train(model, replaced, growth, 4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, replaced, growth, 6, 20)
    assert "no step in the last 16 calls of growth.step()" in growth.summary()["explanations"][0]
    train(model, optimizer, growth, 20, 21)
    train(model, replaced, growth, 21, 22)
    sentences = growth.summary()["explanations"]
    assert not any("no step" in sentence for sentence in sentences), "the optimizer stepped since the last decision"


def test_an_optimizer_replaced_shortly_before_a_decision_is_noticed_there():
    model = grafted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    growth = grow(optimizer, model, every=50)
    train(model, optimizer, growth, 0, 30)
    with pytest.warns(GrowthWarning, match="no step in the last 20 calls"):
        train(model, torch.optim.AdamW(model.parameters(), lr=0.01), growth, 30, 50)


def test_steps_that_a_scaler_skips_are_not_taken_for_an_optimizer_that_is_gone():
    model, scaler = grafted(), torch.amp.GradScaler("cpu", init_scale=2.0**30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    growth = grow(optimizer, model, scaler=scaler)
    x, y = data(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            (scaler.scale(F.cross_entropy(model(x), y)) * torch.inf).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            growth.step()
    with pytest.warns(GrowthWarning, match="SGD that Growth was given has taken no step in the last 8 calls"):
        train(model, torch.optim.SGD(model.parameters()), growth, 6, 8)


def test_a_loss_that_the_loop_maximizes_is_noticed():
    model = grafted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    growth = grow(optimizer, model, loss=lambda output, y: -F.cross_entropy(output, y, reduction="none"))
    with pytest.warns(GrowthWarning, match=r"SGD maximizes, and the loss on the probe has risen from -1\.\d+ to -"):
        train(model, optimizer, growth, 0, 9, sign=-1.0)


@pytest.mark.parametrize(("every", "calls"), [(50, 2), (2, 2), (50, 4)], ids=["twice", "often decided", "accumulated"])
def test_more_calls_than_steps_of_the_optimizer_are_one_warning_until_that_is_mended(every, calls):
    model = grafted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    growth = grow(optimizer, model, every=every)
    x, y = data(5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(200):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(calls if step < 50 else 1):
                growth.step()
    said = [str(each.message) for each in caught if each.category is GrowthWarning]
    assert len(said) == 1
    assert "calls of growth.step() came with no step of the SGD since the call before" in said[0]
    assert not any("came with no step" in sentence for sentence in growth.summary()["explanations"]), "it was mended"


def test_a_loop_that_skips_a_third_of_its_batches_is_not_taken_for_one_that_calls_twice():
    model = grafted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    growth = grow(optimizer, model, every=5)
    x, y = data(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(90):
            F.cross_entropy(model(x), y).backward()
            if step % 3:
                optimizer.step()
            optimizer.zero_grad()
            growth.step()
    assert not any("came with no step" in sentence for sentence in growth.summary()["explanations"])
