"""Measure a network in a person's own loop on its probe: fixed batches, and the loss of each example where it can be computed."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.kasmina.graft.recording import call, floats
from esper.leyline.data.batches import check_pairs
from esper.leyline.messages import InputError, in_words, kind_of

Loss = Callable[[Any, Any], Tensor]
Batches = Sequence[tuple[Any, Any]] | Callable[[], Sequence[tuple[Any, Any]]]

Way = Literal["given", "mapped", "whole"]

_GIVE_PAIRS = "give (input, target) pairs as the loop has them"
_NO_LOSS, _GIVE_LOSS = "the loss cannot take {}", "give loss(output, target) and targets that go with it"


class Probe:
    """Measures the loss of a network on batches of (input, target).

    way: how the loss of an example is computed: 'given', the loss returns one for each; 'mapped', torch.vmap maps the loss over
    the examples; 'whole', only that of a batch is known. first, batch: the first input, and its number of examples.
    """

    def __init__(self, batches: Batches, loss: Loss, device: torch.device) -> None:
        """Raise InputError if there is no batch, or if the loss is not a function."""
        if not callable(loss):
            raise InputError(f"loss is {kind_of(loss)}; give a function of the output and the target")
        self.source, self.loss, self.device = batches, loss, device
        self.way: Way | None = None
        self._print: list[Tensor] | None = None
        self.first, target = self.batches()[0]
        self.batch = examples_in(target, self.first)

    def batches(self) -> list[tuple[Any, Any]]:
        """Return the batches, on the device. InputError if there are none, or others than before."""
        found = self.source() if callable(self.source) else self.source
        if not isinstance(found, list | tuple):
            raise InputError(
                f"probe is {kind_of(found)}; give a list of (input, target) pairs or a function that returns one, as in "
                "probe=list(loader)"
            )
        check_pairs(found, "probe")
        moved: list[tuple[Any, Any]] = [
            pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self.device), (x, y)) for x, y in found
        ]
        prints = [_fingerprint(batch) for batch in moved]
        if self._print is not None and not (len(prints) == len(self._print) and all(map(_same, prints, self._print))):
            raise InputError(
                "probe has other batches than before, so that its measurements cannot be compared; give fixed ones, as "
                "probe=list(loader), without shuffling or augmentation"
            )
        self._print = prints
        return moved

    def passes(self) -> list[Callable[[nn.Module], Any]]:
        """Return for every batch a function that runs a network and returns its output, or the loss if it has no number."""
        return [partial(self._number, x, y) for x, y in self.batches()]

    def _number(self, x: Any, y: Any, network: nn.Module) -> Any:
        output = call(network, x)
        return output if next(floats(output), None) is not None else self.loss(output, y)

    @torch.no_grad()
    def see(
        self, network: Callable[..., Any], batches: Sequence[tuple[Any, Any]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Measure a network, which is in evaluation mode, on what `batches` returned, or returns now.

        Returns (N,) float64 losses, one for every example, or for every batch where examples have none of their own; and ()
        the standard deviation of the outputs over examples, root mean square over outputs.
        """
        losses, spreads = [], []
        for x, y in self.batches() if batches is None else batches:
            output = call(network, x)
            losses.append(self._losses(output, y))
            spreads.append(_spread(output).to(self.device))
        return torch.cat(losses), torch.stack(spreads).mean()

    def mean(self, output: Any, target: Any) -> Tensor:
        """Return the loss of a batch as one number. InputError if it is none."""
        value = self.loss(output, target)
        _check_loss(value, examples_in(target, output))
        return value.mean()

    def first_output(self, network: nn.Module) -> Any:
        """Return the output for the first input of the probe. InputError if the network does not take it."""
        with in_words("the model cannot run on the first input of the probe", _GIVE_PAIRS):
            return call(network, self.first)

    def try_all(self, network: nn.Module) -> None:
        """Raise InputError if the network does not take the inputs of the probe, or the loss its outputs with the targets."""
        losses = []
        for x, y in self.batches():
            with in_words("the model cannot run on an input of the probe", _GIVE_PAIRS):
                output = call(network, x)
            with in_words(_NO_LOSS.format("an output and a target of the probe"), _GIVE_LOSS):
                losses.append(self._losses(output, y))
        _check_finite(torch.cat(losses).mean())

    def settle(self, network: nn.Module) -> None:
        """Find out how to compute the loss of an example. InputError if there is none, or if it has no standard error."""
        batches = self.batches()
        with torch.no_grad():
            self.way = self._way(self.first_output(network), batches[0][1])
            losses, _ = self.see(network, batches)
        _check_finite(losses.mean())
        if sum(examples_in(*batch) for batch in batches) == 1:
            raise InputError(
                "probe holds one example, so that no standard error is known; give two at least, better 30 or more"
            )
        if len(losses) < 2:
            raise InputError(
                "probe has one batch, and the loss gives one number for it, so that no standard error is known; give two "
                "batches or more, or a loss that returns one number for each example, as with reduction='none'"
            )

    def _way(self, output: Any, target: Any) -> Way:
        with in_words(_NO_LOSS.format("the output and the target of the probe's first batch"), _GIVE_LOSS):
            value, examples = self.loss(output, target), examples_in(target, output)
        _check_loss(value, examples)
        if value.dim():
            return "given"
        if examples < 2:
            return "whole"
        try:
            mapped = _mapped(self.loss, output, target, examples)
            # Without an output axis, vmap raises ValueError where the loss depends on the example. Where it does not, the
            # network computes the loss of the batch itself and returns it with its output.
            with suppress(ValueError):
                _mapped(self.loss, output, target, examples, out_dims=None)
                return "whole"
        except Exception:  # of a person's loss or of torch.vmap on one example; the batch has a loss in any case
            return "whole"
        same = mapped.shape == (examples,) and torch.allclose(
            mapped.mean().float(), value.float(), rtol=1e-3, atol=1e-6
        )
        return "mapped" if same else "whole"

    def _losses(self, output: Any, target: Any) -> Tensor:
        """Compute (n,) float64 losses: of each example of a batch, or of the batch."""
        examples = examples_in(target, output)
        if self.way == "mapped":
            return _mapped(self.loss, output, target, examples).double()
        value = self.loss(output, target)
        _check_loss(value, examples)
        return value.double().reshape(len(value), -1).mean(1) if value.dim() else value.double().reshape(1)


