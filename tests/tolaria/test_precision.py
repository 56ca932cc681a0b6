from pathlib import Path

import numpy as np
import pytest
import torch

import esper
from esper.cli import main
from esper.leyline.config.tree import build_config
from esper.leyline.messages import InputError
from esper.tolaria import runtime
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import multiplies_bfloat16, products_in, resolve_amp
from populations import GROW, GROW_ZERO, assert_same, blobs, small_config, trajectory

CPU = torch.device("cpu")


@pytest.fixture
def native(monkeypatch):
    """Let the processor count as one that multiplies bfloat16; torch computes it on any, only slower."""
    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda device: True)


def bf16(**overrides):
    return small_config(amp="bf16", **overrides)


def test_off_and_a_device_without_bfloat16_leave_the_products_in_the_type_of_the_parameters(monkeypatch):
    assert resolve_amp("off", CPU, torch.float32) is None
    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda device: False)
    assert resolve_amp("auto", CPU, torch.float32) is None


def test_auto_takes_bfloat16_where_the_device_multiplies_it(native):
    assert resolve_amp("auto", CPU, torch.float32) is torch.bfloat16
    assert resolve_amp("auto", CPU, torch.float64) is None


def test_bfloat16_is_refused_for_a_device_that_lacks_it_and_for_hosts_in_float64(monkeypatch):
    for there, dtype, words in ((False, torch.float32, "does not multiply bfloat16"), (True, torch.float64, "float64")):
        monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda device, there=there: there)
        with pytest.raises(InputError, match=words):
            resolve_amp("bf16", CPU, dtype)


def test_a_type_that_the_device_lacks_is_one_sentence_before_anything_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda device: False)
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as end:
        main(["grow", "spirals", "--set", "amp=bf16", "--run", str(run)])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert "does not multiply bfloat16 natively; set amp to off, fp16 or auto" in err
    assert err.count("\n") == 1
    assert not run.exists()


def test_the_check_of_the_processor_agrees_with_its_flags():
    flags = Path("/proc/cpuinfo").read_text().split()
    assert multiplies_bfloat16(CPU) == bool({"avx512_bf16", "amx_bf16"} & set(flags))


def test_yaml_reads_off_as_false_and_the_config_knows_it():
    assert build_config({"amp": False}).amp == "off"
    with pytest.raises(InputError, match="amp"):
        build_config({"amp": "fp8"})


def test_a_linear_layer_multiplies_in_the_type_that_was_asked_for():
    layer, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    with products_in(torch.bfloat16, CPU):
        assert layer(x).dtype is torch.bfloat16
    with products_in(None, CPU):
        assert layer(x).dtype is torch.float32


@pytest.mark.parametrize(("mapping", "incubation"), [("auto", "shadow"), ("vmap", "ste"), ("loop", "shadow")])
def test_training_in_bfloat16_follows_float32_and_keeps_its_parameters_in_float32(native, mapping, incubation):
    config = {"mapping": mapping, "lifecycle": {"incubation": incubation}}
    (short, *_), (wide, *_) = trajectory(bf16(**config), GROW), trajectory(small_config(**config), GROW)
    body = short.population.body
    for stack in (body.host, *body.stacks.values()):
        assert {column.dtype for name, column in stack.columns.items() if name in ("value", "gradient")} == {
            torch.float32
        }
    value, exact = body.host.columns["value"], wide.population.body.host.columns["value"]
    assert not torch.equal(value, exact), "bfloat16 rounds"
    torch.testing.assert_close(value, exact, rtol=0.1, atol=0.02)
    np.testing.assert_allclose(short.state.scores.loss, wide.state.scores.loss, rtol=0.05)


@pytest.mark.parametrize("decisions", [{}, GROW_ZERO])
def test_an_environment_in_bfloat16_is_bitwise_the_same_in_any_population(native, decisions):
    alone = trajectory(bf16(envs=1), decisions)[2]
    for envs in (2, 5):
        assert_same(trajectory(bf16(envs=envs), decisions)[2], alone)


def test_the_first_measurement_does_not_know_the_type_of_the_products(native):
    measured = [VectorizedEngine(blobs(), config).reset().measurements.loss for config in (bf16(), small_config())]
    assert np.array_equal(*measured)


@pytest.mark.slow
def test_an_accuracy_on_images_in_bfloat16_is_that_of_float32_within_noise(native):
    settings = {"envs": 4, "steps": 8, "data": {"batches_per_step": 8}, "baselines": "none"}
    accuracy = [
        np.mean(
            esper.grow("digits-image", settings | {"amp": amp}, controller="never", progress=False)["test_accuracy"][
                "grown"
            ]
        )
        for amp in ("off", "bf16")
    ]
    assert accuracy[0] > 0.5
    assert abs(accuracy[0] - accuracy[1]) < 0.05
