"""Test the mixture `repair`: how often each problem is drawn, what a key decides, and what no split shares with another."""

import math
from collections import Counter
from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.host import check_host
from esper.kasmina.stack.rows import Stack
from esper.leyline.config.tree import HeuristicConfig, OptimizerConfig, build_config
from esper.leyline.data import keys
from esper.leyline.data.task import Instance, Split
from esper.leyline.messages import InputError
from esper.tasks.repair import (
    BLOCKS,
    DAMAGES,
    FAMILIES,
    HIDDEN,
    NARROW,
    POOLS,
    RANGES,
    SLIM,
    WIDTHS,
    Facts,
    describe,
    digit_pools,
    held_back,
    repair,
    sample,
)
from esper.tolaria.stacked.optimizer import Updates

FACTS = [describe(key) for key in range(2000)]
BORDERS = [key for part in RANGES.values() for key in (part[0], part[-1])]


def first(count: int = 1, **wanted: object) -> list[Facts]:
    """Find the first instances that were drawn so."""
    return [f for f in FACTS if all(getattr(f, name) == value for name, value in wanted.items())][:count]


def splits(key: int) -> tuple[Split, Split, Split, Split]:
    instance = sample(key)
    return instance.train, instance.probe, instance.validation, held_back(key)


def assert_as_often_as(drawn: Iterable[object], probabilities: dict[object, float]) -> None:
    counts = Counter(drawn)
    total = counts.total()
    assert set(counts) <= set(probabilities)
    for value, p in probabilities.items():
        assert abs(counts[value] - total * p) < 4 * math.sqrt(total * p * (1 - p)), (value, counts[value], total * p)


def evenly(values: Iterable[object]) -> dict[object, float]:
    counts = Counter(values)
    return {value: count / counts.total() for value, count in counts.items()}


# What is drawn, and how often.


def test_families_and_damages_are_drawn_independently_as_often_as_they_say() -> None:
    assert_as_often_as((f.family for f in FACTS), dict(FAMILIES))
    assert_as_often_as((f.damage for f in FACTS), dict(DAMAGES))
    joint: dict[object, float] = {(f, d): p * q for f, p in FAMILIES.items() for d, q in DAMAGES.items()}
    assert_as_often_as(((f.family, f.damage) for f in FACTS), joint)


def test_sizes_of_hosts_are_drawn_evenly() -> None:
    assert_as_often_as((f.host.width for f in FACTS), evenly(WIDTHS))
    sound = [f.host.hidden for f in FACTS if f.damage in ("none", "linear")]
    for block in range(BLOCKS):
        assert_as_often_as((hidden[block] for hidden in sound), evenly(HIDDEN))


