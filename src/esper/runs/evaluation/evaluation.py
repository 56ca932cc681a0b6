"""Compare controllers on the same held-out instances, with the same seeds, by the test split.

C contenders, N instances, R seeds, E environments of a population.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from esper.kasmina.lifecycle import dormant
from esper.kasmina.network.static import Absent
from esper.leyline.config.tree import BASELINES, Config, baseline_names, build_config
from esper.leyline.data.task import AnyTask, Mixture
from esper.leyline.errors import InputError
from esper.leyline.lifecycle.stages import Stage
from esper.leyline.lifecycle.view import Floats, Outcome
from esper.leyline.progress import Pace
from esper.leyline.text import counted
from esper.runs.baselines import GrowthResult, grown_of, train_baseline
from esper.runs.evaluation.contenders import ROWS, RULES, Contender, Say, contender_config, grow_contender, named, tell
from esper.runs.evaluation.record import Evaluation, Record, RecordedFigures, findings
from esper.runs.evaluation.work import (
    Arrays,
    EvaluationPart,
    EvaluationPool,
    Kept,
    References,
    computed,
    evaluation_work,
    hired,
    play_parts,
)
from esper.runs.figures import exported_objective, objective_of, test_splits
from esper.runs.folder.environment import describe_environment, fingerprint
from esper.runs.workers.transports import serve_rank
from esper.runs.workers.workers import ALONE, WorkerOptions
from esper.store.disk import DiskRetry, remove_unfinished
from esper.store.files import EVALUATION
from esper.store.lock import locked_folder
from esper.tamiyo.catalog import with_sensors
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.play import Observer, decide
from esper.tolaria.runtime import resolve_device
from esper.tolaria.stacked.population import instance_keys

FIGURE, GROWN = "evaluation.png", "grown"
ROOT = Path("runs/evaluation")
"""The parent of default folders. A default folder is named after the arguments; all of them share the stored populations."""
ASKED = ("task", "tasks", "controller", "envs", "twin", "baselines", "instances", "first_instance", "models")
"""Config keys that an evaluation sets itself. Settings must not contain them."""


class Design(NamedTuple):
    """Holds the task, instances, seeds and settings that contenders share."""

    task: AnyTask
    settings: Sequence[Mapping[str, Any]]  # layers of config over that of the task
    seeds: tuple[int, ...]
    part: str  # the part of the task's instances
    first: int
    instances: int
    rows: int  # largest number of environments of a population

    @classmethod
    def of(
        cls,
        task: AnyTask,
        settings: Sequence[Mapping[str, Any]],
        seeds: int,
        part: str,
        first: int,
        instances: int,
        rows: int = ROWS,
    ) -> "Design":
        """Return the design with consecutive seeds from that of the config on. Raises InputError if nothing can be evaluated."""
        if task.test is None:
            raise InputError(f"task {task.name!r} has no test split, which an evaluation reads; give it one")
        for name, count in (("instances", instances), ("seeds", seeds)):
            if count < 1:
                raise InputError(f"{name} is {count}; an evaluation needs 1 or more")
        config = build_config(task.defaults, *settings)
        if config.widen.at:
            raise InputError("widen.at is set, but networks become wider in `esper grow` alone; leave widen out")
        base = config.seed
        for name in ASKED:
            if any(name in layer for layer in settings):
                raise InputError(f"{name} is among the settings, but an evaluation sets it by itself; leave it out")
        return cls(task, settings, tuple(range(base, base + seeds)), part, first, instances, rows)

    def check(self, contender: Contender) -> None:
        """Raise InputError if a contender cannot decide on the task, by one decision in one environment."""
        instance_keys(self.task, self.config(contender, self.seeds[-1]))
        config = contender_config(self.task, contender, self.settings, self.seeds[0], self.part, self.first, 1)
        client = contender.make(config)
        engine = VectorizedEngine(self.task.sealed(), with_sensors(config, client))
        decide(client, engine.reset(), engine.trial)

    def config(self, contender: Contender, seed: int) -> Config:
        """Return the config of a contender on all instances at once."""
        return contender_config(self.task, contender, self.settings, seed, self.part, self.first, self.instances)

    def populations(self, contender: Contender) -> Iterator[tuple[int, int, Config]]:
        """Yield every population of a contender: the index of its seed, its first instance, and its config."""
        for (at, seed), start in itertools.product(enumerate(self.seeds), range(0, self.instances, self.rows)):
            envs, first = min(self.rows, self.instances - start), self.first + start
            yield at, start, contender_config(self.task, contender, self.settings, seed, self.part, first, envs)


Runs = list[list[Arrays]]
"""The figures of a contender, by seed and population."""


class Grower(NamedTuple):
    """Names the populations of a design, and has them grown."""

    design: Design  # the task and what contenders share
    kept: Kept  # the stored results
    watch: Say | None = None  # called with lines of progress
    pace: Pace | None = None  # counts what was grown
    pool: EvaluationPool | None = None  # compute the populations; None computes them in this process

    @classmethod
    def of(
        cls,
        design: Design,
        folder: Path | None,
        watch: Say | None,
        pace: Pace | None,
        pool: EvaluationPool | None = None,
    ) -> "Grower":
        """Return a grower that stores results in a folder, if one is given."""
        kept = Kept(folder, {} if folder is None else fingerprint(design.task), partial(tell, watch))
        return cls(design, kept, watch, pace, pool)

    def parts(self, contender: Contender) -> list[EvaluationPart]:
        """Return every population of a contender, by seed and first instance."""
        who, compute = [contender.name, contender.content], partial(_figures, contender)
        return [self.part(who, config, compute, start) for _, start, config in self.design.populations(contender)]

    def part(
        self, who: Sequence[str], config: Config, compute: Callable[..., Arrays | Absent], start: int
    ) -> EvaluationPart:
        """Return the part that computes the figures (E,) of a population, from the instance `start` of the design on."""
        design = self.design
        done = f"{start + config.envs} of {counted(design.instances, 'instance')}"
        said = f"{design.task.name}: {who[0]}, seed {config.seed}, {done}"
        return EvaluationPart(self.kept, design.task, who, config, RecordedFigures._fields, compute, said)

    def train(self, names: Sequence[str], sizer: Contender, grown: Runs) -> dict[str, Runs | Absent]:
        """Train the static networks of names for every population that `sizer` grew; Absent are those that the task lacks."""
        design, populations = self.design, list(self.design.populations(sizer))
        parts = [
            self.part(
                [name, sizer.name, sizer.content],
                config,
                partial(_trained, name, grown[at][start // design.rows]),
                start,
            )
            for name in names
            for at, start, config in populations
        ]
        made, found = iter(play_parts(parts, self.pool, self.watch, self.pace)), dict[str, Runs | Absent]()
        for name in names:
            trained = list(itertools.islice(made, len(populations)))
            absent = next((each for each in trained if isinstance(each, Absent)), None)
            if absent is not None:
                tell(self.watch, f"{design.task.name}: {name} is absent: {absent.reason}")
            found[name] = absent or self.by_seed([each for each in trained if not isinstance(each, Absent)])
        return found

    def by_seed(self, grown: Sequence[Arrays]) -> Runs:
        """Return the results of the parts of a contender by seed."""
        each = len(grown) // len(self.design.seeds)
        return [list(grown[start : start + each]) for start in range(0, len(grown), each)]


def stacked(runs: Sequence[Sequence[Arrays]], name: str) -> Floats:
    """Return one figure of a contender, (N, R)."""
    return np.stack([np.concatenate([chunk[name] for chunk in chunks]) for chunks in runs], 1)


_KEPT = ("stage", "blueprint", "blend", "alpha")


def _figures(contender: Contender, task: AnyTask, config: Config, *observers: Observer) -> Arrays:
    """Return the figures (E,) of one population, and its growth as arrays, from which `_trained` makes it again."""
    engine, outcome, seconds = grow_contender(task.sealed(), contender, config, observers=observers)
    grown = grown_of(engine)
    return {
        **tested(task, config, engine, outcome, seconds)._asdict(),
        "instance": grown.instance,
        "params": grown.params,
        **{f"seeds_{name}": getattr(grown.kept, name) for name in _KEPT},
    }


def tested(
    task: AnyTask, config: Config, engine: VectorizedEngine, outcome: Outcome, seconds: float
) -> RecordedFigures:
    """Return the figures (E,) of a population that grew on `task.sealed()`; no other function reads test data of one.

    outcome: the last one. seconds: duration of the steps.
    """
    metric, loss = engine.evaluate(test_splits(engine, task))
    return RecordedFigures(
        objective=exported_objective(engine, metric, loss),
        metric=metric,
        added_params=(engine.exported_params() - outcome.host_params).astype(np.float64),
        kept=(outcome.seeds.stage == Stage.FOSSILIZED).sum(1).astype(np.float64),
        seconds=np.full(config.envs, seconds / config.envs),
    )


def _trained(name: str, arrays: Arrays, task: AnyTask, config: Config, *observers: Observer) -> Arrays | Absent:
    """Train the static networks of one baseline, which no observer sees, and return their figures (E,).

    arrays: of the population that grew, from `_figures`. The figure `kept` is nan for networks without seeds.
    """
    seeds = dormant(*arrays["seeds_stage"].shape)._replace(**{each: arrays[f"seeds_{each}"] for each in _KEPT})
    grown = GrowthResult(arrays["instance"], seeds, arrays["params"])
    trained = train_baseline(name, task, config, grown, config.steps)
    if isinstance(trained, Absent):
        return trained
    assert trained.seconds is not None
    host_params = grown.params - arrays["added_params"].astype(np.int64)
    added = trained.params - host_params
    kept = (seeds.stage == Stage.FOSSILIZED).sum(1) if name == "same-size" else np.full(config.envs, np.nan)
    return RecordedFigures(
        objective=objective_of(trained.metric, trained.loss, added, host_params, config.reward),
        metric=trained.metric,
        added_params=added.astype(np.float64),
        kept=kept.astype(np.float64),
        seconds=np.full(config.envs, trained.seconds / config.envs),
    )._asdict()


class Entry(NamedTuple):
    """Holds what rivals add to the contenders of one task."""

    rules: Sequence[Contender] = ()  # compared with every controller, as the rules are
    opponents: Sequence[Contender] = ()  # grown on the task itself
    # contenders on tasks of their own, which grow the same instances, each with its grower
    elsewhere: Sequence[tuple[Grower, Contender]] = ()
    # contenders that take part in `best_of` alone, and the contender whose networks they equal, or None
    plans: Sequence[tuple[Contender, str | None]] = ()
    # name of an opponent that has figures of the plans and of `rules`, and what chooses them
    best_of: tuple[str, Callable[[Sequence[Runs]], Runs]] | None = None
    absent: Mapping[str, str] = {}  # names of those that take no part, with the reasons
    facts: Mapping[str, Any] = {}  # what the record of the task says; its entry "lines" is printed below the tables


class Participation(NamedTuple):
    """Holds what rivals have decided before anything is grown."""

    counts: Sequence[int]  # contenders that grow networks, by task
    searched: int = 0  # networks that are grown to choose contenders, on all tasks
    references: References = ()  # the tasks that contenders have for themselves, each with the function that makes it
    lines: Sequence[str] = ()  # printed before anything is grown
    summary: Mapping[str, Any] = {}  # what the record says about them on all tasks


class Rivals:
    """Adds contenders to an evaluation; a package may pass such an object as `rivals`. This class adds none."""

    headroom: tuple[str, str] | None = None  # the contenders whose difference is 100 % in the column "headroom"

    def names(self, tasks: Sequence[AnyTask]) -> Sequence[str]:
        """Return names that no controller may have."""
        return ()

    def enter(
        self, designs: Sequence[Design], controllers: Sequence[Contender], settings: Sequence[Any]
    ) -> Participation:
        """Decide who takes part in each task. Raises InputError where a contender cannot."""
        return Participation([0] * len(designs))

    def grow(self, at: int, grower: Grower, folder: Path | None) -> Entry:
        """Return the contenders of task `at`, whose searches may grow networks by `grower`."""
        return Entry()


def run_evaluation(
    controllers: Sequence[Contender],
    tasks: Sequence[AnyTask],
    *,
    instances: int = 200,
    seeds: int = 3,
    part: str = "heldout",
    first: int = 0,
    settings: Sequence[Mapping[str, Any]] = (),
    baselines: Sequence[str] = BASELINES,
    folder: Path | None = None,
    watch: Say | None = None,
    workers: WorkerOptions = ALONE,
    rivals: Rivals | None = None,
) -> Record:
    """Compare controllers with the rules, static networks and `rivals` on every task; return a strict JSON object.

    baselines: static networks, of the sizes that the first controller grew, or the heuristic without one; the
    controller never is the twin. settings: layers of config over that of the tasks, the same for all contenders.
    folder: stores the results of populations, which are reused. watch: called with lines of progress. workers: the
    workers that grow the populations; in a rank of torchrun above 0, this process is one of them until the evaluation
    ends.
    """
    rivals = Rivals() if rivals is None else rivals
    rules = [named(name) for name in RULES]
    again = [(rule.name, rule.settings) for rule in rules]
    ours = [controller for controller in controllers if (controller.name, controller.settings) not in again]
    names, reserved = [contender.name for contender in (*rules, *ours)], (*rivals.names(tasks), *BASELINES)
    if len(set(names)) < len(names) or set(reserved) & set(names):
        raise InputError(
            f"the controllers are {', '.join(names)}; give each a name of its own, and none of "
            f"{', '.join(map(repr, reserved))}"
        )
    try:
        baseline_names(list(baselines))
    except ValueError as error:
        raise InputError(f"baselines is {', '.join(map(str, baselines))!r}; {error}") from None
    if len({task.name for task in tasks}) < len(tasks) or not tasks:
        given = ", ".join(task.name for task in tasks) or "none"
        raise InputError(f"the tasks of the evaluation are {given}; give one or more, each once")
    static = [name for name in baseline_names(list(baselines)) if name != BASELINES[0]]
    designs = [Design.of(task, settings, seeds, part, first, instances) for task in tasks]
    entered = rivals.enter(designs, ours, settings)
    for design in designs:
        for contender in (*rules, *ours):
            design.check(contender)
    grown = [len(rules) + len(ours) + len(static) + count for count in entered.counts]
    populations = [len(list(design.populations(rules[0]))) for design in designs]
    most = max(each * (own - len(static)) for each, own in zip(populations, grown, strict=True))
    if workers.any and workers.size > most:
        raise InputError(
            f"workers is {workers.size}, but the evaluation has {counted(most, 'population')} to grow, each by one worker; give "
            f"{most} or fewer, or more instances or seeds"
        )
    if workers.is_rank:
        return serve_rank(evaluation_work(workers, tasks, entered.references), workers.devices or (None,))
    with hired(workers, tasks, entered.references, [*rules, *ours], watch) as pool:
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                why = f"cannot keep figures in {folder}: {error.strerror}"
                raise InputError(f"{why}; name another folder") from None
        pace = None
        if watch is not None:
            networks, search = sum(grown) * instances * seeds, entered.searched
            more = f", and {search:,} in searches on training instances" if search else ""
            watch(
                f"{counted(networks, 'network')} to grow on {counted(len(tasks), 'task')}, with static networks{more}"
            )
            for line in entered.lines:
                watch(line)
            pace = Pace(networks + search, "networks", watch)
        sized_by = ours[0].name if ours else RULES[2]
        evaluations, facts = [], []
        for at, design in enumerate(designs):
            grower = Grower.of(design, folder, watch, pace, pool)
            entry = rivals.grow(at, grower, folder)
            evaluations.append(
                compared(grower, [*rules, *entry.rules, *ours], len(rules) + len(entry.rules), entry, static, sized_by)
            )
            facts.append(entry.facts)
        waited = {} if pool is None else {"workers": pool.summary()}
    rows = [contender.group or contender.name for contender in controllers]
    config = build_config(tasks[0].defaults, *settings)
    return {
        "named": list(dict.fromkeys(rows)),
        "instances": instances,
        "seeds": list(evaluations[0].seeds),
        "part": part,
        "first_instance": first,
        "settings": [dict(layer) for layer in settings],
        **entered.summary,
        "environment": describe_environment(resolve_device(config.device), config),
        **findings(evaluations, static, rows, rivals.headroom, facts),
        **waited,
    }


def compared(
    grower: Grower,
    contenders: Sequence[Contender],
    rules: int,
    entry: Entry,
    static: Sequence[str],
    sized_by: str | None,
) -> Evaluation:
    """Return the figures of contenders, the first `rules` of them before the rivals, and of static networks."""
    design, absent = grower.design, dict(entry.absent)
    task = design.task
    episodes = {contender.name: contender.episodes for contender in (*contenders, *entry.opponents)}
    episodes |= {contender.name: contender.episodes for _, contender in entry.elsewhere}
    own = {each.name: (grower, each) for each in (*entry.opponents, *contenders)}  # a controller may be an opponent
    others = {contender.name: (each, contender) for each, contender in entry.elsewhere}
    fresh = [plan for plan, equal in entry.plans if equal not in own]
    asked = [*own.values(), *others.values(), *((grower, plan) for plan in fresh)]
    parts = [each.parts(contender) for each, contender in asked]  # the populations of all are played together
    made = iter(computed([*itertools.chain(*parts)], pool=grower.pool, watch=grower.watch, pace=grower.pace))
    grown = [each.by_seed([*itertools.islice(made, len(of))]) for (each, _), of in zip(asked, parts, strict=True)]
    runs = dict(zip([*own, *others], grown, strict=False))
    against = {name: runs[name] for name in (*(each.name for each in entry.opponents), *others)}
    if entry.best_of is not None:
        name, choose = entry.best_of
        planned = dict(zip((plan.name for plan in fresh), grown[len(runs) :], strict=True))
        every: list[Runs] = [planned[plan.name] if equal not in own else runs[equal] for plan, equal in entry.plans]
        against[name] = choose([*every, *(runs[each.name] for each in entry.rules)])
    ours = contenders[rules:] if against else []
    order = [*(each.name for each in contenders if each not in ours), *against, *(each.name for each in ours)]
    runs = {name: (runs | against)[name] for name in dict.fromkeys(order)}
    if static:
        sizer = next(contender for contender in contenders if contender.name == sized_by)
        trained = grower.train(static, sizer, runs[sizer.name])
        absent |= {name: each.reason for name, each in trained.items() if isinstance(each, Absent)}
        runs |= {name: each for name, each in trained.items() if not isinstance(each, Absent)}
    groups = {each.group: tuple(own.name for own in contenders if own.group == each.group) for each in contenders}
    groups.pop("", None)
    return Evaluation(
        task=task.name,
        metric=task.objective.metric,
        contenders=tuple(runs),
        instances=instance_keys(task, design.config(contenders[0], design.seeds[0])),
        seeds=design.seeds,
        sampled=isinstance(task, Mixture),
        figures=RecordedFigures(
            *(np.stack([stacked(each, name) for each in runs.values()]) for name in RecordedFigures._fields)
        ),
        static=tuple(name for name in static if name not in absent),
        absent=absent,
        sized_by=sized_by,
        rules=tuple(each.name for each in contenders[:rules]),
        opponents=tuple(against),
        groups=groups,
        episodes=episodes
        | {name: max((episodes[own] or 0 for own in of), default=0) or None for name, of in groups.items()},
    )


@contextmanager
def evaluation_folder(
    path: Path, note: Callable[[str], None], *, overwrite: bool = False, shared: bool = False
) -> Iterator[Path]:
    """Make and lock the folder of an evaluation, and give the one, in or beside it, in which results are stored."""
    retry = DiskRetry(0.0, note, path, lambda: False, further="give the same command again")  # nothing is lost yet
    with locked_folder(path, note, retry):
        if (path / EVALUATION).exists() and not overwrite:
            raise InputError(
                f"{path / EVALUATION} is the record of an evaluation; name another folder (--out, out=), or replace "
                "it (--overwrite, overwrite=True), which keeps the networks that were grown"
            )
        remove_unfinished(path)
        if not shared:  # other processes may be writing to one that is shared
            remove_unfinished(path / GROWN)
        yield (path.parent if shared else path) / GROWN


def default_folder(
    controllers: Sequence[Contender], tasks: Sequence[str], settings: Sequence[Mapping[str, Any]], **numbers: int | None
) -> Path:
    """Return the default folder of an evaluation, which is a function of its arguments."""
    asked = [[each.name, each.content, dict(each.settings)] for each in controllers]
    digest = hashlib.sha256(json.dumps([asked, tasks, settings, numbers], sort_keys=True, default=str).encode())
    readable = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in "+".join(tasks))[:40]
    return ROOT / f"{readable}-{digest.hexdigest()[:8]}"
