"""What a step measured, from the one packet that is read from the device. E rows, S slots."""

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.body import Body
from esper.kasmina.lifecycle import dormant, exported
from esper.leyline.stages import Stage
from esper.leyline.task import Objective
from esper.leyline.view import Bools, CoalitionValues, Estimate, Floats, Measurements, Scores, Seeds, choose
from esper.tolaria.coalitions import Coalitions, Sampling, coalitions, masks
from esper.tolaria.data import Examples
from esper.tolaria.probe import negated, probe, sense, spread
from esper.tolaria.runtime import read_packet
from esper.tolaria.sensors import SENSORS
from esper.tolaria.training import Trained
from esper.tolaria.vitals import Signs


class Asked(NamedTuple):
    """What is to be measured."""

    held: Examples  # the probe split
    fit: Examples | None  # training examples, where the growth sensors are due
    sampling: Sampling | None  # where attribution is due
    terminal: bool  # at the end of an episode also what would be exported
    step: int  # steps that were taken in the episode
    data: Tensor | None = None  # (E,) bool on the device, whether a row's data are finite: asked for where one broke
    validation: Examples | None = None  # the validation split, where early stopping reads it


class Measured(NamedTuple):
    """What was."""

    measurements: Measurements
    scores: Scores
    exported: Scores | None  # of the networks that would be exported, at the end of an episode
    coalitions: CoalitionValues | None  # where attribution was due
    signs: Signs
    data: Bools | None = None  # (E,) whether a row's data are finite, where it was asked for
    validation: Scores | None = None  # of the networks that would be exported, where the validation split was asked for

    def replaced(self, other: "Measured", rows: Bools) -> "Measured":
        """Some rows, (E,) bool, measured again, after all their unfinished seeds are gone; the rest is as it was."""
        scores = choose(rows, other.scores, self.scores)
        return Measured(
            choose(rows, other.measurements, self.measurements),
            scores,
            None if self.exported is None else choose(rows, scores, self.exported),
            None if self.coalitions is None else without(self.coalitions, rows),
            choose(rows, other.signs, self.signs),
            other.data,
            self.validation,
        )


class _Figures(NamedTuple):
    """`Probed`, read: the same fields as arrays."""

    loss: Floats
    metric: Floats
    branch_loss: Floats
    branch_metric: Floats
    loss_rise: Floats
    metric_fall: Floats
    participation: Floats
    signs: Floats


def measure(
    body: Body, seeds: Seeds, objective: Objective, asked: Asked, last: Measurements, trained: Trained | None
) -> Measured:
    """Probe every row and read what was found: the one device read of a step.

    `last` are the measurements before, whose growth sensors stay where they are not due; `trained` is what the step's
    training accumulated, where there was any.
    """
    wanted = coalitions(seeds, asked.sampling, terminal=asked.terminal)
    probed = probe(body, seeds, asked.held, objective, wanted, signs=True)
    sensors = [sense(body, seeds, asked.fit, asked.held, objective)] if asked.fit is not None else []
    training = [trained.loss, trained.gradient_norm, *trained.seed_norms] if trained is not None else []
    data = [asked.data] if asked.data is not None else []
    validation = _validated(body, seeds, objective, asked.validation) if asked.validation is not None else []
    packet = iter(read_packet([*probed, *sensors, *data, *validation, *training]))
    figures = _Figures._make(itertools.islice(packet, len(probed)))
    found = next(packet) if sensors else None
    sound = next(packet) > 0 if data else None
    worth = Scores(next(packet), next(packet), _exported_params(body, seeds)) if validation else None
    measurements = _unpack(seeds, wanted, figures, found, last, trained, list(packet))
    scores = Scores(measurements.metric, measurements.loss, body.added_params(seeds))
    final = _exported(body, seeds, wanted, figures, scores) if asked.terminal else None
    values = _values(asked.step, asked.sampling.draw, wanted, figures) if asked.sampling is not None else None
    return Measured(measurements, scores, final, values, _signs(measurements, figures, trained), sound, worth)


