import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from esper.kasmina.host import SegmentedHost
from esper.leyline.config.tree import build_config
from esper.leyline.data.task import Task
from esper.leyline.lifecycle.slots import SlotSpec
from esper.leyline.messages import DataWarning, InputError
from esper.tasks.hosts import MLP
from esper.tasks.objectives import Classification, Regression
from esper.tasks.own.custom import task_from

N, D = 90, 4
SPLITS = ("train", "probe", "validation", "test")


def tensors() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(N, D, generator=draw), torch.arange(N) % 3


class Pairs(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(D), 0


class Endless(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(D), 0


def mlp(outputs: int = 3) -> MLP:
    return MLP(inputs=D, width=5, hidden=(2,), outputs=outputs)


def same_data(a: Task, b: Task) -> bool:
    return all(
        torch.equal(x, y) and x.dtype == y.dtype
        for name in SPLITS
        for x, y in zip(getattr(a, name), getattr(b, name), strict=True)
    )


def test_a_task_of_ones_own_takes_a_host_of_plain_modules() -> None:
    def host() -> SegmentedHost:
        segments = [nn.Linear(D, 8), nn.Sequential(nn.Linear(8, 2), nn.Tanh(), nn.Linear(2, 8)), nn.Linear(8, 3)]
        return SegmentedHost(segments, [SlotSpec("middle", after=1, width=8)])

    x, y = tensors()
    task = task_from("mine", x, y, host=host, standardize=True)
    assert task.objective == Classification(3)
    assert [len(getattr(task, name).x) for name in SPLITS] == [54, 14, 8, 14]
    assert task.read(task.train.x).mean(0).abs().max() < 1e-6
    assert torch.isin(task.train.x, x).all()  # the splits hold the features as they came


def test_a_dataset_and_its_tensors_give_the_same_task() -> None:
    x, y = tensors()
    plain = task_from("t", x, y, host=mlp())
    assert same_data(plain, task_from("t", TensorDataset(x, y), host=mlp()))
    assert same_data(
        plain, task_from("t", Pairs([(row.numpy(), int(label)) for row, label in zip(x, y, strict=True)]), host=mlp())
    )


def test_arrays_and_lists_give_the_same_task_as_tensors() -> None:
    x, y = tensors()
    plain = task_from("t", x, y, host=mlp())
    assert same_data(plain, task_from("t", x.numpy(), y.numpy(), host=mlp()))
    assert same_data(plain, task_from("t", x.tolist(), y.tolist(), host=mlp()))
    assert same_data(plain, task_from("t", x.numpy().astype(np.float64), y.numpy().astype(np.uint16), host=mlp()))


def test_another_seed_gives_another_split() -> None:
    x, y = tensors()
    assert same_data(task_from("t", x, y, host=mlp(), seed=3), task_from("t", x, y, host=mlp(), seed=3))
    assert not same_data(task_from("t", x, y, host=mlp()), task_from("t", x, y, host=mlp(), seed=3))


def test_floating_point_targets_make_a_regression() -> None:
    x, _ = tensors()
    assert task_from("t", x, x[:, 0], host=mlp(1)).train.y.shape == (54,)
    assert task_from("t", x, x[:, :2].double(), host=mlp(2)).train.y.dtype == torch.float32
    assert task_from("t", x, x[:, :2], host=mlp(2)).objective == Regression(2)


def test_classes_may_be_more_than_the_labels_show() -> None:
    x, y = tensors()
    assert task_from("t", x, y, host=mlp(7), classes=7).objective == Classification(7)


def test_bytes_become_floats_of_the_same_values() -> None:
    x = torch.arange(N * D, dtype=torch.uint8).view(N, D)
    task = task_from("t", x, torch.arange(N) % 3, host=mlp())
    assert task.train.x.dtype == torch.float32
    assert task.train.x.max() > 200


def test_a_float64_tensor_stays_float64_and_its_host_keeps_its_own_dtype() -> None:
    x, y = tensors()
    assert task_from("t", x.double(), y, host=lambda: mlp()().double()).train.x.dtype == torch.float64
    assert task_from("t", x.double(), y, host=mlp()).train.x.dtype == torch.float64

    def mixed() -> SegmentedHost:
        host = mlp()()
        host.segments[1].double()
        return host

    sentence = (
        "the host's segments.0.weight is torch.float32 and its segments.1..* is torch.float64; build it in one dtype"
    )
    with pytest.raises(InputError, match=f"^{sentence}$"):
        task_from("t", x, y, host=mixed)


def test_the_task_does_not_see_later_changes_of_the_data() -> None:
    x, y = tensors()
    task = task_from("t", x, y, host=mlp())
    before = task.train.x.clone()
    x.zero_()
    assert torch.equal(task.train.x, before)


def test_building_a_task_draws_nothing_from_the_callers_generator() -> None:
    x, y = tensors()
    state = torch.random.get_rng_state()
    task_from("t", x, y, host=mlp())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_features_that_need_a_gradient_are_detached() -> None:
    x, y = tensors()
    assert not task_from("t", x.requires_grad_(), y, host=mlp()).train.x.requires_grad


def of(*segments: nn.Module) -> Callable[[], SegmentedHost]:
    return lambda: SegmentedHost(segments, [SlotSpec("middle", after=0, width=8)])


X, Y = tensors()
ONE_HOST = mlp()()


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: task_from("", X, Y, host=mlp()), "the task has no name; give one, as in task('wine', ...)"),
        (lambda: task_from("t", X[0, 0], Y, host=mlp()), "x has shape (); give at least one feature per example"),
        (lambda: task_from("t", X, host=mlp()), "y is missing and x is a Tensor; give both, or a Dataset of"),
        (
            lambda: task_from("t", Stream(), host=mlp()),
            "x is a Stream, an IterableDataset, whose examples have no index",
        ),
        (lambda: task_from("t", Endless(), host=mlp()), "x is an Endless without a length; give it __len__"),
        (lambda: task_from("t", Pairs([]), host=mlp()), "x is a Pairs of length 0; give examples"),
        (lambda: task_from("t", DataLoader(Pairs([1])), host=mlp()), "x is a DataLoader; give its data set, x.dataset"),
        (lambda: task_from("t", Pairs([(X, Y)]), Y, host=mlp()), "x is a Dataset, which contains its own labels"),
        (
            lambda: task_from("t", Pairs([X[0]]), host=mlp()),
            "example 0 of the Dataset is a Tensor, not a pair; give pairs",
        ),
        (
            lambda: task_from("t", Pairs([(X[0], 0), (X[0, :2], 1)]), host=mlp()),
            "example 1 has features of shape (2,) and example 0 of shape (4,); give every example one shape",
        ),
        (
            lambda: task_from("t", Pairs([(X[0], "cat")]), host=mlp()),
            "the label of example 0 of the Dataset is the text 'cat'; give whole numbers from 0 on, and the names "
            "of the classes as classes",
        ),
        (lambda: task_from("t", [[1.0], [1.0, 2.0]], Y, host=mlp()), "x is a list that cannot be read as an array"),
        (lambda: task_from("t", X + 0j, Y, host=mlp()), "x holds complex numbers; give their real and imaginary"),
        (lambda: task_from("t", X, Y[:3], host=mlp()), "x holds 90 examples and y 3; give one label or target"),
        (lambda: task_from("t", X[:0], Y[:0], host=mlp()), "x and y hold no examples; give at least a few dozen"),
        (lambda: task_from("t", X / 0, Y, host=mlp()), "x holds NaN or infinite values, in examples 0, 1, 2"),
        (
            lambda: task_from("t", X, Y - 5, classes=3, host=mlp()),
            "y holds labels below 0 or over 2, in examples 0, 1, 2, 3, 4, ... (90 of",
        ),
        (
            lambda: task_from("t", X, 0 * Y, host=mlp()),
            "y holds the one class 0; give examples of at least two classes",
        ),
        (
            lambda: task_from("t", X, Y + 0.5, classes=3, host=mlp()),
            "classes is 3, but y holds values of dtype float64; give whole numbers from 0 to 2",
        ),
        (lambda: task_from("t", X, 0 * X, host=mlp(4)), "target 0 is the same in all 54 examples of the train split"),
        (lambda: task_from("t", X[:9], Y[:9], host=mlp()), "the validation split would hold 1 of 9 examples"),
        (lambda: task_from("t", X, Y, fractions=(0.7, 0.3), host=mlp()), "fractions is (0.7, 0.3); give four positive"),
        (lambda: task_from("t", X, Y, host=mlp(), menu="affine"), "menu is 'affine'; give a list of blueprint names"),
        (lambda: task_from("t", X, Y, host=mlp(), menu=()), "menu is (); give a list of blueprint names"),
        (lambda: task_from("t", X, Y, host=mlp(), defaults={"step": 3}), "unknown config key 'step'"),
        (
            lambda: task_from("t", X, Y, host=ONE_HOST),
            "host is a SegmentedHost; give a function that returns a fresh one",
        ),
        (
            lambda: task_from("t", X, Y, host=nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))),
            "host is a Sequential; give a function that returns a fresh one, as lambda: nn.Sequential(...)",
        ),
        (lambda: task_from("t", X, Y, host=lambda: ONE_HOST), "the host factory returned the same module twice"),
        (lambda: task_from("t", X, Y, host=lambda: nn.Linear(4, 3)), "the host, a Linear, has no place for a slot"),
        (lambda: task_from(5, X, Y, host=mlp()), "the task's name is 5; give it one in quotes"),
        (
            lambda: task_from("t", X, Y, classes="2", host=mlp()),
            "classes is '2'; give the number of classes as a whole number",
        ),
        (lambda: task_from("t", X, Y, fractions=0.8, host=mlp()), "fractions is 0.8; give four positive numbers"),
        (
            lambda: task_from("t", X, Y, fractions=("a", 0.2, 0.1, 0.1), host=mlp()),
            "fractions is ('a', 0.2, 0.1, 0.1); give four positive numbers",
        ),
        (lambda: task_from("t", X, Y, seed="x", host=mlp()), "seed is 'x'; give a whole number from 0 on"),
        (lambda: task_from("t", X, Y, seed=1.5, host=mlp()), "seed is 1.5; give a whole number from 0 on"),
        (
            lambda: task_from("t", X, Y, standardize="yes", host=mlp()),
            "standardize is 'yes'; give True, False, or 'features'",
        ),
        (lambda: task_from("t", X, Y, menu=5, host=mlp()), "menu is 5; give a list of blueprint names"),
        (
            lambda: task_from("t", X, Y, menu=["affine", "affine"], host=mlp()),
            "menu names the blueprint 'affine' 2 times; name it once",
        ),
        (
            lambda: task_from("t", X, Y, host=lambda width: mlp()()),
            "host is a function that needs width, but it is called without arguments; give a function without, as in "
            "host=lambda: MyHost(width=...)",
        ),
        (
            lambda: task_from("t", X, Y, host=SegmentedHost),
            "host is the class SegmentedHost that needs segments and slots, but it is called without arguments; give a "
            "function without, as in host=lambda: SegmentedHost(segments=..., slots=...)",
        ),
        (
            lambda: task_from("t", X, Y, host=lambda: 1 / 0),
            "the host factory raised an error: ZeroDivisionError: division by zero",
        ),
        (
            lambda: task_from("t", X, Y, host=of(nn.LazyLinear(8), nn.Linear(8, 3))),
            "the host's segments.0.weight is not initialised, because LazyLinear takes its size from its first input",
        ),
        (
            lambda: task_from("t", X, Y, host=of(nn.Linear(4, 8), torch.relu)),
            "segments[1] of a SegmentedHost is a builtin_function_or_method; give an nn.Module",
        ),
        (
            lambda: task_from("t", X, Y, host=of(nn.Linear(4, 8), nn.ReLU)),
            "segments[1] of a SegmentedHost is the class ReLU; give an nn.Module",
        ),
        (lambda: SegmentedHost(3, []), "segments of a SegmentedHost is an int; give a list, as in [nn.Linear(4, 8)"),
        (lambda: SegmentedHost([], ["a"]), "slots[0] of a SegmentedHost is a str; give an esper.SlotSpec"),
        (
            lambda: SegmentedHost([], SlotSpec("a", 0, 1)),
            "slots of a SegmentedHost is a SlotSpec; give a list, as in [esper.SlotSpec(",
        ),
        (
            lambda: task_from("t", X, Y, host=of(nn.Linear(4, 3))),
            "the host has 1 segment; give at least two, because a slot lies between two segments",
        ),
        (
            lambda: task_from("t", X, Y, host=of()),
            "the host has no segments; give at least two, because a slot lies between two segments",
        ),
        (
            lambda: SlotSpec("a", after="0", width=8),
            "slot 'a' is after segment '0'; give the index of a segment, a whole",
        ),
        (
            lambda: SlotSpec("a", after=-1, width=8),
            "slot 'a' is after segment -1; give the index of a segment, a whole",
        ),
        (
            lambda: SlotSpec("a", after=0, width=0),
            "slot 'a' has width 0; give the features of the segment before it, a",
        ),
        (
            lambda: SlotSpec("a", after=0, width=True),
            "slot 'a' has width True; give the features of the segment before",
        ),
        (lambda: SlotSpec("a", after=0, width=8, inner=0), "inner of slot 'a' is 0; give None, or how many modules of"),
        (lambda: SlotSpec("", after=0, width=8), "the name of a slot is ''; give it a name in quotes, as in 'middle'"),
        (
            lambda: task_from("t", X, Y, host=mlp(4)),
            "the host returns 4 numbers per example, but y has 3 classes: 0 (30 examples), 1 (30",
        ),
        (
            lambda: task_from("t", X, ["a", "b", "c"] * 29 + ["c", "c", "B"], host=mlp()),
            "the host returns 3 numbers per example, but y has 4 classes: 'B' (1 example), 'a' (29 examples), 'b' (29 examples), "
            "'c' (31 examples); give the host 4 outputs",
        ),
        (
            lambda: task_from("t", X, X[:, 0] * 3, host=mlp()),
            "the host returns 3 numbers per example, but y holds 1 floating-point target per example (for classes give whole "
            "numbers or text, or kind='classification'); give the host 1 output",
        ),
        (
            lambda: task_from("t", X, Y, host=of(nn.Linear(6, 8), nn.Linear(8, 3))),
            "an example of x has 4 features, but segment 0 of the host takes 6; make the two the same",
        ),
        (
            lambda: task_from("t", X, Y, host=of(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(5, 3)))),
            "segment 1 of the host cannot run on its input: mat1 and mat2",
        ),
        (
            lambda: task_from("t", X, Y, host=of(nn.Linear(4, 8), nn.Sequential(nn.Linear(5, 3)))),
            "segment 0 of the host returns 8 features, but segment 1 of the host takes 5; make the two the same",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(build: Callable[[], Task], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        build()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"host": mlp(), "standardise": True}, "esper.task has no argument 'standardise'; did you mean 'standardize'?"),
        ({"host": mlp(), "qqq": 1}, "esper.task has no argument 'qqq'; it takes name, x, y, host, kind"),
        ({}, "esper.task was given no host; give a function that makes the network to be grown, as host=esper.mlp("),
        ({"name": "t"}, "esper.task: multiple values for argument 'name'"),
    ],
)
def test_a_wrong_argument_is_told_under_the_name_by_which_the_user_calls(arguments: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        task_from("t", X, Y, **arguments)


@pytest.mark.parametrize("last", [nn.Softmax(-1), nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1))])
def test_a_host_of_classes_that_ends_with_a_softmax_is_warned_of(last: nn.Module) -> None:
    with pytest.warns(
        DataWarning, match="the host ends with a Softmax, but the loss, the cross-entropy, takes the softmax"
    ):
        task_from("t", X, Y, host=of(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 3), last)))


