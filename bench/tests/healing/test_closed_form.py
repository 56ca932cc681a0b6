"""Test low-rank corrections in closed form, beside a slow version, and the task `heal-eora`."""

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import drawn_with
from esper_bench.healing.closed_form import Correction, correct, correction
from esper_bench.healing.damage import DamageKind
from esper_bench.healing.heal import CorrectedHost, DamagedHost, describe, heal, heal_eora, trained_host
from quick_healing import quick_hosts


@pytest.fixture(autouse=True, scope="module")
def _quick_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_hosts(tmp_path_factory.mktemp("cache")):
        yield


def drawn() -> tuple[nn.Linear, nn.Linear, Tensor]:
    """Draw a damaged map, the intact one, and correlated inputs."""
    with drawn_with(3):
        damaged, intact = nn.Linear(6, 5).double(), nn.Linear(6, 5).double()
        x = torch.randn(40, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64)
    return damaged, intact, x


def affine(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight, layer.bias[:, None]], 1).detach()


@torch.no_grad()
def error(change: Tensor, damaged: nn.Linear, intact: nn.Linear, x: Tensor) -> float:
    """Compute the mean squared error of the outputs that a change (O, I + 1) of the damaged map leaves, example by example."""
    total = 0.0
    for row in x:
        total += float((intact(row) - damaged(row) - change @ torch.cat([row, torch.ones(1)])).square().sum())
    return total / len(x)


def at_rank(found: Correction, rank: int) -> Tensor:
    return found.out[:, :rank] @ found.into[:rank]


def eora(damaged: nn.Linear, intact: nn.Linear, x: Tensor, rank: int) -> Tensor:
    """Correct as the paper does: Q' = Q sqrt(L) of the covariance, SVD of the error times Q', Q' taken out again."""
    rows = torch.cat([x, torch.ones(len(x), 1)], 1)
    values, q = torch.linalg.eigh(rows.T @ rows / len(rows))
    scaled = q @ values.sqrt().diag()
    u, s, v = torch.linalg.svd((affine(intact) - affine(damaged)) @ scaled, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank] @ torch.linalg.inv(scaled)


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_a_correction_is_that_of_the_paper(rank: int) -> None:
    damaged, intact, x = drawn()
    change = at_rank(correction(damaged, intact, x), rank)
    torch.testing.assert_close(change, eora(damaged, intact, x, rank))
    assert torch.linalg.matrix_rank(change) == rank


def test_no_other_change_of_the_rank_leaves_less_error() -> None:
    damaged, intact, x = drawn()
    change = at_rank(correction(damaged, intact, x), 2)
    least = error(change, damaged, intact, x)
    u, s, v = torch.linalg.svd(affine(intact) - affine(damaged))
    assert least < error((u[:, :2] * s[:2]) @ v[:2], damaged, intact, x)  # the best without the inputs
    left, right = torch.linalg.qr(change)[0][:, :2], torch.linalg.qr(change)[1][:2]
    torch.testing.assert_close(left @ right, change)
    with drawn_with(1):
        for size in (1e-3, 1e-1):
            moved = (left + size * torch.randn(5, 2)) @ (right + size * torch.randn(2, 7))
            assert least < error(moved, damaged, intact, x)


def test_the_energy_of_a_rank_is_the_share_of_the_error_that_it_removes() -> None:
    damaged, intact, x = drawn()
    found = correction(damaged, intact, x)
    whole = float(intact(x).detach().square().sum(1).mean())
    errors = [error(at_rank(found, rank), damaged, intact, x) / whole for rank in range(6)]
    removed = [before - after for before, after in itertools.pairwise(errors)]
    torch.testing.assert_close(found.energy.tolist(), removed, rtol=1e-6, atol=1e-9)


def test_an_intact_map_has_no_rank() -> None:
    _, intact, x = drawn()
    assert correction(intact, intact, x).energy.tolist() == []


