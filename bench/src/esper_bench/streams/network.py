"""Stack small networks: one row learns one stream. N rows, M places in a bank, B examples, P parameters of a row.

A row has a *trunk*, an embedding and residual blocks, and a *head*, the last linear map. Behind each block there may be a slot
with a *seed*, a bypass. Heads and seeds are *parts*: a bank (`bank.Bank`) keeps those that may return.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.kasmina.stack.layers import Linear, Residual
from esper.kasmina.stack.rows import Stack
from esper.leyline.data import keys
from esper.leyline.data.keys import Purpose
from esper_bench.streams.bank import EVERY_PART, HEAD_PART, PartBank
from esper_bench.streams.data import Floats, Ints

Bools = NDArray[np.bool_]
TRUNK, HEAD, SEEDS = 0, 1, 2
"""Indices of what has a learning rate and a step count of its own."""
DECAYS = (0.9, 0.99)
"""Decay of the moments. The second is shorter than usual, so that a new segment is not scaled by the gradients of the last."""


class Weights(IntEnum):
    """Names the draws of weights, beside the update at which they are drawn. The values are part of keys."""

    FIRST = 1000
    REDRAWN = 1001
    REPLAY = 1002
    UNIT = 1003
    SEED = 1004


class Normed(nn.Module):
    """Normalises the features of each example to mean 0 and variance 1 (Ba et al., "Layer Normalization", 2016)."""

    stacks = True

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., D) -> (..., D)."""
        return F.layer_norm(x, x.shape[-1:])


