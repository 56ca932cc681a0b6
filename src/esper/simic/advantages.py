"""Returns and advantages of a rollout. T steps, E environments."""

from typing import NamedTuple

import torch
from torch import Tensor


class Advantages(NamedTuple):
    """The targets of the policy and of the critic, each (T, E) float32.

    Attributes:
        advantage (tensor): advantage of the decision at step t
        target (tensor): lambda-return, the target of the critic
        returns (tensor): discounted sum of the rewards from step t on, bootstrapped where a sequence was truncated
    """

    advantage: Tensor
    target: Tensor
    returns: Tensor


def advantages(
    reward: Tensor, value: Tensor, after: Tensor, end: Tensor, gamma: float, lam: float, idle: Tensor | None = None
) -> Advantages:
    """Generalised advantage estimation (Schulman et al., "High-dimensional continuous control using GAE", 2016, eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t,      A_t = delta_t + gamma lam (1 - end_t) A_{t+1}

    All arguments are (T, E). `end` marks the last step of a sequence. There V_{t+1} is `after`: 0 at a terminal state, V of
    the last observation where the sequence was truncated. Elsewhere V_{t+1} is the next row of `value`, and `after` is not
    read. The last step of a rollout must end every sequence. lam = 1 gives the Monte Carlo advantage.

    idle: (T, E) bool, entries at which a row decided nothing. Its sequence is that of its other entries, and an idle one has the
    advantage and the returns of the next.
    """
    assert reward.shape == value.shape == after.shape == end.shape, (reward.shape, value.shape, after.shape, end.shape)
    idle = torch.zeros_like(end) if idle is None else idle
    assert bool((end | idle)[-1].all()), "the last step of a rollout ends every sequence"
    if idle.any():
        value = value.clone()
        for t in reversed(range(len(value) - 1)):
            value[t] = torch.where(idle[t], value[t + 1], value[t])
    next_value = torch.where(end, after, torch.cat([value[1:], after[-1:]]))
    delta = reward + gamma * next_value - value
    discount = gamma * (~end).to(reward.dtype)
    advantage, returns = torch.empty_like(reward), torch.empty_like(reward)
    next_advantage, next_return = torch.zeros_like(reward[0]), torch.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        own = delta[t] + lam * discount[t] * next_advantage
        next_advantage = torch.where(idle[t], next_advantage, own)
        earned = reward[t] + torch.where(end[t], gamma * after[t], gamma * next_return)
        next_return = torch.where(idle[t], next_return, earned)
        advantage[t], returns[t] = next_advantage, next_return
    return Advantages(advantage, advantage + value, returns)


def subtract_group_mean(advantage: Tensor, group: int) -> Tensor:
    """A_i - mean over the other members j of the group of A_j, at each step: (T, E) -> (T, E).

    A group is `group` consecutive environments with the same host and data, whose random effects cancel. The baseline of an
    environment does not depend on its own decisions, so the gradient is unbiased (Kool, van Hoof and Welling, "Buy 4 REINFORCE
    samples, get a baseline for free!", 2019). E must be a multiple of `group`. A group of one keeps its advantage.
    """
    steps, envs = advantage.shape
    assert envs % group == 0, (envs, group)
    if group == 1:
        return advantage
    members = advantage.view(steps, envs // group, group)
    others = (members.sum(2, keepdim=True) - members) / (group - 1)
    return (members - others).view(steps, envs)
