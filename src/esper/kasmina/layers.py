"""Layers that run one network, or a stack of them at once when their parameters carry a leading row axis."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """nn.Linear over (B, D); with stacked parameters (E, O, D), (E, O) over (E, B, D)."""

    stacks = True

    def forward(self, x: Tensor) -> Tensor:
        """(B, D) -> (B, O), or (E, B, D) -> (E, B, O)."""
        if self.weight.dim() == 2:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.bmm(x, self.weight.mT)
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)


class PositionMean(nn.Module):
    """The mean of a map over its positions."""

    draws = False

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C)."""
        return x.mean((-2, -1))
