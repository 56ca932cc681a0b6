"""Passes as graphs of tensors that return gradients. The graphs run here as they were traced."""

import signal
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from esper.kasmina.lifecycle import doses
from esper.kasmina.stack.rows import ParameterPlace, Stack
from esper.leyline.lifecycle.vocabulary import LIVE, Op, Stage
from esper.tolaria.stacked import compiling
from esper.tolaria.stacked.compiling import CompiledPass, CudaGraphPass, PassBatch, gradients, shielded
from esper.tolaria.stacked.population import shadows
from populations import small_config, trajectory

LIVE_AND_INCUBATING = {
    (0, 1): (Op.GERMINATE, 0, 1, 0, 2, 3),
    (2, 1): (Op.ADVANCE, 0),
    (3, 2): (Op.GERMINATE, 1, 2, 2, 1, 3),
}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    monkeypatch.setattr(compiling, "compiled", lambda graph, tensors: graph)


def grown(decisions=LIVE_AND_INCUBATING, **options):
    """Make an engine with a live and an incubating seed, the route of its next pass, and a batch with weights and factors."""
    config = small_config(steps=4, **options)
    engine, *_ = trajectory(config, decisions)
    seeds, body, feed = engine.state.seeds, engine.population.body, engine.population.feed
    part, shadow = body.parts[0], config.lifecycle.incubation == "shadow"
    branches = shadows(seeds).within(part)[0] if shadow else None
    route = body.route(doses(seeds), seeds, branches, part=part, train=True, straight=not shadow)
    body.train(True)
    feed.advance()
    generator = torch.Generator().manual_seed(1)
    x, y = feed.of(part)
    weights, factors = (torch.rand(shape, generator=generator).to(y.device) for shape in (y.shape, len(y)))
    return engine, route, PassBatch(x, y, weights, factors)


def added(engine, route, batch, mode, times=2):
    """Return the losses of a pass, and the gradients of every stack after some passes over one batch."""
    passes, body = engine.population.passes, engine.population.body
    stacks = [body.host, *body.stacks.values()]
    for stack in stacks:
        stack.columns["gradient"].zero_()
    passes.mode = mode
    losses = [passes.forward_backward(route, batch) for _ in range(times)]
    return [losses[-1], *(stack.columns["gradient"].clone() for stack in stacks)]


@pytest.mark.parametrize(("incubation", "microbatch"), [("shadow", 0), ("shadow", 5), ("ste", 0)])
def test_a_graph_adds_the_gradients_of_hosts_and_of_live_and_incubating_seeds(incubation, microbatch):
    engine, *given = grown(
        lifecycle={"incubation": incubation},
        data={"microbatch": microbatch},
        optimizer={"accumulation_steps": 3},
    )
    stage = engine.state.seeds.stage
    assert stage[1, 0] in LIVE
    assert stage[2, 1] == Stage.TRAINING
    eager, graph = (added(engine, *given, mode) for mode in ("off", "on"))
    assert all(gradient.abs().sum() > 0 for gradient in eager), "every stack has gradients"
    for one, other in zip(eager, graph, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_outputs_that_rows_do_not_have_are_inputs_of_a_graph():
    engine, route, batch = grown({})
    body, passes = engine.population.body, engine.population.passes
    real = torch.ones(3, 1, 3, dtype=torch.bool, device=batch[0].device)
    batch = batch._replace(y=batch.y.clamp(max=1))
    plans = passes.counts.plans
    for fewer in (0, 1):
        real[fewer, :, 2] = False
        body.real_outputs = real.clone()
        eager, graph = (added(engine, route, batch, mode) for mode in ("off", "on"))
        for one, other in zip(eager, graph, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    assert passes.counts.plans == plans + 1, "one graph serves both, and another one the passes without them"


def test_a_pass_that_finds_out_about_a_loop_leaves_the_gradients_alone():
    engine, route, batch = grown({}, mapping="loop")
    passes, host = engine.population.passes, engine.population.body.host
    eager = added(engine, route, batch, "off")
    host._parts.clear()
    passes._known.clear()
    looped = passes.counts.looped
    again = added(engine, route, batch, "on")
    assert passes.counts.looped == looped + 1
    assert all(torch.equal(one, other) for one, other in zip(eager, again, strict=True))


def test_what_is_compiled_again_after_many_other_plans_is_counted(monkeypatch):
    monkeypatch.setattr(compiling, "PLANS", 1)
    engine, route, batch = grown()
    body, passes, seeds = engine.population.body, engine.population.passes, engine.state.seeds
    bare = body.route(0 * doses(seeds), seeds, part=route.part, train=True)
    passes.mode = "on"
    for each in (route, bare, route):
        passes.forward_backward(each, batch)
    assert (passes.counts.plans, passes.recompiled) == (3, 1)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 2), (2, 3, 2, 2)])
