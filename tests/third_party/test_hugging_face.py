"""Test a model of transformers that grows under its Trainer, and goes on from its checkpoints."""

import shutil

import pytest
import torch
import torch.nn.functional as F

import esper
from esper.kasmina.blueprints import drawn_with
from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import GrowthWarning, InputError
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry
from esper.tolaria.live.groups import OWNER
from loops import LIFE, SETTINGS, STAGES, equal, repeatable, stages
from populations import Script

tf = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")
from esper.callbacks import HuggingFaceAnytimeGrowth, HuggingFaceGrowth  # noqa: E402  # needs transformers

pytestmark = [pytest.mark.third_party, pytest.mark.filterwarnings("ignore")]

STEPS, EVERY = 30, 2


def gpt2():
    """Build a GPT-2 with dropout, so that torch's random state is part of what is resumed."""
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 24}
    with drawn_with(0):
        return tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def sentences(key, count):
    with drawn_with(key):
        start = torch.randint(0, 24, (count, 1))
    ids = (start + 5 * torch.arange(12)) % 24
    return [{"input_ids": row, "labels": row} for row in ids]


def batch(key, count=6):
    rows = sentences(key, count)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class Watch(tf.TrainerCallback):
    """Keeps the stages behind each step."""

    def __init__(self, growing):
        self.growing, self.seen = growing, {}

    def on_step_end(self, args, state, control, **kwargs):
        self.seen[state.global_step] = stages(self.growing.growth)


def trainer_of(folder, callbacks, arguments=None):
    """Make a trainer of a fresh model."""
    given = tf.TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": STEPS,
            "save_steps": 1,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 5e-3,
            "warmup_steps": 5,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "logging_strategy": "no",
            **(arguments or {}),
        }
    )
    return tf.Trainer(gpt2(), given, train_dataset=sentences(3, 40), eval_dataset=sentences(4, 4), callbacks=callbacks)


def training(folder, *, arguments=None, watched=False, **options):
    """Make a trainer and a callback, as a program would make them anew."""
    usual = {"controller": Script(LIFE), "every": EVERY, "budget": 9.0, "settings": SETTINGS}
    growing = HuggingFaceGrowth(**{**usual, "probe": [batch(1), batch(2)], **options})
    callbacks = [growing, Watch(growing)] if watched else [growing]
    trainer = trainer_of(folder, callbacks, arguments)
    return (trainer, growing, callbacks[-1]) if watched else (trainer, growing)


def test_a_training_resumed_by_the_trainer_in_any_stage_is_the_one_that_was_never_stopped(tmp_path):
    trainer, growing, watch = training(tmp_path / "straight", watched=True)
    trainer.train()
    state, summary = growing.growth.state_dict(), repeatable(growing.growth)
    assert growing.growth.calls == STEPS
    sites = list(growing.growth.population.network.sites)
    assert [entry["site"] for entry in summary["keeps"]] == [sites[0]]
    assert [entry["site"] for entry in summary["prunes"]] == [sites[1]]
    for stage in STAGES:
        step = next(step for step, found in watch.seen.items() if stage in found)
        shutil.copytree(tmp_path / "straight" / f"checkpoint-{step}", tmp_path / stage / f"checkpoint-{step}")
        again, resumed = training(tmp_path / stage, arguments={"save_strategy": "no"})
        again.train(resume_from_checkpoint=str(tmp_path / stage / f"checkpoint-{step}"))
        assert equal(again.model.state_dict(), trainer.model.state_dict()), stage
        assert equal(resumed.growth.state_dict(), state), stage
        assert repeatable(resumed.growth) == summary
        assert equal(again.optimizer.state_dict(), trainer.optimizer.state_dict()), stage


def test_the_optimizer_holds_what_was_grown_with_the_rate_of_the_schedule(tmp_path):
    trainer, growing = training(tmp_path, arguments={"save_strategy": "no"})
    trainer.train()
    model = growing.network
    assert model is trainer.model
    held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert all(id(parameter) in held for parameter in model.parameters())
    matrices, vectors = (group for group in trainer.optimizer.param_groups if OWNER in group)
    assert matrices["lr"] == vectors["lr"] == trainer.optimizer.param_groups[0]["lr"] == 0.0
    assert matrices["initial_lr"] == vectors["initial_lr"] == 5e-3
    assert {parameter.dim() for parameter in matrices["params"]} == {2}
    assert {parameter.dim() for parameter in vectors["params"]} == {1}
    before = model.eval()(**batch(7)).loss
    grown = growing.growth.finish()
    assert grown is model
    assert any(".esper." in name for name in model.state_dict())
    assert torch.allclose(grown(**batch(7)).loss, before, atol=1e-6)


