"""Make all hosts of a body wider together, with their seeds, moments and snapshots; every row computes what it did. R rows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import Blueprint, drawn_with
from esper.kasmina.graft.find_sites import Hidden, find_hidden
from esper.kasmina.graft.grafted import undisturbed
from esper.kasmina.graft.recording import saved, undone_on_error
from esper.kasmina.graft.units import Outputs, additions, append, append_tried, width_of
from esper.kasmina.host import SegmentedHost, drawn_host
from esper.kasmina.stack.body import Body
from esper.kasmina.stack.layout import HERE, Layout
from esper.kasmina.stack.plan import Indices
from esper.kasmina.stack.rows import Stack, picked_columns
from esper.leyline.data.batches import Batch
from esper.leyline.lifecycle.view import Seeds
from esper.leyline.messages import InputError

Hosts = Callable[[], nn.Module]


class HiddenWidening(NamedTuple):
    """Describes one widening of the hosts of a task: every hidden width that can be larger is multiplied."""

    factor: int
    hidden: tuple[Hidden, ...]  # the hidden features that become more, in the order in which they do
    slots: tuple[bool, ...]  # (S,) whether the stream of each slot is of them
    widths: dict[str, tuple[int, int]]  # by the first layer of each: how many before and after
    left_out: dict[str, str]  # by the first layer of the others: why they stay

    def parameters(self, host: nn.Module, factor: int) -> int:
        """Return the parameters that a host has with so many times as many of these features."""
        found = 0
        for path, layer in host.named_modules():
            written, read = (sum(path in each[side] for each in self.hidden) for side in range(2))
            for parameter in layer.parameters(recurse=False):
                found += parameter.numel() * factor ** (written + read * (parameter.dim() > 1))
        return found

    @torch.no_grad()
    def apply(self, host: SegmentedHost, key: int) -> None:
        """Make a host wider, in place, with weights drawn by a key; it computes what it did."""
        for number, hidden in enumerate(self.hidden):
            name = min(hidden.writers)
            width = self.factor * width_of(name, host.get_submodule(name))
            append(host, additions(host, hidden, width, (key + number) % 2**63))
        host.slots = tuple(
            replace(slot, width=self.factor * slot.width) if wider else slot
            for slot, wider in zip(host.slots, self.slots, strict=True)
        )


def wider_hosts(hosts: Hosts, widenings: Sequence[HiddenWidening]) -> Hosts:
    """Return a factory of hosts that were made wider, in order."""

    def wider() -> SegmentedHost:
        host = hosts()
        assert isinstance(host, SegmentedHost)
        for widening in widenings:
            widening.apply(host, 0)
        return host

    return wider


def plan_widenings(
    hosts: Hosts, menu: Sequence[Blueprint], example: Batch, dtype: torch.dtype, factor: int, times: int, most: float
) -> tuple[HiddenWidening, ...]:
    """Return the widenings of hosts, one after the other. Each change is tried on an example (B, ...).

    A slot's stream can be wider where all blueprints of the menu follow: a seed in the leading corner of a wider one, which is 0
    elsewhere, computes what it did. most: largest size of a host [bytes].

    Raises InputError if nothing can be wider.
    """
    host, tried = (drawn_host(hosts).to(dtype) for _ in range(2))
    layout = Layout(host, menu, example, dtype)
    size = _widen(tried, layout, example, 2).parameters(host, factor**times) * dtype.itemsize
    if size > most:  # said before anything large is made
        gibibytes = Decimal(size) / 2**30  # as a float it can be too large
        raise InputError(
            f"widen.factor is {factor:,}, with which a host grows to {gibibytes:,.3g} GiB, but with what is kept of each "
            f"network there is memory for {most / 2**30:,.3g} GiB; lower it, or give fewer steps in widen.at"
        )
    return tuple(_widen(host, layout, example, factor) for _ in range(times))


def _widen(host: SegmentedHost, layout: Layout, example: Batch, factor: int) -> HiddenWidening:
    """Make a host wider, in place. InputError if nothing in it can be."""
    groups, idle = find_hidden(host, example)
    if idle:
        raise InputError(f"widen.at is set, but {idle[0]!r} of the host does not run; leave widen out")
    wider, slots = list[Hidden](), np.zeros(len(layout.slots), bool)
    widths, left_out = dict[str, tuple[int, int]](), dict[str, str]()
    with undisturbed(host), torch.no_grad():
        expected = Outputs(host, example)
        for hidden in groups:
            name, before = min(hidden.writers), layout.widths(host.eval(), example).taps
            try:
                width = factor * (old := width_of(name, host.get_submodule(name)))
                with undone_on_error(saved(host.modules())):
                    append_tried([host], additions(host, hidden, width, len(wider)), expected)
                    after = layout.widths(host.eval(), example).taps
                    _check_fit(layout, before, after)
            except InputError as error:
                left_out[name] = str(error)
            else:
                wider.append(hidden)
                widths[name] = old, width
                slots |= after[:, HERE] != before[:, HERE]
    if not wider:
        reasons = (f"{name!r}: {reason}" for name, reason in left_out.items())
        why = next(reasons, "no features are returned by one layer and read by the next ones alone")
        raise InputError(f"widen.at is set, but nothing in the host can be wider: {why}; leave widen out")
    return HiddenWidening(factor, tuple(wider), tuple(slots.tolist()), widths, left_out)


def _check_fit(layout: Layout, before: Indices, after: Indices) -> None:
    """Raise InputError if a seed would compute something else on wider streams. before, after (S, 4): as `Widths.taps`."""
    for slot in np.flatnonzero((before != after).any(1)).tolist():
        for blueprint in np.flatnonzero(layout.fits[slot]).tolist():
            entry, stream = layout.menu[blueprint], layout.streams[slot]
            read = layout.tap_of[blueprint]
            small, large = (
                layout.build(slot, blueprint, 0, int(of[slot, read]), int(of[slot, HERE])) for of in (before, after)
            )
            with drawn_with(1):
                for parameter in small.parameters():  # away from its initial weights, at which every change is 0
                    parameter.normal_()
                shape = (3, *(4,) * (stream.axes - 1), int(after[slot, read]))
                u = torch.randn(shape, dtype=layout.dtype).movedim(-1, stream.features)
            stack = Stack(large, 1, mapping="loop", dtype=layout.dtype)
            stack.write(0, small)
            wide = stack(u[None], slice(0, 1), part="delta", frozen=True)[0]
            narrow = small.delta(u.narrow(stream.features, 0, int(before[slot, read])))
            if not torch.allclose(wide.narrow(stream.features, 0, narrow.shape[stream.features]), narrow, atol=1e-4):
                name = layout.slots[slot].name
                raise InputError(
                    f"a seed {entry.name} at slot {name!r} would compute something else on more features; leave it out of "
                    "blueprints"
                )


class BodyWidening(NamedTuple):
    """Moves the rows of a body into one whose hosts are wider."""

    old: Body
    new: Body  # with its hosts planted
    widening: HiddenWidening
    host: Callable[[int], SegmentedHost]  # from a row to a host as the old body holds it
    key: Callable[[int], int]  # from a row to the key of its new weights

    @torch.no_grad()
    def of_hosts(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the columns (R, ...) of all hosts, of the body or of a snapshot. What an optimizer knows of new weights is 0."""
        made = _padded(columns, self.old.host, self.new.host)
        for row in range(len(made["value"])):
            host = self.old.host.read(row, self.host(row).to(self.old.dtype), columns)
            assert isinstance(host, SegmentedHost)
            self.widening.apply(host, self.key(row))
            self.new.host.fill(row, host, made)
        return made

    @torch.no_grad()
    def of_seeds(
        self, slot: int, form: int, blueprints: Indices, columns: dict[str, Tensor]
    ) -> list[tuple[int, Indices, dict[str, Tensor]]]:
        """Return seeds (n,) of a form as the new body holds them: its form, the indices of the seeds in it, and their columns."""
        made = []
        forms = self.new.layout.form_of[slot, blueprints]
        for to in np.unique(forms).tolist():
            (of,) = np.nonzero(forms == to)
            chosen = picked_columns(columns, of)
            made.append((to, of, _padded(chosen, self.old.stacks[slot, form], self.new.room(slot, to))))
        return made

    @torch.no_grad()
    def move(self, seeds: Seeds) -> None:
        """Move the hosts and the seeds (R, S)."""
        old, new = self.old, self.new
        new.host.put(np.arange(old.host.capacity), self.of_hosts(old.host.columns), old.host.steps)
        for (slot, form), envs in old.envs.items():
            held = {name: column[: len(envs)] for name, column in old.stacks[slot, form].columns.items()}
            for to, of, columns in self.of_seeds(slot, form, seeds.blueprint[envs, slot].astype(np.int64), held):
                stack, known = new.stacks[slot, to], new.envs[slot, to]
                stack.reserve(len(known) + len(of))
                stack.put(len(known) + np.arange(len(of)), columns, old.stacks[slot, form].steps[of])
                new.envs[slot, to] = np.append(known, envs[of])
        new.arrange(seeds)


def _padded(columns: dict[str, Tensor], old: Stack, new: Stack) -> dict[str, Tensor]:
    """Return the columns (n, ...) of rows of a stack for a larger one: each tensor in the leading corner, 0 elsewhere."""
    sources, made = {place.name: place for place in old.places}, dict[str, Tensor]()
    for name, column in columns.items():
        if name == "gradient":  # 0 between steps
            continue
        if name in new.buffers:
            made[name] = column.new_zeros(len(column), *new.buffers[name].shape)
            pairs = [(made[name], column)]
        elif column.dim() == 2:
            made[name] = column.new_zeros(len(column), new.size)
            pairs = [(place.of(made[name]), sources[place.name].of(column)) for place in new.places]
        else:
            made[name], pairs = column, []
        for target, source in pairs:
            corner = (slice(None), *map(slice, map(min, target.shape[1:], source.shape[1:])))
            target[corner] = source[corner]
    return made
