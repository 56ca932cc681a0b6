"""Save the seeds of a network, or the whole network that grew, in a folder, and load them into other copies of the host.

An *adapter* holds seeds alone, with a digest of the weights of their host; a *grown network* holds every weight and buffer too.
"""

import copy
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from esper.kasmina.blueprints import drawn_with, get_blueprint
from esper.kasmina.blueprints.functions import FUNCTIONS, NUMBERED, RELU, Pointwise
from esper.kasmina.graft.copies import IN_BLOCK, copy_of_block, deeper, own_parameters, seed_of
from esper.kasmina.graft.folding import widened
from esper.kasmina.graft.grafted import acting, graft, holders, plant, trim, ungraft, with_own_files
from esper.kasmina.graft.grown import CHILD, check_tensors, class_of, is_grafted, prefix_behind, shapes_of
from esper.kasmina.graft.planted import Mode, Planted, Recipe
from esper.kasmina.graft.sharding import gather, in_parts
from esper.kasmina.graft.units import resized
from esper.leyline.config.parsing import parse_model
from esper.leyline.lifecycle.slots import STREAMS, Kind, Site, Tap
from esper.leyline.lifecycle.vocabulary import Blend
from esper.leyline.messages import GrowthWarning, InputError, kind_of, typed_line, warn, with_article
from esper.store.disk import (
    SUMS,
    Content,
    check_sum,
    find_folder,
    open_regular,
    read_kept,
    remove,
    sums_of,
    write_folder,
)
from esper.store.tensors import bytes_of, to_parts

ADAPTER_WEIGHTS, ADAPTER, ADAPTER_FORMAT = "adapter.safetensors", "adapter.json", 2
NETWORK_WEIGHTS, NETWORK, NETWORK_FORMAT = "grown.safetensors", "grown.json", 1
_LARGEST = 2**24  # largest description that is read, in bytes
_MODEL = "give a model that is built as the saved one was"

M = TypeVar("M", bound=nn.Module)


