"""Make the latest version of the controller `shipped`: collect, fit, measure families that are left out, and write the card.

    python bench/scripts/make_shipped.py FOLDER
    python bench/scripts/make_shipped.py FOLDER --full-menu   # measures the cases with the full menu alone, and fits nothing

What FOLDER/SOURCE/PART holds of collect_healing.py and FOLDER/confirmed of confirm_shipped.py is not grown again; from nothing
this takes half an hour of one core. `--streams ...` then runs bench/scripts/fit_streams.py, which fits the controller of
streams, with the arguments that follow. The files are written to bench/src/esper_bench/controllers/cards and to
bench/docs/shipped.md. Those of an earlier version stay as they are; the revision that wrote them makes them again.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import confirm_full_menu as full
import numpy as np
import torch
from collect_healing import LAST_BLOCK, SOURCES, Floats, collected, features, kept, views
from confirm_shipped import (
    BEFORE,
    BYPASS,
    EXPECTED,
    FOUND,
    FULL,
    OURS,
    RULE,
    WAITS,
    Confirmation,
    confirmed,
    sources,
    waited,
    waiting,
)
from numpy.typing import NDArray
from shipped_card import card
from sklearn.ensemble import ExtraTreesRegressor
from study_heal import picks

from esper.leyline.lifecycle.view import View
from esper.runs.evaluation.contenders import named
from esper.runs.evaluation.statistics import interval, mean_difference
from esper_bench.controllers.forest import Forest, Forests, forest_of, save_forests
from esper_bench.controllers.healing_features import FEATURES
from esper_bench.controllers.placement import Collapse, ParticipationDrop, Placement
from esper_bench.controllers.plans import SKIP
from esper_bench.controllers.shipped import FOLDER, GROUPS, LARGE, MARGIN, SMALL, Option, choose, facts_of, options
from esper_bench.records import run_script

VERSION = "shipped-2"
SKIP_AFTER = 2
"""Steps before the skip [steps]: of WAITS the one of the largest mean J on training cases (`--margins`)."""
CASES = {"heal": (480, 320), "repair": (320, 160), "repair-tables": (160, 160)}
"""Training and fresh cases of each source."""
SETTINGS: dict[str, Any] = {"n_estimators": 32, "min_samples_leaf": 3, "max_leaf_nodes": 96}
TRIED: dict[str, Any] = {"n_estimators": 64, "min_samples_leaf": 5, "max_leaf_nodes": 48}
"""Trees that were tried on hosts that train, and are not shipped."""
UNTRAINED = ("repair", "repair-tables")
DOCS = Path(__file__).parent.parent / "docs" / "shipped.md"
STREAMS = Path(__file__).parent / "fit_streams.py"


class Kind(NamedTuple):
    """Describes a kind of hosts for the card.

    `needs` are blueprints of the menu, `rule` is what `shipped` is compared with, and `recognised` whether a run can tell such
    hosts from others.
    """

    hosts: str
    frozen: bool
    needs: tuple[str, ...]
    rule: str
    rivals: tuple[str, ...]
    recognised: bool


HEAL = Kind(
    "trained, frozen networks of vectors under a small budget",
    True,
    ("bypass-rank-1", "bypass-rank-2", "bypass-rank-4", "low-rank"),
    "participation",
    ("participation", "collapse", "uniform"),
    True,
)
TRAIN = Kind(
    "untrained MLPs, four in five of them damaged, with `skip-mlp` in the menu",
    False,
    ("skip-mlp",),
    RULE,
    (RULE, BEFORE, BYPASS),
    False,
)


def name_of(option: Option) -> str:
    return option.plan.name if option.slot < 0 else f"{option.plan.name} at {option.slot}"


def axes(source: str, facts: Any) -> dict[str, str]:
    """Return the families that a case belongs to, by axis."""
    if source == "heal":
        return {"data": facts.problem.family, "damage": facts.damage.kind.value}
    return {"data": facts.family, "damage": facts.damage}


class Cases(NamedTuple):
    """Holds cases (n,) of a kind: source and families of each, features (n, S, F), and mean J (n,) by plan or rule."""

    families: Sequence[dict[str, str]]
    x: Floats
    objective: dict[str, Floats]
    keys: dict[str, list[int]]

    def has(self, axis: str, family: str) -> NDArray[np.bool_]:
        return np.array([own[axis] == family for own in self.families])


def cases(folder: Path, names: Sequence[str], part: str) -> Cases:
    found: list[dict[str, Floats]] = []
    families: list[dict[str, str]] = []
    x, keys = [], {}
    for name in names:
        source, place = SOURCES[name], folder / name / part
        of = collected(place, source, part, CASES[name][part != "training"], 1)
        keys[name] = [of.keys[0], of.keys[-1], len(of.keys)]
        families += [axes(name, facts) for facts in of.facts]
        x.append(features(of, place / f"features-{part}-{len(of.keys)}.npz")[..., : len(FEATURES)])
        grown = kept(place, {rule: named(rule) for rule in source.rules}, source.task(), of.keys, 1)
        if name in UNTRAINED:
            grown |= kept(place, {f"wait {wait}": waiting(wait) for wait in WAITS}, source.task(), of.keys, 1, FULL)
        objective = {name: own.objective[:, 0] for name, own in {**of.plans, **grown}.items()}
        found.append(objective | (placed_by_rules(views(source, of.keys), objective) if source.taught else {}))
    joined = {name: np.concatenate([own[name] for own in found]) for name in found[0]}
    return Cases(families, np.concatenate(x), joined, keys)


RULES: dict[str, Callable[[], Placement]] = {"participation": ParticipationDrop, "collapse": Collapse}


def placed_by_rules(seen: Sequence[View], objective: dict[str, Floats]) -> dict[str, Floats]:
    """Return J of the rules, which plant one of the plans; under "choice of RULE", the index of its plan in the options."""
    known, found = options(SMALL, seen[0].space.width.shape[1]), {}
    for name, rule in RULES.items():
        placed = [Option(each.plan, each.slot) for each in picks(rule(), seen)]
        found[name] = np.array([objective[name_of(option)][case] for case, option in enumerate(placed)])
        found[f"choice of {name}"] = np.array([known.index(option) for option in placed])
    return found


def fitted(of: Cases, rows: NDArray[np.bool_]) -> dict[str, Forest]:
    """Fit, for each plan of SMALL but the first, trees that predict its gain in J over the first from the features of a slot."""
    found, known = {}, options(SMALL, of.x.shape[1])
    base, *others = GROUPS[SMALL]
    for plan in others:
        x, y = [], []
        for option in known:
            if option.plan == plan:
                x.append(of.x[rows][:, option.slot])
                y.append((of.objective[name_of(option)] - of.objective[base.name])[rows])
        model = ExtraTreesRegressor(**SETTINGS, max_features=0.5, random_state=0, n_jobs=1)
        found[f"{SMALL}/{plan.name}"] = compact(forest_of(model.fit(np.concatenate(x), np.concatenate(y))))
    return found


def compact(forest: Forest) -> Forest:
    """Shrink trees to two thirds of the bytes: predictions in half precision, indices in the integers that hold them."""
    assert len(forest.feature) < 2**15, "an index of a node does not fit"
    return forest._replace(
        feature=forest.feature.astype(np.int8),
        left=forest.left.astype(np.int16),
        right=forest.right.astype(np.int16),
        value=forest.value.astype(np.float16),
    )


def planted(of: Cases, models: dict[str, Forest], margin: float = MARGIN) -> Floats:
    """Return J (n,) of the plan that the controller chooses for each case of HEAL."""
    known, rows = options(SMALL, of.x.shape[1]), np.arange(len(of.x))
    expected = [models[f"{SMALL}/{plan.name}"].predict(of.x[:, slot]) for plan, slot in known[1:]]
    gains = np.stack([np.zeros(len(of.x)), *expected], 1)
    rule = [known[int(index)] for index in of.objective["choice of collapse"]]
    _, best = choose(known, gains, rule, margin)
    return np.stack([of.objective[name_of(option)] for option in known], 1)[rows, best]


Choose = Callable[[Cases, NDArray[np.bool_], Cases], Floats]
"""From training cases, which of them (n,) to choose by, and other cases, to J (m,) of what is then grown on those."""


def by_trees(margin: float = MARGIN) -> Choose:
    """Return the choice by the trees of HEAL."""
    return lambda training, rows, fresh: planted(fresh, fitted(training, rows), margin)


def by_wait(training: Cases, rows: NDArray[np.bool_], fresh: Cases) -> Floats:
    """Return J (n,) with the number of steps before a skip that has the largest mean J in training."""
    return fresh.objective[f"wait {best_wait(training, rows)}"]


def best_wait(of: Cases, rows: NDArray[np.bool_]) -> int:
    return max(WAITS, key=lambda wait: float(of.objective[f"wait {wait}"][rows].mean()))


def left_out(chosen: Choose, training: Cases, fresh: Cases, axis: str) -> Floats:
    """Return J (n,) of fresh cases, each by what was chosen on training cases without its family."""
    found = np.full(len(fresh.x), np.nan)
    for family in sorted({own[axis] for own in fresh.families}):
        rows = fresh.has(axis, family)
        found[rows] = chosen(training, ~training.has(axis, family), fresh)[rows]
    return found


def row(name: str, ours: Floats, theirs: Floats, rows: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the mean gain in J of some cases, with its paired 95 % interval."""
    found = interval(mean_difference, [ours[rows, None]], [theirs[rows, None]])
    values = {"gain": found.value, "low": found.low, "high": found.high}
    return {"name": name, "cases": int(rows.sum()), **{key: round(float(value), 4) for key, value in values.items()}}