@pytest.mark.parametrize("layer", [nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(2, 3, (2, 1), stride=2, dilation=2)])
def test_a_convolution_is_corrected_as_the_map_of_its_patches(layer: nn.Conv2d) -> None:
    with drawn_with(5):
        intact, damaged = copy.deepcopy(layer), copy.deepcopy(layer)
        x = torch.randn(8, 2, 6, 6)
        nn.init.normal_(intact.weight), nn.init.normal_(damaged.weight)

    def left() -> float:
        return float((intact(x) - damaged(x)).square().mean().detach())

    cost, before = 3 + layer.weight[0].numel() + 1, left()
    assert correct(damaged, intact, x, cost) == cost
    change = (intact.weight - damaged.weight).flatten(1).detach()
    assert torch.linalg.matrix_rank(change, tol=1e-4) == 2
    assert left() < before
    correct(damaged, intact, x, 10_000)
    assert left() < 1e-8 < before


def test_a_map_without_a_bias_is_corrected_and_a_shared_weight_stays() -> None:
    with drawn_with(5):
        damaged, intact = (nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))) for _ in range(2))
        x = torch.randn(9, 4)
    for network in (damaged, intact):
        network[2].weight = network[1].weight
    before = damaged[1].weight.clone()
    assert correct(damaged, intact, x, 100) == 4 * 8
    torch.testing.assert_close(damaged[0](x), intact[0](x))
    assert torch.equal(damaged[1].weight, before)


def test_ranks_are_taken_by_the_error_that_they_remove_for_each_parameter() -> None:
    damaged, intact = (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 12)).double() for _ in range(2))
    damaged.load_state_dict(intact.state_dict())
    with torch.no_grad():
        damaged[0].weight.mul_(0.9)
        damaged[2].weight.zero_()
    x = torch.randn(30, 4, dtype=torch.float64)
    before = damaged[0].weight.clone()
    assert correct(damaged, intact, x, 0) == 0
    assert correct(damaged, intact, x, 17) == 17  # one rank of the second layer: 12 outputs, 4 inputs and the bias
    assert torch.equal(damaged[0].weight, before)
    assert torch.linalg.matrix_rank(damaged[2].weight) == 1
    correct(damaged, intact, x, 10_000)
    torch.testing.assert_close(damaged(x), intact(x))


def key(kind: DamageKind) -> int:
    return next(key for key in range(1000) if describe(key).damage.kind == kind and describe(key).plain)


@pytest.mark.parametrize("kind", [DamageKind.PRUNED, DamageKind.LOW_RANK, DamageKind.NOISE, DamageKind.MIXED])
def test_a_corrected_host_computes_what_the_intact_one_does_where_the_cap_allows_it(kind: DamageKind) -> None:
    facts = describe(key(kind))
    x = heal().instance(facts.key).train.x
    intact = trained_host(facts.number)(x)
    away = [float((CorrectedHost(facts, cap)()(x) - intact).square().mean()) for cap in (0.0, 0.06, 10.0)]
    assert away[2] < 1e-6 < away[1] < away[0]


@pytest.mark.parametrize("cap", [0.03, 0.06, 0.1])
def test_the_corrections_stay_within_the_cap(cap: float) -> None:
    for kind in (DamageKind.PRUNED, DamageKind.TERNARY, DamageKind.MIXED):
        host, spent = CorrectedHost(describe(key(kind)), cap).corrected()
        assert 0 < spent <= cap * sum(parameter.numel() for parameter in host.parameters())


@pytest.mark.parametrize("kind", [DamageKind.LABELS, DamageKind.INPUT, DamageKind.NONE, DamageKind.REMOVED])
def test_nothing_is_corrected_where_no_weight_differs_or_the_block_is_gone(kind: DamageKind) -> None:
    facts = describe(key(kind))
    host, spent = CorrectedHost(facts, 0.06).corrected()
    damaged = DamagedHost(facts.number, facts.damage, frozen=True)()
    assert spent == 0
    assert all(torch.equal(a, b) for a, b in zip(host.parameters(), damaged.parameters(), strict=True))


def test_the_task_has_the_data_of_heal_and_frozen_hosts() -> None:
    ours, other = heal_eora().instance(5), heal().instance(5)
    assert torch.equal(ours.train.x, other.train.x)  # type: ignore[arg-type]
    assert not any(parameter.requires_grad for parameter in ours.host().parameters())
    assert ours.host.architecture == other.host.architecture  # type: ignore[attr-defined]
