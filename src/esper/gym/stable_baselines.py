"""Offer a population as a vector environment of Stable-Baselines3, whose interface differs from Gymnasium's. E environments."""

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from esper.gym.environments import Arrays, EsperVectorEnv, row
from esper.leyline.lifecycle.masks import allowed_of, every_decision
from esper.leyline.lifecycle.view import Bools
from esper.leyline.lifecycle.vocabulary import Head
from esper.leyline.messages import InputError

try:
    from stable_baselines3.common.vec_env import VecEnv
except ModuleNotFoundError:
    raise InputError(
        "esper.gym.sb3 needs Stable-Baselines3, which is not installed; run pip install stable-baselines3 sb3-contrib"
    ) from None

Indices = None | int | Iterable[int]


class FlatVecEnv(VecEnv):
    """Offers one discrete action: the index of a row of `decisions`. `action_masks` marks the decisions that are accepted now."""

    render_mode: str | None = None

    def __init__(self, env: EsperVectorEnv, heads: Collection[str] | None = None) -> None:
        self._population = env.population
        self.decisions = every_decision(env.space, _named(heads))  # (N, 6)
        self._chosen = np.zeros(env.num_envs, np.int64)
        super().__init__(env.num_envs, env.single_observation_space, spaces.Discrete(len(self.decisions)))

    def action_masks(self) -> Bools:
        """Return (E, N) bool: whether each decision is valid now."""
        view = self._population.view
        if view is None:
            raise InputError("there is no mask before the first reset()")
        return allowed_of(view.masks, self.decisions)

    def reset(self) -> Arrays:
        """Return the first observations of an episode, with the values that were given to `seed` and `set_options`."""
        options = {name: [mine[name] for mine in self._options] for name in self._options[0]}
        observation, info = self._population.begin(self._seeds[0], options)
        self._reset_seeds()
        self._reset_options()
        self.reset_infos = [{"instance": key} for key in info["instance"].tolist()]
        return observation

    def step_async(self, actions: NDArray[np.int64]) -> None:
        self._chosen = actions

    def step_wait(self) -> tuple[Arrays, NDArray[np.float32], Bools, list[dict[str, Any]]]:
        """Return observations, rewards, dones and infos, (E, ...). At an episode's end the observation is the next's first."""
        (observation, info), reward, ended = self._population.advance(self.decisions[self._chosen])
        shown = {name: info[name] for name in ("accepted", "reward", "rolled_back", "instance")}
        infos = [row(shown, env) | {"TimeLimit.truncated": False} for env in range(self.num_envs)]
        for env in np.flatnonzero(ended).tolist():
            infos[env]["terminal_observation"] = row(observation, env)
        if self._population.over:
            observation, _ = self._population.begin(None, None)
        return observation, reward.astype(np.float32), ended, infos

    def close(self) -> None:
        """Do nothing: there are no resources to free."""

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Return an attribute of this object, once for each environment. Raises AttributeError if it does not exist."""
        return [getattr(self, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Raise InputError: the environments are rows of one object and have no attributes of their own."""
        raise InputError(f"{attr_name} cannot be set: the environments of a population are rows of one object")

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Return the result of a method of this object, indexed by environment."""
        found = getattr(self, method_name)(*method_args, **method_kwargs)
        return [found[env] for env in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Indices = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]


def _named(heads: Collection[str] | None) -> frozenset[Head]:
    """Return the heads that are free; None frees all. Raises InputError if one is no head, or op or slot is missing."""
    if heads is None:
        return frozenset(Head)
    names = [head.name.lower() for head in Head]
    if isinstance(heads, str) or not {"op", "slot"} <= set(heads) <= set(names):
        given = heads if isinstance(heads, str) else ", ".join(map(str, heads))
        raise InputError(f"heads are {given}; give op, slot, and any of {', '.join(names[2:])}, as a list of names")
    return frozenset(Head[name.upper()] for name in heads)
