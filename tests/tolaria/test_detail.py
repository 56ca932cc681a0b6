"""Check that the rows of decisions and of measurements say what the engine decided on and measured."""

import numpy as np
import pytest
import torch
from device_reads import counted_reads

import esper
from esper.leyline.lifecycle.gates import judge
from esper.leyline.lifecycle.view import Estimate
from esper.leyline.lifecycle.vocabulary import ADDED, RELEVANT, Actions, Head, Op, among
from esper.leyline.protocols import Controller
from esper.nissa.events import rounded
from esper.nissa.hub import Hub
from esper.nissa.rows import (
    AnomalyRow,
    DecisionRow,
    GateRow,
    GradientsRow,
    MeasurementRow,
    PhasesRow,
    RollbackRow,
    SensorsRow,
    StepRow,
)
from esper.tamiyo.policy.actor import Learned
from esper.tamiyo.policy.controller import Language, Policy
from esper.tamiyo.rules.base import RandomValid
from esper.tolaria.engine import Observer, VectorizedEngine
from esper.tolaria.journal import Journal
from esper.tolaria.measure.coalitions import attribute
from populations import GROW, Memory, Script, blobs, small_config


class Seen(Observer):
    """Keeps the steps of a run."""

    def __init__(self):
        self.steps = []

    def stepped(self, step):
        self.steps.append(step)


def played(client, config, task=None, level="step"):
    """Play a run; return its rows by kind, its steps and its engine."""
    engine, memory, seen = VectorizedEngine(task or blobs(), config), Memory(), Seen()
    engine.run(client, Journal(engine, Hub([memory], level)), seen)
    return lambda kind: [row for row in memory.rows if type(row) is kind], seen.steps, engine


@pytest.fixture(scope="module")
def random_run():
    config = small_config(
        envs=6, steps=30, gates={"permissive": False, "min_contribution": -1}, probe={"sensors_every": 5}
    )
    return played(RandomValid(), config)


def test_every_decision_but_wait_has_a_row(random_run):
    rows, steps, _ = random_run
    decided = [
        (step.outcome.step, env, Op(int(op)).name, bool(done))
        for step in steps
        for env, (op, done) in enumerate(zip(step.outcome.actions.op, step.outcome.accepted, strict=True))
        if op != Op.WAIT
    ]
    assert [(row.step, row.env, row.op, row.carried_out) for row in rows(DecisionRow)] == decided
    assert {op for _, _, op, _ in decided} == {op.name for op in Op if op != Op.WAIT}


def test_a_decision_has_the_measurements_and_margins_before_the_step(random_run):
    rows, steps, engine = random_run
    views, checked = {step.outcome.step: step.view for step in steps}, 0
    for row in rows(DecisionRow):
        view, slot = views[row.step], engine.space.slots.index(row.slot)
        assert row.stage == esper.Stage(int(view.seeds.stage[row.env, slot])).name
        for name, estimate in (("contribution", view.measurements.contribution), ("gain", view.measurements.gain)):
            for part in ("mean", "se"):
                value = getattr(estimate, part)[row.env, slot]
                assert getattr(row, f"{name}_{part}") == (None if np.isnan(value) else pytest.approx(value, rel=1e-4))
        gates = judge(view.seeds, view.measurements, engine.config.gates)
        gate = {"TRAINING": gates.advance, "HOLDING": gates.fossilize}.get(row.stage)
        assert (gate is None) == (row.gate_checks is None) == (row.margins == {})
        if gate is not None:
            passed = all(margin is not None and margin > 0 for margin in row.margins.values())
            assert passed == gate.passed()[row.env, slot] == (row.gate_checks == "passed")
            checked += 1
    assert checked


def test_a_planting_names_the_seed_and_its_price_and_a_later_decision_the_same(random_run):
    rows, steps, _ = random_run
    prices = {}
    for row in rows(DecisionRow):
        place = row.env, row.slot
        if row.op == "GERMINATE":
            assert row.stage == "DORMANT"
            assert row.tempo in steps[0].view.space.tempos
            prices[place] = row.blueprint, row.blend, row.price
        else:
            assert (row.blueprint, row.blend, row.price) == prices[place]
        assert (row.target is None) == (row.op not in ("GERMINATE", "SET_ALPHA"))
    assert len({price for _, _, price in prices.values()}) > 1
    end = steps[-1].after
    kept, added = end.seeds.stage == esper.Stage.FOSSILIZED, among(end.seeds.stage, ADDED)
    (whole,) = np.nonzero(kept.any(1) & (kept.sum(1) == added.sum(1)))
    assert len(whole)
    for env in whole.tolist():
        slots = [end.space.slots[slot] for slot in np.flatnonzero(kept[env])]
        assert sum(prices[env, slot][2] for slot in slots) == end.added_params[env]


