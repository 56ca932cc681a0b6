"""Test environments that a placement leaves to the rule `heuristic`, and the skip that comes first where it may."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from esper.leyline.config.tree import Config, GatesConfig, HeuristicConfig, build_config
from esper.leyline.lifecycle.view import BlueprintInfo, Outcome, View
from esper.leyline.lifecycle.vocabulary import Op
from esper.runs.evaluation.contenders import Contender, grow_contender
from esper.runs.evaluation.evaluation import Design
from esper.tamiyo.catalog import find_controller, get_controller
from esper.tasks.repair import repair
from esper_bench.controllers.handover import HANDED, Handover, SkipWhereWeak
from esper_bench.controllers.placement import Picks
from esper_bench.controllers.plans import LINEAR

LATER = 2
KEYS = np.array([3, 8, 21, 30])
MENU = ["bypass-linear", "bypass-mlp", "mlp-small", "skip-mlp"]
SHORT: Mapping[str, Any] = {"steps": 12, "data": {"batches_per_step": 2}}


class Mixed(Handover):
    """Plants a bypass at the second slot of every other environment and leaves the rest to its rule."""

    handed: Sequence[bool] = (True, False, True, False)

    def pick(self, view: View) -> Picks:
        return Picks(
            [HANDED if handed else LINEAR for handed in self.handed],
            np.where(self.handed, -1, 1),
            ["" if handed else "the plan is fixed" for handed in self.handed],
        )


class OwnAlone(Mixed):
    handed = (False,) * 4


def rule(wait: int = LATER) -> SkipWhereWeak:
    return SkipWhereWeak(HeuristicConfig(plant_below=0.9, weak_below=0.7), GatesConfig(permissive=True), wait)


def grown(client: Any, permissive: bool, **settings: Any) -> Outcome:
    contender = Contender("mine", {"gates": {"permissive": permissive}, "controller": "mine"}, client)
    config = Design(repair().sealed(), [{**SHORT, **settings}], 1, "training", 0, len(KEYS)).config(contender, 0)
    return grow_contender(repair().sealed(), contender, config, KEYS)[1]


def handing(kind: type[Mixed], wait: int = LATER) -> Any:
    return lambda config: kind(SkipWhereWeak(config.heuristic, config.gates, wait))


def test_under_permissive_gates_the_environments_of_the_rule_grow_as_those_of_heuristic_bit_for_bit() -> None:
    expected = grown(lambda config: get_controller("heuristic", config), permissive=False)
    ours = grown(lambda config: get_controller("shipped-2", config), permissive=True)
    assert expected.exported is not None
    assert ours.exported is not None
    assert expected.exported.added_params.any(), "the comparison needs seeds that were kept"
    for mine, theirs in zip(ours.exported, expected.exported, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(ours.seeds.stage, expected.seeds.stage)


def test_each_environment_grows_as_it_does_where_one_controller_has_all_of_them() -> None:
    alone = grown(handing(OwnAlone), permissive=True)
    ruled = grown(lambda config: get_controller("heuristic", config), permissive=False)
    both = grown(handing(Mixed), permissive=True)
    assert alone.exported is not None
    assert ruled.exported is not None
    assert both.exported is not None
    chosen = np.where(Mixed.handed, ruled.exported.metric, alone.exported.metric)
    np.testing.assert_array_equal(both.exported.metric, chosen)


def with_skip(view: Any, step: int, metric: float, steps: int = 24) -> View:
    """Make a view of one narrow slot in front, and a skip that fits the last slot alone."""
    made: View = view(
        may={Op.GERMINATE: True}, inner=[[0.9, 0.3, 0.3]], step=step, steps=steps, metric=metric,
        blueprints=tuple(BlueprintInfo(name, "before") for name in ("bypass-linear", "bypass-mlp", "skip-mlp")),
        fits=np.array([[True, True, False]] * 2 + [[True, True, True]]),
    )  # fmt: skip
    return made


@pytest.mark.parametrize(
    ("step", "metric", "expected"),
    [
        (0, 0.2, (Op.WAIT, 0, 0)),
        (1, 0.2, (Op.WAIT, 0, 0)),
        (2, 0.2, (Op.GERMINATE, 2, 2)),  # weak after the wait: the skip, at the last slot
        (2, 0.95, (Op.WAIT, 0, 0)),
        (3, 0.2, (Op.GERMINATE, 0, 0)),  # from then on the rule: the narrow segment
    ],
)
def test_where_a_skip_may_be_planted_it_comes_first_and_only_in_a_host_that_stays_weak(
    view: Any, step: int, metric: float, expected: tuple[Op, int, int]
) -> None:
    client = rule()
    actions = client.act(with_skip(view, step, metric))
    assert (actions.op[0], actions.slot[0], actions.blueprint[0]) == expected
    if step == LATER and metric < 0.9:
        assert "a skip goes around all blocks" in str(client.reasons()[0])


def test_a_run_that_is_too_short_for_the_wait_is_one_of_heuristic(view: Any) -> None:
    actions = rule().act(with_skip(view, 0, 0.2, steps=9))
    assert (actions.op[0], actions.slot[0]) == (Op.GERMINATE, 0)
    assert rule().act(with_skip(view, 0, 0.2, steps=10)).op[0] == Op.WAIT


def test_a_waiting_environment_is_not_explained_as_one_that_refuses_to_plant(view: Any) -> None:
    client = rule()
    for step in range(LATER + 1):
        client.act(with_skip(view, step, 0.2))
    assert client.explain() == []


def test_its_state_restores_the_environments_of_the_rule_and_what_the_rule_remembers() -> None:
    config = build_config(repair().defaults, find_controller("shipped-2").settings, {"blueprints": MENU, **SHORT})
    first, second = (get_controller("shipped-2", config) for _ in range(2))
    assert isinstance(first, Handover)
    assert isinstance(second, Handover)
    states: list[Any] = []

    decide = first.act

    def compared(view: View) -> Any:
        second.load_state(first.state())
        ours, theirs = decide(view), second.act(view)
        states.append(all((one == other).all() for one, other in zip(ours, theirs, strict=True)))
        return ours

    first.act = compared  # type: ignore[method-assign]
    grown(lambda config: first, permissive=True, blueprints=MENU)
    assert len(states) == SHORT["steps"]
    assert all(states)


@pytest.mark.parametrize(("kind", "age"), [(Mixed, 2), (OwnAlone, 6)])
def test_sensors_are_measured_again_only_where_the_rule_has_an_environment(kind: type[Mixed], age: int) -> None:
    contender = Contender("mine", {"gates": {"permissive": True}, "controller": "mine"}, handing(kind))
    layers = [{"steps": 6, "data": {"batches_per_step": 1}}]
    config = Design(repair().sealed(), layers, 1, "training", 0, len(KEYS)).config(contender, 0)
    engine, _, _ = grow_contender(repair().sealed(), contender, config, KEYS)
    assert engine.view().measurements.sensor_age == age


def test_version_1_leaves_nothing_to_a_rule_and_both_read_sensors_when_they_need_them() -> None:
    one, two = (get_controller(f"shipped-{version}", Config()) for version in (1, 2))
    assert isinstance(one, Handover)
    assert isinstance(two, Handover)
    assert (one.rule, set(one.state())) == (None, {"wish", "reasons", "next", "version", "digest"})
    assert two.rule is not None
    assert one.sensors_every > two.sensors_every == 4
