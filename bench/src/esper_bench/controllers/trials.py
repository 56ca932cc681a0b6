"""Try the first candidates of a rule in copies of the network, and plant the best: the controllers `trials:RULE`.

E environments, n candidates.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config.tree import TrialsConfig
from esper.leyline.data.objective import objective
from esper.leyline.lifecycle.view import View
from esper.leyline.messages import InputError
from esper.leyline.protocols import Proposed
from esper_bench.controllers.placement import Choice, Picks, Placement, Ranking, first
from esper_bench.controllers.plans import NONE

TRIALS = "trials:"
"""Prefix of the names of controllers that try the candidates of a rule."""


class GivenSeeds(Placement):
    """Plants what it is given."""

    sensors_every = 0

    def __init__(self, picks: Picks) -> None:
        super().__init__()
        self.picks = picks

    def pick(self, view: View) -> Picks:
        """Pick what was given."""
        return self.picks


class Trials(Placement):
    """Tries the first candidates of a rule at the first decision, and plants the one whose copy is worth most after the trial.

    An environment for which the rule names one candidate tries nothing. Where no copy is worth more than the network was before
    the trial, nothing is planted. Equal candidates come in the order of the rule.
    """

    def __init__(self, rule: Placement, name: str, config: TrialsConfig) -> None:
        """Raise InputError if the rule compares no places."""
        super().__init__()
        if type(rule).ranking is Placement.ranking:
            raise InputError(
                f"the controller {TRIALS}{name} has nothing to try, because {name} ranks no places; give {TRIALS} with "
                "participation, collapse, inner-use or tree"
            )
        self.rule, self.name, self.config = rule, name, config
        self.sensors_every, self.sensor_families, self.sensors_read = (
            rule.sensors_every,
            rule.sensor_families,
            rule.sensors_read,
        )
        self._ranking: Ranking = []
        self._before: NDArray[np.float64] = np.zeros(0)
        self._picks: Picks | None = None

    def __repr__(self) -> str:
        return f"Trials({self.rule!r})"

    def proposals(self, view: View) -> Proposed | None:
        """Propose the first candidates of each environment that has several, at the first decision of an episode."""
        if (view.step and self._wish is not None) or not self.chooses(view):
            return None
        self._ranking = [choices[: self.config.candidates] for choices in self.rule.ranking(view)]
        space, measured = view.space, view.measurements
        value = measured.metric if space.objective == "metric" else -measured.loss
        self._before = objective(value, view.added_params, view.host_params, space.rent, space.rent_size)
        contested = [env for env, choices in enumerate(self._ranking) if len(choices) > 1]
        env = np.array([each for each in contested for _ in self._ranking[each]], np.int64)
        self._picks = None if len(env) else first(self._ranking)
        if not len(env):
            return None
        flat = first([[choice] for each in contested for choice in self._ranking[each]])
        return Proposed(env, GivenSeeds(flat), min(self.config.trial_steps, view.steps - view.step))

    def tried(self, worth: NDArray[np.float64]) -> None:
        """Choose by J (n,) of the copies. A copy whose J is not a number is not chosen."""
        left, chosen = np.nan_to_num(worth, nan=-np.inf).tolist(), []
        for choices, before in zip(self._ranking, self._before.tolist(), strict=True):
            if len(choices) == 1:
                chosen.append(choices)
                continue
            tried, left = left[: len(choices)], left[len(choices) :]
            best = int(np.argmax(tried))
            of = f"of {len(choices)} candidates tried for {self.config.trial_steps} steps"
            if tried[best] > before:
                why = f"{choices[best].reason}, and it has the highest J {of}, {tried[best]:.3f} (before: {before:.3f})"
                chosen.append([choices[best]._replace(reason=why)])
            else:
                chosen.append([Choice(NONE, -1, f"none {of} raised J from {before:.3f}")])
        self._picks = first(chosen)

    def pick(self, view: View) -> Picks:
        """Pick what the trials chose. Raises InputError if no trial could be made."""
        if self._picks is None:
            raise InputError(
                f"the controller {TRIALS}{self.name} tries candidates in copies of the network, which only a run of a "
                f"population makes (esper grow, esper eval); take {self.name}"
            )
        return self._picks

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        super().load_state(state)
        self._picks = None
