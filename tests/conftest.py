"""Share one thread, small populations, and seeds that are put into a body by hand."""

import signal
from importlib.metadata import entry_points

import pytest
import torch

from collecting import pytest_collection_finish, pytest_collection_modifyitems  # noqa: F401  hooks
from commands import elsewhere, esper  # noqa: F401  fixtures for all
from disks import full, full_device, tmpfs  # noqa: F401  fixtures for all
from esper.leyline import plugins

torch.set_num_threads(1)


def entry_points_of_others(group):
    """Leave out what an installed package adds, which is no part of the library that is tested here."""
    return [entry for entry in entry_points(group=group) if entry.dist.name != "esper-bench"]


plugins.entry_points = entry_points_of_others
plugins.plugins.cache_clear()

# Under nohup, or as the background job of a shell, these are ignored, and processes would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def drawn_from_zero():
    """Let every test draw its own numbers from the same start."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack for each kind of device: a millisecond


@pytest.fixture(autouse=True)
def kernels_as_they_were():
    """Restore, after the test, what an engine with deterministic=true sets for the whole process."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    found = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    flags = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32
    cudnn.allow_tf32 = False  # the tolerances are those of float32
    yield
    torch.use_deterministic_algorithms(found[0])
    torch.utils.deterministic.fill_uninitialized_memory = found[1]
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32 = flags
