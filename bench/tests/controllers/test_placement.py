"""Test controllers that plant all their seeds in the first step, on the hosts of `heal`."""

import itertools
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import esper
from esper.leyline.config.tree import SENSOR_FAMILIES, build_config
from esper.leyline.lifecycle.view import View
from esper.leyline.lifecycle.vocabulary import Actions, Op, Refusal, Stage
from esper.tamiyo.catalog import find_controller, get_controller, with_sensors
from esper.tasks.small import classical
from esper.tolaria.engine import Observer, Step, VectorizedEngine, planted, play
from esper.tolaria.measure.sensors import SENSORS
from esper_bench.controllers.catalog import PLACEMENTS
from esper_bench.controllers.handover import Handover
from esper_bench.controllers.placement import Collapse, DriftRise, Picks, Placement, Uniform
from esper_bench.controllers.plans import BYPASS, HERE, MIXED, NONE, SEVERAL, UNIFORM
from esper_bench.healing.damage import DamageKind
from esper_bench.healing.heal import describe, heal, heal_taught
from quick_healing import facts_of_first_hosts, quick_hosts


@pytest.fixture(autouse=True, scope="module")
def _quick_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_hosts(tmp_path_factory.mktemp("cache")):
        yield


def keys_of(kind: DamageKind, count: int = 1, sites: Collection[int] = (0, 1)) -> list[int]:
    """Find plain hosts that are trained together, with one damage of a kind at as many blocks as `sites` allows."""
    fit = (
        facts.key
        for facts in facts_of_first_hosts()
        if facts.plain and facts.damage.kind == kind and len(facts.damage.segments) in sites
    )
    found = list(itertools.islice(fit, count))
    assert len(found) == count, kind
    return found


def engine_for(
    name: str,
    keys: list[int],
    taught: bool = False,
    steps: int = 8,
    limit: float = 0.06,
    families: tuple[str, ...] | None = None,
) -> tuple[VectorizedEngine, Placement]:
    task = heal_taught() if taught else heal()
    fixed: dict[str, object] = {
        "task": task.name,
        "envs": len(keys),
        "baselines": [],
        "steps": steps,
        "controller": name,
    }
    fixed["governor"] = {"param_limit": limit}
    fixed["probe"] = {"sensors": families}
    config = build_config(task.defaults, find_controller(name).settings, fixed)
    client = get_controller(name, config)
    assert isinstance(client, Placement)
    engine = VectorizedEngine(task.sealed(), with_sensors(config, client))
    engine.reset(np.array(keys))
    return engine, client


def view_with(engine: VectorizedEngine, **sensors: list[list[float]]) -> View:
    """Return the view of an engine with other values of some sensors."""
    view = engine.view()
    values = view.measurements.sensors.copy()
    for name, value in sensors.items():
        values[..., view.space.sensors.index(name)] = value
    return view._replace(measurements=view.measurements._replace(sensors=values))


def test_uniform_plants_around_every_block_in_the_first_step_and_keeps_all() -> None:
    engine, client = engine_for("uniform", keys_of(DamageKind.PRUNED), limit=0.2)
    engine.step(client.act(engine.view()), client.reasons(), lambda view, refused: _more(client, view, refused))
    seeds = engine.view().seeds
    assert (seeds.stage[0] != Stage.DORMANT).tolist() == [False, *[True] * 5]
    assert [entry["step"] for entry in engine.seed_history.lists["plantings"]] == [0] * 5
    assert {entry["reason"] for entry in engine.seed_history.lists["plantings"]} == {"every block gets a bypass"}
    engine.reset()
    seen = Counted()
    play(engine, client, seen)
    assert (engine.view().seeds.stage[0] == Stage.FOSSILIZED).tolist() == [False, *[True] * 5]
    assert (seen.planted, seen.operations) == (5, 15)


class Counted(Observer):
    """Counts the seeds that were planted and the operations other than WAIT that were carried out."""

    def __init__(self) -> None:
        self.planted = self.operations = 0

    def stepped(self, step: Step) -> None:
        self.planted += planted(step)
        decided = [(step.outcome.actions, step.outcome.refused), *step.further]
        self.operations += sum(int(((a.op != Op.WAIT) & (refused == Refusal.NONE)).sum()) for a, refused in decided)


def _more(client: Placement, view: View, refused: np.ndarray) -> tuple[Actions, object] | None:
    actions = client.further(view, refused)
    return None if actions is None else (actions, client.reasons())


def test_a_loop_that_asks_for_one_decision_a_step_plants_the_same_seeds_one_after_the_other() -> None:
    engine, client = engine_for("uniform", keys_of(DamageKind.PRUNED), steps=20, limit=0.2)
    while not engine.over:
        _, outcome = engine.step(client.act(engine.view()))
        client.store(outcome)
    assert (engine.view().seeds.stage[0] == Stage.FOSSILIZED).sum() == 5
    assert len({entry["step"] for entry in engine.seed_history.lists["plantings"]}) == 5


