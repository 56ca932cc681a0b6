"""Make two spirals: on a residual host, on a host with a very narrow block, and on a host that is trained beforehand.

E networks, B examples.
"""

import math
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.host import SegmentedHost
from esper.leyline.config.tree import build_config
from esper.leyline.data import keys
from esper.leyline.data.task import Task
from esper.tasks.hosts import MLP, ResidualMLP, VectorHost
from esper.tasks.small import table_task

DATA = "2,048 points on two interleaved spirals"
SUMMARY = f"{DATA}; a residual network"
NARROW = f"{DATA}; an MLP that is narrow in the first of its three blocks"
SIZES = (1024, 256, 256, 512)  # train, probe, validation, test; 16 batches of 64 are one epoch
TURNS = 1.5  # of each spiral
BAND = 0.05  # half width of a spiral; the spirals are 1 / (2 * TURNS) apart
RADIUS = 2.0  # so that the features have a standard deviation near 1
HOST = ResidualMLP(inputs=2, width=32, hidden=(32,) * 3, outputs=2)

POOL = 16
"""Number of trained hosts; every environment starts from one of them."""
EPOCHS = 24
SMALL = ResidualMLP(inputs=2, width=8, hidden=(4, 4), outputs=2)
TRAINED = f"{DATA}; a small residual network after {EPOCHS} epochs of training, to be grown further"


def spirals() -> Task:
    """Return two interleaved Archimedean spirals: 2 features, 2 classes, on a residual host.

    The problem follows Lang and Witbrock, "Learning to tell two spirals apart", 1988, with more points, because their 194 are
    too few for four splits, and with half the turns. The bands do not touch, so an accuracy of 1 is possible. The points and
    the splits are the same in every run, and the features have torch's default dtype.
    """
    x, y = spiral_points(sum(SIZES))
    task = table_task("spirals", SUMMARY, x, y, HOST, sizes=SIZES, batches=(64, 16))
    return replace(task, scaling=None)  # `RADIUS` has scaled the points


def spirals_narrow() -> Task:
    """Make `spirals` on a damaged host without skip connections whose first block is too narrow, to test controllers."""
    host = MLP(inputs=2, width=16, hidden=(2, 12, 4), outputs=2)
    return replace(spirals(), name="spirals-narrow", summary=NARROW, host=host, room=None)


def spiral_points(count: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Compute (count, 2) features x in torch's default dtype, and (count,) int64 labels y, which alternate between 0 and 1.

    The points are those of the numbers from `first` on, of which no two are alike.

        t = sqrt(u),   angle = 2 pi TURNS t + pi y,   r = t + BAND (2 v - 1),   x = RADIUS r (cos angle, sin angle)

    with u and v uniform in [0, 1). The square root spreads the points evenly along a spiral.
    """
    index = first + np.arange(count)
    u, v = (keys.uniform(keys.key(draw, index)) for draw in range(2))
    t, y = np.sqrt(u), index % 2
    angle = 2 * math.pi * TURNS * t + math.pi * y
    radius = RADIUS * (t + BAND * (2 * v - 1))
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return torch.from_numpy(x).to(torch.get_default_dtype()), torch.from_numpy(y)


class Trained:
    """Makes hosts that were trained without growth: a call returns one of a pool, drawn from torch's global generator.

    The pool is trained at the first call, with the loss, the batch size and the learning rate of the task. Its weights are the
    same in every process.
    """

    def __init__(self, architecture: VectorHost, task: Task) -> None:
        self.architecture = architecture  # a saved network names its host by it; the file holds the weights
        self._task = task

    def __repr__(self) -> str:
        return f"Trained({self.architecture}, epochs={EPOCHS})"

    def __call__(self) -> SegmentedHost:
        start = int(torch.randint(POOL, (1,)))
        host = self.architecture()
        host.load_state_dict({name: values[start] for name, values in self._weights.items()})
        return host

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        """Train all hosts of the pool by AdamW, each with its own initial weights and order of examples: (POOL, *shape) each."""
        task, config = self._task, build_config(self._task.defaults)
        hosts = []
        for start in range(POOL):
            with drawn_with(start):
                hosts.append(self.architecture())
        values, _ = stack_module_state(hosts)
        optimizer = torch.optim.AdamW(values.values(), lr=config.optimizer.lr, weight_decay=0)
        x = task.read(task.train.x)
        assert isinstance(x, Tensor)
        generator = torch.Generator().manual_seed(0)
        for _ in range(EPOCHS):
            order = torch.stack([torch.randperm(len(x), generator=generator) for _ in hosts])
            for index in order.split(config.data.batch_size, 1):
                outputs = functional_call(hosts[0], values, (x[index],))
                loss = task.objective.loss(outputs, task.train.y[index]).mean(1).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return {name: value.detach() for name, value in values.items()}


def spirals_trained() -> Task:
    """Make `spirals` on a trained host that is too small: the task is to grow it further, not to train a larger one.

    The host is a residual network of 194 parameters, trained without growth for 24 epochs before the run. The run trains for
    12 more epochs. The heuristic widens every block. The rent is low, because under the default rent a seed as large as this
    small host would cost 7 points of accuracy.
    """
    task = spirals()
    return replace(
        task,
        name="spirals-trained",
        summary=TRAINED,
        host=Trained(SMALL, task),
        room=SMALL.room(),
        plain=SMALL.plain,
        defaults={
            "steps": 24,
            "data": {"batch_size": 64, "batches_per_step": 8},
            "reward": {"rent": 0.02},
            "heuristic": {"plant_below": 1.0, "narrow_from": 0.01, "narrow_blueprints": ("bypass-mlp",)},
        },
    )
