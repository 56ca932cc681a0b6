"""Grow many plans on many cases of `heal`, and keep J of each: data for trees, and the opponents of scripts/study_heal.py.

    python scripts/collect_healing.py FOLDER --part training --cases 512 --seeds 1
    python scripts/collect_healing.py FOLDER --part training --cases 320 --setting "cap 3 %"

A case is a key of a plain host, or of a residual one, from a first key on, with the damage that a setting is about: one damaged
site unless it says otherwise. Figures of 160 cases under one plan and seed are one file of the folder; those that are there are
not grown again.
"""

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.actions import Actions
from esper.leyline.task import Mixture
from esper.leyline.view import View
from esper.runs.contenders import Contender, contender_config
from esper.simic.rewards import objective
from esper.tamiyo.catalog import with_sensors
from esper.tamiyo.placement import Fixed
from esper.tamiyo.plans import BYPASS, HERE, MIXED, NONE, UNIFORM, UNIFORM_2, Placed
from esper.tasks.damage import DamageKind
from esper.tasks.heal import RANGES, Facts, describe, heal, heal_scratch, heal_unfrozen
from esper.tasks.healing_hosts import BLOCKS, VECTORS, HostSet
from esper.tasks.healing_images import IMAGES
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.play import Observer, Step, play

ROWS = 160
EMPTY: Mapping[str, object] = MappingProxyType({})
FIRST = {
    "training": RANGES["training"].start,
    "heldout": RANGES["heldout"].start + 16384,
    "fresh": RANGES["heldout"].start + 32768,
    "further": RANGES["heldout"].start + 57344,
}
"""First key of each set of cases. Nothing was chosen by the figures of `fresh` and `further`."""
SPREAD = (DamageKind.MIXED, DamageKind.NONE)
SLOTS = BLOCKS + 1  # the slot behind the embedding comes first
Floats = NDArray[np.float64]


PLANS = (
    Placed(NONE),
    Placed(UNIFORM),
    *(Placed(BYPASS, slot) for slot in range(SLOTS)),
    *(Placed(MIXED, slot) for slot in range(SLOTS)),
    Placed(HERE, SLOTS - 1),
)


class Last(Fixed):
    """A bypass of rank 1 at the last three blocks, as far as the cap allows: the best fixed plan at a cap of 3 %."""

    def __init__(self) -> None:
        super().__init__([Placed(UNIFORM)])

    def _decide(self, view: View) -> Actions:
        assert self._wish is not None, "pick comes before it"
        self._wish[:, : SLOTS - 3] = -1
        return super()._decide(view)


LAST = "rank 1 at 3 4 5"


def last_blocks() -> Contender:
    settings = {"controller": LAST, "gates": {"permissive": True}, "probe": {"coalitions_every": 1000}}
    return Contender(LAST, settings, lambda config: Last())


def fixed(placed: Placed) -> Contender:
    name = placed.name
    settings = {"controller": name, "gates": {"permissive": True}, "probe": {"coalitions_every": 1000}}
    return Contender(name, settings, lambda config: Fixed([placed]))


def concentrated(facts: Facts) -> bool:
    """One damaged site: one segment, a group of inputs, or swapped labels."""
    return facts.damage.kind not in SPREAD and len(facts.damage.segments) <= 1


def two_sites(facts: Facts) -> bool:
    """Damage of the weights of two segments, and sound others."""
    return facts.damage.kind not in SPREAD and len(facts.damage.segments) == 2


def spread(facts: Facts) -> bool:
    """Coarse weights in every layer, ternary weights in one or two segments, or no damage."""
    return facts.damage.kind in (*SPREAD, DamageKind.TERNARY)


class Setting(NamedTuple):
    """Which cases, and what differs from the defaults of the task."""

    wanted: Callable[[Facts], bool] = concentrated
    settings: Mapping[str, Any] = EMPTY


ONE_SITE = "one site"
SETTINGS: Mapping[str, Setting] = {
    ONE_SITE: Setting(),
    "cap 3 %": Setting(settings={"governor": {"param_limit": 0.03}}),
    "cap 10 %": Setting(settings={"governor": {"param_limit": 0.1}}),
    "160 updates": Setting(settings={"steps": 80}),
    "two sites": Setting(two_sites),
    "spread": Setting(spread),
}


class Collection(NamedTuple):
    """What is collected of one set of hosts: which plans, and how many cases are one file."""

    hosts: HostSet
    plans: tuple[Placed, ...] = PLANS
    rows: int = ROWS


COLLECTIONS: Mapping[str, Collection] = {
    VECTORS.name: Collection(VECTORS),
    IMAGES.name: Collection(IMAGES, (*PLANS, Placed(UNIFORM_2)), rows=40),
}


