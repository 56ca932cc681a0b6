"""The measurements of a step, from the figures of a population. E rows, S slots."""

from typing import NamedTuple

import numpy as np

from esper.leyline.stages import Stage
from esper.leyline.view import Bools, CoalitionValues, Estimate, Measurements, Scores, Seeds, choose
from esper.tolaria.certifying import Certifier
from esper.tolaria.coalitions import Coalitions, Sampling, coalitions, masks
from esper.tolaria.population import Asked, Figures, Indices, ParameterNorms, Population
from esper.tolaria.probe import negated, spread
from esper.tolaria.vitals import Signs


class Measured(NamedTuple):
    """The results of `measure`. A network as exported contains the fossilized seeds only.

    Attributes:
        measurements (Measurements): what a controller sees
        scores (Scores): scores of the networks on the probe split
        exported (Scores or None): scores of the networks as exported; None before the end of an episode
        coalitions (CoalitionValues or None): values of coalitions; None if attribution was not due
        signs (Signs): vital signs
        data ((E,) bool array or None): whether the data of a row are finite; None if it was not asked for
        validation (Scores or None): scores of the networks as exported on the validation split; None if not asked for
        parameter_norms (ParameterNorms or None): gradient norms of each parameter; None if not asked for
    """

    measurements: Measurements
    scores: Scores
    exported: Scores | None
    coalitions: CoalitionValues | None
    signs: Signs
    data: Bools | None = None
    validation: Scores | None = None
    parameter_norms: ParameterNorms | None = None

    def replaced(self, other: "Measured", rows: Bools) -> "Measured":
        """Return the results, with those of `other` in the rows that are marked in `rows` (E,), which have no unfinished seed."""
        scores = choose(rows, other.scores, self.scores)
        return Measured(
            choose(rows, other.measurements, self.measurements),
            scores,
            None if self.exported is None else choose(rows, scores, self.exported),
            None if self.coalitions is None else without(self.coalitions, rows),
            choose(rows, other.signs, self.signs),
            other.data,
            self.validation,
            self.parameter_norms,
        )


def measure(
    population: Population,
    seeds: Seeds,
    last: Measurements,
    step: int,
    *,
    sampling: Sampling | None = None,
    terminal: bool = False,
    trained: bool = False,
    sensors: bool = False,
    finite: bool = False,
    validation: bool = False,
    certifier: Certifier | None = None,
) -> Measured:
    """Probe every row after `step` steps. This is the one device read of a step.

    last: the previous measurements, whose growth sensors are kept if new ones are not due.
    sampling: how attribution samples coalitions; None if attribution is not due.
    terminal: whether the episode ends, so that the networks as exported are measured too.
    trained, sensors, finite, validation: as in `Asked`.
    certifier: looks at the seeds on trial with fresh examples; None if this is not the measurement of a step.
    """
    wanted = coalitions(seeds, sampling, terminal=terminal)
    look = None if certifier is None else certifier.look(seeds, last)
    figures = population.probe(seeds, Asked(wanted, trained, sensors, finite, validation, look))
    measurements = _unpack(seeds, wanted, figures, last)
    if certifier is not None:
        measurements = certifier.certified(seeds, last, measurements, look, figures.compared)
    scores = Scores(measurements.metric, measurements.loss, population.added_params(seeds))
    kept = population.added_params(seeds, frozenset({Stage.FOSSILIZED}))
    return Measured(
        measurements,
        scores,
        _exported(wanted, figures, scores, kept) if terminal else None,
        _values(step, sampling.draw, wanted, figures) if sampling is not None else None,
        _signs(measurements, figures),
        figures.finite,
        None if figures.validation is None else Scores(*figures.validation, kept),
        None if figures.trained is None else figures.trained.parameter_norms,
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


def _values(step: int, draw: int, asked: Coalitions, figures: Figures) -> CoalitionValues:
    """Return the values of the coalitions of a step, with the full coalition of every environment that has live seeds."""
    full = np.flatnonzero(asked.live.any(1))
    env, mask = np.concatenate([asked.env, full]), np.concatenate([asked.mask, masks(asked.live)[full]])
    order = np.lexsort((mask, env))
    metric = np.concatenate([figures.branch_metric[asked.branch], figures.metric[full]])
    loss = np.concatenate([figures.branch_loss[asked.branch], figures.loss[full]])
    return CoalitionValues(step, draw, asked.live, env[order], mask[order], metric[order], loss[order])


def _unpack(seeds: Seeds, asked: Coalitions, figures: Figures, last: Measurements) -> Measurements:
    """Unpack the figures of a step into measurements."""
    shape, trained = seeds.stage.shape, figures.trained
    fresh = unmeasured(*last.sensors.shape)
    seed_norm = fresh.seed_gradient_norm
    if trained is not None:
        for (at, owners), norm in zip(trained.seed_owners, trained.seed_norms, strict=True):
            seed_norm[owners, at] = norm
    sensors, sensor_age = figures.sensors, 0
    if sensors is None:
        sensors, sensor_age = last.sensors, last.sensor_age + 1
    return fresh._replace(
        metric=figures.metric,
        loss=figures.loss,
        train_loss=trained.loss if trained is not None else fresh.train_loss,
        gradient_norm=fresh.gradient_norm
        if trained is None or trained.gradient_norm is None
        else trained.gradient_norm,
        contribution=spread(figures.metric_fall, asked.without(), shape),
        contribution_loss=spread(figures.loss_rise, asked.without(), shape),
        gain=negated(spread(figures.loss_rise, asked.alone, shape)),
        gain_metric=negated(spread(figures.metric_fall, asked.alone, shape)),
        seed_gradient_finite=np.isfinite(seed_norm),
        participation=figures.participation,
        sensors=sensors,
        sensor_age=sensor_age,
    )


def _exported(asked: Coalitions, figures: Figures, scores: Scores, kept: Indices) -> Scores:
    """Return the scores of the networks without unfinished seeds. kept: (E,) added parameters of the fossilized seeds."""
    branch, env = asked.exported()
    metric, loss = scores.metric.copy(), scores.loss.copy()
    metric[env], loss[env] = figures.branch_metric[branch], figures.branch_loss[branch]
    return Scores(metric, loss, kept)


def _signs(measurements: Measurements, figures: Figures) -> Signs:
    """Return the vital signs of a step."""
    gradient, trained = np.ones(len(figures.loss), bool), figures.trained
    if trained is not None:
        if trained.gradient_norm is not None:
            gradient = np.isfinite(trained.gradient_norm)
        for at, owners in trained.seed_owners:
            gradient[owners] &= measurements.seed_gradient_finite[owners, at]
        if trained.skipped is not None and trained.gradient_norm is not None:  # nan says that no update was made
            gradient |= np.isnan(trained.gradient_norm)
    metric_se, outputs, parameters = figures.signs.T
    return Signs(
        loss=figures.loss,
        metric=figures.metric,
        metric_se=metric_se,
        spread=outputs,
        train_loss=measurements.train_loss,
        gradient=gradient,
        parameter=np.isfinite(parameters),
    )


def without(values: CoalitionValues, rows: Bools) -> CoalitionValues:
    """Return the values without those of the rows that are marked in `rows` (E,), whose seeds were removed."""
    kept = ~rows[values.env]
    return values._replace(
        live=values.live & ~rows[:, None],
        **{name: getattr(values, name)[kept] for name in ("env", "mask", "metric", "loss")},
    )
