"""The return of an episode under several rewards. E environments."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from esper.leyline.protocols import PolicyClient, Reward
from esper.leyline.view import Floats
from esper.simic.rewards import total
from esper.tolaria.engine import Engine
from esper.tolaria.play import Observer, Step, play


class Returns(Observer):
    """Sums rewards over the steps of an episode. `earned` holds the sum (E,) of each reward by name."""

    def __init__(self, envs: int, rewards: Mapping[str, Reward]) -> None:
        self.rewards = rewards
        self.earned = {name: np.zeros(envs) for name in rewards}

    def stepped(self, step: Step) -> None:
        """Add the rewards of a step."""
        for name, reward in self.rewards.items():
            self.earned[name] += total(reward(step.outcome))


def returns(engine: Engine[Any], client: PolicyClient, rewards: Mapping[str, Reward]) -> dict[str, Floats]:
    """Play an episode and return its undiscounted return (E,) under every reward, by name.

    The client receives outcomes and is not updated. To compare clients, give each a fresh engine.
    """
    engine.reset()
    observer = Returns(engine.config.envs, rewards)
    play(engine, client, observer)
    return observer.earned
