import numpy as np
import torch

from esper.kasmina.host import check_host
from esper.leyline.config.tree import build_config
from esper.tasks.spirals import BAND, RADIUS, TURNS, spiral_points, spirals, spirals_narrow


def test_every_point_lies_in_the_band_of_its_own_spiral() -> None:
    x, y = (tensor.numpy() for tensor in spiral_points(500))
    radius = np.hypot(x[:, 0], x[:, 1]) / RADIUS
    angle = np.arctan2(x[:, 1], x[:, 0]) - np.pi * y
    turns = angle / (2 * np.pi * TURNS) + np.arange(-2, 3)[:, None] / TURNS  # radii at which the spiral meets the ray
    outside = np.abs(radius - turns).min(0) > BAND + 1e-5
    assert not outside[radius > BAND].any()  # nearer the origin, a point may lie on the far side of it


def test_the_classes_are_balanced_and_equally_large() -> None:
    x, y = spiral_points(2000)
    squares = x.square().sum(1)
    assert y.bincount().tolist() == [1000, 1000]
    torch.testing.assert_close(squares[y == 0].mean(), squares[y == 1].mean(), rtol=0.1, atol=0)


def test_fewer_points_are_the_first_of_more() -> None:
    assert torch.equal(spiral_points(20)[0], spiral_points(50)[0][:20])


def test_the_task_is_the_same_in_every_call_and_fits_its_host() -> None:
    first, again = spirals(), spirals()
    assert torch.equal(first.train.x, again.train.x)
    for task in (first, spirals_narrow()):
        check_host(task.host(), first.train.x[:2], first.objective.outputs)


def test_classes_are_balanced_in_every_split() -> None:
    task = spirals()
    assert task.test is not None
    for part in (task.train, task.probe, task.validation, task.test):
        assert part.y.bincount().tolist() == [len(part.y) // 2] * 2


def test_a_step_of_the_defaults_is_one_epoch() -> None:
    task = spirals()
    data = build_config(task.defaults).data
    assert data.batch_size * data.batches_per_step == len(task.train.x)
