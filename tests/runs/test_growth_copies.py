"""Seeds that are a narrow copy of the submodule of their site: further heads, gated units and channels, and then part of it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.runs.test_growth_hosts import VOCABULARY, positions, tokens
from torch import nn
from torch.optim.swa_utils import AveragedModel

import esper
from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.copies import find_units
from esper.kasmina.graft.find_sites import find_sites
from esper.kasmina.graft.grafted import graft, planted_at
from esper.kasmina.graft.grown import called_beside
from esper.kasmina.network.saving import load_grown
from esper.leyline.lifecycle.vocabulary import Blend, Op
from esper.leyline.messages import InputError
from esper.runs.live.growth import Growth
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry
from lives import SETTINGS, Host, live

WIDTH = 8


class Heads(nn.Module):
    """Attends causally, with a layer each for query, key and value or one for all, and keys that several heads may share."""

    def __init__(self, number=4, shared=4, size=2, *, fused=False, by_head=False):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.fused, self.by_head = (
            number,
            shared,
            size,
            fused,
            by_head,
        )
        sizes = (3 * number * size,) if fused else (number * size, shared * size, shared * size)
        self.reads = nn.ModuleList(nn.Linear(WIDTH, each) for each in sizes)
        self.out, self.drop = nn.Linear(number * size, WIDTH), nn.Dropout(0.1)

    def forward(self, x, mask=None):
        batch, length, _ = x.shape
        if self.by_head:
            q, k, v = self.reads[0](x).view(batch, length, -1, 3 * self.head_dim).transpose(1, 2).chunk(3, -1)
        else:
            parts = self.reads[0](x).chunk(3, -1) if self.fused else [layer(x) for layer in self.reads]
            q, k, v = (each.view(batch, length, -1, self.head_dim).transpose(1, 2) for each in parts)
        k, v = (each.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.drop(self.out(y.transpose(1, 2).reshape(batch, length, -1)))


class Gated(nn.Module):
    def __init__(self, fused=False):
        super().__init__()
        self.up = nn.Linear(WIDTH, 32) if fused else nn.ModuleList([nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)])
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, -1) if isinstance(self.up, nn.Linear) else (each(x) for each in self.up)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = attention, mlp

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Decoder(nn.Module):
    def __init__(self, attention=Heads, mlp=Gated):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block(attention(), mlp()) for _ in range(2))

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Channels(nn.Module):
    """Runs residual blocks over maps, with a norm by channel within."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 3)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
            for _ in range(2)
        )

    def forward(self, x):
        x = self.stem(x)
        for branch in self.branches:
            x = x + branch(x)
        return self.head(x.mean((2, 3)))


def images():
    x = torch.randn(16, 1, 6, 6)
    return x, (x.mean((1, 2, 3)) > 0).long()


NETWORKS = {
    "heads, gated units": Host(Decoder, tokens, positions),
    "heads by one layer, gated units by one": Host(
        lambda: Decoder(lambda: Heads(fused=True), lambda: Gated(fused=True)), tokens, positions
    ),
    "heads by one layer, head by head": Host(
        lambda: Decoder(lambda: Heads(fused=True, by_head=True)), tokens, positions
    ),
    "keys that heads share": Host(lambda: Decoder(lambda: Heads(8, 2, 2)), tokens, positions),
    "channels behind a norm": Host(Channels, images, F.cross_entropy),
}
PARTS = {"channels behind a norm": ["branches.0", "branches.1"]}


@pytest.mark.parametrize("name", NETWORKS)
def test_narrow_copies_live_through_a_whole_growth_and_become_part_of_their_submodules(name):
    at = PARTS.get(name, ["blocks.0.attention", "blocks.1.mlp"])
    life = live(NETWORKS[name], lambda *_: dict.fromkeys(at, ("narrow-copy", Blend.ADD)), at="parts")
    assert set(life.kept.values()) == {"narrow-copy"}
    assert life.folded == at


