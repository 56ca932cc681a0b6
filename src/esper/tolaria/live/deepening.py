"""Add blocks to a stack of equal blocks in a person's own loop, in place and with an unchanged function."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, groupby, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.graft.find_sites import check_module
from esper.kasmina.graft.flow import Flow
from esper.kasmina.graft.grafted import copied, undisturbed
from esper.kasmina.graft.multiplying import configs, trial
from esper.kasmina.graft.recording import call, floats, mapped, on_aliases, record
from esper.leyline.errors import InputError, in_words
from esper.leyline.text import counted
from esper.tolaria.live.groups import each_of
from esper.tolaria.live.widening import averages, check_growable, check_memory, check_optimizer, warn_left

_DEPTHS = re.compile(r"(layer|depth|block)(?!.*(size|idx|index|id$|norm|drop|width|dim|scale|decay))", re.I)
"""Names of attributes that count blocks."""
_PLACES = re.compile(r"layer_?(idx|index|id|number)$", re.I)
"""Names of attributes of a block that say which one it is."""
_WIDTHS = re.compile(r"size|width|channel|dim|head", re.I)
"""Names of attributes that list a width for each stage."""


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
    if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
        raise InputError(f"blocks is {blocks!r}; give a whole number from 1 on")
    check_module(model)
    stacks = _stacks(model)
    if at is not None and at not in stacks:
        raise InputError(f"at is {at!r}; give the path of a stack: {', '.join(map(repr, stacks)) or 'there is none'}")
    if not stacks:
        raise InputError(
            f"{type(model).__name__} has no nn.Sequential or nn.ModuleList with blocks of one class and of equal shapes, to "
            "which one could be added"
        )
    parameters = dict(model.named_parameters())
    networks, optimizers = (model, *averages(ema, model)), () if optimizer is None else each_of(optimizer)
    for own in optimizers:
        check_optimizer(own, parameters)
    path = (
        at
        if at is not None
        else max(stacks, key=lambda each: sum(own.numel() for own in model.get_submodule(each).parameters()))
    )
    start, stop = stacks[path]
    count = _blocks_of_one_class(model.get_submodule(path), start)
    prefix = f"{path}." if path else ""
    last = f"{prefix}{stop - 1}"
    if not any(parameter.requires_grad for parameter in model.get_submodule(last).parameters()):
        raise InputError(
            f"{last!r} is frozen, and so would its copies be; let its parameters require gradients until the blocks are added"
        )
    each = sum(parameter.numel() * parameter.element_size() for parameter in model.get_submodule(last).parameters())
    check_memory(networks, blocks * each, f"by {counted(blocks, 'block')}", "give fewer blocks")
    with undisturbed(*networks), torch.no_grad():
        _add(networks, path, stop, blocks, example, count)
    made = [f"{prefix}{stop + number}." for number in range(blocks)]
    for own in optimizers:
        _join(own, model, made, f"{prefix}{stop - 1}.")
    held = {id(parameter) for own in optimizers for group in own.param_groups for parameter in group["params"]}
    new = {name: parameter for name, parameter in model.named_parameters() if name.startswith(tuple(made))}
    if any(id(parameter) in held for parameter in new.values()):
        left = [name for name, parameter in new.items() if parameter.requires_grad and id(parameter) not in held]
        warn_left(left, "is new", optimizers)
    return {path: (count, count + blocks)}


def _stacks(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the longest run of equal blocks in each container, or the last of several, from its first to past its last place.

    A single block counts in a ModuleList, and in a Sequential if it is no layer of torch.
    """
    found: dict[str, tuple[int, int]] = {}
    for path, part in model.named_modules():
        if not isinstance(part, nn.Sequential | nn.ModuleList):
            continue
        kinds = [(type(each), [(name, own.shape) for name, own in each.state_dict().items()]) for each in part]
        places = [list(group) for _, group in groupby(range(len(kinds)), kinds.__getitem__)]
        runs = [(at[0], at[-1] + 1) for at in places if kinds[at[0]][1]]
        own = isinstance(part, nn.ModuleList)
        runs = [
            run for run in runs if run[1] - run[0] > 1 or own or not kinds[run[0]][0].__module__.startswith("torch.")
        ]
        if runs:
            found[path] = max(runs, key=lambda run: (run[1] - run[0], run[0]))
    return found


def _blocks_of_one_class(container: Any, at: int) -> int:
    """Return how many blocks around a place are of its class: a first one may have further weights, as a bias that all share."""
    own, kinds = type(container[at]), [type(each) for each in container]
    before, behind = reversed(kinds[:at]), kinds[at:]
    return sum(1 for side in (before, behind) for _ in takewhile(lambda kind: kind is own, side))


def _add(networks: tuple[nn.Module, ...], path: str, place: int, blocks: int, example: Any, count: int) -> None:
    """Add blocks at a place of a container of every network. InputError if the outputs change; nothing is changed then.

    Weights that are all 0 are drawn during the trial, but not those of the new blocks: nothing would be seen behind them.
    """
    network, last, ran = networks[0], f"{path}.{place - 1}".lstrip("."), set[nn.Module]()
    blank = [name for name, each in network.get_submodule(last).named_parameters() if each.numel() and not each.any()]
    problem = f"{path!r} has no layer that writes what a new block adds; give another stack by at="
    with trial(networks, example, 0, "deeper") as (expected, undo):
        # a factor that is 0 may be enough, as in ReZero before training
        for silenced in chain([list[str]()] if blank else [], _silenced(network, last, example)):
            _insert(network, path, place, blocks, [*silenced, *blank], count)
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
                if _learns(network, made, example):
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
        _insert(each, path, place, blocks, silenced, count)


