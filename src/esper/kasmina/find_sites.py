"""Find the places in a module where seeds can be planted, by one forward and one backward pass on an example."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from esper.kasmina.candidates import UNKNOWN_STREAM, Candidates
from esper.kasmina.lookahead import causal_paths
from esper.kasmina.recording import on_aliases, record, tensors
from esper.leyline.errors import InputError
from esper.leyline.sites import Site
from esper.leyline.streams import Kind, Stream
from esper.leyline.text import counted

_SHOWN = 3
"""Largest number of modules that the table names for one reason to leave modules out."""


class FoundSites(Mapping[str, Site]):
    """Sites by name, in the order in which the network runs them, with the reasons. Prints as a table.

    Attributes:
        why (dict[str, str]): for the name of each site, the reason why it was chosen
        left_out (dict[str, str]): for the dotted path of each other submodule, the reason why it is not a site
    """

    def __init__(self, network: str, sites: Iterable[Site], why: dict[str, str], left_out: dict[str, str]) -> None:
        """`network`: the name of the module's class."""
        self._network = network
        self._sites = {site.name: site for site in sites}
        self.why = why
        self.left_out = left_out

    def __getitem__(self, name: str) -> Site:
        return self._sites[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def __repr__(self) -> str:
        rows = [("site", "stream", "causal", "why")]
        for name, site in self.items():
            stream = f"{type(site.stream).__name__}({site.stream.width})"
            rows.append((name, stream, "yes" if site.causal else "no", self.why[name]))
        sizes = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join([*(cell.ljust(size) for cell, size in zip(row, sizes, strict=False)), row[-1]]) for row in rows
        ]
        return "\n".join([f"{counted(len(self), 'site')} in {self._network}", *lines, *self._left_out_lines()])

    def _left_out_lines(self) -> list[str]:
        if not self.left_out:
            return []
        by_reason: dict[str, list[str]] = {}
        for path, reason in self.left_out.items():
            by_reason.setdefault(reason, []).append(path)
        return ["left out", *(f"  {reason}: {_listed(paths)}" for reason, paths in by_reason.items())]


class NoSiteError(InputError):
    """A module has no site. `found` says why, without what to do about it; `left_out` is that of `FoundSites`."""

    def __init__(self, found: str, left_out: Mapping[str, str]) -> None:
        forms = any(reason.startswith(UNKNOWN_STREAM) for reason in left_out.values())
        mend = "give an esper.Site for a submodule that returns (B, C), (B, C, H, W) or (B, L, C)"
        if forms:
            mend += ", or let one return such a stream, for example by x.transpose(1, 2) at the end of its forward"
        super().__init__(f"{found}; {mend}")
        self.found, self.left_out = found, left_out


def find_sites(module: nn.Module, example: Any, loss: Callable[[Any], Tensor] | None = None) -> FoundSites:
    """Find the sites of a module: its repeated blocks, and the layers in them that widen or narrow a stream.

    Blocks are submodules of one class that run one after the other. If no block repeats, every layer that multiplies by
    a weight (Linear, convolutions, recurrent layers) is a candidate. The stream of a submodule that returns a tuple is
    the first floating-point tensor in it. A site needs a stream of shape (B, C), (B, C, H, W) or (B, L, C), and a
    gradient of the loss. Heads, embeddings, normalisations, submodules that share a parameter with a head, and
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
    _check_module(module)
    examples = _examples(example)
    return on_aliases(module, lambda weights: _found(module, example, loss, weights, examples))


def _found(
    module: nn.Module, example: Any, loss: Callable[[Any], Tensor] | None, weights: dict[str, Tensor], examples: int
) -> FoundSites:
    recording = record(module, example, loss)
    candidates = Candidates(module, recording, weights, examples)
    for choice in candidates.choices():
        chosen, left_out = candidates.sifted(choice)
        if chosen:
            break
    else:
        raise NoSiteError(_nothing(module, left_out), left_out)
    streams = {path: stream for path in chosen if isinstance(stream := candidates.stream(path), Stream)}
    causal = causal_paths(module, example, [path for path, each in streams.items() if each.kind == Kind.SEQUENCE])
    sites = [Site(path, path, path, stream, path in causal) for path, stream in streams.items()]
    return FoundSites(type(module).__name__, sites, chosen, left_out)


def is_quantised(weight: Tensor) -> bool:
    """Whether a weight has too few bits to be trained: integers, or floating-point numbers of 8 bits."""
    whole = not (weight.is_floating_point() or weight.is_complex())
    return weight.is_quantized or whole or weight.dtype.itemsize == 1


def _listed(paths: list[str]) -> str:
    more = len(paths) - _SHOWN
    return ", ".join(paths[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _examples(example: Any) -> int:
    """Return B, the size of the first axis of the first tensor of the example. Raises InputError if there is none."""
    if not isinstance(example, Tensor | tuple | list | Mapping):
        raise InputError(
            f"the example is a {type(example).__name__}; give a tensor, a tuple of arguments or a mapping of named arguments"
        )
    sizes = [x.shape[0] for x in tensors(example) if x.dim() > 0]
    if not sizes or sizes[0] == 0:
        raise InputError(
            "the example holds no examples; give at least one tensor whose first axis is a batch, as in torch.randn(2, 8)"
        )
    return sizes[0]


def _check_module(module: nn.Module) -> None:
    """Raise InputError if the module cannot be recorded, or its weights cannot have a gradient."""
    if not isinstance(module, nn.Module):
        raise InputError(f"module is a {type(module).__name__}; give an nn.Module")
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


def _nothing(module: nn.Module, left_out: dict[str, str]) -> str:
    """Say in one sentence why the module has no site."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in left_out.items():
        by_reason.setdefault(reason, []).append(path)
    common = sorted(by_reason.items(), key=lambda item: -len(item[1]))[:_SHOWN]
    reasons = (
        "; ".join(f"{_listed(paths)} ({reason})" for reason, paths in common) or "it has no submodule with parameters"
    )
    return f"no site found in {type(module).__name__}: {reasons}"
