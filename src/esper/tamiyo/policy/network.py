"""Define the policy network, sample decisions of it, and compute the probabilities of decisions that were made.

It has one encoder for all slots, a recurrent trunk, and heads that are chosen one after the other. T steps, E environments,
S slots, K blueprints. Any number of slots, and any menu, runs with the same weights.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.leyline.lifecycle.masks import chosen_in_turn, offered
from esper.leyline.lifecycle.view import Bools, Masks
from esper.leyline.lifecycle.vocabulary import RELEVANT, Actions, Blend, Head, Ints, Op
from esper.tamiyo.policy.observation import PROSPECTS

Hidden = tuple[Tensor, Tensor]
"""Hidden state and cell state of the LSTM, each (E, H) float32."""

EMBEDDING, PAIR = 8, 32
"""Widths of the embedding of a blueprint and of an op, and of the encoding of a blueprint at a slot."""


class Batch(NamedTuple):
    """Holds a normalised `Observation` as tensors, with blueprints as indices into the vocabulary."""

    env: Tensor  # (T, E, G) features of the environment
    slot: Tensor  # (T, E, S, F) features of the slots
    blueprint: Tensor  # (T, E, S) int64, blueprint of the seed in the slot; the number of blueprints for an empty slot
    cost: Tensor  # (T, E, S, K) cost of each blueprint of the menu at the slot
    prospects: Tensor  # (T, E, S, K, P) what the growth sensors tell of it there
    menu: Tensor  # (K,) int64, the blueprints of the menu; -1 for one that the vocabulary lacks


class Encoded(NamedTuple):
    """Holds the inputs of the heads."""

    trunk: Tensor  # (T, E, H)
    slots: Tensor  # (T, E, S, D)
    pairs: Tensor  # (T, E, S, K, P): of each blueprint at each slot


class FactoredRecurrentActorCritic(nn.Module):
    """Computes pi(op, slot, blueprint, blend, tempo, target | history) as a product over heads, and the value V of the state.

    A head is conditioned on the op and the slot that were chosen before it. Scores that depend on the slot are computed from
    the encoding of that slot with shared weights, so permuting slots permutes their probabilities. A blueprint at a slot is
    encoded from its cost and its sensors there with shared weights; its score reads that, and the slot reads the largest of
    each column, so that the menu can be permuted as well. The embedding of a blueprint holds what its numbers do not tell; one
    that the vocabulary lacks has the mean of those that it knows.
    """

    value_mean: Tensor
    value_scale: Tensor

    def __init__(
        self,
        env: int,
        slot: int,
        blueprints: int,
        tempos: int,
        targets: int,
        packages: int = 0,
        hidden: int = 96,
        code: int = 48,
    ) -> None:
        """env, slot: columns of `Batch.env` and `Batch.slot`. blueprints, packages: of the vocabulary.

        tempos, targets: choices of these heads. hidden: units of the LSTM. code: width of the encoding of a slot.
        """
        super().__init__()
        self.blueprints, self.hidden = blueprints, hidden
        self.blueprint = nn.Embedding(blueprints + 1 + packages, EMBEDDING)
        self.op = nn.Embedding(len(Op), EMBEDDING)
        self.pair = nn.Sequential(nn.Linear(1 + 2 * len(PROSPECTS) + EMBEDDING, PAIR), nn.SiLU())
        reads = slot + EMBEDDING + PAIR
        self.encoder = nn.Sequential(nn.Linear(reads, 64), nn.SiLU(), nn.Linear(64, code), nn.SiLU())
        self.pooled = nn.Sequential(nn.Linear(env + 2 * code, hidden), nn.SiLU())
        self.lstm = nn.LSTM(hidden, hidden)
        here = hidden + code
        self.op_head = _head(hidden, 64, len(Op))
        self.slot_head = _head(here + EMBEDDING, 64, 1)
        self.blueprint_head = _head(here + PAIR, 64, 1)
        self.blend_head = _head(here, 32, len(Blend))
        self.tempo_head = _head(here + EMBEDDING, 32, tempos)
        self.target_head = _head(here + EMBEDDING, 32, targets)
        self.value_head = _head(hidden, 64, 1)
        self.register_buffer("value_mean", torch.zeros(()))  # moments of the return; V is in units of the return
        self.register_buffer("value_scale", torch.ones(()))

    def initial(self, envs: int) -> Hidden:
        """Return the state at the start of a sequence: zeros."""
        zeros = torch.zeros(envs, self.hidden, device=self.value_scale.device)
        return zeros, zeros

    def forward(self, batch: Batch, hidden: Hidden, starts: Tensor | None = None) -> tuple[Encoded, Tensor, Hidden]:
        """Return encodings, values (T, E) and the state after the last step.

        starts: (T, E) bool, steps at which a new sequence begins. The state of the row is set to zeros before such a step. None
        stands for no such step.
        """
        names = torch.cat([self.blueprint.weight, self.blueprint.weight[: self.blueprints].mean(0, keepdim=True)])
        menu = names[batch.menu].expand(*batch.cost.shape, -1)
        pairs = self.pair(torch.cat([batch.cost.unsqueeze(-1), batch.prospects, menu], -1))
        code = self.encoder(torch.cat([batch.slot, names[batch.blueprint], pairs.amax(3)], -1))
        pooled = torch.cat([batch.env, code.mean(2), code.amax(2)], -1)
        x, state = self.pooled(pooled), (hidden[0].unsqueeze(0), hidden[1].unsqueeze(0))
        # The LSTM runs in one call for each range of steps within which no sequence begins.
        cuts = [] if starts is None else [t for t in starts.any(1).cpu().nonzero()[:, 0].tolist() if t > 0]
        parts = []
        for begin, end in zip([0, *cuts], [*cuts, len(x)], strict=True):
            if starts is not None:
                keep = (~starts[begin]).to(x.dtype)[None, :, None]
                state = (state[0] * keep, state[1] * keep)
            part, state = self.lstm(x[begin:end], state)
            parts.append(part)
        trunk = torch.cat(parts)
        value = self.value_head(trunk).squeeze(-1) * self.value_scale + self.value_mean
        return Encoded(trunk, code, pairs), value, (state[0][0], state[1][0])

    def logits(self, head: Head, encoded: Encoded, op: Tensor, slot: Tensor) -> Tensor:
        """Return logits (T, E, choices) of a head, given the choices before it. op, slot: (T, E) int64.

        The op head reads neither, and the slot head does not read `slot`.
        """
        trunk, slots = encoded.trunk, encoded.slots
        if head is Head.OP:
            return self.op_head(trunk)
        chosen_op = self.op(op)
        if head is Head.SLOT:
            shared = torch.cat([trunk, chosen_op], -1).unsqueeze(2).expand(-1, -1, slots.shape[2], -1)
            return self.slot_head(torch.cat([shared, slots], -1)).squeeze(-1)
        here = torch.cat([trunk, _at(slots, slot)], -1)
        match head:
            case Head.BLUEPRINT:
                pairs = _at(encoded.pairs.flatten(3), slot).unflatten(-1, encoded.pairs.shape[3:])
                rows = torch.cat([here.unsqueeze(2).expand(*pairs.shape[:-1], -1), pairs], -1)
                return self.blueprint_head(rows).squeeze(-1)
            case Head.BLEND:
                return self.blend_head(here)
            case Head.TEMPO:
                return self.tempo_head(torch.cat([here, chosen_op], -1))
        return self.target_head(torch.cat([here, chosen_op], -1))

    @torch.no_grad()
    def bias_ops(self, biases: Mapping[Op, float]) -> None:
        """Add to the logits of operations in every state."""
        last = self.op_head[-1]
        assert isinstance(last, nn.Linear)
        for op, bias in biases.items():
            last.bias[op] += bias

    @torch.no_grad()
    def rescale(self, mean: Tensor, scale: Tensor) -> None:
        """Change the moments of the return and keep every V(s).

        van Hasselt et al., "Learning values across many orders of magnitude", 2016, equation 9 (Pop-Art).
        """
        last = self.value_head[-1]
        assert isinstance(last, nn.Linear)
        mean, scale = mean.to(self.value_mean.device), scale.to(self.value_scale.device)
        last.weight.mul_(self.value_scale / scale)
        last.bias.copy_((last.bias * self.value_scale + self.value_mean - mean) / scale)
        self.value_mean.copy_(mean)
        self.value_scale.copy_(scale)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a policy runs, without TF32 in the LSTM of cuDNN.

    The error of TF32, 1e-3, would differ between the step of a decision and the sequence from which it is learnt.
    """
    if device.type != "cuda":
        return nullcontext()
    cudnn = torch.backends.cudnn
    return cudnn.flags(enabled=True, benchmark=cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=False)


def _head(reads: int, units: int, writes: int) -> nn.Sequential:
    """Return an MLP with one hidden layer. The last weights are small, so a new policy is almost uniform and a new V almost 0."""
    last = nn.Linear(units, writes)
    nn.init.orthogonal_(last.weight, 0.01)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(reads, units), nn.SiLU(), last)


def _at(values: Tensor, slot: Tensor) -> Tensor:
    """Map values (T, E, S, F), slot (T, E) -> the values of the slot (T, E, F)."""
    index = slot[..., None, None].expand(*slot.shape, 1, values.shape[-1])
    return values.gather(2, index).squeeze(2)


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
    """Compute the probability of every choice, (..., C), exactly 0 where it is not valid.

        p(c) = (1 - x) softmax(logits)_c + x / n_valid

    This mixes the network's distribution with the uniform distribution over the valid choices; x is the exploration of the head.
    The rollout stores the probability of the mixture, and training differentiates it, so the ratio of PPO is that of the
    distribution from which the decision was sampled. The exploration of the op head is smaller than that of the others, because
    an op is chosen at every step: with a tenth of random operations no seed survives twenty steps.

    logits, valid: (..., C), of which one choice must be valid. exploration: one number for all, or a float64 tensor (..., 1).
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
