"""Train the hosts of the tasks `heal`, and keep them in folders. G hosts of one group, B examples.

A `HostSet` names the hosts of one kind. Hosts are trained in groups of GROUP, at once, when a host of the group is first asked
for. A group is a file in the cache folder, and is trained again where the file is missing.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load
from torch import Tensor

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.host import SegmentedHost
from esper.kasmina.stack.rows import RowMapping, Stack
from esper.leyline.data import keys
from esper.leyline.data.task import Split, one_tensor
from esper.leyline.messages import InputError
from esper.store.disk import read_kept, write_atomic
from esper.store.files import cache_root
from esper.store.tensors import to_parts
from esper_bench.healing.bridged import BridgedCNN, BridgedMLP
from esper_bench.healing.damage import Damage
from esper_bench.healing.data import CLASSES, INPUTS, HostDraw, Problem, Subset, examples, one_of, problem, uniform

BLOCKS = 5
WIDTHS = (16, 20, 24)  # of the stream
HIDDEN = (12, 16, 24)  # inner widths, the same in all blocks of a host
RESIDUAL = 1 / 3
"""Share of the hosts that have a skip connection around every block: a control, where damage is easy to repair anywhere."""

GROUP = 8
UPDATES = 700
BATCH = 48
LR = 4e-3
WARM_UP = 30  # updates in which the learning rate rises
STARTS = 4
"""Most initial weights that are tried for a host. The trained host with the best accuracy on SOUND examples is kept."""
SOUND = 0.75
"""Share of the way from guessing to a perfect accuracy at which a host is sound, and no other start is tried."""

LARGEST = 2**24  # bytes of a file

Weights = dict[str, Tensor]
BridgedHost = BridgedMLP | BridgedCNN


@dataclass(frozen=True)
class HostSet:
    """Holds trained hosts of one kind, by number, and the problems that they are trained on.

    Attributes:
        name (str): name of the task that damages them, and of their folder
        summary (str): what they are, in a few words
        recipe (int): number of the recipe of their training, part of the name of the folder; a change of it raises the number
        count (int): hosts of each part of the keys
        inputs (shape): of one example of the largest host
        problem (callable): from a number to the problem
        examples (callable): from a problem, a part and a number of examples, or None for all, to those examples
        architecture (callable): from a number to the host's factory, without its trained weights
        largest (callable): returns the factory of a host in whose leading corner every host fits
        updates (int): by which a host is trained
        mapping (str): how a stack of them runs, as the config key `mapping`
        slots (int): slots of a host
        menu (names): blueprints beside those of every set
        trained (HostSet or None): the set whose trained weights these hosts have; None for weights of their own
        rates (three floats): learning rates of seeds, of all weights of a trained host, and from scratch
        keys (mapping or None): ranges of the keys of instances, by part; None for those of `heal`
        damage (callable or None): from a key to its damage; None for that of `heal`
        settings (mapping): config of the tasks, over that of `heal`, section by section
    """

    name: str
    summary: str
    recipe: int
    count: int
    inputs: tuple[int, ...]
    problem: Callable[[int], Problem]
    examples: Callable[[Problem, Subset, int | None], Split]
    architecture: Callable[[int], BridgedHost]
    largest: Callable[[], BridgedHost]
    updates: int
    mapping: RowMapping = "auto"
    rates: tuple[float, float, float] = (0.02, 0.003, 0.01)
    slots: int = BLOCKS + 1
    menu: tuple[str, ...] = ()
    trained: "HostSet | None" = None
    keys: Mapping[str, range] | None = field(default=None, hash=False)
    damage: Callable[[int], Damage] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)


def architecture(number: int, of: Problem | None = None) -> BridgedMLP:
    """Draw the host of a number, without its trained weights: five blocks, plain or residual. of: None for `problem(number)`."""

    def once(draw: HostDraw) -> float:
        return float(uniform(number, draw)[0])

    of = of or problem(number)
    hidden = one_of(HIDDEN, once(HostDraw.HIDDEN))
    skips = (once(HostDraw.SKIP) < RESIDUAL,) * BLOCKS
    return BridgedMLP(
        of.inputs, one_of(WIDTHS, once(HostDraw.WIDTH)), (hidden,) * BLOCKS, of.classes, skips, entry=True
    )


def largest() -> BridgedMLP:
    """Return a host in whose leading corner every host fits."""
    return BridgedMLP(INPUTS, max(WIDTHS), (max(HIDDEN),) * BLOCKS, CLASSES, (False,) * BLOCKS, entry=True)


def open_architecture(number: int) -> BridgedMLP:
    """Return the host of a number with a slot behind the last layer as well."""
    return replace(architecture(number), exit=True)


def open_largest() -> BridgedMLP:
    """Return a host with that slot in whose leading corner every host fits."""
    return replace(largest(), exit=True)


VECTORS = HostSet(
    name="heal",
    summary="trained networks of five blocks",
    recipe=1,
    count=512,
    inputs=(INPUTS,),
    problem=problem,
    examples=examples,
    architecture=architecture,
    largest=largest,
    updates=UPDATES,
)
FULL = replace(
    VECTORS,
    name="heal-full",
    summary="trained networks of five blocks with slots at both ends and a full menu",
    architecture=open_architecture,
    largest=open_largest,
    slots=BLOCKS + 2,
    menu=(
        "bypass-mlp-2",
        "bypass-mlp-8",
        "bypass-mlp",
        "bypass-linear",
        "full-head",
        "sparse-rows",
        "sparse-head",
    ),
    trained=VECTORS,
)
"""The hosts of VECTORS, from the same files, with a slot behind the last layer."""


def trained_weights(number: int, of: HostSet = VECTORS) -> Weights:
    """Read the parameters of a number's trained host, by name, float32, from the cache, or train its group and write it there.

    InputError if the file of the cache is damaged.
    """
    of = of.trained or of
    group, place = divmod(number, GROUP)
    start = f"{place}."
    found = _group(group, str(cache_folder(of)), of)
    return {name.removeprefix(start): value for name, value in found.items() if name.startswith(start)}


def cache_folder(of: HostSet = VECTORS) -> Path:
    """Return the folder of the trained hosts: <name>-<recipe> in the cache folder of Esper."""
    of = of.trained or of
    return cache_root() / f"{of.name}-{of.recipe}"


@lru_cache(maxsize=64)
def _group(group: int, folder: str, of: HostSet) -> Weights:
    path = Path(folder) / f"hosts-{group:06}.safetensors"
    if path.exists() or path.is_symlink():
        return read_group(path)
    weights = train_group(range(group * GROUP, (group + 1) * GROUP), of=of)
    write_group(path, weights)
    return weights


def write_group(path: Path, weights: Weights) -> None:
    """Write a file of weights: the SHA-256 of the rest in 64 hexadecimal digits and a newline, then a safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = b"".join(bytes(part) for part in to_parts(weights))
    write_atomic(path, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


def read_group(path: Path) -> Weights:
    """Read the weights of a file that `write_group` wrote. InputError if it is damaged."""
    mend = "delete it, and its hosts are trained again"
    digest, _, content = read_kept(path, LARGEST, mend).partition(b"\n")
    if hashlib.sha256(content).hexdigest().encode() != digest:
        raise InputError(f"{path} is damaged: its checksum is not that of its content; {mend}")
    weights: Weights = load(content)
    return weights


def train_group(
    numbers: Sequence[int], updates: int | None = None, starts: int = STARTS, of: HostSet = VECTORS
) -> Weights:
    """Train hosts together, by AdamW under a cosine schedule, and return their parameters by "<place>.<name>".

    updates: of each host; None for those of the set.

    A host that is not sound after a start is trained again from other initial weights, up to `starts` times, and the best start
    is kept. The weights are the same in every call on one machine; the last bits may depend on the machine and on the version of
    torch.
    """
    best: dict[int, Weights] = {}
    share = np.full(len(numbers), -np.inf)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():  # a host may be asked for under torch.no_grad
        for start in range(starts):
            places = [place for place in range(len(numbers)) if share[place] < SOUND]
            if not places:
                break
            found = _train([numbers[place] for place in places], start, updates or of.updates, of)
            for place, (weights, reached) in zip(places, found, strict=True):
                if reached > share[place]:
                    best[place], share[place] = weights, reached
    return {f"{place}.{name}": value for place, own in best.items() for name, value in own.items()}


def soundness(number: int, weights: Weights, part: Subset = Subset.SOUND, of: HostSet = VECTORS) -> float:
    """Measure the accuracy of a trained host on a part of its problem: 0 is guessing, and 1 a perfect accuracy."""
    host, own = of.architecture(number)(), of.problem(number)
    host.load_state_dict(weights, strict=False)
    x, y = of.examples(own, part, None)
    with torch.no_grad():
        accuracy = float((host(x).argmax(-1) == y).float().mean())
    return (accuracy - 1 / own.classes) / (1 - 1 / own.classes)


def _train(numbers: Sequence[int], start: int, updates: int, of: HostSet) -> list[tuple[Weights, float]]:
    """Train hosts from one start each. Returns their parameters and their soundness."""
    hosts: list[SegmentedHost] = []
    for number in numbers:
        with drawn_with(keys.scalar(keys.Purpose.HEALING, number, HostDraw.START, start)):
            hosts.append(of.architecture(number)())
        hosts[-1].float()
    # vmap whatever the engine would take: weights that are cached and measured must not change with it
    stack = Stack(of.largest()(), len(hosts), mapping="vmap", dtype=torch.float32)
    for row, host in enumerate(hosts):
        stack.write(row, host)
    problems = [of.problem(number) for number in numbers]
    data = [of.examples(own, Subset.HOST, None) for own in problems]
    read = [one_tensor(split.x, "a trained host").float() for split in data]
    x = torch.stack([F.pad(each, (0, of.inputs[-1] - each.shape[-1])) for each in read])
    y = torch.stack([split.y for split in data])
    classes = torch.tensor([own.classes for own in problems])
    absent = torch.arange(CLASSES) >= classes[:, None, None]
    order = np.array(numbers)[:, None, None], np.arange(updates)[None, :, None], np.arange(BATCH)
    drawn = keys.uniform(keys.key(keys.Purpose.HEALING, order[0], HostDraw.BATCH, start, *order[1:]))
    batches = torch.from_numpy((drawn * y.shape[1]).astype(np.int64))
    values = stack.columns["value"]
    optimizer = torch.optim.AdamW([values], lr=LR, weight_decay=1e-2)
    rows = torch.arange(len(hosts))[:, None]
    for update in range(updates):
        for group in optimizer.param_groups:
            cosine = 0.5 * (1 + np.cos(np.pi * update / updates)) + 0.01
            group["lr"] = LR * min(1.0, (update + 1) / WARM_UP) * cosine
        index = batches[:, update]
        outputs = stack(x[rows, index], slice(0, len(hosts))).masked_fill(absent, -torch.inf)
        loss = F.cross_entropy(outputs.flatten(0, 1), y[rows, index].flatten(), reduction="sum") / BATCH
        stack.columns["gradient"].zero_()
        loss.backward()
        values.grad = stack.columns["gradient"]
        optimizer.step()
    found = []
    for row, number in enumerate(numbers):
        stack.read(row, hosts[row])
        weights = {name: value.detach().clone() for name, value in hosts[row].named_parameters()}
        found.append((weights, soundness(number, weights, of=of)))
    return found
