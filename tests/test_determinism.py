"""Check what is the same to the bit and what to rounding, as docs/determinism.md says."""

import subprocess
import sys

import pytest
import torch

from esper.store.tensors import flatten, unflatten
from esper.tamiyo.rules.base import RandomValid
from esper.tasks.catalog import get_task
from esper.tolaria.engine import VectorizedEngine
from populations import blobs, small_config


def states(task, config, steps):
    """Return all arrays of a population after every step, under a client that plants and prunes at random."""
    engine, client = VectorizedEngine(task.sealed(), config), RandomValid()
    view, seen = engine.reset(), []
    for _ in range(steps):
        view, outcome = engine.step(client.act(view))
        client.store(outcome)
        seen.append(flatten(engine.snapshot())[0])
    return seen


def assert_equal(first, second):
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name].nan_to_num(-1), b[name].nan_to_num(-1)), name


@pytest.mark.parametrize(
    ("name", "optimizer"), [("blobs", "sgd"), ("spirals-narrow", "adamw"), ("digits-image-narrow", "adamw")]
)
def test_deterministic_kernels_give_the_same_bits_on_the_cpu(name, optimizer):
    task = blobs() if name == "blobs" else get_task(name)
    config = small_config(
        task=name, envs=2, steps=5, twin=True, optimizer={"name": optimizer}, probe={"sensors_every": 2}
    )
    usual = states(task, config, 5)
    assert not torch.are_deterministic_algorithms_enabled()
    fixed = states(task, config.model_copy(update={"deterministic": True}), 5)
    assert torch.are_deterministic_algorithms_enabled()
    assert_equal(usual, fixed)


def test_an_engine_that_does_not_ask_for_them_leaves_the_kernels_as_they_are():
    torch.use_deterministic_algorithms(True)
    VectorizedEngine(blobs(), small_config())
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.campaign
def test_for_a_gpu_the_workspace_is_fixed_before_cuda_begins_unless_it_is_already():
    code = (
        "import os, torch\nfrom esper.tolaria.runtime import use_deterministic_kernels\n"
        "for device, before in ('cpu', None), ('cuda', None), ('cuda', ':16:8'), ('cuda', ':0:0'):\n"
        "    os.environ.pop('CUBLAS_WORKSPACE_CONFIG', None)\n"
        "    if before: os.environ['CUBLAS_WORKSPACE_CONFIG'] = before\n"
        "    use_deterministic_kernels(torch.device(device))\n"
        "    print(os.environ.get('CUBLAS_WORKSPACE_CONFIG'))\n"
        "cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul\n"
        "print(cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["None", ":4096:8", ":16:8", ":4096:8", "True False False False"]


@pytest.mark.parametrize("name", ["digits-narrow", "digits-image-narrow"])
def test_two_threads_agree_with_one_to_rounding_at_every_step(name):
    task, config = (
        get_task(name),
        small_config(task=name, envs=2, steps=4, data={"batch_size": 64, "batches_per_step": 2}),
    )
    one = states(task, config, 2)
    torch.set_num_threads(2)
    try:
        two = states(task, config, 2)
    finally:
        torch.set_num_threads(1)
    for a, b in zip(one, two, strict=True):
        for field in a:
            torch.testing.assert_close(a[field], b[field], rtol=1e-5, atol=1e-6, equal_nan=True, msg=field)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float64, 1e-10, 1e-12), (torch.float32, 1e-5, 1e-6)])
def test_the_mappings_agree_to_rounding_after_a_step_from_one_state(dtype, rtol, atol):
    engines = {
        mapping: VectorizedEngine(blobs(dtype=dtype, stacks=False), small_config(mapping=mapping))
        for mapping in ("loop", "vmap")
    }
    client = RandomValid()
    view = engines["loop"].reset()
    for _ in range(4):
        engines["vmap"].restore(unflatten(*flatten(engines["loop"].snapshot())))
        actions = client.act(view)
        view = engines["loop"].step(actions)[0]
        engines["vmap"].step(actions)
        first, second = (flatten(engine.snapshot())[0] for engine in engines.values())
        for field in first:
            torch.testing.assert_close(
                first[field], second[field], rtol=rtol, atol=atol, equal_nan=True, check_dtype=False, msg=field
            )
