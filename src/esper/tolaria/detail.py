"""Detailed rows of the events: the basis of the decisions of a step, and its measurements. E environments, S slots."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.kasmina.gates import Gates, judge
from esper.leyline.actions import RELEVANT, Blend, Head, Op
from esper.leyline.config import GatesConfig
from esper.leyline.masks import offered
from esper.leyline.stages import Stage
from esper.leyline.verdicts import Refusal
from esper.leyline.view import Floats, Outcome, View, take
from esper.nissa.rows import DecisionRow, GradientsRow, MeasurementRow, SensorsRow
from esper.tolaria.attribution import attribute
from esper.tolaria.fates import GATES
from esper.tolaria.play import Decision
from esper.tolaria.population import Population

DIGITS = 6
"""Significant digits of measurements."""


def decision_rows(
    view: View, decision: Decision, outcome: Outcome, gates: GatesConfig, population: Population
) -> Iterator[DecisionRow]:
    """Yield a row for each environment that chose another operation than WAIT. `view` is what the decision was based on."""
    actions = outcome.actions
    acting = np.flatnonzero(actions.op != Op.WAIT)
    if not len(acting):
        return
    judged = judge(view.seeds, view.measurements, gates)
    counts = _counts(view, outcome)
    for env in acting.tolist():
        op, slot = int(actions.op[env]), int(actions.slot[env])
        known, there = 0 <= op < len(Op), 0 <= slot < len(view.space.slots)
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
            **_judgement(decision, env),
        )


def measurement_row(view: View, outcome: Outcome, pairs: int) -> MeasurementRow:
    """Return the measurements of the step that led to `view`. pairs: `probe.shapley_samples`."""
    measured, values, envs = view.measurements, view.coalitions, len(view.host_params)
    row = MeasurementRow(
        episode=outcome.episode,
        step=outcome.step,
        contribution_means=rounded(measured.contribution.mean),
        contribution_ses=rounded(measured.contribution.se),
        gain_means=rounded(measured.gain.mean),
        gain_ses=rounded(measured.gain.se),
        participations=rounded(measured.participation),
    )
    if values is not None and values.step == view.step:
        found = take(attribute(values, pairs), slice(0, envs))
        row.shapley_means, row.shapley_ses = rounded(found.shapley.mean), rounded(found.shapley.se)
        if np.isfinite(found.interaction).any():
            row.interactions = rounded(found.interaction)
    return row


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


def gradients_row(view: View, outcome: Outcome) -> GradientsRow:
    """Return the gradient norms of the step that led to `view`."""
    return GradientsRow(
        episode=outcome.episode,
        step=outcome.step,
        host_gradients=rounded(view.measurements.gradient_norm),
        seed_gradients=rounded(view.measurements.seed_gradient_norm),
    )


def rounded(values: NDArray[np.floating[Any]]) -> Floats:
    """Round values to `DIGITS` significant digits; 0 and values that are not finite are returned unchanged."""
    values = np.asarray(values, np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(np.abs(values))))
        near: Floats = np.round(values * scale) / scale
    return np.where(np.isfinite(near), near, values)


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
        "contribution_mean": _number(measured.contribution.mean[env, slot]),
        "contribution_se": _number(measured.contribution.se[env, slot]),
        "gain_mean": _number(measured.gain.mean[env, slot]),
        "gain_se": _number(measured.gain.se[env, slot]),
    }
    if stage in GATES:
        gate = getattr(judged, GATES[stage])
        basis["gate_checks"] = gate.reason(env, slot)
        basis["margins"] = {check.name: _number(check.margin[env, slot]) for check in gate.checks}
    return basis


def _judgement(decision: Decision, env: int) -> dict[str, Any]:
    """Return the policy's own figures for its decision; nothing for other controllers."""
    found = decision.judgement
    if found is None:
        return {}
    return {
        "probabilities": rounded(found.probability[env]),
        "entropies": rounded(found.entropy[env]),
        "value": _number(float(rounded(found.value[env]))),
    }


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
