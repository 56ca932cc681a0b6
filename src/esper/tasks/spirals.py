"""Two spirals: on a residual host, and on a host with a very narrow block."""

import math
from dataclasses import replace

import numpy as np
import torch

from esper.leyline.data import keys
from esper.leyline.data.task import Task
from esper.tasks.hosts.factories import MLP, VECTOR_MENU, ResidualMLP, room_for
from esper.tasks.objectives import Classification
from esper.tasks.splits import split

DATA = "2,048 points on two interleaved spirals"
SUMMARY = f"{DATA}; a residual network"
NARROW = f"{DATA}; an MLP that is narrow in the first of its three blocks"
SIZES = (1024, 256, 256, 512)  # train, probe, validation, test; 16 batches of 64 are one epoch
TURNS = 1.5  # of each spiral
BAND = 0.05  # half width of a spiral; the spirals are 1 / (2 * TURNS) apart
RADIUS = 2.0  # so that the features have a standard deviation near 1
HOST = ResidualMLP(inputs=2, width=32, hidden=(32,) * 3, outputs=2)


def spirals() -> Task:
    """Two interleaved Archimedean spirals: 2 features, 2 classes, on a residual host.

    The problem follows Lang and Witbrock, "Learning to tell two spirals apart", 1988, with more points, because their 194 are
    too few for four splits, and with half the turns. The bands do not touch, so an accuracy of 1 is possible. The points and
    the splits are the same in every run, and the features have torch's default dtype.
    """
    x, y = spiral_points(sum(SIZES))
    splits = split(x, y, sizes=SIZES, seed=0)
    return Task(
        name="spirals",
        summary=SUMMARY,
        host=HOST,
        room=room_for(HOST),
        **splits._asdict(),
        objective=Classification(2),
        menu=VECTOR_MENU,
        defaults={"steps": 24, "data": {"batch_size": 64, "batches_per_step": 16}},
    )


def spirals_narrow(hidden: tuple[int, ...] = (2, 12, 4), width: int = 16) -> Task:
    """`spirals` on a damaged host without skip connections whose first block is too narrow: a test of controllers.

    Raises InputError if a width is under 1.
    """
    host = MLP(inputs=2, width=width, hidden=hidden, outputs=2)
    return replace(spirals(), name="spirals-narrow", summary=NARROW, host=host, room=None)


def spiral_points(count: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(count, 2) features x in torch's default dtype, and (count,) int64 labels y, which alternate between 0 and 1.

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
