"""The strongest rule we know: plant bypasses early where the stream is thin, keep or remove by the paired contribution.

E environments, S slots.
"""

import numpy as np

from esper.leyline.actions import Actions, Head, Ints, Op
from esper.leyline.config import GatesConfig, HeuristicConfig
from esper.leyline.stages import Stage
from esper.leyline.view import Bools, Floats, Space, View
from esper.tamiyo.baselines import Rule, complete, defaults


class Heuristic(Rule):
    """One operation per environment and step; several seeds may be under way. The first of these that applies:

    1. FOSSILIZE the holding seed of the largest contribution, where the mask allows it and its lower confidence bound
       is above `gates.min_contribution` (so that permissive gates do not make the rule careless).
    2. ADVANCE the trained seed of the largest incubation gain, if it can still be fossilized in this episode.
    3. PRUNE the seed of the lowest contribution among those that harm (holding, upper confidence bound under 0) and
       those whose gate could have let them through at `patience` decisions, this one included, and does not now.
    4. GERMINATE at the dormant slot of the lowest relative participation, from `start` on, where the metric is under
       `threshold`, the participation under `min_rank`, and there is time to fossilize it and `slack` steps more: a
       seed that is unfinished at the end is worth nothing. Up to `tie` times the lowest counts as lowest.
    5. WAIT.

    Confidence bounds are mean -/+ `gates.z` standard errors. What was not measured satisfies no condition. A view does
    not tell the rent, so a run says in `gates.min_contribution` what a seed must bring in.
    """

    def __init__(self, config: HeuristicConfig, gates: GatesConfig) -> None:
        self.config = config
        self.gates = gates

    def act(self, view: View) -> Actions:
        """One decision per environment, from its own row of the view alone."""
        config, gates = self.config, self.gates
        stage, age, may = view.seeds.stage, view.seeds.age, view.masks.slot
        contribution, gain = view.measurements.contribution, view.measurements.gain
        usual = defaults(view.space)
        usual[Head.BLUEPRINT] = _on_menu(config.blueprint, view.space)
        # A seed planted now trains from the next step on, and its FOSSILIZE takes a decision of its own.
        trial = view.space.tempos[usual[Head.TEMPO]] + gates.min_holding + 1
        life = 1 + gates.min_training + trial
        left = view.steps - view.step

        # nan, which is what was not measured, compares False with everything.
        bound = gates.z * contribution.se
        keep = may[:, Op.FOSSILIZE] & (contribution.mean - bound > gates.min_contribution)
        advance = may[:, Op.ADVANCE] & (left >= trial)
        harmful = (stage == Stage.HOLDING) & (contribution.mean + bound < 0)
        unkept = (stage == Stage.HOLDING) & ~keep & (age - gates.min_holding + 1 >= config.patience)
        untrained = (stage == Stage.TRAINING) & ~may[:, Op.ADVANCE] & (age - gates.min_training + 1 >= config.patience)
        prune = may[:, Op.PRUNE] & (harmful | unkept | untrained)
        rank = view.measurements.participation
        timely = view.step >= config.start and left >= life + config.slack
        weak = view.measurements.metric[:, None] < config.threshold
        plant = may[:, Op.GERMINATE] & view.masks.blueprint[..., usual[Head.BLUEPRINT]]
        plant &= weak & (rank < config.min_rank) & timely

        # A stream stays thin behind the slot where it became so, hence of about equals the first is the cause.
        thinnest = np.where(plant, rank, np.inf).min(1, keepdims=True)
        plant &= rank <= config.tie * thinnest

        op, slot = np.zeros(len(stage), np.int64), np.zeros(len(stage), np.int64)
        for choice, candidates, score in (  # last first: each overrules those before it
            (Op.GERMINATE, plant, np.zeros_like(rank)),
            (Op.PRUNE, prune, -contribution.mean),
            (Op.ADVANCE, advance, gain.mean),
            (Op.FOSSILIZE, keep, contribution.mean),
        ):
            any_candidate = candidates.any(1)
            op = np.where(any_candidate, choice, op)
            slot = np.where(any_candidate, _best(candidates, score), slot)
        return complete(view.masks, op, slot, usual)


def _best(candidates: Bools, score: Floats) -> Ints:
    """The candidate of the highest score, the first of equals; one that was not measured comes after all that were.

    candidates, score: (E, S).  Returns (E,) int64; 0 where there is no candidate.
    """
    known = np.nan_to_num(score, nan=np.finfo(np.float64).min)
    best: Ints = np.where(candidates, known, -np.inf).argmax(1)
    return best


def _on_menu(name: str, space: Space) -> int:
    """Index of a blueprint by name; the first of the menu where the task lacks it."""
    menu = [blueprint.name for blueprint in space.blueprints]
    return menu.index(name) if name in menu else 0
