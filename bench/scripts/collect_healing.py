"""Grow many plans on many cases of a task with damaged hosts, and keep J of each: data for trees, and opponents of the studies.

    python bench/scripts/collect_healing.py FOLDER --part training --cases 512 --seeds 1
    python bench/scripts/collect_healing.py FOLDER --part training --cases 96 --setting "cap 3 %"
    python bench/scripts/collect_healing.py FOLDER --task heal-bytes --part training --cases 24

A case of `heal` and its kin is a key of a plain host, from a first key on, with the damage that a setting is about: one damaged
site unless it says otherwise. Figures of some cases under one plan and seed are one file of the folder; those that are there are
not grown again.
"""

import argparse
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from esper.kasmina.network.static import Skipped
from esper.leyline.config.tree import build_config
from esper.leyline.data.task import Instance, Mixture
from esper.leyline.lifecycle.view import View
from esper.runs.evaluation.contenders import Contender, grow_contender, named
from esper.runs.evaluation.evaluation import Design, tested
from esper.simic.rewards import objective
from esper.tasks import repair
from esper.tasks.hosts import VECTOR_MENU
from esper.tolaria.engine import Observer, Step, VectorizedEngine
from esper_bench import repair_tables as tables
from esper_bench.controllers.healing_features import FEATURES, TAUGHT_FEATURES, slot_features, table
from esper_bench.controllers.plans import (
    BYPASS,
    FULL_HEAD,
    FULL_HEAD_MIXED,
    HERE_MIXED,
    HIDDEN,
    LINEAR,
    LOW_RANK_HEAD,
    LOW_RANK_HEAD_MIXED,
    NONE,
    RANKS,
    SKIP,
    SPARSE_HEAD,
    SPARSE_HEAD_MIXED,
    SPARSE_ROWS,
    UNIFORM,
    UNIFORM_2,
    UNIFORM_8,
    UNIFORM_ENDS,
    UNIFORM_MLP,
    Placed,
    placed_plans,
)
from esper_bench.evaluation.plan_menu import UNMEASURED, Candidate, abreast
from esper_bench.healing import heal, heal_bytes
from esper_bench.healing.byte_hosts import LAYERS
from esper_bench.healing.damage import DamageKind
from esper_bench.healing.data import FINAL, OTHER
from esper_bench.healing.frozen import Repair, repaired
from esper_bench.healing.hosts import BLOCKS, FULL, VECTORS, HostSet
from esper_bench.healing.images import IMAGES
from esper_bench.healing.unknown import KEYS as UNKNOWN_KEYS
from esper_bench.healing.unknown import UNKNOWN_HOSTS
from esper_bench.records import load_figures, load_record, run_script, save_figures, save_record

EMPTY: Mapping[str, Any] = MappingProxyType({})
SENSED: Mapping[str, Any] = {"probe": {"sensors_every": 1000, "coalitions_every": 1000}}
FIRST: Mapping[str, int] = {
    "training": heal.RANGES["training"].start,
    "heldout": heal.RANGES["heldout"].start + 16384,
    "fresh": heal.RANGES["heldout"].start + 32768,
    "card": heal.RANGES["heldout"].start + 40960,
    "learners": heal.RANGES["heldout"].start + 46080,
    "menu": heal.RANGES["heldout"].start + 27648,
    "places": FINAL.start + 8192,
    "decisions": heal.RANGES["heldout"].start + 61440,
    "packages": heal.RANGES["heldout"].start + 63488,
    "final": FINAL.start,
    "other": OTHER.start,
}
"""First key of each set. Nothing was chosen by the figures of those after `heldout`; `card` is for shipped controllers.
`final`, `places` and `other` have hosts and problems of their own. The cases of `decisions` and `packages` were looked at by
comparisons that others have replaced, so they are no fresh ones."""
FIRST_UNKNOWN = {"training": UNKNOWN_KEYS["training"].start, "final": UNKNOWN_KEYS["heldout"].start + 1024}
"""Those of the game; the instances of its page are the first held-out ones."""
FIRST_BYTES = {
    "training": heal.RANGES["training"].start + 4096,
    "heldout": heal.RANGES["heldout"].start + 40_000,
    "final": FINAL.start,
}
"""Those of heal-bytes, whose settings were chosen on training keys below 64."""
FIRST_REPAIR = {**FIRST, "final": repair.RANGES["heldout"].start + 50_000}
"""Those of repair, which has no keys FINAL."""
REDRAWN = "full fine-tuning, dead units drawn anew"
FINE_TUNED, WITH_SKIPS = "full fine-tuning", "static, with a skip around every block"
SPREAD = (DamageKind.MIXED, DamageKind.NONE)
FROZEN_ROWS = 16
"""Cases of which the frozen opponents are one file."""
Floats = NDArray[np.float64]


