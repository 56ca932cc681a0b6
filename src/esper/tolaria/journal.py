"""The journal: an observer that writes what happens in an episode as rows of the events. E environments, S slots."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from esper.leyline.stages import among
from esper.leyline.verdicts import Vital
from esper.leyline.view import Floats, Scores, Seeds, Transitions, View
from esper.nissa.events import Basis, episode_rows, lifecycle_rows, rollback_rows, step_row
from esper.nissa.hub import Hub
from esper.nissa.rows import DecisionRow, GradientsRow, MeasurementRow, PhasesRow, PlayedRow, SensorsRow, StepRow
from esper.tolaria.detail import decision_rows, gradients_row, measurement_row, sensors_row
from esper.tolaria.early_stopping import UNDER_WAY
from esper.tolaria.governor import Verdicts
from esper.tolaria.play import Observer, Step

if TYPE_CHECKING:
    from esper.tolaria.engine import Engine


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


class Source(NamedTuple):
    """The population of a training to which rows belong."""

    cohort: str  # 'training' or 'validation'
    task: str
    round: int


class Journal(Observer):
    """Write the rows of an episode.

    Writes the decisions of each step, its changes of stage, its rollbacks and its measurements, and at the end of an
    episode a row for every environment. In a training, whose rows come from several populations, every row names its
    `source`.
    """

    def __init__(self, engine: "Engine[Any]", hub: Hub, source: Source | None = None) -> None:
        self.engine, self.hub, self.source = engine, hub, source
        self._spent: dict[str, float] = {}  # seconds by phase before the step
        every = engine.config.telemetry.gradients_every
        if every is None:
            every = 1 if hub.level == "debug" else 0
        self._stride = every or sys.maxsize

    def going(self, view: View) -> bool:
        """Note the time before a step."""
        self._spent = dict(self.engine.timer.seconds)
        return True

    def stepped(self, step: Step) -> None:
        """Write the rows of a step."""
        hub, engine, outcome, view = self.hub, self.engine, step.outcome, step.after
        trace, config = engine.trace, engine.config
        assert trace is not None, "a step must be played before its rows are written"
        hub.begin_step(restored=bool((trace.found != Vital.GOOD).any()))
        if hub.wants(DecisionRow):
            self._write(decision_rows(step.view, step.decision, outcome, config.gates, engine.population))
        for transitions, before, after, bases in trace.changes:
            self._write(lifecycle_rows(outcome.episode, outcome.step, view.space, transitions, before, after, bases))
        self._write(rollback_rows(outcome, view.space, trace.found, trace.scores, trace.ticked, trace.governed))
        if hub.wants(StepRow):
            self._write([step_row(view, outcome, twin_metrics=trace.twins)])
        if hub.wants(MeasurementRow):
            self._write([measurement_row(view, outcome, config.probe.shapley_samples)])
        if hub.wants(SensorsRow) and (sensors := sensors_row(view, outcome)) is not None:
            self._write([sensors])
        if hub.wants(PhasesRow):
            self._write([self._phases(step, trace.reads)])
        if hub.wants(GradientsRow) and (outcome.step + 1) % self._stride == 0:
            self._write([gradients_row(view, outcome)])
        hub.end_step()
        if outcome.terminal and engine.stopping is None:  # else `close` writes the networks that would be exported
            assert outcome.exported is not None, "exported networks are measured at the end of an episode"
            self._close(view, outcome.exported, view.seeds)

    def _phases(self, step: Step, reads: int) -> PhasesRow:
        """Return the seconds of each phase of the step."""
        spent = {name: now - self._spent.get(name, 0.0) for name, now in self.engine.timer.seconds.items()}
        seconds = {name: round(each, 6) for name, each in {"deciding": step.deciding, **spent}.items()}
        return PhasesRow(
            episode=step.outcome.episode, step=step.outcome.step, phase_seconds=seconds, device_reads=reads
        )

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
            row.cohort, row.task, row.round = self.source
        return row
