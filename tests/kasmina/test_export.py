"""Check that grown networks as plain modules equal the population they came from, saved, loaded, and run by torch alone."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import esper
from bodies import ALL, empty, make_body, set_seed
from crashes import at_every_call
from esper.kasmina.blueprints import drawn_with, get_blueprint
from esper.kasmina.host import SegmentedHost
from esper.kasmina.lifecycle import doses
from esper.kasmina.network.export import (
    MODEL,
    PROGRAM,
    TOPOLOGY,
    GrownNetwork,
    _SavedTopology,
    grown_network,
    load_network,
    read_topology,
    save_network,
)
from esper.kasmina.stack.body import Body
from esper.leyline.data.task import Interface
from esper.leyline.lifecycle.slots import SlotSpec
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, Blend, Stage
from esper.leyline.messages import InputError
from esper.store.disk import SUMS
from esper.tasks.hosts import MLP

WIDTH, INPUTS = 8, 6
BLENDS = pytest.mark.parametrize("blend", Blend)
EXAMPLE = torch.zeros(2, INPUTS)
INTERFACE = Interface((INPUTS,), classes=(0, 1, 2))


def factory(slots):
    return MLP(inputs=INPUTS, width=WIDTH, hidden=tuple(2 + s for s in range(slots)), outputs=3)


def grown(placed, *, slots=2, blend=Blend.ADD, stage=Stage.FOSSILIZED, alpha=0.75, dtype=torch.float32):
    """Grow three environments, of which the middle one has the seeds {slot: blueprint}; return the body and its seeds."""
    body = make_body(3, hidden=factory(slots).hidden, width=WIDTH, inputs=INPUTS, dtype=dtype)
    seeds = empty(body)
    for slot, name in placed.items():
        seeds = set_seed(body, seeds, 1, slot, ALL.index(name), stage=stage, blend=blend, alpha=alpha)
        seeds = set_seed(body, seeds, 0, slot, ALL.index("mlp-large"), stage=Stage.HOLDING)
    return body, seeds


def network_of(body, seeds, env=1):
    slots = len(body.slots)
    return grown_network(factory(slots), body, seeds, env, INTERFACE)


def engine_output(body, seeds, x, env=1):
    """Return what the population gives for x (B, inputs) in one environment, unfinished seeds at dose 0."""
    final = np.where(seeds.stage == Stage.FOSSILIZED, seeds.alpha, np.float32(0))
    rows = x.expand(body.host.capacity, *x.shape)
    return body.run(rows, body.route(final, seeds)).output[env].detach()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# The network in memory.


@pytest.mark.parametrize("name", ALL)
def test_the_network_gives_what_the_population_gives(name):
    for blend, dtype in (*((blend, torch.float32) for blend in Blend), (Blend.GATE, torch.float64)):
        body, seeds = grown({0: name, 1: name}, blend=blend, dtype=dtype)
        network, _ = network_of(body, seeds)
        x = torch.randn(7, INPUTS, dtype=dtype)
        output = network(x)
        close(output, engine_output(body, seeds, x))
        assert not torch.allclose(output, engine_output(body, empty(body), x)), (blend, dtype)


@BLENDS
def test_the_network_has_the_parameters_that_the_population_counts(blend):
    body, seeds = grown(dict(enumerate(ALL)), slots=len(ALL), blend=blend)
    network, topology = network_of(body, seeds)
    added = body.table.added_params(seeds, frozenset({Stage.FOSSILIZED}))[1]
    assert topology["parameters"] == sum(p.numel() for p in network.parameters())
    assert topology["parameters"] == body.table.host_params[1] + added
    assert topology["host_parameters"] == body.table.host_params[1]


def test_a_network_that_did_not_grow_is_the_host():
    body, seeds = grown({0: "affine"})
    network, topology = network_of(body, seeds, env=2)
    x = torch.randn(7, INPUTS)
    host = factory(2)()
    body.host.read(2, host)
    assert torch.equal(network(x), host(x))
    assert (topology["seeds"], topology["unfinished"]) == ([], [])


@pytest.mark.parametrize("stage", sorted(IN_BUDGET - {Stage.FOSSILIZED}))
def test_an_unfinished_seed_is_left_out_and_reported(stage):
    body, seeds = grown({0: "affine", 1: "bypass-mlp"})
    seeds.stage[1, 1] = stage
    body.arrange(seeds)
    network, topology = network_of(body, seeds)
    assert topology["unfinished"] == ["block1"]
    assert [seed["slot"] for seed in topology["seeds"]] == ["block0"]
    x = torch.randn(7, INPUTS)
    close(network(x), engine_output(body, seeds, x))


@pytest.mark.parametrize("stage", [Stage.DORMANT, Stage.EMBARGOED])
def test_a_slot_without_a_seed_is_not_reported(stage):
    body, seeds = grown({})
    seeds.stage[1, 0] = stage
    assert network_of(body, seeds)[1]["unfinished"] == []


def test_the_network_is_a_copy():
    body, seeds = grown({0: "mlp-small"})
    network, _ = network_of(body, seeds)
    x = torch.randn(7, INPUTS)
    before = network(x)
    for stack in (body.host, *body.stacks.values()):
        stack.columns["value"].zero_()
    assert torch.equal(network(x), before)


def test_taking_the_network_changes_nothing_in_the_population():
    body, seeds = grown({0: "mlp-small", 1: "skip-mlp"}, blend=Blend.GATE)
    stacks = [body.host, *body.stacks.values()]
    before = [{name: column.clone() for name, column in stack.columns.items()} for stack in stacks]
    random = torch.get_rng_state()
    network_of(body, seeds)
    assert torch.equal(torch.get_rng_state(), random)
    for stack, columns in zip(stacks, before, strict=True):
        assert all(torch.equal(stack.columns[name], column) for name, column in columns.items())


def test_the_network_is_on_the_cpu_in_evaluation_mode():
    network, _ = network_of(*grown({0: "gated"}))
    assert not any(module.training for module in network.modules())
    assert {parameter.device.type for parameter in network.parameters()} == {"cpu"}


def test_the_network_can_be_trained_further():
    network, _ = network_of(*grown({0: "mlp-small", 1: "bypass-mlp"}, blend=Blend.GATE))
    network(torch.randn(9, INPUTS)).square().sum().backward()
    assert all(parameter.grad.count_nonzero() for parameter in network.parameters())


# The folder.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a network of every built-in blueprint for each blend: (folder, network, topology, body, seeds)."""
    made = {}
    for blend in Blend:
        torch.manual_seed(int(blend))
        body, seeds = grown(dict(enumerate(ALL)), slots=len(ALL), blend=blend, alpha=0.5)
        network, topology = network_of(body, seeds)
        folder = tmp_path_factory.mktemp("models") / blend.name
        save_network(folder, network, topology, EXAMPLE)
        made[blend] = folder, network, topology, body, seeds
    return made


