"""What growing is worth on `heal`: rules, fixed plans, full fine-tuning, training from scratch and an oracle, with intervals.

    python scripts/study_heal.py --instances 96 --searched 32
    python scripts/study_heal.py --instances 40 --plan plan.yaml        # a plan that an earlier search found

The cases are held-out keys of plain hosts, or of residual ones, with one damaged site, from key FIRST on. Figures are J and
accuracy on the test split. The best fixed plan is searched for on training keys of the same kind. The learning rates of the
static networks are chosen on training keys too.
"""

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.actions import Actions, Op
from esper.leyline.protocols import PolicyClient
from esper.leyline.task import Mixture
from esper.leyline.view import Outcome, View
from esper.runs.contenders import Contender, named
from esper.runs.evaluation import evaluate
from esper.runs.schedule_search import PERMISSIVE, entry_line, search_schedules
from esper.runs.statistics import interval, mean, mean_difference
from esper.tamiyo.baselines import Rule
from esper.tamiyo.schedule import Entry, Schedule, load_schedule
from esper.tasks.damage import DamageKind
from esper.tasks.heal import RANGES, Facts, describe, heal, heal_scratch, heal_unfrozen
from esper.tasks.healing_hosts import BLOCKS

FIRST = RANGES["heldout"].start + 4096
SEEDS = 2
BYPASS, UNIFORM = "bypass-rank-4", "bypass-rank-1"
BYPASSES = (BYPASS,)
SPREAD = (DamageKind.MIXED, DamageKind.NONE)
RATES = {"heal-unfrozen": (1e-3, 3e-3, 1e-2), "heal-scratch": (3e-3, 1e-2, 2e-2)}
Floats = NDArray[np.float64]


def concentrated(facts: Facts) -> bool:
    """One damaged site: one segment, a group of inputs, or swapped labels."""
    return facts.damage.kind not in SPREAD and len(facts.damage.segments) <= 1


def cases(start: int, count: int, plain: bool = True) -> list[Facts]:
    found = (f for key in itertools.count(start) if concentrated(f := describe(key)) and f.plain == plain)
    return list(itertools.islice(found, count))


def of_cases(mixture: Mixture, parts: Mapping[str, Sequence[Facts]]) -> Mixture:
    """The mixture with these cases as the instances of each part, numbered from 0."""
    keys = [facts.key for each in parts.values() for facts in each]
    ends = np.cumsum([0, *(len(each) for each in parts.values())]).tolist()
    ranges = {name: range(a, b) for name, (a, b) in zip(parts, itertools.pairwise(ends), strict=True)}
    sample, test = mixture.sample, mixture.test
    assert test is not None
    return replace(mixture, ranges=ranges, sample=lambda i: sample(keys[i]), test=lambda i: test(keys[i]))


def planting(blueprint: str, blocks: Sequence[int]) -> list[Entry]:
    return [Entry(at=0, op=Op.GERMINATE, slot=f"block{k}", blueprint=blueprint, keep=True) for k in blocks]


def fixed(name: str, entries: Sequence[Entry]) -> Contender:
    return Contender(name, {"controller": name, **PERMISSIVE}, lambda config: Schedule(entries, name))


class ParticipationDrop(Rule):
    """A bypass where the participation of the stream drops by more than half from one slot to the next, else a fixed plan.

    The drop is read once, before the first step. The slot behind the first block has no neighbour in front of it.
    """

    def __init__(self, otherwise: Sequence[Entry]) -> None:
        plans = [planting(BYPASS, [k]) for k in range(BLOCKS)]
        self.schedules = [Schedule(plan, "the rule") for plan in (*plans, otherwise)]
        self.chosen: NDArray[np.int64] | None = None

    def act(self, view: View) -> Actions:
        if view.step == 0 or self.chosen is None:
            stream = view.measurements.participation
            ratio = stream[:, 1:] / np.maximum(stream[:, :-1], 1e-9)
            self.chosen = np.where(ratio.min(1) < 0.5, 1 + ratio.argmin(1), BLOCKS)
        each = [schedule.act(view) for schedule in self.schedules]
        rows = np.arange(len(self.chosen))
        return Actions(*(np.stack(heads)[self.chosen, rows] for heads in zip(*each, strict=True)))

    def store(self, outcome: Outcome) -> None:
        for schedule in self.schedules:
            schedule.store(outcome)


def rule(name: str, make: Callable[[], PolicyClient], settings: Mapping[str, Any]) -> Contender:
    return Contender(name, {"controller": name, **settings}, lambda config: make())


def never_at(task: Mixture, lr: float, instances: int, seeds: int, part: str) -> tuple[Floats, Floats]:
    """Accuracy (N, R) on the test split of hosts that train without growth, and their J, which has no rent."""
    settings = [{"optimizer": {"lr": lr}}]
    found = evaluate(task, [named("never")], instances=instances, seeds=seeds, part=part, settings=settings)
    return found.figures.objective[0], found.figures.metric[0]


