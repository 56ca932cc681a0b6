"""Compute the measurements of a step from the figures of a population. E rows, S slots."""

from typing import NamedTuple

import numpy as np

from esper.leyline.lifecycle.view import Bools, CoalitionValues, Estimate, Measurements, Scores, Seeds, choose
from esper.leyline.lifecycle.vocabulary import Stage
from esper.tolaria.governor import Signs
from esper.tolaria.measure.certifying import Certifier
from esper.tolaria.measure.coalitions import Sampling, coalitions, masks
from esper.tolaria.measure.probe import spread
from esper.tolaria.population import ParameterNorms, Population, ProbeRequest, TrainedFigures


class StepMeasurements(NamedTuple):
    """Holds the results of `measure`. A network as exported contains the fossilized seeds only."""

    measurements: Measurements  # what a controller sees
    scores: Scores  # scores of the networks on the probe split
    exported: Scores | None  # scores of the networks as exported; None before the end of an episode
    coalitions: CoalitionValues | None  # values of coalitions; None if attribution was not due
    signs: Signs  # vital signs
    data: Bools | None = None  # (E,) whether the data of a row are finite; None if it was not asked for
    validation: Scores | None = None  # of the networks as exported on the validation split; None if not asked for
    parameter_norms: ParameterNorms | None = None  # gradient norms of each parameter; None if not asked for

    def replaced(self, other: "StepMeasurements", rows: Bools) -> "StepMeasurements":
        """Return the results, with those of `other` in the rows that are marked in `rows` (E,), which have no unfinished seed."""
        scores = choose(rows, other.scores, self.scores)
        return self._replace(
            measurements=choose(rows, other.measurements, self.measurements),
            scores=scores,
            exported=None if self.exported is None else choose(rows, scores, self.exported),
            coalitions=None if self.coalitions is None else without(self.coalitions, rows),
            signs=choose(rows, other.signs, self.signs),
            data=other.data,
        )


def measure(
    population: Population,
    seeds: Seeds,
    last: Measurements,
    step: int,
    *,
    sampling: Sampling | None = None,
    terminal: bool = False,
    certifier: Certifier | None = None,
    **asked: bool,
) -> StepMeasurements:
    """Probe every row after `step` steps. This is the one device read of a step.

    last: the previous measurements, whose growth sensors are kept if new ones are not due.
    sampling: how attribution samples coalitions; None if attribution is not due.
    terminal: whether the episode ends, so that the networks as exported are measured too.
    certifier: looks at the seeds on trial with fresh examples; None if this is not the measurement of a step.
    asked: further fields of `ProbeRequest`.
    """
    wanted = coalitions(seeds, sampling, terminal=terminal)
    look = None if certifier is None else certifier.look(seeds, last)
    figures = population.probe(seeds, ProbeRequest(wanted.branches, look=look, **asked))
    shape, signs, fresh = seeds.stage.shape, figures.signs.T, unmeasured(*last.sensors.shape)
    nothing = TrainedFigures(fresh.train_loss, None, fresh.seed_gradient_norm, np.zeros(shape, bool))
    train_loss, host_norm, seed_norm, seed_trained, parameter_norms, skipped = figures.trained or nothing
    measurements = fresh._replace(
        metric=figures.metric,
        loss=figures.loss,
        train_loss=train_loss,
        gradient_norm=fresh.gradient_norm if host_norm is None else host_norm,
        seed_gradient_norm=seed_norm,
        contribution=spread(figures.metric_fall, wanted.without(), shape),
        contribution_loss=spread(figures.loss_rise, wanted.without(), shape),
        gain=spread(figures.loss_rise, wanted.alone, shape, -1),
        gain_metric=spread(figures.metric_fall, wanted.alone, shape, -1),
        seed_gradient_finite=np.isfinite(seed_norm),
        participation=figures.participation,
        sensors=last.sensors if figures.sensors is None else figures.sensors,
        sensor_age=last.sensor_age + 1 if figures.sensors is None else 0,
    )
    if figures.seedless_rise is not None:  # of a network in a loop, whose metric is minus the loss
        mean, se = figures.seedless_rise[..., 0], figures.seedless_rise[..., 1]
        known, without = np.isfinite(mean), measurements.contribution
        contribution = Estimate(np.where(known, mean, without.mean), np.where(known, se, without.se), without.measured)
        measurements = measurements._replace(contribution=contribution, contribution_loss=contribution)
    if certifier is not None:
        measurements = certifier.certified(seeds, last, measurements, look, figures.compared)

    gradient = np.ones(len(figures.loss), bool) if host_norm is None else np.isfinite(host_norm)
    gradient &= (np.isfinite(seed_norm) | ~seed_trained).all(1)
    if skipped is not None and host_norm is not None:  # nan says that no update was made
        gradient |= np.isnan(host_norm)
    scores = Scores(figures.metric, figures.loss, population.table.added_params(seeds))
    kept = population.table.added_params(seeds, frozenset({Stage.FOSSILIZED}))
    exported = None
    if terminal:
        branch, env = wanted.exported()
        metric, loss = scores.metric.copy(), scores.loss.copy()
        metric[env], loss[env] = figures.branch_metric[branch], figures.branch_loss[branch]
        exported = Scores(metric, loss, kept)
    values = None
    if sampling is not None:
        full = np.flatnonzero(wanted.live.any(1))  # the full coalition is the pass of the row itself
        env, mask = np.concatenate([wanted.env, full]), np.concatenate([wanted.mask, masks(wanted.live)[full]])
        order = np.lexsort((mask, env))
        metric = np.concatenate([figures.branch_metric[wanted.branch], figures.metric[full]])
        loss = np.concatenate([figures.branch_loss[wanted.branch], figures.loss[full]])
        values = CoalitionValues(step, sampling[1], wanted.live, env[order], mask[order], metric[order], loss[order])
    return StepMeasurements(
        measurements,
        scores,
        exported,
        values,
        Signs(figures.loss, figures.metric, signs[0], signs[1], train_loss, gradient, np.isfinite(signs[2])),
        figures.finite,
        None if figures.validation is None else Scores(*figures.validation, kept),
        parameter_norms,
    )


def unmeasured(rows: int, slots: int, sensors: int) -> Measurements:
    """Return measurements of nan, (rows,), (rows, slots) and (rows, slots, sensors), for the time before the first step."""
    nothing, shape = np.full(rows, np.nan), (rows, slots)
    return Measurements(
        metric=nothing,
        loss=nothing,
        train_loss=nothing,
        gradient_norm=nothing,
        contribution=Estimate.absent(*shape),
        contribution_loss=Estimate.absent(*shape),
        gain=Estimate.absent(*shape),
        gain_metric=Estimate.absent(*shape),
        seed_gradient_norm=np.full(shape, np.nan),
        seed_gradient_finite=np.zeros(shape, bool),
        participation=np.full(shape, np.nan),
        sensors=np.full((*shape, sensors), np.nan),
        sensor_age=0,
        certificate=np.full(shape, np.nan),
        level=nothing,
    )


def without(values: CoalitionValues, rows: Bools) -> CoalitionValues:
    """Return the values without those of the rows that are marked in `rows` (E,), whose seeds were removed."""
    kept = ~rows[values.env]
    return values._replace(
        live=values.live & ~rows[:, None],
        **{name: getattr(values, name)[kept] for name in ("env", "mask", "metric", "loss")},
    )
