"""Multiply all inner widths of a network at once, in place and with an unchanged function: streams, attention heads and all.

Every inner feature gets further ones beside it. Three ways to keep the function are tried in turn; the first that holds is taken.

- zeros: nothing writes the new features of a stream, and whatever reads them begins with drawn weights. An RMSNorm over
  r times as many features divides by a root of mean squares that is smaller by sqrt(r), for which its weights make up.
- means: the new features of a stream are the mean of the old ones, which leaves what a LayerNorm subtracts as it was.
- copies: each feature gets copies, and whatever reads them divides its weights among them, with noise that sums to 0 over them
  (Net2Net, Chen et al. 2016, arXiv 1511.05641). Any norm computes what it did.

In the first two ways, features over which nothing normalises, as those of attention heads, are drawn, and nothing reads them yet.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from esper.kasmina.graft.find_sites import EMBEDDINGS, Hidden, check_module
from esper.kasmina.graft.flow import CONVOLUTIONS, RECURRENT, Flow, Reach
from esper.kasmina.graft.folding import known_axes, successor
from esper.kasmina.graft.recording import PRODUCT, Recording, before, distance, recorded, results, saved
from esper.kasmina.graft.units import Outputs, axes_of, check_own_weight
from esper.leyline.messages import InputError, in_words

Way = Literal["zeros", "means", "copies"]
WAYS: tuple[Way, ...] = get_args(Way)

Variant = Literal[
    "plain", "buffers", "by head", "new heads first", "by head, new heads first", "scaled", "joined", "positions"
]
VARIANTS: tuple[Variant, ...] = get_args(Variant)

NOISE = 0.5
"""Standard deviation of the noise on weights that read copies, as a share of that of these weights."""

_LARGE = 8.0
"""By how much features that nothing reads yet are larger in a second attempt, which a network that takes their maximum shows."""

_BY_FEATURE = (nn.modules.batchnorm._NormBase,)
_OVER_FEATURES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)

_HEADS = re.compile(
    r"^(n|num|number_of)?_?((en|de)coder_)?(self_)?(attn|attention|query|q|key_value|kv|k|v)?_?heads?(_q|_k|_kv)?$"
    r"|^(n?_?h|heads?_(num|number|count))$",
    re.I,
)
_HEAD_SIZES = re.compile(r"head_?(dim|size)|d_?head|dim_head|d_kv?$|key_value_proj_dim|^(d_?h|h_?d|h_?s)$", re.I)
_WIDTHS = re.compile(
    r"emb|dim|hid|width|channel|feature|d_model|d_ff|units|inner|split|planes|intermediate|size|normalized_shape",
    re.I,
)
_SCALES = re.compile(r"scale|multiplier|normali[sz]er|root|sqrt", re.I)
_NO_WIDTHS = re.compile(
    r"vocab|block|context|position|length|image|patch|kernel|window|batch|num_embeddings|chunk|codebook|class|stride|input|output"
    r"|segment|frame|^(n|num|number_of)_(\w+_)?layers?$",
    re.I,
)
"""Names of attributes of a person's modules, and of their configs, that count attention heads or features, or are a root of
their number."""


class Axis(NamedTuple):
    """Describes an axis of a parameter or buffer along which there will be more."""

    axis: int
    # elements that stay beside each other: 1, those of an attention head, or the positions of a channel of a flattened map
    block: int = 1
    reads: bool = False  # whether the elements read features, and do not write them
    stream: bool = False  # whether something normalises over these features
    copied: bool = False  # whether these features are copied in any way, as keys and values that several heads share
    # whether the new elements stand in front of the old ones that they belong to, and nothing reads them yet
    first: bool = False


class _Heads(NamedTuple):
    """Describes the attention heads around a layer: their width, their number, and whether the layer writes for fewer of them."""

    size: int
    number: int
    shared: bool


class Multiplication:
    """Finds where a network gets the further features, by one pass on an example."""

    def __init__(
        self, module: nn.Module, example: Any, wider: Sequence[tuple[Hidden, int]] = (), variant: Variant = "plain"
    ) -> None:
        """wider: hidden features of which there are more already, with the number before.

        variant: what the graph does not show. 'buffers': buffers of a person's modules whose last axis has the width of a stream
        are added to it, as positions. 'by head': a layer writes query, key and value of one head beside each other. 'new heads
        first': each new head stands in front of the old one, as slopes of ALiBi for twice as many heads have the old ones at
        every second place. 'scaled': what the last layer reads is divided by a root of the width, where it shares its weight with
        an embedding, as in T5. 'joined': a Linear behind convolutions reads several streams side by side, as tokens of two kinds
        or neighbouring patches, and not the positions of each channel. 'positions': a Linear or Conv1d mixes positions, as in
        MLP-Mixer, if it reads no multiple of the features that flow to it and no half, third or quarter, or what such a layer
        returns.

        InputError if a layer is of a kind that is not known, frozen, or did not run.
        """
        self._variant = variant
        self._module, self._before = module, {width for _, width in wider}
        self._written = {path for hidden, _ in wider for path in hidden.writers}
        self._read = {path for hidden, _ in wider for path in hidden.readers}
        self._normed = {path for hidden, _ in wider for path in hidden.norms}
        self._frozen = {name for name, own in module.named_parameters() if not own.requires_grad}
        self.widths: dict[str, int] = {}  # the layers that write inner features, with the number of these
        self.positions = set[str]()  # the layers that mix positions, whose number stays
        # by the name of each parameter and buffer that changes; none of a scale of features
        self.axes: dict[str, list[Axis]] = {}
        # parameters and buffers that are applied to each feature, with the value for new ones, None for the mean of the old ones
        self.scales: dict[str, float | None] = {}
        # those of them that are the weights of norms over a stream, which are divided by sqrt(r)
        self.normalising: set[str] = set()
        # powers of r where layers alone read what such a norm returns, and are divided in its place: of their weights, of
        # those of the norm, and of its bias
        self.shares: dict[str, float] = {}
        # attributes that are multiplied, with their values, by the path of the submodule, or by `path:name` of its config; some
        # are lists of widths, such as `hidden_sizes`
        self.counts: dict[str, dict[str, Any]] = {}
        self.epsilons: dict[str, dict[str, float]] = {}  # by the same paths, what such norms add to the mean square
        self.offsets: set[str] = set()  # weights of such norms to which 1 is added where they are applied, as in Gemma
        # attributes of embeddings, or of the modules that hold them, which are the root of the width, and by which
        # embeddings are multiplied
        self.roots: dict[str, list[str]] = {}
        # exponents of r for the weights of these embeddings (-1/2), and for the norms in front of layers that share them (1/2)
        self.powers: dict[str, float] = {}
        self._rooted: set[str] = set()  # embeddings that are multiplied by such a root
        self._flattens = False  # whether a layer reads the positions of maps, or several streams side by side
        self._divided: set[str] = set()  # parameters of norms in front of a layer that is tied to one that writes
        check_module(module)
        with recorded(module, example, lambda out: distance(results(out))) as recording:
            self._find(recording)
        # buffers of a person's modules that may be added to a stream
        streams = {width for path, width in self.widths.items() if (path, False) in self._streams}
        for path, part in self._flow.parts.items() if variant == "buffers" else ():
            for name, own in part._buffers.items() if not type(part).__module__.startswith("torch.") else ():
                if own is not None and own.is_floating_point() and own.dim() > 1 and own.shape[-1] in streams:
                    self._grow(_prefix(path) + name, Axis(own.dim() - 1, stream=True))
        if variant == "joined" and not self._flattens:
            raise InputError("no layer reads several times as many features as a convolution returns channels")
        if variant == "positions" and not self.positions:
            raise InputError("no layer mixes positions")

    def _find(self, recording: Recording) -> None:
        self._flow = flow = Flow(recording)
        outer = flow.reach(before(recording.loss.grad_fn), "")
        for node in flow.order if self._variant == "positions" else ():
            path = flow.owner.get(node, "")
            part: Any = flow.parts[path]
            if path in flow.layers and isinstance(part, nn.Linear | nn.Conv1d):
                widths = {self._width(each) for each in flow.reach(before(node), path).layers}
                read = part.weight.shape[1]
                another = all(read % each and each not in (2 * read, 3 * read, 4 * read) for each in widths)
                if widths and (another or flow.goes_on(node, type(part))):
                    flow.pass_along(path)
                    self.positions.add(path)
        starts = {path: list[Node]() for path in flow.layers}
        for node, path in flow.owner.items():
            starts[path] += before(node)
        reads = {path: flow.reach(nodes, path) for path, nodes in starts.items()}
        self._heads, single = self._find_heads(reads), self._find_single(reads)
        for path, reach in reads.items():
            weighed = any(reach.layers.values()) and not isinstance(flow.parts[path], nn.MultiheadAttention)
            if weighed and path not in self._heads:
                # Attention of one head, or over a graph: the layers that make its weights go on to return what they did.
                reads[path] = flow.reach(starts[path], path, values=True)
                single |= reach.layers.keys() - reads[path].layers.keys()
        self._external, self._inner = set(outer.nodes), dict[Node, bool]()
        # What reads no layer reads the input of the network, or norms and parameters alone. Of these, learned queries are inner
        # features where they are also added to some.
        own = {id(weight) for name, weight in flow.weights.items() if name.rpartition(".")[0] not in flow.layers}
        fed = {path for path, reach in reads.items() if reach.layers}
        leaves = {node for path in fed for node in reads[path].nodes if id(getattr(node, "variable", None)) in own}
        fed |= {path for path, reach in reads.items() if leaves & reach.nodes.keys()}
        for path in fed:
            for node, through in reads[path].nodes.items():
                self._inner[node] = through or self._inner.get(node, False)
        self._external |= {node for path, reach in reads.items() if path not in fed for node in reach.nodes}
        self._streams = self._find_streams(reads)
        for path in sorted(flow.layers):
            reading = path in fed and path not in self._read
            writing = path not in outer.layers.keys() | single | self._written
            self._grow_layer(path, reads[path], reading=reading, writing=writing)
        self._grow_norms()
        self._grow_parameters()
        tables: tuple[dict[str, Any], ...] = self.counts, self.axes
        for path, first in flow.doubles.items():
            if isinstance(flow.parts[path], EMBEDDINGS):
                self._note_roots(path, self._width(path))
            for table in tables:
                found = {name: own for name, own in table.items() if f"{name}.".startswith(f"{first}.")}
                table |= {path + name.removeprefix(first): own for name, own in found.items()}
        self._join_tied()
        self._share()
        self._count()

    def _find_heads(self, reads: Mapping[str, Reach]) -> dict[str, _Heads]:
        """Return the attention heads of the layers around them, where an attribute counts them."""
        found: dict[str, _Heads] = {}
        for path, reach in reads.items():
            writers = [each for each, through in reach.layers.items() if through]
            part: Any = self._flow.parts[path]
            if not writers or isinstance(part, (nn.MultiheadAttention, *RECURRENT)):
                continue
            inner = part.weight.shape[axes_of(path, part).reads]
            places = {each.rsplit(".", n)[0] for each in (path, *writers) for n in range(1, each.count(".") + 1)}
            for place in [*sorted(places, key=lambda each: -each.count(".")), ""]:
                numbers = [
                    (name, own) for name, own in whole_numbers(self._flow.parts[place]) if own > 0 and inner % own == 0
                ]
                size = next((own for name, own in numbers if _HEAD_SIZES.search(name)), 0)
                count = next((own for name, own in numbers if own < inner and _HEADS.search(name)), 0)
                if size or count:
                    size = size or inner // count
                    found[path] = _Heads(size, inner // size, False)
                    for each in writers:
                        own, number = self._width(each), inner // size
                        # of a value for each head, as a bias by the distance of positions
                        by_head = own == number and (isinstance(self._flow.parts[each], EMBEDDINGS) or own % size > 0)
                        found[each] = _Heads(1, number, True) if by_head else _Heads(size, number, own < inner)
                    break
        return found

    def _find_single(self, reads: Mapping[str, Reach]) -> set[str]:
        """Return the layers of one feature that meets each of many others, as the score of a position or a gate: it stays one."""
        found = set[str]()
        for path, reach in reads.items():
            part, widths = self._flow.parts[path], {each: self._width(each) for each in reach.layers}
            read = next((vars(part)[name] for name in ("in_features", "in_channels", "nx") if name in vars(part)), 0)
            if read % max(widths.values(), default=1) == 0:  # they do not lie side by side
                found |= {each for each, width in widths.items() if width == 1 < max(widths.values())}
        return found

    def _normalises(self, path: str) -> bool:
        """Return whether a submodule normalises over the features of a stream, and not over those of one attention head."""
        part: Any = self._flow.parts[path]
        weights = [own for own in part._parameters.values() if own is not None]
        named = bool(re.search("norm|rms", type(part).__name__, re.I)) and not isinstance(part, _BY_FEATURE)
        if not (isinstance(part, _OVER_FEATURES) or (weights and named)) or path in self._flow.layers:
            return False
        shape = getattr(part, "normalized_shape", max(map(len, weights), default=0))
        size = shape if isinstance(shape, int) else shape[-1]
        node = self._flow.node(path)
        of_heads = node is not None and self._inner.get(node, False)
        return not of_heads or size not in {each.size for each in self._heads.values()}

    def _find_streams(self, reads: Mapping[str, Reach]) -> set[tuple[str, bool]]:
        """Return the layers that read (True) or write (False) features over which something normalises."""
        norms = {self._flow.node(path) for path in self._flow.parts if self._normalises(path)}
        group = {(path, way): {(path, way)} for path in self._flow.layers for way in (True, False)}
        for path, reach in reads.items():
            joined = set().union(group[path, True], *(group[each, False] for each in reach.layers))
            group |= dict.fromkeys(joined, joined)
        normed = {path for path, reach in reads.items() if norms & set(reach.nodes)}
        return {each for path in normed for each in group[path, True]}

    def _width(self, path: str) -> int:
        """Return how many features a layer writes."""
        part: Any = self._flow.parts[path]
        named = ((EMBEDDINGS, "embedding_dim"), (RECURRENT, "hidden_size"), (nn.MultiheadAttention, "embed_dim"))
        known = (*named, (CONVOLUTIONS, "out_channels"))
        found = next((name for kind, name in known if isinstance(part, kind)), None)
        return int(getattr(part, found or axes_of(path, part).written))

    def _grow_layer(self, path: str, reach: Reach, *, reading: bool, writing: bool) -> None:
        """Note the axes of a layer's parameters."""
        part: Any = self._flow.parts[path]
        if not (reading or writing):
            return
        check_own_weight(path, part)
        prefix, counts = _prefix(path), self.counts.setdefault(path, {})
        heads = self._heads.get(path)
        into = Axis(1, reads=True, stream=(path, True) in self._streams)
        out = Axis(0, stream=(path, False) in self._streams)
        if heads and any(reach.layers.values()):
            into = into._replace(block=heads.size, first="first" in self._variant)
        elif heads:
            fused = "by head" in self._variant and self._width(path) == 3 * heads.size * heads.number
            block, first = heads.size * (3 if fused else 1), "first" in self._variant
            out = out._replace(block=block, copied=heads.shared, first=first)
        if writing:
            self.widths[path] = self._width(path)
        if isinstance(part, EMBEDDINGS):
            self._grow(f"{prefix}weight", out._replace(axis=1), added=out.stream)
            counts["embedding_dim"] = part.embedding_dim
            self._note_roots(path, part.embedding_dim)
        elif isinstance(part, RECURRENT):
            self._grow_recurrent(part, path, into if reading else None, out if writing else None)
        elif isinstance(part, nn.MultiheadAttention):
            if not (reading and writing) or part.in_proj_weight is None:
                raise InputError(f"{path!r} reads or writes what is no inner width of the network, or several widths")
            self._grow(f"{prefix}in_proj_weight", into, Axis(0, part.head_dim))
            self._grow(f"{prefix}in_proj_bias", Axis(0, part.head_dim))
            self._grow(f"{prefix}out_proj.weight", Axis(1, part.head_dim, reads=True), out)
            self._grow(f"{prefix}out_proj.bias", out)
            self._grow(f"{prefix}bias_k", Axis(2, part.head_dim))
            self._grow(f"{prefix}bias_v", Axis(2, part.head_dim))
            counts |= {name: getattr(part, name) for name in ("embed_dim", "kdim", "vdim", "num_heads")}
            self.counts[f"{prefix}out_proj"] = dict.fromkeys(("in_features", "out_features"), part.embed_dim)
        else:
            maps = [self._width(each) for each in reach.layers if isinstance(self._flow.parts[each], CONVOLUTIONS)]
            if maps and isinstance(part, nn.Linear) and part.in_features % max(maps) == 0:
                positions = part.in_features // max(maps)
                self._flattens = self._flattens or positions > 1
                into = into._replace(block=1 if self._variant == "joined" else positions)
            self._grow_matrix(part, path, into if reading else None, out if writing else None)

    def _note_roots(self, path: str, width: int) -> None:
        """Note the roots of the width by which an embedding, or the module that holds it, may multiply."""
        node = self._flow.node(path)
        outside = any(each.name().startswith("Mul") and before(each) == [node] for each in self._flow.order)
        for where in (path, path.rpartition(".")[0])[: 1 + outside]:
            if found := _roots(self._flow.parts[where], width):
                self.roots[where] = found
                self._rooted.add(path)

    def _grow_matrix(self, part: Any, path: str, into: Axis | None, out: Axis | None) -> None:
        prefix, counts = _prefix(path), self.counts[path]
        writes, reads, *names = known_axes(part) if isinstance(part, CONVOLUTIONS) else axes_of(path, part)
        if getattr(part, "groups", 1) > 1:
            if part.transposed:
                raise InputError(f"{path!r} is a transposed convolution with {part.groups} groups")
            if into and out and part.weight.shape[1] == 1:  # depthwise: each new channel is a group of its own
                if part.in_channels != part.out_channels:
                    raise InputError(f"{path!r} returns several channels for each of its {part.groups} groups")
                counts |= {"groups": part.groups, "in_channels": part.in_channels}
                into = None
        self._grow(f"{prefix}weight", into and into._replace(axis=reads), out and out._replace(axis=writes))
        self._grow(f"{prefix}bias", out)
        changed = [name for name, own in zip(names, (out, into), strict=True) if own and hasattr(part, name)]
        counts |= {name: getattr(part, name) for name in changed}

    def _grow_recurrent(self, part: Any, path: str, into: Axis | None, out: Axis | None) -> None:
        if getattr(part, "proj_size", 0):
            raise InputError(f"{path!r} is an LSTM with proj_size, which is not known")
        counts = self.counts[path]
        counts |= {"input_size": part.input_size} if into else {}
        counts |= {"hidden_size": part.hidden_size} if out else {}
        inner = out and Axis(1, reads=True, stream=out.stream)
        for name in part._parameters:
            first = re.match(r"weight_ih($|_l0($|_))", name)  # of a cell, or of the first layer in a direction
            read = into if first else inner if name.startswith("weight") else None
            self._grow(_prefix(path) + name, read, out)

    def _grow(self, name: str, *given: Axis | None, added: bool = False) -> None:
        """Note the axes of a parameter or buffer, if there are any. InputError if it cannot change.

        added: whether what is frozen may become wider too, as a table of positions that is added to a stream.
        """
        path, _, entry = name.rpartition(".")
        part, axes = self._flow.parts[path], [axis for axis in given if axis is not None]
        own = part._parameters.get(entry, part._buffers.get(entry))
        if own is None and getattr(part, entry, None) is not None:
            raise InputError(f"{name} is computed from other parameters before each pass")
        if not axes or own is None:
            return
        if name in self._frozen and not added:
            raise InputError(f"{name} is frozen")
        self.axes.setdefault(name, []).extend(axes)

    def _grow_norms(self) -> None:
        """Note the norms of torch whose features become more."""
        for path, part in self._flow.parts.items():
            node: Any = self._flow.node(path)
            if not isinstance(part, (*_BY_FEATURE, *_OVER_FEATURES)) or path in self._normed:
                continue
            if node in self._external or node not in self._inner:
                continue
            over = self._normalises(path)
            shape = getattr(part, "normalized_shape", (0,))
            if isinstance(part, _OVER_FEATURES) and not over:
                continue  # of each attention head, the size of which stays
            if len(shape) > 1:
                raise InputError(f"{path!r} normalises over {len(shape)} axes")
            names = [name for name in ("normalized_shape", "num_channels", "num_features") if hasattr(part, name)]
            self.counts[path] = {name: shape[0] or getattr(part, name) for name in names}
            for name, value in (("weight", None), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
                self._grow(_prefix(path) + name, Axis(0, self._head_size(node) if over else 1, stream=over))
                self.scales[_prefix(path) + name] = value
            if over:
                self._note_norm(path)

    def _note_norm(self, path: str) -> None:
        part = self._flow.parts[path]
        names = [name for name, own in part._parameters.items() if name != "bias" and own is not None]
        self.normalising |= {_prefix(path) + name for name in names}
        if _adds_one(part):
            self.offsets.add(f"{_prefix(path)}weight")
        for where, holder in ((path, part), *configs(self._flow.parts[""], "")):
            floating = {name: own for name, own in vars(holder).items() if isinstance(own, float)}
            if small := {name: own for name, own in floating.items() if "eps" in name.lower()}:
                self.epsilons[where] = small

    def _grow_parameters(self) -> None:
        """Note the parameters of other modules: positions, tokens, scales of features, and the weights of norms."""
        names = {id(weight): name for name, weight in self._flow.weights.items()}
        factor = {each for node in self._flow.order if node.name().startswith("Mul") for each in _leaves(node)}
        behind_heads = {
            path
            for path, heads in self._heads.items()
            if any(each.reads and each.block == heads.size for each in self.axes.get(f"{_prefix(path)}weight", []))
        }
        streams = {self._width(path) for path in self.widths if path not in self._heads.keys() - behind_heads}
        for node in self._flow.order:
            name = names.get(id(getattr(node, "variable", None)))
            if name is None or name in self.axes or node in self._external or node not in self._inner:
                continue
            path, _, _ = name.rpartition(".")
            if path in self._flow.layers | self.positions | self._normed or any(
                path.startswith(f"{layer}.") for layer in self._flow.layers
            ):
                continue
            shape = tuple(self._flow.weights[name].shape)
            wanted, over = streams, self._normalises(path)
            if self._inner[node] and self._heads:
                if any(length == heads.size > 1 for length in shape for heads in self._heads.values()):
                    continue
                wanted = {heads.number for heads in self._heads.values()}
                if over:  # of all heads together
                    wanted = set(shape)
            along = [axis for axis, size in enumerate(shape) if size in wanted and size > 1]
            if not along:
                continue
            inner = self._inner[node] and not over
            block = self._head_size(node) if over else 1
            self._grow(name, Axis(along[-1], block, stream=not inner, copied=inner), added=node not in factor)
            if isinstance(part := self._flow.parts[path], EMBEDDINGS):  # that holds it as a table
                self.counts[path] = {"embedding_dim": int(part.embedding_dim)}
            if node in factor:
                self.scales[name] = None
            if over:
                self._note_norm(path)
        self._grow_idle()

    def _grow_idle(self) -> None:
        """Note the parameters that took no part, beside those of a stream in one module, as a token for masked places."""
        weights = self._flow.weights
        ran = {id(getattr(node, "variable", None)) for node in self._flow.order}
        for path, part in self._flow.parts.items():
            own = {_prefix(path) + name: value for name, value in part._parameters.items() if value is not None}
            wide = {
                value.shape[-1]
                for name, value in own.items()
                if any(each.stream and each.axis == value.dim() - 1 for each in self.axes.get(name, []))
            }
            for name, value in own.items() if path not in self._flow.layers and not self._normalises(path) else ():
                if name in weights and id(weights[name]) not in ran and value.dim() and value.shape[-1] in wide:
                    self._grow(name, Axis(value.dim() - 1, stream=True), added=True)

    def _head_size(self, node: Node) -> int:
        """Return how many features of an attention head stay beside each other on the way through a node; 1 elsewhere."""
        return next((heads.size for heads in self._heads.values() if heads.size > 1), 1) if self._inner[node] else 1

    def _join_tied(self) -> None:
        """Let layers with one weight agree on it: where one writes by it and one reads, the norm in front of that one divides."""
        tied: dict[int, list[str]] = {}
        for path, part in self._flow.parts.items():
            for entry, own in part._parameters.items():
                if own is not None:
                    tied.setdefault(id(own), []).append(_prefix(path) + entry)
        self._tied = list(tied.values())
        for first, *others in self._tied:
            rooted = self._rooted & {name.rpartition(".")[0] for name in (first, *others)}
            self.powers |= dict.fromkeys((first, *others) if rooted else (), -0.5)
            for other in others:
                one, two = (sorted(self.axes.get(name, [])) for name in (first, other))
                if [each[:2] for each in one] != [each[:2] for each in two]:
                    raise InputError(
                        f"{first} is shared with another module, which reads or writes other features by it"
                    )
                if one != two:
                    reader = first if one[0].reads else other
                    norm, names = self._norm_before(reader.rpartition(".")[0]), set[str]()
                    if norm is not None:
                        held = self._flow.parts[norm]._parameters
                        names = {_prefix(norm) + name for name, each in held.items() if each is not None}
                        self._divided |= names
                    self.powers |= dict.fromkeys(names if rooted else (), 0.5)
                    if norm is not None and self._variant == "scaled":
                        self.shares |= dict.fromkeys(names & self.normalising, 0.0)
                    # New columns are read by one layer, so that they begin at 0, whatever the other writes by them.
                    joined = [each._replace(reads=False, stream=True) for each in one]
                    self.axes |= dict.fromkeys((first, *others), joined)

    def _share(self) -> None:
        """Let layers rather than the norms in front of them make up for the number of features, where they alone read these.

        Weights of a layer shrink with the width that it reads, as they do when they are drawn, and those of norms do not.
        """
        norms = {name.rpartition(".")[0] for name in self.normalising}
        read: dict[str, list[str]] = {norm: [] for norm in norms}
        for path in self._flow.layers:
            norm = self._norm_before(path)
            if norm in read:
                read[norm].append(path)
        tied = {name for own in self._tied for name in own if len(own) > 1}
        reading = [name for name, axes in self.axes.items() if any(each.reads and each.stream for each in axes)]
        for norm, paths in read.items():
            names = [name for path in paths for name in reading if name.startswith(_prefix(path))]
            recurrent = any(isinstance(self._flow.parts[path], RECURRENT) for path in paths)
            if len(names) == len(paths) > 0 and not recurrent and not tied & set(names):
                own = {name for name in self.normalising if name.rpartition(".")[0] == norm}
                self.shares |= dict.fromkeys(own, 0.0)
                self.shares |= dict.fromkeys(names, -0.5)
                self.shares[f"{_prefix(norm)}bias"] = 0.5

    def _norm_before(self, path: str) -> str | None:
        """Return the module with parameters by feature whose output, or a part of it, a layer reads; None if there is none."""
        flow = self._flow
        made = {
            call.edge.node: each
            for each, calls in flow.calls.items()
            for call in calls
            if call.edge is not None and flow.parts[each]._parameters and each not in flow.layers
        }
        calls = flow.calls.get(flow.doubles.get(path, path))
        node = calls[0].source.node if calls and calls[0].source is not None else None
        while node is not None and node not in made:
            read = before(node)
            node = read[0] if len(read) == 1 else None
        return None if node is None else made[node]

    def _count(self) -> None:
        """Note the attributes of a person's modules, and of their configs, that count inner features or attention heads."""
        by_head = {path for path, heads in self._heads.items() if heads.size == 1}
        inner = self.widths.keys() - by_head
        widths = {*self._before, *(self.widths[path] for path in inner)}
        widths |= {len(part.weight) for path in inner if isinstance(part := self._flow.parts[path], nn.Linear)}
        sizes, numbers = ({heads[at] for heads in self._heads.values()} for at in (0, 1))
        for path, part in self._flow.parts.items():
            known = type(part).__module__.startswith("torch.") and not isinstance(part, nn.Transformer)
            if known or path in self._flow.layers:
                continue
            for where, holder in ((path, part), *configs(part, path)):
                for name, own in whole_numbers(holder):
                    if _NO_WIDTHS.search(name) or (_HEAD_SIZES.search(name) and own in sizes):
                        continue
                    if (self._heads and _HEADS.search(name)) or (own in widths and own > 1 and _WIDTHS.search(name)):
                        self.counts.setdefault(where, {})[name] = own
                for name, listed in vars(holder).items():
                    if not isinstance(listed, list | tuple) or not listed or _NO_WIDTHS.search(name):
                        continue
                    of_heads = bool(self._heads and ":" in where and _HEADS.search(name))
                    among = numbers if of_heads else widths - {1}
                    if (of_heads or _WIDTHS.search(name)) and all(type(own) is int and own in among for own in listed):
                        self.counts.setdefault(where, {})[name] = listed

    @torch.no_grad()
    def apply(
        self, networks: Sequence[nn.Module], example: Any, factor: int, key: int, ways: Sequence[Way] = WAYS
    ) -> Way:
        """Multiply the widths of a network and its moving averages, in the first way that keeps its outputs; returns that way.

        InputError if there is none; nothing is changed then. Weights that are all 0 are drawn as ways are tried, because nothing
        would be seen behind them.
        """
        both = (True, False)
        attempts = itertools.product(both if self.roots else (False,), ways, both if self.shares else (True,))
        with temporary_changes(networks, example, key, "wider") as (expected, undo):
            for rooted, way, share in attempts:
                try:
                    for size in (1.0, _LARGE):
                        with in_words("the wider network fails on the example"):
                            self._change(networks[0], way, factor, key, share, rooted, size)
                            same = expected.are_of(networks[0])
                        undo()
                        if not same:
                            raise InputError(
                                "the outputs of the wider network are others; something depends on the number of features"
                            )
                    break
                except InputError as error:
                    problem = str(error)  # the error itself would keep this frame, and with it the weights of before
                    undo()
            else:
                raise InputError(problem)
        for each in networks:
            self._change(each, way, factor, key, share, rooted)
        return way

    def size(self, factor: int) -> int:
        """Return the bytes of the parameters and buffers that change, once their widths are multiplied."""
        tensors = dict([*self._module.named_parameters(), *self._module.named_buffers()])
        changed = [(tensors[name], len(axes)) for name, axes in self.axes.items() if name in tensors]  # a tied one once
        return sum(value.numel() * value.element_size() * factor**power for value, power in changed)

    def _change(
        self, network: nn.Module, way: Way, factor: int, key: int, share: bool, rooted: bool, size: float = 1.0
    ) -> None:
        """Multiply the widths of a network.

        share: whether layers make up for the number of features in the place of norms. rooted: whether `roots` follow the width,
        for which the embeddings make up. size: of features that nothing reads yet.
        """
        parts = {"": network, **dict(network.named_modules())}
        generator = torch.Generator().manual_seed(key)
        # Numbers are multiplied as they were found, so that a config which modules share is not multiplied twice.
        for where, numbers in [*self.counts.items(), *(self.epsilons.items() if way != "copies" else ())]:
            path, _, config = where.partition(":")
            holder = vars(parts[path])[config] if config else parts[path]
            for name, own in numbers.items():
                if isinstance(own, list | tuple):
                    vars(holder)[name] = type(own)(factor * each for each in own)
                elif isinstance(holder, _OVER_FEATURES) and name == "normalized_shape":
                    vars(holder)[name] = (factor * own,)
                else:
                    vars(holder)[name] = own * (factor**-1 if isinstance(own, float) else factor)
        for path, names in self.roots.items() if rooted else ():
            part = parts[path]
            for name in names:
                table = part._buffers if name in part._buffers else vars(part)
                table[name] = table[name] * math.sqrt(factor)
        made: dict[int, nn.Parameter] = {}
        for name, axes in self.axes.items():
            path, _, entry = name.rpartition(".")
            part = parts[path]
            old = getattr(part, entry)
            if id(old) not in made:
                value, divided = old.detach(), name in self._divided and way == "copies"
                if name in self.offsets:
                    value = 1 + value.double()  # in few digits 1 + a small weight is 1
                if rooted and name in self.powers:
                    value = value * factor ** self.powers[name]
                if way != "copies":
                    alone = -0.5 if name in self.normalising else 0.0
                    value = value * factor ** (self.shares.get(name, alone) if share else alone)
                if name in self.scales and way != "copies":
                    value = _scaled(value, axes[0], factor, self.scales[name])
                else:
                    value = _multiplied(value, axes, way, factor, generator, size) / (factor if divided else 1)
                if name in self.offsets:
                    value = (value - 1).to(old.dtype)
                row = getattr(part, "padding_idx", None)
                if isinstance(row, int) and not bool(old[row].any()):
                    value[row] = 0  # of an embedding, which never learns there
                if entry in part._buffers:
                    part._buffers[entry] = value
                    continue
                made[id(old)] = successor(old, value)
            setattr(part, entry, made[id(old)])


def _multiplied(
    value: Tensor, axes: Sequence[Axis], way: Way, factor: int, generator: torch.Generator, size: float
) -> Tensor:
    """Return a tensor with more along some axes, in the order of `axes`: first along what it reads, then along what it writes."""
    spread = float(value.double().std(correction=0)) if value.numel() else 0.0

    def drawn(like: Tensor) -> Tensor:
        return spread * torch.randn(like.shape, generator=generator).to(like)

    for axis, block, reads, stream, copied, first in axes:
        old = value.unflatten(axis, (-1, block)).unsqueeze(axis + 1)
        more = old.repeat_interleave(factor - 1, axis + 1)
        if copied or (way == "copies" and not first):
            value = torch.cat([old, more], axis + 1)
            if reads:
                noise = drawn(value)
                noise -= noise.mean(axis + 1, keepdim=True)
                value = (value + NOISE * math.sqrt(factor / (factor - 1)) * noise) / factor
        else:
            if reads:
                more = drawn(more) if stream else torch.zeros_like(more)
            elif not stream:
                more = size * drawn(more)
            elif way == "means":
                more = old.mean(axis, keepdim=True).expand_as(more)
            else:
                more = torch.zeros_like(more)
            value = torch.cat([more, old] if first else [old, more], axis + 1)
        value = value.flatten(axis, axis + 2)
    return value


def _scaled(value: Tensor, at: Axis, factor: int, new: float | None) -> Tensor:
    """Return what is applied to each feature with more features, each with the value `new`, or with the mean of the old ones."""
    old = value.unflatten(at.axis, (-1, at.block)).unsqueeze(at.axis + 1)
    fill = old.mean((at.axis, at.axis + 2), keepdim=True) if new is None else old.new_full((), new)
    more = fill.expand_as(old.repeat_interleave(factor - 1, at.axis + 1))
    return torch.cat([old, more], at.axis + 1).flatten(at.axis, at.axis + 2)


def _roots(part: nn.Module, width: int) -> list[str]:
    """Return the attributes and buffers of a module that scale by the root of a width, by their values and names."""
    found = []
    for name, own in (vars(part) | part._buffers).items():
        single = isinstance(own, Tensor) and own.dim() == 0 and own.is_floating_point()
        if not (single or isinstance(own, float)) or not _SCALES.search(name):
            continue
        if math.isclose(float(own), math.sqrt(width), rel_tol=1e-2 if single else 1e-6):  # of few digits
            found.append(name)
    return found


def _adds_one(norm: nn.Module) -> bool:
    """Return whether a norm multiplies by 1 + its weight, so that weights of 0 do not silence it."""
    weight = norm._parameters.get("weight")
    if weight is None or isinstance(norm, _OVER_FEATURES) or len(list(norm.parameters())) > 1:
        return False
    features = torch.linspace(1, 2, len(weight), dtype=weight.dtype, device=weight.device)
    norm._parameters["weight"] = nn.Parameter(torch.zeros_like(weight))
    try:
        with torch.no_grad():
            return bool(norm.forward(features[None]).any())  # without hooks, which know other inputs
    except Exception:  # a person's module, which may take more arguments
        return False
    finally:
        norm._parameters["weight"] = weight


def is_width(name: str) -> bool:
    """Return whether an attribute of this name may count features."""
    return bool(_WIDTHS.search(name)) and not _NO_WIDTHS.search(name)


def _prefix(path: str) -> str:
    return f"{path}." if path else ""


def _leaves(node: Node) -> Iterator[Node]:
    """Yield the nodes of the parameters that a node reads, unchanged or reshaped."""
    for each in before(node):
        reshaped = each
        while len(before(reshaped)) == 1 and not PRODUCT.search(reshaped.name()):
            reshaped = before(reshaped)[0]
        if reshaped.name().endswith("AccumulateGrad"):
            yield reshaped


def whole_numbers(holder: Any) -> list[tuple[str, int]]:
    """Return the whole numbers among the attributes of a module or config."""
    return [(name, value) for name, value in vars(holder).items() if type(value) is int]


def configs(part: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that hold sizes as attributes of their own, each with `path:name`."""
    for name in ("config", "cfg", "args", "hparams"):
        value = vars(part).get(name)
        with suppress(TypeError):
            if value is not None and not isinstance(value, nn.Module | Mapping) and vars(value):
                yield f"{path}:{name}", value


def saved_with_configs(networks: Sequence[nn.Module]) -> Callable[[], None]:
    """Return what gives all modules of networks and their configs their present attributes again (`saved`)."""
    parts = [part for network in networks for part in network.modules()]
    return saved([*parts, *{id(own): own for part in parts for _, own in configs(part, "")}.values()])


@contextmanager
def temporary_changes(
    networks: Sequence[nn.Module], example: Any, key: int, kind: str
) -> Iterator[tuple[Outputs, Callable[[], None]]]:
    """Yield what a network computes, and a function that undoes its changes, which are undone on exit in any case.

    kind: "wider" or "deeper", for errors. Weights that are all 0 are drawn until then, because nothing would be seen behind them.
    """
    blank = [parameter for parameter in networks[0].parameters() if parameter.numel() and not parameter.any()]
    undo = saved_with_configs(networks)
    generator = torch.Generator().manual_seed(key)
    for parameter in blank:
        parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(0.1))
    try:
        with in_words(f"the {kind} network fails on the example"):
            expected = Outputs(networks[0], example)
        yield expected, undo
    finally:
        undo()
        for parameter in blank:
            parameter.zero_()
