"""Find the size from which on a network costs time: the knee of the seconds of a step over the size."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

NEARLY_FREE = 1.2
"""A size is nearly free if a step takes at most this many times as long as one of the smallest size."""
TIMED, FEW, LONG_ENOUGH = 7, 3, 0.02
"""Steps of which the shortest counts, and how many are enough where they take so long together [seconds]."""
WARM = 2
"""Steps before these, which are not timed."""
NAP = 1e-5
"""Wait before each of these steps [seconds]."""


class Knee(NamedTuple):
    """Holds what the sizes of a network cost."""

    sizes: list[int]  # those that were timed, from the smallest on, to the first that is not nearly free
    seconds: list[float]  # of a step at each
    taken: float  # seconds that this took
    unit: str  # of the sizes

    @property
    def size(self) -> int:
        """The largest size whose step takes at most 1.2 times the seconds of one of the smallest."""
        most = NEARLY_FREE * self.seconds[0]
        return max(size for size, seconds in zip(self.sizes, self.seconds, strict=True) if seconds <= most)

    def __str__(self) -> str:
        if len(self.sizes) == 1:
            return f"training starts with {self.sizes[0]:,} {self.unit}, as no larger size can be"
        steps = ", ".join(f"{1e3 * seconds:.2f}" for seconds in self.seconds)
        sizes = ", ".join(f"{size:,}" for size in self.sizes)
        return (
            f"a step takes {steps} ms with {sizes} {self.unit}, timed in {self.taken:.2f} s, so training starts with "
            f"{self.size:,}, the largest of these within a fifth of the smallest's seconds"
        )


def find_knee(size: int, larger: Iterable[tuple[int, Callable[[], Sequence[float]]]], unit: str) -> Knee:
    """Time larger sizes, each in turn with the first `size`, up to one that is not nearly free, or does not fit into memory.

    larger: sizes, each with a function that returns the seconds of a step of the first size and of this one.
    """
    begun, sizes, seconds = time.perf_counter(), [size], [math.inf]
    with suppress(MemoryError):
        for other, measure in larger:
            first, own = measure()
            if own > NEARLY_FREE * min(seconds[0], first):  # again, as other work may have come between
                first, own = map(min, (first, own), measure())
            seconds[0] = min(seconds[0], first)
            sizes.append(other)
            seconds.append(own)
            if own > NEARLY_FREE * seconds[0]:
                break
    return Knee(sizes, seconds, time.perf_counter() - begun, unit)


def shortest(steps: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Return the seconds of the shortest of several runs of each step; they take turns. Forks the random numbers of torch."""
    taken: list[list[float]] = [[] for _ in steps]
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if on_cuda else []):
        while any(len(each) < WARM + (FEW if sum(each[WARM:]) > LONG_ENOUGH else TIMED) for each in taken):
            for step, each in zip(steps, taken, strict=True):
                if on_cuda:
                    torch.cuda.synchronize(device)
                # On a busy machine a process that never waits is interrupted at equal distances, which can fall into each
                # step of the same network; one that has just waited is not.
                time.sleep(NAP)
                begun = time.perf_counter()
                step()
                if on_cuda:
                    torch.cuda.synchronize(device)
                each.append(time.perf_counter() - begun)
    return [min(each[WARM:]) for each in taken]
