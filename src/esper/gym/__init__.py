"""The engine as environments of Gymnasium and of Stable-Baselines3, for learners that are not Esper's own."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from esper.leyline.distribution import pip_install
from esper.leyline.errors import InputError

try:
    import gymnasium  # noqa: F401
except ModuleNotFoundError:
    raise InputError(f"esper.gym needs Gymnasium, which is not installed; run {pip_install('gym')}") from None

from esper.gym.environments import EsperEnv, EsperVectorEnv

if TYPE_CHECKING:
    from esper.gym.stable_baselines import FlatVecEnv

__all__ = ["EsperEnv", "EsperVectorEnv", "sb3"]


def sb3(env: EsperVectorEnv, heads: Collection[str] | None = None) -> "FlatVecEnv":
    """The environments as Stable-Baselines3's `VecEnv`, with a flat `Discrete` of enumerated decisions and an exact mask.

    `heads` names the parts of a decision that are free, op and slot among them; a shorter list makes fewer actions. The
    others are ADD, a ramp of 2 steps, the full dose and the menu's first blueprint (`esper.tamiyo.baselines.defaults`).
    InputError where Stable-Baselines3 is missing, or `env` is no population.
    """
    from esper.gym.stable_baselines import FlatVecEnv

    if not isinstance(env, EsperVectorEnv):
        raise InputError(
            f"sb3 takes an EsperVectorEnv, but {type(env).__name__} was given; for one environment set envs to 1"
        )
    return FlatVecEnv(env, heads)
