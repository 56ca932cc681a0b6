"""Check advantages against sums written out, with every kind of end that a sequence can have."""

import pytest
import torch

from esper.simic.ppo import advantages, subtract_group_mean

T, E = 9, 4
GOES_ON, TERMINAL, ROLLBACK = range(3)


def drawn(seed=0):
    """Draw rewards, values, and ends: terminals and rollbacks, some of them in mid-rollout."""
    generator = torch.Generator().manual_seed(seed)
    reward, value = (torch.randn(T, E, generator=generator, dtype=torch.float64) for _ in range(2))
    kind = torch.where(
        torch.rand(T, E, generator=generator) < 0.6, GOES_ON, torch.randint(3, (T, E), generator=generator)
    )
    kind[-1] = torch.where(kind[-1] == GOES_ON, TERMINAL, kind[-1])
    kind[3, :2] = torch.tensor([TERMINAL, ROLLBACK])
    reward[kind == ROLLBACK] -= 5.0  # its penalty
    return reward, value, kind != GOES_ON


def slow(reward, value, end, gamma, lam):
    """Compute A_t = sum over l of (gamma lam)^l delta_{t + l}, and the discounted rewards, up to the end of the sequence."""
    advantage, returns = torch.zeros(T, E, dtype=torch.float64), torch.zeros(T, E, dtype=torch.float64)
    for e in range(E):
        for t in range(T):
            for later in range(t, T):
                last = bool(end[later, e])
                following = 0.0 if last else value[later + 1, e]
                delta = reward[later, e] + gamma * following - value[later, e]
                advantage[t, e] += (gamma * lam) ** (later - t) * delta
                returns[t, e] += gamma ** (later - t) * reward[later, e]
                if last:
                    break
    return advantage, returns


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.9, 0.0)])
def test_advantages_are_discounted_sums_of_errors_to_the_end_of_the_sequence(seed, gamma, lam):
    data = drawn(seed)
    found, (advantage, returns) = advantages(*data, gamma, lam), slow(*data, gamma, lam)
    torch.testing.assert_close(found.advantage, advantage, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.returns, returns, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.target, advantage + data[1], rtol=0, atol=1e-12)


def test_without_a_trace_the_advantage_is_the_error_of_one_step():
    reward, value, end = drawn()
    following = torch.where(end, 0.0, value.roll(-1, 0))
    torch.testing.assert_close(advantages(reward, value, end, 0.9, 0.0).advantage, reward + 0.9 * following - value)


def test_with_a_full_trace_the_advantage_is_the_return_less_the_value():
    reward, value, end = drawn()
    found = advantages(reward, value, end, 0.9, 1.0)
    torch.testing.assert_close(found.advantage, found.returns - value)


def test_what_lies_behind_an_end_changes_nothing_in_front_of_it():
    reward, value, end = drawn()
    end[4] = True
    before = advantages(reward, value, end, 0.9, 0.8).advantage[:5]
    reward[5:], value[5:] = 100.0, 50.0
    assert torch.equal(advantages(reward, value, end, 0.9, 0.8).advantage[:5], before)


def test_each_environment_alone_equals_itself_among_the_others():
    data = drawn()
    together = advantages(*data, 0.9, 0.8)
    for e in range(E):
        alone = advantages(*(x[:, e : e + 1] for x in data), 0.9, 0.8)
        assert all(torch.equal(one[:, 0], many[:, e]) for one, many in zip(alone, together, strict=True))


def test_a_rollout_that_ends_in_the_air_is_refused():
    reward, value, end = drawn()
    end[-1, 2] = False
    with pytest.raises(AssertionError, match="ends every sequence"):
        advantages(reward, value, end, 0.9, 0.8)


@pytest.mark.parametrize("group", [2, 3, 6])
def test_a_group_baseline_is_the_mean_of_the_other_members(group):
    advantage = torch.randn(5, 12, dtype=torch.float64)
    found = subtract_group_mean(advantage, group)
    for t in range(5):
        for e in range(12):
            first = e - e % group
            others = [float(advantage[t, i]) for i in range(first, first + group) if i != e]
            assert float(found[t, e]) == pytest.approx(float(advantage[t, e]) - sum(others) / len(others), abs=1e-12)


def test_a_group_baseline_takes_away_what_a_group_has_in_common():
    advantage, common = torch.randn(5, 12, dtype=torch.float64), torch.randn(5, 4, 1, dtype=torch.float64)
    shifted = (advantage.view(5, 4, 3) + common).view(5, 12)
    torch.testing.assert_close(subtract_group_mean(shifted, 3), subtract_group_mean(advantage, 3), rtol=0, atol=1e-12)


def test_a_group_of_one_keeps_its_advantage():
    advantage = torch.randn(5, 3)
    assert torch.equal(subtract_group_mean(advantage, 1), advantage)


def test_environments_that_do_not_make_whole_groups_are_refused():
    with pytest.raises(AssertionError):
        subtract_group_mean(torch.randn(2, 5), 2)
