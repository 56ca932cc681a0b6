"""What seeds bring to damaged and frozen transformers for bytes (`heal-bytes`), and what choosing their places brings.

    python scripts/study_heal_bytes.py FOLDER training
    python scripts/study_heal_bytes.py FOLDER heldout
    python scripts/study_heal_bytes.py FOLDER static
    python scripts/study_heal_bytes.py FOLDER table

The first two grow every plan on cases of one part, and the third trains whole networks. All keep what is done in FOLDER, and
`--share 0/2` does one half of it, for two processes. The last grows what is missing and prints the tables: J and bits per byte on
the test split, with paired intervals over cases. A rule that picks one of the plans has the figures of that plan, which were
grown from the same hosts, text and draws.
"""

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from collect_healing import Figures, Floats, concentrated, fixed, kept
from study_heal import Scores, chosen, rule_picks, whole

from esper.leyline.config import build_config
from esper.leyline.task import Mixture
from esper.leyline.view import View
from esper.runs.contenders import Contender, named
from esper.runs.statistics import interval, mean_difference
from esper.tamiyo.placement import Collapse, DriftRise, ParticipationDrop, Placement
from esper.tamiyo.plans import (
    BYPASS,
    FULL_HEAD,
    HERE,
    MIXED,
    NONE,
    SPARSE_HEAD,
    SPARSE_ROWS,
    UNIFORM,
    UNIFORM_8,
    UNIFORM_MLP,
    Placed,
)
from esper.tamiyo.trees import Trees
from esper.tasks.byte_hosts import LAYERS
from esper.tasks.heal import RANGES
from esper.tasks.heal_bytes import (
    DEFAULTS,
    ByteFacts,
    describe,
    heal_bytes,
    heal_bytes_scratch,
    heal_bytes_taught,
    heal_bytes_unfrozen,
)
from esper.tolaria.engine import VectorizedEngine

ROWS = 8
FIRST = {"training": RANGES["training"].start + 4096, "heldout": RANGES["heldout"].start + 40_000}
"""First key of the cases of each part. Settings were chosen on training keys below 64."""
COUNTS = {"training": (24, 1), "heldout": (32, 2)}
"""Cases and starts of each part."""
EMBED, HEAD = 0, LAYERS + 1
PLANS = (
    Placed(NONE),
    Placed(UNIFORM),
    Placed(UNIFORM_8),
    Placed(UNIFORM_MLP),
    *(Placed(plan, slot) for plan in (BYPASS, MIXED) for slot in range(LAYERS + 2)),
    Placed(HERE, HEAD),
    Placed(SPARSE_ROWS, EMBED),
    Placed(SPARSE_HEAD, HEAD),
    Placed(FULL_HEAD, HEAD),
)
RULES: Mapping[str, Callable[[], Placement]] = {
    "participation": ParticipationDrop,
    "collapse": Collapse,
    "drift (taught)": DriftRise,
    "tree": Trees,
}
STATIC: Mapping[str, Callable[[], Mixture]] = {
    "full fine-tuning": heal_bytes_unfrozen,
    "from scratch": heal_bytes_scratch,
}


def cases(part: str) -> list[ByteFacts]:
    """The first cases of a part with one damaged site."""
    found = (facts for key in itertools.count(FIRST[part]) if concentrated(facts := describe(key)))
    return list(itertools.islice(found, COUNTS[part][0]))


def batched(keys: list[int]) -> list[list[int]]:
    return [keys[start : start + ROWS] for start in range(0, len(keys), ROWS)]


def figures(
    folder: Path,
    contenders: Mapping[str, Contender],
    task: Mixture,
    part: str,
    settings: Mapping[str, object],
    share: tuple[int, int] = (0, 1),
) -> dict[str, Scores]:
    """The figures of contenders on the cases of a part, from the folder or grown now, ROWS cases at a time.

    share: (i, n) grows and returns what the i-th of n processes has to do.
    """
    chunks, seeds = batched([facts.key for facts in cases(part)]), range(COUNTS[part][1])
    work = [(seed, chunk) for chunk in range(len(chunks)) for seed in seeds][share[0] :: share[1]]
    done = {(s, c): kept(folder, contenders, task, chunks[c], s, settings) for s, c in work}
    if share[1] > 1:
        return {}
    runs = [
        {
            name: Figures(*map(np.concatenate, zip(*(done[seed, c][name] for c in range(len(chunks))), strict=True)))
            for name in contenders
        }
        for seed in seeds
    ]
    return {name: whole([run[name] for run in runs]) for name in contenders}


def views(part: str) -> list[View]:
    """The views before the first step, with the sensors and the drifts."""
    task, keys = heal_bytes_taught().sealed(), [facts.key for facts in cases(part)]
    found = []
    for chunk in batched(keys):
        settings = {"task": task.name, "envs": len(chunk), "baselines": [], "probe": {"sensors_every": 1000}}
        engine = VectorizedEngine(task, build_config(task.defaults, settings))
        found.append(engine.reset(np.array(chunk), episode=0))
    return found


def oracle(plans: Mapping[str, Scores]) -> Scores:
    """The best plan for each case by the J of one start, with the figures of the other."""
    value = np.stack([own.objective for own in plans.values()])
    best = value[..., ::-1].argmax(0)[None]
    fields = (np.stack([getattr(own, field) for own in plans.values()]) for field in Scores._fields)
    return Scores(*(np.take_along_axis(field, best, 0)[0] for field in fields))