def test_a_softmax_before_a_loss_of_ones_own_or_within_the_host_is_nobodys_business() -> None:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        return -output.gather(1, y[:, None])[:, 0].log()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task_from("t", X, Y, host=of(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 3), nn.Softmax(-1))), loss=loss)
        task_from("t", X, Y, host=of(nn.Linear(4, 8), nn.Sequential(nn.Softmax(-1), nn.Linear(8, 3))))


def test_a_class_with_a_single_example_is_warned_of() -> None:
    with pytest.warns(DataWarning, match="^the class 'odd' has a single example, which is in one split alone"):
        task_from("t", X, ["a", "b"] * 44 + ["a", "odd"], host=mlp())


def test_a_tiny_host_of_ones_own_pays_rent_as_a_host_of_a_thousand_parameters_does():
    task = task_from("two", torch.randn(40, 2), torch.arange(40) % 2, host=MLP(2, 4, (2,), 2))
    assert build_config(task.defaults).reward.rent_size == 1000
    assert build_config(task.defaults, {"reward": {"rent_size": 0}}).reward.rent_size == 0


def test_behind_a_narrow_segment_a_task_of_ones_own_plants_a_hidden_layer_unless_told_otherwise():
    task = task_from("two", torch.randn(40, 2), torch.arange(40) % 2, host=MLP(2, 4, (2,), 2))
    assert build_config(task.defaults).heuristic.narrow_blueprints == ("bypass-mlp", "bypass-conv-3x3")
    linear = {"heuristic": {"narrow_blueprints": ["bypass-linear"]}}
    assert build_config(task.defaults, linear).heuristic.narrow_blueprints == ("bypass-linear",)


