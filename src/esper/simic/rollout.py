"""Record the decisions of a round, from which a policy is updated. T decisions, E environments, S slots.

A step of the engine has one decision, or several. A row that makes fewer than others in a step is idle for the rest of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from esper.tamiyo.policy.actor import ActorOutput
from esper.tamiyo.policy.observation import Observation


class Rollout(NamedTuple):
    """Holds the steps of a round; every tensor has the leading axes (T, E)."""

    observation: list[Tensor]  # the fields of `Observation`
    actions: list[Tensor]  # by head, (T, E) int64
    valid: list[Tensor]  # by head, (T, E, choices) bool
    log_prob: Tensor  # as in the decision of an `ActorOutput`
    value: Tensor  # this and the next three are as in `ActorOutput`
    starts: Tensor
    exploration: Tensor
    idle: Tensor
    reward: Tensor  # (T, E) reward of the step, at the last decision of the row in it; 0 at the others
    end: Tensor  # (T, E) bool, whether the sequence ends with this step

    def observations(self) -> Observation:
        """Return the observations as arrays, which share memory."""
        return Observation(*(field.numpy() for field in self.observation))

    def decided(self, values: Tensor) -> Tensor:
        """Return the entries (n, ...) of a tensor (T, E, ...) at which a row was not idle."""
        return values[~self.idle]


class ShardedRollout(NamedTuple):
    """Holds the rollout of a task in a round, divided into shards (`exchange`), of which each worker has some."""

    menu: Sequence[str]  # names of the blueprints
    envs: Mapping[int, int]  # environments of every shard
    rollouts: Mapping[int, Rollout]  # those of this worker

    @classmethod
    def whole(cls, rollout: Rollout, menu: Sequence[str], shard: int = 0) -> "ShardedRollout":
        """Return a rollout in a single shard, with this number."""
        return cls(menu, {shard: rollout.value.shape[1]}, {shard: rollout})


class TamiyoRolloutBuffer:
    """Records the decisions of E environments, step by step.

    A sequence ends at a terminal state, or at a rollback by the governor. After an end the row begins a new sequence with empty
    memory. Episodes are played to their end, so no return is bootstrapped.
    """

    def __init__(self) -> None:
        self._entries: list[Rollout] = []  # one for each decision, without the axis T
        self._closed = 0  # steps since it was made, or since `load_state`
        self._last = torch.zeros(0, dtype=torch.long)  # (E,) entry of the last decision of each row

    def add(self, output: ActorOutput, steps: int) -> None:
        """Record a decision. `close` adds the rewards of the step. steps: number of steps of a round."""
        assert self._closed < steps, "the buffer is full; a new one begins the next round"
        decision, envs = output.decision, len(output.idle)
        if not self._entries:
            self._last = torch.zeros(envs, dtype=torch.long)
        fields: list[Any] = [
            list(output.observation),
            list(decision.actions),
            list(decision.valid),
            decision.log_prob,
            output.value,
            output.starts,
            output.exploration,
            output.idle,
            torch.zeros(envs),  # reward
            torch.zeros(envs, dtype=torch.bool),  # end
        ]
        # copied, since the engine and the memory of the policy may go on in these arrays
        entry = Rollout(*pytree.tree_map(lambda field: torch.as_tensor(field).clone(), fields))
        self._last = torch.where(entry.idle, self._last, len(self._entries))
        self._entries.append(entry)

    def close(self, reward: NDArray[np.float64], end: NDArray[np.bool_]) -> None:
        """End a step: record its rewards (E,), and whether it ends the sequence (E,), at the last decision of each row."""
        assert self._entries, "a step is written before it is closed"
        paid, ended = torch.from_numpy(reward).float(), torch.from_numpy(end)
        for entry in self._last.unique().tolist():
            rows = self._last == entry
            self._entries[entry].reward[rows], self._entries[entry].end[rows] = paid[rows], ended[rows]
        self._closed += 1

    def rollout(self) -> Rollout:
        """Return a copy of the steps written so far."""
        assert self._entries, "nothing was written"
        return pytree.tree_map(lambda *fields: torch.stack(fields), *self._entries)

    def state(self) -> dict[str, Any] | None:
        """Return the steps written so far; None where there are none."""
        return self.rollout()._asdict() if self._entries else None

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore the steps of a `state`; further steps follow them."""
        self._entries, self._closed = [], 0
        if state is not None:
            written = pytree.tree_map(torch.clone, Rollout(**state))
            fields, tree = pytree.tree_flatten(written)
            self._entries = [pytree.tree_unflatten(entry, tree) for entry in zip(*fields, strict=True)]
            self._last = torch.where(written.idle, -1, torch.arange(len(written.value))[:, None]).amax(0)


def take(values: Tensor, order: Tensor) -> Tensor:
    """Take entry order[i, e] of row e: values (T, E, ...), order (n, E) int64 -> (n, E, ...)."""
    return values[order, torch.arange(order.shape[1])]
