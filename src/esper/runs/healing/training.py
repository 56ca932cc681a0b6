"""Train and score the networks that `heal` compares, all on the same batches. N examples, or rows of K inputs and O outputs."""

import copy
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import undisturbed
from esper.kasmina.graft.recording import call, floats
from esper.kasmina.host import dtype_of
from esper.leyline.data.arrays import numeric_array, real
from esper.leyline.data.batches import check_lengths, check_pairs
from esper.leyline.data.keys import Purpose, key, permutations, scalar
from esper.leyline.data.task import check_finite
from esper.leyline.messages import InputError, in_words, kind_of
from esper.runs.healing.healed import ComparedNetwork, half_width
from esper.tolaria.live.missing import ridge
from esper.tolaria.live.probe import Loss, Probe, Way, examples_in

SHARES = {"train": 0.7, "probe": 0.15}
"""Share of the examples that train, and that choose among what was trained; the table is measured on the rest."""
LEAST = 20
"""Fewest examples that can be split: the probe and the rest get three each."""
IGNORED = -100
"""Label of a position that does not count, as in torch.nn.functional.cross_entropy."""
BATCH = 256
"""Examples in one pass that measures."""
WEIGHTS = ("weight", "weight_orig", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Names of the weights that LoRA adapts: of layers, of pruned layers in an exported graph, and of nn.MultiheadAttention."""
PIECES = 20
"""Batches that are measured if a loss does not know examples; fewer where there are fewer examples."""
READ, PASS = 256, 16
"""Examples of the training part that `refit` reads, and those in one pass, so that the patches of a convolution fit in memory."""
ROWS = 128
"""Most inputs of a layer that one call of it leaves to `refit`."""
RIDGE = 0.01
"""Ridge of `refit`, as a share of the mean squared singular value of the inputs."""


class HealingExamples(NamedTuple):
    """Holds inputs and targets, trees of tensors (N, ...). An input that is a tuple or a mapping is the arguments of a model."""

    x: Any
    y: Any

    def __len__(self) -> int:
        return examples_in(self.x, self.y)

    def at(self, index: Tensor | slice) -> "HealingExamples":
        return HealingExamples(*pytree.tree_map_only(Tensor, lambda leaf: leaf[index], (self.x, self.y)))

    def like(self, network: nn.Module) -> "HealingExamples":
        """Return the examples with floating-point inputs of the dtype of the network's parameters."""
        dtype = dtype_of(network)
        x = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, self.x)
        return HealingExamples(x, self.y)

    def batches(self, least: int = 2) -> list[tuple[Any, Any]]:
        """Divide all examples into at least `least` (input, target) pairs of about equal length, of at most `BATCH` each."""
        count = max(math.ceil(len(self) / BATCH), min(least, len(self)))
        cuts = np.linspace(0, len(self), count + 1).round().astype(int).tolist()
        return [(part.x, part.y) for part in (self.at(slice(*cut)) for cut in itertools.pairwise(cuts))]


class HealingParts(NamedTuple):
    """Divides the examples of a healing: `train` trains; `probe` ranks places, opens gates, chooses rates; `held` is compared."""

    train: HealingExamples
    probe: HealingExamples
    held: HealingExamples