def test_the_best_checkpoint_is_loaded_with_the_seeds_that_it_had(tmp_path):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "seven"}
    trainer, growing = training(tmp_path, arguments={**best, "greater_is_better": True, "max_steps": 14})
    trainer.compute_metrics = lambda seen: {"seven": float(trainer.state.global_step == 7)}
    trainer.train()
    assert trainer.state.best_global_step == 7
    saved = torch.load(tmp_path / "checkpoint-7" / "growth.pt")
    assert growing.growth.calls == 7
    assert equal(growing.growth.state_dict(), saved)


def test_what_cannot_be_followed_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(InputError, match="no argument 'step'; did you mean"):
        training(tmp_path, step=4)
    trainer, _ = training(tmp_path / "a", arguments={"max_steps": 3})
    trainer.train()
    with pytest.raises(InputError, match="has grown a network already"):
        trainer.train()
    shutil.copytree(tmp_path / "a" / "checkpoint-3", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "a")
    again, _ = training(tmp_path / "a")
    with pytest.raises(InputError, match=r"checkpoint-3 has no growth.pt"):
        again.train(resume_from_checkpoint=str(tmp_path / "elsewhere"))
    other, growing = training(tmp_path / "a", checkpoint=tmp_path / "elsewhere", arguments={"save_strategy": "no"})
    other.train(resume_from_checkpoint=str(tmp_path / "elsewhere"))
    assert growing.growth.calls == STEPS
    saved = torch.load(tmp_path / "elsewhere" / "growth.pt")
    saved["tensors"]["transformer.wte.weight"][0, 0] += 1
    torch.save(saved, tmp_path / "elsewhere" / "growth.pt")
    last, _ = training(tmp_path / "a", checkpoint=tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is not the checkpoint that the trainer has resumed"):
        last.train(resume_from_checkpoint=str(tmp_path / "elsewhere"))
    lossless, _ = training(tmp_path / "b", probe=[{"input_ids": batch(1)["input_ids"]}])
    with pytest.raises(InputError, match="returns no loss for the probe"):
        lossless.train()


@pytest.mark.parametrize(
    ("argument", "value", "sentence"),
    [
        ("_n_gpu", 2, "the trainer uses DataParallel"),
        ("deepspeed", "zero.json", "the trainer uses deepspeed"),
        ("fsdp", True, "the trainer uses fsdp"),
    ],
)
def test_parameters_that_growth_cannot_follow_are_refused_by_name(tmp_path, argument, value, sentence):
    trainer, growing = training(tmp_path)
    setattr(trainer.args, argument, value)
    with pytest.raises(InputError, match=sentence):
        growing.on_train_begin(
            trainer.args, trainer.state, trainer.control, model=trainer.model, optimizer=None, lr_scheduler=None
        )


def llama(inner):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    with drawn_with(0):
        return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, intermediate_size=inner, vocab_size=24))


@pytest.mark.parametrize(
    ("build", "key", "layers", "inner"),
    [
        (gpt2, "n_inner", ["transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_fc"], 64),
        (lambda: llama(20), "intermediate_size", [f"model.layers.{layer}.mlp.gate_proj" for layer in (0, 1)], 20),
    ],
    ids=["GPT-2", "Llama"],
)
def test_a_model_with_wider_feed_forwards_is_one_of_its_config(build, key, layers, inner, tmp_path):
    model, given = build().eval(), {"input_ids": batch(3)["input_ids"]}
    before = model(**given).logits
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert dict(esper.widen(model, 1.5, example=given, optimizer=optimizer)) == dict.fromkeys(
        layers, (inner, 3 * inner // 2)
    )
    assert torch.allclose(model(**given).logits, before, atol=1e-5)
    for _ in range(2):
        model(**batch(4)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    setattr(model.config, key, 3 * inner // 2)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**given).logits, model(**given).logits)


def bert():
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
    return tf.BertForMaskedLM(tf.BertConfig(vocab_size=24, max_position_embeddings=32, **sizes))


def vit():
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
    return tf.ViTForImageClassification(tf.ViTConfig(image_size=8, patch_size=4, num_channels=1, **sizes))


def t5(**settings):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 24}
    return tf.T5ForConditionalGeneration(tf.T5Config(**sizes | settings))


def bloom(heads=2):
    return tf.BloomForCausalLM(tf.BloomConfig(hidden_size=8 * heads, n_layer=2, n_head=heads, vocab_size=24))


def decoder(name, **settings):
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(tf, f"{name}Config")(vocab_size=24, max_position_embeddings=32, **sizes, **settings)
    return getattr(tf, f"{name}ForCausalLM")(config)


def bart(kind="Bart", build=tf.BartForConditionalGeneration):
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20}
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 24, "max_position_embeddings": 32}
    return build(getattr(tf, f"{kind}Config")(**sizes, **heads, scale_embedding=True, pad_token_id=0))


