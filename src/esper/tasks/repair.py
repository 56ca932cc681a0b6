"""Make the mixture 'repair': problems of five families on hosts with seven kinds of damage, sampled by key.

N examples, D features, C classes. Every random number of an instance is a hash of its key, so instances are reproducible.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.data import keys
from esper.leyline.data.task import Instance, Lengths, Mixture, Room, Split
from esper.leyline.messages import InputError
from esper.tasks.hosts import VECTOR_MENU, DamagedMLP
from esper.tasks.objectives import Classification
from esper.tasks.splits import dealt

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
Choice = TypeVar("Choice")

SUMMARY = (
    "sampled problems: digits, spirals, parities, checkerboards and random teachers, "
    "on MLPs that are sound, narrow, linear, frozen or slim"
)
RANGES: Mapping[str, range] = {
    "training": range(2**20),
    "validation": range(2**20, 2**20 + 2**16),
    "heldout": range(2**20 + 2**16, 2**20 + 2**17),
}
FAMILIES: Mapping[str, float] = {"digits": 0.45, "spiral": 0.14, "parity": 0.12, "checker": 0.12, "teacher": 0.17}
DAMAGES: Mapping[str, float] = {
    "none": 0.2,
    "narrow1": 0.28,
    "narrow2": 0.2,
    "linear": 0.1,
    "narrow+linear": 0.08,
    "frozen": 0.09,
    "slim_all": 0.05,
}
"""Probabilities of the kinds of damage: one or two narrow blocks, blocks without a nonlinearity, both, a slim block that is
never trained, or slim blocks throughout. The damaged blocks are drawn too."""

BLOCKS = 4
WIDTHS = (8, 12, 16)  # of the stream
HIDDEN = (6, 8, 12, 16)  # inner widths of an undamaged block
NARROW = (1, 2)  # of a bottleneck
SLIM = (2, 3)  # of a frozen block, and of every block of a slim host
CLASSES = 10  # at most

POOLS = (1000, 240, 160, 397)  # digits that train, probe, validation and test splits are taken from
PIXEL_SCALE = 4.5  # of digits, whose pixels go from 0 to 16
SPIRAL_NOISE, PARITY_NOISE = 0.05, 0.2
RADIUS = 2.0  # of spirals and checkerboards, so that features have a standard deviation near 1


class RepairSplit(IntEnum):
    """Names the splits of an instance, and REFERENCE, the inputs by which the outputs of a teacher are normalized."""

    TRAIN = 0
    PROBE = 1
    VALIDATION = 2
    TEST = 3
    REFERENCE = 4


SIZES: Mapping[RepairSplit, int] = {
    RepairSplit.PROBE: 200,
    RepairSplit.VALIDATION: 200,
    RepairSplit.TEST: 400,
    RepairSplit.REFERENCE: 1000,  # inputs by which the classes of a teacher are balanced
}
"""Numbers of examples. A split of digits has fewer where its pool has fewer of the classes. The size of train is drawn."""


# The random draws: first those of `Facts`, and from PIXELS on those of the data. The values are part of keys.
_Draw = IntEnum(
    "_Draw",
    "FAMILY DAMAGE WIDTH HIDDEN PLACE NARROW SLIM CLASSES DIGITS NOISE LABEL_NOISE EXAMPLES DETAIL "
    "PIXELS ORDER INPUT LABEL FEATURE_NOISE FLIP FLIPPED FIRST_MAP SECOND_MAP",
    start=0,
)


@dataclass(frozen=True)
class Facts:
    """Holds the parameters of an instance, without its data."""

    key: int
    family: str  # a key of FAMILIES
    damage: str  # a key of DAMAGES
    host: DamagedMLP  # factory of hosts with the features and classes of the data
    examples: int  # size of the train split; a pool of digits may have fewer examples of the classes
    noise: float  # standard deviation of the noise on every feature, in every split
    label_noise: float  # share of training labels that are drawn again
    digits: tuple[int, ...] | None  # (C,) digit of each class; None in the other families
    detail: float  # turns of a spiral, bits of a parity, squares in a row, or units of a teacher; NaN for digits


def repair() -> Mixture:
    """Make the mixture of damaged hosts on small data. Some gain from growth at some slots, and some do not.

    A host has four blocks on a stream of 8, 12 or 16 features, and a slot behind each block. The probabilities come from a
    study of the problems in which growth pays. `describe` returns the parameters of a key.

        digits    2 to 10 classes of scikit-learn's digits, pixels permuted, with noise on features and labels
        spiral    2 or 3 spiral arms of 0.6 to 1.4 turns
        parity    of the first 2 to 4 of 8 bits, with noise
        checker   a checkerboard of 2 x 2 or 3 x 3 squares
        teacher   the largest output of a random network of 16 inputs and 4 or 16 hidden units, 2 to 6 classes

    The splits of an instance are drawn independently. Those of digits come from four disjoint sets of digits, which are the
    same for all instances, so no instance trains on a digit that another instance is tested on.
    """
    return Mixture(
        name="repair",
        summary=SUMMARY,
        room=Room(
            DamagedMLP(
                inputs=INPUTS,
                width=max(WIDTHS),
                hidden=(max(HIDDEN),) * BLOCKS,
                outputs=CLASSES,
                linear=(False,) * BLOCKS,
                frozen=(False,) * BLOCKS,
            ),
            (INPUTS,),
            Lengths(probe=SIZES[RepairSplit.PROBE], held=max(SIZES[RepairSplit.VALIDATION], SIZES[RepairSplit.TEST])),
        ),
        sample=sample,
        test=held_back,
        ranges=RANGES,
        objective=Classification(CLASSES),
        menu=VECTOR_MENU,
        defaults={
            "steps": 24,
            "data": {"batch_size": 32, "batches_per_step": 16},
            "lifecycle": {"max_seeds": 2, "max_training_seeds": 2},
            "reward": {"rent": 0.1},
            "gates": {"gain_z": -1.0, "contribution_z": 0.0, "min_contribution": -0.02},
        },
    )


def sample(key: int) -> Instance:
    """Return the instance of a key, without its test split. InputError for a key outside RANGES."""
    facts = describe(key)
    train, probe, validation = (_examples(facts, part) for part in list(RepairSplit)[:3])
    return Instance(facts.host, train, probe, validation, facts.host.outputs)


def held_back(key: int) -> Split:
    """Return the test split of the instance of a key. InputError for a key outside RANGES."""
    return _examples(describe(key), RepairSplit.TEST)


def describe(key: int) -> Facts:
    """Return the parameters of the instance of a key, without its data. InputError for a key outside RANGES."""
    if not any(part.start <= key < part.stop for part in RANGES.values()):
        known = ", ".join(f"{name} {part.start:,} to {part.stop - 1:,}" for name, part in RANGES.items())
        raise InputError(f"key {key:,} is not an instance of 'repair'; the keys are {known}")
    u = keys.uniform(keys.key(keys.Purpose.INSTANCE, key, np.arange(_Draw.PIXELS)[:, None], np.arange(CLASSES)))
    family = _weighted(FAMILIES, u[_Draw.FAMILY, 0])
    damage = _weighted(DAMAGES, u[_Draw.DAMAGE, 0])
    shape = _SHAPES[family]

    hidden = [_one_of(HIDDEN, v) for v in u[_Draw.HIDDEN, :BLOCKS]]
    first, second, *_ = u[_Draw.PLACE, :BLOCKS].argsort().tolist()
    if damage in ("narrow1", "narrow2", "narrow+linear"):
        hidden[first] = _one_of(NARROW, u[_Draw.NARROW, 0])
    if damage == "narrow2":
        hidden[second] = _one_of(NARROW, u[_Draw.NARROW, 1])
    if damage == "frozen":
        hidden[first] = _one_of(SLIM, u[_Draw.SLIM, 0])
    if damage == "slim_all":
        hidden = [_one_of(SLIM, v) for v in u[_Draw.SLIM, :BLOCKS]]
    classes = _one_of(shape.classes, u[_Draw.CLASSES, 0])
    return Facts(
        key=key,
        family=family,
        damage=damage,
        host=DamagedMLP(
            inputs=shape.inputs,
            width=_one_of(WIDTHS, u[_Draw.WIDTH, 0]),
            hidden=tuple(hidden),
            outputs=classes,
            linear=(damage in ("linear", "narrow+linear"),) * BLOCKS,
            frozen=tuple(damage == "frozen" and block == first for block in range(BLOCKS)),
        ),
        examples=_one_of(shape.examples, u[_Draw.EXAMPLES, 0]),
        noise=_one_of(shape.noise, u[_Draw.NOISE, 0]),
        label_noise=_one_of(shape.label_noise, u[_Draw.LABEL_NOISE, 0]),
        digits=tuple(u[_Draw.DIGITS].argsort()[:classes].tolist()) if family == "digits" else None,
        detail=_one_of(shape.detail, u[_Draw.DETAIL, 0]),
    )


@lru_cache(maxsize=1)
def digit_pools() -> tuple[tuple[Floats, Labels], ...]:
    """Return four disjoint sets of digits, for train, probe, validation, test: pixels (N, 64) float64, digits (N,) int64.

    Pixels are (pixel - mean) / PIXEL_SCALE, with the mean of each pixel over the first set. Every set, and every prefix of a
    set, has nearly the same share of every digit.
    """
    from sklearn.datasets import load_digits  # a second of imports

    data = load_digits()
    x, y = torch.from_numpy(data.data).to(torch.float64), torch.from_numpy(data.target).to(torch.int64)
    pools = dealt(y, POOLS, seed=0)
    mean = x[pools[0]].mean(0)
    return tuple((((x[pool] - mean) / PIXEL_SCALE).numpy(), y[pool].numpy()) for pool in pools)


def _examples(facts: Facts, part: RepairSplit) -> Split:
    """Return one split, in torch's default dtype. It shares no storage."""
    x, y = _SHAPES[facts.family].generate(facts, part, facts.examples if part == RepairSplit.TRAIN else SIZES[part])
    if facts.noise:
        x = x + facts.noise * _normal(facts, _Draw.FEATURE_NOISE, part, *x.shape)
    if facts.label_noise and part == RepairSplit.TRAIN:
        again = _uniform(facts, _Draw.FLIP, part, len(y)) < facts.label_noise
        y = np.where(again, _integers(facts, _Draw.FLIPPED, part, facts.host.outputs, len(y)), y)
    return Split(torch.from_numpy(x).to(torch.get_default_dtype(), copy=True), torch.from_numpy(y))


