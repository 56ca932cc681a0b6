"""Damage what lies at a path, in many ways."""

import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch


class Place(NamedTuple):
    """Holds what a damage may draw on."""

    rng: np.random.Generator
    other: Path  # the same file or folder of another run
    aside: Path  # a folder out of the run's
    marker: Path  # what is there once a pickle was obeyed


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def truncated(path: Path, place: Place) -> None:
    """Cut the file off at a random place."""
    os.truncate(path, int(place.rng.integers(path.stat().st_size)))


def flipped(path: Path, place: Place) -> None:
    """Flip one random bit."""
    data = bytearray(path.read_bytes())
    data[place.rng.integers(len(data))] ^= 1 << int(place.rng.integers(8))
    path.write_bytes(data)


def emptied(path: Path, place: Place) -> None:
    """Leave no bytes of a file, or no files in a folder."""
    if path.is_dir():
        deleted(path)
        path.mkdir()
    else:
        path.write_bytes(b"")


def deleted(path: Path, place: Place | None = None) -> None:
    """Remove what is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def swapped(path: Path, place: Place) -> None:
    """Replace what is there by that of another run."""
    deleted(path)
    _copy(place.other, path)


def pickled(path: Path, place: Place) -> None:
    """Replace what is there by a pickle."""
    deleted(path)
    path.write_bytes(pickle.dumps(Payload(place.marker)))


def torch_saved(path: Path, place: Place) -> None:
    """Replace what is there by a pickle as torch.save makes them."""
    deleted(path)
    torch.save(Payload(place.marker), path)


def linked_to_itself(path: Path, place: Place) -> None:
    """Replace what is there by a link to a perfect copy elsewhere."""
    _copy(path, place.aside / path.name)
    _link(path, place.aside / path.name)


def linked_to_another(path: Path, place: Place) -> None:
    """Replace what is there by a link to that of another run."""
    _link(path, place.other)


def linked_to_zeros(path: Path, place: Place) -> None:
    """Replace what is there by a link to a file that never ends."""
    _link(path, Path("/dev/zero"))


def linked_to_pipe(path: Path, place: Place) -> None:
    """Replace what is there by a link to a pipe that nobody writes to."""
    os.mkfifo(place.aside / "pipe")
    _link(path, place.aside / "pipe")


def pipe(path: Path, place: Place) -> None:
    """Replace what is there by a pipe that nobody writes to."""
    deleted(path)
    os.mkfifo(path)


def folder(path: Path, place: Place) -> None:
    """Replace a file by a folder."""
    deleted(path)
    path.mkdir()


def file(path: Path, place: Place) -> None:
    """Replace a folder by a file."""
    deleted(path)
    path.write_bytes(b"step")


def _link(path: Path, target: Path) -> None:
    deleted(path)
    path.symlink_to(target)


def _copy(source: Path, target: Path) -> None:
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)


Damage = Callable[[Path, Place], None]
DRAWN: tuple[Damage, ...] = (truncated, flipped)
OF_FILES: tuple[Damage, ...] = (
    *(*DRAWN, emptied, deleted, swapped, pickled, torch_saved, pipe, folder),
    *(linked_to_itself, linked_to_another, linked_to_zeros, linked_to_pipe),
)
OF_FOLDERS: tuple[Damage, ...] = (emptied, deleted, swapped, file, linked_to_itself, linked_to_another)
OF_ALL: tuple[Damage, ...] = (linked_to_itself, linked_to_another)
DAMAGES: Mapping[str, Damage] = {each.__name__: each for each in (*OF_FILES, *OF_FOLDERS)}


def check_payload(out: Path) -> None:
    """Check that the pickle, where it is obeyed, does what readers must not let it do."""
    marker = out / "obeyed"
    pickle.loads(pickle.dumps(Payload(marker)))
    marker.rmdir()
