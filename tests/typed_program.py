"""Define a program that `mypy --strict` accepts (see pyproject.toml) and a test runs: own data, host, seed and controller."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import esper


def host() -> esper.SegmentedHost:
    """Build a convolutional host with a slot behind its first segment."""
    segments = [
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 2)),
    ]
    return esper.SegmentedHost(segments, [esper.SlotSpec("maps", after=0, width=4, kind="map")])


def wide(reads: int, writes: int) -> nn.Module:
    """Make a convolution that changes nothing at first."""
    layer = nn.Conv2d(reads, writes, 1)
    nn.init.zeros_(layer.weight)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


class Planter(esper.Controller):
    """Plants wherever the masks allow."""

    def __init__(self) -> None:
        self.outcomes: list[esper.Outcome] = []

    def act(self, view: esper.View) -> esper.Actions:
        """Plant where GERMINATE is allowed."""
        space: esper.Space = view.space
        actions = esper.Actions.wait(len(view.host_params))
        masks: esper.Masks = view.masks
        able = masks.op[:, esper.Op.GERMINATE]
        actions.op[able] = esper.Op.GERMINATE
        actions.blend[:] = esper.Blend.ADD
        actions.slot[able] = masks.slot[able, esper.Op.GERMINATE].argmax(1)
        actions.tempo[:] = space.tempos.index(2)
        seeds: esper.Seeds = view.seeds
        assert (seeds.stage >= esper.Stage.DORMANT).all()
        measurements: esper.Measurements = view.measurements
        gain: esper.Estimate = measurements.gain
        assert gain.measured.shape == seeds.stage.shape
        return actions

    def store(self, outcome: esper.Outcome) -> None:
        """Keep what came of it."""
        scores: esper.Scores = outcome.after
        assert scores.metric.shape == outcome.refused.shape
        self.outcomes.append(outcome)


def run(folder: str) -> tuple[Mapping[str, Any], Tensor]:
    """Grow, and read a network back."""
    esper.blueprint("typed-wide", kind="map", tap="here", parameters=lambda reads, writes: (reads + 1) * writes)(wide)
    x = torch.rand(120, 1, 4, 4)
    y = (x.mean((1, 2, 3)) > 0.5).long()
    task: esper.Task = esper.task("typed", x, y, host=host, classes=2, menu=["typed-wide"])
    config: esper.Config = esper.build_config(
        task.defaults, {"envs": 1, "steps": 2, "data.batch_size": 8, "twin": False}
    )
    client: esper.Controller = Planter()
    ready: Callable[[], esper.SegmentedHost] = esper.mlp(inputs=4, width=8, classes=2)
    assert [slot.kind for slot in ready().slots] == [esper.Kind.VECTOR] * 3
    try:
        summary = esper.grow(task, config, controller=client, run=folder)
    except (esper.InputError, esper.UserCodeError) as error:
        raise SystemExit(str(error)) from None
    network: esper.GrownNetwork = esper.load(f"{folder}/models/env-000", host=host)
    part: esper.Split | None = task.test
    assert part is not None
    answer: Tensor = network(part.x)
    print(esper.__version__, summary["status"], task, config.seed)
    return summary, answer
