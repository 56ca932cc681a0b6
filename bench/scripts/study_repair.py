"""Measure what growing `repair` is worth with every blueprint in the menu, beside fixed plans, rules and static networks.

    train    three controllers on `repair-full` by the preset quick, which imitate the heuristic first
    search   the best fixed plan of the menu of `repair` and of that of `repair-full`, on training instances
    grow     all contenders and the static networks on held-out instances that no other study has grown
    tables   print the tables of bench/docs/repair.md

python bench/scripts/study_repair.py PART ... [--out DIR] [--machine WORDS] [--quick]

A training or search that has ended and a population that was grown are kept in --out and not made again. `--quick` does
everything on a few instances, to see that the script runs.
"""

import argparse
import itertools
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.config.tree import build_config
from esper.leyline.lifecycle.view import View, take
from esper.leyline.lifecycle.vocabulary import Actions
from esper.runs.configuration import training_configs
from esper.runs.evaluation.contenders import ROWS, Contender, grow_contender, named
from esper.runs.evaluation.evaluation import Design
from esper.runs.evaluation.statistics import CONFIDENCE, DRAWS
from esper.runs.folder.resume import Opening
from esper.runs.train import train
from esper.store.files import SUMMARY
from esper.tamiyo.rules.base import Rule
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry
from esper.tasks.catalog import get_task
from esper.tolaria.engine import VectorizedEngine
from esper_bench.evaluation.one_task import evaluate
from esper_bench.evaluation.plan_search import probe_objective
from esper_bench.records import load_record, run_script, save_record

Floats = NDArray[np.float64]
Record = dict[str, Any]

REPAIR, FULL = "repair", "repair-full"
SEEDS = (0, 1, 2)
"""Seeds of the trainings."""
SHORT: Mapping[str, Any] = {"ppo": {"rounds": 10, "validate_every": 5}}
"""Settings of the trainings over those of the preset quick."""
FIRST = 4000
"""The first held-out instance."""
SEARCH_SEED = 2**40
"""Run seed of a search, which no evaluation has."""
FEW = 4
"""Training instances on which all plans are grown."""
PERMISSIVE: Mapping[str, Any] = {"gates": {"permissive": True}}

SKIP = "skip-mlp behind the last block"
LAST: list[Record] = [{"at": 0, "op": "germinate", "blueprint": "skip-mlp", "keep": True, "slot": "block3"}]
"""The plan that is named SKIP."""
FIXED = {FULL: "best fixed plan, full menu", REPAIR: "best fixed plan, menu of repair"}
LEARNED = "learned, full menu, all trainings"
PARTS = ("train", "search", "grow", "tables")


class Size(NamedTuple):
    """Sets how large the study is."""

    instances: int  # held-out instances, each from one start
    searches: Mapping[str, tuple[tuple[int, ...], int]]  # by task: steps at which plans may plant, training instances
    settings: Mapping[str, Any]  # config of all that is grown
    training: Mapping[str, Any]  # config of the trainings


WHOLE = Size(200, {REPAIR: ((0, 2), 16), FULL: ((0,), 16)}, {}, {})
QUICK = Size(
    3,
    {REPAIR: ((0,), 1), FULL: ((0,), 1)},
    {"steps": 14, "data": {"batches_per_step": 2}},
    {"envs": 16, "ppo": {"rounds": 1, "imitation_rounds": 1, "validate_envs": 4}},
)


class Row(NamedTuple):
    """Holds the figures of one contender on the held-out instances, (N, R) each; R trainings, or 1."""

    name: str
    objective: Floats
    metric: Floats
    added_params: Floats
    kept: Floats
    seconds: Floats


