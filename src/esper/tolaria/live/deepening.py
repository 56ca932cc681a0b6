"""Add blocks to a stack of equal blocks in a person's own loop, in place and with an unchanged function."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import nn

from esper.kasmina.graft.find_sites import check_module
from esper.kasmina.graft.grafted import copied, undisturbed
from esper.kasmina.graft.multiplying import trial
from esper.kasmina.graft.recording import call, floats, mapped
from esper.kasmina.graft.stacks import blocks_of_one_class, insert, silenced, stacks
from esper.leyline.config.arguments import check_integer
from esper.leyline.errors import InputError, in_words
from esper.leyline.text import counted
from esper.tolaria.live.groups import each_of
from esper.tolaria.live.widening import averages, check_growable, check_memory, check_optimizer, warn_left


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
    networks, optimizers = (model, *averages(ema, model)), () if optimizer is None else each_of(optimizer)
    for own in optimizers:
        check_optimizer(own, parameters)
    path = (
        at
        if at is not None
        else max(runs, key=lambda each: sum(own.numel() for own in model.get_submodule(each).parameters()))
    )
    start, stop = runs[path]
    count = blocks_of_one_class(model.get_submodule(path), start)
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


def _add(networks: tuple[nn.Module, ...], path: str, place: int, blocks: int, example: Any, count: int) -> None:
    """Add blocks at a place of a container of every network. InputError if the outputs change; nothing is changed then.

    Weights that are all 0 are drawn during the trial, but not those of the new blocks: nothing would be seen behind them.
    """
    network, last, ran = networks[0], f"{path}.{place - 1}".lstrip("."), set[nn.Module]()
    blank = [name for name, each in network.get_submodule(last).named_parameters() if each.numel() and not each.any()]
    problem = f"{path!r} has no layer that writes what a new block adds; give another stack by at="
    with trial(networks, example, 0, "deeper") as (expected, undo):
        # a factor that is 0 may be enough, as in ReZero before training
        for zeros in chain([list[str]()] if blank else [], silenced(network, last, example)):
            _insert(network, path, place, blocks, [*zeros, *blank], count)
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
        _insert(each, path, place, blocks, zeros, count)


def _insert(network: nn.Module, path: str, place: int, blocks: int, zeros: Sequence[str], count: int) -> None:
    """Add copies of the block in front of a place, with some parameters at 0."""
    made = []
    for _ in range(blocks):
        made.append(copied(network.get_submodule(path)[place - 1]))  # type: ignore[index]
        for name in zeros:
            made[-1].get_parameter(name).zero_()
    insert(network, path, place, made, count)


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
