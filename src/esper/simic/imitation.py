"""Imitation of a rule, from which a policy starts. E environments."""

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.actions import Actions
from esper.leyline.config import GovernorConfig
from esper.leyline.masks import offered
from esper.leyline.protocols import Judgement, PolicyClient, Reward
from esper.leyline.view import View
from esper.simic.client import SimicClient, sampled_step
from esper.simic.ppo import PPO
from esper.tamiyo.policy import GREEDY


class Apprentice(SimicClient):
    """DAgger: some environments follow the teacher and the others the policy; the teacher's decisions are recorded in all.

    The policy is therefore trained on the states that it visits itself (Ross, Gordon and Bagnell, "A reduction of imitation
    learning to no-regret online learning", 2011, algorithm 3.1, with the mixture over environments instead of steps). The
    teacher must decide each environment from its row of the view alone.
    """

    def __init__(
        self,
        learner: PPO,
        reward: Reward,
        teacher: PolicyClient,
        led: float,
        penalty: float = GovernorConfig().penalty,
    ) -> None:
        """led: share of the environments that follow the teacher."""
        super().__init__(learner, reward, penalty)
        self.teacher, self.led = teacher, led
        self._follows = np.zeros(0, bool)

    def act(self, view: View) -> Actions:
        """The teacher's decisions in the environments that it leads, and sampled decisions of the policy in the others."""
        envs = len(view.host_params)
        self._output = output = self.actor.act(view, greedy=False)
        taught = self.teacher.act(view)
        step = sampled_step(output, GREEDY)
        valid = offered(view.masks, taught)
        self.record(view, step._replace(actions=taught, valid=valid, log_prob=torch.zeros(envs)))
        self._follows = follows = led_by_teacher(view.space.number, self.led)
        return Actions(*(np.where(follows, *pair) for pair in zip(taught, output.decision.actions, strict=True)))

    def judgement(self) -> Judgement:
        """What the policy thought of its own decisions; probability and entropy of the teacher's are nan."""
        found, taught = super().judgement(), self._follows[:, None]
        return found._replace(
            probability=np.where(taught, np.nan, found.probability), entropy=np.where(taught, np.nan, found.entropy)
        )


def led_by_teacher(number: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """floor((n + 1) share) > floor(n share): whether the teacher leads the environments of numbers n, (E,) int64 -> (E,) bool.

    The teacher leads share * m of m consecutive numbers, rounded up or down and evenly spread.
    """
    led: NDArray[np.bool_] = np.floor((number + 1) * share) > np.floor(number * share)
    return led
