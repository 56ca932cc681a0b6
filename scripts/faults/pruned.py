"""Make a small network on digits with most weights of a layer pruned, which the campaign of kills heals."""

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn.utils import prune


def images() -> tuple[Tensor, Tensor]:
    """Return the second half of the digits."""
    digits = load_digits()
    return torch.tensor(digits.data / 16, dtype=torch.float32)[898:], torch.tensor(digits.target)[898:]


def network() -> nn.Module:
    """Make a network without training, pruned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 10))
    prune.l1_unstructured(model[2], "weight", amount=0.8)  # type: ignore[no-untyped-call]
    return model
