"""Find the function of each feature that runs between the two layers that a site spans, by what it makes of given values."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.functions import REACH, Pointwise, recognised
from esper.kasmina.graft.folding import is_layer
from esper.kasmina.graft.grafted import undisturbed
from esper.kasmina.graft.grown import first_tensor, sites_of
from esper.leyline.errors import is_out_of_memory


@torch.no_grad()
def functions_between(network: nn.Module, run: Callable[[], Any]) -> dict[str, Pointwise]:
    """Return, by site, the function f of a pair W2 f(W1 x + b1) + b2 that the site spans, where it is a known one.

    `run` makes one pass in evaluation mode, in which values from -REACH to REACH, in any order, replace what the first layer of
    each pair returns. What the second layer is given then shows f, whether it is a module or a call, and however many
    functions it is made of. BatchNorms are left out of that pass, as those of new units return what they are given (`folding`). A
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
            if isinstance(
                part, nn.modules.batchnorm._BatchNorm
            ):  # in evaluation mode it takes each feature by itself, in turn
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
