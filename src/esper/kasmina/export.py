"""Grown networks as plain PyTorch: one module, one folder, loadable where only torch is installed."""

import dataclasses
import inspect
import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from esper.kasmina.blueprints import count, drawn_with, get_blueprint
from esper.kasmina.body import Body
from esper.kasmina.host import SegmentedHost
from esper.kasmina.network import Graft, GrownNetwork
from esper.kasmina.regrow import RegrownHost, as_host
from esper.kasmina.slot import Seed
from esper.kasmina.sums import SUMS, check_sum, sums_of
from esper.leyline.actions import Blend
from esper.leyline.batches import Batch, Shapes, arguments, cast, leaf_names, map_leaves, shape_leaves
from esper.leyline.errors import InputError
from esper.leyline.parsing import parse_json
from esper.leyline.stages import IN_BUDGET, Stage
from esper.leyline.task import Interface, Label, Scaling
from esper.leyline.view import Seeds
from esper.store.disk import Retry, find_folder, write_folder, write_once
from esper.store.reading import read_kept

FORMATS = (2, 3)
"""Formats of topology.json that are read. One that holds everything is written, the lowest: 2 where an example is one tensor of
floating-point numbers, or of bytes that the network standardizes, and has one label or any targets; else 3."""
MODEL, TOPOLOGY, PROGRAM = "model.safetensors", "topology.json", "model.pt2"
FILES = frozenset({MODEL, TOPOLOGY, PROGRAM, SUMS})
"""All that may stand in the folder of a network."""
_LARGEST_TOPOLOGY = 2**20  # bytes of it that are read
_LARGEST_HEADER = 2**22  # bytes of the names and shapes in model.safetensors


_Dtype = Literal["uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64"]
_Shape = list[PositiveInt]


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


def _names(classes: list[Label]) -> list[Label]:
    if len(classes) < 2 or len({type(name) for name in classes}) > 1 or len(set(classes)) < len(classes):
        raise ValueError("classes are two or more different names of one type")
    return classes


class _SavedTopology(_Saved):
    """What topology.json holds."""

    format: int
    host: _SavedHost | None  # None where no file can name the factory
    dtype: Literal["float16", "bfloat16", "float32", "float64"]
    input: _Shape | list[_Shape] | dict[str, _Shape]  # shape of one example, or of each of its tensors
    standardize: list[PositiveInt] | None  # shape of the mean and the deviation, which are among the weights
    classes: Annotated[list[str | int | float | bool], AfterValidator(_names)] | None  # in the order of the outputs
    target: list[PositiveInt]  # shape of one example's y
    columns: list[str] | None  # names of the features
    restore: list[PositiveInt] | None = None  # likewise of targets that hosts return standardized; absent for others
    example: _Dtype | list[_Dtype] | dict[str, _Dtype]  # dtype of x, likewise
    parameters: int
    host_parameters: int
    seeds: list[_SavedSeed]
    unfinished: list[str]


