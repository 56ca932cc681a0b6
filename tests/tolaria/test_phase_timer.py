"""Test the seconds of phases, on a device that is behind the process too."""

import math

import pytest
import torch

from esper.leyline.config.tree import Config
from esper.tolaria.runtime import CpuMoment, PhaseTimer, describe_gpu, driver_version


class Device:
    """Runs for a second on each phase, as a device, and begins when it is told to catch up."""

    def __init__(self):
        self.given, self.passed = 0.0, 0.0

    def catch_up(self):
        self.passed = self.given


class DeviceMoment(CpuMoment):
    """Marks a moment of that device, as `torch.cuda.Event` marks one of a GPU."""

    def __init__(self, device):
        self.device, self.time = device, device.given

    def query(self):
        return self.device.passed >= self.time

    def elapsed_time(self, end_event):
        assert self.query()
        assert end_event.query()
        return super().elapsed_time(end_event)


class Behind(PhaseTimer):
    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.device = Device()

    def moment(self):
        return DeviceMoment(self.device)


def test_on_a_cpu_the_seconds_of_a_phase_are_there_when_it_ends():
    timer = PhaseTimer(torch.device("cpu"))
    with timer.phase("train"):
        sum(range(1000))
    first = timer.seconds["train"]
    with timer.phase("train"), timer.phase("probe"):
        pass
    assert timer.seconds["train"] > first > 0
    assert list(timer.seconds) == ["train", "probe"]


def test_phases_of_a_device_that_is_behind_are_read_when_it_has_passed_them():
    timer = Behind()
    for name in ("train", "probe"):
        with timer.phase(name):
            timer.device.given += 1.0
    assert timer.seconds == {}
    timer.device.passed = 1.0  # amid the work, as after the packet of a probe
    assert timer.seconds == {"train": 1.0}
    with timer.phase("train"):
        timer.device.given += 1.0
    timer.device.catch_up()
    assert timer.seconds == {"train": 2.0, "probe": 1.0}


def test_a_phase_that_fails_is_counted():
    timer = Behind()

    def fail():
        with timer.phase("train"):
            timer.device.given += 1.0
            math.exp(1000)

    with pytest.raises(OverflowError):
        fail()
    timer.device.catch_up()
    assert timer.seconds == {"train": 1.0}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n", "550.54.15"),
        ("nothing of that kind", None),
    ],
)
def test_the_version_of_the_driver_is_found(text, version):
    assert driver_version(text) == version


def test_of_a_cpu_nothing_is_said_about_a_gpu():
    assert describe_gpu(torch.device("cpu"), Config()) == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch sees")
def test_on_a_gpu_phases_are_those_of_the_device_and_its_driver_is_named():
    device = torch.device("cuda")
    timer, a = PhaseTimer(device), torch.randn(2048, 2048, device=device)
    with timer.phase("train"):
        for _ in range(50):
            a = a @ a / a.norm()
    torch.cuda.synchronize()
    assert timer.seconds["train"] > 0
    assert set(describe_gpu(device, Config())) >= {"cuda", "capability", "amp", "compile"}
