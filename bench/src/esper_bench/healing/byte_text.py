"""Read the text of the task `heal-bytes`: modules of Python's standard library, as 96 symbols, in four disjoint parts.

N windows of L symbols.
"""

import hashlib
import sysconfig
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.data import keys
from esper.leyline.data.task import Split
from esper.leyline.messages import InputError
from esper.tasks.text import sources
from esper_bench.healing.data import Subset

SYMBOLS = b"\n" + bytes(range(32, 127))
"""The newline and the printable ASCII characters; a symbol is an index. A file with any other byte is left out."""
LENGTH = 32  # of a window
SHARES = {Subset.HOST: 0.7, Subset.PROBE: 0.8, Subset.VALIDATION: 0.9, Subset.TEST: 1.0}
"""Shares of the files, up to which each part goes."""
LEAST = 2**15  # symbols of a part
WINDOW = 200  # names the draw of the windows in keys

Symbols = NDArray[np.uint8]


@lru_cache(maxsize=1)
def texts() -> dict[Subset, Symbols]:
    """Read the symbols of every part, (N,) uint8. A hash of its name decides which part a file belongs to.

    InputError if the sources of this Python's standard library are not files.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts: dict[Subset, list[bytes]] = {part: [] for part in SHARES}
    for name, content in sources(folder).items():
        if not content.translate(None, SYMBOLS):
            share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
            parts[next(part for part, upto in SHARES.items() if share < upto)].append(content)
    place = np.zeros(256, np.uint8)
    place[np.frombuffer(SYMBOLS, np.uint8)] = np.arange(len(SYMBOLS))
    found = {part: place[np.frombuffer(b"".join(contents), np.uint8)] for part, contents in parts.items()}
    for part, symbols in found.items():
        if len(symbols) < LEAST:
            raise InputError(
                f"{folder} has {len(symbols):,} bytes of modules for the part {part.name.lower()} of 'heal-bytes', which needs "
                f"{LEAST:,}; give a Python whose standard library is in files, not in an archive"
            )
    return found


@lru_cache(maxsize=1)
def digest() -> str:
    """Compute eight hexadecimal digits of a hash of the text that hosts are trained on, which another Python changes."""
    return hashlib.sha256(texts()[Subset.HOST].tobytes()).hexdigest()[:8]


def common() -> list[int]:
    """List all symbols, the most frequent one of the text that hosts are trained on first."""
    return np.bincount(texts()[Subset.HOST], minlength=len(SYMBOLS)).argsort(kind="stable")[::-1].tolist()


def windows(part: Subset, number: int, *indices: int | NDArray[np.int64]) -> Split:
    """Draw windows of a part by a number and indices: x (..., L) int64, and y of the same shape, the symbols behind.

    indices: integer arrays, which broadcast to (...). Windows may overlap.
    """
    text = texts()[part]
    drawn = keys.uniform(keys.key(keys.Purpose.HEALING, number, WINDOW, int(part), *indices))
    start = (drawn * (len(text) - LENGTH)).astype(np.int64)
    read = torch.from_numpy(text[start[..., None] + np.arange(LENGTH + 1)].astype(np.int64))
    return Split(read[..., :-1].clone(), read[..., 1:].clone())
