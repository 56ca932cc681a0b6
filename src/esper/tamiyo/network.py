"""The policy network: one encoder for all slots, a recurrent trunk, and heads that are chosen one after the other.

T steps, E environments, S slots, K blueprints. Any number of slots runs with the same weights.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline.actions import Blend, Head, Op

Hidden = tuple[Tensor, Tensor]
"""State of the LSTM, each (E, H) float32: what it remembers, and what it puts out."""


class Shapes(NamedTuple):
    """What the network's parameters are laid out for."""

    env: int  # columns of `Inputs.env`
    slot: int  # columns of `Inputs.slot`
    blueprints: int  # names that it has an embedding for
    tempos: int
    targets: int
    hidden: int = 96  # units of the LSTM
    code: int = 48  # width of a slot's encoding
    embedding: int = 8  # width of a blueprint's


class Batch(NamedTuple):
    """`Inputs` as tensors, with blueprints by their place in the network's own vocabulary."""

    env: Tensor  # (T, E, G)
    slot: Tensor  # (T, E, S, F)
    blueprint: Tensor  # (T, E, S) int64, vocabulary index of what the slot holds; `Shapes.blueprints` when empty
    cost: Tensor  # (T, E, S, K)
    menu: Tensor  # (K,) int64, vocabulary index of every blueprint of the menu


class Encoded(NamedTuple):
    """What the heads read."""

    trunk: Tensor  # (T, E, H)
    slots: Tensor  # (T, E, S, D)
    cost: Tensor  # (T, E, S, K)
    menu: Tensor  # (K,) int64


class FactoredRecurrentActorCritic(nn.Module):
    """pi(op, slot, blueprint, blend, tempo, target | history) as a product over heads, and V(s), which sees no action.

    Each head reads the op and the slot chosen before it. A slot's score given the op, and everything that depends on the
    slot, comes from that slot's encoding through shared weights, so permuting slots permutes their probabilities.
    """

    value_mean: Tensor
    value_scale: Tensor

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.shapes = shapes
        h, d, e = shapes.hidden, shapes.code, shapes.embedding
        self.blueprint = nn.Embedding(shapes.blueprints + 1, e)
        self.op = nn.Embedding(len(Op), e)
        self.encoder = nn.Sequential(nn.Linear(shapes.slot + e, 64), nn.SiLU(), nn.Linear(64, d), nn.SiLU())
        self.pooled = nn.Sequential(nn.Linear(shapes.env + 2 * d, h), nn.SiLU())
        self.lstm = nn.LSTM(h, h)
        self.op_head = _head(h, 64, len(Op))
        self.slot_head = _head(h + d + e, 64, 1)
        self.blueprint_head = _head(h + d + e + 1, 64, 1)
        self.blend_head = _head(h + d, 32, len(Blend))
        self.tempo_head = _head(h + d + e, 32, shapes.tempos)
        self.target_head = _head(h + d + e, 32, shapes.targets)
        self.value_head = _head(h, 64, 1)
        self.register_buffer("value_mean", torch.zeros(()))  # moments of the return, in whose units V is given
        self.register_buffer("value_scale", torch.ones(()))

    def initial(self, envs: int) -> Hidden:
        """The state at the start of a sequence: zeros."""
        zeros = torch.zeros(envs, self.shapes.hidden)
        return zeros, zeros

    def forward(self, batch: Batch, hidden: Hidden, starts: Tensor | None = None) -> tuple[Encoded, Tensor, Hidden]:
        """Encodings, values (T, E) and the state after the last step.

        starts (T, E) bool: steps at which a sequence begins anew, before which the state of that row is forgotten. None
        begins none.
        """
        code = self.encoder(torch.cat([batch.slot, self.blueprint(batch.blueprint)], -1))
        pooled = torch.cat([batch.env, code.mean(2), code.amax(2)], -1)
        trunk, hidden = self._recur(self.pooled(pooled), hidden, starts)
        value = self.value_head(trunk).squeeze(-1) * self.value_scale + self.value_mean
        return Encoded(trunk, code, batch.cost, batch.menu), value, hidden

    def logits(self, head: Head, encoded: Encoded, op: Tensor, slot: Tensor) -> Tensor:
        """(T, E, choices of the head), given what was chosen before it; op, slot: (T, E) int64.

        The first two heads read no slot, the first no op.
        """
        trunk, slots = encoded.trunk, encoded.slots
        if head is Head.OP:
            return self.op_head(trunk)  # type: ignore[no-any-return]
        chosen_op = self.op(op)
        if head is Head.SLOT:
            shared = torch.cat([trunk, chosen_op], -1).unsqueeze(2).expand(-1, -1, slots.shape[2], -1)
            return self.slot_head(torch.cat([shared, slots], -1)).squeeze(-1)  # type: ignore[no-any-return]
        here = torch.cat([trunk, _at(slots, slot)], -1)
        match head:
            case Head.BLUEPRINT:
                cost, name = _at(encoded.cost, slot).unsqueeze(-1), self.blueprint(encoded.menu)
                shape = (*cost.shape[:-1], -1)
                rows = torch.cat([here.unsqueeze(2).expand(shape), name.expand(shape), cost], -1)
                return self.blueprint_head(rows).squeeze(-1)  # type: ignore[no-any-return]
            case Head.BLEND:
                return self.blend_head(here)  # type: ignore[no-any-return]
            case Head.TEMPO:
                return self.tempo_head(torch.cat([here, chosen_op], -1))  # type: ignore[no-any-return]
        return self.target_head(torch.cat([here, chosen_op], -1))  # type: ignore[no-any-return]

    @torch.no_grad()
    def rescale(self, mean: Tensor, scale: Tensor) -> None:
        """Take other moments of the return and leave every V(s) what it is.

        van Hasselt et al., "Learning values across many orders of magnitude", 2016, equation 9 (Pop-Art).
        """
        last = self.value_head[-1]
        assert isinstance(last, nn.Linear)
        last.weight.mul_(self.value_scale / scale)
        last.bias.copy_((last.bias * self.value_scale + self.value_mean - mean) / scale)
        self.value_mean.copy_(mean)
        self.value_scale.copy_(scale)

    def _recur(self, x: Tensor, hidden: Hidden, starts: Tensor | None) -> tuple[Tensor, Hidden]:
        """The LSTM over (T, E, H), cut where sequences begin anew: between two such steps it is one call."""
        state = (hidden[0].unsqueeze(0), hidden[1].unsqueeze(0))
        cuts = [] if starts is None else [t for t in starts.any(1).nonzero()[:, 0].tolist() if t > 0]
        parts = []
        for begin, end in zip([0, *cuts], [*cuts, len(x)], strict=True):
            if starts is not None:
                keep = (~starts[begin]).to(x.dtype)[None, :, None]
                state = (state[0] * keep, state[1] * keep)
            part, state = self.lstm(x[begin:end], state)
            parts.append(part)
        return torch.cat(parts), (state[0][0], state[1][0])


def _head(reads: int, units: int, writes: int) -> nn.Sequential:
    """One hidden layer; a last layer of small weights, so that a new policy is near uniform and a new value near 0."""
    last = nn.Linear(units, writes)
    nn.init.orthogonal_(last.weight, 0.01)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(reads, units), nn.SiLU(), last)


def _at(values: Tensor, slot: Tensor) -> Tensor:
    """(T, E, S, F) at a slot each, (T, E) -> (T, E, F)."""
    index = slot[..., None, None].expand(*slot.shape, 1, values.shape[-1])
    return values.gather(2, index).squeeze(2)
