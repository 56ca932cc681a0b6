"""The device: which one, how it is read, and where the time of a step goes."""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.errors import InputError


def resolve_device(text: str) -> torch.device:
    """'auto', 'cpu', 'cuda' or 'cuda:i' as a device. InputError where that GPU is not there."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch("cpu|cuda(:(0|[1-9][0-9]{0,5}))?", text):
        raise InputError(f"device {text[:60]!r} is no device; give auto, cpu, cuda or cuda:i")
    name, _, index = text.partition(":")
    if name == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= there:  # before torch reads it, to which 300 is 44
            raise InputError(
                f"device {text!r} was asked for, but torch sees {there} CUDA devices; use --device cpu or auto"
            )
    return torch.device(text)


def available_memory(device: torch.device) -> int:
    """Bytes that can be had on a device now; of a CPU whose system does not say so, all there are."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    said = Path("/proc/meminfo")
    if said.exists():
        lines = [line.split() for line in said.read_text().splitlines()]
        found = [int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:"]
        if found:
            return found[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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


class CUDATimer:
    """Device seconds between `start` and `stop` by CUDA events, summed when `seconds` is read, which waits for them."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """Mark the beginning on the current stream."""
        begin = torch.cuda.Event(enable_timing=True)
        begin.record()
        self._pairs.append((begin, torch.cuda.Event(enable_timing=True)))

    def stop(self) -> None:
        """Mark the end on the current stream."""
        self._pairs[-1][1].record()

    def seconds(self) -> float:
        """All intervals so far; synchronises, so ask after a run and not in a step."""
        torch.cuda.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in self._pairs)) / 1e3


class PhaseTimer:
    """Seconds by phase of a step: of the process always, and of the device on CUDA, where launches return early."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._cuda: dict[str, CUDATimer] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of a block to a phase."""
        if self._device.type == "cuda":
            self._cuda.setdefault(name, CUDATimer()).start()
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
            if name in self._cuda:
                self._cuda[name].stop()

    def device_seconds(self) -> dict[str, float]:
        """Device seconds by phase; empty on the CPU."""
        return {name: timer.seconds() for name, timer in self._cuda.items()}