def small_blocks(hidden: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(block for block, size in enumerate(hidden) if size < min(HIDDEN))


@pytest.mark.parametrize(("damage", "sizes"), [("narrow1", NARROW), ("narrow+linear", NARROW), ("frozen", SLIM)])
def test_damage_to_one_block_is_anywhere(damage: str, sizes: tuple[int, ...]) -> None:
    drawn = [f.host.hidden for f in FACTS if f.damage == damage]
    assert_as_often_as(map(small_blocks, drawn), evenly((block,) for block in range(BLOCKS)))
    assert_as_often_as((min(hidden) for hidden in drawn), evenly(sizes))


def test_two_narrow_blocks_are_anywhere_and_drawn_apart() -> None:
    drawn = [f.host.hidden for f in FACTS if f.damage == "narrow2"]
    assert_as_often_as(map(small_blocks, drawn), evenly((a, b) for b in range(BLOCKS) for a in range(b)))
    sizes = [tuple(hidden[block] for block in small_blocks(hidden)) for hidden in drawn]
    assert_as_often_as(sizes, evenly((a, b) for a in NARROW for b in NARROW))


def test_slim_hosts_are_slim_throughout() -> None:
    assert_as_often_as((size for f in FACTS if f.damage == "slim_all" for size in f.host.hidden), evenly(SLIM))


def test_what_is_linear_and_what_is_frozen_follows_from_the_damage() -> None:
    for f in FACTS:
        assert f.host.linear == (f.damage in ("linear", "narrow+linear"),) * BLOCKS
        slim = tuple(size in SLIM for size in f.host.hidden)
        assert f.host.frozen == (slim if f.damage == "frozen" else (False,) * BLOCKS)


@pytest.mark.parametrize(
    ("family", "name", "values"),
    [
        ("digits", "classes", range(2, 11)),
        ("digits", "noise", (0.0, 0.5, 1.0)),
        ("digits", "label_noise", (0.0, 0.0, 0.15)),
        ("digits", "examples", (120, 400, 1000)),
        ("spiral", "classes", (2, 3)),
        ("spiral", "detail", (0.6, 1.0, 1.4)),
        ("spiral", "examples", (300, 1000)),
        ("parity", "detail", (2, 3, 4)),
        ("checker", "detail", (2, 3)),
        ("checker", "examples", (300, 1000)),
        ("teacher", "classes", (2, 4, 6)),
        ("teacher", "detail", (4, 16)),
        ("teacher", "examples", (300, 1000)),
    ],
)
def test_what_varies_in_a_family_is_drawn_evenly(family: str, name: str, values: Iterable[object]) -> None:
    drawn = [f.host.outputs if name == "classes" else getattr(f, name) for f in FACTS if f.family == family]
    assert_as_often_as(drawn, evenly(values))


def test_every_digit_is_a_class_equally_often_and_in_any_place() -> None:
    for place in range(2):
        assert_as_often_as((f.digits[place] for f in FACTS if f.digits is not None), evenly(range(10)))
    assert all(len(set(f.digits)) == f.host.outputs for f in FACTS if f.digits is not None)


# What a key decides.


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_is_the_same_instance_in_every_call(family: str) -> None:
    key = first(family=family)[0].key
    assert describe(key) == describe(key)
    assert sample(key).host == sample(key).host
    for one, other in zip(splits(key), splits(key), strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.y, other.y)


def test_what_is_described_is_what_is_sampled() -> None:
    for key in BORDERS:
        instance, facts = sample(key), describe(key)
        assert (instance.host, instance.outputs) == (facts.host, facts.host.outputs)
        assert facts.key == key


def test_no_two_parts_share_a_key_and_no_two_keys_share_a_draw() -> None:
    every = np.concatenate([np.arange(part.start, part.stop) for part in RANGES.values()])
    assert np.diff(np.sort(every)).all()
    assert np.diff(np.sort(keys.key(keys.Purpose.INSTANCE, every))).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_instances_of_different_parts_have_other_data(family: str) -> None:
    drawn = [
        next(key for key in part if describe(key).family == family)
        for part in (RANGES["training"], RANGES["training"][100:], RANGES["validation"], RANGES["heldout"])
    ]
    inputs = [part.x[:20] for key in drawn for part in splits(key)]
    same = [(a, b) for b in range(len(inputs)) for a in range(b) if torch.equal(inputs[a], inputs[b])]
    assert not same


@pytest.mark.parametrize("key", [-1, RANGES["heldout"].stop])
def test_a_key_out_of_range_is_refused_with_the_ranges(key: int) -> None:
    sentence = (
        f"key {key:,} is not an instance of 'repair'; the keys are training 0 to 1,048,575, "
        "validation 1,048,576 to 1,114,111, heldout 1,114,112 to 1,179,647"
    )
    for reads in (describe, sample, held_back):
        with pytest.raises(InputError, match=f"^{sentence}$"):
            reads(key)


# Splits.


@pytest.mark.parametrize("family", FAMILIES)
def test_the_splits_of_an_instance_share_no_example_and_no_storage(family: str) -> None:
    for facts in first(3, family=family):
        parts = splits(facts.key)
        rows = torch.cat([part.x for part in parts])
        assert len(rows.unique(dim=0)) == len(rows)
        assert len({tensor.untyped_storage().data_ptr() for part in parts for tensor in part}) == 8


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "digits"])
def test_splits_have_the_sizes_that_were_drawn(family: str) -> None:
    for facts in first(3, family=family):
        assert [len(part.y) for part in splits(facts.key)] == [facts.examples, 200, 200, 400]


