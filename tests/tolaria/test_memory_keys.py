"""Test batches in pieces, and activations that are computed again: the same numbers with less memory."""

import gc

import numpy as np
import pytest
import torch
from faults.poison import fingerprints
from torch import nn
from torch.nn import functional as F

from esper.kasmina.host import SegmentedHost
from esper.kasmina.lifecycle import doses
from esper.kasmina.stack.layers import Linear
from esper.leyline.lifecycle.slots import Kind, SlotSpec
from esper.leyline.messages import InputError
from esper.tasks.own.custom import task_from
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.stacked.compiling import PassBatch, PassLoss, microbatches
from populations import GROW, blobs, small_config, trajectory


class Drawing(nn.Module):
    """Drops numbers out in a way that vmap maps in evaluation mode and not in training mode."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)

    def forward(self, x):
        return F.dropout(torch.relu(self.inner(x)), 0.3, self.training)


HOSTS = {
    "normalised by the batch": lambda: SegmentedHost(
        [nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 3)],
        [SlotSpec("s", 0, 8, Kind.VECTOR)],
    ),
    "with dropout": lambda: SegmentedHost([Drawing(), Linear(8, 3)], [SlotSpec("s", 0, 8, Kind.VECTOR)]),
    "frozen": lambda: SegmentedHost(
        [Linear(6, 8), Linear(8, 3).requires_grad_(False)], [SlotSpec("s", 0, 8, Kind.VECTOR)]
    ),
}


def noise(host):
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(160, 6, generator=generator), torch.arange(160) % 3
    return task_from("noise", x, y, host=host, classes=3, menu=("bypass-linear", "bypass-mlp", "mlp-small"))


def both(task=None, **config):
    """Return fingerprints of an episode with and without activations that are computed again."""
    config.setdefault("steps", 5)
    made = (small_config(**config, activation_checkpointing=again) for again in (False, True))
    decisions = {at: (one[0], 0, *one[2:]) for at, one in GROW.items()} if task is not None else GROW
    return [fingerprints(trajectory(each, decisions, task)[0]) for each in made]


@pytest.mark.parametrize("incubation", ["shadow", "ste"])
@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_activations_that_are_computed_again_change_no_bit(incubation, amp):
    stored, again = both(lifecycle={"incubation": incubation}, amp=amp)
    assert stored == again


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_statistics_draws_and_frozen_layers_are_the_same_in_the_second_pass(host):
    stored, again = both(noise(host))
    assert stored == again


@pytest.mark.parametrize("microbatch", [1, 5])
def test_gradients_of_pieces_sum_to_those_of_the_batch(microbatch):
    divided, whole = (
        trajectory(small_config({"data": {"microbatch": size}}), GROW, blobs(dtype=torch.float64))
        for size in (microbatch, 0)
    )
    for name in ("value", "first_moment", "second_moment"):
        one, other = (engine.population.body.host.columns[name] for engine, *_ in (divided, whole))
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        divided[0].view().measurements.train_loss, whole[0].view().measurements.train_loss, rtol=1e-9
    )


def test_pieces_go_with_accumulation_float16_and_dropout_and_an_environment_does_not_know_the_others():
    config = {
        "amp": "fp16",
        "optimizer": {"accumulation_steps": 3},
        "data": {"microbatch": 5, "batch_size": 12, "batches_per_step": 3},
    }
    for task in (None, noise(HOSTS["with dropout"])):
        alone, beside = (trajectory(small_config(config, envs=envs, steps=4), {}, task)[0] for envs in (1, 3))
        assert fingerprints(alone)[0] == fingerprints(beside)[0]


def test_each_piece_has_its_share_its_weights_and_keys_of_its_own():
    x, y, weights = torch.randn(2, 7, 3), torch.arange(14).view(2, 7), torch.rand(2, 7)
    keys, scales = np.array([5, 6]), torch.tensor([4.0, 8.0])
    found = list(microbatches(3, torch.float32, PassBatch(x, y, weights, scales, keys)))
    assert [share for share, _ in found] == [3 / 7, 3 / 7, 1 / 7]
    pieces = [piece for _, piece in found]
    assert torch.equal(torch.cat([piece.x for piece in pieces], 1), x)
    assert torch.equal(torch.cat([piece.y for piece in pieces], 1), y)
    assert torch.equal(torch.cat([piece.weights for piece in pieces], 1), weights)
    torch.testing.assert_close(sum(piece.factors for piece in pieces), scales)
    assert len({key for piece in pieces for key in piece.keys.tolist()}) == 6
    ((_, whole),) = microbatches(7, torch.float32, PassBatch(x, y))
    assert whole.x is x
    assert whole.factors is None


def held_storages():
    """Return the storages that tensors in Python hold, by their addresses, which none gets again while the result is kept."""
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.layout == torch.strided]
    return {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}


def stored_bytes(**config):
    """Count the bytes of the distinct tensors that one pass of training stores at most for its backward pass."""
    engine = VectorizedEngine(blobs(hidden=(32,) * 8), small_config(config, steps=1))
    population, seeds = engine.population, engine.reset().seeds
    population.body.train(True)
    route = population.body.route(doses(seeds), seeds, part=population.body.parts[0], train=True)
    population.feed.advance()
    held, most, seen = {}, 0, set()

    def pack(tensor):
        nonlocal most
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        seen.update(held)
        most = max(most, sum(held.values()))
        return tensor

    parameters = population.body.host.columns["value"]
    backward, before = PassLoss.backward, held_storages()

    def play_back(loss):
        nonlocal most
        if loss.tape is not None:
            most = max(most, sum(storage.nbytes() for at, storage in held_storages().items() if at not in before))
        backward(loss)
        held.clear()

    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        patch.setattr(PassLoss, "backward", play_back)
        population.passes.forward_backward(route, PassBatch(*population.feed.of(route.part)))
    return most - (parameters.untyped_storage().nbytes() if parameters.untyped_storage().data_ptr() in seen else 0)


def test_both_keys_store_less():
    size = {"batch_size": 64, "batches_per_step": 1}
    whole = stored_bytes(data=size)
    assert stored_bytes(data=size | {"microbatch": 16}) < 0.3 * whole
    assert stored_bytes(data=size, activation_checkpointing=True) < 0.7 * whole


def test_what_cannot_be_divided_or_computed_again_is_refused():
    for config, words in (
        ({"data": {"microbatch": 13}}, "data.microbatch is 13, more than data.batch_size \\(12\\)"),
        ({"data": {"microbatch": 5}, "lifecycle": {"incubation": "ste"}}, "proximal term"),
        ({"activation_checkpointing": True, "compile": "on"}, "compile is on"),
    ):
        with pytest.raises(InputError, match=words):
            small_config(config)
    task = noise(HOSTS["normalised by the batch"])
    with pytest.raises(InputError, match=r"segments\.0\.1 of the host is a BatchNorm1d"):
        VectorizedEngine(task, small_config({"data": {"microbatch": 5}}))
    VectorizedEngine(task, small_config({"data": {"microbatch": 12}}))
