"""Train the transformers of the task `heal-bytes`, and keep them in a folder. G hosts of one group.

The hosts of a group are trained at once, when one of them is first asked for. A group is a file in the cache folder, and is
trained again where the file is missing.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.host import SegmentedHost
from esper.kasmina.stack.rows import Stack
from esper.leyline.data import keys
from esper.tasks.objectives import NextByte
from esper_bench.healing import hosts as healing_hosts
from esper_bench.healing.byte_text import LENGTH, SYMBOLS, digest, windows
from esper_bench.healing.data import HostDraw, Subset
from esper_bench.healing.hosts import Weights, read_group, write_group
from esper_bench.healing.open_transformer import OpenTransformer

LAYERS = 4
HOST = OpenTransformer(vocabulary=len(SYMBOLS), width=32, layers=LAYERS, heads=4, length=LENGTH)
GROUP = 2
UPDATES = 700
BATCH = 32  # windows
LR = 4e-3
WARM_UP = 50  # updates in which the learning rate rises
RECIPE = 2
"""Number of the recipe by which hosts are trained, part of the name of the folder. A change of the recipe raises it."""


def trained_weights(number: int) -> Weights:
    """Read the parameters of a number's trained host, by name, float32, from the cache, or train its group and write it there.

    InputError if the file of the cache is damaged.
    """
    group, place = divmod(number, GROUP)
    start = f"{place}."
    found = _group(group, str(cache_folder()))
    return {name.removeprefix(start): value for name, value in found.items() if name.startswith(start)}


def cache_folder() -> Path:
    """Return the folder of the trained hosts: heal-bytes-<recipe>-<digest of the text> in the cache folder of Esper."""
    return healing_hosts.cache_folder().parent / f"heal-bytes-{RECIPE}-{digest()}"


@lru_cache(maxsize=8)
def _group(group: int, folder: str) -> Weights:
    path = Path(folder) / f"hosts-{group:06}.safetensors"
    if path.exists() or path.is_symlink():
        return read_group(path)
    weights = train_group(range(group * GROUP, (group + 1) * GROUP))
    write_group(path, weights)
    return weights


def train_group(numbers: Sequence[int], updates: int = UPDATES) -> Weights:
    """Train hosts together, by AdamW under a cosine schedule, and return their parameters by "<place>.<name>".

    The weights are the same in every call on one machine; the last bits may depend on the machine and on the version of torch.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad():  # a host may be asked for under torch.no_grad
        stack = Stack(HOST(), len(numbers), dtype=torch.float32)
        for row, number in enumerate(numbers):
            with drawn_with(keys.scalar(keys.Purpose.HEALING, number, HostDraw.START)):
                stack.write(row, HOST().float())
        _train(stack, numbers, updates)
        found = {}
        for row in range(len(numbers)):
            for name, value in stack.read(row, HOST().float()).named_parameters():
                found[f"{row}.{name}"] = value.detach().clone()
    return found


def bits(host: SegmentedHost, number: int, part: Subset = Subset.VALIDATION, count: int = 256) -> float:
    """Measure the bits that a byte of a part takes under a host, over `count` windows that the number draws."""
    x, y = windows(part, number, -1, np.arange(count))
    objective = NextByte(HOST.vocabulary)
    with torch.no_grad():
        return -float(objective.score(host(x)[None], y[None]).mean())


def _train(stack: Stack, numbers: Sequence[int], updates: int) -> None:
    values, objective = stack.columns["value"], NextByte(HOST.vocabulary)
    optimizer = torch.optim.AdamW([values], lr=LR, weight_decay=1e-2)
    for update in range(updates):
        for group in optimizer.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * update / updates)) + 0.01
            group["lr"] = LR * min(1.0, (update + 1) / WARM_UP) * cosine
        drawn = [windows(Subset.HOST, number, update, np.arange(BATCH)) for number in numbers]
        x, y = (torch.stack([split[k] for split in drawn]) for k in (0, 1))  # type: ignore[misc]
        loss = objective.loss(stack(x, slice(0, len(numbers))), y).mean(1).sum()
        stack.columns["gradient"].zero_()
        loss.backward()
        values.grad = stack.columns["gradient"]
        optimizer.step()