def test_splits_of_digits_are_as_large_as_the_pools_allow() -> None:
    for facts in first(20, family="digits"):
        there = [int(np.isin(y, facts.digits).sum()) for _, y in digit_pools()]
        wanted = [min(count, most) for count, most in zip(there, (facts.examples, 200, 200, 400), strict=True)]
        assert [len(part.y) for part in splits(facts.key)] == wanted


def test_every_train_split_gives_a_full_batch_of_the_defaults() -> None:
    batch = build_config(repair().defaults).data.batch_size
    smallest = [f for f in FACTS if f.family == "digits" and f.host.outputs == 2]
    assert min(len(sample(f.key).train.y) for f in smallest) >= batch


def test_every_digit_is_in_one_pool_and_every_pool_has_its_share_of_each() -> None:
    pools = digit_pools()
    pixels = np.concatenate([x for x, _ in pools])
    assert [len(x) for x, _ in pools] == list(POOLS)
    assert len(np.unique(pixels, axis=0)) == len(pixels) == 1797
    for _, y in pools:
        assert np.abs(np.bincount(y, minlength=10) / len(y) - 0.1).max() < 0.015


def pool_rows(x: Tensor) -> set[tuple[float, ...]]:
    """Sort the pixels of digits, whose order differs from instance to instance."""
    return set(map(tuple, x.sort(dim=1).values.tolist()))


def test_every_split_of_digits_comes_from_its_own_pool() -> None:
    pools = [pool_rows(torch.from_numpy(x).float()) for x, _ in digit_pools()]
    assert sum(map(len, pools)) == len(set().union(*pools)) == 1797
    clean = first(10, family="digits", noise=0.0)
    assert len(clean) == 10
    for facts in clean:
        for part, pool in zip(splits(facts.key), pools, strict=True):
            assert pool_rows(part.x) <= pool


@pytest.mark.parametrize("noise", [0.5, 1.0])
def test_noise_is_on_the_features_of_every_split(noise: float) -> None:
    (facts,) = first(family="digits", noise=noise, examples=1000)
    assert facts.digits is not None
    for part, (x, y) in zip(splits(facts.key), digit_pools(), strict=True):
        clean = x[np.isin(y, facts.digits)].var(axis=0).mean()
        assert part.x.var(0).mean().item() - clean == pytest.approx(noise**2, rel=0.2)


def test_as_many_training_labels_are_wrong_as_were_drawn() -> None:
    (facts,) = first(family="digits", label_noise=0.15, noise=0.0, examples=1000)
    assert facts.digits is not None
    wrong = []
    for part, (x, y) in zip(splits(facts.key), digit_pools(), strict=True):
        rows = torch.from_numpy(x).float().sort(dim=1).values
        which = torch.cdist(part.x.sort(dim=1).values, rows).argmin(1).numpy()
        wrong.append(float((np.array(facts.digits)[part.y.numpy()] != y[which]).mean()))
    expected = 0.15 * (1 - 1 / facts.host.outputs)
    assert wrong[1:] == [0, 0, 0]
    assert wrong[0] == pytest.approx(expected, abs=4 * math.sqrt(expected / len(sample(facts.key).train.y)))


# Data.


def test_the_class_of_a_parity_is_that_of_its_first_bits() -> None:
    for facts in first(3, family="parity"):
        for part in splits(facts.key):
            assert torch.equal((part.x[:, : int(facts.detail)] > 0).sum(1) % 2, part.y)


def test_the_class_of_a_checkerboard_is_the_colour_of_its_square() -> None:
    for facts in first(3, family="checker"):
        for part in splits(facts.key):
            squares = ((part.x.double() / 4 + 0.5) * facts.detail).floor().sum(1).long()
            assert (squares % 2 == part.y).float().mean() > 0.999  # float32 may round over an edge


