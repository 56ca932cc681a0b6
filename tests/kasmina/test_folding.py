"""Check that a seed whose change is linear becomes part of its nn.Linear, and that the folded network computes the same."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from esper.kasmina.blueprints import BLUEPRINTS, drawn_with
from esper.kasmina.graft.folding import fold as fold_all
from esper.kasmina.graft.grafted import graft, plant, planted_at, ungraft
from esper.kasmina.graft.planted import Mode, Planted
from esper.kasmina.slot import Seed
from esper.leyline.lifecycle.slots import STREAMS, Kind, Map, Sequence, Site, Tap, Vector, Volume
from esper.leyline.lifecycle.vocabulary import Blend
from loops import equal

READS, WRITES = 5, 8


def fold(model, x, *averages, agree=bool):
    """Fold the seed at the one site, with one pass on an input; returns whether."""
    return fold_all((model, *averages), "a", [lambda network: network(x)], agree) is None


KINDS = (Kind.VECTOR, Kind.SEQUENCE)
NAMES = [key for key, entry in BLUEPRINTS.items() if key[0] in KINDS and entry.tap != Tap.INPUT]
FOLDS = {
    (Kind.VECTOR, name)
    for name in (
        "affine",
        "low-rank",
        "bypass-linear",
        "bypass-rank-1",
        "bypass-rank-2",
        "bypass-rank-4",
        "bypass-rank-8",
        "full-head",
        "sparse-rows",
        "sparse-head",
    )
} | {
    (Kind.SEQUENCE, name)
    for name in (
        "low-rank",
        "bypass-linear",
        "bypass-rank-1",
        "bypass-rank-2",
        "bypass-rank-4",
        "bypass-rank-8",
        "sparse-rows",
    )
}


def grown(kind, name, blend=Blend.ADD, *, bias=True, change=lambda model: None):
    """Build a network with a seed of random weights at dose 0.6 behind its second layer, and an input."""
    entry = BLUEPRINTS[kind, name]
    with drawn_with(0):
        model = nn.Sequential(nn.Linear(3, READS), nn.Linear(READS, WRITES, bias=bias), nn.Tanh())
        x = torch.randn(4, 3) if kind == Kind.VECTOR else torch.randn(4, 6, 3)
        change(model)
        graft(model, {"a": Site("a", "1", "1", STREAMS[kind](WRITES), kind == Kind.SEQUENCE)})
        reads = READS if entry.tap == Tap.BEFORE else WRITES
        made = Seed(entry.build(reads, WRITES), reads)
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
    planted = Planted(made, entry.tap, blend, kind)
    planted.mode = Mode.ON
    planted.alpha.fill_(0.6)
    plant(model, "a", planted)
    return model, x


def is_linear(delta, kind, reads):
    """Return whether the change at every position is one linear map of what is read there, and a constant."""
    with drawn_with(3), torch.no_grad():
        shape = (2, reads) if kind == Kind.VECTOR else (2, 6, reads)
        u, v = torch.randn(shape), torch.randn(shape)
        zero = delta(torch.zeros(shape))
        straight = torch.allclose(delta(u + 2 * v) - zero, delta(u) + 2 * delta(v) - 3 * zero, atol=1e-4)
        return straight and (kind == Kind.VECTOR or torch.allclose(delta(u), delta(u.flip(1)).flip(1), atol=1e-5))


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_just_the_seeds_whose_change_is_linear_fold_and_folded_equals_unfolded(kind, name):
    model, x = grown(kind, name)
    before = model(x)
    folded = fold(model, x)
    reads = READS if BLUEPRINTS[kind, name].tap == Tap.BEFORE else WRITES
    assert folded == is_linear(model[1].esper.seed.delta, kind, reads) == ((kind, name) in FOLDS)
    ungraft(model)
    assert torch.allclose(model(x), before, atol=1e-6) == folded


@pytest.mark.parametrize("blend", [Blend.GATE, Blend.MULTIPLY])
@pytest.mark.parametrize(("kind", "name"), sorted(FOLDS))
def test_a_blend_that_depends_on_the_stream_does_not_fold(kind, name, blend):
    model, x = grown(kind, name, blend)
    before = copy.deepcopy(model.state_dict())
    assert not fold(model, x)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["low-rank", "bypass-rank-2", "bypass-linear"])
def test_a_layer_without_a_bias_takes_what_needs_none(name):
    model, x = grown(Kind.VECTOR, name, bias=False)
    before = model(x)
    assert fold(model, x) == (name == "bypass-rank-2")
    if name == "bypass-rank-2":
        ungraft(model)
        assert torch.allclose(model(x), before, atol=1e-6)


def test_a_seed_that_is_linear_on_the_probe_alone_does_not_fold():
    model, x = grown(Kind.VECTOR, "mlp-small")
    with torch.no_grad():
        model[1].esper.seed.delta.inner.bias.fill_(50.0)  # every unit is above 0 there, and its ReLU the identity
    assert is_linear(model[1].esper.seed.delta, Kind.VECTOR, WRITES)
    assert not fold(model, x)


class Tied(nn.Module):
    """Runs two linear layers, and a third product with a parameter of one of them."""

    def __init__(self, tie):
        super().__init__()
        self.first, self.layer, self.twin, self.tie = nn.Linear(3, READS), nn.Linear(READS, WRITES), None, tie
        if tie == "bias in two layers":
            self.twin = nn.Linear(WRITES, WRITES)
            self.twin.bias = self.layer.bias
        elif tie == "weight in a layer that no pass calls":
            self.twin = nn.Linear(READS, WRITES)
            self.twin.weight = self.layer.weight

    def forward(self, x):
        h = self.layer(self.first(x))
        if self.tie == "weight as a decoder":
            return F.linear(torch.relu(h), self.layer.weight.t())
        if self.tie == "bias in a sum":
            return torch.relu(h) + self.layer.bias
        return h if self.tie == "weight in a layer that no pass calls" else self.twin(h)


TIES = ["bias in two layers", "weight in a layer that no pass calls", "weight as a decoder", "bias in a sum"]


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


CHANGES = {
    "frozen layer": lambda model: model.layer.requires_grad_(False),
    "frozen weight": lambda model: model.layer.weight.requires_grad_(False),
    "frozen bias": lambda model: model.layer.bias.requires_grad_(False),
    "pruned weight": lambda model: prune.l1_unstructured(model.layer, "weight", 0.5),
    "pruned bias": lambda model: prune.l1_unstructured(model.layer, "bias", 0.5),
    "weight norm": lambda model: parametrizations.weight_norm(model.layer),
    "weight norm of old": lambda model: nn.utils.weight_norm(model.layer),
    "spectral norm": lambda model: parametrizations.spectral_norm(model.layer),
    "doubled": lambda model: setattr(model.layer, "__class__", Doubled),
}


def behind_layer(model, blueprint="bypass-linear", std=0.3):
    """Copy a model, with a seed of random weights at dose 0.6 behind its layer."""
    entry = BLUEPRINTS[Kind.VECTOR, blueprint]
    with drawn_with(1):
        made = Seed(entry.build(READS, WRITES), READS)
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=std)
    planted = Planted(made, entry.tap, Blend.ADD, Kind.VECTOR).to(next(model.parameters()).dtype)
    planted.mode = Mode.ON
    planted.alpha.fill_(0.6)
    plant(graft(model, {"a": Site("a", "layer", "layer", Vector(WRITES))}), "a", planted)
    return model


def inputs(dtype=torch.float32):
    with drawn_with(2):
        return torch.randn(16, 3).to(dtype)


def built(tie="none", change=lambda model: None):
    with drawn_with(0):
        model = Tied(tie)
        model.twin = nn.Linear(WRITES, WRITES) if tie == "none" else model.twin
        change(model)
    return model


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated")
@pytest.mark.parametrize("case", [*TIES, *CHANGES])
def test_a_layer_that_is_frozen_or_used_or_computed_elsewhere_keeps_its_seed_beside_and_its_bits(case):
    model = behind_layer(built(case) if case in TIES else built(change=CHANGES[case]))
    model.train()
    modes, random = [part.training for part in model.modules()], torch.get_rng_state()
    before = copy.deepcopy(model.state_dict())
    versions = {name: p._version for name, p in model.named_parameters() if not p.requires_grad}
    assert not fold(model, inputs())
    assert [part.training for part in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert equal(model.state_dict(), before)
    assert planted_at(model, "a").mode == Mode.ON
    assert all(p._version == versions[name] for name, p in model.named_parameters() if name in versions), "not written"


def test_a_frozen_bias_that_a_fold_does_not_change_is_no_reason_against_it():
    model = behind_layer(built(change=CHANGES["frozen bias"]), "bypass-rank-2")
    bias, expected = model.layer.bias.clone(), model(inputs())
    assert fold(model, inputs())
    assert torch.equal(model.layer.bias, bias)
    assert torch.allclose(ungraft(model)(inputs()), expected, atol=1e-5)


def test_a_network_and_its_average_fold_both_or_neither():
    model = behind_layer(built())
    average = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter *= 1.1
    other = behind_layer(built("bias in a sum")).requires_grad_(False)
    before, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(other.state_dict())
    assert not fold(model, inputs(), other)
    assert equal(model.state_dict(), before)
    assert equal(other.state_dict(), kept)
    expected = [each(inputs()) for each in (model, average)]
    assert fold(model, inputs(), average)
    for each, output in zip((model, average), expected, strict=True):
        assert torch.allclose(ungraft(each)(inputs()), output, atol=1e-5)


def test_processes_fold_as_they_agree():
    model = behind_layer(built())
    before = copy.deepcopy(model.state_dict())
    assert not fold(model, inputs(), agree=lambda mine: False)
    assert equal(model.state_dict(), before)


def test_a_pass_that_fails_leaves_every_bit_as_it_was():
    model, calls = behind_layer(built()), []
    before = copy.deepcopy(model.state_dict())

    def run(network):
        calls.append(network)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return network(inputs())

    with pytest.raises(RuntimeError, match="out of memory"):
        fold_all((model,), "a", [run])
    assert equal(model.state_dict(), before)
    assert planted_at(model, "a").mode == Mode.ON


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_rounding_changes_is_equal_and_what_a_tie_changes_is_not(dtype):
    for tie in ("none", "bias in a sum", "weight as a decoder"):
        model = behind_layer(built(tie).to(dtype), std=1.0)
        assert fold(model, inputs(dtype)) == (tie == "none")


def test_a_seed_that_changes_less_than_the_rounding_of_a_weight_stays_beside():
    model = behind_layer(built().to(torch.bfloat16), std=2e-3)
    assert not fold(model, inputs(torch.bfloat16))
    assert fold(behind_layer(built(), std=2e-3), inputs())


def test_outputs_of_infinities_are_compared_as_what_they_are():
    model = behind_layer(built())
    masked = [lambda network: {"logits": network(inputs()).masked_fill(inputs()[:, :1] > 0, -torch.inf)}]
    assert fold_all((model,), "a", masked) is None


CONVOLUTIONS = {1: (nn.Conv1d, Sequence(WRITES, "BCL")), 2: (nn.Conv2d, Map(WRITES)), 3: (nn.Conv3d, Volume(WRITES))}


def convolved(sides, name, **options):
    """Build a convolution with a seed of random weights at dose 0.6, and an input."""
    layer, stream = CONVOLUTIONS[sides]
    entry = BLUEPRINTS[stream.kind, name]
    with drawn_with(0):
        usual = {"kernel_size": 3, "padding": 1}
        model = nn.Sequential(layer(READS, WRITES, **{**usual, **options}), nn.Tanh())
        x = torch.randn(2, READS, *(7, 6, 5)[:sides])
        graft(model, {"a": Site("a", "0", "0", stream)})
        reads = READS if entry.tap == Tap.BEFORE else WRITES
        made = Seed(entry.build(reads, WRITES), reads)
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
    planted = Planted(made, entry.tap, Blend.ADD, stream.kind, stream.permutation)
    planted.mode = Mode.ON
    planted.alpha.fill_(0.6)
    plant(model, "a", planted)
    return model, x


POINTWISE = {1: "bypass-linear", 2: "bypass-conv-1x1", 3: "bypass-conv-1x1x1"}
WIDE = {2: "bypass-conv-3x3", 3: "bypass-conv-3x3x3"}


@pytest.mark.parametrize(
    ("sides", "name", "options", "folds"),
    [
        *((sides, name, {}, True) for sides, name in (*POINTWISE.items(), *WIDE.items())),
        *((sides, name, {"padding": 2, "dilation": 2}, True) for sides, name in POINTWISE.items()),
        *((sides, name, {"padding": 2, "dilation": 2}, False) for sides, name in WIDE.items()),
        *((sides, name, {"kernel_size": 1, "padding": 0}, False) for sides, name in WIDE.items()),
        *((sides, "bypass-rank-2", {"padding": "same", "padding_mode": "circular"}, True) for sides in CONVOLUTIONS),
        *((sides, "low-rank", {"stride": 2}, True) for sides in CONVOLUTIONS),  # reads what the layer returns
        *((sides, "bypass-rank-2", {"stride": 2}, False) for sides in CONVOLUTIONS),  # reads means of positions
        *((sides, "bypass-rank-2", {"kernel_size": 2, "padding": 0}, False) for sides in CONVOLUTIONS),
        (2, "bypass-conv-3x3", {"padding_mode": "circular"}, False),
        (2, "conv-light", {}, False),
    ],
)
def test_a_linear_seed_folds_into_a_convolution_that_reads_the_same_positions(sides, name, options, folds):
    model, x = convolved(sides, name, **options)
    before = model(x)
    assert fold(model, x) == folds
    ungraft(model)
    assert torch.allclose(model(x), before, atol=1e-5) == folds


@pytest.mark.parametrize("sides", CONVOLUTIONS)
def test_hidden_units_around_two_convolutions_become_channels_between_them(sides):
    layer, stream = CONVOLUTIONS[sides]
    with drawn_with(0):
        model = nn.Sequential(layer(READS, 2, 3, padding=1), nn.ReLU(), layer(2, WRITES, 1))
        x = torch.randn(2, READS, *(7, 6, 5)[:sides])
        graft(model, {"a": Site("a", "2", "0", stream)})
        made = Seed(BLUEPRINTS[stream.kind, "bypass-mlp-small"].build(READS, WRITES), READS)
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
    planted = Planted(made, Tap.BEFORE, Blend.ADD, stream.kind, stream.permutation)
    planted.mode = Mode.ON
    planted.alpha.fill_(0.6)
    plant(model, "a", planted)
    before = model(x)
    assert fold(model, x)
    ungraft(model)
    assert torch.allclose(model(x), before, atol=1e-5)
    assert (model[0].out_channels, model[2].in_channels) == (6, 6)