def _learns(network: nn.Module, made: Any, example: Any) -> bool:
    """Return whether a parameter of each new block has a gradient on the example."""
    with torch.enable_grad():
        outputs = [
            value.square().sum() + value.sum()
            for value in floats(call(network, mapped(example, torch.clone)))
            if value.requires_grad
        ]
        for block in made:
            own = [parameter for parameter in block.parameters() if parameter.requires_grad]
            found = torch.autograd.grad(sum(outputs), own, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
            if not any(gradient is not None and bool(gradient.any()) for gradient in found):
                return False
    return True


def _silenced(model: nn.Module, block: str, example: Any) -> Iterator[list[str]]:
    """Yield sets of the parameters of a block, by their names in it, which make its output 0 where they are 0."""

    def found(weights: dict[str, Tensor]) -> tuple[list[str], list[str]]:
        flow = Flow(model, record(model, example, None), weights)
        if (node := flow.node(block)) is None:
            first = next(path for path, part in model.named_modules() if part is model.get_submodule(block))
            if first != block:
                raise InputError(f"{block!r} and {first!r} are one module; blocks of a stack have weights of their own")
            raise InputError(f"{block!r} did not run on the example, or returns nothing that can be learned")
        reach = flow.reach([node], "")
        layers = [layer for layer in reach.layers if f"{layer}.".startswith(f"{block}.")]
        norms = [path for path in flow.parts if path.startswith(f"{block}.") and flow.node(path) in reach.nodes]
        return layers, [path for path in norms if flow.parts[path]._parameters]

    for paths in on_aliases(model, found):
        names = []
        for path in paths:
            part = model.get_submodule(path)
            part = part.out_proj if isinstance(part, nn.MultiheadAttention) else part
            own = {id(parameter) for parameter in part.parameters(recurse=False)}
            names += [name for name, each in model.get_submodule(block).named_parameters() if id(each) in own]
        if names:
            yield names


def _insert(network: nn.Module, path: str, place: int, blocks: int, silenced: list[str], count: int) -> None:
    """Add copies of the block in front of a place, with some parameters at 0, and count them where blocks are counted."""
    container: Any = network.get_submodule(path)
    made = []
    for number in range(blocks):
        block = copied(container[place - 1])
        for name in silenced:
            block.get_parameter(name).zero_()
        _move(block, number + 1)
        made.append(block)
    for behind in container[place:]:
        _move(behind, blocks)
    own = [*container[:place], *made, *container[place:]]
    container._modules.clear()
    container._modules.update({str(index): block for index, block in enumerate(own)})
    whole = {id(holder) for _, holder in configs(network, "")}
    for part in network.modules():
        if type(part).__module__.startswith("torch.") or part in made:
            continue
        for _, holder in ((path, part), *configs(part, "")):
            named = [name for name, value in vars(holder).items() if type(value) is int and value == count]
            of_decoder = "dec" in path and id(holder) in whole and any("decoder" in name for name in named)
            for name, value in list(vars(holder).items()):
                other = any(side in name and side[:3] not in path for side in ("encoder", "decoder"))
                if other or (of_decoder and "decoder" not in name):  # the blocks of another stack, as of an encoder
                    continue
                if type(value) is int and value == count and _DEPTHS.search(name) and not _PLACES.search(name):
                    vars(holder)[name] = count + blocks
                elif isinstance(value, list | tuple) and _DEPTHS.search(name):
                    vars(holder)[name] = type(value)(_followed(network, holder, path, name, list(value), count, blocks))


def _move(block: nn.Module, places: int) -> None:
    """Note that a block stands so many places further on."""
    for part in block.modules():
        for name, value in list(vars(part).items()):
            if type(value) is int and _PLACES.search(name):
                vars(part)[name] = value + places


def _followed(
    network: nn.Module, holder: Any, path: str, name: str, value: list[Any], count: int, blocks: int
) -> list[Any]:
    """Return what an attribute lists for the blocks of a stack, or for those of each stage, once a stack has more blocks.

    InputError if the stack is one of stages that have a list of their widths too.
    """
    before, number, behind = re.fullmatch(r"(.*?)(\d*)(\D*)", path, re.DOTALL).groups()  # type: ignore[union-attr]
    stages = dict[int, int]()
    for other, part in network.named_modules():
        same = re.fullmatch(re.escape(before) + r"(\d+)" + re.escape(behind), other)
        if number and same is not None and isinstance(part, nn.Sequential | nn.ModuleList):
            stages[int(same[1])] = len(part) - blocks * (other == path)
    if stages and [stages[each] for each in sorted(stages)] == value:
        return [own + blocks * (stage == int(number)) for own, stage in zip(value, sorted(stages), strict=True)]
    container: Any = network.get_submodule(path)
    beside = {
        other: list(listed)
        for other, listed in vars(holder).items()
        if isinstance(listed, list | tuple) and len(listed) == len(value) and not _DEPTHS.search(other)
    }
    if len(value) == len(container) - blocks and (wide := next(filter(_WIDTHS.search, beside), None)):
        raise InputError(
            f"{path!r} has {counted(len(value), 'stage')}, for which {name} is {value} and {wide} is {beside[wide]}, so that a "
            "network that is built from these would not have another one; give at= the blocks of one stage"
        )
    if len(value) != count:
        return value
    return [*value, *(value[-1:] * blocks)]


def _join(optimizer: torch.optim.Optimizer, model: nn.Module, made: list[str], copied: str) -> None:
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
