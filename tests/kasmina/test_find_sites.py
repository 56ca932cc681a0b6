"""Check that sites are found by one forward and one backward pass, and that the module stays as it was."""

import copy
import random
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from esper.kasmina.blueprints import drawn_with, get_blueprint
from esper.kasmina.graft.find_sites import find_sites
from esper.kasmina.graft.grafted import graft, plant, uproot
from esper.kasmina.graft.planted import Mode, Planted
from esper.kasmina.slot import Seed
from esper.leyline.lifecycle.slots import Kind, Map, Sequence, Tap, Vector, Volume
from esper.leyline.lifecycle.vocabulary import Blend
from esper.leyline.messages import InputError
from trees import SHAPES, conv, trees


class Residual(nn.Module):
    """Computes x + a(relu(b(norm(x)))), over vectors, sequences or maps."""

    def __init__(self, width, inner, layer=nn.Linear, norm=nn.LayerNorm):
        super().__init__()
        self.norm, self.up, self.down = norm(width), layer(width, inner), layer(inner, width)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class ResNet(nn.Module):
    """Stacks two stages of two residual blocks; the first block of the second stage widens and halves the resolution."""

    class Block(nn.Module):
        def __init__(self, inputs, outputs, stride=1):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
            self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
            self.relu = nn.ReLU(inplace=True)
            self.short = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride)

        def forward(self, x):
            y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            y += self.short(x)
            return self.relu(y)

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.layer1 = nn.Sequential(self.Block(8, 8), self.Block(8, 8))
        self.layer2 = nn.Sequential(self.Block(8, 16, 2), self.Block(16, 16))
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.bottom = self.double(3, 8), self.double(8, 16), self.double(16, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.back2, self.back1, self.out = self.double(32, 16), self.double(16, 8), nn.Conv2d(8, 2, 1)

    @staticmethod
    def double(inputs, outputs):
        return nn.Sequential(conv(inputs, outputs), nn.ReLU(), conv(outputs, outputs), nn.ReLU())

    def forward(self, x):
        a = self.first(x)
        b = self.second(F.max_pool2d(a, 2))
        c = self.up2(self.bottom(F.max_pool2d(b, 2)))
        d = self.up1(self.back2(torch.cat([b, c], 1)))
        return self.out(self.back1(torch.cat([a, d], 1)))


class Attention(nn.Module):
    def __init__(self, width, heads=2, causal=True):
        super().__init__()
        self.qkv, self.proj, self.heads, self.causal = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            heads,
            causal,
        )

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Decodes with a head that is its embedding: a module that shares the weight, or a product in the forward."""

    class Block(nn.Module):
        def __init__(self, width, causal):
            super().__init__()
            self.ln1, self.attn, self.ln2 = nn.LayerNorm(width), Attention(width, causal=causal), nn.LayerNorm(width)
            self.fc, self.proj, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

        def forward(self, x):
            x = x + self.attn(self.ln1(x))
            return x + self.drop(self.proj(F.gelu(self.fc(self.ln2(x)))))

    def __init__(self, causal=True, head="module", layers=2, width=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(30, width), nn.Embedding(12, width)
        self.blocks = nn.ModuleList(self.Block(width, causal) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = None
        if head == "module":
            self.head = nn.Linear(width, 30, bias=False)
            self.head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.ln(x)
        return F.linear(x, self.wte.weight) if self.head is None else self.head(x)


class Recurrent(nn.Module):
    def __init__(self, batch_first=True, backward=False):
        super().__init__()
        self.emb = nn.Embedding(30, 8)
        self.lstm = nn.LSTM(8, 12, batch_first=batch_first, bidirectional=backward)
        self.head = nn.Linear(24 if backward else 12, 30)

    def forward(self, tokens):
        return self.head(self.lstm(self.emb(tokens))[0])


TOKENS = torch.arange(24).view(2, 12) % 30


def streams(sites):
    return {name: site.stream for name, site in sites.items()}


def causal(sites):
    return {site.causal for site in sites.values()}


# What is found


def test_a_resnet_has_its_blocks_and_the_convolutions_that_widen():
    module = ResNet()
    sites = find_sites(module, torch.randn(2, 3, 8, 8))
    assert streams(sites) == {
        "layer1.0": Map(8),
        "layer1.1": Map(8),
        "layer2.0.conv1": Map(16),
        "layer2.0.short": Map(16),
        "layer2.0": Map(16),
        "layer2.1": Map(16),
    }
    assert all(site.after == site.around == name for name, site in sites.items())
    assert "head" in sites.left_out["fc"]
    assert "outside" in sites.left_out["stem.0"]
    assert "normalisation" in sites.left_out["layer1.0.bn1"]
    assert "keeps the width" in sites.left_out["layer1.0.conv1"]
    assert causal(sites) == {False}


def test_a_unet_has_its_double_convolutions_of_every_width():
    sites = find_sites(UNet(), torch.randn(2, 3, 8, 8))
    blocks = {"first": 8, "second": 16, "bottom": 32, "back2": 16, "back1": 8, "out": 2}
    assert {name: site.stream.width for name, site in sites.items() if "." not in name} == blocks
    assert streams(sites)["bottom.0"] == Map(32)
    assert "outside" in sites.left_out["up1"]


@pytest.mark.parametrize("head", ["module", "product"])
def test_a_gpt_has_its_blocks_and_wide_layers_and_neither_head_nor_embeddings(head):
    sites = find_sites(GPT(head=head), TOKENS)
    assert streams(sites) == {
        f"blocks.{block}{name}": Sequence(width)
        for block in range(2)
        for name, width in ((".attn.qkv", 48), (".fc", 64), (".proj", 16), ("", 16))
    }
    assert causal(sites) == {True}
    assert sites.left_out["wte"] == sites.left_out["wpe"] == "an embedding"
    assert head == "product" or "head" in sites.left_out["head"]


def test_a_layer_that_shares_its_weight_with_the_head_is_left_out():
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    network[2].weight = network[4].weight
    sites = find_sites(network, torch.randn(4, 8))
    assert list(sites) == ["0"]
    assert sites.left_out["2"] == "shares a parameter with the head 4"


def test_without_its_mask_a_transformer_is_not_causal():
    assert causal(find_sites(GPT(causal=False), TOKENS)) == {False}
    assert causal(find_sites(GPT(causal=False), (torch.zeros(2, 12, dtype=torch.long),))) == {False}


def test_an_encoder_with_a_decoder_is_causal_in_the_decoder_alone():
    class Translate(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
            self.body = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)

        def forward(self, source, target):
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            return self.head(self.body(self.emb(source), self.emb(target), tgt_mask=mask))

    sites = find_sites(Translate(), {"source": TOKENS[:, :9], "target": TOKENS})
    assert {name.split(".")[1]: site.causal for name, site in sites.items()} == {"encoder": False, "decoder": True}
    assert sites["body.decoder.layers.1"].stream == Sequence(16)
    assert "body.encoder.layers.0.linear1" in sites
    assert sites.left_out["body.encoder.layers.0.self_attn.out_proj"] == "does not run on the example"


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_positions_in_front_of_examples_in_the_input_are_left_out():
    with pytest.raises(
        InputError, match=r"\(L, B, C\), because batch_first is False, but its second axis is not the batch"
    ):
        find_sites(nn.Transformer(16, 2, 1, 1, 32), (torch.randn(5, 2, 16), torch.randn(4, 2, 16)))


def test_positions_in_front_of_examples_are_found_if_their_numbers_differ():
    class Turned(Recurrent):
        def forward(self, tokens):
            return self.head(self.lstm(self.emb(tokens).transpose(0, 1))[0]).transpose(0, 1)

    module = Turned(batch_first=False)
    sites = find_sites(module, TOKENS)
    assert streams(sites) == {"lstm": Sequence(12, "LBC")}
    assert sites["lstm"].causal
    assert "its axes are (L, B, C), by batch_first=False" in sites.why["lstm"]
    with pytest.raises(
        InputError, match=r"it has 12 positions and as many examples, .* an example with another number"
    ):
        find_sites(module, TOKENS.repeat(6, 1))
    both_ways = Turned(batch_first=False, backward=True)
    assert not find_sites(both_ways, TOKENS)["lstm"].causal


@pytest.mark.parametrize("padding", [(2, 0), (1, 1)])
@pytest.mark.parametrize("head", ["channels", "features"])
def test_whether_channels_in_front_of_positions_look_ahead_is_measured(padding, head):
    class Padded(nn.Conv1d):
        def forward(self, x):
            return super().forward(F.pad(x, padding))

    class Temporal(nn.Sequential):
        def forward(self, x):
            x = super().forward(x)
            return x if head == "channels" else x.transpose(1, 2)

    module = Temporal(Padded(3, 6, 3), nn.ReLU(), Padded(6, 6, 3), nn.ReLU(), nn.Conv1d(6, 2, 1))
    sites = find_sites(module, torch.randn(4, 3, 9))
    assert {site.causal for site in sites.values()} == {padding == (2, 0)}


def test_an_lstm_is_a_site_whose_stream_is_the_first_tensor_that_it_returns():
    sites = find_sites(Recurrent(), TOKENS)
    assert streams(sites) == {"lstm": Sequence(12)}
    assert "the first floating-point tensor of what it returns" in sites.why["lstm"]
    assert causal(sites) == {True}
    assert causal(find_sites(Recurrent(backward=True), TOKENS)) == {False}


def test_a_block_that_runs_three_times_is_one_site():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.block, self.head = nn.Linear(4, 8), Residual(8, 16), nn.Linear(8, 3)

        def forward(self, x):
            x = self.stem(x)
            for _ in range(3):
                x = self.block(x)
            return self.head(x)

    sites = find_sites(Loop(), torch.randn(5, 4))
    assert streams(sites) == {"block.up": Vector(16), "block.down": Vector(8), "block": Vector(8)}
    assert sites.why["block"].endswith("; runs 3 times")


def test_a_shared_layer_that_runs_with_two_shapes_is_left_out():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.shared, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            y = self.shared(self.first(x))
            return self.head(self.shared(torch.stack([y, y], 1)).mean(1))

    sites = find_sites(Twice(), torch.randn(5, 6))
    assert list(sites) == ["first"]
    assert sites.left_out["shared"] == "runs 2 times with different shapes"


def test_outputs_may_be_a_dictionary_and_the_loss_may_read_a_part_of_it():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(Residual(6, 12), Residual(6, 12))
            self.mid, self.side = nn.Linear(6, 6), nn.Linear(6, 2)
            self.unused, self.classes = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            x = self.body(x)
            return {"classes": self.classes(x), "more": [self.side(F.relu(self.mid(x))), None], "count": 3}

    module, x = Heads(), torch.randn(4, 6)
    sites = find_sites(module, x)
    assert list(sites) == ["body.0.up", "body.0.down", "body.0", "body.1.up", "body.1.down", "body.1"]
    assert "head" in sites.left_out["classes"]
    assert "head" in sites.left_out["side"]
    assert "outside" in sites.left_out["mid"]
    assert sites.left_out["unused"] == "does not run on the example"
    part = find_sites(module, x, loss=lambda output: output["classes"].sum())
    assert part.left_out["mid"] == part.left_out["side"] == "the loss does not depend on its output"


def test_parallel_branches_are_no_blocks_in_sequence():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = nn.ModuleList(Residual(6, 12) for _ in range(3))
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            return self.head(sum(branch(x) for branch in self.branches))

    sites = find_sites(Branches(), torch.randn(4, 6))
    assert list(sites) == [f"branches.{k}.{name}" for k in range(3) for name in ("up", "down")]
    assert "outside of any repeated block" in sites.why["branches.0.up"]


def test_a_head_that_begins_at_zero_hides_no_site():
    network = nn.Sequential(Residual(6, 12), Residual(6, 12), nn.Linear(6, 2))
    expected = list(find_sites(network, torch.randn(4, 6)))
    nn.init.zeros_(network[2].weight)
    nn.init.zeros_(network[1].down.weight)
    assert list(find_sites(network, torch.randn(4, 6))) == expected
    assert not network[2].weight.any()


def test_where_frozen_weights_of_zero_follow_there_is_no_gradient_and_no_site():
    network = nn.Sequential(Residual(6, 12), Residual(6, 12), nn.Linear(6, 2))
    nn.init.zeros_(network[1].down.weight).requires_grad_(False)
    sites = find_sites(network, torch.randn(4, 6))
    assert list(sites) == ["0.up", "0.down", "0", "1.down", "1"]
    assert sites.left_out["1.up"] == "the gradient of the loss is zero there"


def test_a_frozen_host_has_the_same_sites():
    module = GPT()
    found = find_sites(module, TOKENS)
    assert dict(find_sites(module.requires_grad_(False), TOKENS)) == dict(found)
    assert not any(p.requires_grad for p in module.parameters())


def test_weights_behind_a_parametrization_are_layers():
    module = ResNet()
    found = find_sites(module, torch.randn(2, 3, 8, 8))
    nn.utils.parametrizations.weight_norm(module.fc)
    nn.utils.parametrizations.spectral_norm(module.layer2[0].conv1)
    assert dict(find_sites(module, torch.randn(2, 3, 8, 8))) == dict(found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_inside_a_checkpoint_are_found_or_refused_by_name(reentrant):
    class Checkpointed(GPT):
        def forward(self, tokens):
            x = self.wte(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(self.ln(x))

    module = Checkpointed()
    if not reentrant:
        with kept(module):
            found = find_sites(module, TOKENS)
        assert dict(found) == dict(find_sites(GPT(), TOKENS))
    else:
        with pytest.raises(InputError, match="reentrant checkpoint"):
            find_sites(module, TOKENS)


class Mixing(nn.Module):
    """Multiplies by a matrix of its own in a way that does not show which axis has the features."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return torch.einsum("bhwc,oc->bhwo", x, self.weight)