def test_a_rank_over_the_budget_is_refused_and_the_next_smaller_one_is_planted() -> None:
    keys = keys_of(DamageKind.PRUNED, 4)
    engine, client = engine_for("participation", keys)
    slots = len(engine.space.slots)
    low = [[1.0] * 2 + [0.1] + [1.0] * (slots - 3)] * 4
    client.pick = lambda view: type(client).pick(  # type: ignore[method-assign]
        client, view_with(engine, participation=low, participation_before=[[1.0] * slots] * 4)
    )
    play(engine, client)
    view = engine.view()
    added = engine.exported_params() - view.host_params
    assert (added <= 0.06 * view.host_params).all()
    assert (view.seeds.stage[:, 2] == Stage.FOSSILIZED).all()
    names = [view.space.blueprints[index].name for index in view.seeds.blueprint[:, 2]]
    assert set(names) <= {"bypass-rank-1", "bypass-rank-2", "bypass-rank-4"}


def test_the_participation_rule_sees_a_drop_behind_the_first_block_and_spreads_where_there_is_none() -> None:
    engine, client = engine_for("participation", keys_of(DamageKind.PRUNED, 2))
    slots = len(engine.space.slots)
    stream = [[0.9, 0.2, *[0.2] * (slots - 2)], [0.9, *[0.6] * (slots - 1)]]
    before = [[0.9, 0.9, *[0.2] * (slots - 2)], [0.9, 0.9, *[0.6] * (slots - 2)]]
    picks = client.pick(view_with(engine, participation=stream, participation_before=before))
    assert list(picks.plans) == [MIXED, UNIFORM]
    assert picks.slot.tolist() == [1, -1]
    assert picks.reasons[0] == "the participation of the stream falls to 22% of that in front of block0"


def test_dead_units_come_before_a_drop_of_participation() -> None:
    engine, client = engine_for("collapse", keys_of(DamageKind.PRUNED))
    slots = len(engine.space.slots)
    ones = [[1.0] * slots]
    stream = [[1.0] * (slots - 1) + [0.3]]
    dead = [[0.0, 0.0, 0.9, *[0.0] * (slots - 3)]]
    view = view_with(engine, participation=stream, participation_before=ones, dead=dead)
    assert client.pick(view).slot.tolist() == [2]
    view = view_with(engine, participation=stream, participation_before=ones, dead=[[0.1] * slots])
    assert client.pick(view).slot.tolist() == [slots - 1]


def test_a_pruned_block_of_a_real_host_is_found_by_its_dead_units() -> None:
    keys = keys_of(DamageKind.PRUNED, 6)
    engine, client = engine_for("collapse", keys)
    truth = [describe(key).damage.segments[0] for key in keys]
    assert np.mean(client.pick(engine.view()).slot == truth) >= 0.8


def test_a_narrow_block_is_one_whose_inner_units_are_all_in_use() -> None:
    engine, client = engine_for("inner-use", keys_of(DamageKind.PRUNED))
    slots = len(engine.space.slots)
    inner = [[np.nan, 0.1, 0.7, 0.01, *[0.2] * (slots - 4)]]
    stream = [[0.1, 0.1, 0.4, 0.3, *[0.1] * (slots - 4)]]
    picks = client.pick(view_with(engine, participation_inner=inner, participation=stream))
    assert (list(picks.plans), picks.slot.tolist()) == ([BYPASS], [3])


# The intact network.


def test_drift_names_the_damaged_segment_the_input_and_the_head() -> None:
    kinds = (DamageKind.PRUNED, DamageKind.LOW_RANK, DamageKind.LABELS, DamageKind.REMOVED)
    keys = [keys_of(kind)[0] for kind in kinds]
    engine, client = engine_for("drift", keys, taught=True)
    picks = client.pick(engine.view())
    truth = [describe(key).damage.segments for key in keys]
    last = len(engine.space.slots) - 1
    assert picks.slot.tolist() == [*truth[0], *truth[1], last, *truth[3]]
    assert list(picks.plans) == [MIXED, MIXED, HERE, MIXED]


def test_drift_of_an_undamaged_network_is_0_and_absent_without_an_intact_one() -> None:
    keys = keys_of(DamageKind.LABELS)
    taught, _ = engine_for("drift", keys, taught=True)
    columns = [taught.space.sensors.index(name) for name in ("drift", "drift_before")]
    assert taught.view().measurements.sensors[..., columns].max() < 1e-5
    blind, client = engine_for("drift", keys)
    assert np.isnan(blind.view().measurements.sensors[..., columns]).all()
    picks = client.pick(blind.view())
    assert list(picks.plans) == [UNIFORM]
    assert "no intact network" in picks.reasons[0]