class TrunkAndHead(nn.Module):
    """Computes an embedding, residual blocks of one hidden layer, and a linear head: (B, inputs) -> (B, classes).

    With `norm`, each block and the head read normalised features. With a `rank`, each block is followed by a seed of `rank`
    hidden units, h + up(relu(down(h))), which reads normalised features too.
    """

    stacks = True

    def __init__(
        self, inputs: int, width: int, hidden: int, blocks: int, classes: int, norm: bool = False, rank: int = 0
    ) -> None:
        super().__init__()
        self.inputs = inputs
        first: list[nn.Module] = [Normed()] if norm else []
        block = (Residual(*first, Linear(width, hidden), nn.ReLU(), Linear(hidden, width)) for _ in range(blocks))
        self.trunk = nn.Sequential(Linear(inputs, width), *block, *first)
        self.head = Linear(width, classes)
        self.seeds = nn.ModuleList(
            nn.Sequential(*first, Linear(width, rank), nn.ReLU(), Linear(rank, width, bias=False))
            for _ in range(blocks if rank else 0)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, inputs) -> (B, classes), or with stacked parameters (N, B, inputs) -> (N, B, classes)."""
        h = x
        for index, layer in enumerate(self.trunk):
            h = layer(h)
            if 0 < index <= len(self.seeds):
                h = h + self.seeds[index - 1](h)
        y: Tensor = self.head(h)
        return y


class Rows:
    """Holds N networks, the moments of their optimizer, and their banks; every method acts on chosen rows.

    Weights are drawn with the key of a stream and the update, so a row does not depend on the other rows. At birth the second
    map of a block or a seed is 0, so that it changes nothing, and so is the head.
    """

    def __init__(
        self, module: TrunkAndHead, row_keys: Ints, *, bank: int = 0, holds: int = HEAD_PART, members: int = 1
    ) -> None:
        """Draw one network for each key, or `members` of them, which are then rows of their own.

        The bank has `bank` places for the parts `holds`, a sum of HEAD_PART and `slot_part`: the head, all seeds, or both.
        """
        self.keys = np.repeat(row_keys, members)
        self.member = np.tile(np.arange(members), len(row_keys))
        count = len(self.keys)
        self.stack = Stack(module, count, moments=("first_moment", "second_moment"))
        self.scale = torch.cat([_scale(place.name, place.shape) for place in self.stack.places])
        ends = {place.name: place.stop for place in self.stack.places}
        first = ends["trunk.0.bias"]
        self.trunk = next(place.start for place in self.stack.places if place.name == "head.weight")
        self.blocks = slice(first, self.trunk)
        self.norm, self.classes = len(module.trunk) > 1 + len(module.seeds), module.head.out_features
        self.slots, stop = len(module.seeds), ends["head.bias"]
        self.blocks_and_seeds = [self.blocks, slice(stop, self.stack.size)]
        parts = (slice(0, self.trunk), slice(self.trunk, stop), slice(stop, self.stack.size))
        self.parts = parts if self.slots else parts[:2]
        self.steps = torch.zeros(count, len(self.parts))  # (N, parts) float32, because torch's kernel takes floats
        self.bank = PartBank(module, self.stack, bank, holds)
        self.age = np.zeros(count, np.int64)  # updates for which the active parts have trained
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
        """Return what the heads read: x (n, B, D) -> (n, B, width), with all seeds at their doses."""
        if not self.slots:
            return self.stack(x, rows, part="trunk")
        every = np.arange(len(self.keys))[rows]
        dose = self.bank.dose[every, -1, :, None, None]  # (n, M + 1, 1, 1)
        acting = [np.nonzero(own)[0] for own in dose[:, :-1, 0, 0].numpy().T]
        h = self.stack(x, rows, part="trunk.0")
        for slot in range(self.slots):
            h = self.stack(h, rows, part=f"trunk.{slot + 1}")
            delta = dose[:, -1] * self.stack(h, rows, part=f"seeds.{slot}")
            for place, own in enumerate(acting):
                if len(own):
                    index = torch.from_numpy(own)
                    stored = self.bank.seed(h.index_select(0, index), every[own], place, slot)
                    delta = delta.index_add(0, index, dose[own, place] * stored)
            h = h + delta
        last = f"trunk.{self.slots + 1}"
        return self.stack(h, rows, part=last) if self.norm else h

    def logits(self, features: Tensor, rows: Ints | slice) -> Tensor:
        """Return the logits of features: (n, B, width) -> (n, B, C)."""
        return self.stack(features, rows, part="head")

    @torch.no_grad()
    def stored_logits(self, x: Tensor, features: Tensor, rows: Ints) -> Tensor:
        """Return the logits if the parts of each place were active: (n, M, B, C), 0 where a place holds nothing.

        x is (n, B, D); `features` (n, B, width), which only heads without seeds read, are those of the rows.
        """
        if not self.slots:
            return self.bank.head_logits(features, rows)
        places = self.bank.held.shape[1]
        found = torch.zeros(len(rows), places, x.shape[1], self.classes)
        value, dose, held = self.value[rows], self.bank.dose[rows], self.bank.held[rows]
        for place in range(places):
            index = np.nonzero(held[:, place])[0]
            if not len(index):
                continue
            own = rows[index]
            self.bank.show(self.value, own, place)
            found[index, place] = self.logits(self.features(x[index], own), own)
            self.value[own], self.bank.dose[own] = value[index], dose[index]
        return found

    # Operations.

    @torch.no_grad()
    def store_and_activate(self, rows: Ints, store: Bools, place: Ints, update: int, parts: Ints | None = None) -> None:
        """STORE the active parts of the rows where `store` is set, and ACTIVATE those of `place` where it is at least 0.

        Activated parts leave the bank. Parts are stored in the place that this frees, else in an empty one, else in that of the
        parts that were stored first, which are lost. `parts` (n,) are those that move.
        """
        chosen = np.full(len(rows), EVERY_PART) if parts is None else parts
        for index, row in enumerate(rows):
            self.age[row] = self.bank.move(
                self.value[row],
                row,
                bool(store[index]),
                int(place[index]),
                int(chosen[index]),
                update,
                int(self.age[row]),
            )

    @torch.no_grad()
    def new(self, rows: Ints, update: int, parts: Ints | None = None) -> None:
        """Set heads to 0 and draw seeds with zero output: NEW. No stored seed acts beside them."""
        chosen = np.full(len(rows), EVERY_PART) if parts is None else parts
        for bit, region in self.bank.regions:
            own = rows[(chosen & bit) != 0]
            if len(own):
                self.value[own, region] = 0 if bit == HEAD_PART else self._drawn(own, Weights.SEED, update)[:, region]
        self.age[rows] = 0
        self.bank.part_from_others(rows)

    @torch.no_grad()
    def redraw_blocks(self, rows: Ints, update: int) -> None:
        """Draw all blocks and seeds anew, with zero output, and empty the banks, whose parts read other features: RESET."""
        drawn = self._drawn(rows, Weights.REDRAWN, update)
        for region in self.blocks_and_seeds:
            self.value[rows, region] = drawn[:, region]
        self.bank.empty(rows)

    @torch.no_grad()
    def shrink(self, rows: Ints, keep: Floats, update: int) -> None:
        """Move all weights toward fresh ones: keep * value + (1 - keep) * drawn; 0 draws the network anew. keep (n,)."""
        factor = torch.from_numpy(keep).float()[:, None]
        drawn = self._drawn(rows, Weights.REDRAWN, update)
        self.value[rows] = factor * self.value[rows] + (1 - factor) * drawn
        self.age[rows] = 0
        self.bank.empty(rows)

    def forget(self, rows: Ints) -> None:
        """Set moments and step counts to 0."""
        for name in ("first_moment", "second_moment"):
            self.stack.columns[name][rows] = 0
        self.steps[rows] = 0

    # Training.

    @torch.no_grad()
    def step(self, rate: Floats, decay: float, pull: Tensor | None = None) -> None:
        """Update by AdamW with the learning rates `rate` (N, parts) of the trunk, the head and the seeds; gradients are then 0.

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
        """List the rows of value, gradient and moments of a part as single tensors: a row's numbers do not depend on others."""
        names = ("value", "gradient", "first_moment", "second_moment")
        return [list(self.stack.columns[name][:, part].unbind(0)) for name in names]

    def _drawn(self, rows: Ints, draw: Weights, update: int) -> Tensor:
        """Draw (n, P) fresh weights."""
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
            "age": self.age,
            "bank": self.bank.snapshot(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `snapshot` returned. Raises ValueError if it is of other networks."""
        self.stack.load_state(state["stack"])
        self.steps.copy_(state["steps"])
        self.age[:] = state["age"]
        self.bank.load(state["bank"])


def _scale(name: str, shape: torch.Size) -> Tensor:
    """Return (numbers,) the standard deviation of each initial weight of a parameter.

    It is 0 for biases, the head, and the last map of a block or a seed. In front of a ReLU it is sqrt(2 / inputs) (He et al.,
    2015), in the embedding sqrt(1 / inputs).
    """
    scale = 0.0
    if name == "trunk.0.weight":
        scale = shape[1] ** -0.5
    elif name.endswith((".0.weight", ".1.weight")):  # the first map of a block or a seed, behind a normalisation or not
        scale = (2 / shape[1]) ** 0.5
    return torch.full((shape.numel(),), scale)
