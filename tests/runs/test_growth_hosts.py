"""Let networks of many kinds live through a whole growth: sites found, seeds born, blended, kept, finished, exported."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from esper.kasmina.blueprints import drawn_with, get_blueprint
from esper.kasmina.graft.grafted import graft, planted_at
from esper.leyline.lifecycle.vocabulary import Blend, Op, Stage
from esper.leyline.messages import InputError
from esper.runs.live.growth import Growth
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry
from lives import SETTINGS, Host, equal, live, row, train
from thinning import thinned

PAGE = Path(__file__).parents[2] / "docs" / "sites.md"
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
    """Predicts next tokens, the head tied to the embedding."""

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
    """Adds a residual branch with everything in place."""

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
    """Runs one block three times."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 4)
        self.block = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))

    def forward(self, x):
        x = self.stem(x)
        for _ in range(3):
            x = x + self.block(x)
        return self.head(x)


class Translator(nn.Module):
    """Runs an nn.Transformer whose decoder looks at no later token."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.body = nn.Transformer(8, 2, 2, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.body(self.tokens(source), self.tokens(target), tgt_mask=mask, tgt_is_causal=True))


class Gather(nn.Module):
    """Takes and returns a mapping, with the stream in a tuple of its own."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 12), nn.ReLU(inplace=True), nn.Linear(12, 8))

    def forward(self, state):
        step, (h, *rest) = state["step"], state["streams"]
        return {"step": step + 1, "streams": (h + self.body(h), *rest)}


class Mappings(nn.Module):
    """Passes mappings from block to block, and returns a mapping."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList([Gather(), Gather()])

    def forward(self, x):
        state = {"step": torch.zeros((), dtype=torch.long), "streams": (self.stem(x), x)}
        for block in self.blocks:
            state = block(state)
        return {"features": state["streams"][0], "logits": self.head(state["streams"][0])}


class UNet1d(nn.Module):
    """Predicts a value for each position of a signal (B, C, L), on two levels."""

    def __init__(self):
        super().__init__()
        self.enter, self.inner = nn.Conv1d(2, 6, 3, padding=1), self.block(6, 8)
        self.down, self.up = nn.Conv1d(6, 6, 2, 2), nn.ConvTranspose1d(8, 6, 2, 2)
        self.outer, self.leave = self.block(12, 6), nn.Conv1d(6, 1, 1)

    @staticmethod
    def block(inputs, outputs):
        return nn.Sequential(
            nn.Conv1d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.ReLU(),
            nn.Conv1d(outputs, outputs, 3, padding=1),
        )

    def forward(self, x):
        a = torch.relu(self.enter(x))
        b = self.up(torch.relu(self.inner(self.down(a))))
        return self.leave(torch.relu(self.outer(torch.cat([a, b], 1)))).squeeze(1)


class TemporalBlock(nn.Module):
    """Adds a path of two dilated convolutions that see no later position."""

    def __init__(self, dilation):
        super().__init__()
        self.first, self.second = (nn.Conv1d(8, 8, 3, dilation=dilation) for _ in range(2))
        self.behind = 2 * dilation

    def forward(self, x):
        y = torch.relu(self.first(F.pad(x, (self.behind, 0))))
        return torch.relu(x + self.second(F.pad(y, (self.behind, 0))))


class TCN(nn.Module):
    """Predicts next tokens, by convolutions alone."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 8), nn.Conv1d(8, VOCABULARY, 1)
        self.blocks = nn.Sequential(TemporalBlock(1), TemporalBlock(2), TemporalBlock(4))

    def forward(self, ids):
        return self.head(self.blocks(self.tokens(ids).mT)).mT


class VolumeBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Conv3d(4, 8, 1), nn.Conv3d(8, 4, 3, padding=1), nn.BatchNorm3d(4)

    def forward(self, x):
        return x + self.norm(self.second(torch.relu(self.first(x))))


class VolumeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv3d(1, 4, 3, 2, 1), nn.Linear(4, 4)
        self.blocks = nn.Sequential(VolumeBlock(), VolumeBlock())

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3, 4)))


class MixerBlock(nn.Module):
    """Mixes by a depthwise convolution on channels first and a hidden layer on channels last: (B, H, W, C) -> (B, H, W, C)."""

    def __init__(self):
        super().__init__()
        self.spread, self.norm = nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        y = self.spread(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + self.down(F.gelu(self.up(self.norm(y))))


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 2, 2), nn.Linear(6, 4)
        self.blocks = nn.Sequential(MixerBlock(), MixerBlock())

    def forward(self, x):
        return self.head(self.blocks(self.stem(x).permute(0, 2, 3, 1)).mean((1, 2)))


