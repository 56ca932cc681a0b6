"""Objectives: what a task minimises and what it reports. E rows, B examples, C outputs.

A row's figures are computed from that row alone, by operations whose order does not depend on E.
"""

from dataclasses import dataclass, field

from torch import Tensor

from esper.leyline.task import Objective


@dataclass(frozen=True)
class Classification(Objective):
    """Cross-entropy [nats] to minimise, accuracy to report."""

    outputs: int  # C classes
    metric: str = field(default="accuracy", init=False)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """ln sum_c exp(z_c) - z_target,   z = output - max.   output (E, B, C), target (E, B) int64 -> (E, B) [nats].

        What `F.cross_entropy` computes, to the last few bits. On a CPU its kernel goes through so few classes one example
        at a time, which takes four times as long and made a fifth of a training step.
        """
        assert output.shape == (*target.shape, self.outputs), (output.shape, target.shape, self.outputs)
        z = output - output.detach().amax(-1, keepdim=True)
        return z.exp().sum(-1).log() - z.gather(-1, target.unsqueeze(-1)).squeeze(-1)

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """1 where the largest output is the label's, else 0.   output (E, B, C), target (E, B) int64 -> (E, B)."""
        assert output.shape == (*target.shape, self.outputs), (output.shape, target.shape, self.outputs)
        return (output.argmax(-1) == target).to(output.dtype)


@dataclass(frozen=True)
class Regression(Objective):
    """Squared error to minimise, R2 to report; both are means over the C targets."""

    outputs: int  # C targets
    metric: str = field(default="r2", init=False)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """mean_c (output - target)^2.   output (E, B, C), target (E, B, C), or (E, B) where C = 1 -> (E, B)."""
        return (output - self._by_output(output, target)).square().mean(-1)

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """mean_c 1 - (output - target)^2 / variance.   Shapes as for `loss`.

        The variance is the mean squared deviation of a row's own targets over B, so only over a whole split is the mean
        R2, averaged over targets (scikit-learn's `uniform_average`). A split whose targets do not vary has no R2;
        `splits.split` refuses it.
        """
        target = self._by_output(output, target)
        variance = (target - target.mean(1, keepdim=True)).square().mean(1, keepdim=True)
        return (1 - (output - target).square() / variance).mean(-1)

    def _by_output(self, output: Tensor, target: Tensor) -> Tensor:
        if target.dim() == output.dim() - 1:
            target = target.unsqueeze(-1)
        assert output.shape == target.shape, (output.shape, target.shape)
        assert output.shape[-1] == self.outputs, (output.shape, self.outputs)
        return target
