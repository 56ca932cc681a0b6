"""Grow a whole network in a training loop whose length nobody knows: small first, wider as it has seen more."""

import copy
import itertools
import math
import operator
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from esper.kasmina.blueprints import count, drawn_with
from esper.kasmina.graft import sharding
from esper.kasmina.graft.find_sites import check_module
from esper.kasmina.graft.grafted import copied, undisturbed
from esper.kasmina.graft.grown import check_tensors
from esper.kasmina.graft.multiplying import WAYS, Way
from esper.kasmina.graft.recording import call, floats, tensors
from esper.leyline.config.arguments import check_integer, check_switch, is_number, known_as, to_path
from esper.leyline.messages import GrowthWarning, InputError, counted, in_words, is_out_of_memory, kind_of, warn
from esper.nissa.rows import RollbackRow, SizeRow
from esper.runs.live.growth_state import check_format
from esper.runs.live.knee import find_knee, shortest
from esper.runs.live.size_log import SizeLog
from esper.tolaria.live.groups import placed_moments
from esper.tolaria.live.population import total
from esper.tolaria.live.probe import Batches, Loss, Probe
from esper.tolaria.live.ranks import Ranks
from esper.tolaria.live.resize import check_growable, follow, optimizers_of, warn_left, widen

Cost = Literal["parameters", "seconds"]
M = TypeVar("M", bound=nn.Module)

FORMAT = 13
"""Version of the state; other versions are refused."""
SETTLED = 20
"""Steps of the loop of which the shortest is the seconds of a step, where these are measured: other work only adds to them."""
BEGINNING = 30
"""Steps of the loop in which growths decide the size with which the training begins, so that rates are not scaled by them."""
TARGETS = 30.0
"""Targets seen for each parameter, when the network becomes wider, where `ratio` is not given and no probe decides."""
WORTH = 0.01
"""Share by which the loss on the probe must have fallen since the last growth."""
AGAIN = 1.1
"""Factor of the examples seen after which the probe is looked at again, if the loss there had not fallen."""
FRESH = 0.5
"""Share of freshly drawn weights behind a growth, where the loss on the probe decides."""
LOOK = 1.08
"""Factor of the compute between two looks at the probe, where its loss decides."""
SHORT, LONG = 2.0, 8.0
"""Factors of the compute over which the slope of that loss is measured: lately, and before."""
BEND = 0.9
"""The network becomes wider when the late slope is below this share of the earlier one."""
APART = 4.0
"""Least factor of the compute between two growths, and between the steps that `EARLY` counts and the first growth."""
EARLY = 7
"""The first steps of the loop, which say little of how the loss falls, as a multiple of the steps of the warm-up."""
DOUBLED = 5000
"""Steps of the loop after which the batch is doubled, so that it is about in proportion to the examples seen."""
GUARDED = 100
"""Steps of the loop between two looks at whether all parameters are finite; the network is then kept as it is."""
_SHARDED = (
    "the {} is sharded by fully_shard, and parts of parameters cannot become wider; give the plain network, and as shard= a "
    "function that calls fully_shard on it, as `esper docs sharding` shows"
)
WINDOW = 8.0
"""The running average weighs a step at compute C by (C / total)^8, so that about the last tenth of the compute counts."""

_PROGRESS = (
    *("steps", "seen", "why", "growths", "rollbacks", "_since", "_compute", "_look_at", "_loss_before", "_cooling"),
    *("_beside", "_slower", "_elasticity", "_shortest", "_grown_at", "_curve", "_looked", "_last_loss", "_lowest"),
    *("_scales", "start"),
)
"""Attributes of plain values that the state holds."""

_UNFINISHED: "weakref.WeakSet[AnytimeGrowth]" = weakref.WeakSet()
"""Growths whose hooks are at an optimizer."""


class _GrowthPlan(NamedTuple):
    """Describes a growth: the factor of the widths, that of the seconds of a step where they were measured, and its way."""

    factor: int
    slower: float | None
    way: Way | None
    why: str


