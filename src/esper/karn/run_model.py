"""Build the model of a run from its rows, one by one: report, watch, serve, compare and exporters show what it holds.

T steps, E environments, S slots, K blueprints. A quantity that a run did not measure, or did not record, is None or nan, never 0.
"""

import bisect
import itertools
import re
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from esper.leyline.intervals import mean_and_error
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, Stage, among
from esper.nissa.rows import (
    DecisionRow,
    EnvRow,
    EpisodeRow,
    EvaluationRow,
    GradientsRow,
    LifecycleRow,
    MeasurementRow,
    PhasesRow,
    PlayedRow,
    RollbackRow,
    RoundRow,
    Row,
    RunRow,
    SensorsRow,
    SizeRow,
    StepRow,
    WideningRow,
)

if TYPE_CHECKING:
    from esper.karn.reader import OpenRun

Floats = NDArray[np.float64]
NO_SEED = -1
NAN = float("nan")

# most decisions that the figure of contributions shows; the largest contributions and the smallest
DRAWN_DECISIONS = 60
LISTED = 200  # most rows of a table of single decisions or rollbacks
POINTS = 512  # most points of a live curve; when it has twice as many, every second one is dropped
LOGGED = 12  # last events of each environment that are kept
TIMED = 32  # last steps or rounds from which the pace is worked out


class Stay(NamedTuple):
    """Holds a run of steps in which one slot of one environment is in one stage.

    GERMINATED, when a seed is planted, and PRUNED, when it is removed, do not last as long as a step: they stop where they start.
    """

    env: int
    slot: int  # index of the slot
    start: int  # first step
    stop: int  # one past the last step
    stage: Stage
    blueprint: str | None  # the seed in the slot
    alpha: float  # the dose at the end of the stay
    why: str | None  # why the seed was planted, kept or pruned, where the stay begins with that


class EpisodeSteps(NamedTuple):
    """Holds the steps of a run that is no training, which has one episode."""

    steps: NDArray[np.int64]  # (T,) numbers of the steps
    metric: Floats  # (T, E) task metric on the probe split
    loss: Floats  # (T, E) loss on the probe split
    train_loss: Floats  # (T, E) mean loss over the batches of the step
    twin: Floats | None  # (T, E) metric of the networks that never grow; None without twins
    added: NDArray[np.int64]  # (T, E) parameters of the seeds in BLENDING, HOLDING or FOSSILIZED
    stage: NDArray[np.int8]  # (T, E, S) stage of every slot
    alpha: Floats  # (T, E, S) dose of every slot
    seed: NDArray[np.int64]  # (T, E, S) index of the blueprint in the slot, NO_SEED if there is none