SLOTS = BLOCKS + 1
PLANS = tuple(placed_plans(SLOTS))
LITTLE = (
    *(f"{BYPASS.name} at {slot}" for slot in range(1, SLOTS)),
    *(f"{plan.name} at {SLOTS}" for plan in (LOW_RANK_HEAD, LOW_RANK_HEAD_MIXED, FULL_HEAD_MIXED)),
    *(f"{plan.name} at {SLOTS}" for plan in (SPARSE_HEAD, SPARSE_HEAD_MIXED)),
    *(UNIFORM_ENDS.name, f"{SPARSE_ROWS.name} at 0", f"{HERE_MIXED.name} at {SLOTS - 1}"),
)
"""Plans without which the best plan of each of 280 training cases loses .3 points together, of the 7.6 that it is above the best
fixed plan. They are not grown on other cases."""
ENDS = tuple(placed for placed in placed_plans(SLOTS, heads=1) if placed.name not in LITTLE)
FOUND = Placed(LOW_RANK_HEAD_MIXED, SLOTS)
"""What `esper eval --tasks heal-full --search-episodes 7200` finds on training instances of all kinds."""
BYTES = tuple(placed_plans(LAYERS + 2))
BYTES_ALL = (
    *BYTES,
    *(Placed(plan) for plan in (UNIFORM_8, UNIFORM_MLP)),
    Placed(SPARSE_ROWS, 0),
    *(Placed(plan, LAYERS + 1) for plan in (SPARSE_HEAD, FULL_HEAD)),
)
LAST_BLOCK = 3  # of the hosts of repair
UNTRAINED = (
    Placed(NONE),
    Placed(UNIFORM),
    *(Placed(plan, slot) for plan in (LINEAR, HIDDEN) for slot in range(LAST_BLOCK + 1)),
    *(Placed(SKIP, slot) for slot in (LAST_BLOCK - 1, LAST_BLOCK)),
)
MENU = (*VECTOR_MENU, "low-rank", *RANKS, "skip-mlp")
EVERY: Mapping[str, Any] = {"blueprints": MENU}


def every(facts: Any) -> bool:
    return True


def concentrated(facts: Any) -> bool:
    """Return whether one site is damaged: one segment, a group of inputs, or swapped labels."""
    return facts.damage.kind not in SPREAD and len(facts.damage.segments) <= 1


def two_sites(facts: heal.HealCase) -> bool:
    """Return whether the weights of two segments are damaged, and all others sound."""
    return facts.damage.kind not in SPREAD and len(facts.damage.segments) == 2


class Setting(NamedTuple):
    """Says which cases of a host set are taken, and what differs from the defaults of the task."""

    wanted: Callable[[heal.HealCase], bool] = concentrated
    settings: Mapping[str, Any] = EMPTY


ONE_SITE = "one site"
SETTINGS: Mapping[str, Setting] = {
    ONE_SITE: Setting(),
    "cap 3 %": Setting(settings={"governor": {"param_limit": 0.03}}),
    "cap 10 %": Setting(settings={"governor": {"param_limit": 0.1}}),
    "160 updates": Setting(settings={"steps": 80}),
    "two sites": Setting(two_sites),
}


