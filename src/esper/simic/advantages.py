"""Returns and advantages of a rollout: arrays in, arrays out. T steps, E environments."""

from typing import NamedTuple

import torch
from torch import Tensor


class Advantages(NamedTuple):
    """What the policy and the critic learn from, each (T, E) float32."""

    advantage: Tensor  # of the decision at t
    target: Tensor  # lambda-return, which the critic is fitted to
    returns: Tensor  # discounted sum of the rewards that came, bootstrapped where a sequence was cut short


def advantages(reward: Tensor, value: Tensor, after: Tensor, end: Tensor, gamma: float, lam: float) -> Advantages:
    """Generalised advantage estimation (Schulman et al., "High-dimensional continuous control using GAE", 2016, eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t,      A_t = delta_t + gamma lam (1 - end_t) A_{t+1}

    All are (T, E). end_t says that the sequence ends with step t, and `after` what its state is worth then: 0 where the
    end is a true terminal, V of the last observation where it was cut short. Elsewhere V_{t+1} is the next row of `value`
    and `after` is not read. The last step of a rollout must end every sequence. lam = 1 gives the Monte Carlo advantage.
    """
    assert reward.shape == value.shape == after.shape == end.shape, (reward.shape, value.shape, after.shape, end.shape)
    assert bool(end[-1].all()), "a rollout ends every sequence, by a terminal or by a bootstrap"
    following = torch.where(end, after, torch.cat([value[1:], after[-1:]]))
    delta = reward + gamma * following - value
    goes_on = gamma * (~end).to(reward.dtype)
    advantage, returns = torch.empty_like(reward), torch.empty_like(reward)
    gathered, summed = torch.zeros_like(reward[0]), torch.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        gathered = delta[t] + lam * goes_on[t] * gathered
        summed = reward[t] + torch.where(end[t], gamma * after[t], gamma * summed)
        advantage[t], returns[t] = gathered, summed
    return Advantages(advantage, advantage + value, returns)


def less_group(advantage: Tensor, group: int) -> Tensor:
    """The advantage less the mean of the other members' at the same step; groups are runs of `group` environments.

    What an environment is compared with does not depend on its own decisions, so the gradient stays unbiased (Kool, van
    Hoof and Welling, "Buy 4 REINFORCE samples, get a baseline for free!", 2019); host, data and their luck are shared and
    cancel. (T, E) -> (T, E); E must be a multiple of `group`, and a group of one keeps its advantage.
    """
    steps, envs = advantage.shape
    assert envs % group == 0, (envs, group)
    if group == 1:
        return advantage
    members = advantage.view(steps, envs // group, group)
    others = (members.sum(2, keepdim=True) - members) / (group - 1)
    return (members - others).view(steps, envs)
