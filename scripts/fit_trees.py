"""Fit the trees of the controller `tree` on the figures that scripts/collect_healing.py keeps of training cases.

    python scripts/fit_trees.py FOLDER trees.safetensors
    python scripts/fit_trees.py FOLDER taught.safetensors --taught

For every plan, trees predict its gain in J over a bypass around every block, from the features of a slot. A host has a row for
each slot. Prints the gain over that plan on hosts that were left out, in five folds.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from collect_healing import COLLECTIONS, FIRST, PLANS, Floats, cases, fixed, kept
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor

from esper.leyline.config import build_config
from esper.leyline.view import View
from esper.tamiyo.forest import Forest, Forests, forest_of, save_forests
from esper.tamiyo.healing_features import FEATURES, TAUGHT_FEATURES, slot_features, table
from esper.tamiyo.plans import PLACED, UNIFORM, Placed
from esper.tasks.heal import Facts, heal, heal_taught
from esper.tasks.healing_hosts import VECTORS, HostSet
from esper.tolaria.engine import VectorizedEngine

ROWS = 160
TREES, LEAF, LEAVES = 32, 3, 96


class Known(NamedTuple):
    """What is known of cases (n,): facts, features (n, S, F) in the order of TAUGHT_FEATURES, and J by plan (n,)."""

    facts: Sequence[Facts]
    x: Floats
    objective: dict[str, Floats]

    @property
    def host(self) -> NDArray[np.int64]:
        return np.array([facts.number for facts in self.facts])


def views(keys: Sequence[int], taught: bool = True, hosts: HostSet = VECTORS) -> list[View]:
    """The views before the first step, ROWS keys each, with the sensors."""
    task, found = (heal_taught if taught else heal)(hosts).sealed(), []
    for start in range(0, len(keys), ROWS):
        chunk = keys[start : start + ROWS]
        config = build_config(
            task.defaults, {"task": task.name, "envs": len(chunk), "baselines": [], "probe": {"sensors_every": 1000}}
        )
        found.append(VectorizedEngine(task, config).reset(np.array(chunk), episode=0))
    return found


def features(keys: Sequence[int], hosts: HostSet = VECTORS) -> Floats:
    seen = views(keys, hosts=hosts)
    return np.concatenate([table(slot_features(view, taught=True), TAUGHT_FEATURES) for view in seen])


def known(folder: Path, part: str, count: int, seeds: int, plain: bool = True, hosts: HostSet = VECTORS) -> Known:
    facts, own = cases(FIRST[part], count, plain, hosts=hosts), COLLECTIONS[hosts.name]
    keys, path = [each.key for each in facts], folder / f"features-{part}-{count}-{plain}.npy"
    if not path.exists():
        np.save(path, features(keys, hosts))
    plans = {placed.name: fixed(placed) for placed in own.plans}
    runs = [kept(folder, plans, heal(hosts), keys, seed, rows=own.rows) for seed in range(seeds)]
    return Known(facts, np.load(path), {name: np.mean([run[name].objective for run in runs], 0) for name in plans})


def fitted(of: Known, names: Sequence[str], rows: NDArray[np.bool_], seed: int = 0) -> dict[str, Any]:
    """A regressor for each plan, on the cases of `rows`."""
    columns = [TAUGHT_FEATURES.index(name) for name in names]
    found = {}
    for plan in PLACED:
        x, y = [], []
        for placed in PLANS:
            if placed.plan == plan:
                x.append(of.x[rows][:, placed.slot][:, columns])
                y.append((of.objective[placed.name] - of.objective[UNIFORM.name])[rows])
        model = ExtraTreesRegressor(
            TREES, min_samples_leaf=LEAF, max_leaf_nodes=LEAVES, max_features=0.5, random_state=seed, n_jobs=1
        )
        found[plan.name] = model.fit(np.concatenate(x), np.concatenate(y))
    return found


def picked(models: dict[str, Forest], of: Known, names: Sequence[str]) -> list[Placed]:
    """The plan of the largest expected gain for each case, as the controller picks it."""
    columns = [TAUGHT_FEATURES.index(name) for name in names]
    options = [Placed(UNIFORM), *(placed for placed in PLANS if placed.plan.name in models)]
    gains = [np.zeros(len(of.x))]
    gains += [models[placed.plan.name].predict(of.x[:, placed.slot][:, columns]) for placed in options[1:]]
    return [options[index] for index in np.stack(gains).argmax(0)]


def scored(picks: Sequence[Placed], of: Known) -> Floats:
    return np.array([of.objective[placed.name][case] for case, placed in enumerate(picks)])


def crossed(of: Known, names: Sequence[str], group: NDArray[np.int64]) -> Floats:
    """J (n,) of the trees on each group of cases, fitted on the others."""
    found = np.zeros(len(of.x))
    for each in np.unique(group):
        rows = group == each
        models = {name: forest_of(model) for name, model in fitted(of, names, ~rows).items()}
        found[rows] = scored(picked(models, of, names), of)[rows]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--cases", type=int, default=480)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--taught", action="store_true")
    parser.add_argument("--task", choices=list(COLLECTIONS), default=VECTORS.name)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hosts = COLLECTIONS[options.task].hosts
    of = known(options.folder, "training", options.cases, options.seeds, hosts=hosts)
    names = TAUGHT_FEATURES if options.taught else FEATURES
    uniform = of.objective[UNIFORM.name]
    best = np.stack([of.objective[placed.name] for placed in PLANS]).max(0)
    gain = crossed(of, names, of.host % 5) - uniform
    print(
        f"{len(of.x)} cases; gain over uniform on hosts left out {100 * gain.mean():+.2f} points, "
        f"best of all plans by the same figures {100 * (best - uniform).mean():+.2f}"
    )
    models = fitted(of, names, np.ones(len(of.x), bool))
    save_forests(options.output, Forests(tuple(names), {name: forest_of(model) for name, model in models.items()}))
    print(options.output, options.output.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