@dataclass
class DecisionLog:
    """Counts the plantings, keeps and prunes of a run; those of a training's episodes, without those of validations.

    It holds only the rows that a page shows, so that its memory is bounded.
    """

    total: int = 0  # keeps and prunes
    measured: int = 0  # those with a contribution
    first: list[LifecycleRow] = field(default_factory=list)  # the first `LISTED`
    planted: int = 0  # plantings outside of trainings
    plantings: list[LifecycleRow] = field(default_factory=list)  # the first `LISTED` of them
    idle: int = 0  # prunes of seeds in TRAINING whose gain was exactly 0, so that switching them on changed no loss
    # the largest contributions and then the smallest, `DRAWN_DECISIONS` at most; of equal ones the earlier comes first
    ends: list[LifecycleRow] = field(default_factory=list)

    def write(self, row: LifecycleRow) -> None:
        """Count a row if it is a decision to plant, to keep or to remove a seed, and not one of a validation."""
        if row.cohort not in (UNSET, "training") or not row.why:
            return
        if row.to_stage == "GERMINATED" and row.cohort is UNSET:
            self.planted += 1
            if len(self.plantings) < LISTED:
                self.plantings.append(row)
        if row.to_stage not in ("FOSSILIZED", "PRUNED") or not row.blueprint:
            return
        self.total += 1
        self.idle += row.to_stage == "PRUNED" and row.gain_mean == 0 and row.gain_se == 0
        if len(self.first) < LISTED:
            self.first.append(row)
        if row.contribution_mean is not None:
            self.measured += 1
            bisect.insort(self.ends, row, key=lambda row: -(row.contribution_mean or 0.0))
            if len(self.ends) > DRAWN_DECISIONS:
                del self.ends[DRAWN_DECISIONS // 2]


class Tally(NamedTuple):
    """Says what became of the seeds of one blueprint at one slot."""

    blueprint: str  # name of the blueprint
    slot: str  # name of the slot
    tried: int  # seeds planted
    kept: int  # seeds fossilized
    pruned: int  # seeds removed by a decision or by a rollback
    contribution: float  # mean contribution to the metric when a seed was kept or removed; nan if never measured
    error: float  # standard error of that mean over seeds; nan with fewer than two
    measured: int  # number of seeds over which that mean is taken
    params_bought: int | None  # parameters of the seeds that were kept; None if the run has no decision rows
    steps_to_keep: float  # mean number of steps from planting to keeping; nan if none was kept
    price: float  # mean number of parameters of the seeds planted; nan if the run has no decision rows


class BlueprintAnalytics:
    """Counts what became of each blueprint at each slot; it can be an output of a run (`esper.grow(..., outputs=[...])`)."""

    def __init__(self) -> None:
        self._prices: dict[tuple[object, ...], int] = {}  # parameters of the seeds that are planted in this step
        # Of each slot with a seed: the row by which the seed was planted or kept, and its parameters, 0 where they are not known.
        self._seeds: dict[tuple[object, ...], tuple[LifecycleRow, int]] = {}
        self._counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self._measured: dict[tuple[str, str], array[float]] = defaultdict(lambda: array("d"))
        self._waited: dict[tuple[str, str], array[int]] = defaultdict(lambda: array("l"))

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Self:
        found = cls()
        for row in rows:
            found.write(row)
        return found

    def write(self, row: Row) -> None:
        match row:
            case DecisionRow(op="GERMINATE", carried_out=True, slot=str(slot), price=int(price)):
                self._prices[_place(row, slot)] = price
            case LifecycleRow(to_stage="GERMINATED" | "FOSSILIZED" | "PRUNED", blueprint=str(blueprint)):
                key, place = (blueprint, row.slot), _place(row, row.slot)
                count = self._counts[key]
                count[row.to_stage] += 1
                if row.to_stage == "GERMINATED":
                    count["priced"] += place in self._prices
                    price = self._prices.pop(place, 0)
                    count["price"] += price
                    self._seeds[place] = row, price
                    return
                if row.contribution_mean is not None:
                    self._measured[key].append(row.contribution_mean)
                seed, params = self._seeds.pop(place, (None, 0))
                if row.to_stage == "FOSSILIZED" and seed is not None:
                    self._waited[key].append(row.step - seed.step)
                    count["params"] += params
                    self._seeds[place] = row, params
            case RollbackRow(twin=False):
                for slot in row.pruned:
                    seed, params = self._seeds.pop(_place(row, slot), (None, 0))
                    if seed is None:
                        continue
                    key = str(seed.blueprint), slot
                    self._counts[key]["PRUNED"] += 1
                    if seed.to_stage == "FOSSILIZED":  # in the same step
                        self._counts[key]["FOSSILIZED"] -= 1
                        self._counts[key]["params"] -= params
                        self._waited[key].pop()
            case EpisodeRow():
                for slot in (*row.grown, *row.unfinished):  # the next episode begins with empty slots
                    self._seeds.pop(_place(row, slot), None)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def tallies(self) -> list[Tally]:
        """Return one for each blueprint and slot, that which was tried most first."""
        found = [
            Tally(
                *key,
                count["GERMINATED"],
                count["FOSSILIZED"],
                count["PRUNED"],
                *mean_and_error(self._measured[key]),
                len(self._measured[key]),
                count["params"] if count["priced"] == count["GERMINATED"] else None,
                mean_and_error(self._waited[key])[0],
                count["price"] / count["priced"] if count["priced"] else NAN,
            )
            for key, count in self._counts.items()
        ]
        return sorted(found, key=lambda tally: (-tally.tried, tally.slot, tally.blueprint))


def _place(row: EnvRow, slot: str) -> tuple[object, ...]:
    """Return a slot of an environment in an episode."""
    return row.cohort, row.task, row.round, row.episode, row.env, slot


class Curve:
    """Keeps values over steps or rounds, at most 2 `POINTS` of them. Which are kept does not depend on how they come in."""

    def __init__(self) -> None:
        self.x: list[float] = []
        self.y: list[tuple[float, ...]] = []
        self._every, self._count = 1, 0

    def add(self, x: float, *y: float) -> None:
        if self._count % self._every == 0:
            self.x.append(x)
            self.y.append(y)
        self._count += 1
        if len(self.x) >= 2 * POINTS:
            self.x, self.y, self._every = self.x[::2], self.y[::2], 2 * self._every


class CurvePoint(NamedTuple):
    """Holds the values of the exported curves at one place (`esper docs exporters`)."""

    x: int  # `step` of the row in a grown run; number of rounds before this one in a training; it never decreases
    time: float  # when the row was written [seconds since 1970]
    values: Mapping[str, float]  # by name of the curve; a quantity that was not measured is missing


Best = Callable[[Floats], np.float64] | None
OF_STEPS: Sequence[tuple[str, str, str | None, Best]] = (
    ("metrics", "metric", "metric", np.max),
    ("twin_metrics", "twin_metric", "metric of the twins", np.max),
    ("losses", "loss", "loss", np.min),
    ("train_losses", "train_loss", None, np.min),
    ("added_param_counts", "added_params", "added parameters", None),
)
"""The quantities of step rows, of which quartiles and the best value over environments are curves: the field of the row, the
prefix of the names of the exported curves, the name of the live curve or None, and the best of the values or None."""
OF_EPISODES: Mapping[str, Best] = {"metric": np.max, "loss": np.min, "added_params": None}
"""Those of the networks at the end of an episode, which a training exports for each of its populations."""
SIZE_CURVES: Mapping[str, str] = {"params": "parameters", "loss": "loss on the probe"}
"""The quantities of size rows, and the names of their curves."""
COUNTED: Mapping[str, str] = {"GERMINATED": "seeds/planted", "FOSSILIZED": "seeds/kept", "PRUNED": "seeds/pruned"}
"""The changes of stage that are counted, and the names of their curves."""
_LONGEST = 60  # characters of a task's name in the name of a curve


class RunModel:
    """Holds what the rows and the other files of a run say.

    `write` takes the rows in order, as they come or from a finished file; `complete` takes in the other files, and works out what
    needs all steps.
    """

    # As of the last call of `complete`. The population is None without steps in the rows.
    status: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    environment: Mapping[str, Any] | None
    population: EpisodeSteps | None
    stays: list[Stay]
    tallies: list[Tally]  # of all episodes but those of validations, the blueprint that was tried most first

    def __init__(self, rounds: range | None = None, history: bool = True) -> None:
        """`rounds` are those of a training, of which the ones of imitation are below 0; None for other runs.

        history: whether every step of an episode is held, which `complete` needs; without it memory is bounded.
        """
        self.planned, self.history = rounds, history
        self.head: RunRow | None = None  # the first row of the events
        self.last: RunRow | None = None  # the last `run` row
        self.changed: list[str] = []  # settings that were changed when the run was resumed
        self.step = -1  # of the last step row
        # Over steps, the 10th, the 50th and the 90th percentile over environments; in a training over rounds.
        self.curves: dict[str, Curve] = {}
        # Seeds planted, kept and pruned so far, and rollbacks, by name of the curve; 0 in a training.
        self.counts = dict.fromkeys((*COUNTED.values(), "rollbacks"), 0)
        self.decided = DecisionLog()
        self.refused: Counter[str] = Counter()  # refused decisions by reason
        # How often, and the first step and the last, by reason, environment, operation, slot and blueprint.
        self.refusals: dict[tuple[str, int, str, str | None, str | None], tuple[int, int, int]] = {}
        self.operations: dict[int, Counter[str]] = {}  # in a training, decisions other than WAIT by round and operation
        self.rollbacks: list[RollbackRow] = []
        self.widenings: list[str] = []  # a sentence each
        self.rounds: list[RoundRow] = []
        # Of a network that becomes wider as a whole: each growth, and each look at its loss.
        self.sizes: list[SizeRow] = []
        # In a training, J of each validation's networks by round.
        self.validated: dict[int, Sequence[float | None]] = {}

        # The state of the population now.
        self._now: StepRow | None = None  # the last
        self._measurement: MeasurementRow | None = None  # the last
        self._seeds: dict[tuple[int, str], str | None] = {}
        self._logs: dict[int, deque[str]] = {}
        self._times: deque[float] = deque(maxlen=TIMED)
        # seconds for full queues of outputs, and of all steps or rounds that told of theirs
        self.waited = self.timed = 0.0

        # The history of the run, which has one episode: rows of a training, which plays many, are not held here.
        self._steps: list[tuple[Any, ...]] = []  # the fields of `EpisodeSteps` but the last
        self._changes: list[LifecycleRow] = []
        # of the last row of phases: share of the time in which training waited for batches, and 95th percentile of these waits
        # [seconds]; None where all examples are in memory
        self.reading: tuple[float, float] | None = None
        self.contributions: list[tuple[int, Floats]] = []  # step, and contribution (E, S) of every seed to the metric
        # The Shapley values (E, S) and the interactions (E, S, S) after the last step at which coalitions were measured there.
        self.coalitions: dict[str, Floats] = {}
        # step, names (F,) of the growth sensors, and their medians (S, F) over environments
        self.sensed: list[tuple[int, Sequence[str], Floats]] = []
        self.phases: list[PhasesRow] = []

        self._analytics = BlueprintAnalytics()
        self._episodes: dict[tuple[str, str], list[EpisodeRow]] = {}  # of the present round, by cohort and task
        self._task_names: dict[str, str] = {}  # as they are in the names of curves

    def update(self, rows: Iterable[Row]) -> Self:
        for row in rows:
            self.write(row)
        return self

    def write(self, row: Row) -> CurvePoint | None:
        """Take in the next row. Returns the point that it adds to the exported curves; None if it adds none."""
        cohort = row.cohort if isinstance(row, PlayedRow) else UNSET  # UNSET outside of a training
        if cohort in (UNSET, "training"):
            self._analytics.write(row)
        match row:
            case RunRow():
                if self.head is None or row.status == "running":
                    self._times.clear()
                self.head, self.last = self.head or row, row
                self.changed += row.changed
            case RoundRow():
                return self._write_round(row)
            case SizeRow():
                return self._write_size(row)
            case StepRow() if cohort is UNSET:  # a training shows its rounds instead
                return self._write_step(row)
            case GradientsRow() if cohort is UNSET:
                return CurvePoint(row.step, row.time, _spread("host_gradient", None, row.host_gradients)[0])
            case LifecycleRow():
                self._write_change(row)
            case DecisionRow():
                self._write_decision(row)
            # The next three come before or after the row of their step.
            case MeasurementRow() if cohort is UNSET:
                self._write_measurement(row)
            case SensorsRow() if cohort is UNSET and self.history:
                known = np.ma.masked_invalid(np.array(row.readings, float))
                medians = np.ma.median(known, axis=0).filled(np.nan)  # type: ignore[no-untyped-call]
                self.sensed.append((row.step, row.sensors, medians))
            case PhasesRow() if cohort is UNSET:
                self._write_phases(row)
            case RollbackRow():
                self.rollbacks.append(row)
                if cohort is UNSET and not row.twin:
                    self.counts["rollbacks"] += 1
                    self._log(
                        row.env, f"step {row.step}: restored to its last snapshot: {row.reason.replace('_', ' ')}"
                    )
            case WideningRow():
                sizes = sorted(set(row.host_param_counts))
                hosts = " or ".join(f"{size:,}" for size in sizes)
                self.widenings.append(f"step {row.step}: all networks became wider; a host has {hosts} parameters")
                for env in range(len(row.host_param_counts)):
                    self._log(env, self.widenings[-1])
            case EpisodeRow(cohort=str(cohort), task=str(task)):
                self._episodes.setdefault((cohort, task), []).append(row)
            case EpisodeRow():
                grown = ", ".join(f"{name} at {slot}" for slot, name in row.grown.items()) or "nothing"
                self._log(row.env, f"end of episode {row.episode}: grew {grown}")
            case EvaluationRow(cohort="validation", round=int(number)):
                self.validated[number] = [*self.validated.get(number, []), *row.objectives]  # a row for each task
        return None

    def _write_round(self, row: RoundRow) -> CurvePoint:
        self.rounds.append(row)
        self._times.append(row.time)
        if (waited := row.figures.get("output_wait_seconds")) is not None:
            self.waited += waited
            self.timed += row.seconds
        values = {}
        for name, value in row.figures.items():
            if value is not None:
                self.curves.setdefault(name.replace("_", " "), Curve()).add(row.round, value, value, value)
                values[f"round/{name}"] = float(value)
        for (cohort, task), rows in self._episodes.items():
            ended = [each for each in rows if each.round == row.round]
            if task not in self._task_names:  # in characters that every target of an export accepts; each has its own
                base = re.sub(r"[^A-Za-z0-9_-]+", "_", task)[-_LONGEST:] or "_"
                names = itertools.chain([base], (f"{base}-{count}" for count in itertools.count(2)))
                self._task_names[task] = next(name for name in names if name not in self._task_names.values())
            for figure, best in OF_EPISODES.items():
                name = f"{cohort}/{self._task_names[task]}/{figure}"
                values |= _spread(name, best, [getattr(each, figure) for each in ended])[0]
        self._episodes.clear()
        return CurvePoint(len(self.rounds) - 1, row.time, values)

    def _write_size(self, row: SizeRow) -> CurvePoint:
        self.sizes.append(row)
        self.step, values = row.step, {}
        for name, curve in SIZE_CURVES.items():
            if (size := getattr(row, name)) is not None:
                values[f"size/{name}"] = value = float(size)
                self.curves.setdefault(curve, Curve()).add(row.step, value, value, value)
        return CurvePoint(row.step, row.time, values)

    def _write_step(self, row: StepRow) -> CurvePoint:
        self.step, self._now = row.step, row
        self._times.append(row.time)
        if self.history:
            figures = np.array((row.metrics, row.losses, row.train_losses), float)
            twin = None if row.twin_metrics is None else np.array(row.twin_metrics, float)
            added = np.array(row.added_param_counts, np.int64)
            state = np.array(row.stages, np.int8), np.array(row.alphas, np.float64)
            self._steps.append((row.step, *figures, twin, added, *state))
        found: dict[str, float] = {}
        for field_, name, live, best in OF_STEPS:
            values, ends = _spread(name, best, getattr(row, field_) or ())
            found |= values
            if live is not None and ends:
                self.curves.setdefault(live, Curve()).add(row.step, *ends)
        return CurvePoint(row.step, row.time, found | self.counts)

    def _write_change(self, row: LifecycleRow) -> None:
        self.decided.write(row)
        if row.cohort is not UNSET:
            return  # a training has no step rows that its changes would be drawn with
        self._seeds[row.env, row.slot] = row.blueprint
        if row.to_stage in COUNTED:
            self.counts[COUNTED[row.to_stage]] += 1
        seed, why = f"{row.blueprint} " if row.blueprint else "", f": {row.why}" if row.why else ""
        self._log(row.env, f"step {row.step}: {seed}at {row.slot} {row.from_stage} to {row.to_stage}{why}")
        if self.history:
            self._changes.append(row)

    def _write_decision(self, row: DecisionRow) -> None:
        if row.cohort == "training" and isinstance(row.round, int) and row.op != "WAIT":
            self.operations.setdefault(row.round, Counter())[row.op] += 1
        if row.cohort is not UNSET:
            return
        if row.refusal is not None:
            self.refused[row.refusal] += 1
            refused = row.refusal, row.env, row.op, row.slot, row.blueprint
            count, first, _ = self.refusals.get(refused, (0, row.step, row.step))
            self.refusals[refused] = count + 1, first, row.step
            where = row.slot or "no slot"
            self._log(row.env, f"step {row.step}: {row.op} at {where} refused: {row.refusal.replace('_', ' ')}")
        if row.probabilities is not None and row.value is not None:
            chosen = next((value for value in row.probabilities if value is not None), None)
            sure = "" if chosen is None else f", probability {chosen:.2f}"
            said = f"step {row.step}: the policy chose {row.op} at {row.slot}{sure}, value {row.value:+.3f}"
            self._log(row.env, said)

    def _write_measurement(self, row: MeasurementRow) -> None:
        self._measurement = row
        if not self.history:
            return
        if row.contribution_means is not None:
            self.contributions.append((row.step, np.array(row.contribution_means, float)))
        for name, values in (("shapley", row.shapley_means), ("interaction", row.interactions)):
            if values is not None:
                found = np.array(values, float)
                before = self.coalitions.get(name, np.full(found.shape, np.nan))
                self.coalitions[name] = np.where(np.isfinite(found), found, before)

    def _write_phases(self, row: PhasesRow) -> None:
        whole = sum(row.phase_seconds.values())
        if row.reading_p95 is not None:
            self.reading = row.phase_seconds.get("reading", 0.0) / whole if whole else NAN, row.reading_p95
        if row.output_wait_seconds is not None:
            self.waited += row.output_wait_seconds
            self.timed += whole
        if self.history:
            self.phases.append(row)

    def _log(self, env: int, words: str) -> None:
        self._logs.setdefault(env, deque(maxlen=LOGGED)).append(words)

    @property
    def slots(self) -> Sequence[str]:
        return () if self.head is None else self.head.slots

    @property
    def why_not_larger(self) -> str:
        """Why a network that becomes wider as a whole is not larger, as of its last row."""
        last = self.sizes[-1]
        return "it became wider at this step" if last.widths else last.why or ""

    @property
    def envs(self) -> int:
        """Environments of the last step row; 0 before the first."""
        return 0 if self._now is None else len(self._now.stages)

    def state(self, env: int, slot: int) -> tuple[Stage, float]:
        """Return the stage and dose of one slot of one environment as it is now."""
        assert self._now is not None, "no step yet"
        alpha = self._now.alphas[env][slot]
        return Stage(int(self._now.stages[env][slot])), NAN if alpha is None else float(alpha)

    def cell(self, env: int, slot: int) -> tuple[Stage, float, str | None, float, float]:
        """Return stage, dose and seed of one slot of one environment now, and its contribution with the standard error.

        The contribution is nan if it was not measured.
        """
        stage, alpha = self.state(env, slot)
        seed = self._seeds.get((env, self.slots[slot])) if stage in IN_BUDGET else None
        found = self._measurement
        if seed is None or found is None or found.step != self.step:
            return stage, alpha, seed, NAN, NAN
        measured = (
            None if each is None else each[env][slot] for each in (found.contribution_means, found.contribution_ses)
        )
        value, error = (NAN if each is None else float(each) for each in measured)
        return stage, alpha, seed, value, error

    def log(self, env: int) -> list[str]:
        """Return the last events of an environment, the newest first."""
        return list(reversed(self._logs.get(env, ())))

    def done(self) -> tuple[int, int]:
        """Return how many steps are done, and how many the episode has; rounds in a training."""
        if self.planned is not None:
            return (self.rounds[-1].round - self.planned.start + 1 if self.rounds else 0), len(self.planned)
        return self.step + 1, 0 if self.head is None else self.head.steps

    def seconds_left(self) -> float:
        """Estimate the time to the end of the episode or training at the pace of the last steps or rounds [seconds], or nan."""
        done, whole = self.done()
        if not whole or len(self._times) < 2 or self.last is None or self.last.status != "running":
            return NAN
        return float(np.median(np.diff(self._times))) * max(whole - done, 0)

    def complete(self, run: "OpenRun") -> Self:
        """Take in the other files of the run, and work out what needs all steps so far. Further rows and calls may follow.

        Raises InputError if one of these files is damaged.
        """
        assert self.history
        self.status, self.config = run.status, run.checked_config
        self.summary, self.environment = run.summary, run.environment
        self.tallies = self._analytics.tallies()
        self.population, self.stays = None, []
        if self.head is not None and self._steps:
            self.population, self.stays = _timeline(self.head, self._steps, self._changes, self.rollbacks)
        return self


def _timeline(
    head: RunRow, steps: Sequence[tuple[Any, ...]], changes: Sequence[LifecycleRow], rollbacks: Iterable[RollbackRow]
) -> tuple[EpisodeSteps, list[Stay]]:
    """Return the steps, and the stays of every slot but those in DORMANT, with the removals by rollbacks."""
    numbers, metric, loss, train_loss, twins, added, stages, alphas = zip(*steps, strict=True)
    slots, names = ({name: index for index, name in enumerate(each)} for each in (head.slots, head.blueprints))
    stage, at = np.array(stages), {step: index for index, step in enumerate(numbers)}
    seed = np.full(stage.shape, NO_SEED)
    planted: dict[tuple[int, str], list[tuple[int, str | None]]] = {}
    stays, reasons = list[Stay](), {}
    for row in changes:
        place = row.env, slots[row.slot]
        if row.step in at:
            seed[at[row.step] :, *place] = NO_SEED if row.blueprint is None else names.get(row.blueprint, NO_SEED)
        if row.why is not None:
            reasons[*place, row.step] = row.why
        if row.to_stage == "GERMINATED":
            planted.setdefault((row.env, row.slot), []).append((row.step, row.blueprint))
        if row.to_stage in ("GERMINATED", "PRUNED"):
            stays.append(Stay(*place, row.step, row.step, Stage[row.to_stage], row.blueprint, row.alpha, row.why))
    for lost in rollbacks:
        for slot in lost.pruned if lost.cohort is UNSET and not lost.twin else ():
            why = f"lost in a rollback ({lost.reason}), without a decision of the controller"
            before = [name for step, name in planted.get((lost.env, slot), ()) if step <= lost.step]
            name = before[-1] if before else None
            stays.append(Stay(lost.env, slots[slot], lost.step, lost.step, Stage.PRUNED, name, NAN, why))

    seed = np.where(among(stage, IN_BUDGET), seed, NO_SEED)
    twin = None if any(each is None for each in twins) else np.array(twins)
    probe, losses, training = np.array([metric, loss, train_loss])
    population = EpisodeSteps(
        np.array(numbers), probe, losses, training, twin, np.array(added), stage, np.array(alphas), seed
    )
    for env, slot in np.ndindex(stage.shape[1:]):
        own, seeds = stage[:, env, slot], seed[:, env, slot]
        cuts = np.flatnonzero((np.diff(own) != 0) | (np.diff(seeds) != 0)) + 1
        for first, last in itertools.pairwise([0, *cuts.tolist(), len(own)]):
            if own[first] == Stage.DORMANT:
                continue
            start, stop = int(numbers[first]), int(numbers[last - 1]) + 1
            blueprint = head.blueprints[int(seeds[first])] if seeds[first] != NO_SEED else None
            alpha, reason = float(population.alpha[last - 1, env, slot]), reasons.get((env, slot, start))
            stays.append(Stay(env, slot, start, stop, Stage(int(own[first])), blueprint, alpha, reason))
    return population, stays


def _spread(name: str, best: Best, values: Iterable[float | None]) -> tuple[dict[str, float], tuple[float, ...]]:
    """Summarise the values (E,) that are not None; empty if there are none.

    Returns the median, the quartiles (linear interpolation) and the best by name of their curve, and the 10th, the 50th and the
    90th percentile.
    """
    known = np.array([value for value in values if value is not None], np.float64)
    if not known.size:
        return {}, ()
    lowest, low, middle, high, highest = np.percentile(known, (10, 25, 50, 75, 90)).tolist()
    shown = {f"{name}/median": middle, f"{name}/q25": low, f"{name}/q75": high}
    if best is not None:
        shown[f"{name}/best"] = float(best(known))
    return shown, (lowest, middle, highest)
