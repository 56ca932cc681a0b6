import json

import numpy as np
import pytest
import torch
from safetensors.torch import load

from esper.store.tensors import Picked, StateCopy, flatten, to_parts

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool]


def some(dtype, shape):
    return (torch.rand(shape) * 9).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_library_reads_what_is_written(dtype):
    tensors = {f"a.{shape}": some(dtype, shape) for shape in [(), (0,), (3, 0), (1,), (7,), (2, 3, 5)]}
    found = load(b"".join(to_parts(tensors)))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.from_numpy(np.array(np.broadcast_to(np.arange(1), (1,)), order="C")),
        torch.arange(3)[1:2].expand(1, 1),
        torch.arange(6.0).reshape(2, 3).T,
        torch.arange(6.0)[2:5],
        torch.arange(6.0)[::2],
        torch.ones(1).expand(4),
    ],
    ids=["broadcast", "expanded", "transposed", "of more", "strided", "repeated"],
)
def test_tensors_of_any_layout_are_written(tensor):
    assert torch.equal(load(b"".join(to_parts({"a": tensor})))["a"], tensor)


def test_every_value_is_aligned_and_no_byte_is_without_a_name():
    tensors = {f"{dtype} {size}": some(dtype, (size,)) for dtype in DTYPES for size in (1, 3, 8)}
    data = b"".join(to_parts(tensors))
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    end = 0
    for name, entry in header.items():
        begin, then = entry["data_offsets"]
        assert begin == end
        assert (8 + length + begin) % tensors[name].element_size() == 0
        end = then
    assert 8 + length + end == len(data)
    assert load(data).keys() == tensors.keys()


def test_nothing_at_all_is_a_file_too():
    assert load(b"".join(to_parts({}))) == {}


def test_the_values_are_not_copied():
    tensor = torch.zeros(1000)
    _, part = to_parts({"a": tensor})
    tensor[7] = 1
    assert torch.equal(torch.frombuffer(part, dtype=torch.float32), tensor)


def test_a_dtype_that_no_file_holds_is_named():
    with pytest.raises(TypeError, match=r"^weird is of torch\.complex64"):
        to_parts({"weird": torch.zeros(3, dtype=torch.complex64)})


def test_a_second_copy_takes_the_memory_of_the_first_where_it_fits_and_none_of_what_it_copies():
    tree = {"same": torch.arange(4.0), "longer": torch.zeros(2), "expanded": torch.ones(1).expand(3)}
    copy = StateCopy()
    copy.take(tree)
    held = {name: tensor.data_ptr() for name, tensor in copy.tensors.items()}
    tree = {"same": torch.ones(4), "longer": torch.ones(3), "expanded": torch.zeros(1).expand(3), "new": torch.ones(1)}
    copy.take(tree)
    assert all(torch.equal(copy.tensors[name], tensor) for name, tensor in tree.items())
    assert [name for name in held if copy.tensors[name].data_ptr() == held[name]] == ["same", "expanded"]
    assert all(copy.tensors[name].data_ptr() != tensor.data_ptr() for name, tensor in tree.items())
    assert all(torch.equal(tensor, tree[name]) for name, tensor in copy.tree().items())


@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 2], [1], []], ids=str)
def test_picked_rows_are_saved_like_the_tensor_that_they_make(rows):
    column = torch.arange(6.0).view(3, 2)
    rows = np.array(rows, dtype=np.int64)
    tensors, plain = flatten({"rows": Picked(column, rows, 0)})
    assert torch.equal(tensors["rows"], column[torch.from_numpy(rows)])
    assert tensors["rows"].data_ptr() != column.data_ptr()
    assert plain == flatten({"rows": column})[1]


def test_picked_rows_are_copied_again_where_they_were_written_to_or_are_others():
    column, copy = torch.arange(6.0).view(3, 2), StateCopy()

    def taken(rows, writes):
        copy.take({"rows": Picked(column, np.array(rows), writes)})
        return copy.tree()["rows"].tolist()

    assert taken([0, 2], 0) == [[0, 1], [4, 5]]
    column += 10
    assert taken([0, 2], 0) == [[0, 1], [4, 5]]  # it is not looked at, as nobody wrote by what is said
    assert taken([0, 2], 1) == [[10, 11], [14, 15]]
    assert taken([1, 2], 1) == [[12, 13], [14, 15]]
    column = column + 1
    assert taken([1, 2], 1) == [[13, 14], [15, 16]]
