"""Layers that run one network, or a stack of them at once when their parameters carry a leading row axis."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """nn.Linear over (B, ..., D); with stacked parameters (E, O, D), (E, O) over (E, B, ..., D)."""

    stacks = True

    def forward(self, x: Tensor) -> Tensor:
        """(B, ..., D) -> (B, ..., O), or (E, B, ..., D) -> (E, B, ..., O)."""
        if self.weight.dim() == 2:
            return F.linear(x, self.weight, self.bias)
        if x.dim() > 3:  # the positions of every example are further rows of one product
            y: Tensor = self(x.flatten(1, -2)).unflatten(1, x.shape[1:-1])
            return y
        if self.bias is None:
            return torch.bmm(x, self.weight.mT)
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)


class PositionMean(nn.Module):
    """The mean of a map over its positions."""

    draws = False

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C)."""
        return x.mean((-2, -1))


class Residual(nn.Sequential):
    """y = shortcut(x) + branch(x): the last module is the shortcut, the modules in front of it are the branch in order.

    The shortcut is nn.Identity where the stream keeps its shape. A `SlotSpec.inner` of k counts modules of the branch.
    """

    stacks = True

    def __init__(self, *branch: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__(*branch, shortcut if shortcut is not None else nn.Identity())
        self.stacks = all(isinstance(m, nn.Identity | nn.ReLU) or getattr(m, "stacks", False) for m in self)

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, ...), or (E, B, ...) -> (E, B, ...) where every module stacks."""
        *branch, shortcut = self
        h = x
        for module in branch:
            h = module(h)
        y: Tensor = shortcut(x) + h
        return y