class _Saved(BaseModel):
    """Refuses a part of a saved description that lacks a key or has an unknown one; the base of all such parts."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _function(function: list[str | float]) -> list[str | float]:
    numbers = [float] if function[:1] and function[0] in NUMBERED else []
    if (function[:1] and function[0] not in FUNCTIONS) or [type(each) for each in function] != [str, *numbers]:
        raise ValueError(f"functions are {', '.join(FUNCTIONS)}; {' and '.join(NUMBERED)} have a number")
    return function


class _SavedSeed(_Saved):
    """Describes a seed, without its weights."""

    site: str
    after: str
    around: str
    kind: Annotated[Kind, Field(strict=False)]
    width: PositiveInt
    order: str = ""  # of the axes of the stream, as in `Stream`
    causal: bool
    blueprint: str
    reads: PositiveInt
    function: Annotated[list[str | float], AfterValidator(_function)] = list(RELU)  # that of `Recipe`
    counts: dict[str, dict[str, PositiveInt]] = {}  # those of `Recipe`
    blend: Literal["ADD", "GATE", "MULTIPLY"]
    alpha: float = Field(gt=0, le=1)
    attached: bool
    host: dict[str, list[int]]  # shape of each parameter of the submodules `after` and `around`

    @property
    def pointwise(self) -> Pointwise:
        return cast("Pointwise", tuple(self.function))

    @property
    def planted_at(self) -> Site:
        return Site(self.site, self.after, self.around, STREAMS[self.kind](self.width, self.order), self.causal)


class _SavedAdapter(_Saved):
    format: int
    host: str  # digest of the weights of the host
    seeds: list[_SavedSeed]


class _SavedNetwork(_Saved):
    format: int
    network: str  # name of the class
    seeds: list[_SavedSeed]
    shared: dict[str, str]  # names of tensors that are another one, by name, in the same memory
    shapes: dict[str, list[int]] = {}  # of the parameters that became larger, before
    blocks: dict[str, list[int]] = {}  # places of the blocks that were added to stacks, by the path of the stack
    counts: dict[str, dict[str, PositiveInt]] = {}  # attributes that count units of which there are more, by module


# Adapters.


def adapter_files(network: nn.Module, seeds: Mapping[str, Planted], sites: Iterable[str]) -> dict[str, bytes]:
    """Return the files of an adapter, by name.

    seeds: by the submodule that they are behind. sites: submodules whose seeds, these and others, are not part of the host.
    """
    described = _described(network, seeds)
    tensors = {
        f"{known.site}/{part}": gather(tensor.detach()).cpu().contiguous()
        for known, seed in zip(described, seeds.values(), strict=True)
        for part, tensor in seed.weights().items()
    }
    whole = _SavedAdapter(format=ADAPTER_FORMAT, host=_host_digest(network, sites), seeds=described)
    text = json.dumps(whole.model_dump(mode="json"), indent=1).encode()
    files = {ADAPTER_WEIGHTS: save(tensors), ADAPTER: text}
    return {**files, SUMS: sums_of(files)}


def save_beside(network: nn.Module, directory: Path | str) -> None:
    """Write the seeds that act to the subfolder `esper` of a folder, with a warning; without any, remove an earlier adapter."""
    folder, seeds = Path(directory) / CHILD, acting(network)
    if seeds:
        replace_folder(folder, adapter_files(network, seeds, holders(network)))
        name = class_of(network).__name__
        warn(
            f"from_pretrained makes {with_article(name)} without the seeds that grew in it; save_pretrained has written them "
            f"to the subfolder {CHILD!r}: load both by esper.attach({name}.from_pretrained(folder), folder + '/{CHILD}')",
            GrowthWarning,
        )
    elif (folder / ADAPTER).is_file():
        remove(folder)


def attach(model: M, folder: Path | str, *, other_host: bool = False) -> M:
    """Attach the seeds that `Growth.save_adapter` wrote to another copy of the host, in place; return the model.

    The attached seeds compute what they computed in the network that they were grown in, and their parameters are among
    those of the model.

    other_host: whether the host may have other weights than the one that the seeds were grown in, with which they may do harm.

    Raises InputError if the folder holds no adapter, or one for a host with other submodules, widths or weights.
    """
    folder = folder_of(folder)
    files = _read_files(folder, ADAPTER_WEIGHTS, ADAPTER, "adapter", "save_adapter")
    return attach_files(model, files, find_folder(folder), other_host=other_host)


def attach_files(model: M, files: Mapping[str, bytes], folder: Path, *, other_host: bool = False) -> M:
    """Attach the seeds of the files that `adapter_files` returned, as `attach` does; messages of errors name `folder`."""
    again = "save the adapter again"
    _, described = parse_model(files[ADAPTER], _SavedAdapter, [ADAPTER_FORMAT], folder / ADAPTER, again)
    tensors = _loaded(files[ADAPTER_WEIGHTS], folder / ADAPTER_WEIGHTS, again)
    if not described.seeds:
        raise InputError(f"the adapter in {folder} has no seeds, as none was kept when it was saved")
    _check_hosts(model, described.seeds)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    made = {}
    for seed in described.seeds:
        first = f"{seed.site}/"
        own = {name.removeprefix(first): tensor for name, tensor in tensors.items() if name.startswith(first)}
        planted = _built(model, seed, own, folder / ADAPTER_WEIGHTS, again)
        planted.alpha.fill_(seed.alpha)
        made[seed.site] = planted.to(like.device, like.dtype)
    known = {seed.after for seed in described.seeds}.issubset(path for path, _ in model.named_modules())
    if known and not other_host and (mine := _host_digest(model, ())) != described.host:
        raise InputError(
            f"the adapter in {folder} was grown on a host whose weights have digest {described.host}, and those of this one have "
            f"{mine}; attach it to the host as it was trained then, or give other_host=True"
        )
    graft(model, {seed.site: seed.planted_at for seed in described.seeds})
    for name, planted in made.items():
        plant(model, name, planted.train(model.training))
    trim(model)
    return model


# Whole networks.


def save_grown(
    network: nn.Module,
    shapes: Mapping[str, Sequence[int]],
    folder: Path | str | None,
    *,
    blocks: Mapping[str, Sequence[int]] | None = None,
    counts: Mapping[str, Mapping[str, int]] | None = None,
) -> None:
    """Write all weights and buffers of a network, and the seeds that act in it, to a folder.

    shapes: of the parameters that became larger, before. blocks: places of those that stacks got, by the paths of these. counts:
    attributes of modules that count units of which there are more, by the paths of these. folder: None in a process that gathers
    what it has a part of, and writes nothing.
    """
    seeds = acting(network)
    described = _described(network, seeds)
    inside = tuple(prefix_behind(path) for path in holders(network))
    state = {name: value for name, value in network.state_dict().items() if not name.startswith(inside)}
    for first, seed in seeds.items():
        weights = {"alpha": seed.alpha} | {f"seed.{name}": value for name, value in seed.weights().items()}
        for path in sorted(_every_name(network, [first])):
            state |= {prefix_behind(path) + name: value for name, value in weights.items()}
    tensors, shared, known = dict[str, Tensor](), dict[str, str](), dict[object, str]()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"state_dict of the {type(network).__name__} holds {name!r}, {kind_of(value)}, and the folder holds "
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
    whole = _SavedNetwork(
        format=NETWORK_FORMAT,
        network=type(network).__name__,
        seeds=described,
        shared=shared,
        shapes={name: list(shape) for name, shape in shapes.items()},
        blocks={path: list(places) for path, places in (blocks or {}).items()},
        counts={path: dict(own) for path, own in (counts or {}).items()},
    )
    text = json.dumps(whole.model_dump(mode="json"), indent=1).encode()
    files: dict[str, Content] = {NETWORK_WEIGHTS: parts, NETWORK: text}
    replace_folder(folder, {**files, SUMS: sums_of(files)})


def load_grown(folder: Path | str, model: M) -> M:
    """Load what `Growth.save` wrote into a fresh copy of the model, as it was before it grew, in place; return the model.

    The model gets every weight and buffer, the widths and blocks that it grew to, and the seeds. It computes bit for bit what the
    saved network did. Its `state_dict` has the same names, so that later weights of the saved network can be loaded into it too.

    Raises InputError if the folder holds no grown network, or one of another model; the model then stays as it was.
    """
    again = "save the network again"
    files = _read_files(folder_of(folder), NETWORK_WEIGHTS, NETWORK, "grown network", "growth.save")
    folder = find_folder(folder_of(folder))
    weights_path = folder / NETWORK_WEIGHTS
    _, described = parse_model(files[NETWORK], _SavedNetwork, [NETWORK_FORMAT], folder / NETWORK, again)
    tensors = _loaded(files[NETWORK_WEIGHTS], weights_path, again)
    if missing := [first for first in described.shared.values() if first not in tensors]:
        raise InputError(f"{weights_path} is damaged: it lacks {missing[0]!r}; {again}")
    tensors |= {name: tensors[first] for name, first in described.shared.items()}
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is {kind_of(model)}; give an nn.Module")
    if is_grafted(model):
        raise InputError(f"the {type(model).__name__} is grafted; give one as it was before esper.graft")
    with deeper(model, described.blocks), resized(model, described.shapes, tensors, described.counts):
        _load_into(model, described.seeds, tensors, folder, again)
    count_in_configs(model, widened(model, described.shapes))
    return model


def _load_into(
    model: nn.Module, seeds: Sequence[_SavedSeed], tensors: Mapping[str, Tensor], folder: Path, again: str
) -> None:
    """Plant seeds in a model, and fill all tensors in. InputError, and no seed, if it is another model."""
    _check_hosts(model, seeds)
    made = {}
    for seed in seeds:
        first = prefix_behind(seed.after)
        own = {name.removeprefix(first): value for name, value in tensors.items() if name.startswith(first)}
        weights = {name.removeprefix("seed."): value for name, value in own.items() if name != "alpha"}
        made[seed.site] = _built(model, seed, weights, folder / NETWORK_WEIGHTS, again)
    inside = tuple(map(prefix_behind, _every_name(model, [seed.after for seed in seeds])))
    mine = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    if meta := [name for name, value in mine.items() if value.is_meta]:
        raise InputError(f"{meta[0]!r} of the model is on the meta device; give a model with weights")
    host = {name: value for name, value in tensors.items() if not name.startswith(inside)}
    check_tensors(host, mine, "the saved network", "the model", _MODEL)
    if made:
        graft(model, {seed.site: seed.planted_at for seed in seeds})
    for seed in seeds:
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


# What a config counts.


_INNER = re.compile("inner|intermediate|ff|mlp|hidden|dim")
"""Names of settings that count inner features, and may be None for a multiple of the width, as `n_inner`."""


def count_in_configs(network: nn.Module, widened: Mapping[str, tuple[int, int]]) -> list[str]:
    """Set what counts the features of layers that became wider in each `config` that is saved with a part of a network.

    `from_pretrained` builds the class from the config, so a value is set only if the class then has the shapes of the network.
    widened: the widths of layers before and after. Returns the names of the parts that no value builds, as where one block of
    several became wider.
    """
    cannot = []
    for path, part in with_own_files(network):
        changed = {widths for name, widths in widened.items() if name.startswith(f"{path}." if path else "")}
        if changed and not _counts(part, changed):
            cannot.append(path)
    return cannot


def _counts(part: Any, changed: set[tuple[int, int]]) -> bool:
    """Return whether the config of a part builds its shapes, after a setting got another value where that is needed."""
    if "config" not in vars(part):
        return False
    if _builds(part, part.config):
        return True
    if len(changed) != 1:
        return False
    ((before, now),) = changed
    settings = vars(part.config)
    counting = [name for name, value in settings.items() if type(value) is int and value == before]
    counting += [name for name, value in settings.items() if value is None and _INNER.search(name)]
    for name in counting:
        other = copy.deepcopy(part.config)
        setattr(other, name, now)
        if _builds(part, other):
            setattr(part.config, name, now)
            return True
    return False


def _builds(part: nn.Module, config: Any) -> bool:
    """Return whether the class of a part, built from a config, has parameters and buffers of its shapes."""
    kind: Any = class_of(part)
    try:
        with torch.device("meta"):
            built = kind(config)
    except Exception:  # a config may refuse a value, in any way
        return False
    return shapes_of(part) == shapes_of(built)


# Files and descriptions of both.


def replace_folder(folder: Path | str, files: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Write a folder, or replace one that holds these and known files alone. InputError if there is something else."""
    folder = folder_of(folder).resolve()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give the name of a folder")
    allowed = {*files, *known}
    others = sorted(path.name for path in folder.iterdir() if path.name not in allowed) if folder.is_dir() else []
    if others:
        raise InputError(f"{folder} holds {others[0]!r}, which would be removed; give a folder that is new or empty")
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_folder(folder, files)