@BLENDS
def test_a_loaded_network_gives_the_outputs_of_the_saved_one_bit_for_bit(saved, blend):
    folder, network, *_ = saved[blend]
    loaded = load_network(folder, factory(len(ALL)))
    x = torch.randn(7, INPUTS)
    assert torch.equal(loaded(x), network(x))
    assert not loaded.training


def test_a_network_in_float64_is_loaded_in_float64(tmp_path):
    network, topology = network_of(*grown({0: "gated"}, blend=Blend.GATE, dtype=torch.float64))
    save_network(tmp_path, network, topology, EXAMPLE.double())
    x = torch.randn(7, INPUTS, dtype=torch.float64)
    assert torch.equal(load_network(tmp_path, factory(2))(x), network(x))


def test_the_topology_is_what_was_grown(saved):
    folder, _, topology, *_ = saved[Blend.GATE]
    read = json.loads((folder / TOPOLOGY).read_text())
    assert read == json.loads(json.dumps(topology)) | {"example": "float32"}
    assert [seed["blueprint"] for seed in read["seeds"]] == list(ALL)
    assert read["seeds"][ALL.index("skip-mlp")] == {
        "slot": f"block{ALL.index('skip-mlp')}",
        "after": ALL.index("skip-mlp") + 1,
        "blueprint": "skip-mlp",
        "blend": "gate",
        "alpha": 0.5,
        "reads": INPUTS,
        "writes": WIDTH,
    }


