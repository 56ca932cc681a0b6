"""Offer scikit-learn estimators whose network starts small and grows while that helps on examples that are held back."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from esper.kasmina.blueprints import drawn_with
from esper.leyline.config.arguments import check_integer, is_number
from esper.leyline.messages import InputError, counted
from esper.runs.live.anytime import AnytimeGrowth
from esper.runs.live.knee import Knee, find_knee, shortest
from esper.tolaria.live.resize import check_free, check_learning, widen

LOOK = 50
"""Steps of the optimizer between two looks at the examples that are held back."""
MOST_HELD_OUT = 10_000
"""Examples that are held back at most."""
DECAY = 0.99
"""Of the moving average of the weights, by step: the network that is measured and returned."""
WORTH = 0.01
"""Least share by which the loss must have fallen since the network grew last, for it to grow again."""
BY_HEART = 0.1
"""Share by which the loss on held back examples may be above that on as many training examples, for the network to grow."""
_CHUNK = 8192  # examples of a forward pass

Learner = tuple[nn.Sequential, torch.optim.Optimizer, AveragedModel]
"""A network, its optimizer, and its moving average."""


class Look(NamedTuple):
    """Records what one look at the loss found.

    Attributes:
        steps (int): steps of the optimizer so far
        units (int): of each hidden layer, until now
        loss (float): mean over the examples that are held back
    """

    steps: int
    units: int
    loss: float


@dataclass(kw_only=True, eq=False, repr=False)
class _Growing(BaseEstimator):
    """Holds what both estimators share; the docstrings of these say what the parameters are."""

    layers: int = 2
    units: int = 16
    start: Literal["knee"] | None = None
    factor: float = 4.0
    most_units: int = 256
    rate: float = 3e-3
    batch: int = 64
    held_out: float = 0.15
    patience: int = 12
    most_steps: int = 20_000
    plan: Literal["anytime"] | None = None
    random_state: Any = None

    @torch.enable_grad()
    def _fit_network(self, x: NDArray[Any], target: Tensor, outputs: int, loss: nn.Module, strata: Any) -> None:
        """Train and grow. target (n, ...) is what `loss` takes; strata (n,) classes of equal shares on both sides, or None."""
        self._check()
        check_learning("fit")
        random = check_random_state(self.random_state)
        key = int(random.randint(2**31 - 1))
        train, held = _divided(len(x), self.held_out, strata, key)
        self.scaler_ = StandardScaler().fit(x[train.numpy()])
        inputs = self._standardized(x)
        start = int(self.units)
        network, optimizer, moving = begun = self._begun(x.shape[1], start, outputs, key)
        knee = None
        if self.start is not None:
            some = train[: self.batch]
            knee = self._timed(begun, inputs[some], target[some], loss, key)
            start = knee.size
            network, optimizer, moving = self._begun(x.shape[1], start, outputs, key)
        growth: AnytimeGrowth | None = None
        if self.plan is not None:  # becomes wider when the loss on what is held back begins to fall more slowly
            some, probe, sizes = inputs[held][:2], [(inputs[held], target[held])], [1]
            while start * sizes[-1] * self.factor <= self.most_units:
                sizes.append(sizes[-1] * int(self.factor))
            growth = AnytimeGrowth(network, optimizer, example=some, sizes=sizes, probe=probe, loss=loss, seed=key)
        average = moving.module if growth is None else growth.average
        batches = _batches(train, min(self.batch, len(train)), key)
        steps, since_best, looks, why = 0, 0, list[Look](), ""
        best = at_growth = math.inf
        kept: nn.Module | None = None
        best_look = Look(0, start, math.inf)
        self.stopped_ = f"after the most steps that were allowed, {self.most_steps:,}"
        while steps < self.most_steps:
            for _ in range(min(LOOK, self.most_steps - steps)):
                batch = next(batches)
                loss(network(inputs[batch]), target[batch]).backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                if growth is None:
                    moving.update_parameters(network)
                elif growth.step(len(batch)):
                    since_best = 0
            found = _mean_loss(average, inputs[held], target[held], loss)
            units = int(network[0].out_features)  # type: ignore[arg-type]
            looks.append(Look(steps, units, found))
            if found < best * (1 - WORTH / 10):
                best, since_best, kept, best_look = found, 0, copy.deepcopy(average), looks[-1]
            else:
                since_best += 1
            seen = train[: len(held)]  # as many that it trains on
            if since_best >= self.patience or not math.isfinite(found):
                self.stopped_ = (
                    f"after {steps:,} steps, because the loss on the {counted(len(held), 'example')} that are held back had not "
                    f"fallen in {counted(since_best, 'look')}"
                )
                if growth is not None and not growth.growths and growth.sizes != (1,):
                    why = (
                        "the loss on examples that are held back stopped falling before the network was due to be wider"
                    )
                    if by_heart := _by_heart(found, _mean_loss(average, inputs[seen], target[seen], loss)):
                        why = f"no larger size was tried, as {why}, and {by_heart}"
                break
            if math.ceil(units * self.factor) > self.most_units:
                why = f"more would exceed most_units={self.most_units:,}"
            elif growth is not None:
                why = growth.why
            elif best > at_growth * (1 - WORTH):
                why = f"the loss had fallen by less than {WORTH:.0%} since it has these"
            elif by_heart := _by_heart(found, _mean_loss(average, inputs[seen], target[seen], loss)):
                why = by_heart
            elif steps >= self.most_steps:
                why = "the training ended then"
            else:
                widen(network, self.factor, example=inputs[held][:2], optimizer=optimizer, ema=moving, seed=key + steps)
                at_growth = best
        if kept is None:
            raise InputError(
                f"the loss on the examples that are held back is {found}; give a smaller rate than {self.rate:g}, or finite data"
            )
        self.network_, self.looks_, self.n_iter_ = kept, looks, steps
        self.units_ = int(kept.get_submodule("0").out_features)  # type: ignore[arg-type]
        path = " -> ".join(f"{size:,}" for size in dict.fromkeys(look.units for look in looks))
        if any(look.units > best_look.units for look in looks):
            why = f"more than {best_look.units:,} did not lower the loss"
        self.growth_ = (
            f"{counted(self.layers, 'hidden layer')} of {path} units; the network of step {best_look.steps:,} has "
            f"{best_look.units:,}: {why}; ended {self.stopped_}{f'; {knee}' * (knee is not None)}"
        )

    def _begun(self, inputs: int, units: int, outputs: int, key: int) -> Learner:
        """Build a network with its optimizer and its moving average. InputError if it does not fit into memory."""
        numbers = (inputs + 1) * units + (self.layers - 1) * (units + 1) * units + (units + 1) * outputs
        # A number is a weight, its gradient, two moments of AdamW and its moving average, of four bytes each.
        what = f"training a network with units={units:,} in {counted(self.layers, 'layer')}"
        check_free(torch.device("cpu"), 5 * 4 * int(numbers), what, "give fewer units or layers")
        with drawn_with(key):
            parts: list[nn.Module] = []
            for reads in (inputs, *(units,) * (self.layers - 1)):
                parts += [nn.Linear(reads, units), nn.ReLU()]
            network = nn.Sequential(*parts, nn.Linear(units, outputs)).float()
        optimizer = torch.optim.AdamW(network.parameters(), self.rate)
        return network, optimizer, AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def _timed(self, smallest: Learner, x: Tensor, y: Tensor, loss: nn.Module, key: int) -> Knee:
        """Measure steps on a batch, in turn with those of the smallest network, up to the first size that takes longer."""

        def step(network: nn.Module, optimizer: torch.optim.Optimizer, moving: AveragedModel) -> None:
            loss(network(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            moving.update_parameters(network)

        def larger() -> Iterator[tuple[int, Callable[[], list[float]]]]:
            outputs, units = len(smallest[0].get_parameter(f"{2 * self.layers}.bias")), int(self.units)
            while (units := math.ceil(units * self.factor)) <= self.most_units:
                try:
                    learner = self._begun(x.shape[1], units, outputs, key)
                except InputError:  # it does not fit into the memory
                    return
                yield units, partial(shortest, [partial(step, *smallest), partial(step, *learner)], x.device)

        return find_knee(int(self.units), larger(), "units")

    def _outputs(self, X: ArrayLike) -> NDArray[np.float32]:
        """Compute (n, outputs) of the network for X (n, features)."""
        check_is_fitted(self)
        inputs = self._standardized(validate_data(self, X, reset=False))
        with torch.no_grad():
            return torch.cat([self.network_(part) for part in inputs.split(_CHUNK)]).numpy()

    def _standardized(self, x: NDArray[Any]) -> Tensor:
        inputs = torch.tensor(self.scaler_.transform(x), dtype=torch.float32)
        if not bool(inputs.isfinite().all()):
            row = int((~inputs.isfinite()).any(1).nonzero()[0])
            raise InputError(
                f"row {row} of X has a value that float32 cannot hold when it is standardized; leave it out"
            )
        return inputs

    def _check(self) -> None:
        """Raise InputError if a parameter cannot be."""
        for name in ("layers", "units", "most_units", "batch", "patience", "most_steps"):
            check_integer(getattr(self, name), name, kinds=int | np.integer)
        if self.start not in (None, "knee"):
            raise InputError(f"start is {self.start!r}; give None, to start with `units`, or 'knee'")
        if self.plan not in (None, "anytime"):
            raise InputError(f"plan is {self.plan!r}; give None or 'anytime'")
        if self.most_units < self.units:
            raise InputError(f"most_units is {self.most_units}, below units, {self.units}; give at least as many")
        for name, low, high in (("factor", 1.0, math.inf), ("rate", 0.0, math.inf), ("held_out", 0.0, 1.0)):
            value = getattr(self, name)
            if not is_number(value, int | float | np.number) or not low < value < high:
                raise InputError(
                    f"{name} is {value!r}; give a number above {low:g}" + f" and below {high:g}" * (high < math.inf)
                )
        if self.plan is not None and self.factor != int(self.factor):
            raise InputError(
                f"factor is {self.factor!r}, and plan='anytime' takes whole factors alone; give a whole number"
            )


class GrowingClassifier(ClassifierMixin, _Growing):
    """Classifies with a network that finds its size: it starts small and grows while that helps on examples that are held back.

        model = esper.GrowingClassifier().fit(x, y)
        model.score(x_test, y_test), model.units_, model.growth_

    The network has hidden layers of equal width with ReLU, on standardized inputs. AdamW trains it at a constant rate; after
    every 50 steps the moving average of its weights is measured on the examples that are held back. Where the loss has fallen by
    1 % since the last growth, and is at most a tenth above that on as many training examples, every hidden layer gets `factor`
    times its units (`esper.widen`, which changes no output). Training ends when `patience` looks have found no lower loss; the
    network with the lowest is kept.

    With plan='anytime' it grows as `esper.AnytimeGrowth` does, whose probe are the examples that are held back: when the loss on
    them begins to fall more slowly, with its average of the weights and its rates by size. Where that loss stops falling before
    the first growth, and the network learns by heart, `growth_` says that no larger size was tried, and why.

    Args:
        layers: hidden layers
        units: of each hidden layer at first
        start: None to start with `units`. 'knee' times a step of the training with `units`, with `factor` times as many, and so
            on up to `most_units`, and starts with the largest of these whose step takes at most 1.2 times the seconds of the
            smallest, as `growth_` says. Two fits with one random_state are then equal only where they start alike.
        factor: by which the units of each layer grow
        most_units: of each hidden layer
        rate: learning rate
        batch: examples of a step
        held_out: share of the examples that are held back, at most 10,000
        patience: looks without a lower loss after which training ends
        most_steps: steps of the optimizer
        plan: when it grows: None as soon as the loss has fallen, 'anytime' when the loss falls more slowly than before
        random_state: seed, generator or None, as everywhere in scikit-learn; it decides all that is random here

    Attributes:
        network_ (nn.Sequential): the network, which reads standardized inputs and returns one logit for each class
        units_ (int): units of each of its hidden layers
        growth_ (str): in one sentence which sizes there were, and why it ended with this one
        looks_ (list[Look]): steps, units and loss at every look
        n_iter_ (int): steps that were taken
        classes_, n_features_in_, feature_names_in_: as everywhere in scikit-learn
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> "GrowingClassifier":
        """Train on X (n, features) and the classes y (n,). InputError, a ValueError, if a parameter cannot be."""
        x, labels = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(labels)
        self.classes_, index = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(f"y has one class, {self.classes_[0]!r}; a classifier needs at least two classes")
        self._fit_network(x, torch.from_numpy(index), len(self.classes_), nn.CrossEntropyLoss(), index)
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return (n, classes) probabilities for X (n, features)."""
        return torch.from_numpy(self._outputs(X)).double().softmax(1).numpy()

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return (n,) classes for X (n, features)."""
        best = self._outputs(X).argmax(1)  # first: it says where nothing was fitted
        return self.classes_[best]


