"""Curves in a terminal, of braille characters: two dots by four in each."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
"""The bit of each dot of a braille character (Unicode, block U+2800)."""


def plot(x: Sequence[float], lines: Sequence[Sequence[float]], width: int, height: int) -> list[str]:
    """Curves over a common axis as `height` lines of at most `width` characters, with the ends of both axes.

    x (N), lines: values (N) each; nan where a line has none.
    """
    label = 9
    across, up = 2 * max(width - label - 1, 1), 4 * max(height - 1, 1)
    values = [np.asarray(line, np.float64) for line in lines]
    finite = np.concatenate([line[np.isfinite(line)] for line in values]) if values else np.zeros(0)
    if not len(x) or not finite.size:
        return ["nothing was measured yet".ljust(width)[:width], *[""] * (height - 1)]
    low, high = float(finite.min()), float(finite.max())
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    first, last = float(min(x)), float(max(x))
    cells = np.zeros((up // 4, across // 2), np.int64)
    for line in values:
        known = np.isfinite(line)
        places = (np.asarray(x, np.float64)[known] - first) / max(last - first, 1e-12) * (across - 1)
        levels = (high - line[known]) / (high - low) * (up - 1)
        for column, row in zip(*_joined(places, levels), strict=True):
            cells[row // 4, column // 2] |= DOTS[row % 4, column % 2]
    shown = ["".join(chr(0x2800 + int(cell)) for cell in row) for row in cells]
    names = [""] * len(shown)
    names[0], names[-1] = f"{high:.4g}", f"{low:.4g}"
    axis = f"{first:g}".ljust(across // 2 - len(f"{last:g}")) + f"{last:g}"
    return [*(f"{name:>{label}} {row}" for name, row in zip(names, shown, strict=True)), " " * (label + 1) + axis]


def _joined(places: Floats, levels: Floats) -> tuple[list[int], list[int]]:
    """The dots of a line through points, in columns and rows."""
    columns, rows = [], []
    for index in range(len(places)):
        start = max(index - 1, 0)
        count = int(max(abs(places[index] - places[start]), abs(levels[index] - levels[start]))) + 1
        columns += np.rint(np.linspace(places[start], places[index], count + 1)).astype(int).tolist()
        rows += np.rint(np.linspace(levels[start], levels[index], count + 1)).astype(int).tolist()
    return columns, rows
