"""What an episode pays. E environments."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from esper.leyline.protocols import PolicyClient, Reward
from esper.leyline.view import Floats
from esper.simic.rewards import total
from esper.tolaria.engine import Engine
from esper.tolaria.play import Observer, Step, play


class Returns(Observer):
    """Sums up rewards over the steps of an episode; `earned` holds (E,) under the name of each."""

    def __init__(self, envs: int, rewards: Mapping[str, Reward]) -> None:
        self.rewards = rewards
        self.earned = {name: np.zeros(envs) for name in rewards}

    def stepped(self, step: Step) -> None:
        """Add the rewards of a step."""
        for name, reward in self.rewards.items():
            self.earned[name] += total(reward(step.outcome))


def returns(engine: Engine[Any], client: PolicyClient, rewards: Mapping[str, Reward]) -> dict[str, Floats]:
    """The undiscounted return of the next episode under every reward, (E,) by its name. What is compared needs fresh engines.

    The client is told outcomes and not asked to learn.
    """
    engine.reset()
    found = Returns(engine.config.envs, rewards)
    play(engine, client, found)
    return found.earned
