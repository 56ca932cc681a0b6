"""Record the decisions of a round, from which a policy is updated. T decisions, E environments, S slots.

A step of the engine has one decision, or several. A row that makes fewer than others in a step is idle for the rest of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.lifecycle.actions import Actions
from esper.tamiyo.policy.observation import Observation


class RolloutStep(NamedTuple):
    """Holds one step of every environment, before its outcome is known.

    Attributes:
        observation (Observation): (E, ...)
        actions (Actions): (E,)
        valid (arrays by head): (E, choices) bool
        log_prob ((E,) tensor): log-probability of the decision [nats]
        value ((E,) tensor): V of the state, in units of return
        starts ((E,) bool array): whether a sequence begins with this step
        exploration ((E, heads) float64 tensor): share of the uniform distribution in each head's probabilities
        idle ((E,) bool array): whether the row decides nothing, because its decisions of the step were over
    """

    observation: Observation
    actions: Actions
    valid: Sequence[NDArray[np.bool_]]
    log_prob: Tensor
    value: Tensor
    starts: NDArray[np.bool_]
    exploration: Tensor
    idle: NDArray[np.bool_]


class Rollout(NamedTuple):
    """Holds the steps of a round; every tensor has the leading axes (T, E).

    Attributes:
        observation (tensors): the fields of `Observation`
        actions (tensors by head): (T, E) int64
        valid (tensors by head): (T, E, choices) bool
        log_prob, value, starts, exploration, idle (tensors): as in `RolloutStep`
        reward ((T, E) tensor): reward of the step, at the last decision of the row in it; 0 at the others
        end ((T, E) bool tensor): whether the sequence ends with this step
    """

    observation: tuple[Tensor, ...]
    actions: tuple[Tensor, ...]
    valid: tuple[Tensor, ...]
    log_prob: Tensor
    value: Tensor
    starts: Tensor
    exploration: Tensor
    idle: Tensor
    reward: Tensor
    end: Tensor

    def observations(self) -> Observation:
        """Return the observations as arrays, which share memory."""
        return Observation(*(field.numpy() for field in self.observation))

    def decided(self, values: Tensor) -> Tensor:
        """Return the entries (n, ...) of a tensor (T, E, ...) at which a row was not idle."""
        return values[~self.idle]

    def copied(self) -> "Rollout":
        """Return a copy, which the next round does not overwrite."""
        return self.rows(torch.arange(self.value.shape[1]))

    def tree(self) -> dict[str, Any]:
        """Return the fields by name, as a tree of tensors that share memory."""
        return {name: list(field) if isinstance(field, tuple) else field for name, field in self._asdict().items()}

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> "Rollout":
        """Make a rollout from its `tree`."""
        fields: list[Any] = [tuple(tree[name]) if isinstance(tree[name], list) else tree[name] for name in cls._fields]
        return cls(*fields)

    def rows(self, index: Tensor) -> "Rollout":
        """Return copies of the sequences of the environments in `index`."""
        return self._map(lambda field: field[:, index])

    def taken(self, order: Tensor) -> "Rollout":
        """Return copies of the entries (n, E) of each row."""
        return self._map(lambda field: take(field, order))

    def steps(self, stop: int) -> "Rollout":
        """Return views of the steps before `stop`."""
        return self._map(lambda field: field[:stop])

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Rollout":
        fields = [tuple(map(function, field)) if isinstance(field, tuple) else function(field) for field in self]
        return Rollout(*fields)  # type: ignore[arg-type]


class ShardedRollout(NamedTuple):
    """Holds the rollout of a task in a round, divided into shards (`exchange`), of which each worker has some.

    Attributes:
        menu (texts): names of the blueprints
        envs (numbers by shard): environments of every shard
        rollouts (rollouts by shard): those of this worker
    """

    menu: Sequence[str]
    envs: Mapping[int, int]
    rollouts: Mapping[int, Rollout]

    @classmethod
    def whole(cls, rollout: Rollout, menu: Sequence[str], shard: int = 0) -> "ShardedRollout":
        """Return a rollout in a single shard, with this number."""
        return cls(menu, {shard: rollout.value.shape[1]}, {shard: rollout})


class TamiyoRolloutBuffer:
    """Records T steps of E environments, in memory that is allocated once. Further decisions of a step enlarge it.

    A sequence ends at a terminal state, or at a rollback by the governor. After an end the row begins a new sequence with empty
    memory. Episodes are played to their end, so no return is bootstrapped.
    """

    def __init__(self, steps: int, envs: int) -> None:
        self.steps, self.envs, self.length = steps, envs, 0
        self._begun = 0  # steps since `clear`, or since `load_state`
        self._rollout: Rollout | None = None
        self._last = torch.zeros(envs, dtype=torch.long)  # entry of the last decision of each row

    def add(self, step: RolloutStep, *, further: bool = False) -> None:
        """Write observations and decisions. `close` adds the rewards of the step. further: not the first decision of the step."""
        self._begun += not further
        assert self._begun <= self.steps, "the buffer is full; clear() begins the next round"
        rollout = self._rollout = self._rollout or _allocate(self.steps, self.envs, step)
        if self.length == len(rollout.value):
            rollout = self._rollout = _enlarged(rollout, self.steps)
        fields = (*rollout.observation, *rollout.actions, *rollout.valid, *rollout[3:8])
        parts = (*step.observation, *step.actions, *step.valid, *step[3:])
        for field, part in zip(fields, parts, strict=True):
            field[self.length] = part if isinstance(part, Tensor) else torch.from_numpy(part)
        for empty in (rollout.reward, rollout.end):
            empty[self.length] = 0
        self._last = torch.where(rollout.idle[self.length], self._last, self.length)
        self.length += 1

    def close(self, reward: NDArray[np.float64], end: NDArray[np.bool_]) -> None:
        """Write the rewards (E,) of the last step, and whether it ends the sequence (E,), at the last decision of each row."""
        assert self._rollout is not None, "a step is written before it is closed"
        at = self._last, torch.arange(self.envs)
        self._rollout.reward[at] = torch.from_numpy(reward).to(self._rollout.reward.dtype)
        self._rollout.end[at] = torch.from_numpy(end)

    def rollout(self) -> Rollout:
        """Return views of the steps written so far."""
        assert self._rollout is not None, "nothing was written"
        return self._rollout.steps(self.length)

    def clear(self) -> None:
        """Begin the next round in the same memory."""
        self.length = self._begun = 0

    def state(self) -> dict[str, Any] | None:
        """Return the steps written so far; None where there are none."""
        return self.rollout().tree() if self.length else None

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore the steps of a `state`; further steps follow them."""
        if state is None:
            self.clear()
            return
        written = Rollout.of_tree(state)
        self.length = len(written.value)
        self._rollout = _enlarged(written, max(self.steps - self.length, 0))
        self._last = torch.where(written.idle, -1, torch.arange(self.length)[:, None]).amax(0)


