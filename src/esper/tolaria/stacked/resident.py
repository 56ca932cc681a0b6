"""The data of a population on its device: train splits, and the examples that rows are measured on. R rows."""

from collections.abc import Sequence

import numpy as np
import torch

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.host import check_host
from esper.leyline.config.tree import Config
from esper.leyline.data.batches import Batch, picked
from esper.leyline.data.duplicates import example_digests
from esper.leyline.data.task import SENSED, AnyTask, Instance, Mixture, Split, finite, nonfinite
from esper.leyline.errors import InputError
from esper.tolaria.measure.bounds import bounds
from esper.tolaria.measure.certifying import set_aside
from esper.tolaria.population import Indices
from esper.tolaria.stacked.data import RowExamples, SharedBatchIterator, stack_splits


class ResidentData:
    """The problems of R rows, on the device. A problem that several instances share is held once.

    instance (R,): key of the instance of each row. problems: the distinct ones. feed: batches of the train splits. fit,
    probe: examples for the sensors and the probe. fresh: examples for certified keeps, None without them. set_aside: for
    each row, digests (N,) of its fresh examples. validation: examples for early stopping, None without it. bounds (R, 2):
    metric on the probe split of the best constant prediction, and of the perfect prediction.
    """

    def __init__(
        self, task: AnyTask, config: Config, instance: Indices, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Raise InputError if a split is not finite, or a host does not run on it."""
        self.task, self.config, self.device, self.dtype = task, config, device, dtype
        self.instance = instance
        keys, which = np.unique(instance, return_inverse=True)
        problems: dict[int, Instance] = {}  # by the first key of each problem
        self.problem_of: list[int] = []  # for each instance, in the order of their keys
        for name in keys.tolist():
            problem = task.instance(name)
            same = next((i for i, known in enumerate(problems.values()) if _is_one(known, problem)), None)
            if same is None:
                same, problems[name] = len(problems), problem
            self.problem_of.append(same)
        self.problems = [self._checked(name, problem) for name, problem in problems.items()]
        row = np.array(self.problem_of)[which]
        pixels, scaling = self.problems[0].pixels, self.problems[0].scaling
        assert all(each.pixels == pixels for each in self.problems), "all instances must read bytes in the same way"
        assert all(each.scaling is scaling for each in self.problems), "all instances must be scaled in the same way"
        source = self.problems[0].source  # from which training examples are read by batch
        assert source is None or len(self.problems) == 1, "the instances of a mixture are in memory"
        if source is not None and config.data.nonfinite == "skip":
            raise InputError(
                f"data.nonfinite is skip, but {task.name} reads its training examples batch by batch, so those to skip are "
                "not known; leave them out of the Dataset, for example by torch.utils.data.Subset"
            )
        trains = [problem.train for problem in self.problems]
        weighed = [each.weights for each in self.problems if each.weights is not None]
        assert len(weighed) in (0, len(trains)), "either all instances have weights or none"
        inputs, weights = task.inputs, weighed or None
        self.feed = SharedBatchIterator(
            trains,
            row,
            instance,
            config.seed,
            config.data.batch_size,
            inputs,
            device,
            pixels,
            scaling,
            weights,
            dtype,
            source,
        )
        self.fresh, self.set_aside = None, [np.zeros(0, np.int64)] * len(row)
        if config.gates.certify is not None:
            parts = [set_aside(each.probe, config.gates.certify_share, config.seed) for each in self.problems]
            self.problems = [each._replace(probe=probe) for each, (probe, _) in zip(self.problems, parts, strict=True)]
            digests = [example_digests(*fresh).cpu().numpy() for _, fresh in parts]
            self.set_aside = [digests[index] for index in row]
            self.fresh = self.stacked([fresh for _, fresh in parts], row, "probe")
        probes = [problem.probe for problem in self.problems]
        between = [bounds(task.objective, each.probe, each.target_scaling) for each in self.problems]
        self.bounds = np.array(between)[row]
        sensed = slice(SENSED)
        self.fit = self.stacked([Split(picked(each.x, sensed), each.y[sensed]) for each in trains], row, "sensed")
        self.probe = self.stacked(probes, row, "probe")
        self.validation = None
        if config.early_stopping.enabled:
            self.validation = self.stacked([each.validation for each in self.problems], row, "held")

    def few(self, problem: Instance, count: int = 2) -> Batch:
        """Return a few training examples as the hosts of a problem read them."""
        return problem.read(picked(problem.train.x, slice(count)), self.dtype)

    def stacked(self, splits: Sequence[Split], row: Indices, part: str) -> RowExamples:
        """Move splits to the device; row (R,) names the split of each. In a mixture they are padded to the length of `part`."""
        lengths, first = self.task.lengths, self.problems[0]
        length = None
        if lengths is not None:
            length = {"sensed": SENSED, "probe": lengths.probe, "held": lengths.held}[part]
        return stack_splits(splits, row, self.task.inputs, self.device, first.pixels, length, first.scaling, self.dtype)

    def sound(self, splits: Sequence[Split]) -> list[Split]:
        """Return splits to evaluate on, treated as `data.nonfinite` says; what several environments share stays one split.

        Raises InputError if `data.nonfinite` is 'stop' and a value is not finite.
        """
        name = f"a held-out split of {self.task.name}"
        distinct = {(id(split.x), id(split.y)): split for split in splits}
        found = {place: finite(split, name, self.config.data.nonfinite) for place, split in distinct.items()}
        return [found[id(split.x), id(split.y)] for split in splits]

    def validation_splits(self) -> list[Split]:
        """Return the validation split of every environment's instance."""
        which = np.unique(self.instance, return_inverse=True)[1]
        return [self.problems[self.problem_of[index]].validation for index in which[: self.config.envs]]

    def _checked(self, name: int, problem: Instance) -> Instance:
        """Return a problem whose splits are finite and whose host runs on them. Raises InputError if it is not such a problem."""
        of = f"instance {name} of {self.task.name}" if isinstance(self.task, Mixture) else f"task {self.task.name}"
        train, probe, validation = (
            finite(getattr(problem, part), f"the {part} split of {of}", self.config.data.nonfinite)
            for part in ("train", "probe", "validation")
        )
        with drawn_with(0):
            few = self.few(problem._replace(train=train))
            check_host(problem.host(), few, problem.outputs, objective=self.task.objective, y=train.y[:2])
        weights = problem.weights
        if weights is not None and len(train.y) < len(weights):
            weights = weights[~nonfinite(problem.train)]
        return problem._replace(train=train, probe=probe, validation=validation, weights=weights)


def _is_one(known: Instance, other: Instance) -> bool:
    """Whether two instances are one problem: the same host, examples and labels, as objects."""
    splits = zip(
        (known.train, known.probe, known.validation), (other.train, other.probe, other.validation), strict=True
    )
    return known.host is other.host and all(a.x is b.x and a.y is b.y for a, b in splits)
