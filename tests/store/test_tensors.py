import json

import numpy as np
import pytest
import torch
from safetensors.torch import load

from esper.store.tensors import Picked, flatten, to_parts, unflatten

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
    first, _ = flatten(tree, into={})
    held = {name: tensor.data_ptr() for name, tensor in first.items()}
    tree = {"same": torch.ones(4), "longer": torch.ones(3), "expanded": torch.zeros(1).expand(3), "new": torch.ones(1)}
    second, plain = flatten(tree, into=first)
    assert all(torch.equal(second[name], tensor) for name, tensor in tree.items())
    assert [name for name in held if second[name].data_ptr() == held[name]] == ["same", "expanded"]
    assert all(second[name].data_ptr() != tensor.data_ptr() for name, tensor in tree.items())
    assert plain == flatten(tree)[1]


def test_picked_rows_are_gathered_into_the_memory_of_the_first_copy():
    column, rows = torch.arange(6.0).view(3, 2), torch.tensor([2, 0])
    first, plain = flatten({"rows": Picked(column, rows)}, into={})
    assert torch.equal(unflatten(*flatten({"rows": Picked(column, rows)}))["rows"], column[rows])
    held = first["rows"].data_ptr()
    column += 10
    second, again = flatten({"rows": Picked(column, rows)}, into=first)
    assert torch.equal(second["rows"], column[rows])
    assert second["rows"].data_ptr() == held
    assert again == plain
    third, _ = flatten({"rows": Picked(column, rows[:1])}, into=second)
    assert torch.equal(third["rows"], column[2:])
