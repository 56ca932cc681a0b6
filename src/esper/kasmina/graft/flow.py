"""Follow features through one recorded run of a network: which layers a layer's inputs come from, and through what."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn
from torch.autograd.graph import Node

from esper.kasmina.graft.find_sites import EMBEDDINGS
from esper.kasmina.graft.grown import class_of
from esper.kasmina.graft.recording import PRODUCT, Recording, before, factors
from esper.leyline.messages import InputError, with_article

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)


_MIXES = re.compile(rf"{PRODUCT.pattern}|Scaled|Attention")
"""Names of the autograd nodes that multiply by a weight, or by what layers return."""


class Reach(NamedTuple):
    """Lists what the inputs of a layer, or the outputs of the network, depend on without another layer between."""

    layers: dict[str, bool]  # the layers, and whether the way there leads through attention
    nodes: dict[Node, bool]  # the nodes of the autograd graph on the way, and whether attention follows on them


class Flow:
    """Records the layers of a network, and what flows between them in one run on an example.

    Attributes:
        parts, weights, calls, order: those of the recording
        layers (set[str]): those of known kinds that multiply what flows by a weight
        doubles (dict[str, str]): layers that share all parameters with one of `layers`, with its path
        passed (dict[Node, str]): nodes of layers that are no `layers`, as they multiply along another axis than that of features
    """

    def __init__(self, recording: Recording) -> None:
        """Raise InputError if a submodule did not run, or is a layer of a kind that is not known."""
        self.parts, self.weights, self.calls, _, self.order = recording
        weights = self.weights
        held = [path for path, part in self.parts.items() if any(True for _ in part.parameters(recurse=False))]
        known = [path for path in held if self._is_layer(path)]
        embeddings = {path for path in known if isinstance(self.parts[path], EMBEDDINGS)}
        matrices = {id(own) for name, own in weights.items() if name.rpartition(".")[0] in set(known) - embeddings}
        products = [factors(node) for node in self.order if PRODUCT.search(node.name())]
        multiplied = set[int]().union(*(each & matrices or each for each in products))
        # an embedding may hold a table that a module around it reads as a whole, as one of learned queries
        used = {id(getattr(node, "variable", None)) for node in self.order} - multiplied
        used -= {id(weights.get(f"{path}.weight")) for path in self.calls}
        tables = {path for path in embeddings if id(weights.get(f"{path}.weight")) in used}
        known = [path for path in known if path not in tables]
        inside = {path for path in held if any(path.startswith(f"{layer}.") for layer in known)}
        own = {path: (type(self.parts[path]), *map(id, self.parts[path].parameters())) for path in known}
        # a module around a layer may multiply by its weight itself
        running = {*self.calls, *tables, *(path for path in known if id(weights.get(f"{path}.weight")) in multiplied)}
        ran = {own[path]: path for path in reversed(known) if path in running}
        self.doubles = {path: ran[own[path]] for path in known if ran.get(own[path], path) != path}
        self.layers = set(known) - inside - set(self.doubles)
        for path in held:
            if isinstance(self.parts[path], nn.ParameterList | nn.ParameterDict):
                raise InputError(self._why_unknown(path))
            if path and path not in running and path not in inside | set(self.doubles):
                raise InputError(f"{path!r} did not run on the example; give an example on which every layer runs")
        self.owner, self.passed = self._owners(), dict[Node, str]()

    def _is_layer(self, path: str) -> bool:
        part = self.parts[path]
        known = isinstance(part, (nn.Linear, nn.MultiheadAttention, *RECURRENT, *CONVOLUTIONS, *EMBEDDINGS))
        return known or class_of(part).__name__ == "Conv1D"

    def _owners(self) -> dict[Node, str]:
        """Return the layer by whose weight each product multiplies. InputError if it is the weight of no known layer."""
        holders: dict[int, list[str]] = {}
        for path, part in self.parts.items():
            layer = next((each for each in self.layers if path.startswith(f"{each}.")), self.doubles.get(path, path))
            for own in part._parameters.values():
                if own is not None and own.dim() >= 2:
                    holders.setdefault(id(own), []).append(layer)
        found: dict[Node, str] = {}
        for node in self.order:
            embeds = "Embedding" in node.name()
            if not embeds and not PRODUCT.search(node.name()):
                continue
            named = [path for weight in factors(node) for path in holders.get(weight, [])]
            fitting = [path for path in named if isinstance(self.parts[path], EMBEDDINGS) == embeds]
            if known := [path for path in fitting if path in self.layers]:
                found[node] = known[0]  # a further factor is what the layer reads, as learned queries are
            elif named:
                raise InputError(self._why_unknown(named[0]))
        return found

    def _why_unknown(self, path: str) -> str:
        """Say why the widths of a submodule cannot change by whose weight something is multiplied."""
        kind = type(self.parts[path])
        if path in self.layers:
            return (
                f"the weight of {path!r} is multiplied outside of it too; let a Linear that has the same weight do that, as in "
                "head.weight = embedding.weight"
            )
        where = f"{repr(path) if path else 'the model'} is {with_article(kind.__name__)}"
        if kind.__module__.startswith("torch.nn."):
            return f"{where}, whose widths cannot change"
        return (
            f"{where}, which multiplies by a weight of its own, and not by a Linear, so that its widths cannot change"
        )

    def reach(self, starts: Sequence[Node], path: str, *, values: bool = False) -> Reach:
        """Follow nodes towards the inputs of the network up to the next layers; those of the layer `path` itself are passed.

        values: whether a product of what layers return is followed to the features that it weighs alone, not to their weights.
        """
        layers, nodes = dict[str, bool](), dict[Node, bool]()
        waiting = [(node, False) for node in starts]
        while waiting:
            node, through = waiting.pop()
            layer = self.owner.get(node)
            if layer is not None and layer != path:
                layers[layer] = layers.get(layer, False) or through
            elif node not in nodes or (through and not nodes[node]):
                nodes[node] = through
                read = before(node)
                # a product with what does not depend on the network, as with the adjacency of a graph, is none of features
                mixes = layer is None and len(read) > 1 and node not in self.passed and _MIXES.search(node.name())
                if mixes and values:
                    waiting.append((self._weighed(node, path), False))
                else:
                    waiting += [(each, layer is None and bool(through or mixes)) for each in read]
        return Reach(layers, nodes)

    def pass_along(self, path: str) -> None:
        """Let features flow through a layer that multiplies along another axis, such as that of the positions (MLP-Mixer)."""
        self.layers.remove(path)
        self.passed |= {node: path for node, layer in self.owner.items() if layer == path}
        self.owner = {node: layer for node, layer in self.owner.items() if layer != path}

    def goes_on(self, node: Node, kind: type[nn.Module]) -> bool:
        """Return whether a node reads what a `passed` layer of a kind returns, in the same order of axes."""
        waiting, seen = before(node), set[Node]()
        while waiting:
            each = waiting.pop()
            if each in self.passed and isinstance(self.parts[self.passed[each]], kind):
                return True
            if each not in seen and each not in self.owner and not re.match("(T|Transpose|Permute)Back", each.name()):
                seen.add(each)
                waiting += before(each)
        return False

    def _weighed(self, node: Node, path: str) -> Node:
        """Return what a product weighs: the values of attention, or the factor that depends on no further product."""
        if not PRODUCT.search(node.name()):
            values = node.next_functions[2][0]
            return before(node)[-1] if values is None else values
        left, right = before(node)[-2:]
        mixed = [any(self.reach([each], path).layers.values()) for each in (left, right)]
        return left if mixed == [False, True] else right

    def node(self, path: str) -> Node | None:
        """Return the node of the autograd graph that a submodule's first call returned."""
        calls = self.calls.get(path)
        return calls[0].edge.node if calls and calls[0].edge is not None else None
