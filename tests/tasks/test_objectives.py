import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, r2_score
from torch import Tensor

from esper.leyline.data.task import Objective
from esper.tasks.objectives import Classification, Regression

E, B, C = 5, 37, 3


def classified(rows: int = E, examples: int = B, classes: int = C) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    output = 3 * torch.randn(rows, examples, classes, generator=draw)
    return output, torch.randint(classes, (rows, examples), generator=draw)


def regressed(rows: int = E, examples: int = B, targets: int = C) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    target = 4 + 2 * torch.randn(rows, examples, targets, generator=draw)
    return target + torch.randn(rows, examples, targets, generator=draw), target


def test_classification_loss_is_the_cross_entropy_of_every_row() -> None:
    output, target = classified()
    rows = [F.cross_entropy(o, t, reduction="none") for o, t in zip(output, target, strict=True)]
    torch.testing.assert_close(Classification(C).loss(output, target), torch.stack(rows))


def test_the_cross_entropy_of_equal_outputs_is_ln_c() -> None:
    loss = Classification(C).loss(torch.zeros(2, 4, C, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.int64))
    torch.testing.assert_close(loss, torch.full((2, 4), C, dtype=torch.float64).log())


def test_the_mean_of_classification_scores_is_accuracy() -> None:
    output, target = classified()
    scores = Classification(C).score(output, target)
    for row in range(E):
        assert scores[row].mean().item() == pytest.approx(accuracy_score(target[row], output[row].argmax(1)))


def test_regression_loss_is_the_mean_squared_error_of_every_example() -> None:
    output, target = regressed()
    loss = Regression(C).loss(output, target)
    assert loss[3, 7].item() == pytest.approx(
        sum((output[3, 7, c] - target[3, 7, c]).item() ** 2 for c in range(C)) / C
    )


@pytest.mark.parametrize("targets", [1, 2, 3])
def test_the_mean_of_regression_scores_is_r2(targets: int) -> None:
    output, target = regressed(targets=targets)
    scores = Regression(targets).score(output, target)
    for row in range(E):
        assert scores[row].mean().item() == pytest.approx(r2_score(target[row], output[row]), abs=1e-5)


def test_the_r2_of_the_mean_is_zero() -> None:
    _, target = regressed()
    scores = Regression(C).score(target.mean(1, keepdim=True).expand_as(target), target)
    torch.testing.assert_close(scores.mean(1), torch.zeros(E), rtol=0, atol=1e-6)


def test_one_target_may_come_without_its_axis() -> None:
    output, target = regressed(targets=1)
    objective = Regression(1)
    assert torch.equal(objective.loss(output, target[..., 0]), objective.loss(output, target))
    assert torch.equal(objective.score(output, target[..., 0]), objective.score(output, target))


@pytest.mark.parametrize("outputs", [1, 2, 3, 8, 10, 16])
@pytest.mark.parametrize("examples", [1, 3, 37, 64, 257])
@pytest.mark.parametrize("shared", [False, True])
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(outputs: int, examples: int, shared: bool) -> None:
    cases: list[tuple[Objective, Tensor, Tensor]] = [(Regression(outputs), *regressed(E, examples, outputs))]
    if outputs > 1:
        cases.append((Classification(outputs), *classified(E, examples, outputs)))
    for objective, output, target in cases:
        if shared:  # one probe split, expanded over rows
            target = target[:1].expand_as(target)
        for measure in (objective.loss, objective.score):
            whole = measure(output, target)
            for rows in range(2, E):
                assert torch.equal(measure(output[:rows], target[:rows]).nan_to_num(), whole[:rows].nan_to_num())
            pair = torch.tensor([E - 1, 0])
            assert torch.equal(measure(output[pair], target[pair]).nan_to_num(), whole[pair].nan_to_num())


def test_objectives_never_read_the_device() -> None:
    # a tensor of the meta device has no values: any read raises
    output = torch.empty(E, B, C, device="meta")
    labels, targets = torch.empty(E, B, dtype=torch.int64, device="meta"), torch.empty(E, B, C, device="meta")
    for objective, target in ((Classification(C), labels), (Regression(C), targets)):
        assert objective.loss(output, target).shape == (E, B)
        assert objective.score(output, target).shape == (E, B)


def test_outputs_of_another_number_are_an_error_of_the_caller() -> None:
    output, target = classified()
    with pytest.raises(AssertionError):
        Classification(C + 1).loss(output, target)
    with pytest.raises(AssertionError):
        Regression(C).loss(output, output[..., :2])
