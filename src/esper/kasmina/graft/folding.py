"""Fold a seed into the linear layers at its site: one whose change is linear, and one that is further units of a pair."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints.functions import REACH, RELU, Pointwise, apply, named, recognised
from esper.kasmina.blueprints.map import Channelwise, Convolutions
from esper.kasmina.blueprints.vector import Affine, Factored, LinearMap, LowRank, MLPSeed, SparseHead, SparseRows
from esper.kasmina.graft.grafted import planted_at, undisturbed
from esper.kasmina.graft.grown import class_of, first_tensor, sites_of
from esper.kasmina.graft.planted import Mode, Planted
from esper.kasmina.graft.recording import floats, saved
from esper.kasmina.graft.sharding import fill, gather, gather_module, reshard
from esper.leyline.lifecycle.slots import Site, Tap
from esper.leyline.lifecycle.vocabulary import Blend
from esper.leyline.messages import InputError, is_out_of_memory, with_article

LINEAR = (Affine, Factored, LinearMap, LowRank, SparseHead, SparseRows)
"""Modules whose change is W u + b at every position."""

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
"""Layers that a seed folds into, beside the `Conv1D` of transformers, a Linear whose weight is the other way around."""

_ALIKE = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Identity)
"""Modules between two layers that treat further units as a seed does in evaluation mode, which has no dropout."""

Pass = Callable[[nn.Module], Any]
"""A forward pass of a network on a batch; returns the output."""


@torch.no_grad()
def fold(
    networks: Sequence[nn.Module],
    name: str,
    passes: Sequence[Pass],
    agree: Callable[[bool], bool] = bool,
    *,
    pairs: bool = True,
) -> str | None:
    """Fold the seed at a site into weights and biases of linear layers: in a network and its moving averages, or in none.

        before:  W x + b + alpha (V x + c)                     becomes  (W + alpha V) x + b + alpha c
        here:    (W x + b) + alpha (V (W x + b) + c)           becomes  (W + alpha V W) x + b + alpha (V b + c)
        a pair:  W f(A x + a) + b + alpha (V f(C x + c) + d)   becomes  [W alpha V] f([A; C] x + [a; c]) + b + alpha d

    A layer is an nn.Linear, a `Conv1D` of transformers, or a convolution without groups; a smaller kernel of a seed goes into the
    middle of its own.

    The seed is folded only if every pass gives what it gave before, to rounding (`_same_output`). So a weight that is also
    used elsewhere, or is computed from other parameters before each pass, and another function between the layers of a pair than
    that of the seed, is found by what the network computes. Otherwise every parameter has its bits again. A
    parameter of the network that requires no gradient, or that a second module holds, is never written. The layers of a pair get
    other parameters, which are larger.

    networks: the network, then its moving averages. agree: makes one decision of those of several processes, which all
    call this. pairs: whether layers may become wider. Returns None if the seed was folded, otherwise why
    it was not, to be read behind a colon. The seed itself is not removed.
    """
    with undisturbed(*networks):
        for network in networks:
            reshard(network)
        try:
            changes = [_changes(network, name, pairs, passes) for network in networks]
        except InputError as why_not:
            return str(why_not)
        for change in changes[0]:
            if why_fixed := fixed(networks[0], change.held):
                return f"a {change.name} that it would change {why_fixed}"
        # every process makes every pass, because those of a sharded network wait for each other
        same = [
            _same_output(network, name, changed, run)
            for network, changed in zip(networks, changes, strict=True)
            for run in passes
        ]
    if not agree(all(same)):
        return _difference(networks[0], name, changes[0], passes)
    for changed in changes:
        for change in changed:
            change.carry_out()
    return None


def fixed(network: nn.Module, own: Tensor) -> str:
    """Return why a parameter of a network must not get another value, behind its name in a sentence; empty where it may."""
    holders = sum(each is own for part in network.modules() for each in part._parameters.values())
    if holders > 1:
        return "is shared with another module"
    return "is frozen" if isinstance(own, nn.Parameter) and not own.requires_grad else ""


class _Change(NamedTuple):
    """Holds another value of a parameter or of a buffer, to be written later."""

    part: nn.Module  # the module that holds it
    name: str  # its name there
    value: Tensor  # the value, whole; of another shape if the parameter becomes larger

    @property
    def held(self) -> Tensor:
        """The parameter or buffer that the module has now."""
        held = {**self.part._buffers, **self.part._parameters}[self.name]
        assert held is not None, "a module has each parameter that is changed"
        return held

    @property
    def widens(self) -> bool:
        """Whether the parameter or buffer becomes larger."""
        return self.held.shape != self.value.shape

    def carry_out(self) -> None:
        """Write the value into the parameter, or put a larger parameter in its place."""
        if self.widens:
            put(self.part, self.name, self.value.to(self.held.device, self.held.dtype))
        else:
            fill(self.held, self.value)


def successor(held: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Return a parameter for the place of another one, with a larger value, in its memory format and with its attributes."""
    if held.dim() == 4 and not held.is_contiguous() and held.is_contiguous(memory_format=torch.channels_last):
        value = value.contiguous(memory_format=torch.channels_last)
    made = nn.Parameter(value, held.requires_grad)
    vars(made).update(vars(held))
    return made


