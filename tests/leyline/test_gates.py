"""Test gates: margins, what was not measured, and the reasons that a person reads."""

import numpy as np
import pytest

from esper.kasmina.lifecycle import dormant
from esper.leyline.config.tree import GatesConfig
from esper.leyline.lifecycle.gates import Check, Gate, judge
from esper.leyline.lifecycle.view import Estimate, Measurements
from esper.leyline.lifecycle.vocabulary import Stage

CONFIG = GatesConfig(min_training_steps=2, gain_z=1.5, min_holding_steps=3, min_contribution=0.01, contribution_z=2.0)


def estimate(mean, se):
    return Estimate(np.array([[mean]]), np.array([[se]]), ~np.isnan([[mean]]))


def judged(*, stage=Stage.TRAINING, age=5, gain=(0.2, 0.1), contribution=(0.2, 0.05), finite=True, config=CONFIG):
    """Judge both gates of one slot."""
    seeds = dormant(1, 1)
    seeds.stage[:], seeds.age[:] = stage, age
    found = {
        "gain": estimate(*gain),
        "contribution": estimate(*contribution),
        "seed_gradient_finite": np.array([[finite]]),
    }
    measurements = Measurements(**dict.fromkeys(Measurements._fields) | found)
    return judge(seeds, measurements, config)


def margins(gate):
    return {check.name: check.margin[0, 0].item() for check in gate.checks}


NAN = (np.nan, np.nan)


def test_a_gate_applies_to_one_stage():
    gates = judged()
    assert (gates.advance.stage, gates.fossilize.stage) == (Stage.TRAINING, Stage.HOLDING)


def test_the_gain_has_its_mean_less_gain_z_standard_errors_as_margin():
    assert margins(judged(gain=(0.2, 0.1)).advance)["incubation gain"] == pytest.approx(0.2 - 1.5 * 0.1)


def test_the_contribution_has_its_lower_bound_less_the_least_that_is_asked_as_margin():
    gate = judged(stage=Stage.HOLDING, contribution=(0.2, 0.05)).fossilize
    assert margins(gate)["contribution"] == pytest.approx(0.2 - 2 * 0.05 - 0.01)


@pytest.mark.parametrize(("age", "passes"), [(1, False), (2, True), (3, True)])
def test_advance_asks_for_min_training_steps(age, passes):
    assert judged(age=age).advance.passed()[0, 0] == passes


@pytest.mark.parametrize(("age", "passes"), [(2, False), (3, True), (4, True)])
def test_fossilize_asks_for_min_holding_steps(age, passes):
    assert judged(stage=Stage.HOLDING, age=age).fossilize.passed()[0, 0] == passes


@pytest.mark.parametrize(("mean", "passes"), [(0.1, False), (0.15, False), (0.16, True), (-1.0, False)])
def test_advance_asks_for_a_gain_above_gain_z_standard_errors(mean, passes):
    assert judged(gain=(mean, 0.1)).advance.passed()[0, 0] == passes


@pytest.mark.parametrize(("mean", "passes"), [(0.11, False), (0.12, True), (-1.0, False)])
def test_fossilize_asks_for_a_lower_bound_above_min_contribution(mean, passes):
    gate = judged(stage=Stage.HOLDING, contribution=(mean, 0.05)).fossilize
    assert gate.passed()[0, 0] == passes


def test_advance_asks_for_finite_gradients():
    gate = judged(finite=False).advance
    assert not gate.passed()[0, 0]
    assert gate.reason(0, 0) == "failed: a gradient of the seed is not finite"


def test_advance_does_not_read_the_contribution_nor_fossilize_the_gain():
    assert judged(contribution=NAN).advance.passed()[0, 0]
    assert judged(stage=Stage.HOLDING, gain=NAN, finite=False).fossilize.passed()[0, 0]


@pytest.mark.parametrize("permissive", [False, True])
def test_a_gain_that_was_not_measured_fails_and_says_so(permissive):
    gate = judged(gain=NAN, config=CONFIG.model_copy(update={"permissive": permissive})).advance
    assert not gate.passed()[0, 0]
    assert "not measured" in gate.reason(0, 0)
    assert "gain" in gate.reason(0, 0)


@pytest.mark.parametrize("permissive", [False, True])
def test_a_contribution_that_was_not_measured_fails_and_says_so(permissive):
    config = CONFIG.model_copy(update={"permissive": permissive})
    gate = judged(stage=Stage.HOLDING, contribution=NAN, config=config).fossilize
    assert not gate.passed()[0, 0]
    assert "not measured" in gate.reason(0, 0)
    assert "contribution" in gate.reason(0, 0)


def test_the_gradients_of_a_seed_that_has_not_trained_were_not_measured():
    gate = judged(age=0, finite=False, config=GatesConfig(min_training_steps=0)).advance
    assert not gate.passed()[0, 0]
    assert gate.reason(0, 0) == "failed: finite gradients not measured"


def test_permissive_gates_ask_only_for_the_dwell_and_that_the_number_was_measured():
    config = CONFIG.model_copy(update={"permissive": True})
    harmful = {"gain": (-5.0, 0.1), "contribution": (-5.0, 0.1), "finite": False, "config": config}
    assert judged(age=2, **harmful).advance.passed()[0, 0]
    assert not judged(age=1, **harmful).advance.passed()[0, 0]
    assert judged(stage=Stage.HOLDING, age=3, **harmful).fossilize.passed()[0, 0]
    assert not judged(stage=Stage.HOLDING, age=2, **harmful).fossilize.passed()[0, 0]


def test_a_reason_says_of_every_check_that_fails_what_was_measured_what_it_has_to_exceed_and_the_key():
    assert judged(age=0, gain=(0.1, 0.1)).advance.reason(0, 0) == (
        "failed: it has been there for 0 of 2 steps (gates.min_training_steps) and incubation gain less 1.5 standard errors "
        "must exceed 0 and is -0.05 (gates.gain_z)"
    )
    config = CONFIG.model_copy(update={"contribution_z": 1.0, "min_contribution": 0.0})
    assert judged(stage=Stage.HOLDING, contribution=(0.0, 0.0), config=config).fossilize.reason(0, 0) == (
        "failed: contribution less its standard error must exceed 0 and is +0 (gates.contribution_z and gates.min_contribution)"
    )


def test_a_gate_that_passes_says_so():
    assert judged().advance.reason(0, 0) == "passed"


def test_a_gate_passes_where_its_reason_is_that_it_passed():
    random = np.random.default_rng(0)
    grid = random.choice([-1.0, -0.0, 0.0, 1e-300, 1.0, np.nan], size=(3, 20, 4))
    gate = Gate(Stage.HOLDING, tuple(Check(f"check {i}", margin, margin, "no") for i, margin in enumerate(grid)))
    said = [[gate.reason(env, slot) == "passed" for slot in range(4)] for env in range(20)]
    assert gate.passed().tolist() == said
    assert np.array_equal(gate.passed(), (grid > 0).all(0))


def test_a_margin_of_exactly_0_does_not_pass():
    gate = Gate(Stage.TRAINING, (Check("even", np.zeros((1, 1)), np.zeros((1, 1)), "{value}"),))
    assert not gate.passed()[0, 0]
