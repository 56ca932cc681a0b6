"""Test a LightningModule that grows under Lightning's Trainer, and goes on from its checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from esper.karn.reader import open_run
from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import graft
from esper.leyline.lifecycle.slots import Site, Vector
from esper.leyline.messages import InputError
from esper.runs.live.anytime import AnytimeGrowth
from esper.runs.live.growth import Growth
from loops import LIFE, SETTINGS, STAGES, equal, repeatable, stages
from populations import Script

lightning = pytest.importorskip("lightning", reason="lightning is not installed: pip install -e '.[lightning]'")
from esper.callbacks import LightningAnytimeGrowth, LightningGrowth  # noqa: E402  # needs lightning

pytestmark = [pytest.mark.third_party, pytest.mark.filterwarnings("ignore")]

EVERY, BATCHES, EPOCHS = 2, 2, 15  # one decision an epoch
# |c|^2 / |h|^2 of a batch is not a mean over its parts
PLAIN = SETTINGS | {"lifecycle": {"embargo": 2, "proximal": 0.0}}


def examples(key, count):
    with drawn_with(key):
        x = torch.randn(count, 4)
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long()


class Network(nn.Sequential):
    """Normalises batches, so that buffers are part of what is resumed."""

    def __init__(self):
        with drawn_with(0):
            super().__init__(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


class Classifier(lightning.pytorch.LightningModule):
    def __init__(self, schedule="onecycle"):
        super().__init__()
        self.net, self.schedule = Network(), schedule
        self.losses = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        total = EPOCHS * BATCHES
        made = {
            "onecycle": lambda: lr_scheduler.OneCycleLR(optimizer, 0.05, total),
            "sequential": lambda: lr_scheduler.SequentialLR(
                optimizer,
                [lr_scheduler.LinearLR(optimizer, 0.1, 1, 4), lr_scheduler.CosineAnnealingLR(optimizer, total)],
                [4],
            ),
        }[self.schedule]()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "interval": "step"}}


def training(
    folder, *, network="", schedule="onecycle", accumulate=1, plain=False, callbacks=(), arguments=None, **options
):
    """Make a trainer, a module and a callback, as a program would make them anew."""
    module = Classifier(schedule)
    if plain:
        module.net[3] = nn.Identity()
    sites = {name: Site(name, name, name, Vector(6)) for name in ("0", "2")}
    first = "" if network else "net."
    graft(
        module.get_submodule(network),
        {name: Site(name, first + name, first + name, each.stream) for name, each in sites.items()},
    )
    probe = [examples(1, 12), examples(2, 12)]
    usual = {"controller": Script(LIFE), "every": EVERY, "budget": 9.0, "settings": SETTINGS}
    growing = LightningGrowth(probe=probe, loss=F.cross_entropy, network=network, **{**usual, **options})
    return trainer_of(folder, module, [growing, *callbacks], accumulate, arguments)


def trainer_of(folder, module, callbacks, accumulate=1, arguments=None):
    """Make a trainer with the first of some callbacks, a module, and a loader."""
    trainer = lightning.pytorch.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=accumulate,
        callbacks=callbacks,
        **{"gradient_clip_val": 0.5, **(arguments or {})},
    )
    x, y = examples(3, 12 * BATCHES * accumulate)
    return trainer, module, callbacks[0], DataLoader(TensorDataset(x, y), 12)


def widening(folder, *, accumulate=1, plain=False, callbacks=(), arguments=None, **options):
    """Make what `training` makes, for a network that becomes wider twice in 30 steps of 12 targets, 24 with accumulation."""
    module = Classifier("sequential")
    if plain:
        module.net[3] = nn.Identity()
    usual = {"example": examples(1, 4)[0], "ratio": accumulate, "sizes": [1, 2, 4], "warmup": 3}
    growing = LightningAnytimeGrowth(**usual | options)
    return trainer_of(folder, module, [growing, *callbacks], accumulate, arguments)


PROCESSES = """
import os
import sys
sys.path.insert(0, {tests!r})
import torch
from test_lightning import PLAIN, training, widening