def difference(ours: Floats, theirs: Floats) -> str:
    found = interval(mean_difference, [ours], [theirs])
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def share_of_parameters(own: Scores) -> float:
    """The mean share of the host's parameters that was added, by the definition of J."""
    added: float = np.expm1((own.metric - own.objective) / DEFAULTS["reward"]["rent"]).mean()
    return added


def print_table(scores: Mapping[str, Scores]) -> None:
    """J and bits per byte of every contender, and differences in J; over time is J on the probe split, mean over the steps."""
    base, uniform = scores["best fixed plan"], scores["uniform"]
    columns = [
        "bits per byte",
        "parameters",
        "over the best fixed plan [95 %]",
        "over uniform",
        "over time, over uniform",
    ]
    print(f"\n| | J | {' | '.join(columns)} |\n|---|---|---|---|---|---|---|")
    for name, own in scores.items():
        timed = "" if np.isnan(own.over_time).any() else difference(own.over_time, uniform.over_time)
        cells = (difference(own.objective, other.objective) if own is not other else "" for other in (base, uniform))
        figures = f"{own.objective.mean():.3f} | {-own.metric.mean():.3f} | {share_of_parameters(own):.1%}"
        print(f"| {name} | {figures} | {' | '.join(cells)} | {timed} |")


def print_damage(scores: Mapping[str, Scores], held: Sequence[ByteFacts]) -> None:
    kinds = np.array([facts.damage.kind.value for facts in held])
    print(f"\n| damage | cases | {' | '.join(scores)} |\n|---|---|{'---|' * len(scores)}")
    for kind in np.unique(kinds):
        rows = kinds == kind
        print(
            f"| {kind} | {rows.sum()} | {' | '.join(f'{own.objective[rows].mean():.3f}' for own in scores.values())} |"
        )


def statics(folder: Path, share: tuple[int, int] = (0, 1)) -> dict[str, Scores]:
    """Full fine-tuning and training from scratch, without rent."""
    found = {}
    for name, build in STATIC.items():
        place = folder / "static" / name.replace(" ", "-")
        for own in figures(place, {name: named("never")}, build(), "heldout", {}, share).values():
            found[name] = own._replace(objective=own.metric, over_time=np.full_like(own.over_time, np.nan))
    return found


def report(folder: Path, cap: float) -> None:
    plans = {part: grown(folder, part, cap) for part in COUNTS}
    held = cases("heldout")
    means = {name: float(own.objective.mean()) for name, own in plans["training"].items()}
    best = max(means, key=means.__getitem__)
    sorted_means = ", ".join(f"{name} {means[name]:.3f}" for name in sorted(means, key=means.__getitem__, reverse=True))
    print(f"{len(held)} cases, keys {held[0].key} to {held[-1].key}, cap {cap:g}; on training cases: {sorted_means}")
    scores = {"never": plans["heldout"][NONE.name], "best fixed plan": plans["heldout"][best]}
    scores["uniform"] = plans["heldout"][UNIFORM.name]
    names = {placed.plan.name: placed.name for placed in PLANS if placed.plan in (SPARSE_ROWS, SPARSE_HEAD, FULL_HEAD)}
    scores |= {name: plans["heldout"][placed] for name, placed in names.items()}
    seen = views("heldout")
    scores |= {name: chosen(rule_picks(rule(), seen), plans["heldout"]) for name, rule in RULES.items()}
    scores["oracle"] = oracle(plans["heldout"])
    few = {name: own for name, own in plans["heldout"].items() if name.partition(" at ")[0] in OLDER}
    scores["oracle of the plans of heal"] = oracle(few)
    scores |= statics(folder)
    print(f"best fixed plan: {best}")
    print_table(scores)
    print_damage(scores, held)
    picks = np.stack([own.objective for own in plans["heldout"].values()]).argmax(0).ravel()
    counts = np.bincount(picks, minlength=len(PLANS))
    print(
        "\nthe best plan of a case and start:",
        {PLANS[k].name: int(counts[k]) for k in counts.argsort()[::-1] if counts[k]},
    )


OLDER = (NONE.name, UNIFORM.name, BYPASS.name, MIXED.name, HERE.name)


def grown(folder: Path, part: str, cap: float, share: tuple[int, int] = (0, 1)) -> dict[str, Scores]:
    """The figures of every plan on the cases of a part, where seeds may have a share `cap` of the host's parameters."""
    settings = {"governor": {"param_limit": cap}}
    return figures(folder / f"{part}-{cap:g}", {p.name: fixed(p) for p in PLANS}, heal_bytes(), part, settings, share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", choices=[*COUNTS, "static", "table"])
    parser.add_argument("--cap", type=float, default=0.06, help="largest share of parameters that seeds may have")
    parser.add_argument("--share", default="0/1", help="i/n: do the i-th of n parts of the work, counted from 0")
    options = parser.parse_args()
    torch.set_num_threads(1)
    share = tuple(map(int, options.share.split("/")))
    if options.what == "table":
        report(options.folder, options.cap)
    elif options.what == "static":
        statics(options.folder, share)
    else:
        grown(options.folder, options.what, options.cap, share)


if __name__ == "__main__":
    main()
