"""Doses of a training pass, and the types in which its products are computed. E rows, S slots."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import nn

from esper.kasmina.stack.plan import Branches
from esper.leyline.errors import InputError
from esper.leyline.lifecycle.stages import ADDED, Stage, among
from esper.leyline.lifecycle.view import Seeds


def shadows(seeds: Seeds) -> Branches:
    """Return one branch for each incubating seed: the network with this one seed at dose 1, every other at its own dose."""
    env, slot = np.nonzero(seeds.stage == Stage.TRAINING)
    dose = doses(seeds)[env]
    dose[np.arange(len(env)), slot] = 1
    return Branches.at(env, slot, dose)[0]


def doses(seeds: Seeds) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return (E, S) the dose at which every slot acts on its network now."""
    return np.where(among(seeds.stage, ADDED), seeds.alpha, np.float32(0))


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
    if products != torch.float16 or device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return
    if any(isinstance(part, nn.LSTM) for module in modules for part in module.modules()):
        raise InputError(
            "amp is fp16, but torch has no LSTM in float16 for this processor; set amp to off, or to bf16 if the processor "
            "multiplies it natively"
        )


def products_in(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass whose products are in `dtype`, as `torch.autocast` chooses; None changes nothing."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
