"""Let a learner climb a ladder of problems with known optima, from one slot to the full space of decisions. E environments.

    result = train("full", seed=0, rounds=40)       # a score a round: 0 for never growing, 1 for the optimum

Every rung is a network by formula (`lab.formula`) with S slots and K blueprints. At the right place the right blueprint restores
all that is lost, another one a part of it; elsewhere nothing happens. The environments of a group share a problem, and its rent
makes every superfluous seed cost.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.lifecycle.view import BlueprintInfo, Floats, Outcome, Seeds, View
from esper.leyline.lifecycle.vocabulary import Actions, Ints, Op
from esper.leyline.protocols import Controller
from esper.simic.client import SimicClient
from esper.simic.ppo import PPO
from esper.simic.rewards import get_reward
from esper.tamiyo.policy.actor import Learned
from esper.tamiyo.policy.controller import Language, Policy
from esper_bench.lab.formula import EpisodeDraw, Process, trained_steps
from esper_bench.lab.sandbox import Sandbox, play

START, LIFT, RIPE, PART = 0.45, 0.4, 2.0, 0.4
"""The metric without seeds, what the right seed adds, the time constant of its training [steps], and the share of a wrong one."""
STEPS, COST = 10, 60
"""Length of an episode [steps]; parameters of every seed, of a host with 1,000."""
NAMES = ("bypass-linear", "bypass-mlp", "bypass-rank-1", "bypass-rank-2", "bypass-rank-4", "bypass-rank-8", "mlp-small")
OTHER = 1000
"""Added to a seed, the seed of the problems on which a policy is scored and not trained."""


class SlotPlan(NamedTuple):
    """Says what a plan does with one slot: plant, blend as soon as its gate allows it, and keep or prune."""

    slot: int
    blueprint: int
    keep: bool = True


class Rung(NamedTuple):
    """Describes a problem of the ladder.

    Attributes:
        meaning (str): what has to be learnt
        process (Process): the formulas and the settings
        plans (callable): kind -> plans, each the plantings of an environment, among which brute force finds the optimum
        taught (Process): where a policy is trained, if that is not where it is scored
    """

    meaning: str
    process: Process
    plans: Callable[[int], Sequence[tuple[SlotPlan, ...]]]
    taught: Process | None = None


def _process(
    name: str,
    kinds: int,
    slots: int,
    blueprints: int,
    worth: Callable[[Ints, Seeds, Floats], Floats],
    sense: Callable[[Ints], tuple[Floats, Floats]],
    settings: Mapping[str, Any],
) -> Process:
    """Make the process of a rung.

    worth: kind, seeds, and doses times ripeness (R, S) -> (R,) share of what is lost that is restored. sense: kind ->
    participation and sensors. settings: config beside what all rungs share.
    """

    def metric(draw: EpisodeDraw, step: int, seeds: Seeds, dose: Floats) -> Floats:
        ripe = 1 - np.exp(-trained_steps(seeds) / RIPE)
        return START + LIFT * worth(draw.kind, seeds, dose * ripe)

    usual: dict[str, Any] = {
        "steps": STEPS,
        "envs": 64,
        "reward": {"name": "sparse", "rent": 0.1, "group_size": 4},
        "ppo": {"lr": 3e-3, "gae_lambda": 1.0},
        "lifecycle": {
            "max_seeds": slots,
            "max_training_seeds": slots,
            "embargo": 2,
            "tempos": [0, 1, 2],
            "targets": [1.0],
        },
        "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1},
    }
    merged = {
        key: {**usual.get(key, {}), **value} if isinstance(value, Mapping) else value for key, value in settings.items()
    }
    return Process(
        name=name,
        kinds=kinds,
        slots=tuple(f"s{slot}" for slot in range(slots)),
        menu=tuple(BlueprintInfo(NAMES[each], "before", (f"fit_{each}",)) for each in range(blueprints)),
        cost=(COST,) * blueprints,
        sensors=tuple(f"fit_{each}" for each in range(blueprints)),
        settings={**usual, **merged},
        metric=metric,
        sense=lambda draw: sense(draw.kind),
    )


def _one_place(name: str, meaning: str, slots: int, blueprints: int, *, told: bool = False, **settings: Any) -> Rung:
    """Make a rung on which one slot is right, and its participation tells which.

    told: a sensor tells which blueprint is right, another one in each kind; otherwise it is the same in all.
    """
    usual = min(4, blueprints - 1)
    kinds = slots * blueprints if told else slots

    def right(kind: Ints) -> tuple[Ints, Ints]:
        return kind % slots, kind // slots if told else np.full_like(kind, usual)

    def worth(kind: Ints, seeds: Seeds, dose: Floats) -> Floats:
        slot, blueprint = right(kind)
        part = np.where(seeds.blueprint == blueprint[:, None], 1.0, PART) * (seeds.blueprint >= 0)
        here = np.arange(slots) == slot[:, None]
        worth: Floats = (here * part * dose).sum(1)
        return worth

    def sense(kind: Ints) -> tuple[Floats, Floats]:
        slot, blueprint = right(kind)
        fit = np.zeros((len(kind), slots, blueprints))
        fit[np.arange(len(kind)), :, blueprint] = 0.5
        return np.where(np.arange(slots) == slot[:, None], 0.12, 0.6), fit

    def plans(kind: int) -> list[tuple[SlotPlan, ...]]:
        return [(SlotPlan(*place),) for place in itertools.product(range(slots), range(blueprints))]

    return Rung(meaning, _process(name, kinds, slots, blueprints, worth, sense, settings), plans)


def _menu() -> Rung:
    """Make the rung `blueprint` with a menu that lacks the last blueprint in training, where a second-best one must do."""
    meaning = "which of 7 blueprints, one of which was not in the menu of the training"
    rung = _one_place("menu", meaning, 6, 7, told=True)
    process = rung.process
    return rung._replace(taught=replace(process, menu=process.menu[:-1], cost=process.cost[:-1]))


def _pair(slots: int = 6) -> Rung:
    """Make a rung on which two slots are right. Each alone restores 15 %, both together all."""
    pairs = np.array(list(itertools.combinations(range(slots), 2)))

    def worth(kind: Ints, seeds: Seeds, dose: Floats) -> Floats:
        first, second = np.take_along_axis(dose * (seeds.blueprint >= 0), pairs[kind], 1).T
        worth: Floats = 0.15 * (first + second) + 0.7 * first * second
        return worth

    def sense(kind: Ints) -> tuple[Floats, Floats]:
        here = (np.arange(slots) == pairs[kind][..., None]).any(1)
        return np.where(here, 0.12, 0.6), np.zeros((len(kind), slots, 1))

    def plans(kind: int) -> list[tuple[SlotPlan, ...]]:
        chosen = (itertools.combinations(range(slots), count) for count in (1, 2))
        return [tuple(SlotPlan(slot, 0) for slot in each) for each in itertools.chain(*chosen)]

    meaning = "two right slots, worth little alone and all together"
    return Rung(meaning, _process("pair", len(pairs), slots, 1, worth, sense, {}), plans)


def _bait(slots: int = 6) -> Rung:
    """Make a rung whose bait pays at once and costs twice as much from its sixth step on; the right seed ripens to the end."""
    pairs = np.array(list(itertools.permutations(range(slots), 2)))  # the right slot and the bait

    def worth(kind: Ints, seeds: Seeds, dose: Floats) -> Floats:
        right, bait = pairs[kind].T
        rows = np.arange(len(kind))
        late = np.where(seeds.life[rows, bait] > 5, -1.0, 0.5)
        lives = seeds.blueprint >= 0
        worth: Floats = (dose * lives)[rows, right] + late * lives[rows, bait] * (dose > 0)[rows, bait]
        return worth

    def sense(kind: Ints) -> tuple[Floats, Floats]:
        here = np.arange(slots) == pairs[kind][..., None]  # (E, 2, S)
        return np.where(here.any(1), 0.12, 0.6), np.where(here[:, 1], 0.5, 0.0)[..., None]

    def plans(kind: int) -> list[tuple[SlotPlan, ...]]:
        return [
            tuple(SlotPlan(slot, 0) for slot in each)
            for count in (1, 2)
            for each in itertools.combinations(range(slots), count)
        ]

    meaning = "a seed at the wrong slot pays early and costs late"
    settings = {"reward": {"name": "delta"}}
    return Rung(meaning, _process("bait", len(pairs), slots, 1, worth, sense, settings), plans)


def _incubation(slots: int = 6) -> Rung:
    """Make a rung on which only the gain of a seed that incubates at the right slot tells that slot."""

    def worth(kind: Ints, seeds: Seeds, dose: Floats) -> Floats:
        here = np.arange(slots) == kind[:, None]
        worth: Floats = (here * dose * (seeds.blueprint >= 0)).sum(1)
        return worth

    def sense(kind: Ints) -> tuple[Floats, Floats]:
        return np.full((len(kind), slots), 0.6), np.zeros((len(kind), slots, 1))

    def plans(kind: int) -> list[tuple[SlotPlan, ...]]:
        """Plant any set of slots; keep any of them."""
        sets = itertools.chain(*(itertools.combinations(range(slots), count) for count in range(1, slots + 1)))
        return [
            tuple(SlotPlan(slot, 0, slot in kept) for slot in planted) for planted in sets for kept in ({kind}, planted)
        ]

    meaning = "only incubating tells which slot is right: plant several, keep the one that gains"
    settings = {"ppo": {"decisions_per_step": 8}, "probe": {"sensors_every": 1}}
    return Rung(meaning, _process("incubation", slots, slots, 1, worth, sense, settings), plans)


_FULL: dict[str, Any] = {"lifecycle": {"tempos": [0, 1, 2, 4, 8], "targets": [0.25, 0.5, 0.75, 1.0]}}
RUNGS: Mapping[str, Rung] = {
    "slot": _one_place("slot", "one slot, one blueprint: to plant, blend and keep", 1, 1),
    "place": _one_place("place", "which of 6 slots, and one good blueprint of 7", 6, 7),
    "blueprint": _one_place("blueprint", "which of 7 blueprints: a sensor of it tells", 6, 7, told=True),
    "full": _one_place("full", "6 slots, 7 blueprints, 5 tempos, 4 targets, one decision a step", 6, 7, **_FULL),
    "several": _one_place(
        "several", "the same with eight decisions a step", 6, 7, ppo={"decisions_per_step": 8}, **_FULL
    ),
    "menu": _menu(),
    "pair": _pair(),
    "bait": _bait(),
    "incubation": _incubation(),
}
"""The ladder, by name, the easiest first."""


class PlanPlayer(Controller):
    """Carries out one plan an environment: it plants, blends, and keeps or prunes, each at the first chance.

    tempo, target: indices of those of every seed. several: whether it may make several decisions a step.
    """

    def __init__(self, plans: Sequence[tuple[SlotPlan, ...]], tempo: int, target: int, *, several: bool) -> None:
        self.plans, self.tempo, self.target, self.several = plans, tempo, target, several
        self._done: list[set[int]] = [set() for _ in plans]  # slots that were planted

    def act(self, view: View) -> Actions:
        """Return the next decision of every plan."""
        actions, masks = Actions.wait(len(self.plans)), view.masks.slot
        actions.tempo[:], actions.target[:] = self.tempo, self.target
        for env, plan in enumerate(self.plans):
            for op, (slot, blueprint, keep) in itertools.product(
                (Op.GERMINATE, Op.ADVANCE, Op.FOSSILIZE, Op.PRUNE), plan
            ):
                wanted = {Op.GERMINATE: slot not in self._done[env], Op.PRUNE: not keep}.get(op, keep)
                if wanted and masks[env, op, slot] and view.masks.op[env, op]:
                    actions.op[env], actions.slot[env], actions.blueprint[env] = op, slot, blueprint
                    if op == Op.GERMINATE:
                        self._done[env].add(slot)
                    break
        return actions

    def further(self, view: View, refused: NDArray[np.int8]) -> Actions | None:
        """Return the next decisions of the step, where a policy may make several."""
        actions = self.act(view) if self.several else Actions.wait(len(self.plans))
        return actions if (actions.op != Op.WAIT).any() else None

    def store(self, outcome: Outcome) -> None:
        """Learn nothing."""


@cache
def optimum(name: str) -> tuple[float, ...]:
    """Compute the best return of each kind of problem of a rung, by playing all of its plans at every tempo and target."""
    process, best = RUNGS[name].process, []
    for kind in range(process.kinds):
        plans, earned = RUNGS[name].plans(kind), [0.0]
        sandbox = Sandbox(process, {"envs": len(plans)})
        several, life = sandbox.config.ppo.decisions_per_step > 1, sandbox.config.lifecycle
        for tempo, target in itertools.product(range(len(life.tempos)), range(len(life.targets))):
            planned = PlanPlayer(plans, tempo, target, several=several)
            earned.append(float(play(sandbox, planned, np.full(len(plans), kind)).max()))
        best.append(max(earned))
    return tuple(best)


def score(name: str, policy: Policy, seed: int) -> float:
    """Divide the returns of the greedy policy by those of the optimum, summed over problems that it was not trained on."""
    sandbox = Sandbox(RUNGS[name].process, {"seed": seed + OTHER})
    earned = play(sandbox, Learned(policy))
    best = np.array(optimum(name))[sandbox.space.instance % RUNGS[name].process.kinds]
    return float(earned.sum() / best.sum())


class Climbed(NamedTuple):
    """Holds the figures of one training on a rung.

    Attributes:
        score (float): of the last round; 1 is the optimum
        curve (dict): score by number of rounds
        met (float): share of the episodes of the first round that earned anything
        rows (list): the diagnostics of every round
        seconds (float): of one core
    """

    score: float
    curve: dict[int, float]
    met: float
    rows: list[dict[str, float]]
    seconds: float


def train(name: str, seed: int, rounds: int, marks: Sequence[int] = (), *layers: Mapping[str, Any]) -> Climbed:
    """Train a policy on a rung for some rounds, and score it after those of `marks` and after the last.

    layers: of config, which override the settings of the rung.
    """
    begin = time.process_time()
    rung = RUNGS[name]
    sandbox = Sandbox(rung.taught or rung.process, {"seed": seed, "ppo": {"rounds": rounds}}, *layers)
    config = sandbox.config
    policy = Policy.fresh(
        Language.of([sandbox.space]),
        seed,
        decisions_per_step=config.ppo.decisions_per_step,
        undo_bias=config.ppo.undo_bias,
    )
    client = SimicClient(PPO(policy, config.ppo, seed, config.reward.group_size), get_reward(config.reward))
    curve, rows, met = {}, [], 0.0
    for number in range(1, rounds + 1):
        group = np.arange(config.envs) // config.reward.group_size  # the environments of a group share a problem
        earned = play(sandbox, client, group + (number - 1) * (group[-1] + 1))
        met = float((earned > 0).mean()) if number == 1 else met
        rows.append(dict(client.update()))
        if number in marks or number == rounds:
            curve[number] = score(name, policy, seed)
    return Climbed(curve[rounds], curve, met, rows, time.process_time() - begin)