def grown_network(
    factory: Callable[[], nn.Module], body: Body, seeds: Seeds, env: int, interface: Interface
) -> tuple[GrownNetwork, dict[str, Any]]:
    """The network of an environment on the CPU in evaluation mode, and its topology.

    The network takes and returns what the interface says, so it does the scaling that was done outside the host. Only
    fossilized seeds are in it; `topology["unfinished"]` names the slots of seeds that were left out.
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
        blueprint, blend = int(seeds.blueprint[env, s]), Blend(seeds.blend[env, s])
        entry, alpha = body.layout.menu[blueprint], float(seeds.alpha[env, s])
        reads, writes = body.table.widths_of(env, s, blueprint)
        seed = body.seed_module(seeds, env, s)
        modules.append(_trim(seed, blend))
        grafts.append(Graft(slot.after, entry.tap, blend, alpha, slot.kind))
        grown.append(
            {
                "slot": slot.name,
                "after": slot.after,
                "blueprint": entry.name,
                "blend": blend.name.lower(),
                "alpha": alpha,
                "reads": reads,
                "writes": writes,
            }
        )
    network = GrownNetwork(host, modules, grafts, interface, _original(factory)).to("cpu", body.dtype).eval()
    topology = {
        "format": _format(interface),
        "host": _saved_host(factory),
        "dtype": str(body.dtype).removeprefix("torch."),
        "input": _json_shapes(interface.inputs),
        "standardize": None if interface.scaling is None else list(interface.scaling.mean.shape),
        "classes": None if interface.classes is None else list(interface.classes),
        "target": list(interface.target),
        "columns": None if interface.columns is None else list(interface.columns),
        "parameters": count(network),
        "host_parameters": int(body.table.host_params[env]),
        "seeds": grown,
        "unfinished": unfinished,
    }
    if interface.target_scaling is not None:
        topology["restore"] = list(interface.target_scaling.mean.shape)
    return network, topology


def _format(interface: Interface) -> int:
    """The lowest format that holds what a network takes and returns."""
    several = leaf_names(interface.inputs) != ["x"]
    whole = interface.whole is not None and interface.scaling is None
    return 3 if several or whole or (interface.classes is not None and interface.target) else 2


def _json_shapes(inputs: Shapes) -> Any:
    if isinstance(inputs, dict):
        return {name: list(shape) for name, shape in inputs.items()}
    return [list(part) if isinstance(part, tuple) else part for part in inputs]


def _shapes(saved: Any) -> Shapes:
    """The shapes that `_json_shapes` wrote."""
    if isinstance(saved, dict):
        return {name: tuple(shape) for name, shape in saved.items()}
    shapes: Shapes = tuple(tuple(part) if isinstance(part, list) else part for part in saved)
    return shapes


def example_of(folder: Path, topology: Mapping[str, Any], largest: int) -> Batch:
    """Two examples of 0 with the shapes and dtypes of a topology. InputError where they would hold over `largest` numbers."""
    inputs = _shapes(topology["input"])
    if sum(math.prod(shape) for shape in shape_leaves(inputs)) > largest:
        raise InputError(f"{folder / TOPOLOGY} is damaged at 'input': {topology['input']}; export the network again")
    made = [
        torch.zeros(2, *shape, dtype=dtype)
        for shape, dtype in zip(shape_leaves(inputs), _dtypes(topology), strict=True)
    ]
    if isinstance(inputs, dict):
        return dict(zip(inputs, made, strict=True))
    return tuple(made) if leaf_names(inputs) != ["x"] else made[0]


def _dtypes(topology: Mapping[str, Any]) -> list[torch.dtype]:
    """The dtype of each tensor of an example."""
    example = topology["example"]
    names = list(example.values()) if isinstance(example, dict) else example if isinstance(example, list) else [example]
    return [getattr(torch, name) for name in names]


def _named(factory: object) -> Any:
    """The dataclass by which a file can name the hosts of a factory; None where there is none."""
    made = getattr(factory, "architecture", factory)  # of a factory that fills another's hosts with weights
    known = dataclasses.is_dataclass(made) and not isinstance(made, type)
    return made if known and isinstance(getattr(type(made), "name", None), str) else None


def _saved_host(factory: object) -> dict[str, Any] | None:
    named = _named(factory)
    return None if named is None else {"name": type(named).name, "arguments": dataclasses.asdict(named)}


def _original(factory: object) -> Callable[[], nn.Module] | None:
    """The named factory of the host that was grown first, without any seed; None where a file cannot name it."""
    found: Callable[[], nn.Module] | None = factory.original if isinstance(factory, RegrownHost) else _named(factory)
    return found


def _trim(seed: nn.Module, blend: Blend) -> nn.Module:
    """A seed without the map that its blend does not use."""
    if blend != Blend.GATE:
        del seed.gate
    return seed


def save_network(
    folder: Path,
    network: nn.Module,
    topology: Mapping[str, Any],
    example: Batch,
    retry: Retry = write_once,
    untraceable: str | None = None,
) -> str | None:
    """Write model.safetensors, topology.json and model.pt2, a program for any batch size that needs torch alone, as a folder.

    SHA256SUMS beside them names the sha256 of each. The folder takes the place of a network of that name, and a crash leaves
    the old one or the new. torch.export.load of a program can execute code, so it is for programs of a trusted origin.

    example (B, ...) with B >= 2 fixes the shapes and dtypes of an input, of which floating point is taken in the network's. A
    network that torch.export cannot trace is written
    without a program; returns the reason then, and None otherwise. `untraceable` is the reason where it is known beforehand.
    """
    example = cast(example, getattr(torch, topology["dtype"]))
    program, failure = (None, untraceable) if untraceable is not None else _program(network, example)
    dtypes = map_leaves(lambda leaf: str(leaf.dtype).removeprefix("torch."), example)
    stored_topology = {**topology, "example": dtypes}
    # Copies, because safetensors refuses a weight that two layers share.
    weights = network.state_dict().items()
    files = {
        MODEL: save({name: value.clone(memory_format=torch.contiguous_format) for name, value in weights}),
        TOPOLOGY: (json.dumps(stored_topology, indent=2, allow_nan=False) + "\n").encode(),
    }
    if program is not None:
        files[PROGRAM] = program
    files[SUMS] = sums_of(files)
    strange = {path.name for path in folder.iterdir()} - FILES if folder.exists() else ()
    if strange:
        raise InputError(f"{folder} holds {', '.join(sorted(strange))} beside a network; name another folder")

    def put() -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_folder(folder, files)

    retry(folder, put)
    return failure


def _program(network: nn.Module, example: Batch) -> tuple[bytes | None, str | None]:
    """(the program of a network for any batch size, None) or (None, why torch.export cannot trace it).

    torch.export prints graphs and warnings of what it fails at to stderr, for whoever works on it; the reason is enough here.
    """
    disabled, stored = logging.root.manager.disable, io.BytesIO()
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = torch.export.Dim("batch", min=1)
            positional, named = arguments(example)
            axes: Any = tuple({0: batch} for _ in positional)
            if named:
                axes = {name: {0: batch} for name in named}
            elif len(positional) > 1:  # as the signature of GrownNetwork.forward has it
                axes = (axes[0], axes[1:])
            with _taking(network, named):
                program = torch.export.export(network, positional, named, dynamic_shapes=axes)
            torch.export.save(program, stored)
    except Exception as error:  # torch.export raises errors of many kinds, none of which may cost the trained weights
        return None, (str(error).splitlines() or [type(error).__name__])[0]
    finally:
        logging.disable(disabled)
    return stored.getvalue(), None


@contextmanager
def _taking(network: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Show torch.export a forward with parameters of these names: of `**named` it cannot let the batch vary."""
    if not names:
        yield
        return

    def forward(**named: Tensor) -> Any:
        return type(network).forward(network, **named)

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    network.forward = forward
    try:
        yield
    finally:
        del network.forward


