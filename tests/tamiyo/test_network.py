"""Test the policy network: symmetries, sequences cut anywhere, and values in units that change."""

import pytest
import torch

from esper.leyline.lifecycle.vocabulary import Head, Op
from esper.tamiyo.policy.network import Batch, FactoredRecurrentActorCritic
from esper.tamiyo.policy.observation import PROSPECTS

SHAPES = {"env": 5, "slot": 7, "blueprints": 4, "tempos": 5, "targets": 4}
T, E, S, K = 6, 3, 4, 3


@pytest.fixture(autouse=True)
def double():
    """Set float64, so that equal means equal but for its rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def network():
    """Make a network whose heads have opinions: as drawn, they are nearly uniform."""
    made = FactoredRecurrentActorCritic(**SHAPES)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("head.2.weight"):
                parameter.mul_(50)
    return made


def batch(steps=T, envs=E, slots=S):
    return Batch(
        torch.randn(steps, envs, SHAPES["env"]),
        torch.randn(steps, envs, slots, SHAPES["slot"]),
        torch.randint(SHAPES["blueprints"] + 1, (steps, envs, slots)),
        torch.rand(steps, envs, slots, K),
        torch.randn(steps, envs, slots, K, 2 * len(PROSPECTS)),
        torch.tensor([2, 0, 3]),
    )


def part(whole, steps, envs):
    """Return some steps of some environments."""
    return Batch(*(field[steps, envs] for field in whole[:5]), whole.menu)


def heads(network, encoded, op, slot):
    return [network.logits(head, encoded, op, slot) for head in Head]


def close(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_permuting_slots_permutes_their_probabilities_and_changes_nothing_else(network):
    data, order = batch(), torch.tensor([2, 0, 3, 1])
    moved = Batch(data.env, *(field[:, :, order] for field in data[1:5]), data.menu)
    here, value, state = network(data, network.initial(E))
    there, same, after = network(moved, network.initial(E))
    op = torch.randint(len(Op), (T, E))
    close(same, value)
    close(after, state)
    for place in range(S):
        mine = heads(network, here, op, torch.full((T, E), int(order[place])))
        theirs = heads(network, there, op, torch.full((T, E), place))
        for head in Head:
            close(theirs[head], mine[head][..., order] if head is Head.SLOT else mine[head])


def test_permuting_the_menu_permutes_the_probabilities_of_blueprints(network):
    data, order = batch(), torch.tensor([1, 2, 0])
    moved = data._replace(cost=data.cost[..., order], prospects=data.prospects[..., order, :], menu=data.menu[order])
    op, slot = torch.full((T, E), Op.GERMINATE), torch.randint(S, (T, E))
    mine, theirs = (network.logits(Head.BLUEPRINT, network(x, network.initial(E))[0], op, slot) for x in (data, moved))
    close(theirs, mine[..., order])


def test_a_blueprint_that_the_vocabulary_lacks_is_read_as_the_mean_of_those_that_it_has(network):
    data = batch()
    unknown = network(data._replace(menu=torch.tensor([2, -1, 3])), network.initial(E))[0]
    with torch.no_grad():
        network.blueprint.weight[0] = network.blueprint.weight[: SHAPES["blueprints"]].mean(0)
    close(unknown.pairs, network(data, network.initial(E))[0].pairs)


def test_what_the_sensors_tell_of_a_blueprint_moves_its_own_score_and_that_of_no_other(network):
    data, op, slot = batch(), torch.full((T, E), Op.GERMINATE), torch.randint(S, (T, E))
    data.prospects.requires_grad_()
    encoded = network(data, network.initial(E))[0]
    pairs = encoded.pairs.detach().requires_grad_()
    scores = network.logits(Head.BLUEPRINT, encoded._replace(trunk=encoded.trunk.detach(), pairs=pairs), op, slot)
    (moved,) = torch.autograd.grad(scores[..., 1].sum(), pairs)
    assert moved[..., 1, :].abs().sum() > 0
    assert moved[..., [0, 2], :].abs().sum() == 0
    (told,) = torch.autograd.grad(encoded.pairs[..., 1, :].sum(), data.prospects)
    assert told[..., 1, :].abs().min() > 0
    assert told[..., [0, 2], :].abs().sum() == 0


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_the_same_weights_run_on_any_number_of_slots(network, slots):
    encoded, value, _ = network(batch(slots=slots), network.initial(E))
    op, slot = torch.full((T, E), Op.GERMINATE), torch.full((T, E), slots - 1)
    assert value.shape == (T, E)
    widths = [logits.shape for logits in heads(network, encoded, op, slot)]
    assert widths == [(T, E, n) for n in (len(Op), slots, K, 3, SHAPES["tempos"], SHAPES["targets"])]


def test_a_slot_that_was_not_chosen_does_not_change_what_is_read_of_the_chosen_one(network):
    encoded, _, _ = network(batch(), network.initial(E))
    op, slot = torch.full((T, E), Op.GERMINATE), torch.full((T, E), 1)
    others = encoded.slots.clone()
    others[:, :, [0, 2, 3]] += 1
    found = heads(network, encoded._replace(slots=others), op, slot)
    for head in (Head.OP, Head.BLUEPRINT, Head.BLEND, Head.TEMPO, Head.TARGET):
        close(found[head], network.logits(head, encoded, op, slot))


def test_sequences_that_begin_in_the_middle_equal_sequences_of_their_own(network):
    data, starts = batch(), torch.zeros(T, E, dtype=torch.bool)
    starts[0], starts[1, 1], starts[2, 0], starts[4, 0], starts[5, 2] = True, True, True, True, True
    old = torch.randn(E, network.hidden), torch.randn(E, network.hidden)
    encoded, value, last = network(data, old, starts)
    for env in range(E):
        begins = starts[:, env].nonzero()[:, 0].tolist()
        for begin, end in zip(begins, [*begins[1:], T], strict=True):
            own, worth, state = network(part(data, slice(begin, end), slice(env, env + 1)), network.initial(1))
            close(encoded.trunk[begin:end, env], own.trunk[:, 0])
            close(encoded.slots[begin:end, env], own.slots[:, 0])
            close(value[begin:end, env], worth[:, 0])
        close(last[0][env], state[0][0])
        close(last[1][env], state[1][0])


def test_without_a_start_a_sequence_goes_on_from_the_given_state(network):
    data, none = batch(), torch.zeros(T, E, dtype=torch.bool)
    first = network(part(data, slice(0, 2), slice(None)), network.initial(E))
    second = network(part(data, slice(2, T), slice(None)), first[2], none[2:])
    whole = network(data, network.initial(E))
    close(torch.cat([first[0].trunk, second[0].trunk]), whole[0].trunk)
    close(second[2], whole[2])


def test_step_by_step_equals_the_whole_sequence(network):
    data, state = batch(), network.initial(E)
    _, value, last = network(data, state)
    for t in range(T):
        _, one, state = network(part(data, slice(t, t + 1), slice(None)), state)
        close(one[0], value[t])
    close(state, last)


def test_an_environment_alone_equals_itself_in_the_batch(network):
    data = batch()
    encoded, value, _ = network(data, network.initial(E))
    alone, own, _ = network(part(data, slice(None), slice(1, 2)), network.initial(1))
    close(own[:, 0], value[:, 1])
    close(alone.trunk[:, 0], encoded.trunk[:, 1])


def test_other_moments_of_the_return_leave_every_value_what_it_is(network):
    data = batch()
    _, value, _ = network(data, network.initial(E))
    for mean, scale in ((3.0, 0.2), (-50.0, 40.0), (0.5, 1e-3)):
        network.rescale(torch.tensor(mean), torch.tensor(scale))
        assert (float(network.value_mean), float(network.value_scale)) == (mean, scale)
        torch.testing.assert_close(network(data, network.initial(E))[1], value, rtol=0, atol=1e-10)


def test_a_new_policy_is_nearly_uniform_and_expects_nearly_nothing():
    network = FactoredRecurrentActorCritic(**SHAPES)
    encoded, value, _ = network(batch(), network.initial(E))
    op, slot = torch.full((T, E), Op.GERMINATE), torch.zeros(T, E, dtype=torch.int64)
    assert value.abs().max() < 0.05
    for logits in heads(network, encoded, op, slot):
        share = logits.softmax(-1)
        torch.testing.assert_close(share, torch.full_like(share, 1 / share.shape[-1]), rtol=0.05, atol=0)


def test_every_parameter_is_used(network):
    encoded, value, _ = network(batch(), network.initial(E))
    op, slot = torch.randint(len(Op), (T, E)), torch.randint(S, (T, E))
    (value.sum() + sum(logits.square().sum() for logits in heads(network, encoded, op, slot))).backward()
    assert [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()] == []