def examples_of(data: Any) -> HealingExamples:
    """Read (x, y), a mapping with x and y, an iterable of (x, y) batches, or the path of a .npz, .pt or .safetensors file.

    Floating-point arrays become torch's default dtype. Inputs may be infinite, as masks of attention are.
    """
    found = _content(Path(data)) if isinstance(data, str | Path) else data
    if isinstance(found, Mapping):
        if missing := {"x", "y"} - set(found):
            raise InputError(f"data has no {' and no '.join(sorted(missing))}; give arrays named x and y")
        found = (found["x"], found["y"])
    batches: list[Any] = [found]  # (x, y) are one batch
    if not isinstance(found, HealingExamples) and not (isinstance(found, tuple) and len(found) == 2):
        if not isinstance(found, Iterable):
            raise InputError(
                f"data is {kind_of(data)}; give (x, y), batches of them, or a .npz, .pt or .safetensors file"
            )
        check_pairs(batches := list(found), "data")
    trees = [
        [pytree.tree_map(partial(_tensor, what), part) for what, part in zip("xy", pair, strict=True)]
        for pair in batches
    ]
    leaves, structures = zip(*map(pytree.tree_flatten, trees), strict=True)
    shapes = [[leaf.shape[1:] if isinstance(leaf, Tensor) else None for leaf in own] for own in leaves]
    for number, each in enumerate(zip(shapes, structures, strict=True)):
        if each != (shapes[0], structures[0]):
            raise InputError(f"batch {number} of data has examples of another shape than batch 0; give all one shape")
    columns = zip(*leaves, strict=True)
    whole = [torch.cat(each) if len(each) > 1 and isinstance(each[0], Tensor) else each[0] for each in columns]
    examples = HealingExamples(*pytree.tree_unflatten(whole, structures[0]))
    named = [
        (what, what + pytree.keystr(path), leaf)
        for what, tree in (("x", examples.x), ("y", examples.y))
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]
        if isinstance(leaf, Tensor) and leaf.dim()
    ]
    targets = [len(leaf) for what, _, leaf in named if what == "y"]
    if not named:
        raise InputError("data holds no arrays; give x and y as tensors or NumPy arrays")
    for _, name, leaf in named:
        check_lengths(name, len(leaf), targets[0] if targets else len(named[0][2]))
    if len(examples) < LEAST:
        raise InputError(
            f"data has {len(examples)} examples; healing needs {LEAST} or more, of which it holds some back"
        )
    for what, name, leaf in named:
        wrong = leaf.isnan() if what == "x" else ~leaf.isfinite()
        check_finite(wrong.reshape(len(leaf), -1).any(1), name, "leave those examples out")
    return examples


def _content(path: Path) -> Any:
    if not path.is_file():
        found = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
        raise InputError(f"{found}; give healing data, such as a .npz file with arrays x and y")
    with in_words(f"{path} cannot be read as {path.suffix}", "write it again"):
        match path.suffix:
            case ".npz":
                with np.load(path, allow_pickle=False) as arrays:
                    return dict(arrays)
            case ".pt" | ".pth":
                return torch.load(path, weights_only=True)
            case ".safetensors":
                return load_file(path)
    raise InputError(f"{path} ends in {path.suffix!r}; give a .npz, .pt or .safetensors file with x and y")


