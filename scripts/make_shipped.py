"""Make a version of the controller `shipped`: collect figures, fit, measure families that are left out, and write the card.

    python scripts/make_shipped.py FOLDER --version 1

What FOLDER/SOURCE/PART holds of scripts/collect_healing.py and FOLDER/confirmed of scripts/confirm_shipped.py is not grown again;
from nothing this takes some hours of one core. `--streams ...` then runs scripts/fit_streams.py, which fits the controller of
streams, with the arguments that follow. The files are written to src/esper/tamiyo/cards and docs/shipped.md.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from collect_healing import SOURCES, Floats, collected, features, kept, views
from confirm_shipped import confirmed
from numpy.typing import NDArray
from shipped_card import card
from sklearn.ensemble import ExtraTreesRegressor
from study_heal import picks

from esper.leyline.view import View
from esper.runs.contenders import named
from esper.runs.statistics import interval, mean_difference
from esper.tamiyo.forest import Forest, Forests, forest_of, save_forests
from esper.tamiyo.healing_features import FEATURES
from esper.tamiyo.placement import Collapse, ParticipationDrop, Placement
from esper.tamiyo.shipped import FOLDER, GROUPS, LARGE, MARGIN, SMALL, Option, choose, options

CASES = {"heal": (480, 320), "repair": (320, 160), "repair-tables": (160, 160)}
"""Training and fresh cases of each source."""
SETTINGS: dict[str, dict[str, Any]] = {
    SMALL: {"n_estimators": 32, "min_samples_leaf": 3, "max_leaf_nodes": 96},
    LARGE: {"n_estimators": 16, "min_samples_leaf": 5, "max_leaf_nodes": 48},
}
DOCS = Path(__file__).parent.parent / "docs" / "shipped.md"
STREAMS = Path(__file__).parent / "fit_streams.py"


class Kind(NamedTuple):
    """A kind of hosts, as the card describes it.

    `needs` are blueprints of the menu, `rule` is what `shipped` is compared with, and `recognised` whether a run can tell such
    hosts from others: it cannot tell a damaged MLP from a sound one.
    """

    group: str
    sources: tuple[str, ...]
    hosts: str
    frozen: bool
    needs: tuple[str, ...]
    rule: str
    rivals: tuple[str, ...]
    recognised: bool


KINDS = (
    Kind(
        SMALL,
        ("heal",),
        "trained, frozen networks of vectors under a small budget",
        True,
        ("bypass-rank-1", "bypass-rank-2", "bypass-rank-4", "low-rank"),
        "participation",
        ("participation", "collapse", "uniform"),
        True,
    ),
    Kind(
        LARGE,
        ("repair", "repair-tables"),
        "untrained, damaged MLPs that train, without skip-mlp in the menu",
        False,
        ("bypass-linear", "bypass-mlp"),
        "heuristic",
        ("heuristic", "best fixed plan"),
        False,
    ),
)


def name_of(option: Option) -> str:
    return option.plan.name if option.slot < 0 else f"{option.plan.name} at {option.slot}"


def axes(source: str, facts: Any) -> dict[str, str]:
    """The families that a case belongs to, by axis."""
    if source == "heal":
        return {"data": facts.problem.family, "damage": facts.damage.kind.value}
    return {"data": facts.family, "damage": facts.damage}


class Cases(NamedTuple):
    """Cases (n,) of a kind: the source and families of each, features (n, S, F), and mean J (n,) by plan or rule."""

    families: Sequence[dict[str, str]]
    x: Floats
    objective: dict[str, Floats]
    keys: dict[str, list[int]]

    def has(self, axis: str, family: str) -> NDArray[np.bool_]:
        return np.array([own[axis] == family for own in self.families])


def cases(folder: Path, kind: Kind, part: str, rules: bool) -> Cases:
    found: list[dict[str, Floats]] = []
    families: list[dict[str, str]] = []
    x, keys = [], {}
    for name in kind.sources:
        source, place = SOURCES[name], folder / name / part
        of = collected(place, source, part, CASES[name][part != "training"], 1)
        keys[name] = [of.keys[0], of.keys[-1], len(of.keys)]
        families += [axes(name, facts) for facts in of.facts]
        x.append(features(of, place / f"features-{part}-{len(of.keys)}.npy")[..., : len(FEATURES)])
        grown = {rule: named(rule) for rule in source.rules if part != "training"}
        every = {**of.plans, **kept(place, grown, source.task(), of.keys, 1)}
        objective = {name: own.objective[:, 0] for name, own in every.items()}
        found.append(
            objective | (placed_by_rules(views(source, of.keys), objective) if source.taught and rules else {})
        )
    joined = {name: np.concatenate([own[name] for own in found]) for name in found[0]}
    return Cases(families, np.concatenate(x), joined, keys)


RULES: dict[str, Callable[[], Placement]] = {"participation": ParticipationDrop, "collapse": Collapse}


def placed_by_rules(seen: Sequence[View], objective: dict[str, Floats]) -> dict[str, Floats]:
    """J of the rules, which plant one of the plans, and under "choice" the index of the plan of `collapse` in the options."""
    known, found = options(SMALL, seen[0].space.width.shape[1]), {}
    for name, rule in RULES.items():
        placed = [Option(*each) for each in picks(rule(), seen)]
        found[name] = np.array([objective[name_of(option)][case] for case, option in enumerate(placed)])
        found[f"choice of {name}"] = np.array([known.index(option) for option in placed])
    return found


def fitted(kind: Kind, of: Cases, rows: NDArray[np.bool_]) -> dict[str, Forest]:
    """For each plan of the group but the first, trees that predict its gain in J over the first from the features of a slot."""
    found, known = {}, options(kind.group, of.x.shape[1])
    base, *others = GROUPS[kind.group]
    for plan in others:
        x, y = [], []
        for option in known:
            if option.plan == plan:
                x.append(of.x[rows][:, option.slot])
                y.append((of.objective[name_of(option)] - of.objective[base.name])[rows])
        model = ExtraTreesRegressor(**SETTINGS[kind.group], max_features=0.5, random_state=0, n_jobs=1)
        found[f"{kind.group}/{plan.name}"] = compact(forest_of(model.fit(np.concatenate(x), np.concatenate(y))))
    return found


def compact(forest: Forest) -> Forest:
    """The same trees in two thirds of the bytes: predictions in half precision, indices in the integers that hold them."""
    assert len(forest.feature) < 2**15, "an index of a node does not fit"
    return forest._replace(
        feature=forest.feature.astype(np.int8),
        left=forest.left.astype(np.int16),
        right=forest.right.astype(np.int16),
        value=forest.value.astype(np.float16),
    )


def planted(kind: Kind, of: Cases, models: dict[str, Forest], margin: float = MARGIN) -> Floats:
    """J (n,) of the plan that the controller chooses for each case."""
    known, rows = options(kind.group, of.x.shape[1]), np.arange(len(of.x))
    expected = [models[f"{kind.group}/{plan.name}"].predict(of.x[:, slot]) for plan, slot in known[1:]]
    gains = np.stack([np.zeros(len(of.x)), *expected], 1)
    if kind.group == SMALL:
        rule = [known[int(index)] for index in of.objective["choice of collapse"]]
        _, best = choose(known, gains, rule, margin)
    else:
        best = gains.argmax(1)
    return np.stack([of.objective[name_of(option)] for option in known], 1)[rows, best]


def left_out(kind: Kind, training: Cases, fresh: Cases, axis: str, margin: float = MARGIN) -> Floats:
    """J (n,) of fresh cases, each by trees that were fitted without its family."""
    found = np.full(len(fresh.x), np.nan)
    for family in sorted({own[axis] for own in fresh.families}):
        rows = fresh.has(axis, family)
        models = fitted(kind, training, ~training.has(axis, family))
        found[rows] = planted(kind, fresh, models, margin)[rows]
    return found


def best_fixed(kind: Kind, training: Cases) -> str:
    """The plan of the largest mean J on the training cases."""
    return max(
        (name_of(option) for option in options(kind.group, training.x.shape[1])),
        key=lambda name: float(training.objective[name].mean()),
    )


def row(name: str, ours: Floats, theirs: Floats, rows: NDArray[np.bool_]) -> dict[str, Any]:
    """The mean gain in J of some cases, with its paired 95 % interval."""
    found = interval(mean_difference, [ours[rows, None]], [theirs[rows, None]])
    values = {"gain": found.value, "low": found.low, "high": found.high}
    return {"name": name, "cases": int(rows.sum()), **{key: round(float(value), 4) for key, value in values.items()}}


def measured(kind: Kind, training: Cases, fresh: Cases, models: dict[str, Forest]) -> dict[str, Any]:
    """What the card says of a kind: gains over the rivals, in all and with each family left out of the training."""
    plan = best_fixed(kind, training)
    fresh.objective["best fixed plan"] = fresh.objective[plan]
    every = np.ones(len(fresh.x), bool)
    ours = planted(kind, fresh, models)
    versions = {"seen": ours} | {axis: left_out(kind, training, fresh, axis) for axis in ("data", "damage")}
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
    known = [name_of(option) for option in options(kind.group, fresh.x.shape[1])]
    best = np.stack([fresh.objective[name] for name in known]).max(0)
    return {
        **{name: getattr(kind, name) for name in ("hosts", "frozen", "needs", "rule", "recognised")},
        "stream": "vector",
        "wins": all(rivals[kind.rule][axis]["low"] > 0 for axis in ("data", "damage")),
        "training": training.keys,
        "fresh": fresh.keys,
        "plans": len(known),
        "best_fixed_plan": plan,
        "objective": {
            name: round(float(value.mean()), 4)
            for name, value in {"shipped": ours, **{r: fresh.objective[r] for r in kind.rivals}, "best": best}.items()
        },
        "rivals": rivals,
        "families": families,
    }


def margins(kind: Kind, training: Cases) -> None:
    """Print, on training cases alone, what other margins bring with a family left out: how MARGIN was chosen."""
    for axis in ("data", "damage"):
        for margin in (0.0, 0.01, 0.02, 0.03, 0.05):
            ours = left_out(kind, training, training, axis, margin)
            found = interval(mean_difference, [ours[:, None]], [training.objective["collapse"][:, None]])
            print(f"{axis} left out, margin {margin}: {100 * found.value:+.2f} points over collapse", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="figures of scripts/collect_healing.py")
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument("--margins", action="store_true", help="print how MARGIN was chosen, and write nothing")
    parser.add_argument(
        "--streams", nargs="*", default=[], help="arguments of scripts/fit_streams.py; without it, it is not run"
    )
    options_ = parser.parse_args()
    torch.set_num_threads(1)
    found = {kind: cases(options_.folder, kind, "training", rules=options_.margins) for kind in KINDS}
    if options_.margins:
        margins(KINDS[0], found[KINDS[0]])
        return
    models: dict[str, Forest] = {}
    facts: dict[str, Any] = {"version": f"shipped-{options_.version}", "margin": MARGIN, "kinds": []}
    for kind, training in found.items():
        own = fitted(kind, training, np.ones(len(training.x), bool))
        fresh = cases(options_.folder, kind, "card", rules=True)
        facts["kinds"].append(measured(kind, training, fresh, own))
        models |= own
    facts["confirmed"] = confirmed(options_.folder / "confirmed")
    write(facts, Forests(tuple(FEATURES), models))
    if options_.streams:
        subprocess.run([sys.executable, str(STREAMS), *options_.streams], check=True)


def write(facts: dict[str, Any], forests: Forests) -> None:
    """The arrays, the facts, and the card."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{facts['version']}.safetensors"
    save_forests(path, forests)
    facts["digest"] = hashlib.sha256(path.read_bytes()).hexdigest()
    facts["bytes"] = path.stat().st_size
    text = card(facts)
    path.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    for place in (path.with_suffix(".md"), DOCS):
        place.write_text(text, encoding="utf-8")
    print(path, facts["bytes"], "bytes,", {kind["hosts"]: kind["wins"] for kind in facts["kinds"]})


if __name__ == "__main__":
    main()