def unmeasured(rows: int, slots: int) -> Measurements:
    """Nothing measured yet."""
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
        sensors=np.full((*shape, len(SENSORS)), np.nan),
        sensor_age=0,
    )


def _values(step: int, draw: int, asked: Coalitions, figures: _Figures) -> CoalitionValues:
    """The coalitions of a step, the full one of every environment with live seeds included."""
    full = np.flatnonzero(asked.live.any(1))
    env, mask = np.concatenate([asked.env, full]), np.concatenate([asked.mask, masks(asked.live)[full]])
    order = np.lexsort((mask, env))
    metric = np.concatenate([figures.branch_metric[asked.branch], figures.metric[full]])
    loss = np.concatenate([figures.branch_loss[asked.branch], figures.loss[full]])
    return CoalitionValues(step, draw, asked.live, env[order], mask[order], metric[order], loss[order])


def _unpack(
    seeds: Seeds,
    asked: Coalitions,
    figures: _Figures,
    found: Floats | None,
    last: Measurements,
    trained: Trained | None,
    training: list[NDArray[np.float64]],
) -> Measurements:
    """The packet of a step as measurements over (rows, S)."""
    shape = seeds.stage.shape
    fresh = unmeasured(*shape)
    seed_norm = fresh.seed_gradient_norm
    if trained is not None:
        for (at, owners), norm in zip(trained.seed_owners, training[2:], strict=True):
            seed_norm[owners, at] = norm
    sensors, sensor_age = found, 0
    if sensors is None:
        sensors, sensor_age = last.sensors, last.sensor_age + 1
    return fresh._replace(
        metric=figures.metric,
        loss=figures.loss,
        train_loss=training[0] if trained is not None else fresh.train_loss,
        gradient_norm=training[1] if trained is not None else fresh.gradient_norm,
        contribution=spread(figures.metric_fall, asked.without(), shape),
        contribution_loss=spread(figures.loss_rise, asked.without(), shape),
        gain=negated(spread(figures.loss_rise, asked.alone, shape)),
        gain_metric=negated(spread(figures.metric_fall, asked.alone, shape)),
        seed_gradient_finite=np.isfinite(seed_norm),
        participation=figures.participation,
        sensors=sensors,
        sensor_age=sensor_age,
    )


def _exported(body: Body, seeds: Seeds, asked: Coalitions, figures: _Figures, scores: Scores) -> Scores:
    """What the networks are worth with every unfinished seed left out."""
    branch, env = asked.exported()
    metric, loss = scores.metric.copy(), scores.loss.copy()
    metric[env], loss[env] = figures.branch_metric[branch], figures.branch_loss[branch]
    return Scores(metric, loss, _exported_params(body, seeds))


def _validated(body: Body, seeds: Seeds, objective: Objective, validation: Examples) -> list[Tensor]:
    """Metric and loss on the validation split of the networks that would be exported, each (E,) on the device."""
    nothing = coalitions(dormant(*seeds.stage.shape), None, terminal=False)
    probed = probe(body, exported(seeds), validation, objective, nothing, signs=False)
    return [probed.metric, probed.loss]


def _exported_params(body: Body, seeds: Seeds) -> NDArray[np.int64]:
    """(E,) parameters of the seeds that an export keeps."""
    return body.added_params(seeds, frozenset({Stage.FOSSILIZED}))


def _signs(measurements: Measurements, figures: _Figures, trained: Trained | None) -> Signs:
    """The vital signs among what was measured."""
    gradient = np.ones(len(figures.loss), bool)
    if trained is not None:
        gradient = np.isfinite(measurements.gradient_norm)
        for at, owners in trained.seed_owners:
            gradient[owners] &= measurements.seed_gradient_finite[owners, at]
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
    """The coalitions of all but some rows, (E,) bool: those no longer have the seeds that theirs were of."""
    kept = ~rows[values.env]
    return values._replace(
        live=values.live & ~rows[:, None],
        **{name: getattr(values, name)[kept] for name in ("env", "mask", "metric", "loss")},
    )
