"""Test sequence blueprints: born well at any length, counted truly, and blind to later positions."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from bodies import empty, set_seed
from esper.kasmina.blueprints import BLUEPRINTS, blueprint, check, count, drawn_with, get_blueprint
from esper.kasmina.blueprints.sequence import Attention, CausalConv, FullHead, NormedSparseHead, NormSeed
from esper.kasmina.blueprints.vector import SparseRows
from esper.kasmina.graft.find_sites import find_sites
from esper.kasmina.host import SegmentedHost, check_host
from esper.kasmina.lifecycle import doses
from esper.kasmina.slot import Seed, slot_output
from esper.kasmina.stack.invariance import blends_that_vary
from esper.kasmina.stack.layers import zero_linear
from esper.kasmina.stack.rows import Stack
from esper.leyline.config.tree import build_config
from esper.leyline.lifecycle.slots import Kind, Sequence, SlotSpec, Tap
from esper.leyline.lifecycle.vocabulary import Blend
from esper.leyline.messages import InputError
from esper.runs.live.growth import growth_menu
from esper.tasks.hosts import Transformer
from sequences import HOST, SEQUENCES, CausalHost, sequence_body

EVERY = pytest.mark.parametrize("name", SEQUENCES)


def drawn(name, width=4, key=3):
    """Make a seed whose parameters are all away from their birth."""
    with drawn_with(key):
        seed = Seed(get_blueprint(name, Kind.SEQUENCE).build(width, width), width)
        for parameter in seed.parameters():
            nn.init.normal_(parameter)
    return seed


@EVERY
def test_a_sequence_blueprint_passes_the_checks_of_its_birth(name):
    check(get_blueprint(name, Kind.SEQUENCE))


@EVERY
def test_a_sequence_blueprint_has_as_many_parameters_as_it_declares(name):
    entry = get_blueprint(name, Kind.SEQUENCE)
    for width in (1, 3, 64):
        assert count(entry.build(width, width)) == entry.parameters(width, width)


def test_the_sequence_blueprints_read_the_stream_and_the_bypasses_what_entered_the_segment():
    taps = {name: get_blueprint(name, Kind.SEQUENCE).tap for name in SEQUENCES}
    here = {"norm", "low-rank", "mlp-small", "mlp-large", "gated", "causal-conv", "attention"}
    assert taps == {name: Tap.HERE if name in here else Tap.BEFORE for name in SEQUENCES}
    assert len(SEQUENCES) == len(here) + 10
    assert all(get_blueprint(name, Kind.SEQUENCE).causal for name in SEQUENCES)


@EVERY
def test_a_newborn_changes_nothing_and_can_learn_at_any_length(name):
    for length, batch in itertools.product((1, 2, 7, 64), (1, 7)):
        with drawn_with(3):
            module, u = get_blueprint(name, Kind.SEQUENCE).build(4, 4), torch.randn(batch, length, 4)
        delta = module(u)
        assert delta.shape == u.shape
        assert not delta.count_nonzero()
        (delta - u).square().sum().backward()
        assert any(p.grad is not None and p.grad.count_nonzero() for p in module.parameters())


@EVERY
def test_other_values_at_later_positions_leave_earlier_ones_exactly_alone(name):
    seed = drawn(name)
    for blend, length in itertools.product(Blend, (2, 5, 8)):
        h, u, other = torch.randn(3, 6, length, 4)
        y = slot_output(Sequence, h, u, seed, 0.75, blend)
        for first in range(1, length):
            h2, u2 = h.clone(), u.clone()
            h2[:, first:], u2[:, first:] = other[:, first:], 3 * other[:, first:]
            z = slot_output(Sequence, h2, u2, seed, 0.75, blend)
            assert torch.equal(y[:, :first], z[:, :first]), (blend, length)
            assert not torch.equal(y[:, first:], z[:, first:]), (blend, length)


@EVERY
def test_an_example_does_not_depend_on_its_batch(name):
    module, u = drawn(name).delta.double(), torch.randn(6, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(module(u)[2:3], module(u[2:3]))


@EVERY
def test_the_change_in_a_network_is_exactly_0_at_birth_and_some_gradient_is_not(name):
    for blend in Blend:
        body, x = sequence_body(2, [name]), torch.randn(2, 5, *HOST.inputs)
        without = body.run(x, body.route(doses(empty(body)), empty(body))).output
        seeds = set_seed(body, empty(body), 0, 1, 0, blend=blend, jolt=0)
        output = body.run(x, body.route(doses(seeds), seeds)).output
        assert torch.equal(output, without), blend
        output.square().sum().backward()
        (at,) = [key for key, envs in body.envs.items() if len(envs)]
        assert body.stacks[at].columns["gradient"][0].count_nonzero() > 0, blend


def test_a_norm_is_the_layer_norm_of_torch():
    module, u = NormSeed(4), torch.randn(5, 3, 4)
    nn.init.ones_(module.scale)
    torch.testing.assert_close(module(u), nn.functional.layer_norm(u, (4,)))


def test_a_causal_convolution_is_that_of_torch_padded_in_front():
    module, u = CausalConv(3, 4), torch.randn(5, 6, 3)
    nn.init.normal_(module.taps)
    weight = module.taps.detach()[:, 0, 0].flip(0).T[:, None]  # torch's last weight is that of the newest position
    expected = nn.functional.conv1d(nn.functional.pad(u.mT, (3, 0)), weight, groups=3).mT
    torch.testing.assert_close(module(u), expected)


def test_attention_is_that_of_torch():
    module, u = Attention(4, 4, 8), torch.randn(5, 7, 4)
    nn.init.normal_(module.out.weight)
    q, k, v = module.query(u), module.key(u), module.value(u)
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(module(u), module.out(mixed))


# The last bit of a row must not depend on its neighbours, at widths and lengths that are no multiples of a word too.
@pytest.mark.parametrize("width", [1, 12, *(pytest.param(width, marks=pytest.mark.slow) for width in (2, 4, 16))])
def test_no_sequence_blueprint_depends_on_neighbours_under_any_blend(width):
    assert [name for name in SEQUENCES if blends_that_vary(BLUEPRINTS[Kind.SEQUENCE, name], width)] == []


# What looks ahead.


class NextPosition(nn.Module):
    """Applies a linear map to the position behind each."""

    def __init__(self, reads, writes):
        super().__init__()
        self.out = zero_linear(reads, writes)

    def forward(self, u):
        return self.out(u.roll(-1, 1))


@pytest.fixture
def registry():
    """Return the table of blueprints, and restore it after the test."""
    before = dict(BLUEPRINTS)
    yield BLUEPRINTS
    BLUEPRINTS.clear()
    BLUEPRINTS.update(before)


def test_a_blueprint_that_looks_ahead_is_refused_with_the_positions(registry):
    with pytest.raises(
        InputError, match=r"'ahead' looks ahead: its change at position 0 of 6 depends on positions from 1 on"
    ):
        blueprint("ahead", kind="sequence", parameters=lambda r, w: w * (r + 1))(NextPosition)
    assert (Kind.SEQUENCE, "ahead") not in registry


def test_a_blueprint_that_says_that_it_looks_ahead_fits_a_slot_that_is_not_causal_alone(registry):
    blueprint("ahead", kind="sequence", parameters=lambda r, w: w * (r + 1), causal=False)(NextPosition)
    for causal in (True, False):
        body = sequence_body(2, ["mlp-small", "ahead"], host=CausalHost(causal=causal))
        assert body.layout.fits.tolist() == [[True, not causal]] * 2


def test_a_bypass_around_a_segment_that_shortens_a_causal_sequence_does_not_fit():
    def host(causal):
        halved = nn.Sequential(nn.Linear(2, 4), Halved())
        slots = [SlotSpec("a", 0, 4, "sequence", causal=causal)]
        return SegmentedHost([halved, nn.Sequential(nn.Flatten(), nn.Linear(12, 3))], slots)

    for causal in (True, False):
        made = CausalHostOf(lambda causal=causal: host(causal))
        body = sequence_body(2, ["bypass-mlp", "mlp-small"], host=made)
        assert body.layout.fits.tolist() == [[not causal, True]]


class Halved(nn.Module):
    """Keeps every second position: (B, L, C) -> (B, L // 2, C)."""

    def forward(self, x):
        return x[..., 1::2, :]


class CausalHostOf:
    """Makes a host for sequences of 7 positions, as a factory."""

    inputs, outputs = HOST.inputs, 3

    def __init__(self, make):
        self.make = make

    def __call__(self):
        return self.make()


def test_a_causal_slot_behind_a_segment_that_looks_ahead_is_refused():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(1, keepdim=True)

    slots = [SlotSpec("a", 0, 2, "sequence", causal=True)]
    host = SegmentedHost([Centred(), nn.Sequential(nn.Flatten(), nn.Linear(14, 3))], slots)
    with pytest.raises(InputError, match="slot 'a' is causal, but its stream depends on later positions"):
        check_host(host, torch.randn(4, *HOST.inputs), 3)
    check_host(HOST(), torch.randn(4, *HOST.inputs), 3)


def test_a_causal_slot_of_another_kind_is_refused():
    with pytest.raises(InputError, match="slot 'a' is causal and of kind 'vector'; leave causal out"):
        SlotSpec("a", 0, 4, causal=True)


def test_a_site_of_a_causal_slot_is_causal():
    assert [slot.causal for slot in HOST().slots] == [True, True]


# Heads and rows.


def test_a_full_head_turns_the_head_of_a_transformer_into_any_other():
    host, other, u = Transformer(9, 8, 1, 2, 6)(), Transformer(9, 8, 1, 2, 6)(), torch.randn(3, 6, 8)
    head, target = host.segments[-1], other.segments[-1]
    for part in (head.norm, target.norm):
        nn.init.normal_(part.scale)
        nn.init.normal_(part.shift)
    module = FullHead(8, 9)
    with torch.no_grad():
        module.out.weight.copy_(target.read.weight * target.norm.scale[0, 0] - head.read.weight * head.norm.scale[0, 0])
        module.out.bias.copy_(target.read.weight @ target.norm.shift[0, 0] - head.read.weight @ head.norm.shift[0, 0])
    torch.testing.assert_close(head(u) + module(u), target(u))


@pytest.mark.parametrize("build", [SparseRows, NormedSparseHead])
def test_chosen_rows_are_those_with_the_largest_gradient_and_compute_as_a_dense_map_with_the_others_0(build):
    module, u, pull = build(6, 7, 3), torch.randn(5, 4, 6), torch.randn(5, 4, 7)
    dense = nn.Linear(6, 7, bias=build is NormedSparseHead)
    for parameter in dense.parameters():
        nn.init.zeros_(parameter)
    read = nn.functional.layer_norm(u, (6,)) if build is NormedSparseHead else u
    (dense(read) * pull).sum().backward()  # the gradient of this loss for the stream is `pull`
    norms = sum(p.grad.square().flatten(1).sum(1) if p.dim() > 1 else p.grad.square() for p in dense.parameters())
    if build is SparseRows:
        norms = dense.weight.grad.square().sum(0)
    module.choose(u.flatten(0, 1), pull.flatten(0, 1))
    assert module.chosen.tolist() == sorted(norms.argsort(descending=True)[:3].tolist())
    nn.init.normal_(module.out.weight)
    with torch.no_grad():
        if build is SparseRows:
            dense.weight[:, module.chosen] = module.out.weight
        else:
            nn.init.normal_(module.out.bias)
            dense.weight[module.chosen], dense.bias[module.chosen] = module.out.weight, module.out.bias
    torch.testing.assert_close(module(u), dense(read))


def test_equal_gradients_choose_the_first_rows_and_fewer_features_than_rows_choose_all():
    module = SparseRows(5, 2, 3)
    module.choose(torch.ones(4, 5), torch.ones(4, 2))
    assert module.chosen.tolist() == [0, 1, 2]
    assert SparseRows(2, 5, 8).chosen.tolist() == [0, 1]
    assert NormedSparseHead(5, 2, 8).chosen.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["sparse-rows", "sparse-head"])
