"""Test wider hidden layers: the network computes what it did, goes on learning, and is an ordinary network of these widths."""

import copy
import gc
import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

import esper
from esper.leyline.messages import InputError


class Gated(nn.Module):
    """Runs a residual stream without norms, and a gated feed-forward on it."""

    def __init__(self, inner=6, stream=8):
        super().__init__()
        self.enter, self.leave = nn.Linear(5, stream), nn.Linear(stream, 3)
        self.gate, self.up, self.down = nn.Linear(stream, inner), nn.Linear(stream, inner), nn.Linear(inner, stream)

    def forward(self, x):
        x = self.enter(x)
        return self.leave(x + self.down(F.silu(self.gate(x)) * self.up(x)))


class Normalised(Gated):
    """Runs the same with a norm over the stream, which depends on its width."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = self.enter(x)
        return self.leave(self.norm(x + self.down(F.silu(self.gate(x)) * self.up(x))))


def mlp(*widths):
    layers = [part for reads, writes in itertools.pairwise(widths) for part in (nn.Linear(reads, writes), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def cnn(channels=4, more=6):
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, more, 3),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(more * 4, 5),
    )


NETWORKS = {
    "mlp": (lambda: mlp(5, 2, 3, 4), (7, 5), {"0": (2, 4), "2": (3, 6)}),
    "cnn": (cnn, (7, 1, 8, 8), {"0": (4, 8), "4": (6, 12)}),
    "temporal convolutions": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Conv1d(3, 4, 3)),
        (7, 2, 9),
        {"0": (3, 6)},
    ),
    "stream and gated pair": (Gated, (7, 5), {"down": (8, 16), "gate": (6, 12)}),
    "encoder": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)),
        (7, 4, 8),
        {"0.linear1": (16, 32)},
    ),
}


def trained(build, shape, optimizer=torch.optim.AdamW):
    """Train a network in float64, and return it with an input, its optimizer, and a moving average."""
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(shape, dtype=torch.float64)
    made, average = optimizer(model.parameters(), lr=1e-2), AveragedModel(model)
    for _ in range(3):
        step(model, x, made)
        average.update_parameters(model)
    return model, x, made, average


def step(model, x, optimizer):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def outputs(x, *networks):
    with torch.no_grad():
        return [copy.deepcopy(network).eval()(x) for network in networks]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_wider_network_and_its_average_compute_what_they_did_and_learn_on(name):
    build, shape, widths = NETWORKS[name]
    model, x, optimizer, average = trained(build, shape)
    before, state, random = outputs(x, model, average), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert dict(esper.widen(model, 2.0, example=x, optimizer=optimizer, ema=average)) == widths
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    for one, other in zip(before, outputs(x, model, average), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-9)
    for key, value in model.state_dict().items():  # what was there stays, bit for bit, in the leading corner
        assert torch.equal(value[tuple(map(slice, state[key].shape))], state[key]), key
    assert [each.shape for each in average.module.parameters()] == [each.shape for each in model.parameters()]
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters()} >= {id(each) for each in optimizer.state}
    wide = {path: model.get_submodule(path).weight.detach().clone() for path in widths}
    for _ in range(2):
        step(model, x, optimizer)
        average.update_parameters(model)
    for path, (old, _) in widths.items():
        assert (model.get_submodule(path).weight[old:] != wide[path][old:]).any(), "the new units learn"


def test_a_network_that_is_built_with_the_widths_takes_the_state_dict():
    model, x, optimizer, _ = trained(lambda: mlp(5, 2, 3, 4), (7, 5))
    widened = esper.widen(model, {"0": 9, "2": 4}, example=x, optimizer=optimizer)
    assert repr(widened) == "0: 2 -> 9 units\n2: 3 -> 4 units"
    again = mlp(5, 9, 4, 4).double()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))
    assert repr(model) == repr(again)


def test_the_optimizer_begins_anew_with_what_is_wider_and_remembers_the_rest():
    model, x, optimizer, _ = trained(lambda: mlp(5, 2, 3, 4), (7, 5))
    bias, state = model[4].bias, copy.deepcopy(optimizer.state[model[4].bias])
    esper.widen(model, {"0": 3}, example=x, optimizer=optimizer)
    assert [parameter in optimizer.state for parameter in model.parameters()] == [False, False, False, True, True, True]
    assert model[4].bias is bias
    assert torch.equal(optimizer.state[bias]["exp_avg"], state["exp_avg"])
    step(model, x, optimizer)
    assert int(optimizer.state[model[0].weight]["step"]) == 1


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
        lambda p, lr: torch.optim.Adam(p, lr, amsgrad=True),
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.NAdam,
        torch.optim.Adafactor,
        lambda p, lr: torch.optim.Muon([each for each in p if each.dim() == 2], lr),
    ],
)
def test_optimizers_of_every_usual_kind_go_on(optimizer):
    model, x, made, _ = trained(lambda: mlp(5, 2, 4), (7, 5), optimizer)
    before = outputs(x, model)
    esper.widen(model, example=x, optimizer=made)
    assert torch.allclose(*outputs(x, model), *before, atol=1e-9)
    for _ in range(3):
        step(model, x, made)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_new_weights_are_drawn_by_a_seed_as_the_layer_draws_its_own():
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(3)
        model = mlp(400, 2, 4)
        esper.widen(model, {"0": 300}, example=torch.randn(2, 400), seed=seed)
        drawn.append(model[0].weight[2:])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    bound = 400**-0.5  # of the uniform distribution from which nn.Linear draws
    assert float(drawn[0].detach().abs().max()) <= bound
    assert float(drawn[0].detach().std()) == pytest.approx(bound / 3**0.5, rel=0.02)


class Interleaved(nn.Module):
    """Flattens a map with its channels last, and moves the features on by so many places."""

    def __init__(self, places):
        super().__init__()
        self.first, self.second, self.places = nn.Conv2d(1, 2, 1), nn.Linear(8, 3), places

    def forward(self, x):
        return self.second(self.first(x).permute(0, 2, 3, 1).flatten(1).roll(self.places, 1))


def test_a_map_that_is_flattened_with_its_channels_last_becomes_wider_by_a_whole_factor():
    torch.manual_seed(0)
    model, x = Interleaved(0), torch.randn(2, 1, 2, 2)
    before = model(x)
    assert esper.widen(model, 2, example=x) == {"first": (2, 4)}
    assert torch.allclose(model(x), before, atol=1e-6)


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def frozen():
    model = mlp(4, 4, 4)
    model[0].requires_grad_(False)
    return model


def normed():
    return nn.utils.parametrizations.weight_norm(mlp(4, 4, 4)[0]), nn.ReLU(), nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("build", "shape", "sentence"),
    [
        (tied, (2, 4), "0.weight is shared with another module"),
        (frozen, (2, 4), "0.weight is frozen"),
        (lambda: nn.Sequential(*normed()), (2, 4), "0.weight is computed from other parameters before each pass"),
        (lambda: Interleaved(1), (2, 1, 2, 2), "the outputs of the wider network are others"),
        (lambda: nn.Sequential(nn.Linear(4, 3)), (2, 4), "has no hidden features that one layer returns"),
    ],
)
def test_features_that_cannot_be_more_are_refused_with_the_reason_and_nothing_changes(build, shape, sentence):
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    optimizer = torch.optim.AdamW(model.parameters())
    shown, state = repr(model), copy.deepcopy(model.state_dict())
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with pytest.raises(InputError) as caught:
        esper.widen(model, example=x, optimizer=optimizer)
    assert sentence in str(caught.value)
    assert repr(model) == shown
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))


def test_a_width_that_cannot_be_is_named_and_nothing_changes():
    model, x = mlp(5, 2, 3, 4), torch.randn(7, 5)
    for to, sentence in (
        ({"0": 2}, "to gives '0' the width 2; give a whole number above 2"),
        ({"0": 4, "2": True}, "to gives '2' the width True"),
        ({"4": 9}, "to names '4', which is no layer that returns hidden features; did you mean '"),
        (1, "to is 1; give a factor above 1"),
        ("2", "to is '2'; give a factor above 1"),
        ({"0": 10**13}, "growing the Sequential to more features takes at least "),
        (10**13, "GiB are free on cpu; give smaller widths"),
    ):
        with pytest.raises(InputError) as caught:
            esper.widen(model, to, example=x)
        assert sentence in str(caught.value)
    with pytest.raises(InputError, match="to gives 'up' another width than 'gate'"):
        esper.widen(Gated(), {"gate": 8, "up": 9}, example=torch.randn(7, 5))
    with pytest.raises(InputError, match=r"is grafted; call growth\.finish\(\)"):
        esper.widen(esper.graft(model, example=x), example=x)
    assert [layer.weight.shape for layer in (model[0], model[2], model[4])] == [(2, 5), (3, 2), (4, 3)]


def test_of_several_layers_one_that_cannot_be_wider_undoes_them_all_where_it_was_named():
    model, x = Normalised(), torch.randn(7, 5)
    with pytest.raises(InputError, match="'down' cannot be more: the wider network fails on the example"):
        esper.widen(model, {"gate": 12, "down": 16}, example=x)
    assert (model.gate.out_features, model.down.out_features) == (6, 8)
    assert list(esper.widen(model, 1.5, example=x).left_out) == ["down"]


class Reads(nn.Module):
    """Reads its hidden features by something else than a layer too."""

    def __init__(self, read):
        super().__init__()
        self.first, self.second, self.read = nn.Linear(5, 8), nn.Linear(8, 3), read

    def forward(self, x):
        h = F.relu(self.first(x))
        return self.read(h, self.second(h))


READS = {
    "the largest": lambda h, y: y + h.amax(1, keepdim=True),
    "a mean": lambda h, y: y + h.mean(1, keepdim=True),
    "a factor without a gradient": lambda h, y: y / (1 + h.detach().amax(1, keepdim=True)),
    "a part by position": lambda h, y: y + h[:, -3:],
    "a norm in front of masked outputs": lambda h, y: (y / (1 + h.norm())).masked_fill(y > y.median(), -1e9),
    "softmax": lambda h, y: y + h.softmax(1)[:, :3],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", READS)
def test_features_that_something_else_reads_stay_whatever_is_drawn(name, dtype):
    for seed in range(8):
        torch.manual_seed(seed)
        model, x = Reads(READS[name]).to(dtype), torch.randn(3, 5).to(dtype)
        with pytest.raises(InputError, match="'first' cannot be more"):
            esper.widen(model, {"first": 10}, example=x, seed=seed)
        assert model.first.out_features == 8


@pytest.mark.parametrize(
    "function",
    [nn.PReLU(), nn.Softsign(), nn.Tanhshrink(), nn.Mish(), lambda h: h / 2 - 1, lambda h: torch.where(h > 0, h, -h)],
)
def test_any_function_of_each_feature_by_itself_is_passed(function):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.second(function(self.first(x)))

    torch.manual_seed(0)
    model, x = Plain(), torch.randn(3, 5)
    before = model(x)
    esper.widen(model, example=x)
    assert model.first.out_features == 16
    assert torch.allclose(model(x), before, atol=1e-6)


class Branches(nn.Module):
    """Holds a second layer behind the hidden features, which runs in training mode alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x):
        h = F.relu(self.first(x))
        return (self.second(h), self.third(h)) if self.training else self.second(h)


