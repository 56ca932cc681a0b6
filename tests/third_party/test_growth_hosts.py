"""Let models of Hugging Face's transformers live through a whole growth: seeds born, blended, kept, finished, exported."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from huggingface import HEADS, MODELS, NO_TOKENS, TEXT, transformers
from lives import Host, live, row

pytestmark = pytest.mark.third_party
PAGE = Path(__file__).parents[2] / "docs" / "sites.md"
BATCH = 4


def drawn(x):
    """Draw another input like x, (BATCH, ...)."""
    shape = (BATCH, *x.shape[1:])
    if x.is_floating_point():
        return torch.randn(shape)
    return torch.randint(0, 50, shape) if x.max() > 1 else torch.ones(shape, dtype=x.dtype)


def host(name):
    """Build a model with batches like its example, for classes of images and texts or for tokens."""
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


def albert():
    """Build a model with one layer for all depths."""
    config = transformers.AlbertConfig(embedding_size=16, hidden_size=16, intermediate_size=32, **HEADS, **TEXT)
    return transformers.AlbertForMaskedLM(config)


def mixtral():
    """Build a model of experts, of which each token calls some."""
    experts = {"num_local_experts": 4, "num_key_value_heads": 2, **HEADS, **TEXT, **NO_TOKENS}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(hidden_size=16, intermediate_size=32, **experts))


def mamba():
    """Build a model of layers that carry a state along the sequence."""
    config = transformers.MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=2, **TEXT, **NO_TOKENS)
    return transformers.MambaForCausalLM(config)


def clip():
    """Build a model of two networks that meet in the loss."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, **HEADS}
    text = {"max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **sizes, **TEXT}
    images = {"image_size": 32, "patch_size": 8, **sizes}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=images, projection_dim=8))


def tokens():
    ids = torch.randint(3, 50, (BATCH, 12))
    return {"input_ids": ids}, ids.roll(-1, 1)


def captions():
    return {**tokens()[0], "pixel_values": torch.randn(BATCH, 3, 32, 32)}, torch.arange(BATCH)


def positions(output, y):
    return F.cross_entropy(output.logits.transpose(1, 2), y, reduction="none")


def matches(output, y):
    return F.cross_entropy(output.logits_per_image, y) + F.cross_entropy(output.logits_per_text, y)


OTHERS = {
    "ALBERT": Host(albert, tokens, positions),
    "Mixtral": Host(mixtral, tokens, positions),
    "Mamba": Host(mamba, tokens, positions),
    "CLIP": Host(clip, captions, matches),
}


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_a_model_lives_through_a_whole_growth(name):
    life = live(OTHERS[name] if name in OTHERS else host(name))
    assert PAGE.read_text(encoding="utf-8").splitlines().count(row(name, life)) == 1, row(name, life)
