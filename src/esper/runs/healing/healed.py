"""Hold what a healing gives: the network, what was planted where and why, and the comparison with the usual remedies."""

import html
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esper.kasmina.network.export import program_of
from esper.leyline.config.input import show
from esper.leyline.intervals import mean_and_error, t_factor
from esper.leyline.messages import InputError, RunWarning, aligned, typed_line, warn
from esper.store.disk import Retry, remove, sync_folder, write_folder, write_once, write_synced
from esper.store.lock import is_lock, locked_folder

ADAPTER, MODULE, SUMMARY = "adapter", "network.pt2", "healing.json"
_STAGED = ".healing.new"  # within the folder of a healing: all of its files, until each has its name


def check_folder(folder: Path, overwrite: bool = False) -> None:
    """Raise InputError if a healing may not be written to a folder. What a killed process left of one may be replaced."""
    mend = "name another folder with --out"
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; {mend}")
    names = sorted(path.name for path in folder.iterdir() if not is_lock(path)) if folder.exists() else []
    if _STAGED in names:  # a process was killed before the healing was whole
        names = [name for name in names if name not in (_STAGED, ADAPTER, MODULE)]
    if names and SUMMARY not in names:
        raise InputError(f"{folder} holds other files and no healing; name a new or an empty folder with --out")
    if names and not overwrite:
        raise InputError(f"{folder} holds a healing; give --overwrite, or {mend}")
    if other := [name for name in names if name not in (ADAPTER, MODULE, SUMMARY)]:
        raise InputError(f"{folder} holds {show(other[0])}, which is no file of a healing; {mend}")


def half_width(values: NDArray[np.float64]) -> float:
    """Compute half the width of the 95 % t interval of the mean of (N,) values, N >= 2."""
    return t_factor(len(values)) * mean_and_error(values.tolist())[1]


class HealingSeed(NamedTuple):
    """Describes a seed that is planned, or was kept.

    Attributes:
        site (str): the submodule behind which it acts
        blueprint (str): its kind
        parameters (int): number of its parameters
        why (str): why it was planted there
        kept (str): why it was kept; empty before
    """

    site: str
    blueprint: str
    parameters: int
    why: str
    kept: str = ""


class ComparedNetwork(NamedTuple):
    """Holds a row of the table: one network on the examples that were held back.

    Attributes:
        network (str): 'nothing', 'grown', or the name of another remedy
        loss (float): mean loss
        gain (float): mean loss of 'nothing' less that of this network, paired by example
        half_width (float): half width of the 95 % interval of the gain
        accuracy (float or None): share of right labels; None where targets are no labels
        trained (int): number of trained parameters
        rate (float or None): learning rate that was chosen; None where nothing was trained
        seconds (float): time of its training
    """

    network: str
    loss: float
    gain: float
    half_width: float
    accuracy: float | None
    trained: int
    rate: float | None
    seconds: float


