"""Search for the best fixed plan of a task by successive halving. E environments."""

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config.tree import Config
from esper.leyline.data.objective import objective_of
from esper.leyline.data.task import AnyTask
from esper.leyline.lifecycle.view import Floats, Outcome
from esper.leyline.messages import InputError, counted
from esper.runs.baselines import Absent
from esper.runs.evaluation.contenders import (
    ROWS,
    Contender,
    grow_contender,
)
from esper.runs.evaluation.evaluation import Arrays, Design, EvaluationPart, Runner
from esper.tolaria.engine import Until
from esper_bench.controllers.plans import Placed
from esper_bench.evaluation.declared import SEARCHED
from esper_bench.evaluation.plan_menu import Candidate, abreast, candidate_plans

EPISODES = 2048
"""Default number of episodes of a search."""

SEARCH_SEED = 2**40
"""Run seed of a search. It differs from the seeds of evaluations, so the starts on a data set differ too."""

QUARTER = 4
"""A rung of a search keeps a quarter of its plans, rounded up."""
GROWTH = 2
"""Further instances of a rung / those of the rung before it."""
FINALISTS = 4
"""Most plans of the first stage that take part in the second."""
FEWEST = 3
"""Number of instances for each plan of the first stage that half of the episodes must suffice for, for a second stage."""
LEAST = 8
"""Number of instances on which the second stage can grow each of its plans with half of its episodes."""


class Found(NamedTuple):
    """Holds the best fixed plan, and the cost of the search.

    Attributes:
        best (Candidate): the plan
        objective (float): mean J on the probe split over the instances
        candidates (int): number of candidates of the full menu
        tried (int): number of candidates for which the episodes sufficed
        instances (int): number of instances on which the last candidates were grown
        episodes (int): number of networks that were grown
        seconds (float): duration of the search
    """

    best: Candidate
    objective: float
    candidates: int
    tried: int
    instances: int
    episodes: int
    seconds: float

    @property
    def contender(self) -> Contender:
        """The plan as a contender."""
        return self.best.contender(SEARCHED)._replace(episodes=self.episodes)


def search_plans(
    task: AnyTask,
    settings: Sequence[Mapping[str, Any]] = (),
    *,
    episodes: int = EPISODES,
    part: str = "training",
    runner: Runner | None = None,
) -> Found:
    """Find the fixed plan with the highest mean J on training instances, in two stages.

    The first stage searches among nothing, the plans of the rules and all single seeds in step 0, with half of the episodes,
    until FINALISTS are left. The second stage searches among these and the most promising plans that are made of the single
    seeds (`promising`), as many in all as half of its episodes suffice for on LEAST instances each; at most half of them are
    finalists. Where half of the episodes do not suffice for FEWEST instances under each plan of the first stage, or the second
    stage would have fewer than two plans, the first one has all episodes.

    A stage is a successive halving (`rungs`) on instances of its own, the same for all of its plans. J is computed on the
    probe split, so `task` may be sealed. See `candidate_plans` for the candidates.

    episodes: number of networks that the search grows, all with one seed. runner: grows the populations, and says what the search
    does; None grows them in this process, stores nothing and is silent.

    Raises InputError if `episodes` is below 1.
    """
    if episodes < 1:
        raise InputError(f"the search for the best fixed plan was given {counted(episodes, 'episode')}; give 1 or more")
    every, begin = candidate_plans(task, settings), time.perf_counter()
    keys = task.keys(part)
    grower = _CandidateGrower(task, settings, part, runner or Runner(), every, keys)
    stages = climb(every, episodes, len(keys), grower.grow)
    return Found(
        best=every[stages[-1].order[0]],
        objective=stages[-1].objective,
        candidates=len(every),
        tried=len(np.unique(np.concatenate([stage.order for stage in stages]))),
        instances=stages[-1].instances,
        episodes=sum(stage.episodes for stage in stages),
        seconds=time.perf_counter() - begin,
    )


class SearchStage(NamedTuple):
    """Says what a stage of a search found.

    Attributes:
        order ((n,) int64 array): the candidates that were grown, the best first
        objective (float): mean J of the best one over the instances of the stage
        instances (int): number of instances on which the best one was grown
        episodes (int): number of networks that the stage grew
    """

    order: NDArray[np.int64]
    objective: float
    instances: int
    episodes: int


Grow = Callable[[NDArray[np.int64], int, int], Floats]
"""From candidates (n,), the number of instances before, and that of further ones, to the sum of J (n,) over the further ones."""