class Source(NamedTuple):
    """Describes a task that figures are collected on.

    Attributes:
        task (function): returns the mixture
        describe (function): facts of a key
        plans (Placed): the plans that are grown
        taught (function): returns the mixture with intact hosts, if there is one
        static (mapping): tasks whose hosts train without growth, by the name of the opponent
        rows (int): how many cases are one file
        wanted (function): which facts are cases; None for those of the setting, on hosts without skips
        settings (mapping): what differs from the defaults of the mixture
        rules (names): controllers that plant none of the plans, grown with the defaults of the mixture
        first (mapping): first key of each part
        heads (int): slots behind the last layer
        together (int): plans that are grown in one population, which takes half of the time; their draws differ then
    """

    task: Callable[[], Mixture]
    describe: Callable[[int], Any]
    plans: Sequence[Placed]
    taught: Callable[[], Mixture] | None = None
    static: Mapping[str, Callable[[], Mixture]] = EMPTY
    rows: int = 160
    wanted: Callable[[Any], bool] | None = None
    settings: Mapping[str, Any] = EMPTY
    rules: tuple[str, ...] = ()
    first: Mapping[str, int] = FIRST
    heads: int = 0
    together: int = 1

    @property
    def features(self) -> tuple[str, ...]:
        """The columns of `features_of`; FEATURES come first."""
        return FEATURES if self.taught is None else TAUGHT_FEATURES

    def cases(self, part: str, count: int, setting: str = ONE_SITE, plain: bool = True) -> list[Any]:
        """List the facts of the first cases of a part; of a host set, those of plain hosts, or of residual ones."""
        wanted = self.wanted or (lambda facts: SETTINGS[setting].wanted(facts) and facts.plain == plain)
        return list(itertools.islice(filter(wanted, map(self.describe, itertools.count(self.first[part]))), count))


def healed(hosts: HostSet, plans: Sequence[Placed], rows: int = 160) -> Source:
    static = {
        FINE_TUNED: partial(heal.heal_unfrozen, hosts),
        REDRAWN: partial(heal.heal_redrawn, hosts),
        "from scratch": partial(heal.heal_scratch, hosts),
    }
    describe = partial(heal.describe, of=hosts)
    return Source(partial(heal.heal, hosts), describe, plans, partial(heal.heal_taught, hosts), static, rows)


def _full() -> Source:
    """Return the hosts of `heal` with the full menu, and the correction in closed form, which pays no rent here."""
    own = healed(FULL, ENDS, rows=40)
    return own._replace(
        together=16, static={**own.static, "closed form (taught)": partial(heal.heal_eora, FULL)}, heads=1
    )


def repair_skips() -> Mixture:
    """Return the instances of `repair`, whose damaged hosts have an identity skip around each block and train without growth."""
    mixture = repair.repair()
    places = tuple(range(1, LAST_BLOCK + 2))

    def sample(key: int) -> Instance:
        instance = mixture.sample(key)
        return replace(instance, host=Skipped(instance.host, places))

    room = mixture.room._replace(host=Skipped(mixture.room.host, places))
    return replace(mixture, name="repair-skips", room=room, sample=sample)


VECTOR = healed(VECTORS, PLANS)
SOURCES: Mapping[str, Source] = {
    "heal": VECTOR,
    "heal-full": _full(),
    "heal-images": healed(IMAGES, (*PLANS, Placed(UNIFORM_2)), rows=40),
    "heal-unknown": healed(UNKNOWN_HOSTS, PLANS)._replace(wanted=every, first=FIRST_UNKNOWN),
    "heal-bytes": Source(
        heal_bytes.heal_bytes,
        heal_bytes.describe,
        BYTES_ALL,
        heal_bytes.heal_bytes_taught,
        {FINE_TUNED: heal_bytes.heal_bytes_unfrozen, "from scratch": heal_bytes.heal_bytes_scratch},
        rows=8,
        wanted=concentrated,
        first=FIRST_BYTES,
    ),
    "repair": Source(
        repair.repair,
        repair.describe,
        UNTRAINED,
        static={WITH_SKIPS: repair_skips},
        wanted=every,
        settings=EVERY,
        rules=("heuristic",),
        first=FIRST_REPAIR,
    ),
    "repair-tables": Source(
        tables.repair_tables, tables.describe, UNTRAINED, wanted=every, settings=EVERY, rules=("heuristic",)
    ),
}


def fixed(plans: Iterable[Placed]) -> dict[str, Contender]:
    """Return contenders that plant one plan in every environment, by its name."""
    return {placed.name: Candidate(placed.name, placed, UNMEASURED).contender(placed.name) for placed in plans}