def test_drift_is_that_of_the_two_networks_run_by_hand() -> None:
    key = keys_of(DamageKind.PRUNED)[0]
    instance = heal_taught().instance(key)
    assert instance.intact is not None
    intact, x = instance.intact()
    damaged = instance.host()
    engine, _ = engine_for("drift", [key], taught=True)
    with torch.no_grad():
        h, h0 = instance.train.x, x
        for slot in range(len(engine.space.slots)):
            h, h0 = damaged.segments[slot](h), intact.segments[slot](h0)  # type: ignore[index, operator]
            expected = float((h - h0).norm() / h0.norm())
            found = engine.view().measurements.sensors[0, slot, engine.space.sensors.index("drift")]
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


# Resuming.


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
def test_a_placement_that_is_saved_and_loaded_goes_on_as_before(name: str) -> None:
    keys = keys_of(DamageKind.PRUNED)
    engine, client = engine_for(name, keys)
    engine.step(client.act(engine.view()), None, lambda view, refused: _more(client, view, refused))
    other = get_controller(name, engine.config)
    assert isinstance(other, Placement)
    other.load_state(client.state())
    while not engine.over:
        view = engine.view()
        one, two = client.act(view), other.act(view)
        assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
        _, outcome = engine.step(one)
        client.store(outcome)
        other.store(outcome)
    assert (engine.view().seeds.stage == Stage.FOSSILIZED).any()


def test_a_plan_of_nothing_says_so() -> None:
    engine, client = engine_for("uniform", keys_of(DamageKind.NONE))
    client.pick = lambda view: Picks([NONE], np.array([-1]), ["it is sound"])  # type: ignore[method-assign]
    play(engine, client)
    assert client.explain() == ["nothing was planted: it is sound"]
    assert (engine.view().masks.op[:, Op.GERMINATE]).all()


def test_a_menu_without_what_a_plan_needs_is_named() -> None:
    engine = VectorizedEngine(
        classical("iris"),
        build_config(classical("iris").defaults, {"envs": 1, "blueprints": ["affine"], "baselines": []}),
    )
    client = Uniform()
    client.act(engine.reset())
    assert client.explain() == ["nothing was planted: every block gets a bypass, but the menu has no bypass-rank-1"]


@pytest.mark.parametrize("name", [*PLACEMENTS, "tree", "shipped-1", "trials:tree", "shipped-2"])
def test_a_host_whose_only_slot_lies_behind_the_last_layer_has_no_place_to_choose(name: str) -> None:
    x = torch.randn(120, 3, generator=torch.Generator().manual_seed(0))
    task = esper.task("three", x, x.argmax(1), host=only_a_head, menu=["bypass-rank-1", "low-rank"])
    config = build_config(task.defaults, find_controller(name).settings, {"envs": 2, "steps": 4, "baselines": []})
    client = get_controller(name, config)
    assert isinstance(client, Placement)
    engine = VectorizedEngine(task.sealed(), with_sensors(config, client))
    view = engine.reset()
    play(engine, client)
    if isinstance(client, Handover) and client.rule is not None:
        assert (client.package(view) == -1).all(), "the rule heuristic decides"
    else:
        assert {(entry["step"], entry["blueprint"]) for entry in engine.seed_history.lists["plantings"]} == {
            (0, "bypass-rank-1")
        }


def only_a_head() -> esper.SegmentedHost:
    return esper.SegmentedHost([nn.Linear(3, 3), nn.Identity()], [esper.SlotSpec("head", after=0, width=3, head=True)])


def test_the_heal_tasks_have_one_folder_of_hosts(tmp_path: Path) -> None:
    assert heal_taught().ranges == heal().ranges
    assert heal_taught().instance(0).intact is not None
    assert heal().instance(0).intact is None


@pytest.mark.parametrize(
    ("rule", "read"),
    [
        (Uniform, set()),
        (Collapse, {"dead", "participation", "participation_before"}),
        (DriftRise, {"drift", "drift_before"}),
    ],
)
def test_a_placement_names_the_sensors_that_it_reads(rule: type[Placement], read: set[str]) -> None:
    assert {name for names in rule.sensors_read.values() for name in names} == read
    assert read <= {sensor.name for sensor in SENSORS}
    assert {sensor.family for sensor in SENSORS if sensor.name in read} == set(rule.sensor_families)


def test_a_rule_has_only_the_families_measured_that_it_reads_and_plants_what_it_would_with_all() -> None:
    keys = keys_of(DamageKind.PRUNED, 3)
    for name in ("participation", "drift"):
        some, client = engine_for(name, keys, taught=True)
        every, other = engine_for(name, keys, taught=True, families=SENSOR_FAMILIES)
        own = [index for index, sensor in enumerate(SENSORS) if sensor.family in client.sensor_families]
        mine, whole = some.view().measurements.sensors, every.view().measurements.sensors
        np.testing.assert_array_equal(mine[..., own], whole[..., own])
        assert np.isnan(np.delete(mine, own, 2)).all()
        assert not np.isnan(np.delete(whole, own, 2)).all()
        assert client.pick(some.view()).reasons == other.pick(every.view()).reasons


