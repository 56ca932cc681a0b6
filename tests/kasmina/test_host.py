"""Test the inner features of segments: which are found, which are measured, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn

import esper
from esper.kasmina.host import SegmentedHost, inner_of
from esper.leyline.lifecycle.slots import SlotSpec
from esper.leyline.messages import InputError
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.measure.sensors import participation_ratio
from populations import small_config

FOUND = {
    "two linear layers": (nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8)), 2),
    "an activation behind the last": (nn.Sequential(nn.Linear(8, 2), nn.Tanh(), nn.Linear(2, 8), nn.Tanh()), 2),
    "a norm in front": (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2), nn.PReLU(), nn.Linear(2, 8)), 3),
    "no activation between": (nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8)), 1),
    "two convolutions": (
        nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(2, 8, 3)),
        4,
    ),
}


class Backwards(nn.Sequential):
    """Runs the modules of an nn.Sequential in another order."""

    def forward(self, x):
        for module in reversed(list(self)):
            x = module(x)
        return x


NOT_FOUND = {
    "a single layer": nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
    "three layers": nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2), nn.Linear(2, 8)),
    "layers of two kinds": nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(8, 8)),
    "a module of unknown inside": nn.Sequential(nn.Linear(8, 2), nn.Bilinear(2, 2, 2), nn.Linear(2, 8)),
    "no nn.Sequential": nn.Linear(8, 8),
    "another order": Backwards(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8)),
}


@pytest.mark.parametrize(("segment", "modules"), FOUND.values(), ids=FOUND)
def test_inner_features_are_what_the_second_of_two_layers_reads(segment, modules):
    assert inner_of(segment) == modules
    host = SegmentedHost([segment, nn.Identity()], [SlotSpec("a", after=0, width=8)])
    assert host.slots[0].inner == modules


@pytest.mark.parametrize("segment", NOT_FOUND.values(), ids=NOT_FOUND)
def test_a_segment_without_one_answer_has_no_inner_features(segment):
    assert inner_of(segment) is None


def test_what_a_slot_says_itself_stands():
    segment = nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8))
    host = SegmentedHost([segment, nn.Linear(8, 2)], [SlotSpec("a", after=0, width=8, inner=1)])
    assert host.slots[0].inner == 1


def task_of(segment, *, inner=None):
    """Make a task of two clusters, and a host of 4 -> 8, the segment and 8 -> 2 features."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(120) % 2
    x = torch.randn(120, 4, generator=generator) + y[:, None]

    def host():
        return SegmentedHost(
            [nn.Linear(4, 8), segment(), nn.Linear(8, 2)], [SlotSpec("middle", after=1, width=8, inner=inner)]
        )

    return esper.task("mine", x, y, host=host)


def narrow():
    return nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Dropout(0.5), nn.Linear(2, 8))


def test_inner_features_that_were_found_are_measured_in_every_environment():
    task = task_of(narrow)
    engine = VectorizedEngine(task.sealed(), small_config({"probe": {"sensors_every": 1}}, steps=2))
    view = engine.reset()
    found = view.measurements.sensors[:, 0, view.space.sensors.index("participation_inner")]
    for env, value in enumerate(found[:3]):
        host = engine.export(env)[0].segments
        with torch.no_grad():
            z = host[1][1](host[1][0](host[0](task.train.x)))
        assert value == pytest.approx(float(participation_ratio(z[None])[0]), rel=1e-4)
    assert len(np.unique(found)) == len(found)


class Block(nn.Module):
    """Shows nothing of the narrow segment within."""

    def __init__(self):
        super().__init__()
        self.inside = narrow()

    def forward(self, x):
        return self.inside(x)


@pytest.mark.parametrize(("segment", "said"), [(narrow, False), (Block, True)])
def test_the_heuristic_says_where_it_could_not_recognise_narrow_segments(segment, said):
    settings = {"envs": 1, "steps": 2, "baselines": [], "data": {"batch_size": 12, "batches_per_step": 2}}
    explained = esper.grow(task_of(segment), settings)["explanations"]
    assert any(sentence.startswith("no segment of the host has inner features") for sentence in explained) == said


@pytest.mark.parametrize(
    ("segment", "inner", "sentence"),
    [
        (Block, 1, "inner of slot 'middle' is 1, but segment 1 of the host is a Block; give how many modules of an nn"),
        (
            narrow,
            5,
            "inner of slot 'middle' is 5, but segment 1 of the host has 4 modules; give how many modules of an nn",
        ),
    ],
)
def test_inner_features_that_a_segment_does_not_have_are_refused(segment, inner, sentence):
    with pytest.raises(InputError) as error:
        task_of(segment, inner=inner)
    assert str(error.value).startswith(sentence)
