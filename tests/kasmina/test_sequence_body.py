"""Test sequence hosts and their seeds: what a slot computes, rows in any company and mapping, sensors, and grown networks."""

import copy

import numpy as np
import pytest
import torch

from bodies import empty, set_seed
from esper.kasmina.blueprints import drawn_with
from esper.kasmina.lifecycle import doses
from esper.kasmina.network.export import grown_network, load_network, save_network
from esper.kasmina.network.grown_network import as_host
from esper.kasmina.stack.snapshot import Snapshot
from esper.leyline.data.task import Interface, Split
from esper.leyline.lifecycle.slots import Tap
from esper.leyline.lifecycle.vocabulary import Blend, Stage
from esper.tasks.objectives import Classification
from esper.tolaria.measure.probe import sense
from esper.tolaria.measure.sensors import SENSORS
from esper.tolaria.stacked.data import Format, stack_splits
from esper.tolaria.stacked.population import shadows
from sequences import HOST, SEQUENCES, sequence_body

INTERFACE = Interface(HOST.inputs, classes=(0, 1, 2))
EVERY = pytest.mark.parametrize("name", SEQUENCES)
BLENDS = pytest.mark.parametrize("blend", Blend)


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
        u = {Tap.HERE: h, Tap.BEFORE: before}[entry.tap]
        delta = seed.delta(u)
        change = {
            Blend.ADD: delta,
            Blend.GATE: torch.sigmoid(seed.gate(u)) * delta,
            Blend.MULTIPLY: h * torch.tanh(delta),
        }[Blend(seeds.blend[env, index])]
        h = h + dose[index] * change
    return h


def populated(rows, blend=Blend.ADD, *, stage=Stage.HOLDING, **options):
    """Plant every sequence blueprint in turn, one in each slot of each row; row r is the same in any population."""
    body = sequence_body(rows, **options)
    seeds = empty(body)
    for env in range(rows):
        for slot in range(2):
            which, key = (2 * env + slot) % len(SEQUENCES), 10 * env + slot
            seeds = set_seed(body, seeds, env, slot, which, blend=blend, alpha=0.75, key=key, stage=stage)
    return body, seeds


@BLENDS
@pytest.mark.parametrize("mapping", ["auto", "vmap", "loop"])
def test_a_network_with_seeds_computes_what_the_formulas_say(blend, mapping):
    body, seeds = populated(5, blend, dtype=torch.float64, mapping=mapping)
    x = torch.randn(5, 3, *HOST.inputs, dtype=torch.float64)
    output = body.run(x, body.route(doses(seeds), seeds)).output
    for env in range(5):
        torch.testing.assert_close(output[env], obvious(body, seeds, env, x[env], doses(seeds)[env]))


def gradients(body):
    return [body.host.columns["gradient"], *(body.stacks[at].columns["gradient"] for at in sorted(body.stacks))]