def _tensor(what: str, value: Any) -> Any:
    """Return an array or a tensor as a tensor of numbers; anything else as it is."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(numeric_array(value, what)))
    if not isinstance(value, Tensor):
        return value
    found = real(value.detach(), what)
    return found.to(torch.get_default_dtype()) if found.is_floating_point() else found


def split(examples: HealingExamples, seed: int) -> HealingParts:
    """Split at random: `SHARES` to train and probe, the rest held back."""
    order = permutations(key(Purpose.SPLIT, seed), np.array([len(examples)]), torch.device("cpu"))[0]
    first, second = (round(share * len(examples)) for share in np.cumsum(list(SHARES.values())))
    return HealingParts(*(examples.at(part) for part in (order[:first], order[first:second], order[second:])))


def usual_loss(output: Any, target: Any) -> Tensor:
    """Return (B,) the cross-entropy of output (B, ..., C) for whole numbers (B, ...) [nats], the squared error for other targets.

    Each is the mean over the positions of an example that count.
    """
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        raise InputError(
            f"the model returns {kind_of(output)}, and the target is {kind_of(target)}; give loss(output, target)"
        )
    if not target.is_floating_point() and output.shape[:-1] == target.shape:
        classes = output.shape[-1]
        wrong = target[(target != IGNORED) & ((target < 0) | (target >= classes))]
        if len(wrong):
            mend = f"the model has {classes} outputs; give labels from 0 to {classes - 1}"
            if classes == 1:
                mend = "the model has one output; give floating-point targets, or from Python loss(output, target)"
            raise InputError(f"y holds the label {int(wrong[0])}, and {mend}")
        flat = output.flatten(0, -2), target.flatten().long()
        losses = F.cross_entropy(*flat, ignore_index=IGNORED, reduction="none").reshape(len(target), -1)
        return losses.sum(1) / (target != IGNORED).reshape(len(target), -1).sum(1).clamp_min(1)
    if target.is_floating_point() and output.numel() == target.numel():
        return (output - target.view_as(output)).square().reshape(len(output), -1).mean(1)
    kind, shape = str(target.dtype).removeprefix("torch."), tuple(output.shape)
    raise InputError(
        f"the output of a batch is {shape}, and its y is {kind} {tuple(target.shape)}; give labels as whole numbers "
        f"{shape[:-1]}, targets as floating-point numbers {shape}, or from Python loss(output, target)"
    )


class Case(NamedTuple):
    """Holds what all networks of a healing have in common."""

    host: nn.Module  # the damaged network, in evaluation mode
    masks: Mapping[str, Tensor]  # masks of pruned parameters
    parts: HealingParts  # the examples
    loss: Loss  # of an output and a target
    steps: int  # steps of the optimizer
    batch: int  # examples in a step
    seed: int  # seed of batches and weights
    way: Way = "given"  # how the loss of an example is computed, as in `tolaria/live/probe.py::Probe`

    def batches(self, examples: HealingExamples) -> list[tuple[Any, Any]]:
        """Return batches to measure on: `PIECES` where only batches have a loss, so that an interval has enough of them."""
        return examples.batches(PIECES if self.way == "whole" else 2)


class TrainedNetwork(NamedTuple):
    """Holds a network after its training: its loss on the probe, its trained parameters, its learning rate, and its seconds."""

    network: nn.Module
    probe: float
    learned: int
    rate: float
    seconds: float


def train(
    network: nn.Module, optimizer: torch.optim.Optimizer, case: Case, behind: Callable[[Any, Any], Any], *, still: bool
) -> None:
    """Train on the batches that every network gets, in the same order; `behind` is called after each step.

    still: keep normalisation layers with running statistics in evaluation mode, as those of a frozen network are.
    """
    network.train()
    for part in network.modules():
        if still and isinstance(part, _NormBase) and part.track_running_stats:
            part.eval()
    generator = torch.Generator().manual_seed(scalar(Purpose.ORDER, case.seed))
    with drawn_with(scalar(Purpose.DROPOUT, case.seed)):
        for _ in range(case.steps):
            x, y = case.parts.train.at(torch.randint(len(case.parts.train), (case.batch,), generator=generator))
            case.loss(call(network, x), y).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            behind(x, y)
    network.eval()


def trained(
    network: nn.Module,
    case: Case,
    rate: float,
    *,
    still: bool = True,
    loss: Loss | None = None,
    masks: Sequence[tuple[Tensor, Tensor]] = (),
) -> TrainedNetwork:
    """Train what requires gradients, as `train` does, with AdamW, and measure the result on the probe.

    loss: what is trained on; None for the loss of the case, by which the probe measures in any event. masks: 0 for entries of a
    parameter that stay as they are, as an entry without a gradient does, and else 1.
    """
    begin = time.perf_counter()
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=rate, weight_decay=0.0)
    with ExitStack() as hooks:
        for weight, mask in masks:
            hooks.enter_context(weight.register_hook(lambda slope, mask=mask: slope * mask.to(slope.dtype)))
        train(network, optimizer, case._replace(loss=loss or case.loss), lambda x, y: None, still=still)
    score = probe_loss(network, case)
    return TrainedNetwork(network, score, sum(map(Tensor.numel, learning)), rate, time.perf_counter() - begin)


def all_weights(case: Case, rate: float) -> TrainedNetwork:
    """Return a copy of which every weight is trained; what was pruned stays 0."""
    network = copy.deepcopy(case.host)
    for parameter in network.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    masks = [(parameter, case.masks[name]) for name, parameter in network.named_parameters() if name in case.masks]
    return trained(network, case, rate, still=False, masks=masks)


def revived(case: Case, rate: float) -> TrainedNetwork | None:
    """Return a copy of which every weight is trained after dead units were drawn anew; None if the damaged network has none."""
    network = copy.deepcopy(case.host)
    if not redraw_dead(network, torch.Generator().manual_seed(scalar(Purpose.BIRTH, case.seed))):
        return None
    return all_weights(case._replace(host=network, masks={}), rate)


@torch.no_grad()
def redraw_dead(network: nn.Module, generator: torch.Generator | None = None) -> int:
    """Draw units anew whose weights are all 0, as wide as the others of their layer, and return how many there are.

    Behind a ReLU such a unit has no gradient, so no training revives it. Its bias and the weights that read it stay as they are.

    generator: None for that of torch.
    """
    count = 0
    for part in network.modules():
        for _, weight in _matrices(part):
            units = _by_output(part, weight)
            alive = units.flatten(1).any(1)
            if alive.any() and not alive.all():
                units[~alive] = _drawn(dead := int((~alive).sum()), units[alive], generator)
                count += dead
    return count


def adapters(
    case: Case,
    rate: float,
    within: Collection[str],
    size: int,
    way: Callable[[nn.Module, Case, float], TrainedNetwork | None] = trained,
) -> TrainedNetwork | None:
    """Return a frozen copy with LoRA of one rank >= 1 at every layer at or in submodules, of at most about `size` parameters.

    No rank is larger than its matrix. None if no layer there has a weight that can be adapted.

    way: how the copy is trained.
    """
    network = copy.deepcopy(case.host).requires_grad_(False)
    inside = {id(part): part for path in within for part in network.get_submodule(path).modules()}
    weights = [(part, name, weight) for part in inside.values() for name, weight in _matrices(part)]
    if not weights:
        return None
    each = sum(len(weight) + weight[0].numel() for _, _, weight in weights)
    with drawn_with(scalar(Purpose.BIRTH, case.seed)):
        for part, name, weight in weights:
            most = min(len(weight), weight[0].numel())  # a higher rank computes nothing more
            parametrize.register_parametrization(part, name, LowRankAdapter(weight, min(max(size // each, 1), most)))
    return way(network, case, rate)


def distilled(intact: nn.Module, network: nn.Module, case: Case, rate: float) -> TrainedNetwork | None:
    """Train what requires gradients so that each layer returns what that of the intact network does: layer-wise distillation.

        loss = mean over layers of |h - h0|^2 / |h0|^2

    h0 are the outputs of a layer of the intact network that multiplies by a weight, and h those of the layer of its name, with as
    many outputs, in the network. Returns None if no layer has one of its name.
    """
    sizes = [
        {path: [len(weight) for _, weight in _matrices(part)] for path, part in own.named_modules()}
        for own in (case.host, intact)
    ]
    shared = [path for path, own in sizes[0].items() if own and own == sizes[1].get(path)]
    if not shared:
        return None
    ours, theirs = dict[str, list[Tensor]](), dict[str, list[Tensor]]()

    def teach(_: nn.Module, arguments: Any, named: Any) -> None:
        if network.training:  # and not while it is measured
            with torch.no_grad():
                intact(*arguments, **named)

    def note(found: dict[str, list[Tensor]], path: str, _: nn.Module, given: Any, output: Any) -> None:
        if network.training:
            found.setdefault(path, []).extend(h.float() for h in floats(output))

    def error(output: Any, target: Any) -> Tensor:
        errors = []
        for path, known in theirs.items():
            # A loop that ends by what it computes may call a layer more often in one network than in the other.
            pairs = list(zip(ours[path], known, strict=False))
            apart = torch.stack([(h - h0).square().sum() for h, h0 in pairs]).sum()
            errors.append(apart / torch.stack([h0.square().sum() for _, h0 in pairs]).sum().clamp_min(1e-30))
        ours.clear()
        theirs.clear()
        return torch.stack(errors).mean()

    with ExitStack() as hooks, undisturbed(intact):
        hooks.enter_context(network.register_forward_pre_hook(teach, with_kwargs=True))
        for (own, found), path in itertools.product(((network, ours), (intact, theirs)), shared):
            hooks.enter_context(own.get_submodule(path).register_forward_hook(partial(note, found, path)))
        return trained(network, case, rate, loss=error)


def distilled_and_trained(intact: nn.Module, network: nn.Module, case: Case, rate: float) -> TrainedNetwork | None:
    """Train by `distilled` for half of the steps, and then on the task for the others."""
    half = case.steps // 2
    first = distilled(intact, network, case._replace(steps=half), rate)
    if first is None:
        return None
    second = trained(network, case._replace(steps=case.steps - half), rate)
    return second._replace(seconds=first.seconds + second.seconds)


def bias_and_scale(case: Case, rate: float) -> TrainedNetwork:
    """Return a frozen copy of which biases, normalisations, and a factor for each output of a layer are trained."""
    network = copy.deepcopy(case.host)
    for parameter in network.parameters():
        parameter.requires_grad_(parameter.dim() < 2 and parameter.is_floating_point())
    for part in [*network.modules()]:
        for name, weight in _matrices(part):
            weight.requires_grad_(False)
            parametrize.register_parametrization(part, name, _Scaled(weight))
    return trained(network, case, rate)


def head(case: Case, rate: float, size: int) -> TrainedNetwork | None:
    """Return a frozen copy of which the last layer is trained, or where it has more than `size` parameters LoRA there.

    The last layer is the one that the network calls last. None if no layer has a weight, or if the last one has too many
    parameters and none that LoRA can be added to.
    """
    layers = _layers(case)
    if not layers:
        return None
    network = copy.deepcopy(case.host).requires_grad_(False)
    last = network.get_submodule(layers[-1]).requires_grad_(True)
    if sum(map(Tensor.numel, last.parameters())) > size:
        return adapters(case, rate, layers[-1:], size)
    return trained(network, case, rate)


def regrown(case: Case, rate: float, size: int, places: Sequence[str]) -> TrainedNetwork | None:
    """Return a frozen copy of which weights that were pruned are drawn anew and trained, dead units at the first places first.

    A unit is an output whose weights are all 0; it is drawn as wide as the living ones, with its bias as it is. Where the next
    layer's weights of it are all 0 too, these are trained from 0 on. Of the other entries that are 0, those with the largest
    gradients are trained from 0 on, as RigL regrows them (Evci and others, arXiv 1911.11134, 2020, section 3). At most `size`
    weights in all. None if no weight can be regrown.

    places: submodules, the one to mend first in front; layers within none of them come last.
    """
    network, left, found = copy.deepcopy(case.host).requires_grad_(False), size, dict[str, _Regrowing]()
    for layer in _layers(case):
        part = network.get_submodule(layer)
        for name, weight in _matrices(part):
            if all(weight is not other.weight for other in found.values()):  # two layers may share one
                mask = torch.zeros_like(weight, dtype=torch.bool)
                found[f"{layer}.{name}"] = _Regrowing(weight, mask, _by_output(part, weight), _by_output(part, mask))
    inside = {path: [i for i, place in enumerate(places) if path.startswith(f"{place}.")] for path in found}
    following = dict(itertools.pairwise(found))
    generator = torch.Generator().manual_seed(scalar(Purpose.BIRTH, case.seed))
    for path in sorted(found, key=lambda path: min(inside[path], default=len(places))):
        own, after = found[path], following.get(path, path)
        reads = found[after].units.transpose(0, 1)  # by input; of the layer itself if it is the last one
        alive = own.units.flatten(1).any(1)
        for unit in (~alive).nonzero()[:, 0].tolist() if alive.any() else []:
            cut = after != path and len(reads) == len(own.units) and not reads[unit].any()
            cost = own.units[unit].numel() + (reads[unit].numel() if cut else 0)
            if cost > left:
                break
            own.units[unit] = _drawn(1, own.units[alive], generator)[0]
            own.learning[unit] = True
            if cut:
                found[after].learning[:, unit] = True
            left -= cost
    if found:
        for each in found.values():
            each.weight.requires_grad_(True)
        x, y = case.parts.train.at(slice(BATCH))
        with drawn_with(scalar(Purpose.DROPOUT, case.seed)):
            case.loss(call(network.eval(), x), y).mean().backward()
        useful = [  # 0 for a weight of no effect
            (torch.zeros_like(each.weight) if each.weight.grad is None else each.weight.grad.abs())
            * ((each.weight == 0) & ~each.mask)
            for each in found.values()
        ]
        network.requires_grad_(False)
        network.zero_grad()
        every = torch.cat([each.flatten() for each in useful])
        largest = every.topk(min(left, int((every > 0).sum()))).indices
        chosen = torch.zeros_like(every, dtype=torch.bool).index_fill(0, largest, value=True)
        for each, own_part in zip(found.values(), chosen.split([each.numel() for each in useful]), strict=True):
            each.mask.logical_or_(own_part.view_as(each.mask))
    learning = [each for each in found.values() if each.mask.any()]
    if not learning:
        return None
    masks = [(each.weight.requires_grad_(True), each.mask) for each in learning]
    return trained(network, case, rate, masks=masks)._replace(learned=sum(int(each.mask.sum()) for each in learning))


class _Regrowing(NamedTuple):
    """Holds a weight, which of its entries are trained, and views of both by output."""

    weight: Tensor
    mask: Tensor
    units: Tensor
    learning: Tensor


@torch.no_grad()
def refit(case: Case, intact: nn.Module, size: int) -> TrainedNetwork | None:
    """Correct linear layers and convolutions by adding low-rank matrices of at most `size` parameters in all.

        E = Y0 - X W',   M = (X'X + RIDGE I)^-1 X'E,   correction of rank r: M U_r U_r',   with (X M)'(X M) = U S U'

    Y0 (N, O) are the outputs of the intact layer, W' the damaged weight, and X (N, K) what the layer reads in the damaged network
    once the layers in front are corrected: reduced-rank ridge regression (Mukherjee and Zhu, 2011, section 2). Ranks go to the
    layers where they remove the largest share of the squared error for each parameter, with the inputs of the intact network.
    Returns None if no layer can be corrected within `size`.
    """
    begin = time.perf_counter()
    network = copy.deepcopy(case.host).requires_grad_(False)
    theirs, part = _linear_layers(intact), case.parts.train.at(slice(READ))
    layers = {name: own for name, own in _linear_layers(network).items() if name in theirs}
    layers = {name: own for name, own in layers.items() if own.weight.shape == theirs[name].weight.shape}
    batches = [part.at(slice(at, at + PASS)).x for at in range(0, len(part), PASS)]
    inputs = _layer_inputs(intact, {name: theirs[name] for name in layers}, batches)
    gains = []
    for name, x in inputs.items():
        own, other = _affine(layers[name]), _affine(theirs[name])
        error = _applied(x, other) - _applied(x, own)
        energy = torch.linalg.eigvalsh(error.T @ error).flip(0).clamp_min(0) / _applied(x, other).square().sum()
        cost = len(own) + own.shape[1] - 1
        gains += [(float(each) / cost, cost, name) for each in energy[: own.shape[1] - 1] if each > 1e-9]
    ranks, left = dict.fromkeys(inputs, 0), size
    for _, cost, name in sorted(gains, reverse=True):
        if cost <= left:
            ranks[name], left = ranks[name] + 1, left - cost
    if left == size:
        return None
    for name in (name for name, rank in ranks.items() if rank):  # in the order in which the network runs them
        layer, x = layers[name], _layer_inputs(network, {name: layers[name]}, batches)[name]
        error = _applied(inputs[name], _affine(theirs[name])) - _applied(x, _affine(layer))
        fitted = ridge(x, error, RIDGE * x.square().sum() / min(x.shape))
        directions = torch.linalg.eigh((x @ fitted).T @ (x @ fitted))[1].flip(1)[:, : ranks[name]]
        added = LowRankAdapter(layer.weight, ranks[name])
        added.b.copy_(directions)
        added.a.copy_((fitted @ directions).T)
        parametrize.register_parametrization(layer, "weight", added)
    return TrainedNetwork(network.eval(), probe_loss(network, case), size - left, 0.0, time.perf_counter() - begin)


def _affine(layer: nn.Linear | nn.Conv2d) -> Tensor:
    """Return (O, K + 1) weight and bias."""
    weight = layer.weight.flatten(1).double()
    return F.pad(weight, (0, 1)) if layer.bias is None else torch.cat([weight, layer.bias[:, None].double()], 1)


def _applied(x: Tensor, affine: Tensor) -> Tensor:
    """Return (N, O) what a layer returns for the inputs x (N, K)."""
    return x @ affine[:, :-1].T + affine[:, -1]


def _linear_layers(network: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    return {
        name: part
        for name, part in network.named_modules()
        if isinstance(part, nn.Linear)
        or (
            isinstance(part, nn.Conv2d) and part.groups == 1 and part.padding_mode == "zeros" and part.padding != "same"
        )
    }


def _layer_inputs(
    network: nn.Module, layers: Mapping[str, nn.Linear | nn.Conv2d], batches: list[object]
) -> dict[str, Tensor]:
    """Return (N, K) what each layer reads, in double precision and in the order of the calls; at most `ROWS` of each call.

    The rows depend on the number of them alone, so that two networks leave those of the same examples and positions.
    """
    found: dict[str, list[Tensor]] = {}

    def reading(name: str, layer: nn.Module, given: tuple[Tensor]) -> None:
        x = given[0]
        if isinstance(layer, nn.Conv2d):
            padding = (0, 0) if isinstance(layer.padding, str) else layer.padding
            x = F.unfold(x, layer.kernel_size, layer.dilation, padding, layer.stride).mT
        rows = x.flatten(0, -2)
        kept = torch.randperm(len(rows), generator=torch.Generator().manual_seed(len(rows)))[:ROWS]
        found.setdefault(name, []).append(rows[kept].double())

    with ExitStack() as hooks, undisturbed(network):
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(reading, name)))
        for x in batches:
            call(network, x)
    return {name: torch.cat(rows) for name, rows in found.items()}


@torch.no_grad()
def _layers(case: Case) -> list[str]:
    """Return the paths of the layers with a weight in the order in which the network last calls them, uncalled ones first."""
    found = [
        path
        for path, part in case.host.named_modules()
        if _matrices(part)
        or isinstance(part, nn.RNNBase)
        # of torch.nn.utils.parametrizations, and of the older weight_norm
        or any(name in getattr(part, "parametrizations", ()) for name in WEIGHTS)
        or "weight_v" in part._parameters
    ]
    with ExitStack() as hooks, undisturbed(case.host):
        for path in found:
            last = partial(lambda path, *_: found.append(found.pop(found.index(path))), path)
            hooks.enter_context(case.host.get_submodule(path).register_forward_hook(last))
        call(case.host, case.parts.train.at(slice(2)).x)
    return found


def settled(case: Case) -> Case:
    """Return the case with the way of computing an example's loss. InputError if the damaged network has no finite loss."""
    probe = _probe(case.host, case.parts.probe.batches(), case.loss)
    with undisturbed(case.host):
        probe.settle(case.host)
    assert probe.way is not None
    case = case._replace(way=probe.way)
    losses = np.concatenate([losses_of(case.host, part, case) for part in case.parts])
    if wrong := int((~np.isfinite(losses)).sum()):
        what = "batches" if case.way == "whole" else "examples"
        raise InputError(
            f"the loss of the model is not finite on {wrong} of {len(losses)} {what}; leave out the examples with infinite "
            "inputs, or give a model whose outputs are finite"
        )
    return case


