"""Test slots whose bypasses go around several segments: what they compute, in any company, and what is exported of them."""

import copy
import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import esper
from bodies import empty, planted_body, set_seed
from esper.kasmina.blueprints import drawn_with
from esper.kasmina.host import CutHost, steps_of
from esper.kasmina.lifecycle import doses
from esper.kasmina.network.drawing import describe, draw
from esper.kasmina.network.export import grown_network, load_network, read_topology, save_network
from esper.kasmina.network.grown_network import as_host, lost_slots
from esper.kasmina.network.static import Skipped, WidenedHosts, widened
from esper.kasmina.stack.plan import Branches
from esper.leyline.data.task import Interface
from esper.leyline.lifecycle.slots import Kind, SlotSpec, Tap
from esper.leyline.lifecycle.vocabulary import Blend, Stage
from esper.leyline.messages import InputError
from esper.tolaria.stacked.population import shadows
from spans import MENUS, SpannedHost, linear, spanned_task
from thinning import crossed, thinned

KINDS = pytest.mark.parametrize("kind", thinned(MENUS, 2))
SLOTS = {0: 0, 1: 2, 2: 3, 3: 4}
STARTS = (0, 1, 0, 4)
"""The segment behind which each slot lies, and the first segment that its bypasses go around."""


def populated(kind, rows=5, blend=Blend.ADD, *, stage=Stage.HOLDING, jolt=0.3, dtype=torch.float32, **options):
    """Plant a seed in each slot of each row, of each blueprint in turn; row r is the same in any population."""
    menu = MENUS[kind]
    body = planted_body(SpannedHost(kind), kind, rows, menu, dtype, **options)
    seeds = empty(body)
    for env in range(rows):
        for slot in range(len(body.slots)):
            which, key = (env + slot) % len(menu), 10 * env + slot
            seeds = set_seed(body, seeds, env, slot, which, blend=blend, alpha=0.75, key=key, stage=stage, jolt=jolt)
    return body, seeds


def host_of(body, kind, env):
    with drawn_with(0):
        host = SpannedHost(kind)().to(body.dtype)
    body.host.read(env, host)
    return host


def obvious(body, seeds, kind, env, x, dose):
    """Compute one network, its seeds one after another, as the formulas say."""
    entered, h = [], x
    for index, segment in enumerate(host_of(body, kind, env).segments):
        entered.append(h)
        h = segment(h)
        for slot, after in SLOTS.items():
            if after != index or not dose[slot]:
                continue
            seed, entry = body.seed_module(seeds, env, slot), body.layout.menu[seeds.blueprint[env, slot]]
            stream = body.layout.streams[slot]
            u = stream.fitted({Tap.HERE: h, Tap.BEFORE: entered[STARTS[slot]], Tap.INPUT: x}[entry.tap], h)
            delta = seed.delta(u)
            change = {
                Blend.ADD: delta,
                Blend.GATE: stream.spread(torch.sigmoid(seed.gate(stream.gated(u)))) * delta,
                Blend.MULTIPLY: h * torch.tanh(delta),
            }[Blend(seeds.blend[env, slot])]
            h = h + dose[slot] * change
    return h


