"""What placing seeds by sensors is worth on `heal`: rules, trees, fixed plans, static networks and an oracle, with intervals.

    python scripts/collect_healing.py FOLDER/training --part training --cases 480
    python scripts/collect_healing.py FOLDER/heldout --part heldout --cases 320 --seeds 2
    python scripts/study_heal.py FOLDER

The cases are held-out keys of plain hosts with one damaged site. Figures are J on the test split. A controller that plants one of
the plans has the figures of that plan, which were grown from the same hosts, data and draws. What is missing in FOLDER is grown.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from collect_healing import EMPTY, FIRST, PLANS, STATIC, Figures, Floats, cases, fixed, kept
from fit_trees import Known, fitted, known, picked, views
from numpy.typing import NDArray

from esper.leyline.view import View
from esper.runs.contenders import Contender, named
from esper.runs.statistics import interval, mean_difference
from esper.tamiyo.forest import forest_of, load_forests
from esper.tamiyo.healing_features import FEATURES, TAUGHT_FEATURES
from esper.tamiyo.placement import Collapse, DriftRise, InnerUse, ParticipationDrop, Placement
from esper.tamiyo.plans import NONE, UNIFORM, Placed
from esper.tamiyo.trees import SHIPPED
from esper.tasks.heal import heal

SEEDS, FITS = 2, 8
SENSED: Mapping[str, object] = {"probe": {"sensors_every": 1000, "coalitions_every": 1000}}
RULES: Mapping[str, Callable[[], Placement]] = {
    "participation": ParticipationDrop,
    "collapse": Collapse,
    "inner-use": InnerUse,
    "drift (taught)": DriftRise,
}


class Scores(NamedTuple):
    """Figures of the cases under one contender, (n, SEEDS) each; `over_time` is absent for static networks."""

    objective: Floats
    metric: Floats
    over_time: Floats


def whole(runs: Sequence[Figures]) -> Scores:
    return Scores(*(np.stack([getattr(run, name) for run in runs], 1) for name in Scores._fields))


def chosen(picks: Sequence[Placed], plans: Mapping[str, Scores]) -> Scores:
    """The figures of the plan that was picked for each case."""
    return Scores(*(np.stack([getattr(plans[p.name], f)[i] for i, p in enumerate(picks)]) for f in Scores._fields))


def oracle(plans: Mapping[str, Scores]) -> Scores:
    """The best plan for each case by the J of one seed, with the figures of the other."""
    names = [placed.name for placed in PLANS]
    value = np.stack([plans[name].objective for name in names])
    best = value[..., ::-1].argmax(0)[None]
    fields = (np.stack([getattr(plans[name], field) for name in names]) for field in Scores._fields)
    return Scores(*(np.take_along_axis(field, best, 0)[0] for field in fields))


def rule_picks(rule: Placement, seen: Sequence[View]) -> list[Placed]:
    found = []
    for view in seen:
        picks = rule.pick(view)
        found += [Placed(plan, slot) for plan, slot in zip(picks.plans, picks.slot.tolist(), strict=True)]
    return found


def left_out(training: Known, held: Known) -> list[Placed]:
    """The picks of trees that were fitted without the kind of damage of each case."""
    kinds = np.array([facts.damage.kind.value for facts in training.facts])
    own = np.array([facts.damage.kind.value for facts in held.facts])
    picks: list[Placed] = [Placed(UNIFORM)] * len(own)
    for kind in np.unique(own):
        models = {name: forest_of(model) for name, model in fitted(training, FEATURES, kinds != kind).items()}
        every = picked(models, held, FEATURES)
        picks = [every[i] if own[i] == kind else pick for i, pick in enumerate(picks)]
    return picks


def refitted(training: Known, held: Known) -> list[list[Placed]]:
    """The picks of trees that were fitted on FITS bootstrap samples of the training hosts."""
    hosts, found = np.unique(training.host), []
    for fit in range(FITS):
        drawn = np.random.default_rng(fit).choice(hosts, len(hosts))
        rows = np.concatenate([np.flatnonzero(training.host == host) for host in drawn])
        sample = training._replace(
            facts=[training.facts[row] for row in rows],
            x=training.x[rows],
            objective={name: value[rows] for name, value in training.objective.items()},
        )
        models = fitted(sample, FEATURES, np.ones(len(rows), bool), fit)
        found.append(picked({name: forest_of(model) for name, model in models.items()}, held, FEATURES))
    return found


def joint(fits: NDArray[np.float64], host: NDArray[np.int64]) -> tuple[float, float]:
    """Bounds of the mean of differences (fits, n), by a bootstrap over trainings and hosts together."""
    random, hosts = np.random.default_rng(0), np.unique(host)
    sums = np.stack([fits[:, host == each].sum(1) for each in hosts], 1)
    counts = np.array([(host == each).sum() for each in hosts])
    means = []
    for _ in range(2000):
        which, rows = random.integers(len(fits), size=len(fits)), random.integers(len(hosts), size=len(hosts))
        means.append(sums[which][:, rows].mean(0).sum() / counts[rows].sum())
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def points(ours: Floats, theirs: Floats) -> str:
    found = interval(mean_difference, [ours], [theirs])
    return f"{100 * found.value:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def table(scores: Mapping[str, Scores], reference: str, rival: str) -> None:
    base, other = scores[reference], scores[rival]
    room = (scores["oracle"].objective - base.objective).mean()
    columns = [
        f"over {reference}, points [95 %]",
        "share of the headroom",
        f"over {rival}",
        f"over time, over {reference}",
    ]
    print(f"\n| | J | accuracy | {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|")
    for name, own in scores.items():
        share = f"{(own.objective - base.objective).mean() / room:.0%}"
        timed = "" if np.isnan(own.over_time).any() else points(own.over_time, base.over_time)
        cells = points(own.objective, base.objective), share, points(own.objective, other.objective), timed
        print(f"| {name} | {own.objective.mean():.3f} | {own.metric.mean():.3f} | {' | '.join(cells)} |")


def by_damage(scores: Mapping[str, Scores], kinds: NDArray[np.str_]) -> None:
    print(f"\n| damage | cases | {' | '.join(scores)} |\n|---|---|{'---|' * len(scores)}")
    for kind in np.unique(kinds):
        rows = kinds == kind
        cells = " | ".join(f"{own.objective[rows].mean():.3f}" for own in scores.values())
        print(f"| {kind} | {rows.sum()} | {cells} |")


def static(folder: Path, keys: Sequence[int]) -> dict[str, Scores]:
    """Full fine-tuning and training from scratch, without rent."""
    found = {}
    for name, (build, lr) in STATIC.items():
        settings = {"optimizer": {"lr": lr}}
        runs = [kept(folder, {name: named("never")}, build(), keys, seed, settings)[name] for seed in range(SEEDS)]
        own = whole(runs)
        found[name] = own._replace(over_time=np.full_like(own.over_time, np.nan))
    return found


def grown_with(
    folder: Path, contenders: Sequence[Contender], keys: Sequence[int], settings: Mapping[str, Any]
) -> dict[str, Scores]:
    by_name = {contender.name: contender for contender in contenders}
    runs = [kept(folder, by_name, heal(), keys, seed, settings) for seed in range(SEEDS)]
    return {name: whole([run[name] for run in runs]) for name in by_name}


def residual(folder: Path, count: int) -> None:
    """The control: hosts with skips, where damage can be repaired anywhere."""
    keys = [facts.key for facts in cases(FIRST["heldout"], count, plain=False)]
    names = ("uniform", "tree", "participation")
    found = grown_with(folder, [named(name) for name in names], keys, SENSED)
    print(f"\n{len(keys)} residual cases from key {keys[0]} on")
    for name, own in found.items():
        print(f"{name} {own.objective.mean():.3f} over uniform {points(own.objective, found['uniform'].objective)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", type=int, default=320, help="held-out cases")
    parser.add_argument("--training", type=int, default=480, help="training cases")
    parser.add_argument("--residual", type=int, default=64, help="residual cases of the control; 0 for none")
    parser.add_argument("--no-static", action="store_true", help="leave full fine-tuning and training from scratch out")
    parser.add_argument("--no-heuristic", action="store_true", help="leave the rule `heuristic` out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    training = known(options.folder / "training", "training", options.training, 1)
    held = known(options.folder / "heldout", "heldout", options.cases, SEEDS)
    keys = [facts.key for facts in held.facts]
    by_plan = {placed.name: fixed(placed) for placed in PLANS}
    runs = [kept(options.folder / "heldout", by_plan, heal(), keys, seed) for seed in range(SEEDS)]
    plans = {name: whole([run[name] for run in runs]) for name in by_plan}
    best = max(by_plan, key=lambda name: training.objective[name].mean())
    print(
        f"{len(keys)} cases, keys {keys[0]} to {keys[-1]}, {len(np.unique(held.host))} hosts; best fixed plan on training: {best}"
    )

    scores = {"never": plans[NONE.name], "best fixed plan": plans[best]}
    seen = views(keys)
    scores |= {name: chosen(rule_picks(rule(), seen), plans) for name, rule in RULES.items()}
    shipped = load_forests(SHIPPED, FEATURES)
    scores["tree"] = chosen(picked(dict(shipped.models), held, shipped.features), plans)
    every = np.ones(len(training.x), bool)
    models = {name: forest_of(model) for name, model in fitted(training, TAUGHT_FEATURES, every).items()}
    scores["tree (taught)"] = chosen(picked(models, held, TAUGHT_FEATURES), plans)
    scores["tree, damage left out"] = chosen(left_out(training, held), plans)
    scores["oracle"] = oracle(plans)
    fits = np.stack([chosen(picks, plans).objective.mean(1) for picks in refitted(training, held)])
    gain = fits - scores["best fixed plan"].objective.mean(1)
    low, high = joint(gain, held.host)
    print(
        f"trees of {FITS} bootstrap samples of the training hosts over the best fixed plan: {100 * gain.mean():+.1f} "
        f"[{100 * low:+.1f}, {100 * high:+.1f}], over trainings and hosts together"
    )
    if not options.no_heuristic:
        scores |= grown_with(options.folder / "heuristic", [named("heuristic")], keys, EMPTY)
    if not options.no_static:
        scores |= static(options.folder / "static", keys)
    table(scores, "best fixed plan", "participation")
    by_damage(scores, np.array([facts.damage.kind.value for facts in held.facts]))
    for name in STATIC if not options.no_static else ():
        print(f"tree over {name}: {points(scores['tree'].objective, scores[name].objective)}")
    if options.residual:
        residual(options.folder / "residual", options.residual)


if __name__ == "__main__":
    main()
