"""Decisions from a network: sampled, greedy, or judged again. T steps, E environments.

The probability of a choice is a mixture of the network's and the uniform over what is valid,

    p(c) = (1 - x) softmax(logits)_c + x / n_valid,

with exploration x of its head, inside the probability that is stored and differentiated: the ratio of PPO then is that of
what acted. An op is chosen at every step and a slot once in a seed's life, so the shares of their heads differ: a tenth of
random operations at each of twenty steps leaves no seed alive.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.actions import RELEVANT, Actions, Head, Ints
from esper.leyline.masks import chosen_in_turn, offered
from esper.leyline.view import Bools, Masks
from esper.tamiyo.network import Encoded, FactoredRecurrentActorCritic

GREEDY: Mapping[Head, float] = dict.fromkeys(Head, 0.0)
"""No exploration in any head."""

_RELEVANT = torch.from_numpy(RELEVANT.copy())


class Decision(NamedTuple):
    """One decision per environment and what it was chosen from."""

    actions: Actions  # (E,)
    valid: tuple[NDArray[np.bool_], ...]  # by head, (E, choices): what was valid given the choices before
    log_prob: Tensor  # (E,) of the whole decision


class Judged(NamedTuple):
    """What a network makes of decisions that were made."""

    log_prob: Tensor  # (T, E) of the whole decision
    entropy: Tensor  # (T, E, heads) of each head given the choices before it, 0 where the head did not matter [nats]


def probabilities(logits: Tensor, valid: Tensor, exploration: float | Tensor) -> Tensor:
    """The mixture above: logits and valid (..., C) -> (..., C), exactly 0 where not valid; one choice must be.

    exploration is one share for all, or float64 (..., 1).
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
) -> Decision:
    """A decision of every environment, from encodings of one step, (1, E, ...).

    draws (heads, E) in [0, 1) picks by the inverse of the cumulated probabilities; None is greedy, the first of equals.
    """
    log_prob = torch.zeros(len(masks.op))

    def choose(head: Head, may: Bools, chosen: Actions) -> Ints:
        op, slot = (torch.from_numpy(x)[None] for x in (chosen.op, chosen.slot))
        p = probabilities(network.logits(head, encoded, op, slot)[0], torch.from_numpy(may), exploration[head])
        if draws is None:
            choice = p.argmax(-1)
        else:
            cumulated = p.double().cumsum(-1)
            passed = cumulated <= torch.from_numpy(draws[head])[:, None] * cumulated[:, -1:]
            choice = passed.sum(-1).clamp(max=p.shape[-1] - 1)
        log_prob.add_(torch.where(_RELEVANT[op[0], head], p.gather(-1, choice[:, None])[:, 0].log(), 0.0))
        return choice.numpy()

    actions = chosen_in_turn(masks, choose)
    return Decision(actions, offered(masks, actions), log_prob)


def judge(
    network: FactoredRecurrentActorCritic,
    encoded: Encoded,
    actions: Sequence[Tensor],
    valid: Sequence[Tensor],
    exploration: Mapping[Head, float] | Mapping[Head, Tensor],
) -> Judged:
    """Log-probability and entropies of decisions; actions: by head (T, E), valid: by head (T, E, choices).

    exploration: by head, one share for all decisions or float64 (T, E, 1).
    """
    op, slot = actions[Head.OP], actions[Head.SLOT]
    log_probs, entropies = [], []
    for head in Head:
        p = probabilities(network.logits(head, encoded, op, slot), valid[head], exploration[head])
        log_p = p.clamp(min=1e-30).log()
        matters = _RELEVANT[op, head]
        log_probs.append(torch.where(matters, log_p.gather(-1, actions[head].unsqueeze(-1)).squeeze(-1), 0.0))
        entropies.append(torch.where(matters, -(p * log_p).sum(-1), 0.0))
    return Judged(torch.stack(log_probs).sum(0), torch.stack(entropies, -1))
