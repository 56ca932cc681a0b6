"""Test the mixture `heal`: what a key stands for, and that only seeds train."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.kasmina.blueprints import drawn_with
from esper.leyline.config.tree import build_config
from esper.leyline.data.task import Split
from esper.leyline.lifecycle.vocabulary import Op, Stage
from esper.leyline.messages import InputError
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry
from esper.tolaria.engine import VectorizedEngine, play
from esper_bench.healing.damage import OTHER_PROBABILITIES, DamageKind, damage_split
from esper_bench.healing.data import HEALING, Subset, examples
from esper_bench.healing.heal import (
    DEFAULTS,
    KEYS,
    RANGES,
    DamagedHost,
    describe,
    heal,
    heal_redrawn,
    heal_scratch,
    heal_unfrozen,
)
from esper_bench.healing.hosts import VECTORS
from quick_healing import quick_hosts

HOSTS = VECTORS.count
PARTS = list(KEYS.values())


@pytest.fixture(autouse=True, scope="module")
def _quick_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_hosts(tmp_path_factory.mktemp("cache")):
        yield


def splits(key: int) -> tuple[Split, Split, Split, Split]:
    task = heal()
    instance, test = task.instance(key), task.test_split(key)
    assert test is not None
    return instance.train, instance.probe, instance.validation, test


def first(kind: DamageKind) -> int:
    return next(key for key in range(1000) if describe(key).damage.kind == kind)


# What a key stands for.


def test_parts_share_no_key_no_host_and_no_problem() -> None:
    numbers = [{describe(key).number for key in part[:HOSTS]} for part in PARTS]
    assert [len(each) for each in numbers] == [HOSTS] * 5
    assert len(set().union(*numbers)) == 5 * HOSTS
    keys = np.concatenate([np.arange(part.start, part.stop) for part in PARTS])
    assert len(np.unique(keys)) == len(keys)


def test_a_host_returns_with_other_damage() -> None:
    for key in range(20):
        one, other = describe(key), describe(key + HOSTS)
        assert one.number == other.number
        assert one.problem == other.problem
        assert one.damage != other.damage


def test_a_key_out_of_range_is_refused_with_the_ranges() -> None:
    with pytest.raises(
        InputError, match=r"^key -1 is not an instance of 'heal'; the keys are training 0 to 1,048,575, "
    ):
        describe(-1)


@pytest.mark.parametrize("kind", [DamageKind.PRUNED, DamageKind.INPUT, DamageKind.LABELS])
def test_an_instance_heals_on_examples_of_its_host_in_the_damaged_world(kind: DamageKind) -> None:
    facts = describe(first(kind))
    train = splits(facts.key)[0]
    own = damage_split(examples(facts.problem, Subset.HOST), facts.damage, facts.problem.classes)
    assert len(train.y) == HEALING
    assert torch.equal(train.x, own.x[:HEALING])  # type: ignore[index, arg-type]
    assert torch.equal(train.y, own.y[:HEALING])


def test_no_example_of_a_host_is_in_the_probe_validation_or_test_split() -> None:
    for key in (*range(6), RANGES["heldout"].start):
        facts = describe(key)
        if facts.damage.kind == DamageKind.INPUT and facts.damage.severity == 0:
            continue  # dead inputs can make two examples alike
        own = damage_split(examples(facts.problem, Subset.HOST), facts.damage, facts.problem.classes).x
        seen = {tuple(row.tolist()) for row in own}  # type: ignore[union-attr]
        _, *held = splits(key)
        for split in held:
            assert not seen & {tuple(row.tolist()) for row in split.x}
        assert [len(split.y) for split in held] == [100, 200, 397]


@pytest.mark.parametrize("build", [heal, heal_unfrozen, heal_redrawn, heal_scratch])
def test_the_tasks_have_the_same_data_and_hosts_that_are_frozen_or_not(build) -> None:  # type: ignore[no-untyped-def]
    instance, other = build().instance(5), heal().instance(5)
    assert torch.equal(instance.train.x, other.train.x)
    frozen = {not parameter.requires_grad for parameter in instance.host().parameters()}
    assert frozen == {build is heal}
    assert build_config(build().defaults).steps * 2 == 80


def test_a_removed_block_is_named_as_a_skip_so_that_a_saved_network_can_be_rebuilt() -> None:
    facts = describe(
        next(k for k in range(1000) if describe(k).plain and describe(k).damage.kind == DamageKind.REMOVED)
    )
    factory = DamagedHost(facts.number, facts.damage, frozen=True)
    assert [k + 1 for k, skip in enumerate(factory.architecture.skips) if skip] == list(facts.damage.segments)
    with drawn_with(0):
        host, rebuilt = factory(), factory.architecture()
    rebuilt.load_state_dict(host.state_dict())
    x = torch.randn(4, factory.architecture.inputs)
    assert torch.equal(host(x), rebuilt(x))


def test_the_damage_of_the_last_keys_is_of_kinds_that_no_other_key_has() -> None:
    kinds = [{describe(key).damage.kind for key in keys[:200]} for keys in PARTS]
    assert kinds[4] == set(OTHER_PROBABILITIES)
    assert not kinds[4] & set().union(*kinds[:4])


def test_dead_units_are_drawn_anew_row_by_row_in_each_start_of_a_population() -> None:
    keys = [first(DamageKind.PRUNED), first(DamageKind.NONE)]
    task, segment = heal_redrawn(), describe(keys[0]).damage.segments[0]
    weights = []
    for seed in (0, 1):
        config = build_config(task.defaults, {"task": task.name, "envs": 2, "baselines": [], "seed": seed})
        engine = VectorizedEngine(task.sealed(), config)
        engine.reset(np.array(keys))
        body = engine.population.body  # type: ignore[attr-defined]
        hosts = [body.host.read(row, task.instance(key).host()) for row, key in enumerate(keys)]
        weights.append(hosts[0].segments[segment][0].weight)
        sound = heal().instance(keys[1]).host().state_dict()
        assert all(torch.equal(value, sound[name]) for name, value in hosts[1].state_dict().items())
    dead = ~heal().instance(keys[0]).host().segments[segment][0].weight.any(1)
    one, other = weights
    assert dead.any()
    assert one.any(1).all()
    assert torch.equal(one[~dead], other[~dead])
    assert not (one[dead] == other[dead]).any()


# Growing.


def grown(keys: list[int], entries: list[ScheduleEntry]) -> VectorizedEngine:
    task = heal()
    task = replace(task, sample=lambda key: heal().sample(keys[key % len(keys)]))
    config = build_config(
        DEFAULTS, {"task": "heal", "envs": len(keys), "baselines": [], "gates": {"permissive": True}, "steps": 8}
    )
    engine = VectorizedEngine(task.sealed(), config)
    engine.reset()
    play(engine, Schedule(entries))
    return engine


def test_a_grown_episode_leaves_every_frozen_host_bitwise_unchanged() -> None:
    keys = [first(kind) for kind in (DamageKind.PRUNED, DamageKind.REMOVED, DamageKind.INPUT)]
    entries = [
        ScheduleEntry(at=0, op=Op.GERMINATE, slot=slot, blueprint="bypass-rank-1", keep=True)
        for slot in ("block1", "block3")
    ]
    engine = grown(keys, entries)
    assert (engine.state.seeds.stage == Stage.FOSSILIZED).sum(1).tolist() == [2, 2, 2]
    body = engine.population.body  # type: ignore[attr-defined]
    for row, key in enumerate(keys):
        host = heal().instance(key).host()
        before = host.state_dict()
        after = body.host.read(row, heal().instance(key).host()).state_dict()
        assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_a_seed_over_the_cap_is_refused() -> None:
    entries = [
        ScheduleEntry(at=0, op=Op.GERMINATE, slot=f"block{k}", blueprint="bypass-rank-4", keep=True) for k in range(5)
    ]
    engine = grown([0, 1], entries)
    added = engine.population.table.added_params(engine.state.seeds)
    hosts = engine.population.host_params
    assert (added <= 0.06 * hosts).all()
    assert (added > 0).all()