def swin():
    sizes = {"image_size": 8, "patch_size": 2, "num_channels": 1, "window_size": 2}
    return tf.SwinForImageClassification(tf.SwinConfig(embed_dim=12, depths=[1, 1], num_heads=[3, 6], **sizes))


def dinov2():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_channels": 1}
    return tf.Dinov2ForImageClassification(tf.Dinov2Config(image_size=8, patch_size=4, **sizes))


BUILDS = {
    "GPT-2": gpt2,
    "Llama": lambda: llama(20),
    "BERT": bert,
    "ViT": vit,
    "T5": t5,
    "T5 1.1": lambda: t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "Bloom": bloom,
    "Gemma": lambda: decoder("Gemma", num_key_value_heads=1, head_dim=8),
    "Gemma 2": lambda: decoder("Gemma2", num_key_value_heads=1, head_dim=8),
    "OLMo": lambda: decoder("Olmo"),
    "OLMo 2": lambda: decoder("Olmo2"),
    "BART, scaled embeddings": bart,
    "Swin": swin,
    "DINOv2": dinov2,
    "MPT": lambda: tf.MptForCausalLM(tf.MptConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=24)),
}


@pytest.mark.parametrize("name", BUILDS)
def test_a_model_of_twice_the_width_is_one_of_its_config(name, tmp_path):
    torch.manual_seed(0)
    model = BUILDS[name]().eval()
    pixels = {"pixel_values": torch.randn(3, 1, 8, 8)}
    given = pixels if model.main_input_name == "pixel_values" else {"input_ids": batch(3)["input_ids"]}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = batch(4)["input_ids"][:, :7]
    before, size = model(**given).logits, model.config.hidden_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert not esper.widen(model, 2, example=given, optimizer=optimizer).left_out
    assert model.config.hidden_size == 2 * size
    assert torch.allclose(model(**given).logits, before, atol=1e-5)
    model(**given).logits.square().mean().backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**given).logits, model(**given).logits)


