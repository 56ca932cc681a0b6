"""Learning to do as a rule does, before learning to do better. E environments."""

import numpy as np
import torch

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
        """The teacher's decision in the first environments, the policy's own, sampled, in the rest."""
        envs = len(view.host_params)
        thought = self.mind.think(view, greedy=False)
        shown = self.teacher.act(view)
        valid = offered(view.masks, shown)
        self.keep(view, drawn(thought, GREEDY)._replace(actions=shown, valid=valid, log_prob=torch.zeros(envs)))
        follows = np.arange(envs) < round(self.led * envs)
        own = thought.decision.actions
        return Actions(*(np.where(follows, theirs, mine) for theirs, mine in zip(shown, own, strict=True)))