def measured(kind: Kind, chosen: Choose, training: Cases, fresh: Cases) -> dict[str, Any]:
    """Measure what the card says of a kind: gains over the rivals, in all and with each family left out of the training."""
    every = np.ones(len(fresh.x), bool)
    versions = {"seen": chosen(training, np.ones(len(training.x), bool), fresh)}
    versions |= {axis: left_out(chosen, training, fresh, axis) for axis in ("data", "damage")}
    rivals = {
        rival: {axis: row(axis, own, fresh.objective[rival], every) for axis, own in versions.items()}
        for rival in kind.rivals
    }
    families = {
        axis: [
            row(family, versions[axis], fresh.objective[kind.rule], fresh.has(axis, family))
            for family in sorted({own[axis] for own in fresh.families})
        ]
        for axis in ("data", "damage")
    }
    shown = {OURS: versions["seen"], **{rival: fresh.objective[rival] for rival in kind.rivals}}
    return {
        **{name: getattr(kind, name) for name in ("hosts", "frozen", "needs", "rule", "recognised")},
        "stream": "vector",
        "wins": all(rivals[kind.rule][axis]["low"] > 0 for axis in ("data", "damage")),
        "training": training.keys,
        "fresh": fresh.keys,
        "objective": {name: round(float(value.mean()), 4) for name, value in shown.items()},
        "rivals": rivals,
        "families": families,
    }


