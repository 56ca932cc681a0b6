"""Seeds in any module: what stays as it was, and what a seed changes."""

import copy
import inspect
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import remove_parametrizations
from torch.utils.checkpoint import checkpoint

from esper.kasmina.blueprints import drawn_with, get_blueprint
from esper.kasmina.graft.grafted import (
    graft,
    is_grafted,
    plant,
    planted_at,
    sites_of,
    survey,
    trim,
    undisturbed,
    ungraft,
    uproot,
)
from esper.kasmina.graft.grown import anchor
from esper.kasmina.graft.planted import Bank, Mode, Planted, Seat
from esper.kasmina.slot import Seed, slot_output
from esper.leyline.lifecycle.slots import STREAMS, Kind, Map, Sequence, Site, Stream, Tap, Vector
from esper.leyline.lifecycle.vocabulary import Blend
from esper.leyline.messages import InputError

WIDTH = 8


class Block(nn.Module):
    """Adds a residual branch that works in place where it can."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(WIDTH, 12)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.25)
        self.norm = nn.BatchNorm1d(12)
        self.fall = nn.Linear(12, WIDTH)

    def forward(self, x, *, scale=1.0):
        return x + scale * self.fall(self.norm(self.drop(self.act(self.lift(x)))))


class Net(nn.Module):
    def __init__(self, checkpointed=False, reentrant=False):
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Sequential(nn.Linear(5, WIDTH), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 3)
        self.checkpointed = checkpointed

    def forward(self, x, skip=False):
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if not (skip and index):
                x = checkpoint(block, x, use_reentrant=self.reentrant) if self.checkpointed else block(x)
        return self.head(x)


SITES = {
    "stem": Site("stem", "stem", "stem", Vector(WIDTH)),
    "one": Site("one", "blocks.0", "blocks.0", Vector(WIDTH)),
    "two": Site("two", "blocks.1.fall", "blocks.1", Vector(WIDTH)),
    "span": Site("span", "blocks.1", "blocks.0", Vector(WIDTH)),
}


def net(**options):
    with drawn_with(0):
        return Net(**options)


def grafted(*names, **options):
    return graft(net(**options), {name: SITES[name] for name in names or ("stem", "one", "two")})


def seed(blueprint="mlp-small", tap=Tap.HERE, blend=Blend.ADD, reads=WIDTH, mode=Mode.ON, alpha=0.6, kind=Kind.VECTOR):
    """Make a seed that changes what it is at."""
    with drawn_with(1):
        made = Seed(get_blueprint(blueprint, kind).build(reads, WIDTH), reads)
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
    planted = Planted(made, tap, blend, kind)
    planted.mode = mode
    planted.alpha.fill_(alpha)
    planted.pull.fill_(0.1)
    return planted


def batch():
    with drawn_with(2):
        return torch.randn(6, 5)


def trained(model, x, passes=1):
    """Return the loss, gradients by name and buffers of one training step's backward."""
    model.train()
    with drawn_with(3):
        loss = sum(model(x).square().mean() for _ in range(passes))
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), gradients, dict(model.named_buffers())


def assert_host_equal(model, plain):
    """Check that loss, gradients of the host and buffers are those of the plain network, bit for bit."""
    (loss, gradients, buffers), (other, theirs, kept) = trained(model, batch()), trained(plain, batch())
    assert torch.equal(loss, other)
    for name, gradient in theirs.items():
        assert torch.equal(gradients[name], gradient), name
    for name, buffer in kept.items():
        assert torch.equal(buffers[name], buffer), name


COMPILED = [lambda model: model, lambda model: torch.compile(model, backend="aot_eager", fullgraph=True)]


def test_a_site_without_a_seed_leaves_outputs_gradients_buffers_and_keys_as_they_were():
    plain, model = net(), grafted()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert isinstance(model.blocks[0], Block)
    assert isinstance(model, Net)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert_host_equal(model, plain)


def test_a_compiled_network_with_free_sites_is_bit_for_bit_a_compiled_network():
    plain, model = net(), grafted()
    for block in (*plain.blocks, *model.blocks):
        block.drop.p = 0.0  # a compiled network draws its dropout otherwise
    found = []
    for each in (plain, model):
        run = torch.compile(each.train(), backend="aot_eager", fullgraph=True)
        loss = run(batch()).square().mean()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in each.parameters()), *each.buffers()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("compiled", COMPILED, ids=["eager", "compiled"])
