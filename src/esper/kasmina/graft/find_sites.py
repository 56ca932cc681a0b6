"""Find the places in a module where seeds can be planted, by one forward and one backward pass on an example."""

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from esper.kasmina.graft.recording import (
    PRODUCT,
    Recording,
    before,
    factors,
    floats,
    inputs_first,
    recorded,
    replaced,
    run,
    tensors,
    untouched,
)
from esper.leyline.lifecycle.slots import STREAMS, Kind, Sequence, Site, Stream
from esper.leyline.messages import InputError, aligned, counted, is_out_of_memory, kind_of, listed, typed_line

_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_LAYERS = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.MultiheadAttention, *_CONVOLUTIONS)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

_KEEPS_FEATURES = re.compile(
    r"(Relu|LeakyRelu|Prelu|Rrelu|Gelu|Silu|Mish|Elu|Celu|Selu|Tanh|Sigmoid|LogSigmoid|Softplus|Softsign|Softshrink|Hard\w+|"
    r"Threshold|Clamp\w*|Abs|Sin|Cos|Exp|Pow|Mul|NativeDropout|\w*(BatchNorm|LayerNorm|GroupNorm|RmsNorm|RMSNorm)|"
    r"(Max|Avg|Mean|AdaptiveAvg|AdaptiveMax)Pool\w*|ToCopy|Alias|Clone)Backward\d*$"
)
"""Names of the autograd nodes whose output has the features of their input, which no weight mixes."""

_FUNCTION = re.compile("GELU|SiLU|Activation$")
"""Names of the classes of elementwise functions that may be composed of several, as the GELU of GPT-2; without parameters."""

_MIXES = re.compile(rf"{PRODUCT.pattern}|Scaled|Attention|Softmax|Embedding")
"""Names of the autograd nodes that are known to mix features or positions."""

_KINDS = {
    (len(order), order.index("B"), order.index("C")): (kind, order)
    for kind in STREAMS.values()
    for order in kind.orders
}
"""The kind of a stream and the order of its axes, by their number and the places of the batch and of the features."""

KNOWN_STREAMS = (
    "(B, C), (B, C, H, W), (B, L, C), (B, C, L), (L, B, C), (B, H, W, C), (B, C, D, H, W) and (B, D, H, W, C)"
)
"""What an `esper.Site` can be at."""

UNKNOWN_STREAM = "an unknown kind of stream"
"""How the reason begins for which a submodule is left out whose output has a form on which no seed can grow."""


class Hidden(NamedTuple):
    """Names the layers that write and that read some features between layers, by their dotted paths."""

    writers: set[str]  # the layers that return them; several, as the two of a gated pair
    readers: set[str]  # the layers that take them
    norms: set[str]  # BatchNorms between them


