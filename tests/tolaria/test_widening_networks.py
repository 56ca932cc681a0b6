"""Check that whole networks of many kinds become twice as wide, compute what they did, and learn on in every part that is new."""

import copy
import itertools
import math
from collections import UserDict
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

import esper
from esper.kasmina.graft.multiplying import VARIANTS, WAYS, Multiplication
from esper.leyline.messages import GrowthWarning, InputError


class RMSNorm(nn.Module):
    """Normalises by the root mean square, as a class of a person's own."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        return self.weight * F.rms_norm(x, (x.shape[-1],), eps=self.eps)


class OneMoreNorm(nn.Module):
    """Multiplies by 1 + its weight when it normalises, as in Gemma."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), 1e-6

    def forward(self, x):
        return (1 + self.weight) * F.rms_norm(x, (x.shape[-1],), eps=self.eps)


class RootEmbedding(nn.Embedding):
    """Multiplies by the root of its width, in an attribute and in a buffer, as an embedding does."""

    def __init__(self, number, width):
        super().__init__(number, width)
        self.embed_scale = math.sqrt(width)
        self.register_buffer("scale", torch.tensor(self.embed_scale), persistent=False)

    def forward(self, tokens):
        return super().forward(tokens) * (self.embed_scale * self.scale) ** 0.5


class PlainNorm(nn.Module):
    """Normalises without parameters, as in OLMo."""

    def __init__(self, width):
        super().__init__()
        self.normalized_shape = (width,)

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape)


class Block(nn.Module):
    """Runs a transformer block with one matrix for queries, keys and values."""

    def __init__(self, width, heads, norm):
        super().__init__()
        self.n_head, self.n_embd = heads, width
        self.norm_1, self.norm_2 = norm(width), norm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
            for part in self.c_attn(self.norm_1(x)).split(self.n_embd, dim=2)
        )
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, norm=nn.LayerNorm, tied=True, zero=False, width=8, blocks=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(20, width), nn.Parameter(torch.randn(12, width))
        self.h = nn.ModuleList(Block(width, 2, norm) for _ in range(blocks))
        self.ln_f, self.lm_head = norm(width), nn.Linear(width, 20, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight
        for block in self.h if zero else ():
            nn.init.zeros_(block.c_proj.weight)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class SharedKeys(nn.Module):
    """Shares keys and values between two heads, and normalises each head's queries."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, 2, 4
        self.enter, self.norm, self.leave = nn.Linear(5, 16), nn.RMSNorm(16), nn.Linear(16, 3)
        self.q, self.k, self.v, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 16)
        self.q_norm = nn.RMSNorm(4)

    def forward(self, x):
        x = self.enter(x)
        q, k, v = (
            layer(self.norm(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        k, v = (each.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for each in (k, v))
        mixed = (self.q_norm(q) @ k.transpose(-1, -2) / self.head_dim**0.5).softmax(-1) @ v
        return self.leave(x + self.o(mixed.transpose(1, 2).flatten(2)))


class Short(nn.Module):
    """Attends with heads whose number has a name of one letter."""

    def __init__(self):
        super().__init__()
        self.h = 2
        self.embed, self.qkv, self.proj, self.head = (nn.Linear(*each) for each in ((5, 8), (8, 24), (8, 8), (8, 3)))

    def forward(self, x):
        x = self.embed(x)
        query, key, value = self.qkv(x).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
        return self.head(x + self.proj((weights @ value).transpose(1, 2).flatten(2)))


class NormedHeads(SharedKeys):
    """Normalises queries and keys over all heads together, by torch's norm and one of a person's own, as in OLMo 2."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(16), RMSNorm(8)

    def forward(self, x):
        x = self.enter(x)
        y = self.norm(x)
        q, k, v = (
            each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for each in (self.q_norm(self.q(y)), self.k_norm(self.k(y)), self.v(y))
        )
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        return self.leave(x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


class ByHead(SharedKeys):
    """Puts queries, keys and values of each head beside each other, as in GPT-NeoX."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        del self.q, self.k, self.v, self.q_norm

    def forward(self, x):
        x = self.enter(x)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, 3 * self.head_dim)).transpose(1, 2).chunk(3, -1)
        return self.leave(x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


class Functional(ByHead):
    """Multiplies by the weights of its layers itself, as the shifted windows of torchvision's Swin."""

    def forward(self, x):
        x = self.enter(x)
        qkv = F.linear(self.norm(x), self.qkv.weight, self.qkv.bias)
        q, k, v = qkv.unflatten(-1, (-1, 3 * self.head_dim)).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.leave(x + F.linear(mixed, self.o.weight, self.o.bias))


class Slopes(ByHead):
    """Adds biases of attention by distance with slopes that depend on the number of heads, as in Bloom (ALiBi)."""

    def slopes(self):
        return 2.0 ** (-8 / self.num_heads * torch.arange(1, self.num_heads + 1))

    def forward(self, x):
        x = self.enter(x)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, 3 * self.head_dim)).transpose(1, 2).chunk(3, -1)
        bias = self.slopes()[:, None, None] * torch.arange(x.shape[1])
        mixed = (q @ k.mT / self.head_dim**0.5 + bias).softmax(-1) @ v
        return self.leave(x + self.o(mixed.transpose(1, 2).flatten(2)))


