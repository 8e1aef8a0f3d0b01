"""``OSDPTrainer``: the Trainer of transformers with a model under a plan.

The Trainer keeps the plain model, which is changed in place and still is the ``PreTrainedModel`` it was; what
it trains is the wrapper. What it does by itself (wrapping, clipping, checkpoints) is here done by the model.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME

from osdp.integrations.accelerate import follow_reductions
from osdp.integrations.data_parallel import require_data_parallel
from osdp.runtime.checkpoint import load, save, save_pretrained
from osdp.runtime.ranks.shared_faults import raise_together
from osdp.wrapper import OSDP

#: The folder of model and optimizer inside a checkpoint of the Trainer.
STATE_FOLDER = "osdp"


class OSDPTrainer(Trainer):
    """A Trainer whose model is an :class:`osdp.OSDP`.

    ::

        model = OSDP(AutoModelForCausalLM.from_config(config), sample_batch, "40GiB")
        OSDPTrainer(model=model, args=TrainingArguments(...), train_dataset=data).train()

    Everything else is as with ``Trainer``: accumulation, ``max_grad_norm``, evaluation, ``generate`` in it,
    ``save_total_limit``, ``load_best_model_at_end``, ``resume_from_checkpoint`` (on another number of ranks,
    too). For bfloat16 plan with ``OSDP(..., param_dtype="bfloat16")`` rather than pass ``bf16``, which
    computes in bfloat16 copies that no plan counts. Blocks are compiled before wrapping.

    Args:
        model: The model, wrapped; for others use ``Trainer``.
        *args: As for ``Trainer``.
        **kwargs: As for ``Trainer``.

    Attributes:
        osdp: The wrapped model; ``model`` is the model inside it.

    Raises:
        TypeError: The model is not wrapped.
        ValueError: It is cut into stages, or the Trainer is told to shard, to compile or to convert it in its
            own way, to step by rows and columns of matrices, or to load the best adapters without keeping
            what they are loaded from.
    """

    osdp: OSDP

    def __init__(self, model: OSDP, *args: Any, **kwargs: Any) -> None:
        if not isinstance(model, OSDP):
            raise TypeError(
                f"OSDPTrainer trains an OSDP model, not a {type(model).__name__}: wrap it first, "
                "model = OSDP(model, sample_batch, memory_limit), or use Trainer"
            )
        self.osdp = model
        super().__init__(model.module, *args, **kwargs)
        require_data_parallel(model, self.args.world_size, "Trainer")
        self._check_arguments()
        follow_reductions(self.accelerator, model)
        # Autocast, if bf16 or fp16 ask for it, around the model's forward alone, with outputs in float32: as
        # of every other model, so that losses of one's own and generate() find what they would there.
        _undo_autocast(model.module)
        self.accelerator.prepare_model(model.module, device_placement=False, evaluation_mode=True)
        smoother: Any = self.label_smoother
        if smoother is not None and _predicts_next_tokens(model.module):
            # Trainer goes by the class of what it trains, which is the wrapper's.
            smoother = partial(smoother, shift_labels=True)
        self.label_smoother = smoother
        # As of a module of FSDP2: generate() then goes on on all ranks until the last one is done.
        model.module.__dict__["_is_fsdp_managed_module"] = True
        if hasattr(type(model.module), "save_pretrained"):
            # trainer.model is the model inside, of whose weights its own would find parts.
            model.module.__dict__["save_pretrained"] = partial(_save_inside, model)

    def _check_arguments(self) -> None:
        faults = []
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            faults.append("the model is sharded by OSDP: leave fsdp= and deepspeed= out of TrainingArguments")
        if self.args.torch_compile:
            faults.append(
                "torch_compile= is for models that the Trainer wraps: leave it out, and compile blocks "
                "before wrapping, block.compile()"
            )
        if self.args.bf16_full_eval or self.args.fp16_full_eval:
            faults.append(
                "bf16_full_eval= and fp16_full_eval= convert the model, which is sharded: leave them out, "
                'and plan with OSDP(..., param_dtype="bfloat16")'
            )
        if self.args.optim == "adafactor":
            faults.append(
                "optim='adafactor' steps by rows and columns of whole matrices, which it does not have here: "
                "choose one of torch.optim, such as adamw_torch"
            )
        if self.args.load_best_model_at_end and self.args.save_only_model and self._has_adapters:
            faults.append(
                "load_best_model_at_end reads adapters by shards, which save_only_model does not save: leave "
                "one of the two out"
            )
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def _has_adapters(self) -> bool:
        return hasattr(self.osdp.module, "peft_config")

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """It is where its mesh is."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        del model, training, dataloader
        return self.osdp

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer, with the same parameter groups under every plan, so that its states load."""
        is_given = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        if not is_given:
            _join_equal_groups(optimizer)
        return optimizer

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        # An integer: floating-point inputs of the model are cast to param_dtype. Of bfloat16, 257 would be
        # 256; of float16, more than 65504 would be infinite, and the loss divided by it zero.
        count = super()._get_num_items_in_batch(batch_samples, device)
        return count.long() if isinstance(count, torch.Tensor) else count

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self._clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        # An infinite bound clips nothing.
        return float(self._clip(float("inf")) if grad_norm is None else grad_norm)

    def _clip(self, max_norm: float) -> torch.Tensor:
        self.accelerator.unscale_gradients()
        return self.osdp.clip_grad_norm_(max_norm)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save all; what goes wrong on one rank is raised on all, which would wait for it."""
        fault: Exception | None = None
        try:
            super()._save_checkpoint(model, trial)
        except Exception as error:  # of whatever is saved
            fault = error
        raise_together(fault)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = output_dir or str(self.args.output_dir)
        save_pretrained(self.osdp, folder)

        def write() -> None:
            processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if processor is not None:
                processor.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))

        self._write_or_raise_together(write, folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(Path(output_dir) / STATE_FOLDER, self.osdp, self._bare_optimizer)

        def write() -> None:
            if self.lr_scheduler is not None:
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

        self._write_or_raise_together(write, output_dir)

    def _write_or_raise_together(self, write: Callable[[], None], folder: str) -> None:
        """Call ``write`` on the ranks that write files; what it raises is raised on all, which would wait."""
        fault: Exception | None = None
        try:
            if self.args.should_save:
                write()
        except Exception as error:  # a tokenizer may raise anything; the other ranks wait in any case
            fault = error
        raise_together(fault, f"{folder} is not complete")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Only check that all is there: it is loaded when there is an optimizer."""
        folder = Path(resume_from_checkpoint)
        lacks = [name for name in (STATE_FOLDER, SCHEDULER_NAME) if not (folder / name).exists()]
        fault: Exception | None = None
        if lacks:
            fault = ValueError(
                f"{folder} cannot be resumed from: it has no {' and no '.join(lacks)}, which OSDPTrainer "
                "saves unless save_only_model is set; its weights alone load by model.load_pretrained(folder)"
            )
        else:
            try:
                self._saved_scheduler(resume_from_checkpoint)
            except Exception as error:  # a damaged file raises whatever its bytes lead to
                fault = ValueError(f"{folder / SCHEDULER_NAME} cannot be read: {error}")
        raise_together(fault)

    @staticmethod
    def _saved_scheduler(checkpoint: str) -> Any:
        return torch.load(os.path.join(checkpoint, SCHEDULER_NAME), map_location="cpu", weights_only=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        load(Path(checkpoint) / STATE_FOLDER, self.osdp, self._bare_optimizer)
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(self._saved_scheduler(checkpoint))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert best is not None  # the caller has found it
        if self._has_adapters:
            # Its weights in the format of Hugging Face are those of the adapters alone.
            load(Path(best) / STATE_FOLDER, self.osdp)
        else:
            self.osdp.load_pretrained(best)

    @property
    def _bare_optimizer(self) -> torch.optim.Optimizer:
        found: Any = self.optimizer
        bare: torch.optim.Optimizer = getattr(found, "optimizer", found)
        return bare


def _save_inside(model: OSDP, folder: str | Path, **options: Any) -> None:
    """``save_pretrained`` of the model inside: the wrapper's, or its own with a ``state_dict`` given."""
    if options.get("state_dict") is None:
        model.save_pretrained(folder, **options)
    else:
        own: Any = type(model.module)
        own.save_pretrained(model.module, folder, **options)


def _undo_autocast(module: Any) -> None:
    """Undo what ``prepare_model`` of an earlier Trainer has done to the forward of a model."""
    if vars(module).pop("_original_forward", None) is not None:
        vars(module).pop("forward", None)
    module._is_accelerate_prepared = False


def _predicts_next_tokens(module: Any) -> bool:
    """Whether labels of a model are those of the next positions, by the list that the Trainer goes by."""
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    return type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _join_equal_groups(optimizer: torch.optim.Optimizer) -> None:
    """Join groups with the same options: the Trainer has one for each device mesh, which plans decide on."""
    joined: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        same = next((g for g in joined if {n: v for n, v in g.items() if n != "params"} == options), None)
        if same is None:
            joined.append(group)
        else:
            same["params"] += group["params"]
    optimizer.param_groups[:] = joined
