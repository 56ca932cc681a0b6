"""Check that backward passes that a loop throws away leave a host with an incubating seed, and the seed, as they were."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import graft, planted_at
from esper.leyline.lifecycle.slots import Site, Vector
from esper.leyline.lifecycle.vocabulary import Op
from esper.runs.live.growth import Growth
from loops import SETTINGS, equal
from populations import Script
from thinning import crossed

WIDTH, STEPS = 6, 8
INCUBATE = {(0, 0): (Op.GERMINATE, 0, 0, 0, 1, 3)}


def data(key, examples=12):
    with drawn_with(key):
        x = torch.randn(examples, 4)
        return x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long()


class Loop:
    """Holds a host with a seed that incubates, or without one, and the pieces that loops are made of."""

    def __init__(self, *, grown, freeze="none", fused=False, scaled=False, unused=False):
        with drawn_with(0):
            self.model = nn.Sequential(
                nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
            )
        if unused:
            self.model.register_parameter("unused", nn.Parameter(torch.ones(3)))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, enabled=scaled)
        if grown:
            graft(self.model, {"2": Site("2", "2", "2", Vector(WIDTH))})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, fused=fused)
        self.growth = None
        if grown:
            self.growth = Growth(
                self.model, self.optimizer, controller=Script(INCUBATE), probe=[data(1)], loss=F.cross_entropy, every=2,
                budget=9.0, freeze=freeze, scaler=self.scaler if scaled else None,
                settings={**SETTINGS, "blueprints": ["bypass-mlp-small"]},
            )  # fmt: skip

    def backward(self, key, factor=1.0):
        x, y = data(key)
        (self.scaler.scale(F.cross_entropy(self.model(x), y)) * factor).backward()

    def step(self, *batch):
        """Do what a loop does at the end of an iteration, whether the scaler leaves the step out or not."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.growth is not None:
            self.growth.step(*batch)
        self.optimizer.zero_grad()

    def host(self):
        return {name: value for name, value in self.model.state_dict().items() if ".esper." not in name}


def skip(loop, key, thrown):
    """Skip a batch whose loss is not finite."""
    if thrown:
        loop.backward(key + 50, torch.nan)
        loop.optimizer.zero_grad()
    loop.backward(key)
    loop.step()


def accumulate(loop, key, thrown):
    """Drop accumulated gradients, which are finite."""
    for part in range(2 if thrown else 0):
        loop.backward(key + 50 + part, 40.0)
    if thrown:
        loop.optimizer.zero_grad()
    for part in range(3):
        loop.backward(key + 200 * part)
    loop.step()


def scale(loop, key, thrown):
    """Let a GradScaler skip a step whose gradients overflow."""
    if thrown:
        loop.backward(key + 50, 40.0)
        loop.model[4].bias.grad.fill_(torch.inf)  # the gradients of the seed are finite
        loop.step()
    loop.backward(key)
    loop.step()


def twice(loop, key, thrown):
    """Call backward once to look at the gradients, and once more, with another weight, to step by them."""
    x, y = data(key)
    loss = F.cross_entropy(loop.model(x), y)
    if thrown:
        loss.backward(retain_graph=True)
        loop.optimizer.zero_grad()
    (0.7 * loss).backward()
    loop.step()


def run(iteration, *, thrown=(2, 3, 6), **options):
    """Run some iterations of a loop, in a few of which passes are thrown away."""
    loop = Loop(**{"grown": True, **options})
    for step in range(STEPS):
        iteration(loop, 100 + step, step in thrown)
    return loop


def seed(loop):
    return copy.deepcopy(planted_at(loop.model, "2").state_dict())


@pytest.mark.parametrize("iteration", [skip, accumulate, scale, twice])
def test_passes_that_are_thrown_away_reach_neither_the_host_nor_the_seed(iteration):
    scaled = iteration is scale
    plain, growing = (run(iteration, grown=grown, scaled=scaled) for grown in (False, True))
    clean = run(iteration, thrown=(), scaled=scaled)
    assert equal(growing.host(), plain.host())
    assert equal(seed(growing), seed(clean))
    assert not equal(seed(growing), seed(Loop(grown=True))), "it learned"
    assert growing.growth.summary()["rollbacks"] == {}
    assert len(growing.growth.summary()["plantings"]) == 1


def in_place(loop):
    for group in loop.optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.zero_()


def to_none(loop):
    for p in loop.model.parameters():
        p.grad = None


WAYS = {
    "optimizer.zero_grad": lambda loop: loop.optimizer.zero_grad(),
    "optimizer.zero_grad to zeros": lambda loop: loop.optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda loop: loop.model.zero_grad(),
    "None": to_none,
    "zeros in place": in_place,
}


@pytest.mark.parametrize(("way", "freeze"), crossed(list(WAYS), ["none", "host"]))
def test_a_pass_is_thrown_away_in_any_of_many_ways(way, freeze):
    def iteration(loop, key, thrown):
        if thrown:
            loop.backward(key + 50, 30.0)
            WAYS[way](loop)
        loop.backward(key)
        loop.step()

    def fallen_through(loop, key, thrown):
        """Drop the gradients of a bad batch, and step nevertheless."""
        loop.backward(key, torch.nan if thrown else 1.0)
        if thrown:
            WAYS[way](loop)
        loop.step()

    assert equal(seed(run(iteration, freeze=freeze)), seed(run(iteration, thrown=(), freeze=freeze)))
    growing, plain = (run(fallen_through, grown=grown, freeze=freeze if grown else "none") for grown in (True, False))
    assert all(bool(value.isfinite().all()) for value in seed(growing).values())
    assert growing.growth.summary()["rollbacks"] == {}
    assert freeze == "host" or equal(growing.host(), plain.host())


def test_a_seed_learns_where_passes_reach_nothing_else_that_trains():
    def reaching(unused):
        loop = Loop(grown=True, freeze=["0", "2", "4"], unused=unused)
        for _ in range(2):
            loop.step()  # the seed learns from the first decision on; before it, no loss requires a gradient
        for step in range(STEPS):
            accumulate(loop, 100 + step, thrown=False)
        return loop

    assert equal(seed(reaching(True)), seed(reaching(False)))
    assert not equal(seed(reaching(True)), seed(Loop(grown=True)))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("batch", [False, True], ids=["straight-through", "shadow"])
def test_a_step_that_a_scaler_skips_is_none_of_the_seed_either(batch, fused):
    loop = Loop(grown=True, fused=fused, scaled=True)
    for step in range(STEPS):
        before = seed(loop)
        loop.backward(100 + step, torch.inf if step in (3, 4) else 1.0)
        loop.step(*(data(100 + step) if batch else ()))
        assert step < 2 or equal(before, seed(loop)) == (step in (3, 4)), "it learns from the first decision on"
    assert loop.growth.summary()["rollbacks"] == {}


def test_a_seed_learns_by_a_pass_within_a_closure_of_the_optimizer():
    def closed(loop, key, thrown):
        def closure():
            loop.optimizer.zero_grad()
            loop.backward(key)

        loop.optimizer.step(closure)
        loop.growth.step()

    def plain(loop, key, thrown):
        loop.optimizer.zero_grad()
        loop.backward(key)
        loop.optimizer.step()
        loop.growth.step()

    assert equal(seed(run(closed)), seed(run(plain)))
