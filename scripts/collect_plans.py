"""Grow every plan on cases of `heal`, `repair` and `repair-tables`, and keep J of each, for scripts/make_shipped.py.

    python scripts/collect_plans.py FOLDER repair --part training --cases 480
    python scripts/collect_plans.py FOLDER repair --part fresh --cases 320 --seeds 2

The files of a source are those of scripts/collect_healing.py, in FOLDER/SOURCE/PART; what is there is not grown again.
"""

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from collect_healing import EMPTY, PLANS, ROWS, Figures, Floats, concentrated, fixed, kept

from esper.leyline.config import build_config
from esper.leyline.task import Mixture
from esper.leyline.view import View
from esper.runs.contenders import named
from esper.tamiyo.healing_features import FEATURES, slot_features, table
from esper.tamiyo.plans import HIDDEN, LINEAR, NONE, RANKS, SKIP, UNIFORM, Placed
from esper.tasks import heal, repair, tables
from esper.tasks.hosts import VECTOR_MENU
from esper.tolaria.engine import VectorizedEngine

FIRST = {
    "training": heal.RANGES["training"].start,
    "heldout": heal.RANGES["heldout"].start + 16384,
    "fresh": heal.RANGES["heldout"].start + 40960,
}
"""First key of each set of cases. Nothing was chosen by the figures of `fresh`."""
SLOTS = 4  # of the hosts of repair
LAST = SLOTS - 1
UNTRAINED = (
    Placed(NONE),
    Placed(UNIFORM),
    *(Placed(plan, slot) for plan in (LINEAR, HIDDEN) for slot in range(SLOTS)),
    *(Placed(SKIP, slot) for slot in (LAST - 1, LAST)),
)
MENU = (*VECTOR_MENU, "low-rank", *RANKS, "skip-mlp")
FULL: Mapping[str, Any] = {"blueprints": MENU}


class Source(NamedTuple):
    """A mixture that figures are collected on.

    Attributes:
        task (function): returns the mixture
        describe (function): facts of a key
        wanted (function): which facts are cases
        plans (Placed): the plans that are grown
        settings (mapping): what differs from the defaults of the mixture
        rules (names): controllers that plant none of the plans, grown on fresh cases with the defaults of the mixture
    """

    task: Callable[[], Mixture]
    describe: Callable[[int], Any]
    wanted: Callable[[Any], bool]
    plans: Sequence[Placed]
    settings: Mapping[str, Any] = EMPTY
    rules: tuple[str, ...] = ()


def every(facts: Any) -> bool:
    return True


SOURCES = {
    "heal": Source(heal.heal, heal.describe, lambda facts: concentrated(facts) and facts.plain, PLANS),
    "repair": Source(repair.repair, repair.describe, every, UNTRAINED, FULL, ("heuristic",)),
    "repair-tables": Source(tables.repair_tables, tables.describe, every, UNTRAINED, FULL, ("heuristic",)),
}


class Collected(NamedTuple):
    """Figures of cases (n,).

    Attributes:
        facts (n facts): of the cases
        x ((n, S, F) floats): features before the first step, in the order of FEATURES
        objective (mapping): J (n, seeds) by name of a plan or a rule
    """

    facts: Sequence[Any]
    x: Floats
    objective: dict[str, Floats]

    def rows(self, chosen: Any) -> "Collected":
        """The cases of a mask (n,)."""
        facts = [each for each, one in zip(self.facts, chosen, strict=True) if one]
        return Collected(facts, self.x[chosen], {name: value[chosen] for name, value in self.objective.items()})


def facts_of(source: str, part: str, count: int) -> list[Any]:
    own = SOURCES[source]
    keys = (own.describe(key) for key in itertools.count(FIRST[part]))
    return list(itertools.islice((facts for facts in keys if own.wanted(facts)), count))


@lru_cache(maxsize=1)
def views(source: str, keys: tuple[int, ...]) -> list[View]:
    """The views before the first step, ROWS keys each, with the sensors."""
    own, found = SOURCES[source], []
    task = own.task().sealed()
    for start in range(0, len(keys), ROWS):
        chunk = keys[start : start + ROWS]
        ours = {"task": task.name, "envs": len(chunk), "baselines": [], "probe": {"sensors_every": 1000}}
        config = build_config(task.defaults, own.settings, ours)
        found.append(VectorizedEngine(task, config).reset(np.array(chunk), episode=0))
    return found


def collected(folder: Path, source: str, part: str, count: int, seeds: int) -> Collected:
    """The figures of a source, from the folder or grown now."""
    own, facts, path = SOURCES[source], facts_of(source, part, count), folder / source / part
    keys = [each.key for each in facts]
    runs: list[dict[str, Figures]] = []
    for seed in range(seeds):
        run = kept(path, {placed.name: fixed(placed) for placed in own.plans}, own.task(), keys, seed, own.settings)
        if part != "training":
            run |= kept(path, {name: named(name) for name in own.rules}, own.task(), keys, seed)
        runs.append(run)
    file = path / f"features-{count}.npy"
    if not file.exists():
        x = [table(slot_features(view, taught=False), FEATURES) for view in views(source, tuple(keys))]
        np.save(file, np.concatenate(x))
    objective = {name: np.stack([run[name].objective for run in runs], 1) for name in runs[0]}
    return Collected(facts, np.load(file), objective)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("source", choices=list(SOURCES))
    parser.add_argument("--part", choices=list(FIRST), default="training")
    parser.add_argument("--cases", type=int, default=480)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = collected(options.folder, options.source, options.part, options.cases, options.seeds)
    for name, value in found.objective.items():
        print(f"{name}: {value.mean():.4f}", flush=True)


if __name__ == "__main__":
    main()
