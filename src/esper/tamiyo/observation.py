"""What a controller sees: a view as arrays of features. E environments, S slots, K blueprints, W remembered steps.

One table names every feature. Continuous ones are nan where they were not measured; `Normaliser` gives them zero mean and
unit variance and puts 0 in place of nan, beside a flag that says so. Flags are 0 or 1 and are left as they are.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.actions import Actions
from esper.leyline.view import Bools, Floats, Measurements, View
from esper.tamiyo.features import (
    GLOBAL,
    GLOBAL_FLAGS,
    RELATIVE,
    SLOT,
    SLOT_FLAGS,
    TREND,
    WINDOWS,
    Feature,
    Flag,
    Seen,
    interactions,
    ln,
    read,
    sensor_feature,
    slot_features,
)

Features = NDArray[np.float32]


class Observation(NamedTuple):
    """Features as they stand before normalisation; nan where something was not measured."""

    env: Features  # (E, G)
    env_flags: Features  # (E, Gf)
    slot: Features  # (E, S, F) raw, then relative to the mean over slots
    slot_flags: Features  # (E, S, Ff)
    blueprint: NDArray[np.int64]  # (E, S) index into the menu, -1 when empty
    cost: Features  # (E, S, K) ln(1 + parameters of the blueprint / host parameters)


class History(NamedTuple):
    """What an environment remembers of its own past, to tell slopes and the last decision."""

    trend: Floats  # (E, W, 3) metric, ln loss and ln training loss of the last steps, the newest first; nan before
    op: NDArray[np.int64]  # (E,) the last operation, -1 where there is none
    accepted: Bools  # (E,)

    @classmethod
    def empty(cls, envs: int) -> "History":
        """The history at the first decision of an episode."""
        shape = (envs, max(WINDOWS) + 1, len(TREND))
        return cls(np.full(shape, np.nan), np.full(envs, -1, np.int64), np.zeros(envs, bool))

    def measured(self, measurements: Measurements) -> "History":
        """The history with one more step in front."""
        newest = np.stack([measurements.metric, ln(measurements.loss), ln(measurements.train_loss)], 1)
        newest = np.where(
            np.isfinite(newest), newest, np.nan
        )  # a loss that overflowed tells as little as an absent one
        return self._replace(trend=np.concatenate([newest[:, None], self.trend[:, :-1]], 1))

    def decided(self, actions: Actions, accepted: Bools) -> "History":
        """The history after a decision."""
        return self._replace(op=np.asarray(actions.op, np.int64), accepted=accepted)

    def reset(self, rows: Bools) -> "History":
        """The history with that of some environments, (E,) bool, forgotten."""
        fresh = History.empty(len(rows))
        return History(
            np.where(rows[:, None, None], fresh.trend, self.trend),
            np.where(rows, fresh.op, self.op),
            np.where(rows, fresh.accepted, self.accepted),
        )


def observe(view: View, history: History) -> Observation:
    """The view as features; `history` holds this view's own measurements in front (`History.measured`)."""
    seen = Seen(view, history, *interactions(view.coalitions, view.step, view.seeds.life))
    envs = len(view.host_params)
    slot_shape = envs, len(view.space.slots)
    raw = read((*SLOT, *(sensor_feature(name) for name in view.space.sensors)), seen, slot_shape)
    known = np.isfinite(raw)
    count = np.maximum(known.sum(1, keepdims=True), 1)
    relative = raw - np.where(known, raw, 0).sum(1, keepdims=True) / count
    host = view.host_params[:, None, None]
    return Observation(
        env=_single(read(GLOBAL, seen, (envs,))),
        env_flags=read(GLOBAL_FLAGS, seen, (envs,)).astype(np.float32),
        slot=_single(np.concatenate([raw, relative], 2)),
        slot_flags=read(SLOT_FLAGS, seen, slot_shape).astype(np.float32),
        blueprint=view.seeds.blueprint.astype(np.int64),
        cost=np.log1p(view.space.cost / host).astype(np.float32),
    )


