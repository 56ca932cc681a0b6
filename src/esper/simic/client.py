"""Play the controller that learns: sample decisions, receive rewards, and record both in a rollout. E environments."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.config.tree import GovernorConfig
from esper.leyline.lifecycle.actions import Actions, Head
from esper.leyline.lifecycle.view import Floats, Outcome, View
from esper.leyline.protocols import Reward
from esper.simic.ppo import PPO
from esper.simic.rewards import StatefulReward, paid, total
from esper.simic.rollout import Rollout, RolloutStep, ShardedRollout, TamiyoRolloutBuffer
from esper.tamiyo.policy.actor import ActorOutput
from esper.tamiyo.policy.controller import Learned


class SimicClient(Learned):
    """Samples the decisions of one cohort. Several can share a learner, whose `update` then takes all their rollouts."""

    def __init__(self, learner: PPO, reward: Reward, penalty: float = GovernorConfig().penalty) -> None:
        """penalty: subtracted from the reward of a step that the governor rolls back."""
        super().__init__(learner.policy)
        self.learner, self.reward, self.penalty = learner, reward, penalty
        self.menu: tuple[str, ...] = ()
        self._buffer: TamiyoRolloutBuffer | None = None
        self.paid: Mapping[str, Floats] = {}  # components (E,) of the rewards of the last step

    def act(self, view: View) -> Actions:
        """Sample a decision for every environment, and record it with its observation."""
        exploration = self.learner.exploration
        self._output = output = self.actor.act(view, exploration, greedy=False)
        self.record(view, sampled_step(output, exploration))
        self._carried(view, output)
        return self._done

    def further(self, view: View, refused: NDArray[np.int8]) -> Actions | None:
        """Sample and record further decisions of the step; return None where no environment has one left."""
        exploration = self.learner.exploration
        output = self.actor.further(view, self._done, refused, exploration, greedy=False)
        if output is not None:
            self.record(view, sampled_step(output, exploration), further=True)
        return self._carried(view, output)

    def record(self, view: View, step: RolloutStep, *, further: bool = False) -> None:
        """Write decisions into the rollout. further: not the first of their step."""
        envs = len(view.host_params)
        if self._buffer is None or (self._buffer.steps, self._buffer.envs) != (view.steps, envs):
            self._buffer = TamiyoRolloutBuffer(view.steps, envs)
        self.menu = tuple(info.name for info in view.space.blueprints)
        self._buffer.add(step, further=further)

    def store(self, outcome: Outcome) -> None:
        """Record the rewards of the last decisions. A rollback ends the sequence of its row, and empties the row's memory."""
        self.paid = paid(self.reward, outcome, self.penalty)
        self._written().close(total(self.paid), outcome.ended)
        self.actor.store(outcome)

    def rollout(self) -> Rollout:
        """Return the steps that were recorded since `clear`."""
        return self._written().rollout()

    def clear(self) -> None:
        """Begin the next rollout."""
        if self._buffer is not None:
            self._buffer.clear()

    def _written(self) -> TamiyoRolloutBuffer:
        assert self._buffer is not None, "act is called first"
        return self._buffer

    def state(self) -> dict[str, Any]:
        """Return the memory, the rollout so far, and the state of the reward, without the learner."""
        buffer = self._buffer
        return {
            "menu": list(self.menu),
            "mind": self.actor.state(),
            "reward": dict(self.reward.state()) if isinstance(self.reward, StatefulReward) else {},
            "room": None if buffer is None else [buffer.steps, buffer.envs],
            "rollout": None if buffer is None else buffer.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. The learner and the reward must be of the same classes."""
        self.menu = tuple(state["menu"])
        self.actor.load_state(state["mind"])
        if isinstance(self.reward, StatefulReward):
            self.reward.load_state(state["reward"])
        self._buffer = None if state["room"] is None else TamiyoRolloutBuffer(*state["room"])
        if self._buffer is not None:
            self._buffer.load_state(state["rollout"])

    def update(self) -> Mapping[str, float]:
        """Update the learner from this cohort alone, and begin the next rollout."""
        figures = self.learner.update([ShardedRollout.whole(self.rollout(), self.menu)])
        self.clear()
        return figures


def sampled_step(output: ActorOutput, exploration: Mapping[Head, float]) -> RolloutStep:
    """Return the step of a decision that was sampled with this exploration of each head."""
    decision = output.decision
    shares = torch.tensor([[exploration[head] for head in Head]], dtype=torch.float64)
    return RolloutStep(
        observation=output.observation,
        actions=decision.actions,
        valid=decision.valid,
        log_prob=decision.log_prob,
        value=output.value,
        starts=output.starts,
        exploration=shares.repeat(len(output.value), 1),
        idle=output.idle,
    )
