"""Build models of Hugging Face's transformers, each with an example, from small configurations: nothing is downloaded."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")
TEXT = {"vocab_size": 50, "use_cache": False}  # torch.export takes no cache of keys and values
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2}
IMAGES = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32).sin()}
TOKENS = {"input_ids": torch.arange(24).view(2, 12) % 50}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}


def resnet(layer_type):
    widths = {"hidden_sizes": [8, 16, 24], "depths": [2, 2, 2], "embedding_size": 8}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**widths, layer_type=layer_type))


MODELS = {
    "ResNet, basic": lambda: (resnet("basic"), IMAGES),
    "ResNet, bottleneck": lambda: (resnet("bottleneck"), IMAGES),
    "MobileNetV2": lambda: (
        transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config(depth_multiplier=0.35)),
        IMAGES,
    ),
    "ViT": lambda: (
        transformers.ViTForImageClassification(
            transformers.ViTConfig(hidden_size=16, intermediate_size=32, image_size=32, patch_size=8, **HEADS)
        ),
        IMAGES,
    ),
    "ConvNext": lambda: (
        transformers.ConvNextForImageClassification(
            transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[2, 2], num_stages=2)
        ),
        IMAGES,
    ),
    "Swin": lambda: (
        transformers.SwinForImageClassification(
            transformers.SwinConfig(
                image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4
            )
        ),
        IMAGES,
    ),
    "GPT-2": lambda: (
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_positions=32, n_embd=16, n_layer=2, n_head=2, **TEXT, **NO_TOKENS)
        ),
        TOKENS,
    ),
    "BERT": lambda: (
        transformers.BertForSequenceClassification(
            transformers.BertConfig(hidden_size=16, intermediate_size=32, **HEADS, **TEXT)
        ),
        TOKENS | {"attention_mask": torch.ones(2, 12, dtype=torch.long)},
    ),
    "T5": lambda: (
        transformers.T5ForConditionalGeneration(
            transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, **TEXT)
        ),
        TOKENS | {"decoder_input_ids": TOKENS["input_ids"].flip(1)},
    ),
    "Llama": lambda: (
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                **TEXT,
                **NO_TOKENS,
            )
        ),
        TOKENS | {"labels": TOKENS["input_ids"]},
    ),
}
