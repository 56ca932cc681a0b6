"""Decide which submodules of a recorded run can be sites, and say in words why the others cannot."""

from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn.utils.parametrize import ParametrizationList

from esper.kasmina.recording import Graph, Recording, submodules
from esper.leyline.errors import InputError, is_out_of_memory, typed_line
from esper.leyline.streams import STREAMS, Stream
from esper.leyline.text import counted

_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_LAYERS = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.MultiheadAttention, *_CONVOLUTIONS)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

UNKNOWN_STREAM = "an unknown kind of stream"
"""How the reason begins for which a submodule is left out whose output has a form on which no seed can grow."""


class Candidates:
    """Rules about the submodules of a module, by dotted path, applied to a recorded run."""

    def __init__(self, module: nn.Module, recording: Recording, weights: dict[str, Tensor], examples: int) -> None:
        self._loss, self._calls, self._examples = recording.loss, recording.calls, examples
        self._modules = submodules(module)
        self._graph = Graph(recording.loss, weights.values())
        self._layers = self._find_layers()
        self._inner = {path: [layer for layer in self._layers if _within(layer, path)] for path in self._calls}
        ends = {call.edge.node for layer in self._layers for call in self._calls[layer] if call.edge is not None}
        self._behind = self._graph.before_products(ends)
        self._head_weights = {
            id(p): layer for layer in self._layers if self._is_head(layer) for p in self._modules[layer].parameters()
        }

    def _find_layers(self) -> list[str]:
        """Return the submodules that multiply a stream by a weight themselves, in the order of their calls."""
        factors = self._graph.factors
        known = [path for path in self._calls if isinstance(self._modules[path], _LAYERS)]
        others = [
            path
            for path in self._calls
            if not isinstance(self._modules[path], (*_EMBEDDINGS, ParametrizationList))
            and any(id(p) in factors for p in self._modules[path].parameters(recurse=False))
            and not any(_within(path, layer) for layer in known)
        ]
        owners = {
            path for path in (*known, *others) if not any(path != other and _within(other, path) for other in others)
        }
        return [path for path in self._calls if path in owners]

    # Sites, best choice first.

    def choices(self) -> Iterator[dict[str, str]]:
        """Yield sets of candidates with the reason for each, the best set first."""
        for layers in (2, 1):
            for same_shape in (True, False):
                blocks = self._blocks(layers, same_shape)
                if blocks:
                    yield blocks | self._inner_layers(blocks)
        yield {path: f"a {self._kind(path)} outside of any repeated block" for path in self._layers}

    def _blocks(self, layers: int, same_shape: bool) -> dict[str, str]:
        """Return the repeated blocks with at least `layers` layers.

        A block is left out if it lies inside another one, or is itself made of repeated blocks.
        """
        groups: dict[Any, list[str]] = {}
        for path, inner in self._inner.items():
            if len(inner) >= layers and path not in self._layers:
                groups.setdefault(_signature(self._modules[path]), []).append(path)
        chains = [self._repeated(group, same_shape) for group in groups.values()]
        repeated = {path: chain for chain in chains for path in chain}
        blocks = {path: group for path, group in repeated.items() if not self._is_made_of(path, repeated)}
        return {
            path: f"one of {len(group)} blocks of {self._kind(path)} that run one after the other"
            if len(group) > 1
            else f"a {self._kind(path)} that runs {len(self._calls[path])} times, one after the other"
            for path, group in blocks.items()
            if not any(path != other and _within(path, other) for other in blocks)
        }

    def _repeated(self, group: list[str], same_shape: bool) -> list[str]:
        """Return the members of a group that run before or after another member.

        With `same_shape`, return none unless two such members return the same shape.
        """
        pairs = [
            (first, second)
            for first in group
            for second in group
            if (first == second or not (_within(first, second) or _within(second, first)))
            and self._follows(second, first)
        ]
        if same_shape and not any(self._calls[first][0].left == self._calls[second][0].left for first, second in pairs):
            return []
        return [path for path in group if any(path in pair for pair in pairs)]

    def _follows(self, second: str, first: str) -> bool:
        """Whether a call of `second` depends on a call of `first`."""
        nodes = {call.edge.node for call in self._calls[first] if call.edge is not None}
        return any(
            nodes & self._ancestors.get(call.edge.node, set()) for call in self._calls[second] if call.edge is not None
        )

    @cached_property
    def _ancestors(self) -> dict[Node, set[Node]]:
        calls = (
            call
            for path, inner in self._inner.items()
            if inner and path not in self._layers
            for call in self._calls[path]
        )
        return self._graph.ancestors({call.edge.node: None for call in calls if call.edge is not None})

    def _is_made_of(self, path: str, repeated: Collection[str]) -> bool:
        """Whether a repeated block is a stage: it consists mostly of one other block, or holds two of one class in sequence."""
        parts = [other for other in repeated if other != path and _within(other, path)]
        whole = self._edges(path)
        if any(2 * len(self._inner[part]) > len(self._inner[path]) and self._edges(part) == whole for part in parts):
            return True
        return any(
            _signature(self._modules[first]) == _signature(self._modules[second])
            and not _within(first, second)
            and self._calls[second][0].source is not None
            and self._calls[second][0].source == self._calls[first][-1].edge
            for first in parts
            for second in parts
            if first != second
        )

    def _inner_layers(self, blocks: Collection[str]) -> dict[str, str]:
        """Return the layers inside the blocks that widen or narrow the stream."""
        found = {}
        for path in self._layers:
            block = next((block for block in blocks if _within(path, block)), None)
            call = self._calls[path][0]
            if block is None or call.entered is None or call.left is None:
                continue
            axis = self._features(path, len(call.left))
            before, after = call.entered[axis], call.left[axis]
            if before != after:
                found[path] = f"{'widens' if after > before else 'narrows'} {before} to {after} in {block}"
        return found

    # Submodules that are not sites.

    def sifted(self, choice: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        """Split a set of candidates: the sites with their reasons, and all other submodules with parameters with theirs."""
        left_out = {path: reason for path in self._modules if (reason := self._refusal(path, choice)) is not None}
        chosen: dict[str, str] = {}
        places: dict[tuple[GradientEdge | None, ...], str] = {}
        for path, why in choice.items():
            other = places.get(self._edges(path))
            if path not in left_out and other is not None:
                left_out[path] = f"returns what {other} returns"
            elif path not in left_out:
                places[self._edges(path)] = path
                chosen[path] = why + self._remarks(path)
        for path in self._without_gradient(chosen):
            left_out[path] = "the gradient of the loss is zero there"
            del chosen[path]
        for path in self._modules:
            if path not in chosen and path not in left_out:
                left_out[path] = self._beside(path, choice)
        named = [path for path, each in self._modules.items() if _has_parameters(each)]
        return {path: chosen[path] for path in self._calls if path in chosen}, {
            path: left_out[path] for path in named if path in left_out
        }

    def _refusal(self, path: str, choice: Collection[str]) -> str | None:
        """Return why a submodule cannot be a site, or None if it can."""
        module = self._modules[path]
        if path not in choice and any(_within(other, path) for other in choice):
            return "contains blocks or layers that were considered instead"
        if isinstance(module, _EMBEDDINGS):
            return "an embedding"
        if path not in self._calls:
            return "does not run on the example"
        if not self._inner[path]:
            return "a normalisation alone" if "Norm" in self._kind(path) else "has no layer that multiplies by a weight"
        nodes = [edge.node for edge in self._edges(path) if edge is not None]
        if not nodes:
            return "its output needs no gradient: torch.no_grad, a reentrant checkpoint, or no floating-point numbers"
        if not any(node in self._graph.nodes for node in nodes):
            return "the loss does not depend on its output"
        if self._is_head(path):
            return "a head: its output reaches the loss without another layer"
        tied = next((self._head_weights[id(p)] for p in module.parameters() if id(p) in self._head_weights), None)
        if tied is not None and not _within(tied, path):
            return f"shares a parameter with the head {tied}"
        stream = self.stream(path)
        return stream if isinstance(stream, str) else None

    def _beside(self, path: str, choice: Collection[str]) -> str:
        """Return why a submodule that could be a site was not chosen."""
        if any(other != path and _within(path, other) for other in choice):
            return "a layer of a block that keeps the width" if path in self._layers else "a part of a block"
        return "outside of the repeated blocks"

    def _is_head(self, path: str) -> bool:
        """Whether the output of a submodule reaches the loss without passing another layer."""
        nodes = [edge.node for edge in self._edges(path) if edge is not None and edge.node in self._graph.nodes]
        return bool(nodes) and not any(node in self._behind for node in nodes)

    def _without_gradient(self, paths: Collection[str]) -> list[str]:
        """Return the outputs that the gradient of the loss does not reach."""
        edges = [(path, edge) for path in paths for edge in self._edges(path) if edge is not None]
        if not edges:
            return []
        try:
            gradients = torch.autograd.grad(
                self._loss, [edge for _, edge in edges], retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:  # raised by a node of the graph, such as a reentrant checkpoint
            if is_out_of_memory(error):
                raise
            mend = (
                "checkpoints with use_reentrant=False" if "heckpoint" in str(error) else "a loss whose backward() runs"
            )
            raise InputError(
                f"the module cannot run backward on the example: {typed_line(error)}; use {mend}"
            ) from error
        reached = {
            path
            for (path, _), each in zip(edges, gradients, strict=True)
            if each is not None and bool(each.count_nonzero())
        }
        return [path for path in paths if path not in reached]

    # Streams.

    def stream(self, path: str) -> Stream | str:
        """Return the stream that a submodule returns, or a sentence that says why it is not a known kind of stream."""
        calls = self._calls[path]
        shapes = {(call.entered, call.left) for call in calls}
        if len(shapes) > 1:
            return f"runs {len(calls)} times with different shapes"
        entered, left = calls[0].entered, calls[0].left
        if left is None or entered is None:
            return f"{'returns' if left is None else 'reads'} no floating-point tensor"
        if len(left) == 3 and self._positions_first(path):
            return "its axes are (L, B, C), because batch_first is False"
        if left[0] != self._examples or entered[0] != self._examples:
            return f"its first axis is not the batch, which has {counted(self._examples, 'example')}"
        axis = self._features(path, len(left))
        kind = next(
            (each for each in STREAMS.values() if (len(left), axis - len(left)) == (each.axes + 1, each.features)), None
        )
        if kind is None:
            return f"{UNKNOWN_STREAM}, {_axes(len(left), axis)}; known are (B, C), (B, C, H, W) and (B, L, C)"
        if len(entered) != len(left):
            return f"reads a stream with {len(entered)} axes and returns one with {len(left)}"
        return kind(left[axis])

    def _features(self, path: str, rank: int) -> int:
        """Return the axis of the features in an output with `rank` axes, judged by the layers inside that return as many axes."""
        layers = [layer for layer in self._inner[path] if len(self._calls[layer][0].left or ()) == rank]
        first = [layer for layer in layers if isinstance(self._modules[layer], _CONVOLUTIONS)]
        if rank < 3 or not first:
            return rank - 1
        if len(first) == len(layers):
            return 1
        shape = self._calls[path][0].left or ()
        widths = {(self._calls[layer][0].left or ())[1 if layer in first else -1] for layer in layers}
        if (shape[1] in widths) != (shape[-1] in widths):
            return 1 if shape[1] in widths else rank - 1
        return 1 if rank == 4 else rank - 1

    def _positions_first(self, path: str) -> bool:
        """Whether a submodule, or a neighbour of a layer, reads (L, B, C)."""
        around = path.rpartition(".")[0] if path in self._layers else path
        return any(
            getattr(each, "batch_first", True) is False
            for other, each in self._modules.items()
            if other in self._calls and (not around or _within(other, around))
        )

    def _remarks(self, path: str) -> str:
        calls = self._calls[path]
        several = f"; runs {len(calls)} times" if len(calls) > 1 else ""
        return several + "; its stream is the first floating-point tensor of what it returns" * calls[0].bundled

    def _edges(self, path: str) -> tuple[GradientEdge | None, ...]:
        return tuple(call.edge for call in self._calls[path])

    def _kind(self, path: str) -> str:
        return type(self._modules[path]).__name__


def _within(path: str, other: str) -> bool:
    """Whether a dotted path is equal to another one or lies inside it."""
    return path == other or path.startswith(other + ".")


def _signature(module: nn.Module) -> Any:
    """Return what blocks of one kind share: the class, and for an nn.Sequential the signatures of its modules."""
    if type(module) is nn.Sequential:
        return (nn.Sequential, *map(_signature, module))
    return type(module)


def _has_parameters(module: nn.Module) -> bool:
    lists = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return not isinstance(module, lists) and next(module.parameters(), None) is not None


def _axes(rank: int, features: int) -> str:
    """Write the axes of an output in words: (B, C, *, *, *)."""
    return f"(B, {', '.join('C' if axis == features else '*' for axis in range(1, rank))})"
