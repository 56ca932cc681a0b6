"""Grow a model while `transformers.Trainer` trains it."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from esper.callbacks import GrowthCallback, LargerWeights, count_targets
from esper.leyline.distribution import of_extra
from esper.leyline.messages import InputError, kind_of
from esper.runs.live.anytime import AnytimeGrowth
from esper.runs.live.growth import Growth
from esper.runs.live.growth_state import check_whole
from esper.store.disk import write_atomic
from esper.tolaria.live.groups import without_seeds
from esper.tolaria.live.probe import Loss

with of_extra("hf", "esper.callbacks.HuggingFaceGrowth needs transformers, which is"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

FILE = "growth.pt"  # file of a checkpoint folder that holds the growth
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"

_OTHER = "{} is not the checkpoint that the trainer has resumed: its weights are others; give its folder, as {}(checkpoint=...)"
Inputs = Sequence[Mapping[str, Any]]


def loss_of_model(output: Any, labels: Any) -> Tensor:
    """Return the loss () that a model returns where its inputs have labels. InputError if it returns none."""
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if loss is None:
        raise InputError("the model returns no loss for the probe; put 'labels' into its batches, or give a loss")
    return loss


def check_arguments(args: TrainingArguments) -> None:
    """Raise InputError if a network cannot grow under a trainer with these arguments."""
    if args.n_gpu > 1:
        raise InputError(
            "the trainer uses DataParallel, under which a network cannot grow; start it with torchrun, or set one device"
        )
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise InputError(
                f"the trainer uses {name}, under which a network cannot grow; use one device or torchrun without it, or "
                "torch.distributed.fsdp.fully_shard with esper.Growth in a loop of your own"
            )


class HuggingFaceGrowth(GrowthCallback, TrainerCallback):
    """Grows the model of a `transformers.Trainer`: takes a step of `esper.Growth` after each step of the optimizer.

        growing = esper.callbacks.HuggingFaceGrowth(probe=batches, budget=0.1)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[growing])
        trainer.train()
        model = growing.growth.finish()

    The optimizer, the learning rate scheduler, the gradient scaler and the number of steps are those of the trainer. Each
    checkpoint gets a file growth.pt, and `trainer.train(resume_from_checkpoint=...)` resumes it.

    Args:
        probe: a list of batches that are not trained on, each a mapping of the model's arguments as a data collator gives it,
            with labels; or a function that returns one.
        loss: loss(output, labels) of a batch: one number, or one for each example. The default is the loss of the model.
        checkpoint: folder of the checkpoint that is resumed; None where it is checkpoint-<step> of the output folder.
        changed: names of arguments that may be others than in the checkpoint, as ['budget'] (`Growth.load_state_dict`).
        options: further arguments of `esper.Growth`: controller, budget, budget_passes, budget_seconds, freeze, every, steps,
            seed, settings.
    """

    growth: Growth | None

    def __init__(
        self,
        *,
        probe: Inputs | Callable[[], Inputs],
        loss: Loss = loss_of_model,
        checkpoint: Path | str | None = None,
        changed: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(Growth, options)
        self._probe, self._loss, self._checkpoint = probe, loss, checkpoint
        self._changed = [*changed, *(() if "steps" in options else ("steps",))]  # as long as the trainer trains now

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Begin, or go on from a checkpoint, whose host the trainer has restored."""
        check_arguments(args)
        self.check_first()
        model, optimizer = own["model"], own["optimizer"]
        saved = None
        if state.global_step:
            folder, own_state = _resumed_folder(self._checkpoint, args, state), model.state_dict()
            saved = _read(folder)
            check_whole(saved.get("growth", saved))  # that of HuggingFaceAnytimeGrowth, which is refused
            if not all(
                name not in own_state or torch.equal(own_state[name].cpu(), value.cpu())
                for name, value in saved["tensors"].items()
            ):
                raise InputError(_OTHER.format(folder, "HuggingFaceGrowth"))
        self.growth = Growth(
            model,
            optimizer,
            own["lr_scheduler"],
            probe=self._pairs,
            loss=self._loss,
            scaler=getattr(optimizer, "scaler", None),
            shared=args.world_size > 1,
            **{"steps": state.max_steps, **self._options},
        )
        if saved is not None:
            self.growth.load_state_dict(saved, changed=self._changed)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Take a step; the trainer has stepped its optimizer and its scheduler."""
        assert self.growth is not None, "the training has begun"
        self.growth.step()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Write the growth into the checkpoint, and leave there of the optimizer and its scheduler what a new one has too.

        The trainer loads them into an optimizer that it has just made of the host's parameters. The growth has all of it.
        """
        if not state.is_world_process_zero or self.growth is None:
            return
        folder = _folder(args, state.global_step)
        _write(folder / FILE, self.growth.state_dict())
        paths = folder / OPTIMIZER, folder / SCHEDULER
        if all(path.is_file() for path in paths):
            optimizer, scheduler = (torch.load(path, map_location="cpu", weights_only=True) for path in paths)
            for path, tree in zip(paths, without_seeds(optimizer, scheduler), strict=True):
                _write(path, tree)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Restore the seeds of the best checkpoint where the trainer has restored its host."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None and self.growth is not None:
            self.growth.load_state_dict(_read(Path(state.best_model_checkpoint)), changed=self._changed)

    def _pairs(self) -> list[tuple[dict[str, Any], Any]]:
        """Return the probe as pairs of inputs and labels."""
        batches = self._probe() if callable(self._probe) else self._probe
        for batch in batches:
            if not isinstance(batch, Mapping):
                raise InputError(f"a batch of probe is {kind_of(batch)}; give mappings of the model's arguments")
        return [(dict(batch), batch.get("labels")) for batch in batches]