def put(layer: nn.Module, name: str, value: Tensor) -> None:
    """Put a value of any shape in the place of a parameter or buffer of a layer, whose attributes count the features anew."""
    held = getattr(layer, name)
    setattr(layer, name, successor(held, value) if isinstance(held, nn.Parameter) else value)
    axes = known_axes(layer)
    for attribute, axis in ((axes.written, axes.writes), (axes.read, axes.reads)):
        if hasattr(layer, attribute) and (name == "weight" or isinstance(layer, nn.modules.batchnorm._NormBase)):
            setattr(layer, attribute, value.shape[axis])


def _difference(network: nn.Module, name: str, changes: Sequence[_Change], passes: Sequence[Pass]) -> str:
    """Return why outputs differ: what stands between the two layers that a site spans, as far as that is a module."""
    shared = "a weight is also used elsewhere or is computed before each pass"
    if not any(change.widens for change in changes):
        return f"the outputs would differ, as where {shared}"
    site, planted = sites_of(network)[name], planted_at(network, name)
    function = RELU if planted is None or planted.recipe is None else planted.recipe.function
    other = (
        f"the outputs would differ, as where a function other than {named(function)} runs between {site.around!r} and "
        f"{site.after!r}, or {shared}"
    )
    if not passes:
        return other
    order, given, alike = list[nn.Module](), dict[nn.Module, Tensor | None](), set[nn.Module]()

    def enter(part: nn.Module, args: Any) -> None:
        order.append(part)
        given[part] = next((x.clone() for x in floats(args)), None)  # the module may work in place

    def leave(part: nn.Module, args: Any, output: Any) -> None:
        x = given[part]
        if x is not None and isinstance(output, Tensor) and same_values(output, apply(function, x), _eps(output)):
            alike.add(part)

    spanned = [network.get_submodule(path) for path in (site.around, site.after)]
    with ExitStack() as hooks, undisturbed(network):
        for part in network.modules():
            if part in spanned or next(part.children(), None) is None:
                hooks.enter_context(part.register_forward_pre_hook(enter))
                hooks.enter_context(part.register_forward_hook(leave))
        passes[0](network)
    first, second = map(order.index, spanned)
    between = [part for part in order[first + 1 : second] if part not in alike and not isinstance(part, _ALIKE)]
    kinds = dict.fromkeys(type(part).__name__ for part in between)
    if not kinds:
        return other
    run = "runs" if len(kinds) == 1 else "run"
    return f"{' and '.join(map(with_article, kinds))} {run} between {site.around!r} and {site.after!r}"


_NO_BIAS = "{!r} has no bias that could take that of the seed"
_OTHER_KERNEL = "the kernel, stride or padding of {!r} reads other positions"


