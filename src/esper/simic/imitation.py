"""Learning to do as a rule does, before learning to do better. E environments."""

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.actions import Actions
from esper.leyline.config import GovernorConfig
from esper.leyline.masks import offered
from esper.leyline.protocols import PolicyClient, Reward
from esper.leyline.view import View
from esper.simic.client import SimicClient, drawn
from esper.simic.ppo import PPO
from esper.tamiyo.policy import GREEDY


class Apprentice(SimicClient):
    """Some environments follow the teacher, the others the policy; what the teacher would have done is kept of all.

    So the policy is corrected in states that it brings about itself (Ross, Gordon and Bagnell, "A reduction of imitation
    learning to no-regret online learning", 2011, algorithm 3.1, with the mixture over environments instead of steps). The
    teacher must decide each environment from its view alone.
    """

    def __init__(
        self,
        learner: PPO,
        reward: Reward,
        teacher: PolicyClient,
        led: float,
        penalty: float = GovernorConfig().penalty,
    ) -> None:
        """`led` is the share of environments that the teacher decides for."""
        super().__init__(learner, reward, penalty)
        self.teacher, self.led = teacher, led

    def act(self, view: View) -> Actions:
        """The teacher's decision in the environments that it leads, the policy's own, sampled, in the rest."""
        envs = len(view.host_params)
        thought = self.mind.think(view, greedy=False)
        shown = self.teacher.act(view)
        valid = offered(view.masks, shown)
        self.keep(view, drawn(thought, GREEDY)._replace(actions=shown, valid=valid, log_prob=torch.zeros(envs)))
        follows = led_by_teacher(view.space.number, self.led)
        own = thought.decision.actions
        return Actions(*(np.where(follows, theirs, mine) for theirs, mine in zip(shown, own, strict=True)))


def led_by_teacher(number: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """floor((n + 1) share) > floor(n share): which environments the teacher leads, by their numbers n, (E,) int64.

    Of m consecutive numbers these are share * m, rounded up or down, evenly spread; so a part of a population has its part.
    """
    led: NDArray[np.bool_] = np.floor((number + 1) * share) > np.floor(number * share)
    return led