def _digits(facts: Facts, part: RepairSplit, count: int) -> tuple[Floats, Labels]:
    assert facts.digits is not None
    x, y = digit_pools()[part]
    order = np.arange(len(y))
    if part == RepairSplit.TRAIN:
        order = _uniform(facts, _Draw.ORDER, part, len(y)).argsort()
    taken = order[np.isin(y[order], facts.digits)][:count]
    pixels = _uniform(facts, _Draw.PIXELS, 0, x.shape[1]).argsort()
    label = np.full(10, -1)
    label[list(facts.digits)] = np.arange(facts.host.outputs)
    return x[taken][:, pixels], label[y[taken]]


def _spiral(facts: Facts, part: RepairSplit, count: int) -> tuple[Floats, Labels]:
    """Compute t = sqrt(u),   angle = 2 pi (turns t + y / C),   x = RADIUS t (cos angle, sin angle)."""
    y = _integers(facts, _Draw.LABEL, part, facts.host.outputs, count)
    t = np.sqrt(_uniform(facts, _Draw.INPUT, part, count))
    angle = 2 * math.pi * (facts.detail * t + y / facts.host.outputs)
    return RADIUS * np.stack([t * np.cos(angle), t * np.sin(angle)], axis=1), y


def _parity(facts: Facts, part: RepairSplit, count: int) -> tuple[Floats, Labels]:
    """Compute x = 2 b - 1,   y = (b_1 + ... + b_k) mod 2,   with bits b and k = detail."""
    bits = _integers(facts, _Draw.INPUT, part, 2, count, facts.host.inputs)
    return (2 * bits - 1).astype(np.float64), bits[:, : int(facts.detail)].sum(1) % 2


