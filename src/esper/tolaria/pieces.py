"""Pieces of a batch, which pass through the networks one after another. n rows, B examples."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from esper.kasmina.body import Body
from esper.kasmina.plan import Indices
from esper.leyline.batches import Batch, map_leaves
from esper.leyline.config import DataConfig
from esper.leyline.errors import InputError
from esper.leyline.keys import key


class Piece(NamedTuple):
    """A part of the examples of a batch, with the arguments of a pass over it."""

    share: float  # of the examples
    x: Batch  # leaves (n, b, ...)
    y: Tensor  # (n, b, ...)
    weights: Tensor | None  # (n, b)
    factors: Tensor | None  # (n,)
    keys: Indices | None  # (n,)


def pieces(
    size: int,
    x: Batch,
    y: Tensor,
    weights: Tensor | None,
    factors: Tensor | None,
    keys: Indices | None,
    dtype: torch.dtype,
) -> Iterator[Piece]:
    """Divide a batch into pieces of at most `size` examples; 0 leaves it whole. The last piece may be smaller.

    The factors of a piece have its share of the batch in them, so that the gradients of all pieces sum to those of the mean
    over the batch; new factors have `dtype`. Each piece has keys of its own, because otherwise all would draw the same numbers.
    """
    examples = y.shape[1]
    if not 0 < size < examples:
        yield Piece(1.0, x, y, weights, factors, keys)
        return
    for index, start in enumerate(range(0, examples, size)):
        cut = slice(start, min(start + size, examples))
        share = (cut.stop - cut.start) / examples
        own = torch.full((len(y),), share, dtype=dtype, device=y.device) if factors is None else factors * share
        yield Piece(
            share,
            map_leaves(lambda leaf, cut=cut: leaf[:, cut].contiguous(), x),
            y[:, cut].contiguous(),
            None if weights is None else weights[:, cut],
            own,
            None if keys is None else key(keys, index),
        )


def check_divisible(body: Body, config: DataConfig) -> None:
    """Raise InputError if batches are divided and a module computes with more than one example at a time."""
    if not 0 < config.microbatch < config.batch_size:
        return
    body.train(True)
    for name, part in body.host.module.named_modules():
        if part.training and (
            isinstance(part, _BatchNorm) or (isinstance(part, _NormBase) and part.track_running_stats)
        ):
            raise InputError(
                f"data.microbatch is {config.microbatch}, but {name} of the host is a {type(part).__name__}, whose statistics "
                "are those of a whole batch; set data.microbatch to 0, or normalise each example by itself, as LayerNorm does"
            )