def _changes(network: nn.Module, name: str, pairs: bool, passes: Sequence[Pass]) -> list[_Change]:
    """Return the parameters of the layers at a site that a seed folds into, each with its folded value. InputError if into none.

    pairs: whether layers may become wider.
    """
    site, planted = sites_of(network)[name], planted_at(network, name)
    assert planted is not None, "there must be a seed to fold"
    delta = planted.seed.delta.seed if isinstance(planted.seed.delta, Channelwise) else planted.seed.delta
    hidden: tuple[nn.Module, ...] = ()  # the two layers of a seed with one hidden layer
    if isinstance(delta, MLPSeed):
        hidden = delta.inner, delta.out
    elif isinstance(delta, Convolutions) and len(delta) == 3:
        hidden = delta[0], delta[2]
    if hidden and (planted.tap, planted.blend) == (Tap.BEFORE, Blend.ADD):
        changed = _wider(network, site, hidden[0], hidden[1], planted.alpha, pairs)
        return [*changed, *_wider_norms(network, site, planted, changed, passes)]
    reads_input = planted.tap == Tap.BEFORE and site.around == site.after
    if planted.blend != Blend.ADD:
        raise InputError(f"by the blend {planted.blend.name} what it adds depends on the stream")
    layer = _layer(network, site.after)
    if not reads_input and planted.tap != Tap.HERE:
        raise InputError(f"it reads neither what {site.after!r} reads nor what it returns")
    weight, alpha = matrix(layer, gather(layer.weight)).double(), planted.alpha.double()
    kernel, shift = _linear(planted.seed.delta, weight.shape[1 if reads_input else 0], weight.device)
    bias = None if layer.bias is None else gather(layer.bias).double()
    if reads_input:
        more, moved = _centred(kernel, layer, site.after), shift
    elif kernel.dim() > 2:
        raise InputError(f"it reads several positions of what {site.after!r} returns")
    else:
        more, moved = torch.tensordot(kernel, weight, 1), shift if bias is None else kernel @ bias + shift
    changed = [_Change(layer, "weight", matrix(layer, weight + alpha * more).to(layer.weight.dtype))]
    if moved.count_nonzero():
        if bias is None or layer.bias is None:
            raise InputError(_NO_BIAS.format(site.after))
        changed.append(_Change(layer, "bias", (bias + alpha * moved).to(layer.bias.dtype)))
    return changed


def _wider(network: nn.Module, site: Site, inner: Any, out: Any, alpha: Tensor, pairs: bool) -> list[_Change]:
    """Return the parameters of the two layers that a site spans, with the hidden units of its seed. InputError says why not.

    inner, out: the two layers of the seed.
    """
    if network.get_submodule(site.around) is network.get_submodule(site.after):
        raise InputError("it has hidden units, and spans one layer and not two")
    if not site.around:
        raise InputError("it has hidden units, and reads the input of the network")
    if not pairs:
        raise InputError("layers become wider in one process alone")
    first, second = _layer(network, site.around), _layer(network, site.after)
    own, next_own = matrix(first, first.weight), matrix(second, second.weight)
    if own.shape[0] != next_own.shape[1]:
        raise InputError(f"{site.after!r} does not read the features that {site.around!r} writes")
    rows, columns = _centred(inner.weight, first, site.around), _centred(alpha * out.weight, second, site.after)
    changed = [
        _Change(first, "weight", matrix(first, torch.cat([own, rows]))),
        _Change(second, "weight", matrix(second, torch.cat([next_own, columns], 1))),
    ]
    for path, layer, more, adds in (
        (site.around, first, inner.bias, True),
        (site.after, second, alpha * out.bias, False),
    ):
        if layer.bias is not None:
            changed.append(_Change(layer, "bias", torch.cat([layer.bias, more]) if adds else layer.bias + more))
        elif more.count_nonzero():
            raise InputError(_NO_BIAS.format(path))
    return changed


