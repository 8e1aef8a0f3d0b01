"""Trainers that people use: they train, save and resume a model under a plan, and refuse by name."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from benchmarks.support.trainers.problem import STEPS, Sentences, plain_model, planned
from benchmarks.support.trainers.runs import TRAINERS, train
from benchmarks.trainers import compare
from osdp import OSDP, ModelDesc, Training
from osdp.integrations.accelerate import OSDPAccelerator, follow_reductions
from osdp.integrations.data_parallel import require_data_parallel
from osdp.integrations.huggingface.trainer import OSDPTrainer
from osdp.integrations.lightning import OSDPFabricStrategy, OSDPStrategy
from osdp.runtime.checkpoint import save_pretrained, summarize, whole_state_dict
from tests.habits.running.plans import plan_of
from tests.helpers.distributed import run
from tests.helpers.torchrun import as_under_torchrun
from tests.test_refine import SEEN, made, step_on


def trained(trainer: str, plan: str, folder: str, stop: int | None = None, resume: int | None = None) -> Any:
    with as_under_torchrun():
        arguments = {"plan": plan, "folder": folder, "stop": stop, "resume": resume}
        return train(dist.get_rank(), dist.get_world_size(), trainer=trainer, run=arguments)


@pytest.mark.parametrize(
    ("trainer", "plan"),
    [(trainer, "mixed") for trainer in TRAINERS]
    + [pytest.param(trainer, "replicated", marks=pytest.mark.slow) for trainer in ("lightning", "fabric")],
)
def test_a_training_that_is_ended_goes_on_on_other_ranks(tmp_path: Path, trainer: str, plan: str) -> None:
    # Lightning knows a distributed model by its DTensors, which a replicated plan has none of.
    through = run(2, trained, trainer, plan, str(tmp_path / "through"), fresh=True)[0]
    folder = str(tmp_path / "ended")
    ended = run(2, trained, trainer, plan, folder, STEPS // 2, fresh=True)[0]
    resumed = run(4, trained, trainer, plan, folder, None, STEPS // 2, fresh=True)[0]
    assert "error" not in compare(through, ended, resumed)


def arguments_of(folder: str, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {"use_cpu": True, "max_steps": 2, "report_to": [], "disable_tqdm": True}
    return TrainingArguments(folder, **(defaults | options))


@as_under_torchrun()
def evaluated_and_exported(folder: str) -> dict[str, Any]:
    model = planned("mixed")
    trainer = OSDPTrainer(
        model=model,
        args=arguments_of(
            folder, eval_strategy="steps", eval_steps=1, save_steps=1, save_total_limit=1,
            load_best_model_at_end=True, per_device_train_batch_size=2,
        ),
        train_dataset=Sentences(),
        eval_dataset=torch.utils.data.Subset(Sentences(), range(5)),
    )  # fmt: skip
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    prompt = Sentences()[0]["input_ids"][None, :4]
    trainer.model.eval()
    tokens = trainer.model.generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=True)
    assert torch.equal(model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False), tokens)
    trainer.save_model(f"{folder}/exported")
    trainer.model.save_pretrained(f"{folder}/inside")
    best = min(losses)
    return {
        "losses": losses,
        "best": float(trainer.evaluate()["eval_loss"]) - best,
        "tokens": tokens,
        "state": whole_state_dict(model),
        "left": sorted(name for name in os.listdir(folder) if name.startswith("checkpoint-")),
    }


def test_the_trainer_evaluates_generates_and_exports(tmp_path: Path) -> None:
    answers = run(2, evaluated_and_exported, str(tmp_path), fresh=True)
    first = answers[0]
    assert len(first["losses"]) == 2 and first["losses"] == answers[1]["losses"]
    assert first["best"] == pytest.approx(0, abs=1e-6)
    assert torch.equal(first["tokens"], answers[1]["tokens"])
    assert 1 <= len(first["left"]) <= 2  # the best, and the last
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    # Where anything was sharded rank 0 raised, and the others waited for it.
    inside = AutoModelForCausalLM.from_pretrained(tmp_path / "inside").state_dict()
    assert all(torch.equal(value, inside[name]) for name, value in plain.state_dict().items())
    assert type(plain).__name__ == "LlamaForCausalLM" and plain.config.tie_word_embeddings
    state = plain.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in first["state"].items())
    plain.eval()
    tokens = plain.generate(Sentences()[0]["input_ids"][None, :4], max_new_tokens=4, do_sample=False)
    assert torch.equal(tokens, first["tokens"])


@as_under_torchrun()
def computed_in_bfloat16(folder: str) -> None:
    model = planned("mixed")
    seen: set[torch.dtype] = set()
    for layer in model.module.model.layers:
        layer.mlp.register_forward_hook(lambda _module, _args, output: seen.add(output.dtype))
    arguments = arguments_of(folder, bf16=True, per_device_train_batch_size=2, save_strategy="no")
    data = torch.utils.data.Subset(Sentences(), range(4))
    trainer = OSDPTrainer(model=model, args=arguments, train_dataset=Sentences(), eval_dataset=data)
    trainer.train()
    assert seen == {torch.bfloat16} and {p.dtype for p in model.parameters()} == {torch.float32}
    seen.clear()
    assert 0 < trainer.evaluate()["eval_loss"] < 10
    assert seen == {torch.bfloat16} and not torch.is_autocast_enabled("cpu")
    # Losses of one's own get what they get from Accelerate, and so does generate().
    batch = {name: value[None] for name, value in Sentences()[0].items()}
    assert trainer.osdp(**batch).logits.dtype is torch.float32
    seen.clear()
    model.generate(input_ids=batch["input_ids"][:, :4], max_new_tokens=2, do_sample=False)
    assert seen == {torch.bfloat16}
    with pytest.raises(ValueError, match=r"bf16_full_eval= .* convert the model"):
        OSDPTrainer(model=model, args=arguments_of(folder, bf16_full_eval=True))
    with pytest.raises(ValueError, match="steps by rows and columns of whole matrices"):
        OSDPTrainer(model=model, args=arguments_of(folder, optim="adafactor"))
    with pytest.raises(ValueError, match=r"torch_compile= is for .* before wrapping, block\.compile\(\)"):
        OSDPTrainer(model=model, args=arguments_of(folder, torch_compile=True))


def test_the_trainer_computes_in_bfloat16_where_it_is_asked_to(tmp_path: Path) -> None:
    # Accelerate does so in the forward of what it wraps, which this model is not: all was float32.
    run(2, computed_in_bfloat16, str(tmp_path), fresh=True)


@as_under_torchrun()
def labels_smoothed(folder: str) -> None:
    model = planned("mixed")
    trainer = OSDPTrainer(model=model, args=arguments_of(folder, label_smoothing_factor=0.1))
    batch = {name: value[None] for name, value in Sentences()[dist.get_rank()].items()}
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.osdp, dict(batch))
        logits = model(batch["input_ids"]).logits
    labels = batch["labels"]
    expected = nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], label_smoothing=0.1)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_smoothed_labels_are_those_of_the_next_tokens(tmp_path: Path) -> None:
    # Trainer looks for the model's class among those whose labels it shifts, and found the wrapper's.
    run(2, labels_smoothed, str(tmp_path), fresh=True)


@as_under_torchrun()
def checkpoint_not_saved(folder: str) -> None:
    arguments = arguments_of(folder, save_steps=1, per_device_train_batch_size=2)
    trainer = OSDPTrainer(model=planned("mixed"), args=arguments, train_dataset=Sentences())
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(trainer, "_save_rng_state", _full_disk)
        with pytest.raises(RuntimeError, match="rank 1: OSError: No space left"):
            trainer.train()


def test_what_one_rank_cannot_save_is_told_on_all_ranks(tmp_path: Path) -> None:
    # Rank 1 raised, and the others waited for it in the next step.
    run(2, checkpoint_not_saved, str(tmp_path), fresh=True)


@as_under_torchrun()
def best_adapters(folder: str) -> float:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    adapted = get_peft_model(plain_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    model = planned("mixed", adapted)
    best: dict[str, Any] = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    best |= {"save_steps": 1, "save_total_limit": 1, "per_device_train_batch_size": 2, "learning_rate": 0.1}
    data = torch.utils.data.Subset(Sentences(), range(4))
    with pytest.raises(ValueError, match="reads adapters by shards, which save_only_model does not save"):
        OSDPTrainer(model=model, args=arguments_of(folder, save_only_model=True, **best), eval_dataset=data)
    trainer = OSDPTrainer(
        model=model, args=arguments_of(folder, **best), train_dataset=Sentences(), eval_dataset=data
    )
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return float(trainer.evaluate()["eval_loss"]) - min(losses)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_the_best_adapters_are_loaded_at_the_end(tmp_path: Path) -> None:
    # They were looked for among weights of a whole model, which a folder of adapters does not have.
    assert run(2, best_adapters, str(tmp_path), fresh=True) == pytest.approx([0, 0], abs=1e-6)


@as_under_torchrun()
def adapters_trained(folder: str) -> torch.Tensor:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    adapted = get_peft_model(plain_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    model = planned("mixed", adapted)
    arguments = arguments_of(folder, save_steps=2, per_device_train_batch_size=2, learning_rate=0.1)
    trainer = OSDPTrainer(model=model, args=arguments, train_dataset=Sentences())
    trainer.train()
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(Sentences()[0]["input_ids"][None]).logits
    return logits


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_the_trainer_saves_the_adapters_of_a_peft_model(tmp_path: Path) -> None:
    from peft import PeftModel

    logits = run(2, adapters_trained, str(tmp_path), fresh=True)[0]
    folder = tmp_path / "checkpoint-2"
    assert (folder / "adapter_model.safetensors").exists() and not list(folder.glob("model*"))
    model = PeftModel.from_pretrained(plain_model(), str(folder)).eval()
    with torch.no_grad():
        found = model(Sentences()[0]["input_ids"][None]).logits
        plain = plain_model().eval()(Sentences()[0]["input_ids"][None]).logits
    assert torch.allclose(found, logits, atol=1e-5) and not torch.allclose(found, plain, atol=1e-3)


@as_under_torchrun()
def frozen_adapters_saved(folder: str) -> dict[str, torch.Tensor]:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    adapted = get_peft_model(
        plain_model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("layernorm" in name)
    expected = {
        name.replace(".default", ""): value.detach().clone()
        for name, value in adapted.named_parameters()
        if "lora" in name
    }
    save_pretrained(planned("mixed", adapted), folder)
    return expected


def test_frozen_adapters_are_saved(tmp_path: Path) -> None:
    # Adapters that were loaded to be used, not trained, were left out: the folder had none, without a word.
    expected = run(2, frozen_adapters_saved, str(tmp_path), fresh=True)[0]
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert expected and all(torch.equal(saved[name], value) for name, value in expected.items())


@as_under_torchrun()
def adapters_not_saved(folder: str) -> None:
    from peft import LoraConfig, get_peft_model

    model = planned("mixed", get_peft_model(plain_model(), LoraConfig(r=2, target_modules=["q_proj"])))
    with pytest.raises(RuntimeError, match=r"may have a part of the new adapters: .*OSError: No space left"):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(type(model.module), "save_pretrained", _full_disk)
            save_pretrained(model, folder)


def _full_disk(*_: Any, **__: Any) -> None:
    raise OSError("No space left")


def test_adapters_that_cannot_be_written_are_told_on_all_ranks(tmp_path: Path) -> None:
    # Rank 0 raised, and the others waited for it without end.
    run(2, adapters_not_saved, str(tmp_path), fresh=True)


def lightning_saves_all_or_nothing(folder: str) -> None:
    model = planned("mixed")
    strategy = OSDPFabricStrategy(lambda _model, _mesh: model)
    strategy.save_checkpoint(folder, {"model": model, "step": 1})
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match=r"osdp has what it had before: rank 0: \w+Error: Can't pickle"):
        more = (lambda: None) if dist.get_rank() == 0 else None
        strategy.save_checkpoint(folder, {"model": model, "step": 2, "more": more})
    doubled = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="has no more: leave them out, or pass strict=False"):
        strategy.load_checkpoint(folder, {"model": model, "more": None})
    assert all(
        torch.equal(_local(value), _local(doubled[name])) for name, value in model.state_dict().items()
    )
    found = strategy.load_checkpoint(folder, {"model": model})
    assert found == {"step": 1}
    assert all(torch.equal(_local(value), _local(saved[name])) for name, value in model.state_dict().items())


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def test_a_lightning_checkpoint_is_published_as_a_whole(tmp_path: Path) -> None:
    # New weights lay beside the old step, only rank 0 raised, and what lacked an entry was loaded even so.
    run(2, lightning_saves_all_or_nothing, str(tmp_path / "state"), fresh=True)


class Planned(lightning.LightningModule):
    """A module with a model under a plan, and with a layer beside it if asked."""

    def __init__(self, with_layer: bool = False) -> None:
        super().__init__()
        self.model: Any = None
        self.layer = nn.Linear(2, 2) if with_layer else None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = planned("mixed")

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def lightning_trainer(folder: str, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=OSDPStrategy(),
        default_root_dir=folder,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def few_sentences() -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.Subset(Sentences(), range(8)), batch_size=2)


@as_under_torchrun()
def weights_alone(folder: str) -> None:
    keep = ModelCheckpoint(
        folder, monitor="step", mode="max", save_weights_only=True, save_on_train_epoch_end=True
    )
    module, trainer = Planned(), lightning_trainer(folder, callbacks=[keep])
    trainer.fit(module, few_sentences())
    best = Path(keep.best_model_path)
    dist.barrier()  # rank 0 removes the one before
    assert [path.name for path in Path(folder).glob("*.ckpt")] == [best.name]
    assert not summarize(best / "osdp").optimizer_bytes
    saved = {name: _local(value).clone() for name, value in module.model.state_dict().items()}
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter.mul_(2)
    trainer.test(module, few_sentences(), ckpt_path=str(best), verbose=False)
    assert all(torch.equal(_local(value), saved[name]) for name, value in module.model.state_dict().items())
    with pytest.raises(ValueError, match="of another model or optimizer; nothing was loaded: it lacks"):
        lightning_trainer(folder, enable_checkpointing=False).fit(
            Planned(), few_sentences(), ckpt_path=str(best)
        )
    fresh = lightning_trainer(folder, enable_checkpointing=False)
    fresh.test(Planned(), few_sentences(), verbose=False)
    fresh.save_checkpoint(f"{folder}/untrained")
    assert not summarize(f"{folder}/untrained/osdp").optimizer_bytes


class Looking(Planned):
    """Notes in each forward whether gradients of the last step are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen.append(any(parameter.grad is not None for parameter in self.model.parameters()))
        return super().training_step(batch, index)