class Figures(NamedTuple):
    """Holds figures of cases (n,) or (n, seeds) under one contender. `over_time`: J on the probe split, mean over the steps."""

    objective: Floats
    metric: Floats
    added: Floats
    over_time: Floats


class OverTime(Observer):
    """Sums J on the probe split over steps, of the networks as they compute after each step, for its mean."""

    def __init__(self, rent: float) -> None:
        self.rent, self.total, self.steps = rent, np.zeros(0), 0

    def stepped(self, step: Step) -> None:
        after = step.outcome.after
        value = objective(after.metric, after.added_params, step.outcome.host_params, self.rent, 0)
        self.total, self.steps = value + (self.total if self.steps else 0), self.steps + 1


def grow(task: Mixture, keys: Sequence[int], contender: Contender, seed: int, settings: Mapping[str, Any]) -> Figures:
    """Grow the cases of keys under a contender, and return their figures (n,)."""
    config = Design(task.sealed(), [settings], 1, "training", 0, len(keys)).config(contender, seed)
    watch = OverTime(config.reward.rent)
    engine, outcome, seconds = grow_contender(task.sealed(), contender, config, np.array(keys), [watch])
    own = tested(task, config, engine, outcome, seconds)
    return Figures(own.objective, own.metric, own.added_params / outcome.host_params, watch.total / watch.steps)


def file_of(folder: Path, name: str, chunk: Sequence[int], seed: int) -> Path:
    """Return the file in which the figures of some keys under a contender are kept."""
    return folder / f"{name.replace(' ', '-')}-{chunk[0]}-{chunk[-1]}-{len(chunk)}-s{seed}.npz"


def keep(path: Path, figures: Figures) -> None:
    """Write figures, and say so."""
    save_figures(path, **figures._asdict())
    print(path.name, f"{figures.objective.mean():.4f}", flush=True)


def keep_together(
    folder: Path, source: Source, keys: Sequence[int], seeds: int, settings: Mapping[str, Any] = EMPTY
) -> None:
    """Grow what is missing of the plans of a source, `together` plans in one population."""
    for seed, start in itertools.product(range(seeds), range(0, len(keys), source.rows)):
        chunk = keys[start : start + source.rows]
        missing = [placed for placed in source.plans if not file_of(folder, placed.name, chunk, seed).exists()]
        for first in range(0, len(missing), source.together):
            group = [Candidate(each.name, each, UNMEASURED) for each in missing[first : first + source.together]]
            several = Contender("plans", {**UNMEASURED, "controller": "plans"}, partial(abreast, group, "plans"))
            whole = grow(source.task(), [*chunk] * len(group), several, seed, settings)
            for index, each in enumerate(group):
                rows = slice(index * len(chunk), (index + 1) * len(chunk))
                keep(file_of(folder, each.name, chunk, seed), Figures(*(field[rows] for field in whole)))


def kept(
    folder: Path,
    contenders: Mapping[str, Contender],
    task: Mixture,
    keys: Sequence[int],
    seeds: int,
    settings: Mapping[str, Any] = EMPTY,
    rows: int = 160,
) -> dict[str, Figures]:
    """Return the figures (n, seeds) of keys by contender, from the folder or grown now, `rows` cases at a time."""
    found: dict[str, list[Figures]] = {name: [] for name in contenders}
    for seed, start in itertools.product(range(seeds), range(0, len(keys), rows)):
        chunk = keys[start : start + rows]
        for name, contender in contenders.items():
            path = file_of(folder, name, chunk, seed)
            if not path.exists():
                keep(path, grow(task, chunk, contender, seed, settings))
            found[name].append(Figures(**load_figures(path)))
    return {
        name: Figures(*(np.concatenate(column).reshape(seeds, -1).T for column in zip(*parts, strict=True)))
        for name, parts in found.items()
    }


