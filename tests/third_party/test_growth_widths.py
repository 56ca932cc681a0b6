"""Check that a model of Hugging Face whose inner layers grew is an ordinary one of a config with other widths."""

import pytest
import torch

import esper
from esper.kasmina.blueprints import drawn_with
from esper.leyline.lifecycle.slots import Sequence, Site
from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import GrowthWarning
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry
from huggingface import MODELS, transformers
from populations import Script

pytestmark = pytest.mark.third_party
GATES = {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1}
GROW = {(0, 0): (Op.GERMINATE, 0, 0, 0, 1, 2), (2, 0): (Op.ADVANCE, 0), (5, 0): (Op.FOSSILIZE, 0)}
GROW |= {(6, 0): (Op.GERMINATE, 1, 0, 0, 1, 2), (8, 0): (Op.ADVANCE, 1), (11, 0): (Op.FOSSILIZE, 1)}


def loss(output, y):
    return output.loss


def batch(key):
    with drawn_with(key):
        ids = torch.randint(3, 50, (4, 12))
    return {"input_ids": ids, "labels": ids}, ids


def grown(blocks):
    """Grow a GPT-2 in float64 with a kept seed around the inner layers of some blocks; return it, the growth, and its outputs."""
    with drawn_with(0):
        model = MODELS["GPT-2"]()[0].double()
    sites = {}
    for block in blocks:
        inner = f"transformer.h.{block}.mlp"
        sites[inner] = Site(inner, f"{inner}.c_proj", f"{inner}.c_fc", Sequence(16), causal=True)
    esper.graft(model, sites)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    settings = {"gates": GATES, "blueprints": ["bypass-mlp"]}
    script = Script({moment: action for moment, action in GROW.items() if action[1] < len(blocks)})
    growth = esper.Growth(
        model,
        optimizer,
        probe=[batch(1), batch(2)],
        loss=loss,
        every=2,
        budget=9.0,
        controller=script,
        settings=settings,
    )
    for step in range(28):
        model.train()(**batch(100 + step)[0]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step()
    with torch.no_grad():
        return model, growth, model.eval()(**batch(7)[0]).logits


def test_a_gpt_2_whose_blocks_grew_is_one_of_a_config_with_a_larger_n_inner(tmp_path):
    model, growth, before = grown([0, 1])
    assert model.config.n_inner is None
    network = growth.finish()
    assert growth.widened == {f"transformer.h.{block}.mlp.c_fc": (64, 80) for block in (0, 1)}
    assert "transformer.h.0.mlp.c_fc: 16 -> 64 became 16 -> 80" in growth.architecture
    assert type(network) is transformers.GPT2LMHeadModel
    assert (network.config.n_inner, network.config.n_layer) == (80, 2)
    with torch.no_grad():
        after = network(**batch(7)[0]).logits
        assert (after - before).abs().max() < 1e-9
        ordinary = transformers.GPT2LMHeadModel(network.config).double().eval()
        ordinary.load_state_dict(network.state_dict())
        network.save_pretrained(tmp_path)
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
        for each in (ordinary, loaded):
            assert torch.equal(each(**batch(7)[0]).logits, after)
    assert repr(loaded) == repr(network)


def test_a_config_that_cannot_say_that_one_block_is_wider_stays_and_the_end_says_so():
    _, growth, before = grown([0])
    with pytest.warns(GrowthWarning, match=r"from_pretrained cannot build the widths that grew \(transformer\.h\.0"):
        network = growth.finish()
    assert network.config.n_inner is None
    with torch.no_grad():
        assert (network(**batch(7)[0]).logits - before).abs().max() < 1e-9


def test_a_wider_network_that_is_loaded_into_a_fresh_model_sets_its_config(tmp_path):
    _, growth, _ = grown([0, 1])
    network = growth.finish()
    growth.save(tmp_path / "grown")
    with drawn_with(0):
        fresh = esper.load_grown(tmp_path / "grown", MODELS["GPT-2"]()[0].double()).eval()
    assert fresh.config.n_inner == 80
    with torch.no_grad():
        assert torch.equal(fresh(**batch(7)[0]).logits, network(**batch(7)[0]).logits)


@pytest.mark.parametrize(
    ("name", "attention", "mlp", "became"),
    [
        ("GPT-2", "transformer.h.0.attn", "transformer.h.1.mlp", "transformer.h.0.attn.num_heads 2 became 3"),
        (
            "Llama",
            "model.layers.0.self_attn",
            "model.layers.1.mlp",
            "model.layers.1.mlp.intermediate_size 32 became 40",
        ),
    ],
)
def test_heads_and_gated_units_become_part_of_a_transformer(name, attention, mlp, became, tmp_path):
    with drawn_with(0):
        model = MODELS[name]()[0].double()
    entries = [
        ScheduleEntry(at=1, op=Op.GERMINATE, slot=slot, blueprint="narrow-copy", tempo=1, target=1.0, keep=True)
        for slot in (attention, mlp)
    ]
    growth = esper.Growth(
        model,
        optimizer := torch.optim.AdamW(model.parameters(), 0.01),
        probe=[batch(1), batch(2)],
        loss=loss,
        every=2,
        budget=9.0,
        controller=Schedule(entries),
        settings={"gates": GATES, "blueprints": ["narrow-copy"]},
    )
    for step in range(28):
        model.train()(**batch(100 + step)[0]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step()
    with torch.no_grad():
        before = model.eval()(**batch(7)[0]).logits
    with pytest.warns(GrowthWarning, match="from_pretrained cannot build the widths that grew"):
        network = growth.finish()
    assert growth.folded == [attention, mlp]
    *_, last = growth.architecture.split("; ")
    assert last == became
    growth.save(tmp_path)
    loaded = esper.load_grown(tmp_path, MODELS[name]()[0].double()).eval()
    with torch.no_grad():
        after = network(**batch(7)[0]).logits
        assert (after - before).abs().max() < 1e-9
        assert torch.equal(loaded(**batch(7)[0]).logits, after)
        generated = network.generate(batch(7)[0]["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert generated.shape == (4, 15)
