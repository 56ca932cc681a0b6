"""Save grown networks as plain PyTorch modules: one folder each, which loads where only torch is installed."""

import dataclasses
import inspect
import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.kasmina.blueprints import count, drawn_with, get_blueprint
from esper.kasmina.graft.find_sites import Hidden
from esper.kasmina.host import CutHost, SegmentedHost, drawn_host
from esper.kasmina.network.grown_network import Graft, GrownNetwork, RegrownHost, as_host
from esper.kasmina.network.saving import replace_folder
from esper.kasmina.slot import Seed
from esper.kasmina.stack.body import Body
from esper.kasmina.stack.wider_rows import HiddenWidening, wider_hosts
from esper.leyline.config.parsing import parse_model
from esper.leyline.data.batches import (
    Batch,
    arguments,
    cast,
    map_leaves,
    named_leaves,
    shapes_from_json,
    shapes_to_json,
)
from esper.leyline.data.preprocess import preprocess_from_json
from esper.leyline.data.task import Interface, Label, Scaling
from esper.leyline.lifecycle.slots import Tap
from esper.leyline.lifecycle.view import Seeds
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, Blend, Stage
from esper.leyline.messages import InputError, first_line, kind_of, system_in_words
from esper.store.disk import SUMS, Retry, check_sum, find_folder, read_kept, sums_of, write_once

FORMATS = (2, 3, 4, 5, 6)
"""Formats of topology.json that are read. The lowest one that can describe the network is written: 6 if a seed goes around
several segments; else 5 if the host became wider while it grew; else 4 if `predict` takes raw features, which a transformer of
the user makes numbers of; else 2 if an example is one tensor of floating-point numbers, or of bytes that the network
standardizes, and has one label or any targets; else 3."""
MODEL, TOPOLOGY, PROGRAM = "model.safetensors", "topology.json", "model.pt2"
FILES = frozenset({MODEL, TOPOLOGY, PROGRAM, SUMS})
"""Names of the files that the folder of a network may contain."""
_LARGEST_TOPOLOGY = 2**20  # largest topology.json that is read, in bytes
_LARGEST_EXAMPLE = 2**26  # numbers in the examples with which a host is cut into segments
_LARGEST_HEADER = 2**22  # largest header (names and shapes) of model.safetensors that is read, in bytes


_Dtype = Literal["uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64"]
_Shape = list[PositiveInt]


class _ExportedPart(BaseModel):
    model_config = ConfigDict(strict=True)


class _SavedHost(_ExportedPart):
    name: str
    arguments: dict[str, Any]


class _ExportedSeed(_ExportedPart):
    slot: str
    after: int
    around: int | None = None  # index of the segment whose input it reads, if that is an earlier one than `after`
    blueprint: str
    blend: Literal["add", "gate", "multiply"]
    alpha: float = Field(gt=0, le=1)
    reads: PositiveInt
    writes: PositiveInt


def _names(classes: list[Label]) -> list[Label]:
    if len(classes) < 2 or len({type(name) for name in classes}) > 1 or len(set(classes)) < len(classes):
        raise ValueError("classes must be two or more different names of one type")
    return classes


class _SavedHidden(_ExportedPart):
    writers: Annotated[list[str], Field(min_length=1)]
    readers: list[str]
    norms: list[str]


class _SavedWidening(_ExportedPart):
    factor: int = Field(ge=2)
    hidden: list[_SavedHidden]
    slots: list[bool]


class _SavedTopology(_ExportedPart):
    """Describes the content of topology.json."""

    format: int
    host: _SavedHost | None  # None if the factory has no name that a file can hold
    dtype: Literal["float16", "bfloat16", "float32", "float64"]
    input: _Shape | list[_Shape] | dict[str, _Shape]  # shape of one example, or of each of its tensors
    standardize: list[PositiveInt] | None  # shape of the mean and of the deviation
    classes: Annotated[list[str | int | float | bool], AfterValidator(_names)] | None  # in the order of the outputs
    target: list[PositiveInt]  # shape of one example's y
    columns: list[str] | None  # names of the features
    restore: list[PositiveInt] | None = None  # the same for targets; None if they are raw
    widened: list[_SavedWidening] | None = None  # how the host became wider while it grew
    preprocess: dict[str, Any] | None = None  # what `predict` does with raw features first
    example: _Dtype | list[_Dtype] | dict[str, _Dtype]  # dtype of one example, or of each of its tensors
    parameters: int
    host_parameters: int
    seeds: list[_ExportedSeed]
    unfinished: list[str]


