"""Small networks in stacks: one row learns one stream. N rows, M stored heads, B examples, P parameters of a row.

A row has a *trunk*, an embedding and residual blocks, and a *head*, the last linear map. A *bank* keeps heads that may return.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.kasmina.layers import Linear, Residual
from esper.kasmina.stack import Stack
from esper.leyline import keys
from esper.leyline.keys import Purpose
from esper.streams.data import Floats, Ints

Bools = NDArray[np.bool_]
TRUNK, HEAD = 0, 1
"""Indices of the two parts, which have rates and step counts of their own."""
DECAYS = (0.9, 0.99)
"""Decay of the moments. The second is shorter than usual, so that a new segment is not scaled by the gradients of the last."""


class Weights(IntEnum):
    """Names of the draws of weights, beside the update at which they are drawn. The values are part of keys."""

    FIRST = 1000
    REDRAWN = 1001
    REPLAY = 1002
    UNIT = 1003


class Normed(nn.Module):
    """Features with mean 0 and variance 1 in each example (Ba et al., "Layer Normalization", 2016), without parameters."""

    stacks = True

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return F.layer_norm(x, x.shape[-1:])


class TrunkAndHead(nn.Module):
    """An embedding, residual blocks of one hidden layer, and a linear head: (B, inputs) -> (B, classes).

    With `norm`, each block and the head read normalised features.
    """

    stacks = True

    def __init__(self, inputs: int, width: int, hidden: int, blocks: int, classes: int, norm: bool = False) -> None:
        super().__init__()
        first: list[nn.Module] = [Normed()] if norm else []
        block = (Residual(*first, Linear(width, hidden), nn.ReLU(), Linear(hidden, width)) for _ in range(blocks))
        self.trunk = nn.Sequential(Linear(inputs, width), *block, *first)
        self.head = Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs) -> (B, classes), or with stacked parameters (N, B, inputs) -> (N, B, classes)."""
        y: Tensor = self.head(self.trunk(x))
        return y