class Convolved(nn.Module):
    """Convolves with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, 3))

    def forward(self, x):
        return F.conv1d(x, self.weight, padding=1)


@pytest.mark.parametrize(
    ("build", "shape", "stream", "why"),
    [
        (lambda: Residual(6, 6), (2, 4, 4, 6), Map(6, "BHWC"), "its axes are (B, H, W, C), by Linear"),
        (lambda: Residual(6, 6), (2, 4, 4, 4, 6), Volume(6, "BDHWC"), "its axes are (B, D, H, W, C), by Linear"),
        (lambda: nn.Conv1d(6, 6, 3, padding=1), (2, 6, 9), Sequence(6, "BCL"), "its axes are (B, C, L), by Conv1d"),
        (Convolved, (2, 6, 6), Sequence(6, "BCL"), "its axes are (B, C, L), by Convolved"),
        (lambda: nn.Conv3d(6, 6, 3, padding=1), (2, 6, 4, 4, 4), Volume(6), "outside of any repeated block"),
    ],
)
def test_the_order_of_the_axes_is_that_of_the_layers(build, shape, stream, why):
    with drawn_with(0):
        sites = find_sites(nn.Sequential(*(build() for _ in range(3))), torch.randn(shape))
    assert set(streams(sites).values()) == {stream}
    assert sites.why["1"].endswith(why)


def test_the_order_of_axes_that_no_layer_shows_is_not_guessed():
    with pytest.raises(
        InputError, match=r"unknown kind of stream, \(B, \*, \*, C\); known are \(B, C\), .*Site for a submodule"
    ):
        find_sites(nn.Sequential(*(Mixing() for _ in range(3))), torch.randn(2, 4, 5, 6))


def test_a_first_axis_that_is_not_the_batch_is_left_out():
    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.outer(F.relu(self.inner(x.reshape(-1, 2, 4)).reshape_as(x))))

    sites = find_sites(Windows(), torch.randn(3, 6, 4))
    assert streams(sites) == {"outer": Sequence(4)}
    assert sites.left_out["inner"] == "its first axis is not the batch, which has 3 examples"


def test_the_table_says_what_was_chosen_and_what_was_not():
    assert str(find_sites(ResNet(), torch.randn(2, 3, 8, 8))) == TABLE


def test_a_unit_of_a_bypass_costs_a_weight_for_each_feature_on_both_of_its_sides_and_a_bias():
    sites = find_sites(
        nn.Sequential(nn.Linear(7, 2), nn.ReLU(), nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3)), torch.randn(4, 7)
    )
    assert sites.reads == {"0": 7, "2": 7, "4": 7}
    assert [line.split()[4] for line in str(sites).splitlines()[2:5]] == ["10", "13", "11"]


def test_the_page_on_sites_shows_what_its_python_prints(capsys):
    page = (Path(__file__).parents[2] / "docs" / "sites.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n((?:(?!```).)*)```\n\n```\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 3
    names = {"__name__": "sites"}
    for program, printed in examples:
        exec(compile(program, "sites.md", "exec"), names)
        assert capsys.readouterr().out == printed


TABLE = """\
6 sites in ResNet
site            around          reads  stream   a unit  causal  why
layer1.0        layer1.0        8      Map(8)   17      no      one of 4 blocks of Block that run one after the other
layer1.1        layer1.1        8      Map(8)   17      no      one of 4 blocks of Block that run one after the other
layer2.0.conv1  layer2.0.conv1  8      Map(16)  25      no      widens 8 to 16 in layer2.0
layer2.0.short  layer2.0.short  8      Map(16)  25      no      widens 8 to 16 in layer2.0
layer2.0        layer2.0        8      Map(16)  25      no      one of 4 blocks of Block that run one after the other
layer2.1        layer2.1        16     Map(16)  33      no      one of 4 blocks of Block that run one after the other
further spans
from      to        reads  stream   a unit  why
layer1.0  layer1.1  8      Map(8)   17      around 2 blocks between equal streams
input     layer1.1  3      Map(8)   12      from the input of the network
input     layer2.1  3      Map(16)  20      from the input of the network
left out
  outside of the repeated blocks: stem, stem.0
  a normalisation alone: stem.1, layer1.0.bn1, layer1.0.bn2 and 6 more
  contains blocks or layers that were considered instead: layer1, layer2
  a layer of a block that keeps the width: layer1.0.conv1, layer1.0.conv2, layer1.1.conv1 and 4 more
  a head: its output reaches the loss without another layer: fc"""


@pytest.mark.parametrize(
    ("build", "example"),
    [(ResNet, torch.ones(2, 3, 8, 8)), (UNet, torch.ones(2, 3, 8, 8)), (GPT, TOKENS), (Recurrent, TOKENS)],
)
def test_the_sites_can_be_grafted_and_are_found_again_afterwards(build, example):
    module = build().eval()
    usual, sites = module(example), find_sites(module, example)
    graft(module, sites)
    assert torch.equal(module(example), usual)
    assert dict(find_sites(module, example)) == dict(sites)


def test_a_planted_seed_is_no_site_itself():
    network = nn.Sequential(Residual(8, 12), Residual(8, 12), nn.Linear(8, 2))
    x = torch.randn(4, 8)
    sites = find_sites(network, x)
    planted = Planted(Seed(get_blueprint("gated", Kind.VECTOR).build(8, 8), 8), Tap.HERE, Blend.ADD, Kind.VECTOR)
    planted.mode = Mode.ON
    planted.alpha.fill_(0.5)
    plant(graft(network, sites), "0", planted)
    again = find_sites(network, x)
    assert dict(again) == dict(sites)
    assert again.left_out == sites.left_out


# Spans


def spanned(module, x):
    return {name: site.around for name, site in find_sites(module, x).items() if site.around != name}


def test_a_site_behind_a_narrow_place_is_around_the_layer_in_front_of_it():
    mlp = nn.Sequential(
        nn.Linear(9, 3), nn.LayerNorm(3), nn.GELU(), nn.Dropout(0.1), nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)
    )
    assert spanned(mlp, torch.randn(4, 9)) == {"4": "0", "6": "0"}
    images = nn.Sequential(
        *(
            nn.Conv2d(9, 3, 3),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(3, 8, 3),
            nn.SiLU(),
            nn.Conv2d(8, 2, 1),
        ),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )
    assert spanned(images, torch.randn(4, 9, 12, 12)) == {"4": "0", "6": "0"}


def test_several_narrow_layers_in_a_row_are_one_place():
    row = nn.Sequential(
        nn.Linear(9, 2), nn.Tanh(), nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 5)
    )
    assert spanned(row, torch.randn(8, 9)) == {"2": "0", "6": "0"}


def test_the_hidden_units_in_front_of_a_head_are_spanned_however_few_outputs_it_has():
    assert spanned(nn.Sequential(nn.Linear(9, 3), nn.ReLU(), nn.Linear(3, 1)), torch.randn(4, 9)) == {"2": "0"}


def test_a_head_behind_a_narrow_stream_is_spanned_with_the_network():
    narrow = nn.Sequential(nn.Linear(9, 3), Residual(3, 6), Residual(3, 6), nn.LayerNorm(3), nn.Linear(3, 4))
    assert spanned(narrow, torch.randn(4, 9))["4"] == ""
    wide = nn.Sequential(nn.Linear(9, 16), Residual(16, 6), Residual(16, 6), nn.LayerNorm(16), nn.Linear(16, 4))
    assert find_sites(wide, torch.randn(4, 9)).left_out["4"].startswith("a head")


def test_two_layers_are_no_pair_if_something_else_enters_between_them():
    class Skip(nn.Module):
        def __init__(self, join):
            super().__init__()
            self.join, self.down, self.up, self.head = join, nn.Linear(8, 3), nn.Linear(3, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.head(torch.relu(self.up(self.join(torch.relu(self.down(x)), x[:, :3]))))

    # x needs no gradient, so that the graph does not show where it enters
    for join in (torch.add, torch.mul, torch.sub):
        assert spanned(Skip(join), torch.randn(4, 8)) == {}


def test_a_seed_around_a_narrow_place_reads_what_is_in_front_of_it_and_can_be_kept():
    model = nn.Sequential(nn.Linear(9, 3), nn.ReLU(), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(4, 9)
    before = model(x)
    graft(model, example=x)
    planted = Planted(Seed(get_blueprint("bypass-mlp", Kind.VECTOR).build(9, 8), 8), Tap.BEFORE, Blend.ADD, Kind.VECTOR)
    planted.mode = Mode.ON
    planted.alpha.fill_(1.0)
    for parameter in planted.parameters():
        nn.init.normal_(parameter)
    plant(model, "2", planted)
    plain = copy.deepcopy(model)
    uproot(plain, "2")
    seen = {}
    model[2].register_forward_hook(lambda _, __, y: seen.update(y=y))
    assert not torch.equal(model(x), before)
    torch.testing.assert_close(seen["y"], plain[2](torch.relu(plain[0](x))) + planted.seed.delta(x))


# The module stays as it was


class kept:
    """Checks that a block of code leaves a module, the gradients and the random generators as they were, to the bit."""

    def __init__(self, module):
        self.module = module

    def state(self):
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        return (
            {name: (id(x), x.dtype, x.detach().clone().view(-1), x.requires_grad) for name, x in tensors},
            {name: None if p.grad is None else p.grad.clone() for name, p in self.module.named_parameters()},
            {
                name: (each.training, sorted(vars(each)), len(each._forward_hooks))
                for name, each in self.module.named_modules()
            },
            (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.is_grad_enabled()),  # noqa: NPY002
        )

    def __enter__(self):
        self.before = self.state()

    def __exit__(self, kind, *_):
        if kind is None:
            after = self.state()
            assert str(self.before[2]) == str(after[2])
            for old, new in zip(flat(self.before), flat(after), strict=True):
                assert torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new


def flat(structure):
    if isinstance(structure, dict):
        structure = tuple(structure.items())
    return [leaf for each in structure for leaf in flat(each)] if isinstance(structure, tuple | list) else [structure]


class Restless(nn.Module):
    """Changes everything that a forward can change: statistics, buffers, attributes, lists, random generators and its input."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Residual(6, 12), nn.BatchNorm1d(6), nn.Dropout(0.5), Residual(6, 12))
        self.head = nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.last, self.log = 0, None, []

    def forward(self, x):
        x.mul_(2)
        self.calls += 1
        self.seen = self.seen + 1
        self.log.append(random.random() + np.random.rand())  # noqa: NPY002  the global generator is what must not move
        self.last = self.body(x)
        return self.head(self.last)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_a_module_stays_as_it_was(training, grad):
    module, x = Restless().train(training), torch.randn(5, 6)
    module.head(torch.randn(3, 6)).sum().backward()
    given = x.clone()
    with torch.set_grad_enabled(grad), kept(module):
        assert "body.0" in find_sites(module, x)
    assert torch.equal(x, given)
    assert (module.calls, module.last, module.log, module.seen.item()) == (0, None, [], 0)
    assert all(p.grad is None for p in module.body.parameters())