def grown_network(
    factory: Callable[[], nn.Module],
    body: Body,
    seeds: Seeds,
    env: int,
    interface: Interface,
    widenings: Sequence[HiddenWidening] = (),
) -> tuple[GrownNetwork, dict[str, Any]]:
    """Return the network of an environment on the CPU in evaluation mode, and its topology.

    The network takes and returns what the interface says, so it includes the scaling that was done outside the host. It
    contains only fossilized seeds; `topology["unfinished"]` names the slots of seeds that were left out. widenings: of the
    hosts of the factory since the run began.
    """
    host = drawn_host(wider_hosts(factory, widenings))
    body.host.read(env, host.to(body.dtype))
    modules, grafts, kept, unfinished = [], [], [], []
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
        around = slot.start if entry.tap == Tap.BEFORE and slot.start < slot.after else None
        grafts.append(Graft(slot.after, entry.tap, blend, alpha, slot.kind, entry.name, around))
        place = {"slot": slot.name, "after": slot.after} | ({} if around is None else {"around": around})
        kind = {"blueprint": entry.name, "blend": blend.name.lower(), "alpha": alpha}
        kept.append({**place, **kind, "reads": reads, "writes": writes})
    named = _named(factory)
    original = factory.original if isinstance(factory, RegrownHost) else named  # of the host without any seed
    original = None if widenings else original  # it has other widths
    network = GrownNetwork(host, modules, grafts, interface, original).to("cpu", body.dtype).eval()
    several = list(named_leaves(interface.inputs)) != ["x"] or (interface.classes is not None and interface.target)
    whole = interface.whole is not None and interface.scaling is None
    topology = {
        "format": max(
            6 * any(graft.around is not None for graft in grafts),
            5 * bool(widenings),
            4 * (interface.preprocess is not None),
            3 * bool(several or whole),
            2,
        ),
        "host": None if named is None else {"name": type(named).name, "arguments": dataclasses.asdict(named)},
        "dtype": str(body.dtype).removeprefix("torch."),
        "input": shapes_to_json(interface.inputs),
        "standardize": None if interface.scaling is None else list(interface.scaling.mean.shape),
        "classes": None if interface.classes is None else list(interface.classes),
        "target": list(interface.target),
        "columns": None if interface.columns is None else list(interface.columns),
        "parameters": count(network),
        "host_parameters": int(body.table.host_params[env]),
        "seeds": kept,
        "unfinished": unfinished,
    }
    if interface.target_scaling is not None:
        topology["restore"] = list(interface.target_scaling.mean.shape)
    if interface.preprocess is not None:
        topology["preprocess"] = interface.preprocess.model_dump(mode="json")
    if widenings:
        topology["widened"] = []
        for each in widenings:
            hidden = [{kind: sorted(paths) for kind, paths in own._asdict().items()} for own in each.hidden]
            topology["widened"].append({"factor": each.factor, "hidden": hidden, "slots": list(each.slots)})
    return network, topology


def example_of(folder: Path, topology: Mapping[str, Any], largest: int) -> Batch:
    """Return two examples of zeros for a topology. Raises InputError if they would hold more than `largest` numbers."""
    inputs = shapes_from_json(topology["input"])
    shapes = named_leaves(inputs)
    if sum(map(math.prod, shapes.values())) > largest:
        raise InputError(f"{folder / TOPOLOGY} is damaged at 'input': {topology['input']}; export the network again")
    pairs = zip(shapes.values(), _dtypes(topology).values(), strict=True)
    made = [torch.zeros(2, *shape, dtype=dtype) for shape, dtype in pairs]
    if isinstance(inputs, dict):
        return dict(zip(inputs, made, strict=True))
    return tuple(made) if list(shapes) != ["x"] else made[0]


