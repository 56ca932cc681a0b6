"""Define a second logical device for torch without a GPU. Its tensors have data on the CPU; no operation mixes the two."""

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cpu:1")
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Far(torch.Tensor):
    """Holds the data of a tensor on the logical device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near):
        like = {"strides": near.stride(), "storage_offset": near.storage_offset(), "dtype": near.dtype}
        # for autograd, whose thread of the CPU also serves this device
        far = torch.Tensor._make_wrapper_subclass(cls, near.shape, **like, device="meta", dispatch_device=True)
        far.near = near
        return far

    def __repr__(self):
        return f"Far({self.near})"

    def __deepcopy__(self, memo):
        return Far(self.near.detach().clone())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return carried_out(func, args, kwargs or {})


class Logical(TorchDispatchMode):
    """Lets tensors be made on the logical device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return carried_out(func, args, kwargs or {})


def carried_out(func, args, kwargs):
    """Return the result of an operation. RuntimeError if it has tensors of both devices, as on a GPU."""
    if func is torch.ops.prim.device.default:
        return DEVICE
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    far = any(isinstance(each, Far) for each in tensors)
    if far and func not in COPIES and any(each.dim() and not isinstance(each, Far) for each in tensors):
        raise RuntimeError(f"{func} has tensors of two devices: {[tuple(each.shape) for each in tensors]}")
    if kwargs.get("device") is not None:
        far, kwargs = torch.device(kwargs["device"]) == DEVICE, {**kwargs, "device": torch.device("cpu")}
    own = pytree.tree_map(lambda each: each.near if isinstance(each, Far) else each, (args, kwargs))
    found = func(*own[0], **own[1])
    if func._schema.name.endswith("_") and args and isinstance(args[0], torch.Tensor):
        return args[0]  # changed in place
    return pytree.tree_map(lambda each: Far(each) if far and isinstance(each, torch.Tensor) else each, found)