def test_inference_mode_of_the_caller_does_not_matter():
    module = GPT()
    with torch.inference_mode(), kept(module):
        sites = find_sites(module, TOKENS.clone())
    assert len(sites) == 8


def test_a_module_stays_as_it_was_when_its_forward_fails():
    module, x = Restless(), torch.randn(5, 7)
    with kept(module), pytest.raises(InputError):
        find_sites(module, x)
    assert module.calls == 0


def test_a_sequence_with_dropout_stays_as_it_was_and_is_measured_in_evaluation_mode():
    module = GPT()
    with kept(module):
        assert causal(find_sites(module, TOKENS)) == {True}


def test_a_parameter_that_is_written_in_the_forward_is_named():
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.fast, self.slow = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                self.slow.weight.lerp_(self.fast.weight, 0.1)
            return self.slow(F.relu(self.fast(x)))

    with pytest.raises(InputError, match=r"writes into its parameter 'slow.weight'"):
        find_sites(Average(), torch.randn(3, 4))


# Random module trees

KINDS = {"vector": Vector, "map": Map, "sequence": Sequence}


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(SHAPES)), st.booleans())
def test_every_site_of_a_random_tree_runs_has_its_width_and_a_gradient(data, kind, training):
    torch.manual_seed(0)
    head = nn.Conv2d(4, 2, 1) if kind == "map" else nn.Linear(4, 2)
    module = nn.Sequential(data.draw(trees(kind, 4)), head).train(training)
    x = torch.randn(3, *SHAPES[kind])
    with kept(module):
        sites = sites_or_none(module, x)
    assert set(sites) & set(getattr(sites, "left_out", ())) == set()
    assert "1" not in sites or sites["1"].around != "1", "a head that is not behind a narrow place"
    outputs = {}
    for name, site in sites.items():
        assert name == site.name == site.after
        if site.around != name:
            assert narrower(module, site, x)
        # a hook that returns changes
        module.get_submodule(site.after).register_forward_hook(
            lambda _, __, y, name=name: outputs.update({name: outputs.get(name, y.clone())})
        )
    twins = {name: copy.deepcopy(module) for name in sites}
    module(x)
    for name, site in sites.items():
        assert type(site.stream) is KINDS[kind]
        assert site.stream.width == site.stream.width_of(outputs[name])
        causal = kind == "sequence" and follows_the_end(copy.deepcopy(twins[name]), x, site)
        assert site.causal == causal, "no position of these trees reads another one"
        assert changes_the_output(twins[name], x, site), name


