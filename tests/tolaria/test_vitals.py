"""Check what is found of a row's numbers, by hand and against the obvious version."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.kasmina.lifecycle import dormant
from esper.leyline.config.tree import GovernorConfig
from esper.leyline.lifecycle.vocabulary import Stage, Vital
from esper.tolaria.governor import Signs, VitalHistory, examine, lowered

CONFIG = GovernorConfig(confirm_steps=2, loss_window=4)
ROWS = 2


def signs(**changed):
    """Make signs of two healthy rows; a value is that of row 0, row 1 stays as it is."""
    fields = {
        "loss": 1.0,
        "metric": 0.8,
        "metric_se": 0.01,
        "spread": 1.0,
        "train_loss": 1.0,
        "gradient": True,
        "parameter": True,
    }
    return Signs(**{name: np.array([changed.get(name, value), value]) for name, value in fields.items()})


def seen(*steps, config=CONFIG):
    """Return what is found in the last of some steps, after fresh networks."""
    history, found = VitalHistory.begin(signs(train_loss=np.nan, loss=2.0), config), None
    for step in steps:
        history, found = examine(history, step, config)
    return history, found


@pytest.mark.parametrize(
    ("changed", "vital"),
    [
        ({"loss": np.nan}, Vital.LOSS),
        ({"loss": np.inf}, Vital.LOSS),
        ({"train_loss": np.nan}, Vital.LOSS),
        ({"gradient": False}, Vital.GRADIENT),
        ({"parameter": False}, Vital.PARAMETER),
    ],
)
def test_what_is_not_finite_is_found_at_once_and_in_its_row_alone(changed, vital):
    assert seen(signs(), signs(**changed))[1].tolist() == [vital, Vital.GOOD]


@pytest.mark.parametrize(
    ("changed", "vital"),
    [
        ({"train_loss": 9.0}, Vital.RISE),
        ({"spread": 1e-6, "train_loss": 1.5}, Vital.COLLAPSE),
        ({"metric": 0.5}, Vital.FALL),
    ],
)
def test_a_finite_sign_must_last(changed, vital):
    healthy = [signs()] * 4
    assert not seen(*healthy, signs(**changed))[1].any()
    assert seen(*healthy, signs(**changed), signs(**changed))[1].tolist() == [vital, Vital.GOOD]
    assert not seen(*healthy, signs(**changed), signs(), signs(**changed))[1].any()


def test_a_strike_is_no_part_of_the_history():
    before, _ = seen(*[signs()] * 4)
    after, _ = seen(*[signs()] * 4, signs(train_loss=9.0))
    np.testing.assert_array_equal(after.loss[0], before.loss[0])
    assert after.strikes[0].tolist() == [1, 0, 0]


def test_a_loss_that_falls_is_no_sign():
    assert not seen(*[signs(train_loss=loss) for loss in (5.0, 2.0, 0.5, 0.1, 0.01, 0.01)])[1].any()


def test_a_loss_that_grows_steadily_is_no_sign():
    assert not seen(*[signs(train_loss=0.1 * step) for step in range(1, 40)])[1].any()


def test_a_network_that_never_told_its_examples_apart_does_not_collapse():
    dull = [signs(spread=1e-3, train_loss=2.0)] * 3
    assert not seen(*dull, *[signs(spread=0.0, train_loss=2.0)] * 4)[1].any()


def test_nothing_is_held_against_a_row_while_too_few_losses_are_known():
    lucky = [signs(train_loss=1e-3), *[signs(train_loss=1.5)] * 5]
    assert not seen(*lucky)[1].any()


def test_a_fall_within_the_noise_is_none():
    noisy = {"metric_se": 0.2}
    assert not seen(*[signs(**noisy)] * 3, *[signs(metric=0.3, **noisy)] * 4)[1].any()


def test_a_metric_that_could_not_be_measured_leaves_the_best_that_was():
    gap = [signs(), signs(metric=np.nan)]
    assert seen(*gap, *[signs(metric=0.4)] * 2)[1].tolist() == [Vital.FALL, Vital.GOOD]


def test_a_history_that_begins_anew_holds_nothing_against_the_row_but_its_first_loss():
    history, _ = seen(*[signs()] * 4, signs(train_loss=9.0))
    fresh = history.restart(np.array([True, False]))
    assert fresh.first.tolist() == history.first.tolist()
    assert np.isnan(fresh.loss[0]).all()
    assert np.isnan([fresh.best[0], fresh.best_se[0], fresh.spread[0]]).all()
    assert not fresh.strikes.any()
    np.testing.assert_array_equal(fresh.loss[1], history.loss[1])


@pytest.mark.parametrize(
    ("ramp", "alpha", "after", "falls"),
    [
        ((1, 0, 4), (0.5, 0.25), Stage.BLENDING, True),
        ((1, 0, 4), (0, 0), Stage.EMBARGOED, True),  # the first training at dose 0
        ((1, 0.25, 4), (0.25, 0.25), Stage.HOLDING, True),
        ((0.25, 1, 4), (0.5, 0.75), Stage.BLENDING, False),
        ((0.25, 1, 4), (1, 1), Stage.HOLDING, False),
    ],
)
def test_a_dose_is_lowered_in_every_training_of_a_ramp_down(ramp, alpha, after, falls):
    before, behind = dormant(2, 1), dormant(2, 1)
    before.stage[1], before.alpha[1], before.ramp[1] = Stage.BLENDING, alpha[0], ramp
    behind.stage[1], behind.alpha[1], behind.ramp[1] = after, alpha[1], ramp
    assert lowered(before, behind).tolist() == [False, falls]


losses = st.lists(st.floats(0, 100) | st.just(np.nan), min_size=1, max_size=12)


@settings(deadline=None)
@given(losses)
def test_the_rise_is_that_of_the_plain_formula(path):
    config = GovernorConfig(confirm_steps=1, loss_window=4, min_output_spread=0.0)
    history, kept = VitalHistory.begin(signs(train_loss=np.nan, loss=2.0), config), []
    for loss in path:
        history, found = examine(history, signs(train_loss=loss), config)
        if np.isnan(loss):
            assert found[0] == Vital.LOSS
            continue
        middle = np.median(kept) if kept else np.nan
        deviation = np.median(np.abs(np.array(kept) - middle)) if kept else np.nan
        rises = loss - middle > 8.0 * max(1.4826 * deviation, 0.05 * 2.0)
        assert (found[0] == Vital.RISE) == rises
        if not rises:
            kept = [loss, *kept][:4]


@settings(deadline=None)
@given(losses, losses)
def test_a_row_is_judged_by_its_own_numbers_alone(one, other):
    def found(path, beside):
        history, all_found = VitalHistory.begin(signs(train_loss=np.nan), CONFIG), []
        for step, loss in enumerate(path):
            now = signs(train_loss=loss)
            now.train_loss[1] = beside[step % len(beside)]
            history, verdicts = examine(history, now, CONFIG)
            all_found.append(int(verdicts[0]))
        return all_found

    assert found(one, [1.0]) == found(one, other)