def test_an_incubating_seed_leaves_the_host_bit_for_bit_and_has_gradients(compiled):
    plain, model = net(), grafted()
    for name, blueprint, tap in (("stem", "gated", Tap.HERE), ("one", "bypass-mlp", Tap.BEFORE)):
        plant(model, name, seed(blueprint, tap, Blend.GATE, mode=Mode.STRAIGHT))
    model.blocks[0].drop.p = plain.blocks[0].drop.p = 0.0  # a compiled network draws its dropout otherwise
    model.blocks[1].drop.p = plain.blocks[1].drop.p = 0.0
    run = compiled(model)
    model.train()
    plain.train()
    loss, other = run(batch()).square().mean(), compiled(plain)(batch()).square().mean()
    loss.backward()
    other.backward()
    assert torch.equal(loss, other)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in plain.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name
    grown = {name: g for name, g in gradients.items() if ".esper." in name}
    assert len(grown) == 4 + 2 + 4 + 2
    assert all(gradient.count_nonzero() for gradient in grown.values())


def test_a_seed_of_nan_that_incubates_does_not_reach_the_host():
    plain, model = net(), grafted()
    planted = seed(mode=Mode.STRAIGHT)
    with torch.no_grad():
        planted.seed.delta.out.weight.fill_(torch.nan)
    plant(model, "one", planted)
    assert_host_equal(model, plain)


def test_the_gradient_of_an_incubating_seed_is_that_of_its_change_and_of_its_size():
    model, planted = grafted("stem"), seed(mode=Mode.STRAIGHT)
    plant(model, "stem", planted)
    model.eval()
    seen = {}
    model.stem.register_forward_hook(lambda module, given, output: seen.update(y=output))
    output = model(batch())
    seen["y"].retain_grad()
    output.square().mean().backward()
    own = copy.deepcopy(planted.seed)
    own.zero_grad()
    h = seen["y"].detach()
    change = own.delta(h)
    (change * seen["y"].grad).sum().backward(retain_graph=True)
    (0.1 * change.square().sum() / h.square().sum()).backward()
    for mine, theirs in zip(planted.seed.parameters(), own.parameters(), strict=False):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-6)


def transformed(form):
    """Build a network in evaluation mode with seeds in a form; return it, its parameters, and its loss on some examples."""
    model = grafted("one", "two").eval()
    if form == "frozen":
        anchor(model.requires_grad_(False), True)
    else:
        mode = Mode.ON if form == "on" else Mode.STRAIGHT
        seeds = seed("bypass-mlp", Tap.BEFORE, Blend.GATE, mode=mode), seed("skip-mlp", Tap.INPUT, reads=5, mode=mode)
        for name, planted in zip(("one", "two"), seeds, strict=True):
            planted.pull.fill_(0.1 * (form == "pulled"))
            if form != "reserve":
                plant(model, name, planted)
                continue
            blueprint, reads = ("bypass-mlp", WIDTH) if name == "one" else ("skip-mlp", 5)
            gated = seed(blueprint, planted.tap, Blend.GATE, reads)  # a seat has a gate, whatever its blend
            seat = Seat(gated.seed, planted.tap, Kind.VECTOR)
            plant(model, name, Bank({"a": seat}))
            seat.mode = mode
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights, x, y):
        output = functional_call(model, (weights, dict(model.named_buffers())), (x,))
        return nn.functional.cross_entropy(output, y)

    return model, parameters, loss


FORMS = ["straight-through", "pulled", "on", "reserve", "frozen"]


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_each_example_by_vmap_are_those_of_a_loop(form):
    model, parameters, loss = transformed(form)
    x, y = batch(), torch.arange(6) % 3
    found = vmap(grad(lambda weights, x, y: loss(weights, x[None], y[None])), (None, 0, 0))(parameters, x, y)
    for index in range(len(x)):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[index, None]), y[index, None]).backward()
        for name, parameter in model.named_parameters():
            theirs = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            mine = torch.zeros_like(parameter) if form == "frozen" else found[name][index]
            assert torch.allclose(mine, theirs, atol=1e-6), name


@pytest.mark.parametrize(
    "form", [form for form in FORMS if form != "pulled"]
)  # a pull is in no output, so in no tangent
@pytest.mark.parametrize("of", ["weights", "input"])
def test_a_tangent_is_the_product_with_the_gradient(form, of):
    _, parameters, loss = transformed(form)
    x, y = batch(), torch.arange(6) % 3

    def function(values):
        return loss(values, x, y) if of == "weights" else loss(parameters, values["x"], y)

    values = parameters if of == "weights" else {"x": x}
    with drawn_with(5):
        along = {name: torch.randn_like(value) for name, value in values.items()}
    _, tangent = jvp(function, (values,), (along,))
    if form != "frozen":  # the anchor of a frozen network passes tangents, and no gradients
        gradient = grad(function)(values)
        assert torch.allclose(tangent, sum((gradient[name] * along[name]).sum() for name in values), atol=1e-5)
    else:
        step = 1e-3
        ahead, behind = (function({n: v + k * step * along[n] for n, v in values.items()}) for k in (1, -1))
        assert torch.allclose(tangent, (ahead - behind) / (2 * step), atol=1e-3)


