"""Test the mixture `repair-tables`: tables of scikit-learn on the hosts of `repair`."""

import numpy as np
import pytest
import torch

from esper.leyline.config.tree import build_config
from esper.leyline.messages import InputError
from esper.tasks import repair
from esper.tasks.small import classical
from esper.tolaria.engine import VectorizedEngine
from esper_bench.repair_tables import TABLES, describe, repair_tables, sample


def first(family: str) -> int:
    return next(key for key in range(100) if describe(key).family == family)


def test_every_table_is_drawn_about_as_often() -> None:
    drawn = [describe(key).family for key in range(600)]
    assert all(150 < drawn.count(family) < 250 for family in TABLES)


def test_the_host_is_that_of_repair_with_the_features_and_classes_of_the_table() -> None:
    key = first("wine")
    host, damaged = describe(key).host, repair.describe(key).host
    assert (host.inputs, host.outputs) == (13, 3)
    assert (host.width, host.hidden, host.linear, host.frozen) == (
        damaged.width,
        damaged.hidden,
        damaged.linear,
        damaged.frozen,
    )


def test_the_splits_are_those_of_the_task_of_the_table_standardized() -> None:
    task, instance = classical("wine"), sample(first("wine"))
    assert torch.equal(instance.train.y, task.train.y)
    x = instance.train.x
    assert isinstance(x, torch.Tensor)
    torch.testing.assert_close(x.mean(0), torch.zeros(13), atol=1e-5, rtol=0)
    test = repair_tables().test_split(first("wine"))
    assert test is not None
    assert task.test is not None
    assert torch.equal(test.y, task.test.y)


def test_a_population_holds_all_tables_at_once() -> None:
    task, keys = repair_tables(), [first(family) for family in TABLES]
    config = build_config(task.defaults, {"task": task.name, "envs": 3, "baselines": []})
    view = VectorizedEngine(task.sealed(), config).reset(np.array(keys))
    assert np.isfinite(view.measurements.loss).all()


def test_a_key_outside_the_ranges_is_refused() -> None:
    with pytest.raises(InputError, match="is not an instance"):
        describe(2**30)
