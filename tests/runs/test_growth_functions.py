"""Check that hidden units of a seed have the function between the two layers that they span, and become units of these."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import esper
from esper.kasmina.blueprints import drawn_with
from esper.kasmina.blueprints.functions import FUNCTIONS, REACH, named, recognised
from esper.kasmina.graft.folding import functions_between
from esper.kasmina.graft.grafted import graft, planted_at
from esper.leyline.lifecycle.slots import Map, Sequence, Site, Vector
from esper.leyline.lifecycle.vocabulary import Blend, Op
from loops import equal
from populations import Script

GATES = {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1}
SCRIPT = {(0, 0): (Op.GERMINATE, 0, 0, 0, 1, 2), (2, 0): (Op.ADVANCE, 0), (5, 0): (Op.FOSSILIZE, 0)}


class Pair(nn.Module):
    """Calls a function between two layers."""

    def __init__(self, function, units=3):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, units), nn.Linear(units, 6), nn.Linear(6, 3)
        self.function = function

    def forward(self, x):
        return self.head(self.second(self.function(self.first(x))))


class Gelu(nn.Module):
    """Computes the GELU of GPT-2, written out."""

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def made(*between, units=3):
    last = str(1 + len(between))
    return nn.Sequential(nn.Linear(5, units), *between, nn.Linear(units, 6), nn.Tanh(), nn.Linear(6, 3)), last


FUNCTIONAL = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": lambda x: x.sigmoid(),
    "relu": lambda x: x.clamp(min=0),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "leaky_relu(0.2)": partial(F.leaky_relu, negative_slope=0.2),
    "elu(0.7)": partial(F.elu, alpha=0.7),
}
MODULES = {
    "gelu": [nn.GELU()],
    "silu": [nn.Dropout(0.3), nn.SiLU(inplace=True)],
    "elu(1)": [nn.ELU(inplace=True), nn.Dropout(0.3)],
    "relu6": [nn.ReLU6()],
    "mish": [nn.Mish()],
    "gelu_tanh": [Gelu()],
    "leaky_relu(0.01)": [nn.LeakyReLU()],
}


def grown(model, site, x, y, loss=F.cross_entropy, blueprint="bypass-mlp"):
    """Grow a float64 model, with a seed that is kept at a site, up to `finish`. The birth changed no bit of the outputs."""
    model = model.double()
    plain = copy.deepcopy(model).eval()
    graft(model, {"pair": site})
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    growth = esper.Growth(
        model,
        optimizer,
        probe=[(x, y), (x, y)],
        loss=loss,
        every=2,
        budget=99.0,
        controller=Script(SCRIPT),
        settings={"gates": GATES, "blueprints": [blueprint]},
    )
    model.eval()
    with torch.no_grad():
        growth.population.act_at([1.0])
        assert torch.equal(model(x), plain(x))
        growth.population.act_at([0.0])
    for _ in range(18):  # 9 decisions
        loss(model.train()(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step()
    return model.eval(), growth


def function_of(model):
    """Return the function of the hidden units of the seed."""
    seed = planted_at(model, "pair")
    units = next(part for part in seed.modules() if hasattr(part, "function"))
    assert units.function == seed.recipe.function
    return units.function


def assert_folds_into(model, growth, x, ordinary):
    """Check that the finished network computes host and seed, and that an ordinary one with its widths takes its state_dict."""
    with torch.no_grad():
        before = model(x)
        network = growth.finish()
        assert growth.folded == ["pair"], growth.architecture
        assert growth.beside == {}
        assert (network(x) - before).abs().max() < 1e-9
        assert type(network) is type(ordinary)
        ordinary = ordinary.double().eval()
        ordinary.load_state_dict(network.state_dict())
        assert torch.equal(ordinary(x), network(x))
    assert repr(ordinary) == repr(network)


def vectors():
    with drawn_with(7):
        return torch.randn(32, 5, dtype=torch.float64), torch.randint(0, 3, (32,))


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_units_of_a_pair_have_the_function_that_is_called_between_its_layers(name):
    with drawn_with(0):
        model, ordinary = Pair(FUNCTIONAL[name]), Pair(FUNCTIONAL[name], 19)
    model, growth = grown(model, Site("pair", "second", "first", Vector(6)), *vectors())
    assert named(function_of(model)) == name
    assert_folds_into(model, growth, vectors()[0], ordinary)
    assert growth.architecture == "first: 5 -> 3 became 5 -> 19; second: 3 -> 6 became 19 -> 6"


@pytest.mark.parametrize("name", MODULES)
def test_units_of_a_pair_have_the_function_of_the_modules_between_its_layers(name):
    with drawn_with(0):
        (model, last), (ordinary, _) = made(*MODULES[name]), made(*MODULES[name], units=19)
    model, growth = grown(model, Site("pair", last, "0", Vector(6)), *vectors())
    assert named(function_of(model)) == name
    assert_folds_into(model, growth, vectors()[0], ordinary)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_each_function_is_recognised_by_its_values(name, dtype):
    x = torch.linspace(-REACH, REACH, 48, dtype=dtype)
    numbers = [0.3] if name in ("leaky_relu", "elu") else []
    assert recognised(x, FUNCTIONS[name](x, *numbers)) == (name, *numbers)


def test_other_functions_and_those_of_several_features_are_not_recognised():
    for between in (nn.Identity(), nn.LayerNorm(3), nn.Softmax(-1), nn.Tanhshrink(), nn.Softplus(3)):
        model, last = made(between)
        graft(model, {"pair": Site("pair", last, "0", Vector(6))})
        assert functions_between(model, lambda: model(vectors()[0].float())) == {}  # noqa: B023


def cnn(function, channels=4, kernels=(3, 3)):
    first, second = kernels
    return nn.Sequential(
        nn.Conv2d(3, channels, first, padding=first // 2),
        function,
        nn.Conv2d(channels, 6, second, padding=second // 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


@pytest.mark.parametrize(
    ("blueprint", "kernels", "units"),
    [
        ("bypass-mlp-3x3", (3, 3), 8),
        ("bypass-mlp-3x3", (5, 3), 8),
        ("bypass-mlp-small", (3, 3), 4),
        ("bypass-mlp-small", (3, 1), 4),
    ],
)
def test_channels_between_two_convolutions_have_their_function_and_become_channels_of_theirs(blueprint, kernels, units):
    with drawn_with(0):
        x, y = torch.randn(16, 3, 8, 8, dtype=torch.float64), torch.randint(0, 3, (16,))
        model, ordinary = cnn(nn.GELU(), kernels=kernels), cnn(nn.GELU(), 4 + units, kernels)
    model, growth = grown(model, Site("pair", "2", "0", Map(6)), x, y, blueprint=blueprint)
    assert_folds_into(model, growth, x, ordinary)


def normed(channels, norm_first):
    """Build convolutions with a BatchNorm between, in front of their function or behind it, that ran for some steps."""
    with drawn_with(0):
        between = [nn.BatchNorm2d(channels), nn.SiLU()]
        model = cnn(nn.Sequential(*(between if norm_first else reversed(between))), channels)
    for _ in range(3):
        with drawn_with(5):
            model(torch.randn(16, 3, 8, 8) + 1)
    return model


@pytest.mark.parametrize("norm_first", [True, False], ids=["norm first", "function first"])
def test_channels_through_a_batch_norm_become_channels_of_it_which_it_returns_as_they_are(tmp_path, norm_first):
    with drawn_with(0):
        x, y = torch.randn(16, 3, 8, 8, dtype=torch.float64) * 2, torch.randint(0, 3, (16,))
    site = Site("pair", "2", "0", Map(6))
    model, growth = grown(normed(4, norm_first), site, x, y, blueprint="bypass-mlp-3x3")
    assert function_of(model) == ("silu",)
    assert_folds_into(model, growth, x, normed(12, norm_first))
    assert growth.widened == {"0": (4, 12)}
    norm, inputs = next(part for part in model.modules() if isinstance(part, nn.BatchNorm2d)), []
    norm.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    model(x)
    assert (norm(inputs[0]) - inputs[0])[:, 4:].abs().max() < 1e-9
    # The statistics of the new channels are those of the probe, which is x here.
    assert (norm.train()(inputs[0]) - inputs[0])[:, 4:].abs().max() < 1e-6
    growth.save(tmp_path / "grown")
    fresh = esper.load_grown(tmp_path / "grown", normed(4, norm_first).double()).eval()
    assert torch.equal(fresh(x), model.eval()(x))


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.before, self.behind = nn.LayerNorm(16), nn.LayerNorm(16)
        self.read, self.write = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, inner), nn.Linear(inner, 16)

    def forward(self, h):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.read(self.before(h)).chunk(3, -1))
        h = h + self.write(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.behind(h)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(50, 16), nn.ModuleList(map(Block, inner))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 50, bias=False)

    def forward(self, ids):
        h = self.tokens(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def test_units_of_the_inner_layers_of_a_gpt_become_units_of_these():
    with drawn_with(0):
        ids, model, ordinary = torch.randint(0, 50, (8, 12)), GPT(64, 64), GPT(64, 80)
    site = Site("pair", "blocks.1.down", "blocks.1.up", Sequence(16), causal=True)
    model, growth = grown(model, site, ids, ids.roll(-1, 1), lambda out, y: F.cross_entropy(out.mT, y))
    assert function_of(model) == ("gelu_tanh",)
    assert_folds_into(model, growth, ids, ordinary)
    assert growth.widened == {"blocks.1.up": (64, 80)}


@pytest.mark.parametrize(
    ("between", "why"),
    [
        ([nn.LayerNorm(3), nn.ReLU()], "a LayerNorm runs between '0' and '3'"),
        ([nn.BatchNorm1d(3, affine=False), nn.ReLU()], "a BatchNorm1d runs between '0' and '3'"),
        ([nn.PReLU(3)], "a PReLU runs between '0' and '2'"),
        ([nn.Tanhshrink()], "a Tanhshrink runs between '0' and '2'"),
        ([nn.Softmax(-1)], "a Softmax runs between '0' and '2'"),
        ([nn.GELU(), nn.SiLU()], "a GELU and a SiLU run between '0' and '3'"),
    ],
    ids=["LayerNorm", "BatchNorm without weights", "PReLU", "unknown", "Softmax", "two functions"],
)
def test_units_whose_function_is_another_or_depends_on_other_units_stay_beside(between, why):
    with drawn_with(0):
        model, last = made(*copy.deepcopy(between))
    model, growth = grown(model, Site("pair", last, "0", Vector(6)), *vectors())
    before = model(vectors()[0])
    network = growth.finish()
    assert growth.folded == []
    assert why in growth.architecture
    assert torch.equal(network(vectors()[0]), before)


def test_seeds_that_read_the_stream_and_those_around_one_layer_keep_their_relu():
    model, last = made(nn.GELU())
    growth = esper.Growth(
        model.double(),
        torch.optim.AdamW(model.parameters()),
        probe=[vectors()],
        loss=partial(F.cross_entropy, reduction="none"),
        budget=99.0,
        settings={"blueprints": ["mlp-small", "bypass-mlp"]},
    )
    population = growth.population
    for slot, site in enumerate(population.sites):
        for entry in population.menu:
            seed = population.made(slot, entry, Blend.ADD, 0)
            spans = site.around != site.after and entry.name == "bypass-mlp"
            assert seed.seed.delta.function == (("gelu",) if spans and site.after == last else ("relu",))


def test_a_network_with_a_seed_of_its_function_is_saved_and_loaded_before_it_ends(tmp_path):
    with drawn_with(0):
        model, last = made(nn.ELU(0.7))
    model, growth = grown(model, Site("pair", last, "0", Vector(6)), *vectors())
    x = vectors()[0]
    growth.save(tmp_path / "grown")
    growth.save_adapter(tmp_path / "adapter")
    state = growth.state_dict()
    assert state["seeds"]["pair"][2] == ["elu", 0.7]
    fresh = esper.load_grown(tmp_path / "grown", made(nn.ELU(0.7))[0].double()).eval()
    assert torch.equal(fresh(x), model(x))
    host = made(nn.ELU(0.7))[0].double().eval()
    host.load_state_dict({name: own for name, own in model.state_dict().items() if ".esper." not in name})
    assert torch.equal(esper.attach(host, tmp_path / "adapter")(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert equal(model.state_dict(), copy.deepcopy(model).state_dict())