ALONE = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "esper":
            raise ModuleNotFoundError("esper is not installed here", name=name)

sys.meta_path.insert(0, Blocker())
try:
    import esper
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("esper can be imported")

import torch
torch.set_num_threads(1)
inputs, *programs = sys.argv[1:]
batches = torch.load(inputs)
outputs = []
for program in programs:
    run = torch.export.load(program).module()
    outputs.append([run(x) for x in batches])
assert not any(name.split(".")[0] == "esper" for name in sys.modules)
torch.save(outputs, inputs)
"""
SIZES = (1, 2, 7, 64)


@pytest.fixture(scope="module")
def alone(saved, tmp_path_factory):
    """Run the programs where only torch is: {blend: [(x, output) for each size of a batch]}."""
    folder = tmp_path_factory.mktemp("alone")
    batches = [torch.randn(size, INPUTS) for size in SIZES]
    torch.save(batches, folder / "batches.pt")
    programs = [str(saved[blend][0] / PROGRAM) for blend in Blend]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, str(folder / "batches.pt"), *programs],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    outputs = torch.load(folder / "batches.pt")
    return {blend: list(zip(batches, given, strict=True)) for blend, given in zip(Blend, outputs, strict=True)}


@BLENDS
def test_the_program_gives_what_the_population_gives_where_only_torch_is_installed(saved, alone, blend):
    *_, body, seeds = saved[blend]
    for size, (x, output) in zip(SIZES, alone[blend], strict=True):
        assert output.shape == (size, 3)
        close(output, engine_output(body, seeds, x))


def test_the_folder_holds_the_three_files_and_their_checksums_and_nothing_else(saved):
    folder = saved[Blend.ADD][0]
    assert sorted(path.name for path in folder.iterdir()) == sorted([MODEL, TOPOLOGY, PROGRAM, SUMS])
    listed = dict(line.split("  ")[::-1] for line in (folder / SUMS).read_text().splitlines())
    for name in (MODEL, TOPOLOGY, PROGRAM):
        assert listed.pop(name) == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert listed == {}


@pytest.mark.parametrize(
    ("name", "at", "words"),
    [
        (MODEL, -1, "model.safetensors is damaged: its sha256 is not the one in SHA256SUMS"),
        (TOPOLOGY, None, "topology.json is damaged: its sha256 is not the one in SHA256SUMS"),
        (SUMS, 0, "SHA256SUMS does not list topology.json, or is damaged"),
    ],
)
def test_a_file_that_is_not_the_one_of_its_checksum_is_refused(saved, tmp_path, name, at, words):
    shutil.copytree(saved[Blend.ADD][0], tmp_path / "net")
    content = bytearray((tmp_path / "net" / name).read_bytes())
    if at is None:
        content += b" "  # the same JSON
    else:
        content[at] ^= 0x40
    (tmp_path / "net" / name).write_bytes(content)
    assert words in refusal(tmp_path / "net")


def test_saving_again_replaces_what_is_there(tmp_path):
    for name in ("affine", "mlp-small"):
        network, topology = network_of(*grown({0: name}))
        save_network(tmp_path, network, topology, EXAMPLE)
    x = torch.randn(3, INPUTS)
    assert torch.equal(load_network(tmp_path, factory(2))(x), network(x))


def test_a_crash_between_any_two_system_calls_leaves_the_old_network_or_the_new(tmp_path, monkeypatch):
    one, other = (network_of(*grown({0: name})) for name in ("affine", "mlp-small"))
    shapeless = EXAMPLE[:, :1]  # of which no program is made, which would take most of the time
    folder, found = tmp_path / "env-000", []

    def prepare():
        assert save_network(folder, *one, shapeless) is not None

    for _ in at_every_call(monkeypatch, prepare, lambda: save_network(folder, *other, shapeless)):
        load_network(folder, factory(2))
        found.append(read_topology(folder)["seeds"][0]["blueprint"])
    assert len(found) > 10, "or this test shows nothing"
    assert found == sorted(found)
    assert set(found) == {"affine", "mlp-small"}


class Tied(nn.Module):
    """Multiplies twice by one weight, as a map of a host."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def tied_host():
    parts = [nn.Linear(INPUTS, WIDTH), Tied(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)]
    return SegmentedHost(parts, [SlotSpec("one", after=1, width=WIDTH), SlotSpec("two", after=2, width=WIDTH)])


