"""Check features of a view, each against a slow version of itself, and the page that lists them."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from esper.leyline.lifecycle.view import CoalitionValues, Estimate
from esper.leyline.lifecycle.vocabulary import Actions, Blend, Op, Stage
from esper.tamiyo.policy.observation import (
    CLIP,
    GLOBAL,
    GLOBAL_FLAGS,
    RELATIVE,
    SLOT,
    SLOT_FLAGS,
    WINDOWS,
    History,
    Moments,
    Normaliser,
    Observation,
    input_names,
    normalise,
    observe,
    slot_features,
)
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.measure.coalitions import attribute
from esper.tolaria.measure.sensors import SENSORS
from populations import Script, blobs, small_config

ROOT = Path(__file__).parents[2]
NAMES = tuple(sensor.name for sensor in SENSORS)
ENV = {feature.name: i for i, feature in enumerate(GLOBAL)}
SLOT_COLUMNS = {feature.name: i for i, feature in enumerate(slot_features(NAMES))}


@pytest.fixture
def measured(view):
    """Return (envs, slots, seed) -> View, which draws everything but leaves out a third of what can be absent."""

    def draw(envs=3, slots=4, seed=0, sensors=NAMES):
        rng = np.random.default_rng(seed)

        def some(*shape):
            return np.where(rng.random(shape) < 1 / 3, np.nan, rng.random(shape))

        def estimate():
            mean = some(envs, slots)
            return Estimate(mean, mean / 2, np.isfinite(mean))

        base = view(rng.integers(len(Stage), size=(envs, slots)), sensors=sensors, age=rng.integers(6, size=slots))
        measurements = base.measurements._replace(
            metric=some(envs),
            loss=some(envs),
            train_loss=some(envs),
            gradient_norm=some(envs),
            contribution=estimate(),
            contribution_loss=estimate(),
            gain=estimate(),
            gain_metric=estimate(),
            seed_gradient_norm=some(envs, slots),
            participation=some(envs, slots),
            sensors=some(envs, slots, len(sensors)),
            sensor_age=2,
        )
        seeds = base.seeds._replace(
            alpha=rng.random((envs, slots), np.float32), ramp=rng.random((envs, slots, 3), np.float32)
        )
        return base._replace(measurements=measurements, seeds=seeds)

    return draw


def seen(view, history=None):
    history = History.empty(len(view.host_params)) if history is None else history
    return observe(view, history.measured(view.measurements))


def column(observation, name):
    """Return (E, S) of one slot feature."""
    return observation.slot[..., SLOT_COLUMNS[name]]


def table(envs, slots, live, worth, step=4):
    """Make the values of every coalition of the live seeds of each environment, which are worth `worth(env, mask)`."""
    entries = [
        (env, mask)
        for env in range(envs)
        for mask in range(1 << slots)
        if live[env].any() and not mask & ~bits(live[env])
    ]
    env, mask = (np.array(x, np.int64) for x in zip(*entries, strict=True))
    value = np.array([worth(e, m) for e, m in entries])
    return CoalitionValues(step, 0, live, env, mask, value, -value)


def bits(live):
    return int((live << np.arange(len(live))).sum())


@pytest.mark.parametrize("sensors", [(), NAMES], ids=["without sensors", "with sensors"])
@pytest.mark.parametrize("slots", [1, 4])
def test_every_column_has_a_name_of_its_own(measured, sensors, slots):
    view = measured(slots=slots, sensors=sensors)
    inputs = normalise(seen(view), Normaliser.prior(sensors), slot_features(sensors))
    for values, names in zip((inputs.env, inputs.slot), input_names(sensors), strict=True):
        assert values.shape[-1] == len(names) == len(set(names))
        assert values.dtype == np.float32


def test_what_may_be_absent_and_nothing_else_has_a_flag_that_says_whether_it_was_measured():
    env, slot = input_names(NAMES)
    for columns, features in ((env, GLOBAL), (slot, slot_features(NAMES))):
        expected = {f"{f.name}?" for f in features if f.missing and not f.name.endswith(RELATIVE)}
        assert {name for name in columns if name.endswith("?")} == expected


def test_only_what_the_table_calls_missing_is_ever_nan(measured):
    for seed in range(5):
        observation = seen(measured(seed=seed))
        for values, features in ((observation.env, GLOBAL), (observation.slot, slot_features(NAMES))):
            absent = np.isnan(values).reshape(-1, values.shape[-1]).any(0)
            assert [f.name for f, gone in zip(features, absent, strict=True) if gone and not f.missing] == []


def test_every_feature_says_its_unit_a_positive_scale_and_what_it_means():
    for feature in (*GLOBAL, *slot_features(NAMES)):
        assert feature.unit
        assert feature.meaning
        assert feature.scale > 0


def test_a_relative_feature_is_the_raw_one_less_its_mean_over_the_slots_where_it_was_measured(measured):
    observation = seen(measured(envs=4))
    for feature in slot_features(NAMES):
        if feature.name.endswith(RELATIVE):
            raw, relative = column(observation, feature.name.removesuffix(RELATIVE)), column(observation, feature.name)
            for e, row in enumerate(raw):
                known = row[np.isfinite(row)]
                expected = row - known.mean() if len(known) else row
                np.testing.assert_allclose(relative[e], expected, rtol=0, atol=2e-6)


def test_a_slope_is_the_mean_change_over_the_steps_that_were_measured_without_a_break(measured):
    rng, window = np.random.default_rng(1), max(WINDOWS) + 1
    trend = np.where(rng.random((40, window, 3)) < 0.2, np.nan, rng.random((40, window, 3)))
    base = measured(envs=40)
    found = observe(base, History.empty(40)._replace(trend=trend)).env
    for i, name in enumerate(("metric", "loss", "train_loss")):
        for steps in WINDOWS:
            for e in range(40):
                values = []
                for value in trend[e, : steps + 1, i]:
                    if np.isnan(value):
                        break
                    values.append(value)
                expected = np.mean(-np.diff(values)) if len(values) > 1 else np.nan
                np.testing.assert_allclose(found[e, ENV[f"{name}_slope_{steps}"]], expected, rtol=0, atol=1e-6)


def test_a_history_holds_the_last_steps_the_newest_in_front(measured):
    history = History.empty(3)
    views = [measured(seed=seed) for seed in range(9)]
    for view in views:
        history = history.measured(view.measurements)
    for back, view in enumerate(reversed(views[-history.trend.shape[1] :])):
        m = view.measurements
        np.testing.assert_array_equal(history.trend[:, back, 0], m.metric)
        np.testing.assert_array_equal(history.trend[:, back, 1], np.log(m.loss))
        np.testing.assert_array_equal(history.trend[:, back, 2], np.log(m.train_loss))


def test_a_history_that_is_reset_in_some_rows_is_empty_there_and_whole_elsewhere(measured):
    history = History.empty(3).measured(measured().measurements)
    history = history.decided(Actions.wait(3)._replace(op=np.array([1, 2, 3])), np.array([True, False, True]))
    cleared = history.reset(np.array([False, True, False]))
    for field, before, empty in zip(cleared, history, History.empty(3), strict=True):
        np.testing.assert_array_equal(field[1], empty[1])
        np.testing.assert_array_equal(field[[0, 2]], before[[0, 2]])


def test_flags_tell_the_last_operation_whether_it_was_taken_and_whether_there_was_none(view):
    plain, history = view(np.zeros((3, 2))), History.empty(3)
    first = dict(zip([flag.name for flag in GLOBAL_FLAGS], seen(plain, history).env_flags.T, strict=True))
    assert first["first_step"].tolist() == [1, 1, 1]
    assert not any(first[f"last_{op.name.lower()}"].any() for op in Op)
    ops = np.array([Op.WAIT, Op.PRUNE, Op.GERMINATE])
    history = history.decided(Actions.wait(3)._replace(op=ops), np.array([True, False, True]))
    after = dict(zip([flag.name for flag in GLOBAL_FLAGS], seen(plain, history).env_flags.T, strict=True))
    assert after["first_step"].tolist() == [0, 0, 0]
    assert after["last_accepted"].tolist() == [1, 0, 1]
    for op in Op:
        assert after[f"last_{op.name.lower()}"].tolist() == (ops == op).tolist()


def test_flags_of_a_slot_tell_its_stage_the_blend_of_a_planted_seed_and_whether_it_is_doomed(view):
    stages = [[Stage.DORMANT, Stage.BLENDING, Stage.HOLDING]]
    base = view(stages, doomed=[[False, True, False]])
    planted = base._replace(seeds=base.seeds._replace(blend=np.full((1, 3), Blend.GATE, np.int8)))
    flags = dict(zip([flag.name for flag in SLOT_FLAGS], seen(planted).slot_flags[0].T, strict=True))
    for stage in Stage:
        assert flags[stage.name.lower()].tolist() == [float(s == stage) for s in stages[0]]
    assert flags["blend_gate"].tolist() == [0, 1, 1]
    assert flags["blend_add"].tolist() == [0, 0, 0]
    assert flags["doomed"].tolist() == [0, 1, 0]


def test_an_environment_is_seen_as_if_there_were_no_others(measured):
    mine, other = measured(seed=1), measured(seed=2)

    def mixed(a, b):
        """Combine environment 1 of a with the rest of b."""
        if isinstance(a, tuple):
            return type(a)(*(mixed(x, y) for x, y in zip(a, b, strict=True)))
        return np.where((np.arange(3) == 1).reshape(3, *(1,) * (a.ndim - 1)), a, b)

    joint = mine._replace(
        measurements=mixed(
            mine.measurements._replace(sensor_age=np.zeros(3)), other.measurements._replace(sensor_age=np.ones(3))
        )._replace(sensor_age=2),
        seeds=mixed(mine.seeds, other.seeds),
    )
    for alone, among in zip(seen(mine), seen(joint), strict=True):
        np.testing.assert_array_equal(among[1], alone[1])


def test_the_interaction_of_two_live_seeds_is_that_of_attribution(view):
    rng = np.random.default_rng(0)
    live = np.array([[True, False, True], [False, True, True], [True, True, False]])
    worth = rng.random((3, 8))
    base = view(np.where(live, Stage.HOLDING, Stage.DORMANT), step=6, age=9)
    coalitions = table(3, 3, live, lambda e, m: worth[e, m])
    found = seen(base._replace(coalitions=coalitions))
    expected = attribute(coalitions, 8).interaction
    for e in range(3):
        i, j = np.flatnonzero(live[e])
        np.testing.assert_allclose(column(found, "interaction")[e, [i, j]], expected[e, i, j], rtol=0, atol=1e-6)
    np.testing.assert_allclose(column(found, "interaction_age")[live], 2 / base.steps, rtol=1e-6)
    assert np.isnan(column(found, "interaction")[~live]).all()
    assert np.isnan(column(found, "interaction_age")[~live]).all()


def test_the_interaction_of_one_of_many_is_its_worth_among_them_less_its_worth_alone(view):
    worth = np.random.default_rng(0).random(16)
    live = np.array([[True, True, False, True]])
    base = view(np.where(live, Stage.BLENDING, Stage.DORMANT), age=9)
    found = column(seen(base._replace(coalitions=table(1, 4, live, lambda _, m: worth[m]))), "interaction")[0]
    for i in (0, 1, 3):
        others = 0b1011 & ~(1 << i)
        np.testing.assert_allclose(found[i], worth[0b1011] - worth[others] - worth[1 << i] + worth[0], atol=1e-6)


def test_a_seed_that_lives_alone_has_no_interaction(view):
    live = np.array([[False, True], [True, True]])
    base = view(np.where(live, Stage.HOLDING, Stage.DORMANT), age=9)
    found = column(seen(base._replace(coalitions=table(2, 2, live, lambda e, m: e + m / 10))), "interaction")
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()


def test_an_interaction_that_lacks_a_term_is_not_measured(view):
    live = np.array([[True, True]])
    whole = table(1, 2, live, lambda _, m: m / 10)
    lacking = CoalitionValues(whole.step, 0, live, *(x[1:] for x in whole[3:]))
    found = seen(view(np.full((1, 2), Stage.HOLDING), age=9)._replace(coalitions=lacking))
    assert np.isnan(column(found, "interaction")).all()
    assert np.isnan(column(found, "interaction_age")).all()


def test_a_seed_does_not_take_over_the_interaction_of_the_one_that_was_in_its_slot(view):
    live = np.array([[True, True]])
    base = view([[Stage.TRAINING, Stage.HOLDING]], step=7, age=[[2, 9]])
    found = column(seen(base._replace(coalitions=table(1, 2, live, lambda _, m: m / 10))), "interaction")[0]
    assert np.isnan(found[0])
    assert np.isfinite(found[1])


def test_the_real_engine_measures_the_interaction_of_two_live_seeds():
    grow = {(0, 0): (Op.GERMINATE, 0, 1, 0, 1, 3), (0, 1): (Op.GERMINATE, 0, 1, 0, 1, 3)}
    grow |= {
        (1, 0): (Op.GERMINATE, 1, 2, 0, 1, 3),
        (3, 0): (Op.ADVANCE, 0),
        (4, 0): (Op.ADVANCE, 1),
        (3, 1): (Op.ADVANCE, 0),
    }
    engine = VectorizedEngine(blobs(), small_config(envs=2, steps=6, probe={"coalitions_every": 1}))
    client, view = Script(grow), engine.reset()
    while view.step < view.steps:
        view, _ = engine.step(client.act(view))
    assert view.coalitions.live[:2].tolist() == [[True, True], [True, False]]
    found = column(seen(view), "interaction")
    expected = attribute(view.coalitions, 8).interaction[0, 0, 1]
    np.testing.assert_allclose(found[0], [expected, expected], rtol=0, atol=1e-6)
    assert np.isnan(found[1]).all()


def test_growth_sensors_are_shares_held_out_shares_of_the_gradients_energy_or_logarithms(measured):
    view = measured()
    found, sensors = seen(view), dict(zip(NAMES, np.moveaxis(view.measurements.sensors, 2, 0), strict=True))
    for name, value in sensors.items():
        if name.startswith(("participation", "drift")) or name in ("dead", "unsaturated"):
            expected = value
        elif name.startswith("heldout_"):
            expected = np.clip(value / sensors["gradient_rms"] ** 2, -1, 1)
        else:
            expected = np.log(value)
        at = len(SLOT) + NAMES.index(name)
        np.testing.assert_allclose(found.slot[..., at], expected, rtol=1e-5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38])
def test_figures_that_overflowed_count_as_not_measured_and_warn_of_nothing(measured, value):
    view, usual = measured(), measured()
    view.measurements.sensors[0] = value
    view.measurements.contribution_loss.mean[0] = value
    view.measurements.gradient_norm[0] = abs(value)
    inputs, found = (
        normalise(
            observe(each, History.empty(3).measured(each.measurements)), Normaliser.prior(NAMES), slot_features(NAMES)
        )
        for each in (view, usual)
    )
    assert np.isfinite(inputs.env).all()
    assert np.isfinite(inputs.slot).all()
    _, names = input_names(NAMES)
    known = inputs.slot[0][:, [names.index("contribution_loss?")]]
    assert (known == np.isfinite(value)).all()
    np.testing.assert_array_equal(inputs.slot[1:], found.slot[1:])
    heldout = [names.index(f"{name}?") for name in NAMES if name.startswith("heldout_")]
    assert heldout
    assert (inputs.slot[0][:, heldout] == np.isfinite(value)).all()


def test_a_cost_is_the_logarithm_of_what_a_blueprint_adds_to_the_host(measured):
    view = measured()
    assert seen(view).cost.shape == (3, 4, 3)
    np.testing.assert_allclose(seen(view).cost, np.log1p(100 / 1000), rtol=1e-6)


def test_what_is_not_finite_counts_as_not_measured(measured):
    view = measured()
    broken = np.full(3, np.inf)
    observation = seen(view._replace(measurements=view.measurements._replace(loss=broken)))
    inputs = normalise(observation, Normaliser.prior(NAMES), slot_features(NAMES))
    columns = input_names(NAMES)[0]
    assert inputs.env[:, columns.index("loss")].tolist() == [0, 0, 0]
    assert inputs.env[:, columns.index("loss?")].tolist() == [0, 0, 0]
    assert all(np.isfinite(field).all() for field in inputs)


def test_moments_taken_in_round_by_round_are_those_of_everything_at_once():
    rng = np.random.default_rng(0)
    values = np.where(rng.random((60, 2, 3)) < 0.3, np.nan, 5 + 3 * rng.standard_normal((60, 2, 3))).astype(np.float32)
    moments = Moments.prior([2.0] * 3)
    for part in np.split(values, [1, 8, 9, 40]):
        moments = moments.merged(Moments.of(part))
    flat = values.reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose(moments.mean, np.nanmean(flat, 0), rtol=1e-12)
    np.testing.assert_allclose(moments.var, np.nanvar(flat, 0), rtol=1e-12)
    np.testing.assert_array_equal(moments.n, np.isfinite(flat).sum(0))


def test_a_feature_that_was_never_measured_keeps_the_scale_of_the_table():
    values = np.array([[1.0, np.nan], [3.0, np.inf]], np.float32)
    moments = Moments.prior([2.0, 3.0]).merged(Moments.of(values))
    assert moments.mean.tolist() == [2, 0]
    assert moments.var.tolist() == [1, 9]
    assert moments.n.tolist() == [2, 0]


def test_taking_in_nothing_changes_no_moments():
    before = Moments.prior([2.0]).merged(Moments.of(np.array([[1.0], [4.0]], np.float32)))
    after = before.merged(Moments.of(np.full((5, 1), np.nan, np.float32)))
    assert [x.tolist() for x in after] == [x.tolist() for x in before]


def test_a_normalised_feature_has_mean_0_and_variance_1_over_what_the_moments_were_taken_from(measured):
    views = [seen(measured(seed=seed)) for seed in range(30)]
    joint = Observation(*(np.stack(fields) for fields in zip(*views, strict=True)))
    normaliser = Normaliser.prior(NAMES).merged(Normaliser.of(joint))
    inputs = normalise(joint, normaliser, slot_features(NAMES))
    columns = input_names(NAMES)[0]
    values, known = (inputs.env[..., columns.index(name)] for name in ("metric", "metric?"))
    assert values[known == 1].mean() == pytest.approx(0, abs=1e-5)
    assert values[known == 1].std() == pytest.approx(1, abs=1e-5)
    assert (values[known == 0] == 0).all()
    assert max(np.abs(inputs.env).max(), np.abs(inputs.slot).max()) <= CLIP


def test_inputs_of_one_observation_are_those_of_it_among_many(measured):
    views = [seen(measured(seed=seed)) for seed in range(3)]
    joint = Observation(*(np.stack(fields) for fields in zip(*views, strict=True)))
    normaliser = Normaliser.prior(NAMES).merged(Normaliser.of(joint))
    together = normalise(joint, normaliser, slot_features(NAMES))
    for t, view in enumerate(views):
        for one, many in zip(normalise(view, normaliser, slot_features(NAMES)), together, strict=True):
            np.testing.assert_array_equal(many[t], one)


def test_the_page_of_the_observation_is_what_its_script_writes():
    page = runpy.run_path(str(ROOT / "scripts" / "write_observation_page.py"))["page"]()
    assert (ROOT / "docs" / "observation.md").read_text(encoding="utf-8") == page, (
        "run python scripts/write_observation_page.py"
    )


def test_the_page_of_the_observation_names_every_column():
    page = (ROOT / "docs" / "observation.md").read_text(encoding="utf-8")
    for name in (name for columns in input_names(NAMES) for name in columns):
        assert f"| `{name.removesuffix('?').removesuffix(RELATIVE)}` |" in page, name
