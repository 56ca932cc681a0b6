"""What the report shows, worked out from a run folder. T steps, E environments, S slots, K blueprints.

Nothing here draws. A quantity that a run did not measure, or did not record, is None or nan, never 0.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET

from esper.karn.reader import OpenRun, Status, fitting_files
from esper.karn.report.keeps import DecisionLog, Decisions
from esper.karn.report.records import NO_SEED, Floats, Population, SeedMark, Sensed, Stay, Times, Worths
from esper.leyline.stages import Stage
from esper.nissa.analytics import BlueprintAnalytics, Tally
from esper.nissa.rows import (
    DecisionRow,
    EvaluationRow,
    LifecycleRow,
    MeasurementRow,
    PhasesRow,
    PlayedRow,
    RollbackRow,
    RoundRow,
    Row,
    RunRow,
    SensorsRow,
    StepRow,
)


class Refused(NamedTuple):
    """A decision that was not carried out: the reason (`esper.Refusal`), and what the controller chose for which environment."""

    reason: str
    env: int
    op: str
    slot: str | None
    blueprint: str | None


class RunModel(NamedTuple):
    """A run, ready to be shown.

    Attributes:
        status (Status): how the run stands
        head (RunRow or None): the first row of the events; None if there are none
        config, summary, environment (mappings): the files of the folder; None if they are missing
        population (Population or None): the last episode with steps; None if step rows were not recorded
        stays (list of Stay): of that episode
        marks (list of SeedMark): likewise
        worths (Worths or None): likewise; None if no seed was measured
        sensed (Sensed or None): likewise; None if no sensors were measured
        times (Times or None): likewise; None if no times were recorded
        tallies (list of Tally): of all episodes but those of validations, the blueprint that was tried most first
        params (mapping): of the seeds planted in these, mean number of parameters by blueprint and slot
        decided (Decisions): plantings, keeps and prunes of these
        refused (mapping): number of refused decisions by reason
        refusals (mapping): by what was refused, how often, and the first step and the last of it
        operations (mapping): in a training, the decisions other than WAIT of each round by operation
        rollbacks (list of RollbackRow): all
        rounds (list of RoundRow): of a training
        validated (mapping): in a training, J of the networks of each validation by round
        changed (sequence of str): settings that were changed when the run was resumed
    """

    status: Status
    head: RunRow | None
    config: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    environment: Mapping[str, Any] | None
    population: Population | None
    stays: list[Stay]
    marks: list[SeedMark]
    worths: Worths | None
    sensed: Sensed | None
    times: Times | None
    tallies: list[Tally]
    params: Mapping[tuple[str, str], float]
    decided: Decisions
    refused: Mapping[str, int]
    refusals: Mapping[Refused, tuple[int, int, int]]
    operations: Mapping[int, Mapping[str, int]]
    rollbacks: list[RollbackRow]
    rounds: list[RoundRow]
    validated: Mapping[int, Sequence[float | None]]
    changed: Sequence[str]


class Gathered:
    """The rows of a run that its model needs, as they come. `write` every row in order; `model` may be called at any time."""

    def __init__(self) -> None:
        self._heads: list[RunRow] = []
        self._steps: list[StepRow] = []  # of the last episode
        self._changes: list[LifecycleRow] = []  # of that episode, and of later ones
        self._decided = DecisionLog()
        self._rollbacks: list[RollbackRow] = []
        self._rounds: list[RoundRow] = []
        self._episode = -1  # of the next four
        self._measured: list[tuple[int, Floats]] = []  # step, contributions
        self._worth: dict[str, Floats] = {}  # the last Shapley values and interactions
        self._sensed: list[tuple[int, Sequence[str], Floats]] = []  # step, names, medians
        self._phases: list[tuple[int, Mapping[str, float]]] = []  # step, seconds
        self._refused: Counter[str] = Counter()
        self._refusals: dict[Refused, tuple[int, int, int]] = {}
        self._operations: dict[int, Counter[str]] = {}
        self._analytics = BlueprintAnalytics()
        self._prices: dict[tuple[str, str], tuple[int, int]] = {}  # seeds and their parameters, by blueprint and slot
        self._validated: dict[int, Sequence[float | None]] = {}

    def write(self, row: Row) -> None:
        """Take in the next row."""
        if not isinstance(row, PlayedRow) or row.cohort in (UNSET, "training"):
            self._analytics.write(row)
        match row:
            case RunRow():
                self._heads.append(row)
            case StepRow() if row.cohort is UNSET:  # a training shows its rounds instead
                if self._steps and self._steps[-1].episode != row.episode:
                    self._steps = []
                self._steps.append(row)
            case DecisionRow():
                self._write_decision(row)
            case MeasurementRow() | SensorsRow() | PhasesRow() if row.cohort is UNSET:
                self._write_figures(row)
            case LifecycleRow():
                self._write_change(row)
            case RollbackRow():
                self._rollbacks.append(row)
            case RoundRow():
                self._rounds.append(row)
            case EvaluationRow(cohort="validation", round=int(number)):
                self._validated[number] = [*self._validated.get(number, []), *row.objectives]  # a row for each task

    def _write_decision(self, row: DecisionRow) -> None:
        if row.op == "GERMINATE" and row.carried_out and row.price is not None and row.cohort in (UNSET, "training"):
            key = row.blueprint or "", row.slot or ""
            count, params = self._prices.get(key, (0, 0))
            self._prices[key] = count + 1, params + row.price
        if row.cohort is UNSET:
            if row.refusal is not None:
                self._refused[row.refusal] += 1
                refused = Refused(row.refusal, row.env, row.op, row.slot, row.blueprint)
                count, first, _ = self._refusals.get(refused, (0, row.step, row.step))
                self._refusals[refused] = count + 1, first, row.step
        elif row.cohort == "training" and isinstance(row.round, int) and row.op != "WAIT":
            self._operations.setdefault(row.round, Counter())[row.op] += 1

    def _write_figures(self, row: MeasurementRow | SensorsRow | PhasesRow) -> None:
        """Measurements, sensors and times of a step, which comes before or after the row of that step."""
        if row.episode != self._episode:
            self._episode, self._measured, self._sensed, self._phases, self._worth = row.episode, [], [], [], {}
        match row:
            case PhasesRow():
                self._phases.append((row.step, row.phase_seconds))
            case SensorsRow():
                self._sensed.append((row.step, row.sensors, _medians(_floats(row.readings))))
            case MeasurementRow():
                if row.contribution_means is not None:
                    self._measured.append((row.step, _floats(row.contribution_means)))
                for name, values in (("shapley", row.shapley_means), ("interaction", row.interactions)):
                    if values is not None:
                        found = _floats(values)
                        before = self._worth.get(name, np.full(found.shape, np.nan))
                        self._worth[name] = np.where(np.isfinite(found), found, before)

    def _write_change(self, row: LifecycleRow) -> None:
        self._decided.write(row)
        if row.cohort is not UNSET:
            return  # a training has no step rows that its changes would be drawn with
        if self._changes and self._steps and self._changes[-1].episode != row.episode:
            shown = self._steps[-1].episode
            self._changes = [change for change in self._changes if change.episode >= shown]
        self._changes.append(row)

    def model(self, run: OpenRun) -> RunModel:
        """The model of the rows so far and of the other files of their run. InputError if one of these is damaged."""
        heads, steps, changes = self._heads, self._steps, self._changes
        head = heads[0] if heads else None
        population = _population(head, steps, changes) if head is not None and steps else None
        shown = [row for row in changes if steps and row.episode == steps[-1].episode]
        return RunModel(
            run.status_after(heads[-1].status if heads else None),
            head,
            run.checked_config,
            run.summary,
            run.environment,
            population,
            _stays(population, head, shown) if head and population else [],
            _marks(head, shown, self._rollbacks) if head and population else [],
            self._measurements(),
            self._sensors(),
            _times(self._phases),
            self._analytics.tallies(),
            {key: params / count for key, (count, params) in self._prices.items()},
            self._decided.decisions(),
            dict(self._refused.most_common()),
            dict(self._refusals),
            {number: dict(counts) for number, counts in sorted(self._operations.items())},
            list(self._rollbacks),
            list(self._rounds),
            dict(self._validated),
            [setting for row in heads for setting in row.changed],
        )

    def _measurements(self) -> Worths | None:
        if not self._measured:
            return None
        steps, values = zip(*self._measured, strict=True)
        return Worths(np.array(steps), np.array(values), self._worth.get("shapley"), self._worth.get("interaction"))

    def _sensors(self) -> Sensed | None:
        if not self._sensed:
            return None
        steps, names, medians = zip(*self._sensed, strict=True)
        return Sensed(np.array(steps), names[0], np.array(medians))


def read_model(run: OpenRun) -> RunModel:
    """The model of a run folder. InputError if a file of it is damaged."""
    gathered = Gathered()
    with fitting_files(run.folder):
        for row in run.rows():
            gathered.write(row)
        return gathered.model(run)


def _population(head: RunRow, steps: Sequence[StepRow], changes: Iterable[LifecycleRow]) -> Population:
    episode = steps[0].episode
    stage = np.array([row.stages for row in steps], np.int8)
    seed = np.full(stage.shape, NO_SEED)
    at = {row.step: index for index, row in enumerate(steps)}
    slots = {name: index for index, name in enumerate(head.slots)}
    names = {name: index for index, name in enumerate(head.blueprints)}
    for row in changes:
        if row.episode == episode and row.step in at:
            known = names.get(row.blueprint, NO_SEED) if row.blueprint is not None else NO_SEED
            seed[at[row.step] :, row.env, slots[row.slot]] = known
    empty = np.isin(stage, [Stage.DORMANT, Stage.PRUNED, Stage.EMBARGOED])
    twins = [row.twin_metrics for row in steps]
    return Population(
        np.array([row.step for row in steps]),
        np.array([row.metrics for row in steps], np.float64),
        np.array([row.losses for row in steps], np.float64),
        np.array([row.train_losses for row in steps], np.float64),
        np.array(twins, np.float64) if None not in twins else None,
        np.array([row.added_param_counts for row in steps], np.int64),
        stage,
        np.array([row.alphas for row in steps], np.float64),
        np.where(empty, NO_SEED, seed),
    )


def _stays(population: Population, head: RunRow, changes: Iterable[LifecycleRow]) -> list[Stay]:
    """The stays of every slot but those in DORMANT, by environment, slot and step."""
    reasons: dict[tuple[int, int, int], str] = {}
    slots = {name: index for index, name in enumerate(head.slots)}
    for row in changes:
        if row.why is not None:
            reasons[row.env, slots[row.slot], row.step] = row.why
    stays = []
    steps, envs, count = population.stage.shape
    for env in range(envs):
        for slot in range(count):
            stage, seed = population.stage[:, env, slot], population.seed[:, env, slot]
            cuts = np.flatnonzero((np.diff(stage) != 0) | (np.diff(seed) != 0)) + 1
            for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), steps], strict=True):
                if stage[first] == Stage.DORMANT:
                    continue
                start = int(population.steps[first])
                stays.append(
                    Stay(
                        env,
                        slot,
                        start,
                        int(population.steps[last - 1]) + 1,
                        Stage(int(stage[first])),
                        head.blueprints[int(seed[first])] if seed[first] != NO_SEED else None,
                        float(population.alpha[last - 1, env, slot]),
                        reasons.get((env, slot, start)),
                    )
                )
    return stays


def _marks(head: RunRow, changes: Iterable[LifecycleRow], rollbacks: Iterable[RollbackRow]) -> list[SeedMark]:
    """The plantings and removals of an episode, whose changes of stage are `changes`; a rollback may remove seeds too."""
    slots, episode = {name: index for index, name in enumerate(head.slots)}, -1
    planted: dict[tuple[int, str], list[tuple[int, str | None]]] = {}
    marks = []
    for row in changes:
        episode = row.episode
        if row.to_stage in ("GERMINATED", "PRUNED"):
            if row.to_stage == "GERMINATED":
                planted.setdefault((row.env, row.slot), []).append((row.step, row.blueprint))
            marks.append(
                SeedMark(row.env, slots[row.slot], row.step, row.to_stage == "GERMINATED", row.blueprint, row.why)
            )
    for lost in rollbacks:
        for slot in lost.pruned if lost.episode == episode and lost.cohort is UNSET and not lost.twin else ():
            why = f"lost in a rollback ({lost.reason}), without a decision of the controller"
            seeds = [seed for step, seed in planted.get((lost.env, slot), ()) if step <= lost.step]
            marks.append(SeedMark(lost.env, slots[slot], lost.step, False, seeds[-1] if seeds else None, why))
    return marks


def _times(phases: Sequence[tuple[int, Mapping[str, float]]]) -> Times | None:
    if not phases:
        return None
    steps, spent = zip(*phases, strict=True)
    names = dict.fromkeys(name for each in spent for name in each)
    return Times(np.array(steps), {name: np.array([each.get(name, np.nan) for each in spent]) for name in names})


def _floats(values: Any) -> Floats:
    """Numbers with None for what was not measured, as an array with nan."""
    return np.array(values, np.float64)


def _medians(values: Floats) -> Floats:
    """(E, ...) -> (...) medians of the finite values; nan where there are none."""
    known = np.isfinite(values)
    filled = np.where(known.any(0), values, 0.0)  # numpy warns of a median of no values
    return np.where(known.any(0), np.nanmedian(np.where(np.isfinite(filled), filled, np.nan), axis=0), np.nan)
