"""Compare the heuristic with its never-grow twins, and sizes, on data that a small host solves without growth.

python bench/scripts/study_negative_controls.py [--quick] [--keys N] [--page FILE]
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import esper

TASKS = ("breast-cancer-plain", "spirals")
"""The controls. iris and wine are for tests alone. On digits half of the width costs .6 points, so they are none."""
FACTORS = (0.5, 1, 2, 4)
"""Widths of the static networks, as multiples of those of the host."""

PAGE = """# Negative controls

Two saturated sets, on which growth should do nothing: the 569 tumours of breast-cancer on a host without skips, and 2,048
points on two spirals on the residual host that Esper gives them. iris and wine are for tests alone.

    python bench/scripts/study_negative_controls.py --keys {keys}

torch {torch}, one thread. Test accuracy of the heuristic's networks and of their never-grow twins. Intervals are 95 %
bootstraps over {keys} keys, each with initial weights and orders of its own, on one split of the examples. The right answer
is not to grow: where networks grew, parameters were spent on the difference beside them.

{growth}

## What size is worth there

The same hosts without growth on the same keys, batches and steps: with all widths halved, as they are, doubled, and four
times as large. Differences are paired. The mean of no width is more than {most:.1f} points from that of the host.

{sizes}
"""

Floats = NDArray[np.float64]


def bounded(values: Floats, form: str) -> str:
    """Format the mean of (keys,) values with its 95 % bootstrap interval over keys."""
    draws = np.random.default_rng(0).integers(len(values), size=(4000, len(values)))
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return f"{values.mean():{form}} [{low:{form}}, {high:{form}}]"


def sized(task: Any, factor: float) -> Any:
    """Return the task on a host whose widths are multiplied by a factor."""
    host = task.host
    host = replace(host, width=round(factor * host.width), hidden=tuple(round(factor * size) for size in host.hidden))
    return replace(task, host=host, room=host.room())


def sizes(task: Any, keys: int) -> tuple[str, float]:
    """Return the table of static networks by size, in Markdown, and by how much at most a mean differs from that of the host."""
    settings = {"envs": keys, "baselines": []}
    found = {factor: esper.grow(sized(task, factor), settings, controller="never") for factor in FACTORS}
    accuracy = {factor: np.array(summary["test_accuracy"]["grown"]) for factor, summary in found.items()}
    lines = [
        f"| {task.name}: width | parameters | test accuracy | less that of the host |",
        "|---|---|---|---|",
    ]
    for factor, own in accuracy.items():
        apart = "the host" if factor == 1 else bounded(own - accuracy[1], "+.4f")
        width, parameters = round(factor * task.host.width), found[factor]["host_params"]
        lines.append(f"| {width} | {parameters:,} | {bounded(own, '.4f')} | {apart} |")
    return "\n".join(lines), max(abs((own - accuracy[1]).mean()) for own in accuracy.values())


def main() -> None:
    """Grow, compare and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few keys, to see that it runs")
    parser.add_argument(
        "--keys", type=int, default=100, help="environments, each with initial weights and orders of its own"
    )
    parser.add_argument("--page", type=Path, help="write the tables to this Markdown file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keys = 4 if arguments.quick else arguments.keys
    tasks = [esper.get_task(name) for name in TASKS]
    growth = [
        "| task | never | heuristic | difference | median parameters added | networks that grew |",
        "|---|---|---|---|---|---|",
    ]
    for task in tasks:
        summary = esper.grow(task, {"envs": keys, "baselines": ["twin"]})
        host, grown = (np.array(summary["test_accuracy"][which]) for which in ("host", "grown"))
        added = np.array(summary["grown_params"]) - summary["host_params"]
        cells = (task.name, f"{host.mean():.4f}", f"{grown.mean():.4f}", bounded(grown - host, "+.4f"))
        growth.append(f"| {' | '.join(cells)} | {np.median(added):.0f} | {(added > 0).mean():.0%} |")
    by_size, apart = zip(*(sizes(task, keys) for task in tasks), strict=True)
    tables = {"growth": "\n".join(growth), "sizes": "\n\n".join(by_size)}
    print("\n\n".join(tables.values()))
    if arguments.page:
        page = PAGE.format(keys=keys, torch=torch.__version__, most=100 * max(apart), **tables)
        arguments.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