def test_positions_that_are_computed_when_a_model_is_built_are_named_and_can_be_put_back(tmp_path):
    torch.manual_seed(0)
    model, ids = bart("Marian", tf.MarianMTModel).eval(), batch(3)["input_ids"]
    given = {"input_ids": ids, "decoder_input_ids": ids[:, :7]}
    before = model(**given).logits
    with pytest.warns(
        GrowthWarning, match="embed_positions.weight is wider too, but is not saved with the MarianMTModel"
    ):
        assert not esper.widen(model, 2, example=given).left_out
    assert torch.allclose(model(**given).logits, before, atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    for side in ("encoder", "decoder"):
        mine, own = (getattr(each.model, side) for each in (model, loaded))
        own.embed_positions.load_state_dict(mine.embed_positions.state_dict())
    assert torch.allclose(loaded(**given).logits, model(**given).logits, atol=1e-6)


def test_a_bloom_whose_heads_are_no_power_of_two_gets_wider_feed_forwards_alone_and_says_why():
    torch.manual_seed(0)
    model, given = bloom(3).eval(), {"input_ids": batch(3)["input_ids"]}
    before = model(**given).logits
    widened = esper.widen(model, 2, example=given)
    assert set(widened) == {f"transformer.h.{layer}.mlp.dense_h_to_4h" for layer in (0, 1)}
    assert "the outputs of the wider network are others" in next(iter(widened.left_out.values()))
    assert torch.allclose(model(**given).logits, before, atol=1e-5)


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "ViT"])
def test_a_model_in_float64_computes_the_same_to_the_ninth_digit_when_it_becomes_wider(name):
    torch.manual_seed(0)
    model = BUILDS[name]().double().eval()
    pixels = {"pixel_values": torch.randn(3, 1, 8, 8, dtype=torch.float64)}
    given = pixels if model.main_input_name == "pixel_values" else {"input_ids": batch(3)["input_ids"]}
    before = model(**given).logits
    assert not esper.widen(model, 2, example=given).left_out
    assert torch.allclose(model(**given).logits, before, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Mistral"])
def test_a_model_in_float64_whose_norms_compute_in_float32_becomes_wider(name):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = getattr(tf, f"{name}Config")(**sizes, num_hidden_layers=2, vocab_size=24)
    model, given = getattr(tf, f"{name}ForCausalLM")(config).double().eval(), {"input_ids": batch(3)["input_ids"]}
    before = model(**given).logits
    assert not esper.widen(model, 2, example=given).left_out
    assert torch.allclose(model(**given).logits, before, rtol=0, atol=1e-6)
    assert model.config.hidden_size == 32


@pytest.mark.parametrize("kind", ["ResNet", "ResNet of bottlenecks", "ConvNeXt"])
def test_lists_of_widths_in_a_config_follow(kind, tmp_path):
    torch.manual_seed(0)
    if kind == "ConvNeXt":
        config, build = (
            tf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
            tf.ConvNextForImageClassification,
        )
    else:
        wide, layer = ([8, 16], "basic") if kind == "ResNet" else ([16, 32], "bottleneck")
        config = tf.ResNetConfig(embedding_size=8, hidden_sizes=wide, depths=[1, 1], layer_type=layer)
        build = tf.ResNetForImageClassification
    model, given, listed = build(config).eval(), {"pixel_values": torch.randn(2, 3, 64, 64)}, [*config.hidden_sizes]
    before = model(**given).logits
    assert not esper.widen(model, 2, example=given).left_out
    assert torch.allclose(model(**given).logits, before, atol=1e-5)
    assert model.config.hidden_sizes == [2 * own for own in listed]
    model.save_pretrained(tmp_path)
    assert torch.equal(build.from_pretrained(tmp_path).eval()(**given).logits, model(**given).logits)


def test_a_resnet_gets_blocks_within_a_stage_that_its_config_counts_and_no_stages(tmp_path):
    torch.manual_seed(0)
    config = tf.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[2], layer_type="basic")
    model, given = tf.ResNetModel(config).eval(), {"pixel_values": torch.randn(2, 3, 32, 32)}
    with pytest.raises(
        InputError, match=r"'encoder.stages' has 1 stage, for which depths is \[2\] and hidden_sizes is \[8\]"
    ):
        esper.deepen(model, 1, example=given, at="encoder.stages")
    before = model(**given)[0]
    assert esper.deepen(model, 1, example=given, at="encoder.stages.0.layers") == {"encoder.stages.0.layers": (2, 3)}
    assert torch.equal(model(**given)[0], before)
    model.save_pretrained(tmp_path)
    loaded = tf.ResNetModel.from_pretrained(tmp_path).eval()
    assert loaded.config.depths == [3]
    assert torch.equal(loaded(**given)[0], before)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_blocks_of_one_side_alone_are_counted_in_the_config(side, tmp_path):
    torch.manual_seed(0)
    model, ids = t5().eval(), batch(3)["input_ids"]
    given = {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    before = model(**given).logits
    assert esper.deepen(model, 1, example=given, at=f"{side}.block") == {f"{side}.block": (2, 3)}
    assert torch.allclose(model(**given).logits, before, atol=1e-6)
    assert (model.config.num_layers, model.config.num_decoder_layers) == ((3, 2) if side == "encoder" else (2, 3))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**given).logits, model(**given).logits)
    if side == "encoder":  # transformers itself cannot generate with more blocks in the decoder than in the encoder
        one, other = (each.generate(ids, max_new_tokens=3, decoder_start_token_id=0) for each in (loaded, model))
        assert torch.equal(one, other)