class Dropping(Looking):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        assert not self.seen[1:] or self.seen[-1]


@as_under_torchrun()
def gradients_dropped_early(folder: str) -> None:
    for kind, kept in ((Looking, False), (Dropping, True)):
        module = kind()
        lightning_trainer(folder, enable_checkpointing=False).fit(module, few_sentences())
        assert module.seen[1:] and all(seen is kept for seen in module.seen[1:])
    module = Looking()
    accumulating = lightning_trainer(folder, enable_checkpointing=False, accumulate_grad_batches=2)
    accumulating.fit(module, few_sentences())
    assert any(module.seen)


def test_lightnings_forwards_run_without_the_gradients_of_the_last_step(tmp_path: Path) -> None:
    """Lightning drops them behind the next forward, where no plan has memory for them."""
    run(2, gradients_dropped_early, str(tmp_path), fresh=True)


def test_lightning_keeps_weights_alone_where_it_is_asked_to(tmp_path: Path) -> None:
    # Optimizer states were saved all the same, and a model that was never trained could not be saved.
    run(2, weights_alone, str(tmp_path), fresh=True)


@as_under_torchrun()
def trained_outside(folder: str) -> None:
    with pytest.raises(ValueError, match=r"2 parameters are in no OSDP model, the first is 'layer\.weight'"):
        lightning_trainer(folder, enable_checkpointing=False).fit(Planned(with_layer=True), few_sentences())
    averaging = StochasticWeightAveraging(1e-2)
    with pytest.raises(ValueError, match="averages into a copy of the plain module"):
        lightning_trainer(folder, enable_checkpointing=False, callbacks=[averaging]).fit(
            Planned(), few_sentences()
        )
    with pytest.raises(ValueError, match=r"sync_batchnorm=True converts layers .* before wrapping"):
        lightning_trainer(folder, enable_checkpointing=False, sync_batchnorm=True).fit(
            Planned(), few_sentences()
        )
    with pytest.raises(ValueError, match="=False: checkpoints are saved by shards"):
        OSDPStrategy(save_distributed_checkpoint=False)
    fabric = lightning.Fabric(
        accelerator="cpu", devices=dist.get_world_size(), strategy=OSDPFabricStrategy(lambda model, _: model)
    )
    fabric.launch()
    with pytest.raises(ValueError, match=r"2 parameters are in no OSDP model, the first is 'weight'"):
        fabric.setup(nn.Linear(2, 2))


