"""Models of Hugging Face's transformers live through a whole growth: seeds born, blended, kept, finished, exported."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from huggingface import MODELS
from lives import Host, live, row

pytestmark = pytest.mark.third_party
PAGE = Path(__file__).parents[2] / "docs" / "sites.md"
BATCH = 4


def drawn(x):
    """Another input like x, (BATCH, ...)."""
    shape = (BATCH, *x.shape[1:])
    if x.is_floating_point():
        return torch.randn(shape)
    return torch.randint(0, 50, shape) if x.max() > 1 else torch.ones(shape, dtype=x.dtype)


def host(name):
    """A model with batches like its example, for classes of images and texts or for tokens."""
    _, example = MODELS[name]()

    def batch():
        x = {key: drawn(value) for key, value in example.items()}
        if "labels" in x:
            x["labels"] = x["input_ids"]
        return x, torch.randint(0, 2, (BATCH, 12))

    def loss(output, y):
        if output.logits.dim() == 2:
            return F.cross_entropy(output.logits, y[:, 0])
        return F.cross_entropy(output.logits.transpose(1, 2), y, reduction="none")

    return Host(lambda: MODELS[name]()[0], batch, loss)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_lives_through_a_whole_growth(name):
    life = live(host(name))
    assert PAGE.read_text(encoding="utf-8").splitlines().count(row(name, life)) == 1, row(name, life)
