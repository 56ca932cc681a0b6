"""Detailed rows of the events: the basis of the decisions of a step, and its measurements. E environments, S slots."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.actions import RELEVANT, Blend, Head, Op
from esper.leyline.config import GatesConfig
from esper.leyline.gates import Gates, judge
from esper.leyline.masks import offered
from esper.leyline.stages import Stage, among
from esper.leyline.verdicts import Refusal
from esper.leyline.view import Floats, Outcome, View, take
from esper.nissa.events import digits, rounded
from esper.nissa.rows import DecisionRow, GateRow, GradientsRow, MeasurementRow, SensorsRow
from esper.tolaria.attribution import attribute
from esper.tolaria.fates import GATES
from esper.tolaria.play import Decision
from esper.tolaria.population import ParameterNorms, Population


def decision_rows(
    view: View, decision: Decision, outcome: Outcome, gates: GatesConfig, population: Population, *, full: bool = False
) -> Iterator[DecisionRow]:
    """Yield a row for each environment that chose another operation than WAIT. `view` is what the decision was based on.

    full: also rows of decisions to WAIT, and the values of all sensors.
    """
    actions = outcome.actions
    acting = np.flatnonzero((actions.op != Op.WAIT) | full)
    if not len(acting):
        return
    judged = judge(view.seeds, view.measurements, gates)
    counts = _counts(view, outcome)
    for env in acting.tolist():
        op, slot = int(actions.op[env]), int(actions.slot[env])
        known, there = 0 <= op < len(Op), op != Op.WAIT and 0 <= slot < len(view.space.slots)
        read = view.space.sensors if full else (decision.sensors or {}).get(Op(op), ()) if known else ()
        yield DecisionRow(
            episode=outcome.episode,
            step=outcome.step,
            env=env,
            op=Op(op).name if known else str(op),
            slot=view.space.slots[slot] if there else None,
            carried_out=bool(outcome.accepted[env]),
            refusal=Refusal(int(outcome.refused[env])).name.lower() if outcome.refused[env] else None,
            why=decision.reasons[env] if decision.reasons is not None else None,
            choice_counts=counts[env].tolist(),
            **_ramp(view, outcome, env, known),
            **(_seed(view, outcome, env, slot, population) if there else _NO_SEED),
            **(_basis(view, judged, env, slot) if there else _NO_BASIS),
            rule_sensors=_sensors(view, env, slot, read) if there else {},
            **_judgement(decision, env),
        )


def gate_rows(before: View, after: View, outcome: Outcome, gates: GatesConfig) -> Iterator[GateRow]:
    """Yield a row for each seed whose gate gives another answer in one view than in the view before, or has its first."""
    waiting = among(after.seeds.stage, frozenset(GATES))
    if not waiting.any():
        return
    old, new = (judge(view.seeds, view.measurements, gates) for view in (before, after))
    for stage, name in GATES.items():
        gate, previous = getattr(new, name), getattr(old, name)
        stays = (before.seeds.stage == stage) & (before.seeds.blueprint == after.seeds.blueprint)
        changed = (after.seeds.stage == stage) & ~(stays & (gate.passed() == previous.passed()))
        passed = gate.passed()
        for env, slot in np.argwhere(changed).tolist():
            yield GateRow(
                episode=outcome.episode,
                step=outcome.step,
                env=env,
                slot=after.space.slots[slot],
                gate=name,
                passed=bool(passed[env, slot]),
                margins={check.name: digits(check.margin[env, slot]) for check in gate.checks},
            )


def measurement_row(view: View, outcome: Outcome, pairs: int, *, full: bool = False) -> MeasurementRow | None:
    """Return the measurements of the step that led to `view`, None if there are none. pairs: `probe.shapley_samples`.

    full: also the participation of every stream, which the sensors have less often.
    """
    measured, values, envs = view.measurements, view.coalitions, len(view.host_params)
    found = {
        "contribution_means": measured.contribution.mean,
        "contribution_ses": measured.contribution.se,
        "gain_means": measured.gain.mean,
        "gain_ses": measured.gain.se,
        "participations": measured.participation if full else None,
    }
    if values is not None and values.step == view.step:
        shares = take(attribute(values, pairs), slice(0, envs))
        found |= {
            "shapley_means": shares.shapley.mean,
            "shapley_ses": shares.shapley.se,
            "interactions": shares.interaction,
        }
    known: dict[str, Any] = {
        name: rounded(value) for name, value in found.items() if value is not None and not np.isnan(value).all()
    }
    return MeasurementRow(episode=outcome.episode, step=outcome.step, **known) if known else None


def sensors_row(view: View, outcome: Outcome) -> SensorsRow | None:
    """Return the growth sensors if the step that led to `view` measured them, else None."""
    measured = view.measurements
    if measured.sensor_age or not np.isfinite(measured.sensors).any():
        return None
    return SensorsRow(
        episode=outcome.episode,
        step=outcome.step,
        sensors=view.space.sensors,
        readings=rounded(measured.sensors),
    )


def gradients_row(view: View, outcome: Outcome, norms: ParameterNorms | None) -> GradientsRow:
    """Return the gradient norms of the step that led to `view`. norms: those of each parameter, if they were measured."""
    host, seeds = norms or ({}, {})
    envs = len(view.host_params)

    def of_environments(by_name: Mapping[str, Floats]) -> dict[str, Floats] | None:
        return {name: rounded(values[:envs]) for name, values in by_name.items()} or None

    return GradientsRow(
        episode=outcome.episode,
        step=outcome.step,
        host_gradients=rounded(view.measurements.gradient_norm),
        seed_gradients=rounded(view.measurements.seed_gradient_norm),
        host_parameter_gradients=of_environments(host),
        seed_parameter_gradients=of_environments(seeds),
    )


_NO_SEED: dict[str, Any] = {"stage": None, "blueprint": None, "blend": None, "price": None}
_NO_BASIS: dict[str, Any] = {
    "gate_checks": None,
    "margins": {},
    **dict.fromkeys(("contribution_mean", "contribution_se", "gain_mean", "gain_se")),
}


def _counts(view: View, outcome: Outcome) -> NDArray[np.int64]:
    """Return (E, 6) the number of valid choices for each head; 0 if the operation does not read the head or is unknown."""
    actions, space = outcome.actions, view.space
    known = (actions.op >= 0) & (actions.op < len(Op)) & (actions.slot >= 0) & (actions.slot < len(space.slots))
    safe = actions._replace(op=np.where(known, actions.op, 0), slot=np.where(known, actions.slot, 0))
    left = np.stack([valid.sum(1) for valid in offered(view.masks, safe)], 1)
    counts: NDArray[np.int64] = np.where(RELEVANT[safe.op] & known[:, None], left, 0)
    counts[:, Head.OP] = view.masks.op.sum(1)
    return counts


def _ramp(view: View, outcome: Outcome, env: int, known: bool) -> dict[str, Any]:
    """Return the length and the target of the ramp that a decision asks for."""
    asked: dict[str, Any] = {}
    for head, menu in ((Head.TEMPO, view.space.tempos), (Head.TARGET, view.space.targets)):
        choice = int(outcome.actions[head][env])
        reads = known and RELEVANT[outcome.actions.op[env], head] and 0 <= choice < len(menu)
        asked[head.name.lower()] = menu[choice] if reads else None
    return asked


def _seed(view: View, outcome: Outcome, env: int, slot: int, population: Population) -> dict[str, Any]:
    """Return the seed that a decision is about, with its price."""
    seeds, menu = view.seeds, view.space.blueprints
    plants = outcome.actions.op[env] == Op.GERMINATE
    chosen = outcome.actions if plants else seeds
    index, blend = (int(field[env] if plants else field[env, slot]) for field in (chosen.blueprint, chosen.blend))
    seed = {**_NO_SEED, "stage": Stage(int(seeds.stage[env, slot])).name}
    if 0 <= index < len(menu) and 0 <= blend < len(Blend):
        place = (np.array([each], np.int64) for each in (env, slot, index, blend))
        price = int(population.price(*place)[0])
        seed |= {"blueprint": menu[index].name, "blend": Blend(blend).name, "price": price}
    return seed


def _basis(view: View, judged: Gates, env: int, slot: int) -> dict[str, Any]:
    """Return the gate that a seed must pass next, and its figures."""
    measured, stage = view.measurements, Stage(int(view.seeds.stage[env, slot]))
    basis = {
        **_NO_BASIS,
        "contribution_mean": digits(measured.contribution.mean[env, slot]),
        "contribution_se": digits(measured.contribution.se[env, slot]),
        "gain_mean": digits(measured.gain.mean[env, slot]),
        "gain_se": digits(measured.gain.se[env, slot]),
    }
    if stage in GATES:
        gate = getattr(judged, GATES[stage])
        basis["gate_checks"] = gate.reason(env, slot)
        basis["margins"] = {check.name: digits(check.margin[env, slot]) for check in gate.checks}
    return basis


def _judgement(decision: Decision, env: int) -> dict[str, Any]:
    """Return the policy's own figures for its decision; nothing for other controllers."""
    found = decision.judgement
    if found is None:
        return {}
    return {
        "probabilities": rounded(found.probability[env]),
        "entropies": rounded(found.entropy[env]),
        "value": digits(found.value[env]),
    }


def _sensors(view: View, env: int, slot: int, names: Sequence[str]) -> dict[str, float | None]:
    """Return the values of sensors of a slot; None for one that was not measured."""
    values = view.measurements.sensors[env, slot].tolist()
    return {name: digits(values[view.space.sensors.index(name)]) for name in names if name in view.space.sensors}