def test_a_parameter_of_rows_is_turned_back_into_their_columns(shape):
    shape = torch.Size(shape)
    place, rows = ParameterPlace("p", shape, 2, 2 + shape.numel(), ()), torch.randn(4, shape.numel() + 5)
    assert torch.equal(place.flat(place.of(rows)), rows[:, 2 : 2 + shape.numel()])


class Tied(nn.Module):
    """Maps twice by one weight, and has a third parameter that nothing reads."""

    stacks = True

    def __init__(self):
        from esper.kasmina.stack.layers import Linear

        super().__init__()
        self.first, self.second = Linear(3, 3), Linear(3, 3)
        self.second.weight = self.first.weight
        self.unread = nn.Parameter(torch.randn(2))


def test_a_parameter_that_two_segments_share_gets_both_gradients():
    stack, x = Stack(Tied(), 2), torch.randn(2, 4, 3)
    for row in range(2):
        stack.write(row, Tied())

    def total():
        return stack(stack(x, slice(0, 2), part="first"), slice(0, 2), part="second").square().sum()

    total().backward()
    one = torch.ones(())
    with stack.bound({"value": stack.columns["value"]}):
        runs, found = gradients([stack], [(total(), one)])
    added = torch.zeros_like(stack.columns["gradient"])
    for run, gradient in zip(runs, found, strict=True):
        added[run.rows, run.columns] += gradient
    torch.testing.assert_close(added, stack.columns["gradient"], rtol=1e-5, atol=1e-6)


def test_a_recorded_pass_reads_the_body_where_it_is_and_each_batch_and_is_recorded_anew_where_the_body_moved():
    """Check without CUDA, which alone has graphs: the record calls the pass again, on the tensors with which it was recorded."""

    def again(run, tensors, pool):
        results = [each.clone() for each in run(*tensors)]

        def play():
            for kept, new in zip(results, run(*tensors), strict=True):
                kept.copy_(new)

        return play, results

    engine, route, (x, y, weights, factors, _) = grown()
    passes, body = engine.population.passes, engine.population.body
    first = passes.inputs(route, PassBatch(x, y, weights, factors))
    graph, runs = passes.traced(first)
    recorded = CudaGraphPass(graph, first.state, again)

    def passed(run, inputs):
        body.host.columns["gradient"].zero_()
        return CompiledPass(run, runs)(inputs.stacks, inputs.tensors), body.host.columns["gradient"].clone()

    kept, *_ = passed(recorded, first)
    losses = kept.clone()
    for records, others in ((1, (x.flip(1), y.flip(1), 2 * weights, factors)), (2, (x, y, weights, 3 * factors))):
        if records == 2:
            body.host.columns["value"] = 0.5 * body.host.columns["value"]
            body.host._leaves.clear()
        body.host.columns["value"][:] += 0.01
        inputs = passes.inputs(route, PassBatch(*others))
        for got, expected in zip(passed(recorded, inputs), passed(graph, inputs), strict=True):
            assert torch.equal(got, expected)
        assert recorded.records == records
    assert torch.equal(kept, losses)
    assert not torch.equal(passed(recorded, first)[0], losses)


@pytest.mark.campaign
def test_torch_takes_a_pass_with_live_and_incubating_seeds_as_one_graph():
    engine, route, batch = grown()
    passes = engine.population.passes
    inputs = passes.inputs(route, batch)
    graph, _ = passes.traced(inputs)
    whole = torch.compile(graph, fullgraph=True, backend="eager")  # raises where the graph would break
    for got, expected in zip(whole(*inputs.tensors), graph(*inputs.tensors), strict=True):
        assert torch.equal(got, expected)


def test_ctrl_c_does_not_reach_a_process_that_is_started_under_a_shield_and_takes_effect_behind_it():
    def interrupted():
        with shielded():
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
            child.send_signal(signal.SIGINT)
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            assert child.wait() == 0

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
