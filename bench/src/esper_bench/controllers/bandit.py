"""Choose plans by a contextual bandit: Bayesian linear models of their gains, with exploration. E environments.

A context is the features of a slot, which are free of the size of the host. F features, D = F + 1 with a constant.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from esper.leyline.lifecycle.view import Floats, View
from esper.leyline.messages import InputError
from esper.store.disk import read_named, write_atomic
from esper_bench.controllers.healing_features import FEATURES, UNKNOWN, slot_features, table
from esper_bench.controllers.placement import Picks, Placement
from esper_bench.controllers.plans import HERE, NONE, PLACED, UNIFORM, Plan

SUFFIX = ".bandit"
"""Suffix of the file of a bandit."""
LARGEST = 2**22  # bytes of a file
NAMES = "features"
"""Name of the tensor that holds the names of the features, as UTF-8 of a JSON list."""
PRIOR, NOISE, CLIP = 1.0, 0.1, 4.0
"""Precision of the prior, in units of 1 / NOISE^2; standard deviation of a gain given its features [J]; largest feature."""


class Posterior(NamedTuple):
    """Holds the posterior of w in gain = w . x + noise, with the prior N(0, NOISE^2 / PRIOR) and noise N(0, NOISE^2).

    Attributes:
        covariance ((D, D) array): C; the covariance of w is NOISE^2 C
        moment ((D,) array): b, the sum of gain * x; the mean of w is C b
    """

    covariance: Floats
    moment: Floats

    @classmethod
    def prior(cls, size: int) -> "Posterior":
        """Return the posterior of no observation, D = size."""
        return cls(np.eye(size) / PRIOR, np.zeros(size))

    def observed(self, x: Floats, gain: float) -> "Posterior":
        """Add an observation x (D,) to the posterior: C - C x x' C / (1 + x' C x) (Sherman and Morrison), b + gain x."""
        towards = self.covariance @ x
        return Posterior(self.covariance - np.outer(towards, towards) / (1 + x @ towards), self.moment + gain * x)

    def mean(self, x: Floats) -> Floats:
        """Return the expected gains of x (..., D) -> (...) [J]."""
        expected: Floats = x @ (self.covariance @ self.moment)
        return expected

    def deviation(self, x: Floats) -> Floats:
        """Return the standard deviations of the expected gains of x (..., D) -> (...) [J]."""
        spread: Floats = NOISE * np.sqrt(((x @ self.covariance) * x).sum(-1))
        return spread


def contexts(features: Floats) -> Floats:
    """Turn features (..., F), UNKNOWN where not measured, into contexts (..., D): clipped, 0 for the unknown, and a constant."""
    known = np.where(features <= UNKNOWN, 0.0, np.clip(features, -CLIP, CLIP))
    return np.concatenate([np.ones((*known.shape[:-1], 1)), known], -1)


class Bandit(Placement):
    """Plants the plan of the largest expected gain in J over `uniform`; UNIFORM where none is above 0.

    Learning, it adds `bold` standard deviations to every expectation (LinUCB; Li et al., "A contextual-bandit approach to
    personalized news article recommendation", 2010, algorithm 1, with one linear model for each plan, shared by all slots).
    `learn` takes what an episode brought, and `learn_all` what the last one brought in every environment. `bold` 0 plants what is
    best so far.
    """

    def __init__(self, models: Mapping[str, Posterior] | None = None, bold: float = 0.0) -> None:
        super().__init__()
        size = len(FEATURES) + 1
        self.models = dict(models or {plan.name: Posterior.prior(size) for plan in PLACED})
        self.bold = bold
        self.context = np.zeros((0, 0, size))  # (E, S, D) of the last picks
        self.picked: list[tuple[Plan, int]] = []  # the last picks (E,), slot -1 for a plan without one

    def pick(self, view: View) -> Picks:
        """Choose in each environment the plan and the slot of the largest gain, and note them for `learn_all`."""
        self.context = contexts(table(slot_features(view, taught=False), FEATURES))
        options, gains = self.gains(self.context)
        best = gains.argmax(1)
        self.picked = picks = [options[index] for index in best]
        reasons = [
            f"the bandit expects {gain:+.3f} in J over a bypass around every block, the most of {len(options)} plans"
            for gain in gains.max(1).tolist()
        ]
        return Picks([plan for plan, _ in picks], np.array([slot for _, slot in picks]), reasons)

    def gains(self, context: Floats) -> tuple[list[tuple[Plan, int]], Floats]:
        """Return the plans with their slots, and the gain over UNIFORM by which each is chosen, (E, S, D) -> (E, plans)."""
        slots = context.shape[1]
        options, columns = [(UNIFORM, -1)], [np.zeros(len(context))]
        for plan in PLACED:
            model = self.models[plan.name]
            worth = model.mean(context) + (self.bold * model.deviation(context) if self.bold else 0.0)
            for slot in range(slots) if plan not in (NONE, HERE) else [slots - 1]:
                options.append((plan, -1 if plan == NONE else slot))
                columns.append(worth[:, slot])
        return options, np.stack(columns, 1)

    def learn(self, plan: Plan, context: Floats, gain: float) -> None:
        """Add an episode: the plan, the context (D,) of its slot, the last one for NONE, and J less that of UNIFORM."""
        if plan != UNIFORM:
            self.models[plan.name] = self.models[plan.name].observed(context, gain)

    def learn_all(self, gains: Floats) -> None:
        """Add the episode that followed the last picks: J of each environment (E,), less that of UNIFORM on its instance."""
        for (plan, slot), context, gain in zip(self.picked, self.context, gains.tolist(), strict=True):
            self.learn(plan, context[slot], gain)


def save_bandit(path: Path, bandit: Bandit) -> None:
    """Write a file; an interrupted write leaves the old one."""
    tensors = {
        f"{name}.{part}": getattr(own, part) for name, own in bandit.models.items() for part in Posterior._fields
    }
    write_atomic(path, save({**tensors, NAMES: np.frombuffer(json.dumps(FEATURES).encode(), np.uint8)}))


def load_bandit(path: Path, bold: float = 0.0) -> Bandit:
    """Read a file that `save_bandit` wrote. InputError if it is not one, or was made with other features."""
    data = read_named(path, LARGEST, "give a file that `esper_bench.controllers.bandit.save_bandit` wrote")
    try:
        tensors = load(data)
        names = tuple(json.loads(bytes(tensors.pop(NAMES))))
        models = {
            plan.name: Posterior(*(tensors[f"{plan.name}.{part}"] for part in Posterior._fields)) for plan in PLACED
        }
    except (SafetensorError, KeyError, ValueError, TypeError):
        raise InputError(
            f"{path} is not the file of a bandit; train one with bench/scripts/study_learners.py"
        ) from None
    if names != FEATURES:
        raise InputError(f"the bandit of {path} reads other features than this Esper has; train it again")
    size = len(FEATURES) + 1
    for name, model in models.items():
        whole = model.covariance.shape == (size, size) and model.moment.shape == (size,)
        if not whole or any(part.dtype != np.float64 or not np.isfinite(part).all() for part in model):
            raise InputError(f"the model {name!r} of the bandit of {path} is damaged; train it again")
    return Bandit(models, bold)
