"""Record one run of a module on an example: the submodules that ran, their streams, and what a loss depends on.

The module is not changed: `on_aliases` runs it with aliases of its parameters and copies of its buffers, and its
attributes, its training mode and the random generators are restored afterwards.
"""

import copy
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from esper.kasmina.graft.planted import Planted
from esper.leyline.messages import InputError, in_words, kind_of

PRODUCT = re.compile(r"(?<!^Cu)(?<!a)[Mm]m|[Mm]v|Conv|(?<!^Upsample)(?<!^UpsampleBi)(?<!^UpsampleTri)[Ll]inear|Rnn")
"""Names of the autograd nodes that multiply by a weight; interpolation, cumulative maxima and gamma functions do not."""

_RESHAPE = re.compile(
    r"^(T|Transpose|Permute|View|UnsafeView|Reshape|ReshapeAlias|ToCopy|Expand|Unsqueeze|Clone|Alias|SplitWithSizes)Back"
)
"""Names of the autograd nodes that can lie between a parameter and the node that multiplies by it."""


Stream = tuple[tuple[int, ...] | None, GradientEdge | None]
"""Shape of a stream and its place in the autograd graph, at the time of the call."""


class Call(NamedTuple):
    """Records one call of a submodule. A stream is the first floating-point tensor of the input or of the output."""

    entered: tuple[int, ...] | None  # shape of the input stream, or None if there is none
    source: GradientEdge | None  # the input stream in the autograd graph; None if it needs no gradient
    left: tuple[int, ...] | None  # shape of the output stream, or None if there is none
    edge: GradientEdge | None  # the output stream in the autograd graph; None if it needs no gradient
    bundled: bool  # whether the output is a structure that holds the stream, and not a tensor


class Recording(NamedTuple):
    """Records one forward pass."""

    parts: dict[str, nn.Module]  # the submodules by dotted path, the module itself among them
    weights: dict[str, Tensor]  # the aliases that are in the places of the parameters, by name
    calls: dict[str, list[Call]]  # by dotted path, in the order in which the submodules first returned
    loss: Tensor  # () the loss, with its graph
    order: list[Node]  # the graph, each node behind those that it depends on


@contextmanager
def on_aliases(module: nn.Module, *, started: bool = False) -> Iterator[dict[str, Tensor]]:
    """Put aliases of the parameters, which need a gradient, in their places inside the block, and yield them by name.

    Copies replace the buffers. With `started`, small random matrices replace those that are 0 and are trained: a head that
    begins at 0 lets no gradient through before its first step. Everything else that running a module changes is restored
    afterwards (`untouched`). Raises InputError if the module writes into a parameter.
    """
    with torch.inference_mode(False), torch.enable_grad(), untouched(module):  # which puts the parameters back, too
        weights, replaced = dict[str, Tensor](), dict[int, Tensor]()
        for name, p in module.named_parameters():
            alias = p.detach()
            if started and p.requires_grad and p.ndim > 1 and not bool(p.any()):
                drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
                alias = (0.02 * drawn).to(p.device, p.dtype)
            weights[name] = replaced[id(p)] = alias.requires_grad_(p.is_floating_point())
        versions = {name: weight._version for name, weight in weights.items()}
        replaced |= {id(buffer): buffer.clone() for buffer in module.buffers()}
        for part in module.modules():
            tables: tuple[dict[str, Any], ...] = part._parameters, part._buffers
            for table in tables:
                table |= {name: replaced[id(own)] for name, own in table.items() if own is not None}
        yield weights
    for name, version in versions.items():
        if weights[name]._version != version:
            raise InputError(
                f"the forward of {type(module).__name__} writes into its parameter {name!r}; keep what changes in a buffer"
            )


