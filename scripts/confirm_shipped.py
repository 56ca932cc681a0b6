"""Grow `shipped` with the full menu on held-out instances that no choice was made on, beside rules, plans and static networks.

    python scripts/confirm_shipped.py FOLDER

Populations that FOLDER holds are not grown again. scripts/make_shipped.py puts the figures on the card.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from collect_healing import LAST_BLOCK, MENU
from study_repair import schedule

from esper.leyline.task import Mixture
from esper.runs.contenders import Contender, named
from esper.runs.evaluation import evaluate
from esper.runs.statistics import interval, mean, mean_difference
from esper.tasks import repair, tables

FIRST = 45_056
"""The first held-out instance. No page, study or test had grown instances from here on when it was chosen."""
FULL: Mapping[str, Any] = {"blueprints": list(MENU)}
OURS, RULE, NOTHING = "shipped", "heuristic", "never"
BYPASS = "bypass-linear behind the last block"
NAMES = {
    "skips, sized by never": "the damaged host with an identity skip around every block, nothing grown",
    "plain, sized by never": "a network without the damage, as large as the host, nothing grown",
    "plain, sized by shipped": "a network without the damage, as large as what `shipped` grows",
    RULE: "`heuristic`, the default there",
    BYPASS: "the best fixed plan without `skip-mlp`: `bypass-linear` behind the last block",
    NOTHING: "`never`: the damaged host as it is",
}
"""What `shipped` is compared with, in the order of the card."""


class Source(NamedTuple):
    """A mixture with the full menu, and how many instances are grown."""

    task: Mixture
    instances: int


def sources() -> dict[str, Source]:
    return {"repair": Source(repair.repair_full(), 320), "repair-tables": Source(tables.repair_tables(), 160)}


def bypass() -> Contender:
    slot = f"block{LAST_BLOCK}"
    return schedule(BYPASS, [{"at": 0, "op": "germinate", "blueprint": "bypass-linear", "keep": True, "slot": slot}])


def grown(folder: Path, source: Source, contender: Contender, static: tuple[str, ...]) -> dict[str, Any]:
    """J (N, 1) of a contender, and of static networks of the sizes that it grew."""
    found = evaluate(
        source.task,
        [contender],
        instances=source.instances,
        seeds=1,
        first=FIRST,
        settings=[FULL],
        static=static,
        sized_by=contender.name,
        folder=folder,
        watch=print,
    )
    assert not found.absent, found.absent
    names = [contender.name, *(f"{name}, sized by {contender.name}" for name in found.static)]
    return dict(zip(names, found.figures.objective, strict=True))


def confirmed(folder: Path) -> list[dict[str, Any]]:
    """For each source the keys, the mean J of every network, and what `shipped` gains over each, with 95 % intervals."""
    facts = []
    for name, source in sources().items():
        scores = {}
        for contender, static in (
            (named(OURS)._replace(name=OURS), ("plain",)),
            (named(RULE), ()),
            (named(NOTHING), ("skips", "plain")),
            (bypass(), ()),
        ):
            scores |= grown(folder / name, source, contender, static)
        keys = source.task.keys("heldout")[FIRST : FIRST + source.instances]
        over = {other: interval(mean_difference, [scores[OURS]], [scores[other]]) for other in NAMES}
        facts.append(
            {
                "source": name,
                "keys": [keys[0], keys[-1], len(keys)],
                "objective": {each: round(float(mean([value])), 4) for each, value in scores.items()},
                "over": {other: [round(float(bound), 4) for bound in found] for other, found in over.items()},
            }
        )
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the populations are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for source in confirmed(options.folder):
        print(source["source"], source["keys"])
        for name, (value, low, high) in source["over"].items():
            print(f"  {source['objective'][name]:.4f}  {value:+.4f} [{low:+.4f}, {high:+.4f}]  over {name}")


if __name__ == "__main__":
    main()
