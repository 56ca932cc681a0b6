"""Offer an engine as Gymnasium environments: `EsperEnv`, and `EsperVectorEnv`, which equals several of them step by step.

`GymPopulation` turns views into observations and outcomes into rewards for both, and for Stable-Baselines3. E environments.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import Env, spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch.utils._pytree import tree_map

from esper.leyline.config.tree import Config, build_config
from esper.leyline.data.keys import Purpose, key, uniform
from esper.leyline.data.task import AnyTask, Mixture, Task
from esper.leyline.lifecycle.masks import choices_of
from esper.leyline.lifecycle.view import Bools, Floats, Space, View
from esper.leyline.lifecycle.vocabulary import Actions, Head, Op
from esper.leyline.messages import InputError, kind_of
from esper.simic.rewards import get_reward, paid, total
from esper.tamiyo.policy.observation import CLIP, History, Normaliser, input_names, normalise, observe, slot_features
from esper.tolaria.engine import VectorizedEngine

Arrays = dict[str, Any]
"""An observation or a batch of observations: arrays by name."""
Info = dict[str, Any]
"""Nested dicts of arrays; of plain numbers for one environment."""
GymState = tuple[Arrays, Info]
"""Observation and info between two decisions: arrays (E, ...) by name, those of the info nested."""


class GymPopulation:
    """Wraps a `VectorizedEngine` of E environments with observations, rewards and seeds for other libraries.

    In a population with seed s, environment e has the seed s + e. An environment with seed s draws the instance of its n-th
    episode, hash(s, n), from the part that `config.instances` names; its index in the population does not matter.
    """

    def __init__(self, task: AnyTask, config: Config | Mapping[str, Any] | None, envs: int | None = None) -> None:
        """A mapping overrides the defaults of the task, and `envs` that of the config. InputError if they do not fit together."""
        if not isinstance(task, Task | Mixture):
            raise InputError(f"the task is {kind_of(task)}; make one with esper.get_task(name) or esper.task(...)")
        if not isinstance(config, Config):
            config = build_config(task.defaults, config or {})
        if config.first_instance:
            raise InputError(
                f"first_instance is {config.first_instance}, but here instances are drawn; leave it at 0 and choose with "
                "reset(seed=...) or reset(options={'instance': ...})"
            )
        if config.reward.relative_to == "group":
            raise InputError(
                "reward.relative_to is group, which Esper's own learner subtracts from the advantage and no environment can; "
                "choose none or twin"
            )
        twins = ("twin",) if config.reward.relative_to == "twin" else ()  # only the reward reads the twins
        own = {"task": task.name, "envs": envs or config.envs, "baselines": twins}
        self.config = config = config.model_copy(update=own)
        self.engine = VectorizedEngine(task, config)
        self.view: View | None = None
        self._keys = task.keys(config.instances)
        self._seeds = _consecutive(config.seed, config.envs)
        self._reward = get_reward(config.reward)
        self._history = History.empty(config.envs)
        self._normaliser = Normaliser.prior(self.engine.space.sensors)
        self._features = slot_features(self.engine.space.sensors)

    def begin(self, seed: int | None, options: Mapping[str, Any] | None) -> GymState:
        """Begin an episode of every environment. A seed restarts the sequence; `options` may hold `instance`, one key or (E,)."""
        state = self.engine.state
        if seed is not None:
            self._seeds = _consecutive(seed, self.config.envs)
            state.episode = -1
        self._history = History.empty(self.config.envs)
        if unknown := (options or {}).keys() - {"instance"}:
            raise InputError(
                f"unknown option {min(unknown)!r} of reset; the one option is 'instance', a key or one for each"
            )
        if not options:
            draws = uniform(key(self._seeds, Purpose.SAMPLE, state.episode + 1))
            drawn = self._keys.start + np.floor(draws * len(self._keys)).astype(np.int64)
            return self._see(self.engine.reset(drawn), {})
        asked = np.asarray(options["instance"])
        if asked.dtype.kind not in "iu" or asked.shape not in ((), (self.config.envs,)):
            raise InputError(f"instance is {options['instance']!r}; give one key, or {self.config.envs}, one for each")
        named = np.broadcast_to(asked, self.config.envs).astype(np.int64)
        if stray := [name for name in named.tolist() if name not in self._keys]:
            raise InputError(
                f"instance {stray[0]} is none of the {self.config.instances} instances, {self._keys.start} to "
                f"{self._keys.stop - 1}; choose among them, or another part with the config key instances"
            )
        return self._see(self.engine.reset(named), {})

    def advance(self, heads: NDArray[np.int64]) -> tuple[GymState, Floats, Bools]:
        """Take a step with decisions (E, 6). Returns the next observation, rewards (E,), and which sequences ended, (E,) bool.

        All sequences end with the episode. The sequence of an environment also ends if it is rolled back; the returned
        observation is then the first of a new sequence in the same episode.
        """
        if self.over:
            raise ResetNeeded("no episode is going on; reset() begins one")
        if np.shape(heads) != (self.config.envs, len(Head)):
            raise InputError(
                f"the action has shape {np.shape(heads)}; give {self.config.envs} of {len(Head)} heads each"
            )
        view, outcome = self.engine.step(Actions(*np.asarray(heads, np.int64).T))
        self._history = self._history.decided(outcome.actions, outcome.accepted)
        if outcome.rolled_back.any():
            self._history = self._history.reset(outcome.rolled_back)
        parts = paid(self._reward, outcome, self.config.governor.penalty)
        info = {"accepted": outcome.accepted, "reward": parts, "rolled_back": outcome.rolled_back}
        return self._see(view, info), total(parts), outcome.ended

    @property
    def over(self) -> bool:
        """Whether the episode has ended, or none has begun."""
        return self.view is None or self.view.step == self.config.steps

    def _see(self, view: View, info: Info) -> GymState:
        self.view, self._history = view, self._history.measured(view.measurements)
        inputs = normalise(observe(view, self._history), self._normaliser, self._features)
        observation: Arrays = {
            "env": inputs.env,
            "slot": inputs.slot,
            "blueprint": inputs.blueprint + 1,
            "cost": np.minimum(inputs.cost, np.float32(CLIP)),
        }
        now = {"action_mask": view.masks._asdict(), "instance": view.space.instance}
        return observation, tree_map(np.array, now | info)  # copies, which their reader may change


def action_space(space: Space) -> spaces.MultiDiscrete:
    """Return the space of decisions: a choice per head, in the order of `Head`. Heads that an operation lacks are ignored."""
    return spaces.MultiDiscrete(np.array([len(Op), *map(len, choices_of(space).values())]))


def observation_space(space: Space) -> spaces.Space[Arrays]:
    """Return the space of observations: S slots, K blueprints, and the columns of `_Named.columns`; all values are finite."""
    slots, menu, (env, slot) = len(space.slots), len(space.blueprints), input_names(space.sensors)
    return spaces.Dict(
        {
            "env": spaces.Box(-CLIP, CLIP, (len(env),), np.float32),
            "slot": spaces.Box(-CLIP, CLIP, (slots, len(slot)), np.float32),
            "blueprint": spaces.MultiDiscrete(np.full(slots, menu + 1)),  # 0 is an empty slot, 1 the menu's first
            "cost": spaces.Box(0, CLIP, (slots, menu), np.float32),
        }
    )


def row(record: Info, env: int) -> Info:
    """Return the entries of one environment in a nested dict of arrays (E, ...); scalars become plain numbers."""
    return tree_map(lambda values: values[env].copy() if np.ndim(values[env]) else values[env].item(), record)


def _consecutive(seed: int, envs: int) -> NDArray[np.int64]:
    """Return (E,) seed + e, modulo 2**63."""
    return np.array([(seed + env) % 2**63 for env in range(envs)], np.int64)


Heads = NDArray[np.int64]
"""Choices in the order of `Head`: (6,), or (E, 6) of a population."""


class _Named:
    """Names the actions and the observations of a population."""

    population: GymPopulation

    @property
    def space(self) -> Space:
        """The names behind the indices of an action."""
        return self.population.engine.space

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Names along the last axis of the arrays of an observation, and of the indices in `blueprint`."""
        env, slot = input_names(self.space.sensors)
        menu = tuple(info.name for info in self.space.blueprints)
        return {"env": env, "slot": slot, "blueprint": ("", *menu), "cost": menu}