def test_copies_across_splits_are_one_warning_with_their_number() -> None:
    x, y = tensors()
    with pytest.warns(DataWarning) as told:
        task = task_from("d", x.repeat(2, 1), y.repeat(2), host=mlp())
    (sentence,) = [str(warning.message) for warning in told]
    splits = [getattr(task, name) for name in SPLITS]
    known, copies = {row.numpy().tobytes() for row in splits[0].x}, []
    for split in splits[1:]:
        rows = [row.numpy().tobytes() for row in split.x]
        copies.append(sum(row in known for row in rows))
        known.update(rows)
    assert sentence.startswith(
        f"{sum(copies)} examples of one split are also in an earlier one of train, probe, validation"
    )
    for name, copied, split in zip(("probe", "validation", "test"), copies, splits[1:], strict=True):
        assert f"{copied} of {len(split.y)} in {name}" in sentence


def test_the_same_examples_as_train_and_test_are_warned_of_and_other_labels_of_equal_features_are_not() -> None:
    x, y = tensors()
    parts = dict(zip(("train", "probe", "validation"), torch.arange(len(y)).chunk(3), strict=True))
    same = {name: (x[part], y[part]) for name, part in parts.items()}
    n = len(parts["train"])
    with pytest.warns(DataWarning, match=rf"{n} examples of one split .*: {n} of {n} in test; what"):
        task_from("d", splits=same | {"test": same["train"]}, host=mlp())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task_from("d", splits=same | {"test": (x[:n], (y[:n] + 1) % 3)}, host=mlp())


def test_of_a_stream_the_first_examples_are_compared() -> None:
    data = Pairs(list(zip(torch.randn(700, D), (torch.arange(700) % 3).tolist(), strict=True)))
    parts = {"train": 560, "probe": 40, "validation": 60, "test": 40}
    splits = dict(zip(parts, torch.arange(700).split(list(parts.values())), strict=True))
    twice = Pairs([data[index if index < 600 else index - 600] for index in range(700)])
    with pytest.warns(DataWarning, match=r"of 60 in validation.* \(of train, the first 256 examples were compared\)"):
        task_from("d", twice, classes=3, splits=splits, host=mlp(), stream=True)
