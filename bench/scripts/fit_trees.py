"""Fit the trees of the controller `tree` on the figures that bench/scripts/collect_healing.py keeps of training cases.

    python bench/scripts/fit_trees.py FOLDER trees.safetensors
    python bench/scripts/fit_trees.py FOLDER taught.safetensors --taught

For every plan, trees predict its gain in J over a bypass around every block, from the features of a slot. A host has a row for
each slot. Prints the gain over that plan on hosts that were left out, in five folds.
"""

import argparse
from collections.abc import Container, Sequence
from pathlib import Path

import numpy as np
import torch
from collect_healing import SOURCES, Collected, Floats, collected, features
from numpy.typing import NDArray

from esper.leyline.lifecycle.view import View
from esper_bench.controllers.forest import Forests, save_forests
from esper_bench.controllers.healing_features import FEATURES, TAUGHT_FEATURES
from esper_bench.controllers.plans import FURTHER, PLACED, UNIFORM, Placed
from esper_bench.controllers.tree_fitting import fit_trees
from esper_bench.controllers.trees import Trees, options_of
from esper_bench.records import run_script


def fitted(
    of: Collected, x: Floats, names: Sequence[str], rows: NDArray[np.generic] | slice = slice(None), seed: int = 0
) -> Forests:
    """Fit trees of every plan that read the named features, on the cases of a mask or of indices; x as of `features`."""
    columns = [of.source.features.index(name) for name in names]
    known = (UNIFORM, *PLACED, *(FURTHER if of.source.heads else ()))
    objective = {placed: value[rows] for placed, value in of.objective.items() if placed.plan in known}
    own = x[rows][..., columns]
    return Forests(tuple(names), fit_trees(own, objective, seed), len(own) * len(objective) * of.seeds)


def picked(forests: Forests, of: Collected, x: Floats) -> list[Placed]:
    """Return the plan of the largest expected gain for each case, as the controller picks it from views."""
    own = x[..., [of.source.features.index(name) for name in forests.features]]
    options, gains = options_of(forests, own, of.source.heads)
    return [Placed(*options[index]) for index in gains.argmax(1)]


def crossed(of: Collected, x: Floats, names: Sequence[str], group: NDArray[np.int64]) -> Floats:
    """Return J (n,) of the trees on each group of cases, fitted on the others."""
    found, objective = np.zeros(len(x)), of.objective
    for each in np.unique(group):
        picks = picked(fitted(of, x, names, group != each), of, x)
        for case in np.flatnonzero(group == each):
            found[case] = objective[picks[case]][case]
    return found


def best_grown(trees: Trees, seen: Sequence[View], plans: Container[str]) -> list[Placed]:
    """Return the plan of each case of which the trees expect the most among those that were grown."""
    found = []
    for view in seen:
        for choices in trees.ranking(view):
            placed = (Placed(choice.plan, choice.slot) for choice in choices)
            found.append(next(each for each in placed if each.name in plans))
    return found


def left_out(training: Collected, x: Floats, held: Collected, seen: Sequence[View]) -> list[Placed]:
    """Return the picks of trees that were fitted without the kind of damage of each case."""
    found: dict[str, list[Placed]] = {}
    for kind in np.unique(held.kind):
        trees = Trees(fitted(training, x, FEATURES, training.kind != kind))
        found[kind] = best_grown(trees, seen, held.plans)
    return [found[kind][case] for case, kind in enumerate(held.kind)]


def refitted(training: Collected, x: Floats, held: Collected, seen: Sequence[View], fits: int) -> list[list[Placed]]:
    """Return the picks of trees that were fitted on `fits` bootstrap samples of the training hosts."""
    hosts, found = np.unique(training.host), []
    for seed in range(fits):
        drawn = np.random.default_rng(seed).choice(hosts, len(hosts))
        rows = np.concatenate([np.flatnonzero(training.host == host) for host in drawn])
        found.append(best_grown(Trees(fitted(training, x, FEATURES, rows, seed)), seen, held.plans))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--cases", type=int, default=480)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--taught", action="store_true")
    parser.add_argument("--task", choices=[name for name, own in SOURCES.items() if own.taught], default="heal")
    options = parser.parse_args()
    torch.set_num_threads(1)
    of = collected(options.folder, SOURCES[options.task], "training", options.cases, options.seeds)
    x = features(of, options.folder / f"features-training-{options.cases}.npz")
    names = TAUGHT_FEATURES if options.taught else FEATURES
    uniform, best = of.objective[Placed(UNIFORM)], np.stack(list(of.objective.values())).max(0)
    gain = crossed(of, x, names, of.host % 5) - uniform
    print(
        f"{len(x)} cases; gain over uniform on hosts left out {100 * gain.mean():+.2f} points, "
        f"best of all plans by the same figures {100 * (best - uniform).mean():+.2f}"
    )
    forests = fitted(of, x, names)
    save_forests(options.output, forests)
    print(options.output, options.output.stat().st_size, "bytes, fitted on", forests.episodes, "episodes")


if __name__ == "__main__":
    run_script(main)
