"""Train the convolutional hosts of the task `heal-images`: handwritten digits of 8 x 8 pixels."""

from torch import Tensor

from esper.leyline.data.task import Split
from esper_bench.healing.bridged import BridgedCNN
from esper_bench.healing.data import CLASSES, NOISES, HostDraw, Problem, Subset, examples, one_of, uniform
from esper_bench.healing.hosts import BLOCKS, RESIDUAL, HostSet

SIDE = 8  # pixels
WIDTH = 8  # channels of the stream
HIDDEN = (6, 8)  # inner channels, the same in all blocks of a host


def image_problem(number: int) -> Problem:
    """Draw the problem of a host's number: digits, with noise on the pixels or without."""
    noise = one_of(NOISES, float(uniform(number, HostDraw.NOISE)[0]))
    return Problem(number, "digits", SIDE * SIDE, CLASSES, noise, 0.0)


def images(of: Problem, part: Subset, count: int | None = None) -> Split:
    """Return the first `count` examples of a part, or all: images (N, 1, SIDE, SIDE) and y (N,), the digits of `heal`."""
    split = examples(of, part, count)
    assert isinstance(split.x, Tensor), type(split.x)
    return Split(split.x.view(-1, 1, SIDE, SIDE), split.y)


def image_host(number: int) -> BridgedCNN:
    """Draw the host of a number, without its trained weights: five blocks, plain or residual."""
    hidden = one_of(HIDDEN, float(uniform(number, HostDraw.HIDDEN)[0]))
    skips = (float(uniform(number, HostDraw.SKIP)[0]) < RESIDUAL,) * BLOCKS
    return BridgedCNN((1, SIDE, SIDE), WIDTH, (hidden,) * BLOCKS, CLASSES, skips)


def largest_image_host() -> BridgedCNN:
    """Return a host in whose leading corner every host fits."""
    return BridgedCNN((1, SIDE, SIDE), WIDTH, (max(HIDDEN),) * BLOCKS, CLASSES, (False,) * BLOCKS)


IMAGES = HostSet(
    name="heal-images",
    summary="trained convolutional networks of five blocks",
    recipe=1,
    count=32,
    inputs=(1, SIDE, SIDE),
    problem=image_problem,
    examples=images,
    architecture=image_host,
    largest=largest_image_host,
    updates=500,
    mapping="vmap",
)