def test_lightning_refuses_what_would_drift_apart(tmp_path: Path) -> None:
    # Each rank trained a copy of its own of layers beside the wrapped model.
    run(2, trained_outside, str(tmp_path), fresh=True)


@as_under_torchrun()
def refused(folder: str) -> None:
    model = planned("replicated")
    # Silently reduced twice, once by each.
    for wrap in (DistributedDataParallel, lambda it: DistributedDataParallel(it.module)):
        with pytest.raises(
            RuntimeError, match=r"was given to DistributedDataParallel.*OSDPTrainer and .*OSDPAcc"
        ):
            wrap(model)
    trainer = Trainer(model=model, args=arguments_of(folder), train_dataset=Sentences())
    with pytest.raises(RuntimeError, match="was given to DistributedDataParallel"):
        trainer.train()
    with pytest.raises(TypeError, match="OSDPTrainer trains an OSDP model, not a Linear: wrap it first"):
        OSDPTrainer(model=nn.Linear(2, 2), args=arguments_of(folder))
    mine = OSDPTrainer(model=model, args=arguments_of(folder), train_dataset=Sentences())
    Path(folder, "checkpoint-3").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match=r"cannot be resumed from: it has no osdp and no scheduler\.pt"):
        mine.train(resume_from_checkpoint=f"{folder}/checkpoint-3")

    shutil.copytree(f"{folder}/checkpoint-3", f"{folder}/checkpoint-4", dirs_exist_ok=True)
    Path(folder, "checkpoint-4", "osdp").mkdir(exist_ok=True)
    Path(folder, "checkpoint-4", "scheduler.pt").write_bytes(b"torn")
    before = whole_state_dict(model)
    with pytest.raises(ValueError, match=r"scheduler\.pt cannot be read"):
        mine.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    assert all(torch.equal(value, before[name]) for name, value in whole_state_dict(model).items())