@BLENDS
def test_the_mappings_agree_in_outputs_and_gradients(blend):
    found = []
    for mapping in ("loop", "vmap", "auto"):
        body, seeds = populated(5, blend, dtype=torch.float64, mapping=mapping)
        with drawn_with(1):
            x = torch.randn(5, 7, *HOST.inputs, dtype=torch.float64)
        output = body.run(x, body.route(doses(seeds), seeds)).output
        output.square().sum().backward()
        found.append((gradients(body), output))
    for other, output in found[1:]:
        torch.testing.assert_close(output, found[0][1], rtol=1e-10, atol=1e-12)
        for got, want in zip(other, found[0][0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batch", [1, 7])
@BLENDS
def test_a_row_is_bitwise_the_same_in_any_company(batch, blend):
    with drawn_with(1):
        x = torch.randn(5, batch, *HOST.inputs)

    def trained(rows):
        body, seeds = populated(rows, blend)
        output = body.run(x[:rows], body.route(doses(seeds), seeds)).output
        output.square().sum().backward()
        rows_of = {env: [] for env in range(rows)}
        for at, envs in sorted(body.envs.items()):
            for row, env in enumerate(envs.tolist()):
                rows_of[env].append(body.stacks[at].columns["gradient"][row])
        return output.detach(), body.host.columns["gradient"], rows_of

    whole = trained(5)
    for rows in (2, 3):
        output, host, seeds = trained(rows)
        assert torch.equal(output, whole[0][:rows])
        assert torch.equal(host[:rows], whole[1][:rows])
        for env in range(rows):
            assert all(map(torch.equal, seeds[env], whole[2][env]))


def test_an_incubating_seed_leaves_the_host_bit_for_bit_alone():
    body, x = sequence_body(2), torch.randn(2, 7, *HOST.inputs)
    without = body.run(x, body.route(doses(empty(body)), empty(body))).output
    without.square().sum().backward()
    alone = body.host.columns["gradient"].clone()
    for straight in (False, True):
        body.host.columns["gradient"].zero_()
        body.clear()
        seeds = set_seed(body, empty(body), 0, 0, SEQUENCES.index("attention"), stage=Stage.TRAINING)
        route = body.route(doses(seeds), seeds, None if straight else shadows(seeds), train=True, straight=straight)
        result = body.run(x, route)
        total = result.output.square().sum()
        for further in (result.branches, result.proximal):
            total = total if further is None else total + further.square().sum()
        total.backward()
        assert torch.equal(result.output, without)
        assert torch.equal(body.host.columns["gradient"], alone)
        (at,) = [key for key, envs in body.envs.items() if len(envs)]
        assert body.stacks[at].columns["gradient"][0].count_nonzero()


def test_branches_compute_what_the_network_does_at_their_doses():
    body, seeds = populated(3)
    seeds.stage[:, 1] = Stage.TRAINING
    body.arrange(seeds)
    x, asked = torch.randn(3, 7, *HOST.inputs), shadows(seeds)
    branches = body.run(x, body.route(doses(seeds), seeds, asked)).branches
    for branch, env in enumerate(asked.env.tolist()):
        dose = np.tile(asked.dose[branch], (3, 1))
        alone = body.run(x, body.route(dose, seeds)).output[env]
        torch.testing.assert_close(branches[branch], alone, rtol=1e-6, atol=1e-6)


def test_a_restored_row_is_bitwise_what_it_was_and_its_neighbours_stay():
    body, seeds = populated(3, stage=Stage.FOSSILIZED)
    kept = Snapshot(body, seeds, 0)
    kept.take(seeds, np.ones(3, bool), 1)
    x = torch.randn(3, 7, *HOST.inputs)
    before = body.run(x, body.route(doses(seeds), seeds)).output
    with torch.no_grad():
        for stack in (body.host, *body.stacks.values()):
            stack.columns["value"].add_(0.1)
    moved = body.run(x, body.route(doses(seeds), seeds)).output
    seeds = kept.put_back(seeds, np.array([False, True, False]))
    after = body.run(x, body.route(doses(seeds), seeds)).output
    assert torch.equal(after[1], before[1])
    assert torch.equal(after[[0, 2]], moved[[0, 2]])
    assert not torch.equal(after[0], before[0])


# Growth sensors: positions are examples.


def test_the_sensors_of_a_sequence_are_those_of_its_positions_and_every_one_is_measured():
    body, seeds = populated(2)
    generator = torch.Generator().manual_seed(0)
    splits = [Split(torch.randn(n, *HOST.inputs, generator=generator), torch.arange(n) % 3) for n in (40, 24)]
    where = np.zeros(2, np.int64)
    fit, held = (stack_splits([split], where, Format(HOST.inputs, torch.device("cpu"))) for split in splits)
    table = sense(body, seeds, fit, held, Classification(3))
    assert table.shape == (2, 2, len(SENSORS))
    names = [sensor.name for sensor in SENSORS]
    measured = table.isfinite().all(0)
    inner = {"participation_inner", "dead", "unsaturated"}  # of the second segment alone
    taught = {"drift", "drift_before"}  # where there is an intact network
    assert [name for name, there in zip(names, measured[0], strict=True) if not there] == [
        n for n in names if n in inner | taught
    ]
    assert [name for name, there in zip(names, measured[1], strict=True) if not there] == [
        n for n in names if n in taught
    ]
    streams = body.run(fit.read(slice(0, 40)), body.route(doses(empty(body)), empty(body)), streams="here").streams
    h = streams[0].here[0].flatten(0, 1)
    rms = h.square().sum(1).mean().sqrt()
    torch.testing.assert_close(table[0, 0, names.index("stream_rms")], rms)


# Grown networks.


def grown(name, blend=Blend.ADD, dtype=torch.float32):
    body = sequence_body(3, dtype=dtype)
    seeds = empty(body)
    for slot in range(2):
        which = SEQUENCES.index(name)
        seeds = set_seed(body, seeds, 1, slot, which, stage=Stage.FOSSILIZED, blend=blend, alpha=0.75)
        seeds = set_seed(body, seeds, 0, slot, SEQUENCES.index("mlp-large"))
    return body, seeds


@EVERY
def test_an_exported_network_gives_what_the_population_gives(name):
    for blend in Blend:
        body, seeds = grown(name, blend)
        network, topology = grown_network(HOST, body, seeds, 1, INTERFACE)
        x = torch.randn(5, *HOST.inputs)
        rows = body.run(x.expand(3, *x.shape), body.route(doses(seeds), seeds)).output
        torch.testing.assert_close(network(x), rows[1], rtol=1e-5, atol=1e-6)
        assert [seed["blueprint"] for seed in topology["seeds"]] == [name, name]


# The program of one blueprint says nothing of another: each is traced, and most of the time is torch's.
@pytest.mark.parametrize(
    "name",
    [n if n in ("attention", "causal-conv", "norm") else pytest.param(n, marks=pytest.mark.slow) for n in SEQUENCES],
)
def test_a_saved_network_is_loaded_again_and_its_program_runs_any_batch(name, tmp_path):
    body, seeds = grown(name, Blend.GATE)
    network, topology = grown_network(HOST, body, seeds, 1, INTERFACE)
    folder = tmp_path / "network"
    assert save_network(folder, network, topology, torch.randn(2, *HOST.inputs)) is None
    loaded = load_network(folder, HOST)
    program = torch.export.load(folder / "model.pt2").module()
    for batch in (1, 5):
        x = torch.randn(batch, *HOST.inputs)
        assert torch.equal(loaded(x), network(x))
        torch.testing.assert_close(program(x), network(x), rtol=1e-5, atol=1e-6)


@EVERY
def test_a_grown_network_is_a_host_again_with_its_slots_free_and_causal(name):
    body, seeds = grown(name)
    network, _ = grown_network(HOST, body, seeds, 1, INTERFACE)
    host, x = as_host(copy.deepcopy(network)), torch.randn(5, *HOST.inputs)
    assert torch.equal(host(x), network(x))
    assert [(slot.name, slot.causal) for slot in host.slots] == [("block0", True), ("block1", True)]
    assert host.stacks
