"""Place seeds in hosts of which one block is damaged, or several: the rule `sites`. E environments, S slots."""

from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from esper.leyline.lifecycle.view import Bools, Floats, View, sensor
from esper.leyline.lifecycle.vocabulary import Op
from esper.tamiyo.policy.packages import inner_slots
from esper_bench.controllers.placement import CUT, RISE, Collapse, DriftRise, Picks, Placement, padded
from esper_bench.controllers.plans import MIXED, SEVERAL

PULL = 2.5
"""A block is damaged if the gradient of a bypass around it is more than this many times the median of the host."""


class Sites(Placement):
    """Plants bypasses of rank 2 around all damaged blocks where there are several, and else what the rule for one block plants.

    The rule for one block is `Collapse`, or `DriftRise` where the task has an intact network. If it names a damaged block, the
    further ones are those whose units are dead (CUT), and those behind which the drift rises (RISE). Behind a block that lets
    little through, neither the participation nor the drift shows more damage. Where no further block was named, and the units of
    the first are not dead, the block with the largest gradient of a bypass (`map_gradient_before`) is taken too, if that
    gradient is above PULL times the median.
    """

    sensors_read = MappingProxyType(
        {
            Op.GERMINATE: (
                *Collapse.sensors_read[Op.GERMINATE],
                "map_gradient_before",
                *DriftRise.sensors_read[Op.GERMINATE],
            )
        }
    )
    sensor_families = (*Collapse.sensor_families, "gradient", *DriftRise.sensor_families)

    def pick(self, view: View) -> Picks:
        """Pick what the rule for one block plants, or SEVERAL at the first block and the further ones."""
        rise = sensor(view, "drift") - sensor(view, "drift_before")
        rules, taught = (Collapse().pick(view), DriftRise().pick(view)), np.asarray(np.isfinite(rise).any(1)).tolist()
        inner = inner_slots(view.space)
        dead, pull = inner & (sensor(view, "dead") > CUT), pulls(view, inner)
        named = dead | (inner & (rise > RISE))
        plans, slots, reasons = [], [], []
        for env, own in enumerate(taught):
            rule = rules[own]
            plan, at, why = rule.plans[env], int(rule.slot[env]), rule.reasons[env]
            further, too = np.flatnonzero(named[env] & (np.arange(len(inner[env])) != at)), "there is damage at {} too"
            if not len(further) and not dead[env, at]:
                further, too = strongest(pull[env], at), "{} has {:.1f} times the median gradient of a bypass"
            if plan == MIXED and len(further):
                names = " and ".join(view.space.slots[slot] for slot in further)
                plan, why = SEVERAL, f"{why}, and {too.format(names, pull[env, further[0]])}"
                slots.append(tuple(sorted([at, *further.tolist()])))
            else:
                slots.append((at,))
            plans.append(plan)
            reasons.append(why)
        return Picks(plans, padded(slots), reasons)


def pulls(view: View, inner: Bools) -> Floats:
    """Return (E, S) the gradient of a bypass around each inner block, in multiples of its median over them; 0 if not measured."""
    gradient = np.where(inner, sensor(view, "map_gradient_before"), np.nan)
    known = np.isfinite(gradient)
    medians = [float(np.median(row[own])) if own.any() else 1.0 for row, own in zip(gradient, known, strict=True)]
    multiples: Floats = np.where(known, gradient, 0) / np.maximum(medians, 1e-9)[:, None]
    return multiples


def strongest(pull: Floats, besides: int) -> NDArray[np.int64]:
    """Find the slot with the largest of (S,) multiples besides one slot; the array is empty if none is above PULL."""
    others = np.where(np.arange(len(pull)) == besides, 0, pull)
    return np.flatnonzero((others == others.max()) & (others > PULL))[:1]
