"""`EsperEnv`, one environment, and `EsperVectorEnv`, a population that equals as many of them step by step."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import Env
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from esper.gym.population import Arrays, Info, Population, action_space, columns, observation_space, row
from esper.leyline.config import Config
from esper.leyline.task import AnyTask
from esper.leyline.view import Bools, Floats, Space

Heads = NDArray[np.int64]
"""Choices in the order of `Head`: (6,), or (E, 6) of a population."""


class EsperEnv(Env[Arrays, Heads]):
    """One host that is grown: an action is a decision, a reward what the config's reward pays for it.

        env = EsperEnv(esper.get_task("repair"), {"steps": 24})
        observation, info = env.reset(seed=1)

    An action that the masks refuse changes nothing: it is a WAIT whose `info["accepted"]` is False. The episode terminates
    after `config.steps` steps and is never truncated, as the end is part of the problem and time left is observed.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]  # gymnasium has no ClassVar

    def __init__(self, task: AnyTask, config: Config | Mapping[str, Any] | None = None) -> None:
        """InputError where the task and the config do not fit together; `envs` of the config is not read."""
        self.population = Population(task, config, envs=1)
        self.observation_space = observation_space(self.space)
        self.action_space = action_space(self.space)

    @property
    def space(self) -> Space:
        """The names behind the indices of an action."""
        return self.population.engine.space

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Names of the numbers of an observation."""
        return columns(self.space)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Arrays, Info]:
        """Begin an episode: the next one, the first of a seed, or on the instance that options name."""
        super().reset(seed=seed)
        now = self.population.begin(seed, options)
        return row(now.observation, 0), row(now.info, 0)

    def step(self, action: Heads) -> tuple[Arrays, float, bool, bool, Info]:
        """Observation, reward, terminated, truncated (never) and info, as Gymnasium has them."""
        now, reward, terminal = self.population.advance(np.asarray(action)[None])
        return row(now.observation, 0), float(reward[0]), terminal, False, row(now.info, 0)


class EsperVectorEnv(VectorEnv[Arrays, Heads, NDArray[Any]]):
    """`config.envs` environments that train as one object.

    Row e, seeded with s, equals an `EsperEnv` that is seeded with s + e: bit for bit where a row's trajectory does not depend
    on its neighbours (docs/lifecycle.md). All episodes end at one step, so they begin anew within it: nothing is lost by
    `AutoresetMode.SAME_STEP`, and no step is spent on a reset.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": [],
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }

    def __init__(self, task: AnyTask, config: Config | Mapping[str, Any] | None = None) -> None:
        """InputError where the task and the config do not fit together."""
        self.population = Population(task, config)
        self.num_envs = self.population.config.envs
        self.single_observation_space = observation_space(self.space)
        self.single_action_space = action_space(self.space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    @property
    def space(self) -> Space:
        """The names behind the indices of an action."""
        return self.population.engine.space

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Names of the numbers of an observation."""
        return columns(self.space)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Arrays, Info]:
        """Begin an episode of every environment: the next, the first of a seed, or on the instances that options name."""
        super().reset(seed=seed)
        now = self.population.begin(seed, options)
        return now.observation, _flagged(now.info, self.num_envs)

    def step(self, actions: Heads) -> tuple[Arrays, Floats, Bools, Bools, Info]:
        """Arrays over environments. At the end observation and info are those of the next episode's first state.

        What was seen last is then in `info["final_obs"]` and `info["final_info"]`.
        """
        now, reward, terminal = self.population.advance(actions)
        info: Info = {}
        if terminal:
            last = np.full(self.num_envs, None, object)
            last[:] = [row(now.observation, env) for env in range(self.num_envs)]
            info = {"final_obs": last, "final_info": now.info}
            now = self.population.begin(None, None)
        ended = np.full(self.num_envs, terminal)
        return now.observation, reward, ended, np.zeros_like(ended), _flagged(info | now.info, self.num_envs)


def _flagged(info: Info, envs: int) -> Info:
    """Gymnasium's form of many infos: beside every entry `_name` says which environments have it, here all of them."""
    flagged: Info = {}
    for name, value in info.items():
        flagged[name] = _flagged(value, envs) if isinstance(value, dict) else value
        flagged[f"_{name}"] = np.ones(envs, bool)
    return flagged