def follows_the_end(module, x, site):
    """Return whether the output of a site changes with the last position of x, which units that are never active keep from it."""
    seen, other = [], x.clone()
    other[:, -1] = 1 - other[:, -1]
    module.get_submodule(site.after).register_forward_hook(lambda _, __, y: seen.append(y.clone()))
    module.eval()
    module(x), module(other)
    return not torch.equal(*seen)


def narrower(module, site, x):
    """Return whether the submodule of a site reads fewer features than what is around it."""
    module, widths = copy.deepcopy(module), {}

    def note(path, given):
        widths[path] = site.stream.width_of(given[0])

    for path in (site.after, site.around):
        module.get_submodule(path).register_forward_pre_hook(lambda _, given, path=path: note(path, given))
    module(x)
    return 0 < widths[site.after] < widths[site.around]


def sites_or_none(module, x):
    try:
        return find_sites(module, x)
    except InputError as error:
        return {} if str(error).startswith("no site found in Sequential: ") else pytest.fail(str(error))


def changes_the_output(module, x, site):
    """Return whether a small change of what a site returns changes the module's output: what the gradient says, without it."""
    for each in module.modules():
        each._forward_hooks.clear()
    usual = module.double()(x.double())
    module.get_submodule(site.after).register_forward_hook(lambda _, __, y: y + 1e-3 * torch.randn_like(y))
    return not torch.equal(usual, module(x.double()))


