"""Test blueprints: every built-in one is born well, and a bad one is refused with its reason."""

import itertools

import pytest
import torch
from torch import nn

from bodies import empty, make_body, set_seed
from esper.kasmina.blueprints import BLUEPRINTS, Blueprint, blueprint, check, count, drawn_with, get_blueprint
from esper.kasmina.blueprints.vector import PADDED, MLPSeed
from esper.kasmina.lifecycle import doses
from esper.kasmina.slot import blend_change, sigmoid
from esper.kasmina.stack.layers import zero_linear
from esper.leyline.lifecycle.slots import Kind, Tap
from esper.leyline.lifecycle.vocabulary import Blend, Stage
from esper.leyline.messages import InputError

VECTORS = sorted(name for kind, name in BLUEPRINTS if kind == Kind.VECTOR)
MAPS = sorted(name for kind, name in BLUEPRINTS if kind == Kind.MAP)
BUILT_IN = pytest.mark.parametrize("name", VECTORS)
BLENDS = pytest.mark.parametrize("blend", Blend)


def entry(build, parameters=None, *, name="mine", tap=Tap.HERE):
    """Make a blueprint that declares its true number of parameters unless told otherwise."""
    return Blueprint(name, Kind.VECTOR, tap, build, parameters or (lambda r, w: count(build(r, w))), "")


# Small modules, good and bad.


class Then(nn.Module):
    """Applies a map that starts at 0, and something after it."""

    def __init__(self, reads, writes, last=None):
        super().__init__()
        self.out, self.last = zero_linear(reads, writes), last or nn.Identity()

    def forward(self, u):
        return self.last(self.out(u))


class Idle(Then):
    """Adds a parameter that nothing reads."""

    def __init__(self, reads, writes):
        super().__init__(reads, writes)
        self.idle = nn.Parameter(torch.ones(3))


class Frozen(Then):
    """Multiplies by a parameter that is read and never trained."""

    def __init__(self, reads, writes):
        super().__init__(reads, writes)
        self.scale = nn.Parameter(torch.ones(writes), requires_grad=False)

    def forward(self, u):
        return self.out(u) * self.scale


class Nothing(nn.Module):
    """Changes nothing, and has no parameter."""

    def forward(self, u):
        return u * 0


@pytest.fixture
def registry():
    """Return the table of blueprints, and restore it after the test."""
    before = dict(BLUEPRINTS)
    yield BLUEPRINTS
    BLUEPRINTS.clear()
    BLUEPRINTS.update(before)


# The built-in ones.


@BUILT_IN
def test_a_built_in_blueprint_passes_the_checks_of_its_birth(name):
    check(get_blueprint(name))


@BUILT_IN
def test_a_built_in_blueprint_has_as_many_parameters_as_it_declares(name):
    for width in (1, 3, 16):
        assert count(get_blueprint(name).build(width, width)) == get_blueprint(name).parameters(width, width)


def test_the_built_in_blueprints_are_those_of_a_vector_stream():
    taps = {name: get_blueprint(name).tap for name in VECTORS}
    here = {"affine", "low-rank", "mlp-small", "mlp-large", "gated"}
    assert taps == dict.fromkeys(here, Tap.HERE) | {
        "bypass-linear": Tap.BEFORE, "bypass-mlp": Tap.BEFORE, "bypass-mlp-small": Tap.BEFORE,
        "bypass-mlp-2": Tap.BEFORE, "bypass-mlp-8": Tap.BEFORE,
        "bypass-rank-1": Tap.BEFORE, "bypass-rank-2": Tap.BEFORE, "bypass-rank-4": Tap.BEFORE, "bypass-rank-8": Tap.BEFORE,
        "full-head": Tap.BEFORE, "sparse-rows": Tap.BEFORE, "sparse-head": Tap.BEFORE,
        "skip-mlp": Tap.INPUT,
    }  # fmt: skip


@BUILT_IN
def test_the_change_is_exactly_0_at_birth_and_some_gradient_is_not(name):
    for blend, dtype in itertools.product(Blend, (torch.float32, torch.float64)):
        body, x = make_body(2, [name], dtype=dtype), torch.randn(2, 9, 6, dtype=dtype)
        without = body.run(x, body.route(doses(empty(body)), empty(body))).output
        seeds = set_seed(body, empty(body), 0, 1, 0, blend=blend, jolt=0)
        output = body.run(x, body.route(doses(seeds), seeds)).output
        assert torch.equal(output, without), (blend, dtype)
        output.square().sum().backward()
        (at,) = [key for key, envs in body.envs.items() if len(envs)]
        assert body.stacks[at].columns["gradient"][0].count_nonzero() > 0, (blend, dtype)


