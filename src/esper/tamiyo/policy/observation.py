"""Observe a view as arrays of features. E environments, S slots, K blueprints, W steps of history.

The tables of `features` name every column. Continuous features are nan where they were not measured. `normalise` scales them to
zero mean and unit variance, replaces nan by 0, and adds a flag for it. Flags are 0 or 1 and are not scaled.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.lifecycle.actions import Actions
from esper.leyline.lifecycle.view import Bools, Floats, Measurements, View
from esper.tamiyo.policy.features import (
    GLOBAL,
    GLOBAL_FLAGS,
    PROSPECTS,
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
    prospects,
    read,
    sensor_feature,
    slot_features,
)

Features = NDArray[np.float32]


class Observation(NamedTuple):
    """Holds features before normalisation, float32; nan where a quantity was not measured."""

    env: Features  # (E, G) continuous features of the environment
    env_flags: Features  # (E, Gf) flags of the environment
    slot: Features  # (E, S, F) continuous features of the slots, raw, then relative to the mean over slots
    slot_flags: Features  # (E, S, Ff) flags of the slots
    blueprint: NDArray[np.int64]  # (E, S) index into the menu; -1 for an empty slot
    cost: Features  # (E, S, K) ln(1 + parameters of the blueprint / host parameters)
    # (E, S, K, 3) what the growth sensors tell of each blueprint at each slot (`features.PROSPECTS`)
    prospects: Features


class History(NamedTuple):
    """Holds the recent measurements and the last decision of every environment."""

    trend: Floats  # (E, W, 3) metric, ln loss and ln training loss, newest step first; nan before the episode
    op: NDArray[np.int64]  # (E,) last operation; -1 where there is none
    accepted: Bools  # (E,) whether the last decision was accepted

    @classmethod
    def empty(cls, envs: int) -> "History":
        """Return the history at the first decision of an episode."""
        shape = (envs, max(WINDOWS) + 1, len(TREND))
        return cls(np.full(shape, np.nan), np.full(envs, -1, np.int64), np.zeros(envs, bool))

    def measured(self, measurements: Measurements) -> "History":
        """Return the history with the measurements of one more step. Infinite values become nan."""
        newest = np.stack([measurements.metric, ln(measurements.loss), ln(measurements.train_loss)], 1)
        newest = np.where(np.isfinite(newest), newest, np.nan)
        return self._replace(trend=np.concatenate([newest[:, None], self.trend[:, :-1]], 1))

    def decided(self, actions: Actions, accepted: Bools) -> "History":
        return self._replace(op=np.asarray(actions.op, np.int64), accepted=accepted)

    def reset(self, rows: Bools) -> "History":
        """Return the history, emptied in the environments that are marked in `rows` (E,)."""
        fresh = History.empty(len(rows))
        return History(
            np.where(rows[:, None, None], fresh.trend, self.trend),
            np.where(rows, fresh.op, self.op),
            np.where(rows, fresh.accepted, self.accepted),
        )


def observe(view: View, history: History) -> Observation:
    """Return the features of a view. `history` must already contain the measurements of the view (`History.measured`)."""
    seen = Seen(
        view, view.seeds, view.measurements, history, *interactions(view.coalitions, view.step, view.seeds.life)
    )
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
        prospects=_single(prospects(seen)),
    )


class Moments(NamedTuple):
    """Holds the running mean, variance and number of values of each feature, (F,) float64 each."""

    mean: Floats
    var: Floats
    n: Floats

    @classmethod
    def prior(cls, scale: Sequence[float]) -> "Moments":
        """Return the moments before any value: mean 0 and these standard deviations."""
        return cls(np.zeros(len(scale)), np.square(scale), np.zeros(len(scale)))

    @classmethod
    def of(cls, values: Features) -> "Moments":
        """Return the moments of values (..., F); nan is left out."""
        flat = values.reshape(-1, values.shape[-1]).astype(np.float64)
        known = np.isfinite(flat)
        count = known.sum(0).astype(np.float64)
        mean = np.where(known, flat, 0).sum(0) / np.maximum(count, 1)
        var = np.where(known, (flat - mean) ** 2, 0).sum(0) / np.maximum(count, 1)
        return cls(mean, var, count)

    def merged(self, other: "Moments") -> "Moments":
        """Return the moments of these values and others (Chan, Golub and LeVeque, "Updating formulae", 1979, eq. 1.5)."""
        total = np.maximum(self.n + other.n, 1)
        shift, some = other.mean - self.mean, other.n > 0
        joint = self.var * self.n + other.var * other.n + shift**2 * self.n * other.n / total
        return Moments(
            np.where(some, self.mean + shift * other.n / total, self.mean),
            np.where(some, joint / total, self.var),
            self.n + other.n,
        )


class Normaliser(NamedTuple):
    """Holds moments of the continuous features. They change only after an update of the policy, never during a rollout."""

    env: Moments
    slot: Moments
    prospects: Moments

    @classmethod
    def prior(cls, sensors: Sequence[str]) -> "Normaliser":
        """Return the moments before the first round."""
        scales = [[feature.scale for feature in table] for table in (GLOBAL, slot_features(sensors))]
        return cls(*map(Moments.prior, [*scales, [1.0] * len(PROSPECTS)]))

    @classmethod
    def of(cls, observation: Observation) -> "Normaliser":
        """Return the moments of observations, of any leading shape."""
        return cls(*(Moments.of(getattr(observation, name)) for name in cls._fields))

    def merged(self, other: "Normaliser") -> "Normaliser":
        return Normaliser(*(mine.merged(theirs) for mine, theirs in zip(self, other, strict=True)))


class Inputs(NamedTuple):
    """Holds the inputs of a network: normalised features and flags, without nan, float32."""

    env: Features  # (..., G + flags) features of the environment
    slot: Features  # (..., S, F + flags) features of the slots
    blueprint: NDArray[np.int64]  # (..., S) index into the menu; -1 for an empty slot
    cost: Features  # (..., S, K) as in `Observation`
    prospects: Features  # (..., S, K, 6) prospects, and flags that say which of them were measured


CLIP = 5.0
"""Largest absolute normalised value [standard deviations]."""


def normalise(observation: Observation, normaliser: Normaliser, features: Sequence[Feature]) -> Inputs:
    """Return the inputs of a network. `features`: the columns of `observation.slot`, from `slot_features`."""
    known = np.isfinite(observation.prospects)
    scaled = _scaled(observation.prospects, normaliser.prospects, np.ones(len(PROSPECTS)))
    return Inputs(
        env=_normal(observation.env, observation.env_flags, normaliser.env, GLOBAL),
        slot=_normal(observation.slot, observation.slot_flags, normaliser.slot, features),
        blueprint=observation.blueprint,
        cost=observation.cost,
        prospects=np.concatenate([scaled, known], -1, dtype=np.float32),
    )


def input_names(sensors: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return names of the columns of `Inputs.env` and `Inputs.slot`. The flag `name?` says whether `name` was measured."""
    return _columns(GLOBAL, GLOBAL_FLAGS), _columns(slot_features(sensors), SLOT_FLAGS)