def losses_of(network: nn.Module, examples: HealingExamples, case: Case) -> NDArray[np.float64]:
    """Return (N,) the loss of each example, or of each batch if the loss does not know examples."""
    probe = _probe(network, case.batches(examples), case.loss)
    probe.way = case.way
    with undisturbed(network):
        return probe.see(network)[0].cpu().numpy()


def probe_loss(network: nn.Module, case: Case) -> float:
    """Return the loss on the probe, which chooses among rates; infinite if it is not finite, so that it comes last."""
    loss = float(losses_of(network, case.parts.probe, case).mean())
    return loss if math.isfinite(loss) else math.inf


def table(
    case: Case, networks: Mapping[str, TrainedNetwork]
) -> tuple[tuple[ComparedNetwork, ...], dict[str, NDArray[np.float64]]]:
    """Return every network on the examples that were held back, and its losses there. The first network is the damaged one."""
    held = case.parts.held
    losses = {name: losses_of(each.network, held, case) for name, each in networks.items()}
    first = next(iter(losses.values()))
    rows = []
    for name, each in networks.items():
        less = first - losses[name]
        measured = float(losses[name].mean()), float(less.mean()), half_width(less), _accuracy(each.network, held)
        rows.append(ComparedNetwork(name, *measured, each.learned, each.rate or None, round(each.seconds, 2)))
    return tuple(rows), losses