@pytest.mark.parametrize("blend", list(Blend))
def test_a_seed_computes_what_a_slot_computes(blend):
    model, plain = grafted(), net().eval()
    model.eval()
    plant(model, "one", seed("bypass-mlp", Tap.BEFORE, blend))
    other = seed("bypass-mlp", Tap.BEFORE, blend).seed
    x = plain.stem(batch())
    y = slot_output(STREAMS[Kind.VECTOR], plain.blocks[0](x), x, other, torch.tensor(0.6), blend)
    assert torch.equal(model(batch()), plain.head(plain.blocks[1](y)))


def test_taps_read_what_the_block_and_the_network_were_given():
    model, plain = grafted("two"), net().eval()
    model.eval()
    plant(model, "two", seed("bypass-mlp", Tap.BEFORE))
    delta = seed("bypass-mlp", Tap.BEFORE).seed.delta
    x = plain.blocks[0](plain.stem(batch()))
    assert torch.allclose(model(batch()), plain.head(plain.blocks[1](x) + 0.6 * delta(x)), atol=1e-6)
    uproot(model, "two")
    plant(model, "two", seed("skip-mlp", Tap.INPUT, reads=5))
    delta = seed("skip-mlp", Tap.INPUT, reads=5).seed.delta
    assert torch.allclose(model(batch()), plain.head(plain.blocks[1](x) + 0.6 * delta(batch())), atol=1e-6)


def test_a_bypass_spans_several_submodules():
    model, plain = grafted("span").eval(), net().eval()
    plant(model, "span", seed("bypass-mlp", Tap.BEFORE))
    delta = seed("bypass-mlp", Tap.BEFORE).seed.delta
    x = plain.stem(batch())
    y = plain.blocks[1](plain.blocks[0](x)) + 0.6 * delta(x)
    assert torch.allclose(model(batch()), plain.head(y), atol=1e-6)


def test_a_wire_is_empty_behind_a_pass():
    model = grafted("span", "two")
    plant(model, "span", seed("bypass-mlp", Tap.BEFORE))
    plant(model, "two", seed("skip-mlp", Tap.INPUT, reads=5))
    model(batch())
    points = [part.__dict__["_esper_point"] for part in model.modules() if "_esper_point" in part.__dict__]
    wires = [wire for point in points for wire in point.records]
    assert len(wires) == 3
    assert all((wire.local.held.place, wire.local.held.value) == (-1, None) for wire in wires)


def wired(build=Net):
    """Build a network in evaluation mode with a seed that reads an earlier block's input, and one that reads the network's."""
    with drawn_with(0):
        model = build().eval()
    graft(model, {name: SITES[name] for name in ("span", "two")})
    plant(model, "span", seed("bypass-mlp", Tap.BEFORE))
    plant(model, "two", seed("skip-mlp", Tap.INPUT, reads=5))
    return model


def test_two_threads_in_one_network_read_each_its_own_input():
    model, both = wired(), threading.Barrier(2)
    given = [batch(), 3 * batch()[:4]]
    expected = [model(x) for x in given]

    def meet(*_):
        both.wait(60)  # every wire has been written to by then

    model.blocks[0].register_forward_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        assert all(map(torch.equal, pool.map(model, given), expected))


def test_a_pass_that_fails_leaves_nothing_to_a_call_of_a_part():
    model, x = wired(), torch.randn(6, WIDTH)
    handle = model.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch())
    handle.remove()
    for part in (model.blocks[1], model.blocks[1].fall):
        model.blocks[0](x)  # of no pass of the network
        with pytest.raises(InputError, match="is called outside the forward pass of the network"):
            part(x if part is model.blocks[1] else torch.randn(6, 12))


def test_a_pass_within_a_pass_has_a_value_of_its_own():
    model = wired()
    expected, inner = model(batch()), []

    def again(*_):
        if not inner:
            inner.append(None)
            inner.append(model(3 * batch()))

    model.blocks[0].register_forward_hook(again)
    assert torch.equal(model(batch()), expected)
    assert torch.equal(inner[1], model(3 * batch()))


class Broken(Net):
    """Splits the graph of its pass, so that dynamo cannot compile it as one."""

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = block(x)
        return self.head(x)


