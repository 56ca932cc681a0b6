"""Test spans, pairs of a source and a target: a seed there starts as nothing, learns, and becomes units of a pair or stays."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper.kasmina.blueprints import BLUEPRINTS, drawn_with
from esper.kasmina.graft.find_sites import find_sites
from esper.kasmina.graft.folding import fold
from esper.kasmina.graft.grafted import graft, plant, planted_at, uproot
from esper.kasmina.graft.planted import Mode, Planted
from esper.kasmina.slot import Seed
from esper.leyline.lifecycle.slots import Kind, Tap
from esper.leyline.lifecycle.vocabulary import Blend
from lives import Host, live
from thinning import thinned
from trees import conv


class FeedForward(nn.Module):
    """Computes x + down(f(up(norm(x)))), a block of a transformer without attention."""

    def __init__(self, width, inner, between=nn.ReLU):
        super().__init__()
        self.norm, self.up, self.between, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, inner),
            between(),
            nn.Linear(inner, width),
        )

    def forward(self, x):
        return x + self.down(self.between(self.up(self.norm(x))))


class Bottleneck(nn.Module):
    """Runs its kernel of 3 on `inner` channels, fewer or more than its width, as a block of a ResNet."""

    def __init__(self, width, inner):
        super().__init__()
        self.reduce, self.bn1 = nn.Conv2d(width, inner, 1), nn.BatchNorm2d(inner)
        self.expand, self.bn2 = nn.Conv2d(inner, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.bn2(self.expand(F.relu(self.bn1(self.reduce(x))))))


class Pooled(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer, self.inner, self.back = self.double(3, 8), self.double(8, 16), self.double(24, 8)
        self.mask = nn.Conv2d(8, 2, 1)

    @staticmethod
    def double(inputs, outputs):
        return nn.Sequential(conv(inputs, outputs), nn.ReLU(), conv(outputs, outputs), nn.ReLU())

    def forward(self, x):
        a = self.outer(x)
        b = F.interpolate(self.inner(F.max_pool2d(a, 2)), scale_factor=2)
        return self.mask(self.back(torch.cat([a, b], 1)))


class Decoder(nn.Module):
    """Reads token ids by blocks and by a head whose weight is that of the embedding."""

    def __init__(self, layers):
        super().__init__()
        self.wte, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.blocks = nn.ModuleList(FeedForward(8, 24, nn.GELU) for _ in range(layers))
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def residual_mlp():
    return nn.Sequential(nn.Linear(4, 16), *(FeedForward(16, 32) for _ in range(5)), nn.Linear(16, 3))


def resnet(inner):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *(Bottleneck(8, inner) for _ in range(3)), Pooled(), nn.Linear(8, 4)
    )


def spans(module, x):
    return {ends: span.reads for ends, span in find_sites(module, x).spans.items()}


# What is found


def test_a_pair_that_widens_and_narrows_is_spanned_also_in_front_of_a_head():
    assert spans(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(4, 2)) == {("0", "2"): 2}
    through = nn.Sequential(nn.Linear(3, 9), nn.LayerNorm(9), nn.GELU(), nn.Dropout(0.1), nn.Linear(9, 5))
    found = find_sites(through, torch.randn(4, 3)).spans["0", "4"]
    assert (found.site.after, found.site.around, found.site.stream.width) == ("4", "0", 5)
    assert found.why == "the pair widens 3 to 9 and narrows to 5"


def test_a_pair_is_found_through_a_gelu_that_is_composed_of_several_functions():
    class NewGELUActivation(nn.Module):
        def forward(self, x):
            return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))

    network = nn.Sequential(nn.Linear(3, 9), NewGELUActivation(), nn.Dropout(0.1), nn.Linear(9, 2))
    assert spans(network, torch.randn(4, 3)) == {("0", "3"): 3}


def test_neither_a_narrow_pair_nor_one_that_something_enters_is_a_wide_one():
    assert spans(nn.Sequential(nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 6)), torch.randn(4, 9)) == {}

    class Entered(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)) + x.repeat(1, 2))

    assert spans(Entered(), torch.randn(5, 4)) == {}


def test_a_layer_that_others_read_too_is_no_first_of_a_pair():
    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.aside = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x):
            y = torch.relu(self.up(x))
            return self.down(y) + self.aside(y)

    assert spans(Read(), torch.randn(5, 4)) == {}


def test_a_stack_of_blocks_has_its_pairs_2_4_and_all_of_its_blocks_and_the_input():
    pairs = {(f"{block}.up", f"{block}.down"): 16 for block in range(1, 6)}
    farther = {("1", "2"): 16, ("3", "4"): 16, ("1", "4"): 16, ("1", "5"): 16, ("", "5"): 4}
    assert spans(residual_mlp(), torch.randn(8, 4)) == pairs | farther


def test_a_decoder_is_spanned_from_its_first_block_where_its_input_is_token_ids():
    sites = find_sites(Decoder(12), torch.arange(24).view(2, 12) % 20)
    farther = [ends for ends in sites.spans if ends[0] in sites and ends[0].count(".") == 1]
    steps = [int(target.rpartition(".")[2]) - int(source.rpartition(".")[2]) for source, target in farther]
    assert steps == [1] * 6 + [3] * 3 + [7, 11]
    assert len(farther) < 12
    assert all(span.site.causal for span in sites.spans.values())


def test_blocks_of_a_resnet_are_spanned_and_those_that_widen_have_their_pair():
    farther = {("1", "2"): 8, ("1", "3"): 8, ("", "3"): 3}
    assert spans(resnet(4), torch.randn(2, 3, 6, 6)) == farther
    pairs = {(f"{block}.reduce", f"{block}.expand"): 8 for block in range(1, 4)}
    assert spans(resnet(16), torch.randn(2, 3, 6, 6)) == pairs | farther


def test_the_late_streams_of_a_unet_are_spanned_with_the_input():
    assert spans(UNet(), torch.randn(2, 3, 8, 8)) == {("", "back"): 3, ("", "inner"): 3}


def test_blocks_of_an_encoder_and_of_a_decoder_are_not_one_stack():
    class Translate(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Transformer(8, 2, 2, 2, 16, 0.0, batch_first=True), nn.Linear(8, 3)

        def forward(self, source, target):
            return self.head(self.body(source, target))

    found = spans(Translate(), (torch.randn(2, 5, 8), torch.randn(2, 5, 8)))
    stacks = [f"body.{part}.layers." for part in ("encoder", "decoder")]
    farther = {ends for ends in found if not ends[0].endswith("linear1")}
    assert farther == {(f"{stack}0", f"{stack}1") for stack in stacks}


def test_the_table_shows_from_where_to_where_a_seed_goes_and_what_its_units_cost():
    lines = str(find_sites(residual_mlp(), torch.randn(8, 4))).splitlines()
    table = lines[lines.index("further spans") : lines.index("left out")]
    assert table[1].split() == ["from", "to", "reads", "stream", "a", "unit", "why"]
    assert table[2].split()[:5] == ["1.up", "1.down", "16", "Vector(16)", "33"]
    assert table[-1] == "input  5       4      Vector(16)  21      from the input of the network"


# What a seed there does


def classes(count):
    return lambda *shape: (torch.randn(*shape), torch.arange(shape[0]) % count)


def tokens():
    given = torch.randint(20, (6, 5))
    return given, given.roll(-1, 1)


def by_position(output, target):
    return F.cross_entropy(output.transpose(1, 2), target)


HOSTS = {
    "residual network": Host(residual_mlp, lambda: classes(3)(16, 4), F.cross_entropy),
    "ResNet": Host(lambda: resnet(16), lambda: classes(4)(8, 3, 6, 6), F.cross_entropy),
    "U-Net": Host(UNet, lambda: (torch.randn(4, 3, 8, 8), torch.rand(4, 2, 8, 8)), F.mse_loss),
    "decoder": Host(lambda: Decoder(4), tokens, by_position),
    "one hidden layer": Host(
        lambda: nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)), lambda: classes(3)(16, 2), F.cross_entropy
    ),
}
LIVES = [
    ("one hidden layer", ("0", "2"), "bypass-mlp", True),
    ("residual network", ("2.up", "2.down"), "bypass-mlp", True),
    ("residual network", ("1", "4"), "bypass-mlp", False),
    ("residual network", ("", "5"), "bypass-linear", False),
    ("ResNet", ("1.reduce", "1.expand"), "bypass-conv-1x1", False),
    ("ResNet", ("1", "2"), "bypass-conv-3x3", False),
    ("U-Net", ("", "back"), "bypass-conv-1x1", False),
    ("decoder", ("blocks.1.up", "blocks.1.down"), "bypass-mlp", True),
    ("decoder", ("blocks.0", "blocks.3"), "bypass-mlp", False),
]


@pytest.mark.parametrize(
    ("host", "span", "blueprint", "folds"), thinned(LIVES, 2), ids=lambda value: str(value).replace(" ", "-")
)
def test_a_seed_on_a_span_changes_nothing_at_birth_learns_and_is_folded_or_saved_beside(host, span, blueprint, folds):
    life = live(HOSTS[host], lambda *_: {span[1]: (blueprint, Blend.ADD)}, span)
    assert life.folded == ([span[1]] if folds else [])


def hidden(module, x, span, kind):
    """Build a network in float64 with four hidden units of random weights on a span, at dose 0.6."""
    module.double()
    site = find_sites(module, x).spans[span]
    graft(module, {site.site.name: site.site})
    made = Seed(BLUEPRINTS[kind, "bypass-mlp-small"].build(site.reads, site.site.stream.width), site.reads).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    planted = Planted(made, Tap.BEFORE, Blend.ADD, kind)
    planted.mode = Mode.ON
    planted.alpha.fill_(0.6)
    plant(module, site.site.name, planted)
    return module


@pytest.mark.parametrize(
    ("build", "shape", "span", "kind", "attributes"),
    [
        (residual_mlp, (8, 4), ("2.up", "2.down"), Kind.VECTOR, ("out_features", "in_features")),
        (
            lambda: nn.Sequential(conv(3, 8), nn.ReLU(), nn.Conv2d(8, 2, 1), nn.Flatten(), nn.Linear(50, 3)),
            (2, 3, 5, 5),
            ("0", "2"),
            Kind.MAP,
            ("out_channels", "in_channels"),
        ),
    ],
    ids=["Linear", "Conv2d"],
)
def test_hidden_units_on_a_wide_pair_become_units_of_its_layers(build, shape, span, kind, attributes):
    with drawn_with(0):
        x = torch.randn(shape, dtype=torch.float64)
        network = hidden(build(), x, span, kind)
    before = network(x)
    layers = [network.get_submodule(path) for path in span]
    widths = [getattr(layer, each) for layer, each in zip(layers, attributes, strict=True)]
    assert fold((network,), span[1], [lambda each: each(x)]) is None
    uproot(network, span[1])
    assert torch.allclose(network(x), before, rtol=0, atol=1e-9)
    assert [getattr(layer, each) for layer, each in zip(layers, attributes, strict=True)] == [
        width + 4 for width in widths
    ]


@pytest.mark.parametrize(
    ("build", "span", "why"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 16), FeedForward(16, 32, nn.GELU)), ("1.up", "1.down"), "a GELU runs"),
        (residual_mlp, ("1", "4"), "'1' is no Linear, no convolution without groups"),
        (residual_mlp, ("", "5"), "it has hidden units, and reads the input of the network"),
    ],
    ids=["another function", "blocks", "input"],
)
def test_hidden_units_that_are_none_of_a_pair_stay_beside_with_the_reason(build, span, why):
    with drawn_with(0):
        x = torch.randn(8, 4, dtype=torch.float64)
        network = hidden(build(), x, span, Kind.VECTOR)
    bits = [parameter.clone() for parameter in network.parameters()]
    assert why in fold((network,), span[1], [lambda each: each(x)])
    assert planted_at(network, span[1]) is not None
    assert all(torch.equal(one, other) for one, other in zip(bits, network.parameters(), strict=True))