def _dtypes(topology: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor of an example, by its name as in `named_leaves`."""
    example = topology["example"]
    names = {"x": example} if isinstance(example, str) else named_leaves(example) if example else {}
    return {name: getattr(torch, dtype) for name, dtype in names.items()}


def _named(factory: object) -> Any:
    """Return the dataclass by which a file names the hosts of a factory; None if no file can name them."""
    made = getattr(factory, "architecture", factory)  # of the hosts that a factory fills with weights
    known = dataclasses.is_dataclass(made) and not isinstance(made, type)
    return made if known and isinstance(getattr(type(made), "name", None), str) else None


def _trim(seed: nn.Module, blend: Blend) -> nn.Module:
    """Return a seed without the gate, unless its blend is GATE."""
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
    """Write model.safetensors, topology.json, model.pt2 and SHA256SUMS, the sha256 of each, as a folder.

    model.pt2 is a program for any batch size that needs only torch. The folder replaces a network of the same name;
    after a crash it holds the old network or the new one. torch.export.load of a program can execute code, so load only
    programs that you trust.

    example (B, ...) with B >= 2 fixes the shapes and dtypes of an input; floating-point tensors are cast to the dtype
    of the network. A network that torch.export cannot trace is written without a program. The return value is then the
    reason, and None otherwise. `untraceable` is the reason if it is known beforehand.
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
    retry(folder, partial(replace_folder, folder, files, FILES))
    return failure


def _program(network: nn.Module, example: Batch) -> tuple[bytes | None, str | None]:
    """Return the program of a network for any batch size and None, or None and the reason why torch.export cannot trace it."""
    disabled, (positional, named) = logging.root.manager.disable, arguments(example)
    logging.disable(logging.CRITICAL)

    def forward(**named: Tensor) -> Any:
        return type(network).forward(network, **named)

    try:
        if named:  # as parameters by name, because torch.export cannot vary the batch size of arguments in `**named`
            parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in named]
            forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
            network.forward = forward
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return program_of(network, positional, named, torch.export.Dim("batch", min=1)), None
    except Exception as error:  # torch.export raises errors of many kinds; the trained weights are saved in any case
        return None, first_line(error)
    finally:
        if named:
            del network.forward
        logging.disable(disabled)


def program_of(network: nn.Module, positional: tuple[Any, ...], named: dict[str, Any], axis: Any) -> bytes:
    """Return the file of torch.export of a network; axis 0 of every tensor that it takes has the length of `axis`."""
    bound = inspect.signature(network.forward).bind(*positional, **named).arguments  # as torch.export names shapes
    shapes = pytree.tree_map(lambda leaf: {0: axis} if isinstance(leaf, Tensor) else None, dict(bound))
    file = io.BytesIO()
    torch.export.save(torch.export.export(network, positional, named, dynamic_shapes=shapes), file)
    return file.getvalue()


def load_network(folder: Path, host: Callable[[], nn.Module]) -> GrownNetwork:
    """Rebuild a saved network; `host` makes a host of its architecture. InputError if a file is damaged or does not fit."""
    folder = find_folder(folder)
    topology = read_topology(folder)
    with drawn_with(0):
        base = host()
    original = base.original if isinstance(base, GrownNetwork) else _named(host)
    if topology.get("widened"):
        original = None
    if isinstance(base, GrownNetwork):
        base = as_host(base)
    if isinstance(base, nn.Module) and not isinstance(base, SegmentedHost):
        example = example_of(folder, topology, _LARGEST_EXAMPLE)
        base = CutHost(host, example.float() if topology["standardize"] and isinstance(example, Tensor) else example)()
    if not isinstance(base, SegmentedHost):
        raise InputError(f"the host factory returned {kind_of(base)}; return an nn.Module, or a grown network")
    _widen(base, folder, topology)
    modules, grafts, slots = [], [], {slot.after: slot for slot in base.slots}
    scaled = [shape for name in ("standardize", "restore") if (shape := topology.get(name)) is not None]
    parameters = count(base) + sum(2 * math.prod(shape) for shape in scaled)
    check_size(folder, parameters)
    for seed in topology["seeds"]:
        slot = slots.get(seed["after"])
        if slot is None or seed["writes"] != slot.width:
            lacks = "no slot" if slot is None else f"no slot of width {seed['writes']}"
            raise InputError(
                f"{folder / TOPOLOGY} has a seed behind segment {seed['after']}, where the host has {lacks}; "
                "give the factory of the host that was grown"
            )
        entry, blend = get_blueprint(seed["blueprint"], slot.kind), Blend[seed["blend"].upper()]
        gate = seed["reads"] if blend == Blend.GATE else 1  # a gate that _trim removes need not be wide
        parameters += entry.parameters(seed["reads"], seed["writes"]) + gate
        check_size(folder, parameters)
        modules.append(_trim(Seed(entry.build(seed["reads"], seed["writes"]), gate), blend))
        around = seed.get("around")
        if around is not None and not (0 <= around < slot.after and entry.tap == Tap.BEFORE):
            raise InputError(
                f"{folder / TOPOLOGY} has a seed {entry.name!r} behind segment {slot.after} that is around segment {around}, "
                "where no bypass can begin; export the network again"
            )
        grafts.append(Graft(slot.after, entry.tap, blend, seed["alpha"], slot.kind, entry.name, around))
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
    except Exception as error:  # of safetensors or load_state_dict: the file does not fit
        reason = str(error).splitlines()[-1].strip()
        raise InputError(
            f"{folder / MODEL} does not fit the network of {TOPOLOGY}: {reason}; give the host that it was grown with, or export "
            "it again"
        ) from None
    return network.eval()