@BLENDS
@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_a_change_is_the_formula_of_its_blend(blend, alpha):
    h, delta, gate = torch.randn(3, 5, 4), torch.randn(3, 5, 4), torch.randn(3, 5, 1)
    formula = {
        Blend.ADD: alpha * delta,
        Blend.GATE: alpha * torch.sigmoid(gate) * delta,
        Blend.MULTIPLY: alpha * h * torch.tanh(delta),
    }
    which = torch.full((3, 1, 1), int(blend))
    found, _ = blend_change(h, delta, gate, torch.full((3, 1, 1), alpha), which)
    torch.testing.assert_close(found, formula[blend])


def test_rows_that_blend_in_different_ways_do_not_touch():
    h, delta, gate = torch.randn(3, 5, 4), torch.randn(3, 5, 4), torch.randn(3, 5, 1)
    alpha, blend = torch.tensor([0.3, 0.6, 1.0])[:, None, None], torch.tensor([0, 1, 2])[:, None, None]
    mixed, _ = blend_change(h, delta, gate, alpha, blend)
    for i in range(3):
        rows = slice(i, i + 1)
        assert torch.equal(mixed[rows], blend_change(h[rows], delta[rows], gate[rows], alpha[rows], blend[rows])[0])


def test_an_overflow_in_one_blend_leaves_the_rows_of_another_alone():
    h, delta = torch.ones(2, 3, 2), torch.ones(2, 3, 2)
    gate, blend = torch.tensor([torch.nan, 0.0])[:, None, None].expand(2, 3, 1), torch.tensor([0, 1])[:, None, None]
    assert blend_change(h, delta, gate, torch.ones(2, 1, 1), blend)[0].isfinite().all()


