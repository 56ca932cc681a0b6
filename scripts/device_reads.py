"""Count the operations that make the host wait for the device, by the line that called them. Other threads are not counted."""

import os
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import esper

OPERATORS = frozenset(
    {
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "equal",
        "is_nonzero",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "repeat_interleave",
        "bincount",
        "allclose",
    }
)
"""Operators for which the host must wait, because it needs the result or its shape to continue."""
HOME = str(Path(esper.__file__).parent) + os.sep
METHODS = ("numpy", "tolist", "cpu", "__array__", "item", "__bool__", "__float__", "__int__", "__index__")
"""Methods of a tensor that return its numbers to Python or NumPy."""
STAGED = 64 * 2**10
"""Largest tensor that CUDA copies without a wait where it is not in pinned memory, if the copy does not block [bytes]."""


class Read(NamedTuple):
    """Describes one wait of the host."""

    what: str  # the operator or method
    site: str  # file:function of Esper's own innermost frame


class Reads(TorchDispatchMode):
    """Counts reads on any device. On a CPU nothing waits, but the same calls would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: list[Read] = []

    def note(self, what: str) -> None:
        frames = traceback.extract_stack()
        ours = [frame for frame in frames if frame.filename.startswith(HOME)]
        site = f"{ours[-1].filename.rsplit('/', 1)[-1]}:{ours[-1].name}" if ours else "?"
        self.reads.append(Read(what, site))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name in OPERATORS:
            self.note(name)
        if name.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        ):
            self.note("index by a mask")
        if name in ("_to_copy", "copy_"):
            copied = args[1] if name == "copy_" else args[0]
            source = copied.device.type
            target = args[0].device.type if name == "copy_" else torch.device(kwargs.get("device") or source).type
            free = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            if source != "cpu" and target == "cpu" and not free:  # else the host waits where it takes the numbers
                self.note("copy to the host")
            waits = not free or (target == "cuda" and copied.nbytes > STAGED and not copied.is_pinned())
            if source == "cpu" and target != "cpu" and waits:
                self.note("copy to the device that blocks")
        return func(*args, **kwargs)


@contextmanager
def counted_reads() -> Iterator[list[Read]]:
    """Yield a list to which every read inside the block is appended."""
    mode = Reads()
    originals, thread = {name: getattr(Tensor, name) for name in METHODS}, threading.get_ident()

    def watched(name: str) -> Any:
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                mode.note(name)
            return originals[name](self, *args, **kwargs)

        return method

    own = {name: Tensor.__dict__.get(name) for name in METHODS}
    for name in METHODS:
        setattr(Tensor, name, watched(name))
    try:
        with mode:
            yield mode.reads
    finally:
        for name, method in own.items():
            if method is None:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, method)