arguments = dict(precision="64-true", strategy="ddp", devices=2, use_distributed_sampler=False)
for name, make, options in ("training", training, dict(settings=PLAIN)), ("widening", widening, {{}}):
    trainer, module, growing, loader = make({folder!r}, plain=True, arguments=arguments, **options)
    mine = [each[int(os.environ.get("LOCAL_RANK", 0)) :: 2] for each in loader.dataset.tensors]
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*mine), 6))
    torch.save([module.state_dict(), growing.growth.summary()], {folder!r} + f"/{{name}}-{{trainer.global_rank}}.pt")
"""


def saving(folder):
    return lightning.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)


class Watch(lightning.pytorch.Callback):
    """Keeps the stages behind each epoch."""

    def __init__(self, growing):
        self.growing, self.seen = growing, []

    def on_train_epoch_end(self, trainer, module):
        self.seen.append(stages(self.growing.growth))


def test_a_training_resumed_by_the_trainer_in_any_stage_is_the_one_that_was_never_stopped(tmp_path):
    trainer, module, growing, loader = training(tmp_path, accumulate=2, callbacks=[saving(tmp_path)])
    watch = Watch(growing)
    trainer.callbacks.insert(1, watch)
    trainer.fit(module, loader)
    state, summary = growing.growth.state_dict(), repeatable(growing.growth)
    assert trainer.global_step == EPOCHS * BATCHES == growing.growth.calls
    assert [entry["site"] for entry in summary["keeps"]] == ["0"]
    assert [entry["site"] for entry in summary["prunes"]] == ["2"]
    for stage in STAGES:
        epoch = next(index for index, found in enumerate(watch.seen) if stage in found)
        again, other, resumed, loader = training(tmp_path, accumulate=2)
        again.fit(other, loader, ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
        assert other.losses == module.losses[(epoch + 1) * BATCHES * 2 :], stage
        assert equal(other.state_dict(), module.state_dict()), stage
        assert equal(resumed.growth.state_dict(), state), stage
        assert repeatable(resumed.growth) == summary
        mine, theirs = (each.optimizers[0].state_dict() for each in (again, trainer))
        assert equal(mine, theirs), stage
        frozen = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        assert {name: parameter.requires_grad for name, parameter in other.named_parameters()} == frozen


def test_the_trainer_grows_as_a_loop_of_ones_own_does(tmp_path):
    trainer, module, growing, loader = training(tmp_path, schedule="sequential")
    trainer.fit(module, loader)
    _, plain, _, _ = training(tmp_path, schedule="sequential")
    made = plain.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    growth = Growth(
        plain,
        optimizer,
        scheduler,
        probe=[examples(1, 12), examples(2, 12)],
        loss=F.cross_entropy,
        controller=Script(LIFE),
        every=EVERY,
        budget=9.0,
        steps=EPOCHS * BATCHES,
        settings=SETTINGS,
    )
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(plain(x), y).backward()
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)
            optimizer.step()
            scheduler.step()
            growth.step()
    assert equal(plain.state_dict(), module.state_dict())
    assert repeatable(growth) == repeatable(growing.growth)
    finished = growing.growth.finish()
    assert finished is module is growing.network
    assert any(".esper." in name for name in finished.state_dict())


def test_a_submodule_grows_under_autocast_and_the_checkpoint_has_each_tensor_once(tmp_path):
    trainer, module, growing, loader = training(
        tmp_path, network="net", arguments={"precision": "bf16-mixed"}, callbacks=[saving(tmp_path)]
    )
    trainer.fit(module, loader)
    assert growing.network is module.net
    assert [entry["site"] for entry in growing.growth.summary()["keeps"]] == ["0"]
    checkpoint = torch.load(tmp_path / f"epoch={EPOCHS - 1}.ckpt")
    growth = checkpoint["callbacks"]["LightningGrowth"]
    shared = {tensor.data_ptr() for tensor in checkpoint["state_dict"].values()}
    assert all(tensor.data_ptr() in shared for name, tensor in growth["tensors"].items() if ".esper." not in name)
    again, other, resumed, loader = training(tmp_path, network="net", arguments={"precision": "bf16-mixed"})
    again.fit(other, loader, ckpt_path=tmp_path / "epoch=6.ckpt")
    assert equal(other.state_dict(), module.state_dict())
    assert equal(resumed.growth.state_dict(), growing.growth.state_dict())


def test_a_checkpoint_of_the_same_process_is_restored_for_evaluation_with_its_seeds(tmp_path):
    trainer, module, growing, loader = training(tmp_path, callbacks=[saving(tmp_path)])
    trainer.fit(module, loader)
    (after,) = trainer.validate(module, loader, verbose=False)
    (then,) = trainer.validate(module, loader, ckpt_path=tmp_path / "epoch=2.ckpt", verbose=False)
    assert list(growing.growth.population.planted()) == ["0"]
    assert stages(growing.growth)[0] == "HOLDING"
    assert (*trainer.validate(module, loader, ckpt_path=tmp_path / f"epoch={EPOCHS - 1}.ckpt", verbose=False),) == (
        after,
    )
    assert then != after
    growing.growth.finish()
    with pytest.raises(InputError, match="load checkpoints before growth"):
        trainer.validate(module, loader, ckpt_path=tmp_path / "epoch=2.ckpt", verbose=False)
    again, other, _, loader = training(tmp_path)
    again.callbacks[0] = growing
    with pytest.raises(InputError, match="has grown a network already"):
        again.fit(other, loader)
    again, other, _, loader = training(tmp_path)
    with pytest.raises(InputError, match="seeds, which are restored together with an optimizer"):
        again.validate(other, loader, ckpt_path=tmp_path / "epoch=2.ckpt", verbose=False)


def test_a_checkpoint_from_before_growth_fits_and_grows_from_there(tmp_path):
    trainer, module, growing, loader = training(tmp_path, callbacks=[saving(tmp_path)])
    trainer.callbacks.remove(growing)
    trainer.fit(module, loader)
    again, other, resumed, loader = training(tmp_path)
    again.fit(other, loader, ckpt_path=tmp_path / "epoch=2.ckpt")
    assert resumed.growth.calls == (EPOCHS - 3) * BATCHES
    assert [entry["site"] for entry in resumed.growth.summary()["keeps"]] == ["0"]


class ByHand(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"module": ByHand, "arguments": {"gradient_clip_val": None}}, "optimizes by hand"),
        ({"budgets": 1}, "no argument 'budgets'; did you mean 'budget'"),
        ({"plan": "anytime"}, "no argument 'plan'; to widen the network as a whole, take LightningAnytimeGrowth"),
        ({"optimizer": None}, "no argument 'optimizer'; the trainer gives it"),
        ({"callbacks": [lightning.pytorch.callbacks.EMAWeightAveraging()]}, "EMAWeightAveraging averages a copy"),
        ({"callbacks": [lightning.pytorch.callbacks.StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging aver"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_sentence(tmp_path, change, sentence):
    made = change.pop("module", Classifier)

    def fit():
        trainer, _, _, loader = training(tmp_path, **change)
        trainer.fit(made(), loader)

    with pytest.raises(InputError, match=sentence):
        fit()


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory):
    """Train in two processes, in each way; return a function from a way to the weights and the summary of each process."""
    folder = tmp_path_factory.mktemp("processes")
    program = folder / "program.py"
    program.write_text(PROCESSES.format(tests=str(Path(__file__).parent), folder=str(folder)))
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ended.returncode == 0, ended.stderr
    return lambda made: [torch.load(folder / f"{made}-{rank}.pt") for rank in range(2)]


def test_two_processes_of_the_trainer_grow_as_one_on_all_the_data(tmp_path, in_two_processes):
    trainer, module, _, loader = training(tmp_path, plain=True, settings=PLAIN, arguments={"precision": "64-true"})
    first, second = in_two_processes("training")
    trainer.fit(module, loader)
    assert equal(first[0], second[0])
    assert [entry["site"] for entry in first[1]["keeps"]] == ["0"]
    for name, value in module.state_dict().items():
        assert torch.allclose(first[0][name], value, rtol=1e-9, atol=1e-11), name


def test_a_strategy_that_growth_cannot_follow_is_refused_by_name(tmp_path):
    trainer, module, growing, _ = training(tmp_path)
    trainer._accelerator_connector.strategy = lightning.pytorch.strategies.ModelParallelStrategy()
    with pytest.raises(InputError, match="strategy is ModelParallelStrategy, under which a network cannot grow"):
        growing.on_fit_start(trainer, module)


def test_the_trainer_widens_as_a_loop_of_ones_own_does(tmp_path):
    trainer, module, growing, loader = widening(tmp_path, run=tmp_path / "run")
    trainer.fit(module, loader)
    assert open_run(tmp_path / "run").summary["growths"] == growing.growth.growths  # the trainer has ended it
    plain = Classifier("sequential")
    made = plain.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    growth = AnytimeGrowth(plain, optimizer, example=examples(1, 4)[0], ratio=1, sizes=[1, 2, 4], warmup=3)
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(plain(x), y).backward()
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)
            optimizer.step()
            scheduler.step()
            growth.step(y)
    assert [each["factor"] for each in growth.growths] == [2, 2]
    assert growth.summary() == growing.growth.summary()
    assert equal(plain.state_dict(), module.state_dict())
    assert equal(growth.average.state_dict(), growing.growth.average.state_dict())
    assert growing.network is module
    assert module.net[0].out_features == 24
    snapshot = growing.growth.snapshot()
    assert snapshot(examples(1, 4)[0]).shape == (4, 3)


def plain(growth):
    """Return the state of a growth without NaN, which is not equal to itself."""
    state = growth.state_dict()
    progress = {name: value for name, value in state["progress"].items() if name not in ("_beside", "_grown_at")}
    return progress, {name: value for name, value in state.items() if name not in ("progress",)}


def test_a_widening_resumed_by_the_trainer_at_any_size_is_the_one_that_was_never_stopped(tmp_path):
    trainer, module, growing, loader = widening(tmp_path, accumulate=2, callbacks=[saving(tmp_path)])
    trainer.fit(module, loader)
    first, second = (each["step"] for each in growing.growth.growths)
    for step in (first - 1, first + 1, second - 3, second + 1):  # before, in the warm-ups behind, and between growths
        epoch = step // BATCHES
        again, other, resumed, loader = widening(tmp_path, accumulate=2)
        again.fit(other, loader, ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
        assert other.losses == module.losses[(epoch + 1) * BATCHES * 2 :]
        assert equal(other.state_dict(), module.state_dict())
        assert equal(plain(resumed.growth), plain(growing.growth))
        assert equal(*(each.optimizers[0].state_dict() for each in (again, trainer)))
        assert equal(*(each.lr_scheduler_configs[0].scheduler.state_dict() for each in (again, trainer)))


def test_two_processes_of_the_trainer_become_wider_as_one_on_all_the_data(tmp_path, in_two_processes):
    trainer, module, growing, loader = widening(tmp_path, plain=True, arguments={"precision": "64-true"})
    first, second = in_two_processes("widening")
    trainer.fit(module, loader)
    assert equal(first, second)
    assert [each["factor"] for each in first[1]["growths"]] == [2, 2]
    assert first[1] == growing.growth.summary()
    for name, value in module.state_dict().items():
        assert torch.allclose(first[0][name], value, rtol=1e-9, atol=1e-11), name


def test_what_cannot_become_wider_under_the_trainer_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(
        InputError, match="no argument 'shard'; a network that fully_shard has in parts grows in a loop of"
    ):
        LightningAnytimeGrowth(example=None, shard=print)
    with pytest.raises(InputError, match="no argument 'size'; did you mean 'sizes'"):
        LightningAnytimeGrowth(example=None, size=[1, 2])
    trainer, module, _, loader = widening(tmp_path, callbacks=[saving(tmp_path)])
    trainer.fit(module, loader)
    with pytest.raises(InputError, match="has grown a network already"):
        trainer.fit(module, loader)
    again, other, _, loader = widening(tmp_path)
    for large, small in ((again, other), (trainer, module)):
        epoch = EPOCHS - 1 if large is again else 0
        with pytest.raises(InputError, match="the checkpoint is of a network of another size"):
            large.validate(small, loader, ckpt_path=tmp_path / f"epoch={epoch}.ckpt", verbose=False)
    averaged, third, _, loader = widening(tmp_path, callbacks=[lightning.pytorch.callbacks.EMAWeightAveraging()])
    with pytest.raises(InputError, match="EMAWeightAveraging averages a copy"):
        averaged.fit(third, loader)
    triples = DataLoader(TensorDataset(*loader.dataset.tensors, torch.zeros(24)), 12)
    last, fourth, _, _ = widening(tmp_path)
    fourth.training_step = lambda batch, batch_idx: Classifier.training_step(fourth, batch[:2], batch_idx)
    with pytest.raises(InputError, match="is no \\(input, target\\) pair and has no 'labels'; give targets="):
        last.fit(fourth, triples)
