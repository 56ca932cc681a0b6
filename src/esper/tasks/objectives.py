"""The built-in objectives: the loss that training minimises, and the metric. E rows, B examples, C outputs; ... are positions.

Loss and score of a row are computed from that row alone, by operations whose order does not depend on E.
"""

import math
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from esper.leyline.data.task import Objective

MANY = 64
"""Classes from which on `F.cross_entropy` is faster on a CPU than the formula written out: 1.7 times at 64 and at 256."""


@dataclass(frozen=True)
class Classification(Objective):
    """The objective of a classification: the loss is the cross-entropy [nats], the metric the accuracy.

    Both are means over the positions of an example.
    """

    outputs: int  # C classes
    metric: str = field(default="accuracy", init=False)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """ln sum_c exp(z_c) - z_target,   z = output - max.   output (E, B, ..., C), target (E, B, ...) int64 -> (E, B) [nats].

        `F.cross_entropy` computes it for `MANY` classes and more. For few classes on a CPU it takes twice as long as the formula
        that is written out here, and was a fifth of a training step.
        """
        return by_example(self.losses(output, target))

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of each position: output (E, B, ..., C), target (E, B, ...) int64 -> (E, B, ...) [nats]."""
        assert output.shape == (*target.shape, self.outputs), (output.shape, target.shape, self.outputs)
        if self.outputs >= MANY:
            return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)
        z = output - output.detach().amax(-1, keepdim=True)
        return z.exp().sum(-1).log() - z.gather(-1, target.unsqueeze(-1)).squeeze(-1)

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """1 where the largest output is the label's, else 0.   output (E, B, ..., C), target (E, B, ...) int64 -> (E, B)."""
        assert output.shape == (*target.shape, self.outputs), (output.shape, target.shape, self.outputs)
        return by_example((output.argmax(-1) == target).to(output.dtype))


@dataclass(frozen=True)
class NextToken(Classification):
    """The objective of a model of tokens: the loss is the cross-entropy [nats], the metric minus the bits that a token takes."""

    metric: str = field(default="neg_bits_per_token", init=False)

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """log2 of the probability of the token, as a mean over positions.   Shapes as for `loss`."""
        return -self.loss(output, target) / math.log(2)


@dataclass(frozen=True)
class NextByte(NextToken):
    """`NextToken` where tokens are bytes, so that the metric compares with that of other models of text."""

    metric: str = field(default="neg_bits_per_byte", init=False)


@dataclass(frozen=True)
class Regression(Objective):
    """The objective of a regression: the loss is the squared error, the metric R2; both are means over the targets."""

    outputs: int  # C targets along the last axis; 1 where an example has a single one
    metric: str = field(default="r2", init=False)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """mean (output - target)^2.   output (E, B, ...), target of that shape, or (E, B) for outputs (E, B, 1) -> (E, B)."""
        return by_example((output - self._by_output(output, target)).square())

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """mean 1 - (output - target)^2 / variance.   Shapes as for `loss`.

        The variance is the mean squared deviation of a row's targets over B. The mean over B of the score of a whole split is
        therefore R2, averaged over targets (scikit-learn's `uniform_average`). A split whose targets are constant has no R2;
        `splits.split` raises InputError for it.
        """
        target = self._by_output(output, target)
        variance = (target - target.mean(1, keepdim=True)).square().mean(1, keepdim=True)
        return by_example(1 - (output - target).square() / variance)

    def _by_output(self, output: Tensor, target: Tensor) -> Tensor:
        if target.dim() == 2 and output.dim() == 3:
            target = target.unsqueeze(-1)
        assert output.shape == target.shape, (output.shape, target.shape)
        assert output.dim() == 2 or output.shape[-1] == self.outputs, (output.shape, self.outputs)
        return target


def by_example(values: Tensor) -> Tensor:
    """(E, B, ...) -> (E, B), the mean over the positions and targets of an example."""
    if values.dim() == 3:
        return values.mean(-1)
    return values.flatten(2).mean(-1) if values.dim() > 3 else values