def _checker(facts: Facts, part: RepairSplit, count: int) -> tuple[Floats, Labels]:
    """Compute x = RADIUS (2 u - 1),   y = (floor(k u_1) + floor(k u_2)) mod 2,   with k = detail squares in a row."""
    u = _uniform(facts, _Draw.INPUT, part, count, facts.host.inputs)
    return RADIUS * (2 * u - 1), np.floor(u * facts.detail).sum(1).astype(np.int64) % 2


def _teacher(facts: Facts, part: RepairSplit, count: int) -> tuple[Floats, Labels]:
    """Compute y = argmax_c (z_c - mean_c) / deviation_c,   z = max(x W - 1/2, 0) V.

    Mean and standard deviation are those of the REFERENCE inputs, so the labels of a split do not depend on another split.
    """
    inputs, units, classes = facts.host.inputs, int(facts.detail), facts.host.outputs
    first = _normal(facts, _Draw.FIRST_MAP, 0, inputs, units) * (2 / math.sqrt(inputs))
    second = _normal(facts, _Draw.SECOND_MAP, 0, units, classes)

    drawn = ((part, count), (RepairSplit.REFERENCE, SIZES[RepairSplit.REFERENCE]))
    x, references = (_normal(facts, _Draw.INPUT, of, many, inputs) for of, many in drawn)
    z, reference = (np.maximum(each @ first - 0.5, 0) @ second for each in (x, references))
    return x, ((z - reference.mean(0)) / (reference.std(0) + 1e-6)).argmax(1)


