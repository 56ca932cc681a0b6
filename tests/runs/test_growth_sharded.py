"""Test a network that grows under FSDP's fully_shard, in two processes over gloo."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ranks
from esper.kasmina.graft.grafted import ungraft
from esper.kasmina.network.saving import attach, load_grown
from loops import equal

pytestmark = pytest.mark.campaign

PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"
STRAIGHT = [name for name, case in ranks.SHARDED.items() if not case.start and not case.half]
CORE = ["before", "after", "after from 9", "bare", "wrapped"]
"""The cases that every run of the tests plays; the others take long."""
EACH = [pytest.param(name, marks=[] if name in CORE else pytest.mark.slow) for name in STRAIGHT]


def program():
    """Return the program of the page on sharding."""
    (found,) = re.findall(r'^```python title="train.py"\n(.*?)^```', PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def core(folder):
    """Return what each of two processes found in the cases of `CORE`."""
    return ranks.finished(ranks.start(2, folder, [*CORE, "refusals"], "SHARDED"), 2, folder)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Return what each of two processes found in the other cases."""
    made = tmp_path_factory.mktemp("others")
    # `half` is compared with "after"
    names = ["after", *(name for name in ranks.SHARDED if name not in CORE)]
    return ranks.finished(ranks.start(2, made, names, "SHARDED"), 2, made)


@pytest.fixture
def found(request):
    """Return what each of two processes found in the case that a test names, or in the core."""
    name = request.node.callspec.params["name"] if hasattr(request.node, "callspec") else CORE[0]
    return request.getfixturevalue("core") if name in CORE else request.getfixturevalue("others")


@pytest.mark.parametrize("name", EACH)
def test_a_sharded_network_grows_as_a_whole_one_in_one_process(found, name, tmp_path):
    alone = ranks.train(name, folder=tmp_path, cases=ranks.SHARDED)
    for each in found:
        assert each[name]["stages"] == alone["stages"]
        assert each[name]["finished"].keys() == alone["finished"].keys()
        for key, value in each[name]["finished"].items():
            assert torch.allclose(value, alone["finished"][key], rtol=1e-9, atol=1e-11), key
    seeds = any(".esper." in key for key in alone["finished"])
    assert seeds == ("folded" not in name)
    assert sum(alone["summary"]["rollbacks"].values()) == (name == "spoilt")


def test_a_network_may_be_sharded_before_it_is_grafted_or_after(found):
    for each in found:
        assert equal(each["before"]["finished"], each["after"]["finished"])
        assert each["before"]["kinds"] == ["GrownFSDPLinear", "ReLU", "FSDPLinear", "Identity", "Tanh", "Linear"]
        assert each["after"]["kinds"] == ["FSDPGrownLinear", "ReLU", "FSDPLinear", "Identity", "Tanh", "Linear"]


def test_a_state_is_whole_and_goes_on_to_the_same_bits_in_a_network_sharded_in_another_order(found, folder):
    state = torch.load(folder / "after from 9.pt")
    assert all(type(tensor) is torch.Tensor for tensor in state["tensors"].values())
    assert state["tensors"]["0.weight"].shape == (6, 4)
    for each in found:
        assert equal(each["after from 9"]["trained"], each["after"]["trained"])
        assert each["after from 9"]["summary"] == each["after"]["summary"]


def test_a_state_goes_on_in_a_whole_network_and_a_process_of_two_holds_half_of_it(found, folder):
    alone = ranks.train("after from 9", folder=folder, cases=ranks.SHARDED)
    for each in (every["after from 9"] for every in found):
        assert each["stages"] == alone["stages"]
        assert 0.4 < each["held"] / alone["held"] < 0.6
        for key, value in each["finished"].items():
            assert torch.allclose(value, alone["finished"][key], rtol=1e-9, atol=1e-11), key


@pytest.mark.slow
def test_a_moving_average_goes_on_with_its_seeds(others):
    for each in others:
        assert "average.0.esper.seed.delta.out.weight" in each["average"]["finished"]
        assert equal(each["average from 20"]["finished"], each["average"]["finished"])


def test_a_sharded_network_has_the_bits_of_one_under_distributed_data_parallel(found):
    for each in found:
        assert each["bare"]["stages"] == each["wrapped"]["stages"]
        assert each["bare"]["summary"] == each["wrapped"]["summary"]
        assert equal(each["bare"]["finished"], each["wrapped"]["finished"])