def healed(folder: Path, training: Cases) -> dict[str, Any]:
    """Measure the facts of HEAL, with its plans."""
    fresh = cases(folder, ("heal",), "card")
    known = [name_of(option) for option in options(SMALL, fresh.x.shape[1])]
    best = np.stack([fresh.objective[name] for name in known]).max(0)
    facts = measured(HEAL, by_trees(), training, fresh)
    facts["objective"]["best"] = round(float(best.mean()), 4)
    return facts | {
        "plans": len(known),
        "best_fixed_plan": max(known, key=lambda name: training.objective[name].mean()),
    }


def trained(folder: Path, training: Cases, grown: Sequence[Confirmation]) -> dict[str, Any]:
    """Measure the facts of TRAIN, of the fresh instances with the full menu."""
    full = [each for each in grown if each.skip]
    families = [axes(each.source, sources()[each.source].describe(key)) for each in full for key in each.keys]
    objective = {name: np.concatenate([each.scores[name][:, 0] for each in full]) for name in TRAIN.rivals}
    others = [wait for wait in WAITS if wait != SKIP_AFTER]
    objective |= {f"wait {wait}": values for wait, values in waited(folder, others).items()}
    objective[f"wait {SKIP_AFTER}"] = np.concatenate([each.scores[OURS][:, 0] for each in full])
    keys = {each.source: [each.keys[0], each.keys[-1], len(each.keys)] for each in full}
    fresh = Cases(families, np.zeros((len(families), 1, 1)), objective, keys)
    facts = measured(TRAIN, by_wait, training, fresh)
    return facts | {"waits": {str(wait): round(float(training.objective[f"wait {wait}"].mean()), 4) for wait in WAITS}}