def load_network(folder: Path, host: Callable[[], nn.Module]) -> GrownNetwork:
    """Rebuild a saved network from topology.json and model.safetensors; `host` makes a host of the saved architecture.

    Raises InputError, naming the file, where one is missing, is not what it should be, or does not fit the host.
    """
    folder = find_folder(folder)
    topology = read_topology(folder)
    with drawn_with(0):
        base = host()
    original = base.original if isinstance(base, GrownNetwork) else _named(host)
    if isinstance(base, GrownNetwork):
        base = as_host(base)
    if not isinstance(base, SegmentedHost):
        raise InputError(
            f"the host factory returned a {type(base).__name__}; return an esper.SegmentedHost, or a grown network"
        )
    modules, grafts, kinds = [], [], {slot.after: slot.kind for slot in base.slots}
    scaled = [shape for name in ("standardize", "restore") if (shape := topology.get(name)) is not None]
    parameters = count(base) + sum(2 * math.prod(shape) for shape in scaled)
    check_size(folder, parameters)
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
        grafts.append(Graft(seed["after"], entry.tap, blend, seed["alpha"], kinds[seed["after"]]))
    network = GrownNetwork(base, modules, grafts, _interface(folder, topology), original)
    network = network.to(getattr(torch, topology["dtype"]))
    try:
        _check_tensors(folder / MODEL, network)
        check_sum(folder / MODEL)
        network.load_state_dict(load_file(folder / MODEL))
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{folder / MODEL}: {error.strerror or error}; export the network again") from None
    except Exception as error:  # safetensors and load_state_dict each have their own; both mean the file does not fit
        reason = str(error).splitlines()[-1].strip()
        raise InputError(
            f"{folder / MODEL} does not fit the network of {TOPOLOGY}: {reason}; export it again"
        ) from None
    return network.eval()