class Candidates:
    """Applies rules about sites to the submodules of a module, by dotted path, from a recorded run."""

    def __init__(self, recording: Recording, examples: int, example: Any) -> None:
        self._loss, self._calls, self._examples, order = recording.loss, recording.calls, examples, recording.order
        given = next(tensors(example))
        self._input = tuple(given.shape) if given.is_floating_point() else None
        self._modules = {path: part for path, part in recording.parts.items() if path}
        matrices = {id(weight) for weight in recording.weights.values() if weight.dim() >= 2}
        products = {node: factors(node) & matrices for node in order if PRODUCT.search(node.name())}
        self._nodes = set(order)
        self._returned = {path: {edge.node for edge in self._edges(path) if edge is not None} for path in self._calls}
        self._readers: dict[Node, list[Node]] = {}
        for node in order:
            for each in before(node):
                self._readers.setdefault(each, []).append(node)
        # the ids of the parameters with two axes or more that multiply a stream, and of those that convolve it
        self._factors = set[int]().union(*products.values())
        self._convolved = set[int]().union(*(ids for node, ids in products.items() if "Conv" in node.name()))
        # the submodules that multiply a stream by a weight themselves, in the order of their calls
        known = [path for path in self._calls if isinstance(self._modules[path], _LAYERS)]
        others = [
            path
            for path in self._calls
            if not isinstance(self._modules[path], (*EMBEDDINGS, ParametrizationList))
            and any(id(p) in self._factors for p in self._modules[path].parameters(recurse=False))
            and not any(_within(path, layer) for layer in known)
        ]
        around = {each for each in (*known, *others) if any(each != path and _within(path, each) for path in others)}
        self._layers = [path for path in self._calls if path in {*known, *others} - around]
        self._inner = {path: [layer for layer in self._layers if _within(layer, path)] for path in self._calls}
        ends = set[Node]().union(*(self._returned[layer] for layer in self._layers))
        self._behind = set[Node]()  # nodes that reach the loss through a product with a parameter, or through a layer
        for node in reversed(order):
            if node in self._behind or node in ends or products.get(node):
                self._behind.update(before(node))
        self._head_weights = {
            id(p): layer for layer in self._layers if self._is_head(layer) for p in self._modules[layer].parameters()
        }

    # Sites, best choice first.

    def choices(self) -> Iterator[dict[str, str]]:
        """Yield sets of candidates with the reason for each, the best set first."""
        for layers in (2, 1):
            for same_shape in (True, False):
                blocks = self._blocks(layers, same_shape)
                if blocks:
                    outer = [path for path in self._layers if not any(_within(path, block) for block in blocks)]
                    behind = [path for path in outer if self._behind_narrow(path)]
                    outside = {path: f"a {self._kind(path)} outside of the blocks" for path in behind}
                    yield blocks | self._inner_layers(blocks) | outside
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
        nodes = {path: self._nodes & self._returned[path] for path in group}
        under = {path: {*inputs_first(*(each for node in own for each in before(node)))} for path, own in nodes.items()}
        pairs = [
            (one, two)
            for one, two in itertools.product(group, repeat=2)
            if (one == two or not (_within(one, two) or _within(two, one))) and nodes[one] & under[two]
        ]
        if same_shape and not any(self._calls[first][0].left == self._calls[second][0].left for first, second in pairs):
            return []
        return [path for path in group if any(path in pair for pair in pairs)]

    def _is_made_of(self, path: str, repeated: Collection[str]) -> bool:
        """Return whether a repeated block is a stage: mostly made of one other block, or of two of one class in sequence."""
        parts = [other for other in repeated if other != path and _within(other, path)]
        whole = self._edges(path)
        if any(2 * len(self._inner[part]) > len(self._inner[path]) and self._edges(part) == whole for part in parts):
            return True
        return any(
            _signature(self._modules[first]) == _signature(self._modules[second])
            and not _within(first, second)
            and (source := self._calls[second][0].source) is not None
            and source == self._calls[first][-1].edge
            for first, second in itertools.permutations(parts, 2)
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
            entered, left = call.entered[axis], call.left[axis]
            if entered != left:
                found[path] = f"{'widens' if left > entered else 'narrows'} {entered} to {left} in {block}"
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
                left_out[path] = self._why_not_chosen(path, choice)
        lists = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
        return {path: chosen[path] for path in self._calls if path in chosen}, {
            path: left_out[path]
            for path, each in self._modules.items()
            if path in left_out and not isinstance(each, lists) and next(each.parameters(), None) is not None
        }

    def _refusal(self, path: str, choice: Collection[str]) -> str | None:
        """Return why a submodule cannot be a site, or None if it can."""
        module = self._modules[path]
        if path not in choice and any(_within(other, path) for other in choice):
            return "contains blocks or layers that were considered instead"
        if isinstance(module, EMBEDDINGS):
            return "an embedding"
        if path not in self._calls:
            return "does not run on the example"
        if not self._inner[path]:
            return "a normalisation alone" if "Norm" in self._kind(path) else "has no layer that multiplies by a weight"
        if not self._returned[path]:
            return "its output needs no gradient: torch.no_grad, a reentrant checkpoint, or no floating-point numbers"
        if not self._returned[path] & self._nodes:
            return "the loss does not depend on its output"
        if self._is_head(path) and self._widths(path) is None:
            return "a head: its output reaches the loss without another layer"
        tied = next((self._head_weights[id(p)] for p in module.parameters() if id(p) in self._head_weights), None)
        if tied is not None and not _within(tied, path):
            return f"shares a parameter with the head {tied}"
        stream = self.stream(path)
        return stream if isinstance(stream, str) else None

    def _why_not_chosen(self, path: str, choice: Collection[str]) -> str:
        """Return why a submodule that could be a site was not chosen."""
        if any(other != path and _within(path, other) for other in choice):
            return "a layer of a block that keeps the width" if path in self._layers else "a part of a block"
        return "outside of the repeated blocks"

    def _is_head(self, path: str) -> bool:
        """Return whether the output of a submodule reaches the loss without passing another layer."""
        nodes = self._returned[path] & self._nodes
        return bool(nodes) and not nodes & self._behind

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
            again = "heckpoint" in str(error)
            mend = "checkpoints with use_reentrant=False" if again else "a loss whose backward() runs"
            raise InputError(
                f"the module cannot run backward on the example: {typed_line(error)}; use {mend}"
            ) from error
        reached = {
            path
            for (path, _), each in zip(edges, gradients, strict=True)
            if each is not None and bool(each.count_nonzero())
        }
        return [path for path in paths if path not in reached]

    def parts(self, chosen: Collection[str]) -> list[str]:
        """Return the submodules with several layers that could be sites and were not chosen."""
        several = [path for path, inner in self._inner.items() if path and len(inner) > 1 and path not in self._layers]
        return [path for path in several if path not in chosen and self._refusal(path, (path,)) is None]

    # Spans.

    def span(self, path: str) -> str:
        """Return the submodule whose input a bypass at a site reads: `path`, or one in front of a narrow place there.

        Narrow is a place with fewer features than in front of the first layer and behind the second: what a seed computes
        from the input of the first is more units of the pair. Before a head, few outputs need many units too, so that the
        place in front decides alone; a head without a layer directly in front of it is spanned together with the network: "".
        """
        return path if (widths := self._widths(path)) is None else widths[0]

    def reads(self, source: str, target: str) -> int:
        """Return the number of features that a seed behind a target reads in front of a source, "" for the network.

        It is 0 if there is another kind of tensor in front of the source.
        """
        read, left = self._calls[source][0].entered if source else self._input, self._calls[target][0].left
        return read[self._features(target, len(left))] if read and left and len(read) == len(left) else 0

    def _widths(self, path: str) -> tuple[str, int, int] | None:
        """Return what is spanned with a layer behind a narrow place, and the widths in front of and at the place."""
        left, between = self._calls[path][0].left or (), self.reads(path, path)
        if path not in self._layers or len(self._calls[path]) != 1 or not between:
            return None
        after, head, stream = left[self._features(path, len(left))], self._is_head(path), self.stream(path)
        # whether the network's input has its axes in that order
        known = isinstance(stream, str) or not stream.permutation
        at, found = path, None
        while (first := self._pair(at)) is not None or (head and known):
            read = self.reads(first or "", path)
            if not read or not (head or between < after):
                break
            if read > between:
                found = first or "", read, between
            if first is None:
                break
            between, at = max(between, read), first
        return found

    def spans(self, sites: Collection[str]) -> dict[tuple[str, str], tuple[int, str]]:
        """Return further pairs of submodules, (source, target), that a seed can span: it reads what the source reads and changes
        what the target returns. Each has the number of features that it reads, and a reason.

        1. The two layers of a pair that widens and narrows.
        2. 2, 4, 8, ... blocks between streams of one shape, side by side, and all of them; layers where the sites are layers. So
           there are fewer such spans than blocks.
        3. From the input of the network, "", to the last block that returns a shape.
        """
        found: dict[tuple[str, str], tuple[int, str]] = {}
        for path in self._layers:
            # a seed can be behind a head, too
            change = isinstance(self.stream(path), Stream) if self._is_head(path) else self._refusal(path, ()) is None
            if change and (wide := self._wide(path)) is not None:
                first, *widths = wide
                found[first, path] = widths[0], "the pair widens {} to {} and narrows to {}".format(*widths)
        units = [path for path in sites if path not in self._layers] or list(sites)
        units = [path for path in units if len(self._calls[path]) == 1]
        for row in self._rows(units):
            size, kind = 2, "layers" if row[0] in self._layers else "blocks"
            while size <= len(row):
                for ends in zip(row[::size], row[size - 1 :: size], strict=False):
                    found[ends] = self.reads(*ends), f"around {size} {kind} between equal streams"
                size *= 2
            if len(row) > 1:
                ends = row[0], row[-1]
                found.setdefault(ends, (self.reads(*ends), f"around all {len(row)} {kind} between equal streams"))
        latest = {self._calls[path][0].left: path for path in units}
        for path in latest.values():
            sources = [self.span(path), *(source for source, target in found if target == path)]
            already = any(not source or self._calls[source][0].source is None for source in sources)
            if not already and self._input_fits(path):
                found["", path] = self.reads("", path), "from the input of the network"
        return found

    def _wide(self, path: str) -> tuple[str, int, int, int] | None:
        """Return the first layer of a pair that widens and narrows, of which `path` is the second, and the widths in front of,
        in and behind it; None if there is no such pair, or something else reads what is between the two.
        """
        first = self._pair(path) if len(self._calls[path]) == 1 else None
        if first is None:
            return None
        writers = set[Node]().union(*(self._returned[layer] for layer in self._fed_by(path)[0]))
        source = self._calls[path][0].source
        assert source is not None, "a layer feeds it"
        waiting, between = [source.node], set[Node]()
        while waiting:
            if (node := waiting.pop()) not in between and not node.name().endswith("AccumulateGrad"):
                between.add(node)
                waiting += () if node in writers else before(node)
        if len({reader for node in between for reader in self._readers.get(node, ())} - between) != 1:
            return None
        stream = self.stream(path)
        assert isinstance(stream, Stream), "a seed can be behind the second layer"
        widths = self.reads(first, path), self.reads(path, path), stream.width
        return (first, *widths) if 0 < widths[0] < widths[1] > widths[2] else None

    def _rows(self, units: Collection[str]) -> list[list[str]]:
        """Return the longest rows of submodules each of which reads what the one in front of it returned, all in one shape."""
        rows: list[list[str]] = []
        for path in units:
            call, (fed, _) = self._calls[path][0], self._fed_by(path, among=units)
            if call.entered is None or call.entered != call.left or not isinstance(self.stream(path), Stream):
                continue
            row = next(
                (each for each in rows if fed == {each[-1]} and self._calls[each[-1]][0].left == call.left), None
            )
            if row is None:
                rows.append([path])
            else:
                row.append(path)
        return rows

    def _input_fits(self, path: str) -> bool:
        """Return whether a seed behind a submodule can read the input of the network."""
        stream, left = self.stream(path), self._calls[path][0].left
        if self._input is None or left is None or not isinstance(stream, Stream) or stream.permutation:
            return False
        positions = 2 if stream.kind == Kind.SEQUENCE else 1  # one axis of these is the batch
        return len(self._input) == len(left) and self._input[:positions] == left[:positions]

    def _pair(self, path: str) -> str | None:
        """Return the layer that feeds a layer, with only elementwise functions, normalisations, pooling and dropout between.

        Of several layers that read the same input, as the two of a gated pair, the first is returned.
        """
        found, _ = self._fed_by(path)
        if len({self._calls[layer][0].source for layer in found}) != 1:
            return None
        return next(layer for layer in self._layers if layer in found)

    def _fed_by(
        self, path: str, *, tried: bool = False, among: Collection[str] | None = None
    ) -> tuple[set[str], set[GradientEdge]]:
        """Return the layers that feed a layer through functions that keep the features, none if anything else does, and the way.

        tried: whether what is found will be tried, so that everything passes that is not known to mix features (`_MIXES`).
        among: the submodules that are looked for in place of the layers.
        """
        others = [other for other in (self._layers if among is None else among) if other != path]
        ends = {self._calls[other][0].edge: other for other in others if len(self._calls[other]) == 1}
        whole = (path for path in self._calls if self._keeps_features(path))
        through = {call.edge: call.source for each in whole for call in self._calls[each] if call.edge is not None}
        source = self._calls[path][0].source
        waiting, found, seen = [source] if source is not None else [], set[str](), set[GradientEdge]()
        while waiting:
            edge = waiting.pop()
            if edge in ends:
                found.add(ends[edge])
            elif (entered := through.get(edge)) not in (None, edge):
                waiting.append(entered)
            elif _MIXES.search(edge.node.name()) if tried else not _KEEPS_FEATURES.match(edge.node.name()):
                return set(), seen
            elif edge not in seen:
                seen.add(edge)
                for node, at in edge.node.next_functions:
                    if node is None and not tried and edge.node.name().startswith("Mul"):
                        return set(), seen  # a factor that may be any tensor
                    if node is not None and not node.name().endswith("AccumulateGrad"):
                        waiting.append(GradientEdge(node, at))
        return found, seen

    def hidden(self) -> list[Hidden]:
        """Return the hidden features of the network: what one or several layers write, and the next layers alone read."""
        groups: list[Hidden] = []
        for reader in self._layers:
            writers, edges = self._fed_by(reader, tried=True) if len(self._calls[reader]) == 1 else (set(), set())
            if not writers:
                continue
            norms = {
                path
                for path, calls in self._calls.items()
                if isinstance(self._modules[path], nn.modules.batchnorm._NormBase) and calls[0].edge in edges
            }
            found = Hidden(writers, {reader}, norms)
            for other in [group for group in groups if group.writers & writers]:
                groups.remove(other)
                found = Hidden(*(one | two for one, two in zip(found, other, strict=True)))
            groups.append(found)
        return groups

    def _behind_narrow(self, path: str) -> str:
        """Return the reason for a site behind a narrow place; empty where there is none."""
        widths = self._widths(path)
        return "" if widths is None else "a bypass reads {} features past a place of {}".format(*widths[1:])

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
        axis, batch = self._features(path, len(left)), 0
        around = path.rpartition(".")[0] if path in self._layers else path
        neighbours = (other for other in self._calls if not around or _within(other, around))
        # where the submodule, or a neighbour of a layer, reads (L, B, C)
        if len(left) == 3 and any(getattr(self._modules[each], "batch_first", True) is False for each in neighbours):
            if left[1] != self._examples or entered[1:2] != left[1:2]:
                return (
                    "its axes are (L, B, C), because batch_first is False, but its second axis is not the batch, which has "
                    f"{counted(self._examples, 'example')}"
                )
            if left[0] == self._examples:
                return (
                    f"it has {self._examples} positions and as many examples, so that batch_first=False does not tell its axes "
                    "apart; give an example with another number of them"
                )
            batch = 1
        if batch == 0 and (left[0] != self._examples or entered[0] != self._examples):
            return f"its first axis is not the batch, which has {counted(self._examples, 'example')}"
        kind, order = _KINDS.get((len(left), batch, axis), (None, ""))
        if kind is None or (len(left) > 3 and axis > 1 and not self._told(path, len(left), last=True)):
            axes = ", ".join("C" if place == axis else "*" for place in range(1, len(left)))
            return f"{UNKNOWN_STREAM}, (B, {axes}); known are {KNOWN_STREAMS}"
        if len(entered) != len(left):
            return f"reads a stream with {len(entered)} axes and returns one with {len(left)}"
        return kind(left[axis], order)

    def _features(self, path: str, rank: int) -> int:
        """Return the axis of the features in an output with `rank` axes, judged by the layers inside that return as many axes."""
        layers = [layer for layer in self._inner[path] if len(self._calls[layer][0].left or ()) == rank]
        first = [layer for layer in layers if self._convolves(layer)]
        if rank < 3 or not first:
            return rank - 1
        if len(first) == len(layers):
            return 1
        shape = self._calls[path][0].left or ()
        widths = {(self._calls[layer][0].left or ())[1 if layer in first else -1] for layer in layers}
        if (shape[1] in widths) != (shape[-1] in widths):
            return 1 if shape[1] in widths else rank - 1
        return 1 if rank == 4 else rank - 1

    def _convolves(self, layer: str) -> bool:
        """Return whether a layer convolves, so that its features are the second axis: by its class or by its weight's use."""
        module = self._modules[layer]
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        return isinstance(module, _CONVOLUTIONS) or bool(own & self._convolved)

    def _told(self, path: str, rank: int, *, last: bool) -> list[str]:
        """Return the classes of layers inside that show where the features are: last, as of Linear, or second, as of Conv."""
        layers = (layer for layer in self._inner[path] if len(self._calls[layer][0].left or ()) == rank)
        shows = (lambda layer: isinstance(self._modules[layer], nn.Linear)) if last else self._convolves
        return list(dict.fromkeys(self._kind(layer) for layer in layers if shows(layer)))

    def _remarks(self, path: str) -> str:
        """Return what else the reason for a site says, as by what the axes of its stream were judged in another order."""
        calls, stream, remarks = self._calls[path], self.stream(path), [self._behind_narrow(path)]
        if isinstance(stream, Stream) and stream.permutation:
            by = "batch_first=False"
            if stream.order[0] == "B":
                by = " and ".join(self._told(path, len(stream.order), last=stream.order[-1] == "C"))
            remarks.append(f"its axes are ({', '.join(stream.order)}), by {by}")
        if len(calls) > 1:
            remarks.append(f"runs {len(calls)} times")
        if calls[0].bundled:
            remarks.append("its stream is the first floating-point tensor of what it returns")
        return "".join(f"; {each}" for each in remarks if each)

    def _keeps_features(self, path: str) -> bool:
        """Return whether a submodule is known to keep the features that it reads, whatever functions it is made of."""
        module = self._modules[path]
        if isinstance(module, nn.modules.dropout._DropoutNd):
            return True
        return _FUNCTION.search(self._kind(path)) is not None and next(module.parameters(), None) is None

    def _edges(self, path: str) -> tuple[GradientEdge | None, ...]:
        return tuple(call.edge for call in self._calls[path])

    def _kind(self, path: str) -> str:
        return type(self._modules[path]).__name__


def _within(path: str, other: str) -> bool:
    """Return whether a dotted path is equal to another one or lies inside it."""
    return path == other or path.startswith(other + ".")


def _signature(module: nn.Module) -> Any:
    """Return what blocks of one kind share: the class, and for an nn.Sequential the signatures of its modules."""
    if type(module) is nn.Sequential:
        return (nn.Sequential, *map(_signature, module))
    return type(module)


_NOISE = 16
"""Differences of at most this many units in the last place of the largest value count as rounding."""


def causal_paths(module: nn.Module, example: Any, paths: Mapping[str, Stream]) -> set[str]:
    """Return the submodules among `paths`, sequences, whose output follows an input that the network reads causally.

    The last position of each sequence of the example, (B, L) or (B, L, C), is changed, and the module is run again in
    evaluation mode. The network reads that input causally if later positions of the streams or of the output change and
    earlier ones do not. If the module fails on the changed input, nothing is known, and all streams count as causal.
    """
    if not paths:
        return set()
    causal, orders = set[str](), {stream.order: stream for stream in (Sequence(1), *paths.values())}
    with untouched(module):
        for each in module.modules():
            each.training = False
        usual = _streams(module, example, paths)
        for length, other in _changed(example):
            try:
                streams = _streams(module, other, paths)
            except InputError:
                return set(paths)
            effects = {
                path: _effect(paths[path].arranged(x), paths[path].arranged(streams[path]), length)
                for path, x in usual.items()
                if path in paths and path in streams
            }
            looks_ahead = any(early for early, _ in effects.values())
            for path, x in usual.items():
                if path in paths or path not in streams:
                    continue
                # An output of the network looks ahead if it does so whichever order of axes of the streams it has. Positions in
                # front of the last are what is asked about, so that an order with a single position tells nothing.
                pairs = [(order.arranged(x), order.arranged(streams[path])) for order in orders.values()]
                pairs = [(one, two) for one, two in pairs if one.shape[1] > 1 or one.shape != two.shape]
                looks_ahead |= bool(pairs) and all(_effect(*pair, length)[0] for pair in pairs)
            if not looks_ahead:
                causal.update(path for path, (_, late) in effects.items() if late)
    return causal


def _streams(module: nn.Module, example: Any, paths: Collection[str]) -> dict[str, Tensor]:
    """Return the sequences that the submodules at `paths` and the module itself, at path "", compute.

    Every call starts from the same random state.
    """
    found: dict[str, Tensor] = {}

    def keep(path: str, output: Any) -> None:
        for index, x in enumerate(floats(output)):
            if x.dim() == 3 and (index == 0 or not path):
                found[path if index == 0 else f"/{index}"] = x.detach().clone()

    with untouched(module):  # which takes the hooks away too
        for path in paths:
            module.get_submodule(path).register_forward_hook(lambda _, __, output, path=path: keep(path, output))
        keep("", run(module, example))
    return found


def _effect(usual: Tensor, changed: Tensor, length: int) -> tuple[bool, bool]:
    """Return whether early and whether late positions of a stream change when the last of `length` input positions does.

    A stream may be longer or shorter than the input. Its late positions are those that begin in the last position of
    the input.
    """
    if usual.shape != changed.shape:
        return True, True
    cut = usual.shape[1] * (length - 1) // length
    rounding = _NOISE * torch.finfo(usual.dtype).eps * usual.abs().max()
    moved = (usual.float() - changed.float()).abs().amax((0, 2)) > rounding
    return bool(moved[:cut].any()), bool(moved[cut:].any())


def _changed(example: Any) -> Iterator[tuple[int, Any]]:
    """Yield, for each sequence and axis, the example with the last position of the sequence changed, and its length.

    Whole numbers there are replaced by values that the sequence has elsewhere.
    """
    for x in tensors(example):
        if x.dim() not in (2, 3) or x.dtype == torch.bool:
            continue
        for axis in range(1, x.dim() if x.is_floating_point() else 2):
            if x.shape[axis] < 2:
                continue
            changed = x.detach().clone()
            last = changed.select(axis, x.shape[axis] - 1)
            if x.is_floating_point():
                last.mul_(-1).add_(1)
            elif len(known := x.unique()) == 1:
                last.add_(1 if int(known[0]) == 0 else -1)
            else:
                last.copy_(known[(torch.searchsorted(known, last.contiguous()) + 1) % len(known)])
            yield x.shape[axis], replaced(example, x, changed)


_SHOWN = 3
"""Largest number of modules that the table names for one reason to leave modules out."""


class Span(NamedTuple):
    """Holds a site whose bypass reads the input of another submodule than that of the site found there.

    Attributes:
        site (Site): the site, for `esper.graft`, in place of the one with its name
        reads (int): the features that a bypass reads
        why (str): what is spanned
    """

    site: Site
    reads: int
    why: str


class FoundSites(dict[str, Site]):
    """Maps names to sites, in the order in which the network runs them, with the reasons. Prints as a table.

    Attributes:
        spans (dict[tuple[str, str], Span]): further spans, by the dotted paths of the submodule whose input a bypass reads, ""
            for the network, and of the submodule whose output its seed changes
        why (dict[str, str]): for the name of each site, the reason why it was chosen
        left_out (dict[str, str]): for the dotted path of each other submodule, the reason why it is not a site
        reads (dict[str, int | None]): for the name of each site, the features that a bypass reads; None if it cannot read there
        parts (dict[str, Site]): further submodules with several layers, as the attention and the feed-forward of a block; for
            seeds that are narrow copies of them `esper.graft` takes their names too
    """

    def __init__(
        self,
        network: str,
        sites: Iterable[Site],
        why: dict[str, str],
        left_out: dict[str, str],
        reads: dict[str, int | None],
        spans: dict[tuple[str, str], Span],
        parts: dict[str, Site],
    ) -> None:
        """`network`: the name of the module's class."""
        super().__init__((site.name, site) for site in sites)
        self._network, self.why, self.left_out, self.reads, self.spans = network, why, left_out, reads, spans
        self.parts = parts

    def __repr__(self) -> str:
        rows: list[tuple[str, ...]] = [("site", "around", "reads", "stream", "a unit", "causal", "why")]
        for name, site in self.items():
            stream, reads = str(site.stream), self.reads[name]
            # A hidden unit of a bypass is a row of weights, a bias and a column of weights.
            sizes_there = ("", "") if reads is None else (f"{reads:,}", f"{reads + 1 + site.stream.width:,}")
            causal = "yes" if site.causal else "no"
            rows.append((name, site.around, sizes_there[0], stream, sizes_there[1], causal, self.why[name]))
        lines = aligned(rows)
        if self.spans:
            rows = [("from", "to", "reads", "stream", "a unit", "why")]
            for (source, target), (site, read, why) in self.spans.items():
                unit = f"{read + 1 + site.stream.width:,}"
                rows.append((source or "input", target, f"{read:,}", str(site.stream), unit, why))
            lines += ["further spans", *aligned(rows)]
        if self.left_out:
            reasons = _by_reason(self.left_out).items()
            lines += ["left out", *(f"  {why}: {listed(paths, _SHOWN)}" for why, paths in reasons)]
        return "\n".join([f"{counted(len(self), 'site')} in {self._network}", *lines])


class NoSiteError(InputError):
    """Says that a module has no site. `found` says why, without what to do about it; `left_out` is that of `FoundSites`."""

    def __init__(self, found: str, left_out: Mapping[str, str]) -> None:
        forms = any(reason.startswith(UNKNOWN_STREAM) for reason in left_out.values())
        mend = f"give an esper.Site for a submodule that returns one of {KNOWN_STREAMS.replace(' and ', ', ')}"
        if forms:
            mend += ", or let one return such a stream, for example by x.permute(...) at the end of its forward"
        super().__init__(f"{found}; {mend}")
        self.found, self.left_out = found, left_out


def find_sites(module: nn.Module, example: Any, loss: Callable[[Any], Tensor] | None = None) -> FoundSites:
    """Find the sites of a module: its repeated blocks, and the layers in them that widen or narrow a stream.

    Blocks are submodules of one class that run one after the other. If no block repeats, every layer that multiplies by
    a weight (Linear, convolutions, recurrent layers) is a candidate. A bypass reads the input of the submodule, unless that
    is a narrow place between two layers: then it reads what the layer in front of the place reads (`Site.around`). The
    stream of a submodule that returns a tuple is the first floating-point tensor in it. A site needs a stream with the axes of a
    `Vector`, `Map`, `Sequence` or `Volume`, and a gradient of the loss. Which axis is which is judged by the layers inside. Heads
    that are not behind a narrow place, embeddings, normalisations, submodules that share a parameter with a head, and
    submodules that do not run are left out.

    The module runs forward and backward once, in its present mode. If a sequence flows through it, it runs a few more
    times, in evaluation mode, to see whether the sequence looks ahead. The module and the random generators are
    restored afterwards, bit for bit.

    Args:
        module: any module that runs eagerly, with floating-point weights
        example: a tensor for module(x), a tuple or list for module(*x), or a mapping for module(**x); B examples, B first
        loss: a function of the output that returns one number; by default, the squared distance of every floating-point tensor
            of the output from fixed numbers

    Raises:
        InputError: if the module cannot be examined, cannot run on the example, or has no site
    """
    check_module(module)
    examples = _examples(example)

    with recorded(module, example, loss, started=True) as recording:
        candidates = Candidates(recording, examples, example)
        for choice in candidates.choices():
            chosen, left_out = candidates.sifted(choice)
            if chosen:
                break
        else:
            common = sorted(_by_reason(left_out).items(), key=lambda item: -len(item[1]))[:_SHOWN]
            reasons = "; ".join(f"{listed(paths, _SHOWN)} ({reason})" for reason, paths in common)
            raise NoSiteError(
                f"no site found in {type(module).__name__}: {reasons or 'it has no submodule with parameters'}",
                left_out,
            )
        pairs = candidates.spans(chosen)
        parts = candidates.parts(chosen)
        targets = dict.fromkeys((*chosen, *parts, *(target for _, target in pairs)))
        streams = {path: stream for path in targets if isinstance(stream := candidates.stream(path), Stream)}
        sequences = {path: each for path, each in streams.items() if each.kind == Kind.SEQUENCE}
        causal = causal_paths(module, example, sequences)
        sites = [Site(path, path, candidates.span(path), streams[path], path in causal) for path in chosen]
        further = {path: Site(path, path, path, streams[path], path in causal) for path in parts}
        each_site = [*sites, *further.values()]
        reads = {site.name: candidates.reads(site.around, site.name) or None for site in each_site}
        why = {**dict.fromkeys(parts, "a part with several layers"), **chosen}
        spans = {
            (source, target): Span(Site(target, target, source, streams[target], target in causal), read, why)
            for (source, target), (read, why) in pairs.items()
        }
    return FoundSites(type(module).__name__, sites, why, left_out, reads, spans, further)


def find_hidden(module: nn.Module, example: Any) -> tuple[list[Hidden], list[str]]:
    """Find the hidden features of a module by one forward pass on an example, as `find_sites` runs it; same errors.

    Returns them, and the submodules with parameters of their own that did not run.
    """
    check_module(module)
    examples = _examples(example)

    with recorded(module, example) as recording:
        not_called = {path: part for path, part in recording.parts.items() if path and path not in recording.calls}
        idle = [path for path, part in not_called.items() if any(True for _ in part.parameters(recurse=False))]
        hidden = Candidates(recording, examples, example).hidden()
    return hidden, idle


def is_quantised(weight: Tensor) -> bool:
    """Return whether a weight has too few bits to be trained: integers, or floating-point numbers of 8 bits."""
    whole = not (weight.is_floating_point() or weight.is_complex())
    return weight.is_quantized or whole or weight.dtype.itemsize == 1


def _by_reason(left_out: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path, reason in left_out.items():
        found.setdefault(reason, []).append(path)
    return found


def _examples(example: Any) -> int:
    """Return B, the size of the first axis of the first tensor of the example. Raises InputError if there is none."""
    if not isinstance(example, Tensor | tuple | list | Mapping):
        raise InputError(
            f"the example is {kind_of(example)}; give a tensor, a tuple of arguments or a mapping of named arguments"
        )
    sizes = [x.shape[0] for x in tensors(example) if x.dim() > 0]
    if not sizes or sizes[0] == 0:
        raise InputError(
            "the example holds no examples; give at least one tensor whose first axis is a batch, as in torch.randn(2, 8)"
        )
    return sizes[0]


def check_module(module: nn.Module) -> None:
    """Raise InputError if the module cannot be recorded, or its weights cannot have a gradient."""
    if not isinstance(module, nn.Module):
        raise InputError(f"module is {kind_of(module)}; give an nn.Module")
    for path, each in module.named_modules():
        where = f"{path!r} of {type(module).__name__}" if path else type(module).__name__
        if isinstance(each, torch.jit.ScriptModule):
            raise InputError(f"{where} is a torch.jit module, whose code is fixed; give the module before torch.jit")
        if type(each).__name__ == "OptimizedModule" or each._compiled_call_impl is not None:
            raise InputError(
                f"{where} is compiled, and a compiled module cannot be recorded; find its sites before torch.compile"
            )
        if isinstance(each, nn.parallel.DistributedDataParallel):
            raise InputError(
                f"{where} is wrapped in DistributedDataParallel; give the module before it is wrapped, its .module"
            )
        if type(each).__module__.startswith("torch.ao.nn.quantized"):
            raise InputError(
                f"{where} is a quantised {type(each).__name__}; give the module with floating-point weights"
            )
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(value):
            raise InputError(
                f"{name} of {type(module).__name__} takes its size from the first input; run the module once before"
            )
        if value.is_meta:
            raise InputError(
                f"{name} of {type(module).__name__} is on the meta device; give the module with its numbers"
            )
        if value.is_quantized or (isinstance(value, nn.Parameter) and is_quantised(value)):
            kind = str(value.dtype).removeprefix("torch.")
            raise InputError(
                f"{name} of {type(module).__name__} is quantised ({kind}); give the module with floating-point weights"
            )
    if next(module.parameters(), None) is None:
        raise InputError(f"{type(module).__name__} has no parameters; give a network that can be trained")
