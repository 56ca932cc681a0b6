"""Grown networks as plain PyTorch: one module, one folder, loadable where only torch is installed."""

import dataclasses
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from esper.kasmina.blending import sigmoid
from esper.kasmina.blueprints import count, drawn_with, get_blueprint
from esper.kasmina.body import Body, Seed
from esper.kasmina.host import SegmentedHost
from esper.leyline.actions import Blend
from esper.leyline.disk import Patient, at_once, standing, write_folder
from esper.leyline.errors import InputError
from esper.leyline.reading import parse_json, read_kept
from esper.leyline.slots import Tap
from esper.leyline.stages import IN_BUDGET, Stage
from esper.leyline.view import Seeds

FORMAT = 1
MODEL, TOPOLOGY, PROGRAM = "model.safetensors", "topology.json", "model.pt2"
_LARGEST_TOPOLOGY = 2**20  # bytes of it that are read


class _Saved(BaseModel):
    model_config = ConfigDict(strict=True)


class _SavedHost(_Saved):
    name: str
    arguments: dict[str, Any]


class _SavedSeed(_Saved):
    slot: str
    after: int
    blueprint: str
    blend: Literal["add", "gate", "multiply"]
    alpha: float = Field(gt=0, le=1)
    reads: PositiveInt
    writes: PositiveInt


class _SavedTopology(_Saved):
    """What topology.json holds."""

    format: int
    host: _SavedHost | None  # None where no file can name the factory
    dtype: Literal["float16", "bfloat16", "float32", "float64"]
    input: list[int]
    parameters: int
    host_parameters: int
    seeds: list[_SavedSeed]
    unfinished: list[str]


class Graft(NamedTuple):
    """A fossilized seed of one network."""

    after: int  # segment whose output it changes
    tap: Tap
    blend: Blend
    alpha: float


