"""Draw random numbers by keys: each draw is a hash of its purpose and indices, not the next value of a stream.

Adding environments, workers or telemetry therefore cannot change an existing trajectory. The hash is splitmix64
(Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, figure 3) in int64 operations that
NumPy and torch share bit for bit, on every device.
"""

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = TypeVar("Integers", NDArray[np.int64], Tensor)


class Purpose(IntEnum):
    """Names the purposes of draws. The values are part of every key, so their meaning never changes."""

    HOST = 1  # initial weights of a host
    BIRTH = 2  # initial weights of a seed
    ORDER = 3  # order of the training examples
    POLICY = 4  # random choices of a controller
    DROPOUT = 5  # activations that are dropped
    SPLIT = 6  # assignment of examples to splits
    SENSOR = 7  # draws of the growth sensors
    INSTANCE = 8  # host and data of a sampled problem
    ATTRIBUTION = 9  # permutations of sampled attribution
    AUGMENT = 10  # how a training image is shifted and mirrored
    POLICY_WEIGHTS = 11  # initial weights of a policy
    MINIBATCH = 12  # assignment of sequences to minibatches of the policy's optimizer
    SAMPLE = 13  # instances of a round of training
    VALIDATION = 14  # run seed of the validation of a policy
    HEALING = 15  # hosts, data and damage of the task `heal`
    CERTIFY = 16  # fresh examples for certified keeps
    STREAM = 17  # segments, contexts and examples of streams of changing data, and weights of networks that learn them
    WIDENING = 18  # weights of further hidden features of a host
    MENU = 19  # the part of a menu that a learner has in an episode


_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def mix(x: Integers) -> Integers:
    """Compute splitmix64's output function of int64 values, elementwise; arithmetic wraps, shifts are logical."""
    x = x + _GAMMA
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def key(*parts: Any) -> NDArray[np.int64]:
    """Return one int64 key from integers and integer arrays, which broadcast; at least one-dimensional.

    key(a, b, c) = mix(mix(mix(0 ^ a) ^ b) ^ c), so the order of the parts matters.
    """
    state = np.zeros(1, np.int64)
    for part in parts:
        state = mix(state ^ np.asarray(part, np.int64))
    return state


def scalar(*parts: int) -> int:
    """Return the `key` of plain integers as a Python integer in [0, 2**63), which can seed a torch.Generator."""
    return int(key(*parts)[0]) & ((1 << 63) - 1)


def uniform(keys: NDArray[np.int64]) -> NDArray[np.float64]:
    """Draw numbers in [0, 1), one per key, with 53 random bits; the shape of `keys`."""
    bits = (mix(keys) >> 11) & ((1 << 53) - 1)
    return bits.astype(np.float64) * 2.0**-53


def permutations(keys: NDArray[np.int64], sizes: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return one permutation of range(size) per key: the argsort of the hashes of (key, index).

    keys, sizes: (N,) int64.  Returns (N, max size) int64 on `device`; in each row, indices of at least its size come last.
    The hashes are distinct, so both sorts give the same order. On the CPU NumPy sorts seven times faster than torch (1,000
    indices, 64 keys); on other devices torch avoids a copy to the CPU.
    """
    length, last = int(sizes.max()), np.iinfo(np.int64).max
    if device.type == "cpu":
        index = np.arange(length)
        hashes = mix(keys[:, None] ^ mix(index)[None])
        if (sizes < length).any():
            hashes = np.where(index < sizes[:, None], hashes, last)
        return torch.from_numpy(np.argsort(hashes, axis=1))
    place = torch.arange(length, device=device)
    sent, ends = (torch.from_numpy(values).to(device, non_blocking=True)[:, None] for values in (keys, sizes))
    return mix(sent ^ mix(place)[None]).masked_fill(place >= ends, last).argsort(dim=1)


ROUNDS = 4
"""Rounds of the network of `permuted`, from which on it cannot be told from a random permutation (Luby and Rackoff, 1988)."""


def permuted(keys: NDArray[np.int64], size: int, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where a permutation of range(size), one for each key, takes an index, without computing the others.

    A Feistel network permutes the pairs of range(width), width = ceil(sqrt(size)), of which there are at most 2 width more than
    indices: index = left * width + right, and each round takes

        (left, right) -> (right, (left + hash(key, round, right)) mod width)

    An image of `size` or more is permuted again, until it is smaller (J. Black and P. Rogaway, "Ciphers with arbitrary finite
    domains", CT-RSA 2002). keys, index: integers that broadcast; returns int64 of their common shape.
    """
    width = math.isqrt(size - 1) + 1
    keys, index = np.broadcast_arrays(keys, index)
    rounds = [mix(keys ^ number) for number in range(ROUNDS)]

    def network(rounds: Sequence[NDArray[np.int64]], index: NDArray[np.int64]) -> NDArray[np.int64]:
        left, right = np.divmod(index, width)
        for own in rounds:
            left, right = right, (left + (mix(own ^ right) & ((1 << 63) - 1)) % width) % width
        return left * width + right

    image = network(rounds, index)
    while (outside := image >= size).any():
        image[outside] = network([own[outside] for own in rounds], image[outside])
    return image
