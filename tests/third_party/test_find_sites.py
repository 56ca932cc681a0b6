"""Find sites of the models of Hugging Face's transformers, built from small configurations: nothing is downloaded."""

from pathlib import Path

import pytest
import torch

from esper.kasmina.graft.find_sites import find_sites
from esper.kasmina.graft.grafted import graft
from huggingface import MODELS
from thinning import crossed

pytestmark = pytest.mark.third_party
PAGE = Path(__file__).parents[2] / "docs" / "sites.md"


def row(name, sites):
    """Write the row of docs/sites.md: what was found in a model."""
    blocks = [path for path in sites if " blocks of " in sites.why[path]]
    (block,) = {sites.why[path].partition(" blocks of ")[2].split()[0] for path in blocks}
    found = (
        f"`{path.removeprefix(around + '.')}`" for path in sites for around in blocks if path.startswith(around + ".")
    )
    layers = list(dict.fromkeys(found))
    streams = {f"`{type(site.stream).__name__}`" for site in sites.values()}
    causal = sum(site.causal for site in sites.values())
    cells = (name, f"{len(blocks)} `{block}`", f"{len(sites) - len(blocks)}: {', '.join(layers)}" if layers else "0")
    return f"| {' | '.join((*cells, *streams, f'{causal} of {len(sites)}'))} |"


def state(module):
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: x.detach().clone() for name, x in named}, {
        name: each.training for name, each in module.named_modules()
    }


@pytest.mark.parametrize(("name", "training"), crossed(list(MODELS), [True, False]))
def test_every_site_of_a_model_runs_has_its_width_and_a_gradient_and_the_model_stays_as_it_was(name, training):
    module, example = MODELS[name]()
    module.train(training)
    tensors, modes = state(module)
    generator = torch.get_rng_state()
    sites = find_sites(module, example)
    assert torch.equal(generator, torch.get_rng_state())
    after, modes_after = state(module)
    assert modes == modes_after
    assert all(torch.equal(x, after[path]) for path, x in tensors.items())
    assert all(p.grad is None for p in module.parameters())
    outputs = {}
    for path, site in sites.items():

        def keep(_, __, output, path=path):
            outputs[path] = output if isinstance(output, torch.Tensor) else output[0]
            outputs[path].retain_grad()

        module.get_submodule(site.after).register_forward_hook(keep)
    output = module.train()(**example)
    output.logits.square().sum().backward()
    for path, site in sites.items():
        assert site.stream.width == site.stream.width_at(outputs[path])
        assert outputs[path].grad.count_nonzero() > 0


@pytest.mark.parametrize("name", MODELS)
def test_the_sites_of_a_model_can_be_grafted(name):
    module, example = MODELS[name]()
    usual, sites = module.eval()(**example).logits, find_sites(module, example)
    graft(module, sites)
    assert torch.equal(module(**example).logits, usual)
    assert dict(find_sites(module, example)) == dict(sites)


@pytest.mark.parametrize("name", MODELS)
def test_the_page_has_what_was_found_in_a_model(name):
    module, example = MODELS[name]()
    assert row(name, find_sites(module, example)) in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_has_a_row_for_each_of_these_models_and_for_no_other():
    _, _, table = PAGE.read_text(encoding="utf-8").partition("| model | blocks |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    assert [line.split("|")[1].strip() for line in rows] == list(MODELS)


def test_heads_and_embeddings_are_left_out_by_name():
    module, example = MODELS["GPT-2"]()
    left_out = find_sites(module, example).left_out
    assert left_out["lm_head"].startswith("a head")
    assert left_out["transformer.wte"] == "an embedding"
    module, example = MODELS["T5"]()
    assert find_sites(module, example).left_out["shared"] == "an embedding"
