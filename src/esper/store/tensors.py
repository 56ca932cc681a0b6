"""Write trees of arrays and tensors as files and as messages between processes: JSON, and the layout of a safetensors file.

`safetensors.torch.save` builds the whole file in memory, and aborts the process if that memory cannot be allocated. `to_parts`
copies no tensor, and safetensors reads what it makes. Nothing is unpickled, and the same tree has the same bytes.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load
from torch import Tensor

Tree = dict[str, Any]
"""Nested dicts, with texts as keys, and lists of arrays, tensors, `Picked`, numbers, texts, booleans and None."""


class Picked(NamedTuple):
    """Holds rows of a tensor, as a leaf of a `Tree`; they are gathered where the tree is copied."""

    tensor: Tensor
    rows: NDArray[np.int64]  # (n,) in ascending order, none twice
    writes: int  # how often the tensor was written to

    @property
    def whole(self) -> bool:
        return len(self.rows) == len(self.tensor)

    def gathered(self) -> Tensor:
        """Return the rows, in the memory of the tensor where they are all of it."""
        if self.whole:
            return self.tensor
        return self.tensor[torch.from_numpy(self.rows).to(self.tensor.device, non_blocking=True)]


_ARRAY, _TENSOR, _NUMBER = "$array", "$tensor", "$number"  # keys that replace values which JSON cannot hold
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def to_parts(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """Return the parts of a safetensors file, to be written one by one; all parts but the first are views of the tensors.

    The tensors must be on the CPU and must not change until the parts are written. Tensors that are not contiguous are copied.
    The format (README of huggingface/safetensors, "Format"): 8 bytes, little-endian, the length of the header; the header,
    JSON; the values. The wider dtypes come first, and the header is padded to 8 bytes, so that every value is aligned.
    Raises TypeError for a dtype that is not in `_NAMES`.
    """
    header, parts, end = dict[str, object](), list[bytes | memoryview](), 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} is of {tensor.dtype}, which no file of Esper holds")
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        parts.append(bytes_of(tensor))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *parts]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the values of a tensor on the CPU, row by row; a view of it where it is contiguous."""
    # as_strided: a contiguous tensor of one value may have any stride, which `view` refuses
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _to_cpu(value: Tensor | Picked, name: str) -> Tensor:
    value = value.gathered() if isinstance(value, Picked) else value
    return value.detach().to("cpu", copy=True).contiguous()


def flatten(tree: Any, copied: Callable[[Tensor | Picked, str], Tensor] = _to_cpu) -> tuple[dict[str, Tensor], Any]:
    """Return the arrays and tensors of a tree by dotted name, `copied`, and the tree as JSON with names in their place.

    `unflatten` is the bitwise inverse, except that tuples become lists. TypeError if a leaf is not allowed in a `Tree`.
    """
    tensors: dict[str, Tensor] = {}

    def put(value: Tensor, name: str, kind: str) -> dict[str, str]:
        assert name not in tensors, f"two leaves are called {name}"
        tensors[name] = value
        return {kind: name}

    def walk(value: Any, name: str) -> Any:
        match value:
            case Tensor() | Picked():
                return put(copied(value, name), name, _TENSOR)
            case np.ndarray():
                return put(torch.from_numpy(np.array(value, order="C")), name, _ARRAY)
            case dict():
                assert all(isinstance(key, str) and not key.startswith("$") for key in value), list(value)
                return {key: walk(item, f"{name}.{key}" if name else key) for key, item in value.items()}
            case list() | tuple():
                return [walk(item, f"{name}.{index}" if name else str(index)) for index, item in enumerate(value)]
            case float() if not math.isfinite(value):
                return {_NUMBER: repr(float(value))}
            case bool() | str() | None:
                return value
            case int() | float():
                return value
        raise TypeError(f"{name} is a {type(value).__name__}, which no checkpoint holds")

    return tensors, walk(tree, "")


class StateCopy:
    """Copies the latest state of a tree that changes, into memory that each copy takes from the one before.

    Tensors stay on their device, which is not waited for, and `Picked` rows that were not written to since are not copied again.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._plain: Any = None
        self._picked: dict[str, Picked] = {}

    def take(self, tree: Any) -> None:
        """Copy the tree in place of the one before. TypeError as `flatten`."""
        self.tensors, self._plain = flatten(tree, self._copied)

    def tree(self) -> Any:
        """Return the tree that was copied, in new memory."""
        return unflatten(self.tensors, self._plain)

    def _copied(self, value: Tensor | Picked, name: str) -> Tensor:
        old, before = self.tensors.get(name), self._picked.pop(name, None)
        if not isinstance(value, Picked):
            return self._over(old, value.detach())
        same = before is not None and before.tensor is value.tensor and before.writes == value.writes
        if old is None or before is None or not same or not np.array_equal(before.rows, value.rows):
            old = self._over(old, value.gathered().detach())
        self._picked[name] = value
        return old

    @staticmethod
    def _over(old: Tensor | None, new: Tensor) -> Tensor:
        if old is None or (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
            return new.clone()
        return old.copy_(new)


def unflatten(tensors: Mapping[str, Tensor], plain: Any) -> Any:
    """Return the tree from which `flatten` made its results, in new memory. KeyError if a tensor is missing."""
    match plain:
        case {"$tensor": str(name)}:
            return tensors[name].clone()  # a copy, because a view of the file is not aligned
        case {"$array": str(name)}:
            return tensors[name].clone().numpy()
        case {"$number": str(text)}:
            return float(text)
        case dict():
            return {key: unflatten(tensors, item) for key, item in plain.items()}
        case list():
            return [unflatten(tensors, item) for item in plain]
    return plain


def pack(tree: Tree) -> bytes:
    """Return a tree as bytes: 8 bytes, little-endian, the length of the JSON; the JSON; the arrays. TypeError as `flatten`."""
    tensors, plain = flatten(tree)
    text = json.dumps(plain, allow_nan=False).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *to_parts(tensors)])


def unpack(message: bytes) -> Any:
    """Return the tree of a message of `pack`, in new memory; tuples have become lists."""
    end = 8 + int.from_bytes(message[:8], "little")
    return unflatten(load(message[end:]), json.loads(message[8:end]))
