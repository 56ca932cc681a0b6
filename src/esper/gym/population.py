"""An engine behind the interfaces of other libraries: observations as arrays, rewards, seeds. E environments."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from esper.leyline.actions import Actions, Blend, Head, Op
from esper.leyline.config import Config, build_config
from esper.leyline.errors import InputError
from esper.leyline.keys import Purpose, key, uniform
from esper.leyline.task import AnyTask, Mixture, Task
from esper.leyline.view import Bools, Floats, Space, View
from esper.simic.rewards import get_reward, paid, total
from esper.tamiyo.features import slot_features
from esper.tamiyo.observation import CLIP, History, Normaliser, input_names, normalise, observe
from esper.tolaria.engine import VectorizedEngine

Arrays = dict[str, Any]
"""An observation or a batch of observations: arrays by name."""
Info = dict[str, Any]
"""Nested dicts of arrays; of plain numbers for one environment."""


class Observed(NamedTuple):
    """Observation and info between two decisions.

    Attributes:
        observation: arrays (E, ...) by name
        info: arrays (E, ...) by name, nested
    """

    observation: Arrays
    info: Info


class GymPopulation:
    """A `VectorizedEngine` of E environments with observations, rewards and seeds for other libraries.

    In a population with seed s, environment e has the seed s + e. An environment with seed s draws the instance of its n-th
    episode, hash(s, n), from the part that `config.instances` names; its index in the population does not matter.
    """

    def __init__(self, task: AnyTask, config: Config | Mapping[str, Any] | None, envs: int | None = None) -> None:
        """A mapping overrides the defaults of the task; `envs` that of the config. Twins are trained if the reward needs them.

        Raises InputError if the task and the config do not fit together.
        """
        if not isinstance(task, Task | Mixture):
            raise InputError(
                f"the task is a {type(task).__name__}; make one with esper.get_task(name) or esper.task(...)"
            )
        if not isinstance(config, Config):
            config = build_config(task.defaults, config or {})
        _check(config)
        self.config = config = config.model_copy(
            update={
                "task": task.name,
                "envs": envs or config.envs,
                "baselines": ("twin",)
                if config.reward.relative_to == "twin"
                else (),  # only the reward reads the twins
            }
        )
        self.engine = VectorizedEngine(task, config)
        self.view: View | None = None
        self._keys = task.keys(config.instances)
        self._seeds = _consecutive(config.seed, config.envs)
        self._reward = get_reward(config.reward)
        self._history = History.empty(config.envs)
        self._normaliser = Normaliser.prior(self.engine.space.sensors)
        self._features = slot_features(self.engine.space.sensors)

    def begin(self, seed: int | None, options: Mapping[str, Any] | None) -> Observed:
        """Begin an episode of every environment. A seed restarts the sequence of episodes; the first seed is config.seed.

        `options` may hold `instance`, the key of the instance of this episode: one for all environments, or (E,).
        """
        state = self.engine.state
        if seed is not None:
            self._seeds = _consecutive(seed, self.config.envs)
            state.episode = -1
        self._history = History.empty(self.config.envs)
        return self._see(self.engine.reset(self._instances(options or {})), {})

    def advance(self, heads: NDArray[np.int64]) -> tuple[Observed, Floats, Bools]:
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

    def _see(self, view: View, info: Info) -> Observed:
        self.view, self._history = view, self._history.measured(view.measurements)
        inputs = normalise(observe(view, self._history), self._normaliser, self._features)
        observation: Arrays = {
            "env": inputs.env,
            "slot": inputs.slot,
            "blueprint": inputs.blueprint + 1,
            "cost": np.minimum(inputs.cost, np.float32(CLIP)),
        }
        now = {"action_mask": view.masks._asdict(), "instance": view.space.instance}
        return Observed(observation, copied(now | info))

    def _instances(self, options: Mapping[str, Any]) -> NDArray[np.int64]:
        """(E,) keys of the instances of the next episode, from `options` or drawn."""
        if unknown := options.keys() - {"instance"}:
            raise InputError(
                f"unknown option {min(unknown)!r} of reset; the one option is 'instance', a key or one for each"
            )
        if "instance" not in options:
            draws = uniform(key(self._seeds, Purpose.SAMPLE, self.engine.state.episode + 1))
            return self._keys.start + np.floor(draws * len(self._keys)).astype(np.int64)
        asked = np.asarray(options["instance"])
        if asked.dtype.kind not in "iu" or asked.shape not in ((), (self.config.envs,)):
            raise InputError(f"instance is {options['instance']!r}; give one key, or {self.config.envs}, one for each")
        named = np.broadcast_to(asked, self.config.envs).astype(np.int64)
        if stray := [name for name in named.tolist() if name not in self._keys]:
            raise InputError(
                f"instance {stray[0]} is none of the {self.config.instances} instances, {self._keys.start} to "
                f"{self._keys.stop - 1}; choose among them, or another part with the config key instances"
            )
        return named


def action_space(space: Space) -> spaces.MultiDiscrete:
    """One choice per head, in the order of `Head`; heads that the operation does not read are ignored."""
    sizes = (len(Op), len(space.slots), len(space.blueprints), len(Blend), len(space.tempos), len(space.targets))
    assert len(sizes) == len(Head)
    return spaces.MultiDiscrete(np.array(sizes))


def observation_space(space: Space) -> spaces.Space[Arrays]:
    """The space of observations: S slots, K blueprints, and the columns that `columns` names; all values are finite."""
    slots, menu, (env, slot) = len(space.slots), len(space.blueprints), input_names(space.sensors)
    return spaces.Dict(
        {
            "env": spaces.Box(-CLIP, CLIP, (len(env),), np.float32),
            "slot": spaces.Box(-CLIP, CLIP, (slots, len(slot)), np.float32),
            "blueprint": spaces.MultiDiscrete(np.full(slots, menu + 1)),  # 0 is an empty slot, 1 the menu's first
            "cost": spaces.Box(0, CLIP, (slots, menu), np.float32),
        }
    )


def columns(space: Space) -> dict[str, tuple[str, ...]]:
    """Names along the last axis of the arrays of an observation, and names of the indices in `blueprint`."""
    env, slot = input_names(space.sensors)
    menu = tuple(info.name for info in space.blueprints)
    return {"env": env, "slot": slot, "blueprint": ("", *menu), "cost": menu}


def copied(record: Info) -> Info:
    """A deep copy of a nested dict of arrays, which its reader may change."""
    return {name: copied(value) if isinstance(value, dict) else np.array(value) for name, value in record.items()}


def row(record: Info, env: int) -> Info:
    """The entries of one environment in a nested dict of arrays (E, ...); scalars become plain numbers."""
    return {name: row(value, env) if isinstance(value, dict) else _entry(value[env]) for name, value in record.items()}


def _entry(value: Any) -> Any:
    return value.copy() if np.ndim(value) else value.item()


def _consecutive(seed: int, envs: int) -> NDArray[np.int64]:
    """(E,) seed + e, modulo 2**63."""
    return np.array([(seed + env) % 2**63 for env in range(envs)], np.int64)


def _check(config: Config) -> None:
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
