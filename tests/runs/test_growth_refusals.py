"""Check what `esper.Growth` and `esper.graft` refuse: each in one sentence that names what was given and what mends it."""

import copy
import inspect
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import graft, is_grafted, ungraft
from esper.leyline.lifecycle.slots import Map, Site, Vector
from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import InputError
from esper.runs.live.anytime import AnytimeGrowth
from esper.runs.live.growth import Growth
from populations import Script

WIDTH = 6
SITES = {name: Site(name, name, name, Vector(WIDTH)) for name in ("0", "2")}


def host():
    with drawn_with(0):
        return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def data(key, examples=12):
    with drawn_with(key):
        x = torch.randn(examples, 4)
        return x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long()


def shuffled():
    return [data(int(torch.randint(0, 10**6, ())))]


def nothing(output, y):
    return output.sum() * torch.nan


def grow(model=None, optimizer=None, **options):
    model = graft(host(), SITES) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    usual = {"probe": [data(1), data(2)], "loss": F.cross_entropy, "every": 2, "budget": 9.0, "controller": "never"}
    return Growth(model, optimizer, **{**usual, **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 0}, "budget is 0; give a number above 0"),
        ({"budget": -1.0}, "budget is -1.0; give a number above 0"),
        ({"budget": True}, "budget is True"),
        ({"budget": torch.nan}, "budget is nan"),
        ({"budget": 0.01}, r"allows 0, and the smallest seed has 30, bypass-\S+ at '\S+'; give at least 0.323"),
        ({"probe": []}, "probe has no batches"),
        ({"probe": list}, "probe has no batches"),
        ({"probe": None}, "probe is a NoneType; give a list"),
        ({"probe": data(1)}, "a batch of probe is a Tensor"),
        ({"probe": [data(1), data(2, 0)]}, "a batch of probe holds no examples"),
        ({"probe": torch.utils.data.DataLoader([1, 2])}, "probe is a DataLoader; give a list"),
        ({"probe": [(data(1)[0].to_sparse(), data(1)[1])]}, "a batch of probe holds a tensor of torch.float32 that is sparse"),
        ({"probe": [(torch.nested.as_nested_tensor([*data(1)[0]]), data(1)[1])]}, "a batch of probe holds a tensor of"),
        ({"probe": shuffled}, "probe has other batches than before"),
        ({"probe": [(torch.randn(5, 3), data(1)[1])]}, "cannot run on the first input of the probe: RuntimeError: mat1"),
        ({"probe": [(data(1)[0], data(1)[1] + 5)]}, "the loss cannot take the output .*: IndexError: Target [567]"),
        ({"probe": [(data(1)[0] * torch.nan, data(1)[1])]}, "the loss of the model on the probe is nan before it grows"),
        ({"loss": "mse"}, "loss is a str; give a function"),
        ({"loss": nothing}, "the loss of the model on the probe is nan before it grows"),
        ({"loss": lambda output, y: float(output.sum())}, "loss returns a float; return a tensor"),
        ({"loss": lambda output, y: None}, "loss returns a NoneType; return a tensor"),
        ({"loss": lambda output, y: output.sum(0)}, r"of shape \(3,\) for a batch of 12 examples; return one number"),
        ({"loss": lambda output, y: y.sum()}, "loss returns torch.int64"),
        ({"loss": lambda output, y: output.logits}, "the loss cannot take .*: AttributeError: 'Tensor' object"),
        ({"probe": [data(1)], "loss": lambda o, y: (o.mean() - y.float().mean()) ** 2}, "probe has one batch, and the loss"),
        ({"probe": [data(1, 1)]}, "probe holds one example, so that no standard error is known; give two at least"),
        ({"every": 0}, "every is 0; give a whole number"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"scaler": 2.0}, "scaler is a float; give the torch.amp.GradScaler"),
        ({"controller": "heuristics"}, r"unknown controller 'heuristics'; .*; did you mean 'heuristic'\?"),
        ({"settings": {"envs": 2}}, "settings sets envs"),
        ({"settings": {"amp": "fp16"}}, "settings sets amp, which a network in your own training loop does not have"),
        ({"settings": {"data": {"microbatch": 4}}}, r"settings sets data\.microbatch"),
        ({"settings": {"blueprints": ["conv-light"]}}, "blueprint 'conv-light' is for map streams"),
        ({"settings": {"gate": {}}}, "gate"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_in_a_sentence(options, said):
    with pytest.raises(InputError, match=said) as caught:
        grow(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"plan": "anytmie"},
            r"^plan is 'anytmie'; give None, which plants seeds, or 'anytime'$",
        ),
        (
            {"sizes": [1, 2]},
            r"^esper\.Growth has no argument 'sizes'; .* give plan='anytime' to widen the network as a whole",
        ),
        (
            {"plan": "anytime", "example": 0, "budget": 0.1},
            r"^esper\.AnytimeGrowth has no argument 'budget'; it takes model, ",
        ),
        ({"plan": "anytime", "exmple": 0}, r"^esper\.AnytimeGrowth has no argument 'exmple'; did you mean 'example'"),
        ({"plan": "anytime"}, r"^esper\.AnytimeGrowth: missing a required .*'example'$"),
    ],
)
def test_arguments_of_the_other_plan_of_growth_are_refused_by_name(given, said):
    model = host()
    with pytest.raises(InputError, match=said):
        Growth(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)