def planting(*sites, model=None, chosen=None, **options):
    """Make a growth that plants a narrow copy at each of these sites of a decoder, keeps it, and plants nothing else."""
    if model is None:
        with drawn_with(0):
            model = Decoder()
    own = {"blueprint": "narrow-copy", "tempo": 1, "target": 1.0, "keep": True} | (chosen or {})
    entries = [ScheduleEntry(at=1, op=Op.GERMINATE, slot=site, **own) for site in sites]
    settings = {**SETTINGS, "blueprints": ["narrow-copy"]} | options.pop("settings", {})
    rest = {"budget": 1e3, "budget_passes": None, "every": 1, "controller": Schedule(entries)} | options
    with drawn_with(1):
        probe = [tokens(), tokens()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Growth(model, optimizer, probe=probe, loss=positions, settings=settings, **rest)


def run_on(growth, steps):
    for number in range(growth.calls, growth.calls + steps):
        with drawn_with(100 + number):
            x, y = tokens()
            positions(growth.model.train()(x), y).mean().backward()
        growth.population.groups.optimizer.step()
        growth.population.groups.optimizer.zero_grad()
        growth.step(x, y)
    return growth


BOTH = "blocks.0.attention", "blocks.1.mlp"


def test_a_network_that_is_built_with_the_units_loads_the_state(tmp_path):
    growth = run_on(planting(*BOTH), 12)
    network = growth.finish().eval()
    assert growth.architecture == (
        "blocks.0.attention.reads.0: 8 -> 8 became 8 -> 10; blocks.0.attention.reads.1: 8 -> 8 became 8 -> 10; "
        "blocks.0.attention.reads.2: 8 -> 8 became 8 -> 10; blocks.0.attention.out: 8 -> 8 became 10 -> 8; "
        "blocks.1.mlp.up.0: 8 -> 16 became 8 -> 20; blocks.1.mlp.up.1: 8 -> 16 became 8 -> 20; "
        "blocks.1.mlp.down: 16 -> 8 became 20 -> 8; "
        "blocks.0.attention.num_heads 4 became 5; blocks.0.attention.num_kv_heads 4 became 5"
    )
    assert not any(".esper." in name for name in network.state_dict())
    growth.save(tmp_path)
    x, _ = tokens()
    for other in (load_grown(tmp_path, Decoder()), growth.gather(Decoder())):
        assert torch.equal(other.eval()(x), network(x))
        assert other.blocks[0].attention.num_heads == 5


def test_a_moving_average_gets_the_units_too():
    with drawn_with(0):
        model = Decoder()
    graft(model, "parts", example=tokens()[0])
    average = AveragedModel(model)
    growth = planting(*BOTH, model=model, ema=average)
    for _ in range(12):
        run_on(growth, 1)
        average.update_parameters(model)
    x, _ = tokens()
    before = average.eval()(x)
    growth.finish()
    assert average.module.blocks[0].attention.num_heads == 5
    assert torch.allclose(average(x), before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stop", [3, 6])
def test_a_growth_of_copies_goes_on_from_its_state_bit_for_bit(stop):
    whole, half, resumed = run_on(planting(*BOTH), 12), run_on(planting(*BOTH), stop), planting(*BOTH)
    resumed.load_state_dict(copy.deepcopy(half.state_dict()))
    run_on(resumed, 12 - stop)
    for network in (lambda growth: growth.model, lambda growth: growth.finish()):
        mine, theirs = (network(growth).state_dict() for growth in (resumed, whole))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_a_copy_adds_nothing_at_birth_and_its_price_is_what_it_has():
    growth = planting("blocks.0.attention")
    x, _ = tokens()
    before = growth.model.eval()(x)
    seen = []
    growth.model.blocks[0].attention.out.register_forward_hook(lambda part, args, _: seen.append(args[0].shape[-1]))
    random = torch.random.get_rng_state()
    run_on(growth, 1)
    growth.load_state_dict(copy.deepcopy(growth.state_dict()))
    assert torch.equal(torch.random.get_rng_state(), random), "torch's own generators are not used"
    run_on(growth, 3)
    assert set(seen) == {WIDTH}, "a person's hooks see the submodule alone"
    seed = planted_at(growth.model, "blocks.0.attention")
    learning = sum(parameter.numel() for parameter in seed.trained())
    slot = growth.population.space.slots.index("blocks.0.attention")
    assert learning == growth.population.space.cost[0, slot, 0] == 3 * (2 * WIDTH + 2) + 2 * WIDTH
    assert not torch.equal(growth.model.eval()(x), before), "the host has trained"
    assert seed.units == 1
    assert [name for name in seed.fixed if "out.bias" in name]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"chosen": {"blend": Blend.GATE}}, "by the blend GATE what it adds depends on the stream"),
        ({"freeze": "host"}, "blocks.1.mlp.down.weight, which it would change, is frozen"),
    ],
)
def test_a_copy_that_cannot_be_part_of_its_submodule_stays_beside_with_a_reason(options, why, tmp_path):
    growth = run_on(planting("blocks.1.mlp", **options), 12)
    x, _ = tokens()
    before = growth.model.eval()(x)
    network = growth.finish()
    assert growth.why_beside == {"blocks.1.mlp": why}
    growth.save(tmp_path)
    assert torch.equal(network(x), before)
    assert torch.equal(load_grown(tmp_path, Decoder()).eval()(x), before)