def test_the_counts_of_choices_are_those_of_the_masks(random_run):
    rows, steps, _ = random_run
    views = {step.outcome.step: step for step in steps}
    for row in rows(DecisionRow):
        masks, op = views[row.step].view.masks, Op[row.op]
        assert row.choice_counts[Head.OP] == masks.op[row.env].sum()
        assert row.choice_counts[Head.SLOT] == masks.slot[row.env, op].sum()
        assert [count > 0 for count in row.choice_counts] == RELEVANT[op].tolist()
        assert (row.probabilities, row.entropies, row.value) == (None, None, None)


def test_a_refused_decision_says_why_and_an_unknown_one_is_told_as_it_came():
    class Wrong(Controller):
        def act(self, view):
            wait = Actions.wait(3)
            if view.step == 0:
                return wait._replace(op=np.array([Op.PRUNE, 9, Op.GERMINATE]), slot=np.array([0, 0, 7]))
            return wait

    rows, _, _ = played(Wrong(), small_config(steps=2))
    told = [(row.op, row.slot, row.carried_out, row.refusal) for row in rows(DecisionRow)]
    assert told == [
        ("PRUNE", "block0", False, "masked"),
        ("9", "block0", False, "masked"),
        ("GERMINATE", None, False, "masked"),
    ]


def test_the_reason_of_a_rule_stands_in_the_row():
    task = esper.get_task("spirals-narrow")
    config = esper.build_config(task.defaults, {"envs": 2, "steps": 24, "probe": {"sensors_every": 2}})
    rows, steps, _ = played(esper.get_controller("heuristic", config), config, task)
    (planted, *_) = [row for row in rows(DecisionRow) if row.op == "GERMINATE"]
    assert planted.why == steps[planted.step].decision.reasons[planted.env]
    sensors = steps[planted.step].view.measurements.sensors[planted.env, steps[0].view.space.slots.index(planted.slot)]
    assert set(planted.rule_sensors) == {"participation", "participation_inner"}
    for name, value in planted.rule_sensors.items():
        measured = sensors[steps[0].view.space.sensors.index(name)]
        assert value == pytest.approx(measured, rel=1e-4) if np.isfinite(measured) else value is None
    assert planted.why


def test_a_policy_tells_its_probabilities_its_entropy_and_its_value():
    config = small_config(envs=6, steps=12)
    policy = Policy.fresh(Language.of([VectorizedEngine(blobs(), config).space]), seed=0)
    rows, steps, _ = played(Learned(policy), config)
    decisions = rows(DecisionRow)
    assert decisions
    for row in decisions:
        reads = RELEVANT[Op[row.op]]
        assert np.isfinite(row.probabilities).tolist() == np.isfinite(row.entropies).tolist() == reads.tolist()
        for p, entropy, left in zip(row.probabilities, row.entropies, row.choice_counts, strict=True):
            if left:
                assert 1 / left - 1e-5 <= p <= 1 + 1e-5  # the most probable one was taken
                assert -1e-5 <= entropy <= np.log(left) + 1e-5
        judged = steps[row.step].decision.judgement
        assert row.value == pytest.approx(judged.value[row.env], rel=1e-4)


def test_the_measurement_rows_hold_what_the_controller_saw_after_the_step(random_run):
    rows, steps, _ = random_run
    measured = rows(MeasurementRow)
    told = {row.step: row for row in measured}
    for step in steps:
        seen, row = step.after.measurements, told.get(step.outcome.step)
        for name, estimate in (("contribution", seen.contribution), ("gain", seen.gain)):
            assert isinstance(estimate, Estimate)
            for part, values in (("means", estimate.mean), ("ses", estimate.se)):
                found = None if row is None else getattr(row, f"{name}_{part}")
                assert (found is None) == np.isnan(values).all()
                if found is not None:
                    np.testing.assert_allclose(found, values, rtol=1e-4)
        assert row is None or row.participations is None  # at level debug only
    assert 0 < len(measured) <= len(steps)


def test_shapley_values_stand_where_coalitions_were_measured(random_run):
    rows, steps, engine = random_run
    fresh = 0
    for row in rows(MeasurementRow):
        step = steps[row.step]
        values = step.after.coalitions
        due = values is not None and values.step == step.after.step
        assert due or row.shapley_means is None
        if row.shapley_means is not None:
            found = attribute(values, engine.config.probe.shapley_samples)
            np.testing.assert_allclose(row.shapley_means, found.shapley.mean[:6], rtol=1e-4)
            fresh += np.isfinite(row.shapley_means).any()
    assert fresh
    assert any(row.interactions is not None for row in rows(MeasurementRow))


def test_sensors_rows_stand_where_sensors_were_measured(random_run):
    rows, steps, _ = random_run
    found = rows(SensorsRow)
    assert [row.step for row in found] == [4, 9, 14, 19, 24, 29]
    for row in found:
        np.testing.assert_allclose(row.readings, steps[row.step].after.measurements.sensors, rtol=1e-4)


