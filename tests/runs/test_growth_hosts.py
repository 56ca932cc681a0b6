"""Networks of many kinds live through a whole growth: sites found, seeds born, blended, kept, finished, exported."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.grafted import planted_at
from esper.leyline.actions import Actions, Op
from esper.leyline.stages import Stage
from esper.runs.growth import Growth

VOCABULARY, LENGTH = 11, 7


class DecoderBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    """Next tokens, the head tied to the embedding."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList([DecoderBlock(), DecoderBlock()])
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.checkpointed = checkpointed

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed and self.training else block(x)
        return self.head(x)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids):
        return self.head(self.body(self.tokens(ids)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.first, self.second = nn.LSTM(8, 8, batch_first=True), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids):
        h, _ = self.first(self.tokens(ids))
        h, _ = self.second(h)
        return self.head(h)


class ConvBlock(nn.Module):
    """A residual block with everything in place."""

    def __init__(self):
        super().__init__()
        self.conv_1, self.norm_1 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv_2, self.norm_2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm_2(self.conv_2(self.act(self.norm_1(self.conv_1(x)))))
        y += x
        return self.act(y)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 2, 1)
        self.blocks = nn.Sequential(ConvBlock(), ConvBlock())
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class UNet(nn.Module):
    """Returns a mapping: a mask, and logits from its middle."""

    def __init__(self):
        super().__init__()
        self.down_1, self.down_2 = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 8, 3, 2, 1)
        self.up_1, self.up_2 = nn.ConvTranspose2d(8, 4, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)
        self.mask, self.head = nn.Conv2d(4, 1, 1), nn.Linear(8, 4)

    def forward(self, x):
        a = torch.relu(self.down_1(x))
        b = torch.relu(self.down_2(a))
        up = self.up_2(torch.cat([a, torch.relu(self.up_1(b))], 1))
        return {"mask": self.mask(up), "logits": self.head(b.mean((2, 3)))}


class Shared(nn.Module):
    """One block that runs three times."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 4)
        self.block = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))

    def forward(self, x):
        x = self.stem(x)
        for _ in range(3):
            x = x + self.block(x)
        return self.head(x)


def tokens():
    ids = torch.randint(0, VOCABULARY, (6, LENGTH + 1))
    return ids[:, :-1], ids[:, 1:]


def images():
    return torch.randn(6, 3, 8, 8), torch.randint(0, 4, (6,))


def vectors():
    return torch.randn(6, 5), torch.randint(0, 4, (6,))


def positions(output, y):
    return F.cross_entropy(output.transpose(1, 2), y, reduction="none")


def masked(output, y):
    return F.cross_entropy(output["logits"], y, reduction="none") + output["mask"].square().mean((1, 2, 3))


HOSTS = {
    "decoder": (Decoder, tokens, positions),
    "checkpointed decoder": (lambda: Decoder(checkpointed=True), tokens, positions),
    "encoder": (Encoder, tokens, positions),
    "recurrent": (Recurrent, tokens, positions),
    "residual convolutions": (ResNet, images, F.cross_entropy),
    "u-net": (UNet, images, masked),
    "shared block": (Shared, vectors, F.cross_entropy),
}


class Lives:
    """Plants at each of some sites in turn one blueprint after the other that fits, and keeps it."""

    def __init__(self, slots):
        self.slots, self.planted = slots, 0

    def act(self, view):
        actions, masks = Actions.wait(1), view.masks
        for op in (Op.FOSSILIZE, Op.ADVANCE, Op.GERMINATE):
            slots = [slot for slot in np.flatnonzero(masks.slot[0, op]) if slot in self.slots]
            if slots:
                fits = np.flatnonzero(masks.blueprint[0, slots[0]])
                actions.op[:], actions.slot[:], actions.tempo[:], actions.target[:] = op, slots[0], 1, 3
                if op == Op.GERMINATE:
                    actions.blueprint[:], actions.blend[:] = fits[self.planted % len(fits)], self.planted % 3
                    self.planted += 1
                return actions
        return actions

    def store(self, outcome):
        pass

    def update(self):
        return {}


def train(model, optimizer, loss, batch, number, growth=None):
    model.train()
    with drawn_with(100 + number):
        x, y = batch()
        loss(model(x), y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if growth is not None:
        growth.step()


@pytest.mark.filterwarnings("ignore:The tensor attributes self")  # of exporting an nn.LSTM
@pytest.mark.parametrize("name", HOSTS)
def test_a_network_lives_through_a_whole_growth(name):
    build, batch, loss = HOSTS[name]
    with drawn_with(0):
        model, probe = build(), [batch(), batch()]
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    other = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    gates = {"permissive": True, "min_training_steps": 1, "min_holding_steps": 0}
    growth = Growth(
        model, optimizer, probe=probe, loss=loss, controller=Lives([]), every=1, budget=100.0, settings={"gates": gates}
    )
    sites = growth.population.sites
    assert sites
    growth.controller.slots = [0, len(sites) - 1]
    keys = list(plain.state_dict())
    for number in range(3):  # a first seed is born and incubates
        train(model, optimizer, loss, batch, number, growth)
        train(plain, other, loss, batch, number)
    mine = model.state_dict()
    assert [key for key in mine if ".esper." not in key] == keys
    assert any(".esper." in key for key in mine)
    assert all(torch.equal(mine[key], value) for key, value in plain.state_dict().items())

    for number in range(3, 24):
        train(model, optimizer, loss, batch, number, growth)
    stages = growth.engine.state.seeds.stage[0]
    assert (stages[growth.controller.slots] == Stage.FOSSILIZED).all()
    with drawn_with(1), torch.no_grad():
        x, _ = batch()
        before = model.eval()(x)
        network = growth.finish()
        after, exported = network(x), torch.export.export(network, (x,)).module()(x)
        again = copy.deepcopy(network)(x)
        for one in (after, exported, again):
            for key, value in before.items() if isinstance(before, dict) else [(..., before)]:
                assert torch.allclose(one[key], value, atol=1e-5), name
    train(network, optimizer, loss, batch, 99)


def test_what_grows_in_a_causal_network_looks_at_no_later_position():
    with drawn_with(0):
        model, probe = Decoder(), [tokens(), tokens()]
    settings = {
        "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 0},
        "blueprints": ["attention", "causal-conv", "bypass-mlp", "low-rank"],
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    growth = Growth(
        model,
        optimizer,
        probe=probe,
        loss=positions,
        controller=Lives(range(8)),
        every=1,
        budget=100.0,
        settings=settings,
    )
    assert all(site.causal for site in growth.population.sites)
    for number in range(40):
        train(model, optimizer, positions, tokens, number, growth)
    acting = [planted_at(model, site.name) for site in growth.population.sites]
    assert sum(seed is not None and float(seed.alpha) == 1 for seed in acting) > 4
    model.eval()
    with drawn_with(1):
        ids, _ = tokens()
    other = ids.clone()
    other[:, 4] = (ids[:, 4] + 1) % VOCABULARY
    assert torch.allclose(model(ids)[:, :4], model(other)[:, :4], atol=1e-6)
    assert not torch.allclose(model(ids)[:, 4:], model(other)[:, 4:], atol=1e-3)
