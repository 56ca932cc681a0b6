"""Test the task `heal-full`: the instances of `heal` with a slot behind the head, and a menu for both ends."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from esper.leyline.config.tree import build_config
from esper.leyline.lifecycle.view import View
from esper.leyline.lifecycle.vocabulary import Op, Stage
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry
from esper.tasks.catalog import get_task
from esper.tolaria.engine import VectorizedEngine, play
from esper_bench.controllers.forest import Forests
from esper_bench.controllers.healing_features import TAUGHT_FEATURES, slot_features, table
from esper_bench.controllers.placement import Collapse, DriftRise, ParticipationDrop, Placement, Uniform
from esper_bench.controllers.plans import FURTHER, PLACED, UNIFORM, choices_of, placed_plans, plans_of
from esper_bench.controllers.several import Sites
from esper_bench.controllers.shipped import Shipped
from esper_bench.controllers.tree_fitting import fit_trees
from esper_bench.controllers.trees import Trees, options_of
from esper_bench.evaluation.declared import opponents_of
from esper_bench.evaluation.opponents import oracle_plans
from esper_bench.healing.damage import DamageKind
from esper_bench.healing.heal import describe, heal, heal_eora, heal_scratch, heal_taught, heal_unfrozen
from esper_bench.healing.hosts import FULL, VECTORS, cache_folder, trained_weights
from quick_healing import quick_hosts

ENDS = ("sparse-rows", "sparse-head", "full-head")


@pytest.fixture(autouse=True, scope="module")
def _quick_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_hosts(tmp_path_factory.mktemp("cache")):
        yield


def keys_of(classes: set[int]) -> list[int]:
    """Find the first plain training keys of hosts with so many classes, one each."""
    found: dict[int, int] = {}
    for key in range(200):
        facts = describe(key)
        if facts.problem.classes in classes and facts.plain and facts.damage.kind != DamageKind.REMOVED:
            found.setdefault(facts.problem.classes, key)
    return list(found.values())


def opened(name: str, keys: list[int]) -> View:
    """Return the view of a task before the first step, with its sensors."""
    task = get_task(name).sealed()
    config = build_config(
        task.defaults, {"task": name, "envs": len(keys), "baselines": [], "probe": {"sensors_every": 1000}}
    )
    return VectorizedEngine(task, config).reset(np.array(keys))


# What a key stands for.


@pytest.mark.parametrize("build", [heal, heal_taught, heal_unfrozen, heal_scratch, heal_eora])
def test_the_instances_are_those_of_heal(build) -> None:  # type: ignore[no-untyped-def]
    full, small = build(FULL), build(VECTORS)
    assert (full.name, full.ranges) == (small.name.replace("heal", "heal-full"), small.ranges)
    for key in (0, 7, 2**20 + 3):
        instance, other = full.instance(key), small.instance(key)
        for split in ("train", "probe", "validation"):
            ours, theirs = getattr(instance, split), getattr(other, split)
            assert torch.equal(ours.x, theirs.x)
            assert torch.equal(ours.y, theirs.y)
        assert describe(key, FULL).damage == describe(key).damage
        torch.manual_seed(0)
        host = instance.host()
        torch.manual_seed(0)
        closed = other.host()
        assert torch.equal(host(instance.train.x), closed(instance.train.x))
        assert {not p.requires_grad for p in host.parameters()} == {build not in (heal_unfrozen, heal_scratch)}
        assert [slot.name for slot in host.slots] == [*(slot.name for slot in closed.slots), "head"]
    assert (instance.intact is not None) == (build is heal_taught)


def test_the_hosts_are_read_from_the_files_of_heal() -> None:
    weights, own = trained_weights(3, FULL), trained_weights(3, VECTORS)
    assert all(torch.equal(value, own[name]) for name, value in weights.items())
    assert cache_folder(FULL) == cache_folder(VECTORS)


def test_the_menu_has_that_of_heal_and_seeds_for_both_ends_and_every_slot_may_have_one() -> None:
    full = heal(FULL)
    assert full.menu[: len(heal().menu)] == heal().menu
    assert {*ENDS, "bypass-mlp-2", "bypass-mlp-small", "bypass-mlp-8", "bypass-linear"} <= set(full.menu)
    config = build_config(full.defaults)
    assert (config.lifecycle.max_seeds, config.lifecycle.max_training_seeds) == (7, 7)
    assert config.governor.param_limit == 0.06


def test_the_opponents_are_those_of_heal_on_tasks_of_the_same_hosts() -> None:
    for name in ("heal-full", "heal-full-taught"):
        own, other = opponents_of(name), opponents_of(name.replace("-full", ""))
        assert own.names == other.names
        assert {"fitted-tree", "fine-tuning", "from-scratch", "closed-form", "oracle"} <= set(own.names)
        for reference in own.references.values():
            assert reference.task().name.startswith("heal-full")
            assert get_task(reference.task().name).name == reference.task().name


# Plans.


def test_the_plans_cover_both_ends_and_those_of_heal_are_what_they_were() -> None:
    small, full = opened("heal", [0, 5]).space, opened("heal-full", [0, 5]).space
    assert (full.heads, full.slots) == (1, (*small.slots, "head"))
    assert choices_of(small) == placed_plans(6)
    assert [plan for plan in choices_of(full) if plan in choices_of(small)] == choices_of(small)
    assert [plan.choice for plan in oracle_plans(full)] == choices_of(full) == placed_plans(6, heads=1)
    assert {placed.plan for placed in choices_of(full)} == {UNIFORM, *PLACED, *FURTHER}
    names = {blueprint.name for blueprint in full.blueprints}
    singles = {placed.plan.name for placed in plans_of(full)}
    assert names <= singles | {"low-rank", "bypass-rank-1"}  # which other plans of one seed stand for


@pytest.mark.parametrize("rule", [Uniform, ParticipationDrop, Collapse, Sites, DriftRise, Trees, Shipped])
def test_rules_and_trees_plant_what_they_plant_on_heal(rule: type[Placement]) -> None:
    keys = list(range(8))
    small, full = (rule().pick(opened(f"heal{name}-taught", keys)) for name in ("", "-full"))
    assert list(full.plans) == list(small.plans)
    np.testing.assert_array_equal(full.slot, small.slot)


def test_trees_are_fitted_on_the_plans_of_both_ends_and_choose_among_them() -> None:
    view = opened("heal-full-taught", list(range(6)))
    x = table(slot_features(view, taught=True), TAUGHT_FEATURES)
    assert x.shape[1] == 6
    objective = {placed: np.zeros(6) for placed in placed_plans(6, heads=1)}
    wanted = next(placed for placed in objective if placed.name == "full head at 6")
    objective[wanted] = np.ones(6)
    forests = Forests(tuple(TAUGHT_FEATURES), fit_trees(x, objective), 0)
    options, gains = options_of(forests, x, heads=1)
    assert len(options) == len(objective)
    assert {options[index] for index in gains.argmax(1)} == {(wanted.plan, 6)}
    picks = Trees(forests).pick(view)
    assert (set(picks.plans), set(picks.slot.tolist())) == ({wanted.plan}, {6})
    assert {option for option, _ in options_of(forests, x)[0]} == {UNIFORM, *PLACED, *FURTHER[:-9]}


# Growing.


def grown(keys: list[int], seeds: dict[str, str], **settings: object) -> VectorizedEngine:
    """Play some steps on these keys with a seed at each of these slots, and return the engine."""
    task = heal(FULL).sealed()
    ours = {"task": task.name, "envs": len(keys), "baselines": [], "gates": {"permissive": True}, "steps": 4}
    engine = VectorizedEngine(task, build_config(task.defaults, ours, settings))
    engine.reset(np.array(keys))
    play(
        engine,
        Schedule([ScheduleEntry(at=0, op=Op.GERMINATE, slot=s, blueprint=b, keep=True) for s, b in seeds.items()]),
    )
    return engine


def test_seeds_at_both_ends_choose_true_rows_and_leave_the_host_and_all_padding_bitwise_as_they_were() -> None:
    """Stack hosts of 2, 4 and 10 classes: no row beyond them is chosen, and what is padding stays exactly 0."""
    keys = keys_of({2, 4, 10})
    engine = grown(keys, {"embed": "sparse-rows", "head": "sparse-head"}, governor={"param_limit": 0.2})
    assert (engine.state.seeds.stage[:, [0, -1]] != Stage.DORMANT).all()
    body, facts = engine.population.body, [describe(key) for key in keys]  # type: ignore[attr-defined]
    for row, (key, own) in enumerate(zip(keys, facts, strict=True)):
        host = heal(FULL).instance(key).host()
        before = {name: value.clone() for name, value in host.state_dict().items()}
        assert all(torch.equal(v, before[n]) for n, v in body.host.read(row, host).state_dict().items())
        for slot, most in ((0, own.problem.inputs), (6, own.problem.classes)):
            delta = body.seed_module(engine.state.seeds, row, slot).delta
            assert len(delta.chosen) == min(8, most)
            assert delta.chosen.max() < most
            assert any(parameter.count_nonzero() for parameter in delta.parameters())
            at = slot, int(body.layout.form_of[slot, engine.state.seeds.blueprint[row, slot]])
            stack, place = body.stacks[at], int(np.flatnonzero(body.envs[at] == row)[0])
            for name, parameter in delta.named_parameters():
                rest = stack.parameter(f"delta.{name}")[place].detach().clone()
                rest[tuple(slice(0, size) for size in parameter.shape)] = 0
                assert not rest.count_nonzero()


def test_the_rows_of_the_embedding_are_those_with_the_largest_gradient() -> None:
    (key,) = keys_of({10})
    engine = grown([key], {"embed": "sparse-rows"})
    instance = heal(FULL).instance(key)
    host, x = instance.host(), instance.train.x
    stream = host.segments[0](x).detach().requires_grad_()
    z = stream
    for segment in host.segments[1:]:
        z = segment(z)
    torch.nn.functional.cross_entropy(z, instance.train.y).backward()
    norms = (x.mT @ stream.grad).norm(dim=1)
    chosen = engine.population.body.seed_module(engine.state.seeds, 0, 0).delta.chosen  # type: ignore[attr-defined]
    assert chosen.tolist() == sorted(norms.argsort(descending=True)[:8].tolist())


@pytest.mark.parametrize("name", [*ENDS[1:], "low-rank"])
def test_a_network_with_a_seed_behind_its_head_is_exported_as_plain_torch(name: str) -> None:
    keys = keys_of({4, 10})
    engine = grown(keys, {"head": name})
    costs = {"full-head": lambda w, c: c * (w + 1), "sparse-head": lambda w, c: min(8, c) * (w + 1)}
    task, added = heal(FULL), engine.population.table.added_params(engine.state.seeds)
    metric, _ = engine.evaluate([task.test_split(key) for key in keys])
    for row, key in enumerate(keys):
        own = describe(key)
        cost = costs.get(name, lambda w, c: 5 * c)(own.architecture.width, own.problem.classes)
        assert added[row] == cost <= 0.06 * engine.population.host_params[row]
        network, _ = engine.export(row)
        x, y = task.test_split(key)
        assert float((network.eval()(x).argmax(-1) == y).float().mean()) == pytest.approx(metric[row])
        exported = torch.export.export(network, (x[:2],), strict=False).module()
        torch.testing.assert_close(exported(x[:2]), network(x[:2]))