def test_the_points_of_a_spiral_lie_near_their_arm() -> None:
    for facts in first(3, family="spiral"):
        x, y = sample(facts.key).train
        t = torch.linspace(0, 1, 2000)
        angle = 2 * math.pi * (facts.detail * t + torch.arange(facts.host.outputs)[:, None] / facts.host.outputs)
        arms = 2 * torch.stack([t * angle.cos(), t * angle.sin()], dim=-1)
        distance = (x[:, None] - arms[y]).norm(dim=-1).amin(1)
        assert 0.5 * facts.noise < distance.mean() < 1.1 * facts.noise


def test_no_class_of_a_teacher_takes_nearly_all_of_a_split() -> None:
    for facts in first(20, family="teacher"):
        for part in splits(facts.key):
            assert part.y.bincount().max() < 0.85 * len(part.y)


def test_labels_of_a_teacher_can_be_learned_from_another_split() -> None:
    (facts,) = first(family="teacher", examples=1000, detail=4)
    train, *others = splits(facts.key)
    w = torch.linalg.lstsq(quadratic(train.x), F.one_hot(train.y).float()).solution
    for part in others:
        guess = F.one_hot(part.y).sum(0).max() / len(part.y)
        assert ((quadratic(part.x) @ w).argmax(1) == part.y).float().mean() > guess + 0.1


def quadratic(x: Tensor) -> Tensor:
    return torch.cat([torch.ones(len(x), 1), x, x.square()], dim=1)


def test_features_are_of_the_order_of_one_and_finite() -> None:
    for key in range(40):
        for part in splits(key):
            assert part.x.isfinite().all()
            assert 0.5 < part.x.std() < 2


def test_features_have_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert {part.x.dtype for key in range(5) for part in splits(key)} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)
    assert {part.x.dtype for key in range(5) for part in splits(key)} == {torch.float32}


# Hosts.


def one_of_each_damage() -> list[Instance]:
    return [sample(first(damage=damage)[0].key) for damage in DAMAGES]


def blocks(host: nn.Module) -> list[nn.Module]:
    segments = host.get_submodule("segments")
    assert isinstance(segments, nn.ModuleList)
    return list(segments)[1:-1]


def test_every_host_fits_its_data_and_the_largest_fits_all() -> None:
    task = repair()
    check_host(task.largest(), torch.randn(2, *task.inputs), task.objective.outputs)
    biggest = dict(task.largest().named_parameters())
    for key in range(200):
        own = dict(describe(key).host().named_parameters())
        assert list(own) == list(biggest)
        assert all(n <= m for name in own for n, m in zip(own[name].shape, biggest[name].shape, strict=True))
    for instance in one_of_each_damage():
        host = instance.host()
        check_host(host, instance.train.x[:2], instance.outputs)
        assert [slot.name for slot in host.slots] == [slot.name for slot in task.largest().slots]
        assert len(host.slots) == BLOCKS


def test_a_host_has_as_many_parameters_as_its_sizes_say() -> None:
    for f in FACTS[:100]:
        d, count = f.host.width, sum(p.numel() for p in f.host().parameters())
        inner = sum(2 * d * r + r + d for r in f.host.hidden)
        assert count == f.host.inputs * d + d + inner + d * f.host.outputs + f.host.outputs


def test_parameters_do_not_train_in_the_frozen_block_alone() -> None:
    for damage in DAMAGES:
        (facts,) = first(damage=damage)
        host = facts.host()
        fixed = [not any(p.requires_grad for p in block.parameters()) for block in blocks(host)]
        assert fixed == list(facts.host.frozen)
        assert sum(not p.requires_grad for p in host.parameters()) == 4 * sum(facts.host.frozen)


