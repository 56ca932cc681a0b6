import numpy as np
import pytest
import torch

from esper.leyline.data.task import Split
from esper.tasks.objectives import Classification, Regression
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.measure.bounds import bounds, constant_metric
from populations import blobs, small_config


def test_the_floor_of_accuracy_is_the_share_of_the_most_frequent_class_and_its_ceiling_is_1():
    y = torch.tensor([0] * 97 + [1] * 3)
    assert bounds(Classification(2), Split(torch.zeros(100, 2), y)) == pytest.approx((0.97, 1.0))


def test_a_constant_prediction_is_fitted_to_one_split_and_scored_on_another(monkeypatch):
    train, test = torch.tensor([1, 1, 1, 0, 2]), torch.tensor([1, 0, 0, 2] * 25)
    for at_once in (1, 7, 2**20):
        monkeypatch.setattr("esper.tolaria.measure.bounds.AT_ONCE", at_once)
        assert constant_metric(Classification(3), train, Split(test, test)) == pytest.approx(0.25)
    y, held = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 2.0, 7.0])
    assert constant_metric(Regression(1), y, Split(held, held)) == pytest.approx(1 - 29 / 26)  # the mean of y is 2
    assert np.isnan(constant_metric(Classification(2), train, Split(test, test))), "labels that are no classes"


@pytest.mark.parametrize("shape", [(50,), (50, 3)])
def test_the_floor_of_r2_is_0_and_its_ceiling_is_1(shape):
    y = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = bounds(Regression(shape[-1] if len(shape) > 1 else 1), Split(torch.zeros(50, 2), y))
    assert found == pytest.approx((0.0, 1.0), abs=1e-5)


def test_the_bounds_of_a_metric_of_ones_own_are_worked_out_from_it():
    class Error(Regression):
        def score(self, output, target):
            return -(output - target.unsqueeze(-1)).abs().mean(-1)

    y = torch.tensor([0.0, 2.0])
    assert bounds(Error(1), Split(torch.zeros(2, 1), y)) == (-1.0, 0.0)


def test_a_metric_that_is_not_finite_there_has_no_bounds():
    found = bounds(Regression(1), Split(torch.zeros(4, 1), torch.ones(4)))
    assert np.isnan(found).any()


def test_every_environment_sees_the_bounds_of_its_own_probe_split():
    task = blobs()
    space = VectorizedEngine(task, small_config()).space
    share = task.probe.y.bincount().max().item() / len(task.probe.y)
    np.testing.assert_allclose(space.floor, [share] * 3)
    np.testing.assert_allclose(space.ceiling, [1.0] * 3)
