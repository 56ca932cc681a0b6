"""Tensors as the parts of a safetensors file, without a copy of the tensors.

`safetensors.torch.save` builds the whole file in memory, and aborts the process if that memory cannot be allocated.
safetensors reads the files that are written here.
"""

import json
from collections.abc import Mapping

import torch
from torch import Tensor

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
    """The parts of a safetensors file, to be written one after the other; all parts but the first are views of the tensors.

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
    """The values of a tensor on the CPU, row by row; a view of it where it is contiguous."""
    # as_strided: a contiguous tensor of one value may have any stride, which `view` refuses
    values: memoryview = tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
    return values