class Moments(NamedTuple):
    """Running mean and variance of some features, and how many values of each they are made of."""

    mean: Floats  # (F,)
    var: Floats  # (F,)
    n: Floats  # (F,)

    @classmethod
    def prior(cls, features: Sequence[Feature]) -> "Moments":
        """Nothing seen yet: mean 0 and the scale of the table."""
        scale = np.array([feature.scale for feature in features])
        return cls(np.zeros(len(features)), scale**2, np.zeros(len(features)))

    def including(self, values: Features) -> "Moments":
        """With (..., F) more values, nan left out (Chan, Golub and LeVeque, "Updating formulae", 1979, equation 1.5)."""
        flat = values.reshape(-1, values.shape[-1]).astype(np.float64)
        known = np.isfinite(flat)
        count = known.sum(0).astype(np.float64)
        some = count > 0
        mean = np.where(known, flat, 0).sum(0) / np.maximum(count, 1)
        spread = np.where(known, (flat - mean) ** 2, 0).sum(0)
        total = np.maximum(self.n + count, 1)
        shift = mean - self.mean
        joint = self.var * self.n + spread + shift**2 * self.n * count / total
        return Moments(
            np.where(some, self.mean + shift * count / total, self.mean),
            np.where(some, joint / total, self.var),
            self.n + count,
        )


class Normaliser(NamedTuple):
    """Frozen moments of the continuous features. They change between a policy's update and the next rollout only."""

    env: Moments
    slot: Moments

    @classmethod
    def prior(cls, sensors: Sequence[str]) -> "Normaliser":
        """What stands in for moments before the first round."""
        return cls(Moments.prior(GLOBAL), Moments.prior(slot_features(sensors)))

    def including(self, observation: Observation) -> "Normaliser":
        """With the moments of more observations, of any leading shape."""
        return Normaliser(self.env.including(observation.env), self.slot.including(observation.slot))


class Inputs(NamedTuple):
    """An observation as a network reads it: no nan, flags included. All but `blueprint` are float32."""

    env: Features  # (..., G + flags)
    slot: Features  # (..., S, F + flags)
    blueprint: NDArray[np.int64]  # (..., S)
    cost: Features  # (..., S, K)


CLIP = 5.0
"""Largest normalised value [standard deviations]."""


def normalise(observation: Observation, normaliser: Normaliser, features: Sequence[Feature]) -> Inputs:
    """Inputs of a network; `features` are the columns of `observation.slot`, as `slot_features` names them."""
    return Inputs(
        env=_normal(observation.env, observation.env_flags, normaliser.env, GLOBAL),
        slot=_normal(observation.slot, observation.slot_flags, normaliser.slot, features),
        blueprint=observation.blueprint,
        cost=observation.cost,
    )


def input_names(sensors: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the columns of `Inputs.env` and `Inputs.slot`; `name?` says whether `name` was measured."""
    return _columns(GLOBAL, GLOBAL_FLAGS), _columns(slot_features(sensors), SLOT_FLAGS)


def _columns(features: Sequence[Feature], flags: Sequence[Flag]) -> tuple[str, ...]:
    measured = (f"{feature.name}?" for feature in features if _flagged(feature))
    return (*(feature.name for feature in features), *(flag.name for flag in flags), *measured)


def _flagged(feature: Feature) -> bool:
    """A relative feature is measured where the raw one is, so one flag does for both."""
    return feature.missing and not feature.name.endswith(RELATIVE)


def _normal(values: Features, flags: Features, moments: Moments, features: Sequence[Feature]) -> Features:
    assert values.shape[-1] == len(features), (values.shape, len(features))
    least = np.array([0.1 * feature.scale for feature in features])
    deviation = np.maximum(np.sqrt(moments.var), least)
    scaled = np.clip((values - moments.mean) / deviation, -CLIP, CLIP)
    known = np.isfinite(values)
    may_miss = [i for i, feature in enumerate(features) if _flagged(feature)]
    columns = np.concatenate([np.where(known, scaled, 0), flags, known[..., may_miss]], -1)
    return np.asarray(columns, np.float32)


def _single(values: Floats) -> Features:
    """As float32; what exceeds its range counts as not measured, nan."""
    return np.where(np.abs(values) <= np.finfo(np.float32).max, values, np.nan).astype(np.float32)
