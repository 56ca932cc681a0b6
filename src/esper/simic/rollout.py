"""What a round leaves to learn from. T steps, E environments, S slots."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.actions import Actions
from esper.tamiyo.observation import Observation


class Step(NamedTuple):
    """One step of every environment, before it is known what came of it."""

    observation: Observation  # (E, ...)
    actions: Actions  # (E,)
    valid: Sequence[NDArray[np.bool_]]  # by head (E, choices)
    log_prob: Tensor  # (E,)
    value: Tensor  # (E,) V of the state, in units of return
    starts: NDArray[np.bool_]  # (E,) a sequence begins here: the memory was empty
    exploration: Tensor  # (E, heads) float64, share of the uniform in each head's choice, as it is in `log_prob`


class Rollout(NamedTuple):
    """The steps of a round, each field with a leading (T, E)."""

    observation: tuple[Tensor, ...]  # the fields of `Observation`
    actions: tuple[Tensor, ...]  # by head, (T, E) int64
    valid: tuple[Tensor, ...]  # by head, (T, E, choices) bool
    log_prob: Tensor  # (T, E)
    value: Tensor  # (T, E)
    starts: Tensor  # (T, E) bool
    exploration: Tensor  # (T, E, heads) float64, the shares under which the decisions were drawn
    reward: Tensor  # (T, E)
    end: Tensor  # (T, E) bool, the sequence ends with this step
    after: Tensor  # (T, E) value of the state behind it where it was cut short, else 0

    def observations(self) -> Observation:
        """The observations as arrays, sharing memory."""
        return Observation(*(field.numpy() for field in self.observation))

    def copied(self) -> "Rollout":
        """The same in memory of its own, which a next round does not write over."""
        return self.rows(torch.arange(self.value.shape[1]))

    def tree(self) -> dict[str, Any]:
        """The fields by name, as a tree of tensors that share memory."""
        return {name: list(field) if isinstance(field, tuple) else field for name, field in self._asdict().items()}

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> "Rollout":
        """What `tree` took apart."""
        fields: list[Any] = [tuple(tree[name]) if isinstance(tree[name], list) else tree[name] for name in cls._fields]
        return cls(*fields)

    def rows(self, index: Tensor) -> "Rollout":
        """Whole sequences of some environments."""
        pick = [tuple(x[:, index] for x in field) if isinstance(field, tuple) else field[:, index] for field in self]
        return Rollout(*pick)  # type: ignore[arg-type]


class TamiyoRolloutBuffer:
    """Room for T steps of E environments, allocated once and written one step at a time.

    A sequence ends at a terminal, where a governor rolled a row back (`end` with its own penalty), or where it is cut
    short; then `cut` keeps what its state is worth. Behind an end the same row begins a new sequence with empty memory.
    """

    def __init__(self, steps: int, envs: int) -> None:
        self.steps, self.envs, self.length = steps, envs, 0
        self._rollout: Rollout | None = None

    def add(self, step: Step) -> None:
        """Write what was seen and decided; `close` adds what came of it."""
        assert self.length < self.steps, "the buffer is full; clear() begins the next round"
        parts = (*step.observation, *step.actions, *step.valid, *step[3:])
        rollout = self._rollout = self._rollout or _room(self.steps, self.envs, step)
        for room, part in zip(_written(rollout), parts, strict=True):
            room[self.length] = part if isinstance(part, Tensor) else torch.from_numpy(part)
        self.length += 1

    def close(self, reward: NDArray[np.float64], end: NDArray[np.bool_]) -> None:
        """What came of the last step, (E,)."""
        assert self._rollout is not None, "a step is written before it is closed"
        at = self.length - 1
        self._rollout.reward[at] = torch.from_numpy(reward)
        self._rollout.end[at] = torch.from_numpy(end)
        self._rollout.after[at] = 0.0

    def cut(self, after: Tensor) -> None:
        """End every sequence that has not ended with the last step, where its state is worth `after`, (E,)."""
        assert self._rollout is not None, "there is nothing to cut short"
        at = self.length - 1
        going = ~self._rollout.end[at]
        self._rollout.after[at] = torch.where(going, after, self._rollout.after[at])
        self._rollout.end[at] = True

    def rollout(self) -> Rollout:
        """The steps written so far, as views."""
        assert self._rollout is not None, "nothing was written"
        t = self.length
        cut = [tuple(x[:t] for x in field) if isinstance(field, tuple) else field[:t] for field in self._rollout]
        return Rollout(*cut)  # type: ignore[arg-type]

    def clear(self) -> None:
        """Begin the next round in the same memory."""
        self.length = 0

    def state(self) -> dict[str, Any] | None:
        """The steps written so far; None where there are none."""
        return self.rollout().tree() if self.length else None

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Go on behind the steps that `state` gave."""
        if state is None:
            self.clear()
            return
        written = Rollout.of_tree(state)
        self.length = len(written.value)
        self._rollout = Rollout(*[self._with_room(field) for field in written])

    def _with_room(self, field: Tensor | tuple[Tensor, ...]) -> Any:
        """A field, or each part of one, with room for the steps that are still to come."""
        if isinstance(field, tuple):
            return tuple(map(self._with_room, field))
        return torch.cat([field, field.new_zeros(self.steps - self.length, *field.shape[1:])])


def _room(steps: int, envs: int, step: Step) -> Rollout:
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
        reward=torch.zeros(shape),
        end=torch.zeros(shape, dtype=torch.bool),
        after=torch.zeros(shape),
    )


def _written(rollout: Rollout) -> list[Tensor]:
    return [
        *rollout.observation,
        *rollout.actions,
        *rollout.valid,
        rollout.log_prob,
        rollout.value,
        rollout.starts,
        rollout.exploration,
    ]
