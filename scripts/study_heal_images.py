"""What placing seeds by sensors is worth on `heal-images`: the table of scripts/study_heal.py for convolutional hosts.

    python scripts/collect_healing.py FOLDER/one-site/training --task heal-images --part training --cases 160
    python scripts/collect_healing.py FOLDER/one-site/fresh --task heal-images --part fresh --cases 160 --seeds 2
    python scripts/study_heal_images.py FOLDER
    python scripts/study_heal_images.py FOLDER --setting "cap 3 %"   # of FOLDER/cap-3-%, with the hosts of one site

The cases are held-out keys of plain hosts with one damaged site. Intervals are over hosts, each with all of its cases, because a
host has several. What is missing in FOLDER is grown.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from collect_healing import COLLECTIONS, FIRST, ONE_SITE, SETTINGS, Floats, cases, fixed, kept
from fit_trees import Known, features, fitted, picked, views
from numpy.typing import NDArray
from study_heal import RULES, SEEDS, SENSED, Scores, by_damage, chosen, left_out, rule_picks, whole

from esper.runs.contenders import Contender, named
from esper.tamiyo.forest import forest_of, load_forests
from esper.tamiyo.healing_features import FEATURES, TAUGHT_FEATURES
from esper.tamiyo.plans import NONE, UNIFORM, UNIFORM_2
from esper.tamiyo.trees import SHIPPED
from esper.tasks.heal import heal, heal_scratch, heal_unfrozen
from esper.tasks.healing_images import IMAGES

OWN = COLLECTIONS[IMAGES.name]
BUILDS = {"full fine-tuning": (heal_unfrozen, IMAGES.rates[1]), "from scratch": (heal_scratch, IMAGES.rates[2])}
DRAWS = 4000


def folder_of(root: Path, setting: str) -> Path:
    return root / setting.replace(" ", "-")


def grown(
    folder: Path,
    contenders: Mapping[str, Contender],
    keys: Sequence[int],
    settings: Mapping[str, object],
    seeds: int = SEEDS,
) -> dict[str, Scores]:
    """The figures of contenders on the frozen hosts, of every start."""
    runs = [kept(folder, contenders, heal(IMAGES), keys, seed, settings, OWN.rows) for seed in range(seeds)]
    return {name: whole([run[name] for run in runs]) for name in contenders}


def measured(root: Path, setting: str, part: str, count: int, seeds: int) -> tuple[Known, dict[str, Scores]]:
    """What is known of the cases of a setting, and the figures of every plan. The features are those of one site."""
    facts, path = cases(FIRST[part], count, hosts=IMAGES), folder_of(root, ONE_SITE) / f"features-{part}-{count}.npy"
    keys = [each.key for each in facts]
    if not path.exists():
        np.save(path, features(keys, IMAGES))
    by_plan, settings = {placed.name: fixed(placed) for placed in OWN.plans}, SETTINGS[setting].settings
    plans = grown(folder_of(root, setting) / part, by_plan, keys, settings, seeds)
    return Known(facts, np.load(path), {name: own.objective.mean(1) for name, own in plans.items()}), plans


def static(root: Path, setting: str, keys: Sequence[int]) -> dict[str, Scores]:
    """Full fine-tuning and training from scratch, without rent, for as many steps as the seeds have."""
    steps = {name: value for name, value in SETTINGS[setting].settings.items() if name == "steps"}
    folder, found = folder_of(root, setting if steps else ONE_SITE) / "static", {}
    for name, (build, lr) in BUILDS.items():
        settings, never = {"optimizer": {"lr": lr}} | steps, {name: named("never")}
        runs = [kept(folder, never, build(IMAGES), keys, seed, settings, OWN.rows)[name] for seed in range(SEEDS)]
        found[name] = whole(runs)
    return found


def best_of_all(plans: Mapping[str, Scores]) -> Scores:
    """The best plan for each case by the J of one seed, with the figures of the other."""
    columns = {field: np.stack([getattr(own, field) for own in plans.values()]) for field in Scores._fields}
    best = columns["objective"][..., ::-1].argmax(0)[None]
    return Scores(*(np.take_along_axis(columns[field], best, 0)[0] for field in Scores._fields))


def fits(of: Known, names: Sequence[str], held: Known, plans: Mapping[str, Scores]) -> Scores:
    """The figures of the plans that trees pick which were fitted on the training cases of images."""
    models = fitted(of, names, np.ones(len(of.x), bool))
    return chosen(picked({name: forest_of(model) for name, model in models.items()}, held, names), plans)


def points(ours: Floats, theirs: Floats, host: NDArray[np.int64]) -> str:
    """The mean of a paired difference [points], with 95 % bounds of a bootstrap over hosts."""
    gap = 100 * (ours - theirs).mean(1)
    each = [gap[host == one] for one in np.unique(host)]
    sums, counts = np.array([own.sum() for own in each]), np.array([len(own) for own in each])
    drawn = np.random.default_rng(0).integers(len(each), size=(DRAWS, len(each)))
    low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), [0.025, 0.975])
    return f"{gap.mean():+.1f} [{low:+.1f}, {high:+.1f}]"


def table(scores: Mapping[str, Scores], host: NDArray[np.int64]) -> None:
    """J, accuracy, the paired gains over three plans that read no sensor, and those over time over the first of them."""
    rivals = ("best fixed plan", UNIFORM_2.name, UNIFORM.name)
    heads = [f"over {rival}, points [95 %]" for rival in rivals] + [f"over time, over {rivals[0]}"]
    print(f"\n| | J | accuracy | {' | '.join(heads)} |")
    print("|---|---|---|---|---|---|---|")
    for name, own in scores.items():
        cells = ["" if name == rival else points(own.objective, scores[rival].objective, host) for rival in rivals]
        timeless = name in (rivals[0], *BUILDS)
        cells.append("" if timeless else points(own.over_time, scores[rivals[0]].over_time, host))
        print(f"| {name} | {own.objective.mean():.3f} | {own.metric.mean():.3f} | {' | '.join(cells)} |")


def residual(folder: Path, count: int, settings: Mapping[str, object]) -> None:
    """The control: hosts with skips, where damage can be repaired anywhere."""
    facts = cases(FIRST["fresh"], count, plain=False, hosts=IMAGES)
    keys, host = [each.key for each in facts], np.array([each.number for each in facts])
    found = grown(
        folder, {name: named(name) for name in ("uniform", "participation", "tree")}, keys, {**SENSED, **settings}
    )
    print(f"\n{len(keys)} residual cases from key {keys[0]} on, {len(np.unique(host))} hosts")
    for name, own in found.items():
        print(
            f"{name} {own.objective.mean():.3f} over uniform {points(own.objective, found['uniform'].objective, host)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--setting", choices=["one site", "cap 3 %", "cap 10 %", "160 updates"], default=ONE_SITE)
    parser.add_argument("--cases", type=int, default=160, help="held-out cases")
    parser.add_argument("--training", type=int, default=160, help="training cases")
    parser.add_argument("--residual", type=int, default=20, help="residual cases of the control; 0 for none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root, setting = options.folder, options.setting
    training, _ = measured(root, setting, "training", options.training, 1)
    held, plans = measured(root, setting, "fresh", options.cases, SEEDS)
    keys = [facts.key for facts in held.facts]
    value = {name: own.mean() for name, own in training.objective.items()}
    best = max(value, key=lambda name: value[name])
    print(f"{len(training.x)} training cases: " + ", ".join(f"{name} {mean:.3f}" for name, mean in value.items()))
    print(
        f"{setting}: {len(keys)} cases, keys {keys[0]} to {keys[-1]}, {len(np.unique(held.host))} hosts; best fixed plan: {best}"
    )

    scores = {"never": plans[NONE.name], "best fixed plan": plans[best], "uniform": plans[UNIFORM.name]}
    scores[UNIFORM_2.name] = plans[UNIFORM_2.name]
    seen = views(keys, hosts=IMAGES)
    scores |= {name: chosen(rule_picks(rule(), seen), plans) for name, rule in RULES.items()}
    shipped = load_forests(SHIPPED, FEATURES)
    scores["tree, as shipped"] = chosen(picked(dict(shipped.models), held, shipped.features), plans)
    scores["tree, fitted on images"] = fits(training, FEATURES, held, plans)
    scores["tree, fitted on images (taught)"] = fits(training, TAUGHT_FEATURES, held, plans)
    scores["tree, damage left out"] = chosen(left_out(training, held), plans)
    scores["oracle"] = best_of_all(plans)
    scores |= static(root, setting, keys)
    table(scores, held.host)
    by_damage(scores, np.array([facts.damage.kind.value for facts in held.facts]))
    taught, drift = scores["tree, fitted on images (taught)"], scores["drift (taught)"]
    print(f"taught trees over drift: {points(taught.objective, drift.objective, held.host)}")
    if options.residual:
        residual(folder_of(root, setting) / "residual", options.residual, SETTINGS[setting].settings)


if __name__ == "__main__":
    main()
