"""`EsperEnv`, one environment, and `EsperVectorEnv`, a population that equals as many of them step by step."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import Env
from gymnasium.error import ResetNeeded
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

    Where the governor rolls the host back, the step pays minus `governor.penalty` and terminates too. The next `reset()`
    without a seed and options then returns to the same episode, the rest of which is a sequence of its own.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]  # gymnasium has no ClassVar

    def __init__(self, task: AnyTask, config: Config | Mapping[str, Any] | None = None) -> None:
        """InputError where the task and the config do not fit together; `envs` of the config is not read."""
        self.population = Population(task, config, envs=1)
        self._rest: tuple[Arrays, Info] | None = None  # where the rest of a rolled back episode begins
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
        rest, self._rest = self._rest, None
        if rest is not None and seed is None and not options:
            return rest
        now = self.population.begin(seed, options)
        return row(now.observation, 0), row(now.info, 0)

    def step(self, action: Heads) -> tuple[Arrays, float, bool, bool, Info]:
        """Observation, reward, terminated, truncated (never) and info, as Gymnasium has them."""
        if self._rest is not None:
            raise ResetNeeded("the host was rolled back, which ended the sequence; reset() goes on with the episode")
        now, reward, ended = self.population.advance(np.asarray(action)[None])
        observation, info = row(now.observation, 0), row(now.info, 0)
        if ended[0] and not self.population.over:
            self._rest = row(now.observation, 0), row(now.info, 0)
        return observation, float(reward[0]), bool(ended[0]), False, info


class EsperVectorEnv(VectorEnv[Arrays, Heads, NDArray[Any]]):
    """`config.envs` environments that train as one object.

    Row e, seeded with s, equals an `EsperEnv` that is seeded with s + e: bit for bit where a row's trajectory does not depend
    on its neighbours (docs/lifecycle.md). All episodes end at one step, so they begin anew within it: nothing is lost by
    `AutoresetMode.SAME_STEP`, and no step is spent on a reset. A row that the governor rolls back terminates by itself, and
    goes on with the rest of its episode.
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
        return now.observation, _flagged(now.info, np.ones(self.num_envs, bool))

    def step(self, actions: Heads) -> tuple[Arrays, Floats, Bools, Bools, Info]:
        """Arrays over environments. At the end observation and info are those of the next episode's first state.

        What was seen last is then in `info["final_obs"]` and `info["final_info"]`.
        """
        now, reward, ended = self.population.advance(actions)
        info: Info = {}
        if ended.any():
            last = np.full(self.num_envs, None, object)
            last[ended] = [row(now.observation, env) for env in np.flatnonzero(ended).tolist()]
            info = _flagged({"final_obs": last, "final_info": now.info}, ended)
        if self.population.over:
            now = self.population.begin(None, None)
        everyone = np.ones(self.num_envs, bool)
        return now.observation, reward, ended, np.zeros_like(ended), info | _flagged(now.info, everyone)


def _flagged(info: Info, those: Bools) -> Info:
    """Gymnasium's form of many infos: beside every entry `_name` says which environments have it, (E,) bool."""
    flagged: Info = {}
    for name, value in info.items():
        flagged[name] = _flagged(value, those) if isinstance(value, dict) else value
        flagged[f"_{name}"] = those.copy()
    return flagged
