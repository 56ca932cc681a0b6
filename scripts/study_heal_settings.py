"""Tables of `heal` on fresh held-out cases: other caps, updates, rent, damage, and the correction in closed form.

    python scripts/collect_healing.py FOLDER/one-site/training --part training --cases 960
    python scripts/collect_healing.py FOLDER/one-site/fresh --part fresh --cases 160 --seeds 2
    python scripts/collect_healing.py FOLDER/cap-3-%/fresh --part fresh --cases 320 --seeds 2 --setting "cap 3 %" --last
    ... likewise "cap 10 %" and "two sites" with one start, and training cases: 320 at 3 % (--last), 320 of two sites, 160 at 10 %
    ... and "160 updates": 480 training cases, and 160 of the part `further` (--seeds 2)
    python scripts/study_heal_settings.py FOLDER

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
    FIRST,
    LAST,
    ONE_SITE,
    PLANS,
    SETTINGS,
    STATIC,
    Floats,
    cases,
    concentrated,
    fixed,
    kept,
    last_blocks,
)
from fit_trees import Known, features, fitted, picked, views
from numpy.typing import NDArray
from study_heal import RULES, SENSED, Scores, by_damage, chosen, left_out, oracle, points, rule_picks, whole

from esper.runs.contenders import named
from esper.runs.statistics import interval, share_of_headroom
from esper.tamiyo.forest import forest_of, load_forests
from esper.tamiyo.healing_features import FEATURES, TAUGHT_FEATURES
from esper.tamiyo.plans import NONE, UNIFORM, Placed
from esper.tamiyo.trees import SHIPPED
from esper.tasks.damage import DamageKind
from esper.tasks.heal import CorrectedHost, Facts, heal, split_of
from esper.tasks.healing_data import Part

CUT = (DamageKind.PRUNED, DamageKind.LOW_RANK)
CUT_TITLE, ADDED_TITLE = ", pruned units and low rank", ", those added"
RESIDUAL = 64  # cases of the control
OF_DATA = (DamageKind.INPUT, DamageKind.LABELS, DamageKind.NONE)


WITHOUT_INTACT = ("participation", "collapse")
"""Rules that read no intact network."""
FIXED, FITTED, TAUGHT, OMITTED = (
    "best fixed plan",
    "tree, fitted here",
    "tree (taught), fitted here",
    "tree, damage left out",
)


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
    earlier: int = (
        0  # the first so many cases were printed before the others were grown, which are printed alone as well
    )


TABLES: Mapping[str, Table] = {
    "cap 6 %": Table(ONE_SITE, 960, fits=True),
    "cap 6 %, rent .3": Table(ONE_SITE, 960, rent=0.3),
    "cap 3 %": Table("cap 3 %", 320, cap=0.03, fits=True),
    "cap 10 %": Table("cap 10 %", 160, seeds=1, cap=0.1),
    "two sites": Table("two sites", 320, seeds=1),
    "cap 3 %, 320 cases": Table("cap 3 %", 320, 320, cap=0.03, fits=True, earlier=160),
    "further, 160 updates": Table("160 updates", 480, fits=True, part="further"),
}


def grown(root: Path, of: Table, part: str, count: int, seeds: int) -> tuple[list[Facts], dict[str, Scores]]:
    """The figures of every plan on the cases of a setting, with the rent of the table."""
    facts, setting = cases(FIRST[part], count, True, of.setting), SETTINGS[of.setting]
    contenders = {placed.name: fixed(placed) for placed in PLANS}
    contenders |= {LAST: last_blocks()} if of.cap < 0.05 else {}
    folder, keys = root / of.setting.replace(" ", "-") / part, [each.key for each in facts]
    runs = [kept(folder, contenders, heal(), keys, seed, setting.settings) for seed in range(seeds)]
    default = heal().defaults["reward"]["rent"]
    found = {}
    for name in contenders:
        own = whole([run[name] for run in runs])
        extra = (of.rent - default) * np.stack([run[name].added for run in runs], 1)
        found[name] = Scores(own.objective - extra, own.metric, own.over_time - extra)
    return facts, found


def one_site(of: Table) -> bool:
    return SETTINGS[of.setting].wanted is concentrated


def measured(root: Path, of: Table, part: str, facts: Sequence[Facts]) -> Floats:
    """Features of the cases, kept in the folder: those of a cap and of more updates are those of one site."""
    kind = ONE_SITE if one_site(of) else of.setting
    path = root / kind.replace(" ", "-") / f"features-{part}-{len(facts)}.npy"
    if not path.exists():
        np.save(path, features([each.key for each in facts]))
    return np.asarray(np.load(path))


def corrected(facts: Sequence[Facts], cap: float, rent: float) -> Scores:
    """The correction in closed form, which has no start; it pays rent for the parameters that it stores."""
    metric, share = [], []
    for each in facts:
        host, spent = CorrectedHost(each, cap).corrected()
        x, y = split_of(each, Part.TEST)
        with torch.no_grad():
            metric.append(float((host(x)[:, : each.problem.classes].argmax(-1) == y).float().mean()))
        share.append(spent / sum(parameter.numel() for parameter in host.parameters()))
    value = np.array(metric)[:, None]
    return Scores(value - rent * np.array(share)[:, None], value, np.full_like(value, np.nan))


def scores_of(root: Path, of: Table) -> tuple[list[Facts], dict[str, Scores], str]:
    """Every contender of a table, and the name of the best fixed plan."""
    known, on_training = grown(root, of, "training", of.training, 1)
    facts, plans = grown(root, of, of.part, of.fresh, of.seeds)
    best = max(on_training, key=lambda name: on_training[name].objective.mean())
    x, keys = measured(root, of, of.part, facts), [each.key for each in facts]
    held = Known(facts, x, {})
    found = {"never": plans[NONE.name], FIXED: plans[best], "uniform": plans[UNIFORM.name]}
    seen = views(keys)
    found |= {name: chosen(rule_picks(rule(), seen), plans) for name, rule in RULES.items() if name != "inner-use"}
    shipped = load_forests(SHIPPED, FEATURES)
    found["tree"] = chosen(picked(dict(shipped.models), held, shipped.features), plans)
    if of.fits:
        training = Known(
            known, measured(root, of, "training", known), {n: own.objective[:, 0] for n, own in on_training.items()}
        )
        every = np.ones(len(known), bool)
        for name, columns in ((FITTED, FEATURES), (TAUGHT, TAUGHT_FEATURES)):
            models = {plan: forest_of(model) for plan, model in fitted(training, columns, every).items()}
            found[name] = chosen(picked(models, held, columns), plans)
        found[OMITTED] = chosen(left_out(training, held), plans)
    listed = {placed.name: plans[placed.name] for placed in PLANS}
    if of.seeds > 1:
        found["oracle"] = oracle(listed)
    else:
        found["best of all"] = chosen([_best(listed, case) for case in range(len(keys))], plans)
    found["closed form (taught)"] = corrected(facts, of.cap, of.rent)
    return facts, found | (static(root, of, keys) if one_site(of) else {}), best


def static(root: Path, of: Table, keys: Sequence[int]) -> dict[str, Scores]:
    """Full fine-tuning and training from scratch, without rent, for as many steps as the seeds have."""
    steps = {name: value for name, value in SETTINGS[of.setting].settings.items() if name == "steps"}
    folder, found = root / ("static-" + of.setting.replace(" ", "-") if steps else "static"), {}
    for name, (build, lr) in STATIC.items():
        settings = {"optimizer": {"lr": lr}} | steps
        runs = [kept(folder, {name: named("never")}, build(), keys, seed, settings)[name] for seed in range(2)]
        own = whole(runs)
        found[name] = own._replace(over_time=np.full_like(own.over_time, np.nan))
    return found


def _best(plans: Mapping[str, Scores], case: int) -> Placed:
    return max(PLANS, key=lambda placed: plans[placed.name].objective[case].mean())


def averaged(found: Mapping[str, Scores], rows: NDArray[np.bool_]) -> dict[str, Scores]:
    """The means over starts (n, 1) of the cases in `rows`."""
    return {name: Scores(*(field[rows].mean(1, keepdims=True) for field in own)) for name, own in found.items()}


def ceiling(part: Mapping[str, Scores]) -> Scores:
    top = part.get("oracle", part.get("best of all"))
    assert top is not None, "a table has one of the two"
    return top


def show(title: str, part: Mapping[str, Scores]) -> None:
    """Print a table of the cases."""
    base = part[FIXED]
    room = (ceiling(part).objective - base.objective).mean()
    print(f"\n**{title}** ({len(base.objective)} cases)\n")
    print(
        "| | J | over the best fixed plan, points [95 %] | share of the headroom | over time |\n|---|---|---|---|---|"
    )
    for name, own in part.items():
        if name == FIXED:
            print(f"| {name} | {own.objective.mean():.3f} | | | |")
            continue
        timed = "" if np.isnan(own.over_time).any() else points(own.over_time, base.over_time)
        gain = (own.objective - base.objective).mean()
        cells = points(own.objective, base.objective), f"{gain / room:.0%}" if gain > 0 else "", timed
        print(f"| {name} | {own.objective.mean():.3f} | {' | '.join(cells)} |")


def share(ours: Scores, base: Scores, top: Scores) -> str:
    found = interval(share_of_headroom, [ours.objective], [base.objective], [top.objective])
    return f"{found.value:.0%} [{found.low:.0%}, {found.high:.0%}]"


def claims(title: str, part: Mapping[str, Scores]) -> None:
    """Print what the first study made one expect beside what the cases show."""
    base, drift, tree = part[FIXED], part["drift (taught)"], part[FITTED]
    rule = max(WITHOUT_INTACT, key=lambda name: part[name].objective.mean())
    taught = f"{share(part[TAUGHT], base, drift)}; {points(part[TAUGHT].objective, drift.objective)} over it"
    lines = {
        f"oracle over the {FIXED} | 6": points(part["oracle"].objective, base.objective),
        f"trees fitted here, over the {FIXED} | 7.9": points(tree.objective, base.objective),
        "over time | 9": points(tree.over_time, base.over_time),
        "best rule, share of the headroom | 70 %": f"`{rule}` {share(part[rule], base, part['oracle'])}",
        "on damage left out of the training | 5": points(part[OMITTED].objective, base.objective),
        "taught trees, share of what `drift` gains | 100 %": taught,
    }
    print(f"\n| {title} (n = {len(base.objective)}) | expected | found [95 %] |\n|---|---|---|")
    for line, cell in lines.items():
        print(f"| {line} | {cell} |")


def side_by_side(parts: Mapping[str, Mapping[str, Scores]]) -> None:
    """Print J of several tables, and the points over the best fixed plan of each."""
    names = list(dict.fromkeys(name for part in parts.values() for name in part))
    print(f"\n| | {' | '.join(parts)} |\n|---|{'---|' * len(parts)}")
    for name in names:
        cells = []
        for part in parts.values():
            own, base = part.get(name), part[FIXED]
            gain = "" if own is None or name == FIXED else f" ({points(own.objective, base.objective)})"
            cells.append("" if own is None else f"{own.objective.mean():.3f}{gain}")
        print(f"| {name} | {' | '.join(cells)} |")


def spread(root: Path) -> None:
    """Print what controllers gain over `uniform` on the first fresh cases of spread damage, grown with one start."""
    facts, names = cases(FIRST["fresh"], 160, True, "spread"), ("uniform", "collapse", "tree")
    keys = [each.key for each in facts]
    found = kept(root / "spread" / "grown", {name: named(name) for name in names}, heal(), keys, 0, SENSED)
    base = found["uniform"].objective[:, None]
    print(f"\nspread: keys {keys[0]} to {keys[-1]}, {len(keys)} cases")
    for name, own in found.items():
        print(f"{name} {own.objective.mean():.3f}, over uniform {points(own.objective[:, None], base)}")


def residual(root: Path, of: Table) -> None:
    """Print the control: hosts with skips, where damage can be repaired anywhere."""
    facts = cases(FIRST[of.part], RESIDUAL, False, of.setting)
    keys, names = [each.key for each in facts], ("uniform", "participation", "tree")
    folder, settings = root / of.setting.replace(" ", "-") / "residual", {**SENSED, **SETTINGS[of.setting].settings}
    by_name = {name: named(name) for name in names}
    runs = [kept(folder, by_name, heal(), keys, seed, settings) for seed in range(of.seeds)]
    found = {name: whole([run[name] for run in runs]) for name in names}
    print(f"\n{len(keys)} residual cases, keys {keys[0]} to {keys[-1]}")
    for name, own in found.items():
        print(f"{name} {own.objective.mean():.3f}, over uniform {points(own.objective, found['uniform'].objective)}")


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
        facts, found, best = scores_of(options.folder, TABLES[title])
        keys = [each.key for each in facts]
        print(
            f"\n{title}: keys {keys[0]} to {keys[-1]}, {len({each.number for each in facts})} hosts; best fixed plan: {best}"
        )
        kinds = np.array([each.damage.kind for each in facts])
        rows = {"": np.ones(len(facts), bool), ", damage of weights": ~np.isin(kinds, OF_DATA)}
        rows |= {CUT_TITLE: np.isin(kinds, CUT)} if TABLES[title].fits else {}
        rows |= {ADDED_TITLE: np.arange(len(facts)) >= TABLES[title].earlier} if TABLES[title].earlier else {}
        for suffix, chosen_rows in rows.items():
            parts[title + suffix] = averaged(found, chosen_rows)
            show(title + suffix, parts[title + suffix])
            if TABLES[title].fits and suffix in ("", CUT_TITLE, ADDED_TITLE):
                claims(title + suffix, parts[title + suffix])
        by_damage(found, kinds)
        if TABLES[title].part == "further":
            residual(options.folder, TABLES[title])
    side_by_side({title: parts[title] for title in options.tables})


if __name__ == "__main__":
    main()