def climb(every: Sequence[Candidate], episodes: int, instances: int, grow: Grow) -> list[SearchStage]:
    """Search among candidates in one or two stages; see `search_plans`. The best plan is the first one of the last stage."""
    first = np.flatnonzero([candidate.first for candidate in every])
    half = episodes // 2
    few = min(FINALISTS, half // (2 * LEAST) // 2)
    if few == 0 or len(first) == len(every) or half < FEWEST * len(first) or instances < 2:
        return [halve(first, rungs(len(first), episodes, instances), grow)]
    begun = halve(first, rungs(len(first), half, instances // 2, few), grow)
    left, done = episodes - begun.episodes, begun.instances
    further = np.concatenate([begun.order[:few], promising(every, begun.order)])[: left // (2 * LEAST)]
    steps = rungs(len(further), left, instances - done)
    return [begun, halve(further, steps, lambda alive, before, more: grow(alive, done + before, more))]


def promising(every: Sequence[Candidate], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the candidates of the second stage, those of the best single seeds first.

    order: candidates of the first stage, the best first. A plan has the rank of the worst of its single seeds, and one that
    plants a blueprint at more than two slots that of the best of them; equal ranks come in the order of the candidates. Plans
    with a seed that was not tried come last.
    """
    ranks = {every[index].parts[0]: rank for rank, index in enumerate(order) if len(every[index].parts) == 1}

    def rank(index: int) -> int:
        found = [ranks.get(part, len(every)) for part in every[index].parts]
        return min(found) if len(found) > 2 else max(found, default=len(every))

    return np.array(sorted((i for i in range(len(every)) if not every[i].first), key=rank), np.int64)


def rungs(candidates: int, episodes: int, instances: int, last: int = 1) -> list[tuple[int, int]]:
    """Return the rungs of a successive halving: the number of candidates, and the number of further instances for each.

    A rung keeps the best quarter, rounded up and at least `last`, and grows it on twice as many further instances, until `last`
    are left. So the first rung has about half of the episodes, and each further one half of those of the rung before. In
    Karnin, Koren and Somekh, "Almost Optimal Exploration in Multi-Armed Bandits", ICML 2013, section 3, the rungs keep halves
    and have the same number of episodes, which finds worse plans where there are few instances for each of many candidates.

    As many candidates take part as all rungs suffice for. Numbers of instances are rounded. What is left goes to the best
    candidate if `last` is 1, so the products sum to `episodes` unless the instances come to an end before.
    """
    assert candidates > 0 < episodes, (candidates, episodes)
    sizes = next(
        some for count in range(candidates, 0, -1) if _cost(some := _sizes(count, last)) <= episodes or count == 1
    )
    steps, left = [], episodes
    for rung, count in enumerate(sizes):
        cost = _cost(sizes[rung:])
        # rounded, because a first rung of 2 instances in place of 2.7 is a bad one
        share = (2 * left + cost) // (2 * cost)
        # at most what leaves as many to each later rung
        more = min(share, left // sum(sizes[rung:]), instances)
        steps.append((count, more))
        left, instances = left - count * more, instances - more
    if last == 1:
        steps.append((1, min(left, instances)))
    return [(count, more) for count, more in steps if more]


def _sizes(count: int, last: int) -> list[int]:
    """Return the number of candidates of each rung."""
    sizes = [count]
    while (count := max(-(-count // QUARTER), last)) > last:
        sizes.append(count)
    return sizes


def _cost(sizes: Sequence[int]) -> int:
    """Return the episodes of rungs whose first one has a single instance."""
    return sum(count * GROWTH**rung for rung, count in enumerate(sizes))


def halve(arms: NDArray[np.int64], steps: Sequence[tuple[int, int]], grow: Grow) -> SearchStage:
    """Search among candidates by rungs.

    steps: from `rungs`. Candidates that leave earlier come later in the order, and equal ones in that of `arms`. A J that is
    not a number is the least.
    """
    order, totals, done = arms[: steps[0][0]], dict.fromkeys(arms.tolist(), 0.0), 0
    for count, more in steps:
        alive = order[:count]
        for index, total in zip(alive.tolist(), grow(alive, done, more).tolist(), strict=True):
            totals[index] += total
        score = np.nan_to_num([totals[index] for index in alive.tolist()], nan=-np.inf)
        order, done = np.concatenate([alive[np.argsort(-score, kind="stable")], order[count:]]), done + more
    return SearchStage(order, totals[int(order[0])] / done, done, sum(count * more for count, more in steps))


class _CandidateGrower(NamedTuple):
    """Grows the candidates of a search; see `search_plans`."""

    task: AnyTask
    settings: Sequence[Mapping[str, Any]]
    part: str
    runner: Runner
    every: Sequence[Candidate]
    keys: Sequence[int]

    def grow(self, alive: NDArray[np.int64], done: int, more: int) -> Floats:
        """Return the sum of J (n,) of candidates over `more` instances after the first `done`."""
        where = counted(more, "further training instance" if done else "training instance")
        of = f" of {len(self.every):,}" if not done and len(alive) < len(self.every) else ""
        self.runner.watch(f"{self.task.name}: search for the {SEARCHED}, {counted(len(alive), 'plan')}{of} on {where}")
        starts = range(done, done + more, ROWS)
        blocks = [np.array(self.keys[start : min(start + ROWS, done + more)]) for start in starts]
        together = list(itertools.product(_alike(self.every, alive), blocks))
        asked = [([self.every[index] for index in group], block) for group, block in together]
        grown = grow_abreast(self.task, asked, self.settings, self.part, self.runner)
        totals = np.zeros(len(self.every))
        for (group, _), own in zip(together, grown, strict=True):
            totals[group] += own.sum(1)
        return totals[alive]


def grow_abreast(
    task: AnyTask,
    asked: Sequence[tuple[Sequence[Candidate], NDArray[np.int64]]],
    settings: Sequence[Mapping[str, Any]],
    part: str,
    runner: Runner,
) -> list[Floats]:
    """Return J (candidates, instances) on the probe split, for each pair of candidates and keys of instances in `asked`.

    The candidates of a pair must be of one kind and have the same settings. They share populations of at most ROWS environments.
    """
    most = min(ROWS, len(task.keys(part)))
    rooms = [max(1, most // len(instance)) for _, instance in asked]
    parts = [
        [
            _part(task, candidates[start : start + room], instance, settings, part)
            for start in range(0, len(candidates), room)
        ]
        for (candidates, instance), room in zip(asked, rooms, strict=True)
    ]
    grown = iter(each for each in runner.play([*itertools.chain(*parts)]) if not isinstance(each, Absent))
    return [
        np.concatenate([each["objective"].reshape(-1, len(instance)) for each in itertools.islice(grown, len(own))])
        for own, (_, instance) in zip(parts, asked, strict=True)
    ]


def _part(
    task: AnyTask,
    candidates: Sequence[Candidate],
    instance: NDArray[np.int64],
    settings: Sequence[Mapping[str, Any]],
    part: str,
) -> EvaluationPart:
    """Return the population of candidates, each on all instances."""
    contender = Contender("search", candidates[0].settings, partial(abreast, candidates, SEARCHED))
    design = Design(task, settings, 1, part, 0, len(candidates) * len(instance))
    config = design.config(contender, SEARCH_SEED)
    who = ["search", *(candidate.content for candidate in candidates), json.dumps(instance.tolist())]
    compute = partial(_searched, contender, np.tile(instance, len(candidates)))
    return EvaluationPart(task, who, config, ("objective", "seconds"), compute)


def _searched(
    contender: Contender,
    instance: NDArray[np.int64],
    task: AnyTask,
    config: Config,
    sign: Callable[[], bool] = lambda: False,
) -> Arrays:
    """Return J (E,) of a population on the probe split, and the duration of its steps."""
    _, outcome, seconds = grow_contender(task.sealed(), contender, config, instance, [Until(sign)])
    return {"objective": probe_objective(outcome, config), "seconds": np.array(seconds)}


def _alike(candidates: Sequence[Candidate], alive: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the candidates that are alive in groups that can be grown together."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for index in sorted(alive.tolist()):
        candidate = candidates[index]
        kind = isinstance(candidate.choice, Placed), json.dumps(candidate.settings, sort_keys=True)
        groups.setdefault(kind, []).append(index)
    return [np.array(group) for group in groups.values()]


def probe_objective(outcome: Outcome, config: Config) -> Floats:
    """Return J (E,) of the networks as exported, on the probe split."""
    assert outcome.exported is not None, "the episode must be over"
    worth = objective_of(outcome.exported, outcome.host_params, config.reward)
    return worth if outcome.compute is None else worth - config.reward.compute_price * outcome.compute[1]
