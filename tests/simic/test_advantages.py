"""Advantages against sums written out, with every kind of end that a sequence can have."""

import pytest
import torch

from esper.simic.ppo import advantages, subtract_group_mean

T, E = 9, 4
GOES_ON, TERMINAL, CUT, ROLLBACK = range(4)


def drawn(seed=0):
    """Rewards, values, values behind an end, and ends: terminals, truncations and rollbacks, some of them in mid-rollout."""
    generator = torch.Generator().manual_seed(seed)
    reward, value, worth = (torch.randn(T, E, generator=generator, dtype=torch.float64) for _ in range(3))
    kind = torch.where(
        torch.rand(T, E, generator=generator) < 0.6, GOES_ON, torch.randint(4, (T, E), generator=generator)
    )
    kind[-1] = torch.where(kind[-1] == GOES_ON, CUT, kind[-1])
    kind[3, :3] = torch.tensor([TERMINAL, CUT, ROLLBACK])
    reward[kind == ROLLBACK] -= 5.0  # its penalty
    return reward, value, torch.where(kind == CUT, worth, 0.0), kind != GOES_ON


def slow(reward, value, after, end, gamma, lam):
    """A_t = sum over l of (gamma lam)^l delta_{t + l}, and the discounted rewards, up to the end of the sequence."""
    advantage, returns = torch.zeros(T, E, dtype=torch.float64), torch.zeros(T, E, dtype=torch.float64)
    for e in range(E):
        for t in range(T):
            for later in range(t, T):
                last = bool(end[later, e])
                following = after[later, e] if last else value[later + 1, e]
                delta = reward[later, e] + gamma * following - value[later, e]
                advantage[t, e] += (gamma * lam) ** (later - t) * delta
                returns[t, e] += gamma ** (later - t) * (reward[later, e] + (gamma * after[later, e] if last else 0))
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
    reward, value, after, end = drawn()
    following = torch.where(end, after, value.roll(-1, 0))
    torch.testing.assert_close(
        advantages(reward, value, after, end, 0.9, 0.0).advantage, reward + 0.9 * following - value
    )


def test_with_a_full_trace_the_advantage_is_the_return_less_the_value():
    reward, value, after, end = drawn()
    found = advantages(reward, value, after, end, 0.9, 1.0)
    torch.testing.assert_close(found.advantage, found.returns - value)


def test_what_lies_behind_an_end_changes_nothing_in_front_of_it():
    reward, value, after, end = drawn()
    end[4], after[4] = True, 0.0
    before = advantages(reward, value, after, end, 0.9, 0.8).advantage[:5]
    reward[5:], value[5:], after[5:] = 100.0, 50.0, 7.0
    assert torch.equal(advantages(reward, value, after, end, 0.9, 0.8).advantage[:5], before)


def test_what_a_state_is_worth_is_read_only_where_a_sequence_ends():
    reward, value, after, end = drawn()
    found = advantages(reward, value, after, end, 0.9, 0.8)
    other = advantages(reward, value, torch.where(end, after, torch.nan), end, 0.9, 0.8)
    assert all(torch.equal(a, b) for a, b in zip(found, other, strict=True))


def test_a_sequence_that_is_cut_and_bootstrapped_equals_the_whole_one_where_the_critic_is_right():
    reward = torch.randn(6, 2, dtype=torch.float64)
    value = reward.flip(0).cumsum(0).flip(0)  # what comes, to the terminal
    end = torch.zeros(6, 2, dtype=torch.bool)
    end[-1] = True
    whole = advantages(reward, value, torch.zeros_like(reward), end, 1.0, 0.95)
    cut = torch.zeros_like(reward[:3])
    cut[-1] = value[3]
    part = advantages(reward[:3], value[:3], cut, end[3:], 1.0, 0.95)
    torch.testing.assert_close(part.returns, whole.returns[:3])
    torch.testing.assert_close(part.advantage, torch.zeros_like(part.advantage), rtol=0, atol=1e-12)


def test_each_environment_alone_equals_itself_among_the_others():
    data = drawn()
    together = advantages(*data, 0.9, 0.8)
    for e in range(E):
        alone = advantages(*(x[:, e : e + 1] for x in data), 0.9, 0.8)
        assert all(torch.equal(one[:, 0], many[:, e]) for one, many in zip(alone, together, strict=True))


def test_a_rollout_that_ends_in_the_air_is_refused():
    reward, value, after, end = drawn()
    end[-1, 2] = False
    with pytest.raises(AssertionError, match="ends every sequence"):
        advantages(reward, value, after, end, 0.9, 0.8)


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
