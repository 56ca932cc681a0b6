"""Define problems of known best decisions: growth by formula, a bandit and a chain. E environments, S slots, K blueprints.

    sandbox = Sandbox(GROWTH, {"envs": 48, "seed": 1})
    view = sandbox.reset()
    view, outcome = sandbox.step(actions)

A learner can be tested here without training networks; `lab.optimum.solve` computes the best return.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from esper.leyline.config.tree import build_config
from esper.leyline.data.keys import key, uniform
from esper.leyline.lifecycle.view import BlueprintInfo, Floats, Outcome, Seeds, View
from esper.leyline.lifecycle.vocabulary import Actions, Ints, Op, Stage
from esper.leyline.protocols import Controller, Reward
from esper.simic.rewards import delta, total
from esper.tolaria.engine import Engine, Observer, Step
from esper.tolaria.engine import play as play_episode
from esper.tolaria.measure.measuring import unmeasured
from esper.tolaria.population import row_environments
from esper_bench.lab.formula import EpisodeDraw, FormulaPopulation, Process, trained_steps


class Sandbox(Engine[FormulaPopulation]):
    """Plays E environments that follow a process."""

    def __init__(self, process: Process, *layers: Mapping[str, Any]) -> None:
        """`layers` of config override the settings of the process. Raises InputError on a bad key or value."""
        usual = {"baselines": [], "governor": {"enabled": False}, "probe": {"sensors_every": 1}}
        config = build_config(usual, process.settings, *layers)
        instance = config.first_instance + np.arange(config.envs)
        self.process = process
        super().__init__(FormulaPopulation(process, config, instance[row_environments(config, ghost=False)]), config)


class Returns(Observer):
    """Sums rewards over the steps of an episode. `earned` holds the sum (E,) of each reward by name."""

    def __init__(self, envs: int, rewards: Mapping[str, Reward]) -> None:
        self.rewards = rewards
        self.earned = {name: np.zeros(envs) for name in rewards}

    def stepped(self, step: Step) -> None:
        """Add the rewards of a step."""
        for name, reward in self.rewards.items():
            self.earned[name] += total(reward(step.outcome))


def returns(
    engine: Engine[Any], client: Controller, rewards: Mapping[str, Reward], instance: Ints | None = None
) -> dict[str, Floats]:
    """Play an episode and return its undiscounted return (E,) under every reward, by name.

    The client receives outcomes and is not updated. To compare clients, give each a fresh engine. instance: (E,) the problem of
    each environment from now on; None leaves them as they are.
    """
    engine.reset(instance)
    observer = Returns(engine.config.envs, rewards)
    play_episode(engine, client, observer)
    return observer.earned


def play(sandbox: Sandbox, client: Controller, instance: Ints | None = None) -> Floats:
    """Play one episode and return (E,) returns under the reward `delta`. The client gets outcomes; `update` is not called."""
    return returns(sandbox, client, {"delta": partial(delta, config=sandbox.config.reward)}, instance)["delta"]


def blindfolded(view: View) -> View:
    """Return the view without measurements, so that it does not reveal the problem of an environment."""
    envs, slots = view.seeds.stage.shape
    return view._replace(
        space=view.space._replace(instance=np.zeros(envs, np.int64)),
        measurements=unmeasured(envs, slots, len(view.space.sensors)),
        coalitions=None,
    )


class Blindfolded(Controller):
    """Passes views without measurements to a client, but the true outcomes."""

    def __init__(self, client: Controller) -> None:
        self.client = client

    def act(self, view: View) -> Actions:
        """Return the decisions of the client, which gets no measurements."""
        return self.client.act(blindfolded(view))

    def store(self, outcome: Outcome) -> None:
        """Pass the outcome on unchanged, because a learner needs its reward."""
        self.client.store(outcome)

    def update(self) -> Mapping[str, float]:
        """Let the client learn."""
        return self.client.update()


LEARNER: Mapping[str, Any] = {"lr": 3e-3, "entropy_weight": 0.05}
"""PPO settings: faster, and with more exploration, than the defaults, under which some seeds of `growth` get stuck."""


# The growth process.

CHANCE, TOP = 0.1, 0.95
"""The metric of a network that has learnt nothing, and of a fully trained network without bottlenecks."""
HOST_STEPS, SEED_STEPS = 4.0, 2.0
"""Time constants of the learning curves of a host and of a seed [steps]."""

KINDS: tuple[str, ...] = ("adequate", "first", "last", "both", "nonlinear", "brittle")
"""The defect of a network. adequate: none. first, last, both: a bottleneck at that slot that a linear bypass
repairs. nonlinear: one in the middle that only an MLP repairs. brittle: one in the middle that every seed makes worse."""
NEED = np.array([(0, 0, 0), (0.4, 0, 0), (0, 0, 0.4), (0.4, 0, 0.4), (0, 0.4, 0), (0, 0.4, 0)])
"""(kinds, S) share of the signal that each slot loses."""
LIFT = np.full((len(KINDS), 3, 2), -0.08)
"""(kinds, S, K) share of the signal that a trained seed restores; negative for a seed that is not needed."""
LIFT[1, 0] = LIFT[2, 2] = LIFT[3, 0] = LIFT[3, 2] = (0.34, 0.36)
LIFT[4, 1] = (0.02, 0.38)


def _growth_metric(draw: EpisodeDraw, step: int, seeds: Seeds, dose: Floats) -> Floats:
    """Compute the metric c + (TOP - CHANCE) * learnt(step) * product over slots of (1 - need + lift * dose * learnt(trained)).

    learnt(t) = 1 - exp(-t / time constant), where a host is one step old when the episode begins; c is CHANCE, varied by
    up to .02 from episode to episode. The slots lie one after the other, so two bottlenecks must both be repaired.
    """
    host = 1 - np.exp(-(step + 1) / HOST_STEPS)
    ripe = 1 - np.exp(-trained_steps(seeds) / SEED_STEPS)
    slots = np.arange(dose.shape[1])
    lift = LIFT[draw.kind[:, None], slots, np.maximum(seeds.blueprint, 0)]
    passed = 1 - NEED[draw.kind] + lift * dose * ripe
    metric: Floats = CHANCE + 0.04 * (uniform(draw.key) - 0.5) + (TOP - CHANCE) * host * passed.prod(1)
    return metric


def _growth_sensors(draw: EpisodeDraw) -> tuple[Floats, Floats]:
    """Compute the participation, low where signal is lost, and sensors, high where their blueprint would repair the loss."""
    index = np.arange(NEED.shape[1])
    jitter = 0.9 + 0.2 * uniform(key(draw.key[:, None, None], index[:, None], np.arange(3)))
    thin, helps = NEED[draw.kind] > 0, LIFT[draw.kind] > 0.1
    participation = np.where(thin, 0.12, 0.6) * jitter[..., 0]
    return participation, np.where(helps, 0.5, 0.02) * jitter[..., 1:]


GROWTH = Process(
    name="growth",
    kinds=len(KINDS),
    slots=("s0", "s1", "s2"),
    menu=(
        BlueprintInfo("bypass-linear", "before", ("explained_before_linear",)),
        BlueprintInfo("bypass-mlp", "before", ("explained_before_relu",)),
    ),
    cost=(300, 1000),
    sensors=("explained_before_linear", "explained_before_relu"),
    settings={
        "steps": 10,
        "envs": 96,
        "ppo": {**LEARNER, "rounds": 60},
        "lifecycle": {"max_seeds": 2, "max_training_seeds": 2, "embargo": 1, "tempos": [0, 1, 2], "targets": [1.0]},
        "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1},
    },
    metric=_growth_metric,
    sense=_growth_sensors,
)
"""Six kinds of network with different best decisions, which only measurements can distinguish."""


# The bandit and the chain: seeds can be planted, but neither advanced nor removed.

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
    metric: Callable[[EpisodeDraw, int, Seeds, Floats], Floats],
    *,
    sensors: tuple[str, ...] = (),
    **lifecycle: int,
) -> Process:
    """Make a process with one blueprint, in which only GERMINATE is possible. `sensors`: none, or the slot as one-hot."""
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


def _named(names: Floats, draw: EpisodeDraw) -> tuple[Floats, Floats]:
    """Return measurements that reveal only the index of the slot, and only if `names` (S, F) has columns."""
    envs = len(draw.kind)
    return np.full((envs, len(names)), 0.5), np.broadcast_to(names, (envs, *names.shape)).copy()


ARMS = 7
"""Number of arms of a bandit: WAIT, and GERMINATE in each of six slots."""


def bandit(best: int) -> Process:
    """Make a bandit of one step with seven arms that pay 1 or 0.

    Arm `best` pays 1 with probability 0.8, the others with 0.1 to 0.6, in order. Arm 0 is WAIT, arm 1 + s plants slot
    s. The payoff is the metric of the exported network. A sensor identifies each slot, because a smooth policy of depth
    alone could not find one best arm among payoffs that rise with depth.
    """
    assert 0 <= best < ARMS, best
    payoff = np.insert(np.arange(1, ARMS) / 10, best, 0.8)
    return _planting(
        "bandit", ARMS - 1, 1, partial(_paid, payoff), sensors=tuple(f"is_s{slot}" for slot in range(ARMS - 1))
    )


def arms(actions: Actions) -> Ints:
    """Return (E,) the index of the arm that each decision pulls."""
    pulled: Ints = np.where(actions.op == Op.GERMINATE, 1 + actions.slot, 0)
    return pulled


def _paid(payoff: Floats, draw: EpisodeDraw, step: int, seeds: Seeds, dose: Floats) -> Floats:
    planted = seeds.stage != Stage.DORMANT
    arm = np.where(planted.any(1), 1 + planted.argmax(1), 0)
    return np.where(step > 0, (uniform(draw.key) < payoff[arm]).astype(np.float64), 0.0)


CHAIN_STEPS = 8
PLANTINGS = (0, 2, 5)
"""The step at which each slot of the chain must be planted; at the other steps WAIT is right."""


def _completed(draw: EpisodeDraw, step: int, seeds: Seeds, dose: Floats) -> Floats:
    """Return 1 at the end of the episode if every slot was planted at its step, else 0."""
    right = (seeds.life == CHAIN_STEPS - np.array(PLANTINGS)).all(1)
    return np.where(step == CHAIN_STEPS, right.astype(np.float64), 0.0)


CHAIN = _planting("chain", len(PLANTINGS), CHAIN_STEPS, _completed, max_seeds=3, max_training_seeds=3)
"""Six decisions must all be right, and reward comes only at the last step. Uniform choice of valid operations and slots succeeds
once in 2^6 * 3! = 384 episodes."""
