"""List which operations round one row of a stack differently from the same row among three.

    python bench/scripts/study_one_row.py [--shapes 3000]

Batched products of random shapes, in float32, float64 and bfloat16: those with a side of 1, such as products of a matrix and a
vector, and the others. Then the operations of a transformer of width 192 on 16 x 128 tokens, with their gradients.
"""

import argparse
import random
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

SIDES = (1, 2, 3, 4, 5, 7, 8, 12, 13, 16, 24, 31, 32, 33, 48, 64, 96, 128, 192, 200, 256, 512, 768, 1024, 2048)
LARGEST = 5 * 10**7
"""Multiplications of the largest product."""


def products(shapes: int) -> None:
    """Print how many random products of one row differ from those of three."""
    count, different = Counter[tuple[torch.dtype, str]](), Counter[tuple[torch.dtype, str]]()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for _ in range(shapes):
            m, k, n = (random.choice(SIDES) for _ in range(3))
            if m * k * n > LARGEST:
                continue
            a = torch.randn(3, k, m, dtype=dtype).mT if random.random() < 0.5 else torch.randn(3, m, k, dtype=dtype)
            b = torch.randn(3, n, k, dtype=dtype).mT if random.random() < 0.5 else torch.randn(3, k, n, dtype=dtype)
            c = torch.randn(3, 1, n, dtype=dtype)
            kind = "a side of 1" if 1 in (m, k, n) else "sides over 1"
            count[dtype, kind] += 1
            same = torch.equal(torch.bmm(a[:1], b[:1]), torch.bmm(a, b)[:1])
            same &= torch.equal(torch.baddbmm(c[:1], a[:1], b[:1]), torch.baddbmm(c, a, b)[:1])
            different[dtype, kind] += not same
    for key, number in count.items():
        print(f"{str(key[0]).removeprefix('torch.')}, {key[1]}: {different[key]} of {number:,} products differ")


def operation(name: str, function: Callable[..., Tensor], *stacked: Tensor) -> None:
    """Print whether a function of tensors (3, ...) and its gradients are the same for the first row alone."""
    found = []
    for rows in (1, 3):
        given = [each[:rows].clone().requires_grad_(each.is_floating_point()) for each in stacked]
        y = function(*given)
        pull = torch.linspace(-1, 1, y[0].numel()).view(1, *y.shape[1:])
        (y * pull).sum().backward()
        found.append([y, *(each.grad for each in given if each.grad is not None)])
    same = all(torch.equal(one, three[:1]) for one, three in zip(*found, strict=True))
    print(f"{name}: {'the same bits' if same else 'OTHER BITS'}")


def main() -> None:
    """Compare products and operations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=3000, help="products of each type")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    products(arguments.shapes)
    x, heads = torch.randn(3, 16, 128, 192), torch.randn(3, 3, 16 * 6, 128, 32)
    tokens = torch.randint(0, 256, (3, 16, 128))
    operation(
        "linear",
        lambda x, w, b: torch.baddbmm(b.unsqueeze(1), x.flatten(1, 2), w.mT),
        x,
        torch.randn(3, 768, 192),
        torch.randn(3, 768),
    )
    operation("layer norm", lambda x: F.layer_norm(x, (192,)), x)
    operation("scale and shift", lambda x, s, t: x * s + t, x, torch.randn(3, 1, 1, 192), torch.randn(3, 1, 1, 192))

    def attention(h: Tensor) -> Tensor:
        q, k, v = (each.flatten(0, 1).unsqueeze(1) for each in h.unbind(1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).view(-1, 96, 128, 32)

    operation("attention", attention, heads)
    operation(
        "embedding",
        lambda t, w: torch.stack([F.embedding(*each) for each in zip(t, w, strict=True)]),
        tokens,
        torch.randn(3, 256, 192),
    )
    operation(
        "cross-entropy",
        lambda z, t: F.cross_entropy(z.flatten(0, -2), t.flatten(), reduction="none").view(t.shape),
        torch.randn(3, 16, 128, 256),
        tokens,
    )
    operation("mean", lambda x: x.flatten(1).mean(1, keepdim=True), x)
    operation("norm", lambda x: torch.linalg.vector_norm(x.flatten(1), dim=1, keepdim=True), x)


if __name__ == "__main__":
    main()