@contextmanager
def recorded(
    module: nn.Module, example: Any, loss: Callable[[Any], Tensor] | None = None, *, started: bool = False
) -> Iterator[Recording]:
    """Run the module once on the example, on aliases (`on_aliases`), which stay inside the block, and yield what was recorded.

    Without a loss, the loss is `distance` of the output. Raises InputError if the module cannot run on the example, or
    if the loss is not a number that depends on the module.
    """
    parts, calls, entered = submodules(module), dict[str, list[Call]](), list[Stream]()  # a stack, because calls nest

    def enter(_: nn.Module, arguments: Any, named: Any) -> None:
        entered.append(_stream((arguments, named)))

    def leave(path: str, _: nn.Module, arguments: Any, output: Any) -> None:
        called = Call(*entered.pop(), *_stream(output), not isinstance(output, Tensor))
        calls.setdefault(path, []).append(called)

    with on_aliases(module, started=started) as weights:
        with ExitStack() as hooks:
            for path, each in parts.items():
                hooks.enter_context(each.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.enter_context(each.register_forward_hook(partial(leave, path)))
            output = run(module, example)
        with in_words("the loss cannot take the output of the module", "correct the loss"):
            value = (loss or distance)(output)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
            raise InputError(f"the loss is {what}; return a tensor with one number")
        if value.grad_fn is None:
            raise InputError(
                f"the loss does not depend on the parameters of {type(module).__name__}: it has no gradient; run the forward "
                "without torch.no_grad() and without detach()"
            )
        yield Recording({"": module, **parts}, weights, calls, value, inputs_first(value.grad_fn))


def run(module: nn.Module, example: Any) -> Any:
    """Run the module on the example: a tensor is the argument, a tuple or list the arguments, a mapping the named arguments.

    Raises InputError if the module cannot run on it.
    """
    shown = ", ".join(f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in tensors(example))
    with in_words(
        f"{type(module).__name__} cannot run on the example ({shown or type(example).__name__})",
        "give a tensor for module(x), a tuple for module(*x) or a mapping for module(**x)",
    ):
        return call(module, mapped(example, lambda x: x.detach().clone()))  # the module may change its input in place


def call(network: Callable[..., Any], given: Any) -> Any:
    """Return the output of a network for an input: a tuple or list holds its arguments, a mapping its named arguments."""
    if isinstance(given, Mapping):
        return network(**given)
    return network(*given) if isinstance(given, tuple | list) else network(given)


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Restore what running a module can change: attributes of every submodule, training modes and random generators."""
    restore = saved(module.modules())
    devices = sorted({p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"})
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  the global generator is the one to restore
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        restore()


def saved(holders: Iterable[Any]) -> Callable[[], None]:
    """Return a function that gives modules and other objects their present attributes again, whenever it is called.

    It restores the contents of dictionaries and lists among the attributes too, which may change in place.
    """
    before = []
    for holder in holders:
        parts = [own for own in vars(holder).values() if isinstance(own, dict | list)]
        contents = [(own, dict(own) if isinstance(own, dict) else list(own)) for own in parts]
        before.append((holder, dict(vars(holder)), contents))

    def restore() -> None:
        for holder, attributes, contents in before:
            vars(holder).clear()
            vars(holder).update(attributes)
            for own, items in contents:
                own.clear()
                if isinstance(own, dict):
                    own.update(items)
                else:
                    own.extend(items)

    return restore


@contextmanager
def undone_on_error(undo: Callable[[], None]) -> Iterator[None]:
    """Call a function, as `saved` returns it, if the block fails."""
    try:
        yield
    except BaseException:
        undo()
        raise


def submodules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules of a module by dotted path, without the module itself and without seeds that are planted in it."""
    seeds = tuple(f"{path}." for path, each in module.named_modules() if isinstance(each, Planted))
    return {path: each for path, each in module.named_modules() if path and not f"{path}.".startswith(seeds)}


def floats(structure: Any) -> Iterator[Tensor]:
    """Return the floating-point tensors of a structure, in order."""
    return (x for x in tensors(structure) if x.is_floating_point())


def tensors(structure: Any) -> Iterator[Tensor]:
    """Yield the tensors of a structure of tuples, lists, mappings and dataclasses, in order."""
    if isinstance(structure, Tensor):
        yield structure
    elif isinstance(structure, Mapping):
        for value in structure.values():
            yield from tensors(value)
    elif isinstance(structure, tuple | list):
        for value in structure:
            yield from tensors(value)
    elif is_dataclass(structure) and not isinstance(structure, type):
        for field in fields(structure):
            yield from tensors(getattr(structure, field.name))


def results(output: Any) -> Any:
    """Return what a network computes, without hidden states and attention maps that it returns beside `logits`."""
    if not isinstance(output, Mapping) or output.get("logits") is None:
        return output
    return {name: own for name, own in output.items() if not re.search("hidden_state|attentions", name)}


def mapped(structure: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the structure with each tensor replaced by `change` of it, in the order of `tensors`."""
    if isinstance(structure, Tensor):
        return change(structure)
    if isinstance(structure, MutableMapping):
        found = copy.copy(structure)
        for key, value in structure.items():
            found[key] = mapped(value, change)
        return found
    if isinstance(structure, Mapping):
        return {key: mapped(value, change) for key, value in structure.items()}
    if isinstance(structure, tuple | list):
        changed = [mapped(value, change) for value in structure]
        return type(structure)(*changed) if hasattr(structure, "_fields") else type(structure)(changed)
    if is_dataclass(structure) and not isinstance(structure, type):
        return replace(
            structure, **{field.name: mapped(getattr(structure, field.name), change) for field in fields(structure)}
        )
    return structure


def replaced(structure: Any, old: Tensor, new: Tensor) -> Any:
    """Return the structure with `new` in every place where `old` is."""
    return mapped(structure, lambda x: new if x is old else x)


def distance(output: Any) -> Tensor:
    """Sum the mean of (x - cos(k))^2 over the floating-point tensors x of the output, where k counts the elements; ().

    The mean of x^2 would have no gradient behind a normalisation, nor at outputs that are zero.
    """
    terms = []
    for x in floats(output):
        wanted = torch.arange(x.numel(), dtype=torch.float32, device=x.device).cos().view(x.shape)
        terms.append((x.float() - wanted).square().mean())
    if not terms:
        if any(value.is_complex() for value in tensors(output)):
            raise InputError("the output of the module is complex; Esper grows networks that return real numbers")
        raise InputError(
            f"the output of the module, {kind_of(output)}, holds no floating-point tensor; give loss=, a function of the "
            "output that returns one number"
        )
    return torch.stack(terms).sum()


def learns(output: Any, parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether one of some parameters has a gradient other than 0 of what depends on an output, as of a loss."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not (apart := distance(output)).requires_grad:
        return False
    many = sum(x.numel() for x in floats(output))  # a mean over many would be 0 in half precision
    found = torch.autograd.grad(apart * many, trained, retain_graph=True, allow_unused=True)
    return any(gradient is not None and bool(gradient.any()) for gradient in found)


def _stream(structure: Any) -> Stream:
    x = next(floats(structure), None)
    if x is None:
        return None, None
    return tuple(x.shape), get_gradient_edge(x) if x.requires_grad else None


def before(node: Node | None) -> list[Node]:
    """Return the nodes that a node of the autograd graph reads."""
    return [each for each, _ in (node.next_functions if node else ()) if each is not None]


def inputs_first(*roots: Node | None) -> list[Node]:
    """Return the roots and all nodes under them, each after those that it depends on."""
    order: list[Node] = []
    seen: set[Node] = set()
    waiting: list[tuple[Node, bool]] = [(root, False) for root in roots if root is not None]
    while waiting:
        node, done = waiting.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting.extend((each, False) for each in before(node) if each not in seen)
    return order


def factors(node: Node) -> set[int]:
    """Yield the ids of the leaves that a node takes, unchanged or transposed, reshaped or cast."""
    found = set()
    for each in before(node):
        while _RESHAPE.match(each.name()) and (reshaped := before(each)):
            each = reshaped[0]
        if each.name().endswith("AccumulateGrad"):
            found.add(id(each.variable))  # type: ignore[attr-defined]
    return found