class LowRankAdapter(nn.Module):
    """Adds LoRA (arXiv 2106.09685, section 4.1): W + B A, B zero at first; of a kernel, each output channel is a row of W."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        reads = weight[0].numel()
        self.a = nn.Parameter(torch.randn(rank, reads).to(weight) / reads**0.5)
        self.b = nn.Parameter(torch.zeros(len(weight), rank).to(weight))

    def forward(self, weight: Tensor) -> Tensor:
        """Map (out, ...) -> (out, ...)."""
        return weight + (self.b @ self.a).view_as(weight)


class _Scaled(nn.Module):
    """Multiplies each row of a weight by a factor, at first 1."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(len(weight), *[1] * (weight.dim() - 1)).to(weight))

    def forward(self, weight: Tensor) -> Tensor:
        """Map (out, ...) -> (out, ...)."""
        return self.scale * weight


def _matrices(part: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the weights that a layer multiplies by, with their names; none for other modules."""
    own = {} if isinstance(part, nn.Embedding) else part._parameters
    return [(name, weight) for name in WEIGHTS if (weight := own.get(name)) is not None and weight.dim() > 1]


def _by_output(part: nn.Module, weight: Tensor) -> Tensor:
    """Return a view of a weight by output, (out, in, ...). That of a transposed convolution is (in, out, ...)."""
    return weight.transpose(0, 1) if isinstance(part, _ConvTransposeNd) else weight


def _drawn(count: int, living: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return units drawn as wide as living ones, of which there is at least one."""
    drawn = torch.randn(count, *living.shape[1:], generator=generator).to(living)
    return drawn * (living.std() if living.numel() > 1 else living.abs().squeeze())


def _probe(network: nn.Module, batches: list[tuple[Any, Any]], loss: Loss) -> Probe:
    return Probe(batches, loss, next((parameter.device for parameter in network.parameters()), torch.device("cpu")))


@torch.no_grad()
def _accuracy(network: nn.Module, examples: HealingExamples) -> float | None:
    """Return the share of right labels; None if targets are no labels."""
    right = []
    with undisturbed(network):
        for x, y in examples.batches():
            output = call(network, x)
            if not isinstance(output, Tensor) or not isinstance(y, Tensor) or y.is_floating_point():
                return None
            if output.shape[:-1] != y.shape:
                return None
            right.append((output.argmax(-1) == y).double().flatten())
    return float(torch.cat(right).mean())