def folder_of(folder: Any) -> Path:
    """Return a folder that the user names. InputError if it is no name."""
    if not isinstance(folder, str | os.PathLike) or not str(folder):
        raise InputError(f"the folder is {folder!r}; give its name, as a text or a pathlib.Path")
    return Path(folder)


def _read_files(folder: Path, weights: str, description: str, what: str, wrote: str) -> dict[str, bytes]:
    """Read both files of a folder, and compare them with their sums. InputError if one is missing or damaged."""
    folder, again = find_folder(folder), f"save the {what.removeprefix('grown ')} again"
    for name in (weights, description):
        if not (folder / name).is_file():
            raise InputError(
                f"{folder} holds no {what}, because it has no file {name}; give a folder that {wrote} wrote"
            )
        check_sum(folder / name, again)
    with open_regular(folder / weights, again) as file:
        return {weights: file.read(), description: read_kept(folder / description, _LARGEST, again)}


def _loaded(data: bytes, path: Path, again: str) -> dict[str, Tensor]:
    """Return the tensors of a file. InputError if it is damaged."""
    try:
        return load(data)
    except SafetensorError as error:
        raise InputError(f"{path} is damaged: {error}; {again}") from None


def _described(network: nn.Module, seeds: Mapping[str, Planted]) -> list[_SavedSeed]:
    """Return what is saved of seeds, by the submodule that they are behind, beside their weights."""
    found, names = [], set[str]()
    for path, seed in seeds.items():
        site, blueprint, reads, function, counts = _recipe(path, seed)
        name = path if site.name in names else site.name
        names.add(name)
        found.append(
            _SavedSeed(
                site=name,
                after=site.after,
                around=site.around,
                kind=site.stream.kind,
                width=site.stream.width,
                order=site.stream.order,
                causal=site.causal,
                blueprint=blueprint,
                reads=reads,
                function=list(function),
                counts={part: dict(own) for part, own in counts.items()},
                blend=seed.blend.name,  # type: ignore[arg-type]
                alpha=float(seed.alpha),
                attached=seed.attached,
                host=_shapes(network, site),
            )
        )
    return found