def test_stacked_rows_compute_as_each_alone_and_keep_what_they_chose(name):
    entry = get_blueprint(name, Kind.SEQUENCE)
    seeds = [drawn(name, 12, key=key).delta for key in range(3)]
    stack = Stack(entry.build(12, 12), 4)
    for row, module in enumerate(seeds):
        module.choose(torch.randn(9, 12), torch.randn(9, 12))
        stack.write(row, module)
    assert len({tuple(module.chosen.tolist()) for module in seeds}) == 3
    u = torch.randn(3, 5, 6, 12)
    for rows in (slice(0, 3), np.array([2, 0, 1])):
        order = range(3)[rows] if isinstance(rows, slice) else rows
        y = stack(u, rows)
        for place, row in enumerate(order):
            torch.testing.assert_close(y[place], seeds[row](u[place]))
    stack.arrange(np.array([2, 0]))
    assert torch.equal(stack.read(0, entry.build(12, 12)).chosen, seeds[2].chosen)


def test_a_loop_of_ones_own_refuses_rows_that_are_chosen_from_a_task():
    sites = find_sites(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)), torch.zeros(2, 5, 4))
    with pytest.raises(InputError, match="'sparse-rows' chooses its rows from the training examples of a task"):
        growth_menu(sites, build_config({"blueprints": ["bypass-mlp", "sparse-rows"]}))