def examples(kind, rows, batch=4, dtype=torch.float32):
    return torch.randn(rows, batch, *SpannedHost(kind).inputs, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize(("kind", "blend"), crossed(list(MENUS), list(Blend)))
def test_networks_and_branches_from_every_slot_compute_what_the_formulas_say(kind, blend):
    body, seeds = populated(kind, blend=blend, dtype=torch.float64)
    x = examples(kind, 5, dtype=torch.float64)
    env, slot = map(np.ravel, np.indices((5, len(body.slots))))
    dose = doses(seeds)[env]
    dose[np.arange(len(env)), slot] = 0.25 * (env % 2)  # a seed that is gone, or one at another dose
    branches, _ = Branches.at(env, slot, dose)
    result = body.run(x, body.route(doses(seeds), seeds, branches))
    for row in range(5):
        torch.testing.assert_close(result.output[row], obvious(body, seeds, kind, row, x[row], doses(seeds)[row]))
    for of, own, output in zip(branches.env, branches.dose, result.branches, strict=True):
        torch.testing.assert_close(output, obvious(body, seeds, kind, of, x[of], own))


@pytest.mark.parametrize(
    ("kind", "options"), crossed(list(MENUS), [{}, {"recomputed": True}, {"mapping": "loop"}]), ids=str
)
def test_a_population_trains_as_each_of_its_networks_does_alone(kind, options):
    body, seeds = populated(kind, dtype=torch.float64, **options)
    seeds.stage[:5] = Stage.FOSSILIZED
    x = examples(kind, 5, dtype=torch.float64)
    networks = [grown_network(SpannedHost(kind), body, seeds, env, Interface(x.shape[2:]))[0] for env in range(5)]
    stacks = [body.host, *body.stacks.values()]
    for _ in range(3):
        for stack in stacks:
            stack.columns["gradient"].zero_()
        output = body.run(x, body.route(doses(seeds), seeds)).output
        output.square().mean((1, 2)).sum().backward()
        with torch.no_grad():
            for stack in stacks:
                stack.columns["value"] -= 0.1 * stack.columns["gradient"]
        for env, network in enumerate(networks):
            network.zero_grad()
            y = network(x[env])
            torch.testing.assert_close(output[env], y)
            y.square().mean().backward()
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter -= 0.1 * parameter.grad
    for env, network in enumerate(networks):
        for name, parameter in network.segments.named_parameters(prefix="segments"):
            torch.testing.assert_close(body.host.parameter(name, "gradient")[env], parameter.grad)
        for slot, seed in enumerate(network.seeds):
            at = slot, int(body.layout.form_of[slot, seeds.blueprint[env, slot]])
            row = int(np.flatnonzero(body.envs[at] == env)[0])
            for name, parameter in seed.named_parameters():
                corner = tuple(slice(0, size) for size in parameter.shape)
                found = body.stacks[at].parameter(name, "gradient")[row][corner]
                torch.testing.assert_close(found, parameter.grad)


@pytest.mark.parametrize(("kind", "batch"), crossed(list(MENUS), [1, 7]))
def test_a_row_has_the_same_bits_in_any_company_and_on_a_tape(kind, batch):
    x = examples(kind, 5, batch)

    def trained(rows, *, taped):
        body, seeds = populated(kind, rows)
        tape = body.tape() if taped else None
        if taped and tape is None:  # maps, which autograd differentiates
            return None
        body.host.columns["gradient"].zero_()
        branches = Branches.at(np.arange(rows), np.full(rows, 3), doses(seeds)[:rows] * np.float32([1, 1, 1, 0]))[0]
        # with a tape no graph is made, so the gradients of the sum of squares are given
        with torch.set_grad_enabled(tape is None):
            result = body.run(x[:rows], body.route(doses(seeds), seeds, branches), tape=tape)
        if tape is None:
            result.output.square().sum().backward()
        else:
            tape.backward([(result.output, 2 * result.output)])
        found = [[] for _ in range(rows)]
        for at, envs in sorted(body.envs.items()):
            for row, env in enumerate(envs.tolist()):
                found[env].append(body.stacks[at].columns["gradient"][row].clone())
        return result.output.detach(), result.branches.detach(), body.host.columns["gradient"].clone(), found

    whole = trained(5, taped=False)
    for rows, taped in ((2, False), (3, False), (5, True), (3, True)):
        if (other := trained(rows, taped=taped)) is None:
            continue
        for mine, others in zip(other, whole, strict=True):
            for env in range(rows):
                pairs = (
                    zip(mine[env], others[env], strict=True)
                    if isinstance(mine[env], list)
                    else [(mine[env], others[env])]
                )
                assert all(torch.equal(*pair) for pair in pairs)


@KINDS
def test_a_seed_changes_no_bit_of_its_network_at_birth_or_while_it_incubates(kind):
    x = examples(kind, 5)
    body, seeds = populated(kind, jolt=0)
    bare, none = populated(kind)[0], empty(body)
    expected = bare.run(x, bare.route(doses(none), none)).output
    assert torch.equal(body.run(x, body.route(doses(seeds), seeds)).output, expected)
    incubating, young = populated(kind, stage=Stage.TRAINING)
    for straight in (False, True):
        branches = None if straight else shadows(young)
        route = incubating.route(doses(young), young, branches, train=True, straight=straight)
        assert torch.equal(incubating.run(x, route).output, expected)


def test_segments_are_joined_only_where_no_acting_slot_reads_between_them():
    slots = SpannedHost()().slots
    paths = {
        (): ["segments.0:5"],
        (0,): ["segments.0", "segments.1:5"],
        (1,): ["segments.0", "segments.1:2", "segments.3:5"],
        (2,): ["segments.0:3", "segments.4:5"],
        (1, 3): ["segments.0", "segments.1:2", "segments.3", "segments.4", "segments.5"],
    }
    for acting, expected in paths.items():
        assert [path for _, path, _ in steps_of(6, slots, acting)] == expected


@KINDS
def test_an_exported_network_is_saved_loaded_and_grown_further(kind, tmp_path):
    body, seeds = populated(kind, 2)
    x = examples(kind, 2)
    expected = body.run(x, body.route(doses(seeds), seeds)).output[0]
    seeds.stage[0] = Stage.FOSSILIZED
    interface = Interface(x.shape[2:], classes=(0, 1, 2))
    network, topology = grown_network(SpannedHost(kind), body, seeds, 0, interface)
    torch.testing.assert_close(network(x[0]), expected)
    assert topology["format"] == 6
    assert save_network(tmp_path / "net", network, topology, x[0]) is None
    again = load_network(tmp_path / "net", SpannedHost(kind))
    assert torch.equal(again(x[0]), network(x[0]))
    program = torch.export.load(tmp_path / "net/model.pt2").module()
    torch.testing.assert_close(program(x[0, :3]), network(x[0, :3]), rtol=0, atol=1e-5)
    regrown = as_host(copy.deepcopy(network))
    assert torch.equal(regrown(x[0]), network(x[0]))


def network_with(*planted):
    """Build a network for vectors with kept seeds (slot, blueprint), of parameters away from their birth."""
    body = planted_body(SpannedHost(), Kind.VECTOR, 2, MENUS[Kind.VECTOR], torch.float32)
    seeds = empty(body)
    for slot, name in planted:
        seeds = set_seed(body, seeds, 0, slot, MENUS[Kind.VECTOR].index(name), stage=Stage.FOSSILIZED)
    return grown_network(SpannedHost(), body, seeds, 0, Interface((6,), classes=(0, 1, 2)))


@pytest.mark.parametrize(
    ("planted", "segments", "slots", "lost"),
    [
        ([], 6, [("first", 0, None), ("wide", 2, 1), ("late", 3, 0), ("last", 4, 4)], []),
        ([(0, "bypass-mlp")], 6, [("first", 0, None), ("wide", 2, 1), ("late", 3, 0), ("last", 4, 4)], []),
        ([(1, "bypass-mlp")], 5, [("first", 0, None), ("wide", 1, 1), ("late", 2, 0), ("last", 3, 3)], []),
        ([(1, "mlp-small")], 6, [("first", 0, None), ("wide", 2, 1), ("late", 3, 0), ("last", 4, 4)], []),
        ([(1, "bypass-mlp"), (2, "bypass-linear")], 3, [("late", 0, 0), ("last", 1, 1)], ["first", "wide"]),
        ([(1, "skip-mlp")], 4, [("wide", 0, None), ("late", 1, 0), ("last", 2, 2)], ["first"]),
    ],
)
def test_segments_that_a_kept_bypass_goes_around_become_one_when_the_network_grows_further(
    planted, segments, slots, lost
):
    network, _ = network_with(*planted)
    host = as_host(network)
    x = examples(Kind.VECTOR, 1)[0]
    assert len(host.segments) == segments
    assert [(slot.name, slot.after, slot.around) for slot in host.slots] == slots
    assert lost_slots(network) == lost
    assert torch.equal(host(x), network(x))


def test_a_slot_whose_bypasses_began_within_what_became_one_segment_is_around_its_own():
    def host():
        slots = [("a", 1, 0), ("b", 3, 1)]
        return esper.SegmentedHost(
            [linear(6, 4) if k == 0 else linear(4, 4) for k in range(4)] + [nn.Linear(4, 3)],
            [SlotSpec(name, after, 4, around=around) for name, after, around in slots],
        )

    body = planted_body(type("Host", (), {"__call__": lambda _: host(), "inputs": (6,), "outputs": 3})(), Kind.VECTOR, 2,
                        ("bypass-linear",), torch.float32)  # fmt: skip
    seeds = set_seed(body, empty(body), 0, 0, 0, stage=Stage.FOSSILIZED)
    network, _ = grown_network(host, body, seeds, 0, Interface((6,)))
    assert [(slot.name, slot.after, slot.around) for slot in as_host(network).slots] == [("a", 0, 0), ("b", 2, None)]


@pytest.mark.parametrize("around", [2, 5, -1])
def test_a_saved_bypass_that_cannot_begin_where_it_says_is_refused(around, tmp_path):
    network, topology = network_with((1, "bypass-mlp"))
    save_network(tmp_path / "net", network, topology, torch.randn(2, 6))
    path = tmp_path / "net/topology.json"
    saved = json.loads(path.read_text())
    assert saved["seeds"][0]["around"] == 1
    saved["seeds"][0]["around"] = around
    path.write_text(json.dumps(saved))
    (tmp_path / "net/SHA256SUMS").unlink()
    with pytest.raises(InputError, match=r"topology\.json"):
        load_network(tmp_path / "net", SpannedHost())


def test_a_network_whose_seeds_go_around_one_segment_keeps_the_earlier_format(tmp_path):
    network, topology = network_with((0, "bypass-mlp"), (3, "bypass-linear"), (1, "mlp-small"))
    assert topology["format"] == 2
    save_network(tmp_path / "net", network, topology, torch.randn(2, 6))
    assert not any("around" in seed for seed in read_topology(tmp_path / "net")["seeds"])


def test_a_description_and_a_drawing_name_where_a_bypass_begins():
    network, _ = network_with((1, "bypass-mlp"), (3, "bypass-linear"))
    text = describe(network)
    assert "+ wide     bypass-mlp; reads what entered segment 1, alpha 1, ADD" in text
    assert "+ last     bypass-linear; reads what entered the part before it" in text
    # rows of 58 px: the input, then the segments; an arrow begins at the row in front of segment 1
    assert 'd="M400 80.0L470' in draw(network) or 'd="M400 80L470' in draw(network)


def test_static_networks_of_a_host_keep_where_its_bypasses_begin():
    host, x = SpannedHost(), torch.randn(4, 6)
    starts = [slot.start for slot in host().slots]
    plain = widened(host, x, 2000)
    assert isinstance(plain, WidenedHosts)
    assert [slot.start for slot in plain().slots] == starts
    assert [slot.start for slot in Skipped(host, (3,))().slots] == starts


def test_the_state_of_a_body_is_refused_by_one_whose_bypasses_begin_elsewhere():
    body, seeds = populated(Kind.VECTOR)
    other = planted_body(replace(SpannedHost(), around=False), Kind.VECTOR, 5, MENUS[Kind.VECTOR], torch.float32)
    with pytest.raises(ValueError, match="its bypasses go around the segments from"):
        other.load_state(body.state())
    again = populated(Kind.VECTOR)[0]
    again.load_state(body.state())
    x = examples(Kind.VECTOR, 5)
    expected = body.run(x, body.route(doses(seeds), seeds)).output
    assert torch.equal(again.run(x, again.route(doses(seeds), seeds)).output, expected)


@pytest.mark.parametrize("around", ["0", 1.0, True, -1])
def test_around_is_a_whole_number(around):
    with pytest.raises(InputError, match=r"slot 'a' is around segment .*; give None, or the index of the segment"):
        SlotSpec("a", 1, 4, around=around)


def test_around_is_not_behind_the_slot():
    with pytest.raises(InputError, match=r"is around segment 2, but it lies behind segment 1; give an earlier segment"):
        SlotSpec("a", 1, 4, around=2)
    assert SlotSpec("a", 1, 4, around=np.int64(0)).start == 0
    assert SlotSpec("a", 1, 4).start == SlotSpec("a", 1, 4, around=1).start == 1


def test_a_stream_of_another_kind_cannot_be_read():
    def host():
        segments = [nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 2)]
        return esper.SegmentedHost(segments, [SlotSpec("a", 2, 5, around=1)])

    words = (
        r"slot 'a' is around segment 1, whose input has shape \(3, 4\), but its seeds read a vector of floating-point"
    )
    with pytest.raises(InputError, match=words):
        esper.task("t", torch.randint(0, 9, (60, 3)), torch.arange(60) % 2, host=host)