# Several damaged blocks.


def sensed(engine: VectorizedEngine, **sensors: list[float]) -> View:
    """Return the view of a host without damage but for the given sensors."""
    slots = len(engine.space.slots)
    sound = {"dead": 0.0, "participation": 1.0, "participation_before": 1.0, "map_gradient_before": 1.0}
    return view_with(
        engine, **{name: [[value] * slots] for name, value in sound.items()} | {n: [v] for n, v in sensors.items()}
    )


def test_the_rule_for_sites_plants_at_every_block_that_stands_out_and_else_as_the_rule_for_one() -> None:
    engine, client = engine_for("sites", keys_of(DamageKind.PRUNED))
    drop, dead = [1.0, 1.0, 0.1, 1.0, 1.0, 1.0], [0.0, 0.0, 0.9, 0.0, 0.9, 0.0]
    cases = {
        "two blocks of dead units": ({"dead": dead}, SEVERAL, [2, 4]),
        "one block of dead units, whatever the gradient is": (
            {"dead": [0.0, 0.0, 0.9, 0.0, 0.0, 0.0], "map_gradient_before": [1.0, 9.0, 1.0, 1.0, 1.0, 9.0]},
            MIXED,
            [2],
        ),
        "a drop and a gradient": (
            {"participation": drop, "map_gradient_before": [1.0, 1.0, 9.0, 1.0, 1.0, 4.0]},
            SEVERAL,
            [2, 5],
        ),
        "a drop and an even gradient": ({"participation": drop}, MIXED, [2]),
        "a gradient alone": ({"map_gradient_before": [1.0, 1.0, 1.0, 9.0, 1.0, 1.0]}, UNIFORM, [-1]),
    }
    for name, (sensors, plan, slots) in cases.items():
        picks = client.pick(sensed(engine, **sensors))
        assert (list(picks.plans), picks.slot[0].tolist()) == ([plan], slots), name
    reason = client.pick(
        sensed(engine, participation=drop, map_gradient_before=[1.0, 1.0, 9.0, 1.0, 1.0, 4.0])
    ).reasons[0]
    assert reason.endswith("10% of that in front of block1, and block4 has 4.0 times the median gradient of a bypass")


def test_the_rule_for_sites_begins_with_the_drift_where_there_is_an_intact_network() -> None:
    kinds = (DamageKind.PRUNED, DamageKind.LABELS)
    engine, client = engine_for("sites", [keys_of(kind)[0] for kind in kinds], taught=True)
    other, drift = engine_for("drift", [keys_of(kind)[0] for kind in kinds], taught=True)
    own, theirs = client.pick(engine.view()), drift.pick(other.view())
    assert (list(own.plans), own.slot[:, 0].tolist()) == (list(theirs.plans), theirs.slot.tolist())


def test_two_pruned_blocks_of_a_real_host_get_a_bypass_of_rank_2_each() -> None:
    keys = keys_of(DamageKind.PRUNED, 3, sites=[2])
    engine, client = engine_for("sites", keys)
    play(engine, client)
    view = engine.view()
    rank_2 = [blueprint.name for blueprint in view.space.blueprints].index("bypass-rank-2")
    for env, key in enumerate(keys):
        assert np.flatnonzero(view.seeds.blueprint[env] == rank_2).tolist() == list(describe(key).damage.segments)
    assert (engine.exported_params() - view.host_params <= 0.06 * view.host_params).all()


def test_shipped_leaves_hosts_with_several_damaged_blocks_to_the_rule_for_sites_from_version_2_on() -> None:
    keys = [*keys_of(DamageKind.PRUNED, 3, sites=[2]), *keys_of(DamageKind.LABELS)]
    picks, plans = {}, {}
    for name in ("sites", "shipped-1", "shipped-2"):
        engine, client = engine_for(name, keys)
        picks[name] = [
            (plan, tuple(slot for slot in np.atleast_1d(slots) if slot >= 0), reason)
            for plan, slots, reason in zip(*client.pick(engine.view()), strict=True)
        ]
        plans[name] = [plan for plan, *_ in picks[name]]
    several = [plan == SEVERAL for plan in plans["sites"]]
    assert several == [True, True, True, False]
    for at, own in enumerate(several):
        mine, before = picks["shipped-2"][at], picks["shipped-1"][at]
        assert mine == picks["sites"][at] if own else mine[:2] == before[:2]
    assert SEVERAL not in plans["shipped-1"]
