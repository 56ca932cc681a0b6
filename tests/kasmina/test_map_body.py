"""Test convolutional hosts and their seeds: what a slot computes, and that a row is the same in any company and mapping."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bodies import empty, set_seed
from esper.kasmina.blueprints import drawn_with
from esper.kasmina.host import SegmentedHost, check_host
from esper.kasmina.lifecycle import doses
from esper.leyline.lifecycle.slots import Kind, SlotSpec, Tap
from esper.leyline.lifecycle.vocabulary import Blend, Stage
from esper.leyline.messages import InputError
from esper.tolaria.stacked.population import shadows
from pictures import HOST, INPUTS, MAPS, map_body
from thinning import crossed


def obvious(body, seeds, env, x, dose):
    """Compute one network, its seeds one after another, as the formulas say."""
    with drawn_with(0):
        host = HOST().to(x.dtype)
    body.host.read(env, host)
    h = x
    for index, segment in enumerate(host.segments):
        before, h = h, segment(h)
        if index >= len(body.slots) or not dose[index]:
            continue
        seed, entry = body.seed_module(seeds, env, index), body.layout.menu[seeds.blueprint[env, index]]
        u = F.adaptive_avg_pool2d({Tap.HERE: h, Tap.BEFORE: before, Tap.INPUT: x}[entry.tap], h.shape[-2:])
        delta = seed.delta(u)
        change = {
            Blend.ADD: lambda delta=delta: delta,
            Blend.GATE: lambda delta=delta, u=u, seed=seed: (
                torch.sigmoid(seed.gate(u.mean((2, 3))))[:, :, None, None] * delta
            ),
            Blend.MULTIPLY: lambda delta=delta, h=h: h * torch.tanh(delta),
        }[Blend(seeds.blend[env, index])]()
        h = h + dose[index] * change
    return h


def populated(rows, blend=Blend.ADD, *, first=0, **options):
    """Plant every map blueprint in turn, one in each slot of each row; row r is the same in any population."""
    body = map_body(rows, **options)
    seeds = empty(body)
    for env in range(rows):
        for slot in range(2):
            which = (2 * (env + first) + slot) % len(MAPS)
            seeds = set_seed(body, seeds, env, slot, which, blend=blend, alpha=0.75, key=10 * (env + first) + slot)
    return body, seeds


@pytest.mark.parametrize("blend", Blend)
@pytest.mark.parametrize("mapping", ["auto", "vmap"])
def test_a_network_with_seeds_computes_what_the_formulas_say(blend, mapping):
    body, seeds = populated(5, blend, dtype=torch.float64, mapping=mapping)
    x = torch.randn(5, 7, *INPUTS, dtype=torch.float64)
    output = body.run(x, body.route(doses(seeds), seeds)).output
    for env in range(5):
        torch.testing.assert_close(output[env], obvious(body, seeds, env, x[env], doses(seeds)[env]))


def gradients(body):
    return [body.host.columns["gradient"], *(body.stacks[at].columns["gradient"] for at in sorted(body.stacks))]


@pytest.mark.parametrize("blend", Blend)
def test_the_mappings_agree_in_outputs_and_gradients(blend):
    found = []
    for mapping in ("loop", "vmap", "auto"):
        body, seeds = populated(4, blend, dtype=torch.float64, mapping=mapping)
        with drawn_with(1):
            x = torch.randn(4, 7, *INPUTS, dtype=torch.float64)
        for part in body.parts:
            output = body.run(x[part], body.route(doses(seeds), seeds, part=part)).output
            output.square().sum().backward()
        found.append((gradients(body), output[-1]))
    for other, last in found[1:]:
        torch.testing.assert_close(last, found[0][1], rtol=1e-10, atol=1e-12)
        for got, want in zip(other, found[0][0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("batch", "blend"), crossed([1, 7, 64], list(Blend)))
def test_a_row_is_bitwise_the_same_in_any_company(batch, blend):
    with drawn_with(1):
        x = torch.randn(5, batch, *INPUTS)

    def trained(rows):
        body, seeds = populated(rows, blend)
        outputs = []
        for part in body.parts[:rows]:
            output = body.run(x[part], body.route(doses(seeds), seeds, part=part)).output
            output.square().sum().backward()
            outputs.append(output.detach())
        rows_of = {env: [] for env in range(rows)}
        for at, envs in sorted(body.envs.items()):
            for row, env in enumerate(envs.tolist()):
                rows_of[env].append(body.stacks[at].columns["gradient"][row])
        return torch.cat(outputs), body.host.columns["gradient"], rows_of

    whole = trained(5)
    for rows in (1, 2, 3):
        output, host, seeds = trained(rows)
        assert torch.equal(output, whole[0][:rows])
        assert torch.equal(host[:rows], whole[1][:rows])
        for env in range(rows):
            assert all(map(torch.equal, seeds[env], whole[2][env]))


def test_parts_of_a_pass_are_the_whole_pass_with_its_branches():
    body, seeds = populated(3)
    seeds.stage[:, 1] = Stage.TRAINING
    body.arrange(seeds)
    x, real, asked = torch.randn(3, 7, *INPUTS), doses(seeds), shadows(seeds)
    whole = body.run(x, body.route(real, seeds, asked))
    assert len(body.parts) == 3
    for part in body.parts:
        inside, places = asked.within(part)
        piece = body.run(x[part], body.route(real, seeds, inside, part=part))
        assert torch.equal(piece.output, whole.output[part])
        assert torch.equal(piece.branches, whole.branches[torch.from_numpy(places)])


def test_an_incubating_seed_leaves_the_host_bit_for_bit_alone():
    body, x = map_body(2), torch.randn(2, 7, *INPUTS)
    without = body.run(x, body.route(doses(empty(body)), empty(body))).output
    without.square().sum().backward()
    alone = body.host.columns["gradient"].clone()
    for straight in (False, True):
        body.host.columns["gradient"].zero_()
        body.clear()
        seeds = set_seed(body, empty(body), 0, 0, MAPS.index("bypass-conv-3x3"), stage=Stage.TRAINING)
        route = body.route(doses(seeds), seeds, None if straight else shadows(seeds), train=True, straight=straight)
        result = body.run(x, route)
        total = result.output.square().sum()
        if result.branches is not None:
            total = total + result.branches.square().sum()
        if result.proximal is not None:
            total = total + result.proximal.sum()
        total.backward()
        assert torch.equal(result.output, without)
        assert torch.equal(body.host.columns["gradient"], alone)
        (at,) = [key for key, envs in body.envs.items() if len(envs)]
        assert body.stacks[at].columns["gradient"][0].count_nonzero()


def test_a_host_without_branches_runs_alone_in_convolutions_channels_last():
    body = map_body(2)
    x = torch.randn(2, 5, 9, 8, 2).movedim(-1, 2)
    (stream, _) = body.run(x[:1], body.route(doses(empty(body)), empty(body), part=slice(0, 1)), streams="here").streams
    assert stream.here[0].is_contiguous(memory_format=torch.channels_last)


def test_a_batch_norm_in_a_users_host_keeps_its_own_statistics_in_each_row():
    def host():
        return SegmentedHost(
            [nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), nn.Sequential(nn.Flatten(), nn.LazyLinear(3))],
            [SlotSpec("a", 0, 4, Kind.MAP)],
        )

    made = host().eval()
    made(torch.zeros(2, *INPUTS))
    body = map_body(2, ["conv-light"], host=_Fixed(made))
    body.train(True)
    x = torch.randn(2, 6, *INPUTS)
    body.run(x, body.route(doses(empty(body)), empty(body)))
    alone = copy.deepcopy(made).train()
    body.host.read(1, alone)
    torch.testing.assert_close(
        body.host.columns["buffer.segments.0.1.running_mean"][1], 0.1 * alone.segments[0][0](x[1]).mean((0, 2, 3))
    )


class _Fixed:
    """Makes copies of one host, as a factory."""

    inputs, outputs = INPUTS, 3

    def __init__(self, made):
        self.made = made

    def __call__(self):
        return copy.deepcopy(self.made)


def test_an_image_host_given_vectors_is_refused_in_a_sentence():
    with pytest.raises(
        InputError, match=r"reads images, but an example .* has shape \(144,\); give x as \(N, C, H, W\)"
    ):
        check_host(HOST(), torch.zeros(2, 144), 3)


def test_a_map_slot_that_declares_another_width_is_refused():
    host = HOST()
    host.slots = (SlotSpec("block0", 0, 4, Kind.MAP), *host.slots[1:])
    with pytest.raises(InputError, match=r"'block0' declares width 4 and kind 'map', but .* \(3, 4, 4\)"):
        check_host(host, torch.zeros(2, *INPUTS), 3)


def test_a_seed_at_dose_0_is_not_run():
    body, seeds = populated(2)
    for stack in body.stacks.values():
        stack.columns["value"].fill_(torch.nan)
    x = torch.randn(2, 5, *INPUTS)
    assert body.run(x, body.route(np.zeros((2, 2), np.float32), seeds)).output.isfinite().all()


def test_a_slot_of_an_unknown_kind_is_refused():
    with pytest.raises(InputError, match="slot 'a' is of kind 'sound'; choose one of vector, map"):
        SlotSpec("a", 0, 4, "sound")


def test_a_host_that_runs_alone_is_bitwise_the_host_that_runs_segment_by_segment():
    found = []
    for streams in ("none", "here"):
        body = map_body(3)
        with drawn_with(1):
            x = torch.randn(3, 7, *INPUTS)
        outputs = []
        for part in body.parts:
            output = body.run(x[part], body.route(doses(empty(body)), empty(body), part=part), streams=streams).output
            output.square().sum().backward()
            outputs.append(output.detach())
        found.append((torch.cat(outputs), body.host.columns["gradient"]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
