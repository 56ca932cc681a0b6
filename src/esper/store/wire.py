"""Trees of arrays as messages between processes: the JSON of the tree, and its arrays in the layout of a safetensors file.

Nothing is unpickled, and the same tree has the same bytes.
"""

import json
from typing import Any

from safetensors.torch import load

from esper.store.checkpoint import Tree, flatten, unflatten
from esper.store.tensors import to_parts


def pack(tree: Tree) -> bytes:
    """Return a tree as bytes: 8 bytes, little-endian, the length of the JSON; the JSON; the arrays. TypeError as `flatten`."""
    tensors, plain = flatten(tree)
    text = json.dumps(plain, allow_nan=False).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *to_parts(tensors)])


def unpack(message: bytes) -> Any:
    """Return the tree of a message of `pack`, in new memory; tuples have become lists."""
    end = 8 + int.from_bytes(message[:8], "little")
    return unflatten(load(message[end:]), json.loads(message[8:end]))