class EsperEnv(_Named, Env[Arrays, Heads]):
    """Offers one growing host as a Gymnasium environment: an action is a decision, and `config.reward` defines the reward.

        env = EsperEnv(esper.get_task("repair"), {"steps": 24})
        observation, info = env.reset(seed=1)

    An action that the masks forbid acts as WAIT, and `info["accepted"]` is False. The episode terminates after `config.steps`
    steps. It is never truncated, because the time left is part of the observation.

    If the governor restores the host to a snapshot, the step terminates. Its reward is J of the restored host minus J before the
    step, minus `governor.penalty`. The next `reset()` without seed and options then continues the same episode as a new sequence
    of steps.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]  # gymnasium has no ClassVar

    def __init__(self, task: AnyTask, config: Config | Mapping[str, Any] | None = None) -> None:
        """`envs` of the config is ignored. Raises InputError if the task and the config do not fit together."""
        self.population = GymPopulation(task, config, envs=1)
        self._rest: tuple[Arrays, Info] | None = None  # first observation after a rollback
        self.observation_space = observation_space(self.space)
        self.action_space = action_space(self.space)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Arrays, Info]:
        """Begin the next episode, the first episode of a seed, or an episode on the instance in `options`."""
        super().reset(seed=seed)
        rest, self._rest = self._rest, None
        if rest is not None and seed is None and not options:
            return rest
        observation, info = self.population.begin(seed, options)
        return row(observation, 0), row(info, 0)

    def step(self, action: Heads) -> tuple[Arrays, float, bool, bool, Info]:
        """Take a step; return observation, reward, terminated, truncated (always False) and info."""
        if self._rest is not None:
            raise ResetNeeded("the host was rolled back, which ended the sequence; reset() continues the episode")
        (observation, info), reward, ended = self.population.advance(np.asarray(action)[None])
        if ended[0] and not self.population.over:
            self._rest = row(observation, 0), row(info, 0)
        return row(observation, 0), float(reward[0]), bool(ended[0]), False, row(info, 0)


class EsperVectorEnv(_Named, VectorEnv[Arrays, Heads, NDArray[Any]]):
    """Trains `config.envs` growing hosts as one population, and offers them as a Gymnasium vector environment.

    With seed s, environment e equals an `EsperEnv` with seed s + e, bit for bit if its results do not depend on its neighbours
    (`esper docs lifecycle`). All episodes end at the same step and are reset within it (`AutoresetMode.SAME_STEP`). An
    environment that the governor restores to a snapshot terminates alone, and then continues its episode.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": [],
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }

    def __init__(self, task: AnyTask, config: Config | Mapping[str, Any] | None = None) -> None:
        """Raises InputError if the task and the config do not fit together."""
        self.population = GymPopulation(task, config)
        self.num_envs = self.population.config.envs
        self.single_observation_space = observation_space(self.space)
        self.single_action_space = action_space(self.space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Arrays, Info]:
        """Begin the next episodes, the first episodes of a seed, or episodes on the instances in `options`."""
        super().reset(seed=seed)
        observation, info = self.population.begin(seed, options)
        return observation, _with_flags(info, np.ones(self.num_envs, bool))

    def step(self, actions: Heads) -> tuple[Arrays, Floats, Bools, Bools, Info]:
        """Take a step; return observation, reward, terminated, truncated and info, as arrays over environments.

        At the end of an episode, observation and info are those of the next episode; `info["final_obs"]` and
        `info["final_info"]` hold the last ones of the old episode.
        """
        (observation, now), reward, ended = self.population.advance(actions)
        info: Info = {}
        if ended.any():
            last = np.full(self.num_envs, None, object)
            last[ended] = [row(observation, env) for env in np.flatnonzero(ended).tolist()]
            info = _with_flags({"final_obs": last, "final_info": now}, ended)
        if self.population.over:
            observation, now = self.population.begin(None, None)
        everyone = np.ones(self.num_envs, bool)
        return observation, reward, ended, np.zeros_like(ended), info | _with_flags(now, everyone)


def _with_flags(info: Info, present: Bools) -> Info:
    """Return infos in the form of Gymnasium: beside each entry `name`, `_name` (E,) bool says which environments have it."""
    flagged: Info = {}
    for name, value in info.items():
        flagged[name] = _with_flags(value, present) if isinstance(value, dict) else value
        flagged[f"_{name}"] = present.copy()
    return flagged