def test_a_layer_that_did_not_run_and_may_read_the_features_is_named():
    model, x = Branches(), torch.randn(3, 5)
    with pytest.raises(InputError, match="'third' did not run on the example and may read them"):
        esper.widen(model.eval(), example=x)
    assert model.first.out_features == 8
    esper.widen(model.train(), {"first": 9}, example=x)
    assert (model.second.in_features, model.third.in_features) == (9, 9)


class Blocks(torch.optim.SGD):
    """Keeps parts of the parameters in an object of its own, as some implementations of Shampoo do."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.blocks = [SimpleNamespace(parts=each.detach().split(2)) for each in self.param_groups[0]["params"]]


class Listed(nn.Module):
    """Holds a weight in a list too, where nothing would find a new one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 2)
        self.decayed = [self.first.weight]

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) + self.decayed[0].square().sum()


def test_a_weight_that_is_used_where_no_module_holds_it_is_refused():
    model = Listed()
    for to in (2, {"first": 6}):
        with pytest.raises(InputError, match=r"'first\.weight' is also used where its module does not hold it"):
            esper.widen(model, to, example=torch.randn(3, 5))
    assert model.first.out_features == 4
    assert model.first.weight is model.decayed[0]


def test_what_cannot_be_is_refused_in_a_sentence_before_anything_changes():
    model, x = mlp(5, 2, 3, 4), torch.randn(7, 5)
    optimizer, other = torch.optim.AdamW(model.parameters()), mlp(5, 2, 4)
    bent = nn.Sequential(*[nn.Tanh() if isinstance(part, nn.ReLU) else copy.deepcopy(part) for part in model])
    for given, sentence in (
        ({"optimizer": "adam"}, "the optimizer is a str; give a torch.optim.Optimizer"),
        ({"optimizer": torch.optim.LBFGS(model.parameters())}, "LBFGS takes one group of parameters"),
        ({"optimizer": torch.optim.AdamW(other.parameters())}, "the AdamW holds no parameter of the model"),
        ({"ema": other}, "ema is a Sequential that has not the parameters of the model"),
        ({"ema": bent}, "ema has a Tanh at '1', where the model has a ReLU; give an average of this model"),
        ({"ema": model}, "ema is the model itself, or shares parameters with it"),
        ({"optimizer": Blocks(model.parameters())}, "Blocks keeps parameters, or tensors of their shapes, in 'blocks'"),
        ({"ema": [model]}, "ema is a list that has not the parameters of the model"),
        ({"seed": "a"}, "seed is 'a'; give a whole number"),
        ({"seed": None}, "seed is None; give a whole number"),
    ):
        with pytest.raises(InputError) as caught:
            esper.widen(model, example=x, **{"optimizer": optimizer, **given})
        assert sentence in str(caught.value)
    with torch.inference_mode(), pytest.raises(InputError, match=r"is called within torch\.inference_mode"):
        esper.widen(model, example=x)
    with pytest.raises(Exception, match=r"memory|size"):  # whatever torch raises; the layers are put back
        esper.widen(model, {"0": 16, "2": 10**13}, example=x, optimizer=optimizer)
    assert (model[0].out_features, model[2].out_features) == (2, 3)
    assert {id(each) for each in optimizer.param_groups[0]["params"]} == {id(each) for each in model.parameters()}


def test_attributes_and_the_memory_format_of_a_parameter_are_kept():
    model = cnn().to(memory_format=torch.channels_last)
    model[4].weight.no_decay = True
    esper.widen(model, example=torch.randn(2, 1, 8, 8))
    assert model[4].weight.no_decay
    assert model[4].weight.is_contiguous(memory_format=torch.channels_last)
    assert not model[4].weight.is_contiguous()


def test_a_widening_that_tries_several_ways_keeps_no_weights_of_before():
    model, x = Normalised(), torch.randn(4, 5)
    before = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.disable()  # a cycle would keep them until the collector runs
    try:
        esper.widen(model, example=x, to=2)
        kept = {id(parameter) for parameter in model.parameters()}
        assert not [own for own in before if own() is not None and id(own()) not in kept]
    finally:
        gc.enable()
