"""Runs that really run out of memory: the kernel refuses the command's next large allocation."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from esper.leyline.messages import InputError, OutOfMemory, is_out_of_memory, requested_memory
from esper.tolaria.runtime import PhaseTimer, available_memory
from journals import events

TIMES = ("seconds", "env_steps_per_second", "phase_seconds", "controller_share", "time")
LARGE = [
    "--set",
    "data={batch_size: 1024, batches_per_step: 1}",
    "--set",
    "checkpoint={every_steps: 1, every_seconds: 0}",
]
GROW = [
    "grow",
    "digits-narrow",
    "--envs",
    "96",
    "--baselines",
    "none",
    "--steps",
    "8",
    "--controller",
    "random-valid",
    *LARGE,
]
GROW += ["--models", "none", "--json"]
TRAIN = ["train", "digits-narrow", "--envs", "96", "--steps", "4", "--rounds", "2", *LARGE, "--json"]
TRAIN += ["--set", "ppo={imitation_rounds: 0, validate_envs: 2, validate_every: 1}"]


def timeless(value):
    if isinstance(value, dict):
        return {name: timeless(item) for name, item in value.items() if name not in TIMES}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def esper(*arguments):
    return subprocess.run([sys.executable, "-m", "esper", *arguments], capture_output=True, text=True, check=True)


def mapped(process):
    """Count the bytes of address space of a process."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def starved(arguments, step):
    """Run the command, and from a checkpoint on give it no more than the least that it held for a while, and 16 MiB."""
    command = [sys.executable, "-m", "esper", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        latest, held = Path("r/checkpoints/latest"), []
        while not latest.exists() or int(latest.read_text()[5:11]) < step:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.002)
            held = [*held[-100:], mapped(process)]
        resource.prlimit(process.pid, resource.RLIMIT_AS, (min(held) + 16 * 2**20, resource.RLIM_INFINITY))
        out, err = process.communicate()
    return process.returncode, out, err


def stopped(arguments, step):
    """Run until no seed is refused for lack of memory, which is part of a run and changes its numbers, and return the end."""
    while True:
        found = starved(arguments, step)
        if not any(row.get("refusal") == "memory" for row in events("r")):
            return found
        shutil.rmtree("r")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a limit on another process is Linux's own")
@pytest.mark.parametrize(("command", "step"), [(GROW, 4), (TRAIN, 3)], ids=["grow", "train"])
def test_a_run_that_memory_ran_out_for_says_so_and_is_resumed_to_the_same_numbers(tmp_path, monkeypatch, command, step):
    monkeypatch.chdir(tmp_path)
    straight = esper(*command, "--run", "straight").stdout
    code, out, err = stopped([*command, "--run", "r"], step)
    sentence = err.splitlines()[-1]
    assert (code, out) == (1, ""), err
    assert "Traceback" not in err
    assert sentence.startswith(("error: memory ran out in the phase ", "error: memory ran out between steps, "))
    assert "96 networks at data.batch_size 1024: " in sentence
    assert re.search(
        r"1024: ([\d.]+ [KMG]iB were asked for, )?[\d.]+ [KMG]iB are available; free some, or lower ", sentence
    )
    assert re.search(r"; esper resume r continues after step \d+, that of the last checkpoint$", sentence)
    assert events("r")[-1]["status"] == "failed"
    assert timeless(json.loads(esper("resume", "r", "--json").stdout)) == timeless(json.loads(straight))
    assert events("r") == events("straight")
    for path in Path("straight/controller").glob("*"):
        assert Path("r/controller", path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("want", [lambda: torch.empty(2**60), lambda: bytearray(2**60)], ids=["torch", "python"])
def test_a_phase_that_asks_for_too_much_is_named_with_the_numbers_and_what_to_lower(want):
    timer = PhaseTimer(torch.device("cpu"), "8 networks at data.batch_size 64")
    with (
        pytest.raises(
            OutOfMemory, match=r"^memory ran out in the phase train, with 8 networks .* lower envs, data.batch_size"
        ),
        timer.phase("train"),
    ):
        want()
    assert timer.seconds["train"] >= 0


def test_other_errors_of_a_phase_stay_what_they_are():
    timer = PhaseTimer(torch.device("cpu"))
    for error in (RuntimeError("shapes do not fit"), InputError("no such slot"), OutOfMemory("memory ran out here")):
        with pytest.raises(type(error)) as raised, timer.phase("probe"):
            raise error
        assert raised.value is error


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has"), "20.50 GiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes."), "4 MiB"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4194304 bytes."), "4 MiB"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (RuntimeError("can't start new thread"), None),
        (RuntimeError("could not create a primitive"), None),
        (MemoryError("Unable to allocate 74.5 GiB for an array with shape (10000000000,)"), "74.5 GiB"),
        (MemoryError(), None),
    ],
)
def test_what_says_that_memory_ran_out_is_known_with_the_amount(error, asked):
    assert is_out_of_memory(error)
    assert requested_memory(error) == asked


def test_what_is_available_is_no_more_than_the_limit_of_the_process_leaves():
    code = (
        "import resource, torch\nfrom esper.tolaria.runtime import available_memory\n"
        "held = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (held + 64 * 2**20, resource.RLIM_INFINITY))\n"
        "print(available_memory(torch.device('cpu')))"
    )
    if not Path("/proc/self/statm").exists():
        pytest.skip("the system does not say what a process holds")
    said = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0 < said <= 64 * 2**20 < available_memory(torch.device("cpu"))