class AnytimeGrowth:
    """Widens a whole network while a loop trains it, so that it is as good at each stop as a network chosen for that stop.

        growth = esper.AnytimeGrowth(model, optimizer, example=x)
        for x, y in loader:
            loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            growth.step(y)
        network = growth.snapshot()

    A small network learns faster at first, and a large one ends better. So start with the smallest that makes sense. When the
    loop has seen 30 targets for each parameter, every inner width is doubled (`esper.widen`). The widths are doubled again at 60
    targets for each parameter of the wider network, and so on until the training stops. The network keeps its class, and a
    growth does not change what it computes.

    With a `probe` and no `ratio`, the loss there decides. While a network is as large as it should be, its loss falls about as a
    power of the compute; when it becomes too small, more slowly. So the network becomes wider when the slope of the logarithm of
    the loss over the logarithm of the compute, over the last doubling, is below .9 of that over the last factor of 8; growths
    are a factor of 4 of compute apart. Data that are seen many times ask for this, and a network that has fitted them learns
    little with new units. So all its weights are halved behind each growth, and half of freshly drawn ones is added (Ash and
    Adams, "On warm-starting neural network training", 2020), which changes what it computes.

    The optimizer's learning rates are scaled (`warmup`, `rate_power`) within each of its steps, and are what they were outside of
    it, so that schedulers know nothing of it.

    With cost='seconds' a network starts at the knee, however small it was built: at the largest size whose step takes at most 1.2
    times the seconds of one of the first size. Behind the first 20 steps of the loop copies are made wider and timed, one after
    the other, up to the first that takes longer, and one growth leads to the largest before it. From there on it
    becomes wider sooner where a wider network is hardly slower: if twice the widths multiply the parameters by p and the seconds
    of a step by p^e, it grows after e^3 * `ratio` targets for each parameter. The seconds are the shortest of the first 20 steps
    of the loop, and of passes of the network and of wider copies on `example`; a run can be repeated only as closely as these.
    Where the size at the knee learns few data by heart, `most_parameters` or `sizes` bound it. (With a loss
    of A / N^a + B / D^b after D targets and a cost of a target that rises as N^e, the best N for a given cost is where
    a A / N^a = e b B / D^b, so D is in proportion to e^(1/b) N for like powers, which are about 1/3: Hoffmann et al., "Training
    compute-optimal large language models", 2022.)

    Several processes with copies of the network grow alike, as the first decides, where each gives shared=True. The targets of
    all of them count. DistributedDataParallel knows the parameters that it was made with, so wrap the network anew behind each
    growth.

        if growth.step(y):
            wrapped = DistributedDataParallel(model)

    With `shard`, each process holds a part of the network, of its average and of what the optimizer remembers. The network is
    given plain, with an optimizer of its parameters; both are sharded when this is made. As parts of parameters cannot become
    wider, a growth gathers the network and its average in every process, and shards the wider ones anew. So `model` is another
    network behind it, made from the one that was given, without the hooks and attributes that it got since then. The optimizer
    stays.

        growth = esper.AnytimeGrowth(model, optimizer, example=x, shard=shard)
        ...
            loss(growth.model(x), y).backward()

    Args:
        model: the network at its first size, before DistributedDataParallel and torch.compile
        optimizer: that of the loop, or a list of all of them, as Muon for matrices and AdamW for the rest
        example: an input of the model on which every layer runs; a tuple or list holds its arguments, a mapping its named ones.
            With cost='seconds', a batch as large as those of the loop
        ratio: targets seen, such as tokens or labels, for each parameter, when the network becomes wider. None lets the loss on
            the probe decide where there is one and cost='parameters'; elsewhere it is 30 times what its first widths were
            multiplied by so far
        cost: what a larger network costs more of, 'parameters' or 'seconds'
        factor: by how much, a whole number
        sizes: in place of `factor`, the sizes that the network passes through, as multiples of the widths that it is given with:
            [1, 4, 8] makes it four times as wide, and then twice as wide again. Each is a whole multiple of the one before
        most_parameters: largest number of parameters; None where there is no limit
        warmup: steps of the linear warm-up of the learning rates, after the start and after each growth
        rate_power: the learning rates of a network whose widths were multiplied by r behind the first 30 steps are scaled by
            r^-rate_power; None is 1/2, and 0 where the loss on the probe decides. Growths before decide the size with which the
            training begins, for which rates are meant
        fresh: share of freshly drawn weights in those of the network behind each growth, of layers with `reset_parameters`; None
            is 0, and .5 where the loss on the probe decides
        probe: a list of (input, target) pairs that are not trained on, or a function that returns one. With it a network waits
            in any case until the loss there has fallen by 1 % since the last growth, so as not to outgrow a small data set.
        loss: loss(output, target) of a batch of the probe
        seed: of the new weights; torch's own generators are not used
        shared: whether the processes of torch.distributed train copies of this network
        shard: a function that calls `fully_shard` on a network of this class, in place, over the processes of torch.distributed,
            which then train it together. Every process calls `step`, `snapshot`, `state_dict` and `finish`, and all of them run
            the probe
        run: folder to which the sizes and losses are written while the loop goes on, for `esper watch`, `esper.report` and
            `esper.open_run`; None writes nothing. Of several processes the first one writes
        overwrite: whether the folder may hold an earlier run, which is then replaced

    Attributes:
        model (nn.Module): the network; with `shard` another one behind each growth
        average (nn.Module): the network with a running average of the weights over about the last tenth of the compute, which
            needs no end to be known, and the latest statistics of BatchNorm
        growths (list[dict]): each growth so far: `step`, `seen`, `parameters` behind it, `factor`, `way`, `why`, `widths` of the
            layers before and behind it, and by how much the seconds of a step were multiplied (`slower`; None where they were
            not measured)
        rollbacks (list[dict]): where parameters were not finite: `step`, and the step whose network was `restored`
        start (str): which sizes were timed, in how long, and with which the training begins, where cost='seconds'; '' before that
        why (str): why the network is not larger

    Raises:
        InputError: in one sentence, if the network cannot be wider as a whole, or an argument cannot be
    """

    @known_as("esper.AnytimeGrowth")
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        example: Any,
        ratio: float | None = None,
        cost: Cost = "parameters",
        factor: int = 2,
        sizes: Sequence[int] | None = None,
        most_parameters: int | None = None,
        warmup: int = 30,
        rate_power: float | None = None,
        fresh: float | None = None,
        probe: Batches | None = None,
        loss: Loss | None = None,
        seed: int = 0,
        shared: bool = False,
        shard: Callable[[Any], Any] | None = None,
        run: str | PathLike[str] | None = None,
        overwrite: bool = False,
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            raise InputError(
                "the model is wrapped in DistributedDataParallel, which does not follow new parameters; give its .module with "
                "shared=True, and wrap that anew where growth.step returns True"
            )
        if isinstance(model, nn.Module) and sharding.is_sharded(model):
            raise InputError(_SHARDED.format(type(model).__name__))
        check_growable(model, "AnytimeGrowth")
        check_module(model)
        for name, value, least in (("factor", factor, 2), ("warmup", warmup, 0), ("seed", seed, 0)):
            check_integer(value, name, least)
        if most_parameters is not None:
            check_integer(most_parameters, "most_parameters", mend="a whole number from 1 on, or None for no limit")
        by_slope = ratio is None and probe is not None and cost == "parameters"
        if rate_power is None:
            rate_power = 0.0 if by_slope else 0.5
        if fresh is None:
            fresh = FRESH if by_slope else 0.0
        for name, number, open_at in (
            ("ratio", TARGETS if ratio is None else ratio, 0.0),
            ("rate_power", rate_power, -math.inf),
        ):
            if not is_number(number) or not open_at < number < math.inf:
                raise InputError(f"{name} is {number!r}; give a finite number" + " above 0" * (open_at == 0))
        if not is_number(fresh) or not 0 <= fresh < 1:
            raise InputError(f"fresh is {fresh!r}; give a share from 0 to below 1")
        if cost not in get_args(Cost):
            raise InputError(f"cost is {cost!r}; give 'parameters' or 'seconds'")
        if (probe is None) != (loss is None):
            raise InputError("probe is given without loss, or loss without probe; give both or none")
        check_switch(overwrite, "overwrite")
        if shard is not None and not callable(shard):
            raise InputError(f"shard is {kind_of(shard)}; give a function that calls fully_shard on a plain network")
        if shard is not None and cost == "seconds":
            raise InputError(
                "cost='seconds' times whole networks, whose steps take other seconds than those of sharded ones; give "
                "cost='parameters' with shard="
            )
        parameters = dict(model.named_parameters())
        self.model, self._optimizers, self._example = model, optimizers_of(optimizer, parameters), example
        mend = "give all optimizers as a list, [muon, adamw], so that they follow growth"
        warn_left(parameters, "requires gradients", self._optimizers, mend)
        self._handles: list[RemovableHandle] = []
        for own in self._optimizers:
            if any(each is own for other in _UNFINISHED if other._handles for each in other._optimizers):
                raise InputError(
                    f"the {type(own).__name__} is used by another esper.AnytimeGrowth, which scales its rates until its "
                    "finish(); call that first, or make the optimizer anew"
                )
        if sizes is not None:
            _check_sizes(sizes, factor)
        tried = copied(model)
        for factor_of_growth in (
            [factor] if sizes is None else [wider // size for size, wider in itertools.pairwise(sizes)]
        ):
            left_out = widen(tried, factor_of_growth, example=example).left_out
            if left_out:
                layer, reason = next(iter(left_out.items()))
                raise InputError(
                    f"{type(model).__name__} cannot become wider as a whole: the features of {layer!r} stay, as {reason}"
                )
        largest = count(tried)
        if sizes is not None and most_parameters is not None and largest > most_parameters:
            raise InputError(
                f"sizes ends with {sizes[-1]}, at which {type(model).__name__} has {largest:,} parameters, above "
                f"most_parameters={most_parameters:,}; leave that size out, or raise the limit"
            )
        self.sizes = None if sizes is None else tuple(sizes)
        self.ratio = None if ratio is None else float(ratio)
        self.factor, self.most_parameters, self.cost = factor, most_parameters, cost
        self.warmup, self.rate_power, self.fresh, self.seed = warmup, float(rate_power), float(fresh), seed
        self._ranks = Ranks(shared or shard is not None, sharded=shard is not None)
        folder = None if run is None else to_path(run, "run")
        self._log = None if folder is None or not self._ranks.first else SizeLog(folder, overwrite=overwrite)
        device = next(model.parameters()).device
        self._probe = None if probe is None or loss is None else Probe(probe, loss, device)
        given = self._settings()
        if self._probe is not None and self._ranks.together:
            given["the batches of the probe"] = len(self._probe.batches())
        for name, own in given.items():
            first, *others = self._ranks.from_each(own)
            if other := [each for each in others if each != first]:
                raise InputError(
                    f"the processes differ in {name}: {first!r} in the first, {other[0]!r} in another; give all the same, "
                    "the probe and its loss too"
                )
        if self._probe is not None:
            with undisturbed(model), torch.no_grad():
                self._probe.try_all(model)
        self.average = copied(model).requires_grad_(False)
        self._scales = _first_scales(model, seed) if self.fresh else {}
        self._shard = shard
        self._name = type(model).__name__  # which fully_shard changes
        # of each network in parts: a copy of its size and class, without values
        self._hollow: MutableMapping[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
        if shard is not None:
            self._take(model, self.average, [name for name, _ in model.named_parameters()])
        self.growths: list[dict[str, Any]] = []
        self.rollbacks: list[dict[str, int]] = []
        # the averaged network of before a growth that changed what it computes, until this one has a lower loss on the probe
        self._before: nn.Module | None = None
        # of the last copy that is kept: its step, the tensors of the network and its average, and what each optimizer remembered
        self._kept: tuple[int, list[Tensor], list[dict[Any, Any]]] | None = None
        self._loss: float | None = None  # on the probe, where it was looked at in this step
        self._last_loss = -math.inf  # on the probe, at the last look
        self._first, self._begun = self.parameters, time.perf_counter()
        self.steps = self.seen = self._since = 0
        self._cooling: tuple[int, int] | None = None  # since which step the rates fall, and in how many
        self._compute = 0.0
        self._look_at, self._loss_before = 0.0, math.inf
        # where the loss on the probe decides: logarithms of compute and loss at its looks over the last factor of LONG
        self._by_slope, self._curve = by_slope, list[tuple[float, float]]()
        self._looked = 0.0  # compute at the last look, finite or not
        self._grown_at = math.nan  # compute at the last growth, or of the first steps, which `EARLY` counts
        # of each size so far: parameters, the lowest loss on the probe, and the steps and the compute then
        self._lowest: list[tuple[int, float, int, float]] = []
        # the seconds of the shortest of the first steps, where they are measured, and when the last step was
        self._shortest, self._stepped = math.inf, math.nan
        self._rows = 0  # of the largest batch of targets; the last batch of an epoch may be smaller
        self._beside = math.nan  # seconds of a step beside the passes of the network, once measured
        self.start = ""
        self._slower: float | None = None  # by how much the seconds of a step are multiplied by the next growth
        self._elasticity = 1.0  # e: that, as a power of the parameters
        self.why = "too few examples were seen"
        self._next_factor()
        self._rates: dict[int, list[Any]] = {}  # of the groups of each optimizer by its id, within its step
        for own in self._optimizers:
            self._handles.append(own.register_step_pre_hook(self._scale_rates))
            self._handles.append(own.register_step_post_hook(self._restore_rates))
        _UNFINISHED.add(self)

    @property
    def parameters(self) -> int:
        """Number of parameters of the network as it is."""
        return count(self.model)

    def cool_down(self, steps: int) -> None:
        """Let the learning rates fall to 0 in so many steps from now on, for a training that ends then.

        The rates fall in a straight line, in each step of the optimizer, under any scheduler; the network becomes no wider.
        """
        check_integer(steps, "steps")
        self._cooling = self.steps, steps
        self._ended(f"the learning rates fall to 0 until step {self.steps + steps:,}")

    def batch_size(self, least: int, most: int) -> int:
        """Return the size of the next batch: `least` at first, twice as many after each 5,000 steps, and at most `most`.

        At first the gradient of a few examples points about where that of many does, so that the same examples are worth more as
        more steps. The learning rates do not depend on it, and a resumed run goes on with the same batches. With cost='seconds'
        every batch is as large as `example`, so this is not for it.
        """
        check_integer(least, "least")
        check_integer(most, "most", least)
        return min(least << (self.steps // DOUBLED), most)

    def step(self, *batch: Any) -> bool:
        """Take note of a step of the optimizer; returns whether the network became wider.

        batch: the targets of the step, or their number, which leaves out what the loss leaves out, as padding; or the input and
        the targets, as for `Growth.step`. Call this behind `optimizer.zero_grad()`: the parameters of a network that becomes
        wider are new objects. With shared=True every process calls it, with its own targets.
        """
        if len(batch) not in (1, 2):
            raise InputError(
                f"growth.step was given {counted(len(batch), 'argument')}; give the targets of the step, or their number, or "
                "the input and the targets"
            )
        targets = batch[-1]
        number = targets.numel() if isinstance(targets, Tensor) else targets
        if not is_number(number, int) or number < 1:
            raise InputError(f"targets is {targets!r}; give the targets of the step as a tensor, or their number")
        if not self._handles:
            raise InputError("the network is finished; make another esper.AnytimeGrowth to widen it further")
        self._reshard()
        # Walked once, as in a small network a walk is a twentieth of a step.
        own: list[Tensor] = list(self.model.parameters())
        if self._shard is None and sharding.in_parts(own[0]):
            raise InputError(_SHARDED.format(type(self.model).__name__))
        now, mine = own[0], next(self.average.parameters())
        if (now.device, now.dtype) != (mine.device, mine.dtype):
            raise InputError(
                f"the {type(self.model).__name__} is of {now.dtype} on {now.device}, and growth.average is of {mine.dtype} on "
                f"{mine.device}; move or cast the network before esper.AnytimeGrowth is made"
            )
        number = sum(self._ranks.from_each(number))
        self.steps += 1
        self._since += 1
        self.seen += number
        size = sum(parameter.numel() for parameter in own)
        compute = float(size * number)
        self._compute += compute
        self._average(own, min(1.0, (WINDOW + 1) * compute / (self._compute + WINDOW * compute)))
        if self._kept is None or self.steps % GUARDED == 0:
            self._guard()
        self._loss, begun = None, time.perf_counter()
        due = self._due(targets, size)
        widened = bool(due) and self._grow(due)
        if self._probe is not None and self._loss is None and (not self._by_slope or self._look_at == math.inf):
            self._look()  # for `improved` and `verdict` alone
        if self._log is not None:
            self._write(self._log, time.perf_counter() - begun if widened else None)
        return widened

    def _due(self, targets: Tensor | int, size: int) -> str:
        """Return why the network should become wider at this step; '' if it should not, as `why` says then."""
        if self._look_at == math.inf or (self.cost == "seconds" and not self._timed(targets)):
            return ""
        if self._starts:
            self.why = "the sizes are timed once the loss on the probe is finite"
            return self.why * (self.seen >= self._look_at)
        if self._by_slope:
            return self._bent()
        ratio = (TARGETS * self._multiple if self.ratio is None else self.ratio) * self._elasticity**3
        needed, each = math.ceil(ratio * size), f"{ratio:.3g} for each of {size:,} parameters"
        slower = ""
        if self._slower is not None:
            wider = f"a network {self._next_factor()} times as wide"
            slower = f", as a step of {wider} takes {self._slower:.2f} times the seconds"
        if self.seen < needed:
            self.why = f"{self.seen:,} targets were seen, and {each} are {needed:,}{slower}"
        if self.seen < max(needed, self._look_at):
            return ""
        return f"{self.seen:,} targets were seen, which are {each}{slower}"

    def snapshot(self) -> nn.Module:
        """Return a copy of the network with averaged weights, as a plain module; the run goes on undisturbed.

        Where freshly drawn weights are added behind a growth and there is a `probe`, that is the network of before the growth,
        until the wider one has a lower loss on the probe at a look.
        """
        found = self._whole(self.average if self._before is None else self._before).train(self.model.training)
        for mine, own in zip(found.parameters(), self.model.parameters(), strict=True):
            mine.requires_grad_(own.requires_grad)
        return found

    def finish(self) -> nn.Module:
        """Leave the optimizer alone from now on, and return the network as it was trained; `snapshot` has the average.

        Where parameters are not finite, that is the last network that was kept. With `shard` it stays in parts. With `run` the
        folder gets its last row and its summary.
        """
        finished = not self._handles
        if self.steps and not finished:
            self._guard()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._log is not None and self._log.begun and not finished:
            self._loss, self._log.noted = None, 0.0
            self._write(self._log, None)
            figures = {name: getattr(self, name) for name in ("seen", "start", "growths", "rollbacks", "why")}
            seconds = round(time.perf_counter() - self._begun, 3)
            sizes = [self._first, *(each["parameters"] for each in self.growths)]
            self._log.end(
                {"verdict": repr(self), "steps_done": self.steps, "sizes": sizes, "seconds": seconds, **figures}
            )
        return self.model

    def summary(self) -> dict[str, Any]:
        """Return how far the training is, each growth, and why the network is not larger, as plain values."""
        names = ("steps", "seen", "parameters", "start", "growths", "rollbacks", "why", "verdict")
        return copy.deepcopy({name: getattr(self, name) for name in names})

    @property
    def improved(self) -> bool:
        """Whether the loss on the probe was looked at in this step, and is the lowest so far.

        It is looked at whenever the compute has risen by 8 %. Keep `snapshot()` then where data are few.
        """
        return self._loss is not None and self._best()[2] == self.steps

    def _best(self) -> tuple[int, float, int, float]:
        """Return the parameters, the loss on the probe, the steps and the compute of the look with the lowest loss."""
        return min(self._lowest, key=operator.itemgetter(1))

    @property
    def verdict(self) -> str:
        """What the probe says of the sizes so far, in a sentence; '' while that is not known.

        Where the loss on it decides, that is whether a larger network had a lower one, once the compute is four times that at the
        last growth, or, before any, at the lowest loss. Everywhere it is whether that loss has risen since it was lowest.
        """
        if not self._lowest:
            return ""
        said = self._sizes_compared()
        size, best, step, _ = self._best()
        if math.isnan(self._last_loss) or _is_lower(best, self._last_loss):
            where = (
                f"the loss on the probe was lowest, {best:.4g}, after {counted(step, 'step')} with {size:,} parameters"
            )
            said = f"{said or where}; the loss there is {self._last_loss:.4g} now: keep growth.snapshot() where growth.improved"
        if self._before is not None:
            smaller = f"until it is lower, growth.snapshot() is the network of {count(self._before):,} parameters"
            said = (
                f"{said}; " * bool(said)
                + f"the loss on the probe was {self._loss_before:.4g} at the last growth: {smaller}"
            )
        return said

    def _sizes_compared(self) -> str:
        """Say whether a larger network had a lower loss on the probe; '' while that is not known."""
        sizes = self._lowest
        if not self._by_slope or sizes[-1][0] != self.parameters:
            return ""
        size, last, step, compute = sizes[-1]
        if self._compute < APART * (self._grown_at if self.growths else compute):
            return ""
        if not self.growths:
            due = "" if self._look_at == math.inf else ", before the network was due to be wider"
            found = f"lowest, {last:.4g}, after {counted(step, 'step')}, and has not fallen since"
            return f"no larger size was tried: the loss on the probe was {found}{due}"
        if len(sizes) < 2:
            return ""
        (smallest, first, *_), (own, best, *_) = sizes[0], min(sizes[1:], key=operator.itemgetter(1))
        if not _is_lower(best, first):
            found = f"{first:.4g} with {smallest:,} parameters, and {best:.4g} with {own:,}"
            return f"size does not matter here: the lowest loss on the probe was {found}"
        before, smaller = min((each[1], each[0]) for each in sizes[:-1])
        found = f"{before:.4g} with {smaller:,} parameters, and is {last:.4g} since it has {size:,}"
        pays = "" if _is_lower(last, before) else "the last growth did not pay: "
        return f"{pays}the lowest loss on the probe was {found}"

    def __repr__(self) -> str:
        sizes = " -> ".join(f"{number:,}" for number in [*(each["before"] for each in self.growths), self.parameters])
        restored = f"; restored {counted(len(self.rollbacks), 'time')}, as values were not finite" * bool(
            self.rollbacks
        )
        steps, verdict = counted(self.steps, "step"), f"; {self.verdict}" * bool(self.verdict)
        start = f"; {self.start}" * bool(self.start)
        size = f"{self._name} of {sizes} parameters"
        return f"{size} after {steps}; not more, as {self.why}{start}{restored}{verdict}"

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on, but for the model and the optimizer, whose own states have the rest.

        With `shard` these are in it too, as `model` and `optimizers`; every process calls this, and the first gets whole tensors,
        those that were in parts in the memory of the CPU, the others an empty state.
        """
        self._reshard()
        values: dict[str, Any] = {
            "average": dict(self.average.state_dict()),
            "before": None if self._before is None else dict(self._before.state_dict()),
        }
        if self._shard is not None:
            values["model"] = dict(self.model.state_dict())
            values["optimizers"] = [own.state_dict() for own in self._optimizers]
        first = self._ranks.first or self._shard is None

        def whole(value: Tensor) -> Tensor | None:
            gathered = sharding.gather_on_cpu(value.detach(), first)
            return None if gathered is None else gathered.clone()

        values = pytree.tree_map_only(Tensor, whole, values)
        if not first:
            return {}
        return {
            "format": FORMAT,
            "settings": self._settings(),
            "progress": copy.deepcopy({name: getattr(self, name) for name in _PROGRESS}),
            "log": None if self._log is None else self._log.state(),
            **values,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give a fresh network, its optimizer and this object the state of another run: its sizes, and where it was.

        Call this before the states of the model and of the optimizer are loaded, which have the values. A state of a run with
        `shard` has them too, so that nothing else is loaded; every process gives that of the first one. InputError if the state
        is of another version or of another network, or if this run has begun already.
        """
        check_format(state, FORMAT, "esper.AnytimeGrowth")
        if self.growths or self.steps:
            raise InputError(
                "this run has begun already; load the state into a fresh model, optimizer and AnytimeGrowth"
            )
        settings = self._settings()
        for name, own in settings.items():
            if (there := state["settings"][name]) != own and name != "most_parameters":  # a limit may be another one
                if name == "probe":  # whether there is one
                    raise InputError(
                        "the state is of a run without a probe, and this one has one; leave out probe= and loss="
                        if own
                        else "the state is of a run with a probe, and this one has none; give probe= and loss= as there"
                    )
                raise InputError(f"the state is of {name}={there!r}, and this run has {name}={own!r}; give the same")
        if self._shard is not None and "model" not in state:
            raise InputError(
                "the state is of a run without shard=, and holds no network; give {**state, 'model': model.state_dict(), "
                "'optimizers': [optimizer.state_dict()]} of that run"
            )
        if len(state.get("optimizers", self._optimizers)) != len(self._optimizers):
            raise InputError(
                f"the state is of {counted(len(state['optimizers']), 'optimizer')}, and this run has "
                f"{len(self._optimizers)}; give the same"
            )
        model, average, before = self._whole(self.model), self._whole(self.average), None  # a refusal changes nothing
        progress = copy.deepcopy({name: state["progress"][name] for name in _PROGRESS})
        for each in progress["growths"]:
            before = copied(average) if state["before"] and each is progress["growths"][-1] else None
            size = count(model)
            if each["before"] != size:
                raise InputError(
                    f"the state is of a network of {each['before']:,} parameters at this point, and this one has "
                    f"{size:,}; build the same model at its first size"
                )
            ways = [each["way"]] if each["way"] else WAYS
            widen(model, each["factor"], example=self._example, ema=average, seed=each["seed"], ways=ways)
        mend = "build the same model at its first size"
        check_tensors(state["average"], average.state_dict(), "the average of the state", "the network", mend)
        if before is not None:
            check_tensors(state["before"], before.state_dict(), "the snapshot of the state", "the network", mend)
            before.load_state_dict(state["before"])
        if "model" in state:
            check_tensors(state["model"], model.state_dict(), "the network of the state", "this one", mend)
        size = count(model)
        if self.most_parameters is not None and size > self.most_parameters:
            raise InputError(
                f"the network of the state has {size:,} parameters, above most_parameters={self.most_parameters:,}; raise the "
                "limit"
            )
        for each in progress["growths"]:
            self._widen(each["factor"], each["seed"], each["way"])
        for network, part in (self.average, "average"), (self.model, "model"):
            if self._shard is not None:
                for name, own in itertools.chain(network.named_parameters(), network.named_buffers()):
                    if name in state[part]:
                        sharding.fill(own.detach(), state[part][name])
            elif part in state:
                network.load_state_dict(state[part])
        for optimizer, memory in zip(self._optimizers, state.get("optimizers", ()), strict=False):
            optimizer.load_state_dict(memory)
            for parameter, moments in list(optimizer.state.items()):
                optimizer.state[parameter] = placed_moments(moments, parameter)
        vars(self).update(progress)
        if before is not None and self._shard is not None:
            self._put_in_parts(before)
        self._before = before
        self._stepped = math.nan
        if state["settings"]["most_parameters"] != self.most_parameters and self._cooling is None:
            self._look_at = 0.0  # what else ended growth ends it again
            self._next_factor()
        if self._log is not None:
            self._log.resumed = state["log"]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "esper.AnytimeGrowth cannot be copied or pickled, as its optimizer would not know the copy; make another one, and "
            "give it growth.state_dict()"
        )

    @torch.no_grad()
    def _average(self, own: list[Tensor], weight: float) -> None:
        """Move the average towards the network, which has these parameters."""
        mine: list[Tensor] = list(self.average.parameters())
        if self._shard is not None:
            mine, own = [sharding.own_part(each) for each in mine], [sharding.own_part(each) for each in own]
        torch._foreach_lerp_(mine, own, weight)
        for averaged, buffer in zip(self.average.buffers(), self.model.buffers(), strict=True):
            averaged.copy_(buffer)

    @torch.no_grad()
    def _guard(self) -> bool:
        """Keep the network as it is if it is finite, or else restore the last one that was kept; return which.

        InputError if none was.
        """
        self._reshard()
        own = [each for network in (self.model, self.average) for each in (*network.parameters(), *network.buffers())]
        memories = [each.state for each in self._optimizers]
        moments = [
            each.sum(dtype=torch.float32)
            for part in self.model.modules()
            if isinstance(part, _NormBase)
            for each in (part.running_mean, part.running_var)
            if each is not None
        ]
        finite = bool(torch.stack([total(self.model).float(), *moments]).isfinite().all())
        if self._ranks.together:
            finite = self._ranks.agreed(finite)  # moments of norms are those of a process
        if finite:
            remembered = [{key: copy.deepcopy(value) for key, value in memory.items()} for memory in memories]
            self._kept = self.steps, [each.detach().clone() for each in own], remembered
            return True
        if self._kept is None:
            raise InputError(
                f"parameters or moments of {self._name} are not finite after step {self.steps:,}, the first "
                "that growth looks at; begin again with finite weights and inputs, or a smaller rate"
            )
        step, tensors, remembered = self._kept
        for mine, value in zip(own, tensors, strict=True):
            mine.copy_(value)
        for memory, values in zip(memories, remembered, strict=True):
            memory.clear()
            memory.update({key: copy.deepcopy(value) for key, value in values.items()})
        self.rollbacks.append({"step": self.steps, "restored": step})
        warn(
            f"parameters or moments of norms are not finite after step {self.steps:,}; the network, its average and the "
            f"optimizer are those of step {step:,} again",
            GrowthWarning,
        )
        if self._log is not None and self._log.begun:
            self._log.hub.emit(
                RollbackRow(
                    episode=0,
                    step=self.steps,
                    env=0,
                    twin=False,
                    reason="parameter",
                    metric=None,
                    loss=None,
                    pruned=(),
                    slot_stages=(),
                )
            )
        return False

    def _settings(self) -> dict[str, Any]:
        names = ("ratio", "cost", "factor", "most_parameters", "warmup", "rate_power", "fresh", "seed")
        sizes = self.sizes and list(self.sizes)
        return {"probe": self._probe is not None, **{name: getattr(self, name) for name in names}, "sizes": sizes}

    def _write(self, log: SizeLog, seconds: float | None) -> None:
        """Write a row, if the network grew, its loss was looked at, or the compute has risen enough since the last one."""
        if not log.begun:
            device, task = next(self.model.parameters()).device, self._name
            log.begin(device, self._settings(), task=task, seed=self.seed, host_param_counts=[self._first])
        if seconds is None and self._loss is None and self._compute < LOOK * log.noted:
            return
        log.noted = self._compute
        growth: dict[str, Any] = {} if seconds is None else self.growths[-1]
        log.hub.emit(
            SizeRow(
                step=self.steps,
                seen=self.seen,
                params=self.parameters,
                loss=self._loss,
                widths=growth.get("widths", {}),
                seconds=None if seconds is None else round(seconds, 4),
                why=growth.get("why", self.why),
            )
        )

    def _widen(self, factor: int, seed: int, way: Way | None) -> dict[str, list[int]]:
        settings: dict[str, Any] = {"example": self._example, "seed": seed, "ways": [way] if way else WAYS}
        if self._shard is None:
            found = widen(self.model, factor, optimizer=self._optimizers, ema=self.average, **settings)
        else:
            model, average = self._whole(self.model), self._whole(self.average)
            before = dict(model.named_parameters())
            found = widen(model, factor, ema=average, **settings)
            self._take(model, average, [name for name, own in model.named_parameters() if before[name] is own])
        self._kept = None  # it is of another size
        return {layer: list(widths) for layer, widths in found.items()}

    def _whole(self, network: M) -> M:
        """Return a copy of the network or of an average as a plain module; every process calls this where it is in parts."""
        if self._shard is None:
            return copied(network)
        self._reshard()
        whole = sharding.gather_into(self._hollow[network], network)
        self._ranks.spread(whole.buffers())
        return whole  # type: ignore[return-value]

    def _reshard(self) -> None:
        """Let every parameter be the part that the optimizer knows, also behind an evaluation."""
        if self._shard is not None:
            sharding.reshard(self.model)
            sharding.reshard(self.average)

    def _put_in_parts(self, network: nn.Module) -> None:
        """Shard a plain network in place. InputError if `shard` does something else."""
        assert self._shard is not None, "there is a function that shards"
        self._hollow[network] = sharding.hollow(network)
        result = self._shard(network)
        if not sharding.is_sharded(network) or not (result is None or result is network):
            raise InputError(
                f"shard leaves the {self._name} whole, or returns another module; let it call fully_shard on the network that it "
                "is given, in place, and compile it by its method `compile`"
            )
        sharding.check_sharding(network, self._ranks.size)

    def _take(self, model: nn.Module, average: nn.Module, same: Sequence[str]) -> None:
        """Shard a plain network and its average, in place, and train them from now on.

        same: the parameters that are as they were, of which the optimizer remembers what it did.
        """
        outgrown, before = self.model, dict(self.model.named_parameters())
        self._put_in_parts(model)
        self._put_in_parts(average)
        after = dict(model.named_parameters())
        if tied := [name for name in after if name not in before]:
            raise InputError(
                f"shard takes tied parameters apart, as {tied[0]!r} is one of its own now; leave the modules that share it to "
                "one call of fully_shard, as that on the whole network"
            )
        moments = [
            (own, after[name], own.state[before[name]])
            for own in self._optimizers
            for name in same
            if before[name] in own.state
        ]
        follow(self._optimizers, before, after)
        for own, parameter, memory in moments:
            own.state[parameter] = placed_moments(memory, parameter)
        self.model, self.average = model, average
        if outgrown is not model:  # a loop that goes on with it would train nothing
            outgrown.register_forward_pre_hook(partial(_refuse_outgrown, self._name), prepend=True)

    @property
    def _multiple(self) -> int:
        """What the first widths were multiplied by so far."""
        return math.prod(each["factor"] for each in self.growths)

    def _next_factor(self, ahead: int = 1) -> int:
        """Return by how much the next growth multiplies the widths; 1 where `sizes` has ended, which `why` then says.

        ahead: what growths that are decided, but not done, multiply them by.
        """
        if self.sizes is None:
            return self.factor
        now = self._multiple * ahead
        factor = next((size // now for size in self.sizes if size > now), 1)
        if factor == 1:
            self._ended(f"sizes ends with {now} times the first widths")
        return factor

    def _copied(self, network: nn.Module, factor: int) -> tuple[nn.Module, Way | None, str]:
        """Return a copy of a network that is so many times as wide, the way to it, and what stands against it in a process."""
        wider, way, problem = self._whole(network), None, ""
        try:
            found = widen(wider, factor, example=self._example, seed=self.seed + len(self.growths))
        except Exception as error:
            problem = _refusal(error)
        else:
            way = found.way
            for layer, reason in found.left_out.items():
                problem = problem or f"the features of {layer!r} would stay as they are: {reason}"
        size = count(wider)
        if self.most_parameters is not None and size > self.most_parameters:
            problem = f"{size:,} parameters would exceed most_parameters={self.most_parameters:,}"
        return wider, self._ranks.from_first((way,))[0], self._of_any(problem)

    def _of_any(self, problem: str) -> str:
        """Return the first problem that a process has; '' where none has one."""
        return next(filter(None, self._ranks.from_each(problem)), "")

    def _ended(self, why: str) -> bool:
        """Leave the network as large as it is from now on, if anything stands against a wider one; return whether it does."""
        if why:
            self.why, self._look_at = why, math.inf
        return bool(why)

    def _measured(self) -> float:
        """Return the loss of the averaged network on the probe."""
        assert self._probe is not None, "there is a probe"
        with undisturbed(self.average):
            runs = self._ranks.first or self._ranks.together
            loss = float(self._probe.see(self.average)[0].mean()) if runs else None
        self._reshard()
        loss = self._ranks.from_first(loss)
        self._loss, self._last_loss = (loss if math.isfinite(loss) else None), loss
        if loss < self._loss_before:
            self._before = None
        own = (self.parameters, loss, self.steps, self._compute)
        if self._loss is not None and (not self._lowest or self._lowest[-1][0] != own[0] or loss < self._lowest[-1][1]):
            self._lowest = [*(each for each in self._lowest if each[0] != own[0]), own]
        return loss

    def _look(self) -> bool:
        """Measure the loss on the probe, if the compute has risen enough; return whether it is finite, above 0 and recorded."""
        if self.steps <= self.warmup:
            return False
        now = math.log(self._compute)
        if self._looked and now < math.log(self._looked) + math.log(LOOK):
            return False
        self._looked, loss = self._compute, self._measured()
        if not 0 < loss < math.inf:
            if self._by_slope and self._look_at < math.inf:
                self.why = f"the loss on the probe is {loss}"
            return False
        self._curve = [each for each in self._curve if each[0] >= now - math.log(LONG)] + [(now, math.log(loss))]
        return True

    def _bent(self) -> str:
        """Return how much more slowly the loss on the probe falls than it did; '' if it does not, as `why` says then."""
        settled = max(EARLY * self.warmup, 1)
        if self.steps <= settled:
            self._grown_at = self._compute
            self.why = f"the first {counted(settled, 'step')} say little of how the loss falls"
        if self.seen < self._look_at or not self._look():
            return ""
        now = self._curve[-1][0]
        first = now - math.log(LONG)
        compute, losses = np.array(self._curve).T
        late = compute >= now - math.log(SHORT)
        if self._compute < APART * self._grown_at or late.sum() < 3:
            since = "at the last growth" if self.growths else f"of the first {counted(settled, 'step')}"
            self.why = f"the next growth waits until the compute is {APART:g} times that {since}"
            return ""
        slope, before = (float(np.polyfit(compute[each], losses[each], 1)[0]) for each in (late, compute >= first))
        self.why = (
            f"the loss on the probe went as compute^{slope:.2f} while the compute doubled, and as compute^{before:.2f} while it "
            f"rose by a factor of {LONG:g}, so it does not yet fall more slowly than before"
        )
        return self.why.replace("does not yet fall", "falls") if slope > BEND * before else ""

    def _grow(self, due: str) -> bool:
        """Widen the network, unless something stands against it, which `why` then says."""
        before, measured, way = self.parameters, math.inf, None
        if not self._guard():  # what is not finite computes nothing by which a wider network could be compared
            return False
        if not self._starts:
            _, way, problem = self._copied(self.model, self._next_factor())
            if self._ended(problem):
                return False
        if self._probe is not None:
            measured = self._measured()
            if not _is_lower(measured, self._loss_before):
                self.why = (
                    f"the loss on the probe is {measured:.4g}, and was {self._loss_before:.4g} at the last growth"
                )
                self._look_at = AGAIN * self.seen
                return False
        seed, problem = self.seed + len(self.growths), ""
        if self._starts:
            plans: Iterable[_GrowthPlan] = self._first_plans()
        else:  # how much slower the growth behind this one is has to be measured anew
            plans, self._slower = [_GrowthPlan(self._next_factor(), self._slower, way, due)], None
        before_growth = None
        if self.fresh and self._probe is not None:  # an average in parts stays as it is, as another one takes its place
            before_growth = copied(self.average) if self._shard is None else self.average
        for plan in plans:
            try:
                widths = self._widen(plan.factor, seed, plan.way)
            except Exception as error:
                if self._ranks.size > 1:  # the others are wider now
                    raise
                problem = _refusal(error)
                self._slower, self._look_at = None, 0.0
            else:
                break
        else:
            self._ended(problem)
            return False
        self._before = before_growth
        if self.fresh:
            drawn = _drawn_anew(self._whole(self.model), seed)
            with torch.no_grad():
                for name, own in self.model.named_parameters():  # `average` keeps its own
                    if own.requires_grad and name in drawn:
                        own.lerp_(sharding.like(self._scales[name] * drawn[name], own), self.fresh)
        self._loss_before, self._since, self._grown_at = measured, 0, self._compute
        sizes = {"before": before, "parameters": self.parameters, "widths": widths}
        self.growths.append({"step": self.steps, "seen": self.seen, "seed": seed, **sizes, **plan._asdict()})
        self._next_factor()
        self._guard()
        return True

    @property
    def _starts(self) -> bool:
        """Whether the training begins with a size that is still to be found."""
        return self.cost == "seconds" and not self.start

    def _timed(self, targets: Tensor | int) -> bool:
        """Return whether it is known how much slower a step becomes by the next growth; measure it if the time has come.

        Before the first size is found, return whether the seconds of a step of the loop are known.
        """
        if isinstance(targets, Tensor) and targets.dim():
            self._rows = max(self._rows, len(targets))
        if self._slower is not None:
            return True
        if math.isnan(self._beside):
            device = next(self.model.parameters()).device
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # else a step lasts as long as its work takes to be given to the device
            now = time.perf_counter()
            self._shortest = min(self._shortest, now - self._stepped if self._stepped > 0 else math.inf)
            self._stepped = now
            if self.steps <= SETTLED or self._shortest == math.inf:
                self.why = f"the seconds of a step are known after {counted(SETTLED + 1, 'step')}"
                return False
        shape = next((each.shape for each in tensors(self._example)), ())
        if self._rows and self._rows not in itertools.accumulate(shape, operator.mul):
            raise InputError(
                f"example has the shape {tuple(shape)}, and batches of the loop have {self._rows} targets; with "
                "cost='seconds', give a batch of the loop as example, so that the seconds measured are those of the loop"
            )
        if self._starts:
            return True
        if not self._guard():
            return False
        wider, _, problem = self._copied(self.model, self._next_factor())
        if self._ended(problem):
            return False
        try:
            own, other = self._time(copied(self.model), wider)
        except MemoryError:
            return False
        self._note_slower(other / own, count(wider) / self.parameters)
        return True

    def _first_plans(self) -> Iterator[_GrowthPlan]:
        """Find the size with which the training begins, as `start` says; yield the growth to it, and those to smaller sizes for
        where it cannot be.

        Copies are made wider and timed, so that the network itself does not pass through each of these sizes.
        """
        first, parameters = copied(self.model), [self.parameters]

        def larger() -> Iterator[tuple[int, Callable[[], list[float]]]]:
            network, size = first, 1
            while (factor := self._next_factor(size)) > 1:
                network, _, problem = self._copied(network, factor)
                if self._ended(problem):
                    return
                size *= factor
                parameters.append(count(network))
                yield size, partial(self._time, first, network)

        knee = find_knee(1, larger(), "times the first widths")
        sizes, seconds, at = knee.sizes, knee.seconds, knee.sizes.index(knee.size)
        self.start = self._ranks.from_first(str(knee))
        if at + 1 < len(sizes):
            self._note_slower(seconds[at + 1] / seconds[at], parameters[at + 1] / parameters[at])
        for place in range(at, 0, -1):
            _, way, problem = self._copied(self.model, sizes[place])
            if problem:
                self._slower, self._look_at = None, 0.0
            else:
                yield _GrowthPlan(sizes[place], max(seconds[place] / seconds[0], 1.0), way, self.start)

    def _time(self, network: nn.Module, wider: nn.Module) -> list[float]:
        """Return the seconds of a step of a network and of a wider one, timed in turn.

        MemoryError, of which `why` has the reason, if the wider one does not fit into the memory of a process.
        """
        passes, problem = [0.0, 0.0], ""
        try:
            passes = self._seconds(network, wider)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            problem = "a step of the wider network does not fit into the memory"
        if self._ended(self._of_any(problem)):
            raise MemoryError(self.why)
        passes, shortest = self._ranks.from_first((passes, self._shortest))
        if math.isnan(self._beside):
            self._beside = max(shortest - passes[0], 0.0)
        return [self._beside + each for each in passes]

    def _note_slower(self, slower: float, larger: float) -> None:
        """Note by how much the next growth multiplies the seconds of a step, where it multiplies the parameters by so much."""
        self._slower = max(slower, 1.0)
        self._elasticity = min(math.log(self._slower) / math.log(larger), 1.0)

    def _seconds(self, *networks: nn.Module) -> list[float]:
        """Return the seconds of a forward and backward pass on the example, for each network; several take turns."""

        def run(network: nn.Module) -> None:
            parts = [part.float().sum() for part in floats(call(network, self._example)) if part.requires_grad]
            torch.stack(parts).sum().backward()

        return shortest([partial(run, network) for network in networks], next(networks[0].parameters()).device)

    def _scale_rates(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        later = math.prod(each["factor"] for each in self.growths if each["step"] > BEGINNING)
        scale = later**-self.rate_power * min(1.0, (self._since + 1) / (self.warmup + 1))
        if self._cooling is not None:
            begun, length = self._cooling
            scale *= max(begun + length - self.steps, 0) / length
        self._restore_rates(optimizer)  # those of a step that raised
        self._rates[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * scale

    def _restore_rates(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates.pop(id(optimizer), []), strict=False):
            group["lr"] = rate


def _is_lower(loss: float, before: float) -> bool:
    """Return whether a loss has fallen by `WORTH`."""
    return loss < before - WORTH * abs(before) if math.isfinite(before) else loss < before


def _refuse_outgrown(name: str, *_: Any) -> None:
    """Raise InputError: the loop runs a sharded network in whose place there is a wider one."""
    raise InputError(
        f"this {name} is trained no more, as there is a wider one in its place; run growth.model, which is another network "
        "behind each growth"
    )


def _drawn_anew(drawn: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return the parameters of all layers with `reset_parameters` as these draw them, in place. InputError if one fails."""
    found = {}
    with drawn_with(seed):
        for path, module in drawn.named_modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                with in_words(f"reset_parameters of {path or 'the model'!r} fails", "correct it, or give fresh=0"):
                    reset()
                found.update(module.named_parameters(path, recurse=False))
    return {name: value.detach() for name, value in found.items()}


def _first_scales(model: nn.Module, seed: int) -> dict[str, float]:
    """Return the standard deviation of each first weight over that of a draw by its layer; 1 if that has one value, as in a norm.

    A model may draw its weights on another scale than its layers would.
    """
    first, scales = dict(model.named_parameters()), {}
    for name, drawn in _drawn_anew(copied(model), seed).items():
        if name in first:  # a tied weight has one name of several
            own, other = (float(each.detach().float().std(correction=0)) for each in (first[name], drawn))
            scales[name] = own / other if other else 1.0
    return scales


def _check_sizes(sizes: Any, factor: int) -> None:
    """Raise InputError if a network cannot pass through these sizes."""
    given = sizes if isinstance(sizes, list | tuple) else []
    if not given or not all(is_number(size, int) for size in given):
        raise InputError(f"sizes is {sizes!r}; give a list of whole numbers, as [1, 2, 4]")
    if factor != 2:
        raise InputError(f"factor={factor} is given beside sizes={given}; leave factor out")
    if given[0] != 1:
        raise InputError(
            f"sizes begins with {given[0]}; give multiples of the widths of the model, so that the first is 1, as [1, 2, 4]"
        )
    for size, wider in itertools.pairwise(given):
        if wider <= size or wider % size:
            raise InputError(
                f"sizes has {wider} behind {size}; give a larger whole multiple of {size}, as layers can only be multiplied"
            )


def _refusal(error: Exception) -> str:
    """Return why a network cannot become wider. Raises an error that says something else."""
    if is_out_of_memory(error):
        return "the wider network does not fit into the memory"
    if isinstance(error, InputError):
        return str(error)
    raise error
