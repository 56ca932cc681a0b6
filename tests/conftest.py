"""Shared pieces: one thread, small populations, and seeds put into a body by hand."""

import pytest
import torch

from disks import full, tmpfs  # noqa: F401  fixtures for all

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def drawn_from_zero():
    """Every test draws its own numbers from the same start."""
    torch.manual_seed(0)
