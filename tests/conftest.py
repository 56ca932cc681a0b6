"""Shared pieces: one thread, small populations, and seeds put into a body by hand."""

import signal

import pytest
import torch

from commands import elsewhere, esper  # noqa: F401  fixtures for all
from disks import full, full_device, tmpfs  # noqa: F401  fixtures for all

torch.set_num_threads(1)

# Under nohup, or as the background job of a shell, these are ignored, and processes would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def drawn_from_zero():
    """Every test draws its own numbers from the same start."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def kernels_as_they_were():
    """What an engine with deterministic=true sets holds for the process; here it ends with the test."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    found = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    flags = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32
    yield
    torch.use_deterministic_algorithms(found[0])
    torch.utils.deterministic.fill_uninitialized_memory = found[1]
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32 = flags
