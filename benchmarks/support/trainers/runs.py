"""What each trainer does with the problem: trains, saves, ends, resumes."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset

from benchmarks.support.trainers.problem import (
    ACCUMULATED,
    LEARNING_RATE,
    MAX_NORM,
    SAMPLES,
    STEPS,
    Run,
    Sentences,
    digest,
    plain_model,
    planned,
    samples_of_rank,
)


@dataclass
class Seen:
    """What a rank saw of a run.

    Attributes:
        losses: The mean loss over all ranks, by step from 1.
        saved: Hash of parameters and optimizer states when they were saved.
        loaded: The same after they were loaded.
    """

    losses: dict[int, float] = field(default_factory=dict)
    saved: str = ""
    loaded: str = ""


def transformers_trainer(run: Run) -> Seen:
    """``OSDPTrainer``."""
    from transformers import TrainerCallback, TrainingArguments, set_seed

    from osdp.integrations.huggingface.trainer import OSDPTrainer

    seen = Seen()

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if run.resume is not None:
                seen.loaded = digest(trainer.osdp, _bare(trainer.optimizer))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == run.stop:
                control.should_save = control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.saved = digest(trainer.osdp, _bare(trainer.optimizer))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                seen.losses[state.global_step] = logs["loss"]

    set_seed(0)
    arguments = TrainingArguments(
        run.folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=samples_of_rank(),
        gradient_accumulation_steps=ACCUMULATED,
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_NORM,
        logging_steps=1,
        save_strategy="no",
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    trainer = OSDPTrainer(
        model=planned(run.plan), args=arguments, train_dataset=Sentences(), callbacks=[Watch()]
    )
    resume = None if run.resume is None else os.path.join(run.folder, f"checkpoint-{run.resume}")
    trainer.train(resume_from_checkpoint=resume)
    return seen


def accelerate(run: Run) -> Seen:
    """``OSDPAccelerator`` in a loop by hand."""
    from osdp.integrations.accelerate import OSDPAccelerator

    seen = Seen()
    accelerator = OSDPAccelerator(gradient_accumulation_steps=ACCUMULATED, cpu=True)
    model = planned(run.plan)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule: Any = LambdaLR(optimizer, lambda step: 1 - step / (2 * STEPS))
    loader: Any = DataLoader(Sentences(), batch_size=samples_of_rank())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(schedule)
    step, batches = 0, loader
    if run.resume is not None:
        accelerator.load_state(run.folder)
        seen.loaded = digest(model, _bare(optimizer))
        step = run.resume
        batches = accelerator.skip_first_batches(loader, step * ACCUMULATED)
    total = torch.zeros(())
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            total += loss.detach() / ACCUMULATED
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        step += 1
        seen.losses[step] = float(accelerator.reduce(total, "mean"))
        total = torch.zeros(())
        if step == run.stop:
            accelerator.save_state(run.folder)
            seen.saved = digest(model, _bare(optimizer))
            break
    return seen


def lightning_trainer(run: Run) -> Seen:
    """Lightning's Trainer with ``OSDPStrategy``."""
    import lightning

    from osdp.integrations.lightning import OSDPStrategy

    seen = Seen()

    class Module(lightning.LightningModule):
        def configure_model(self) -> None:
            self.model = planned(run.plan)

        def train_dataloader(self) -> Any:
            # Lightning does not skip what an epoch has seen already: one ends where the run does.
            begin = self.current_epoch * STEPS // 2 * SAMPLES
            part = Subset(Sentences(), range(begin, begin + STEPS // 2 * SAMPLES))
            return DataLoader(part, batch_size=samples_of_rank())

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            self.total = getattr(self, "total", 0.0) + loss.detach() / ACCUMULATED
            return loss

        def on_train_start(self) -> None:
            if run.resume is not None:
                seen.loaded = digest(self.model, _bare(self.optimizers()))

        def on_train_batch_end(self, *args: Any) -> None:
            if (self.trainer.fit_loop.batch_idx + 1) % ACCUMULATED == 0:
                seen.losses[self.trainer.global_step] = float(self.all_gather(self.total).mean())
                self.total = torch.zeros(())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
            schedule = LambdaLR(optimizer, lambda step: 1 - step / (2 * STEPS))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            self.model.clip_grad_norm_(MAX_NORM)

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            seen.saved = digest(self.model, _bare(self.optimizers()))

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=OSDPStrategy(),
        max_epochs=2 if run.stop is None else 1,
        reload_dataloaders_every_n_epochs=1,
        accumulate_grad_batches=ACCUMULATED,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    path = os.path.join(run.folder, "state.ckpt")
    trainer.fit(Module(), ckpt_path=None if run.resume is None else path)
    if run.stop is not None:
        trainer.save_checkpoint(path)
    return seen


def lightning_fabric(run: Run) -> Seen:
    """Lightning's Fabric: a loop by hand, and the strategy that calls what shards the model."""
    import lightning

    from osdp.integrations.lightning import OSDPFabricStrategy

    seen = Seen()
    strategy = OSDPFabricStrategy(lambda model, mesh: planned(run.plan, model))
    fabric = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model: Any = fabric.setup(plain_model())
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    begin, path = run.resume or 0, os.path.join(run.folder, "state")
    if run.resume is not None:
        kept = {"model": model, "optimizer": optimizer, "step": 0}
        fabric.load(path, kept)
        assert kept["step"] == run.resume
        seen.loaded = digest(model.module, _bare(optimizer))
    part = Subset(Sentences(), range(begin * SAMPLES, STEPS * SAMPLES))
    loader = fabric.setup_dataloaders(DataLoader(part, batch_size=samples_of_rank()))
    total = torch.zeros(())
    for index, batch in enumerate(loader):
        last = (index + 1) % ACCUMULATED == 0
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model(**batch).loss / ACCUMULATED
            fabric.backward(loss)
            total += loss.detach()
        if not last:
            continue
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        step = begin + (index + 1) // ACCUMULATED
        seen.losses[step] = float(fabric.all_reduce(total, reduce_op="mean"))
        total = torch.zeros(())
        if step == run.stop:
            fabric.save(path, {"model": model, "optimizer": optimizer, "step": step})
            seen.saved = digest(model.module, _bare(optimizer))
            break
    return seen


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


#: The trainers, by name.
TRAINERS: dict[str, Callable[[Run], Seen]] = {
    "transformers": transformers_trainer,
    "accelerate": accelerate,
    "lightning": lightning_trainer,
    "fabric": lightning_fabric,
}


def train(rank: int, world_size: int, *, trainer: str, run: dict[str, Any]) -> dict[str, Any]:
    """Worker: one run under ``trainer``."""
    # As torchrun sets them; the process group is there already, so that nobody asks at the address.
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    seen = TRAINERS[trainer](Run(**run))
    return {"losses": seen.losses, "saved": seen.saved, "loaded": seen.loaded}