def chain(*widths):
    layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in pairwise(widths)]
    return nn.Sequential(*[each for pair in layers for each in pair][:-1])


@pytest.mark.parametrize(
    ("widths", "around"),
    [
        ((6, 2, 8, 3), [None, 0]),
        ((6, 8, 8, 3), [None, None]),
        ((6, 8, 2, 7, 3), [None, None, 1]),
        ((8, 6, 2, 7, 7, 3), [None, None, 0, None]),
        ((6, 7, 2, 4, 6, 3), [None, None, 1, 1]),
        ((2, 4, 8, 3), [None, None]),
    ],
)
def test_a_plain_module_that_is_cut_has_bypasses_around_its_narrow_places(widths, around):
    host = CutHost(lambda: chain(*widths), torch.zeros(2, widths[0]))()
    assert [slot.around for slot in host.slots] == around


def test_a_task_of_a_plain_module_lets_a_rule_go_around_a_narrow_place():
    task = spanned_task(Kind.VECTOR, host=lambda: chain(6, 2, 8, 3))
    config = {
        "envs": 2,
        "steps": 6,
        "data": {"batches_per_step": 2},
        "early_stopping": {"enabled": False},
        "baselines": [],
    }
    summary = esper.grow(task, config, controller="heuristic", progress=False)
    assert summary["status"] == "finished"