@dataclass(frozen=True, repr=False)
class Healed:
    """Holds the result of `esper.heal`. Prints as a table.

    Attributes:
        networks (nn.Module by name): the network of each row of the table, in evaluation mode
        ranked (names): the rows that train or add no more than the budget, that with the least loss on the probe first
        table (ComparedNetworks): every network on the examples that were held back
        planted (HealingSeeds): what was planted where and why
        explanations (sentences): why seeds were removed or not planted
        adapter (bytes by name): the files of the adapter, as `esper.attach` reads them; empty if no seed was kept
        losses ((N,) arrays by network): losses of the examples that were held back, or of 20 batches of them if a loss of one's
            own does not know examples
        host_params (int): parameters of the model
        example (tensor or tuple): two inputs, with which `save` exports the network
    """

    networks: Mapping[str, nn.Module]
    ranked: tuple[str, ...]
    table: tuple[ComparedNetwork, ...]
    planted: tuple[HealingSeed, ...]
    explanations: tuple[str, ...]
    adapter: Mapping[str, bytes]
    losses: Mapping[str, NDArray[np.float64]]
    host_params: int
    example: Any

    @property
    def best(self) -> str:
        """The first of `ranked`."""
        return self.ranked[0]

    @property
    def network(self) -> nn.Module:
        """The network of the best row. Its weights are those of the model, but for parameters that the row trains."""
        return self.networks[self.best]

    @property
    def verdict(self) -> str:
        """Says which remedy is best within the budget, and how its held-out loss compares with others.

        Those are nothing, the next best remedy on the probe, what grew, and the best network beyond the budget.
        """
        others = {"nothing": "that of nothing"}
        if len(self.ranked) > 1:
            following = "what grew" if self.ranked[1] == "grown" else self.ranked[1]
            others[self.ranked[1]] = f"that of {following}, the next on the probe"
        if self.planted:
            others.setdefault("grown", "that of what grew")
        elif others.get("grown"):
            del others["grown"]  # it is the network as it was
        others.pop(self.best, None)
        said = [self._compared(self.best, name, words) for name, words in others.items()]
        sentences = [f"best on the probe, within the budget: {self.best}."]
        if said:
            listed = f"{', '.join(said[:-1])}, and {said[-1]}" if len(said) > 1 else said[0]
            sentences.append(f"Its held-out loss is {listed}.")
        if not self.planted:
            sentences.append("No seed was kept, so growth left the network as it was.")
        if beyond := [row for row in self.table if row.network not in self.ranked and np.isfinite(row.loss)]:
            least = min(beyond, key=lambda row: row.loss).network
            sentences.append(f"Beyond the budget, that of {least} is {self._compared(least, self.best, 'it')}.")
        return " ".join(sentences)

    def _compared(self, name: str, other: str, words: str) -> str:
        """Say how the held-out loss of a network compares with that of another one, which `words` name."""
        difference = self.losses[other] - self.losses[name]
        mean, half = float(difference.mean()), half_width(difference)
        if not np.isfinite(mean):
            own = bool(np.isfinite(self.losses[name]).all())
            return f"not comparable with {words}, which is not finite" if own else f"not finite, unlike {words}"
        how = "lower" if mean > 0 else "higher"
        figures = f"by {abs(mean):.4g} ± {half:.2g}"
        return f"within chance of {words} ({how} {figures})" if abs(mean) <= half else f"{how} than {words} ({figures})"

    def row(self, name: str) -> ComparedNetwork:
        """Return the row of a network."""
        return next(row for row in self.table if row.network == name)

    def summary(self) -> dict[str, Any]:
        """Return the table, the seeds and the sentences, as plain values."""
        return {
            "status": "finished",
            "host_params": self.host_params,
            "verdict": self.verdict,
            "best": self.best,
            "table": [row._asdict() for row in self.table],
            "planted": [seed._asdict() for seed in self.planted],
            "explanations": list(self.explanations),
        }

    def save(self, folder: Path | str) -> str:
        """Write the adapter, the network as network.pt2 for any number of examples, and the summary; say what was written.

        What an earlier result wrote is replaced, and other files stay. A network that torch.export cannot express is left to
        the adapter, and the sentence says so. Raises InputError if the folder cannot be made, or another process writes to it.
        """
        folder = Path(folder)
        with locked_folder(folder, lambda text: warn(text, RunWarning), write_once):
            return self.write(folder, write_once)

    def write(self, folder: Path, retry: Retry) -> str:
        """Write what `save` writes to a folder that is locked, and say what was written.

        All files are written beside the old ones and then renamed, healing.json last: a disk that is full leaves an earlier
        result as it was, and a process that is killed leaves no healing.json beside other files than its own.
        """
        given = self.example
        named = dict(given) if isinstance(given, Mapping) else {}
        positional = () if named else tuple(given) if isinstance(given, tuple | list) else (given,)
        program, left = b"", ""
        try:
            program = program_of(self.network, positional, named, torch.export.Dim.AUTO)
        except Exception as error:  # torch.export raises errors of many kinds
            left = f"; {MODULE} was not written, as torch.export refuses the network: {typed_line(error)}"
        staged = folder / _STAGED

        def stage() -> None:
            remove(staged)
            try:
                staged.mkdir()
                if self.adapter:
                    write_folder(staged / ADAPTER, self.adapter)
                if program:
                    write_synced(staged / MODULE, program)
                write_synced(staged / SUMMARY, json.dumps(self.summary(), indent=1).encode())
            except BaseException:
                remove(staged)
                raise

        retry(folder, stage)
        remove(folder / SUMMARY)
        written = []
        for name in (ADAPTER, MODULE, SUMMARY):
            remove(folder / name)  # also of an earlier network that had it where this one has none
            if (staged / name).exists():
                os.rename(staged / name, folder / name)
                written.append(name)
        staged.rmdir()
        sync_folder(folder)
        return f"{folder}: {', '.join(written)}{left}"

    def __repr__(self) -> str:
        seeds = [
            f"planted {seed.blueprint} at {seed.site} ({seed.parameters:,} parameters): {seed.why}"
            for seed in self.planted
        ]
        return "\n".join([*aligned(self._rows()), *seeds, *self.explanations, self.verdict])

    def _repr_html_(self) -> str:
        head, *rows = [[html.escape(cell) for cell in row] for row in self._rows()]
        cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        seeds = "".join(
            f"<li>{html.escape(f'{seed.blueprint} at {seed.site}, {seed.parameters:,} parameters: {seed.why}')}</li>"
            for seed in self.planted
        )
        header = "".join(f"<th>{cell}</th>" for cell in head)
        return f"<table><tr>{header}</tr>{cells}</table><ul>{seeds}</ul><p>{html.escape(self.verdict)}</p>"

    def _rows(self) -> list[list[str]]:
        """Return the cells of the table, headings first, without the accuracy where no network has one."""
        rows = [["network", "held-out loss", "lower by [95 %]", "accuracy", "trained parameters", "rate", "seconds"]]
        for row in self.table:
            low, high = row.gain - row.half_width, row.gain + row.half_width
            gain = "" if row.network == "nothing" else f"{row.gain:+.4f} [{low:+.4f}, {high:+.4f}]"
            accuracy = "" if row.accuracy is None else f"{row.accuracy:.4f}"
            rate = "" if row.rate is None else f"{row.rate:g}"
            rows.append(
                [row.network, f"{row.loss:.4f}", gain, accuracy, f"{row.trained:,}", rate, f"{row.seconds:.1f}"]
            )
        if all(row.accuracy is None for row in self.table):
            for cells in rows:
                del cells[3]
        return rows
