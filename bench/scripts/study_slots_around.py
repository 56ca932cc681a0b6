"""Measure what a slot is worth whose bypasses go around a narrow place, beside one whose bypasses read that place.

    python bench/scripts/study_slots_around.py [WIDTHS ...]       # 64-4-32-10 64-32-4-32-10 64-8-16-10

Each network is a chain of linear layers with ReLUs between them, on digits, cut into segments as `esper.task` does. The same
networks grow under the rule `heuristic`, once with the slots that the cut gives and once with `SlotSpec.around` left out. The
table says what each has at its end, means over environments, and the difference of the accuracies on the test split, paired by
environment, with its 95 % interval.
"""

import argparse
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import esper
from esper.kasmina.host import CutHost
from esper.leyline.intervals import t_interval

WIDTHS = ("64-4-32-10", "64-32-4-32-10", "64-8-16-10")


def main() -> None:
    """Print a row for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("widths", nargs="*", default=WIDTHS)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="two environments and two steps, as a test")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    settings: dict[str, Any] = {"envs": options.envs, "seed": 0, "baselines": ["twin"]}
    if options.quick:
        settings |= {"envs": 2, "steps": 2}
    print("| network | no seed | read the place | go around it | difference | parameters | seeds |")
    print("|---|---|---|---|---|---|---|")
    for name in options.widths:
        print(row(name, settings), flush=True)


def row(name: str, settings: dict[str, Any]) -> str:
    """Grow the networks of some widths with both kinds of slots."""
    widths = tuple(map(int, name.split("-")))
    cut = CutHost(partial(chain, widths), torch.zeros(2, widths[0]))
    around, own = grown(cut, settings), grown(partial(without_spans, cut), settings)
    accuracies = [np.array(summary["test_accuracy"]["grown"]) for summary in (own, around)]
    difference = t_interval((accuracies[1] - accuracies[0]).tolist())
    cells = [
        name,
        f"{np.mean(around['test_accuracy']['host']):.4f}",
        *(f"{values.mean():.4f}" for values in accuracies),
        f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]",
        " and ".join(f"{np.mean(summary['grown_params']):,.0f}" for summary in (own, around)),
        " and ".join(f"{np.mean([len(each) for each in summary['grown']]):.1f}" for summary in (own, around)),
    ]
    return f"| {' | '.join(cells)} |"


def chain(widths: tuple[int, ...]) -> nn.Sequential:
    """Return linear layers of these widths, with ReLUs between them."""
    layers = [layer for reads, writes in pairwise(widths) for layer in (nn.Linear(reads, writes), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def without_spans(cut: CutHost) -> esper.SegmentedHost:
    """Return a host that was cut, whose bypasses read what their own segment reads."""
    host = cut()
    host.slots = tuple(replace(slot, around=None) for slot in host.slots)
    return host


def grown(host: Callable[[], nn.Module], settings: dict[str, Any]) -> dict[str, Any]:
    """Grow hosts on digits and return the summary."""
    x, y = load_digits(return_X_y=True)
    task = esper.task("narrow", x, y, host=host, standardize=True)
    return esper.grow(task, settings, controller="heuristic", progress=False)


if __name__ == "__main__":
    main()
