"""Explain in sentences why nothing was planted, why seeds were not kept, and what figures rest on. E environments."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config.tree import GatesConfig, GrowthConfig
from esper.leyline.data.task import AnyTask, Task
from esper.leyline.lifecycle.gates import judge
from esper.leyline.lifecycle.view import Bools, Space, View
from esper.leyline.lifecycle.vocabulary import Actions, Op, Refusal, Stage, among
from esper.leyline.messages import counted, nothing_planted
from esper.leyline.protocols import Controller

FEW = 30
"""Fewest examples of a split on which figures can rest without a word: below, one example is over 3 % of them."""

REFUSED: Mapping[Refusal, str] = {
    Refusal.MASKED: "the masks forbade it; choose among what view.masks allows",
    Refusal.SEED_CAP: "lifecycle.max_seeds was reached; raise it",
    Refusal.PARAM_BUDGET: "its parameters exceed governor.param_limit (budget of esper.Growth); raise it, or choose smaller "
    "blueprints",
    Refusal.MEMORY: "its modules do not fit into memory; lower envs, or raise governor.memory_share",
}
"""The reason of each refusal of GERMINATE, and the key that changes it."""


@dataclass
class Attempts:
    """Counts the attempts to plant in an episode."""

    decisions: int  # number of decisions
    allowed: NDArray[np.int64]  # (E,) decisions at which GERMINATE was allowed
    planted: NDArray[np.int64]  # (E,) seeds that were planted
    refused: NDArray[np.int64]  # (E, refusals) refusals of GERMINATE by `Refusal`
    allowed_last: Bools | None = None  # (E, ops, S) the valid slots of each operation at the last decision

    @classmethod
    def none(cls, envs: int) -> "Attempts":
        """Return counts of zero, for the start of an episode."""
        zeros = np.zeros(envs, np.int64)
        return cls(0, zeros, zeros.copy(), np.zeros((envs, len(Refusal)), np.int64))

    def count(self, view: View, *decided: tuple[Actions, NDArray[np.int8]]) -> None:
        """Count the decisions of a step, behind each the `Refusal` of each environment (E,); NONE where it was carried out."""
        self.decisions += 1
        self.allowed_last = view.masks.slot.copy()
        self.allowed += view.masks.op[:, Op.GERMINATE]
        for actions, refused in decided:
            tried = actions.op == Op.GERMINATE
            self.planted += tried & (refused == Refusal.NONE)
            np.add.at(self.refused, (np.flatnonzero(tried), refused[tried]), 1)
        self.refused[:, Refusal.NONE] = 0


def explanations(attempts: Attempts, space: Space, client: Controller, controller: str) -> list[str]:
    """Return sentences that explain why nothing was planted, each with the config key that changes it.

    Conditions of the engine come first, then what the controller says (`Controller.explain`), or that it chose other
    operations.
    """
    if not attempts.decisions:
        return []
    envs = len(attempts.planted)
    barren = attempts.planted == 0
    own = client.explain()
    fixed = ""  # why planting is impossible in every environment
    if not space.slots:
        fixed = "the host has no slot; give it one with esper.SlotSpec"
    elif not space.fits.any():
        menu, slots = ", ".join(blueprint.name for blueprint in space.blueprints), ", ".join(space.slots)
        fixed = (
            f"no blueprint of the menu ({menu}) fits a slot that may be used ({slots}); give others with `menu` of the task or "
            "the key `blueprints`, or other `slots`"
        )
    elif not space.max_seeds:
        fixed = "lifecycle.max_seeds is 0; raise it"
    if fixed:
        return [f"{nothing_planted(envs, envs)}: {fixed}", *own]
    sentences = []
    failed = barren & attempts.refused.any(1)
    for why, reason in REFUSED.items():
        where = failed & (attempts.refused[:, why] > 0)
        if where.any():
            sentences.append(f"{nothing_planted(int(where.sum()), envs)}: GERMINATE was refused, as {reason}")
    idle = barren & ~failed & (attempts.allowed > 0)
    if idle.any() and not own:
        sentences.append(
            f"{nothing_planted(int(idle.sum()), envs)}: the controller ({controller}) chose another operation at every decision "
            "at which GERMINATE was allowed; name another with `controller`"
        )
    return [*sentences, *own]


def nothing_left(view: View, plants: Bools | None, config: GrowthConfig, controller: str) -> str:
    """Return the condition by which no operation but WAIT is possible any more in the one environment, in which no seed is under
    way; empty while another operation is.

    plants: (1, S, K) the seeds that the controller may still plant; None for any.
    """
    space, stage = view.space, view.seeds.stage[0]
    kept = stage == Stage.FOSSILIZED
    if kept.all():
        return "every site has a seed that is kept"
    if kept.sum() >= space.max_seeds:
        return f"as many seeds are kept as lifecycle.max_seeds allows ({space.max_seeds})"
    possible = ~kept[:, None] & space.fits & (True if plants is None else plants[0])
    if not possible.any():
        return f"the controller ({controller}) plants no more seeds"
    spent, least = int(view.added_params[0]), int(space.cost[0][possible].min())
    most = config.governor.param_limit
    if most is None or spent + least <= most * view.host_params[0]:
        return ""
    return (
        f"the budget of parameters is spent: the seeds have {spent:,} of {int(most * view.host_params[0]):,}, and the smallest "
        f"that {controller} may still plant has {least:,}"
    )


def unfinished(view: View, config: GatesConfig, allowed_last: Bools | None) -> list[str]:
    """Return sentences that explain why seeds were not kept at the end of an episode, with the keys that change it.

    allowed_last: (E, ops, S) bool, the valid slots of each operation at the last decision.
    """
    stage, gates = view.seeds.stage, judge(view.seeds, view.measurements, config, view.space)
    sentences: list[str] = []

    def explain(seeds: Bools, why: str) -> None:
        """Add a sentence about some seeds (E, S), if there are any."""
        if count := int(seeds.sum()):
            were, they = ("was", "it") if count == 1 else ("were", "they")
            sentences.append(f"{counted(count, 'seed')} {were} not kept at the end: {they} {why}")

    removed = view.seeds.doomed & among(stage, frozenset({Stage.BLENDING, Stage.HOLDING}))
    explain(removed, "had been pruned, with a ramp that was not over")
    stage = np.where(removed, Stage.DORMANT, stage)
    moving = among(stage, frozenset({Stage.GERMINATED, Stage.BLENDING}))
    explain(moving, "had not been blended in; raise steps, or plant earlier")
    alpha = "" if config.certify is None else ", raise gates.certify"
    for gate, op, keys in (
        (gates.advance, Op.ADVANCE, "gates.min_training_steps or gates.gain_z"),
        (
            gates.fossilize,
            Op.FOSSILIZE,
            f"gates.min_holding_steps, gates.min_contribution or gates.contribution_z{alpha}",
        ),
    ):
        here = stage == gate.stage
        passed = here & gate.passed()
        could = passed if allowed_last is None else passed & allowed_last[:, op]
        explain(could, f"could {op.name}, which the controller did not choose")
        late = f"passed the gate to {op.name} in the last step, after the last decision; raise steps"
        explain(passed & ~could, late)
        stopped = here & ~passed
        failed = [
            f"{check.name} in {count}" for check in gate.checks if (count := int((stopped & ~(check.margin > 0)).sum()))
        ]
        explain(stopped, f"failed the gate to {op.name} ({', '.join(failed)}); lower {keys}, or raise steps")
    return sentences


def thin_splits(task: AnyTask) -> list[str]:
    """Return sentences about probe and test splits that are too small, or of one class, for their figures to say much."""
    if not isinstance(task, Task):
        return []
    splits = {name: split for name, split in (("probe", task.probe), ("test", task.test)) if split is not None}
    sentences = few_examples({f"the {name} split": len(split.y) for name, split in splits.items()})
    for name, split in splits.items():
        if not split.y.is_floating_point() and len(split.y.unique()) == 1:
            label = int(split.y.flatten()[0])
            only = repr(task.classes[label]) if task.classes else label
            sentences.append(f"every label of the {name} split is {only}: its figures say nothing about other classes")
    return sentences


def few_examples(counts: Mapping[str, int]) -> list[str]:
    """Return a sentence if a part has so few examples that its figures say little. counts: examples by the name of a part."""
    few = {what: count for what, count in counts.items() if count < FEW}
    if not few:
        return []
    held = " and ".join(f"{what} has {counted(count, 'example')}" for what, count in few.items())
    return [f"{held}, so a single example moves figures by up to {1 / min(few.values()):.0%}; bring {FEW} or more"]
