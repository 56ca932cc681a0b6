"""Adapters: the seeds of a grafted network, saved in a folder and attached to other copies of the same host."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from esper.kasmina.blueprints import Blueprint, drawn_with, get_blueprint
from esper.kasmina.grafted import graft, plant, planted_at, trim
from esper.kasmina.grown import CHILD, sites_of
from esper.kasmina.planted import Mode, Planted
from esper.kasmina.sharding import gather
from esper.kasmina.slot import Seed
from esper.kasmina.sums import SUMS, check_sum, sums_of
from esper.leyline.actions import Blend
from esper.leyline.errors import InputError
from esper.leyline.parsing import parse_json
from esper.leyline.sites import Site
from esper.leyline.streams import STREAMS, Kind
from esper.store.disk import find_folder, write_folder
from esper.store.reading import open_regular, read_kept

WEIGHTS, DESCRIPTION = "adapter.safetensors", "adapter.json"
FORMAT = 1
_LARGEST = 2**24  # largest description that is read, in bytes
_AGAIN = "save the adapter again"

M = TypeVar("M", bound=nn.Module)


class _Saved(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _blend(name: str) -> str:
    if name not in Blend.__members__:
        raise ValueError(f"blends are {', '.join(Blend.__members__)}")
    return name


class _SavedSeed(_Saved):
    site: str
    after: str
    around: str
    kind: Annotated[Kind, Field(strict=False)]
    width: PositiveInt
    causal: bool
    blueprint: str
    reads: PositiveInt
    blend: Annotated[str, AfterValidator(_blend)]
    alpha: float = Field(gt=0, le=1)
    host: dict[str, list[int]]  # shape of each parameter of the submodules `after` and `around`


class _SavedAdapter(_Saved):
    format: int
    seeds: list[_SavedSeed]


def save_adapter(network: nn.Module, kept: Mapping[str, tuple[Blueprint, int]], folder: Path | str | None) -> None:
    """Write the seeds at some sites of a grafted network to a folder.

    kept: for each site, the blueprint of its seed and the width that the seed reads.
    folder: None in a process that gathers what it has a part of, and writes nothing.
    """
    files = adapter_files(network, kept)
    if folder is not None:
        write_folder(Path(folder), files)


def adapter_files(network: nn.Module, kept: Mapping[str, tuple[Blueprint, int]]) -> dict[str, bytes]:
    """The files that `save_adapter` writes, by name."""
    seeds, tensors = [], {}
    for name, (entry, reads) in kept.items():
        site, planted = sites_of(network)[name], planted_at(network, name)
        assert planted is not None, "a kept seed must be in the network"
        seeds.append(
            _SavedSeed(
                site=name,
                after=site.after,
                around=site.around,
                kind=site.stream.kind,
                width=site.stream.width,
                causal=site.causal,
                blueprint=entry.name,
                reads=reads,
                blend=planted.blend.name,
                alpha=float(planted.alpha),
                host=_shapes(network, site),
            )
        )
        for part, tensor in planted.weights().items():
            tensors[f"{name}/{part}"] = gather(tensor.detach()).cpu().contiguous()
    described = _SavedAdapter(format=FORMAT, seeds=seeds).model_dump(mode="json")
    files = {WEIGHTS: save(tensors), DESCRIPTION: json.dumps(described, indent=1).encode()}
    return {**files, SUMS: sums_of(files)}


def attach(model: M, folder: Path | str) -> M:
    """Attach the seeds that `Growth.save_adapter` wrote to another copy of the host, in place; return the model.

    The attached seeds compute what they computed in the network that they were grown in, and their parameters are among
    those of the model. Raises InputError if the folder holds no adapter, or one for a host with other submodules or
    widths.
    """
    folder = find_folder(Path(folder))
    for name in (WEIGHTS, DESCRIPTION):
        if not (folder / name).is_file():
            raise InputError(
                f"{folder} holds no adapter, because it has no file {name}; give a folder that save_adapter wrote"
            )
        check_sum(folder / name)
    with open_regular(folder / WEIGHTS, _AGAIN) as file:
        files = {
            WEIGHTS: file.read(),
            DESCRIPTION: read_kept(folder / DESCRIPTION, _LARGEST, _AGAIN),
        }
    return attach_files(model, files, folder)


def attach_files(model: M, files: Mapping[str, bytes], folder: Path) -> M:
    """Attach the seeds of the files that `adapter_files` returned, as `attach`; `folder` is named in errors."""
    described = _described(files[DESCRIPTION], folder / DESCRIPTION)
    try:
        tensors = load(files[WEIGHTS])
    except SafetensorError as error:
        raise InputError(f"{folder / WEIGHTS} is damaged: {error}; {_AGAIN}") from None
    if not described.seeds:
        raise InputError(f"the adapter in {folder} has no seeds, as none was kept when it was saved")
    sites = {
        seed.site: Site(seed.site, seed.after, seed.around, STREAMS[seed.kind](seed.width), seed.causal)
        for seed in described.seeds
    }
    paths = dict(model.named_modules())
    for seed in described.seeds:
        if seed.after in paths and seed.around in paths:  # graft raises InputError for a submodule that is missing
            _check_host(seed, _shapes(model, sites[seed.site]))
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    made = {seed.site: _planted(seed, tensors, folder).to(like.device, like.dtype) for seed in described.seeds}
    graft(model, sites)
    for name, planted in made.items():
        plant(model, name, planted.train(model.training))
    trim(model)
    return model


def _check_host(seed: _SavedSeed, mine: Mapping[str, list[int]]) -> None:
    """Raise InputError if a submodule has other widths than the one that a seed was grown in."""
    for name in (*seed.host, *mine):
        if mine.get(name) != seed.host.get(name):
            raise InputError(
                f"the adapter was grown on a host whose {name} has shape {seed.host.get(name)}, and this one has "
                f"{mine.get(name)}; attach it to a copy of its own host"
            )


def _planted(seed: _SavedSeed, tensors: Mapping[str, Tensor], folder: Path) -> Planted:
    """Build a seed with the weights of the file. Raises InputError if the file holds other parameters than the blueprint has."""
    entry = get_blueprint(seed.blueprint, seed.kind)
    with drawn_with(0):
        planted = Planted(
            Seed(entry.build(seed.reads, seed.width), seed.reads), entry.tap, Blend[seed.blend], seed.kind
        )
    first = f"{seed.site}/"
    own = {name.removeprefix(first): tensor for name, tensor in tensors.items() if name.startswith(first)}
    planted.to(next(iter(own.values())).dtype)
    try:
        planted.seed.load_state_dict(own)
    except RuntimeError:  # the message of load_state_dict lists every parameter
        raise InputError(
            f"{folder / WEIGHTS} has other parameters than blueprint {seed.blueprint!r} of this version; {_AGAIN}"
        ) from None
    planted.mode = Mode.ON
    planted.alpha.fill_(seed.alpha)
    return planted


def _described(content: bytes, path: Path) -> _SavedAdapter:
    """Parse the content of adapter.json. Raises InputError if it is damaged, or of another format."""
    tree = parse_json(content, path, _AGAIN)
    found = tree.get("format") if isinstance(tree, dict) else None
    if found != FORMAT:
        raise InputError(f"{path} has format {found!r}, but this version of Esper reads format {FORMAT}")
    try:
        return _SavedAdapter.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path} is damaged at {where!r}: {first['msg']}; {_AGAIN}") from None


def _shapes(network: nn.Module, site: Site) -> dict[str, list[int]]:
    """Return the shape of each parameter of the host in the submodules of a site."""
    found = {}
    for path in (site.after, site.around):
        for name, parameter in network.get_submodule(path).named_parameters(prefix=path):
            if f".{CHILD}." not in f".{name}":
                found[name] = list(parameter.shape)
    return found