def test_a_model_under_a_plan_is_not_wrapped_again(tmp_path: Path) -> None:
    run(2, refused, str(tmp_path), fresh=True)


@as_under_torchrun()
def clipped(_folder: str) -> None:
    accelerator = OSDPAccelerator(cpu=True)
    model, plain = planned("mixed"), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, plain = accelerator.prepare(model, optimizer, plain)
    assert isinstance(plain, DistributedDataParallel)
    with pytest.raises(
        ValueError, match=r"1 of the \d+ parameters of a model under a plan are to be clipped"
    ):
        accelerator.clip_grad_norm_([next(iter(model.parameters()))], 1.0)
    with pytest.raises(ValueError, match=r"to be clipped together with 2 others: pass model\.parameters"):
        accelerator.clip_grad_norm_([*model.parameters(), *plain.parameters()], 1.0)
    frozen_one = next(iter(model.parameters())).requires_grad_(False)
    assert not accelerator.clip_grad_norm_((p for p in model.parameters() if p.requires_grad), 1.0)
    frozen_one.requires_grad_(True)
    whole = accelerator.get_state_dict(model)
    assert bool(whole) == (dist.get_rank() == 0)
    unwrapped, saved = accelerator.unwrap_model(model), f"{_folder}/exported"
    options = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
    with pytest.raises(TypeError, match="by shards: leave out state_dict="):
        unwrapped.save_pretrained(saved, state_dict=whole, **options)
    unwrapped.save_pretrained(saved, **options)
    assert list(Path(saved).glob("model*.safetensors"))
    alone = OSDPAccelerator(cpu=True)
    alone.prepare_model(model, evaluation_mode=True)
    with pytest.raises(ValueError, match=r"0 optimizers .* or freeze it by requires_grad_\(False\)"):
        alone.save_state(f"{_folder}/teacher")
    model.requires_grad_(False)
    frozen = OSDPAccelerator(cpu=True)
    frozen.prepare(model)
    frozen.save_state(f"{_folder}/frozen")
    frozen.load_state(f"{_folder}/frozen")
    model.requires_grad_(True)
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="2 optimizers have parameters of it"):
        accelerator.save_state(_folder)
    # Those before are no longer the accelerator's; this optimizer knows the parameters from before wrapping.
    accelerator.free_memory()
    net = plain_model()
    early = torch.optim.AdamW(net.parameters())
    accelerator.prepare(planned("replicated", net), early)
    accelerator.save_state(f"{_folder}/early")
    accelerator.load_state(f"{_folder}/early")
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 0:
            patched.setattr("accelerate.accelerator.save_accelerator_state", _full_disk)
        with pytest.raises(RuntimeError, match="rank 0: OSError: No space left"):
            accelerator.save_state(f"{_folder}/full")
    # One rank fails before our hook is called, and where Accelerate alone waits for all ranks.
    handle = accelerator.register_save_state_pre_hook(_full_disk if dist.get_rank() else lambda *_: None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1: OSError: No space left"):
            accelerator.save_state(f"{_folder}/torn")
    handle.remove()
    project = accelerator.project_configuration
    project.set_directories(f"{_folder}/project")
    project.automatic_checkpoint_naming, project.total_limit = True, 1
    accelerator.save_state()
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 0:
            patched.setattr("accelerate.accelerator.shutil.rmtree", _full_disk)
        with pytest.raises(RuntimeError, match="rank 0: OSError: No space left"):
            accelerator.save_state()
    accelerator.save_state()
    assert len(os.listdir(f"{_folder}/project/checkpoints")) == 1
    with pytest.warns(UserWarning, match="join_uneven_inputs has no effect"):
        with accelerator.join_uneven_inputs([model]):
            pass
    with pytest.raises(ValueError, match="a compiled model under a plan cannot be prepared"):
        accelerator.prepare(torch.compile(model))


def test_accelerate_leaves_other_models_to_accelerate(tmp_path: Path) -> None:
    run(2, clipped, str(tmp_path), fresh=True)


@as_under_torchrun()
def sharded_by_accelerate() -> None:
    accelerator, model = OSDPAccelerator(cpu=True), planned("mixed")
    with pytest.MonkeyPatch.context() as patched:
        # On CPUs Accelerate has no other way than DDP.
        patched.setattr(OSDPAccelerator, "distributed_type", DistributedType.FSDP)
        with pytest.raises(ValueError, match="by OSDP, and this Accelerator is to shard it by FSDP"):
            accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def test_a_model_under_a_plan_is_not_sharded_again_by_accelerate() -> None:
    run(2, sharded_by_accelerate, fresh=True)


class Average:
    """Of a model's weights, as the docs advise to keep it."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = [parameter.detach().clone() for parameter in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


@as_under_torchrun()
def averages_of_shards(folder: str) -> None:
    model = planned("mixed")
    average = Average(model)
    accelerator = OSDPAccelerator(cpu=True)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.register_for_checkpointing(average)
    with pytest.raises(ValueError, match=r"Average, which is registered .* other ranks have parts"):
        accelerator.save_state(f"{folder}/accelerate")
    fabric = OSDPFabricStrategy(lambda module, mesh: module)
    with pytest.raises(ValueError, match="average has DTensors, of which other ranks have parts"):
        fabric.save_checkpoint(f"{folder}/fabric", {"model": model, "average": average})
    assert not Path(f"{folder}/fabric").exists()
    # Fabric.load_raw: a file of the plain model, which is on rank 0 alone.
    state = {name: value.clone() for name, value in whole_state_dict(model).items()}
    raw = f"{folder}/raw{dist.get_rank()}.pt".replace("raw0", "raw")
    if dist.get_rank() == 0:
        torch.save({name: value + 1 for name, value in state.items()}, raw)
    fabric.load_checkpoint(raw, model)
    for name, value in whole_state_dict(model).items():
        assert torch.equal(value, state[name] + 1), name


def test_averages_of_sharded_weights_are_not_saved_in_part(tmp_path: Path) -> None:
    """Rank 0's shards were saved, and loaded into all ranks."""
    run(2, averages_of_shards, str(tmp_path), fresh=True)


@as_under_torchrun()
def processes_counted() -> None:
    model = planned("mixed")
    for processes in (1, 4):
        with pytest.raises(ValueError, match=f"sees {processes} process.*, and the plan is for 2 ranks"):
            require_data_parallel(model, processes, "Trainer")
    require_data_parallel(model, 2, "Trainer")
    accelerator = OSDPAccelerator(cpu=True, gradient_accumulation_steps=2)
    options = accelerator.gradient_state.plugin_kwargs
    follow_reductions(accelerator, model)
    assert not options["sync_each_batch"]  # nothing is accumulated
    training = replace(model.plan.training, microbatches=2)
    for reduce_each in (True, False):
        plan: Any = SimpleNamespace(training=training, reduce_each_microbatch=reduce_each)
        follow_reductions(accelerator, SimpleNamespace(plan=plan))  # type: ignore[arg-type]
        assert options["sync_each_batch"] is reduce_each


def test_a_trainer_and_its_plan_have_the_same_ranks() -> None:
    """Without ``use_cpu=True`` on CPUs each rank trained on all of the data."""
    run(2, processes_counted, fresh=True)


@as_under_torchrun()
def many_tokens_counted(folder: str) -> None:
    plain = plain_model()
    batch = {name: value[None] for name, value in Sentences()[dist.get_rank()].items()}
    desc = ModelDesc.from_module(plain, batch)
    training = Training(local_batch=1, param_dtype="float16")
    model = OSDP(plain, plan=plan_of("mixed", desc, training, dist.get_world_size()))
    trainer = OSDPTrainer(model=model, args=arguments_of(folder))
    labels = torch.zeros(1, 70002, dtype=torch.long)
    count = trainer._get_num_items_in_batch([{"labels": labels}], trainer.args.device)
    assert int(count) == 140002
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.osdp, dict(batch), num_items_in_batch=count)
        same = trainer.compute_loss(trainer.osdp, dict(batch), num_items_in_batch=140002)
    assert 0 < float(loss) == float(same)