def _wider_norms(
    network: nn.Module, site: Site, planted: Planted, changed: Sequence[_Change], passes: Sequence[Pass]
) -> list[_Change]:
    """Return the parameters and buffers of the BatchNorms between the two layers that a site spans, with those of new units.

    With mean m and variance v of a unit on the batches of `passes`, its weight is sqrt(v + eps) and its bias is m, so that the
    norm returns in evaluation mode what it is given, and in training mode the same as far as a batch has these statistics.
    """
    first, second = (network.get_submodule(path) for path in (site.around, site.after))
    axes = known_axes(first)
    more = changed[0].value.shape[axes.writes]
    units = more - int(getattr(first, axes.written))
    # those of their width that run between them once, and have all that the norm of a new unit needs
    known = [part for part in network.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    norms = [part for part in known if part.affine and part.running_mean is not None]
    norms = [part for part in norms if part.num_features == more - units]
    order = list[nn.Module]()
    with ExitStack() as hooks:
        for part in (first, second, *norms):
            hooks.enter_context(part.register_forward_pre_hook(lambda part, _: order.append(part)))
        for run in passes[:1] if norms else ():
            run(network)
    if order.count(first) != 1 or order.count(second) != 1:
        return []
    inside = order[order.index(first) + 1 : order.index(second)]
    norms = [part for part in norms if inside.count(part) == order.count(part) == 1]
    if not norms:
        return []

    def widened_norms(means: Sequence[Tensor], variances: Sequence[Tensor]) -> list[_Change]:
        found = []
        for norm, mean, variance in zip(norms, means, variances, strict=True):
            scale = (variance + norm.eps).sqrt()
            news = {"weight": scale, "bias": mean, "running_mean": mean, "running_var": variance}
            for name, new in news.items():
                own = getattr(norm, name)
                found.append(_Change(norm, name, torch.cat([own, new.to(own)])))
        return found

    like = changed[0].held.double()
    usual = [like.new_zeros(units)] * len(norms), [like.new_ones(units)] * len(norms)
    seen: list[list[Tensor]] = [[] for _ in norms]

    def keep(own: list[Tensor], norm: nn.Module, given: Any) -> None:
        own.append(given[0][:, -units:].transpose(0, 1).flatten(1).double())

    with ExitStack() as hooks, _folded(network, planted, [*changed, *widened_norms(*usual)]):
        for norm, own in zip(norms, seen, strict=True):
            hooks.enter_context(norm.register_forward_pre_hook(partial(keep, own)))
        try:
            for run in passes:
                run(network)
        except RuntimeError as error:  # something else reads as many features as there were, which is said later
            if is_out_of_memory(error):
                raise
            return widened_norms(*usual)
    features = [torch.cat(own, 1) for own in seen]
    return widened_norms([own.mean(1) for own in features], [own.var(1, correction=0) for own in features])


def _layer(network: nn.Module, path: str) -> Layer:
    layer = network.get_submodule(path)
    if not is_layer(layer):
        raise InputError(
            f"{path!r} is no Linear, no convolution without groups and no Conv1D of transformers, or computes its weights "
            "before each pass"
        )
    return layer


def is_layer(layer: nn.Module) -> TypeGuard[Layer]:
    """Return whether a seed can fold into a layer: its weight and bias are parameters, not computed before each pass."""
    own = layer._parameters
    known = isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) or is_turned(layer)
    return known and getattr(layer, "groups", 1) == 1 and own.get("weight") is not None and "bias" in own


def is_turned(layer: nn.Module) -> bool:
    """Return whether a layer is a `Conv1D` of transformers, whose weight has the features read in front of those written."""
    return class_of(layer).__name__ == "Conv1D" and "nf" in vars(layer)