# Bad input


def test_an_example_that_does_not_fit_is_said_with_its_shape():
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(
        InputError, match=r"Sequential cannot run on the example \(float32 \(3, 5\)\): RuntimeError: .*; give a tensor"
    ):
        find_sites(module, torch.randn(3, 5))
    with pytest.raises(InputError, match=r"the example is an int; give a tensor, a tuple"):
        find_sites(module, 3)
    with pytest.raises(InputError, match="the example holds no examples"):
        find_sites(module, torch.randn(0, 4))
    with pytest.raises(InputError, match="the example holds no examples"):
        find_sites(module, {})


@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"input": x}])
def test_an_example_is_a_tensor_a_tuple_or_a_mapping(form):
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    assert streams(find_sites(module, form(torch.randn(3, 4)))) == {"0": Vector(8)}


def test_no_site_is_said_with_the_reasons():
    with pytest.raises(
        InputError,
        match=r"no site found in Sequential: 0 \(a head: its output .*\); give an esper\.Site for a submodule that",
    ):
        find_sites(nn.Sequential(nn.Linear(4, 2)), torch.randn(3, 4))
    with pytest.raises(InputError, match="it has no submodule with parameters"):
        find_sites(nn.Linear(4, 2), torch.randn(3, 4))


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda output: output, r"the loss is of shape \(3, 2\); return a tensor with one number"),
        (lambda output: 1.0, "the loss is a float"),
        (lambda output: output.logits, "the loss cannot take the output of the module: "),
        (lambda output: output.detach().sum(), "the loss does not depend on the parameters of Sequential"),
    ],
)
def test_a_loss_that_is_no_number_of_the_output_is_refused(loss, match):
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(InputError, match=match):
        find_sites(module, torch.randn(3, 4), loss)