@pytest.mark.parametrize("build", [gpt2, lambda: llama(20), vit], ids=["GPT-2", "Llama", "ViT"])
def test_a_model_with_more_blocks_is_one_of_its_config(build, tmp_path):
    torch.manual_seed(0)
    model = build().eval()
    pixels = {"pixel_values": torch.randn(3, 1, 8, 8)}
    given = pixels if model.main_input_name == "pixel_values" else {"input_ids": batch(3)["input_ids"]}
    before = model(**given).logits
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert list(esper.deepen(model, 2, example=given, optimizer=optimizer).values()) == [(2, 4)]
    assert torch.equal(model(**given).logits, before)
    model(**given).logits.square().mean().backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert loaded.config.num_hidden_layers == 4
    assert torch.equal(loaded(**given).logits, model(**given).logits)
    if hasattr(model, "generate"):
        assert torch.equal(
            *(model.generate(**given, do_sample=False, max_new_tokens=4, use_cache=use) for use in (True, False))
        )


def grow_blocks(model, blueprint, steps):
    """Plant a seed at each block of a GPT-2, and train it with a cache of keys and values in every pass."""
    chosen = {"blueprint": blueprint, "tempo": 1, "target": 1.0, "keep": True}
    entries = [ScheduleEntry(at=1, op=Op.GERMINATE, slot=f"transformer.h.{place}", **chosen) for place in (0, 1)]
    gates = {"permissive": True, "min_training_steps": 1, "min_holding_steps": 0}
    growth = esper.Growth(
        model,
        optimizer := torch.optim.AdamW(model.parameters(), lr=1e-2),
        probe=[({"input_ids": batch(key)["input_ids"]}, batch(key)["labels"]) for key in (1, 2)],
        loss=lambda output, y: F.cross_entropy(output.logits[:, :-1].mT, y[:, 1:], reduction="none"),
        controller=Schedule(entries),
        every=1,
        budget=10.0,
        budget_passes=None,
        settings={"blueprints": [blueprint], "gates": gates},
    )
    for key in range(steps):
        model.train()(**batch(10 + key)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step()
    return growth


@pytest.mark.parametrize("blueprint", ["block", "repeat"])
def test_a_block_that_runs_as_a_seed_leaves_the_cache_of_keys_and_values_to_the_host(blueprint):
    torch.manual_seed(0)
    model = gpt2()
    growth, given = grow_blocks(model, blueprint, 14), {"input_ids": batch(3)["input_ids"]}
    assert [entry["blueprint"] for entry in growth.summary()["keeps"]] == [blueprint] * 2
    model.eval()
    assert torch.equal(model(**given, use_cache=True).logits, model(**given, use_cache=False).logits)
    with pytest.raises(InputError, match="generate with use_cache=False"):
        model.generate(**given, max_new_tokens=2)
    assert model.generate(**given, max_new_tokens=2, use_cache=False).shape == (6, 14)


def test_a_gpt_2_with_blocks_that_grew_is_one_of_its_config(tmp_path):
    torch.manual_seed(0)
    model = gpt2()
    growth, given = grow_blocks(model, "block", 14), {"input_ids": batch(3)["input_ids"]}
    grown = model.eval()(**given).logits
    assert growth.finish() is model
    assert growth.architecture == "transformer.h: blocks 2 -> 4"
    assert (type(model), model.config.n_layer) == (tf.GPT2LMHeadModel, 4)
    assert torch.allclose(model(**given).logits, grown, atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = tf.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**given).logits, model(**given).logits)
    one, other = (
        each.generate(**given, do_sample=False, max_new_tokens=3, use_cache=use)
        for each, use in ((model, True), (loaded, False))
    )
    assert torch.equal(one, other)


def widening(folder, *, arguments=None, **options):
    """Make a trainer whose model becomes wider twice in 30 steps of 96 targets, and a callback."""
    usual = {"example": {"input_ids": batch(1)["input_ids"]}, "ratio": 0.1, "sizes": [1, 2, 4], "warmup": 3}
    growing = HuggingFaceAnytimeGrowth(**usual | options)
    return trainer_of(folder, [growing], arguments), growing


def plain(growth):
    """Return the state of a growth without NaN, which is not equal to itself, and without the place in its run folder."""
    state = growth.state_dict()
    progress = {name: value for name, value in state["progress"].items() if name not in ("_beside", "_grown_at")}
    return progress, {name: value for name, value in state.items() if name not in ("progress", "log")}