def matrix(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return a weight of a layer as (written, read, ...), or one of these as the layer holds it."""
    return weight.mT.contiguous() if is_turned(layer) else weight


def widened(network: nn.Module, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
    """Return the layers that write more features than when their parameters had other shapes: the widths before and now."""
    found = {}
    for name, shape in shapes.items():
        path, _, entry = name.rpartition(".")
        if entry == "weight" and is_layer(layer := network.get_submodule(path)):
            now = network.get_parameter(name).shape
            before, units = (len(matrix(layer, torch.empty(*each, device="meta"))) for each in (shape, now))
            if before != units:
                found[path] = before, units
    return found


class Axes(NamedTuple):
    """Says where the features of a layer are."""

    writes: int  # the axis of its weight along which the features are that it returns
    reads: int  # the axis of its weight along which those are that it is given
    written: str  # its attribute with the number of features that it returns
    read: str  # its attribute with the number of those that it is given


def known_axes(layer: nn.Module) -> Axes:
    """Return where the features of a Linear, a convolution, a `Conv1D` of transformers or a BatchNorm are."""
    if is_turned(layer):
        return Axes(1, 0, "nf", "nx")
    if isinstance(layer, nn.modules.batchnorm._NormBase):
        return Axes(0, 0, "num_features", "num_features")
    if isinstance(layer, nn.Linear):
        return Axes(0, 1, "out_features", "in_features")
    return Axes(*((1, 0) if getattr(layer, "transposed", False) else (0, 1)), "out_channels", "in_channels")


def _linear(delta: nn.Module, reads: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the kernel (w, r, ...) of a linear change, a matrix if it is pointwise, and its constant (w,), in float64.

    InputError if it is not linear.
    """
    if isinstance(delta, Convolutions) and len(delta) == 1:
        layer: Any = gather_module(delta[0]).double()
        pointwise = all(size == 1 for size in layer.kernel_size)
        return layer.weight.flatten(1) if pointwise else layer.weight, layer.bias
    each = delta.seed if isinstance(delta, Channelwise) else delta
    if type(each) not in LINEAR:
        raise InputError("its change is not linear")
    each = gather_module(each).double()
    shift: Tensor = each(torch.zeros(1, reads, dtype=torch.float64, device=device))[0]
    return (each(torch.eye(reads, dtype=torch.float64, device=device)) - shift).mT, shift


def _centred(kernel: Tensor, layer: Layer, path: str) -> Tensor:
    """Return a kernel (w, r, ...) in the middle of one of the layer's size. InputError if that would read other positions."""
    if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if kernel.dim() != 2:
            raise InputError(_OTHER_KERNEL.format(path))
        return kernel
    sides = layer.weight.dim() - 2
    own, given = layer.kernel_size, tuple(kernel.shape[2:]) or (1,) * sides
    pads = [(size - 1) // 2 * apart for size, apart in zip(own, layer.dilation, strict=True)]
    if (
        len(given) != sides
        or any(size % 2 == 0 or size < inner for size, inner in zip(own, given, strict=True))
        or any(apart > 1 < inner for apart, inner in zip(layer.dilation, given, strict=True))
        or any(step > 1 for step in layer.stride)
        or (layer.padding != "same" and list(layer.padding) != pads)
        or (layer.padding_mode != "zeros" and max(given) > 1)
    ):
        raise InputError(_OTHER_KERNEL.format(path))
    margins = [(size - inner) // 2 for size, inner in zip(reversed(own), reversed(given), strict=True)]
    spread = kernel.reshape(*kernel.shape[:2], *given)
    return F.pad(spread, [margin for margin in margins for _ in range(2)])


def _same_output(network: nn.Module, name: str, changes: Sequence[_Change], run: Pass) -> bool:
    """Return whether a pass gives the same with the folded layer as with the seed; parameters and seed are restored, bit for bit.

    Equal are values that differ by at most sqrt(eps) of the largest one in the tensor, which is half of its digits, for the
    eps of the coarsest floating type that takes part. The output of the site itself must be so too, and may differ by at
    most a tenth of what the seed changes there, in the root mean square: a change smaller than the rounding of a weight
    would be lost.
    """
    layer, planted = network.get_submodule(sites_of(network)[name].after), planted_at(network, name)
    assert planted is not None, "there must be a seed to fold"
    with _streams(layer, planted) as (front, behind):
        expected = list(floats(run(network)))
    reshard(network)
    try:
        with _folded(network, planted, changes), _streams(layer, planted) as (_, folded):
            found = list(floats(run(network)))
    except RuntimeError as error:  # something else reads as many features as there were
        if is_out_of_memory(error) or not any(change.widens for change in changes):
            raise
        return False
    if not same_outputs([*expected, *behind], [*found, *folded], (changes[0].held, *expected, *behind)):
        return False
    lost, seed = (
        sum(float((one - other).double().square().sum()) for one, other in zip(behind, others, strict=False))
        for others in (folded, front)
    )
    return lost <= seed / 100


@contextmanager
def _folded(network: nn.Module, planted: Planted, changes: Sequence[_Change]) -> Iterator[None]:
    """Carry out changes in place of a seed inside the block; parameters, buffers and the seed are restored, bit for bit."""
    mode, restore = planted.mode, saved(change.part for change in changes)
    values = [(change.held, change.held.detach().clone()) for change in changes]
    try:
        planted.mode = Mode.OFF
        for change in changes:
            change.carry_out()
        yield
    finally:
        reshard(network)
        planted.mode = mode
        restore()
        for held, value in values:
            fill(held, value)


@contextmanager
def _streams(layer: nn.Module, planted: Planted) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Record what flows at a site in front of the seed, if it acts, and behind it; copies, as a module may work in place."""
    front, behind = list[Tensor](), list[Tensor]()
    with (
        planted.register_forward_hook(lambda _, given, output: front.append(given[0].clone())),
        layer.register_forward_hook(lambda _, given, output: behind.append(output.clone())),
    ):
        yield front, behind


def _eps(tensor: Tensor) -> float:
    """Return the distance from 1 to the next number that products of tensors of this type tell apart."""
    if tensor.is_cuda and tensor.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return 2.0**-10
    return torch.finfo(tensor.dtype).eps


def same_values(one: Tensor, other: Tensor, eps: float) -> bool:
    """Return whether two tensors are equal to half of the digits of the largest finite value; equal infinities and nans are."""
    if one.is_nested or one.layout != torch.strided or one.shape != other.shape:
        return False
    if not one.numel():
        return True
    exact = torch.promote_types(one.dtype, torch.float32)
    one, other = one.to(exact), other.to(exact)
    largest = float(one.abs().where(one.isfinite(), 0.0).max())
    return bool(torch.isclose(other, one, rtol=0.0, atol=math.sqrt(eps) * largest, equal_nan=True).all())


def same_outputs(expected: Sequence[Tensor], found: Sequence[Tensor], weights: Iterable[Tensor] = ()) -> bool:
    """Return whether a network returned what is expected, each tensor to half of its digits (`same_values`).

    weights: of a part that computes in fewer digits, perhaps, which then count.
    """
    least = max((_eps(each) for each in weights if each.is_floating_point()), default=0.0)
    return len(expected) == len(found) and all(
        same_values(one, other, max(least, _eps(one))) for one, other in zip(expected, found, strict=True)
    )


@torch.no_grad()
def functions_between(network: nn.Module, run: Callable[[], Any]) -> dict[str, Pointwise]:
    """Return, by site, the function f of a pair W2 f(W1 x + b1) + b2 that the site spans, where it is a known one.

    `run` makes one pass in evaluation mode, in which values from -REACH to REACH, in any order, replace what the first layer of
    each pair returns. What the second layer is given then shows f, whether it is a module or a call, and however many
    functions it is made of. BatchNorms are left out of that pass, as those of new units return what they are given. A
    function that looks at several features, such as LayerNorm, is none. The network is not changed.
    """
    pairs = {name: (site.around, site.after) for name, site in sites_of(network).items() if site.around != site.after}
    pairs = {name: ends for name, ends in pairs.items() if all(is_layer(network.get_submodule(end)) for end in ends)}
    if not pairs:
        return {}
    given, seen = dict[str, list[Tensor]](), dict[str, list[Tensor]]()
    generator = torch.Generator().manual_seed(0)

    def spread(path: str, part: nn.Module, args: Any, output: Any) -> Tensor:
        values = torch.linspace(-REACH, REACH, output.numel())[torch.randperm(output.numel(), generator=generator)]
        given.setdefault(path, []).append(values.to(output).view(output.shape))
        return given[path][-1].clone()  # a function behind it may work in place

    def note(path: str, part: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if (tensor := first_tensor(args, kwargs)) is not None:
            seen.setdefault(path, []).append(tensor.clone())

    with ExitStack() as hooks:
        hooks.enter_context(undisturbed(network))
        for part in network.modules():
            # in evaluation mode it takes each feature by itself
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                hooks.enter_context(part.register_forward_hook(lambda part, args, output: args[0]))
        for first in {first for first, _ in pairs.values()}:
            hooks.enter_context(network.get_submodule(first).register_forward_hook(partial(spread, first)))
        for second in {second for _, second in pairs.values()}:
            noted = network.get_submodule(second).register_forward_pre_hook(partial(note, second), with_kwargs=True)
            hooks.enter_context(noted)
        try:
            run()
        except Exception as error:  # a network may refuse such values; its seeds are as they would be around one layer
            if is_out_of_memory(error):
                raise
            return {}
    found = dict[str, Pointwise]()
    for name, (first, second) in pairs.items():
        values, results = given.get(first, []), seen.get(second, [])
        if len(values) == len(results) == 1 and values[0].shape == results[0].shape:
            function = recognised(values[0].flatten(), results[0].flatten())
            if function is not None:
                found[name] = function
    return found