def take(values: Tensor, order: Tensor) -> Tensor:
    """Take entry order[i, e] of row e: values (T, E, ...), order (n, E) int64 -> (n, E, ...)."""
    return values[order, torch.arange(order.shape[1])]


def _enlarged(rollout: Rollout, more: int) -> Rollout:
    """Return the rollout with room for more entries at the end."""
    return rollout._map(lambda field: torch.cat([field, field.new_zeros(more, *field.shape[1:])]))


def _allocate(steps: int, envs: int, step: RolloutStep) -> Rollout:
    def like(part: NDArray[np.generic] | Tensor) -> Tensor:
        tensor = part if isinstance(part, Tensor) else torch.from_numpy(part)
        assert len(tensor) == envs, (tensor.shape, envs)
        return torch.zeros((steps, *tensor.shape), dtype=tensor.dtype)

    shape = (steps, envs)
    return Rollout(
        observation=tuple(like(field) for field in step.observation),
        actions=tuple(like(head) for head in step.actions),
        valid=tuple(like(may) for may in step.valid),
        log_prob=torch.zeros(shape),
        value=torch.zeros(shape),
        starts=torch.zeros(shape, dtype=torch.bool),
        exploration=like(step.exploration),
        idle=torch.zeros(shape, dtype=torch.bool),
        reward=torch.zeros(shape),
        end=torch.zeros(shape, dtype=torch.bool),
    )