def _columns(features: Sequence[Feature], flags: Sequence[Flag]) -> tuple[str, ...]:
    measured = (f"{feature.name}?" for feature in features if _flagged(feature))
    return (*(feature.name for feature in features), *(flag.name for flag in flags), *measured)


def _flagged(feature: Feature) -> bool:
    """Return whether a feature has a flag `name?`. A relative feature shares the flag of the raw one."""
    return feature.missing and not feature.name.endswith(RELATIVE)


def _normal(values: Features, flags: Features, moments: Moments, features: Sequence[Feature]) -> Features:
    assert values.shape[-1] == len(features), (values.shape, len(features))
    may_miss = [i for i, feature in enumerate(features) if _flagged(feature)]
    scaled = _scaled(values, moments, np.array([feature.scale for feature in features]))
    return np.concatenate([scaled, flags, np.isfinite(values)[..., may_miss]], -1, dtype=np.float32)


def _scaled(values: Features, moments: Moments, scale: Floats) -> Floats:
    """Scale values to zero mean and unit variance, 0 for nan. A tenth of `scale` is the least deviation that divides them."""
    deviation = np.maximum(np.sqrt(moments.var), 0.1 * scale)
    scaled = np.clip((values - moments.mean) / deviation, -CLIP, CLIP)
    return np.where(np.isfinite(values), scaled, 0)


def _single(values: Floats) -> Features:
    """Return values as float32; nan where they exceed its range."""
    return np.where(np.abs(values) <= np.finfo(np.float32).max, values, np.nan).astype(np.float32)
