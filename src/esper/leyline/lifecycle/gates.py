"""Define gates: conditions on a seed before an operation may advance it. E environments, S slots."""

from typing import NamedTuple

import numpy as np

from esper.leyline.config.tree import GatesConfig
from esper.leyline.lifecycle.view import Bools, Floats, Measurements, Seeds, Space
from esper.leyline.lifecycle.vocabulary import Stage, among


class Check(NamedTuple):
    """Checks one condition of a gate."""

    name: str  # name of the condition
    margin: Floats  # (E, S) positive if the condition holds; nan, which fails, if nothing was measured
    value: Floats  # (E, S) the measured quantity
    failure: str  # sentence for a value that fails: the value as {value}, the bound, and its config key


class Gate(NamedTuple):
    """Combines named checks that must all pass, for every slot of every environment at once."""

    stage: Stage  # the gate applies to seeds in this stage
    checks: tuple[Check, ...]  # the conditions

    def passed(self) -> Bools:
        """Return (E, S): whether every margin is positive. An absent measurement, nan, does not pass."""
        return np.logical_and.reduce([check.margin > 0 for check in self.checks])

    def reason(self, env: int, slot: int) -> str:
        failed = [
            f"{check.name} not measured"
            if np.isnan(check.margin[env, slot])
            else check.failure.format(value=float(check.value[env, slot]) + 0.0)  # no -0
            for check in self.checks
            if not check.margin[env, slot] > 0
        ]
        return f"failed: {' and '.join(failed)}" if failed else "passed"


class Gates(NamedTuple):
    """Holds the gates in front of a controller's operations. G3, the end of a ramp, is part of `tick`."""

    advance: Gate  # G2, from TRAINING to BLENDING
    fossilize: Gate  # G5, from HOLDING to FOSSILIZED


def judge(seeds: Seeds, measurements: Measurements, config: GatesConfig, space: Space | None = None) -> Gates:
    """Compute both gates for every seed (`esper docs lifecycle`).

    space: where seeds may be further blocks of stacks, which are blended in from front to back.
    """
    gain, contribution = measurements.gain, measurements.contribution
    untrained = np.where(seeds.age == 0, np.nan, -1.0)  # at age 0 in TRAINING, the seed has not seen a batch yet
    finite = np.where(measurements.seed_gradient_finite, 1.0, untrained)
    trained = _dwell("min_training_steps", seeds, config.min_training_steps)
    held = _dwell("min_holding_steps", seeds, config.min_holding_steps)
    certified: tuple[Check, ...] = ()
    if config.certify is not None:
        certificate = np.nan_to_num(measurements.certificate, nan=0.0)  # not looked at is as refused
        left = np.broadcast_to(measurements.level[:, None], certificate.shape)
        failure = "fresh examples have not shown that it helps, and {value:.2g} of gates.certify is left to test it at"
        certified = (Check("certificate", certificate, left, failure),)
    if config.permissive:
        ready = [trained, _measured("incubation gain", gain.mean)]
        worth = _measured("contribution", contribution.mean)
    else:
        gained = gain.mean - config.gain_z * gain.se
        brought = contribution.mean - config.contribution_z * contribution.se
        sane = Check("finite gradients", finite, finite, "a gradient of the seed is not finite")
        ready = [trained, sane, _bound("incubation gain", gained, config.gain_z, 0.0, "gates.gain_z")]
        keys = "gates.contribution_z and gates.min_contribution"
        worth = _bound("contribution", brought, config.contribution_z, config.min_contribution, keys)
    if space is not None and space.stacks:
        # No further block in front of one, in the same stack, may incubate or blend.
        copies = np.array([each.copies for each in space.blueprints])
        block = (seeds.blueprint >= 0) & copies[np.maximum(seeds.blueprint, 0)]
        early = frozenset({Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING})
        coming = block & among(seeds.stage, early) & ~seeds.doomed
        in_front = np.array([[stack == own and at < here for own, here in space.stacks] for stack, at in space.stacks])
        waits = block & (coming[:, :, None] & in_front).any(1)
        margin, failure = np.where(waits, -1.0, 1.0), "a block in front of it is not on trial yet"
        ready.append(Check("turn", margin, waits.astype(np.float64), failure))
    return Gates(Gate(Stage.TRAINING, tuple(ready)), Gate(Stage.HOLDING, (held, worth, *certified)))


def _dwell(name: str, seeds: Seeds, steps: int) -> Check:
    age = seeds.age.astype(np.float64)
    return Check(name, age - steps + 1, age, f"it has been there for {{value:.0f}} of {steps} steps (gates.{name})")


def _bound(name: str, bound: Floats, z: float, least: float, keys: str) -> Check:
    """Return the check that a measured quantity, less z standard errors, exceeds `least`."""
    errors = "its standard error" if z == 1 else f"{z:g} standard errors"
    failure = f"{name} less {errors} must exceed {least:g} and is {{value:+.4g}} ({keys})"
    return Check(name, bound - least, bound, failure)


def _measured(name: str, mean: Floats) -> Check:
    return Check(f"{name} measured", np.where(np.isnan(mean), np.nan, 1.0), mean, f"{name} is {{value:+.4g}}")
