"""Say in sentences whether a growth paid, why nothing was planted or kept, and what figures rest on. E environments.

What a seed contributes is not asked in the verdict: that is the network less the seed, which trained beside it, and a network
that never had the seed may be as good.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config.tree import GatesConfig, GrowthConfig, RewardConfig
from esper.leyline.data.objective import objective_of
from esper.leyline.data.task import AnyTask, Task
from esper.leyline.intervals import differences, mean_and_error, t_interval
from esper.leyline.lifecycle.gates import judge
from esper.leyline.lifecycle.view import Bools, Scores, Space, View
from esper.leyline.lifecycle.vocabulary import Actions, Op, Refusal, Stage, among
from esper.leyline.messages import counted, nothing_planted, rounded
from esper.leyline.protocols import Controller
from esper.runs.baselines import Absent, BaselineResult

RIVALS: Mapping[str, str] = {
    "twin": "the host as it is (twin)",
    "plain": "a network of this size from the start (plain)",
    "same-size": "the grown one from the start (same-size)",
}
"""The static networks that one could have without growth, in the order of the line. Skips are another host, and no rival."""


def compared_networks(
    grown: Sequence[float | None],
    static: Mapping[str, BaselineResult | Absent],
    host_params: NDArray[Any],
    reward: RewardConfig,
) -> dict[str, dict[str, Any]]:
    """Compare J of the grown networks (E,) on the test split with that of each rival that was trained, by environment.

    Returns the E values of J of each, and the mean and the 95 % t interval of the differences; None without one.
    """
    found = {}
    for name in RIVALS:
        trained = static.get(name)
        if trained is None or isinstance(trained, Absent):
            continue
        scores = Scores(trained.metric, trained.loss, trained.params - host_params)
        worth = objective_of(scores, host_params, reward)
        theirs = [None if each != each else each for each in worth.tolist()]
        gain = t_interval(differences(grown, theirs))
        ends = [None if end != end else end for end in gain[:3]]
        found[name] = {"test_objective": theirs, **dict(zip(("difference", "low", "high"), ends, strict=True))}
    return found


def verdict(summary: Mapping[str, Any], reward: RewardConfig) -> str:
    """Say in one line whether growth paid, from the figures of a summary with its `compared` networks.

    It paid if J of the grown networks is above J of the twin and of the plain networks, each with its whole interval, and not
    below J of the same-size networks. It did not pay if no seed was kept, if one of the three is above the grown networks with
    its whole interval, or if they are not resolved from the twin and the mean of the twin or of the plain networks is at least
    theirs: the host as it is costs nothing. Everything else is not resolved.
    """
    if summary["status"] == "failed":
        return "No verdict: the run failed, so its figures do not say whether growth pays."
    envs, kept = summary["envs"], sum(map(bool, summary["grown"]))
    many = counted(envs, "environment")
    grown, metric = summary["test_objective"]["grown"], f"test_{summary['metric']}"
    rivals = {
        name: t_interval(differences(grown, each["test_objective"])) for name, each in summary["compared"].items()
    }
    cut = f"interrupted after {summary['steps_done']} of {counted(summary['steps'], 'step')}"
    interrupted = summary["status"] == "interrupted"
    if not kept and interrupted:
        return f"Not resolved whether growth pays: {cut}, and no seed is kept yet."
    if not kept:
        name = summary["metric"]
        own = rounded(mean_and_error(summary[metric]["grown"])[0], ".3f")
        nothing = "no seed was planted"
        if planted := len(summary["plantings"]):
            # a reason begins with the condition; the figures of this seed follow a semicolon
            reasons = Counter(entry["reason"].partition(";")[0] for entry in summary["prunes"]).most_common(1)
            most = "".join(f" ({times} removed: {reason})" for reason, times in reasons)
            nothing = f"no seed was kept of {planted} planted{most}"
        clauses = [f"{nothing}, so the grown network is the host alone, with {name} {own}"]
        for rival in ("twin", "plain"):  # a seed that acted and was pruned has changed how the host trained
            values = summary["baselines"].get(rival, {}).get(metric)
            if values is not None and values != summary[metric]["grown"]:
                clauses.append(f"{RIVALS[rival]} has {rounded(mean_and_error(values)[0], '.3f')}")
        return f"Growth did not pay here: {'; '.join(clauses)}."
    seeds = f"{kept} of {many} kept a seed"
    if not rivals:
        return (
            f"Not resolved whether growth paid: {seeds}, and no network without growth was trained beside them; "
            "--baselines twin,same-size,plain (baselines in Python) trains some."
        )
    worth = summary["metric"] if reward.objective == "metric" else "minus the loss"
    prices = [name for name, price in (("rent", reward.rent), ("compute", reward.compute_price)) if price]
    if prices:
        worth = f"J ({worth} less {' and '.join(prices)})"
    others = (
        f"{RIVALS[name]} has {rounded(mean_and_error(summary['compared'][name]['test_objective'])[0], '.3f')} "
        f"(growth {gain:+.3f})"
        for name, gain in rivals.items()
    )
    clauses = [", ".join([f"{worth} is {rounded(mean_and_error(grown)[0], '.3f')} with growth", *others])]
    twin, plain = rivals.get("twin"), rivals.get("plain")
    unresolved = twin is not None and twin.size > 1 and not twin.above
    as_good = unresolved and any(gain.mean <= 0 for gain in (twin, plain) if gain is not None)
    if as_good or any(gain.below for gain in rivals.values()):
        head = "Growth did not pay here"
    elif twin is not None and twin.above and (plain is None or plain.above):
        head = "Growth paid"
    else:
        head = f"Not resolved by {many} whether growth paid"
    if twin is not None and not twin.above:
        equal = "is as good" if twin.size > 1 and twin.mean <= 0 else "may be as good"
        without = "is better" if twin.below else equal
        clauses.append(f"{seeds}, yet the host without it {without}")
        gap = t_interval(differences(summary[metric]["grown"], summary["baselines"]["twin"][metric]))
        if gap.above and reward.objective == "metric":
            clauses.append(f"what the seeds add to {summary['metric']}, {gap:+.3f}, is not worth their rent")
    else:
        clauses.append(seeds)
    if twin is None:
        clauses.append("the host as it is was not trained beside them (--baselines twin)")
    if plain is None and head == "Growth paid":
        clauses.append(f"not compared with {RIVALS['plain']}")
    if interrupted:
        clauses.append(cut)
    if envs == 1:
        clauses.append("one environment gives no interval (--envs 16, envs=16 in Python)")
    return f"{head}: {'; '.join(clauses)}."


def verdict_of_loop(kept: int, added: int, host: int, *, finished: bool, outlook: str = "") -> str:
    """Say in one line what is known of a growth in a loop of a person's own, beside which no network without growth is trained.

    kept: seeds that were kept, with `added` parameters together. host: parameters of the model. outlook: what training on and
    another seed promise.
    """
    if not kept:
        if not finished:
            return "Not resolved whether growth pays: no seed is kept yet."
        return (
            "Growth did not pay here: no seed was kept, so the network is the model alone, as the loop trained it"
            + (f"; {outlook}." if outlook else ".")
        )
    size = f"{counted(kept, 'seed')} with {counted(added, 'parameter')}, {added / host:.1%} of the model's"
    return (
        f"Not resolved whether growth paid: {size}, {'is' if kept == 1 else 'are'} kept, but no network without growth was "
        f"trained beside this one. To know, train the model without esper.Growth, and one of {host + added:,} parameters from "
        "the start, on the same batches, and compare all three on examples that none of them has seen."
    )


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