def margins(folder: Path, training: Cases) -> None:
    """Print, on training cases alone, how MARGIN and SKIP_AFTER were chosen, and what trees add on hosts that train."""
    every = np.ones(len(training.x), bool)
    for axis in ("data", "damage"):
        for margin in (0.0, 0.01, 0.02, 0.03, 0.05):
            found = row("", left_out(by_trees(margin), training, training, axis), training.objective["collapse"], every)
            print(
                f"heal, {axis} left out, margin {margin}: {100 * found['gain']:+.2f} points over collapse", flush=True
            )
    host = cases(folder, UNTRAINED, "training")
    print({wait: round(float(host.objective[f"wait {wait}"].mean()), 4) for wait in WAITS})
    for margin in (0.0, 0.01, 0.02):
        for menu, rows in tried(host, margin).items():
            for axis, found in rows.items():
                bounds = f"[{100 * found['low']:+.2f}, {100 * found['high']:+.2f}]"
                print(
                    f"{menu} skip-mlp, {axis} left out, margin {margin}: trees add {100 * found['gain']:+.2f} {bounds}"
                )


def tried(of: Cases, margin: float) -> dict[str, dict[str, dict[str, Any]]]:
    """Measure what trees add on training cases to the controller on hosts that train, by menu and by what is left out."""
    every = np.ones(len(of.x), bool)
    menus = {
        "with": (f"wait {SKIP_AFTER}", [Option(SKIP, LAST_BLOCK)]),
        "without": (RULE, options(LARGE, of.x.shape[1])),
    }
    return {
        menu: {
            axis: row(axis, with_trees(of, base, more, axis, margin), of.objective[base], every)
            for axis in ("data", "damage")
        }
        for menu, (base, more) in menus.items()
    }


def with_trees(of: Cases, base: str, more: Sequence[Option], axis: str, margin: float) -> Floats:
    """Return J (n,) where trees, fitted without a case's family, replace `base` by a plan if they expect a margin more of it."""
    objective = np.stack([of.objective[base], *(of.objective[name_of(option)] for option in more)], 1)
    gains = np.zeros_like(objective)
    for family in sorted({own[axis] for own in of.families}):
        rows = of.has(axis, family)
        for at, option in enumerate(more, 1):
            model = ExtraTreesRegressor(**TRIED, max_features=0.5, random_state=0, n_jobs=1)
            x = of.x[:, max(option.slot, 0)]
            gains[rows, at] = model.fit(x[~rows], (objective[:, at] - objective[:, 0])[~rows]).predict(x[rows]) - margin
    return objective[np.arange(len(of.x)), gains.argmax(1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="figures of bench/scripts/collect_healing.py")
    parser.add_argument("--margins", action="store_true", help="print how the numbers were chosen, and write nothing")
    parser.add_argument(
        "--full-menu",
        action="store_true",
        help="measure the cases with the full menu anew, and write the card with all other facts as they are",
    )
    parser.add_argument(
        "--streams", nargs="*", default=[], help="arguments of bench/scripts/fit_streams.py; without it, it is not run"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.full_menu:
        known = {**facts_of(VERSION), "expected_full": full.EXPECTED, "found_full": full.FOUND}
        write_card({**known, "full_menu": full.full_menu(asked.folder / "full-menu")})
        return
    training = cases(asked.folder, ("heal",), "training")
    if asked.margins:
        margins(asked.folder, training)
        return
    place = asked.folder / "confirmed" / VERSION
    grown, host = confirmed(place), cases(asked.folder, UNTRAINED, "training")
    facts = {
        "version": VERSION,
        "margin": MARGIN,
        "skip_after": SKIP_AFTER,
        "several": True,
        "frozen": True,
        "expected": EXPECTED,
        "found": FOUND,
        "tried": tried(host, 0.01),
        "expected_full": full.EXPECTED,
        "found_full": full.FOUND,
        "kinds": [healed(asked.folder, training), trained(place, host, grown)],
        "full_menu": full.full_menu(asked.folder / "full-menu"),
        "confirmed": [each.facts() for each in grown],
    }
    write(facts, Forests(tuple(FEATURES), fitted(training, np.ones(len(training.x), bool))))
    if asked.streams:
        subprocess.run([sys.executable, str(STREAMS), *asked.streams], check=True)


def write(facts: dict[str, Any], forests: Forests) -> None:
    """Write the arrays, the facts, and the card."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{facts['version']}.safetensors"
    save_forests(path, forests)
    facts["digest"] = hashlib.sha256(path.read_bytes()).hexdigest()
    facts["bytes"] = path.stat().st_size
    write_card(facts)
    print(path, facts["bytes"], "bytes,", {kind["hosts"]: kind["wins"] for kind in facts["kinds"]})


def write_card(facts: dict[str, Any]) -> None:
    """Write the facts, and the card."""
    path, text = FOLDER / f"{facts['version']}.json", card(facts)
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    for place in (path.with_suffix(".md"), DOCS):
        place.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
