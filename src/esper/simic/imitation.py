"""Imitate a rule, from which a policy starts. E environments."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.config.tree import GovernorConfig
from esper.leyline.lifecycle.actions import Actions
from esper.leyline.lifecycle.masks import offered, only_wait
from esper.leyline.lifecycle.verdicts import Refusal
from esper.leyline.lifecycle.view import Outcome, View
from esper.leyline.protocols import Controller, Judgement, Reward
from esper.simic.client import SimicClient, sampled_step
from esper.simic.ppo import PPO
from esper.tamiyo.policy.actor import ActorOutput
from esper.tamiyo.policy.distribution import GREEDY
from esper.tamiyo.policy.packages import as_package


class Apprentice(SimicClient):
    """Imitates a teacher (DAgger): it leads some environments, the policy the others; its decisions are recorded in all.

    The policy is therefore trained on the states that it visits itself (Ross, Gordon and Bagnell, "A reduction of imitation
    no-regret online learning", 2011, algorithm 3.1, with the mixture over environments instead of steps). The
    teacher must decide each environment from its row of the view alone. It is told of refusals of its own decisions alone.

    Several decisions of a teacher in one step (`Controller.further`) are imitated where the policy may make several
    (`ppo.decisions_per_step`), and the policy learns to end them with WAIT. Where a teacher that plants all its seeds at once is
    about to plant every slot of a package (`ppo.packages`), its decision is that package.
    """

    def __init__(
        self, learner: PPO, reward: Reward, teacher: Controller, led: float, penalty: float = GovernorConfig().penalty
    ) -> None:
        """led: share of the environments that follow the teacher."""
        super().__init__(learner, reward, penalty)
        self.teacher, self.led = teacher, led
        self._follows = np.zeros(0, bool)
        self._taught = Actions.wait(0)

    def act(self, view: View) -> Actions:
        """Return the teacher's decisions in the environments that it leads, and sampled decisions of the policy in the others."""
        self._output = output = self.actor.act(view, greedy=False)
        self._follows = led_by_teacher(view.space.number, self.led)
        self._taught = self.teacher.act(view)
        self._teach(view, output, further=False)
        return self._done

    def further(self, view: View, refused: NDArray[np.int8]) -> Actions | None:
        """Return further decisions of the step; None where they are over. A teacher that makes none decides WAIT."""
        output = self.actor.further(view, self._done, refused, greedy=False)
        taught = None
        if self.learner.policy.decisions_per_step > 1:
            own = np.logical_and.reduce([mine == done for mine, done in zip(self._taught, self._done, strict=True)])
            taught = self.teacher.further(view, np.where(own, refused, Refusal.NONE).astype(refused.dtype))
        self._taught = taught or Actions.wait(len(refused))
        return self._carried(view, None) if output is None else self._teach(view, output, further=True)

    def _teach(self, view: View, output: ActorOutput, *, further: bool) -> Actions | None:
        """Record the teacher's decisions, and return what is carried out."""
        step, taught, names = sampled_step(output, GREEDY), self._taught, self.learner.policy.language.packages
        if names and (package := self.teacher.package(view)) is not None:
            taught = as_package(view, taught, names, package)
        taught = Actions(*(np.where(output.idle, 0, choice) for choice in taught))  # WAIT is 0 in every head
        valid = offered(only_wait(self.actor.masks(view), output.idle), taught)
        self.record(
            view, step._replace(actions=taught, valid=valid, log_prob=torch.zeros(len(output.idle))), further=further
        )
        pairs = zip(taught, output.decision.actions, strict=True)
        return self._carried(view, output, Actions(*(np.where(self._follows, *pair) for pair in pairs)))

    def store(self, outcome: Outcome) -> None:
        """Record the rewards of the last decisions, and let the teacher hear of them."""
        super().store(outcome)
        self.teacher.store(outcome)

    def state(self) -> dict[str, Any]:
        """Return the state of `SimicClient`, and that of the teacher."""
        return super().state() | {"teacher": self.teacher.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        super().load_state(state)
        if state["teacher"] is not None:
            self.teacher.load_state(state["teacher"])

    def judgement(self) -> Judgement:
        """Return what the policy thought of its own decisions; probability and entropy of the teacher's are nan."""
        found, taught = super().judgement(), self._follows[:, None]
        return found._replace(
            probability=np.where(taught, np.nan, found.probability), entropy=np.where(taught, np.nan, found.entropy)
        )


def led_by_teacher(number: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Return whether the teacher leads environments of numbers n, floor((n + 1) share) > floor(n share): (E,) -> (E,) bool.

    The teacher leads share * m of m consecutive numbers, rounded up or down and evenly spread.
    """
    return np.floor((number + 1) * share) > np.floor(number * share)