class Mean(nn.Module):
    """Divides by the number of its units, which a sum of two of it does not."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        hidden = torch.relu(self.up(x))
        return self.down(hidden) / hidden.shape[-1]


class NormedHeads(Heads):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(2)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (each(x).view(batch, length, -1, 2).transpose(1, 2) for each in self.reads)
        y = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


def test_each_submodule_without_units_to_add_has_a_reason():
    with drawn_with(0):
        model, (x, _) = Decoder(NormedHeads, Mean), tokens()
    found = find_sites(model, x)
    units, reasons = find_units(model, [*found.values(), *found.parts.values()], x)
    assert not units
    assert reasons["blocks.0.attention"] == "norm.weight belongs to none of its units"
    assert reasons["blocks.0.mlp"] == "with more units it does not compute the sum, as where it depends on their number"
    assert reasons["blocks.0"] == "a norm runs over all of its units"
    with pytest.raises(InputError, match=r"at 'blocks\.0', for one, a norm runs over all"):
        planting(model=model)
    with pytest.raises(InputError, match="'narrow-copy' would run"):
        planting(mode="reserve")


class Product(nn.Module):
    """Adds up products of what two layers return, one for each of its units."""

    def __init__(self):
        super().__init__()
        self.units, self.one, self.two, self.out = 4, nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out((self.one(x) * self.two(x)).view(-1, self.units))


def growing_at_once():
    """Make a growth by a rule whose kept copies become units while the network trains."""
    with drawn_with(0):
        model, target = nn.Sequential(nn.Linear(6, 6), Product(), nn.Tanh(), nn.Linear(3, 3)), Product()
    growth = Growth(
        esper.graft(model, ["1"], example=torch.randn(4, 6)),
        torch.optim.AdamW(model.parameters(), lr=0.01),
        probe=[products(target, key) for key in (1, 2)],
        loss=F.mse_loss,
        budget=2.0,
        budget_passes=None,
        every=2,
        settings={**SETTINGS, "blueprints": ["narrow-copy"], "lifecycle": {"absorb": True}, "reward": {"rent": 0.0}},
    )
    return growth, target


def products(target, key):
    with drawn_with(key), torch.no_grad():
        x = torch.randn(64, 6)
        return x, 3 * target(x)


def train(growth, target, until):
    while not until():
        assert growth.calls < 400
        x, y = products(target, 10 + growth.calls)
        F.mse_loss(growth.model(x), y).backward()
        growth.population.groups.optimizer.step()
        growth.population.groups.optimizer.zero_grad()
        growth.step(x, y)


def test_a_kept_copy_becomes_units_while_the_network_trains_and_its_place_grows_again():
    growth, target = growing_at_once()
    train(growth, target, lambda: growth.model[1].units == 5)
    assert growth.folded == ["1"]
    state = copy.deepcopy(growth.state_dict())
    train(growth, target, lambda: growth.model[1].units == 6)
    resumed, _ = growing_at_once()
    resumed.load_state_dict(state)
    assert resumed.model[1].units == 5
    train(resumed, target, lambda: resumed.calls == growth.calls)
    mine, theirs = resumed.finish().state_dict(), growth.finish().state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert growth.architecture.endswith("1.units 4 became 6")


class Nested(nn.Module):
    """Wraps a module with the same units, of which one layer is known by two names."""

    def __init__(self):
        super().__init__()
        self.net = Gated()
        self.alias = self.net.down

    def forward(self, x):
        return self.net(x)


def test_units_with_two_places_and_two_names_are_added_once():
    with drawn_with(0):
        model, (x, _) = Decoder(mlp=Nested), tokens()
    found = find_sites(model, x)
    units, reasons = find_units(model, [*found.values(), *found.parts.values()], x)
    assert "blocks.0.mlp" in units
    assert reasons["blocks.0.mlp.net"] == "its units are those of 'blocks.0.mlp'"
    growth = run_on(planting("blocks.0.mlp", model=model), 12)
    growth.finish()
    assert growth.folded == ["blocks.0.mlp"]


class Memory:
    def __init__(self):
        self.keys = []


class Remembering(nn.Linear):
    def forward(self, x, memory):
        if isinstance(memory, Memory):
            memory.keys.append(x)
        else:
            memory["keys"][:] = x
        return super().forward(x)


@pytest.mark.parametrize("memory", [Memory(), {"keys": torch.zeros(2, WIDTH)}], ids=["object", "tensor"])
def test_a_copy_beside_a_submodule_with_a_cache_of_its_own_kind_is_refused(memory):
    with pytest.raises(InputError, match=f"writes to a {type(memory).__name__} that it is given"):
        called_beside(((torch.randn(2, WIDTH), memory), {}), Remembering(WIDTH, WIDTH))


class Listing(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.layer = nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, losses):
        losses.append(x.mean())
        return self.layer(self.act(x))


@pytest.mark.parametrize("attached", [True, False])
def test_a_copy_may_append_to_a_list_of_its_own_and_rectify_its_stream_in_place(attached):
    losses = [torch.zeros(())]
    called_beside(((torch.randn(2, WIDTH), losses), {}), Listing(), attached=attached)
    assert len(losses) == 1