class _Shape(NamedTuple):
    """Says how the data of a family are computed, and among which values its parameters are drawn."""

    generate: Callable[[Facts, RepairSplit, int], tuple[Floats, Labels]]
    inputs: int
    classes: Sequence[int]
    noise: Sequence[float]
    label_noise: Sequence[float]
    examples: Sequence[int]
    detail: Sequence[float]


_SHAPES: Mapping[str, _Shape] = {
    "digits": _Shape(_digits, 64, range(2, 11), (0.0, 0.5, 1.0), (0.0, 0.0, 0.15), (120, 400, 1000), (math.nan,)),
    "spiral": _Shape(_spiral, 2, (2, 3), (SPIRAL_NOISE,), (0.0,), (300, 1000), (0.6, 1.0, 1.4)),
    "parity": _Shape(_parity, 8, (2,), (PARITY_NOISE,), (0.0,), (1000,), (2, 3, 4)),
    "checker": _Shape(_checker, 2, (2,), (0.0,), (0.0,), (300, 1000), (2, 3)),
    "teacher": _Shape(_teacher, 16, (2, 4, 6), (0.0,), (0.0,), (300, 1000), (4, 16)),
}
INPUTS = max(shape.inputs for shape in _SHAPES.values())


def _uniform(facts: Facts, draw: _Draw, part: int, *shape: int) -> Floats:
    """Draw uniformly in [0, 1). A draw of fewer rows is a prefix of a draw of more rows."""
    index = np.arange(math.prod(shape)).reshape(shape)
    return keys.uniform(keys.key(keys.Purpose.INSTANCE, facts.key, draw, part, index))


def _normal(facts: Facts, draw: _Draw, part: int, *shape: int) -> Floats:
    """Draw standard normal numbers: sqrt(-2 ln(1 - u)) cos(2 pi v), after Box and Muller, 1958."""
    u = _uniform(facts, draw, part, *shape, 2)
    return np.asarray(np.sqrt(-2 * np.log1p(-u[..., 0])) * np.cos(2 * math.pi * u[..., 1]))


def _integers(facts: Facts, draw: _Draw, part: int, stop: int, *shape: int) -> Labels:
    return (_uniform(facts, draw, part, *shape) * stop).astype(np.int64)


def _one_of(choices: Sequence[Choice], u: float) -> Choice:
    return choices[int(u * len(choices))]


def _weighted(probabilities: Mapping[str, float], u: float) -> str:
    names, bounds = list(probabilities), np.cumsum(list(probabilities.values()))
    return names[min(int(np.searchsorted(bounds, u, side="right")), len(names) - 1)]
