"""Write what happens in an episode as rows of the events. E environments, S slots."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.lifecycle.gates import Gates, judge
from esper.leyline.lifecycle.masks import offered
from esper.leyline.lifecycle.view import Bools, Floats, Outcome, Scores, Seeds, Space, Transitions, View, take
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, RELEVANT, Blend, Head, Op, Refusal, Stage, Vital, among
from esper.nissa.events import digits, rounded
from esper.nissa.hub import Hub
from esper.nissa.rows import (
    AnomalyRow,
    DecisionRow,
    EpisodeRow,
    GateRow,
    GradientsRow,
    LifecycleRow,
    MeasurementRow,
    PhasesRow,
    PlayedRow,
    RewardRow,
    RollbackRow,
    SensorsRow,
    StepRow,
    WideningRow,
)
from esper.tolaria.early_stopping import UNDER_WAY
from esper.tolaria.engine import Decision, Engine, Observer, Step, Trace
from esper.tolaria.measure.coalitions import attribute
from esper.tolaria.population import Population
from esper.tolaria.runtime import Waits
from esper.tolaria.seed_history import GATES

_SAMPLES = 30  # rows of sensors and of phases in an episode, if the config says nothing else
# the changes that have a basis; a removed seed may leave PRUNED in the same step
_DECIDED = (Stage.GERMINATED, Stage.PRUNED, Stage.FOSSILIZED)
Place = Mapping[str, Any]
"""The episode and the step of a row, and in a training the fields of `PlayedRow`."""


class Journal(Observer):
    """Writes the rows of an episode.

    Writes the decisions of each step, its changes of stage, its rollbacks and its measurements, and at the end of an episode a
    row for every environment. In a training, whose rows come from several populations, every row names its `source`.
    """

    def __init__(
        self,
        engine: Engine[Any],
        hub: Hub,
        source: Mapping[str, Any] | None = None,
        paid: Callable[[], Mapping[str, Floats]] | None = None,
    ) -> None:
        """source: the fields of `PlayedRow` that name the population. None outside of a training.

        paid: gives the components (E,) of the rewards of the last step, by name; None where no reward is paid.
        """
        self.engine, self.hub, self.source, self.paid = engine, hub, source or {}, paid
        self._spent: dict[str, float] = {}  # seconds by phase before the step
        self._phases: dict[str, float] = {}  # seconds by phase of the steps since the last row
        self._covered = self._reads = 0  # number of these steps, and their reads of the device
        self._waits_before = self._counts()  # waits for batches before the step
        self._waits = np.zeros_like(self._waits_before)  # those in the steps since the last row
        self._written = hub.seconds  # of the outputs, up to the last step
        self._waited = hub.waits()  # up to the last row of phases
        telemetry, config = engine.config.telemetry, engine.config
        self._judged: tuple[View, Gates] | None = None  # the gates of the last view
        self._every = telemetry.sensor_rows_every or math.ceil(config.steps / _SAMPLES)
        measured = config.probe.sensors_every or 1
        self._sensors_every = measured * math.ceil(self._every / measured)

    def going(self, view: View) -> bool:
        """Note the time before a step, and ask for the norms of each parameter if the row of this step is to have them."""
        self._spent, self._waits_before = dict(self.engine.timer.seconds), self._counts()
        full = self.hub.level == "debug" and self.hub.wants(GradientsRow)
        self.engine.parameter_norms = full and self._gradients_due(view.step + 1, full)
        return True

    def stepped(self, step: Step) -> None:
        hub, engine, outcome, view = self.hub, self.engine, step.outcome, step.after
        trace = engine.trace
        assert trace is not None, "a step must be played before its rows are written"
        hub.begin_step(restored=bool((trace.found != Vital.GOOD).any()))
        full = hub.level == "debug"
        if hub.wants(DecisionRow):
            gates, envs = self._gates(step.view), len(outcome.actions.op)
            place = {**self.source, "episode": outcome.episode, "step": outcome.step}
            rows: list[PlayedRow] = [
                *decision_rows(place, step.view, step.decision, outcome, gates, engine.population, full=full)
            ]
            for change in trace.changes:
                rows += lifecycle_rows(place, view.space, *change)
            rows += rollback_rows(place, view.space, envs, trace, engine.state.seeds)
            if (wider := trace.widening) is not None:
                widths = {name: list(each) for name, each in wider.widths.items()}
                hosts = view.host_params
                rows.append(WideningRow(**place, host_param_counts=hosts, widths=widths, left_out=wider.left_out))
            raised = hub.raised if hub.level != hub.asked else 0
            for reason in sorted(set(trace.found[trace.found != Vital.GOOD].tolist())):
                failed = np.flatnonzero(trace.found == reason)
                row = AnomalyRow(
                    **place,
                    reason=Vital(reason).name.lower(),
                    failed_envs=failed[failed < envs].tolist(),
                    failed_twins=(failed[failed >= envs] - envs).tolist() or (),
                    raised_level=hub.level if raised else None,
                    raised_steps=raised,
                )
                rows.append(row)
            if hub.wants(StepRow):
                rows += gate_rows(place, step.view, view, gates, self._gates(view))
                rows += self._measured_rows(place, step, trace, full)
            hub.extend(rows)  # at once: a call of the system costs more than a row
        hub.end_step()
        if outcome.terminal and engine.stopping is None:  # else `close` writes the networks that would be exported
            assert outcome.exported is not None, "exported networks are measured at the end of an episode"
            self.close(outcome.exported, view.seeds)

    def _measured_rows(self, place: Place, step: Step, trace: Trace, full: bool) -> Iterator[PlayedRow]:
        outcome, view, config = step.outcome, step.after, self.engine.config
        measured, envs, number = view.measurements, len(view.host_params), outcome.step + 1
        yield StepRow(
            **place,
            metrics=rounded(outcome.after.metric),
            losses=rounded(outcome.after.loss),
            train_losses=rounded(measured.train_loss),
            stages=view.seeds.stage,
            alphas=rounded(view.seeds.alpha),
            added_param_counts=outcome.after.added_params,
            twin_metrics=None if outcome.twin is None else rounded(outcome.twin[1].metric),
        )
        arrays = {
            "contribution_means": measured.contribution.mean,
            "contribution_ses": measured.contribution.se,
            "gain_means": measured.gain.mean,
            "gain_ses": measured.gain.se,
            "participations": measured.participation if full else None,  # the sensors have it less often
        }
        if (values := view.coalitions) is not None and values.step == view.step:
            shares = take(attribute(values, config.probe.shapley_samples), slice(0, envs))
            arrays |= {"shapley_means": shares.shapley.mean, "shapley_ses": shares.shapley.se}
            arrays["interactions"] = shares.interaction
        known: dict[str, Any] = {
            name: rounded(value) for name, value in arrays.items() if value is not None and not np.isnan(value).all()
        }
        if known:
            yield MeasurementRow(**place, **known)
        due = full or number % self._sensors_every == 0
        if due and not measured.sensor_age and np.isfinite(measured.sensors).any():
            yield SensorsRow(**place, sensors=view.space.sensors, readings=rounded(measured.sensors))
        if self.paid is not None:
            paid = self.paid()
            total = rounded(np.sum(list(paid.values()), axis=0))
            yield RewardRow(**place, rewards=total, components={name: rounded(paid[name]) for name in paid})
        spent = {name: now - self._spent.get(name, 0.0) for name, now in self.engine.timer.seconds.items()}
        writing, self._written = self.hub.seconds - self._written, self.hub.seconds
        for name, seconds in {"deciding": step.deciding, "writing": writing, **spent}.items():
            self._phases[name] = self._phases.get(name, 0.0) + seconds
        reads = 1 + bool((trace.found != Vital.GOOD).any())  # what was rolled back is measured again
        self._covered, self._reads = self._covered + 1, self._reads + reads
        self._waits += self._counts() - self._waits_before
        if full or number % self._every == 0 or outcome.terminal:
            phases = {name: float(f"{seconds:.4g}") for name, seconds in self._phases.items()}
            more: dict[str, Any] = {}
            if self._waits.any():
                more["reading_p95"] = digits(Waits.p95(self._waits))
            if self._waited is not None and (now := self.hub.waits()) is not None:
                more["output_waits"] = now["waits"] - self._waited["waits"]
                more["output_wait_seconds"] = round(now["waiting_seconds"] - self._waited["waiting_seconds"], 3)
                self._waited = now
            yield PhasesRow(**place, covered=self._covered, phase_seconds=phases, device_reads=self._reads, **more)
            self._phases, self._covered, self._reads = {}, 0, 0
            self._waits[:] = 0
        if self._gradients_due(number, full):
            host, seeds = (
                {name: rounded(norms[:envs]) for name, norms in by_name.items()} or None
                for by_name in trace.parameter_norms or ({}, {})
            )
            yield GradientsRow(
                **place,
                host_gradients=rounded(measured.gradient_norm),
                seed_gradients=rounded(measured.seed_gradient_norm),
                host_parameter_gradients=host,
                seed_parameter_gradients=seeds,
            )

    def _gates(self, view: View) -> Gates:
        """Return the gates of a view. Those after a step are those before the next one, which need not be judged again."""
        if self._judged is None or self._judged[0] is not view:
            self._judged = view, judge(view.seeds, view.measurements, self.engine.config.gates)
        return self._judged[1]

    def _counts(self) -> NDArray[np.int64]:
        """Return the waits for batches so far, by their length; empty where all examples are in memory."""
        waits = self.engine.population.waits
        return np.zeros(0, np.int64) if waits is None else waits.counts.copy()

    def _gradients_due(self, number: int, full: bool) -> bool:
        """Return whether a step has a row of gradients. number: of the step, counted from 1; full: whether the level is debug."""
        every = self.engine.config.telemetry.gradients_every
        return number % every == 0 if every else full and every is None

    def close(self, exported: Scores, ended: Seeds) -> None:
        """Write the end of an episode, from the scores of the exported networks; `ended` are the seeds before early stopping."""
        unfinished, rollbacks = among(ended.stage, UNDER_WAY), self.engine.governor.record.rollbacks
        self.hub.extend(episode_rows(self.source, self.engine.view(), exported, unfinished, rollbacks))


def decision_rows(
    place: Place,
    view: View,
    decision: Decision,
    outcome: Outcome,
    judged: Gates,
    population: Population,
    *,
    full: bool = False,
) -> Iterator[DecisionRow]:
    """Yield a row for each decision but WAIT on a view; with `full`, also for those to WAIT, with the values of all sensors."""
    actions, space, seeds, measured = outcome.actions, view.space, view.seeds, view.measurements
    acting = np.flatnonzero((actions.op != Op.WAIT) | full)
    if not len(acting):
        return
    counts, accepted = _counts(view, outcome), outcome.accepted
    for env in acting.tolist():
        op, slot = int(actions.op[env]), int(actions.slot[env])
        known, there = 0 <= op < len(Op), op != Op.WAIT and 0 <= slot < len(space.slots)
        row: dict[str, Any] = {}  # the fields that this decision has; the others keep their defaults
        for head, menu in ((Head.TEMPO, space.tempos), (Head.TARGET, space.targets)):
            choice = int(actions[head][env])
            if known and RELEVANT[op, head] and 0 <= choice < len(menu):
                row[head.name.lower()] = menu[choice]
        if there:
            stage = Stage(int(seeds.stage[env, slot]))
            row["stage"] = stage.name
            # The seed that the decision is about: the one to be planted, or the one in the slot.
            plants = op == Op.GERMINATE
            chosen = actions if plants else seeds
            index, blend = (
                int(field[env] if plants else field[env, slot]) for field in (chosen.blueprint, chosen.blend)
            )
            if 0 <= index < len(space.blueprints) and 0 <= blend < len(Blend):
                asked = (np.array([each], np.int64) for each in (env, slot, index, blend))
                row["blueprint"], row["blend"] = space.blueprints[index].name, Blend(blend).name
                row["price"] = int(population.table.price(*asked)[0])
            for name in ("contribution", "gain"):
                estimate = getattr(measured, name)
                row[f"{name}_mean"] = digits(estimate.mean[env, slot])
                row[f"{name}_se"] = digits(estimate.se[env, slot])
            if stage in GATES:
                gate = getattr(judged, GATES[stage])
                row["gate_checks"] = gate.reason(env, slot)
                row["margins"] = {check.name: digits(check.margin[env, slot]) for check in gate.checks}
            read = space.sensors if full else (decision.sensors or {}).get(Op(op), ()) if known else ()
            values = measured.sensors[env, slot].tolist()
            row["rule_sensors"] = {
                name: digits(values[space.sensors.index(name)]) for name in read if name in space.sensors
            }
        if decision.judgement is not None:
            row["probabilities"] = rounded(decision.judgement.probability[env])
            row["entropies"] = rounded(decision.judgement.entropy[env])
            row["value"] = digits(decision.judgement.value[env])
        yield DecisionRow(
            **place,
            env=env,
            op=Op(op).name if known else str(op),
            slot=space.slots[slot] if there else None,
            carried_out=bool(accepted[env]),
            refusal=Refusal(int(outcome.refused[env])).name.lower() if outcome.refused[env] else None,
            why=decision.reasons[env] if decision.reasons is not None else None,
            choice_counts=counts[env].tolist(),
            **row,
        )


def lifecycle_rows(
    place: Place,
    space: Space,
    changes: Transitions,
    before: Seeds,
    after: Seeds,
    bases: Mapping[tuple[int, int], Mapping[str, Any]],
) -> Iterator[LifecycleRow]:
    """Yield one row per change of stage between two states of the seeds, in the order of `changes`.

    `bases` holds the reason and the measurements of plantings, removals and fossilizations, as fields of the row, by environment
    and slot. The blueprint of a removed seed is taken from `before`.
    """
    planted = np.where(after.blueprint >= 0, after.blueprint, before.blueprint)
    for env, slot, source, target in np.stack(changes, axis=1).tolist():
        index = int(planted[env, slot])
        yield LifecycleRow(
            **place,
            env=env,
            slot=space.slots[slot],
            from_stage=Stage(source).name,
            to_stage=Stage(target).name,
            blueprint=space.blueprints[index].name if index >= 0 else None,
            alpha=digits(after.alpha[env, slot]) or 0.0,
            **(bases.get((env, slot), {}) if target in _DECIDED else {}),
        )


def rollback_rows(place: Place, space: Space, envs: int, trace: Trace, after: Seeds) -> Iterator[RollbackRow]:
    """Yield one row per rollback in a step; `after` are the seeds after it."""
    before = trace.changes[-1].after
    for row in np.flatnonzero(trace.found != Vital.GOOD).tolist():
        gone = among(before.stage[row], IN_BUDGET) & ~among(after.stage[row], IN_BUDGET)
        yield RollbackRow(
            **place,
            env=row % envs,
            twin=row >= envs,
            reason=Vital(trace.found[row]).name.lower(),
            metric=float(trace.scores.metric[row]),
            loss=float(trace.scores.loss[row]),
            pruned=[space.slots[slot] for slot in np.flatnonzero(gone)],
            slot_stages=after.stage[row].tolist(),
        )


def episode_rows(
    source: Place, view: View, scores: Scores, unfinished: Bools, rollbacks: NDArray[np.int64]
) -> Iterator[EpisodeRow]:
    """Yield one row per environment at the end of an episode.

    `scores` are those of the networks that would be exported, which have the fossilized seeds of `view`. `unfinished` (E, S)
    marks the other seeds. `rollbacks` (E,) are counts. The arrays may be longer than E.
    """
    space, seeds = view.space, view.seeds
    for env, (stages, blueprints) in enumerate(zip(seeds.stage.tolist(), seeds.blueprint.tolist(), strict=True)):
        slots = zip(space.slots, stages, blueprints, strict=True)
        grown = {name: space.blueprints[index].name for name, stage, index in slots if stage == Stage.FOSSILIZED}
        yield EpisodeRow(
            **source,
            episode=view.episode,
            step=view.step,
            env=env,
            metric=float(scores.metric[env]),
            loss=float(scores.loss[env]),
            host_params=int(view.host_params[env]),
            added_params=int(scores.added_params[env]),
            fossilized=len(grown),
            grown=grown,
            unfinished=[name for name, left_out in zip(space.slots, unfinished[env].tolist(), strict=True) if left_out],
            rollbacks=int(rollbacks[env]),
        )


def gate_rows(place: Place, before: View, after: View, old: Gates, new: Gates) -> Iterator[GateRow]:
    """Yield a row for each seed whose gate gives another answer in one view than in the view before, or has its first."""
    waiting = among(after.seeds.stage, frozenset(GATES))
    if not waiting.any():
        return
    for stage, name in GATES.items():
        gate, previous = getattr(new, name), getattr(old, name)
        stays = (before.seeds.stage == stage) & (before.seeds.blueprint == after.seeds.blueprint)
        changed = (after.seeds.stage == stage) & ~(stays & (gate.passed() == previous.passed()))
        passed = gate.passed()
        for env, slot in np.argwhere(changed).tolist():
            yield GateRow(
                **place,
                env=env,
                slot=after.space.slots[slot],
                gate=name,
                passed=bool(passed[env, slot]),
                margins={check.name: digits(check.margin[env, slot]) for check in gate.checks},
            )


def _counts(view: View, outcome: Outcome) -> NDArray[np.int64]:
    """Return (E, 6) the number of valid choices for each head; 0 if the operation does not read the head or is unknown."""
    actions, space = outcome.actions, view.space
    known = (actions.op >= 0) & (actions.op < len(Op)) & (actions.slot >= 0) & (actions.slot < len(space.slots))
    safe = actions._replace(op=np.where(known, actions.op, 0), slot=np.where(known, actions.slot, 0))
    left = np.stack([valid.sum(1) for valid in offered(view.masks, safe)], 1)
    counts: NDArray[np.int64] = np.where(RELEVANT[safe.op] & known[:, None], left, 0)
    counts[:, Head.OP] = view.masks.op.sum(1)
    return counts
