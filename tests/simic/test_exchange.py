"""Test the exchange between workers: sums that do not depend on who has which shard, and what is heard of a lost worker."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from esper.simic.exchange import Exchange, ExchangeError, divide

LENGTH = 50


def gloo(store, name, rank, size):
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)


def together(owners, size, compute, carried=False):
    """Return what each of some workers computes, which are threads that are connected by gloo.

    carried: whether another group carries what is summed. On GPUs it is of NCCL.
    """
    store = HashStore()

    def work(rank):
        if carried:
            exchange = Exchange(owners, rank, size, *(gloo(store, name, rank, size) for name in ("all", "sums")))
        else:
            exchange = Exchange.joined(store, owners, rank, size, "127.0.0.1")
        try:
            return compute(exchange)
        finally:
            exchange.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def slow_tree(values):
    """Sum a list by the definition of the tree."""
    if len(values) == 1:
        return values[0]
    half = 1
    while 2 * half < len(values):
        half *= 2
    return slow_tree(values[:half]) + slow_tree(values[half:])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shards", [[0, 1, 2, 3, 4, 5, 6], [2], [0, 2, 5]])
def test_a_sum_has_the_same_bits_for_any_number_of_workers(size, shards):
    parts = {shard: torch.randn(LENGTH) * 10.0**shard for shard in range(7)}
    expected = slow_tree([parts[shard] for shard in shards])
    if len(shards) > 3:
        assert not torch.equal(expected, sum(parts[shard] for shard in shards)), "the order of the sum matters here"

    def compute(exchange):
        own = {shard: parts[shard] for shard in shards if exchange.owns(shard)}
        return exchange.sum(own, shards, LENGTH)

    for owners, carried in itertools.product((divide([7], size), [shard % size for shard in range(7)]), (False, True)):
        assert all(torch.equal(found, expected) for found in together(owners, size, compute, carried))
    assert torch.equal(Exchange().sum(parts, shards, LENGTH), expected)


def test_trees_of_any_size_are_gathered_by_all_with_every_bit():
    rows = [np.array([1e300, -0.0]), np.array([np.inf, 1e-300, 0.1] * 1000), np.array([np.nan])]

    def compute(exchange):
        return [(each["rank"], each["rows"][0].tobytes()) for each in exchange.gather(given[exchange.rank])]

    given = [{"rank": rank, "rows": [row]} for rank, row in enumerate(rows)]
    assert together([], 3, compute) == [[(rank, row.tobytes()) for rank, row in enumerate(rows)]] * 3
    assert Exchange().gather(given[0]) == [given[0]]


def test_workers_meet_and_one_that_is_asked_to_stop_does_not_wait():
    late = threading.Event()

    def compute(exchange):
        if exchange.rank == 0:
            stopped = not exchange.meet(lambda: True)
            late.set()
            return stopped
        late.wait(20)
        return exchange.rank

    assert together([], 2, compute) == [True, 1]
    assert together([], 2, lambda exchange: exchange.meet()) == [True, True]


@pytest.mark.parametrize("carried", [False, True])
def test_a_worker_that_is_gone_is_an_error_for_all_that_wait_for_it(carried):
    def compute(exchange):
        if exchange.rank == 1:
            return "gone"
        with pytest.raises(ExchangeError):
            exchange.sum({shard: torch.ones(3) for shard in range(3) if exchange.owns(shard)}, range(3), 3)
        return "told"

    assert together([0, 1, 2], 3, compute, carried) == ["told", "gone", "told"]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shards", [[4], [1, 1, 2], [3, 1], [2, 8], [64, 5]])
def test_every_worker_has_shards_and_about_as_many_of_each_task_which_follow_each_other(shards, size):
    owners = divide(shards, size)
    counts = np.bincount(owners, minlength=size)
    assert counts.min() >= 1
    assert counts.max() - counts.min() <= 1
    begin = 0
    for count in shards:
        own = owners[begin : begin + count]
        assert own == sorted(own)
        each = np.bincount(own, minlength=size)
        assert each.max() - each.min() <= 2
        begin += count