def test_blocks_without_a_nonlinearity_are_affine() -> None:
    for damage in DAMAGES:
        (facts,) = first(damage=damage)
        x, y = torch.randn(2, 50, facts.host.width, dtype=torch.float64)
        for block in blocks(facts.host().double()):
            bend = block(x + y) - block(x) - block(y) + block(torch.zeros_like(x))
            assert (bend.abs().max() < 1e-12) == ("linear" in damage)


@pytest.fixture
def population() -> tuple[Stack, list[Instance], list[nn.Module]]:
    """Make one host of every damage, in float64, in the leading corners of a stack of the largest."""
    instances = one_of_each_damage()
    stack = Stack(repair().largest(), len(instances), moments=("first_moment", "second_moment"), dtype=torch.float64)
    hosts = []
    for row, instance in enumerate(instances):
        with drawn_with(row):
            hosts.append(instance.host().double())
        stack.write(row, hosts[-1])
    return stack, instances, hosts


def padded(x: Tensor) -> Tensor:
    return F.pad(x.double(), (0, 64 - x.shape[1]))


def test_a_padded_row_computes_what_the_host_computes_alone(
    population: tuple[Stack, list[Instance], list[nn.Module]],
) -> None:
    stack, instances, hosts = population
    x = torch.stack([padded(instance.train.x[:30]) for instance in instances])
    with torch.no_grad():
        outputs = stack(x, slice(0, len(hosts)))
        for row, (host, instance) in enumerate(zip(hosts, instances, strict=True)):
            alone = host(instance.train.x[:30].double())
            torch.testing.assert_close(outputs[row, :, : instance.outputs], alone, rtol=0, atol=1e-12)


def test_what_is_padded_stays_zero_in_training(population: tuple[Stack, list[Instance], list[nn.Module]]) -> None:
    stack, instances, hosts = population
    rows, optimizer = slice(0, len(hosts)), partial(Updates, config=OptimizerConfig(lr=1e-2, weight_decay=0.1))
    x = torch.stack([padded(instance.train.x[:30]) for instance in instances])
    real = Stack(repair().largest(), len(hosts), dtype=torch.float64)
    for row, host in enumerate(hosts):
        marked = {name: torch.ones_like(value) for name, value in host.state_dict().items()}
        host.load_state_dict(marked)
        real.write(row, host)
    padding = real.columns["value"] == 0
    assert padding.any(1).all()
    start = stack.columns["value"].clone()
    for _ in range(5):
        outputs = stack(x, rows)
        losses = [
            F.cross_entropy(outputs[row, :, : instance.outputs], instance.train.y[:30])
            for row, instance in enumerate(instances)
        ]
        torch.stack(losses).sum().backward()
        assert not stack.columns["gradient"][padding].any()
        optimizer(stack, rows).step()
    assert not stack.columns["value"][padding].any()
    assert (stack.columns["value"] != start).any(1).all()


# The task.


def test_the_sealed_mixture_has_no_test_split() -> None:
    key = RANGES["heldout"][0]
    assert repair().sealed().test_split(key) is None
    split = repair().test_split(key)
    assert split is not None
    assert torch.equal(split.x, held_back(key).x)


def test_the_parts_are_those_of_the_mixture() -> None:
    assert {part: repair().keys(part) for part in ("training", "validation", "heldout")} == dict(RANGES)


def test_the_defaults_are_those_under_which_there_is_something_to_decide() -> None:
    config = build_config(repair().defaults)
    assert (config.steps, config.data.batch_size, config.data.batches_per_step) == (24, 32, 16)
    assert (config.lifecycle.max_seeds, config.lifecycle.max_training_seeds) == (2, 2)
    assert (config.reward.rent, config.reward.rent_size) == (0.1, 0)  # by which the figures of its pages are made


def test_the_heuristic_runs_by_the_settings_that_were_tuned_on_training_instances() -> None:
    config = build_config(repair().defaults)
    gates = config.gates
    assert config.heuristic == HeuristicConfig()
    assert (gates.gain_z, gates.contribution_z, gates.min_contribution) == (-1.0, 0.0, -0.02)
