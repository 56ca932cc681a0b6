"""Sample decisions of a policy network, and compute the probabilities of decisions that were made. T steps, E environments.

The probability of a choice is a mixture of the network's distribution and the uniform distribution over the valid choices,

    p(c) = (1 - x) softmax(logits)_c + x / n_valid,

with the exploration x of the head. The rollout stores the probability of the mixture, and training differentiates it, so the
ratio of PPO is that of the distribution from which the decision was sampled. The exploration of the op head is smaller than
that of the others, because an op is chosen at every step: with a tenth of random operations no seed survives twenty steps.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.lifecycle.actions import RELEVANT, Actions, Head, Ints
from esper.leyline.lifecycle.masks import chosen_in_turn, offered
from esper.leyline.lifecycle.view import Bools, Masks
from esper.tamiyo.policy.network import Encoded, FactoredRecurrentActorCritic

GREEDY: Mapping[Head, float] = dict.fromkeys(Head, 0.0)
"""No exploration in any head."""

_RELEVANT = torch.from_numpy(RELEVANT.copy())


class SampledDecision(NamedTuple):
    """Holds one decision per environment."""

    actions: Actions  # (E,)
    valid: tuple[NDArray[np.bool_], ...]  # (E, choices) bool, the valid choices given those of the heads before
    log_prob: Tensor  # (E,) log-probability of the whole decision [nats]
    # (E, heads) probability of the choice of each head; nan where the operation does not read the head
    probability: Tensor
    entropy: Tensor  # (E, heads) entropy of the distribution of each head; nan where the probability is [nats]


class Judged(NamedTuple):
    """Holds the probabilities that a network gives to decisions."""

    log_prob: Tensor  # (T, E) log-probability of the whole decision [nats]
    # (T, E, heads) entropy of each head given the choices before; 0 where the op does not use the head [nats]
    entropy: Tensor


def probabilities(logits: Tensor, valid: Tensor, exploration: float | Tensor) -> Tensor:
    """Compute the mixture above. logits, valid: (..., C) -> (..., C), exactly 0 where not valid. One choice must be valid.

    exploration: one number for all, or a float64 tensor (..., 1).
    """
    soft = logits.masked_fill(~valid, -torch.inf).softmax(-1)
    share = torch.as_tensor(exploration, dtype=torch.float64)
    return (1 - share).to(soft.dtype) * soft + share.to(soft.dtype) * valid / valid.sum(-1, keepdim=True)


def decide(
    network: FactoredRecurrentActorCritic,
    encoded: Encoded,
    masks: Masks,
    draws: NDArray[np.float64] | None,
    exploration: Mapping[Head, float],
) -> SampledDecision:
    """Return one decision per environment, from the encodings of one step (1, E, ...). What is returned is on the CPU.

    draws: (heads, E) uniform in [0, 1), for inverse transform sampling. None takes the most probable choice, and the first of
    equally probable ones.
    """
    log_prob, device = torch.zeros(len(masks.op)), encoded.trunk.device
    told = torch.full((2, len(masks.op), len(Head)), torch.nan)  # probability and entropy

    def choose(head: Head, may: Bools, chosen: Actions) -> Ints:
        op, slot = (torch.from_numpy(x)[None] for x in (chosen.op, chosen.slot))
        # sampled on the CPU, so that a draw has the same meaning on every device
        logits = network.logits(head, encoded, op.to(device), slot.to(device))[0].cpu()
        p = probabilities(logits, torch.from_numpy(may), exploration[head])
        if draws is None:
            choice = p.argmax(-1)
        else:
            cumulative = p.double().cumsum(-1)
            below = cumulative <= torch.from_numpy(draws[head])[:, None] * cumulative[:, -1:]
            choice = below.sum(-1).clamp(max=p.shape[-1] - 1)
        taken = p.gather(-1, choice[:, None])[:, 0]
        matters = _RELEVANT[op[0], head]  # every operation reads the first head
        log_prob.add_(torch.where(matters, taken.log(), 0.0))
        told[0, matters, head], told[1, matters, head] = taken[matters], torch.special.entr(p).sum(-1)[matters]
        return choice.numpy()

    actions = chosen_in_turn(masks, choose)
    return SampledDecision(actions, offered(masks, actions), log_prob, told[0], told[1])


def judge(
    network: FactoredRecurrentActorCritic,
    encoded: Encoded,
    actions: Sequence[Tensor],
    valid: Sequence[Tensor],
    exploration: Mapping[Head, float] | Mapping[Head, Tensor],
) -> Judged:
    """Compute log-probabilities and entropies of decisions.

    actions: by head, (T, E) int64. valid: by head, (T, E, choices) bool.
    exploration: by head, one number for all decisions, or a float64 tensor (T, E, 1).
    """
    op, slot = actions[Head.OP], actions[Head.SLOT]
    relevant = _RELEVANT.to(op.device)
    log_probs, entropies = [], []
    for head in Head:
        p = probabilities(network.logits(head, encoded, op, slot), valid[head], exploration[head])
        log_p = p.clamp(min=1e-30).log()
        matters = relevant[op, head]
        log_probs.append(torch.where(matters, log_p.gather(-1, actions[head].unsqueeze(-1)).squeeze(-1), 0.0))
        entropies.append(torch.where(matters, -(p * log_p).sum(-1), 0.0))
    return Judged(torch.stack(log_probs).sum(0), torch.stack(entropies, -1))