def test_phases_rows_hold_the_time_of_the_step_alone(random_run):
    rows, steps, engine = random_run
    phases = rows(PhasesRow)
    assert len(phases) == len(steps)
    spent = sum(
        sum(row.phase_seconds.values()) - row.phase_seconds["deciding"] - row.phase_seconds["writing"] for row in phases
    )
    assert spent <= sum(engine.timer.seconds.values()) + 1e-4
    assert {row.device_reads for row in phases} == {1}


@pytest.mark.parametrize(
    ("level", "every", "steps"),
    [("debug", None, range(8)), ("step", None, ()), ("debug", 0, ()), ("step", 3, (2, 5)), ("run", 1, ())],
)
def test_gradients_rows_stand_where_they_are_asked_for(level, every, steps):
    config = small_config(telemetry={"level": level, "gradients_every": every})
    rows, seen, _ = played(Script(GROW), config, level=level)
    assert [row.step for row in rows(GradientsRow)] == list(steps)
    for row in rows(GradientsRow):
        measured = seen[row.step].after.measurements
        np.testing.assert_allclose(row.host_gradients, measured.gradient_norm, rtol=1e-4)
        np.testing.assert_allclose(row.seed_gradients, measured.seed_gradient_norm, rtol=1e-4)
        assert np.isfinite(row.host_gradients).all()


def test_a_gate_row_stands_where_the_answer_of_a_gate_changes(random_run):
    rows, steps, engine = random_run
    told = {(row.step, row.env, row.slot): row for row in rows(GateRow)}
    passed: dict[tuple[int, str], tuple[str, int, bool]] = {}
    for step in steps:
        view = step.after
        gates = judge(view.seeds, view.measurements, engine.config.gates)
        for env, slot in np.ndindex(view.seeds.stage.shape):
            name, place = view.space.slots[slot], (step.outcome.step, env, view.space.slots[slot])
            gate = {gate.stage: gate for gate in gates}.get(view.seeds.stage[env, slot])
            if gate is None:
                passed.pop((env, name), None)
                assert place not in told
                continue
            answer = gate.stage.name, int(view.seeds.blueprint[env, slot]), bool(gate.passed()[env, slot])
            assert (place in told) == (passed.get((env, name)) != answer)
            if place in told:
                assert told[place].passed == answer[2]
            passed[env, name] = answer
    assert {row.passed for row in told.values()} == {True, False}


def test_at_level_debug_a_decision_to_wait_has_a_row_and_every_sensor_is_told():
    rows, steps, engine = played(Script(GROW), small_config(probe={"sensors_every": 1}), level="debug")
    decisions = rows(DecisionRow)
    assert len(decisions) == len(steps) * engine.config.envs
    waits = [row for row in decisions if row.op == "WAIT"]
    assert {(row.slot, row.carried_out, len(row.rule_sensors)) for row in waits} == {(None, True, 0)}
    (planted, *_) = [row for row in decisions if row.op == "GERMINATE"]
    assert list(planted.rule_sensors) == list(engine.space.sensors)


class Fails(Observer):
    """Makes a parameter of the host of environment 1 infinite before a step."""

    def __init__(self, engine, step):
        self.engine, self.at = engine, step

    def going(self, view):
        if view.step == self.at:
            self.engine.population.body.host.columns["value"][1] = torch.inf
        return True


def test_after_a_restoration_a_run_of_level_run_writes_the_steps_that_follow():
    config, memory = small_config(telemetry={"level": "run"}), Memory()
    engine = VectorizedEngine(blobs(), config)
    engine.run(Script(GROW), Fails(engine, 2), Journal(engine, Hub([memory], "run", raise_steps=2)))
    assert [row.step for row in memory.rows if isinstance(row, RollbackRow)] == [2]
    (anomaly,) = [row for row in memory.rows if isinstance(row, AnomalyRow)]
    assert (anomaly.step, anomaly.failed_envs, anomaly.failed_twins) == (2, [1], ())
    assert (anomaly.raised_level, anomaly.raised_steps) == ("step", 2)
    assert [row.step for row in memory.rows if isinstance(row, StepRow)] == [2, 3]
    assert [row.device_reads for row in memory.rows if isinstance(row, PhasesRow)] == [2, 1]


def test_rows_read_nothing_from_the_device():
    def reads(level):
        with counted_reads() as found:
            played(Script(GROW), small_config(), level=level)
        return len(found)

    assert reads("debug") == reads("step") == reads("off")


def test_a_level_of_run_keeps_the_decisions_and_no_measurements():
    rows, _, _ = played(Script(GROW), small_config(), level="run")
    assert rows(DecisionRow)
    assert rows(StepRow) + rows(MeasurementRow) + rows(SensorsRow) + rows(PhasesRow) == []


def test_rounding_keeps_five_digits_and_what_is_no_number():
    values = np.array([0.0, np.nan, np.inf, -1.23456789, 123456789.0, 1.23456789e-9, 5e-324])
    np.testing.assert_allclose(rounded(values), [0, np.nan, np.inf, -1.2346, 123460000, 1.2346e-9, 5e-324], rtol=1e-12)