class ScaledLogits(SharedKeys):
    """Adds a bias for each head; has two embeddings of one weight, of which one runs; divides logits by a root of width (T5)."""

    def __init__(self):
        super().__init__()
        self.shared, self.enter, self.bias = nn.Embedding(20, 16), nn.Embedding(20, 16), nn.Embedding(8, 4)
        self.last, self.leave, self.d_model = nn.RMSNorm(16), nn.Linear(16, 20, bias=False), 16
        self.enter.weight = self.leave.weight = self.shared.weight

    def forward(self, tokens):
        x, place = self.enter(tokens), torch.arange(tokens.shape[1])
        q, k, v = (
            layer(self.norm(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        k, v = (each.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for each in (k, v))
        bias = self.bias((place[:, None] - place).abs()).movedim(-1, 0)
        mixed = (self.q_norm(q) @ k.mT + bias).softmax(-1) @ v
        return self.leave(self.last(x + self.o(mixed.transpose(1, 2).flatten(2))) * self.d_model**-0.5)


class Residual(nn.Module):
    def __init__(self, norm, channels=4):
        super().__init__()
        self.one, self.two = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.first, self.second = norm(channels), norm(channels)

    def forward(self, x):
        return F.relu(x + self.second(self.two(F.relu(self.first(self.one(x))))))


def resnet(norm):
    body = [nn.Conv2d(1, 4, 3), norm(4), nn.ReLU(), Residual(norm), Residual(norm)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.down, self.middle = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 8, 2, 2), nn.Conv1d(8, 8, 1)
        self.norm, self.up = nn.GroupNorm(2, 8), nn.ConvTranspose1d(8, 4, 2, 2)
        self.join, self.leave = nn.Conv1d(8, 4, 3, padding=1), nn.Conv1d(4, 1, 1)

    def forward(self, x):
        x = F.silu(self.enter(x))
        inner = F.silu(self.middle(F.silu(self.norm(self.down(x)))))
        return self.leave(F.silu(self.join(torch.cat([x, self.up(inner)], 1))))


class Interpolating(UNet):
    """Maps become larger by interpolation, which multiplies by no weight."""

    def __init__(self):
        super().__init__()
        self.up = nn.Sequential(nn.Upsample(scale_factor=2, mode="linear"), nn.Conv1d(8, 4, 1))


class Recurrent(nn.Module):
    def __init__(self, kind, **settings):
        super().__init__()
        self.embed = nn.Embedding(20, 6, padding_idx=0)
        self.body = kind(6, 5, num_layers=2, batch_first=True, **settings)
        self.leave = nn.Linear(10 if settings else 5, 4)

    def forward(self, tokens):
        return self.leave(self.body(self.embed(tokens))[0])


class Cells(nn.Module):
    """Reads the positions one after the other, by two cells."""

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden_size = nn.Embedding(20, 5), 6
        self.first, self.second, self.head = nn.LSTMCell(5, 6), nn.GRUCell(6, 6), nn.Linear(6, 3)

    def forward(self, tokens):
        x, state = self.embedding(tokens), None
        last = x.new_zeros(len(x), self.hidden_size)
        for place in x.unbind(1):
            state = self.first(place, state)
            last = self.second(state[0], last)
        return self.head(last)


class OneHead(nn.Module):
    """Attends by one head between the places of a map, whose channels stand in front of the places (SAGAN)."""

    def __init__(self):
        super().__init__()
        self.stem, self.query, self.key = (nn.Conv2d(*each, 1) for each in ((1, 6), (6, 3), (6, 3)))
        self.value, self.head = nn.Conv2d(6, 6, 1), nn.Linear(6, 3)

    def forward(self, x):
        x = self.stem(x)
        query, key, value = (part(x).flatten(2) for part in (self.query, self.key, self.value))
        weights = (query.transpose(1, 2) @ key).softmax(-1)
        return self.head((x + (value @ weights.transpose(1, 2)).view_as(x)).mean((2, 3)))


class OnGraph(nn.Module):
    """Attends to neighbours in a graph, by scores of two nodes (GAT), and scores each node at the end."""

    def __init__(self):
        super().__init__()
        self.register_buffer("edges", torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]))
        self.into, self.out, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.left, self.right, self.score = (nn.Linear(8, 1) for _ in range(3))

    def forward(self, x):
        x = F.elu(self.edges @ self.into(x))
        scores = F.leaky_relu(self.left(x) + self.right(x).mT) - 9 * (1 - self.edges)
        x = F.elu(self.out(scores.softmax(-1) @ x))
        return self.head((self.score(x).softmax(1) * x).sum(1))


class Queries(nn.Module):
    """Reads the places by learned queries, and adds what they read to them (Perceiver); one more query reads those (PMA)."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(3, 8), nn.Parameter(torch.randn(1, 1, 8))
        self.embed, self.norm, self.head = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.query, self.key, self.value, self.mix = (nn.Linear(8, 8) for _ in range(4))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x, queries = self.embed(x), self.table.weight
        weights = (self.query(self.norm(queries)) @ self.key(x).mT / 8**0.5).softmax(-1)
        x = self.mix(queries + weights @ self.value(x))
        return self.head(self.attention(self.last.expand(len(x), -1, -1), x, x)[0][:, 0])


class Mixer(nn.Module):
    """Mixes places of each feature in one part, features of each place in another, and gates by places in a third (gMLP)."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.places = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))
        self.features = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.into, self.gate, self.out = nn.Linear(8, 14), nn.Linear(6, 6), nn.Linear(7, 8)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.places(self.norm(x).mT).mT
        x = x + self.features(x)
        values, gates = self.into(x).chunk(2, -1)
        return self.head((x + self.out(values * self.gate(gates.mT).mT)).mean(1))


class Tied(nn.Module):
    """Predicts tokens by a last layer that has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(20, 6, padding_idx=0), nn.LSTM(6, 6, batch_first=True)
        self.leave = nn.Linear(6, 20, bias=False)
        self.leave.weight = self.embed.weight

    def forward(self, tokens):
        return self.leave(self.body(self.embed(tokens))[0])


def depthwise():
    inner = [nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU6(), nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4)]
    return nn.Sequential(*inner, nn.ReLU6(), nn.Conv2d(4, 6, 1, groups=2), nn.Flatten(), nn.Linear(96, 4))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Conv2d(1, 8, 2, 2), nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 17, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.body(x))[:, 0])


class TwoTokens(ViT):
    """Reads the token of the class and the mean of the others side by side in its head, as in DINOv2."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = self.norm(self.body(torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions))
        return self.head(torch.cat([x[:, 0], x[:, 1:].mean(1)], 1))


class Gemma(GPT):
    def __init__(self):
        super().__init__(OneMoreNorm)
        self.wte = RootEmbedding(20, 8)
        self.wte.weight = self.lm_head.weight


class Translation(nn.Module):
    """Runs an encoder and a decoder behind one table of positions, which is a buffer."""

    def __init__(self):
        super().__init__()
        self.embed, self.leave = nn.Embedding(20, 8), nn.Linear(8, 5)
        self.body = nn.Transformer(8, 2, 1, 1, 12, batch_first=True, norm_first=True)
        self.register_buffer("positions", torch.randn(1, 16, 8))

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions[:, : tokens.shape[1]]
        return self.leave(self.body(x, x))


def encoder():
    return nn.Sequential(nn.Linear(5, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3))


TOKENS = torch.arange(16).reshape(2, 8) % 20
NETWORKS = {
    "a norm between two layers": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
        (3, 5),
        "means",
    ),
    "GPT, tied": (GPT, TOKENS, "means"),
    "GPT, zero projections": (lambda: GPT(zero=True, tied=False), TOKENS, "means"),
    "GPT, RMSNorm": (lambda: GPT(nn.RMSNorm), TOKENS, "zeros"),
    "GPT, a norm of its own": (lambda: GPT(RMSNorm), TOKENS, "zeros"),
    "GPT, a norm without weights": (lambda: GPT(PlainNorm, tied=False), TOKENS, "copies"),
    "embeddings times the root of the width, norms of 1 + weight": (Gemma, TOKENS, "zeros"),
    "norms over all heads": (NormedHeads, (2, 6, 5), "copies"),
    "streams side by side": (TwoTokens, (3, 1, 8, 8), "means"),
    "shared keys": (SharedKeys, (2, 6, 5), "zeros"),
    "queries, keys and values by head": (ByHead, (2, 6, 5), "zeros"),
    "weights of layers that a module multiplies by": (Functional, (2, 6, 5), "zeros"),
    "slopes by the number of heads": (Slopes, (2, 6, 5), "zeros"),
    "logits over a root of the width": (ScaledLogits, TOKENS, "zeros"),
    "ResNet, BatchNorm": (lambda: resnet(nn.BatchNorm2d), (3, 1, 8, 8), "zeros"),
    "ResNet, GroupNorm": (lambda: resnet(lambda c: nn.GroupNorm(2, c)), (3, 1, 8, 8), "copies"),
    "U-Net": (UNet, (3, 1, 16), "copies"),
    "U-Net that interpolates": (Interpolating, (3, 1, 16), "copies"),
    "LSTM": (lambda: Recurrent(nn.LSTM), TOKENS, "zeros"),
    "LSTM, tied": (Tied, TOKENS, "zeros"),
    "GRU in both directions": (lambda: Recurrent(nn.GRU, bidirectional=True), TOKENS, "zeros"),
    "cells": (Cells, TOKENS, "zeros"),
    "attention of one head": (OneHead, (2, 1, 3, 3), "zeros"),
    "attention on a graph": (OnGraph, (2, 4, 5), "zeros"),
    "learned queries": (Queries, (2, 4, 5), "means"),
    "places that are mixed": (Mixer, (2, 6, 5), "copies"),
    "heads that are counted by h": (Short, (2, 6, 5), "zeros"),
    "depthwise and grouped": (depthwise, (2, 3, 6, 6), "zeros"),
    "ViT": (ViT, (3, 1, 8, 8), "means"),
    "encoder and decoder, positions in a buffer": (Translation, TOKENS, "means"),
    "encoder with norms behind": (encoder, (3, 4, 5), "copies"),
}


