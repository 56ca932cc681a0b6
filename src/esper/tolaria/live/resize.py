"""Make a network of a person's own loop wider or deeper, with its moving average and what the optimizer remembers of it."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from esper.kasmina.blueprints import count
from esper.kasmina.graft.copies import blocks_of_one_class, insert, silenced, stacks
from esper.kasmina.graft.find_sites import Hidden, check_module, find_hidden
from esper.kasmina.graft.grafted import copied, undisturbed
from esper.kasmina.graft.grown import is_grafted
from esper.kasmina.graft.multiplying import VARIANTS, WAYS, Multiplication, Way, temporary_changes
from esper.kasmina.graft.recording import call, floats, learns, mapped, on_aliases, saved, undone_on_error
from esper.kasmina.graft.sharding import is_sharded
from esper.kasmina.graft.units import Outputs, additions, append_tried, axes_of, width_of
from esper.leyline.config.arguments import check_integer, is_number
from esper.leyline.messages import (
    GrowthWarning,
    InputError,
    counted,
    did_you_mean,
    in_words,
    is_out_of_memory,
    kind_of,
    typed_line,
    warn,
)
from esper.tolaria.live.groups import begin_state, check_held, unwrapped
from esper.tolaria.runtime import available_memory


class Widened(dict[str, tuple[int, int]]):
    """Maps the first layer of each hidden width that changed to the width before and after; prints as one line each.

    Attributes:
        left_out (dict[str, str]): for each other layer that returns hidden features, why their width stays; and parameters with
            as many features that took no part on the example
        way (str or None): how the function is kept where norms count features: zeros, means or copies; None where none does
    """

    def __init__(self, widths: Mapping[str, tuple[int, int]], left_out: dict[str, str], way: Way | None = None) -> None:
        super().__init__(widths)
        self.left_out, self.way = left_out, way

    def __repr__(self) -> str:
        layers: dict[tuple[int, int], list[str]] = {}
        for path, widths in self.items():
            layers.setdefault(widths, []).append(path)
        lines = [f"{', '.join(paths)}: {before} -> {after} units" for (before, after), paths in layers.items()]
        return "\n".join([*lines, *(f"{path} stays: {reason}" for path, reason in self.left_out.items())])


def widen(
    model: nn.Module,
    to: float | Mapping[str, int] = 2.0,
    *,
    example: Any,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    ema: nn.Module | None = None,
    seed: int = 0,
    ways: Sequence[Way] = WAYS,
) -> Widened:
    """Give a network more units, in place; it computes what it did.

        esper.widen(model, 2.0, example=x, optimizer=optimizer)      # all inner widths
        esper.widen(model, {"0": 16}, example=x, optimizer=optimizer)

    Hidden features are what one layer returns and the next layers alone read, through any functions that treat each feature by
    itself, BatchNorm, pooling, flattening and sums. For h = W2 f(W1 x + b1) + b2 the wider network is

        h = [W2 0] f([W1; V1] x + [b1; c1]) + b2

    with V1 and c1 drawn as the layer draws its own first weights.

    A whole factor also multiplies the widths of all that is left: embeddings, residual streams with norms, the heads of
    attention, whose size stays, recurrent layers and cells, grouped convolutions and tied weights. Where a module counts no
    heads, what makes the weights of attention stays as it is. New features of a stream begin at zero, or at the mean of the
    old ones where a LayerNorm subtracts that, and the weights and `eps` of norms are scaled by their number. Where that does
    not hold, as with a GroupNorm or with norms behind each block, features are copied, and whatever reads them divides its
    weights among the copies. Attributes that count widths or heads, of modules and of their `config`, follow.

    Layers are of the same classes, so that a network that is built with these widths takes its `state_dict`. Each change is tried
    on the example, in evaluation mode, and undone if the outputs change by more than rounding. So the example must run all layers
    that there are.

    The parameters of these layers are new objects, which take the places of the old ones in the optimizer. It begins anew with
    them, whole: to keep what it remembered of the old elements was not better in a comparison (`esper docs widening`). Call this
    after `optimizer.step()`, as gradients and hooks of these parameters are dropped.

    Args:
        model: the network, before DistributedDataParallel, `fully_shard` and torch.compile, and without an unfinished growth
        to: a factor above 1, a whole one for all inner widths, or new widths by the dotted paths of layers
        example: an input of the network; a tuple or list holds its arguments, a mapping its named arguments
        optimizer: that of the loop, if there is one, or a list of all of them
        ema: a moving average of the model, as torch.optim.swa_utils.AveragedModel, which is widened alike
        seed: of the new weights; torch's own generators are not used
        ways: which ways to keep the function are tried, in this order, where norms count features

    Returns:
        the widths before and after, and why others stay

    Raises:
        InputError: if a layer that is named cannot be widened, or none can be; nothing is changed then
    """
    check_growable(model, "widen")
    check_integer(seed, "seed", 0, below=2**62)
    if not isinstance(ways, list | tuple) or not ways or any(way not in WAYS for way in ways):
        raise InputError(f"ways is {ways!r}; give a list of one or more of {', '.join(WAYS)}")
    if isinstance(model, nn.Module) and not list(model.children()):
        raise InputError(
            f"the {type(model).__name__} holds no layers, so that it has no features between them that could be more"
        )
    found_hidden, idle = find_hidden(model, example)
    unused = _unused(model, example)
    groups = {min(hidden.writers): hidden for hidden in found_hidden}
    asked = _asked(model, groups, to)
    before = dict(model.named_parameters())
    shapes = {name: own.shape for name, own in chain(model.named_parameters(), model.named_buffers())}
    networks = (model, *averages(ema, model))
    optimizers = () if optimizer is None else optimizers_of(optimizer, before)
    check_memory(networks, _least_size(model, groups, asked), "to more features", "give smaller widths")
    widths, left_out, way = dict[str, tuple[int, int]](), dict[str, str](), None
    parts = [part for network in networks for part in network.modules()]
    with undisturbed(*networks), torch.no_grad(), undone_on_error(saved(parts)):
        expected, wider = Outputs(model, example), list[tuple[Hidden, int]]()
        for number, (name, width) in enumerate(asked.items()):
            try:
                old = width_of(name, model.get_submodule(name))
                _check_idle(model, idle, old)
                append_tried(networks, additions(model, groups[name], width, seed + number), expected)
            except InputError as error:
                left_out[name] = str(error)
            else:
                widths[name] = old, width
                wider.append((groups[name], old))
        if not isinstance(to, Mapping) and to == int(to):
            way = _multiply(networks, example, int(to), seed, ways, wider, widths, left_out)
        if not (widths or left_out):
            raise InputError(
                f"{type(model).__name__} has no hidden features that one layer returns and the next ones alone read, so that "
                "nothing can be wider"
            )
        if left_out and (isinstance(to, Mapping) or not widths):
            name, reason = next(iter(left_out.items()))
            whole = "" if name == type(model).__name__ else left_out.get(type(model).__name__, "")
            also = f", and the network as a whole cannot be wider: {whole}" if whole not in ("", reason) else ""
            mend = "leave that layer out; " if isinstance(to, Mapping) else ""
            raise InputError(f"the features of {name!r} cannot be more: {reason}{also}; {mend}nothing was changed")
    old_widths = {old for old, _ in widths.values()}
    for name, parameter in unused.items():
        if model.get_parameter(name) is parameter and (same := old_widths.intersection(parameter.shape)):
            left_out[name] = (
                f"it took no part on the example and has {min(same)} features; give an example on which it does"
            )
    follow(optimizers, before, dict(model.named_parameters()))
    left = getattr(model, "_keys_to_ignore_on_save", None) or []  # of transformers
    for name, own in chain(model.named_parameters(), model.named_buffers()):
        path, _, entry = name.rpartition(".")
        part = model.get_submodule(path)
        # tables that are not saved with the network, as positions that are computed
        unsaved = entry in part._non_persistent_buffers_set or any(re.search(key, name) for key in left)
        if unsaved and own.shape != shapes[name]:
            warn(
                f"{name} is wider too, but is not saved with the {type(model).__name__}, and a network that is built with the "
                "new widths would compute other values for it; save it beside the network, and put it back behind loading",
                GrowthWarning,
            )
    return Widened(widths, left_out, way)


def deepen(
    model: nn.Module,
    blocks: int = 1,
    *,
    example: Any,
    at: str | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    ema: nn.Module | None = None,
) -> dict[str, tuple[int, int]]:
    """Add blocks behind a stack of equal blocks, in place; the network computes what it did.

        esper.deepen(model, 2, example=x, optimizer=optimizer)       # {'layers': (4, 6)}

    A stack is a run of modules of one class and with parameters of equal shapes in an `nn.Sequential` or `nn.ModuleList`, such as
    the blocks of a transformer or the residual blocks of a ResNet. A new block is a copy of the last one. The layers in it that
    write into the residual stream are 0, or the norms behind them, so that it adds nothing at first (as by the factor of ReZero,
    Bachlechner et al. 2021, arXiv 2003.04887). The outputs on the example are compared, in evaluation mode, and everything is
    undone if they change by more than rounding.

    Attributes that count the blocks follow, of modules and of their `config`, and so do lists of the config with an entry for
    each block. The new parameters join the groups that the optimizer has for those of the copied block.

    Args:
        model: the network, before DistributedDataParallel, `fully_shard` and torch.compile, and without an unfinished growth
        blocks: how many blocks are added
        example: an input of the network; a tuple or list holds its arguments, a mapping its named arguments
        at: dotted path of the stack; by default that with the most parameters
        optimizer: that of the loop, if there is one, or a list of all of them
        ema: a moving average of the model, which gets copies of its own last block

    Returns:
        the number of blocks before and after, by the path of the stack

    Raises:
        InputError: if there is no such stack, or a new block cannot leave the function as it is; nothing is changed then
    """
    check_growable(model, "deepen")
    check_integer(blocks, "blocks")
    check_module(model)
    runs = stacks(model)
    if at is not None and at not in runs:
        raise InputError(f"at is {at!r}; give the path of a stack: {', '.join(map(repr, runs)) or 'there is none'}")
    if not runs:
        raise InputError(
            f"{type(model).__name__} has no nn.Sequential or nn.ModuleList with blocks of one class and of equal shapes, to "
            "which one could be added"
        )
    parameters = dict(model.named_parameters())
    networks = (model, *averages(ema, model))
    optimizers = () if optimizer is None else optimizers_of(optimizer, parameters)
    path = at if at is not None else max(runs, key=lambda each: count(model.get_submodule(each)))
    start, stop = runs[path]
    before = blocks_of_one_class(model.get_submodule(path), start)
    prefix = f"{path}." if path else ""
    last = f"{prefix}{stop - 1}"
    if not any(parameter.requires_grad for parameter in model.get_submodule(last).parameters()):
        raise InputError(
            f"{last!r} is frozen, and so would its copies be; let its parameters require gradients until the blocks are added"
        )
    each = sum(parameter.numel() * parameter.element_size() for parameter in model.get_submodule(last).parameters())
    check_memory(networks, blocks * each, f"by {counted(blocks, 'block')}", "give fewer blocks")
    with undisturbed(*networks), torch.no_grad():
        _add_blocks(networks, path, stop, blocks, example, before)
    made = [f"{prefix}{stop + number}." for number in range(blocks)]
    for own in optimizers:
        _join_groups(own, model, made, f"{prefix}{stop - 1}.")
    new = {name: parameter for name, parameter in model.named_parameters() if name.startswith(tuple(made))}
    warn_left(new, "is new", optimizers)
    return {path: (before, before + blocks)}


def _add_blocks(networks: tuple[nn.Module, ...], path: str, place: int, blocks: int, example: Any, count: int) -> None:
    """Add blocks at a place of a container of every network. InputError if the outputs change; nothing is changed then.

    Weights that are all 0 are drawn while this is tried, but not those of the new blocks: nothing would be seen behind them.
    """
    network, last, ran = networks[0], f"{path}.{place - 1}".lstrip("."), set[nn.Module]()
    blank = [name for name, each in network.get_submodule(last).named_parameters() if each.numel() and not each.any()]
    problem = f"{path!r} has no layer that writes what a new block adds; give another stack by at="
    with temporary_changes(networks, example, 0, "deeper") as (expected, undo):
        # a factor that is 0 may be enough, as in ReZero before training
        for zeros in chain([list[str]()] if blank else [], silenced(network, last, example)):
            _insert_blocks(network, path, place, blocks, [*zeros, *blank], count)
            container: Any = network.get_submodule(path)
            made = container[place : place + blocks]
            ran.clear()
            try:
                with in_words("the deeper network fails on the example"), ExitStack() as hooks:
                    for each in made:
                        hooks.enter_context(each.register_forward_hook(lambda module, *_: ran.add(module)))
                    same = expected.are_of(network)
                if len(ran) < blocks:
                    raise InputError(f"the forward pass of the network does not run a new block of {path!r}")
                if not same:
                    raise InputError(
                        f"a new block of {path!r} changes the outputs, as what it returns is not added to its input"
                    )
                with torch.enable_grad():
                    output = call(network, mapped(example, torch.clone))
                    if all(learns(output, block.parameters()) for block in made):
                        break
                raise InputError(
                    f"a new block of {path!r} would never learn, because two factors of what it adds are 0; train the "
                    "network first, so that one of them is not"
                )
            except InputError as error:
                problem = str(error)  # the error itself would keep this frame, and with it the weights of before
                undo()
        else:
            raise InputError(problem)
    for each in networks:
        _insert_blocks(each, path, place, blocks, zeros, count)


def _insert_blocks(network: nn.Module, path: str, place: int, blocks: int, zeros: Sequence[str], count: int) -> None:
    """Add copies of the block in front of a place, with some parameters at 0."""
    made = []
    for _ in range(blocks):
        made.append(copied(network.get_submodule(path)[place - 1]))  # type: ignore[index]
        for name in zeros:
            made[-1].get_parameter(name).zero_()
    insert(network, path, place, made, count)


def _join_groups(optimizer: torch.optim.Optimizer, model: nn.Module, made: list[str], copied: str) -> None:
    """Put the parameters of new blocks into the groups of those that they are copies of."""
    parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        held = {id(parameter) for parameter in group["params"]}
        for prefix in made:
            added = {
                id(parameter): (name, parameter)  # a copy may hold one parameter under two names
                for name, parameter in parameters.items()
                if name.startswith(prefix) and id(parameters[copied + name.removeprefix(prefix)]) in held
            }
            group["params"] += [parameter for _, parameter in added.values()]
            if "param_names" in group:
                group["param_names"] += [name for name, _ in added.values()]


def check_learning(name: str) -> None:
    """Raise InputError, with the name of what is called, where nothing can learn."""
    if torch.is_inference_mode_enabled():
        raise InputError(
            f"{name} is called within torch.inference_mode(), where nothing can learn; call it outside of it"
        )


def check_growable(model: Any, name: str) -> None:
    """Raise InputError if layers of a model cannot be changed now."""
    check_learning(f"esper.{name}")
    if isinstance(model, nn.Module) and (is_grafted(model) or is_sharded(model)):
        grafted = is_grafted(model)
        mend = "call growth.finish() or esper.ungraft(model) first" if grafted else f"{name} it before fully_shard"
        raise InputError(f"the {type(model).__name__} is {'grafted' if grafted else 'sharded'}; {mend}")


def check_memory(networks: Sequence[nn.Module], size: float, what: str, mend: str) -> None:
    """Raise InputError if that many bytes for each network that grows are more than its device has free."""
    device = next((parameter.device for parameter in networks[0].parameters()), torch.device("cpu"))
    check_free(device, len(networks) * size, f"growing the {type(networks[0]).__name__} {what}", mend)


def check_free(device: torch.device, needed: float, what: str, mend: str) -> None:
    """Raise InputError if something takes more bytes than a device has free."""
    free = available_memory(device)
    if needed > free:
        raise InputError(
            f"{what} takes at least {needed / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are free on {device}; {mend}"
        )


def _least_size(model: nn.Module, groups: Mapping[str, Hidden], asked: Mapping[str, int]) -> float:
    """Return the bytes of the weights of the layers that write or read hidden features once these are as many as asked for."""
    ratios = dict[str, float]()
    for name, width in asked.items():
        try:
            ratio = width / width_of(name, model.get_submodule(name))
        except InputError:  # said with the reason where the layers are widened
            continue
        for path in (*groups[name].writers, *groups[name].readers):
            ratios[path] = ratios.get(path, 1.0) * ratio
    parameters = {path: next(model.get_submodule(path).parameters()) for path in ratios}
    return sum(each.numel() * each.element_size() * ratios[path] for path, each in parameters.items())


def _multiply(
    networks: Sequence[nn.Module],
    example: Any,
    factor: int,
    seed: int,
    ways: Sequence[Way],
    wider: Sequence[tuple[Hidden, int]],
    widths: dict[str, tuple[int, int]],
    left_out: dict[str, str],
) -> Way | None:
    """Multiply the widths that are not among the hidden ones that are wider, and note them, or why they stay; returns the way."""
    first, way = type(networks[0]).__name__, None
    for variant in VARIANTS:
        try:
            multiplication = Multiplication(networks[0], example, wider, variant)
        except InputError as error:
            if variant == "plain":
                left_out[first] = str(error)
            continue
        if not multiplication.widths:
            if multiplication.counts:  # of the hidden features that are wider
                with suppress(InputError):  # then they count something else
                    multiplication.apply(networks, example, factor, seed)
            break
        first = next(iter(multiplication.widths))
        check_memory(networks, multiplication.size(factor), "to more features", "give a smaller factor or size")
        try:
            way = multiplication.apply(networks, example, factor, seed, ways)
            break
        except InputError as error:
            if variant == "plain":
                left_out[first] = str(error)
    else:
        return None
    for path in multiplication.positions:
        left_out.pop(path, None)
    for path, width in multiplication.widths.items():
        widths[path] = width, factor * width
        left_out.pop(path, None)
    return way


def _asked(model: nn.Module, groups: Mapping[str, Hidden], to: float | Mapping[str, int]) -> dict[str, int]:
    """Return the new width of each group that is to be wider, by its first layer.

    Raises InputError for a layer that is not there, and for a width that is not larger.
    """
    if not isinstance(to, Mapping):
        if not is_number(to) or not 1 < to < math.inf:
            raise InputError(f"to is {to!r}; give a factor above 1, or a mapping of layers to widths")
        asked = dict.fromkeys(groups, 0)  # where a width is not known, which `additions` then says
        for name in groups:
            with suppress(InputError):
                asked[name] = math.ceil(to * width_of(name, model.get_submodule(name)))
        return asked
    first = {path: name for name, group in groups.items() for path in group.writers}
    asked = dict[str, int]()
    for path, width in to.items():
        if path not in first:
            hint = did_you_mean(path, first, most=3, similarity=0.0)
            raise InputError(f"to names {path!r}, which is no layer that returns hidden features; {hint}")
        now = width_of(path, model.get_submodule(path))
        if not is_number(width, int) or width <= now:
            raise InputError(f"to gives {path!r} the width {width!r}; give a whole number above {now}, which it has")
        if asked.setdefault(first[path], width) != width:
            raise InputError(
                f"to gives {path!r} another width than {first[path]!r}, and one layer reads both; give them one"
            )
    return asked


def averages(ema: Any, model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the module of a moving average, in a tuple; none where there is no average. InputError if it is of another model."""
    if ema is None:
        return ()
    module, parameters = getattr(ema, "module", ema), dict(model.named_parameters())
    own = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
    if {name: each.shape for name, each in own.items()} != {name: each.shape for name, each in parameters.items()}:
        raise InputError(
            f"ema is {kind_of(ema)} that has not the parameters of the model; give a module with them, or an object "
            "whose attribute `module` is one, such as torch.optim.swa_utils.AveragedModel"
        )
    parts = dict(model.named_modules())
    for name, part in module.named_modules():
        there = parts.get(name)
        if there is None or any(
            isinstance(each, nn.Identity | _DropoutNd) or any(each.children()) for each in (part, there)
        ):
            continue  # a model that is used may leave dropout out, and a class of containers computes nothing that is seen here
        if next(part.parameters(), None) is None and kind_of(part) != kind_of(there):
            raise InputError(
                f"ema has {kind_of(part)} at {name!r}, where the model has {kind_of(there)}; give an average of this model"
            )
    if any(own[name] is each for name, each in parameters.items()):
        raise InputError(
            "ema is the model itself, or shares parameters with it; give a copy, as AveragedModel makes one"
        )
    return (module,)


