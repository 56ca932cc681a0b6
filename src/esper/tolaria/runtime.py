"""Choose the device and the types of its products, read it, and measure the time of each phase of a step."""

import math
import os
import re
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.leyline.config.tree import Config
from esper.leyline.messages import InputError, OutOfMemory, is_out_of_memory, raised_in_user_code, requested_memory


def resolve_device(text: str) -> torch.device:
    """Return 'auto', 'cpu', 'cuda' or 'cuda:i' as a device. Raises InputError if that GPU does not exist."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch("cpu|cuda(:(0|[1-9][0-9]{0,5}))?", text):
        raise InputError(f"device {text[:60]!r} is not a device; give auto, cpu, cuda or cuda:i")
    name, _, index = text.partition(":")
    if name == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= there:  # checked before torch, which reads index 300 as 44
            raise InputError(
                f"device {text!r} was asked for, but torch sees {there} CUDA devices; "
                "use cpu or auto (--device, or the config key device)"
            )
    return torch.device(text)


def resolve_amp(amp: str, device: torch.device, parameters: torch.dtype) -> torch.dtype | None:
    """Return the type in which the products of a training pass are computed; None leaves them in that of the parameters.

    amp: off, bf16, fp16 or auto, which takes bf16 if the device multiplies it natively. parameters: the dtype of the hosts.
    Raises InputError if the device or the hosts do not allow the type that is asked for.
    """
    native = multiplies_bfloat16(device)
    if amp == "off" or (amp == "auto" and not (native and parameters == torch.float32)):
        return None
    if parameters != torch.float32:
        raise InputError(f"amp is {amp}, which needs hosts in float32, but these are in {parameters}; set amp to off")
    if amp == "fp16":
        return torch.float16
    if not native:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this processor"
        raise InputError(f"amp is {amp}, but {name} does not multiply bfloat16 natively; set amp to off, fp16 or auto")
    return torch.bfloat16


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether a device has instructions that multiply bfloat16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def check_modules(products: torch.dtype | None, device: torch.device, modules: Iterable[nn.Module]) -> None:
    """Raise InputError if torch cannot run one of the modules with products of a type: an LSTM in float16 on most CPUs."""
    if products != torch.float16 or device.type != "cpu":
        return
    if any(isinstance(part, nn.LSTM) for module in modules for part in module.modules()):
        raise InputError(
            "amp is fp16, but torch has no LSTM in float16 whose rows do not depend on each other on a CPU; set amp to off, or "
            "to bf16 if the processor multiplies it natively"
        )


def products_in(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass whose products are in `dtype`, as `torch.autocast` chooses; None changes nothing."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


@contextmanager
def same_products(dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """Let products in `dtype`, of forward and backward passes, have the same bits for any number of rows.

    A processor with instructions for float16 multiplies it by oneDNN, which chooses other kernels for other numbers of rows.
    Without it, torch computes float16 by way of float32, as on other processors.
    """
    before, apart = torch._C._get_mkldnn_enabled(), dtype == torch.float16 and device.type == "cpu"
    torch._C._set_mkldnn_enabled(before and not apart)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


WORKSPACE, FIXED = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""The variable that cuBLAS reads when CUDA starts, and the values with which its products are the same in every run."""


