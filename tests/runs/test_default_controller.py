"""Check that the default controller grows small data and hosts of one's own where growing can help."""

import numpy as np
import pytest
import torch
from torch import nn

import esper
from esper.tamiyo.rules.heuristic import Heuristic
from populations import blobs, small_config

SHORT = {"envs": 2, "steps": 12, "baselines": [], "data": {"batch_size": 16, "batches_per_step": 2}}


def rings(classes=2, examples=200, rare=0.5):
    """Draw points on circles around one centre, of which no line tells one from another."""
    generator = torch.Generator().manual_seed(3)
    y = (torch.rand(examples, generator=generator) < rare).long() if classes == 2 else torch.arange(examples) % classes
    angle = 2 * np.pi * torch.rand(examples, generator=generator)
    x = (1 + y)[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    return x + 0.1 * torch.randn(examples, 2, generator=generator), y


def own_task(host, x=None, y=None, **options):
    if x is None:
        x, y = rings()
    return esper.task("rings", x, y, host=host, **options)


def plain(width):
    return lambda: esper.SegmentedHost(
        [nn.Linear(2, width), nn.Sequential(nn.Linear(width, width), nn.ReLU()), nn.Linear(width, 2)],
        [esper.SlotSpec("a", 0, width), esper.SlotSpec("b", 1, width)],
    )


def test_a_host_of_four_features_is_grown():
    summary = esper.grow(own_task(plain(4)), SHORT)
    assert summary["seeds"]["germinated"] > 0


def test_where_one_class_is_rare_that_the_other_is_predicted_always_is_no_reason_to_stop():
    x, y = rings(rare=0.04)
    task = own_task(plain(4), x, y)
    assert 1 - task.probe.y.float().mean() > 0.94
    assert esper.grow(task, SHORT)["seeds"]["germinated"] > 0


class Recurrent(nn.Module):
    """Returns the last state of a GRU over a sequence (B, T, 2) -> (B, 4)."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 4, batch_first=True)

    def forward(self, x):
        return self.gru(x)[0][:, -1]


def recurrent():
    return esper.SegmentedHost([Recurrent(), nn.Linear(4, 2)], [esper.SlotSpec("state", 0, 4)])


def test_behind_a_recurrent_segment_it_plants_what_can_be_planted_there():
    x, y = rings()
    task = own_task(recurrent, x[:, None].expand(-1, 3, -1).contiguous(), y)
    summary = esper.grow(task, SHORT)
    assert summary["seeds"]["germinated"] > 0
    assert {name for grown in summary["grown"] for name in grown.values()} <= {"mlp-small"}


class Looking(Heuristic):
    """Decides by the rule, and notes whether it saw the growth sensors at each decision."""

    def __init__(self, *settings):
        super().__init__(*settings)
        self.saw = []

    def act(self, view):
        self.saw.append(bool(np.isfinite(view.measurements.sensors).any()))
        return super().act(view)


@pytest.mark.parametrize(("every", "saw"), [(None, True), (0, False)])
def test_a_run_measures_the_growth_sensors_that_its_controller_needs_unless_it_is_told_how_often(every, saw):
    config = small_config({"probe": {"sensors_every": every}, "models": "none"})
    client = Looking(config.heuristic, config.gates)
    esper.grow(blobs(), config, controller=client)
    assert client.saw == [saw] * 8