def trained(name):
    """Train all parameters of a network in float64; return it, its input, and a moving average."""
    build, given, _ = NETWORKS[name]
    torch.manual_seed(0)
    model = build().double()
    x = given if isinstance(given, torch.Tensor) else torch.randn(given, dtype=torch.float64)
    average, optimizer = AveragedModel(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return model, x, average, optimizer


def output(model, x):
    with torch.no_grad():
        return copy.deepcopy(model).eval()(x)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_twice_the_width_computes_what_it_did_and_all_of_it_learns(name):
    model, x, average, optimizer = trained(name)
    before, random = [output(each, x) for each in (model, average)], torch.get_rng_state()
    widths = esper.widen(model, 2, example=x, optimizer=optimizer, ema=average, seed=1)
    assert torch.equal(torch.get_rng_state(), random)
    assert not widths.left_out
    for one, other in zip(before, (model, average), strict=True):
        assert torch.allclose(one, output(other, x), rtol=0, atol=1e-9)
    assert {each.shape for each in average.module.parameters()} == {each.shape for each in model.parameters()}
    born = {key: value.detach().clone() for key, value in model.named_parameters()}
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for key, value in model.named_parameters():
        moved = (value != born[key]).double().mean()
        tokens = 15 / 16 if key.startswith("embed") else 1  # a row of an embedding learns where its token was seen
        assert moved > 0.5 * tokens, f"{key}: {float(moved):.2f} of its values learn"


@pytest.mark.parametrize("name", NETWORKS)
def test_the_first_way_that_keeps_the_function_is_taken(name):
    model, x, *_ = trained(name)
    variants = {
        TwoTokens: "joined",
        Translation: "buffers",
        ByHead: "by head",
        Functional: "by head",
        Slopes: VARIANTS[4],
        ScaledLogits: "scaled",
        Mixer: "positions",
    }
    found = Multiplication(model, x, variant=variants.get(type(model), "plain"))
    assert found.apply([model.eval()], x, 3, 0) == NETWORKS[name][2]


class Scaled(nn.Module):
    """Divides what a layer without a bias returns by its length."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(F.normalize(self.first(x)))


class Halving(Scaled):
    """Changes its input in place."""

    def forward(self, x):
        return super().forward(x.mul_(0.5))


@pytest.mark.parametrize("change", [lambda m, x: esper.widen(m, 2, example=x), lambda m, x: esper.deepen(m, example=x)])
def test_a_network_that_changes_its_input_in_place_leaves_the_example_alone(change):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Sequential(Halving(), nn.Linear(4, 8)) for _ in range(2))), torch.randn(4, 8)
    example = x.clone()
    with suppress(InputError):
        change(model, example)
    assert torch.equal(example, x)


class Largest(nn.Module):
    """Adds the largest of its features, in which no gradient flows."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.enter(x)
        return self.leave(h) + h.detach().max()


def test_a_largest_feature_is_seen_though_no_new_one_is_larger_as_it_is_drawn():
    torch.manual_seed(2)
    model, x = Largest(), torch.randn(4, 5)
    with torch.no_grad():
        model.enter.bias += 3
    further = 10 * torch.randn(100, 5)
    before = model(further)
    assert esper.widen(model, 2, example=x).way == "copies"
    assert torch.allclose(model(further), before, atol=1e-4)


def test_a_network_that_cannot_run_backward_is_refused_in_a_sentence():
    class Doubling(Stack):
        def forward(self, x):
            return self.leave(self.enter(x).sigmoid().mul_(2))

    with pytest.raises(InputError, match=r"^the Doubling cannot run backward on the example: RuntimeError: one of the"):
        esper.widen(Doubling(), 2, example=torch.ones(2, 8))


def test_embeddings_with_one_weight_and_a_bias_for_each_head_follow():
    model = ScaledLogits()
    esper.widen(model, 2, example=TOKENS)
    assert model.shared.weight is model.enter.weight is model.leave.weight
    assert (model.shared.embedding_dim, model.enter.embedding_dim, model.leave.in_features) == (32, 32, 32)
    assert (model.bias.embedding_dim, model.num_heads, model.num_kv_heads, model.d_model) == (8, 8, 4, 32)


def test_the_root_of_the_width_by_which_an_embedding_is_multiplied_follows():
    model, x, *_ = trained("embeddings times the root of the width, norms of 1 + weight")
    before = output(model, x)
    esper.widen(model, 2, example=x)
    assert (model.wte.embed_scale, model.wte.scale.item()) == (pytest.approx(4.0), pytest.approx(4.0))
    built = GPT(OneMoreNorm, width=16).double()
    built.wte = RootEmbedding(20, 16).double()
    for block in built.h:
        block.n_head = 4
    built.lm_head.weight = built.wte.weight
    built.load_state_dict(model.state_dict())
    assert torch.allclose(output(built, x), before, rtol=0, atol=1e-5)  # but for the eps of norms


def test_positions_that_are_frozen_get_more_features_and_stay_frozen():
    model = GPT()
    model.wpe.requires_grad_(False)
    before = output(model, TOKENS)
    assert not esper.widen(model, 2, example=TOKENS).left_out
    assert (model.wpe.shape[-1], model.wpe.requires_grad) == (16, False)
    assert torch.allclose(output(model, TOKENS), before, atol=1e-5)


def test_a_linear_of_a_class_of_its_own_becomes_wider_if_it_holds_a_weight_and_a_bias_alone():
    class Plain(nn.Linear):
        def forward(self, x):
            return x @ self.weight.T + self.bias

    class Tripled(Plain):
        def __init__(self, *widths):
            super().__init__(*widths)
            self.times = nn.Parameter(torch.tensor(3.0))

    class Equalised(Plain):
        def __init__(self, *widths):
            super().__init__(*widths)
            self.scale = self.in_features**-0.5

    class Drawn(Plain):
        def reset_parameters(self):
            nn.init.normal_(self.weight, std=self.out_features)
            nn.init.zeros_(self.bias)

    for kind in (Plain, Tripled, Equalised, Drawn):
        model, x = nn.Sequential(kind(3, 4), nn.ReLU(), kind(4, 2)), torch.randn(5, 3)
        before = output(model, x)
        if kind is Plain:
            assert dict(esper.widen(model, {"0": 8}, example=x)) == {"0": (4, 8)}
        else:
            with pytest.raises(InputError, match=f"'0' is an? {kind.__name__}, and only widths of Linear"):
                esper.widen(model, {"0": 8}, example=x)
        assert torch.allclose(output(model, x), before, atol=1e-6)


def test_small_weights_of_a_norm_to_which_one_is_added_stay_in_bfloat16():
    torch.manual_seed(0)
    model = Gemma()
    for block in model.h:
        nn.init.normal_(block.norm_1.weight, std=0.003)
    model = model.bfloat16()
    before = model.h[0].norm_1.weight.detach().clone()
    assert esper.widen(model, 2, example=TOKENS, ways=["copies"]).way == "copies"
    assert torch.equal(model.h[0].norm_1.weight[::2], before)


def test_a_table_that_is_not_saved_is_named():
    class Computed(Translation):
        def __init__(self):
            super().__init__()
            self.register_buffer("positions", self.positions, persistent=False)

    model = Computed()
    with pytest.warns(GrowthWarning, match="positions is wider too, but is not saved with the Computed, and a network"):
        assert not esper.widen(model, 2, example=TOKENS).left_out


def test_numbers_that_look_like_widths_or_roots_of_them_stay_where_they_are_none():
    class Odd(Gemma):
        def __init__(self):
            super().__init__()
            self.heads, self.wte.gain, self.scale = [2, 2], math.sqrt(8), 1.5

    torch.manual_seed(0)
    model = Odd().double()
    model.ln_f.normalized_shape = 8
    assert not esper.widen(model, 2, example=TOKENS).left_out
    assert (model.heads, model.wte.gain, model.scale, model.ln_f.normalized_shape) == ([2, 2], math.sqrt(8), 1.5, 16)


def test_a_token_that_took_no_part_beside_positions_is_as_wide_as_they_are():
    model, x = ViT(), torch.randn(3, 1, 8, 8)
    model.mask = nn.Parameter(torch.randn(1, 8))
    assert not esper.widen(model, 2, example=x).left_out
    assert (model.mask.shape, model.token.shape) == ((1, 16), (1, 1, 16))


def test_a_gamma_function_between_layers_is_no_attention():
    class Gamma(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.second(torch.lgamma(1.5 + self.first(x).sigmoid()))

    model, x = Gamma(), torch.randn(5, 3)
    assert dict(esper.widen(model, 2, example=x)) == {"first": (4, 8)}


def test_slopes_that_no_order_of_more_heads_has_are_refused():
    class Uneven(Slopes):
        def slopes(self):
            return 1.0 / (torch.arange(self.num_heads) + self.num_heads)

    model = Uneven()
    with pytest.raises(InputError, match="the outputs of the wider network are others"):
        esper.widen(model, 2, example=torch.randn(2, 6, 5))
    assert model.num_heads == 4


def test_a_wider_network_loads_into_one_that_is_built_with_the_widths():
    model, x, *_ = trained("GPT, tied")
    esper.widen(model, 2, example=x)
    again = GPT(width=16).double()
    for block in again.h:
        block.n_head = 4  # heads keep their size, and there are more
    for each in again.modules():
        if isinstance(each, nn.LayerNorm):
            each.eps /= 2
    again.load_state_dict(model.state_dict())
    assert model.lm_head.weight is model.wte.weight
    assert torch.allclose(again(x), model(x), atol=1e-12)
    assert (model.h[0].n_head, model.h[0].n_embd, model.h[0].c_attn.out_features) == (4, 16, 48)


def test_a_network_grows_twice_and_by_other_factors():
    model, x, *_ = trained("shared keys")
    before = output(model, x)
    for seed, factor in enumerate((3, 2)):
        esper.widen(model, factor, example=x, seed=seed)
    assert (model.enter.out_features, model.num_heads, model.num_kv_heads, model.head_dim) == (96, 24, 12, 4)
    assert torch.allclose(output(model, x), before, atol=1e-9)


def test_a_layer_behind_features_whose_number_is_written_down_is_wider_without_them():
    """Check a generator whose first map has a written number of channels, and whose later transposed convolutions have none."""
    model = nn.Sequential(
        nn.Linear(4, 24),
        nn.Unflatten(1, (6, 2, 2)),
        nn.ConvTranspose2d(6, 6, 2, 2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 1, 2, 2),
    ).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    expected = model(x)
    for factor in (1.5, 2):
        grown = esper.widen(model, factor, example=x)
        assert list(grown) == ["2"]
        torch.testing.assert_close(model(x), expected)
    assert model[2].weight.shape == (6, 18, 2, 2)
    assert model[5].weight.shape == (18, 1, 2, 2)


class Own(nn.Module):
    """Multiplies by a matrix of its own."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.matrix = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return self.leave(self.norm(self.enter(x)) @ self.matrix)


class Counted(Own):
    """Divides by the number of its features, which it counts."""

    def forward(self, x):
        h = self.norm(self.enter(x))
        return self.leave(h / h.shape[-1])


class Remembering(Counted):
    """Holds a recurrent layer, whose list of weights changes in place."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LSTM(8, 8)

    def forward(self, x):
        h = self.norm(self.enter(x))[0]
        return self.leave(h / h.shape[-1])


class Rounded(RMSNorm):
    """Computes its norm in a precision of its own, as those of transformers do."""

    def __init__(self, width, dtype):
        super().__init__(width)
        self.dtype = dtype

    def forward(self, x):
        return self.weight * F.rms_norm(x.to(self.dtype), x.shape[-1:], eps=self.eps).to(x.dtype)


class Inexact(nn.Module):
    """Multiplies by a number that depends a little on the number of its features."""

    def __init__(self, dtype, part):
        super().__init__()
        self.enter, self.norm, self.leave, self.part = nn.Linear(5, 8), Rounded(8, dtype), nn.Linear(8, 3), part

    def forward(self, x):
        h = self.enter(x)
        return self.leave(h + self.norm(h)) * (1 + self.part * h.shape[-1] / 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_in_float64_a_norm_in_fewer_digits_is_no_obstacle_and_a_small_difference_is(dtype):
    torch.manual_seed(0)
    x = torch.randn(4, 5, dtype=torch.float64)
    with pytest.raises(InputError, match="the outputs of the wider network are others"):
        esper.widen(Inexact(dtype, 1e-4).double(), 2, example=x)
    model = Inexact(dtype, 0.0).double()
    before = model(x)
    assert not esper.widen(model, 2, example=x).left_out
    assert torch.allclose(model(x), before, rtol=0, atol=10 * torch.finfo(dtype).eps)


class Skipping(Own):
    """Adds its input to its features."""

    def forward(self, x):
        return self.leave(self.norm(self.enter(x) + F.pad(x, (0, 3))))


class ByWidth(nn.Module):
    """Scales the logits of attention by the width of the model, and not by that of a head."""

    def __init__(self, dim=8, heads=2):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.enter, self.norm, self.qkv = nn.Embedding(10, dim), nn.LayerNorm(dim), nn.Linear(dim, 3 * dim)
        self.out, self.leave = nn.Linear(dim, dim), nn.Linear(dim, 10)

    def forward(self, tokens):
        x = self.enter(tokens)
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(self.dim)).softmax(-1)
        return self.leave(x + self.out((weights @ v).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("shape", [(3, 4), (3, 1), (1, 1)])
def test_what_attention_does_between_positions_is_seen_on_an_example_of_one(shape):
    torch.manual_seed(0)
    model, example = ByWidth(), torch.randint(1, 10, shape)
    with pytest.raises(InputError, match="the outputs of the wider network are others"):
        esper.widen(model, 2, example=example)


WEIGHT_NORMS = (parametrizations.spectral_norm, parametrizations.weight_norm, nn.utils.spectral_norm)


class FunctionallyTied(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.table = nn.Linear(5, 6), nn.Embedding(3, 6)

    def forward(self, x):
        return F.linear(self.enter(x) + self.table(torch.zeros(len(x), dtype=torch.long)), self.table.weight)


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.own = nn.Linear(5, 6), nn.ParameterList([torch.randn(6, 3)])

    def forward(self, x):
        return self.enter(x).relu() @ self.own[0]


class NormedSkip(nn.Module):
    """Normalises the weight of a layer whose widths are those of the network."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(5, 6), nn.Linear(6, 3)
        self.skip = parametrizations.spectral_norm(nn.Linear(5, 3))

    def forward(self, x):
        return self.leave(self.enter(x).relu()) + self.skip(x)


def test_a_computed_weight_whose_widths_stay_is_no_obstacle():
    torch.manual_seed(0)
    model = NormedSkip().eval()
    assert dict(esper.widen(model, 2, example=torch.randn(2, 5))) == {"enter": (6, 12)}


def normed(norm):
    return nn.Sequential(norm(nn.Linear(5, 6)), nn.ReLU(), nn.Linear(6, 3)).eval()


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Own, "the model is an Own, which multiplies by a weight of its own, and not by a Linear"),
        (Counted, "the outputs of the wider network are others"),
        (Remembering, "the outputs of the wider network are others"),
        (Skipping, "the wider network fails on the example"),
        (lambda: nn.Linear(5, 3), "the Linear holds no layers"),
        (
            FunctionallyTied,
            "the weight of 'table' is multiplied outside of it too; let a Linear that has the same weight",
        ),
        (Listed, "'own' is a ParameterList, whose widths cannot change"),
        *(
            (partial(normed, norm), "0.weight is computed from other parameters before each pass")
            for norm in WEIGHT_NORMS
        ),
    ],
)
def test_a_network_that_cannot_be_wider_stays_and_the_reason_is_said(build, reason):
    torch.manual_seed(0)
    model, x = build(), torch.randn(2, 5)
    shown, state, held, before = repr(model), copy.deepcopy(model.state_dict()), list(model.parameters()), model(x)
    with pytest.raises(InputError) as caught:
        esper.widen(model, 2, example=x)
    assert reason in str(caught.value)
    assert repr(model) == shown
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    assert torch.equal(model(x), before)
    assert WAYS[-1] == "copies"


class PlainResidual(nn.Module):
    """Adds a residual branch without norms, whose layer writes the features that it reads."""

    def __init__(self):
        super().__init__()
        self.enter, self.branch, self.leave = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.enter(x))
        return self.leave(x + torch.relu(self.branch(x)))


@pytest.mark.parametrize("to", [2, 1.5, {"branch": 12}, {"enter": 12}])
def test_a_plain_residual_branch_is_wider_by_any_factor(to):
    torch.manual_seed(0)
    model, x = PlainResidual().double(), torch.randn(4, 5, dtype=torch.float64)
    before = model(x)
    esper.widen(model, to, example=x)
    assert torch.allclose(model(x), before, rtol=0, atol=1e-9)
    assert model.branch.weight.shape in ((16, 16), (12, 12))
    model(x).square().sum().backward()
    assert model.leave.weight.grad.abs().min() > 0


def test_the_row_of_padding_stays_zero():
    model = Recurrent(nn.LSTM)
    esper.widen(model, 2, example=TOKENS)
    assert not model.embed.weight[0].any()
    assert model.embed.weight[1:, 1::2].any()


class Chunked(SharedKeys):
    """Attends to as many tokens as it has features or heads, by chance."""

    def __init__(self):
        super().__init__()
        self.chunk_size, self.lookahead, self.num_class_heads = 16, 4, 4


def test_numbers_that_count_no_features_stay():
    model = Chunked()
    before = model.chunk_size, model.lookahead, model.num_class_heads
    esper.widen(model, 2, example=torch.randn(2, 6, 5))
    assert (model.chunk_size, model.lookahead, model.num_class_heads) == before


class Masked(PlainResidual):
    """Holds a token for the place of masked features, and a head that is not used here."""

    def __init__(self):
        super().__init__()
        self.mask_token, self.other = nn.Parameter(torch.zeros(8)), nn.BatchNorm1d(8)


def test_what_takes_no_part_on_the_example_and_is_as_wide_is_named():
    widened = esper.widen(Masked(), 2, example=torch.randn(4, 5))
    assert {"mask_token", "other.weight", "other.bias"} <= set(widened.left_out)
    assert "took no part on the example and has 8 features" in widened.left_out["mask_token"]
    assert "mask_token stays: it took no part" in repr(widened)


@pytest.mark.parametrize("kind", ["group", "layer", "scaled"])
def test_an_example_of_zeros_does_not_hide_what_norms_do(kind):
    torch.manual_seed(0)
    if kind == "scaled":
        model, shape = Scaled(), (4, 8)
    else:
        norm = nn.GroupNorm(4, 8) if kind == "group" else nn.LayerNorm([8, 6, 6])
        model = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), norm, nn.ReLU(), nn.Conv2d(8, 4, 3))
        shape = (2, 1, 8, 8)
    x = torch.randn(shape)
    before = model(x)
    try:
        esper.widen(model, 2, example=torch.zeros(shape))
    except InputError:
        assert kind != "group", "its channels can be copied"
    assert torch.allclose(model(x), before, atol=1e-6)


@pytest.mark.parametrize("change", [lambda m, x: esper.widen(m, 2, example=x), lambda m, x: esper.deepen(m, example=x)])
def test_an_example_without_a_finite_output_is_refused(change):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)) for _ in range(2)))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match="no output on the example is finite"):
        change(model, torch.full((4, 8), torch.nan))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("ways", ["zeros", [], ["zero"]])
def test_ways_that_are_none_are_refused(ways):
    with pytest.raises(InputError, match=r"^ways is .*; give a list of one or more of zeros, means, copies"):
        esper.widen(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), 2, example=torch.ones(1, 2), ways=ways)


def test_an_optimizer_that_keeps_its_memory_in_a_list_is_refused():
    class Momentum(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, 0.1)
            self.kept = [torch.zeros_like(each) for each in self.param_groups[0]["params"]]

    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(InputError, match=r"^Momentum keeps parameters, or tensors of their shapes, in 'kept' beside"):
        esper.widen(model, 2, example=torch.ones(1, 8), optimizer=Momentum(model.parameters()))


def test_counts_of_hidden_features_follow_where_no_stream_is_wider():
    class Net(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            widths = [config.embedding_size, *config.hidden_sizes]
            pairs = itertools.pairwise(widths)
            self.layers = nn.ModuleList([nn.Linear(3, widths[0]), *(nn.Linear(*pair) for pair in pairs)])
            self.last = nn.Linear(widths[-1], 2)

        def forward(self, x):
            for layer in self.layers:
                x = torch.relu(layer(x))
            return self.last(x)

    torch.manual_seed(0)
    model = Net(SimpleNamespace(embedding_size=4, hidden_sizes=(8, 6), classes=2))
    assert not esper.widen(model, 3, example=torch.ones(2, 3)).left_out
    assert vars(model.config) == {"embedding_size": 12, "hidden_sizes": (24, 18), "classes": 2}
    Net(model.config).load_state_dict(model.state_dict())


def test_a_second_optimizer_that_would_go_on_with_old_parameters_is_named():
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    muon = torch.optim.Muon([each for each in model.parameters() if each.dim() == 2])
    with pytest.warns(
        GrowthWarning, match=r"^'0\.bias' is another parameter now, and is none of the Muon's; if a further"
    ):
        esper.widen(model, 2, example=torch.ones(1, 8), optimizer=muon)


class Stack(nn.Module):
    """Stacks two blocks with a residual stream."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(2))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def test_all_optimizers_of_a_list_follow_a_wider_and_a_deeper_network(recwarn):
    model = Stack()
    matrices = [each for each in model.parameters() if each.dim() == 2]
    rest = [each for each in model.parameters() if each.dim() < 2]
    both = [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]
    esper.widen(model, 2, example=torch.ones(1, 8), optimizer=both)
    assert esper.deepen(model, 1, example=torch.ones(1, 8), optimizer=tuple(both)) == {"blocks": (2, 3)}
    assert not recwarn.list
    for optimizer, matrix in zip(both, (True, False), strict=True):
        (group,) = optimizer.param_groups
        own = [each for each in model.parameters() if (each.dim() == 2) == matrix]
        assert sorted(map(id, group["params"])) == sorted(map(id, own))
    with pytest.warns(GrowthWarning, match=r"^'blocks.3.0.bias' is new, and is none of the Muon's; if a further"):
        esper.deepen(model, 1, example=torch.ones(1, 8), optimizer=[both[0], both[0]])
    (group,) = both[0].param_groups
    assert len(group["params"]) == len({id(each) for each in group["params"]}) == 2 + 2 * 4

    class Combined(torch.optim.Optimizer):
        """Updates by two optimizers of its own."""

        def __init__(self, parts):
            super().__init__([each for part in parts for group in part.param_groups for each in group["params"]], {})
            self.parts = parts

    for parts in (both, UserDict(enumerate(both))):
        combined = Combined(both)
        combined.parts = parts
        with pytest.raises(InputError, match=r"the Combined holds optimizers of its own, .*; give these as a list"):
            esper.widen(model, 2, example=torch.ones(1, 8), optimizer=combined)
    with pytest.raises(InputError, match="optimizer is an empty list"):
        esper.widen(model, 2, example=torch.ones(1, 8), optimizer=[])
    with pytest.raises(InputError, match="the optimizer is a StepLR"):
        esper.widen(model, 2, example=torch.ones(1, 8), optimizer=torch.optim.lr_scheduler.StepLR(both[0], 5))
    with pytest.raises(InputError, match="the optimizer is an int"):
        esper.widen(model, 2, example=torch.ones(1, 8), optimizer=[both[0], 3])


class Listed(nn.Module):
    """Counts its layers in two attributes, of which one has their widths."""

    def __init__(self):
        super().__init__()
        self.hidden_layers, self.num_hidden_layers = [8, 8], 8
        self.enter, self.inner, self.leave = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = torch.relu(self.inner(torch.relu(self.enter(x))))
        return {"logits": None, "hidden_states": self.leave(h).reshape(-1, 2) * h.shape[1] / self.hidden_layers[-1]}


def test_widths_of_layers_follow_and_numbers_of_layers_stay():
    model = Listed()
    esper.widen(model, 2, example=torch.randn(3, 4))
    assert (model.hidden_layers, model.num_hidden_layers, model.inner.in_features) == ([16, 16], 8, 16)