def test_a_host_with_tied_weights_and_buffers_is_saved_and_loaded(tmp_path):
    body = Body(tied_host, [get_blueprint("bypass-linear")], 2, EXAMPLE, mapping="loop")
    for row in range(2):
        with drawn_with(row):
            body.plant_host([row], tied_host(), EXAMPLE, 3)
    seeds = empty(body)
    for slot in range(2):
        seeds = set_seed(body, seeds, 1, slot, 0, stage=Stage.FOSSILIZED)
    body.train(True)
    body.run(torch.randn(2, 16, INPUTS), body.route(doses(seeds), seeds))
    body.train(False)
    network, topology = grown_network(tied_host, body, seeds, 1, INTERFACE)
    x = torch.randn(7, INPUTS)
    close(network(x), engine_output(body, seeds, x))
    save_network(tmp_path, network, topology, EXAMPLE)
    assert torch.equal(load_network(tmp_path, tied_host)(x), network(x))


@dataclass(frozen=True)
class Anonymous:
    """Makes a host as a factory of one's own, which no file can name."""

    made: object = tied_host

    def __call__(self):
        return self.made()


@pytest.mark.parametrize("make", [tied_host, Anonymous()])
def test_a_host_that_no_file_can_name_is_saved_without_a_name(make):
    body = Body(make, [get_blueprint("affine")], 2, EXAMPLE, mapping="loop")
    body.plant_host([0, 1], make(), EXAMPLE, 3)
    assert grown_network(make, body, empty(body), 0, INTERFACE)[1]["host"] is None


# Files that are missing or damaged.


@pytest.fixture
def folder(saved, tmp_path):
    """Copy a good folder, to damage it."""
    for name in (MODEL, TOPOLOGY, PROGRAM):
        (tmp_path / name).write_bytes((saved[Blend.ADD][0] / name).read_bytes())
    return tmp_path


def refusal(folder, host=None):
    with pytest.raises(InputError) as error:
        load_network(folder, host or factory(len(ALL)))
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


def edit(folder, change):
    topology = json.loads((folder / TOPOLOGY).read_text())
    change(topology)
    (folder / TOPOLOGY).write_text(json.dumps(topology))


def test_the_copy_that_is_damaged_below_was_good(folder):
    assert isinstance(load_network(folder, factory(len(ALL))), GrownNetwork)


@pytest.mark.parametrize("name", [MODEL, TOPOLOGY])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert str(folder / name) in refusal(folder)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"not json", b"[" * 100_000])
def test_a_topology_that_is_no_json_is_refused(folder, content):
    (folder / TOPOLOGY).write_bytes(content)
    assert f"{folder / TOPOLOGY} is not valid JSON" in refusal(folder)


@pytest.mark.parametrize("content", ["[]", "3", "{}", '{"format": 99}'])
def test_a_topology_of_another_format_is_refused(folder, content):
    (folder / TOPOLOGY).write_text(content)
    assert f"{folder / TOPOLOGY} has format" in refusal(folder)


