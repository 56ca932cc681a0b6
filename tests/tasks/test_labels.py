"""Test what y may hold: text, categories, truth values and numbers, and what is asked about."""

import inspect
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from esper.leyline.data.task import Task
from esper.leyline.messages import DataWarning, InputError
from esper.tasks.hosts import MLP
from esper.tasks.objectives import Classification, Regression
from esper.tasks.own.custom import task_from

N = 90
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
INDEX = np.arange(N) % 3
NAMES = np.array(["cat", "ant", "dog"])[INDEX]  # sorted: ant, cat, dog
SORTED = np.array([1, 0, 2])[INDEX]


def made(y: Any, outputs: int = 3, **options: Any) -> Task:
    return task_from("t", X, y, host=MLP(inputs=4, width=5, hidden=(2,), outputs=outputs), **options)


def labels_of(task: Task) -> dict[tuple[float, ...], Any]:
    """Return every example's label by its features, over all splits."""
    assert task.classes is not None
    splits = [task.train, task.probe, task.validation, task.test]
    return {
        tuple(x.tolist()): task.classes[index]
        for split in splits
        if split
        for x, index in zip(split.x, split.y, strict=True)
    }


@pytest.mark.parametrize(
    "y",
    [
        NAMES,
        NAMES.tolist(),
        NAMES.astype(object),
        pd.Series(NAMES),
        pd.Series(NAMES).astype("string"),
        pd.Series(NAMES, index=np.arange(N)[::-1]),
        pd.Categorical(NAMES),
        pd.Series(NAMES).astype("category"),
        pd.DataFrame({"animal": NAMES}),
    ],
    ids=["array", "list", "objects", "series", "string", "index", "categorical", "category", "frame"],
)
def test_text_and_categories_are_classes_by_their_names(y: Any) -> None:
    task = made(y)
    assert (task.objective, task.classes) == (Classification(3), ("ant", "cat", "dog"))
    assert labels_of(task) == {tuple(x.tolist()): name for x, name in zip(X, NAMES.tolist(), strict=True)}


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (INDEX, (0, 1, 2)),
        (INDEX + 1, (1, 2, 3)),
        (torch.from_numpy(INDEX * 5 - 5), (-5, 0, 5)),
        ((INDEX * 7).astype(np.uint8), (0, 7, 14)),
        (pd.Series(INDEX, dtype="Int64"), (0, 1, 2)),
    ],
)
def test_whole_numbers_are_classes_in_sorted_order_whatever_they_are(y: Any, classes: tuple[int, ...]) -> None:
    task = made(y)
    assert task.classes == classes
    assert all(type(name) is int for name in task.classes)
    assert sorted(set(labels_of(task).values())) == list(classes)


def test_members_of_an_enumeration_are_their_values() -> None:
    animal = StrEnum("animal", ["ant", "cat", "dog"])
    assert made([animal(name) for name in NAMES]).classes == ("ant", "cat", "dog")


def test_truth_values_are_two_classes() -> None:
    assert made(INDEX > 0, 2).classes == (False, True)
    assert made(torch.from_numpy(INDEX > 0), 2).classes == (False, True)


def test_names_may_be_given_for_labels_that_number_the_classes() -> None:
    task = made(INDEX, classes=np.array(["setosa", "versicolor", "virginica"]))
    assert task.classes == ("setosa", "versicolor", "virginica")
    assert torch.equal(task.train.y, made(INDEX).train.y)


def test_names_may_be_given_in_an_order_and_with_classes_that_no_example_has() -> None:
    task = made(NAMES, 4, classes=["dog", "cat", "ant", "emu"])
    assert (task.objective, task.classes) == (Classification(4), ("dog", "cat", "ant", "emu"))
    assert set(labels_of(task).values()) == {"dog", "cat", "ant"}


def test_kind_says_what_floating_point_numbers_are() -> None:
    assert made(INDEX.astype(float), kind="classification").classes == (0.0, 1.0, 2.0)
    assert made(INDEX.astype(float), 1, kind="regression").objective == Regression(1)
    assert made(torch.from_numpy(INDEX).float(), classes=3).classes == (0, 1, 2)


def test_kind_makes_a_regression_of_whole_numbers() -> None:
    task = made(INDEX * 10, 1, kind="regression")
    assert task.objective == Regression(1)
    assert task.train.y.dtype == torch.float32


@pytest.mark.parametrize("dtype", [float, int, bool])
def test_kind_makes_classes_of_one_hot_rows(dtype: type) -> None:
    one_hot = np.eye(3)[SORTED].astype(dtype)
    for y in (one_hot, torch.from_numpy(one_hot), pd.DataFrame(one_hot)):
        task = made(y, kind="classification", classes=["ant", "cat", "dog"])
        assert torch.equal(task.train.y, made(NAMES).train.y)
        assert task.classes == ("ant", "cat", "dog")


def test_floating_point_targets_that_are_whole_but_many_are_a_regression() -> None:
    # as the targets of diabetes are
    assert made(np.arange(N).astype(float), 1, standardize="features").objective == Regression(1)


def test_an_example_without_a_label_is_skipped_where_the_defaults_say_so() -> None:
    y = NAMES.astype(object)
    y[[3, 8]] = None, np.nan
    with pytest.raises(InputError, match=r"^y holds no label for examples 3, 8 \(2 of 90\); drop those examples"):
        made(y)
    with pytest.warns(DataWarning, match="left out with examples 3, 8"):
        task = made(y, defaults={"data": {"nonfinite": "skip"}})
    assert (task.classes, len(labels_of(task))) == (("ant", "cat", "dog"), 88)


