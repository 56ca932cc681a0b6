"""Draw the problems on which the hosts of the task `heal` are trained: digits, and five synthetic families.

N examples, D features, C classes. Every random number is a hash of the number of the host, so a problem is reproducible.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.data import keys
from esper.leyline.data.task import Split
from esper.tasks.splits import dealt

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
Choice = TypeVar("Choice")

FAMILIES: Mapping[str, float] = MappingProxyType(
    {"digits": 0.4, "clusters": 0.12, "teacher": 0.12, "spiral": 0.12, "rings": 0.12, "checker": 0.12}
)
"""Probabilities of the families."""
SYNTHETIC: Mapping[str, float] = MappingProxyType(dict.fromkeys([name for name in FAMILIES if name != "digits"], 0.2))
"""The same without digits, of which every one tests an instance of `heal`."""

CLASSES = 10  # at most
INPUTS = 64  # at most
WAVES = 16  # features of the families in the plane
PIXEL_SCALE = 4.5  # of digits, whose pixels go from 0 to 16
NOISES = (0.0, 0.3, 0.6)
"""Standard deviations of the noise on digits, each as probable as the others."""
TEACHER_UNITS = 16
INFORMATIVE = 6  # features of clusters that depend on the class


FINAL = range(2**20 + 2**17, 2**20 + 2**17 + 2**16)
"""Keys with hosts and problems of their own, for tables that nothing was chosen on."""
OTHER = range(FINAL.stop, FINAL.stop + 2**16)
"""The same with kinds of damage that nothing was chosen on."""


class Subset(IntEnum):
    """Names the sets of examples of one problem. No two sets share an example; the values are part of keys."""

    HOST = 0  # the host is trained on them, and heals on the first HEALING of them
    SOUND = 1  # decide whether the trained host is sound
    PROBE = 2
    VALIDATION = 3
    TEST = 4
    REFERENCE = 5  # inputs by which the outputs of a teacher are normalised


SIZES: Mapping[Subset, int] = MappingProxyType(
    {
        Subset.HOST: 900,
        Subset.SOUND: 200,
        Subset.PROBE: 100,
        Subset.VALIDATION: 200,
        Subset.TEST: 397,
        Subset.REFERENCE: 1000,
    }
)
HEALING = 128
"""Examples on which a damaged host heals: the first of those that it was trained on."""


class HostDraw(IntEnum):
    """Names the draws of a host and its problem. The values are part of keys."""

    FAMILY = 100
    SKIP = 101
    WIDTH = 102
    HIDDEN = 103
    CLASSES = 104
    NOISE = 105
    INPUTS = 106
    ORDER = 107
    INPUT = 108
    LABEL = 109
    FEATURE_NOISE = 110
    FIRST_MAP = 111
    SECOND_MAP = 112
    TURNS = 113
    PHASE = 114
    GROUPS = 115
    CENTERS = 116
    MEMBER = 117
    START = 118
    BATCH = 119


@dataclass(frozen=True)
class Problem:
    """Describes a classification problem, without its examples.

    Attributes:
        number (int): number of the host that is trained on it, the key of all draws
        family (str): a key of FAMILIES
        inputs (int): features
        classes (int): classes
        noise (float): standard deviation of the noise on every feature of digits, or on the points of a family in the plane
        detail (float): turns of a spiral, squares in a row of a checkerboard, clusters of a class; 0 elsewhere
    """

    number: int
    family: str
    inputs: int
    classes: int
    noise: float
    detail: float

    def uniform(self, draw: HostDraw, *indices: int | NDArray[np.int64]) -> Floats:
        """Draw numbers in [0, 1); integer arrays broadcast."""
        return uniform(self.number, draw, *indices)

    def normal(self, draw: HostDraw, part: int, *shape: int) -> Floats:
        """Draw standard normal numbers: sqrt(-2 ln(1 - u)) cos(2 pi v), after Box and Muller, 1958."""
        index = np.arange(math.prod(shape)).reshape(shape)
        u, v = (self.uniform(draw, part, half, index) for half in (0, 1))
        return np.asarray(np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * math.pi * v))


def problem(number: int, families: Mapping[str, float] = FAMILIES) -> Problem:
    """Draw the problem of a host's number, of one of the families with these probabilities."""

    def once(draw: HostDraw) -> float:
        return float(uniform(number, draw)[0])

    bounds = np.cumsum(list(families.values()))
    family = list(families)[min(int(np.searchsorted(bounds, once(HostDraw.FAMILY), side="right")), len(families) - 1)]
    classes, inputs, noise, detail = {
        "digits": ((10,), (64,), NOISES, (0.0,)),
        "clusters": (range(3, 8), (16, 24, 32, 40), (0.0,), (1.0, 2.0)),
        "teacher": (range(3, 7), (6, 8, 10, 12, 14), (0.0,), (0.0,)),
        "spiral": ((2, 3, 4), (WAVES,), (0.02,), (0.75, 1.0)),
        "rings": ((2, 3, 4), (WAVES,), (0.03,), (0.0,)),
        "checker": ((2,), (WAVES,), (0.0,), (2.0, 3.0)),
    }[family]
    return Problem(
        number,
        family,
        inputs=one_of(inputs, once(HostDraw.INPUTS)),
        classes=one_of(classes, once(HostDraw.CLASSES)),
        noise=one_of(noise, once(HostDraw.NOISE)),
        detail=one_of(detail, once(HostDraw.TURNS)),
    )


