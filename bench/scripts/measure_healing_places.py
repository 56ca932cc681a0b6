"""Find where one seed should go in a damaged network: the rule of `esper heal` against the rules and trees of the task `heal`.

    python bench/scripts/measure_healing_places.py FOLDER

The cases are held-out keys of `heal`, plain hosts with one damaged site, with two starts. Every rule names one slot of a case,
and has the figures of the plan that plants the largest bypass there which the budget allows, or the same with a bypass of rank 1
at the other slots. Rules thereby differ in the slot alone. Beside them stand networks without seeds: all weights trained, and
frozen ones that are repaired under the same cap and rent. Figures are J on the test split, and the share of the lost accuracy
that comes back; the accuracy of the intact network is measured on sound data. What is missing in FOLDER is grown.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from collect_healing import SOURCES, Collected, collected, views
from numpy.typing import NDArray
from study_heal import (
    SEEDS,
    Scores,
    chosen,
    difference,
    oracle,
    picks,
    print_opponents,
    repaired_frozen,
    static,
    taken,
)

from esper.leyline.lifecycle.view import View
from esper.runs.healing.heal import ranked
from esper_bench.controllers.placement import Collapse, ParticipationDrop
from esper_bench.controllers.plans import BYPASS, MIXED, NONE, UNIFORM, Plan
from esper_bench.controllers.trees import Trees
from esper_bench.healing.data import Subset
from esper_bench.healing.frozen import sites_of
from esper_bench.healing.heal import DamagedHost, HealCase, split_of, trained_host
from esper_bench.records import run_script

PART, CASES = "places", 96
Slots = NDArray[np.int64]


def by_streams(cases: Sequence[HealCase], taught: bool = False, inner: bool = False) -> Slots:
    """Return the slot (n,) that `esper heal` ranks first, without the intact network or with it.

    inner: rank only slots behind segments that keep the width of the stream, as the rules do.
    """
    found = []
    for facts in cases:
        host = DamagedHost(facts.number, facts.damage, frozen=True, hosts=facts.hosts)()
        sites = sites_of(host)
        intact = trained_host(facts.number, of=facts.hosts) if taught else None
        ranking = ranked(host, sites, split_of(facts, Subset.PROBE).x, intact)
        best = next(place for place in ranking if not inner or place.site != "embed")
        found.append(list(sites).index(best.site))
    return np.array(found)


def by_rule(rule: ParticipationDrop | Collapse, seen: Sequence[View]) -> Slots:
    """Return the slot (n,) that a rule ranks first, whether or not it stands out."""
    rankings = [ranking for view in seen for ranking in rule.ranking(view)]
    return np.array([next(choice.slot for choice in ranking if choice.slot >= 0) for ranking in rankings])


def by_trees(plan: Plan, seen: Sequence[View]) -> Slots:
    """Return the slot (n,) at which the trees that are shipped expect most of a plan."""
    found = []
    for view in seen:
        options, gains = Trees().gains(view)
        at = [index for index, (own, _) in enumerate(options) if own == plan]
        found.append(np.array([options[index][1] for index in at])[gains[:, at].argmax(1)])
    return np.concatenate(found)


def lost(cases: Sequence[HealCase]) -> NDArray[np.float64]:
    """Return the accuracy (n,) of the intact network on the sound test split."""
    found = []
    with torch.no_grad():
        for facts in cases:
            x, y = facts.hosts.examples(facts.problem, Subset.TEST, None)
            output = trained_host(facts.number, of=facts.hosts)(x)[:, : facts.problem.classes]
            found.append(float((output.argmax(-1) == y).double().mean()))
    return np.array(found)


def print_table(scores: Scores, base: str, never: NDArray[np.float64], intact: NDArray[np.float64]) -> None:
    print(f"\n| | J | accuracy | lost accuracy regained | over {base}, points [95 %] |\n|---|---|---|---|---|")
    for name, own in scores.items():
        regained = (own.metric - never).mean() / (intact - never.mean(1)).mean()
        gain = "" if name == base else difference(own.objective, scores[base].objective)
        print(f"| {name} | {own.objective.mean():.3f} | {own.metric.mean():.3f} | {regained:.0%} | {gain} |")


def compare(held: Collected, others: Scores) -> None:
    """Print a table of slots under each of the two plans, and one of what the rules plant of themselves.

    others: figures of networks without seeds.
    """
    seen, plans = views(held.source, held.keys), held.plans
    never, intact = plans[NONE.name].metric, lost(held.facts)
    slots = {"healing_places": by_streams(held.facts)}
    slots["healing_places, inner slots"] = by_streams(held.facts, inner=True)
    slots |= {"participation": by_rule(ParticipationDrop(), seen), "collapse": by_rule(Collapse(), seen)}
    with_intact = by_streams(held.facts, taught=True)
    damaged = np.array([max((*facts.damage.segments, -1)) for facts in held.facts])
    own = {}
    for plan in (BYPASS, MIXED):
        of_plan = slots | {"tree": by_trees(plan, seen), "healing_places, with the intact network": with_intact}
        names = [f"{plan.name} at {slot}" for slot in range(len(seen[0].space.slots))]
        scores = {name: taken(plans, names, slot[:, None]) for name, slot in of_plan.items()}
        scores[f"oracle of {plan.name}"] = oracle(plans, names)
        scores |= {"uniform": plans[UNIFORM.name], "never": plans[NONE.name], **others}
        print(f"\n{plan.name} at the slot of each rule; over healing_places:")
        print_table(scores, "healing_places", never, intact)
        gain = difference(scores["tree"].objective, scores["collapse"].objective)
        print(f"\ntree over collapse: {gain}")
        for name, slot in of_plan.items():
            inside = (damaged >= 0) & (damaged < len(names))
            print(
                f"{name}: {(slot == damaged)[inside].mean():.0%} of {inside.sum()} damaged segments in front of a slot"
            )
        own[f"healing_places, {plan.name}"] = scores["healing_places"]
    own |= {"collapse": chosen(picks(Collapse(), seen), plans), "tree": chosen(picks(Trees(), seen), plans)}
    print(
        "\nwhat the rules plant of themselves, uniform where nothing stands out; over healing_places with mixed plans:"
    )
    print_table(own | {"oracle": oracle(plans)}, f"healing_places, {MIXED.name}", never, intact)
    print(f"\ntree over collapse: {difference(own['tree'].objective, own['collapse'].objective)}")
    print_opponents(others, own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", type=int, default=CASES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    held = collected(options.folder, SOURCES["heal"], PART, options.cases, SEEDS)
    print(f"{options.cases} cases, keys {held.keys[0]} to {held.keys[-1]}, {len(np.unique(held.host))} hosts")
    others = static(options.folder / "static", held.source, held.keys)
    others |= repaired_frozen(options.folder / "frozen", held.source, held.keys)
    compare(held, others)


if __name__ == "__main__":
    run_script(main)
