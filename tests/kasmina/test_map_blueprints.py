"""Map blueprints: born well at any resolution, and counted truly."""

import itertools

import pytest
import torch
from torch import nn

from bodies import empty, set_seed
from esper.kasmina.blueprints import BLUEPRINTS, Blueprint, blueprint, check, count, drawn_with, get_blueprint
from esper.kasmina.blueprints.map import Norm, conv, zero_conv
from esper.kasmina.lifecycle import doses
from esper.kasmina.stack.layers import zero_linear
from esper.leyline.lifecycle.slots import Kind, Tap
from esper.leyline.lifecycle.vocabulary import Blend
from esper.leyline.messages import InputError
from esper.tasks.hosts import CNN
from pictures import MAPS, map_body

EVERY = pytest.mark.parametrize("name", MAPS)


@EVERY
def test_a_map_blueprint_passes_the_checks_of_its_birth(name):
    check(get_blueprint(name, Kind.MAP))


@EVERY
def test_a_map_blueprint_has_as_many_parameters_as_it_declares(name):
    entry = get_blueprint(name, Kind.MAP)
    for width in (1, 3, 16):
        assert count(entry.build(width, width)) == entry.parameters(width, width)


def test_the_map_blueprints_are_those_of_the_design_with_the_taps_they_read():
    taps = {name: get_blueprint(name, Kind.MAP).tap for name in MAPS}
    here = {"norm", "squeeze-excite", "depthwise-separable", "bottleneck", "conv-light", "conv-heavy"}
    here |= {"low-rank", "mlp-small"}
    before = {"bypass-mlp-small", "bypass-mlp-3x3", *(f"bypass-rank-{rank}" for rank in (1, 2, 4, 8))}
    assert taps == dict.fromkeys(here, Tap.HERE) | dict.fromkeys(before, Tap.BEFORE) | {
        "bypass-conv-1x1": Tap.BEFORE, "bypass-conv-3x3": Tap.BEFORE, "skip-conv": Tap.INPUT,
    }  # fmt: skip


@EVERY
def test_a_newborn_changes_nothing_and_can_learn_at_any_resolution(name):
    for resolution, batch in itertools.product(((1, 1), (2, 2), (3, 5), (8, 8)), (1, 7)):
        with drawn_with(3):
            module, u = get_blueprint(name, Kind.MAP).build(4, 4), torch.randn(batch, 4, *resolution)
        delta = module(u)
        assert delta.shape == u.shape
        assert not delta.count_nonzero()
        (delta - u).square().sum().backward()
        if (name, resolution) != ("norm", (1, 1)):
            assert any(p.grad is not None and p.grad.count_nonzero() for p in module.parameters()), resolution


@EVERY
def test_twice_the_first_step_makes_twice_the_change(name):
    changes = []
    for rate in (1e-4, 2e-4):
        with drawn_with(3):
            module, u, pull = get_blueprint(name, Kind.MAP).build(4, 4).double(), *torch.randn(2, 16, 4, 6, 6).double()
        (module(u) - pull).square().mean().backward()
        torch.optim.SGD(module.parameters(), lr=rate).step()
        changes.append(module(u))
    torch.testing.assert_close(changes[1], 2 * changes[0], rtol=1e-6, atol=1e-12)


@EVERY
def test_an_example_does_not_depend_on_its_batch(name):
    with drawn_with(3):
        module, u = get_blueprint(name, Kind.MAP).build(4, 4).double(), torch.randn(6, 4, 5, 5, dtype=torch.float64)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    torch.testing.assert_close(module(u)[2:3], module(u[2:3]))


@EVERY
def test_the_change_in_a_network_is_exactly_0_at_birth_and_some_gradient_is_not(name):
    for blend, inputs in itertools.product(Blend, ((2, 9, 8), (2, 16, 16))):
        host = CNN(inputs=inputs, channels=(3, 5), hidden=(2, 3), outputs=3)
        body, x = map_body(2, [name], host=host), torch.randn(2, 7, *inputs)
        without = body.run(x, body.route(doses(empty(body)), empty(body))).output
        seeds = set_seed(body, empty(body), 0, 1, 0, blend=blend, jolt=0)
        output = body.run(x, body.route(doses(seeds), seeds)).output
        assert torch.equal(output, without), (blend, inputs)
        output.square().sum().backward()
        (at,) = [key for key, envs in body.envs.items() if len(envs)]
        assert body.stacks[at].columns["gradient"][0].count_nonzero() > 0, (blend, inputs)


def test_a_norm_is_that_of_torch_with_one_group():
    module, u = Norm(4), torch.randn(5, 4, 3, 3)
    nn.init.ones_(module.scale)
    torch.testing.assert_close(module(u), nn.functional.group_norm(u, 1))


class Behind(nn.Module):
    """Convolves with weights that start at 0, and applies something behind."""

    def __init__(self, reads, writes, last):
        super().__init__()
        self.inner, self.out, self.last = conv(reads, writes, 3), zero_conv(writes, writes, 3), last

    def forward(self, u):
        return self.last(self.out(self.inner(u)))


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (lambda w: nn.ReLU(), "is dead at birth"),
        (lambda w: nn.GroupNorm(1, w), "does not change in proportion to its first step"),
    ],
)
def test_what_stops_or_blows_up_the_first_step_is_refused(last, reason):
    entry = Blueprint(
        "mine", Kind.MAP, Tap.HERE, lambda r, w: Behind(r, w, last(w)), lambda r, w: count(Behind(r, w, last(w))), ""
    )
    with pytest.raises(InputError, match=reason):
        check(entry)


def test_a_map_blueprint_on_a_vector_host_is_refused_with_its_kind():
    with pytest.raises(InputError, match=r"'conv-light' is for map streams; .*mlp-small.* are for vector streams"):
        get_blueprint("conv-light", Kind.VECTOR)


@pytest.fixture
def registry():
    """Return the table of blueprints, and restore it after the test."""
    before = dict(BLUEPRINTS)
    yield BLUEPRINTS
    BLUEPRINTS.clear()
    BLUEPRINTS.update(before)


def test_blueprints_of_two_kinds_may_share_a_name_which_means_that_of_the_slots_kind(registry):
    blueprint("mine", kind="map", parameters=lambda r, w: w * (r + 1))(lambda r, w: zero_conv(r, w, 1))
    blueprint("mine", parameters=lambda r, w: w * (r + 1))(zero_linear)
    for kind in (Kind.VECTOR, Kind.MAP):
        assert get_blueprint("mine", kind).kind == kind
    with pytest.raises(InputError, match="a blueprint named 'mine' is registered already"):
        blueprint("mine", kind="map", parameters=lambda r, w: w * (r + 1))(lambda r, w: zero_conv(r, w, 1))


def test_an_unknown_kind_is_refused():
    with pytest.raises(InputError, match=r"is of kind 'sound'; choose one of vector, map"):
        blueprint("mine", kind="sound", parameters=lambda r, w: 0)(zero_linear)
