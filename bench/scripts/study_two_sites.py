"""Measure rules on hosts with one damaged site and with two, and what plans at two slots bring (bench/docs/heal.md).

    python bench/scripts/study_two_sites.py FOLDER --part training --starts 1 --plans --settings "two sites"
    python bench/scripts/study_two_sites.py FOLDER
    python bench/scripts/study_two_sites.py FOLDER --part final --cases 96 --settings "two sites" --frozen

Cases are plain hosts at a cap of 6 %, with the defaults of `heal`. All plans that controllers pick for a case are grown for
it, and plans at its damaged sites. The oracle takes the best of them by the J of one start and has the figures of the other.
Two starts are compared with full fine-tuning and training from scratch too, which pay no rent. J is measured on the test
split. Grown figures are kept in FOLDER.
"""

import argparse
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from collect_healing import FIRST, ONE_SITE, SETTINGS, SLOTS, VECTOR, Figures, kept, views
from study_heal import (
    ORACLE,
    SEEDS,
    difference,
    picks,
    print_damage,
    print_opponents,
    repaired_frozen,
    static,
    taken,
)

from esper.leyline.config.tree import Config
from esper.leyline.lifecycle.view import View
from esper.runs.evaluation.contenders import Contender
from esper_bench.controllers.placement import Collapse, DriftRise, Fixed, ParticipationDrop, Placement
from esper_bench.controllers.plans import MIXED, NONE, RANKS, SEVERAL, UNIFORM, Placed, Plan
from esper_bench.controllers.several import Sites
from esper_bench.controllers.shipped import Shipped
from esper_bench.controllers.trees import Trees
from esper_bench.evaluation.plan_menu import UNMEASURED
from esper_bench.evaluation.rivals import best_by_others
from esper_bench.healing.heal import HealCase
from esper_bench.records import run_script

TWO_SITES = "two sites"
LAST = 5  # the last slot, which is also the one for damage of the layer behind it
RULES: Mapping[str, Callable[[], Placement]] = {
    "participation": ParticipationDrop,
    "collapse": Collapse,
    "sites": Sites,
    "tree": Trees,
    "shipped-1": partial(Shipped, "shipped-1"),
    "shipped-2": partial(Shipped, "shipped-2"),
}
TAUGHT: Mapping[str, Callable[[], Placement]] = {"drift (taught)": DriftRise, "sites (taught)": Sites}


def without_drift(view: View) -> View:
    """Return the view of a task that has no intact network."""
    names, values = view.space.sensors, view.measurements.sensors.copy()
    values[..., [names.index(name) for name in ("drift", "drift_before")]] = np.nan
    return view._replace(measurements=view.measurements._replace(sensors=values))


VARIANTS = (
    SEVERAL,
    Plan("rank 2 alone", RANKS[2:]),
    Plan("rank 4 alone", RANKS[1:]),
    MIXED,
    Plan("bypass of rank 8 and uniform", RANKS, UNIFORM.here),
)
"""Plans that are compared at all damaged sites of a case."""
THERE = " at the sites"


def packed(wanted: Sequence[Sequence[Placed]]) -> dict[str, Contender]:
    """Return contenders that together plant all wanted plans of each case: the first of each case, then the second, and so on."""
    found = {}
    for layer in itertools.zip_longest(*wanted, fillvalue=Placed(NONE)):
        name = "plans-" + hashlib.sha256("|".join(placed.name for placed in layer).encode()).hexdigest()[:12]
        found[name] = Contender(name, {"controller": name, **UNMEASURED}, partial(planting, layer))
    return found


def planting(layer: Sequence[Placed], config: Config) -> Fixed:
    """Return the controller of a layer: a plan for each case. It does not depend on the config."""
    return Fixed(layer)


def at_sites(facts: HealCase) -> list[Placed]:
    """List the plans at the slots behind the damaged segments: one at a slot, and one at both."""
    slots = sorted({min(segment, LAST) for segment in facts.damage.segments})
    both = [Placed(SEVERAL, slots[0], tuple(slots[1:]))] if len(slots) > 1 else []
    return [*(Placed(MIXED, slot) for slot in slots), *both]


def every_plan(facts: Sequence[HealCase]) -> dict[str, list[Placed]]:
    """List VARIANTS at the damaged sites, all plans for one slot, and SEVERAL at each pair of slots."""
    slots = [sorted({min(segment, LAST) for segment in each.damage.segments}) or [-1] for each in facts]
    found = {f"{plan.name}{THERE}": [Placed(plan, own[0], tuple(own[1:])) for own in slots] for plan in VARIANTS}
    pairs = [Placed(SEVERAL, one, (other,)) for one, other in itertools.combinations(range(SLOTS), 2)]
    return found | {placed.name: [placed] * len(facts) for placed in (*VECTOR.plans, *pairs)}