@pytest.mark.parametrize("name", [*EACH, pytest.param("half", marks=pytest.mark.slow)])
def test_the_first_process_gathers_a_network_of_plain_modules(found, name):
    first, second = (each[name] for each in found)
    assert second["gathered"] is None
    kinds = {type(part).__name__ for part in first["gathered"].modules()}
    assert not [kind for kind in kinds if "FSDP" in kind]
    grown = {key: value for key, value in first["finished"].items() if not key.startswith("average.")}
    assert equal(first["gathered"].state_dict(), grown)


def test_a_gathered_network_computes_what_grew(found, tmp_path):
    alone = ranks.train("before", folder=tmp_path, cases=ranks.SHARDED)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        assert torch.allclose(found[0]["before"]["gathered"](x), alone["gathered"](x), rtol=1e-9)


@pytest.mark.slow
def test_torchrun_starts_the_program_of_the_page_which_goes_on_with_any_number_of_processes(tmp_path):
    (tmp_path / "train.py").write_text(program())
    networks = []
    for size in ("2", "2", "1"):  # the second and third go on from the checkpoint of the one before
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", size, "train.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        # a processor that rounds in another way may keep a further seed
        assert done.stdout.startswith("[('2', 'bypass-mlp')")
        assert done.stdout.endswith("] were kept\n")
        networks.append(torch.load(tmp_path / "network.pt", weights_only=False).state_dict())
    assert "2.esper.seed.delta.out.weight" in networks[0]
    assert equal(networks[0], networks[1])
    for key, value in networks[0].items():
        assert torch.allclose(value, networks[2][key], atol=1e-4), key


@pytest.mark.slow
def test_a_seed_computes_in_the_precision_of_its_host(others):
    first, second = (each["half"] for each in others)
    assert equal(first["finished"], second["finished"])
    assert [entry["site"] for entry in first["summary"]["keeps"]] == ["0"]
    assert all(torch.isfinite(value).all() for value in first["finished"].values())
    exact = others[0]["after"]["finished"]
    near = [torch.allclose(value, exact[key], atol=0.2) for key, value in first["finished"].items()]
    assert all(near)
    assert not equal(first["finished"], exact)


def test_an_adapter_of_a_sharded_network_is_whole(found, folder):
    network = attach(ungraft(ranks.host(ranks.Case())), folder / "adapter of after", other_host=True)
    seeds = {key: value for key, value in found[0]["after"]["finished"].items() if ".esper." in key}
    assert seeds
    assert all(torch.equal(value, network.state_dict()[key]) for key, value in seeds.items())


def test_a_sharded_network_is_saved_whole_and_loaded_by_one_process(found, folder):
    network = load_grown(folder / "grown of after", ungraft(ranks.host(ranks.Case())))
    trained = found[0]["after"]["trained"]
    assert any(".esper." in key for key in network.state_dict())
    assert all(torch.equal(value, trained[key]) for key, value in network.state_dict().items())


def test_what_cannot_grow_is_refused_by_name_in_every_process(found):
    for each in found:
        said = each["refusals"]
        assert "its parameter '2.weight' is not; call fully_shard on the whole model" in said["partly"]
        assert "has no sites, which are found on a whole model" in said["bare"]
        assert "wrapped in FullyShardedDataParallel" in said["flat"]
        for name in ("tensors", "both"):
            assert "parameter '2.weight' is distributed as (" in said[name]
            assert "which is tensor parallelism; a network can grow under fully_shard alone" in said[name]
        assert "is distributed over 1 of 2 processes; shard the model over a mesh of all of them" in said["alone"]
        assert "ema is whole where the model is sharded; make ema before fully_shard" in said["whole"]
        assert "the model is whole where ema is sharded; make ema before fully_shard" in said["averaged"]
        assert said["early"] == "the network is not finished; call finish before gather"
        assert "the model that gather was given has no '0.weight', which the grown network has" in said["other"]
        assert "gather was given a model that is grafted or sharded" in said["grafted"]
        assert "load that of the first process in all of them" in said["empty"]
        assert "probe has 1, 2 batches in the processes" in said["uneven"]