class GrownNetwork(nn.Module):
    """A host with the seeds that were kept, as one plain module: (B, ...) -> (B, C)."""

    def __init__(self, host: SegmentedHost, seeds: Sequence[nn.Module], grafts: Sequence[Graft]) -> None:
        super().__init__()
        self.segments = host.segments
        self.seeds = nn.ModuleList(seeds)
        self.grafts = tuple(grafts)

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, C)."""
        h = x
        for index, segment in enumerate(self.segments):
            before, h = h, segment(h)
            for seed, graft in zip(self.seeds, self.grafts, strict=True):
                if graft.after == index:
                    h = _grow(seed, graft, {Tap.HERE: h, Tap.BEFORE: before, Tap.INPUT: x})
        return h


def _grow(seed: nn.Module, graft: Graft, sources: Mapping[Tap, Tensor]) -> Tensor:
    h, u = sources[Tap.HERE], sources[graft.tap]
    is_map = h.dim() == 4
    if is_map and u.shape[-2:] != h.shape[-2:]:
        u = F.adaptive_avg_pool2d(u, tuple(h.shape[-2:]))  # type: ignore[arg-type]
    delta = seed.get_submodule("delta")(u)
    if graft.blend == Blend.GATE:
        gate = sigmoid(seed.get_submodule("gate")(u.mean((-2, -1)) if is_map else u))
        delta = (gate[:, :, None, None] if is_map else gate) * delta
    elif graft.blend == Blend.MULTIPLY:
        delta = h * torch.tanh(delta)
    grown: Tensor = h + graft.alpha * delta
    return grown


def grown_network(
    factory: Callable[[], nn.Module], body: Body, seeds: Seeds, env: int, example: Tensor
) -> tuple[GrownNetwork, dict[str, Any]]:
    """The network of an environment on the CPU in evaluation mode, and its topology.

    Only fossilized seeds are in it; `topology["unfinished"]` names the slots of seeds that were left out.
    """
    with drawn_with(0):
        host = factory()
    assert isinstance(host, SegmentedHost)
    body.host.read(env, host.to(body.dtype))
    modules, grafts, grown, unfinished = [], [], [], []
    for s, slot in enumerate(body.slots):
        stage = Stage(seeds.stage[env, s])
        if stage in IN_BUDGET and stage != Stage.FOSSILIZED:
            unfinished.append(slot.name)
        if stage != Stage.FOSSILIZED:
            continue
        entry, blend = body.menu[seeds.blueprint[env, s]], Blend(seeds.blend[env, s])
        alpha, reads = float(seeds.alpha[env, s]), int(body.reads[env, s, seeds.blueprint[env, s]])
        seed = body.seed_module(seeds, env, s)
        modules.append(_trim(seed, blend))
        grafts.append(Graft(slot.after, entry.tap, blend, alpha))
        grown.append(
            {
                "slot": slot.name,
                "after": slot.after,
                "blueprint": entry.name,
                "blend": blend.name.lower(),
                "alpha": alpha,
                "reads": reads,
                "writes": int(body.taps[env, s, 0]),
            }
        )
    network = GrownNetwork(host, modules, grafts).to("cpu").eval()
    named, name = None, getattr(type(factory), "name", None)
    if dataclasses.is_dataclass(factory) and not isinstance(factory, type) and isinstance(name, str):
        named = {"name": name, "arguments": dataclasses.asdict(factory)}  # a host that a file can name
    topology = {
        "format": FORMAT,
        "host": named,
        "dtype": str(body.dtype).removeprefix("torch."),
        "input": list(example.shape[1:]),
        "parameters": count(network),
        "host_parameters": int(body.host_params[env]),
        "seeds": grown,
        "unfinished": unfinished,
    }
    return network, topology


def _trim(seed: nn.Module, blend: Blend) -> nn.Module:
    """A seed without the map that its blend does not use."""
    if blend != Blend.GATE:
        del seed.gate
    return seed


def save_network(
    folder: Path, network: nn.Module, topology: Mapping[str, Any], example: Tensor, patience: Patient = at_once
) -> str | None:
    """Write model.safetensors, topology.json and model.pt2, a program for any batch size that needs torch alone, as a folder.

    It takes the place of a network of that name, and a crash leaves the old one or the new.

    example (B, ...) with B >= 2 fixes the shape and dtype of an input. A network that torch.export cannot trace is written
    without a program; returns the reason then, and None otherwise.
    """
    program, failure = None, None
    try:
        batch = torch.export.Dim("batch", min=1)
        program = torch.export.export(network, (example,), dynamic_shapes=({0: batch},))
    except Exception as error:  # torch.export raises errors of many kinds, none of which may cost the trained weights
        failure = (str(error).splitlines() or [type(error).__name__])[0]
    # Copies, because safetensors refuses a weight that two layers share.
    weights = network.state_dict().items()
    files = {
        MODEL: save({name: value.clone(memory_format=torch.contiguous_format) for name, value in weights}),
        TOPOLOGY: (json.dumps(topology, indent=2, allow_nan=False) + "\n").encode(),
    }
    if program is not None:
        stored = io.BytesIO()
        torch.export.save(program, stored)
        files[PROGRAM] = stored.getvalue()
    strange = {path.name for path in folder.iterdir()} - {MODEL, TOPOLOGY, PROGRAM} if folder.exists() else ()
    if strange:
        raise InputError(f"{folder} holds {', '.join(sorted(strange))} beside a network; name another folder")

    def put() -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_folder(folder, files)

    patience(folder, put)
    return failure


def load_network(folder: Path, host: Callable[[], nn.Module]) -> GrownNetwork:
    """Rebuild a saved network from topology.json and model.safetensors; `host` makes a host of the saved architecture.

    Raises InputError, naming the file, where one is missing, is not what it should be, or does not fit the host.
    """
    folder = standing(folder)
    topology = read_topology(folder)
    with drawn_with(0):
        base = host()
    if not isinstance(base, SegmentedHost):
        raise InputError(f"the host factory returned a {type(base).__name__}; return an esper.SegmentedHost")
    modules, grafts, kinds = [], [], {slot.after: slot.kind for slot in base.slots}
    parameters = count(base)
    for seed in topology["seeds"]:
        if seed["after"] not in kinds:
            raise InputError(
                f"{folder / TOPOLOGY} has a seed behind segment {seed['after']}, where the host has no slot; "
                "give the factory of the host that was grown"
            )
        entry, blend = get_blueprint(seed["blueprint"], kinds[seed["after"]]), Blend[seed["blend"].upper()]
        gate = seed["reads"] if blend == Blend.GATE else 1  # wide only where it is not trimmed off again
        parameters += entry.parameters(seed["reads"], seed["writes"]) + gate
        check_size(folder, parameters)
        modules.append(_trim(Seed(entry.build(seed["reads"], seed["writes"]), gate), blend))
        grafts.append(Graft(seed["after"], entry.tap, blend, seed["alpha"]))
    network = GrownNetwork(base, modules, grafts).to(getattr(torch, topology["dtype"]))
    try:
        _check_tensors(folder / MODEL, network)
        network.load_state_dict(load_file(folder / MODEL))
    except OSError as error:
        raise InputError(f"{folder / MODEL}: {error.strerror or error}; export the network again") from None
    except Exception as error:  # safetensors and load_state_dict each have their own; both mean the file does not fit
        reason = str(error).splitlines()[-1].strip()
        raise InputError(
            f"{folder / MODEL} does not fit the network of {TOPOLOGY}: {reason}; export it again"
        ) from None
    return network.eval()


def _check_tensors(path: Path, network: nn.Module) -> None:
    """See by its header that a file of weights holds those of a network and no others. ValueError where it does not."""
    wanted = network.state_dict()
    with safe_open(path, "pt") as file:
        if odd := sorted(wanted.keys() ^ set(file.keys())):
            raise ValueError(f"tensor {odd[0]} is {'missing' if odd[0] in wanted else 'unknown'}")
        for name, tensor in wanted.items():
            shape = file.get_slice(name).get_shape()
            if shape != list(tensor.shape):
                raise ValueError(f"tensor {name} is {tuple(shape)}, the network has {tuple(tensor.shape)}")


def check_size(folder: Path, parameters: int) -> None:
    """InputError where model.safetensors is missing, or has less than a byte for each of so many parameters.

    So what a topology asks for is no larger than what was brought along, and is built only then.
    """
    path = standing(folder) / MODEL
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InputError(f"{path} is a link or no file, which is not read; put what it stands for in its place")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InputError(f"{folder / MODEL}: {error.strerror}; export the network again") from None
    if parameters > size:
        raise InputError(
            f"{folder / MODEL} does not fit the network of {TOPOLOGY}: it holds {size:,} bytes, and {TOPOLOGY} asks for "
            f"{parameters:,} parameters; export it again"
        )


def read_topology(folder: Path) -> dict[str, Any]:
    """topology.json of an exported network. InputError where it is missing, damaged or of another format."""
    path = standing(folder) / TOPOLOGY
    data = read_kept(path, _LARGEST_TOPOLOGY, "give a folder that `esper grow` or `esper export` wrote")
    topology = parse_json(data, path, "export the network again")
    if not isinstance(topology, dict) or topology.get("format") != FORMAT:
        found = topology.get("format") if isinstance(topology, dict) else None
        raise InputError(f"{path} has format {found!r}, but this version of Esper reads format {FORMAT}")
    try:
        _SavedTopology.model_validate(topology)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path} is damaged at {where!r}: {first['msg']}; export the network again") from None
    return topology
