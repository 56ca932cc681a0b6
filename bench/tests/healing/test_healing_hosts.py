"""Test the trained hosts of `heal`: their problems, their training, and the folder that keeps them."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from esper.leyline.messages import InputError
from esper.store.files import VARIABLE
from esper_bench.healing import hosts as healing_hosts
from esper_bench.healing.data import FAMILIES, PIXEL_SCALE, SIZES, Subset, digit_pools, examples, problem
from esper_bench.healing.hosts import (
    GROUP,
    RESIDUAL,
    HostSet,
    architecture,
    cache_folder,
    largest,
    read_group,
    soundness,
    train_group,
    trained_weights,
    write_group,
)

NUMBERS = range(1000)


def one_of_each_family() -> list[int]:
    return [next(n for n in NUMBERS if problem(n).family == family) for family in FAMILIES]


# Problems.


def test_families_and_residual_hosts_are_drawn_as_often_as_they_say() -> None:
    counts = Counter(problem(n).family for n in NUMBERS)
    for family, p in FAMILIES.items():
        assert abs(counts[family] - 1000 * p) < 4 * math.sqrt(1000 * p * (1 - p)), family
    residual = [all(architecture(n).skips) for n in NUMBERS]
    assert sum(residual) / 1000 == pytest.approx(RESIDUAL, abs=0.06)


def test_a_host_is_plain_or_residual_throughout_and_fits_into_the_largest() -> None:
    whole = largest()
    for n in NUMBERS:
        host = architecture(n)
        assert len(set(host.skips)) == 1
        assert host.inputs <= whole.inputs
        assert host.outputs <= whole.outputs
        assert host.width in (16, 20, 24)
        assert set(host.hidden) <= {12, 16, 24}


@pytest.mark.parametrize("number", one_of_each_family())
def test_the_parts_of_a_problem_share_no_example(number: int) -> None:
    parts = [examples(problem(number), part) for part in list(Subset)[:5]]
    assert [len(part.y) for part in parts] == [SIZES[part] for part in list(Subset)[:5]]
    rows = np.concatenate([part.x.numpy() for part in parts])  # type: ignore[union-attr]
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert np.isfinite(rows).all()
    assert rows.shape[1] == problem(number).inputs
    for part in parts:
        assert set(part.y.tolist()) == set(range(problem(number).classes))


def test_no_digit_that_trains_a_host_is_in_a_probe_or_test_split_of_any() -> None:
    pools = [set(map(tuple, x.tolist())) for x, _ in digit_pools()]
    assert sum(map(len, pools)) == len(set().union(*pools)) == 1797
    digits = [n for n in NUMBERS if problem(n).family == "digits" and problem(n).noise == 0][:3]
    for part, pool in zip(list(Subset)[:5], pools, strict=True):
        known = {tuple(np.float32(row)) for row in pool}
        for n in digits:
            assert {tuple(row.numpy()) for row in examples(problem(n), part).x} <= known


def test_digits_that_test_final_hosts_test_no_other_host_and_train_none_of_theirs() -> None:
    every = {tuple(row): index for index, row in enumerate(load_digits().data)}

    def images(exchanged: bool) -> list[set[int]]:
        pools = [x * PIXEL_SCALE for x, _ in digit_pools(exchanged)]
        lowest = np.concatenate(pools).min(0)  # of every pixel, which is 0 somewhere
        return [{every[tuple(row)] for row in np.round(pool - lowest)} for pool in pools]

    usual, exchanged = images(False), images(True)
    assert [len(pool) for pool in exchanged] == [len(pool) for pool in usual]
    assert len(set().union(*exchanged)) == 1797
    for part in (Subset.PROBE, Subset.VALIDATION, Subset.TEST):
        assert exchanged[part] <= usual[Subset.HOST]
        assert usual[part] <= exchanged[Subset.HOST]


def test_fewer_examples_are_the_first_of_all() -> None:
    for number in one_of_each_family():
        few, whole = examples(problem(number), Subset.HOST, 20), examples(problem(number), Subset.HOST)
        assert torch.equal(few.x, whole.x[:20])  # type: ignore[index, arg-type]
        assert torch.equal(few.y, whole.y[:20])


# Training.


@pytest.fixture(scope="module")
def trained() -> dict[str, torch.Tensor]:
    return train_group(range(2), updates=300, starts=1)


def test_a_trained_host_is_far_better_than_an_untrained_one(trained: dict[str, torch.Tensor]) -> None:
    for place in range(2):
        weights = {k.removeprefix(f"{place}."): v for k, v in trained.items() if k.startswith(f"{place}.")}
        fresh = {name: value.detach() for name, value in architecture(place)().named_parameters()}
        assert set(weights) == set(fresh)
        assert soundness(place, weights, Subset.TEST) > soundness(place, fresh, Subset.TEST) + 0.4


def test_training_is_the_same_again_and_leaves_torchs_generator_alone(trained: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with torch.no_grad():
        again = train_group(range(2), updates=300, starts=1)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(again[name], value) for name, value in trained.items())


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
def test_the_weights_do_not_depend_on_how_populations_of_the_hosts_run(trained, mapping) -> None:  # type: ignore[no-untyped-def]
    again = train_group(range(2), updates=300, starts=1, of=replace(healing_hosts.VECTORS, mapping=mapping))
    assert all(torch.equal(again[name], value) for name, value in trained.items())


def test_a_host_is_trained_alike_whatever_its_neighbours(trained: dict[str, torch.Tensor]) -> None:
    alone = train_group([1], updates=300, starts=1)
    for name, value in alone.items():
        torch.testing.assert_close(value, trained[name.replace("0.", "1.", 1)], rtol=1e-2, atol=1e-2)


# The cache.


def test_a_group_of_hosts_is_trained_once_and_read_again(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    groups = []

    def quick(numbers: range, of: HostSet) -> dict[str, torch.Tensor]:
        groups.append(list(numbers))
        return train_group(numbers, updates=2, starts=1, of=of)

    monkeypatch.setattr(healing_hosts, "train_group", quick)
    healing_hosts._group.cache_clear()
    first = trained_weights(GROUP + 1)
    healing_hosts._group.cache_clear()
    again = trained_weights(GROUP + 1)
    healing_hosts._group.cache_clear()
    assert groups == [list(range(GROUP, 2 * GROUP))]
    assert [path.name for path in cache_folder().iterdir()] == ["hosts-000001.safetensors"]
    assert cache_folder().parent == tmp_path
    assert set(first) == set(dict(architecture(GROUP + 1)().named_parameters()))
    assert all(torch.equal(again[name], value) for name, value in first.items())


def test_the_folder_is_the_users_cache_folder_where_no_other_is_named(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "esper" / "heal-1"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "esper" / "heal-1"


@pytest.mark.parametrize("change", ["flip", "cut", "empty", "text"])
def test_a_damaged_file_is_refused(tmp_path, trained, change: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "hosts-000000.safetensors"
    write_group(path, trained)
    assert all(torch.equal(value, trained[name]) for name, value in read_group(path).items())
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    damaged = {"flip": bytes(content), "cut": path.read_bytes()[:-1], "empty": b"", "text": b"no weights\n"}[change]
    path.write_bytes(damaged)
    with pytest.raises(InputError) as refused:
        read_group(path)
    assert str(refused.value) == (
        f"{path} is damaged: its checksum is not that of its content; delete it, and its hosts are trained again"
    )