def test_tokens_are_counted_exactly_whatever_the_model_computes_in(tmp_path: Path) -> None:
    # It was cast to param_dtype: off in bfloat16, and infinite in float16, so that losses were 0.
    run(2, many_tokens_counted, str(tmp_path), fresh=True)


@as_under_torchrun()
def accumulated_by_fabric() -> None:
    strategy = OSDPFabricStrategy(lambda model, mesh: planned("mixed", model))
    fabric = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model: Any = fabric.setup(plain_model())
    batch = {name: value[None] for name, value in Sentences()[dist.get_rank()].items()}
    for is_last in (False, True):
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(model(**batch).loss)
    assert all(model._forward_module._applied.sharded.syncs.values())
    before = [parameter.grad.clone() for parameter in model.parameters()]
    fabric.backward(model(**batch).loss)  # without the context
    for parameter, earlier in zip(model.parameters(), before, strict=True):
        assert not torch.equal(_local(parameter.grad), _local(earlier)) or not _local(earlier).numel()


def test_fabric_reduces_again_behind_an_accumulation() -> None:
    # Lightning's own context left reductions off behind the last microbatch.
    run(2, accumulated_by_fabric, fresh=True)


@as_under_torchrun()
def refined_under_accelerate() -> int:
    model = made()
    accelerator = OSDPAccelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(2):  # also where it is refined already
        model.refine(optimizer)
    for index in range(36):
        step_on(model, optimizer, index, SEEN)
    assert model.refinement is not None
    mine = {id(parameter) for parameter in model.parameters()}
    assert {id(each) for group in optimizer.param_groups for each in group["params"]} == mine
    switches: int = model.refinement.switches
    return switches


def test_a_plan_is_refined_with_the_optimizer_that_accelerate_returns() -> None:
    # Accelerate's is an optimizer by its class alone, and torch found none of its hooks: AttributeError.
    first, second = run(2, refined_under_accelerate, fresh=True)
    assert first == second >= 1
