"""The journal: an observer that writes what happens in an episode as rows of the events. E environments, S slots."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from esper.leyline.stages import among
from esper.leyline.verdicts import Vital
from esper.leyline.view import Floats, Outcome, Scores, Seeds, Transitions, View
from esper.nissa.events import Basis, anomaly_rows, episode_rows, lifecycle_rows, reward_row, rollback_rows, step_row
from esper.nissa.hub import Hub
from esper.nissa.rows import DecisionRow, GradientsRow, PhasesRow, PlayedRow, StepRow
from esper.tolaria.detail import decision_rows, gate_rows, gradients_row, measurement_row, sensors_row
from esper.tolaria.early_stopping import UNDER_WAY
from esper.tolaria.governor import Verdicts
from esper.tolaria.play import Observer, Step
from esper.tolaria.population import ParameterNorms

if TYPE_CHECKING:
    from esper.tolaria.engine import Engine


_SAMPLES = 30  # rows of sensors and of phases in an episode, if the config says nothing else


class Changes(NamedTuple):
    """Changes of stage between two states of the seeds, and the bases of the decisions behind them."""

    transitions: Transitions
    before: Seeds
    after: Seeds
    bases: dict[tuple[int, int], Basis]  # by environment and slot


class Trace(NamedTuple):
    """The events within a step, beside its outcome. Rows are environments, then twins."""

    changes: tuple[Changes, ...]  # those of the decisions, then those of the tick
    scores: Scores  # (rows,) before the rollback
    found: Verdicts  # (rows,) a `Vital`
    ticked: Seeds  # before the rollback
    governed: Seeds  # after the rollback
    twins: Floats | None  # (E,) metrics of the twins
    reads: int  # number of device reads
    parameter_norms: ParameterNorms | None = (
        None  # of all rows and the ghost, before the rollback; None if not asked for
    )


class Source(NamedTuple):
    """The population of a training to which rows belong."""

    cohort: str  # 'training' or 'validation'
    task: str
    round: int
    first_env: int | msgspec.UnsetType = (
        msgspec.UNSET
    )  # number of the first environment of a shard, if there are several


class Journal(Observer):
    """Write the rows of an episode.

    Writes the decisions of each step, its changes of stage, its rollbacks and its measurements, and at the end of an
    episode a row for every environment. In a training, whose rows come from several populations, every row names its
    `source`.
    """

    def __init__(
        self,
        engine: "Engine[Any]",
        hub: Hub,
        source: Source | None = None,
        paid: Callable[[], Mapping[str, Floats]] | None = None,
    ) -> None:
        """paid: gives the components (E,) of the rewards of the last step, by name; None where no reward is paid."""
        self.engine, self.hub, self.source, self.paid = engine, hub, source, paid
        self._spent: dict[str, float] = {}  # seconds by phase before the step
        self._phases: dict[str, float] = {}  # seconds by phase of the steps since the last row
        self._covered = self._reads = 0  # number of these steps, and their reads of the device
        self._written = hub.seconds  # of the outputs, up to the last step
        telemetry, config = engine.config.telemetry, engine.config
        self._every = telemetry.sensor_rows_every or math.ceil(config.steps / _SAMPLES)
        measured = config.probe.sensors_every or 1
        self._sensors_every = measured * math.ceil(self._every / measured)

    def going(self, view: View) -> bool:
        """Note the time before a step, and ask for the norms of each parameter if the row of this step is to have them."""
        self._spent = dict(self.engine.timer.seconds)
        full = self.hub.level == "debug" and self.hub.wants(GradientsRow)
        self.engine.parameter_norms = full and self._gradients_due(view.step + 1, full)
        return True

    def stepped(self, step: Step) -> None:
        """Write the rows of a step."""
        hub, engine, outcome, view = self.hub, self.engine, step.outcome, step.after
        trace, config = engine.trace, engine.config
        assert trace is not None, "a step must be played before its rows are written"
        hub.begin_step(restored=bool((trace.found != Vital.GOOD).any()))
        full = hub.level == "debug"
        if hub.wants(DecisionRow):
            rows: list[PlayedRow] = [
                *decision_rows(step.view, step.decision, outcome, config.gates, engine.population, full=full)
            ]
            for transitions, before, after, bases in trace.changes:
                rows += lifecycle_rows(outcome.episode, outcome.step, view.space, transitions, before, after, bases)
            rows += rollback_rows(outcome, view.space, trace.found, trace.scores, trace.ticked, trace.governed)
            rows += anomaly_rows(outcome, trace.found, (hub.level, hub.raised if hub.level != hub.asked else 0))
            if hub.wants(StepRow):
                rows += self._of_step(step, trace, full)
            self._write(rows)  # at once: a call of the system costs more than a row
        hub.end_step()
        if outcome.terminal and engine.stopping is None:  # else `close` writes the networks that would be exported
            assert outcome.exported is not None, "exported networks are measured at the end of an episode"
            self._close(view, outcome.exported, view.seeds)

    def _of_step(self, step: Step, trace: Trace, full: bool) -> Iterable[PlayedRow]:
        """Yield the rows that every step has, and those that are due after so many steps."""
        outcome, view, config = step.outcome, step.after, self.engine.config
        number = outcome.step + 1
        yield step_row(view, outcome, twin_metrics=trace.twins)
        yield from gate_rows(step.view, view, outcome, config.gates)
        if (measured := measurement_row(view, outcome, config.probe.shapley_samples, full=full)) is not None:
            yield measured
        due = full or number % self._sensors_every == 0
        if due and (sensors := sensors_row(view, outcome)) is not None:
            yield sensors
        if self.paid is not None:
            yield reward_row(outcome, self.paid())
        self._count(step, trace.reads)
        if full or number % self._every == 0 or outcome.terminal:
            yield self._phases_row(outcome)
        if self._gradients_due(number, full):
            yield gradients_row(view, outcome, trace.parameter_norms)

    def _gradients_due(self, number: int, full: bool) -> bool:
        """Whether a step has a row of gradients. number: of the step, counted from 1; full: whether the level is debug."""
        every = self.engine.config.telemetry.gradients_every
        return number % every == 0 if every else full and every is None

    def _count(self, step: Step, reads: int) -> None:
        """Add the seconds of each phase of a step, and its reads of the device."""
        spent = {name: now - self._spent.get(name, 0.0) for name, now in self.engine.timer.seconds.items()}
        writing, self._written = self.hub.seconds - self._written, self.hub.seconds
        for name, seconds in {"deciding": step.deciding, "writing": writing, **spent}.items():
            self._phases[name] = self._phases.get(name, 0.0) + seconds
        self._covered, self._reads = self._covered + 1, self._reads + reads

    def _phases_row(self, outcome: Outcome) -> PhasesRow:
        """Return the row of the steps that were counted, and count from 0 again."""
        row = PhasesRow(
            episode=outcome.episode,
            step=outcome.step,
            covered=self._covered,
            phase_seconds={name: float(f"{seconds:.4g}") for name, seconds in self._phases.items()},
            device_reads=self._reads,
        )
        self._phases.clear()
        self._covered = self._reads = 0
        return row

    def close(self, exported: Scores, ended: Seeds) -> None:
        """Write the end of an episode with early stopping, from the scores of the restored networks and the seeds before that."""
        self._close(self.engine.view(), exported, ended)

    def _close(self, view: View, exported: Scores, ended: Seeds) -> None:
        rollbacks = self.engine.governor.record.rollbacks
        unfinished = among(ended.stage, UNDER_WAY)
        self._write(episode_rows(view, exported, self.engine.state.step, unfinished, rollbacks))

    def _write(self, rows: Iterable[PlayedRow]) -> None:
        self.hub.extend(self._sourced(row) for row in rows)

    def _sourced(self, row: PlayedRow) -> PlayedRow:
        if self.source is not None:
            row.cohort, row.task, row.round, row.first_env = self.source
        return row