def use_deterministic_kernels(device: torch.device) -> None:
    """Make torch use kernels that give the same bits in every run, in this process from now on, and raise if there is none.

    Raises InputError if CUDA was started without a fixed workspace, which cuBLAS reads only once.
    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    if device.type == "cuda" and os.environ.get(WORKSPACE) not in FIXED:
        if torch.cuda.is_initialized():
            raise InputError(
                f"deterministic was asked for after CUDA was started; set {WORKSPACE}={FIXED[0]} in the environment, or make "
                "the engine before anything else uses the GPU"
            )
        os.environ[WORKSPACE] = FIXED[0]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads what was not written
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def describe_gpu(device: torch.device, config: Config) -> dict[str, str]:
    """Return driver, CUDA version and capability of a GPU, and `amp` and `compile` of the config; empty for a CPU."""
    if device.type != "cuda":
        return {}
    major, minor = torch.cuda.get_device_capability(device)
    said = Path("/proc/driver/nvidia/version")
    driver = driver_version(said.read_text()) if said.exists() else None
    return {
        **({} if driver is None else {"driver": driver}),
        "cuda": str(torch.version.cuda),
        "capability": f"{major}.{minor}",
        "amp": config.amp,
        "compile": config.compile,
    }


def driver_version(text: str) -> str | None:
    """Return the version of the driver in the content of /proc/driver/nvidia/version; None if it is not there."""
    found = re.search(r"Kernel Module.*?\s(\d[\d.]*)\s", text)
    return None if found is None else found[1]


def available_memory(device: torch.device) -> int:
    """Return the bytes that the process can still allocate; all of a machine's memory if its system does not say."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for what comes next
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    page, said, own = os.sysconf("SC_PAGE_SIZE"), Path("/proc/meminfo"), Path("/proc/self/statm")
    free = os.sysconf("SC_PHYS_PAGES") * page
    if said.exists():
        lines = [line.split() for line in said.read_text().splitlines()]
        free = next((int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:"), free)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and own.exists():
        free = min(free, max(limit - int(own.read_text().split()[0]) * page, 0))
    return free


def read_packet(tree: Any) -> Any:
    """Copy the device tensors of a tree to the host in one packed transfer; return the tree with float64 arrays for them.

    On CUDA the copy goes to pinned memory, and the process waits for an event and not for the whole device.
    """
    leaves, structure = pytree.tree_flatten(tree)
    parts = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    packed = torch.cat([part.detach().reshape(-1).to(torch.float64) for part in parts])
    if packed.is_cuda:
        target = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        target.copy_(packed, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(packed.device))  # which need not be the device that torch uses by default
        done.synchronize()
        packed = target
    pieces = iter(np.split(packed.numpy(), np.cumsum([part.numel() for part in parts])))
    read = [next(pieces).reshape(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(read, structure)


def hold_freed_memory() -> None:
    """Make the C library keep freed blocks of up to 32 MiB instead of returning them to the system.

    A pass over maps allocates megabytes and frees them at its end. Each page that the system hands out again costs a page fault
    and is zeroed, which takes a third of a small network's training time. glibc raises its threshold to the size of the largest
    mapped block that was freed, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD). With another C library this does nothing.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


LOWER = {
    "apply": "envs or lifecycle.max_seeds",
    "train": "envs, data.batch_size, data.microbatch or lifecycle.max_seeds",
    "probe": "envs, lifecycle.max_seeds or probe.shapley_samples",
}
"""The settings that the memory of a phase grows with, by phase."""


class CpuMoment:
    """Marks a moment in the work of the process, which is past when it is made, as `torch.cuda.Event` does one of a GPU."""

    def __init__(self) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: "CpuMoment") -> float:
        return (end_event.time - self.time) * 1e3


class PhaseTimer:
    """Measures the seconds of each phase: on a CPU those of the process, on CUDA those of the device.

    On CUDA the device may still be working on a phase when the process has ended it. Its begin and end are therefore events in
    the stream of the device. They are read when the device has passed them, without waiting: at the latest after the packet of
    the next step, for which the process waits anyhow. So `seconds` may lack the last phases of a step until then.
    """

    def __init__(self, device: torch.device, population: str = "") -> None:
        """`population` describes in words what is in memory, for the message of OutOfMemory."""
        self._seconds: dict[str, float] = {}
        # what the device has still to come to: a moment, and the seconds to add then, by phase
        self._open = deque[tuple[Any, Callable[[], dict[str, float]]]]()
        self._device, self._population = device, population

    @property
    def seconds(self) -> dict[str, float]:
        """By name, the seconds of all phases that the device has passed."""
        self._read()
        return self._seconds

    def _read(self) -> None:
        while self._open and self._open[0][0].query():  # in the order of the stream
            for name, seconds in self._open.popleft()[1]().items():
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def moment(self) -> Any:
        """Return the end of the work that the device was given until now."""
        if self._device.type != "cuda":
            return CpuMoment()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def memory(self, where: str, lower: str = "envs", *, users: bool = True) -> Iterator[None]:
        """Raise OutOfMemory, with what to lower, if memory runs out in a block; without `users`, not in code of users."""
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
        """Add the time of a block to a phase. Raises OutOfMemory if memory runs out in the block."""
        with self.timed(name), self.memory(f"in the phase {name}", LOWER.get(name, "envs")):
            yield

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of a block to a phase."""
        begin = self.moment()
        try:
            yield
        finally:
            end = self.moment()
            self._open.append((end, lambda: {name: begin.elapsed_time(end) / 1e3}))
            self._read()

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count a part of the time of a phase that has ended as that of another."""
        self._open.append((self.moment(), lambda: {source: -seconds, target: seconds}))
        self._read()


class Waits:
    """Counts waits by their length: in classes from 1 microsecond to 3 hours, each a twentieth longer than the one before."""

    def __init__(self) -> None:
        self.seconds = 0.0  # the sum
        self.counts = np.zeros(474, np.int64)

    def add(self, seconds: float) -> None:
        self.seconds += seconds
        place = math.log(max(seconds, 1e-6) / 1e-6) / math.log(1.05)
        self.counts[min(math.ceil(place), len(self.counts) - 1)] += 1

    @staticmethod
    def p95(counts: NDArray[np.int64]) -> float:
        """Return the length that 95 % of some waits do not exceed, up to 5 % too high; `counts` holds at least one [seconds]."""
        return float(1e-6 * 1.05 ** np.searchsorted(counts.cumsum(), 0.95 * counts.sum()))