def examples(of: Problem, part: Subset, count: int | None = None) -> Split:
    """Return copies of the first `count` examples of a part, or all: x (N, D) in torch's default dtype and y (N,) int64."""
    x, y = _GENERATORS[of.family](of, part, SIZES[part])
    x, y = x[:count], y[:count]
    return Split(torch.from_numpy(x).to(torch.get_default_dtype(), copy=True), torch.from_numpy(y.astype(np.int64)))


def uniform(number: int, draw: HostDraw, *indices: int | NDArray[np.int64]) -> Floats:
    """Draw numbers in [0, 1) for a host's number; integer arrays broadcast."""
    return keys.uniform(keys.key(keys.Purpose.HEALING, number, draw, *indices))


def one_of(choices: Sequence[Choice], u: float) -> Choice:
    """Choose the entry of a sequence at the share u in [0, 1) of its length."""
    return choices[int(u * len(choices))]


@lru_cache(maxsize=2)
def digit_pools(exchanged: bool = False) -> tuple[tuple[Floats, Labels], ...]:
    """Split the digits into five disjoint sets, for HOST to TEST: pixels (N, 64) and digits (N,).

    Pixels are (pixel - mean) / PIXEL_SCALE, with the mean of each pixel over the first set. The sets are the same for all
    hosts of a part of the keys, so no digit on which a host was trained is in the probe or test split of any instance there.

    exchanged: return the sets of the keys FINAL and OTHER, whose digits to probe, validate and test are some on which hosts of
        the other keys were trained: no rule was chosen and no tree was fitted by figures on them.
    """
    from sklearn.datasets import load_digits  # a second of imports

    data = load_digits()
    x, y = torch.from_numpy(data.data).to(torch.float64), torch.from_numpy(data.target).to(torch.int64)
    sizes = [SIZES[part] for part in list(Subset)[:5]]
    pools = dealt(y, sizes, seed=1)
    if exchanged:
        pools = torch.cat(pools).split(sizes[::-1])[::-1]
    mean = x[pools[0]].mean(0)
    return tuple((((x[pool] - mean) / PIXEL_SCALE).numpy(), y[pool].numpy()) for pool in pools)


def _digits(of: Problem, part: Subset, count: int) -> tuple[Floats, Labels]:
    x, y = digit_pools(of.number >= FINAL.start)[part]
    order = of.uniform(HostDraw.ORDER, part, np.arange(len(y))).argsort()[:count]
    x, y = x[order], y[order]
    return x + of.noise * of.normal(HostDraw.FEATURE_NOISE, part, *x.shape), y