class Study(NamedTuple):
    """Runs the study of a size, and keeps what was made in a folder."""

    size: Size
    out: Path

    def controller(self, seed: int) -> Path:
        """Run folder of a training."""
        return self.out / f"full-s{seed}"

    def train(self, seed: int) -> None:
        """Train a controller of the full menu, as `esper train repair-full --seed SEED` does with the settings SHORT."""
        folder, task = self.controller(seed), get_task(FULL)
        if (folder / SUMMARY).is_file() and json.loads((folder / SUMMARY).read_text())["status"] == "finished":
            return
        configs = training_configs([task], "quick", SHORT, {"seed": seed, **self.size.settings, **self.size.training})
        print(seed, train([task], configs, folder, opening=Opening(overwrite=True))["status"], flush=True)

    def search(self, task: str) -> Record:
        """Search for the best fixed plan of a menu once, and return it as a record."""
        path, (starts, instances) = self.out / f"search-{task}.json", self.size.searches[task]
        if not path.is_file():
            save_record(path, halving(task, candidates(task, starts), instances, self.size.settings))
        return load_record(path)

    def planned(self, task: str) -> Contender:
        """Return the best fixed plan as a contender."""
        lines = self.search(task)["entries"]
        return schedule(SKIP if lines == LAST else FIXED[task], lines)

    def grow(self, task: str, contender: Contender, static: Sequence[str] = ()) -> list[Row]:
        """Grow a contender and train static networks of the sizes that it grew; return their figures."""
        grown = evaluate(
            get_task(task),
            [contender],
            instances=self.size.instances,
            seeds=1,
            first=FIRST,
            settings=[self.size.settings],
            static=static,
            sized_by=contender.name,
            folder=self.out / "grown",
            watch=print,
        )
        assert not grown.absent, grown.absent
        names = [contender.name, *(f"{name}, sized by {contender.name}" for name in grown.static)]
        return [Row(name, *(figure[at] for figure in grown.figures)) for at, name in enumerate(names)]

    def rows(self) -> list[Row]:
        """Return all contenders: the rules, the plans, the learned controllers apart and together, and the static networks."""
        rules = {"inner-use": FULL, "participation": FULL}
        rows = [
            *self.grow(REPAIR, named("never"), ["plain", "skips"]),
            *self.grow(REPAIR, named("heuristic"), ["same-size"]),
            *(row for rule, task in rules.items() for row in self.grow(task, named(rule))),
            *self.grow(REPAIR, self.planned(REPAIR)),
            *self.grow(FULL, self.planned(FULL), ["same-size", "plain"]),
        ]
        if self.planned(FULL).name != SKIP:
            rows += self.grow(FULL, schedule(SKIP, LAST))
        learned = []
        for seed in SEEDS:
            known = named(str(self.controller(seed)))
            known = known._replace(settings={**known.settings, "controller": f"learned, seed {seed}"})
            learned += self.grow(FULL, known._replace(name=f"learned, full menu, seed {seed}"))
        together = [np.concatenate(figures, 1) for figures in zip(*(row[1:] for row in learned), strict=True)]
        return [*rows, *learned, Row(LEARNED, *together)]


class SideBySide(Rule):
    """Runs several schedules, each for an equal share of the environments."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.schedules = schedules

    def act(self, view: View) -> Actions:
        """Return the decisions of every schedule, which reads masks and seeds alone."""
        each = len(view.masks.op) // len(self.schedules)
        parts = [slice(index * each, (index + 1) * each) for index in range(len(self.schedules))]
        decided = [
            plan.act(view._replace(masks=take(view.masks, own), seeds=take(view.seeds, own)))
            for plan, own in zip(self.schedules, parts, strict=True)
        ]
        return Actions(*map(np.concatenate, zip(*decided, strict=True)))


def schedule(name: str, lines: Sequence[Record]) -> Contender:
    """Return a fixed plan as a contender. Its seeds are kept, whatever they contribute."""
    return Contender(
        name, {"controller": "schedule", **PERMISSIVE}, lambda config: of_lines(lines), json.dumps(list(lines))
    )


def of_lines(lines: Sequence[Record]) -> Schedule:
    """Return the schedule of a file's lines."""
    return Schedule([ScheduleEntry.model_validate(line) for line in lines])


def candidates(task: str, starts: Sequence[int]) -> list[list[Record]]:
    """List all fixed plans: nothing, or one blueprint at one or two slots, from one of the steps on."""
    host = get_task(task)
    slots = VectorizedEngine(host.sealed(), build_config(host.defaults, {"envs": 1, "baselines": []})).space.slots
    plans: list[list[Record]] = [[]]
    for count, at in itertools.product((1, 2), starts):
        for places, blueprint in itertools.product(itertools.combinations(slots, count), host.menu):
            usual = {"at": at, "op": "germinate", "blueprint": blueprint, "keep": True}
            plans.append([{**usual, "slot": slot} for slot in places])
    return plans


