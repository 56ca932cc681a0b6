"""Give hidden layers more units, in place and with an unchanged function."""

import copy
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.find_sites import Hidden
from esper.kasmina.graft.flow import CONVOLUTIONS
from esper.kasmina.graft.folding import Axes, fixed, is_layer, is_turned, known_axes, put
from esper.kasmina.graft.grown import class_of
from esper.kasmina.graft.recording import call, floats, mapped, results, saved, undone_on_error
from esper.kasmina.stack.layers import Linear
from esper.leyline.data.duplicates import is_dense
from esper.leyline.messages import InputError, in_words, is_out_of_memory, with_article

_NORM = (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0))
"""Parameters and buffers of a BatchNorm by feature, with their first values."""


_LARGE = 32.0
"""By how much new features are larger while outputs are compared than they are drawn."""


def axes_of(path: str, layer: nn.Module) -> Axes:
    """Return where the features of a layer are. InputError if the layer is of a kind that is not known."""
    check_own_weight(path, layer)
    kind = class_of(layer)
    convolves = isinstance(layer, CONVOLUTIONS) and kind in CONVOLUTIONS
    plain = kind in (nn.Linear, Linear) or (isinstance(layer, nn.Linear) and _is_plain(layer))
    if not (plain or convolves or is_turned(layer)):
        raise InputError(
            f"{path!r} is {with_article(kind.__name__)}, and only widths of Linear and of convolutions can change"
        )
    if convolves and layer.groups != 1:
        raise InputError(f"{path!r} is a convolution with {layer.groups} groups")
    return known_axes(layer)


def _is_plain(layer: nn.Linear) -> bool:
    """Return whether a layer of a class of its own holds what a Linear does, so that nothing else can depend on its width."""
    known = nn.Linear(1, 1)
    drawn = type(layer).reset_parameters is nn.Linear.reset_parameters and layer.weight.is_floating_point()
    further = [own for name, own in vars(layer).items() if name not in vars(known)]
    more = layer._buffers or layer._modules or layer._parameters.keys() - known._parameters.keys()
    return drawn and not more and not any(type(own) in (int, float) or isinstance(own, Tensor) for own in further)


def check_own_weight(path: str, layer: nn.Module) -> None:
    """Raise InputError if parameters of a layer are computed from others before each pass."""
    values = [name for name, value in vars(layer).items() if isinstance(value, Tensor)]
    computed = [name for name in values if name.startswith(("weight", "bias"))]  # by hooks, of old norms
    if is_parametrized(layer):
        computed = list(cast("nn.ModuleDict", layer.parametrizations))
    if computed:
        name = f"{path}.{computed[0]}".lstrip(".")
        raise InputError(
            f"{name} is computed from other parameters before each pass, as spectral and weight norms do; remove that, and add "
            "it again to the wider network"
        )


def width_of(path: str, layer: nn.Module) -> int:
    """Return the number of features that a layer returns. InputError as for `axes_of`."""
    return int(getattr(layer, axes_of(path, layer).written))


class AppendedValues(NamedTuple):
    """Holds values that are appended to a parameter or buffer."""

    path: str  # of the submodule that holds it
    name: str  # its name there
    axis: int  # along which they are appended
    values: Tensor  # the values


def additions(model: nn.Module, hidden: Hidden, width: int, key: int) -> list[AppendedValues]:
    """Return what is appended to the layers around hidden features so that they are `width` many; nothing is changed.

    What the first layers get is drawn, by a key, as they draw their own first weights; what the next layers get is 0.
    InputError if a layer is of a kind that is not known, frozen, or shares its weights.
    """
    found: list[AppendedValues] = []
    modules = {path: model.get_submodule(path) for path in sorted(hidden.writers | hidden.readers | hidden.norms)}
    old = width_of(first := min(hidden.writers), modules[first])
    for path in sorted(hidden.writers):
        if (own_width := width_of(path, modules[path])) != old:
            raise InputError(f"{path!r} returns {own_width} features where {first!r} returns {old}")
        layer, axes = cast("Any", modules[path]), axes_of(path, modules[path])
        fresh = copy.deepcopy(layer)
        for name, axis in (("weight", axes.writes), ("bias", 0)):
            if (own := getattr(layer, name)) is not None:
                setattr(fresh, name, nn.Parameter(_zeros(own, axis, width)))
        with drawn_with(key), torch.no_grad():
            if callable(reset := getattr(fresh, "reset_parameters", None)):
                reset()
            else:
                fresh.weight.normal_(std=float(layer.weight.std()))
        for name, axis in (("weight", axes.writes), ("bias", 0)):
            if (drawn := getattr(fresh, name)) is not None:
                values = drawn.detach().narrow(axis, old, width - old).clone()
                found.append(AppendedValues(path, name, axis, values))
    for path in sorted(hidden.readers):
        axes, weight = axes_of(path, modules[path]), cast("Tensor", modules[path].weight)
        positions, rest = divmod(weight.shape[axes.reads], old)
        if rest:
            read = weight.shape[axes.reads]
            raise InputError(f"{path!r} reads {read} features, which is no multiple of the {old} of {first!r}")
        values = _zeros(weight, axes.reads, positions * (width - old))
        if path in hidden.writers:  # of a residual branch, whose new units are there already
            values = _zeros(values, axes.writes, width)
        found.append(AppendedValues(path, "weight", axes.reads, values))
    for path in sorted(hidden.norms):
        for name, value in _NORM:
            if (own := getattr(modules[path], name, None)) is not None:
                more = own.detach().new_full((width - old,), value)
                found.append(AppendedValues(path, name, 0, more))
    _check_owned(model, found)
    return found


