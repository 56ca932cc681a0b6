"""Seeds for both ends of a network on vectors: rows that are chosen, a full head, and stacks of hosts of different widths."""

import numpy as np
import pytest
import torch
from torch import nn

from esper.kasmina.blueprints import drawn_with, get_blueprint
from esper.kasmina.blueprints.vector import SparseHead, SparseRows
from esper.kasmina.host import SegmentedHost, check_host
from esper.kasmina.stack.rows import Stack
from esper.leyline.lifecycle.slots import Kind, SlotSpec
from esper.leyline.messages import InputError
from esper.tasks.hosts import Floor

SIZES = ((20, 12), (3, 12), (20, 2), (9, 9))
"""Widths read and written: more and fewer than the 8 rows of a sparse blueprint."""
SPARSE = ("sparse-rows", "sparse-head")


def drawn(name, reads, writes, key):
    """Make a module with parameters away from their birth, and rows that were chosen by random gradients."""
    with drawn_with(key):
        module = get_blueprint(name, Kind.VECTOR).build(reads, writes)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        if name in SPARSE:
            module.choose(torch.randn(30, reads), torch.randn(30, writes))
    return module


def slow(module, u):
    """Compute the change of one example (r,), feature by feature."""
    rows, delta = module.chosen.tolist(), torch.zeros(len(u) if isinstance(module, SparseRows) else module.writes)
    if isinstance(module, SparseRows):
        return sum(u[i] * module.out.weight[:, place] for place, i in enumerate(rows))
    for place, o in enumerate(rows):
        delta[o] = module.out.weight[place] @ u + module.out.bias[place]
    return delta


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize(("reads", "writes"), SIZES)
def test_chosen_rows_of_vectors_compute_what_their_definition_says(name, reads, writes):
    module, u = drawn(name, reads, writes, 1), torch.randn(5, reads)
    for x, y in zip(u, module(u), strict=True):
        torch.testing.assert_close(y, slow(module, x))


@pytest.mark.parametrize("build", [SparseRows, SparseHead])
def test_the_rows_are_those_of_a_dense_map_with_the_largest_gradient(build):
    module, u, pull = build(12, 11, 3), torch.randn(40, 12), torch.randn(40, 11)
    dense = nn.Linear(12, 11)
    nn.init.zeros_(dense.weight)
    (dense(u) * pull).sum().backward()  # the gradient of this loss for the stream is `pull`
    weight, bias = dense.weight.grad, dense.bias.grad
    norms = weight.norm(dim=0) if build is SparseRows else torch.cat([weight, bias[:, None]], 1).norm(dim=1)
    module.choose(u, pull)
    assert module.chosen.tolist() == sorted(norms.argsort(descending=True)[:3].tolist())


def test_a_full_head_turns_a_last_layer_into_any_other():
    head, other, u = nn.Linear(6, 4), nn.Linear(6, 4), torch.randn(5, 6)
    module = get_blueprint("full-head", Kind.VECTOR).build(6, 4)
    with torch.no_grad():
        module.out.weight.copy_(other.weight - head.weight)
        module.out.bias.copy_(other.bias - head.bias)
    torch.testing.assert_close(head(u) + module(u), other(u))


@pytest.mark.parametrize("name", [*SPARSE, "full-head", "bypass-mlp-2", "bypass-mlp-8"])
def test_modules_of_different_widths_share_a_stack_whose_padding_stays_exactly_0(name):
    """Check that each row computes and trains as it does alone; padded features are 0, and no gradient reaches padded outputs."""
    entry, most = get_blueprint(name, Kind.VECTOR), [max(size) for size in zip(*SIZES, strict=True)]
    modules = [drawn(name, *size, key=key) for key, size in enumerate(SIZES)]
    stack = Stack(entry.build(*most), len(SIZES))
    u, pull = torch.zeros(len(SIZES), 7, most[0]), torch.zeros(len(SIZES), 7, most[1])
    for row, (module, (reads, writes)) in enumerate(zip(modules, SIZES, strict=True)):
        stack.write(row, module)
        u[row, :, :reads], pull[row, :, :writes] = torch.randn(7, reads), torch.randn(7, writes)
    optimizer = torch.optim.AdamW([stack.columns["value"]], lr=0.05, weight_decay=0.1)
    for _ in range(4):
        stack.columns["gradient"].zero_()
        (stack(u, slice(0, len(SIZES))) * pull).sum().backward()
        stack.columns["value"].grad = stack.columns["gradient"]
        optimizer.step()
    together = stack(u, slice(0, len(SIZES)))
    for row, (module, (reads, writes)) in enumerate(zip(modules, SIZES, strict=True)):
        alone = torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)
        for _ in range(4):
            alone.zero_grad()
            (module(u[row, :, :reads]) * pull[row, :, :writes]).sum().backward()
            alone.step()
        torch.testing.assert_close(together[row, :, :writes], module(u[row, :, :reads]))
        assert not together[row, :, writes:].count_nonzero()
        rest = {place.name: place.of(stack.columns["value"][row]).detach().clone() for place in stack.places}
        for key, parameter in module.named_parameters():
            rest[key][tuple(slice(0, size) for size in parameter.shape)] = 0
            assert not rest[key].count_nonzero()
        if name in SPARSE:
            assert module.chosen.max() < (reads if name == "sparse-rows" else writes)
            assert torch.equal(stack.read(row, entry.build(reads, writes)).chosen, module.chosen)


def test_rows_of_hosts_can_be_gathered_in_any_order():
    stack, modules = Stack(SparseRows(20, 12, 8), 3), [drawn("sparse-rows", 20, 12, key) for key in range(3)]
    for row, module in enumerate(modules):
        stack.write(row, module)
    u = torch.randn(3, 4, 20)
    for place, row in enumerate([2, 0, 1]):
        torch.testing.assert_close(stack(u, np.array([2, 0, 1]))[place], modules[row](u[place]))


# The slot behind the last layer.


def test_a_slot_that_says_it_is_behind_the_last_layer_is_a_last_one():
    segments = [nn.Linear(4, 5), Floor(linear=False), nn.Linear(5, 2)]
    host = SegmentedHost(segments, [SlotSpec("a", 0, 5, head=True), SlotSpec("b", 1, 5)])
    with pytest.raises(InputError, match=r"slot 'a' of the host says .* and slot 'b' behind it does not; set head for"):
        check_host(host, torch.randn(3, 4), 2)
