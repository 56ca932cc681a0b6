"""Test the controllers of the benchmarks as teachers of a policy."""

import pytest

from esper.leyline.messages import InputError
from esper.runs.configuration import training_configs
from esper.runs.train import Trainer, cohorts_of
from esper.tamiyo.catalog import get_controller
from esper.tamiyo.policy.controller import Language, Policy
from esper.tolaria.engine import VectorizedEngine
from esper_bench.controllers.placement import Uniform
from populations import blobs, small_config


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"ppo": {"teacher": "participation", "imitation_rounds": 1}, "probe": {"sensors_every": 0}},
            "probe.sensors_every is 0; set it to 1 or more",
        ),
        (
            {"ppo": {"teacher": "trials:collapse", "imitation_rounds": 1}},
            "ppo.teacher is trials:collapse, which tries candidates in copies of the networks, and a training makes no copies",
        ),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused(settings, says):
    (config,) = training_configs([blobs()], "quick", settings)
    space = VectorizedEngine(blobs(), small_config()).space
    with pytest.raises(InputError, match=says):
        Trainer(cohorts_of(blobs(), config), Policy.fresh(Language.of([space]), 0), config)


def test_the_teacher_is_any_controller():
    config = small_config({"ppo": {"teacher": "uniform"}})
    assert isinstance(get_controller(config.ppo.teacher, config), Uniform)
