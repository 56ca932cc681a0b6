"""Detect speech: the network of silero-vad (MIT) for 16 kHz, with speech from Debian's espeak-ng in noise.

B windows of n chunks of 512 samples, C features.
"""

import io
import shutil
import subprocess
import wave
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.signal import lfilter, resample_poly  # type: ignore[import-untyped]
from torch import Tensor, nn

from esper.leyline.data import keys
from esper.leyline.messages import InputError
from esper_bench.packaged.package_files import package_file

CHUNK, CONTEXT, RATE = 512, 64, 16000
CHUNKS = 32
"""Chunks of a window, about a second."""
WINDOWS = 600
"""Windows that `windows` draws."""
WIDTHS = (128, 64, 64, 128)
"""Channels behind each of the convolutions."""
VOICES = tuple(
    f"{language}+{variant}"
    for language in ("en-us", "de", "fr", "es", "it", "nl")
    for variant in ("m1", "m3", "f2", "f4")
)
QUIET = 0.05
"""Chunks of the clean speech count as speech above this share of the loudest chunk's root mean square."""
_DRAW = 2  # of the module, so that its keys are no other's


class LSTM(nn.Module):
    """Computes an LSTM whose two maps are linear layers of their own, so that each can be damaged, and repaired, as one."""

    def __init__(self, reads: int, width: int) -> None:
        super().__init__()
        self.reads, self.state = nn.Linear(reads, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the states behind each position (B, n, C) of x (B, n, C)."""
        states, h = [], torch.zeros_like(x[:, 0, : self.state.in_features])
        c = h
        for step in self.reads(x).unbind(1):
            i, f, g, o = (step + self.state(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return torch.stack(states, 1)


class SpeechNetwork(nn.Module):
    """Runs the network of silero-vad over all chunks of a window at once: chunks are the last axis of its maps.

    Its Fourier transform is fixed, and so a buffer.
    """

    spectrum: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spectrum", torch.zeros(258, 1, 256, 1))
        sizes = zip((129, *WIDTHS), WIDTHS, (1, 2, 2, 1), strict=False)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(reads, writes, (3, 1), (stride, 1), (1, 0)), nn.ReLU())
                for reads, writes, stride in sizes
            )
        )
        self.memory, self.head = LSTM(128, 128), nn.Linear(128, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of silence, which are 0, and of speech (B, n, 2), of samples (B, 512 n) in [-1, 1]."""
        features = self.layers(magnitudes(framed(x), self.spectrum))
        return with_silence(self.head(torch.relu(self.memory(features.flatten(1, 2).mT))))


def framed(x: Tensor) -> Tensor:
    """Cut samples (B, 512 n) into chunks, columns (B, 1, 640, n), each with its context in front and mirrored at its end."""
    chunks = F.pad(x, (CONTEXT, 0)).unfold(1, CHUNK + CONTEXT, CHUNK)  # (B, n, 576)
    return F.pad(chunks, (0, CONTEXT), mode="reflect").mT[:, None]


def magnitudes(frames: Tensor, basis: Tensor) -> Tensor:
    """Compute sizes of 129 frequencies at 4 times of each chunk: (B, 1, 640, n) -> (B, 129, 4, n). basis: (258, 1, 256, 1)."""
    waves = F.conv2d(frames, basis, stride=(128, 1))  # (B, 258, 4, n)
    return (waves[:, :129].square() + waves[:, 129:].square()).sqrt()


def with_silence(logits: Tensor) -> Tensor:
    """Add logits of silence, which are 0, to those of speech (B, n, 1): silence and speech (B, n, 2)."""
    return torch.cat([torch.zeros_like(logits), logits], -1)


def network() -> SpeechNetwork:
    """Build the trained network from the program that silero-vad runs, a JIT file, of which only the weights are read.

    InputError if the package is not there or its file is damaged.
    """
    path, model = package_file("silero_vad", "data/silero_vad.jit", "silero-vad"), SpeechNetwork()
    names = {"spectrum": "stft.forward_basis_buffer"}
    for kind in ("weight", "bias"):
        names |= {f"layers.{number}.0.{kind}": f"encoder.{number}.reparam_conv.{kind}" for number in range(4)}
        names |= {"memory.reads." + kind: f"decoder.rnn.{kind}_ih", "memory.state." + kind: f"decoder.rnn.{kind}_hh"}
        names["head." + kind] = f"decoder.decoder.2.{kind}"
    try:
        arrays = torch.jit.load(path, map_location="cpu").state_dict()
        state = model.state_dict()
        model.load_state_dict({ours: arrays["_model." + name].view_as(state[ours]) for ours, name in names.items()})
    except (RuntimeError, KeyError, ValueError) as error:
        mend = "run pip install --no-deps --force-reinstall silero-vad"
        raise InputError(f"{path} does not hold the weights of silero-vad 6; {mend}") from error
    return model.eval()


def windows() -> tuple[Tensor, Tensor]:
    """Draw `WINDOWS` windows: samples (N, 512 n), and for each chunk 1 where it holds speech (N, n)."""
    return drawn(0, WINDOWS)


@cache
def drawn(first: int, count: int) -> tuple[Tensor, Tensor]:
    """Draw the windows of the numbers from `first` on.

    One of `VOICES` says numbers, cut or begun at random, in noise 0 to 20 dB below.
    """
    samples, speech = np.zeros((count, CHUNKS * CHUNK)), np.zeros((count, CHUNKS), np.int64)
    for row in range(count):
        u = keys.uniform(keys.key(keys.Purpose.INSTANCE, _DRAW, first + row, np.arange(12)))
        text = " ".join(str(int(1000 * each)) for each in u[:2])
        voice = VOICES[int(u[2] * len(VOICES))]
        said = spoken(text, voice, int(20 + 60 * u[3]), int(130 + 90 * u[4]))
        shift = int((u[5] * 1.5 - 0.75) * samples.shape[1])  # positive: silence in front
        clean = np.zeros(samples.shape[1])
        piece = said[max(-shift, 0) :][: len(clean) - max(shift, 0)]
        clean[max(shift, 0) :][: len(piece)] = piece
        loud = np.sqrt(np.square(clean).reshape(CHUNKS, CHUNK).mean(1))
        speech[row] = loud > QUIET * np.sqrt(np.square(said).mean())
        v, w = (
            keys.uniform(keys.key(keys.Purpose.INSTANCE, _DRAW, first + row, part, np.arange(len(clean))))
            for part in (1, 2)
        )
        noise = np.sqrt(-2 * np.log1p(-v)) * np.cos(2 * np.pi * w)  # normal, after Box and Muller
        noise = lfilter([1.0], [1.0, -0.95 * u[6]], noise)  # from white to brown
        level = np.sqrt(np.square(said).mean()) * 10 ** (-u[7])  # 0 to 20 dB below the speech
        mixed = clean + level * noise / noise.std()
        samples[row] = (0.05 + 0.9 * u[8]) * mixed / np.abs(mixed).max()
    return torch.from_numpy(samples).float(), torch.from_numpy(speech)


def spoken(text: str, voice: str, pitch: int, words_per_minute: int) -> NDArray[np.float64]:
    """Return samples at 16 kHz of a text that espeak-ng says. InputError if it is not installed or says nothing."""
    program = shutil.which("espeak-ng")
    if program is None:
        raise InputError("espeak-ng is not installed; run apt-get install espeak-ng")
    command = [program, "--stdout", "-v", voice, "-p", str(pitch), "-s", str(words_per_minute), text]
    done = subprocess.run(command, check=False, capture_output=True)
    try:
        with wave.open(io.BytesIO(done.stdout)) as file:
            found = np.frombuffer(file.readframes(2**24), np.int16) / 2**15
            resampled: NDArray[np.float64] = resample_poly(found, RATE, file.getframerate())
    except (wave.Error, EOFError):
        said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise InputError(
            f"{program} says nothing with the voice {voice} ({said}); run apt-get install --reinstall espeak-ng espeak-ng-data"
        ) from None
    return resampled


@torch.no_grad()
def speech_error(model: nn.Module, samples: Tensor, target: Tensor) -> float:
    """Return the share of chunks (N, n) that are taken for the other class."""
    return float((model(samples).argmax(-1) != target).double().mean())
