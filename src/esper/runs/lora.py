"""Find where LoRA goes, and with which rank: the directions of the gradient that lower the loss most for their parameters."""

import copy
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from esper.kasmina.blueprints import count
from esper.kasmina.graft.recording import call
from esper.leyline.messages import InputError
from esper.runs.healing.training import HealingExamples, examples_of, usual_loss
from esper.tolaria.live.probe import Loss


def lora_ranks(
    model: nn.Module, data: Any, *, budget: float = 0.01, layers: Sequence[str] = ("*",), loss: Loss | None = None
) -> dict[str, Any]:
    """Choose the layers and the ranks of LoRA before a training, as arguments of `peft.LoraConfig`.

        config = peft.LoraConfig(**esper.lora_ranks(model, (x, y), budget=0.02, layers=["blocks.*"]))

    A direction of rank 1 at a layer with weight W (out, in) costs out + in parameters. A first step of LoRA along it lowers the
    loss by the square of its singular value in the mean gradient of W, as in LoRA-GA (arXiv 2407.05000). The directions with
    the largest square for each parameter are taken until the budget is used. What this is worth beside one rank for all layers:
    `esper docs lora-ranks`.

    Args:
        model: the pretrained module. It is not changed; a copy runs in evaluation mode.
        data: examples of the new task, as `esper.heal` takes them; some hundred are enough.
        budget: most parameters of LoRA / parameters of the model.
        layers: names of linear layers that may be adapted, with the wildcards of `fnmatch`.
        loss: loss(output, target) of a batch; by default the cross-entropy for whole numbers, and else the squared error.

    Returns:
        target_modules, rank_pattern, and r, lora_alpha and alpha_pattern, by which every layer has a scale of 1

    Raises:
        InputError: in one sentence, if no linear layer has such a name, the budget is under the smallest rank, or a gradient is
            not finite or 0
    """
    network = copy.deepcopy(model).eval().requires_grad_(False)
    transposed = ("transformers.pytorch_utils", "Conv1D")  # that of GPT-2, which PEFT adapts too
    linear = {
        name: part.weight
        for name, part in network.named_modules()
        if isinstance(part, nn.Linear) or (type(part).__module__, type(part).__name__) == transposed
    }
    weights = {name: each for name, each in linear.items() if any(fnmatchcase(name, pattern) for pattern in layers)}
    if not weights:
        raise InputError(
            f"no linear layer is named {' or '.join(map(repr, layers))}; there are {', '.join(linear) or 'none in the model'}"
        )
    costs = {name: sum(each.shape) for name, each in weights.items()}
    room = int(budget * count(model))
    if room < min(costs.values()):
        raise InputError(
            f"budget {budget:g} allows {room:,} parameters, and rank 1 of the smallest layer has {min(costs.values()):,}; "
            "give a larger budget"
        )
    examples = examples_of(data).like(network)
    for each in weights.values():
        each.requires_grad_(True)
    for x, y in examples.batches():
        share = len(HealingExamples(x, y)) / len(examples)  # of the mean over all examples
        ((loss or usual_loss)(call(network, x), y).mean() * share).backward()
    gradients = {name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in weights.items()}
    if wrong := [name for name, each in gradients.items() if not each.isfinite().all()]:
        raise InputError(f"the gradient of {wrong[0]} is not finite; leave out examples on which the loss is not")
    offers = [  # singular values fall, so that a layer sells its directions in order
        (float(value) ** 2 / costs[name], name)
        for name, each in gradients.items()
        for value in torch.linalg.svdvals(each.float())
    ]
    ranks: dict[str, int] = {}
    for gain, name in sorted(offers, reverse=True):
        if gain > 0 and costs[name] <= room:
            room -= costs[name]
            ranks[name] = ranks.get(name, 0) + 1
    if not ranks:
        raise InputError("the gradient is 0 at every layer; give data on which the model has something to learn")
    ranks = {name: ranks[name] for name in weights if name in ranks}  # in the order of the model
    # PEFT takes a name in a list also for a layer whose name ends in it
    meant = not any(other.endswith(f".{name}") for name in ranks for other in linear)
    patterns = ranks if meant else {f"^{re.escape(name)}": rank for name, rank in ranks.items()}
    return {
        "target_modules": [*ranks] if meant else "|".join(map(re.escape, ranks)),
        "r": 1,
        "rank_pattern": patterns,
        "lora_alpha": 1,
        "alpha_pattern": patterns,
    }
