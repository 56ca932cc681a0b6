"""Tables of `heal` on fresh held-out cases: other caps, updates, rent, damage, and the correction in closed form.

    python bench/scripts/collect_healing.py FOLDER/one-site/training --part training --cases 960
    python bench/scripts/collect_healing.py FOLDER/one-site/fresh --part fresh --cases 160 --seeds 2
    python bench/scripts/collect_healing.py FOLDER/cap-3-%/fresh --part fresh --cases 320 --seeds 2 --setting "cap 3 %" --last
    ... likewise 320 at "cap 10 %" (without --last), and 160 of "two sites" with one start
    ... and training cases: 320 at 3 % (--last), 320 of two sites, 160 at 10 %
    ... and "160 updates": 480 training cases, and 320 of the part `further` (--seeds 2)
    python bench/scripts/study_heal_settings.py FOLDER

The best fixed plan of a setting is the best on its training cases. With one start there is no oracle: "best of all" takes the
best plan for each case by the very figures that are printed, which is more than any controller can reach.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from collect_healing import (
    ONE_SITE,
    PLANS,
    SENSED,
    SETTINGS,
    VECTOR,
    Collected,
    Figures,
    collected,
    concentrated,
    features,
    kept,
    views,
)
from numpy.typing import NDArray
from study_heal import (
    BEST,
    LEFT_OUT,
    ORACLE,
    RULES,
    Scores,
    chosen,
    difference,
    fit,
    oracle,
    picks,
    place,
    print_damage,
    print_residual,
    static,
)

from esper.runs.evaluation.contenders import named
from esper.runs.evaluation.statistics import interval, share_of_headroom
from esper_bench.controllers.healing_features import FEATURES, TAUGHT_FEATURES
from esper_bench.controllers.plans import NONE, UNIFORM
from esper_bench.controllers.trees import Trees
from esper_bench.healing.damage import DamageKind
from esper_bench.healing.data import Part
from esper_bench.healing.heal import CorrectedHost, Facts, split_of
from esper_bench.records import run_script

CUT = (DamageKind.PRUNED.value, DamageKind.LOW_RANK.value)
CUT_TITLE, ADDED_TITLE, WEIGHTS_TITLE = ", pruned units and low rank", ", those added", ", damage of weights"
RESIDUAL = 64  # cases of the control
OF_DATA = tuple(kind.value for kind in (DamageKind.INPUT, DamageKind.LABELS, DamageKind.NONE))
WITHOUT_INTACT = ("participation", "collapse")
"""Rules that read no intact network."""
FITTED, TAUGHT, TOP = "tree, fitted here", "tree (taught), fitted here", "best of all"
FITS = {FITTED: FEATURES, TAUGHT: TAUGHT_FEATURES, LEFT_OUT: FEATURES}


class Table(NamedTuple):
    """A setting, how many training and held-out cases, how many starts, the cap of the correction, and the rent."""

    setting: str
    training: int
    fresh: int = 160
    seeds: int = 2
    cap: float = 0.06
    rent: float = 0.1
    fits: bool = False  # trees are fitted on the training cases of the setting
    part: str = "fresh"
    earlier: int = 0  # the first so many cases were printed before; the others are printed alone as well


TABLES: Mapping[str, Table] = {
    "cap 6 %": Table(ONE_SITE, 960, fits=True),
    "cap 6 %, rent .3": Table(ONE_SITE, 960, rent=0.3),
    "cap 3 %": Table("cap 3 %", 320, cap=0.03, fits=True),
    "cap 10 %": Table("cap 10 %", 160, cap=0.1, fits=True),
    "two sites": Table("two sites", 320, seeds=1),
    "cap 3 %, 320 cases": Table("cap 3 %", 320, 320, cap=0.03, fits=True, earlier=160),
    "cap 10 %, 320 cases": Table("cap 10 %", 160, 320, cap=0.1, fits=True, earlier=160),
    "further, 160 updates": Table("160 updates", 480, fits=True, part="further"),
    "further, 160 updates, 320 cases": Table("160 updates", 480, 320, fits=True, part="further", earlier=160),
}


def grown(root: Path, of: Table, part: str, count: int, seeds: int) -> Collected:
    """The figures of every plan on the cases of a setting, with the rent of the table."""
    last = of.cap < 0.05
    found = collected(place(root, of.setting) / part, VECTOR, part, count, seeds, of.setting, last)
    more = of.rent - VECTOR.task().defaults["reward"]["rent"]
    paid = {
        name: own._replace(objective=own.objective - more * own.added, over_time=own.over_time - more * own.added)
        for name, own in found.plans.items()
    }
    return found._replace(plans=paid)


def one_site(of: Table) -> bool:
    return SETTINGS[of.setting].wanted is concentrated


def corrected(facts: Sequence[Facts], cap: float, rent: float) -> Figures:
    """The correction in closed form, which has no start; it pays rent for the parameters that it stores."""
    metric, share = [], []
    for each in facts:
        host, spent = CorrectedHost(each, cap).corrected()
        x, y = split_of(each, Part.TEST)
        with torch.no_grad():
            metric.append(float((host(x)[:, : each.problem.classes].argmax(-1) == y).float().mean()))
        share.append(spent / sum(parameter.numel() for parameter in host.parameters()))
    value, added = np.array(metric)[:, None], np.array(share)[:, None]
    return Figures(value - rent * added, value, added, np.full_like(value, np.nan))


def scores_of(root: Path, of: Table) -> tuple[Collected, dict[str, Figures], str]:
    """Every contender of a table, and the name of the best fixed plan."""
    training, held = grown(root, of, "training", of.training, 1), grown(root, of, of.part, of.fresh, of.seeds)
    best, plans, seen = training.best(), held.plans, views(VECTOR, held.keys)
    found = {"never": plans[NONE.name], BEST: plans[best], "uniform": plans[UNIFORM.name]}
    found |= {name: chosen(picks(rule(), seen), plans) for name, rule in RULES.items() if name != "inner-use"}
    found["tree"] = chosen(picks(Trees(), seen), plans)
    if of.fits:
        kind = ONE_SITE if one_site(of) else of.setting
        x = features(training, place(root, kind) / f"features-training-{of.training}.npz")
        found |= {row: fit(row, names, training, x, held, seen) for row, names in FITS.items()}
    if of.seeds > 1:
        found[ORACLE] = oracle(plans, [placed.name for placed in PLANS])
    else:
        most = np.stack([plans[placed.name].objective.mean(1) for placed in PLANS]).argmax(0)
        found[TOP] = chosen([PLANS[index] for index in most], plans)
    found["closed form (taught)"] = corrected(held.facts, of.cap, of.rent)
    if one_site(of):
        longer = "steps" in SETTINGS[of.setting].settings
        beside = root / ("static-" + of.setting.replace(" ", "-") if longer else "static")
        found |= static(beside, VECTOR, held.keys, of.setting)
    return held, found, best


def averaged(found: Scores, rows: NDArray[np.bool_]) -> dict[str, Figures]:
    """The means over starts (n, 1) of the cases in `rows`."""
    return {name: Figures(*(field[rows].mean(1, keepdims=True) for field in own)) for name, own in found.items()}


def show(title: str, part: Scores) -> None:
    """Print a table of the cases."""
    base = part[BEST]
    room = (part[ORACLE if ORACLE in part else TOP].objective - base.objective).mean()
    print(f"\n**{title}** ({len(base.objective)} cases)\n")
    print(
        "| | J | over the best fixed plan, points [95 %] | share of the headroom | over time |\n|---|---|---|---|---|"
    )
    for name, own in part.items():
        if name == BEST:
            print(f"| {name} | {own.objective.mean():.3f} | | | |")
            continue
        timed = "" if np.isnan(own.over_time).any() else difference(own.over_time, base.over_time)
        gain = (own.objective - base.objective).mean()
        cells = difference(own.objective, base.objective), f"{gain / room:.0%}" if gain > 0 else "", timed
        print(f"| {name} | {own.objective.mean():.3f} | {' | '.join(cells)} |")


def share(ours: Figures, base: Figures, top: Figures) -> str:
    found = interval(share_of_headroom, [ours.objective], [base.objective], [top.objective])
    return f"{found.value:.0%} [{found.low:.0%}, {found.high:.0%}]"


def claims(title: str, part: Scores) -> None:
    """Print what the first study made one expect beside what the cases show."""
    base, drift, tree = part[BEST], part["drift (taught)"], part[FITTED]
    rule = max(WITHOUT_INTACT, key=lambda name: part[name].objective.mean())
    taught = f"{share(part[TAUGHT], base, drift)}; {difference(part[TAUGHT].objective, drift.objective)} over it"
    lines = {
        f"oracle over the {BEST} | 6": difference(part[ORACLE].objective, base.objective),
        f"trees fitted here, over the {BEST} | 7.9": difference(tree.objective, base.objective),
        "over time | 9": difference(tree.over_time, base.over_time),
        "best rule, share of the headroom | 70 %": f"`{rule}` {share(part[rule], base, part['oracle'])}",
        "on damage left out of the training | 5": difference(part[LEFT_OUT].objective, base.objective),
        "taught trees, share of what `drift` gains | 100 %": taught,
    }
    print(f"\n| {title} (n = {len(base.objective)}) | expected | found [95 %] |\n|---|---|---|")
    for line, cell in lines.items():
        print(f"| {line} | {cell} |")


def side_by_side(parts: Mapping[str, Scores]) -> None:
    """Print J of several tables, and the points over the best fixed plan of each."""
    names = list(dict.fromkeys(name for part in parts.values() for name in part))
    print(f"\n| | {' | '.join(parts)} |\n|---|{'---|' * len(parts)}")
    for name in names:
        cells = []
        for part in parts.values():
            own, base = part.get(name), part[BEST]
            gain = "" if own is None or name == BEST else f" ({difference(own.objective, base.objective)})"
            cells.append("" if own is None else f"{own.objective.mean():.3f}{gain}")
        print(f"| {name} | {' | '.join(cells)} |")


def spread(root: Path) -> None:
    """Print what controllers gain over `uniform` on the first fresh cases of spread damage, grown with one start."""
    keys, names = [facts.key for facts in VECTOR.cases("fresh", 160, "spread")], ("uniform", "collapse", "tree")
    found = kept(root / "spread" / "grown", {name: named(name) for name in names}, VECTOR.task(), keys, 1, SENSED)
    print(f"\nspread: keys {keys[0]} to {keys[-1]}, {len(keys)} cases")
    for name, own in found.items():
        over = difference(own.objective, found["uniform"].objective)
        print(f"{name} {own.objective.mean():.3f}, over uniform {over}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--spread", action="store_true", help="print the figures of spread damage as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.spread:
        spread(options.folder)
    parts = {}
    for title in options.tables:
        of = TABLES[title]
        held, found, best = scores_of(options.folder, of)
        hosts = len(np.unique(held.host))
        print(f"\n{title}: keys {held.keys[0]} to {held.keys[-1]}, {hosts} hosts; best fixed plan: {best}")
        rows = {"": np.ones(len(held.facts), bool), WEIGHTS_TITLE: ~np.isin(held.kind, OF_DATA)}
        cut, added = np.isin(held.kind, CUT), np.arange(len(held.facts)) >= of.earlier
        rows |= {CUT_TITLE: cut} if of.fits else {}
        rows |= {ADDED_TITLE: added, ADDED_TITLE + CUT_TITLE: added & cut} if of.earlier else {}
        for suffix, own_rows in rows.items():
            parts[title + suffix] = averaged(found, own_rows)
            show(title + suffix, parts[title + suffix])
            if of.fits and suffix != WEIGHTS_TITLE:
                claims(title + suffix, parts[title + suffix])
        print_damage(found, held.kind)
        if of.part == "further":
            folder = place(options.folder, of.setting) / "residual"
            print_residual(folder, VECTOR, of.part, RESIDUAL, of.setting, of.seeds)
    side_by_side({title: parts[title] for title in options.tables})


if __name__ == "__main__":
    run_script(main)
