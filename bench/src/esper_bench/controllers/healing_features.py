"""Compute features of the slots of a host before the first step, free of its size. E environments, S slots, F features.

All are shares, ratios, differences of logarithms and ranks within the host, so that what was fitted on hosts of one width and
depth can be used on others.
"""

from collections.abc import Sequence

import numpy as np

from esper.leyline.lifecycle.view import Floats, View, sensor
from esper.tamiyo.rules.heuristic import relative_metric
from esper_bench.controllers.plans import stream_slots

SHARES = ("participation", "participation_before", "participation_inner", "dead", "unsaturated")
SIZES = ("stream_rms", "gradient_rms", "map_gradient_here", "map_gradient_before")
ENERGIES = ("explained_before_linear", "heldout_before_linear", "explained_before_relu", "heldout_here_linear")
DRIFTS = ("drift", "drift_before")
RANKED = ("drop", "participation", "participation_inner", "dead", "map_gradient_before", "explained_before_linear")
AROUND = ("drop", "participation_inner", "dead")
FEATURES = (
    *SHARES,
    "drop",
    *SIZES,
    *ENERGIES,
    *(f"rank of {name}" for name in RANKED),
    *(f"{what} {name}" for name in AROUND for what in ("smallest", "largest")),
    *(f"{name} {where}" for name in AROUND for where in ("before", "after")),
    "metric",
    "confidence",
    "depth",
)
"""The features without an intact network."""
TAUGHT_FEATURES = (*FEATURES, *DRIFTS, "drift_rise", "drift_largest", "rank of drift_rise")
UNKNOWN = -10.0
"""Stands for a feature that was not measured; every measured one is above it."""


def slot_features(view: View, taught: bool) -> dict[str, Floats]:
    """Compute every feature of the slots, (E, S), by name. With `taught`, the drifts from the intact network are among them.

    S are the slots in front of the last layer.
    """
    slots = stream_slots(view.space)
    shape = len(view.seeds.stage), slots

    def read(name: str) -> Floats:
        return sensor(view, name)[:, :slots]

    found = {name: read(name) for name in SHARES}
    found["drop"] = _log(found["participation"]) - _log(found["participation_before"])
    for name in SIZES:
        value = _log(read(name))
        found[name] = value - _mean(value)
    energy = np.maximum(read("gradient_rms") ** 2, 1e-12)
    found |= {name: np.clip(read(name) / energy, -1, 1) for name in ENERGIES}
    if taught:
        found |= {name: np.minimum(read(name), 5) for name in DRIFTS}
        found["drift_rise"] = found["drift"] - found["drift_before"]
        found["drift_largest"] = np.broadcast_to(found["drift_rise"].max(1, keepdims=True), shape)
        found["rank of drift_rise"] = _ranks(found["drift_rise"])
    for name in RANKED:
        found[f"rank of {name}"] = _ranks(found[name])
    for name in AROUND:
        value = np.nan_to_num(found[name], nan=0.0)
        found[f"smallest {name}"] = np.broadcast_to(value.min(1, keepdims=True), shape)
        found[f"largest {name}"] = np.broadcast_to(value.max(1, keepdims=True), shape)
        found[f"{name} before"] = np.concatenate([value[:, :1], value[:, :-1]], 1)
        found[f"{name} after"] = np.concatenate([value[:, 1:], value[:, -1:]], 1)
    space, measured = view.space, view.measurements
    share = relative_metric(measured.metric, space.floor, space.ceiling)
    hosts = {"metric": share, "confidence": _log(measured.loss) - _log(1 - measured.metric)}
    found |= {name: np.broadcast_to(value[:, None], shape) for name, value in hosts.items()}
    found["depth"] = np.broadcast_to(np.linspace(0, 1, shape[1]), shape)
    return found


def table(found: dict[str, Floats], names: Sequence[str]) -> Floats:
    """Stack the named features, (E, S, F), with UNKNOWN for what is not finite."""
    columns = np.stack([found[name] for name in names], -1)
    return np.where(np.isfinite(columns), columns, UNKNOWN)


def _log(values: Floats) -> Floats:
    logarithm: Floats = np.log(np.maximum(values, 1e-6))
    return logarithm


def _mean(values: Floats) -> Floats:
    """Average each row over the slots where the value was measured, (E, S) -> (E, 1); nan where there is none."""
    known = np.isfinite(values)
    total = np.where(known, values, 0).sum(1, keepdims=True)
    count = known.sum(1, keepdims=True)
    mean: Floats = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return mean


def _ranks(values: Floats) -> Floats:
    """Rank the slots of each host, (E, S): 0 for the smallest value to 1 for the largest; equal values share the lowest rank."""
    below = (values[:, None, :] < values[:, :, None]).sum(2)
    ranks: Floats = below / max(values.shape[1] - 1, 1)
    return ranks