class Rows:
    """N networks, the moments of their optimizer, and their banks; every method acts on chosen rows.

    Weights are drawn with the key of a stream and the update, so a row does not depend on the other rows. At birth the second
    map of a block is 0, so that a block changes nothing. With `zero_head`, so is the head.
    """

    def __init__(
        self, module: TrunkAndHead, row_keys: Ints, *, bank: int = 0, zero_head: bool = True, members: int = 1
    ) -> None:
        """Draw one network for each key, or `members` of them, which are then rows of their own."""
        self.keys = np.repeat(row_keys, members)
        self.member = np.tile(np.arange(members), len(row_keys))
        count = len(self.keys)
        self.stack = Stack(module, count, moments=("first_moment", "second_moment"))
        self.scale = torch.cat([_scale(place.name, place.shape, zero_head) for place in self.stack.places])
        ends = {place.name: place.stop for place in self.stack.places}
        first = ends["trunk.0.bias"]
        self.trunk = next(place.start for place in self.stack.places if place.name == "head.weight")
        self.blocks = slice(first, self.trunk)
        self.parts = (slice(0, self.trunk), slice(self.trunk, self.stack.size))
        self.steps = torch.zeros(count, len(self.parts))  # (N, parts) float32, because torch's kernel takes floats
        self.bank = torch.zeros(count, bank, self.stack.size - self.trunk)
        self.stored = np.zeros((count, bank), bool)
        self.used = np.full((count, bank), -1, np.int64)  # update at which a head was stored
        self.age, self.stored_age = np.zeros(count, np.int64), np.zeros((count, bank), np.int64)  # updates in training
        self.value.copy_(self._drawn(np.arange(count), Weights.FIRST, 0))
        self._lists = [self._row_lists(part) for part in self.parts]

    @property
    def value(self) -> Tensor:
        """(N, P) parameters.

        `.data`, so that the weights of some rows may change while other rows have a graph: a row that changes has no gradient
        from the graph of its old weights.
        """
        return self.stack.columns["value"].data

    @property
    def gradient(self) -> Tensor:
        """(N, P) gradients of the parameters, to which backward adds."""
        return self.stack.columns["gradient"]

    def features(self, x: Tensor, rows: Ints | slice) -> Tensor:
        """Return what the heads read: x (n, B, D) -> (n, B, width)."""
        return self.stack(x, rows, part="trunk")

    def logits(self, features: Tensor, rows: Ints | slice) -> Tensor:
        """(n, B, width) -> (n, B, C)."""
        return self.stack(features, rows, part="head")

    @torch.no_grad()
    def stored_logits(self, features: Tensor, rows: Ints) -> Tensor:
        """Return the logits of every stored head: features (n, B, width) -> (n, M, B, C)."""
        n, examples, width = features.shape
        heads = self.bank[rows]
        classes = heads.shape[-1] // (width + 1)
        weight = heads[..., : classes * width].reshape(n, -1, width).mT  # all heads of a row as one matrix
        bias = heads[..., classes * width :].reshape(n, 1, -1)
        y = torch.baddbmm(bias, features, weight)
        return y.view(n, examples, -1, classes).movedim(2, 1)

    # Operations.

    @torch.no_grad()
    def store_and_activate(self, rows: Ints, store: Bools, slot: Ints, update: int) -> None:
        """STORE the active heads of the rows where `store` is set, and ACTIVATE the stored head `slot` where it is at least 0.

        An activated head leaves the bank. A head is stored in the slot that this frees, else in an empty slot, else in place of
        the head that was stored first.
        """
        active, ages = self.value[rows, self.trunk :].clone(), self.age[rows]
        for index, row in enumerate(rows):
            if slot[index] >= 0:
                assert self.stored[row, slot[index]]
                self.value[row, self.trunk :] = self.bank[row, slot[index]]
                self.stored[row, slot[index]] = False
                self.age[row] = self.stored_age[row, slot[index]]
            if store[index] and self.stored.shape[1]:
                age = np.where(self.stored[row], self.used[row], -1)
                place = int(slot[index]) if slot[index] >= 0 else int(age.argmin())
                self.bank[row, place] = active[index]
                self.stored[row, place], self.used[row, place] = True, update
                self.stored_age[row, place] = ages[index]

    @torch.no_grad()
    def new_head(self, rows: Ints) -> None:
        """Set heads to 0."""
        self.value[rows, self.trunk :] = 0
        self.age[rows] = 0

    @torch.no_grad()
    def redraw_blocks(self, rows: Ints, update: int) -> None:
        """RESET: draw all blocks anew, with zero output, and empty the banks, whose heads read other features."""
        self.value[rows, self.blocks] = self._drawn(rows, Weights.REDRAWN, update)[:, self.blocks]
        self.stored[rows] = False

    @torch.no_grad()
    def shrink(self, rows: Ints, keep: Floats, update: int) -> None:
        """Move all weights toward fresh ones: keep * value + (1 - keep) * drawn; 0 draws the network anew. keep (n,)."""
        factor = torch.from_numpy(keep).float()[:, None]
        drawn = self._drawn(rows, Weights.REDRAWN, update)
        self.value[rows] = factor * self.value[rows] + (1 - factor) * drawn
        self.stored[rows], self.age[rows] = False, 0

    def forget(self, rows: Ints) -> None:
        """Set moments and step counts to 0."""
        for name in ("first_moment", "second_moment"):
            self.stack.columns[name][rows] = 0
        self.steps[rows] = 0

    # Training.

    @torch.no_grad()
    def step(self, rate: Floats, decay: float, pull: Tensor | None = None) -> None:
        """AdamW with the learning rates `rate` (N, parts), one of the trunk and one of the head; gradients are then 0.

        Parts with rate 0 do not change, nor do their moments. The decay moves parameters toward 0, or toward `pull` (N, P):
        p -= rate * decay * (p - pull). Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2.
        """
        for part, lists in enumerate(self._lists):
            counts = self.steps[:, part].unbind(0)
            for lr in np.unique(rate[:, part]):
                rows = np.nonzero(rate[:, part] == lr)[0]
                if lr == 0:
                    continue
                value, gradient, first, second = ([each[row] for row in rows] for each in lists)
                self.steps[rows, part] += 1
                torch._fused_adamw_(
                    value,
                    gradient,
                    first,
                    second,
                    [],
                    [counts[row] for row in rows],
                    lr=float(lr),
                    beta1=DECAYS[0],
                    beta2=DECAYS[1],
                    weight_decay=decay if pull is None else 0.0,
                    eps=1e-8,
                    amsgrad=False,
                    maximize=False,
                )
            if pull is not None:
                own = self.value[:, self.parts[part]]
                own += (pull[:, self.parts[part]] - own) * torch.from_numpy(rate[:, part] * decay).float()[:, None]
        self.gradient.zero_()

    def _row_lists(self, part: slice) -> list[list[Tensor]]:
        """The rows of value, gradient and moments of a part as single tensors: a row's numbers do not depend on others."""
        names = ("value", "gradient", "first_moment", "second_moment")
        return [list(self.stack.columns[name][:, part].unbind(0)) for name in names]

    def _drawn(self, rows: Ints, draw: Weights, update: int) -> Tensor:
        """(n, P) fresh weights."""
        drawn = torch.empty(len(rows), self.stack.size)
        seeds = keys.key(Purpose.STREAM, self.keys[rows], draw, update, self.member[rows]) & ((1 << 63) - 1)
        for index, seed in enumerate(seeds.tolist()):
            drawn[index].normal_(generator=torch.Generator().manual_seed(seed))
        return drawn * self.scale

    # State.

    def snapshot(self) -> dict[str, Any]:
        """Return everything that later updates depend on."""
        return {
            "stack": self.stack.state(),
            "steps": self.steps,
            "bank": self.bank,
            **{name: getattr(self, name) for name in _KNOWN},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `snapshot` returned. Raises ValueError if it is of other networks."""
        self.stack.load_state(state["stack"])
        for name in ("steps", "bank"):
            getattr(self, name).copy_(state[name])
        for name in _KNOWN:
            getattr(self, name)[:] = state[name]


_KNOWN = ("stored", "used", "age", "stored_age")


def _scale(name: str, shape: torch.Size, zero_head: bool) -> Tensor:
    """(numbers,) the standard deviation of each initial weight of a parameter; 0 for biases and for the last map of a block.

    sqrt(2 / inputs) in front of a ReLU (He et al., 2015), sqrt(1 / inputs) in the embedding, half of that in the head.
    """
    scale = 0.0
    if name == "trunk.0.weight":
        scale = shape[1] ** -0.5
    elif name == "head.weight" and not zero_head:
        scale = 0.5 * shape[1] ** -0.5
    elif name.endswith((".0.weight", ".1.weight")):  # of a block: its first map, behind a normalisation or not
        scale = (2 / shape[1]) ** 0.5
    return torch.full((shape.numel(),), scale)