def optimizers_of(optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> tuple[Any, ...]:
    """Return an optimizer, or each of a list of them, inside of what other libraries wrapped around it.

    InputError if there is none, or if one is none of the model, or cannot take other parameters.
    """
    given = optimizer if isinstance(optimizer, list | tuple) else (optimizer,)
    if not given:
        raise InputError("optimizer is an empty list; give the optimizers of the loop")
    found = tuple({id(each): each for each in map(unwrapped, given)}.values())
    shapes = {each.shape for each in parameters.values() if each.numel() > 1}
    for own in found:
        check_held(own, parameters.values())
        values = (list(value.values()) if isinstance(value, Mapping) else value for value in vars(own).values())
        parts = (part for value in values for part in (value if isinstance(value, list | tuple) else [value]))
        if any(isinstance(part, torch.optim.Optimizer) for part in parts):
            raise InputError(
                f"the {type(own).__name__} holds optimizers of its own, which would not follow; give these as a list"
            )
        for name, value in vars(own).items():
            if name not in ("param_groups", "state") and _holds(value, shapes, set()):
                raise InputError(
                    f"{type(own).__name__} keeps parameters, or tensors of their shapes, in {name!r} beside its groups and its "
                    "state, where they would not follow; use an optimizer that keeps what it knows of a parameter in its state, "
                    "as those of torch.optim do"
                )
    return found


def _holds(value: Any, shapes: set[torch.Size], seen: set[int]) -> bool:
    """Return whether an object holds a tensor of one of these shapes, in containers or attributes."""
    if isinstance(value, Tensor):
        return value.shape in shapes
    if id(value) in seen or callable(value) or isinstance(value, torch.optim.Optimizer):
        return False
    seen.add(id(value))
    if isinstance(value, Mapping):
        return any(_holds(each, shapes, seen) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple | set):
        return any(_holds(each, shapes, seen) for each in value)
    return _holds(getattr(value, "__dict__", {}), shapes, seen)


def _unused(model: nn.Module, example: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients and get none from the outputs on the example.

    InputError if the outputs depend on a parameter through anything but its module, as a list that holds it too.
    """
    own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with undisturbed(model):
        try:
            with on_aliases(model) as weights:  # which take the places of the parameters in their modules alone
                streams = floats(call(model, mapped(example, torch.clone)))
                outputs = [value.sum() for value in streams if value.requires_grad]
                both = [*(weights[name] for name in own), *own.values()]
                found: tuple[Any, ...] = (0,) * len(both)
                if own and outputs:
                    found = torch.autograd.grad(sum(outputs), both, allow_unused=True)  # type: ignore[arg-type]
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            in_place = "modified by an inplace operation" in str(error)
            mend = "let the forward pass change no tensor in place that its gradients need" if in_place else "mend that"
            raise InputError(
                f"the {type(model).__name__} cannot run backward on the example: {typed_line(error)}; {mend}"
            ) from error
    for name, gradient in zip(own, found[len(own) :], strict=True):
        if isinstance(gradient, Tensor):
            raise InputError(
                f"{name!r} is also used where its module does not hold it, as in a list, which would go on with the old one; "
                "let the forward pass read it from the module"
            )
    return {name: own[name] for name, gradient in zip(own, found, strict=False) if gradient is None}


def _check_idle(model: nn.Module, idle: Sequence[str], width: int) -> None:
    """Raise InputError if a layer that did not run on the example may read features of this width elsewhere."""
    for path in idle:
        try:
            axes = axes_of(path, layer := model.get_submodule(path))
        except InputError:
            continue
        weight = layer.weight
        if isinstance(weight, Tensor) and weight.shape[axes.reads] == width:
            raise InputError(f"{path!r} did not run on the example and may read them; give an example on which it runs")


def follow(
    optimizers: Sequence[torch.optim.Optimizer], before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]
) -> None:
    """Put the new parameters of layers, by name, in the places of the old ones, of which optimizers remember nothing more."""
    new = {id(old): after[name] for name, old in before.items() if after[name] is not old}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for index, old in enumerate(group["params"]):
                if id(old) in new:
                    group["params"][index] = new[id(old)]
                    optimizer.state.pop(old, None)
                    begin_state(optimizer, group, [new[id(old)]])
    named = {name: after[name] for name, old in before.items() if id(old) in new}
    warn_left(named, "is another parameter now", optimizers)


def warn_left(
    parameters: Mapping[str, nn.Parameter],
    what: str,
    optimizers: Sequence[torch.optim.Optimizer],
    mend: str = "make that one anew, and give all optimizers as a list, optimizer=[...]",
) -> None:
    """Warn where optimizers hold some of the named parameters and not others, which a further optimizer may train."""
    held = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    left = [name for name, each in parameters.items() if each.requires_grad and id(each) not in held]
    if left and any(id(each) in held for each in parameters.values()):
        own = " and ".join(f"the {type(optimizer).__name__}'s" for optimizer in optimizers)
        warn(
            f"{left[0]!r} {what}, and is none of {own}; if a further optimizer trains it, as beside Muon, {mend}",
            GrowthWarning,
        )