def scores_of(
    folder: Path, facts: Sequence[HealCase], picked: Mapping[str, Sequence[Placed]], starts: int
) -> dict[str, Figures]:
    """Return the figures (n, starts) of every controller and, with several starts, of the oracle."""
    cases = zip(facts, zip(*picked.values(), strict=True), strict=True)
    wanted = [list(dict.fromkeys((*own, *at_sites(each)))) for each, own in cases]
    keys = [each.key for each in facts]
    layers = kept(folder, packed(wanted), VECTOR.task(), keys, starts, rows=len(keys))
    found = {}
    for name, placed in picked.items():
        at = np.array([own.index(each) for own, each in zip(wanted, placed, strict=True)])
        found[name] = taken(layers, list(layers), at[:, None])
    if starts > 1:
        grown = np.arange(len(layers))[:, None] < np.array([len(own) for own in wanted])
        scores = np.stack([own.objective for own in layers.values()])
        found[ORACLE] = taken(layers, list(layers), best_by_others(np.where(grown[..., None], scores, np.nan)))
    return found


def best_of(found: Mapping[str, Figures], names: Sequence[str]) -> Figures:
    """Choose the best of some plans for each case, by the figures that are shown: more than any controller can reach."""
    which = np.stack([found[name].objective.mean(1) for name in names]).argmax(0)
    return taken(found, names, which[:, None])


def show(found: Mapping[str, Figures], kinds: np.ndarray) -> None:
    base, top = found["uniform"].objective, found.get(ORACLE)
    print("\n| | J | over `uniform`, points [95 %] | over `collapse` | share of the headroom |\n|---|---|---|---|---|")
    for name, own in found.items():
        gain = (own.objective - base).mean()
        share = "" if top is None or gain <= 0 else f"{gain / (top.objective - base).mean():.0%}"
        rivals = (base, found["collapse"].objective)
        cells = ["" if own.objective is rival else difference(own.objective, rival) for rival in rivals]
        print(f"| {name} | {own.objective.mean():.3f} | {' | '.join(cells)} | {share} |")
    for name, other in (("sites (taught)", "drift (taught)"), ("shipped-2", "shipped-1")):
        print(f"\n{name} over {other}: {difference(found[name].objective, found[other].objective)}")
    print_damage(found, kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", choices=list(FIRST), default="final")
    parser.add_argument("--cases", type=int, default=96)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--settings", nargs="*", choices=list(SETTINGS), default=[TWO_SITES, ONE_SITE])
    parser.add_argument("--frozen", action="store_true", help="repair frozen networks without seeds as well")
    parser.add_argument("--plans", action="store_true", help="grow all plans for one slot and for two as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for setting in options.settings:
        facts = VECTOR.cases(options.part, options.cases, setting)
        keys, hosts = [each.key for each in facts], {each.number for each in facts}
        print(
            f"\n{setting}: {len(keys)} cases, keys {keys[0]} to {keys[-1]}, {len(hosts)} hosts, {options.starts} starts"
        )
        taught = views(VECTOR, keys)
        seen = [without_drift(view) for view in taught]
        picked = {"never": [Placed(NONE)] * len(keys), "uniform": [Placed(UNIFORM)] * len(keys)}
        picked |= {name: picks(rule(), seen) for name, rule in RULES.items()}
        picked |= {name: picks(rule(), taught) for name, rule in TAUGHT.items()}
        for name in ("sites", "sites (taught)"):
            print(name, "plants at several blocks in", sum(placed.plan == SEVERAL for placed in picked[name]))
        plans = every_plan(facts) if options.plans else {}
        folder = options.folder / setting.replace(" ", "-") / options.part
        found = scores_of(folder, facts, picked | plans, options.starts)
        others: dict[str, Figures] = {}
        if options.starts == SEEDS:
            found |= static(folder, VECTOR, keys)
            others = {name: found[name] for name in VECTOR.static}
        if options.frozen and options.starts == SEEDS:
            others |= repaired_frozen(folder / "frozen", VECTOR, keys)
        if plans:
            pairs = [name for name in plans if not name.endswith(THERE)]
            found["best of all for one slot"] = best_of(found, [placed.name for placed in VECTOR.plans])
            found["best of all"] = best_of(found, pairs)
        show(found, np.array([each.damage.kind.value for each in facts]))
        if others:
            print_opponents(others, {name: found[name] for name in ("sites", "shipped-2", "sites (taught)")})


if __name__ == "__main__":
    run_script(main)
