"""The Gymnasium environments: `EsperEnv`, and `EsperVectorEnv`, which equals several of them step by step."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import Env
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from esper.gym.population import Arrays, GymPopulation, Info, action_space, columns, observation_space, row
from esper.leyline.config import Config
from esper.leyline.task import AnyTask
from esper.leyline.view import Bools, Floats, Space

Heads = NDArray[np.int64]
"""Choices in the order of `Head`: (6,), or (E, 6) of a population."""


class _Named:
    """The names of a population."""

    population: GymPopulation

    @property
    def space(self) -> Space:
        """The names behind the indices of an action."""
        return self.population.engine.space

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Names of the numbers in an observation."""
        return columns(self.space)


class EsperEnv(_Named, Env[Arrays, Heads]):
    """One growing host as a Gymnasium environment: an action is a decision, and `config.reward` defines the reward.

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
        now = self.population.begin(seed, options)
        return row(now.observation, 0), row(now.info, 0)

    def step(self, action: Heads) -> tuple[Arrays, float, bool, bool, Info]:
        """Observation, reward, terminated, truncated (always False) and info."""
        if self._rest is not None:
            raise ResetNeeded("the host was rolled back, which ended the sequence; reset() continues the episode")
        now, reward, ended = self.population.advance(np.asarray(action)[None])
        observation, info = row(now.observation, 0), row(now.info, 0)
        if ended[0] and not self.population.over:
            self._rest = row(now.observation, 0), row(now.info, 0)
        return observation, float(reward[0]), bool(ended[0]), False, info


class EsperVectorEnv(_Named, VectorEnv[Arrays, Heads, NDArray[Any]]):
    """`config.envs` growing hosts that train as one population, as a Gymnasium vector environment.

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
        now = self.population.begin(seed, options)
        return now.observation, _with_flags(now.info, np.ones(self.num_envs, bool))

    def step(self, actions: Heads) -> tuple[Arrays, Floats, Bools, Bools, Info]:
        """Observation, reward, terminated, truncated and info, as arrays over environments.

        At the end of an episode, observation and info are those of the next episode; `info["final_obs"]` and
        `info["final_info"]` hold the last ones of the old episode.
        """
        now, reward, ended = self.population.advance(actions)
        info: Info = {}
        if ended.any():
            last = np.full(self.num_envs, None, object)
            last[ended] = [row(now.observation, env) for env in np.flatnonzero(ended).tolist()]
            info = _with_flags({"final_obs": last, "final_info": now.info}, ended)
        if self.population.over:
            now = self.population.begin(None, None)
        everyone = np.ones(self.num_envs, bool)
        return now.observation, reward, ended, np.zeros_like(ended), info | _with_flags(now.info, everyone)


def _with_flags(info: Info, present: Bools) -> Info:
    """Infos in the form of Gymnasium: for each entry `name` there is `_name`, (E,) bool, which environments have the entry."""
    flagged: Info = {}
    for name, value in info.items():
        flagged[name] = _with_flags(value, present) if isinstance(value, dict) else value
        flagged[f"_{name}"] = present.copy()
    return flagged
