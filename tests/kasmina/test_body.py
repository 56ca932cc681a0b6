"""Test what a population computes: seeds at any dose, and nothing that a dose of 0 or an incubating seed could change."""

import numpy as np
import pytest
import torch

from bodies import ALL, empty, make_body, set_seed, shake
from esper.kasmina.blueprints import drawn_with, get_blueprint
from esper.kasmina.lifecycle import doses
from esper.kasmina.network.export import GrownNetwork, grown_network
from esper.kasmina.stack.plan import Branches
from esper.leyline.data.task import Interface
from esper.leyline.lifecycle.vocabulary import Blend, Stage
from esper.tasks.hosts import MLP
from esper.tolaria.stacked.population import shadows
from thinning import crossed


def parameters(body, env):
    return body.host.columns["value"][env]


def test_an_empty_slot_gives_the_host_bit_for_bit():
    body, x = make_body(4), torch.randn(4, 7, 6)
    host = body.host(x, slice(0, 4))
    seeds = empty(body)
    assert torch.equal(body.run(x, body.route(doses(seeds), seeds)).output, host)


@pytest.mark.parametrize("blend", Blend)
def test_a_seed_at_dose_zero_gives_the_host_bit_for_bit_even_if_it_holds_nan(blend):
    rows = (len(ALL) + 1) // 2  # every blueprint once, at one of two slots
    body, x = make_body(rows), torch.randn(rows, 7, 6)
    seeds = empty(body)
    without = body.run(x, body.route(doses(seeds), seeds)).output
    for index in range(len(ALL)):
        seeds = set_seed(body, seeds, index % rows, index // rows, index, blend=blend)
    for stack in body.stacks.values():
        stack.columns["value"].fill_(torch.nan)
    assert torch.equal(body.run(x, body.route(np.zeros_like(seeds.alpha), seeds)).output, without)


@pytest.mark.parametrize("incubation", ["shadow", "ste"])
@pytest.mark.parametrize("poison", [False, True])
def test_an_incubating_seed_leaves_host_outputs_and_gradients_bit_identical(incubation, poison):
    x = torch.randn(4, 7, 6)

    def run(with_seed):
        body = make_body(4)
        seeds = set_seed(body, empty(body), 0, 0, ALL.index("mlp-small"))  # a live neighbour in every case
        if with_seed:
            for env, slot, name in ((0, 1, "bypass-mlp"), (1, 0, "gated"), (1, 1, "skip-mlp"), (3, 0, "affine")):
                seeds = set_seed(body, seeds, env, slot, ALL.index(name), stage=Stage.TRAINING)
                if poison:
                    at = slot, int(body.layout.form_of[slot, ALL.index(name)])
                    body.stacks[at].columns["value"][body.envs[at].tolist().index(env)] = torch.nan
        route = body.route(doses(seeds), seeds, shadows(seeds), train=True, straight=incubation == "ste")
        result = body.run(x, route)
        total = result.output.square().sum()
        if result.branches is not None:
            total = total + result.branches.square().sum()
        if result.proximal is not None:
            total = total + result.proximal.sum()
        total.backward()
        return result.output.detach(), body.host.columns["gradient"]

    for got, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("straight", [False, True])
def test_an_incubating_seed_learns(straight):
    body, x = make_body(3), torch.randn(3, 7, 6)
    seeds = set_seed(body, empty(body), 1, 0, ALL.index("bypass-mlp"), stage=Stage.TRAINING)
    route = body.route(doses(seeds), seeds, None if straight else shadows(seeds), train=True, straight=straight)
    result = body.run(x, route)
    loss = result.output.square().sum()
    (loss if result.branches is None else loss + result.branches.square().sum()).backward()
    stack = body.stacks[0, int(body.layout.form_of[0, ALL.index("bypass-mlp")])]
    assert all(
        stack.parameter(name, "gradient")[0].count_nonzero() for name in ("delta.inner.weight", "delta.out.weight")
    )


def test_a_shadow_minimises_the_loss_of_the_network_with_this_one_seed_at_dose_one():
    body, x = make_body(3, dtype=torch.float64), torch.randn(3, 7, 6, dtype=torch.float64)
    seeds = set_seed(body, empty(body), 1, 1, ALL.index("mlp-small"), alpha=0.5)
    seeds = set_seed(body, seeds, 1, 0, ALL.index("bypass-mlp"), stage=Stage.TRAINING)
    result = body.run(x, body.route(doses(seeds), seeds, shadows(seeds), train=True))
    result.branches.square().mean().backward()
    at = 0, int(body.layout.form_of[0, ALL.index("bypass-mlp")])

    network, _ = grown_network(
        MLP(6, 8, (3, 5), 3), body, fossilized(seeds, {(1, 0): 1.0, (1, 1): 0.5}), 1, Interface((6,))
    )
    network(x[1]).square().mean().backward()
    for name, parameter in network.seeds[0].named_parameters():
        shape = tuple(slice(0, k) for k in parameter.shape)
        torch.testing.assert_close(body.stacks[at].parameter(name, "gradient")[0][shape], parameter.grad)
    assert not body.host.columns["gradient"].count_nonzero()
    other = body.stacks[1, int(body.layout.form_of[1, ALL.index("mlp-small")])]
    assert not other.columns["gradient"].count_nonzero()


def fossilized(seeds, alphas):
    after = type(seeds)(*(field.copy() for field in seeds))
    for (env, slot), alpha in alphas.items():
        after.stage[env, slot], after.alpha[env, slot] = Stage.FOSSILIZED, alpha
    return after


@pytest.mark.parametrize("plain", [False, True])
def test_evaluation_at_a_dose_equals_a_separate_network_built_without_that_seed(plain):
    body, x = make_body(3, dtype=torch.float64, plain=plain), torch.randn(3, 9, 6, dtype=torch.float64)
    seeds = empty(body)
    for env, slot, name, blend in (
        (0, 0, "bypass-mlp", Blend.ADD),
        (0, 1, "mlp-small", Blend.MULTIPLY),
        (1, 0, "mlp-large", Blend.GATE),
        (1, 1, "bypass-linear", Blend.GATE),
        (2, 0, "skip-mlp", Blend.ADD),
        (2, 1, "bypass-mlp", Blend.ADD),
    ):
        seeds = set_seed(body, seeds, env, slot, ALL.index(name), blend=blend, alpha=0.75)
    asked = [(env, slot) for env in range(3) for slot in range(2)]
    dose = np.repeat(doses(seeds)[:3], 2, axis=0)
    dose[np.arange(6), [slot for _, slot in asked]] = 0
    branches, order = Branches.at(np.repeat(np.arange(3), 2), np.tile(np.arange(2), 3), dose)
    with torch.no_grad():
        result = body.run(x, body.route(doses(seeds), seeds, branches))
    factory = MLP(6, 8, (3, 5), 3)
    for env in range(3):
        whole, _ = grown_network(
            factory, body, fossilized(seeds, {(env, 0): 0.75, (env, 1): 0.75}), env, Interface((x.shape[-1],))
        )
        torch.testing.assert_close(result.output[env], whole(x[env]), rtol=1e-10, atol=1e-12)
    for row, index in enumerate(order):
        env, slot = asked[index]
        rest, _ = grown_network(
            factory, body, fossilized(seeds, {(env, 1 - slot): 0.75}), env, Interface((x.shape[-1],))
        )
        assert isinstance(rest, GrownNetwork)
        assert len(rest.seeds) == 1
        torch.testing.assert_close(result.branches[row], rest(x[env]), rtol=1e-10, atol=1e-12)


@torch.no_grad()
def copy_row(stack, source, target):
    for column in stack.columns.values():
        column[target] = column[source]


@pytest.mark.parametrize(
    ("width", "plain"),
    [
        *crossed([1, 3, 16], [True, False]),
        *(pytest.param(width, plain, marks=pytest.mark.slow) for width in (2, 8, 12) for plain in (False, True)),
    ],
)
def test_a_row_is_bitwise_the_same_in_any_group_for_every_blueprint_and_blend(width, plain):
    batch = 2 * width + 3
    x = torch.randn(batch, 6).expand(6, batch, 6).contiguous()
    body = make_body(6, width=width, hidden=(width, 3), plain=plain)
    for row in range(1, 6):
        copy_row(body.host, 0, row)
    for index in range(len(ALL)):
        stack_key = 0, int(body.layout.form_of[0, index])
        for blend in Blend:
            body.clear()
            seeds = empty(body)
            for env in range(6):
                seeds = set_seed(body, seeds, env, 0, index, blend=blend, alpha=0.5, jolt=0)
            shake(body, seeds, 0, 0, 0.3)
            stack = body.stacks[stack_key]
            for row in range(1, 6):
                copy_row(stack, 0, row)
            results = []
            for group in (1, 2, 5, 6):  # six is every row, which takes no index
                dose = doses(seeds)
                dose[group:] = 0
                body.host.columns["gradient"].zero_()
                stack.columns["gradient"].zero_()
                result = body.run(x, body.route(dose, seeds))
                result.output.square().sum().backward()
                assert torch.equal(result.output[0], result.output[group - 1])
                gradients = body.host.columns["gradient"][0].clone(), stack.columns["gradient"][0].clone()
                results.append((result.output[0].detach(), *gradients))
            for other in results[1:]:
                for got, expected in zip(other, results[0], strict=True):
                    assert torch.equal(got, expected), (ALL[index], blend)


@pytest.mark.parametrize("plain", [False, True])
def test_a_row_is_bitwise_the_same_whatever_its_neighbours_carry(plain):
    x = torch.randn(11, 6).expand(6, 11, 6).contiguous()
    bodies = make_body(6, plain=plain), make_body(6, plain=plain)

    def row_zero(body, index, blend, neighbours):
        body.clear()
        seeds = set_seed(body, empty(body), 0, 0, index, blend=blend, alpha=0.5, key=3)
        for env, (other, other_blend) in enumerate(neighbours, 1):
            seeds = set_seed(body, seeds, env, 0, other, blend=other_blend, alpha=0.25)
        for part in (body.host, *body.stacks.values()):
            part.columns["gradient"].zero_()
        result = body.run(x, body.route(doses(seeds), seeds))
        result.output.square().sum().backward()
        at = 0, int(body.layout.form_of[0, index])
        gradients = (
            body.host.columns["gradient"][0],
            body.stacks[at].columns["gradient"][body.envs[at].tolist().index(0)],
        )
        return result.output[0].detach(), *(gradient.clone() for gradient in gradients)

    mixture = [
        (ALL.index("mlp-small"), Blend.MULTIPLY),
        (ALL.index("bypass-mlp"), Blend.GATE),
        (ALL.index("gated"), Blend.ADD),
    ]
    for index in range(len(ALL)):
        for blend in Blend:
            alone, among = row_zero(bodies[0], index, blend, []), row_zero(bodies[1], index, blend, mixture)
            assert alone[2].count_nonzero()
            for got, expected in zip(among, alone, strict=True):
                assert torch.equal(got, expected), (ALL[index], blend)


def test_blueprints_that_differ_only_in_width_or_tap_share_one_stack():
    body = make_body(3)
    forms = {name: int(body.layout.form_of[0, ALL.index(name)]) for name in ALL}
    assert forms["mlp-small"] == forms["mlp-large"] == forms["bypass-mlp"]
    assert len({forms[name] for name in ("affine", "gated", "bypass-linear", "mlp-small")}) == 4


def test_padded_units_of_a_shared_stack_stay_exactly_zero_through_training():
    body = make_body(2)
    small = ALL.index("mlp-small")
    seeds = set_seed(body, empty(body), 0, 0, small)
    stack = body.stacks[0, int(body.layout.form_of[0, small])]
    optimizer = torch.optim.SGD([stack.columns["value"]], lr=0.1)
    for _ in range(5):
        result = body.run(torch.randn(2, 7, 6), body.route(doses(seeds), seeds))
        result.output.square().sum().backward()
        stack.columns["value"].grad = stack.columns["gradient"].clone()
        optimizer.step()
    hidden = get_blueprint("mlp-small").build(8, 8).inner.out_features
    assert stack.parameter("delta.inner.weight")[0, :hidden].count_nonzero()
    assert not stack.parameter("delta.inner.weight")[0, hidden:].count_nonzero()
    assert not stack.parameter("delta.out.weight")[0, :, hidden:].count_nonzero()


def test_a_birth_and_a_prune_leave_every_other_seed_bit_identical():
    from esper.kasmina.lifecycle import edits

    body = make_body(6)
    seeds = empty(body)
    for env in range(5):
        seeds = set_seed(body, seeds, env, 0, ALL.index("bypass-mlp"))
    at = 0, int(body.layout.form_of[0, ALL.index("bypass-mlp")])
    for column in body.stacks[at].columns.values():
        column.copy_(torch.randn(column.shape))

    def of(env):
        row = body.envs[at].tolist().index(env)
        return {name: column[row].clone() for name, column in body.stacks[at].columns.items()}

    before = {env: of(env) for env in range(5)}
    after = type(seeds)(*(field.copy() for field in seeds))
    after.stage[2, 0], after.blueprint[2, 0], after.alpha[2, 0] = Stage.PRUNED, -1, 0
    after.stage[4, 0], after.alpha[4, 0] = Stage.TRAINING, 0  # moves to another group of rows
    after.stage[5, 0], after.blueprint[5, 0] = Stage.GERMINATED, ALL.index("mlp-small")
    body.edit(edits(seeds, after), after, lambda e, s: 9)
    assert sorted(body.envs[at]) == [0, 1, 3, 4, 5]
    for env in (0, 1, 3, 4):
        for name, values in of(env).items():
            assert torch.equal(values, before[env][name])
    with drawn_with(9):
        newborn = get_blueprint("mlp-small").build(8, 8)
    assert torch.equal(body.seed_module(after, 5, 0).delta.inner.weight, newborn.inner.weight)


def test_isolation_stops_the_gradient_through_what_a_live_seed_reads():
    x = torch.randn(2, 7, 6)

    def embed_gradient(isolated, stage):
        body = make_body(2, isolated=isolated)
        with torch.no_grad():  # the segment in front of the slot passes nothing, so that the seed is the only way back
            body.host.parameter("segments.1.2.weight").zero_()
            body.host.parameter("segments.2.2.weight").zero_()
        seeds = set_seed(body, empty(body), 0, 0, ALL.index("bypass-linear"), stage=stage)
        seeds = set_seed(body, seeds, 0, 1, ALL.index("bypass-linear"), stage=stage)
        result = body.run(x, body.route(doses(seeds), seeds))
        result.output.square().sum().backward()
        return body.host.parameter("segments.0.weight", "gradient")[0]

    assert embed_gradient(False, Stage.HOLDING).count_nonzero()
    assert not embed_gradient(True, Stage.HOLDING).count_nonzero()
    assert embed_gradient(True, Stage.FOSSILIZED).count_nonzero()


def test_parameters_are_counted_by_what_the_blend_uses():
    body = make_body(3)
    seeds = set_seed(body, empty(body), 0, 0, ALL.index("bypass-linear"))
    seeds = set_seed(body, seeds, 1, 0, ALL.index("bypass-linear"), blend=Blend.GATE)
    seeds = set_seed(body, seeds, 2, 0, ALL.index("bypass-linear"), stage=Stage.TRAINING)
    assert body.table.added_params(seeds).tolist() == [8 * 8 + 8, 8 * 8 + 8 + 9, 0]