def test_a_key_draws_what_a_manual_seed_draws_without_the_stack_that_torch_formats_for_it(monkeypatch):
    before = torch.manual_seed(5).get_state()
    expected = torch.randn(3)
    torch.default_generator.set_state(before)
    monkeypatch.setattr("traceback.format_stack", lambda: pytest.fail("a stack was formatted"))
    with drawn_with(5):
        assert torch.equal(torch.randn(3), expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_our_sigmoid_is_the_sigmoid():
    x = torch.linspace(-40, 40, 801, dtype=torch.float64)
    torch.testing.assert_close(sigmoid(x), torch.sigmoid(x), rtol=1e-9, atol=1e-15)


# What is refused.


def refusal(build, **declared):
    with pytest.raises(InputError) as error:
        check(entry(build, **declared))
    sentence = str(error.value)
    assert sentence.startswith("blueprint 'mine' ")
    assert "\n" not in sentence
    return sentence


def test_a_small_good_blueprint_passes():
    check(entry(Then))


def test_a_blueprint_that_changes_the_shape_is_refused():
    assert "returns (16, 6) where the stream is (16, 5)" in refusal(lambda r, w: Then(r, w + 1))


def test_a_blueprint_that_does_not_take_what_it_reads_is_refused():
    assert "cannot run on (16, 5)" in refusal(lambda r, w: Then(r + 1, w))


def test_a_blueprint_that_changes_the_stream_at_birth_is_refused():
    assert "changes the stream at birth" in refusal(nn.Linear)


def test_a_blueprint_that_gives_nan_at_birth_is_refused():
    class Divided(Then):
        def forward(self, u):
            return self.out(u) / 0

    assert "changes the stream at birth" in refusal(Divided)


@pytest.mark.parametrize("last", [nn.ReLU(), nn.Threshold(0.5, 0.0)])
def test_a_blueprint_that_is_dead_at_birth_is_refused(last):
    assert "is dead at birth" in refusal(lambda r, w: Then(r, w, last))


def test_a_blueprint_without_a_gradient_is_dead_at_birth():
    class Detached(Then):
        def forward(self, u):
            return self.out(u).detach()

    assert "is dead at birth" in refusal(Detached)


def test_a_blueprint_without_parameters_is_dead_at_birth():
    assert "is dead at birth" in refusal(lambda r, w: Nothing())


def test_a_blueprint_that_declares_a_wrong_number_of_parameters_is_refused():
    sentence = refusal(Then, parameters=lambda r, w: r * w)
    assert "has 30 parameters at widths (5, 5), but declares 25" in sentence


def test_a_count_that_is_true_at_one_width_alone_is_refused():
    assert "at widths (8, 8)" in refusal(Then, parameters=lambda r, w: 30)


@pytest.mark.parametrize(("build", "name"), [(Idle, "idle"), (Frozen, "scale")])
def test_a_parameter_that_never_moves_is_refused_by_name(build, name):
    assert f"never moves {name};" in refusal(build)


@pytest.mark.parametrize("kind", PADDED)
def test_units_that_a_stack_pads_stay_at_exactly_0(kind):
    u, pull = torch.randn(16, 5), torch.randn(16, 8)
    small, wide = kind(5, 8, 2), kind(5, 8, 5)
    corners = {name: tuple(slice(0, size) for size in own.shape) for name, own in small.named_parameters()}
    with torch.no_grad():
        for name, own in wide.named_parameters():
            own.zero_()
            own[corners[name]] = small.get_parameter(name)
    optimizer = torch.optim.AdamW(wide.parameters(), lr=1e-2, weight_decay=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        (wide(u) - pull).square().mean().backward()
        optimizer.step()
    for name, own in wide.named_parameters():
        rest = own.detach().clone()
        rest[corners[name]] = 0
        assert own.count_nonzero()
        assert not rest.count_nonzero()


@pytest.mark.parametrize("tap", Tap)
def test_a_skip_alone_is_checked_at_widths_that_differ(tap):
    widths = []

    def build(reads, writes):
        widths.append((reads, writes))
        return Then(reads, writes)

    check(entry(build, tap=tap, parameters=lambda r, w: r * w + w))
    assert len(widths) >= 2
    assert any(r != w for r, w in widths) == (tap == Tap.INPUT)


def test_a_check_leaves_the_global_generator_as_it_was():
    before = torch.get_rng_state()
    check(get_blueprint("mlp-large"))
    assert torch.equal(torch.get_rng_state(), before)


# The table.


def test_the_decorator_registers_a_blueprint_of_ones_own(registry):
    @blueprint("mine", tap="before", parameters=lambda r, w: r * w + w)
    def mine(reads, writes):
        """Map linearly."""
        return Then(reads, writes)

    found = get_blueprint("mine")
    assert (found.name, found.kind, found.tap, found.summary) == ("mine", Kind.VECTOR, Tap.BEFORE, "Map linearly.")
    assert found.build is mine
    assert registry[Kind.VECTOR, "mine"] is found


def test_a_registered_blueprint_grows_like_a_built_in_one(registry):
    @blueprint("mine", parameters=lambda r, w: r * w + w)
    def mine(reads, writes):
        return Then(reads, writes)

    x = torch.randn(2, 9, 6)
    body = make_body(2, ["mlp-small", "mine"])
    seeds = set_seed(body, empty(body), 0, 0, 1, stage=Stage.HOLDING)
    without = body.run(x, body.route(doses(empty(body)), seeds)).output
    grown = body.run(x, body.route(doses(seeds), seeds)).output
    assert not torch.equal(grown[0], without[0])
    assert torch.equal(grown[1], without[1])


@pytest.mark.parametrize("name", ["affine", "mlp-small"])
def test_a_name_that_is_taken_is_refused(registry, name):
    before = registry[Kind.VECTOR, name]
    with pytest.raises(InputError, match=f"a blueprint named '{name}' is registered already; choose another name"):
        blueprint(name, parameters=lambda r, w: r * w + w)(Then)
    assert registry[Kind.VECTOR, name] is before


def test_a_blueprint_that_fails_a_check_is_not_registered(registry):
    with pytest.raises(InputError, match="dead at birth"):
        blueprint("mine", parameters=lambda r, w: r * w + w)(lambda r, w: Then(r, w, nn.ReLU()))
    assert (Kind.VECTOR, "mine") not in registry


def test_an_unknown_tap_is_refused(registry):
    with pytest.raises(InputError, match=r"tap 'behind'.*here, before, input"):
        blueprint("mine", tap="behind", parameters=lambda r, w: r * w + w)(Then)


@pytest.mark.parametrize(("given", "meant"), [("mlp-smal", "mlp-small"), ("bypass_mlp", "bypass-mlp")])
def test_an_unknown_name_suggests_the_nearest(given, meant):
    with pytest.raises(InputError, match=f"unknown blueprint '{given}'; did you mean '{meant}'?"):
        get_blueprint(given)


def test_a_name_that_is_like_no_other_lists_them_all():
    with pytest.raises(InputError) as error:
        get_blueprint("zzz")
    assert all(name in str(error.value) for _, name in BLUEPRINTS)


def test_a_module_drawn_with_a_key_is_the_same_every_time():
    def draw(seed):
        with drawn_with(seed):
            return nn.utils.parameters_to_vector(MLPSeed(4, 4, 3).parameters())

    assert torch.equal(draw(5), draw(5))
    assert not torch.equal(draw(5), draw(6))
