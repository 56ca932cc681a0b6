"""The learner as a controller: it samples decisions, is paid, and keeps what it saw. E environments."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from esper.leyline.actions import Actions, Head
from esper.leyline.config import GovernorConfig
from esper.leyline.protocols import Reward
from esper.leyline.view import Outcome, View
from esper.simic.ppo import PPO
from esper.simic.rewards import StatefulReward, paid, total
from esper.simic.rollout import Rollout, Step, TamiyoRolloutBuffer
from esper.tamiyo.controller import Mind, Thought


class SimicClient:
    """One cohort's side of a learner: several may share it, and `learner.update` then takes all their rollouts."""

    def __init__(self, learner: PPO, reward: Reward, penalty: float = GovernorConfig().penalty) -> None:
        """`penalty` is what a step costs that the governor rolls back."""
        self.learner, self.reward, self.penalty = learner, reward, penalty
        self.mind = Mind(learner.policy)
        self.menu: tuple[str, ...] = ()
        self._buffer: TamiyoRolloutBuffer | None = None

    def act(self, view: View) -> Actions:
        """A sampled decision per environment, kept with what it was based on."""
        exploration = self.learner.exploration
        thought = self.mind.think(view, exploration, greedy=False)
        self.keep(view, drawn(thought, exploration))
        return thought.decision.actions

    def keep(self, view: View, step: Step) -> None:
        """Write what was seen and decided into the rollout."""
        envs = len(view.host_params)
        if self._buffer is None or (self._buffer.steps, self._buffer.envs) != (view.steps, envs):
            self._buffer = TamiyoRolloutBuffer(view.steps, envs)
        self.menu = tuple(info.name for info in view.space.blueprints)
        self._buffer.add(step)

    def store(self, outcome: Outcome) -> None:
        """Pay the decisions just made, after they acted. What was rolled back ends a sequence; the next begins without memory."""
        assert self._buffer is not None, "act comes before store"
        self._buffer.close(total(paid(self.reward, outcome, self.penalty)), outcome.ended)
        self.mind.learn_outcome(outcome)

    def cut(self, view: View) -> None:
        """End the rollout at an unfinished episode: what its states are worth is estimated, all of them in one pass.

        Where the episode goes on, it does so with empty memory: an update replays a sequence from its start.
        """
        assert self._buffer is not None, "act comes before cut"
        self._buffer.cut(self.mind.expect(view))
        self.mind.forget(np.ones(self._buffer.envs, bool))

    def rollout(self) -> Rollout:
        """What the round left to learn from; `clear` forgets it."""
        assert self._buffer is not None, "a round comes before its rollout"
        return self._buffer.rollout()

    def clear(self) -> None:
        """Begin the next round."""
        assert self._buffer is not None, "a round comes before the next"
        self._buffer.clear()

    def state(self) -> dict[str, Any]:
        """All that it remembers but the learner: memory, rollout so far, and what the reward remembers."""
        buffer = self._buffer
        return {
            "menu": list(self.menu),
            "mind": self.mind.state(),
            "reward": dict(self.reward.state()) if isinstance(self.reward, StatefulReward) else {},
            "room": None if buffer is None else [buffer.steps, buffer.envs],
            "rollout": None if buffer is None else buffer.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, with a learner and a reward of the same kind."""
        self.menu = tuple(state["menu"])
        self.mind.load_state(state["mind"])
        if isinstance(self.reward, StatefulReward):
            self.reward.load_state(state["reward"])
        self._buffer = None if state["room"] is None else TamiyoRolloutBuffer(*state["room"])
        if self._buffer is not None:
            self._buffer.load_state(state["rollout"])

    def update(self) -> Mapping[str, float]:
        """Learn from this cohort alone, and begin the next round."""
        figures = self.learner.update([self.rollout()], [self.menu])
        self.clear()
        return figures


def drawn(thought: Thought, exploration: Mapping[Head, float]) -> Step:
    """The step of a decision that was drawn under these shares of the uniform."""
    made = thought.decision
    shares = torch.tensor([[exploration[head] for head in Head]], dtype=torch.float64)
    return Step(
        observation=thought.observation,
        actions=made.actions,
        valid=made.valid,
        log_prob=made.log_prob,
        value=thought.value,
        starts=thought.starts,
        exploration=shares.repeat(len(thought.value), 1),
    )