def test_a_missing_value_among_whole_floating_point_labels_is_named_before_their_kind_is_asked_for() -> None:
    y = INDEX.astype(float)
    y[7] = np.nan
    with pytest.raises(
        InputError, match=r"^y is NaN in example 7 \(1 of 90\); label or drop .* give kind='classification'"
    ):
        made(y)
    with pytest.raises(InputError, match=r"^y holds no label for example 7 "):
        made(y, kind="classification")


def test_a_warning_about_examples_points_at_the_line_that_made_the_task() -> None:
    y = NAMES.astype(object)
    y[3] = None
    with pytest.warns(DataWarning) as told:
        made(y, defaults={"data": {"nonfinite": "skip"}})
    assert [
        (warning.filename, Path(warning.filename).read_text().splitlines()[warning.lineno - 1]) for warning in told
    ] == [(__file__, inspect.getsource(made).splitlines()[-1])]


ONE_HOT = np.eye(3)[INDEX]


@pytest.mark.parametrize(
    ("y", "options", "sentence"),
    [
        (
            (INDEX > 0).astype(float),
            {},
            "y holds only 0 and 1, as floating-point numbers, which may be classes or targets; give kind='classification' "
            "or kind='regression'",
        ),
        (
            torch.from_numpy(INDEX).float(),
            {},
            "y holds only 3 distinct whole values, as floating-point numbers, which may",
        ),
        (
            ONE_HOT,
            {},
            "every row of y is one-hot, a 1 among 3 columns; give kind='classification' for 3 classes, or "
            "kind='regression' for 3 targets",
        ),
        (ONE_HOT.astype(int), {}, "every row of y is one-hot, a 1 among 3 columns; give kind='classification'"),
        (
            np.arange(N),
            {},
            "y holds 90 different whole numbers in 90 examples; give kind='regression' to predict the numbers, or "
            "kind='classification' for 90 classes",
        ),
        (INDEX, {"kind": "map"}, "kind is 'map'; give 'classification', 'regression', or leave it out"),
        (INDEX, {"kind": "regression", "classes": 3}, "kind is 'regression', but classes is 3; leave one of them out"),
        (
            NAMES,
            {"kind": "regression"},
            "y holds text, which a regression cannot predict; give numbers, or leave kind out",
        ),
        (
            ONE_HOT[:, :2],
            {"kind": "classification"},
            "the host returns an output of shape (3,) per example, which the loss of the objective does not take with a target "
            "of shape (2,) and 2 outputs; give the host outputs of shape (2, 2), or the task a loss",
        ),
        (
            NAMES,
            {"classes": 3},
            "classes is 3, but y holds text; give whole numbers from 0 to 2, or classes as the list",
        ),
        (NAMES, {"classes": ["ant", "dog"]}, "y holds the label 'cat', which is not among the classes ['ant', 'dog']"),
        (NAMES, {"classes": ["ant", "ant"]}, "classes is ['ant', 'ant']; give at least two different names"),
        (
            NAMES,
            {"classes": ["ant", 1]},
            "classes is ['ant', 1]; give at least two different names of one",
        ),
        (INDEX, {"classes": 2.0}, "classes is 2.0; give the number of classes as a whole number from 2 on, or a list"),
        (
            INDEX,
            {"classes": True},
            "classes is True; give the number of classes as a whole number from 2 on, or a list",
        ),
        (
            [1, *NAMES[1:]],
            {},
            "y holds '1', a whole number, and 'ant', text, among its labels; give labels of one type",
        ),
        ([b"a", b"b"] * 45, {}, "y has dtype |S1; give class labels as text or whole numbers"),
        ([{1}, {2}] * 45, {}, "y holds '{1}', a set; give class labels as text or whole numbers"),
        (pd.date_range("2020", periods=N), {}, "y has dtype datetime64["),
        (["a"] * N, {}, "y holds the one class 'a'; give examples of at least two classes"),
        (5, {}, "y is a single number; give one label or target for each example"),
        (np.zeros((N, 2, 0)), {}, "y has shape (90, 2, 0); give one target per example"),
        (np.arange(2 * N).reshape(N, 2), {}, "y holds whole numbers of shape (90, 2), 2 for each example; give kind="),
    ],
)
def test_labels_that_may_be_either_or_neither_are_refused_in_a_sentence(
    y: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        made(y, **options)


def test_a_frame_of_numbers_is_read_by_column() -> None:
    frame = pd.DataFrame(X.numpy(), columns=list("abcd"))
    frame["flag"] = INDEX > 0
    frame["count"] = pd.array(INDEX, dtype="Int64")
    wide = torch.cat([X, torch.from_numpy(np.stack([INDEX > 0, INDEX], 1)).float()], 1)
    host = MLP(inputs=6, width=5, hidden=(2,), outputs=3)
    task, plain = (task_from("t", x, INDEX, host=host) for x in (frame, wide))
    assert torch.equal(task.train.x, plain.train.x)
    assert task.train.x.dtype == torch.float32


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"sex": ["f", "m"] * 45}, "column 'sex' of x holds "),
        (
            {"sex": pd.Categorical(["f", "m"] * 45)},
            "column 'sex' of x holds 'f', a str; give numbers alone, or make the task with",
        ),
        ({"day": pd.date_range("2020", periods=N)}, "column 'day' of x holds dates, such as "),
        ({"n": [None, *range(1, N)]}, "x holds NaN or infinite values, in example 0 (1 of 90)"),
    ],
)
def test_a_column_that_holds_no_numbers_is_named(columns: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        task_from("t", pd.DataFrame(columns), INDEX, host=MLP(inputs=1, width=5, hidden=(2,), outputs=3))


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match=r"^x has several columns of one name among \['a', 'a'\]"):
        task_from("t", pd.DataFrame(X[:, :2].numpy(), columns=["a", "a"]), INDEX, host=MLP(2, 5, (2,), 3))