def _interface(folder: Path, topology: Mapping[str, Any]) -> Interface:
    """What a saved network takes and returns; means and deviations are still to be read. InputError where they do not fit."""
    inputs, shape, classes = topology["input"], topology["standardize"], topology["classes"]
    shapes, example = _shapes(inputs), topology["example"]
    several = leaf_names(shapes) != ["x"]
    alike = example.keys() == inputs.keys() if isinstance(inputs, dict) and isinstance(example, dict) else not several
    if isinstance(inputs, list) and several:
        alike = isinstance(example, list) and len(example) == len(inputs)
    if not alike or (not several and not isinstance(example, str)):
        raise InputError(
            f"{folder / TOPOLOGY} has examples of shape {inputs} and dtype {example}; export the network again"
        )
    if shape is not None and (
        several
        or len(shape) != len(inputs)
        or any(own not in (1, whole) for own, whole in zip(shape, inputs, strict=True))
    ):
        raise InputError(
            f"{folder / TOPOLOGY} has a mean of shape {shape} for inputs of shape {inputs}; export the network again"
        )
    restored, target = topology.get("restore"), topology["target"]
    if restored is not None and restored != target:
        raise InputError(
            f"{folder / TOPOLOGY} has a mean of shape {restored} for targets of shape {target}; export the network again"
        )
    scaling, target_scaling = (
        None if size is None else Scaling(torch.zeros(size), torch.ones(size)) for size in (shape, restored)
    )
    classes, columns = (None if names is None else tuple(names) for names in (classes, topology["columns"]))
    whole = tuple(None if dtype.is_floating_point else dtype for dtype in _dtypes(topology))
    return Interface(shapes, scaling, classes, tuple(target), columns, target_scaling, whole if any(whole) else None)


def _check_tensors(path: Path, network: nn.Module) -> None:
    """See by its header that a file of weights holds those of a network and no others. ValueError where it does not.

    A file that is larger than they are is not opened, as the whole of it would be mapped into memory.
    """
    wanted = network.state_dict()
    size, most = path.stat().st_size, sum(each.nbytes for each in wanted.values()) + _LARGEST_HEADER
    if size > most:
        raise ValueError(f"it has {size:,} bytes, and the network takes at most {most:,}")
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
    path = find_folder(folder) / MODEL
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
    path = find_folder(folder) / TOPOLOGY
    data = read_kept(path, _LARGEST_TOPOLOGY, "give a folder that `esper grow` or `esper export` wrote")
    topology = parse_json(data, path, "export the network again")
    if not isinstance(topology, dict) or topology.get("format") not in FORMATS:
        found = topology.get("format") if isinstance(topology, dict) else None
        known = " and ".join(map(str, FORMATS))
        raise InputError(f"{path} has format {found!r}, but this version of Esper reads the formats {known}")
    try:
        _SavedTopology.model_validate(topology)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path} is damaged at {where!r}: {first['msg']}; export the network again") from None
    check_sum(path)
    return topology
