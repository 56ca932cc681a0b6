"""Measure what placing seeds by sensors is worth: rules, trees, fixed plans, static networks and an oracle, with intervals.

    python bench/scripts/study_heal.py FOLDER
    python bench/scripts/study_heal.py FOLDER --part other --residual 0   # kinds of damage that nothing was chosen on
    python bench/scripts/study_heal.py FOLDER --task heal-images
    python bench/scripts/study_heal.py FOLDER --task heal-full
    python bench/scripts/study_heal.py FOLDER --task heal-images --setting "cap 3 %"   # of FOLDER/cap-3-%
    python bench/scripts/study_heal.py FOLDER --task heal-bytes

The cases are held-out keys of plain hosts with one damaged site. Figures are J on the test split. A controller that plants one of
the plans has the figures of that plan, which were grown from the same hosts, data and draws. What is missing in FOLDER is grown.
Networks that are repaired without seeds stand beside them: all weights trained, and frozen ones under the same cap and rent.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from collect_healing import (
    BYTES,
    EMPTY,
    FIRST,
    FOUND,
    ONE_SITE,
    PLANS,
    SENSED,
    SETTINGS,
    SOURCES,
    Collected,
    Figures,
    Floats,
    Source,
    collected,
    features,
    fixed,
    frozen,
    kept,
    views,
)
from fit_trees import best_grown, fitted, left_out, refitted
from numpy.typing import NDArray
from scipy.special import stdtrit  # type: ignore[import-untyped]

from esper.leyline.lifecycle.view import View
from esper.runs.evaluation.contenders import named
from esper.runs.evaluation.statistics import DRAWS, interval, mean_difference
from esper_bench.controllers.healing_features import FEATURES, TAUGHT_FEATURES
from esper_bench.controllers.placement import Collapse, DriftRise, InnerUse, ParticipationDrop, Placement
from esper_bench.controllers.plans import FULL_HEAD, NONE, SPARSE_HEAD, SPARSE_ROWS, UNIFORM, UNIFORM_2, Placed
from esper_bench.controllers.trees import Trees
from esper_bench.evaluation.rivals import best_by_others
from esper_bench.records import run_script

SEEDS, FITS = 2, 8
RULES: Mapping[str, Callable[[], Placement]] = {
    "participation": ParticipationDrop,
    "collapse": Collapse,
    "inner-use": InnerUse,
    "drift (taught)": DriftRise,
}
BEST, ORACLE, LEFT_OUT = "best fixed plan", "oracle", "tree, damage left out"
SEARCHED = "fixed plan of the search in two stages"
FULL_TREE = "tree, fitted on the full menu"
WITHOUT_INTACT = ("participation", "collapse")
"""Rules that read no intact network."""
Scores = Mapping[str, Figures]


class Study(NamedTuple):
    """Describes what is shown of a task.

    Attributes:
        part (str): the part of the held-out cases, whose folder has its name
        cases, training, residual (ints): numbers of held-out, training and residual cases
        shown (plans): fixed plans with a row of their own
        rules (names): of RULES
        shipped (str): the row of the shipped trees
        fits (mapping): features of trees that are fitted on the training cases, by their row
        rivals (names): the rows that the others are compared with
        timed (str or None): the row with which J over time is compared
        headroom (bool): whether the share of what the oracle gains is shown
        by_host (bool): whether intervals draw hosts, each with all of its cases; otherwise cases
        unit (float): J in the unit of differences: 100 for points
        heuristic (bool): whether the rule `heuristic` is grown
        earlier (ints): numbers of first cases that were printed before; those after each of them are printed alone as well
        few_hosts (bool): whether differences are printed for each host as well, and with bounds that draw hosts
        within (plans): plans of an oracle of their own; empty for none
        searched (plan or None): the plan that `esper eval` found with its search in two stages, with a row of its own
        frozen (bool): whether frozen networks are repaired without seeds as well
    """

    part: str
    cases: int
    training: int
    rivals: Sequence[str]
    residual: int = 0
    shown: Sequence[str] = ()
    rules: Sequence[str] = tuple(RULES)
    shipped: str = "tree"
    fits: Mapping[str, Sequence[str]] = EMPTY
    timed: str | None = None
    headroom: bool = False
    by_host: bool = False
    unit: float = 100
    heuristic: bool = False
    earlier: Sequence[int] = ()
    few_hosts: bool = False
    within: Sequence[Placed] = ()
    searched: Placed | None = None
    frozen: bool = False


STUDIES: Mapping[str, Study] = {
    "heal": Study(
        "final",
        96,
        96,
        (BEST, "participation", "collapse"),
        residual=32,
        timed=BEST,
        headroom=True,
        heuristic=True,
        frozen=True,
    ),
    "heal-images": Study(
        "final",
        80,
        40,
        (BEST, UNIFORM_2.name, UNIFORM.name),
        residual=20,
        shown=(UNIFORM.name, UNIFORM_2.name),
        shipped="tree, as shipped",
        fits={
            "tree, fitted on images": FEATURES,
            "tree, fitted on images (taught)": TAUGHT_FEATURES,
            LEFT_OUT: FEATURES,
        },
        timed=BEST,
        by_host=True,
        frozen=True,
    ),
    "heal-bytes": Study(
        "heldout",
        48,
        24,
        (BEST, UNIFORM.name),
        shown=(UNIFORM.name, *(plan.name for plan in (SPARSE_ROWS, SPARSE_HEAD, FULL_HEAD))),
        rules=("participation", "collapse", "drift (taught)"),
        timed=UNIFORM.name,
        unit=1,
        earlier=(32,),
        few_hosts=True,
        within=BYTES,
    ),
    "heal-full": Study(
        "final",
        96,
        80,
        (BEST, UNIFORM.name),
        shown=(UNIFORM.name,),
        rules=("participation", "collapse", "drift (taught)"),
        shipped="tree, as shipped",
        fits={FULL_TREE: FEATURES, f"{FULL_TREE} (taught)": TAUGHT_FEATURES, LEFT_OUT: FEATURES},
        timed=BEST,
        headroom=True,
        within=PLANS,
        searched=FOUND,
    ),
}


def place(root: Path, setting: str) -> Path:
    """Return the folder of a setting. Features are kept in that of ONE_SITE, for every setting with its cases."""
    return root / setting.replace(" ", "-")


def picks(rule: Placement, seen: Sequence[View]) -> list[Placed]:
    """Return the plan that a rule picks for each case."""
    found = []
    for view in seen:
        own = rule.pick(view)
        slots = own.slot.reshape(len(own.plans), -1).tolist()
        found += [
            Placed(plan, slot, tuple(more for more in further if more >= 0))
            for plan, (slot, *further) in zip(own.plans, slots, strict=True)
        ]
    return found


def taken(plans: Scores, names: Sequence[str], which: NDArray[np.int64]) -> Figures:
    """Return the figures of the plan that is the index (n, seeds) or (n, 1) in `names`."""
    columns = (np.stack([getattr(plans[name], field) for name in names]) for field in Figures._fields)
    return Figures(*(np.take_along_axis(column, which[None], 0)[0] for column in columns))


def chosen(placed: Sequence[Placed], plans: Scores) -> Figures:
    """Return the figures of the plan that was picked for each case."""
    names = list(plans)
    return taken(plans, names, np.array([[names.index(each.name)] for each in placed]))


def oracle(plans: Scores, names: Sequence[str] | None = None) -> Figures:
    """Choose the best plan for each case by the J of one seed, and return the figures of the other."""
    names = list(names or plans)
    return taken(plans, names, best_by_others(np.stack([plans[name].objective for name in names])))


def fit(
    row: str, names: Sequence[str], training: Collected, x: Floats, held: Collected, seen: Sequence[View]
) -> Figures:
    """Return the figures of the plans that trees pick which were fitted on the training cases."""
    if row == LEFT_OUT:
        return chosen(left_out(training, x, held, seen), held.plans)
    return chosen(best_grown(Trees(fitted(training, x, names)), seen, held.plans), held.plans)


def joint(gain: Floats, host: NDArray[np.int64], draws: int = DRAWS) -> tuple[float, float]:
    """Return bounds of the mean of differences (trainings, n), by a bootstrap over trainings and hosts together.

    `runs.statistics.interval` draws cases. Here a host is drawn with all of its cases, which are not independent.
    """
    random, hosts = np.random.default_rng(0), np.unique(host)
    sums = np.stack([gain[:, host == each].sum(1) for each in hosts], 1)
    counts = np.array([(host == each).sum() for each in hosts])
    means = []
    for _ in range(draws):
        which, rows = random.integers(len(gain), size=len(gain)), random.integers(len(hosts), size=len(hosts))
        means.append(sums[which][:, rows].mean(0).sum() / counts[rows].sum())
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def nested(gain: Floats, host: NDArray[np.int64], draws: int = 2 * DRAWS) -> tuple[float, float]:
    """Return bounds of the mean of differences (n,), by a bootstrap that draws hosts, and cases of each host that was drawn."""
    random, own = np.random.default_rng(0), [gain[host == each] for each in np.unique(host)]
    means = []
    for _ in range(draws):
        drawn = [own[which] for which in random.integers(len(own), size=len(own))]
        means.append(np.concatenate([random.choice(cases, len(cases)) for cases in drawn]).mean())
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def signed(value: float, low: float, high: float, unit: float = 100) -> str:
    """Format a difference in J with its bounds, in points or in another unit."""
    digits = 1 if unit == 100 else 3
    return f"{unit * value:+.{digits}f} [{unit * low:+.{digits}f}, {unit * high:+.{digits}f}]"


def difference(ours: Floats, theirs: Floats, host: NDArray[np.int64] | None = None, unit: float = 100) -> str:
    """Format the mean of paired differences (n, seeds), with bounds over cases, or over hosts where they are given."""
    if host is None:
        return signed(*interval(mean_difference, [ours], [theirs]), unit)
    return signed((ours - theirs).mean(), *joint((ours - theirs).mean(1)[None], host, 2 * DRAWS), unit)


def print_table(of: Study, scores: Scores, held: Collected) -> None:
    """Print J, the metric, and paired differences; J over time is on the probe split, mean over the steps."""
    base, room = scores[BEST], (scores[ORACLE].objective - scores[BEST].objective).mean()
    host, points = held.host if of.by_host else None, ", points" if of.unit == 100 else ""
    heads = ["accuracy"] if points else ["bits per byte", "parameters"]
    first, *others = of.rivals
    heads += [f"over {first}{points} [95 %]", *["share of the headroom"] * of.headroom]
    heads += [*(f"over {rival}" for rival in others), *([f"over time, over {of.timed}"] if of.timed else [])]
    print(f"\n| | J | {' | '.join(heads)} |\n|---|---|{'---|' * len(heads)}")
    for name, own in scores.items():
        cells = [f"{own.objective.mean():.3f}", f"{abs(own.metric.mean()):.3f}"]
        cells += [] if points else [f"{own.added.mean():.1%}"]
        for rival in of.rivals:
            theirs = scores[rival].objective
            cells.append("" if name == rival else difference(own.objective, theirs, host, of.unit))
            if of.headroom and rival == first:
                cells.append(f"{(own.objective - base.objective).mean() / room:.0%}")
        if of.timed:
            timed = not np.isnan(own.over_time).any()
            theirs = scores[of.timed].over_time
            cells.append(difference(own.over_time, theirs, host, of.unit) if timed and name != of.timed else "")
        print(f"| {name} | {' | '.join(cells)} |")


def after(count: int, scores: Scores, held: Collected) -> tuple[Scores, Collected]:
    """Return the figures of the cases after the first ones."""
    added = {name: Figures(*(field[count:] for field in own)) for name, own in scores.items()}
    return added, held._replace(facts=held.facts[count:])


def print_damage(scores: Scores, kinds: NDArray[np.str_]) -> None:
    print(f"\n| damage | cases | {' | '.join(scores)} |\n|---|---|{'---|' * len(scores)}")
    for kind in np.unique(kinds):
        rows = kinds == kind
        cells = " | ".join(f"{own.objective[rows].mean():.3f}" for own in scores.values())
        print(f"| {kind} | {rows.sum()} | {cells} |")


def print_opponents(others: Scores, ours: Scores, host: NDArray[np.int64] | None = None, unit: float = 100) -> None:
    """Print what controllers gain over networks that have no seeds."""
    heads = " | ".join(f"`{name}` gains" for name in ours)
    print(f"\n| without seeds | J | accuracy | parameters | {heads} |\n|---|---|---|---|{'---|' * len(ours)}")
    for name, own in others.items():
        cells = [f"{own.objective.mean():.3f}", f"{abs(own.metric.mean()):.3f}", f"{own.added.mean():.1%}"]
        cells += [difference(each.objective, own.objective, host, unit) for each in ours.values()]
        print(f"| {name} | {' | '.join(cells)} |")


def repaired_frozen(folder: Path, source: Source, keys: Sequence[int], setting: str = ONE_SITE) -> dict[str, Figures]:
    """Return the figures of frozen networks that are repaired without seeds, under the cap and the rent of a setting. Those of
    one start stand for those of SEEDS.
    """
    limits = {**source.task().defaults, **SETTINGS[setting].settings}
    found = frozen(folder, source, keys, limits["governor"]["param_limit"], limits["reward"]["rent"])
    return {name: Figures(*(np.repeat(field, SEEDS, 1) for field in own)) for name, own in found.items()}


def print_hosts(of: Study, scores: Scores, held: Collected) -> None:
    """Print differences for each host, and with bounds that draw hosts or take the mean of a host as one observation."""
    hosts, base = np.unique(held.host), scores[BEST].objective
    heads = [f"host {each}, {(held.host == each).sum()} cases" for each in hosts]
    print(f"\n| over the {BEST} | cases drawn | hosts and cases drawn | Student's t over hosts | {' | '.join(heads)} |")
    print(f"|---|---|---|---|{'---|' * len(heads)}")
    for name in (name for name in scores if name != BEST):
        gain = (scores[name].objective - base).mean(1)
        means = np.array([gain[held.host == each].mean() for each in hosts])
        half = stdtrit(len(means) - 1, 0.975) * means.std(ddof=1) / len(means) ** 0.5
        cells = [difference(scores[name].objective, base, None, of.unit)]
        cells += [signed(gain.mean(), *nested(gain, held.host), of.unit)]
        cells += [signed(means.mean(), means.mean() - half, means.mean() + half, of.unit)]
        print(f"| {name} | {' | '.join([*cells, *(f'{of.unit * mean:+.3f}' for mean in means)])} |")


def static(folder: Path, source: Source, keys: Sequence[int], setting: str = ONE_SITE) -> dict[str, Figures]:
    """Return the figures of full fine-tuning and training from scratch, without rent, at the learning rates of their tasks and
    for as many steps as the seeds of a setting have.
    """
    found, steps = {}, {name: value for name, value in SETTINGS[setting].settings.items() if name == "steps"}
    for name, build in source.static.items():
        own = kept(folder, {name: named("never")}, build(), keys, SEEDS, steps, source.rows * source.together)[name]
        found[name] = own._replace(over_time=np.full_like(own.over_time, np.nan))
    return found


def print_residual(
    folder: Path, source: Source, part: str, count: int, setting: str, seeds: int = SEEDS, by_host: bool = False
) -> None:
    """Print the control: hosts with skips, where damage can be repaired anywhere."""
    facts = source.cases(part, count, setting, plain=False)
    keys, host = [each.key for each in facts], np.array([each.number for each in facts])
    rules = {name: named(name) for name in ("uniform", "participation", "tree")}
    settings = {**SENSED, **SETTINGS[setting].settings}
    found = kept(folder, rules, source.task(), keys, seeds, settings, source.rows)
    print(f"\n{len(keys)} residual cases, keys {keys[0]} to {keys[-1]}, {len(np.unique(host))} hosts")
    for name, own in found.items():
        gain = difference(own.objective, found["uniform"].objective, host if by_host else None)
        print(f"{name} {own.objective.mean():.3f}, over uniform {gain}")


def print_trainings(training: Collected, x: Floats, held: Collected, seen: Sequence[View]) -> None:
    """Print what trees of several trainings gain."""
    fits = np.stack([chosen(own, held.plans).objective.mean(1) for own in refitted(training, x, held, seen, FITS)])
    gain = fits - held.plans[training.best()].objective.mean(1)
    print(
        f"trees of {FITS} bootstrap samples of the training hosts over the best fixed plan: "
        f"{signed(gain.mean(), *joint(gain, held.host))}, over trainings and hosts together"
    )


def contenders(
    of: Study, root: Path, setting: str, training: Collected, held: Collected, seen: Sequence[View]
) -> dict[str, Figures]:
    """Return the figures of everything but static networks."""
    plans, source = held.plans, held.source
    scores = {"never": plans[NONE.name], BEST: plans[training.best()]}
    names = {placed.plan.name: placed.name for placed in source.plans}
    scores |= {name: plans[names[name]] for name in of.shown}
    if of.searched:
        there, found, settings = place(root, setting) / of.part, fixed([of.searched]), SETTINGS[setting].settings
        [scores[SEARCHED]] = kept(there, found, source.task(), held.keys, SEEDS, settings, source.rows).values()
    scores |= {name: chosen(picks(RULES[name](), seen), plans) for name in of.rules}
    own, beside = picks(Trees(), seen), place(root, setting) / "tree"
    if all(each.name in plans for each in own):
        scores[of.shipped] = chosen(own, plans)
    else:
        tree, settings = {"tree": named("tree")}, {**SENSED, **SETTINGS[setting].settings}
        scores[of.shipped] = kept(
            beside, tree, source.task(), held.keys, SEEDS, settings, source.rows * source.together
        )["tree"]
    if of.fits:
        x = features(training, place(root, ONE_SITE) / f"features-training-{len(training.facts)}.npz")
        print_trainings(training, x, held, seen)
        scores |= {row: fit(row, names, training, x, held, seen) for row, names in of.fits.items()}
    scores[ORACLE] = oracle(plans)
    if of.within:
        within = [placed.name for placed in of.within if placed.name in plans]
        scores["oracle of the plans of heal"] = oracle(plans, within)
    if of.heuristic:
        rule, settings = {"heuristic": named("heuristic")}, SETTINGS[setting].settings
        scores |= kept(place(root, setting) / "heuristic", rule, source.task(), held.keys, SEEDS, settings, source.rows)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=list(STUDIES), default="heal")
    parser.add_argument("--setting", choices=["one site", "cap 3 %", "cap 10 %", "160 updates"], default=ONE_SITE)
    parser.add_argument("--part", choices=list(FIRST), help="the held-out cases; by default those that the page has")
    parser.add_argument("--cases", type=int, help="held-out cases; by default as many as the page has")
    parser.add_argument("--training", type=int, help="training cases; likewise")
    parser.add_argument("--residual", type=int, help="residual cases of the control; likewise, 0 for none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source, of = SOURCES[options.task], STUDIES[options.task]
    given = {name: getattr(options, name) for name in ("part", "cases", "training", "residual")}
    of = of._replace(**{name: value for name, value in given.items() if value is not None})
    folder = place(options.folder, options.setting)
    training = collected(folder / "training", source, "training", of.training, 1, options.setting)
    held = collected(folder / of.part, source, of.part, of.cases, SEEDS, options.setting)
    means = sorted(training.objective.items(), key=lambda item: -item[1].mean())
    print(f"{of.training} training cases: " + ", ".join(f"{placed.name} {value.mean():.3f}" for placed, value in means))
    print(
        f"{options.setting}: {of.cases} cases, keys {held.keys[0]} to {held.keys[-1]}, {len(np.unique(held.host))} hosts; "
        f"best fixed plan on training: {training.best()}"
    )
    scores = contenders(of, options.folder, options.setting, training, held, views(source, held.keys))
    longer = "steps" in SETTINGS[options.setting].settings
    beside = place(options.folder, options.setting if longer else ONE_SITE) / "static"
    scores |= static(beside, source, held.keys, options.setting)
    print_table(of, scores, held)
    for earlier in (count for count in of.earlier if count < of.cases):
        print(f"\nThe cases after the first {earlier} alone:")
        print_table(of, *after(earlier, scores, held))
    if of.few_hosts:
        print_hosts(of, scores, held)
    host, others = held.host if of.by_host else None, {name: scores[name] for name in source.static}
    if of.frozen:
        others |= repaired_frozen(place(options.folder, options.setting) / "frozen", source, held.keys, options.setting)
    ours = [name for name in (of.shipped, *WITHOUT_INTACT, "drift (taught)") if name in scores]
    print_opponents(others, {name: scores[name] for name in ours}, host, of.unit)
    print_damage({**scores, **others}, held.kind)
    for name in (name for name in of.fits if "taught" in name):
        gain = difference(scores[name].objective, scores["drift (taught)"].objective, host, of.unit)
        print(f"{name} over drift (taught): {gain}")
    best = np.stack([own.objective for own in held.plans.values()]).argmax(0).ravel()
    counts = dict(zip(held.plans, np.bincount(best, minlength=len(held.plans)).tolist(), strict=True))
    print("the best plan of a case and start:", {name: count for name, count in counts.items() if count})
    if of.residual:
        print_residual(folder / "residual", source, of.part, of.residual, options.setting, by_host=of.by_host)


if __name__ == "__main__":
    run_script(main)
