"""Lines below a summary table: the sizes of the splits, and what the intervals cover."""

from collections.abc import Mapping
from typing import Any

from esper.leyline.text import counted

FEW_EXAMPLES = 30
"""A warning is shown for splits with fewer examples."""


def split_lines(summary: Mapping[str, Any]) -> list[str]:
    """The size of the test split, what the intervals cover, and warnings about small splits; empty if the sizes are unknown."""
    sizes = summary.get("examples")
    if sizes is None:
        return []
    test, several = sizes["test"], summary["envs"] > 1
    if isinstance(test, int):
        line = f"test split: {counted(test, 'example')}"
        if several:
            line += (
                ", the same for every environment; intervals and ± cover the choice of starts, not of these examples"
            )
    else:
        line = f"test split: {_range(test)}"
        if several:
            line = (
                f"test splits: {_range(test)}, for every environment another problem with examples of its own; intervals and ± "
                "cover the choice of problems, examples and starts together"
            )
    return [line, *_warnings(sizes)]


def _range(sizes: list[int]) -> str:
    low, high = min(sizes), max(sizes)
    return counted(low, "example") if low == high else f"{low:,} to {high:,} examples"


def _warnings(sizes: Mapping[str, Any]) -> list[str]:
    """A warning for a test split and a probe split with few examples."""
    lines = []
    for part, why in (
        ("test", "the test figures and their differences may be quite different on other examples"),
        ("probe", "the gates decide on it, so seeds may be kept or pruned by chance"),
    ):
        least = sizes[part] if isinstance(sizes[part], int) else min(sizes[part])
        if least < FEW_EXAMPLES:
            lines.append(f"warning: the {part} split has only {counted(least, 'example')}; {why}")
    return lines