def test_a_module_whose_backward_fails_is_refused():
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.ReLU(inplace=True), nn.Linear(8, 2))
    with pytest.raises(
        InputError, match="cannot run backward on the example: RuntimeError: one of the variables needed"
    ):
        find_sites(module, torch.randn(3, 4))


def test_an_output_without_floating_point_tensors_needs_a_loss():
    class Labels(nn.Sequential):
        def forward(self, x):
            return super().forward(x).argmax(1)

    with pytest.raises(InputError, match="holds no floating-point tensor; give loss="):
        find_sites(Labels(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(3, 4))
    with pytest.raises(InputError, match="the output of the module is complex"):
        find_sites(nn.Linear(4, 8, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64))


def test_quantised_weights_are_refused_by_name():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its own function out of date
        dynamic = torch.ao.quantization.quantize_dynamic(network, {nn.Linear})
    with pytest.raises(InputError, match="'0' of Sequential is a quantised Linear"):
        find_sites(dynamic, torch.randn(3, 4))
    network[0].weight = nn.Parameter(torch.ones(8, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(InputError, match=r"0.weight of Sequential is quantised \(int8\)"):
        find_sites(network, torch.randn(3, 4))


def test_a_wrapped_module_is_refused():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(network)
        with pytest.raises(InputError, match=r"give the module before it is wrapped, its .module"):
            find_sites(wrapped, torch.randn(3, 4))
    finally:
        torch.distributed.destroy_process_group()


def test_scripted_compiled_lazy_and_foreign_modules_are_refused():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(network, x)
    with pytest.raises(InputError, match=r"TopLevelTracedModule is a torch.jit module"):
        find_sites(traced, x)
    with pytest.raises(InputError, match=r"'1' of Sequential is a torch.jit module"):
        find_sites(nn.Sequential(nn.Linear(4, 4), traced), x)
    with pytest.raises(InputError, match=r"find its sites before torch.compile"):
        find_sites(torch.compile(network), x)
    with pytest.raises(InputError, match=r"0.weight of Sequential takes its size from the first input"):
        find_sites(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)), x)
    with pytest.raises(InputError, match=r"0.weight of Sequential is on the meta device"):
        find_sites(network.to("meta"), x)
    with pytest.raises(InputError, match=r"module is a type; give an nn.Module"):
        find_sites(nn.Linear, x)


def test_a_block_that_the_loss_does_not_depend_on_makes_no_stack_of_another():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.one, self.idle, self.leave = (
                nn.Linear(6, 8),
                Residual(8, 8),
                Residual(8, 8),
                nn.Linear(8, 3),
            )

        def forward(self, x):
            x = self.one(self.enter(x))
            self.idle(x)
            return self.leave(x)

    names = list(find_sites(Beside(), torch.randn(4, 6)))
    assert "one" not in names
    assert any(name.startswith("one.") for name in names)