@pytest.mark.parametrize(
    "missing", sorted(_SavedTopology.model_fields.keys() - {"format", "preprocess", "restore", "widened"})
)
def test_a_topology_that_lacks_a_field_is_refused(folder, missing):
    edit(folder, lambda topology: topology.pop(missing))
    assert f"{folder / TOPOLOGY} is damaged" in refusal(folder)


@pytest.mark.parametrize("missing", ["after", "blueprint", "blend", "alpha", "reads", "writes"])
def test_a_seed_that_lacks_a_field_is_refused(folder, missing):
    edit(folder, lambda topology: topology["seeds"][0].pop(missing))
    assert f"{folder / TOPOLOGY} is damaged" in refusal(folder)


WRONG = {"blend": "mix", "alpha": 1.5, "after": "last", "reads": -1, "writes": "wide", "blueprint": None}


@pytest.mark.parametrize(("field", "value"), WRONG.items(), ids=WRONG)
def test_a_seed_with_a_value_that_cannot_be_is_refused(folder, field, value):
    edit(folder, lambda topology: topology["seeds"][0].update({field: value}))
    assert f"{folder / TOPOLOGY} is damaged" in refusal(folder)


def test_a_seed_where_the_host_has_no_slot_is_refused(folder):
    edit(folder, lambda topology: topology["seeds"][0].update(after=99))
    assert "has a seed behind segment 99, where the host has no slot" in refusal(folder)


@pytest.mark.parametrize("dtype", ["float31", "nn", 7])
def test_a_dtype_that_is_none_is_refused(folder, dtype):
    edit(folder, lambda topology: topology.update(dtype=dtype))
    assert f"{folder / TOPOLOGY} is damaged" in refusal(folder)


def test_a_seed_that_is_larger_than_the_file_of_weights_is_refused_before_it_is_built(folder):
    edit(folder, lambda topology: topology["seeds"][-1].update(reads=10**12))
    assert f"{folder / MODEL} does not fit the network of {TOPOLOGY}: it holds" in refusal(folder)


@pytest.mark.parametrize("writes", [10**12, 1])
def test_a_seed_that_writes_another_width_than_the_slot_has_is_refused_before_it_is_built(folder, writes):
    edit(folder, lambda topology: topology["seeds"][-1].update(writes=writes))
    assert f"where the host has no slot of width {writes}; give the factory of the host" in refusal(folder)


def test_a_host_that_is_larger_than_the_file_of_weights_is_refused_before_it_is_built(folder):
    arguments = {"inputs": 4, "width": 10**7, "hidden": [3], "outputs": 3}
    edit(folder, lambda topology: topology.update(host={"name": "mlp", "arguments": arguments}))
    with pytest.raises(InputError, match="does not fit"):
        esper.load(folder)


def test_a_blueprint_that_is_not_registered_is_named(folder):
    edit(folder, lambda topology: topology["seeds"][0].update(blueprint="mlp-smal"))
    assert "unknown blueprint 'mlp-smal'; did you mean 'mlp-small'?" in refusal(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_model_is_refused(folder, kept):
    content = (folder / MODEL).read_bytes()
    (folder / MODEL).write_bytes(content[:kept])
    assert f"{folder / MODEL} does not fit" in refusal(folder)


def test_a_model_that_lacks_a_tensor_is_refused_by_name(folder):
    tensors = load_file(folder / MODEL)
    tensors.pop("segments.0.weight")
    save_file(tensors, folder / MODEL)
    sentence = refusal(folder)
    assert f"{folder / MODEL} does not fit" in sentence
    assert "segments.0.weight" in sentence


def test_a_host_of_another_architecture_is_refused(folder):
    other = MLP(inputs=INPUTS, width=WIDTH, hidden=(7,) * len(ALL), outputs=3)
    assert f"{folder / MODEL} does not fit" in refusal(folder, other)


def test_a_factory_that_makes_no_host_is_refused(folder):
    assert "the host, a Linear, cannot run on examples of shape (6,)" in refusal(folder, lambda: nn.Linear(2, 2))
