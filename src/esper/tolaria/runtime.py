"""The device: which one, how it is read, and where the time of a step goes."""

import os
import re
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.errors import InputError, OutOfMemory, is_out_of_memory, raised_in_user_code, requested_memory


def resolve_device(text: str) -> torch.device:
    """'auto', 'cpu', 'cuda' or 'cuda:i' as a device. Raises InputError if that GPU is not there."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch("cpu|cuda(:(0|[1-9][0-9]{0,5}))?", text):
        raise InputError(f"device {text[:60]!r} is no device; give auto, cpu, cuda or cuda:i")
    name, _, index = text.partition(":")
    if name == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= there:  # before torch reads it, to which 300 is 44
            raise InputError(
                f"device {text!r} was asked for, but torch sees {there} CUDA devices; "
                "use cpu or auto (--device, or the config key device)"
            )
    return torch.device(text)


WORKSPACE, FIXED = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""What cuBLAS reads when CUDA begins, and its values under which its products are the same in every run."""


def use_deterministic_kernels(device: torch.device) -> None:
    """Have torch take kernels that give the same bits in every run, in this process from now on, and raise where it has none.

    Raises InputError if a CUDA that has begun already did so without a fixed workspace, which cuBLAS reads once.
    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    if device.type == "cuda" and os.environ.get(WORKSPACE) not in FIXED:
        if torch.cuda.is_initialized():
            raise InputError(
                f"deterministic was asked for behind the start of CUDA; set {WORKSPACE}={FIXED[0]} in the environment, or make "
                "the engine before anything else uses the GPU"
            )
        os.environ[WORKSPACE] = FIXED[0]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads what was not written
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def available_memory(device: torch.device) -> int:
    """Bytes that can be had on a device now, under what limits the process; of a CPU that does not say so, all there are."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    page, said, own = os.sysconf("SC_PAGE_SIZE"), Path("/proc/meminfo"), Path("/proc/self/statm")
    free = os.sysconf("SC_PHYS_PAGES") * page
    if said.exists():
        lines = [line.split() for line in said.read_text().splitlines()]
        free = next((int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:"), free)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and own.exists():
        free = min(free, max(limit - int(own.read_text().split()[0]) * page, 0))
    return free


def read_packet(parts: Sequence[Tensor]) -> list[NDArray[np.float64]]:
    """The one read of a step: device tensors of any shape, packed, copied once, and given back as float64 arrays.

    On CUDA the copy goes to pinned memory, and an event is waited for rather than the device.
    """
    packed = torch.cat([part.detach().reshape(-1).to(torch.float64) for part in parts])
    if packed.is_cuda:
        target = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        target.copy_(packed, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        packed = target
    flat: NDArray[np.float64] = packed.numpy()
    ends = np.cumsum([part.numel() for part in parts])
    return [piece.reshape(part.shape) for piece, part in zip(np.split(flat, ends[:-1]), parts, strict=True)]


def hold_freed_memory() -> None:
    """Let the C library keep freed memory of up to 32 MiB a block instead of handing it back to the system.

    A pass over maps allocates megabytes and frees them at its end, and every page that comes back from the system costs a
    fault and a zeroing, a third of a small network's training time. glibc raises its threshold to the size of the largest
    mapped block that was freed, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD); where there is another C library, this does
    nothing.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


LOWER = {
    "apply": "envs or lifecycle.max_seeds",
    "train": "envs, data.batch_size or lifecycle.max_seeds",
    "probe": "envs, lifecycle.max_seeds or probe.shapley_samples",
}
"""What a phase's need for memory grows with, by phase."""


class PhaseTimer:
    """Seconds of the process by phase of a step; on CUDA, where launches return early, the device works on behind them."""

    def __init__(self, device: torch.device, population: str = "") -> None:
        """`population` is what stands in memory, in words, for where that runs out."""
        self.seconds: dict[str, float] = {}
        self._device, self._population = device, population

    @contextmanager
    def memory(self, where: str, lower: str = "envs", *, users: bool = True) -> Iterator[None]:
        """Raise OutOfMemory, with the place, the numbers and what to lower, where memory runs out in a block.

        Without `users`, what a controller or other code of the user's raises stays what it is.
        """
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if (
                isinstance(error, OutOfMemory)
                or not is_out_of_memory(error)
                or (not users and raised_in_user_code(error))
            ):
                raise
            asked, free = requested_memory(error), available_memory(self._device) / 2**20
            raise OutOfMemory(
                f"memory ran out {where}, with {self._population}: {f'{asked} were asked for, ' if asked else ''}"
                f"{free:,.0f} MiB are available; free some, or lower {lower}"
            ) from error

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of a block to a phase. OutOfMemory where memory runs out in it."""
        begin = time.perf_counter()
        try:
            with self.memory(f"in the phase {name}", LOWER.get(name, "envs")):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