class HuggingFaceAnytimeGrowth(GrowthCallback, TrainerCallback):
    """Widens the model of a `transformers.Trainer` as a whole: takes a step of `esper.AnytimeGrowth` after each of the optimizer.

        growing = esper.callbacks.HuggingFaceAnytimeGrowth(example=batch)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[growing])
        trainer.train()
        growing.growth.snapshot().save_pretrained(folder)

    The optimizer and its scheduler are those of the trainer. Each checkpoint gets a file growth.pt. To resume it, give a model of
    the first size and another callback, as in `trainer.train(resume_from_checkpoint=...)`.

    Args:
        example: a batch on which every layer runs, as a mapping of the model's arguments (`esper.AnytimeGrowth`).
        targets: targets(batch): the number of targets of a batch, which is the mapping that the model is called with. By default
            the elements of 'labels' that are not -100.
        checkpoint: folder of the checkpoint that is resumed; None where it is checkpoint-<step> of the output folder.
        options: further arguments of `esper.AnytimeGrowth`, as ratio, sizes, cost, probe, loss.
    """

    growth: AnytimeGrowth | None

    def __init__(
        self,
        *,
        example: Mapping[str, Any],
        targets: Callable[[Any], int] = count_targets,
        checkpoint: Path | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(AnytimeGrowth, options)
        self._example, self._targets, self._checkpoint = example, targets, checkpoint
        self._larger: LargerWeights | None = None
        self._counting: RemovableHandle | None = None
        self._seen = 0

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Let a checkpoint of a larger network be loaded."""
        self._larger = LargerWeights(own["model"])

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Begin, or go on from a checkpoint with its sizes, its weights and what its optimizer remembered."""
        check_arguments(args)
        for name, used in (
            ("several processes", args.world_size > 1),
            ("torch_compile", args.torch_compile),
            ("load_best_model_at_end", args.load_best_model_at_end),
        ):
            if used:
                raise InputError(
                    f"the trainer uses {name}, which does not follow a model that becomes wider; leave it out, or use "
                    "esper.AnytimeGrowth in a loop of your own"
                )
        self.check_first()
        model, optimizer = own["model"], own["optimizer"]
        weights = {} if self._larger is None else self._larger.weights
        if self._larger is not None:
            self._larger.remove()  # copies of the model have no hook
        example = tree_map_only(torch.Tensor, lambda value: value.to(args.device), dict(self._example))
        self.growth = AnytimeGrowth(model, optimizer, example=example, **self._options)
        if state.global_step:
            folder = _resumed_folder(self._checkpoint, args, state)
            saved = _read(folder)
            self.growth.load_state_dict(saved.get("growth", saved))  # that of HuggingFaceGrowth, which is refused
            if weights:
                model.load_state_dict(weights, strict=False)  # a tied weight is in the file once
            if _sum(model) != saved["sum"]:
                raise InputError(_OTHER.format(folder, "HuggingFaceAnytimeGrowth"))
            optimizer.load_state_dict(torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Count the targets of the batches that the model is called with until the optimizer steps."""

        def count(model: nn.Module, positional: Any, named: dict[str, Any]) -> None:
            if model.training:
                self._seen += self._targets(named)

        self._counting = self.network.register_forward_pre_hook(count, with_kwargs=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Take a step; the trainer has stepped its optimizer and its scheduler."""
        assert self.growth is not None, "the training has begun"
        assert self._counting is not None, "a step has begun"
        self._counting.remove()  # of passes that growth itself needs
        seen, self._seen = self._seen, 0
        self.growth.step(seen)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Write the growth into the checkpoint."""
        if self.growth is not None:
            tree = {"growth": self.growth.state_dict(), "sum": _sum(self.growth.model)}
            _write(_folder(args, state.global_step) / FILE, tree)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Leave the optimizer alone, and end the run folder, if there is one."""
        if self.growth is not None:
            self.growth.finish()


def _sum(model: nn.Module) -> float:
    """Return the sum of all weights, by which those of two checkpoints are told apart."""
    return sum(float(parameter.detach().cpu().double().sum()) for parameter in model.parameters())


def _resumed_folder(given: Path | str | None, args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder of the checkpoint that is resumed."""
    given = given or args.resume_from_checkpoint
    return Path(given) if isinstance(given, str | Path) else _folder(args, state.global_step)


def _folder(args: TrainingArguments, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"


def _write(path: Path, tree: Mapping[str, Any]) -> None:
    content = io.BytesIO()
    torch.save(tree, content)
    write_atomic(path, content.getvalue())


def _read(folder: Path) -> dict[str, Any]:
    """Return the growth of a checkpoint. InputError if it has none."""
    if not (folder / FILE).is_file():
        raise InputError(
            f"{folder} has no {FILE}, so its growth cannot be resumed; give the folder of a checkpoint that was written "
            "with this callback, as HuggingFaceGrowth(checkpoint=...)"
        )
    return torch.load(folder / FILE, map_location="cpu", weights_only=True)
