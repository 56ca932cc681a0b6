"""Play the controllers that learn, from their own decisions or from those of a teacher, and record a rollout. E environments."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.config.tree import GovernorConfig
from esper.leyline.data.keys import Purpose, key, uniform
from esper.leyline.lifecycle.masks import offered, only_wait, without_blueprints
from esper.leyline.lifecycle.view import Floats, Masks, Outcome, View, choose
from esper.leyline.lifecycle.vocabulary import Actions, Head, Refusal
from esper.leyline.protocols import Controller, Judgement, Reward
from esper.simic.ppo import PPO
from esper.simic.rewards import StatefulReward, paid, total
from esper.simic.rollout import Rollout, ShardedRollout, TamiyoRolloutBuffer
from esper.tamiyo.policy.actor import ActorOutput, Learned
from esper.tamiyo.policy.network import GREEDY
from esper.tamiyo.policy.packages import as_package


class SimicClient(Learned):
    """Samples the decisions of one cohort. Several can share a learner, whose `update` then takes all their rollouts."""

    greedy = False

    def __init__(self, learner: PPO, reward: Reward, penalty: float = GovernorConfig().penalty) -> None:
        """penalty: subtracted from the reward of a step that the governor rolls back."""
        super().__init__(learner.policy)
        self.learner, self.reward, self.penalty = learner, reward, penalty
        self.menu: tuple[str, ...] = ()
        self._buffer = TamiyoRolloutBuffer()
        self._room: list[int] | None = None  # steps and environments, which are in the format of checkpoints
        self.paid: Mapping[str, Floats] = {}  # components (E,) of the rewards of the last step

    @property
    def exploration(self) -> Mapping[Head, float]:
        """Share of the uniform distribution in the probabilities of this round, by head."""
        return self.learner.exploration

    def masks(self, view: View) -> Masks:
        """Return the valid decisions. Where an episode has a part of the menu (`ppo.partial_menus`), the rest is forbidden.

        A part has from one blueprint to all but one, small parts as often as large ones (log-uniform), and is the same in a group
        whose advantages are compared. A policy that always has the whole menu does not learn what to plant without its best.
        """
        share, space = self.learner.config.partial_menus, view.space
        if share and len(space.blueprints) > 1:
            group, menu = space.number[:, None] // (self.learner.group or 1), np.arange(len(space.blueprints))
            at = space.seed, Purpose.MENU, view.episode, group
            drawn, size = uniform(key(*at, 0)), np.floor(len(menu) ** uniform(key(*at, 1)))
            order = uniform(key(*at, 2, menu)).argsort(1).argsort(1)
            hidden = (drawn < share) & (order >= size)
            view = view._replace(masks=without_blueprints(view.masks, hidden[:, None]))
        return super().masks(view)

    def carried(self, view: View, output: ActorOutput) -> Actions:
        """Write the decisions of the policy into the rollout, and return them."""
        self.menu = tuple(info.name for info in view.space.blueprints)
        self._room = [view.steps, len(view.host_params)]
        self._buffer.add(output, view.steps)
        return output.decision.actions

    def store(self, outcome: Outcome) -> None:
        """Record the rewards of the last decisions. A rollback ends the sequence of its row, and empties the row's memory."""
        self.paid = paid(self.reward, outcome, self.penalty)
        self._buffer.close(total(self.paid), outcome.ended)
        super().store(outcome)

    def rollout(self) -> Rollout:
        """Return a copy of the steps that were recorded since `clear`."""
        return self._buffer.rollout()

    def clear(self) -> None:
        """Begin the next rollout."""
        self._buffer = TamiyoRolloutBuffer()

    def state(self) -> dict[str, Any]:
        """Return the memory, the rollout so far, and the state of the reward, without the learner."""
        return {
            "menu": list(self.menu),
            "mind": self.memory(),
            "reward": dict(self.reward.state()) if isinstance(self.reward, StatefulReward) else {},
            "room": self._room,
            "rollout": self._buffer.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. The learner and the reward must be of the same classes."""
        self.menu, self._room = tuple(state["menu"]), state["room"]
        self.load_memory(state["mind"])
        if isinstance(self.reward, StatefulReward):
            self.reward.load_state(state["reward"])
        self._buffer.load_state(state["rollout"])

    def update(self) -> Mapping[str, float]:
        """Update the learner from this cohort alone, and begin the next rollout."""
        figures = self.learner.update([ShardedRollout.whole(self.rollout(), self.menu)])
        self.clear()
        return figures


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

    @property
    def exploration(self) -> Mapping[Head, float]:
        return GREEDY

    def masks(self, view: View) -> Masks:
        """Return the valid decisions, with the whole menu, which the teacher has."""
        return Learned.masks(self, view)

    def act(self, view: View) -> Actions:
        """Return the teacher's decisions in the environments that it leads, and sampled decisions of the policy in the others."""
        self._follows, self._taught = led_by_teacher(view.space.number, self.led), self.teacher.act(view)
        return super().act(view)

    def further(self, view: View, refused: NDArray[np.int8]) -> Actions | None:
        """Return further decisions of the step; None where they are over. A teacher that makes none decides WAIT."""
        taught = None
        if self.policy.decisions_per_step > 1:
            own = np.logical_and.reduce([mine == done for mine, done in zip(self._taught, self._done, strict=True)])
            taught = self.teacher.further(view, np.where(own, refused, Refusal.NONE).astype(refused.dtype))
        self._taught = taught or Actions.wait(len(refused))
        return super().further(view, refused)

    def carried(self, view: View, output: ActorOutput) -> Actions:
        """Record the teacher's decisions, and return what is carried out."""
        taught, names = self._taught, self.policy.language.packages
        if names and (package := self.teacher.package(view)) is not None:
            taught = as_package(view, taught, names, package)
        taught = Actions(*(np.where(output.idle, 0, choice) for choice in taught))  # WAIT is 0 in every head
        valid = offered(only_wait(self.masks(view), output.idle), taught)
        lesson = output.decision._replace(actions=taught, valid=valid, log_prob=torch.zeros(len(output.idle)))
        super().carried(view, output._replace(decision=lesson))
        carried: Actions = choose(self._follows, taught, output.decision.actions)
        return carried

    def store(self, outcome: Outcome) -> None:
        super().store(outcome)
        self.teacher.store(outcome)

    def state(self) -> dict[str, Any]:
        return super().state() | {"teacher": self.teacher.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
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
