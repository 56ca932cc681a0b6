"""Test growth where the passes of a loop differ: blocks that are recomputed in a checkpoint, left out of some, or run twice."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import graft, planted_at, ungraft
from esper.leyline.lifecycle.slots import Site, Vector
from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import InputError
from esper.runs.live.growth import Growth
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of reentrant checkpoints
WIDTH = 8
BOTH = 4
"""Step from which both seeds incubate."""
SITES = {
    "block": Site("block", "blocks.0", "blocks.0", Vector(WIDTH)),
    "within": Site("within", "blocks.1.fall", "blocks.1", Vector(WIDTH)),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.norm, self.fall = nn.Linear(WIDTH, 12), nn.LayerNorm(12), nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.fall(torch.relu(self.norm(self.lift(x))))


class Net(nn.Module):
    """Runs the blocks that `path` names, in order; `reentrant` says how they are checkpointed, None for not at all."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.stem, self.head, self.reentrant = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3), reentrant
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x, path=(0, 1)):
        x = self.stem(x)
        for index in path:
            block = self.blocks[index]
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def data(key):
    with drawn_with(key):
        x = torch.randn(12, 4)
        return x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long()


def step(model, optimizer, number, path=(0, 1)):
    x, y = data(100 + number)
    F.cross_entropy(model(x, path), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return (x, path), y


def growing(model, blueprints=("mlp-small", "bypass-mlp"), *, keep=True):
    """Plant seeds at once in the two sites of a network; return its optimizer and its growth."""
    entries = [
        ScheduleEntry(at=0, op=Op.GERMINATE, slot=slot, blueprint=blueprint, tempo=2, target=1.0, keep=keep)
        for slot, blueprint in zip(SITES, blueprints, strict=True)
    ]
    optimizer = torch.optim.AdamW(graft(model, SITES).parameters(), lr=0.01)
    return optimizer, Growth(
        model,
        optimizer,
        controller=Schedule(entries),
        probe=[data(1)],
        loss=F.cross_entropy,
        every=2,
        budget=9.0,
        settings={"gates": {"permissive": True, "min_training_steps": 3}, "lifecycle": {"max_training_seeds": 2}},
    )


def net(reentrant=None):
    with drawn_with(0):
        return Net(reentrant)


def grown(reentrant, *, shadow):
    model = net(reentrant)
    optimizer, growth = growing(model)
    for number in range(30):
        batch = step(model, optimizer, number)
        growth.step(*(batch if shadow else ()))
    assert len(growth.summary()["keeps"]) == 2
    return growth.finish()(data(7)[0])


def test_a_finished_network_grows_further_and_keeps_what_it_has():
    model = net()
    optimizer, growth = growing(model)
    for number in range(30):
        step(model, optimizer, number)
        growth.step()
    model = growth.finish()
    first = [name for name in model.state_dict() if ".esper." in name]
    assert first
    x, _ = data(7)
    expected = model(x)
    assert "holds a seed that was kept" in repr(graft(model, example=x).sites)
    assert torch.equal(ungraft(model)(x), expected)

    with pytest.raises(InputError, match=r"submodule 'blocks.0' of site 'block' holds a seed that was kept"):
        graft(model, SITES)
    names = [name for name in graft(model, example=x).sites if name not in ("blocks.0", "blocks.1.fall")]
    entry = ScheduleEntry(at=0, op=Op.GERMINATE, slot=names[0], blueprint="mlp-small", tempo=2, target=1.0, keep=True)
    again = Growth(
        model,
        optimizer,
        controller=Schedule([entry]),
        probe=[data(1)],
        loss=F.cross_entropy,
        every=2,
        budget=9.0,
        settings={"gates": {"permissive": True}},
    )
    assert torch.equal(model(x), expected)
    for number in range(30, 60):
        step(model, optimizer, number)
        again.step()
    assert [entry["site"] for entry in again.summary()["keeps"]] == names[:1]
    expected = model(x)
    network = again.finish()
    grown = {name for name in network.state_dict() if ".esper." in name}
    assert grown > set(first)
    for each in (network, copy.deepcopy(network)):
        assert torch.allclose(each(x), expected, atol=1e-6)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in network.parameters()}


@pytest.mark.parametrize(("reentrant", "shadow"), [(False, False), (False, True), (True, False)])
def test_blocks_in_a_checkpoint_grow_as_those_outside_of_one(reentrant, shadow):
    assert torch.equal(grown(reentrant, shadow=shadow), grown(None, shadow=shadow))


def test_a_seed_that_a_reentrant_checkpoint_hides_is_refused_by_name():
    with pytest.raises(
        InputError, match=r"site 'block' runs without gradients .* a reentrant checkpoint, so its seed cannot"
    ):
        grown(True, shadow=True)


@pytest.mark.parametrize("shadow", [False, True], ids=["straight-through", "shadow"])
@pytest.mark.parametrize("path", [(), (1,), (0, 0, 1)], ids=["none", "other", "twice"])
def test_a_seed_learns_in_the_passes_that_call_its_site_and_the_host_stays_as_it_was(path, shadow):
    plain, model = net(), net()
    optimizer, growth = growing(model, keep=False)
    other = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for number in range(9):
        now = path if number % 2 else (0, 1)
        before = {name: copy.deepcopy(planted_at(model, name).state_dict()) for name in SITES if number >= BOTH}
        batch = step(model, optimizer, number, now)
        growth.step(*(batch if shadow else ()))
        step(plain, other, number, now)
        for index, name in enumerate(SITES if number >= BOTH else ()):
            after = planted_at(model, name).state_dict()
            changed = any(not torch.equal(value, before[name][key]) for key, value in after.items())
            assert changed == (index in now), (name, number)
    mine = model.state_dict()
    assert all(torch.equal(mine[name], value) for name, value in plain.state_dict().items())
    growth.finish()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks, "nothing watches the optimizer any more"
