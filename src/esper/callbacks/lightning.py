"""Grow a LightningModule while `lightning.Trainer` trains it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from esper.callbacks import GrowthCallback, LargerWeights, count_targets
from esper.kasmina.graft.grown import CHILD
from esper.leyline.distribution import of_extra
from esper.leyline.messages import InputError
from esper.runs.live.anytime import AnytimeGrowth
from esper.runs.live.growth import Growth
from esper.tolaria.live.probe import Batches, Loss

with of_extra("lightning", "esper.callbacks.LightningGrowth needs lightning, which is"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")
"""Callbacks of Lightning, by name: not every version has the first."""


def check_trainer(trainer: Trainer, pl_module: LightningModule) -> None:
    """Raise InputError if a network cannot grow under a trainer."""
    if not pl_module.automatic_optimization:
        raise InputError(
            "the LightningModule optimizes by hand; make an esper.Growth or esper.AnytimeGrowth in it, and call its step after "
            "optimizer.step()"
        )
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        raise InputError(
            f"the trainer's strategy is {type(trainer.strategy).__name__}, under which a network cannot grow; use one "
            "device or strategy='ddp', or torch.distributed.fsdp.fully_shard with esper.Growth in a loop of your own"
        )
    if len(trainer.optimizers) != 1:
        raise InputError(f"the trainer has {len(trainer.optimizers)} optimizers; return one from configure_optimizers")
    for each in trainer.callbacks:
        # their copy of the module was made before its seeds, and pairs parameters with those of the module in order
        if any(kind.__name__ in AVERAGING for kind in type(each).__mro__):
            raise InputError(
                f"{type(each).__name__} averages a copy of the module, which does not grow; leave it out, or average "
                "in a loop of your own with esper.Growth(ema=...)"
            )


def _converted(trainer: Trainer, probe: Batches) -> Batches:
    """Return the probe in the precision of a trainer."""
    convert = trainer.precision_plugin.convert_input
    return (lambda: [convert(pair) for pair in probe()]) if callable(probe) else [convert(pair) for pair in probe]


class LightningGrowth(GrowthCallback, Callback):
    """Grows a LightningModule: takes a step of `esper.Growth` after each step of the optimizer.

        growing = esper.callbacks.LightningGrowth(probe=probe, loss=loss, budget=0.1)
        trainer = lightning.Trainer(callbacks=[growing])
        trainer.fit(module, loader)
        module = growing.growth.finish()

    The optimizer, the learning rate schedulers, the gradient scaler, the precision and the number of steps are those of the
    trainer. A checkpoint of the trainer holds the growth too, and `trainer.fit(module, loader, ckpt_path=...)` resumes it.

    Args:
        probe: a list of (input, target) pairs that are not trained on, or a function that returns one (`esper.Growth`).
        loss: loss(output, target) of a batch, where output is what the network returns for an input.
        network: dotted name of the submodule that grows; '' is the LightningModule itself, through its `forward`.
        changed: names of arguments that may be others than in a checkpoint, as ['budget'] (`Growth.load_state_dict`).
        options: further arguments of `esper.Growth`: controller, budget, budget_passes, budget_seconds, freeze, every, steps,
            seed, settings.
    """

    growth: Growth | None

    def __init__(
        self, *, probe: Batches, loss: Loss, network: str = "", changed: Sequence[str] = (), **options: Any
    ) -> None:
        super().__init__(Growth, options)
        self._probe, self._loss, self._name = probe, loss, network
        self._changed = [*changed, *(() if "steps" in options else ("steps",))]  # as long as the trainer trains now
        self._saved: dict[str, Any] | None = None
        self._steps = 0  # of the optimizer, that growth has been told of
        self._hook: RemovableHandle | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let a checkpoint be loaded whose seeds are not there yet."""
        self.teardown(trainer, pl_module, stage)  # an earlier stage that failed was not torn down
        self._hook = pl_module.register_load_state_dict_pre_hook(self._without_seeds)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing on the module."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the seeds of a checkpoint: the trainer restores the optimizer next, which needs their groups."""
        check_trainer(trainer, pl_module)
        self.check_first()
        if self._saved is not None:
            self._begin(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin where there was nothing to restore: a checkpoint without seeds fits the optimizer as it was made."""
        if self.growth is None:
            self._begin(trainer, pl_module)
        self._saved, self._steps = None, trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take a step where the optimizer has taken one: not while gradients accumulate."""
        if trainer.global_step != self._steps and self.growth is not None:
            self._steps = trainer.global_step
            with trainer.precision_plugin.train_step_context():
                self.growth.step()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the growth."""
        return {} if self.growth is None or self.growth.finished else self.growth.state_dict()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let the growth's entry hold the tensors that the checkpoint has in any case, so that the file has each once."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if not state:
            return
        first = f"{self._name}." if self._name else ""
        for name in state["tensors"]:
            if first + name in checkpoint["state_dict"]:
                state["tensors"][name] = checkpoint["state_dict"][first + name]
        (optimizer,) = checkpoint["optimizer_states"]
        for group, named in zip(optimizer["param_groups"], state["groups"]["groups"], strict=True):
            for index, name in zip(group["params"], named["names"], strict=True):
                if index in optimizer["state"]:
                    state["groups"]["moments"][name] = optimizer["state"][index]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what a checkpoint held until the optimizer is there, which it is where the training is over."""
        if self.growth is None:
            self._saved = state_dict or None
        elif state_dict:
            self.growth.load_state_dict(state_dict, changed=self._changed)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise InputError if a checkpoint's seeds are not there; so at the start of a test and of a prediction."""
        if self._saved is not None and self.growth is None:
            raise InputError(
                "the checkpoint holds seeds, which are restored together with an optimizer; resume it with "
                "trainer.fit(module, loader, ckpt_path=...), and save what growth.finish() returns for evaluation"
            )

    on_test_start = on_predict_start = on_validation_start

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the growth, from the state of a checkpoint where there is one."""
        network = pl_module.get_submodule(self._name)
        usual: dict[str, Any] = {}
        if trainer.estimated_stepping_batches != float("inf"):
            usual["steps"] = int(trainer.estimated_stepping_batches)
        with trainer.precision_plugin.train_step_context():
            self.growth = Growth(
                network,
                trainer.optimizers[0],
                [each.scheduler for each in trainer.lr_scheduler_configs],
                probe=_converted(trainer, self._probe),
                loss=self._loss,
                scaler=getattr(trainer.precision_plugin, "scaler", None),
                shared=isinstance(trainer.strategy, DDPStrategy),
                **{**usual, **self._options},
            )
        if self._saved is not None:
            self.growth.load_state_dict(self._saved, changed=self._changed)

    def _without_seeds(self, module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *rest: Any) -> None:
        """Let the seeds of a checkpoint pass for those that the module has: `load_state_dict` of the growth comes after."""
        if self.growth is not None and self.growth.finished:
            raise InputError(
                "the network is finished, and a checkpoint from before does not fit it; load checkpoints before growth.finish()"
            )
        for name in [name for name in state if CHILD in name.split(".")[:-1]]:
            del state[name]
        own: Mapping[str, torch.Tensor] = module.state_dict()
        state.update({prefix + name: value for name, value in own.items() if CHILD in name.split(".")[:-1]})


class LightningAnytimeGrowth(GrowthCallback, Callback):
    """Widens a LightningModule as a whole: takes a step of `esper.AnytimeGrowth` after each step of the optimizer.

        growing = esper.callbacks.LightningAnytimeGrowth(example=x)
        trainer = lightning.Trainer(callbacks=[growing])
        trainer.fit(module, loader)
        network = growing.growth.snapshot()

    The optimizer and its schedulers are those of the trainer. Under strategy='ddp' the module is wrapped anew behind each growth.
    A checkpoint of the trainer holds the growth too. To resume it, give a module of the first size and another callback, as in
    `trainer.fit(module, loader, ckpt_path=...)`.

    Args:
        example: an input of the network on which every layer runs (`esper.AnytimeGrowth`).
        network: dotted name of the submodule that grows; '' is the LightningModule itself, through its `forward`.
        targets: targets(batch): the number of targets of a batch. By default the elements of the second part of a pair, or those
            of 'labels' that are not -100.
        options: further arguments of `esper.AnytimeGrowth`, as ratio, sizes, cost, probe, loss.
    """

    growth: AnytimeGrowth | None

    def __init__(
        self, *, example: Any, network: str = "", targets: Callable[[Any], int] = count_targets, **options: Any
    ) -> None:
        super().__init__(AnytimeGrowth, options)
        self._example, self._name, self._targets = example, network, targets
        self._saved: dict[str, Any] | None = None
        self._steps = self._seen = 0
        self._larger: LargerWeights | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let a checkpoint of a larger network be loaded."""
        self.teardown(trainer, pl_module, stage)
        self._larger = LargerWeights(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing on the module."""
        if self._larger is not None:
            self._larger.remove()
            self._larger = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the network the sizes and weights of a checkpoint: the trainer restores the optimizer next, which needs them."""
        check_trainer(trainer, pl_module)
        self.check_first()
        assert self._larger is not None, "setup came before"
        weights = self._larger.weights
        self.teardown(trainer, pl_module, "fit")  # copies of the network have no hook
        example = trainer.precision_plugin.convert_input(self._example)
        options = dict(self._options)
        if options.get("probe") is not None:
            options["probe"] = _converted(trainer, options["probe"])
        self.growth = AnytimeGrowth(
            pl_module.get_submodule(self._name),
            trainer.optimizers[0],
            example=tree_map_only(torch.Tensor, lambda value: value.to(pl_module.device), example),
            shared=isinstance(trainer.strategy, DDPStrategy),
            **options,
        )
        if self._saved is not None:
            self.growth.load_state_dict(self._saved)
            self._saved = None
        if weights:
            pl_module.load_state_dict(weights)
            _wrap_anew(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count steps from where the trainer is."""
        self._steps, self._seen = trainer.global_step, 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take a step where the optimizer has taken one: not while gradients accumulate."""
        self._seen += self._targets(batch)
        if trainer.global_step != self._steps and self.growth is not None:
            seen, self._seen, self._steps = self._seen, 0, trainer.global_step
            if self.growth.step(seen):
                _wrap_anew(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the optimizer alone, and end the run folder, if there is one."""
        if self.growth is not None:
            self.growth.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the growth."""
        return {} if self.growth is None else self.growth.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what a checkpoint held until the optimizer is there."""
        if self.growth is None:
            self._saved = state_dict or None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise InputError if a checkpoint is of another size; so at the start of a test and of a prediction."""
        if self._larger is not None and self._larger.weights:
            raise InputError(
                "the checkpoint is of a network of another size; resume it with trainer.fit(module, loader, ckpt_path=...) of a "
                "module of the first size, and save what growth.snapshot() returns for evaluation"
            )

    on_test_start = on_predict_start = on_validation_start


def _wrap_anew(trainer: Trainer, pl_module: LightningModule) -> None:
    """Let DistributedDataParallel know the new parameters, where the trainer uses it."""
    if isinstance(trainer.strategy, DDPStrategy):
        trainer.strategy.model = pl_module
        trainer.strategy.configure_ddp()