def frozen(folder: Path, source: Source, keys: Sequence[int], cap: float, rent: float) -> dict[str, Figures]:
    """Return figures (n, 1) of frozen networks that are repaired without seeds, with one start, from the folder or made now."""
    assert source.taught is not None
    task, rows = source.taught(), list[dict[str, Repair]]()
    for chunk in (keys[start : start + FROZEN_ROWS] for start in range(0, len(keys), FROZEN_ROWS)):
        path = file_of(folder, "frozen", chunk, 0).with_suffix(".json")
        if not path.exists():
            save_record(path, {"cases": [repaired(task, key, cap, 0) for key in chunk]})
            print(path.name, flush=True)
        own = load_record(path)["cases"]
        rows += [{name: Repair(*repair) for name, repair in each.items()} for each in own]
    figures = {}
    for name in rows[0]:
        metric, added = np.array([each[name] for each in rows]).T[..., None]
        figures[name] = Figures(metric - rent * added, metric, added, np.full_like(metric, np.nan))
    return figures


def views(source: Source, keys: Sequence[int]) -> list[View]:
    """Return the views before the first step, with the sensors, and with the drifts where the source has intact hosts."""
    task, found = (source.taught or source.task)().sealed(), []
    for start in range(0, len(keys), source.rows):
        chunk = keys[start : start + source.rows]
        ours = {"task": task.name, "envs": len(chunk), "baselines": [], "probe": {"sensors_every": 1000}}
        config = build_config(task.defaults, source.settings, ours)
        found.append(VectorizedEngine(task, config).reset(np.array(chunk), episode=0))
    return found


class Collected(NamedTuple):
    """Holds cases of a source, and the figures of its plans.

    Attributes:
        source (Source): of the cases
        facts (n facts): of the cases
        plans (mapping): figures (n, seeds) of the plans that were grown, by name
    """

    source: Source
    facts: Sequence[Any]
    plans: Mapping[str, Figures]

    @property
    def keys(self) -> list[int]:
        return [facts.key for facts in self.facts]

    @property
    def host(self) -> NDArray[np.int64]:
        """(n,) the number of the trained host."""
        return np.array([facts.number for facts in self.facts])

    @property
    def kind(self) -> NDArray[np.str_]:
        """(n,) the kind of damage."""
        return np.array([facts.damage.kind.value for facts in self.facts])

    @property
    def objective(self) -> dict[Placed, Floats]:
        """J (n,) of the plans of the source, mean over seeds."""
        return {placed: self.plans[placed.name].objective.mean(1) for placed in self.source.plans}

    @property
    def seeds(self) -> int:
        return self.plans[NONE.name].objective.shape[1]

    def best(self) -> str:
        """Return the name of the plan of the largest mean J."""
        return max(self.plans, key=lambda name: self.plans[name].objective.mean())


def collected(folder: Path, source: Source, part: str, count: int, seeds: int, setting: str = ONE_SITE) -> Collected:
    """Return the figures of every plan on the cases of a part, from the folder or grown now."""
    facts, settings = source.cases(part, count, setting), {**source.settings, **SETTINGS[setting].settings}
    keys = [each.key for each in facts]
    if source.together > 1:
        keep_together(folder, source, keys, seeds, settings)
    plans = kept(folder, fixed(source.plans), source.task(), keys, seeds, settings, source.rows)
    return Collected(source, facts, plans)


def features(of: Collected, path: Path) -> Floats:
    """Return features (n, S, F) of cases in the order of `Source.features`, from a file or measured now."""
    if not path.exists():
        taught = of.source.taught is not None
        x = [table(slot_features(view, taught), of.source.features) for view in views(of.source, of.keys)]
        save_figures(path, x=np.concatenate(x))
    found: Floats = load_figures(path)["x"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", choices=list(FIRST), default="training")
    parser.add_argument("--cases", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--setting", choices=list(SETTINGS), default=ONE_SITE, help="of heal and heal-images")
    parser.add_argument("--task", choices=list(SOURCES), default="heal")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = SOURCES[options.task]
    found = collected(options.folder, source, options.part, options.cases, options.seeds, options.setting)
    rules = {name: named(name) for name in source.rules if options.part != "training"}
    grown = kept(options.folder, rules, source.task(), found.keys, options.seeds)
    for name, figures in {**found.plans, **grown}.items():
        print(name, *(f"{column.mean():.4f}" for column in figures), flush=True)


if __name__ == "__main__":
    run_script(main)