def _check_finite(loss: Tensor) -> None:
    if not bool(loss.isfinite()):
        raise InputError(
            f"the loss of the model on the probe is {float(loss)} before it grows; give a probe, a loss and a model whose loss "
            "is finite"
        )


def _mapped(loss: Loss, output: Any, target: Any, examples: int, out_dims: int | None = 0) -> Tensor:
    """Return (B,) the loss of each example as that of a batch of one."""
    leaves, spec = pytree.tree_flatten((output, target))
    dims = [0 if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == examples else None for leaf in leaves]

    def one(*parts: Any) -> Tensor:
        batch = [part if dim is None else part.unsqueeze(0) for part, dim in zip(parts, dims, strict=True)]
        return loss(*pytree.tree_unflatten(batch, spec))

    return torch.vmap(one, in_dims=tuple(dims), out_dims=out_dims)(*leaves)


def examples_in(*trees: Any) -> int:
    """Return B, the length of the first tensor that has one; 0 where there is none."""
    leaves = (leaf for tree in trees for leaf in ([tree] if isinstance(tree, Tensor) else pytree.tree_leaves(tree)))
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two fingerprints are equal; a nan equals a nan."""
    return one.shape == other.shape and bool(torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all())


def _check_loss(value: Any, examples: int) -> None:
    if not isinstance(value, Tensor):
        raise InputError(f"loss returns {kind_of(value)}; return a tensor")
    if value.dim() and len(value) != examples:
        raise InputError(
            f"loss returns a tensor of shape {tuple(value.shape)} for a batch of {examples} examples; return one number, "
            "or one for each example"
        )
    if not value.is_floating_point():
        raise InputError(f"loss returns {value.dtype}; return a floating-point number")


def _spread(output: Any) -> Tensor:
    """Measure how much the first floating output differs between examples, ()."""
    leaves = pytree.tree_leaves(output)
    first = next(
        (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim()), None
    )
    if first is None or len(first) < 2:
        return torch.ones((), dtype=torch.float64, device=None if first is None else first.device)
    wide = first.detach().double()
    # as `var(0)` would give it, which takes ten times as long along an axis that is not the last
    return (wide - wide.mean(0)).square_().mean().sqrt()


def _fingerprint(batch: tuple[Any, Any]) -> Tensor:
    """Compute the size, the sum and the sum weighed by place of every tensor of a batch, (n, 3)."""
    rows = []
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            flat = leaf.detach().reshape(-1).double()
            weights = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device)
            rows.append(torch.stack([weights.new_tensor(float(len(flat))), flat.sum(), (flat * weights).sum()]))
    return torch.stack(rows) if rows else torch.zeros(0, 3)
