"""Share one thread, the same start of every draw, and the fixtures that the tests of the library have too."""

import pytest
import torch

from collecting import pytest_collection_finish, pytest_collection_modifyitems  # noqa: F401  hooks
from commands import elsewhere, esper, script  # noqa: F401  fixtures for all
from disks import full, full_device, tmpfs  # noqa: F401  fixtures for all
from views import allowed, random_view, view  # noqa: F401  fixtures for all

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def drawn_from_zero():
    """Let every test draw its own numbers from the same start."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack for each kind of device: a millisecond