def tuned(
    build: Callable[[], Mixture], parts: Mapping[str, Sequence[Facts]], count: int
) -> tuple[float, Floats, Floats]:
    """The best learning rate on training cases, and the figures of the held-out cases at it."""
    task = of_cases(build(), parts)
    trials = min(32, len(parts["training"]))
    score = {lr: never_at(task, lr, trials, 1, "training")[0].mean() for lr in RATES[task.name]}
    best = max(score, key=lambda lr: score[lr])
    print(task.name, {lr: round(float(value), 4) for lr, value in score.items()}, flush=True)
    return (best, *never_at(task, best, count, SEEDS, "heldout"))


def oracle(objective: Floats, metric: Floats) -> tuple[Floats, Floats]:
    """Figures (N, R) of the best plan (A, N, R) for each case, chosen by the J of the other seeds."""
    others = (objective.sum(2, keepdims=True) - objective) / (objective.shape[2] - 1)
    chosen = others.argmax(0)[None]
    return np.take_along_axis(objective, chosen, 0)[0], np.take_along_axis(metric, chosen, 0)[0]


def points(value: Any) -> str:
    return f"{100 * value.value:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"


def table(objective: Mapping[str, Floats], metric: Mapping[str, Floats], reference: str, kinds: Sequence[str]) -> None:
    print(f"\n| | J | accuracy | J over {reference}, points [95 %] |\n|---|---|---|---|")
    for name, scores in objective.items():
        own, over = interval(lambda t: mean(t), [scores]), ""
        if name != reference:
            over = points(interval(mean_difference, [scores], [objective[reference]]))
        print(f"| {name} | {own.value:.3f} | {metric[name].mean():.3f} | {over} |")
    print(f"\n| damage | cases | {' | '.join(objective)} |\n|---|---|{'---|' * len(objective)}")
    for kind in sorted(set(kinds)):
        rows = np.array([own == kind for own in kinds])
        cells = " | ".join(f"{scores[rows].mean():.3f}" for scores in objective.values())
        print(f"| {kind} | {rows.sum()} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=96, help="held-out cases")
    parser.add_argument("--searched", type=int, default=32, help="training cases of the search")
    parser.add_argument("--plan", type=Path, help="schedule file of the fixed plan, in place of the search")
    parser.add_argument("--residual", action="store_true", help="residual hosts, the control, in place of plain ones")
    parser.add_argument("--first", type=int, default=FIRST, help="first held-out key that is looked at")
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = options.instances
    plain = not options.residual
    parts = {"training": cases(0, options.searched, plain), "heldout": cases(options.first, count, plain)}
    held = parts["heldout"]
    print(f"held-out keys {held[0].key} to {held[-1].key}: {count} of them; {SEEDS} seeds each", flush=True)
    task = of_cases(heal(), parts)

    plan, entries = fixed_plan(task, options.plan, options.searched)
    single = [fixed(f"{b} at block{k}", planting(b, [k])) for b in BYPASSES for k in range(BLOCKS)]
    uniform = planting(UNIFORM, range(BLOCKS))
    same = [(entry.slot, entry.blueprint) for entry in entries] == [(entry.slot, entry.blueprint) for entry in uniform]
    print(f"the best fixed plan is {'uniform' if same else 'not uniform'}")
    contenders = [
        named("never"),
        named("heuristic"),
        *([] if same else [fixed("uniform", uniform)]),
        plan._replace(name="best fixed plan"),
        rule("participation drop", lambda: ParticipationDrop(entries), PERMISSIVE),
        *single,
    ]
    result = evaluate(
        task, contenders, instances=count, seeds=SEEDS, watch=lambda line: print(line, flush=True), part="heldout"
    )
    objective = dict(zip(result.contenders, result.figures.objective, strict=True))
    metric = dict(zip(result.contenders, result.figures.metric, strict=True))
    plans = [name for name in objective if name not in ("heuristic", "participation drop")]
    best = oracle(*(np.stack([figures[name] for name in plans]) for figures in (objective, metric)))
    for single_site in single:
        print(single_site.name, f"{objective[single_site.name].mean():.3f}")
    shown = [contender.name for contender in contenders if contender not in single]
    objective, metric = ({name: figures[name] for name in shown} for figures in (objective, metric))
    objective["oracle"], metric["oracle"] = best
    for name, build in {"full fine-tuning": heal_unfrozen, "from scratch": heal_scratch}.items():
        lr, objective[name], metric[name] = tuned(build, parts, count)
        print(f"{name}: learning rate {lr}", flush=True)
    table(objective, metric, "best fixed plan", [facts.damage.kind.value for facts in held])


def fixed_plan(task: Mixture, path: Path | None, searched: int) -> tuple[Contender, Sequence[Entry]]:
    """The plan of a file, kept with permissive gates, or the best one on training cases."""
    if path is not None:
        entries = load_schedule(path).entries
        return fixed(str(path), entries), entries
    found = search_schedules(task.sealed(), instances=searched, watch=lambda line: print(line, flush=True))
    print("best fixed plan:", [entry_line(entry) for entry in found.entries], dict(found.contender.settings))
    print(f"{found.candidates} candidates, {found.episodes} networks, {found.seconds:.0f} seconds", flush=True)
    return found.contender, found.entries


if __name__ == "__main__":
    main()
