"""Repair a network of yours by seeds, or find where LoRA goes in it: `esper heal` and `esper find-sites`."""

import json
import logging
import warnings
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from esper.commands.options import say, use_one_thread
from esper.leyline.messages import InputError, in_words, kind_of

PLACE = "path.py:function or module:function"
AGAIN = "give the same command again"


Data = Annotated[
    str, Option(metavar="DATA", help=f"A .npz, .pt or .safetensors file with x and y, or {PLACE} that returns (x, y).")
]


def heal(
    model: Annotated[
        str, Argument(metavar="MODEL", help=f"A .pt2 file of torch.export, or {PLACE} that returns the module.")
    ],
    data: Data,
    intact: Annotated[
        str | None,
        Option(
            metavar="MODEL",
            help="The network before the damage, given like MODEL: layers are refitted to it, and taught what its layers return.",
        ),
    ] = None,
    budget: Annotated[
        float, Option(help="Most parameters that a remedy adds or trains / parameters of the model.")
    ] = 0.06,
    steps: Annotated[int, Option(help="Steps of the optimizer for each network that is trained.")] = 480,
    batch_size: Annotated[int, Option(help="Examples in a step.")] = 64,
    seed: Annotated[int, Option(help="Seed of the split, the batches and the seeds.")] = 0,
    out: Annotated[
        Path | None,
        Option(metavar="DIR", help="Folder to write: the adapter, the best network.pt2, healing.json."),
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the healing that DIR holds.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the summary as JSON, and nothing else.")] = False,
) -> None:
    """Repair a pruned, quantised or truncated network by seeds and other remedies, and say which is best."""
    use_one_thread()
    from esper.leyline.reference import is_reference, load_reference
    from esper.runs.folder.interrupt import ended_by_signals
    from esper.runs.healing.heal import heal as heal_network
    from esper.runs.healing.healed import check_folder
    from esper.store import disk
    from esper.store.lock import locked_folder

    note = partial(say, err=True)
    if out is not None:
        check_folder(out, overwrite)
    try:
        examples: Any = load_reference(data, "healing data", "(x, y)") if is_reference(data) else data
        whole = None if intact is None else _module(intact)
        network = _module(model)
        with ExitStack() as held, warnings.catch_warnings():
            held.enter_context(ended_by_signals())  # so that the folder is unlocked
            if out is not None:  # before the trainings, whose result would be lost
                retry = disk.DiskRetry(disk.PATIENCE, note, out, lambda: False, further=AGAIN)
                held.enter_context(locked_folder(out, note, retry))
                check_folder(out, overwrite)  # again: a process that held the lock may have written a healing since
            # torch warns of its own copies of graphs
            warnings.filterwarnings("ignore", "`isinstance\\(treespec", FutureWarning)
            own = partial(heal_network, steps=steps, batch_size=batch_size, seed=seed, watch=note)
            healed = own(network, examples, whole, budget)
            # printed before it is saved, which a full disk may prevent
            if as_json:
                typer.echo(json.dumps(healed.summary(), indent=2))
            else:
                for line in repr(healed).splitlines():
                    say(line)
            if out is not None:
                written = healed.write(out, retry)
                if not as_json:
                    say(written)
    except KeyboardInterrupt:
        say("interrupted; nothing was written, and the same command begins anew", err=True)
        raise typer.Exit(130) from None


class TableFormat(StrEnum):
    """Names the forms in which `esper find-sites` prints sites."""

    ESPER = "esper"
    PEFT = "peft"


def find_sites(
    model: Annotated[str, Argument(metavar="MODEL", help=f"{PLACE} that returns the module, or a .pt2 file.")],
    data: Data,
    form: Annotated[
        TableFormat, Option("--as", help="esper: sites of seeds. peft: arguments of a LoraConfig, as JSON.")
    ] = TableFormat.ESPER,
    budget: Annotated[float, Option(help="Most parameters of LoRA / parameters of the model, for --as peft.")] = 0.01,
    layers: Annotated[
        list[str] | None, Option(metavar="NAME", help="Linear layers for LoRA, as 'blocks.*'; repeat for more; all.")
    ] = None,
) -> None:
    """List where seeds can be planted in a network, or choose layers and ranks for LoRA by the gradient of the data.

    Such ranks are not better than one rank for all layers on all data: `esper docs lora-ranks` has the figures.
    """
    use_one_thread()
    from esper.kasmina.graft.find_sites import find_sites as find
    from esper.leyline.reference import is_reference, load_reference
    from esper.runs.healing.training import examples_of
    from esper.runs.lora import lora_ranks

    network = _module(model)
    examples = examples_of(load_reference(data, "data", "(x, y)") if is_reference(data) else data).like(network)
    if form is TableFormat.ESPER:
        for line in repr(find(network, examples.at(slice(2)).x)).splitlines():
            say(line)
    else:
        typer.echo(json.dumps(lora_ranks(network, examples, budget=budget, layers=layers or ["*"]), indent=2))


def _module(place: str) -> Any:
    """Return the module of a .pt2 file, with submodules, or the one that a function returns."""
    import torch

    from esper.leyline.reference import is_reference, load_reference

    if is_reference(place):
        made = load_reference(place, "model", "an nn.Module")
        if not isinstance(made, torch.nn.Module):
            raise InputError(f"{place} returned {kind_of(made)}; return an nn.Module")
        return made
    path = Path(place)
    if path.suffix != ".pt2" or path.is_dir():
        what = "a folder" if path.is_dir() else "no model"
        raise InputError(f"{place!r} is {what}; give a .pt2 file of torch.export, or {PLACE} that returns the module")
    if not path.is_file():
        raise InputError(f"there is no file {path}; give a .pt2 file that torch.export.save wrote")
    log = logging.getLogger("torch.export")
    wrong = in_words(f"{path} cannot be read as torch.export's", "write the model with torch.export.save")
    with wrong, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about its own code
        log.disabled = True  # torch logs a traceback of a damaged file, which is one sentence here
        try:
            return torch.export.unflatten(torch.export.load(path))
        finally:
            log.disabled = False