def test_a_widening_resumed_by_the_trainer_at_any_size_is_the_one_that_was_never_stopped(tmp_path):
    trainer, growing = widening(tmp_path / "straight", run=tmp_path / "run")
    trainer.train()
    growth = growing.growth
    summary = esper.open_run(tmp_path / "run").summary  # the trainer has ended it
    assert (summary["steps_done"], summary["growths"]) == (STEPS, growth.growths)
    assert (growth.steps, growth.seen) == (STEPS, STEPS * 4 * 2 * 12)
    first, second = (each["step"] for each in growth.growths)
    assert trainer.model.config.n_embd == 64
    assert {id(each) for group in trainer.optimizer.param_groups for each in group["params"]} == {
        id(each) for each in trainer.model.parameters()
    }
    for step in (first - 1, first, first + 1, second - 2, second + 1):
        shutil.copytree(tmp_path / "straight" / f"checkpoint-{step}", tmp_path / f"{step}" / f"checkpoint-{step}")
        again, resumed = widening(tmp_path / f"{step}", arguments={"save_strategy": "no"})
        again.train(resume_from_checkpoint=str(tmp_path / f"{step}" / f"checkpoint-{step}"))
        assert equal(again.model.state_dict(), trainer.model.state_dict()), step
        assert equal(plain(resumed.growth), plain(growth)), step
        assert equal(again.optimizer.state_dict(), trainer.optimizer.state_dict()), step
        assert equal(again.lr_scheduler.state_dict(), trainer.lr_scheduler.state_dict()), step
    growth.snapshot().save_pretrained(tmp_path / "network")
    loaded = tf.GPT2LMHeadModel.from_pretrained(tmp_path / "network").eval()
    assert torch.equal(loaded(**batch(7)).logits, growth.snapshot().eval()(**batch(7)).logits)
    assert not trainer.model._forward_pre_hooks


def test_a_checkpoint_of_the_other_callback_is_refused_in_one_sentence(tmp_path):
    for write, read, sentence in (
        (widening, training, r"that of esper\.AnytimeGrowth, which esper\.Growth cannot read"),
        (training, widening, r"that of esper\.Growth, which esper\.AnytimeGrowth cannot read"),
    ):
        folder = tmp_path / write.__name__
        write(folder, arguments={"max_steps": 1})[0].train()
        with pytest.raises(InputError, match=sentence):
            read(folder)[0].train(resume_from_checkpoint=str(folder / "checkpoint-1"))


def test_what_cannot_become_wider_under_the_trainer_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(InputError, match="no argument 'factors'; did you mean 'factor'"):
        widening(tmp_path, factors=2)
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    with pytest.raises(
        InputError, match="uses load_best_model_at_end, which does not follow a model that becomes wider"
    ):
        widening(tmp_path, arguments=best)[0].train()
    trainer, growing = widening(tmp_path / "a", arguments={"max_steps": 20})
    trainer.train()
    with pytest.raises(InputError, match="has grown a network already"):
        trainer.train()
    shutil.copytree(tmp_path / "a" / "checkpoint-20", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "a")
    again, _ = widening(tmp_path / "a")
    with pytest.raises(InputError, match=r"checkpoint-20 has no growth.pt"):
        again.train(resume_from_checkpoint=str(tmp_path / "elsewhere"))
    other, resumed = widening(tmp_path / "a", checkpoint=tmp_path / "elsewhere", arguments={"save_strategy": "no"})
    other.train(resume_from_checkpoint=str(tmp_path / "elsewhere"))
    assert resumed.growth.steps == STEPS
    saved = torch.load(tmp_path / "elsewhere" / "growth.pt")
    torch.save(saved | {"sum": saved["sum"] + 1}, tmp_path / "elsewhere" / "growth.pt")
    last, _ = widening(tmp_path / "a", checkpoint=tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is not the checkpoint that the trainer has resumed"):
        last.train(resume_from_checkpoint=str(tmp_path / "elsewhere"))
    smoothed, _ = widening(tmp_path / "b", arguments={"label_smoothing_factor": 0.1})
    with pytest.raises(InputError, match="has no 'labels'; give targets="):
        smoothed.train()
    counted, growing = widening(
        tmp_path / "b",
        arguments={"label_smoothing_factor": 0.1, "max_steps": 2},
        targets=lambda inputs: inputs["input_ids"].numel(),
    )
    counted.train()
    assert growing.growth.seen == 2 * 96
