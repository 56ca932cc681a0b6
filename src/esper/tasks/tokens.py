"""Windows of tokens, in which the label of every position is the token behind it. N tokens, L positions of a window."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from esper.leyline.errors import InputError
from esper.tasks.hosts import GRU, Transformer
from esper.tasks.sizes import is_size

LOGITS, LEAST = 2**28, 16
"""Most logits of all positions of a split that networks are measured on, which are held at once, and its fewest windows."""


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of tokens as pairs x, y (L,) int64, of which y is x moved on by one token.

    tokens: a stream (N,), whose window k holds the tokens k L to k L + L, or windows (W, L + 1). A memmap is read where a window
    is asked for, and not before.
    """

    def __init__(self, tokens: NDArray[Any], length: int, vocabulary: int) -> None:
        self.tokens, self.length, self.vocabulary = tokens, length, vocabulary

    def __len__(self) -> int:
        return len(self.tokens) if self.tokens.ndim == 2 else max(len(self.tokens) - 1, 0) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        x, y = self.stacked(np.array([index]))
        return x[0], y[0]

    def stacked(self, index: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The windows of these indices (n,): x, y (n, L) int64. InputError if a token is not in the vocabulary."""
        places = index if self.tokens.ndim == 2 else index[:, None] * self.length + np.arange(self.length + 1)
        windows = np.asarray(self.tokens[places]).astype(np.int64)
        outside = (windows < 0) | (windows >= self.vocabulary)
        if outside.any():
            raise InputError(
                f"the tokens hold {windows[outside][0]}, but the vocabulary has {self.vocabulary:,}, numbered from 0; give a "
                "host with a larger vocabulary, and classes to match"
            )
        x = torch.from_numpy(windows)
        return x[:, :-1].contiguous(), x[:, 1:].contiguous()

    @property
    def most_held(self) -> int:
        """Most windows of a split that networks are measured on. A large vocabulary allows fewer."""
        return max(LOGITS // (self.length * self.vocabulary), LEAST)

    @property
    def are_bytes(self) -> bool:
        """Whether every token is a byte."""
        return self.tokens.dtype == np.uint8


def is_tokens(value: Any) -> bool:
    """Whether a value without labels is tokens: bytes, or whole numbers along one or two axes."""
    if isinstance(value, Tensor):
        return value.dim() in (1, 2) and not (
            value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
        )
    if isinstance(value, np.ndarray):
        return value.ndim in (1, 2) and value.dtype.kind in "iu"
    return isinstance(value, bytes | bytearray)


def windows_of(value: Any, of: str, host: Any, length: int | None, classes: Any) -> Windows:
    """Tokens as windows. `of` names them in messages; host, length and classes are those of `esper.task`.

    InputError if the length of a window or the vocabulary is not known, or there are too few tokens for a window.
    """
    if isinstance(value, bytes | bytearray):
        tokens = np.frombuffer(value, np.uint8)
    else:
        tokens = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
    known = host if isinstance(host, Transformer | GRU) else None
    vocabulary = known.vocabulary if known is not None and classes is None else classes
    if not is_size(vocabulary):
        raise InputError(
            f"{of} holds tokens, and classes is {str(classes)[:40]!r}; give the size of the vocabulary, as in classes=256, or a "
            "host of esper.transformer or esper.gru"
        )
    if tokens.ndim == 2:
        if length is not None and length != tokens.shape[1] - 1:
            raise InputError(
                f"length is {length}, but the windows of {of} hold {tokens.shape[1]} tokens, of which {tokens.shape[1] - 1} are "
                "labels; leave length out"
            )
        length = tokens.shape[1] - 1
    elif length is None and isinstance(known, Transformer):
        length = known.length
    if not is_size(length):
        raise InputError(
            f"{of} holds tokens, and length is {length!r}; give the number of positions of a window, as in length=64"
        )
    windows = Windows(tokens, int(length or 0), vocabulary)
    if not len(windows):
        raise InputError(
            f"{of} holds {len(tokens):,} tokens, too few for a window of {length} positions and the token behind it; give more "
            "tokens or a smaller length"
        )
    return windows


def runs(examples: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Indices of consecutive examples in parts of the given sizes, in order; neighbouring windows of a text share a part."""
    assert sum(sizes) == examples, (sizes, examples)
    parts: tuple[Tensor, ...] = torch.arange(examples).split(list(sizes))
    return parts


def are_tokens(x: Any, y: Any, splits: Any) -> bool:
    """Whether the examples of `esper.task` are tokens without labels: x, or each of four splits."""
    if y is not None:
        return False
    given = splits.values() if x is None and isinstance(splits, Mapping) else [x]
    return len(given) > 0 and all(map(is_tokens, given))