class PositionsFirst(nn.Module):
    """Runs a transformer with batch_first=False inside, which looks at no later token."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.body = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1), 2, enable_nested_tensor=False
        )

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.body(self.tokens(ids).transpose(0, 1), mask=mask, is_causal=True).transpose(0, 1))


def tokens():
    ids = torch.randint(0, VOCABULARY, (6, LENGTH + 1))
    return ids[:, :-1], ids[:, 1:]


def pairs():
    (source, _), (target, following) = tokens(), tokens()
    return (source, target), following


def images():
    return torch.randn(6, 3, 8, 8), torch.randint(0, 4, (6,))


def vectors():
    return torch.randn(6, 5), torch.randint(0, 4, (6,))


def signals():
    x = torch.randn(6, 2, 12)
    return x, x.sum(1).roll(1, 1)


def volumes():
    return torch.randn(6, 1, 8, 8, 8), torch.randint(0, 4, (6,))


def distances(output, y):
    return (output - y).square().mean(1)


def positions(output, y):
    return F.cross_entropy(output.transpose(1, 2), y, reduction="none")


def masked(output, y):
    return F.cross_entropy(output["logits"], y, reduction="none") + output["mask"].square().mean((1, 2, 3))


def named(output, y):
    return F.cross_entropy(output["logits"], y)


HOSTS = {
    "decoder transformer, head tied": Host(Decoder, tokens, positions),
    "decoder transformer, checkpointed": Host(lambda: Decoder(checkpointed=True), tokens, positions),
    "`nn.TransformerEncoder`": Host(Encoder, tokens, positions),
    "`nn.Transformer`": Host(Translator, pairs, positions),
    "`nn.LSTM`": Host(Recurrent, tokens, positions),
    "residual CNN": Host(ResNet, images, F.cross_entropy),
    "U-Net": Host(UNet, images, masked),
    "one block that runs three times": Host(Shared, vectors, F.cross_entropy),
    "blocks that return mappings": Host(Mappings, vectors, named),
    "U-Net over signals, `nn.Conv1d`": Host(UNet1d, signals, distances),
    "TCN, `nn.Conv1d` padded in front": Host(TCN, tokens, positions),
    "residual network over volumes, `nn.Conv3d`": Host(VolumeNet, volumes, F.cross_entropy),
    "blocks with channels last": Host(ChannelsLast, images, F.cross_entropy),
    "`nn.TransformerEncoder`, batch_first=False": Host(PositionsFirst, tokens, positions),
}


@pytest.mark.filterwarnings("ignore:The tensor attributes self")  # of exporting an nn.LSTM
@pytest.mark.parametrize("name", thinned(HOSTS, 3))
def test_a_network_lives_through_a_whole_growth(name):
    life = live(HOSTS[name])
    assert PAGE.read_text(encoding="utf-8").splitlines().count(row(name, life)) == 1, row(name, life)


def repeats(_, sites):
    """Plant 'repeat' at the first two blocks."""
    first, second, *_ = (name for name in sites if " blocks of " in sites.why[name])
    return {first: ("repeat", Blend.ADD), second: ("repeat", Blend.GATE)}


REPEATED = [
    "decoder transformer, head tied",
    "decoder transformer, checkpointed",
    "`nn.TransformerEncoder`",
    "residual CNN",
    "blocks that return mappings",
    "TCN, `nn.Conv1d` padded in front",
    "blocks with channels last",
]


@pytest.mark.parametrize("name", thinned(REPEATED, 3))
def test_blocks_that_run_again_live_through_a_whole_growth(name):
    life = live(HOSTS[name], repeats)
    assert set(life.kept.values()) == {"repeat"}


def repeating(**options):
    """Make a growth of a decoder that plants 'repeat' at its first block, and nothing else."""
    with drawn_with(0):
        model, probe = Decoder(), [tokens(), tokens()]
    chosen = {"slot": "blocks.0", "blueprint": "repeat", "tempo": 1, "target": 1.0, "keep": True}
    usual = {
        "probe": probe,
        "loss": positions,
        "controller": Schedule([ScheduleEntry(at=1, op=Op.GERMINATE, **chosen)]),
        "every": 1,
        "budget": 1.5 / sum(parameter.numel() for parameter in model.parameters()),
        "settings": {**SETTINGS, "blueprints": ["repeat"]},
    }
    graft(model, example=probe[0][0])
    return Growth(model, torch.optim.AdamW(model.parameters(), lr=0.01), **(usual | options))


def run_on(growth, steps):
    for number in range(growth.calls, growth.calls + steps):
        train(growth.model, growth.population.groups.optimizer, HOSTS["decoder transformer, head tied"], number)
        growth.step()


def test_a_block_that_runs_again_adds_one_parameter_and_trains_its_weights_by_both_runs():
    growth = repeating()
    assert growth.population.space.fits[:, 0].tolist() == [
        name in ("blocks.0", "blocks.1") for name in growth.model.sites
    ]
    run_on(growth, 12)
    assert growth.summary()["added_params"] == 1
    model = growth.finish().eval()
    plain = Decoder().eval()
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if ".esper." not in name})
    seed = model.blocks[0].esper
    with torch.no_grad():
        seed.seed.delta.scale.fill_(0.7)
    first = plain.blocks[0].forward
    plain.blocks[0].forward = lambda x: 0.3 * first(x) + 0.7 * first(first(x))
    with drawn_with(1):
        ids, following = tokens()
    assert equal(model(ids), plain(ids), 1e-6)
    for each in (model, plain):
        positions(each(ids), following).mean().backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if ".esper." not in name:
            assert torch.allclose(parameter.grad, theirs[name].grad, atol=1e-6), name
    assert sum(parameter.numel() for parameter in model.parameters()) == 1 + sum(p.numel() for p in plain.parameters())


def test_a_growth_with_blocks_that_run_again_goes_on_from_its_state_bit_for_bit():
    whole, half = repeating(), repeating()
    run_on(whole, 10)
    run_on(half, 4)
    saved = copy.deepcopy((half.state_dict(), half.model.state_dict(), half.population.groups.optimizer.state_dict()))
    resumed = repeating()
    resumed.load_state_dict(saved[0])
    run_on(resumed, 6)
    mine, theirs = (growth.model.state_dict() for growth in (resumed, whole))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_what_cannot_run_a_block_again_says_so():
    with pytest.raises(
        InputError, match="mode='reserve' runs all that can be planted in every pass, and 'repeat' would run"
    ):
        repeating(mode="reserve")
    with pytest.raises(InputError, match="blueprint 'repeat' runs the block of a site again, which no population has"):
        get_blueprint("repeat")


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        lengths = torch.full((len(x),), x.shape[1])
        h, _ = self.lstm(pack_padded_sequence(x, lengths, batch_first=True))
        return self.head(pad_packed_sequence(h, batch_first=True)[0])


class Reentrant(nn.Sequential):
    def forward(self, x):
        first, *blocks, last = self
        x = first(x)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return last(x)


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return torch.einsum("bhwc,oc->bhwo", x, self.weight)


REFUSED = {
    "`nn.Transformer`, positions in front of the examples of its input": lambda: (
        nn.Transformer(8, 2, 1, 1, 16),
        (torch.randn(5, 3, 8),) * 2,
    ),
    "a product on (B, H, W, C) that is no layer": lambda: (
        nn.Sequential(Product(), Product(), Product()),
        torch.randn(3, 4, 5, 6),
    ),
    "`nn.LSTM` on packed sequences": lambda: (Packed(), torch.randn(3, 7, 5)),
    "blocks within a reentrant checkpoint": lambda: (
        Reentrant(nn.Embedding(VOCABULARY, 8), DecoderBlock(), DecoderBlock(), nn.Linear(8, VOCABULARY)),
        torch.arange(20).view(4, 5) % VOCABULARY,
    ),
    "a single layer": lambda: (nn.Sequential(nn.Linear(5, 4)), torch.randn(3, 5)),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", REFUSED)
def test_a_network_without_a_place_for_seeds_is_refused_with_the_reason_on_the_page(name):
    with drawn_with(0):
        model, example = REFUSED[name]()
    (line,) = (line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |"))
    with pytest.raises(InputError, match=rf"no site found in .*{re.escape(line.split('|')[2].strip())}"):
        graft(model, example=example)
    assert not any(hasattr(type(part), "_esper_original") for part in model.modules())


@pytest.mark.parametrize("build", [Decoder, TCN, PositionsFirst])
def test_what_grows_in_a_causal_network_looks_at_no_later_position(build):
    with drawn_with(0):
        model, probe = build(), [tokens(), tokens()]
    names = list(graft(model, example=probe[0][0]).sites)
    blueprints = ["attention", "causal-conv", "bypass-mlp", "low-rank"]
    entries = [
        ScheduleEntry(
            at=1,
            op=Op.GERMINATE,
            slot=name,
            blueprint=blueprints[k % 4],
            blend=Blend(k % 3),
            tempo=1,
            target=1.0,
            keep=True,
        )
        for k, name in enumerate(names)
    ]
    growth = Growth(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        probe=probe,
        loss=positions,
        controller=Schedule(entries),
        every=1,
        budget=100.0,
        budget_passes=None,
        settings={**SETTINGS, "blueprints": blueprints},
    )
    assert all(site.causal for site in growth.population.sites)
    for number in range(60):
        train(model, growth.population.groups.optimizer, HOSTS["decoder transformer, head tied"], number)
        growth.step()
        if (growth.engine.state.seeds.stage == Stage.FOSSILIZED).all():
            break
    assert all(float(planted_at(model, name).alpha) == 1 for name in names)
    model.eval()
    with drawn_with(1):
        ids, _ = tokens()
    other = ids.clone()
    other[:, 4] = (ids[:, 4] + 1) % VOCABULARY
    assert torch.allclose(model(ids)[:, :4], model(other)[:, :4], atol=1e-6)
    assert not torch.allclose(model(ids)[:, 4:], model(other)[:, 4:], atol=1e-3)
