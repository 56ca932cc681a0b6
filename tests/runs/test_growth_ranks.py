"""Test a network that grows under DistributedDataParallel, in two and three processes over gloo."""

import functools

import pytest
import torch

import ranks
from loops import STAGES, equal

pytestmark = pytest.mark.campaign

SEVERAL = {2: list(ranks.CASES), 3: ["shadow", "parts", "spoilt"]}
EVERYWHERE = [
    pytest.param(size, name, marks=[] if size == 2 else pytest.mark.slow)
    for size, names in SEVERAL.items()
    for name in names
]
COMPARABLE = ["plain", "shadow", "parts", "spoilt", "thrown"]
"""Cases that come to the same in one process: batch normalisation takes its statistics from a part of the batch."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return a function from the number of processes to what each of them found."""
    folder = tmp_path_factory.mktemp("ranks")
    return functools.cache(lambda size: ranks.finished(ranks.start(size, folder, SEVERAL[size]), size, folder))


@pytest.fixture(scope="module")
def alone():
    """Train in one process on all the data, and return what it finds."""
    return {name: ranks.train(name) for name in COMPARABLE}


def learned(found, key):
    """Return the tensors of a network without running statistics, of which each process has those of its last batch."""
    return {name: value for name, value in found[key].items() if "running" not in name}


@pytest.mark.parametrize(("size", "name"), EVERYWHERE)
def test_every_process_grows_as_the_first_does_which_decides(found, size, name):
    first, *others = (each[name] for each in found(size))
    for other in others:
        assert other["stages"] == first["stages"]
        assert other["summary"]["plantings"] == first["summary"]["plantings"]
        assert equal(learned(other, "trained"), learned(first, "trained"))
        assert equal(learned(other, "finished"), learned(first, "finished"))


@pytest.mark.parametrize(("size", "name"), [each for each in EVERYWHERE if each.values[1] in COMPARABLE])
def test_several_processes_grow_as_one_process_on_all_the_data(found, alone, size, name):
    several = found(size)[0][name]
    assert alone[name]["stages"] == several["stages"]
    assert alone[name]["finished"].keys() == several["finished"].keys()
    assert any(".esper." in key for key in several["finished"])
    for key, value in several["finished"].items():
        assert torch.allclose(value, alone[name]["finished"][key], rtol=1e-9, atol=1e-11), key


@pytest.mark.parametrize("name", ["parts", "norm"])
def test_a_seed_in_its_wrapper_learns_bit_for_bit_as_one_that_was_wrapped_again(found, name):
    for each in found(2):
        for key in ("trained", "finished"):
            assert equal(learned(each[name], key), learned(each[f"{name}, wrapped again"], key))


def test_a_wrapper_with_a_static_graph_grows_to_the_same_bits(found):
    for each in found(2):
        assert equal(each["norm"], each["norm, static"])


def test_a_training_saved_by_the_first_process_goes_on_in_all_of_them_to_the_same_bits(found):
    reached = set()
    for step in ranks.STOPS:
        for each in found(2):
            straight, resumed = each["norm"], each[f"norm from {step}"]
            reached |= set(straight["stages"][step - 1])
            assert equal(resumed["trained"], straight["trained"])
            assert resumed["summary"] == straight["summary"]
            assert resumed["stages"] == straight["stages"][step:]
    assert set(STAGES) <= reached


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_batch_that_is_not_finite_in_one_process_restores_all_of_them(found, size):
    for each in found(size):
        assert sum(each["spoilt"]["summary"]["rollbacks"].values()) == 1
        assert all(value.isfinite().all() for value in each["spoilt"]["trained"].values())
