"""Offers environments of Gymnasium and Stable-Baselines3, so that their learners can control growth."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from esper.leyline.distribution import of_extra
from esper.leyline.messages import InputError

with of_extra("gym", "esper.gym needs Gymnasium, which is"):
    import gymnasium  # noqa: F401

from esper.gym.environments import EsperEnv, EsperVectorEnv

if TYPE_CHECKING:
    from esper.gym.stable_baselines import FlatVecEnv

__all__ = ["EsperEnv", "EsperVectorEnv", "sb3"]


def sb3(env: EsperVectorEnv, heads: Collection[str] | None = None) -> "FlatVecEnv":
    """Return the environments as a `VecEnv` of Stable-Baselines3, with a flat `Discrete` action and an exact action mask.

    `heads` names the heads that an action chooses, with op and slot among them; fewer heads give fewer actions. The other
    heads are fixed: the blend ADD, a ramp of 2 steps, the full dose, and the first blueprint of the menu
    (`esper.leyline.lifecycle.masks.defaults`).

    Raises InputError if Stable-Baselines3 is not installed, or if `env` is no `EsperVectorEnv`.
    """
    from esper.gym.stable_baselines import FlatVecEnv

    if not isinstance(env, EsperVectorEnv):
        raise InputError(
            f"sb3 takes an EsperVectorEnv, but {type(env).__name__} was given; for one environment set envs to 1"
        )
    return FlatVecEnv(env, heads)
