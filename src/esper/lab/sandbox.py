"""Worlds whose best decisions are known: growth by formula, a bandit and a chain. E environments, S slots, K blueprints.

    sandbox = Sandbox(GROWTH, {"envs": 48, "seed": 1})
    view = sandbox.reset()
    view, outcome = sandbox.step(actions)

A learner that is at home here needs no network to be trained, and `lab.optimum.solve` says what it should have reached.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from esper.lab.formula import Draw, FormulaPopulation, Process, trained_steps
from esper.leyline.actions import Actions, Ints, Op
from esper.leyline.config import build_config
from esper.leyline.keys import key, uniform
from esper.leyline.protocols import PolicyClient
from esper.leyline.stages import Stage
from esper.leyline.view import BlueprintInfo, Floats, Outcome, Seeds, View
from esper.simic.returns import returns
from esper.simic.rewards import delta
from esper.tolaria.engine import Engine
from esper.tolaria.measuring import unmeasured
from esper.tolaria.population import row_environments


class Sandbox(Engine[FormulaPopulation]):
    """A process played by E environments at once."""

    def __init__(self, process: Process, *layers: Mapping[str, Any]) -> None:
        """`layers` of config come over those of the process. Raises InputError where a key or a value is none."""
        usual = {"baselines": [], "governor": {"enabled": False}, "probe": {"sensors_every": 1}}
        config = build_config(usual, process.settings, *layers)
        instance = config.first_instance + np.arange(config.envs)
        self.process = process
        super().__init__(FormulaPopulation(process, config, instance[row_environments(config)]), config)


def play(sandbox: Sandbox, client: PolicyClient) -> Floats:
    """(E,) returns of one episode under the reward `delta`. The client is told outcomes and not asked to learn."""
    return returns(sandbox, client, {"delta": partial(delta, config=sandbox.config.reward)})["delta"]


def blindfolded(view: View) -> View:
    """The view without anything that was measured: what is left does not tell one kind of network from another."""
    envs, slots = view.seeds.stage.shape
    return view._replace(
        space=view.space._replace(instance=np.zeros(envs, np.int64)),
        measurements=unmeasured(envs, slots, len(view.space.sensors)),
        coalitions=None,
    )


class Blindfolded:
    """A client that is shown blindfolded views, and is otherwise asked and told as it would be."""

    def __init__(self, client: PolicyClient) -> None:
        self.client = client

    def act(self, view: View) -> Actions:
        """What the client decides without measurements."""
        return self.client.act(blindfolded(view))

    def store(self, outcome: Outcome) -> None:
        """The outcome as it is: a learner must be paid. What a client decides may depend on its actions and refusals alone."""
        self.client.store(outcome)

    def update(self) -> Mapping[str, float]:
        """What the client learns."""
        return self.client.update()


LEARNER: Mapping[str, Any] = {"lr": 3e-3, "entropy_weight": 0.05}
"""Faster and less soon settled than the defaults, under which some seeds of `growth` plant the dearer blueprint everywhere."""


# The growth process.

CHANCE, TOP = 0.1, 0.95
"""The metric of a network that has learnt nothing, and of one that lets everything through and has learnt all."""
HOST_STEPS, SEED_STEPS = 4.0, 2.0
"""Time constants of the learning curves of a host and of a seed [steps]."""

KINDS: tuple[str, ...] = ("adequate", "first", "last", "both", "nonlinear", "brittle")
"""What is wrong with a network: nothing; a bottleneck at the first slot, the last, or both, that a linear bypass repairs; one
in the middle that only an MLP repairs; one in the middle that nothing repairs and every seed worsens."""
NEED = np.array([(0, 0, 0), (0.4, 0, 0), (0, 0, 0.4), (0.4, 0, 0.4), (0, 0.4, 0), (0, 0.4, 0)])
"""(kinds, S) share of the signal that each slot loses."""
LIFT = np.full((len(KINDS), 3, 2), -0.08)
"""(kinds, S, K) share that a trained seed gives back; one that is not needed disturbs."""
LIFT[1, 0] = LIFT[2, 2] = LIFT[3, 0] = LIFT[3, 2] = (0.34, 0.36)
LIFT[4, 1] = (0.02, 0.38)


def _grown(draw: Draw, step: int, seeds: Seeds, dose: Floats) -> Floats:
    """metric = c + (TOP - CHANCE) * learnt(step) * product over slots of (1 - need + lift * dose * learnt(trained)).

    learnt(t) = 1 - exp(-t / time constant), where a host is one step old when the episode begins; c is CHANCE, up or down by
    .02 from episode to episode. Slots come one after the other, so two bottlenecks must both be repaired.
    """
    host = 1 - np.exp(-(step + 1) / HOST_STEPS)
    ripe = 1 - np.exp(-trained_steps(seeds) / SEED_STEPS)
    slots = np.arange(dose.shape[1])
    lift = LIFT[draw.kind[:, None], slots, np.maximum(seeds.blueprint, 0)]
    passed = 1 - NEED[draw.kind] + lift * dose * ripe
    metric: Floats = CHANCE + 0.04 * (uniform(draw.key) - 0.5) + (TOP - CHANCE) * host * passed.prod(1)
    return metric


def _grown_sensors(draw: Draw) -> tuple[Floats, Floats]:
    """The stream is thin where signal is lost; a tap explains much where its blueprint would repair it."""
    index = np.arange(NEED.shape[1])
    jitter = 0.9 + 0.2 * uniform(key(draw.key[:, None, None], index[:, None], np.arange(3)))
    thin, helps = NEED[draw.kind] > 0, LIFT[draw.kind] > 0.1
    participation = np.where(thin, 0.12, 0.6) * jitter[..., 0]
    return participation, np.where(helps, 0.5, 0.02) * jitter[..., 1:]


GROWTH = Process(
    name="growth",
    kinds=len(KINDS),
    slots=("s0", "s1", "s2"),
    menu=(BlueprintInfo("bypass-linear", "before"), BlueprintInfo("bypass-mlp", "before")),
    cost=(300, 1000),
    sensors=("explained_before_linear", "explained_before_relu"),
    settings={
        "steps": 10,
        "envs": 96,
        "ppo": {**LEARNER, "rounds": 60},
        "lifecycle": {"max_seeds": 2, "max_training_seeds": 2, "embargo": 1, "tempos": [0, 1, 2], "targets": [1.0]},
        "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1},
    },
    metric=_grown,
    sense=_grown_sensors,
)
"""Six kinds of network with different best decisions, which only measurements tell apart."""


# The bandit and the chain: a planted seed is all there is to it, it can be neither advanced nor removed.

_PLANT_ONLY: Mapping[str, Any] = {
    "envs": 384,
    "ppo": {**LEARNER, "rounds": 30},
    "reward": {"rent": 0.0},
    "lifecycle": {"tempos": [0, 1], "targets": [1.0], "min_prune_age": 10**6},
    "gates": {"min_training_steps": 10**6},
}


def _planting(
    name: str,
    slots: int,
    steps: int,
    metric: Callable[[Draw, int, Seeds, Floats], Floats],
    *,
    sensors: tuple[str, ...] = (),
    **lifecycle: int,
) -> Process:
    """One blueprint and nothing to do but to plant it. `sensors`: none, or one a slot, which is 1 there and 0 elsewhere."""
    return Process(
        name=name,
        kinds=1,
        slots=tuple(f"s{slot}" for slot in range(slots)),
        menu=(BlueprintInfo("bypass-linear", "before"),),
        cost=(100,),
        sensors=sensors,
        settings={**_PLANT_ONLY, "steps": steps, "lifecycle": {**_PLANT_ONLY["lifecycle"], **lifecycle}},
        metric=metric,
        sense=partial(_named, np.eye(slots)[:, : len(sensors)]),
    )


def _named(names: Floats, draw: Draw) -> tuple[Floats, Floats]:
    """Nothing measured tells more than which slot it is, and that where names (S, F) do."""
    envs = len(draw.kind)
    return np.full((envs, len(names)), 0.5), np.broadcast_to(names, (envs, *names.shape)).copy()


ARMS = 7
"""Of a bandit: WAIT, and GERMINATE in each of six slots."""


def bandit(best: int) -> Process:
    """One step, seven arms, each pays 1 or 0: arm `best` with probability .8, the others with .1 to .6, in order.

    Arm 0 is WAIT, arm 1 + s plants slot s. The payoff is the metric of the exported network. A sensor names each slot: by
    their depth alone neighbours look alike, and payoffs that rise with depth but for one arm are a trap for any smooth policy.
    """
    assert 0 <= best < ARMS, best
    payoff = np.insert(np.arange(1, ARMS) / 10, best, 0.8)
    return _planting(
        "bandit", ARMS - 1, 1, partial(_paid, payoff), sensors=tuple(f"is_s{slot}" for slot in range(ARMS - 1))
    )


def arms(actions: Actions) -> Ints:
    """(E,) arm that each decision at a bandit pulls."""
    pulled: Ints = np.where(actions.op == Op.GERMINATE, 1 + actions.slot, 0)
    return pulled


def _paid(payoff: Floats, draw: Draw, step: int, seeds: Seeds, dose: Floats) -> Floats:
    planted = seeds.stage != Stage.DORMANT
    arm = np.where(planted.any(1), 1 + planted.argmax(1), 0)
    return np.where(step > 0, (uniform(draw.key) < payoff[arm]).astype(np.float64), 0.0)


CHAIN_STEPS = 8
PLANTINGS = (0, 2, 5)
"""The step at which each slot of the chain must be planted; WAIT is right at the steps between."""


def _completed(draw: Draw, step: int, seeds: Seeds, dose: Floats) -> Floats:
    """1 at the end of the episode if every slot was planted at its step, else 0."""
    right = (seeds.life == CHAIN_STEPS - np.array(PLANTINGS)).all(1)
    return np.where(step == CHAIN_STEPS, right.astype(np.float64), 0.0)


CHAIN = _planting("chain", len(PLANTINGS), CHAIN_STEPS, _completed, max_seeds=3, max_training_seeds=3)
"""Six decisions must all be right and nothing is paid before the last step. Uniform choice among what is valid, op by op and
slot by slot, succeeds once in 2^6 * 3! = 384 episodes."""
