"""Test targets of a regression that hosts return standardized, while data, metrics and grown networks stay in their units."""

import json
import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score
from torch import nn

import esper
from esper.leyline.messages import DataWarning, InputError
from esper.tasks.hosts import MLP
from esper.tasks.objectives import Classification, Regression, StandardizedObjective, custom_objective
from esper.tolaria.measure.bounds import bounds

SETTINGS = {"envs": 2, "steps": 3, "baselines": ["twin"], "data": {"batch_size": 16, "batches_per_step": 8}}
MEAN, DEVIATION = (150.0, -3.0), (77.0, 0.01)


def data(targets=1, examples=240):
    """Draw features and targets far from mean 0 and deviation 1; one target is (N,)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, 4, generator=generator)
    z = torch.stack([x[:, 0] * x[:, 1] + x[:, 2], x[:, 3] - x[:, 0]], 1)
    y = z * torch.tensor(DEVIATION) + torch.tensor(MEAN)
    return x, y[:, 0] if targets == 1 else y


def task_of(targets=1, **more):
    x, y = data(targets)
    return esper.task("far", x, y, host=MLP(4, 8, (3, 8), targets), **{"standardize": True, **more})


# What is computed.


@pytest.mark.parametrize("targets", [1, 2])
def test_it_trains_as_on_targets_that_were_standardized_by_hand(targets):
    task = task_of(targets)
    x, y = data(targets)
    mean, deviation = task.train.y.mean(0), task.train.y.std(0, correction=0)
    by_hand = task_of_values(x, (y - mean) / deviation, targets)
    one, other = (esper.grow(each, SETTINGS, controller="never", progress=False) for each in (task, by_hand))
    np.testing.assert_allclose(one["test_r2"]["grown"], other["test_r2"]["grown"], rtol=1e-3)
    np.testing.assert_allclose(one["test_loss"]["grown"], other["test_loss"]["grown"], rtol=1e-3)
    assert max(one["test_loss"]["grown"]) < 2, "the loss is that of standardized targets"


def task_of_values(x, y, targets):
    return esper.task("near", x, y, host=MLP(4, 8, (3, 8), targets), standardize="features")


@pytest.mark.parametrize("shape", [(3, 7), (3, 7, 1), (3, 7, 2)])
def test_loss_and_metric_are_those_of_the_base_one_of_standardized_values_the_other_in_the_units_of_y(shape):
    count = shape[2] if len(shape) == 3 else 1
    mean, deviation = MEAN[:count], DEVIATION[:count]
    generator = torch.Generator().manual_seed(1)
    output, z = (torch.randn(3, 7, count, generator=generator, dtype=torch.float64) for _ in range(2))
    units = torch.tensor(deviation, dtype=torch.float64), torch.tensor(mean, dtype=torch.float64)
    target = (z * units[0] + units[1]).reshape(shape)
    raw = output * units[0] + units[1]
    plain = StandardizedObjective(Regression(count), mean, deviation)
    torch.testing.assert_close(plain.loss(output, target), (output - z).square().mean(-1))
    torch.testing.assert_close(plain.score(output, target), Regression(count).score(raw, target))

    def relative(outputs, y):
        return ((outputs - y) / y).abs()

    own = StandardizedObjective(custom_objective(Regression(count), relative, relative, None), mean, deviation)
    expected = ((raw - target.reshape(raw.shape)) / target.reshape(raw.shape)).abs().mean(-1)
    torch.testing.assert_close(own.loss(output, target), expected)
    torch.testing.assert_close(own.score(output, target), expected)


@pytest.mark.parametrize(("metric", "floor", "ceiling"), [(None, 0.0, 1.0), ("neg_mean_absolute_error", -60.0, 0.0)])
def test_the_best_constant_and_a_perfect_prediction_have_the_metrics_that_they_have_in_the_units_of_y(
    metric, floor, ceiling
):
    task = task_of(metric=metric)
    found = bounds(task.objective, task.probe, task.target_scaling)
    if metric:
        floor = -float((task.probe.y - task.probe.y.mean()).abs().mean())
    assert found == pytest.approx((floor, ceiling), abs=1e-3)


def test_classes_have_no_units():
    x, y = data()
    task = esper.task("classes", x, (y > 150).long(), host=MLP(4, 8, (3, 8), 2), standardize=True)
    assert isinstance(task.objective, Classification)
    assert task.target_scaling is None


# What is taken home.


@pytest.mark.parametrize("targets", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_grown_network_returns_targets_in_the_units_of_y_and_so_does_its_program(tmp_path, targets):
    task = task_of(targets)
    summary = esper.grow(task, {**SETTINGS, "steps": 12}, run=tmp_path / "r", progress=False)
    folder = tmp_path / "r/models/env-000"
    network = esper.load(folder)
    x, y = task.test.x, task.test.y.numpy()
    predicted = network.predict(x)
    assert predicted.shape == y.shape
    assert r2_score(y, predicted) == pytest.approx(summary["test_r2"]["grown"][0], abs=1e-4)
    assert r2_score(y, predicted) > 0.5
    program = torch.export.load(folder / "model.pt2").module()
    torch.testing.assert_close(program(x), network(x))
    torch.testing.assert_close(network(x).detach().reshape(y.shape), torch.from_numpy(predicted))


def test_a_metric_by_name_is_in_the_units_of_y(tmp_path):
    task = task_of(metric="neg_mean_absolute_error")
    summary = esper.grow(task, SETTINGS, run=tmp_path / "r", progress=False)
    predicted = esper.load(tmp_path / "r/models/env-000").predict(task.test.x)
    error = mean_absolute_error(task.test.y, predicted)
    assert summary["test_neg_mean_absolute_error"]["grown"][0] == pytest.approx(-error, rel=1e-4)


def test_a_network_that_grows_further_keeps_its_own_means_and_deviations(tmp_path):
    task = task_of()
    esper.grow(task, SETTINGS, run=tmp_path / "r", progress=False)
    network = esper.load(tmp_path / "r/models/env-000")
    x, y = data()
    again = esper.task("again", x[:120], y[:120], host=lambda: network, seed=3)
    assert torch.equal(again.target_scaling.mean, task.target_scaling.mean)
    assert not torch.equal(again.target_scaling.mean, again.train.y.mean())
    first = esper.grow(again, {**SETTINGS, "steps": 1, "optimizer": {"lr": 1e-12}}, controller="never", progress=False)
    assert first["test_r2"]["grown"][0] == pytest.approx(
        r2_score(again.test.y, network.predict(again.test.x)), abs=1e-4
    )


def test_a_network_that_takes_raw_values_grows_further_on_raw_values():
    network = grown_on_raw()
    x, y = data()
    again = esper.task("again", x, y, host=lambda: network, standardize=True)
    assert again.scaling is None
    assert again.target_scaling is None


def grown_on_raw():
    x, y = data()
    task = esper.task("near", x, (y - 150) / 77, host=MLP(4, 8, (3, 8), 1))
    engine = esper.VectorizedEngine(task.sealed(), esper.build_config(task.defaults, {"envs": 1}))
    engine.reset()
    return engine.export(0)[0]


@pytest.mark.parametrize(
    ("restore", "sentence"),
    [
        ([1], r"has a mean of shape \[1\] for targets of shape \[2\]; export the network again"),
        (None, r"tensor restore.deviation is unknown; give the host"),
    ],
)
def test_a_mean_that_does_not_fit_the_targets_or_the_weights_is_refused(tmp_path, restore, sentence):
    esper.grow(task_of(2), {**SETTINGS, "steps": 1}, run=tmp_path / "r", progress=False)
    folder = tmp_path / "r/models/env-000"
    topology = json.loads((folder / "topology.json").read_text())
    assert topology["restore"] == [2]
    (folder / "topology.json").write_text(json.dumps({**topology, "restore": restore}))
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(InputError, match=sentence):
        esper.load(folder)


# What is said.


@pytest.mark.parametrize("targets", [1, 2])
def test_targets_far_from_what_a_host_returns_at_first_are_warned_of_with_the_mend(targets):
    which = "target 0 has" if targets == 2 else "the targets have"
    with pytest.warns(
        DataWarning,
        match=f"^{which} mean 177 and standard deviation 121 in the train split, .*; give standardize=True, or",
    ):
        task_of(targets, standardize=False)


@pytest.mark.parametrize(
    "more", [{"standardize": True}, {"standardize": "features"}, {"standardize": False, "loss": nn.PoissonNLLLoss()}]
)
def test_who_standardizes_them_or_leaves_them_so_on_purpose_is_not_warned(more):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task_of(**more)


def test_another_word_for_standardize_is_refused():
    with pytest.raises(
        InputError, match="standardize is 'targets'; give True, False, or 'features' to leave targets as"
    ):
        task_of(standardize="targets")