def _widen(host: SegmentedHost, folder: Path, topology: Mapping[str, Any]) -> None:
    """Give a host the widths of the saved network. InputError if it is another one, or the file is too small for them."""
    for saved in topology.get("widened") or ():
        hidden = tuple(Hidden(**{kind: set(paths) for kind, paths in each.items()}) for each in saved["hidden"])
        widening = HiddenWidening(saved["factor"], hidden, tuple(saved["slots"]), {}, {})
        check_size(folder, widening.parameters(host, saved["factor"]))
        try:
            if len(saved["slots"]) != len(host.slots):
                raise InputError(f"the network has {len(saved['slots'])} slots, and the host {len(host.slots)}")
            widening.apply(host, 0)
        except (AttributeError, InputError, RuntimeError) as error:  # of layers that are not there, or of another kind
            raise InputError(
                f"{folder / TOPOLOGY} names hidden features that the host does not have: {first_line(error)}; give the factory "
                "of the host that was grown"
            ) from None


def _interface(folder: Path, topology: Mapping[str, Any]) -> Interface:
    """Return what a saved network takes and returns; means and deviations are read later. InputError if entries do not fit."""
    inputs, shape, classes = topology["input"], topology["standardize"], topology["classes"]
    shapes, example, known = shapes_from_json(inputs), topology["example"], _dtypes(topology)
    several = list(named_leaves(shapes)) != ["x"]
    if named_leaves(shapes).keys() != known.keys():
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
    whole = tuple(None if dtype.is_floating_point else dtype for dtype in known.values())
    dtypes, preprocess = whole if any(whole) else None, None
    if (before := topology.get("preprocess")) is not None:
        preprocess = preprocess_from_json(before, -1 if several else math.prod(inputs), str(folder / TOPOLOGY))
    return Interface(shapes, scaling, classes, tuple(target), columns, target_scaling, dtypes, preprocess)


def _check_tensors(path: Path, network: nn.Module) -> None:
    """Raise ValueError if a file of weights has other tensors by its header, or is larger, which would be mapped as a whole."""
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
    """Raise InputError if model.safetensors is missing, or has less than one byte per parameter.

    This check runs before the network is built, so a topology cannot ask for much more memory than its weights take on
    disk.
    """
    path = find_folder(folder) / MODEL
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InputError(f"{path} is a link or not a regular file, and is not read; put the file itself in its place")
    with system_in_words(str(folder / MODEL), "export the network again"):
        size = path.stat().st_size
    if parameters > size:
        raise InputError(
            f"{folder / MODEL} does not fit the network of {TOPOLOGY}: it holds {size:,} bytes, and {TOPOLOGY} asks for "
            f"{parameters:,} parameters; export it again"
        )


def read_topology(folder: Path) -> dict[str, Any]:
    """Read topology.json of an exported network. Raises InputError if it is missing, damaged or of another format."""
    path = find_folder(folder) / TOPOLOGY
    data = read_kept(path, _LARGEST_TOPOLOGY, "give a folder that `esper grow` or `esper export` wrote")
    topology, _ = parse_model(data, _SavedTopology, FORMATS, path, "export the network again")
    check_sum(path)
    assert isinstance(topology, dict)
    return topology