def unchanged(one: Tensor, other: Tensor) -> bool:
    """Return whether two outputs are equal, each value to half of its digits, or to those of a small value of the output."""
    if one.is_nested or one.layout != torch.strided or one.shape != other.shape:
        return False
    half, size = math.sqrt(torch.finfo(one.dtype).eps), one.double().abs()
    some = size[size.isfinite() & (size > 0)]
    some = some[:: 1 + len(some) // 2**20]  # torch takes quantiles of at most 2^24 values
    small = float(some.quantile(0.1)) if len(some) else 0.0
    near = (one.double() - other.double()).abs() <= half * size.clamp(min=small)
    return bool((near | (one == other) | (one.isnan() & other.isnan())).all())


class _InDouble(TorchDispatchMode):
    """Lets a network in float64 compute in it throughout: what it would round to fewer digits, as a norm does, stays as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            to = named.get("dtype")
            if to is not None and to.is_floating_point:
                named["dtype"] = torch.float64
        return func(*args, **named)


class Outputs:
    """Holds what a network computes, to compare it with what it computes after a change.

    It runs on the example, and on variants of it, if it can, because there is much that an example can hide: draws in the place
    of floating-point tensors that have one value throughout, as those of `torch.zeros`, and two positions where there is one,
    over which attention has nothing to weigh. One with parameters in float64 computes in float64 alone, if it can: norms of
    transformers compute in float32, whose rounding would be a difference. Raises InputError where no output is finite, to which
    anything would be equal. Hidden states that a network returns beside `logits` may change, as their widths do.
    """

    def __init__(self, network: nn.Module, example: Any) -> None:
        double = any(own.dtype == torch.float64 for own in network.parameters())
        self._examples, self._precision = [example], _InDouble() if double else nullcontext()  # type: ignore[no-untyped-call]
        try:
            self._before = self._of(network, example)
        except Exception as error:
            if is_out_of_memory(error) or not double:
                raise
            self._precision = nullcontext()  # a part of the network asks for fewer digits
            self._before = self._of(network, example)
        if not any(value.isfinite().any() for value in self._before if not value.is_nested):
            raise InputError(
                "no output on the example is finite, so that a change of the network would not be seen; give another example"
            )
        for change in (partial(_drawn_where_equal, torch.Generator().manual_seed(0)), _twice_as_long):
            variant = _changed(example, change)
            if variant is None:
                continue
            try:
                more = self._of(network, variant)
            except Exception as error:  # the network may ask for what the variant is not
                if is_out_of_memory(error):
                    raise
                continue
            self._examples.append(variant)
            self._before += more

    def are_of(self, network: nn.Module) -> bool:
        """Return whether a network computes the same, to rounding."""
        now = [value for example in self._examples for value in self._of(network, example)]
        return len(now) == len(self._before) and all(map(unchanged, self._before, now))

    def _of(self, network: nn.Module, example: Any) -> list[Tensor]:
        given = mapped(example, torch.clone)  # the network may change its input in place
        with self._precision:
            return [value.clone() for value in floats(results(call(network, given)))]


def _changed(example: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an example with what a function returns for each dense tensor, or None if it returns each as it is."""
    leaves, tree = pytree.tree_flatten(example)
    made = [change(leaf) if isinstance(leaf, Tensor) and is_dense(leaf) and leaf.numel() else leaf for leaf in leaves]
    return None if all(map(operator.is_, leaves, made)) else pytree.tree_unflatten(made, tree)


def _drawn_where_equal(generator: torch.Generator, leaf: Tensor) -> Tensor:
    """Return draws in place of a floating-point tensor that has one value throughout."""
    if not leaf.is_floating_point() or not ((leaf == leaf.flatten()[0]) | leaf.isnan()).all():
        return leaf
    return torch.randn(leaf.shape, generator=generator).to(leaf)


def _twice_as_long(leaf: Tensor) -> Tensor:
    """Return a tensor (B, 1, ...) with a second position, that of the next row or 0."""
    if leaf.dim() < 2 or leaf.shape[1] != 1:
        return leaf
    return torch.cat([leaf, leaf.roll(1, 0) if len(leaf) > 1 else torch.zeros_like(leaf)], 1)


def _zeros(like: Tensor, axis: int, size: int) -> Tensor:
    """Return zeros in the shape of a tensor, but for one axis."""
    return like.detach().new_zeros([size if at == axis else own for at, own in enumerate(like.shape)])


def _check_owned(model: nn.Module, found: Sequence[AppendedValues]) -> None:
    """Raise InputError if a parameter is shared, frozen, or computed from others before each pass."""
    for path, name, *_ in found:
        part = model.get_submodule(path)
        if name in part._buffers:
            continue
        own = part._parameters.get(name)
        if own is None:
            raise InputError(f"{path}.{name} is computed from other parameters before each pass")
        if why_fixed := fixed(model, own):
            raise InputError(f"{path}.{name} {why_fixed}")


def append(network: nn.Module, found: Sequence[AppendedValues]) -> None:
    """Append values to the layers of a network, in place."""
    for path, name, axis, values in found:
        part = network.get_submodule(path)
        old = getattr(part, name)
        put(part, name, torch.cat([old.detach(), values.to(old.device, old.dtype)], axis))


def append_tried(networks: Sequence[nn.Module], found: Sequence[AppendedValues], expected: Outputs) -> None:
    """Append values to the layers of a network, which must go on to compute what is expected, and of its moving averages.

    InputError if the network then fails on the example, or if its outputs depend on the new features; nothing is changed then.
    These are 0 behind the next layers, whatever they are. So they are tried large and of both signs too, which shows a largest
    one, a mean or a norm of features, and a part of them that is taken by its position.
    """
    changed = [network.get_submodule(each.path) for network in networks for each in found]
    with undone_on_error(saved(changed)):
        for network in networks:
            append(network, found)
        tails = [
            getattr(networks[0].get_submodule(path), name).narrow(axis, -values.shape[axis], values.shape[axis])
            for path, name, axis, values in found
        ]
        drawn = [tail.clone() for tail in tails]
        for sign in (0, 1, -1):
            for tail, (_, name, *_) in zip(tails, found, strict=True) if sign else ():
                tail.mul_(_LARGE)  # the weights of the next layers stay 0
                tail.add_(sign * _LARGE if name == "bias" else 0)
            with in_words("the wider network fails on the example"):
                same = expected.are_of(networks[0])
            if not same:
                raise InputError(
                    "the network depends on the number of these features, as a normalisation over them does"
                )
            for tail, values in zip(tails, drawn, strict=True):
                tail.copy_(values)


def set_counts(model: nn.Module, counts: Mapping[str, Mapping[str, int]]) -> None:
    """Set attributes that count features or units, by the paths of the modules, where there are such modules and attributes."""
    parts = dict(model.named_modules())
    for path, own in counts.items():
        held: Any = vars(parts[path]) if path in parts else {}
        held.update({name: value for name, value in own.items() if type(held.get(name)) is int})


@contextmanager
def resized(
    model: nn.Module,
    shapes: Mapping[str, Sequence[int]],
    tensors: Mapping[str, Tensor],
    counts: Mapping[str, Mapping[str, int]] | None = None,
) -> Iterator[None]:
    """Give the layers of a fresh model the widths that they have in another network, unless the block fails.

    shapes: of the parameters and buffers that have another shape there, before. What has another shape before stays, for whoever
    compares them. tensors: of that network, whose values they get. counts: what attributes of modules count there, by their
    paths.
    """
    mine = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with undone_on_error(saved(model.modules())):
        for name, shape in shapes.items():
            path, _, entry = name.rpartition(".")
            own, other = mine.get(name), tensors.get(name)
            if own is None or other is None or own.shape == other.shape or tuple(own.shape) != tuple(shape):
                continue
            part, entries = model.get_submodule(path), [entry]
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                entries += [each for each in ("running_mean", "running_var") if getattr(part, each) is not None]
            elif not is_layer(part):
                continue
            for each in entries:
                held, value = getattr(part, each), tensors.get(f"{path}.{each}".lstrip("."), other)
                put(part, each, value.detach().to(held.device, held.dtype, copy=True))
        set_counts(model, counts or {})
        yield