def _clusters(of: Problem, part: Subset, count: int) -> tuple[Floats, Labels]:
    """Draw normal clusters around distinct corners of a cube of INFORMATIVE dimensions, turned into D dimensions."""
    groups = of.classes * int(of.detail)
    corners = of.uniform(HostDraw.CENTERS, 0, np.arange(2**INFORMATIVE)).argsort()[:groups]
    centers = np.zeros((groups, of.inputs))
    centers[:, :INFORMATIVE] = 2.1 * (2 * (corners[:, None] >> np.arange(INFORMATIVE) & 1) - 1)
    member = (of.uniform(HostDraw.MEMBER, part, np.arange(count)) * groups).astype(np.int64)
    x = centers[member] + of.normal(HostDraw.INPUT, part, count, of.inputs)
    turn = of.normal(HostDraw.FIRST_MAP, 0, of.inputs, of.inputs) / math.sqrt(of.inputs)
    return x @ turn / math.sqrt(1 + 2.1**2 * INFORMATIVE / of.inputs), member % of.classes


def _teacher(of: Problem, part: Subset, count: int) -> tuple[Floats, Labels]:
    """Draw y = argmax_c (z_c - mean_c) / deviation_c,   z = tanh(x W) V, with mean and deviation over the REFERENCE inputs."""
    first = of.normal(HostDraw.FIRST_MAP, 0, of.inputs, TEACHER_UNITS) * (1.5 / math.sqrt(of.inputs))
    second = of.normal(HostDraw.SECOND_MAP, 0, TEACHER_UNITS, of.classes)

    def inputs_and_outputs(part: Subset, count: int) -> tuple[Floats, Floats]:
        x = of.normal(HostDraw.INPUT, part, count, of.inputs)
        return x, np.tanh(x @ first) @ second

    x, z = inputs_and_outputs(part, count)
    _, reference = inputs_and_outputs(Subset.REFERENCE, SIZES[Subset.REFERENCE])
    return x, ((z - reference.mean(0)) / reference.std(0)).argmax(1)


def _spiral(of: Problem, part: Subset, count: int) -> tuple[Floats, Labels]:
    """Draw points t (cos angle, sin angle) of spirals:   t = .15 + .85 u,   angle = 2 pi (turns t + y / C)."""
    y = _labels(of, part, count)
    t = 0.15 + 0.85 * of.uniform(HostDraw.INPUT, part, np.arange(count))
    angle = 2 * math.pi * (of.detail * t + y / of.classes)
    return _waves(of, part, np.stack([t * np.cos(angle), t * np.sin(angle)], 1)), y


def _rings(of: Problem, part: Subset, count: int) -> tuple[Floats, Labels]:
    """Draw points of concentric rings of radius (y + 1) / C."""
    y = _labels(of, part, count)
    angle = 2 * math.pi * of.uniform(HostDraw.INPUT, part, np.arange(count))
    radius = (y + 1) / of.classes
    return _waves(of, part, np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)), y


def _checker(of: Problem, part: Subset, count: int) -> tuple[Floats, Labels]:
    """Draw points 2 u - 1 of a checkerboard:   y = (floor(k u_1) + floor(k u_2)) mod 2, with k = detail squares in a row."""
    u = of.uniform(HostDraw.INPUT, part, np.arange(2 * count).reshape(count, 2))
    return _waves(of, part, 2 * u - 1), np.floor(u * of.detail).sum(1).astype(np.int64) % 2


def _waves(of: Problem, part: Subset, points: Floats) -> Floats:
    """Turn points p (N, 2) in the plane, with noise on them, into WAVES features:   x = 1.3 sin(2 p R + phase)."""
    points = points + of.noise * of.normal(HostDraw.FEATURE_NOISE, part, *points.shape)
    directions = of.normal(HostDraw.FIRST_MAP, 0, 2, of.inputs)
    phase = 2 * math.pi * of.uniform(HostDraw.PHASE, np.arange(of.inputs))
    return 1.3 * np.sin(2 * points @ directions + phase)


def _labels(of: Problem, part: Subset, count: int) -> Labels:
    return (of.uniform(HostDraw.LABEL, part, np.arange(count)) * of.classes).astype(np.int64)


_GENERATORS: Mapping[str, Callable[[Problem, Subset, int], tuple[Floats, Labels]]] = MappingProxyType(
    {
        "digits": _digits,
        "clusters": _clusters,
        "teacher": _teacher,
        "spiral": _spiral,
        "rings": _rings,
        "checker": _checker,
    }
)