class Recomputing(Net):
    """Computes its blocks again in the backward pass, together."""

    def blocks_of(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.head(checkpoint(self.blocks_of, self.stem(x), use_reentrant=False))


@pytest.mark.parametrize("parts", ["whole", "broken", "both blocks", "source", "site"])
def test_what_a_seed_reads_from_elsewhere_reaches_it_in_a_compiled_network_and_between_compiled_parts(parts):
    torch.compiler.reset()
    model = wired(Broken if parts == "broken" else Net)
    expected = [model(x) for x in (batch(), 3 * batch())]
    compiled = {"both blocks": (0, 1), "source": (0,), "site": (1,)}.get(parts, ())
    for index in compiled:
        model.blocks[index].compile(backend="eager", fullgraph=True)
    run = model if compiled else torch.compile(model, backend="eager", fullgraph=parts == "whole")
    assert all(torch.allclose(run(x), y, atol=1e-6) for x, y in zip((batch(), 3 * batch()), expected, strict=True))


class Meeting(Net):
    """Lets threads wait for each other behind each block, where every wire has been written to."""

    meet = staticmethod(lambda: None)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            self.meet()
        return self.head(x)


@pytest.mark.parametrize("compiled", [(0, 1), (0,), (1,)])
def test_threads_read_each_their_own_input_in_parts_that_are_compiled_one_by_one(compiled):
    torch.compiler.reset()
    model, given = wired(Meeting), [batch(), 3 * batch(), batch() - 1]
    expected = [model(x) for x in given]
    for index in compiled:
        model.blocks[index].compile(backend="eager", fullgraph=True)
    model(batch())
    both = threading.Barrier(3)
    model.meet = lambda: both.wait(60)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            assert all(map(torch.allclose, pool.map(model, given), expected))


def test_a_checkpoint_around_what_is_read_and_its_seed_has_the_gradients_of_none():
    gradients = []
    for build in (Net, Recomputing):
        with drawn_with(0):
            model = build()
        graft(model, {"span": SITES["span"]})
        plant(model, "span", seed("bypass-mlp", Tap.BEFORE))
        gradients.append(trained(model, batch())[1])
    assert all(torch.allclose(gradients[0][name], gradient, atol=1e-6) for name, gradient in gradients[1].items())


def test_a_site_in_a_sequential_and_a_sequential_as_a_site():
    with drawn_with(0):
        plain = nn.Sequential(nn.Sequential(nn.Linear(5, WIDTH), nn.ReLU()), nn.Linear(WIDTH, 3))
    model = graft(copy.deepcopy(plain), {"a": Site("a", "0", "0", Vector(WIDTH))})
    plant(model, "a", seed(mode=Mode.STRAIGHT))
    assert torch.equal(model(batch()), plain(batch()))
    assert len(model[0]) == 2
    assert [type(part).__name__ for part in model[0]] == ["Linear", "ReLU"]
    assert model[0][-1] is model[0][1]
    assert torch.equal(model[0][:1](batch()), plain[0][:1](batch()))


def test_a_submodule_that_is_called_twice_has_its_seed_behind_both_calls():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.part(self.part(x))

    with drawn_with(0):
        plain = Shared()
    model = graft(copy.deepcopy(plain), {"part": Site("part", "part", "part", Vector(WIDTH))})
    plant(model, "part", seed("bypass-linear", Tap.BEFORE))
    delta = seed("bypass-linear", Tap.BEFORE).seed.delta

    def part(x):
        return plain.part(x) + 0.6 * delta(x)

    with drawn_with(2):
        x = torch.randn(4, WIDTH)
    assert torch.allclose(model(x), part(part(x)), atol=1e-6)
    planted_at(model, "part").mode = Mode.STRAIGHT
    assert torch.equal(model(x), plain(x))


def test_a_seed_takes_no_part_in_a_pass_that_does_not_call_its_submodule():
    model, plain = grafted("two").eval(), net().eval()
    planted = seed()
    plant(model, "two", planted)
    assert torch.equal(model(batch(), skip=True), plain(batch(), skip=True))
    model(batch(), skip=True).sum().backward()
    assert all(parameter.grad is None for parameter in planted.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", [Mode.STRAIGHT, Mode.ON])
def test_a_site_within_a_checkpoint_has_the_gradients_of_one_outside(mode, reentrant):
    gradients = []
    for checkpointed in (False, True):
        model = grafted("one", "two", checkpointed=checkpointed, reentrant=reentrant)
        plant(model, "one", seed(mode=mode))
        plant(model, "two", seed("bypass-mlp", Tap.BEFORE, mode=mode))
        gradients.append(trained(model, batch())[1])
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.allclose(gradients[0][name], gradients[1][name], atol=1e-6) for name in gradients[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_tap_from_outside_a_checkpoint_is_refused_by_name(reentrant):
    model = grafted("two", checkpointed=True, reentrant=reentrant)
    plant(model, "two", seed("skip-mlp", Tap.INPUT, reads=5))
    with pytest.raises(InputError, match=r"site 'two' reads tap 'input'.*torch.utils.checkpoint"):
        trained(model, batch())


def test_a_module_under_two_names_is_a_site_under_either():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = nn.Linear(5, 5)

        def forward(self, x):
            return self.second(self.first(x))

    for path in ("first", "second"):
        model = graft(Twice(), {"a": Site("a", path, path, Vector(5))})
        assert survey(model, lambda model=model: model(batch()))["a"].calls == 2
    both = {name: Site(name, name, name, Vector(5)) for name in ("first", "second")}
    with pytest.raises(InputError, match="sites 'first' and 'second' are both behind 'second'"):
        graft(Twice(), both)


def test_a_network_whose_path_depends_on_its_data_can_be_grafted():
    """Check a network that tracing fails on: the condition and the number of steps are values of tensors."""

    class Adaptive(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.part = nn.Linear(5, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            h = self.stem(x)
            for _ in range(int(h.square().sum()) % 3):
                h = self.part(torch.relu(h)) if h.mean() > 0 else self.part(torch.tanh(h))
            return h

    with drawn_with(0):
        plain, x = Adaptive(), torch.randn(3, 6, 5)
    model = graft(copy.deepcopy(plain), {"a": Site("a", "part", "part", Vector(WIDTH))})
    plant(model, "a", seed(mode=Mode.STRAIGHT))
    calls = [int(plain.stem(each).square().sum()) % 3 for each in x]
    assert len(set(calls)) > 1
    assert all(torch.equal(model(each), plain(each)) for each in x)
    planted_at(model, "a").mode = Mode.ON
    assert [torch.equal(model(each), plain(each)) for each in x] == [number == 0 for number in calls]


def test_a_seed_follows_its_network_into_evaluation_and_back():
    model = grafted("one")
    plant(model, "one", seed())
    assert not planted_at(model.eval(), "one").training
    assert planted_at(model.train(), "one").training


def test_a_parametrized_layer_keeps_its_parametrization():
    plain = net()
    parametrizations.weight_norm(plain.blocks[0].lift)
    site = {"a": Site("a", "blocks.0.lift", "blocks.0.lift", Vector(12))}
    model = graft(copy.deepcopy(plain), site)
    assert_host_equal(model, plain)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[0].lift.parametrizations.weight.original0.zero_()
    assert_host_equal(model, plain)
    ungraft(model)
    assert [type(part) for part in model.modules()] == [type(part) for part in plain.modules()]


def test_a_class_that_was_swapped_since_keeps_that_swap():
    """Check classes as torch's parametrize and fully_shard swap them: to give the old class back would undo that in silence."""
    graft(model := net(), {"a": Site("a", "blocks.0.lift", "blocks.0.lift", Vector(12))})
    lift = model.blocks[0].lift
    parametrizations.weight_norm(lift)
    weight = lift.weight
    assert type(lift).__name__ == "ParametrizedGrownLinear"
    ungraft(model)
    assert (type(lift).__name__, type(lift).__bases__) == ("ParametrizedLinear", (nn.Linear,))
    assert torch.equal(lift.weight, weight)
    remove_parametrizations(lift, "weight")
    assert type(lift) is nn.Linear
    graft(model, {"a": Site("a", "blocks.0.lift", "blocks.0.lift", Vector(12))})
    lift.__class__ = type("Twice", (type("Once", (type(lift),), {}),), {})
    with pytest.raises(InputError, match="a grafted module was given the class Twice since"):
        ungraft(model)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_a_grown_network_is_one_of_its_own(way):
    model = grafted("stem", "two", "span").eval()
    plant(model, "stem", seed())
    plant(model, "two", seed("skip-mlp", Tap.INPUT, reads=5))
    plant(model, "span", seed("bypass-mlp", Tap.BEFORE))
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    before = model(batch())
    assert torch.equal(other(batch()), before)
    assert type(other) is type(model)
    assert sites_of(other) == sites_of(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(model(batch()), before)
    uproot(other, "span")
    assert planted_at(model, "span") is not None


def test_export_keeps_what_the_seeds_change():
    model = grafted("one", "two").eval()
    plant(model, "one", seed(blend=Blend.GATE))
    plant(model, "two", seed("skip-mlp", Tap.INPUT, reads=5))
    exported = torch.export.export(model, (batch(),), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    with drawn_with(4):
        other = torch.randn(9, 5)
    assert torch.allclose(exported.module()(other), model(other), atol=1e-6)


def test_a_compiled_network_follows_births_doses_and_prunes():
    torch.compiler.reset()
    model, plain = grafted("stem", "two").eval(), net().eval()
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    run = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(run(batch()), plain(batch()))
    planted = seed(mode=Mode.OFF)
    plant(model, "stem", planted)
    assert torch.equal(run(batch()), plain(batch()))
    planted.mode = Mode.ON
    assert torch.allclose(run(batch()), model(batch()))
    before = len(graphs)
    for dose in (0.1, 0.5, 1.0):
        planted.alpha.fill_(dose)
        assert torch.allclose(run(batch()), model(batch()))
        assert not torch.allclose(run(batch()), plain(batch()))
    assert len(graphs) == before, "a dose is not a part of a graph"
    uproot(model, "stem")
    assert torch.equal(run(batch()), plain(batch()))


def test_a_tuple_has_its_first_entry_changed():
    with drawn_with(0):
        plain = nn.LSTM(5, WIDTH, batch_first=True)
    holder = nn.ModuleDict({"lstm": copy.deepcopy(plain)})
    model = graft(holder, {"a": Site("a", "lstm", "lstm", Vector(WIDTH))})
    plant(model, "a", seed())
    with drawn_with(2):
        x = torch.randn(2, 7, 5)
    (output, state), (other, kept) = holder["lstm"](x), plain(x)
    assert torch.allclose(output, other + 0.6 * seed().seed.delta(other), atol=1e-6)
    assert torch.equal(state[0], kept[0])


class Answer(NamedTuple):
    ids: torch.Tensor
    stream: torch.Tensor


@pytest.mark.parametrize(
    "bundle",
    [lambda i, h: {"ids": i, "stream": h}, Answer, lambda i, h: [i, h]],
    ids=["mapping", "named tuple", "list"],
)
def test_a_bundle_has_its_first_floating_tensor_changed(bundle):
    class Bundles(nn.Linear):
        def forward(self, x):
            return bundle(torch.arange(len(x)), super().forward(x))

    with drawn_with(0):
        plain = Bundles(5, WIDTH)
    model = graft(copy.deepcopy(plain), {"a": Site("a", "", "", Vector(WIDTH))})
    assert survey(model, lambda: model(batch()))["a"].widths[Tap.HERE] == WIDTH
    plant(model, "a", seed())
    grown, other = model(batch()), plain(batch())
    assert type(grown) is type(other)
    (ids, stream), (_, h) = (list(each.values()) if isinstance(each, dict) else each for each in (grown, other))
    assert torch.equal(ids, torch.arange(6))
    assert torch.allclose(stream, h + 0.6 * seed().seed.delta(h), atol=1e-6)


@pytest.mark.parametrize("stream", [Map(WIDTH), Sequence(WIDTH)], ids=["map", "sequence"])
def test_other_streams(stream: Stream):
    sequence = isinstance(stream, Sequence)
    with drawn_with(0):
        plain = nn.Sequential(nn.Linear(5, WIDTH) if sequence else nn.Conv2d(5, WIDTH, 3, 2), nn.ReLU())
        x = torch.randn(2, 6, 5) if sequence else torch.randn(2, 5, 9, 9)
    model = graft(copy.deepcopy(plain), {"a": Site("a", "0", "0", stream)})
    readings = survey(model, lambda: model(x))
    assert readings["a"].widths == {Tap.HERE: WIDTH, Tap.BEFORE: 5, Tap.INPUT: 5}
    kind = stream.kind if not sequence else Kind.VECTOR  # those act on the last axis of any stream
    blueprint = "bypass-mlp" if sequence else "bypass-conv-3x3"
    planted = seed(blueprint, Tap.BEFORE, reads=5, kind=kind, mode=Mode.STRAIGHT)
    planted.kind = stream.kind
    plant(model, "a", planted)
    assert torch.equal(model(x), plain(x))
    planted.mode = Mode.ON
    assert not torch.equal(model(x), plain(x))
    assert model(x).shape == plain(x).shape


def test_what_ungraft_gives_back_is_the_module_as_it_was():
    plain, model = net(), grafted()
    plant(model, "one", seed())
    ungraft(model)
    assert not is_grafted(model)
    assert [type(part) for part in model.modules()] == [type(part) for part in plain.modules()]
    assert all(
        vars(mine).keys() == vars(theirs).keys() for mine, theirs in zip(model.modules(), plain.modules(), strict=True)
    )
    assert_host_equal(model, plain)
    graft(model, SITES)


def test_trim_leaves_the_classes_that_a_seed_needs():
    model = grafted("stem", "two", "span").eval()
    plant(model, "span", seed("bypass-mlp", Tap.BEFORE))
    before = model(batch())
    trim(model)
    grown = [name for name, part in model.named_modules() if type(part).__name__.startswith("Grown")]
    assert grown == ["", "blocks.0", "blocks.1"]
    assert torch.equal(model(batch()), before)


def test_a_half_precision_host_stays_one():
    model = grafted("one").to(torch.bfloat16)
    plant(model, "one", seed().to(torch.bfloat16))
    assert model(batch().bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        other = grafted("one")
        plant(other, "one", seed("affine"))
        assert other(batch()).dtype == torch.bfloat16


def test_a_survey_leaves_the_network_as_it_was_and_sees_what_a_seed_could_read():
    model, plain = grafted(), net()
    model.train()
    before = torch.get_rng_state()
    readings = survey(model, lambda: model(batch()))
    assert torch.equal(torch.get_rng_state(), before)
    assert readings["stem"].widths == {Tap.HERE: WIDTH, Tap.BEFORE: 5, Tap.INPUT: 5}
    assert readings["two"].widths == {Tap.HERE: WIDTH, Tap.BEFORE: WIDTH, Tap.INPUT: 5}
    assert readings["one"].calls == 1
    assert model.training
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_host_equal(model, plain)


def test_what_a_submodule_changes_in_place_cannot_be_read():
    with drawn_with(0):
        model = nn.Sequential(nn.Linear(5, WIDTH), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)))
    graft(model, {"a": Site("a", "1", "1", Vector(WIDTH))})
    assert survey(model, lambda: model(batch()))["a"].widths == {Tap.HERE: WIDTH, Tap.BEFORE: 0, Tap.INPUT: 5}


class RunsChildren(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(5, WIDTH)

    def forward(self, x):
        for child in self.children():
            x = child(x)
        return x


class NeverCalled(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(5, WIDTH), nn.Linear(5, WIDTH)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize(
    ("module", "site", "said"),
    [
        (RunsChildren, Site("a", "", "", Vector(WIDTH)), "runs every child"),
        (NeverCalled, Site("a", "unused", "unused", Vector(WIDTH)), "no forward pass in evaluation mode calls"),
        (NeverCalled, Site("a", "used", "used", Vector(9)), "has a vector of width 9, but 'used' returns shape"),
        (NeverCalled, Site("a", "used", "used", Map(WIDTH)), "has a map of width 8"),
    ],
)
def test_a_survey_refuses_what_cannot_be_a_site(module, site, said):
    model = graft(module(), {"a": site})
    with pytest.raises(InputError, match=said):
        survey(model, lambda: model(batch()))
    assert all(not hasattr(part, "esper") for part in model.modules())


class Odd(Stream):
    kind = Kind.VECTOR


def own_forward():
    model = net()
    model.stem.forward = lambda x: x
    return model


def quantised():
    return torch.ao.quantization.quantize_dynamic(net(), {nn.Linear})


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def site(after="stem", around=None, stream=None, name="a"):
    return {"a": Site(name, after, around or after, stream or Vector(WIDTH))}


@pytest.mark.parametrize(
    ("module", "sites", "said"),
    [
        (net, site("blocks.0.lif"), r"'blocks.0.lif', which is not there; did you mean 'blocks.0.lift'"),
        (net, site("stem", "sten"), r"'sten', which is not there; did you mean 'stem'"),
        (net, site(stream=Odd(8)), r"has stream Odd\(width=8\); give esper.Vector"),
        (net, site(name="b"), "is named 'b'"),
        (net, {"a": "stem"}, "is a str; give an esper.Site"),
        (net, {}, "give at least one"),
        (net, "auto", "give one, as esper.graft"),
        (net, "stem", "sites is 'stem'; give 'auto', 'parts', a list of names"),
        (net, {**site(), "b": Site("b", "stem", "stem", Vector(WIDTH))}, "'a' and 'b' are both behind 'stem'"),
        (net, site("blocks"), "is a ModuleList, which is never called"),
        (own_forward, site(), "has a forward of its own"),
        (quantised, site("blocks.0.lift"), "is quantised"),
        (
            encoder,
            site("layers.0.self_attn.out_proj"),
            "within an nn.MultiheadAttention.*use 'layers.0.self_attn' itself",
        ),
        (lambda: torch.jit.script(nn.Linear(5, 3)), site(""), "scripted by torch.jit"),
        (lambda: torch.compile(net()), site("stem"), "is compiled; graft the module itself"),
        (lambda: nn.DataParallel(net()), site("module.stem"), "wrapped in DataParallel"),
        (grafted, site(), "grafted already"),
        (lambda: "net", site(), "was given a str"),
    ],
)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor"
)  # torch's, of torch.jit and of quantization
def test_bad_sites_are_refused_in_a_sentence(module, sites, said):
    with pytest.raises(InputError, match=said):
        graft(module(), sites)


def test_sites_are_found_on_an_example():
    model = graft(net(), example=batch())
    assert {"blocks.0", "blocks.1", "blocks.0.lift"} <= set(model.sites)
    assert "blocks.0.lift" in repr(model.sites)
    assert list(survey(model, lambda: model(batch()))) == list(model.sites)
    assert list(copy.deepcopy(model).sites) == list(model.sites)
    assert list(graft(net(), ["blocks.1"], example=batch()).sites) == ["blocks.1"]
    with pytest.raises(InputError, match=r"'head' is not a site that find_sites finds: a head"):
        graft(net(), ["head"], example=batch())


class Padded(nn.Module):
    """Runs torch's encoder on examples whose last position is padding: in evaluation mode as nested tensors, layer by layer."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, 3)

    def forward(self, x):
        padding = torch.arange(x.shape[1]).expand(x.shape[:2]) == x.shape[1] - 1
        return self.head(self.body(x, src_key_padding_mask=padding)[:, :-1].mean(1))


@pytest.mark.parametrize("after", ["body.layers.0", "body.layers.0.linear2"])
def test_a_seed_in_an_encoder_of_torch_runs_where_its_layers_would_be_fused(after):
    with drawn_with(2):
        model, x = Padded().eval(), torch.randn(4, 5, WIDTH)
    graft(model, example=x)
    first = "body.layers.0"
    assert [name for name in model.sites if name.startswith(first)] == [f"{first}.linear1", f"{first}.linear2", first]
    with torch.no_grad():
        alone = model(x)
        plant(model, after, seed(kind=Kind.SEQUENCE))
        for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            fused = each(x)
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                plain = each(x)
            finally:
                torch.backends.mha.set_fastpath_enabled(True)
            assert torch.allclose(fused, plain, atol=1e-5)
        assert not torch.allclose(fused, alone, atol=1e-3), "the seed acts"
        ungraft(model)
        assert torch.equal(model(x), alone), "its layers are fused again"
    assert model.body.use_nested_tensor
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_the_sites_are_an_attribute_of_the_network_alone():
    model = grafted()
    assert set(model.sites) == {"stem", "one", "two"}
    assert not hasattr(model.stem, "sites")
    assert getattr(model.blocks[0], "sites", None) is None


def test_a_network_without_sites_says_so():
    with pytest.raises(InputError, match="the Net has no sites"):
        ungraft(net())


ORDERS = [stream(WIDTH, order) for stream in STREAMS.values() for order in stream.orders[1:]]


@pytest.mark.parametrize("seated", [False, True])
@pytest.mark.parametrize("mode", [Mode.ON, Mode.STRAIGHT])
@pytest.mark.parametrize("stream", ORDERS, ids=str)
def test_a_seed_computes_the_same_whatever_the_order_of_the_axes(stream, mode, seated):
    def planted(axes):
        made = seed(alpha=0.6, kind=stream.kind, blend=Blend.GATE)
        if seated:
            own = Seat(made.seed, made.tap, stream.kind, axes)
            own.take(made)
        else:
            own = Planted(made.seed, made.tap, Blend.GATE, stream.kind, axes)
        own.mode = mode
        own.alpha.fill_(0.6)
        return own

    with drawn_with(3):
        usual = torch.randn(5, *(3, 4, 6)[: stream.axes - 1], WIDTH).movedim(-1, stream.features)
    inverse = [stream.permutation.index(axis) for axis in range(usual.dim())]
    given = usual.permute(inverse).contiguous()
    assert stream.width_at(given) == WIDTH
    assert torch.equal(stream.arranged(given), usual)
    plain, turned = planted(()), planted(stream.permutation)
    expected, found = plain(*[usual] * (2 + seated)), turned(*[given] * (2 + seated))
    assert torch.allclose(stream.arranged(found), expected, atol=1e-6)
    assert (found != given).any() == (mode == Mode.ON)
    expected.cos().sum().backward()
    found.cos().sum().backward()
    for one, other in zip(plain.seed.parameters(), turned.seed.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.allclose(one.grad, other.grad, atol=1e-4)


def test_an_order_that_a_stream_cannot_have_is_refused():
    with pytest.raises(InputError, match="the axes of a map are in order 'HWCB'; give one of 'BCHW', 'BHWC'"):
        Map(4, "HWCB")


def test_an_undisturbed_network_is_in_evaluation_mode_and_each_part_gets_its_own_mode_back():
    class Switching(nn.Linear):
        def train(self, mode=True):
            self.switched = mode
            return super().train(mode)

    for network in (nn.Sequential(nn.Linear(3, 3), nn.Dropout()), nn.Sequential(Switching(3, 3), nn.Dropout())):
        graft(network, {"0": Site("0", "0", "0", Vector(3))})
        network.train()
        network[1].eval()
        with undisturbed(network):
            assert not any(part.training for part in network.modules())
            assert not getattr(network[0], "switched", False)
        assert [part.training for part in network.modules()] == [True, True, False]
