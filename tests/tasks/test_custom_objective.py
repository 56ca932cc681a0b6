"""Test losses, metrics, weights and splits of a task's own: what they compute, and what of them is refused."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from esper.leyline.data.task import Task
from esper.leyline.messages import DataWarning, InputError
from esper.tasks.hosts import MLP
from esper.tasks.objectives import METRICS, SCORES, Classification, CustomObjective, Regression
from esper.tasks.own.custom import task_from
from esper.tolaria.engine import VectorizedEngine
from populations import GROW, Script, small_config

N, E, B, C = 90, 5, 37, 3
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(N, 4, generator=DRAW)
Y = torch.tensor([0, 0, 0, 1, 1, 2]).repeat(15)  # shares of a half, a third and a sixth
T = X[:, :1] + 0.1 * torch.randn(N, 1, generator=DRAW)
NAMES = np.array(["ant", "cat", "dog"])[Y.numpy()]
INDICES = {"train": range(50), "probe": range(50, 70), "validation": range(70, 80), "test": range(80, 90)}
OUTPUT = torch.randn(E, B, C, generator=DRAW)
LABELS = torch.randint(C, (E, B), generator=DRAW)


def classified(y: Any = Y, **options: Any) -> Task:
    return task_from("t", X, y, host=MLP(inputs=4, width=8, hidden=(3, 5), outputs=3), **options)


def regressed(y: Any = T, **options: Any) -> Task:
    return task_from("t", X, y, host=MLP(inputs=4, width=8, hidden=(3, 5), outputs=1), **options)


def focal(output: Tensor, target: Tensor) -> Tensor:
    chance = output.log_softmax(1).gather(1, target[:, None])[:, 0]
    return -((1 - chance.exp()) ** 2) * chance


def grown(task: Task, **settings: Any) -> VectorizedEngine:
    """Run an engine for eight steps in which seeds incubate, blend and are kept."""
    engine = VectorizedEngine(task, small_config(**settings))
    engine.run(Script(GROW))
    return engine


def trained(task: Task, **settings: Any) -> Tensor:
    return grown(task, **settings).population.body.host.columns["value"].clone()


# Losses.


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
        F.cross_entropy,
        focal,
        lambda output, target: F.cross_entropy(output, target, reduction="none"),
    ],
)
def test_a_loss_gives_the_loss_of_each_example_of_each_row_bit_for_bit_alike(loss: Any) -> None:
    objective = classified(loss=loss).objective
    whole = objective.loss(OUTPUT, LABELS)
    assert whole.shape == (E, B)
    for rows in range(1, E):
        assert torch.equal(objective.loss(OUTPUT[:rows], LABELS[:rows]), whole[:rows])
    expected = loss(OUTPUT[3], LABELS[3])
    if expected.dim():
        assert torch.equal(whole[3], expected)
    elif getattr(loss, "weight", None) is None:  # torch divides a weighted mean by the weights of the batch
        torch.testing.assert_close(whole[3].mean(), expected)


def test_the_loss_of_several_targets_is_their_mean() -> None:
    y = torch.cat([T, 2 * T], 1)
    task = task_from("t", X, y, host=MLP(4, 8, (3,), 2), loss=nn.HuberLoss())
    output, target = torch.randn(E, B, 2), torch.randn(E, B, 2)
    expected = F.huber_loss(output, target, reduction="none").mean(-1)
    torch.testing.assert_close(task.objective.loss(output, target), expected)


def test_targets_without_their_axis_reach_a_loss_with_it() -> None:
    objective = regressed(T[:, 0], loss=nn.L1Loss()).objective
    output, target = torch.randn(E, B, 1), torch.randn(E, B)
    assert torch.equal(objective.loss(output, target), (output[..., 0] - target).abs())
    assert isinstance(objective, CustomObjective)
    assert torch.equal(objective.score(output, target), Regression(1).score(output, target))


def test_training_by_the_cross_entropy_of_torch_is_training_by_ours() -> None:
    own, usual = trained(classified(loss=nn.CrossEntropyLoss())), trained(classified())
    torch.testing.assert_close(own, usual, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(trained(classified(loss=focal)), usual, rtol=1e-3, atol=1e-4)


def test_rows_train_by_an_own_loss_alike_whatever_the_number_of_environments() -> None:
    task = classified(loss=focal, class_weights="balanced", sample_weights=np.arange(1, N + 1))
    three, two = trained(task, envs=3), trained(task, envs=2)
    assert torch.equal(three[:2], two[:2])


def test_a_task_without_anything_of_its_own_has_the_usual_objective() -> None:
    assert classified().objective == classified(metric="accuracy").objective == Classification(3)
    assert regressed().objective == regressed(metric="r2").objective == Regression(1)


# Metrics.


def test_balanced_accuracy_is_that_of_scikit_learn() -> None:
    task = classified(metric="balanced_accuracy")
    assert task.objective.metric == "balanced_accuracy"
    for classes in (3, 2):  # a class that does not occur counts nowhere
        scores = task.objective.score(OUTPUT, LABELS % classes)
        for row in range(E):
            with warnings.catch_warnings(action="ignore"):  # that the outputs name a class that does not occur
                expected = sklearn.metrics.balanced_accuracy_score(LABELS[row] % classes, OUTPUT[row].argmax(1))
            assert scores[row].mean().item() == pytest.approx(expected, abs=1e-6)


def test_the_log_loss_is_that_of_scikit_learn() -> None:
    scores = classified(metric="neg_log_loss").objective.score(OUTPUT, LABELS)
    for row in range(E):
        expected = -sklearn.metrics.log_loss(LABELS[row], OUTPUT[row].double().softmax(1), labels=[0, 1, 2])
        assert scores[row].mean().item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["r2", "neg_mean_squared_error", "neg_mean_absolute_error"])
@pytest.mark.parametrize("targets", [1, 2])
def test_metrics_of_a_regression_are_those_of_scikit_learn(name: str, targets: int) -> None:
    y = torch.cat([T, 2 * T], 1)[:, :targets]
    objective = task_from("t", X, y, host=MLP(4, 8, (3,), targets), metric=name).objective
    scorer: Any = {
        "r2": sklearn.metrics.r2_score,
        "neg_mean_squared_error": lambda y, p: -sklearn.metrics.mean_squared_error(y, p),
        "neg_mean_absolute_error": lambda y, p: -sklearn.metrics.mean_absolute_error(y, p),
    }[name]
    output, target = torch.randn(E, B, targets), torch.randn(E, B, targets)
    scores = objective.score(output, target)
    for row in range(E):
        assert scores[row].mean().item() == pytest.approx(scorer(target[row], output[row]), abs=1e-5)


@pytest.mark.parametrize("name", SCORES)
def test_a_metric_of_a_row_has_the_same_bits_whatever_the_number_of_rows(name: str) -> None:
    target = LABELS if name in METRICS["classification"] else torch.randn(E, B, C)
    whole = SCORES[name](OUTPUT, target)
    for rows in range(1, E):
        assert torch.equal(SCORES[name](OUTPUT[:rows], target[:rows]), whole[:rows])


def test_a_function_is_a_metric_under_its_own_name_and_may_return_truth_values() -> None:
    def in_top_2(output: Tensor, target: Tensor) -> Tensor:
        return (output.topk(2).indices == target[:, None]).any(1)

    engine = grown(classified(metric=in_top_2), envs=2, steps=2)
    assert engine.population.task.objective.metric == "in_top_2"
    metric, _ = engine.evaluate(engine.population.task.validation)
    assert ((metric > 0) & (metric <= 1)).all()
    assert classified(metric=lambda o, t: o.argmax(1) == t).objective.metric == "score"


# Weights.


def test_balanced_weights_are_those_of_scikit_learn_and_have_mean_1() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    task = classified(class_weights="balanced")
    assert isinstance(task.objective, CustomObjective)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=task.train.y.numpy())
    np.testing.assert_allclose(task.objective.class_weights, expected)
    usual = Classification(3).loss(OUTPUT, LABELS)
    weights = torch.tensor(expected, dtype=torch.float32)[LABELS]
    torch.testing.assert_close(task.objective.loss(OUTPUT, LABELS), usual * weights)
    assert torch.equal(task.objective.score(OUTPUT, LABELS), Classification(3).score(OUTPUT, LABELS))


def test_weights_by_label_and_in_order_are_the_same_and_only_their_ratios_count() -> None:
    by_label = classified(NAMES, class_weights={"dog": 30, "ant": 10, "cat": 20}).objective
    in_order = classified(NAMES, class_weights=[1, 2, 3]).objective
    assert isinstance(by_label, CustomObjective)
    assert isinstance(in_order, CustomObjective)
    assert by_label.class_weights == pytest.approx(in_order.class_weights)
    assert np.array(by_label.class_weights)[classified(NAMES).train.y].mean() == pytest.approx(1, abs=1e-6)


def test_equal_sample_weights_change_no_bit() -> None:
    assert torch.equal(trained(classified(sample_weights=np.full(N, 7))), trained(classified()))


def test_an_example_of_weight_0_does_not_train() -> None:
    weights = torch.ones(N)
    weights[:20] = 0
    other = Y.clone()
    other[:20] = (other[:20] + 1) % 3
    options = {"splits": INDICES, "sample_weights": weights}
    assert torch.equal(trained(classified(Y, **options)), trained(classified(other, **options)))
    assert not torch.equal(trained(classified(Y, splits=INDICES)), trained(classified(other, splits=INDICES)))


def test_sample_weights_have_mean_1_over_the_train_split() -> None:
    task = classified(sample_weights=np.arange(N))
    assert task.weights is not None
    assert len(task.weights) == len(task.train.y)
    assert task.weights.mean().item() == pytest.approx(1)


# Splits of one's own.


def same(a: Task, b: Task) -> bool:
    names = ("train", "probe", "validation", "test")
    return all(torch.equal(p, q) for name in names for p, q in zip(getattr(a, name), getattr(b, name), strict=True))


def test_splits_may_be_indices_masks_pairs_or_datasets() -> None:
    host = MLP(inputs=4, width=8, hidden=(3,), outputs=3)
    pairs = {name: (X[list(part)], NAMES[list(part)]) for name, part in INDICES.items()}
    sets = {name: TensorDataset(X[list(part)], Y[list(part)]) for name, part in INDICES.items()}
    masks = {name: np.isin(np.arange(N), part) for name, part in INDICES.items()}
    whole = classified(NAMES, splits=INDICES)
    assert torch.equal(whole.train.x, X[:50])
    assert whole.classes == ("ant", "cat", "dog")
    assert same(whole, classified(NAMES, splits=masks))
    assert same(whole, classified(NAMES, splits={name: torch.tensor(part) for name, part in INDICES.items()}))
    assert same(whole, task_from("t", host=host, splits=pairs))
    assert same(whole, task_from("t", host=host, splits=sets))


def test_an_example_that_is_skipped_leaves_splits_and_weights_as_they_are() -> None:
    x = X.clone()
    x[[3, 60], 0] = torch.nan
    host, weights = MLP(inputs=4, width=8, hidden=(3,), outputs=3), np.arange(N)
    options: dict[str, Any] = {"host": host, "defaults": {"data": {"nonfinite": "skip"}}}
    with pytest.warns(DataWarning, match="left out with examples 3, 60"):
        task = task_from("t", x, Y, splits=INDICES, sample_weights=weights, **options)
    kept = {"train": [i for i in range(50) if i != 3], "probe": [i for i in range(50, 70) if i != 60]}
    clean = task_from("t", X, Y, splits=INDICES | kept, sample_weights=weights, **options)
    assert same(task, clean)
    assert task.weights is not None
    assert clean.weights is not None
    assert torch.equal(task.weights, clean.weights)


PAIRS = {name: (X[list(part)], Y[list(part)]) for name, part in INDICES.items()}


def alone(**options: Any) -> Task:
    return task_from("t", host=MLP(inputs=4, width=8, hidden=(3,), outputs=3), **options)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            lambda: classified(loss="mse"),
            "loss is 'mse'; give a function of outputs (B, C) and y, such as torch.nn.HuberLoss()",
        ),
        (
            lambda: classified(loss=nn.CrossEntropyLoss),
            "loss is the class CrossEntropyLoss; give a function of outputs",
        ),
        (
            lambda: classified(loss=lambda o, t: F.cross_entropy(o, t)),
            "loss returned a tensor of shape () for outputs (5, 3) and y (5,); return one number per example instead",
        ),
        (
            lambda: classified(loss=lambda o, t: o.detach().sum(1)),
            "loss has no finite gradient with respect to the outputs",
        ),
        (
            lambda: classified(loss=lambda o, t: (o - o.mean(0)).square().sum(1)),
            "loss of an example depends on the other examples of its batch; compute it from the outputs and y of that example",
        ),
        (lambda: classified(loss=lambda o, t: o @ o.T), "loss returned a tensor of shape (5, 5) for outputs (5, 3)"),
        (
            lambda: classified(loss=lambda o, t: o.sum(1) / 0),
            "loss is NaN or infinite for outputs (5, 3) and y (5,) of",
        ),
        (lambda: classified(loss=lambda o: o), "loss raised an error for outputs (5, 3) and y (5,): TypeError: "),
        (
            lambda: regressed(T[:, 0], loss=lambda o, t: (o[:, 0] - t) ** 2),
            "loss returned a tensor of shape (5, 5) for outputs (5, 1) and y (5, 1); return one number per example",
        ),
        (lambda: classified(loss=nn.Sequential(nn.Linear(3, 3))), "loss is a Sequential with trainable parameters"),
        (
            lambda: classified(metric="roc_auc"),
            "metric is 'roc_auc'; give accuracy, balanced_accuracy, neg_log_loss for a",
        ),
        (
            lambda: regressed(metric="accuracy"),
            "metric is 'accuracy'; give r2, neg_mean_squared_error, neg_mean_absolute",
        ),
        (lambda: classified(metric=3), "metric is 3; give a name, as in 'accuracy', or a function of outputs (B, C)"),
        (
            lambda: classified(metric=sklearn.metrics.f1_score),
            "metric is scikit-learn's f1_score, which takes predicted labels of a whole split; give one of the names",
        ),
        (
            lambda: classified(metric=lambda o, t: 0.5),
            "metric returned a float for outputs (5, 3) and y (5,); return one",
        ),
        (
            lambda: classified(class_weights="auto"),
            "class_weights is 'auto'; give 'balanced', or a positive number for",
        ),
        (
            lambda: classified(class_weights=[1, 2]),
            "class_weights is [1, 2]; give 'balanced', or a positive number for",
        ),
        (lambda: classified(class_weights=[1, 2, 0]), "class_weights is [1, 2, 0]; give 'balanced', or a positive"),
        (
            lambda: classified(class_weights={0: 1}),
            "class_weights lacks 1; give a weight for each of the classes [0, 1, 2]",
        ),
        (
            lambda: classified(NAMES, class_weights=dict.fromkeys(["ant", "cat", "dog", "emu"], 1)),
            "class_weights names 'emu'; give a weight for each of the classes ['ant', 'cat', 'dog']",
        ),
        (lambda: regressed(class_weights="balanced"), "class_weights was given, but y holds targets of a regression"),
        (
            lambda: classified(sample_weights=[1, 2]),
            "sample_weights has shape (2,); give one weight for each of the 90",
        ),
        (lambda: classified(sample_weights=-np.ones(N)), "sample_weights holds a negative, infinite or missing weight"),
        (lambda: classified(sample_weights=["a"] * N), "sample_weights holds text, such as 'a'; give numbers alone"),
        (lambda: classified(sample_weights=np.zeros(N)), "sample_weights is 0 for every example of the train split"),
        (
            lambda: classified(splits=[1]),
            "splits is a list; give a mapping with the keys train, probe, validation, test",
        ),
        (
            lambda: classified(splits={"train": [0]}),
            "splits has the keys train; give a mapping with the keys train, probe",
        ),
        (
            lambda: classified(splits=INDICES | {"test": [49, 85]}),
            "example 49 is named more than once in the train split and the test split; name every example once, in one split",
        ),
        (
            lambda: classified(splits=INDICES | {"test": [85, 85]}),
            "example 85 is named more than once in the test split; name every example once, in one split",
        ),
        (
            lambda: classified(splits=INDICES | {"test": [90]}),
            "the test split names example 90; give indices from 0 to 89",
        ),
        (lambda: classified(splits=INDICES | {"test": [80]}), "the test split would hold 1 of 90 examples"),
        (
            lambda: classified(splits=INDICES | {"test": [0.5]}),
            "the test split is an array of shape (1,) and dtype float64",
        ),
        (lambda: classified(splits=PAIRS), "the train split is a tuple that cannot be read as an array of numbers"),
        (
            lambda: classified(splits=INDICES, fractions=(0.7, 0.1, 0.1, 0.1)),
            "splits and fractions (0.7, 0.1, 0.1, 0.1)",
        ),
        (
            lambda: alone(splits=INDICES),
            "the train split is a range; give a pair (x, y) or a Dataset, or give indices together",
        ),
        (lambda: alone(y=Y, splits=PAIRS), "y was given without x; leave y out, because the splits contain their own"),
        (lambda: alone(), "x and y are missing; give examples x and y, a Dataset as x, or splits"),
        (
            lambda: alone(splits=PAIRS | {"test": (X[:5, :3], Y[:5])}),
            "the test split has features of shape (3,) and the train split of shape (4,); give every example one shape",
        ),
        (
            lambda: alone(splits=PAIRS | {"test": (X[:5], Y[:4])}),
            "the test split holds 5 examples and y 4; give one label or target per example",
        ),
        (
            lambda: classified(NAMES, splits=dict(zip(INDICES, np.split(Y.argsort(), [50, 70, 80]), strict=True))),
            "the validation split has the class 'dog', of which the train split has no example; add some",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(build: Callable[[], Task], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        build()


def test_a_metric_that_is_named_as_a_figure_of_the_summary_is_refused() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output[:, 0]

    with pytest.raises(InputError, match=r"^metric is a function named 'loss', which the summary uses already"):
        classified(metric=loss)