class GrowingRegressor(RegressorMixin, _Growing):
    """Predicts numbers with a network that finds its size, as that of `GrowingClassifier` does.

        model = esper.GrowingRegressor().fit(x, y)

    Its loss is the squared error of standardized targets, which may be (n,) or (n, outputs). It has the parameters and attributes
    of `GrowingClassifier`, without `classes_`.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> "GrowingRegressor":
        """Train on X (n, features) and y (n,) or (n, outputs). InputError, a ValueError, if a parameter cannot be."""
        x, wanted = validate_data(self, X, y, dtype=np.float64, y_numeric=True, multi_output=True)
        self._flat = wanted.ndim == 1
        targets = wanted.reshape(len(wanted), -1).astype(np.float64)
        self.target_mean_, self.target_scale_ = targets.mean(0), targets.std(0)
        self.target_scale_[self.target_scale_ == 0] = 1.0
        target = torch.tensor((targets - self.target_mean_) / self.target_scale_, dtype=torch.float32)
        self._fit_network(x, target, targets.shape[1], nn.MSELoss(), None)
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return (n,) or (n, outputs) for X (n, features)."""
        outputs: NDArray[np.float64] = self._outputs(X) * self.target_scale_ + self.target_mean_
        return outputs[:, 0] if self._flat else outputs

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _divided(count: int, share: float, strata: Any, key: int) -> tuple[Tensor, Tensor]:
    """Divide (n,) examples into those to train on and those that are held back: their indices, in order."""
    if count < 2:
        raise InputError(
            f"there is {counted(count, 'example')}, n_samples={count}; give at least 2, as some are held back"
        )
    held = max(1, min(round(share * count), MOST_HELD_OUT, count - 1))
    each = np.bincount(strata) if strata is not None else np.zeros(1)
    even = strata is not None and each.min() >= 2 and held >= len(each) and count - held >= len(each)
    parts = train_test_split(np.arange(count), test_size=held, random_state=key, stratify=strata if even else None)
    return torch.from_numpy(np.sort(parts[0])), torch.from_numpy(np.sort(parts[1]))


def _batches(train: Tensor, size: int, key: int) -> Iterator[Tensor]:
    """Yield batches of indices without an end, in a new order each time all were taken."""
    generator = torch.Generator().manual_seed(key)
    while True:
        order = train[torch.randperm(len(train), generator=generator)]
        yield from order[: len(order) // size * size].split(size)


def _by_heart(found: float, known: float) -> str:
    """Say that a network learns by heart, if its loss on examples that are held back is far above that on known ones; or ''."""
    if found <= (1 + BY_HEART) * known:
        return ""
    return f"it learns by heart, as the loss is {found / known - 1:.0%} above that on examples it trains on"


def _mean_loss(network: nn.Module, inputs: Tensor, target: Tensor, loss: nn.Module) -> float:
    with torch.no_grad():
        parts = zip(inputs.split(_CHUNK), target.split(_CHUNK), strict=True)
        return sum(float(loss(network(x), y)) * len(x) for x, y in parts) / len(inputs)