def _recipe(path: str, seed: Planted) -> Recipe:
    """Return what a seed is built from, named as in the network that is saved: a part of the one that grew, or one around it."""
    recipe = seed.recipe
    if recipe is None:
        raise InputError(f"nobody knows what the seed behind {path!r} was built from; plant seeds by esper.Growth")
    site = recipe.site
    if path == site.after:
        return recipe
    outer = path.removesuffix(site.after) if path.endswith(site.after) else ""
    inner = site.after.removesuffix(path) if site.after.endswith(path) else ""
    if not (outer or inner) or not site.around.startswith(inner) or seed.tap == Tap.INPUT:
        raise InputError(
            f"the seed behind {path!r} was grown behind {site.after!r} of another network, of which it reads more than is saved; "
            "save that network"
        )
    around = outer + site.around.removeprefix(inner)
    return recipe._replace(site=Site(site.name, path, around, site.stream, site.causal))


def _check_hosts(model: nn.Module, seeds: Sequence[_SavedSeed]) -> None:
    """Raise InputError if a submodule has other widths than the one that a seed was grown in."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is {kind_of(model)}; give an nn.Module")
    names = [seed.site for seed in seeds]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"the folder describes two seeds at site {twice[0]!r}; save it again")
    paths = dict(model.named_modules())
    for seed in seeds:
        if seed.after not in paths or seed.around not in paths:
            continue  # graft raises InputError for a submodule that is missing
        mine = _shapes(model, seed.planted_at)
        for name in (*seed.host, *mine):
            if mine.get(name) != seed.host.get(name):
                raise InputError(
                    f"the adapter was grown on a host whose {name} has shape {seed.host.get(name)}, and this one has "
                    f"{mine.get(name)}; attach it to a copy of its own host"
                )


def _built(model: nn.Module, seed: _SavedSeed, weights: Mapping[str, Tensor], path: Path, again: str) -> Planted:
    """Build a seed for a model, with weights from a file. InputError if they are not those that the blueprint has."""
    entry = get_blueprint(seed.blueprint, seed.kind, live=True)
    recipe = Recipe(seed.planted_at, seed.blueprint, seed.reads, seed.pointwise, seed.counts)
    if entry.copies:
        parts = dict(model.named_modules())
        if seed.after not in parts:
            raise InputError(f"the seed at {seed.site!r} is a copy of {seed.after!r}, which is not there; {_MODEL}")
        block, first = copy_of_block(parts[seed.after]), IN_BLOCK.removeprefix("seed.")
        own = {name.removeprefix(first): value for name, value in weights.items() if name.startswith(first)}
        shapes = {name: value.shape for name, value in block.state_dict().items()} if entry.copies == "beside" else {}
        with resized(block, shapes, own, seed.counts):
            planted = seed_of(entry, recipe, Blend[seed.blend], block)
    else:
        with drawn_with(0):
            planted = seed_of(entry, recipe, Blend[seed.blend])
        dtype = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), torch.float32)
        planted.to(dtype)
    try:
        planted.seed.load_state_dict(weights)
    except RuntimeError:  # the message of load_state_dict lists every parameter
        raise InputError(
            f"{path} has other parameters than blueprint {seed.blueprint!r} of this version; {again}"
        ) from None
    planted.mode, planted.attached = Mode.ON, seed.attached
    return planted


def _host_digest(network: nn.Module, sites: Iterable[str]) -> str:
    """Return 16 digits of the sha256 of `state_dict` without seeds. Every process of a sharded network calls this."""
    seeds = tuple(map(prefix_behind, _every_name(network, sites)))
    made = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        if isinstance(value, Tensor) and not name.startswith(seeds):
            made.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            made.update(bytes_of(gather(value.detach()).cpu()))
    return made.hexdigest()[:16]


def _every_name(network: nn.Module, paths: Iterable[str]) -> set[str]:
    """Return the names of submodules with those that they have beside, because they are used at several places."""
    named = list(network.named_modules(remove_duplicate=False))
    chosen = set(paths)
    same = {id(part) for path, part in named if path in chosen}
    return {path for path, part in named if id(part) in same}


def _shapes(network: nn.Module, site: Site) -> dict[str, list[int]]:
    """Return the shape of each parameter of the host in the submodules of a site."""
    return {
        (f"{path}." if path else "") + name: list(parameter.shape)
        for path in (site.after, site.around)
        for name, parameter in own_parameters(network.get_submodule(path)).items()
    }