def test_growth_with_the_plan_anytime_is_an_anytime_growth_and_a_derived_class_plants_seeds():
    model, (x, _) = host(), data(1)
    growth = Growth(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="anytime", example=x, ratio=1e9)
    assert type(growth) is AnytimeGrowth
    assert (growth.model, growth.ratio) == (model, 1e9)
    growth.finish()
    assert list(inspect.signature(Growth).parameters) == list(inspect.signature(Growth.__init__).parameters)[1:]

    class Own(Growth):
        def __init__(self, **settings):
            model = host()
            super().__init__(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                probe=[data(1)],
                loss=F.cross_entropy,
                budget=4.0,
                **settings,
            )

    growth = Own(every=2)
    assert type(growth) is Own
    growth.finish()
    with pytest.raises(
        InputError, match=r"^plan is 'anytime', which esper\.Growth itself takes alone; Own plants seeds$"
    ):
        Own(plan="anytime")


def test_a_misspelled_argument_is_refused_with_the_one_that_is_meant():
    with pytest.raises(InputError, match=r"esper\.Growth has no argument 'budgte'; did you mean 'budget'"):
        grow(budgte=0.1)


def test_a_probe_that_changes_while_a_network_grows_is_refused():
    probe = itertools.chain(itertools.repeat([data(1), data(2)], 8), itertools.repeat([data(1), data(3)]))
    growth = grow(probe=lambda: next(probe), controller=Script({}))

    def train():
        for _ in range(40):
            growth.population.groups.optimizer.step()
            growth.step()

    with pytest.raises(InputError, match="probe has other batches than before"):
        train()


class Branches(nn.Module):
    """Leaves out one of its submodules always, and another in evaluation."""

    def __init__(self):
        super().__init__()
        self.used, self.idle, self.helper = nn.Linear(4, 3), nn.Linear(4, WIDTH), nn.Linear(4, WIDTH)

    def forward(self, x):
        return self.used(x) + (self.helper(x)[:, :3] if self.training else 0)


