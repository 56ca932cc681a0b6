"""Test fitted trees as arrays, and the controller that reads them."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save
from sklearn.ensemble import ExtraTreesRegressor

from esper.leyline.lifecycle.view import BlueprintInfo
from esper.leyline.lifecycle.vocabulary import Stage
from esper.leyline.messages import InputError
from esper.tamiyo.policy.packages import inner_slots
from esper.tolaria.measure.sensors import SENSORS
from esper_bench.controllers.forest import FEATURES, Forest, Forests, forest_of, load_forests, save_forests
from esper_bench.controllers.healing_features import FEATURES as BLIND
from esper_bench.controllers.healing_features import TAUGHT_FEATURES, UNKNOWN, slot_features, table
from esper_bench.controllers.plans import BYPASS, MIXED, NONE, PLACED, UNIFORM, wished
from esper_bench.controllers.trees import SHIPPED, Trees

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def fitted() -> tuple[ExtraTreesRegressor, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(200, 3))
    return ExtraTreesRegressor(7, min_samples_leaf=3, random_state=0).fit(x, x[:, 0] * (x[:, 1] > 0)), x


@pytest.fixture
def written(fitted, tmp_path) -> Path:
    path = tmp_path / "trees.safetensors"
    save_forests(path, Forests(NAMES, {"one": forest_of(fitted[0])}))
    return path


def test_a_forest_predicts_what_scikit_learn_does(fitted):
    model, x = fitted
    x32 = x.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(forest_of(model).predict(x32), model.predict(x32), atol=1e-6)
    assert forest_of(model).predict(x.reshape(20, 10, 3)).shape == (20, 10)


def test_a_forest_that_was_written_is_read_as_it_was(fitted, written):
    found = load_forests(written, NAMES)
    assert found.features == NAMES
    for one, other in zip(found.models["one"], forest_of(fitted[0]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_feature_that_esper_lacks_is_refused_by_name(written):
    with pytest.raises(InputError, match=r"read the feature 'c', which Esper does not have; fit them again"):
        load_forests(written, ("a", "b"))


@pytest.mark.parametrize(
    "content", [b"", b"no trees", save({"x": np.zeros(3)}), save({FEATURES: np.zeros(3, np.uint8)})]
)
def test_a_file_that_is_none_of_trees_is_refused(tmp_path, content):
    path = tmp_path / "trees.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a file of trees; give one that"):
        load_forests(path, NAMES)


@pytest.mark.parametrize(
    ("field", "value"), [("left", 0), ("right", 10**6), ("feature", 3), ("roots", -1), ("value", np.nan), ("left", -5)]
)
def test_damaged_trees_are_refused_before_they_are_followed(written, field, value):
    tensors = load(written.read_bytes())
    array = tensors[f"one.{field}"].copy()
    array[0] = value
    if field == "value":
        array[:] = value
    written.write_bytes(save({**tensors, f"one.{field}": array}))
    with pytest.raises(InputError, match=r"the trees 'one' of .* are damaged; fit them again"):
        load_forests(written, NAMES)


# The controller.


RANKS = (1, 2, 4, 8)


@pytest.fixture
def measured(view):
    """Make a view of three hosts of four slots, the first of which changes the width, with drawn sensors and some absent."""
    names = tuple(sensor.name for sensor in SENSORS)
    menu = tuple(BlueprintInfo(f"bypass-rank-{rank}", "before") for rank in RANKS)
    cost = np.array([[(80 if slot == 0 else 32) * rank for rank in RANKS] for slot in range(4)])
    fits = np.ones(cost.shape, bool)
    base = view([(Stage.DORMANT,) * 4] * 3, sensors=names, blueprints=menu, cost=np.stack([cost] * 3), fits=fits)
    rng = np.random.default_rng(1)
    sensors = rng.uniform(0.1, 1, (3, 4, len(names)))
    sensors[:, 0, names.index("participation_inner")] = np.nan
    measurements = base.measurements._replace(sensors=sensors, metric=np.full(3, 0.5), loss=np.ones(3))
    return base._replace(measurements=measurements)


def leaf(value: float) -> Forest:
    """Make a tree that predicts one value."""
    number = np.zeros(1, np.int32)
    return Forest(number, number - 1, np.zeros(1, np.float32), number - 1, number - 1, np.full(1, value, np.float32))


def test_the_shipped_trees_read_features_that_need_no_intact_network():
    forests = load_forests(SHIPPED, BLIND)
    assert set(forests.models) == {plan.name for plan in PLACED}
    assert SHIPPED.stat().st_size < 500_000


def test_trees_pick_the_plan_of_the_largest_gain_and_uniform_where_none_gains(measured, tmp_path):
    view, path = measured, tmp_path / "trees.safetensors"
    envs = len(view.masks.op)
    save_forests(path, Forests(("depth",), {BYPASS.name: leaf(0.2), NONE.name: leaf(0.3)}))
    picks = Trees(path).pick(view)
    assert (list(picks.plans), picks.slot.tolist()) == ([NONE] * envs, [-1] * envs)
    assert picks.reasons[0].startswith("the trees expect +0.300 in J")
    save_forests(path, Forests(("depth",), {BYPASS.name: leaf(-0.1)}))
    assert list(Trees(path).pick(view).plans) == [UNIFORM] * envs


def test_trees_for_an_unknown_plan_are_refused(tmp_path):
    path = tmp_path / "trees.safetensors"
    save_forests(path, Forests(("depth",), {"magic": leaf(1.0)}))
    with pytest.raises(InputError, match=r"are for the plan 'magic'; the plans are none, bypass, "):
        Trees(path)


def test_features_are_finite_and_do_not_change_with_the_scale_of_stream_and_loss(measured):
    view = measured
    found = slot_features(view, taught=True)
    assert set(found) == set(TAUGHT_FEATURES)
    values = table(found, TAUGHT_FEATURES)
    assert np.isfinite(values).all()
    assert (values >= UNKNOWN).all()
    names, sensors = view.space.sensors, view.measurements.sensors.copy()
    for name in ("stream_rms", "gradient_rms", "map_gradient_here", "map_gradient_before"):
        sensors[..., names.index(name)] *= 3
    for name in (name for name in names if name.startswith(("explained", "heldout"))):
        sensors[..., names.index(name)] *= 9
    scaled = view._replace(measurements=view.measurements._replace(sensors=sensors))
    np.testing.assert_allclose(table(slot_features(scaled, taught=True), TAUGHT_FEATURES), values, atol=1e-9)


def test_a_plan_is_wished_at_its_slot_or_around_every_block(measured):
    space = measured.space
    inner = inner_slots(space)
    everywhere = wished(space, UNIFORM, np.full(len(inner), -1))
    assert ((everywhere[..., 0] >= 0) == inner).all()
    assert (wished(space, NONE, np.zeros(len(inner), np.int64)) == -1).all()
    assert inner.tolist() == [[False, True, True, True]] * 3
    one = wished(space, BYPASS, np.ones(len(inner), np.int64))
    assert (one[:, 1] == [3, 2, 1, 0]).all()
    assert (np.delete(one, 1, axis=1) == -1).all()
    mixed = wished(space, MIXED, np.ones(len(inner), np.int64))
    assert mixed[0, :, 0].tolist() == [-1, 2, 0, 0]