def cases(start: int, count: int, plain: bool = True, setting: str = ONE_SITE, hosts: HostSet = VECTORS) -> list[Facts]:
    wanted = SETTINGS[setting].wanted
    found = (f for key in itertools.count(start) if wanted(f := describe(key, hosts)) and f.plain == plain)
    return list(itertools.islice(found, count))


class Figures(NamedTuple):
    """Figures of the cases (n,) under one plan and seed. `over_time` is J on the probe split, mean over the steps."""

    objective: Floats
    metric: Floats
    added: Floats
    over_time: Floats


class OverTime(Observer):
    """The mean over steps of J on the probe split, of the networks as they compute after each step."""

    def __init__(self, rent: float) -> None:
        self.rent, self.total, self.steps = rent, np.zeros(0), 0

    def stepped(self, step: Step) -> None:
        after = step.outcome.after
        value = objective(after.metric, after.added_params, step.outcome.host_params, self.rent, 0)
        self.total, self.steps = value + (self.total if self.steps else 0), self.steps + 1


class Bench:
    """Grows contenders on one set of keys, from the same hosts and data under every one."""

    def __init__(self, task: Mixture, keys: Sequence[int], seed: int, settings: Mapping[str, object] = EMPTY) -> None:
        self.task, self.keys, self.seed, self.settings = task, keys, seed, settings
        self.engine: VectorizedEngine | None = None

    def grow(self, contender: Contender) -> Figures:
        """The figures of the keys under a contender. All contenders of a bench have the same settings."""
        config = contender_config(
            self.task.sealed(), contender, [self.settings], self.seed, "training", 0, len(self.keys)
        )
        client = contender.make(config)
        if self.engine is None:
            self.engine = VectorizedEngine(self.task.sealed(), with_sensors(config, client))
            self.tests = [split for key in self.keys if (split := self.task.test_split(key)) is not None]
        self.engine.reset(np.array(self.keys), episode=0)
        watch = OverTime(config.reward.rent)
        outcome = play(self.engine, client, watch)
        assert outcome is not None
        metric, _ = self.engine.evaluate(self.tests)
        added = self.engine.exported_params() - outcome.host_params
        value = objective(metric, added, outcome.host_params, config.reward.rent, config.reward.rent_size)
        return Figures(value, metric, added / outcome.host_params, watch.total / watch.steps)


def kept(
    folder: Path,
    contenders: Mapping[str, Contender],
    task: Mixture,
    keys: Sequence[int],
    seed: int,
    settings: Mapping[str, object] = EMPTY,
    rows: int = ROWS,
) -> dict[str, Figures]:
    """The figures of some keys by contender, from the folder or grown now, `rows` at a time."""
    found: dict[str, list[Figures]] = {name: [] for name in contenders}
    for start in range(0, len(keys), rows):
        chunk = keys[start : start + rows]
        bench = Bench(task, chunk, seed, settings)
        for name, contender in contenders.items():
            path = folder / f"{name.replace(' ', '-')}-{chunk[0]}-{chunk[-1]}-{len(chunk)}-s{seed}.npz"
            if not path.exists():
                figures = bench.grow(contender)
                folder.mkdir(parents=True, exist_ok=True)
                temporary = path.with_suffix(".tmp.npz")
                np.savez(temporary, **figures._asdict())
                temporary.rename(path)
                print(path.name, f"{figures.objective.mean():.4f}", flush=True)
            with np.load(path) as arrays:
                found[name].append(Figures(**arrays))
    return {name: Figures(*(np.concatenate(c) for c in zip(*parts, strict=True))) for name, parts in found.items()}


STATIC = {"full fine-tuning": (heal_unfrozen, 0.003), "from scratch": (heal_scratch, 0.01)}
"""The task of each static network, and its learning rate: the best of three on 32 training cases (docs/benchmarks/heal.md)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", choices=list(FIRST), default="training")
    parser.add_argument("--cases", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--setting", choices=list(SETTINGS), default=ONE_SITE)
    parser.add_argument("--last", action="store_true", help="grow a bypass at each of the last three blocks as well")
    parser.add_argument("--residual", action="store_true")
    parser.add_argument("--task", choices=list(COLLECTIONS), default=VECTORS.name)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hosts, plans, rows = COLLECTIONS[options.task]
    found_cases = cases(FIRST[options.part], options.cases, not options.residual, options.setting, hosts)
    keys = [facts.key for facts in found_cases]
    task, settings = heal(hosts), SETTINGS[options.setting].settings
    contenders = {placed.name: fixed(placed) for placed in plans} | ({LAST: last_blocks()} if options.last else {})
    for seed in range(options.seeds):
        found = kept(options.folder, contenders, task, keys, seed, settings, rows)
        for name, figures in found.items():
            print(seed, name, *(f"{column.mean():.4f}" for column in figures), flush=True)


if __name__ == "__main__":
    main()