def halving(task: str, plans: Sequence[list[Record]], instances: int, settings: Mapping[str, Any]) -> Record:
    """Find the best of some plans by J on the probe split of training instances, by successive halving from FEW instances on."""
    sealed, totals, alive = get_task(task).sealed(), np.zeros(len(plans)), np.arange(len(plans))
    keys, done, episodes = np.array(sealed.keys("training")[:instances]), 0, 0
    while done < instances:
        some = keys[done : max(2 * done, FEW)]
        each = ROWS // min(len(some), ROWS)
        for group, start in itertools.product(
            [alive[at : at + each] for at in range(0, len(alive), each)], range(0, len(some), ROWS)
        ):
            instance = np.tile(some[start : start + ROWS], len(group))
            abreast = Contender(
                "plans", PERMISSIVE, lambda config, group=group: SideBySide([of_lines(plans[i]) for i in group])
            )
            config = Design(sealed, [settings], 1, "training", 0, len(instance)).config(abreast, SEARCH_SEED)
            _, outcome, _ = grow_contender(sealed, abreast, config, instance)
            totals[group] += probe_objective(outcome, config).reshape(len(group), -1).sum(1)
        done, episodes = done + len(some), episodes + len(some) * len(alive)
        alive = alive[np.argsort(-totals[alive], kind="stable")]
        print(
            f"{task}: {len(alive)} plans on {done} instances, {episodes} networks, best {plans[alive[0]]}", flush=True
        )
        best, alive = alive[0], alive[: -(-len(alive) // 2)]
    return {
        "entries": plans[best],
        "objective": totals[best] / done,
        "candidates": len(plans),
        "instances": done,
        "episodes": episodes,
    }


def estimate(ours: Floats, theirs: Floats | float = 0.0, form: str = ".3f") -> str:
    """Format the mean of ours - theirs, (N, R) each, with a bootstrap interval over instances and trainings.

    A sample has instances and trainings that are both drawn with replacement, the same instances for both sides and the same
    trainings for all instances (Owen and Eckles, "Bootstrapping data arrays of arbitrary order", 2012, section 3).
    """
    apart = ours - theirs  # a contender without trainings has one column
    random, (count, trainings) = np.random.default_rng(0), apart.shape
    rows, columns = random.integers(count, size=(DRAWS, count)), random.integers(trainings, size=(DRAWS, trainings))
    drawn = apart[rows[:, :, None], columns[:, None, :]].mean((1, 2))
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return f"{apart.mean():{form}} [{low:{form}}, {high:{form}}]"


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return ["", *("| " + " | ".join(line) + " |" for line in (names, ["---"] * len(names), *rows)), ""]


def tables(study: Study, machine: str) -> str:
    """Return the tables of the page, in Markdown."""
    rows = {row.name: row for row in study.rows()}
    lines = [
        f"`python bench/scripts/study_repair.py {' '.join(PARTS)}`: {machine}, torch {torch.__version__}, one thread."
    ]
    fields = ("rounds_done", "best_round", "best_validation_objective", "seconds")
    facts = [json.loads((study.controller(seed) / SUMMARY).read_text(encoding="utf-8")) for seed in SEEDS]
    lines += table(
        ["seed of the training", "rounds", "best round", "its validation J", "seconds"],
        [[str(seed), *(f"{fact[name]:.4g}" for name in fields)] for seed, fact in zip(SEEDS, facts, strict=True)],
    )
    found = [study.search(task) for task in FIXED]
    lines += table(
        ["search", "plans", "training instances", "networks", "the best plan"],
        [
            [
                task,
                str(record["candidates"]),
                str(record["instances"]),
                str(record["episodes"]),
                ", ".join(
                    f"{each['blueprint']} at {each['slot']} from step {each['at']}" for each in record["entries"]
                ),
            ]
            for task, record in zip(FIXED, found, strict=True)
        ],
    )
    against = {
        "the best fixed plan": rows[study.planned(FULL).name],
        "`heuristic`": rows["heuristic"],
        "the learned": rows[LEARNED],
    }
    lines += table(
        ["network", "J", "accuracy", "parameters added", "seeds kept", *(f"J less that of {name}" for name in against)],
        [
            [
                row.name,
                estimate(row.objective),
                f"{row.metric.mean():.3f}",
                f"{row.added_params.mean():.0f}",
                "" if np.isnan(row.kept).all() else f"{row.kept.mean():.2f}",
                *(
                    "" if row is other else estimate(row.objective, other.objective, "+.3f")
                    for other in against.values()
                ),
            ]
            for row in sorted(rows.values(), key=lambda row: -row.objective.mean())
        ],
    )
    return "\n".join(lines)


def main() -> None:
    """Do the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path("runs/study-repair"), help="where everything is kept")
    parser.add_argument("--machine", default=platform.machine(), help="what it runs on, in words")
    parser.add_argument("--quick", action="store_true", help="a few instances, to see that the script runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    study = Study(QUICK if arguments.quick else WHOLE, arguments.out)
    study.out.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS if "train" in arguments.parts else ():
        study.train(seed)
    for task in FIXED if "search" in arguments.parts else ():
        study.search(task)
    if "grow" in arguments.parts:
        study.rows()
    if "tables" in arguments.parts:
        print(tables(study, arguments.machine))


if __name__ == "__main__":
    run_script(main)