class Mixing(nn.Module):
    """Multiplies by a matrix of its own, (B, H, W, C) -> (B, H, W, C)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return torch.einsum("bhwc,oc->bhwo", x, self.weight)


def mixing():
    return nn.Sequential(*(Mixing() for _ in range(3)))


KNOWN = "(B, C), (B, C, H, W), (B, L, C), (B, C, L), (L, B, C), (B, H, W, C), (B, C, D, H, W) and (B, D, H, W, C)"


@pytest.mark.parametrize(
    ("build", "example", "name", "said"),
    [
        (
            mixing,
            torch.randn(2, 5, 6, 4),
            "0",
            f"'0' is not a site that find_sites finds: an unknown kind of stream, (B, *, *, C); known are {KNOWN}; give it as an "
            "esper.Site whose stream has `order`, or let the submodule return one that is known",
        ),
        (
            host,
            torch.randn(2, 4),
            "4",
            "'4' is not a site that find_sites finds: a head: its output reaches the loss without another layer; give it as an "
            "esper.Site, or another",
        ),
    ],
)
def test_a_site_that_was_named_is_not_answered_by_the_advice_to_name_it(build, example, name, said):
    with pytest.raises(InputError) as caught:
        graft(build(), [name], example=example)
    assert str(caught.value) == said


def test_a_network_whose_streams_hold_no_seed_says_which_form_is_accepted():
    with pytest.raises(
        InputError, match=r"give an esper\.Site for a submodule that .* x\.permute\(\.\.\.\) at the end"
    ):
        graft(mixing(), example=torch.randn(2, 5, 6, 4))
    block = graft(mixing(), {"1": Site("1", "1", "1", Map(4, "BHWC"))})
    assert list(block.sites) == ["1"]


def of(path, stream=None):
    """Make sites with the one behind a submodule."""
    return {"a": Site("a", path, path, Vector(WIDTH) if stream is None else stream)}


def small(kind):
    model = host()
    model[2].weight = nn.Parameter(model[2].weight.detach().to(kind), requires_grad=False)
    return model


def quantised():
    return torch.ao.quantization.quantize_dynamic(host(), {nn.Linear})


@pytest.mark.parametrize(
    ("build", "sites", "said"),
    [
        (host, of("22"), r"site 'a' names submodule '22', which is not there; did you mean '2'\?"),
        (
            host,
            ["22"],
            r"'22' is not a site that find_sites finds; give it as an esper.Site, or another: did you mean '2' or '0'\?",
        ),
        (host, ["4"], r"'4' is not a site that find_sites finds: a head"),
        (Branches, of("idle"), "'idle', which no forward pass in evaluation mode calls"),
        (Branches, of("helper"), "'helper', which no forward pass in evaluation mode calls"),
        (host, of("2", "vector"), r"has stream 'vector'; give esper.Vector\(width\)"),
        (host, of("2", WIDTH), r"has stream 6; give esper.Vector\(width\)"),
        (host, of("2", Map(WIDTH)), r"has a map of width 6, but '2' returns shape \(12, 6\)"),
        (host, of("2", Vector(5)), r"has a vector of width 5, but '2' returns shape \(12, 6\)"),
        (lambda: torch.jit.script(host()), "auto", "is scripted by torch.jit; graft the module that it was made from"),
        (lambda: torch.jit.trace(host(), data(1)[0]), of("2"), "is scripted by torch.jit"),
        (lambda: nn.Sequential(torch.jit.script(host()), nn.Linear(3, 3)), of("0"), "'0' of site 'a' is scripted by torch.jit"),
        (quantised, "auto", "'0' of .* is a quantised Linear"),
        (quantised, of("2"), "submodule '2' of site 'a' is quantised"),
        (lambda: small(torch.int8), "auto", r"2.weight of .* is quantised \(int8\)"),
        (lambda: small(torch.int8), of("2"), "submodule '2' of site 'a' is quantised"),
        (lambda: small(torch.float8_e4m3fn), "auto", r"2.weight of .* is quantised \(float8_e4m3fn\)"),
        (lambda: small(torch.float8_e4m3fn), of("2"), "submodule '2' of site 'a' is quantised"),
    ],
)  # fmt: skip
def test_bad_sites_are_refused_in_a_sentence(build, sites, said):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls torch.jit and its own quantization out of date
        model = build()
    with pytest.raises(InputError, match=said) as caught:
        grow(graft(model, sites, example=data(1)[0]))
    assert "\n" not in str(caught.value)


def test_bad_models_are_refused_in_a_sentence():
    with pytest.raises(InputError, match=r"the model is a function; give an nn\.Module"):
        grow(lambda x: x, torch.optim.SGD(host().parameters()))
    with pytest.raises(InputError, match="the SGD holds no parameter of the model"):
        grow(optimizer=torch.optim.SGD(host().parameters()))
    with pytest.raises(InputError, match="the optimizer is a str"):
        grow(optimizer="sgd")
    model = graft(host(), SITES)
    with pytest.raises(InputError, match="LBFGS takes one group of parameters"):
        grow(model, torch.optim.LBFGS(model.parameters()))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    with pytest.raises(InputError, match="Muon takes matrices alone"):
        grow(model, torch.optim.Muon(matrices))
    with pytest.raises(InputError, match="SparseAdam takes sparse gradients alone"):
        grow(model, torch.optim.SparseAdam(list(model.parameters())))
    with pytest.raises(InputError, match="the model is wrapped in DataParallel"):
        grow(nn.DataParallel(graft(host(), SITES)))
    with pytest.raises(InputError, match="ema has no sites of its own"):
        grow(ema=AveragedModel(host()))
    with pytest.raises(InputError, match=r"growth\.step was given 1 argument;"):
        grow().step(data(1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda x, y: (x.numpy(), y),
            r"an ndarray as x and a tensor of torch.int64 and shape \(12,\) on cpu as y",
        ),
        (lambda x, y: (x[:, :3], y), r"a tensor of torch.float32 and shape \(12, 3\) on cpu as x"),
        (lambda x, y: (x.double(), y), "a tensor of torch.float64"),
        (lambda x, y: ({"x": x}, y), "a dict as x"),
        (lambda x, y: (x.to("meta"), y), r"and shape \(12, 4\) on meta as x"),
        (lambda x, y: (x.to_sparse_csc(), y[:3]), r"a tensor of torch.float32 and shape \(12, 4\)"),
        (lambda x, y: (x, None), "as x and a NoneType as y"),
        (lambda x, y: (x, y[:3]), r"and shape \(3,\) on cpu as y"),
        (lambda x, y: (x, y.float()), "and a tensor of torch.float32"),
    ],
)
def test_a_batch_on_which_the_model_or_the_loss_fails_is_one_sentence_and_the_next_one_trains(change, said):
    model = graft(host(), SITES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"blueprints": ["bypass-mlp-small"], "gates": {"permissive": True}}
    growth = grow(model, optimizer, controller=Script({(0, 0): (Op.GERMINATE, 0, 0, 0, 1, 3)}), settings=settings)

    def step(x, y):
        F.cross_entropy(model(data(3)[0]), data(3)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step(x, y)

    for _ in range(2):  # until the seed incubates
        step(*data(3))
    before = {name: value.clone() for name, value in model.state_dict().items() if ".esper." in name}
    with pytest.raises(
        InputError,
        match=rf"^growth\.step\(x, y\) was given .*{said}.*, on which the model or the loss fails: .*; give the",
    ):
        step(*change(*data(3)))
    after = model.state_dict()
    assert before
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    step(*data(3))
    assert any(not torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_two_growths_do_not_share_a_model_or_an_optimizer():
    one, other = graft(host(), SITES), graft(host(), SITES)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    growth = grow(one, optimizer)
    with pytest.raises(
        InputError, match=r"Sequential is grown by another esper.Growth, .* call finish\(\) of that one"
    ):
        grow(one)
    with pytest.raises(InputError, match="is grown by another"):
        grow(nn.Sequential(one, nn.Identity()))
    with pytest.raises(
        InputError, match=r"SGD is used by another esper\.Growth, .* give each model that grows an optimizer of"
    ):
        grow(other, optimizer)
    growth.finish()
    grow(other, optimizer).finish()
    grow(one, optimizer).finish()


def test_a_model_with_seeds_that_no_growth_holds_is_refused_until_it_is_ungrafted():
    model = graft(host(), SITES)
    growth = grow(model, controller=Script({(0, 0): (Op.GERMINATE, 0, 0, 0, 1, 3)}))
    again = copy.deepcopy(model)
    del growth
    for each in (model, again):
        with pytest.raises(
            InputError, match=r"has seeds of an esper.Growth that was not finished; call esper\.ungraft"
        ):
            grow(each)
    grow(graft(ungraft(model), SITES))


@pytest.mark.parametrize("other", [nn.Linear(4, WIDTH), None], ids=["replaced", "gone"])
def test_a_grafted_submodule_that_was_replaced_is_named(other):
    model = graft(host(), SITES)
    growth = grow(model)
    grafted, model._modules["0"] = model[0], other
    growth.step()
    for call in (growth.step, growth.finish):
        with pytest.raises(
            InputError, match=r"submodule '0' of site '0' was replaced after the model was grafted; put"
        ):
            call()
    model._modules["0"] = grafted
    growth.finish()


def test_nothing_grows_in_inference_mode():
    growth = grow()
    with torch.inference_mode():
        with pytest.raises(InputError, match=r"growth\.step\(\) is called within torch\.inference_mode\(\)"):
            growth.step()
        with pytest.raises(InputError, match=r"esper\.Growth is called within torch\.inference_mode\(\)"):
            grow()
    assert growth.calls == 0


def test_a_network_whose_growth_is_refused_stays_as_it_was():
    model = host()
    with pytest.raises(InputError, match="budget"):
        grow(model, budget=0)
    assert not is_grafted(model)


def test_bad_schedulers_are_refused_by_name():
    class Own(lr_scheduler.LRScheduler):
        def get_lr(self):
            return [group["lr"] for group in self.optimizer.param_groups]

    model = graft(host(), SITES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="str is not a scheduler whose rates for a new group"):
        grow(model, optimizer, scheduler="cosine")
    with pytest.raises(InputError, match="StepLR schedules another optimizer"):
        grow(model, optimizer, scheduler=lr_scheduler.StepLR(torch.optim.SGD(host().parameters()), 3))
    own = Own(optimizer)
    with pytest.raises(InputError, match="Own is not a scheduler whose rates for a new group"):
        grow(model, optimizer, scheduler=own)
    with pytest.raises(InputError, match="a learning rate scheduler that Growth was not given"):
        grow(model, optimizer)


@pytest.mark.parametrize(
    "options", [{"controller": "heurstic"}, {"budget": 1e-6}, {"scaler": 1}, {"probe": [(torch.ones(2, 4), "y")]}]
)
def test_a_growth_that_is_refused_leaves_the_model_as_it_was(options):
    model = host()
    before = {name: (type(part), dict(part._forward_hooks)) for name, part in model.named_modules()}
    with pytest.raises(InputError):
        grow(model, freeze="host", **options)
    assert {name: (type(part), dict(part._forward_hooks)) for name, part in model.named_modules()} == before
    assert all(parameter.requires_grad for parameter in model.parameters())
