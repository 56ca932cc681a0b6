"""Whole networks with the seeds that grew in them, saved in a folder and loaded into fresh copies of the host."""

import json
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from esper.kasmina.adapter import (
    LARGEST,
    Saved,
    SavedSeed,
    built,
    check_hosts,
    described_seeds,
    every_name,
    folder_of,
    parse_saved,
    site_of,
    write_own,
)
from esper.kasmina.grafted import acting, graft, holders, plant, trim, ungraft
from esper.kasmina.grown import CHILD, is_grafted
from esper.kasmina.sharding import gather, in_parts
from esper.kasmina.sums import SUMS, check_sum, sums_of
from esper.leyline.errors import InputError, typed_line
from esper.store.disk import Content, find_folder
from esper.store.reading import open_regular, read_kept
from esper.store.tensors import to_parts

WEIGHTS, DESCRIPTION = "grown.safetensors", "grown.json"
FORMAT = 1
_AGAIN = "save the network again"

M = TypeVar("M", bound=nn.Module)


class _SavedNetwork(Saved):
    format: int
    network: str  # name of the class
    seeds: list[SavedSeed]
    shared: dict[str, str]  # names of tensors that are another one, by name, in the same memory


def save_grown(network: nn.Module, folder: Path | str | None) -> None:
    """Write all weights and buffers of a network, and the seeds that act in it, to a folder.

    folder: None in a process that gathers what it has a part of, and writes nothing.
    """
    seeds = acting(network)
    described = described_seeds(network, seeds)
    inside = tuple(_first(path) for path in holders(network))
    state = {name: value for name, value in network.state_dict().items() if not name.startswith(inside)}
    for first, seed in seeds.items():
        weights = {"alpha": seed.alpha} | {f"seed.{name}": value for name, value in seed.weights().items()}
        for path in sorted(every_name(network, [first])):
            state |= {_first(path) + name: value for name, value in weights.items()}
    tensors, shared, known = dict[str, Tensor](), dict[str, str](), dict[object, str]()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"state_dict of the {type(network).__name__} holds {name!r}, a {type(value).__name__}, and the folder holds "
                "tensors alone; save the network by torch.save"
            )
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype) if not in_parts(value) else name
        first = known.setdefault(place, name) if value.numel() else name
        if first != name:
            shared[name] = first
        else:
            tensors[name] = gather(value.detach()).cpu()
    if folder is None:
        return
    try:
        parts = to_parts(tensors)
    except TypeError as error:
        raise InputError(f"the network cannot be saved: {error}; convert that tensor to another dtype") from None
    whole = _SavedNetwork(format=FORMAT, network=type(network).__name__, seeds=described, shared=shared)
    text = json.dumps(whole.model_dump(mode="json"), indent=1).encode()
    files: dict[str, Content] = {WEIGHTS: parts, DESCRIPTION: text}
    write_own(folder, {**files, SUMS: sums_of(files)})


def load_grown(folder: Path | str, model: M) -> M:
    """Load what `Growth.save` wrote into a fresh copy of the model, as it was before it grew, in place; return the model.

    The model gets every weight and buffer, and the seeds. It computes bit for bit what the saved network did. Its
    `state_dict` has the same names, so that later weights of the saved network can be loaded into it too.

    Raises InputError if the folder holds no grown network, or one of another model; the model then stays as it was.
    """
    folder = find_folder(folder_of(folder))
    for name in (WEIGHTS, DESCRIPTION):
        if not (folder / name).is_file():
            raise InputError(
                f"{folder} holds no grown network, because it has no file {name}; give a folder that growth.save wrote"
            )
        check_sum(folder / name, _AGAIN)
    data = read_kept(folder / DESCRIPTION, LARGEST, _AGAIN)
    described = parse_saved(_SavedNetwork, FORMAT, data, folder / DESCRIPTION, _AGAIN)
    try:
        with open_regular(folder / WEIGHTS, _AGAIN) as file:
            tensors = load(file.read())
    except SafetensorError as error:
        raise InputError(f"{folder / WEIGHTS} is damaged: {error}; {_AGAIN}") from None
    if missing := [first for first in described.shared.values() if first not in tensors]:
        raise InputError(f"{folder / WEIGHTS} is damaged: it lacks {missing[0]!r}; {_AGAIN}")
    tensors |= {name: tensors[first] for name, first in described.shared.items()}
    check_hosts(model, described.seeds)
    if is_grafted(model):
        raise InputError(f"the {type(model).__name__} is grafted; give one as it was before esper.graft")
    made = {}
    for seed in described.seeds:
        first = _first(seed.after)
        own = {name.removeprefix(first): value for name, value in tensors.items() if name.startswith(first)}
        weights = {name.removeprefix("seed."): value for name, value in own.items() if name != "alpha"}
        made[seed.site] = built(seed, weights, folder / WEIGHTS, _AGAIN)
    inside = tuple(map(_first, every_name(model, [seed.after for seed in described.seeds])))
    _check_tensors(model, {name: value for name, value in tensors.items() if not name.startswith(inside)})
    if made:
        graft(model, {seed.site: site_of(seed) for seed in described.seeds})
    for seed in described.seeds:
        after = model.get_submodule(seed.after)
        like = next((p for p in (*after.parameters(), *model.parameters()) if p.is_floating_point()), torch.zeros(()))
        plant(model, seed.site, made[seed.site].to(like.device).train(after.training))
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        if made:
            ungraft(model)
        raise InputError(f"the model does not take the weights in {folder}: {typed_line(error)}; {_MODEL}") from None
    if made:
        trim(model)
    return model


_MODEL = "give a model that is built as the saved one was"


def _first(path: str) -> str:
    """Return the first part of the names of a seed in a state_dict."""
    return f"{path}.{CHILD}." if path else f"{CHILD}."


def _check_tensors(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """InputError if a model has tensors of other names, shapes or dtypes than those of a host that was saved."""
    mine = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name in (*saved, *mine):
        pair = saved.get(name), mine.get(name)
        if pair[1] is not None and pair[1].is_meta:
            raise InputError(f"{name!r} of the model is on the meta device; give a model with weights")
        shapes = [None if each is None else tuple(each.shape) for each in pair]
        dtypes = [None if each is None else each.dtype for each in pair]
        theirs, own = shapes if shapes[0] != shapes[1] else dtypes
        if theirs != own:
            raise InputError(f"the saved network has {name!r} as {theirs}, where the model has {own}; {_MODEL}")
