"""Checks that a model to wrap is plain, and the guard against torch's own wrappers on a wrapped model."""

import inspect
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

_WRAPPERS = (FSDPModule, FullyShardedDataParallel, DistributedDataParallel, DataParallel)


def refuse_wrapper(wrapper: str) -> NoReturn:
    """Refuse that one of torch's wrappers is put around a model under a plan, or a module of it.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        f"an OSDP model was given to {wrapper}: it is data parallel already, and its gradients would be "
        "reduced twice; train it as it is, and wrap it last and alone. In place of Trainer and Accelerator, "
        "which do so, there are osdp.integrations.huggingface.trainer.OSDPTrainer and "
        "osdp.integrations.accelerate.OSDPAccelerator"
    )


class Wrapped:
    """Base class of a module that runs another under a plan; torch's wrappers refuse it under every plan.

    They first read or set these attributes, which no other model has, and so reach the errors here.
    """

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        refuse_wrapper("DistributedDataParallel")

    @property
    def _is_fsdp_managed_module(self) -> bool:
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, _: bool) -> NoReturn:
        refuse_wrapper("fully_shard")

    def _replicate_for_data_parallel(self) -> NoReturn:
        refuse_wrapper("DataParallel")

    def _check_alone(self) -> None:
        """Raise if a module around this one is wrapped in DDP, which checks only the outermost module."""
        outer: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if outer is not None and any(module is self for module in outer.modules()):
            refuse_wrapper("DistributedDataParallel")


def check_plain(model: nn.Module) -> None:
    """Raise unless ``model`` is a plain module all of whose submodules can run under any plan.

    Raises:
        ValueError: It is wrapped already, or a submodule is TorchScript, has a dot in a registered name, or
            computes after its forward has returned; names that submodule. Or two parameters share memory.
    """
    for fqn, module in model.named_modules():
        fault = _fault(fqn or "the root", module)
        if fault is not None:
            raise ValueError(fault)
    _refuse_common_memory(model)
    tensor_parallel = {id(parameter) for parameter in sharded_parameters(model)}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and id(parameter) not in tensor_parallel:
            raise ValueError(
                f"the model is wrapped already: {name} is a DTensor, by parallelize_module "
                "or fully_shard; wrap the plain model once, and pass tp= for tensor parallelism"
            )


def _refuse_common_memory(model: nn.Module) -> None:
    """Raise if two parameters, one of them trained, begin at one place in memory.

    They would be one where a plan replicates them.

    Raises:
        ValueError: Two do; names them.
    """
    found: dict[tuple[torch.device, int], tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        # Parameters without elements, on meta, or whose memory was freed have no address.
        address = parameter.data_ptr() if type(parameter) is nn.Parameter and parameter.numel() else 0
        own = name, parameter
        other, earlier = found.setdefault((parameter.device, address), own) if address else own
        # Those that are both frozen stay equal in whatever memory.
        if other != name and (parameter.requires_grad or earlier.requires_grad):
            raise ValueError(
                f"{other} and {name} are two parameters in one memory, as a.data = b.data leaves them or two "
                "nn.Parameter of one tensor: sharded they would be trained apart. Tie them as one parameter "
                "(a.weight = b.weight), or give each a tensor of its own (nn.Parameter(tensor.clone()))"
            )


def _fault(where: str, module: nn.Module) -> str | None:
    if isinstance(module, (*_WRAPPERS, Wrapped)):
        kind = type(module).__name__
        article = "an" if kind[0] in "AEIO" else "a"
        return f"the model is wrapped already: {where} is {article} {kind}; wrap the plain model once"
    if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
        return f"{where} is a TorchScript module, whose parameters cannot be sharded; wrap the eager one"
    dotted = next((name for name in _registered(module) if "." in name), None)
    if dotted is not None:
        return f"{where} registers {dotted!r}, and a dot separates the names of modules; rename it"
    if _runs_late(module):
        return (
            f"the forward of {where}, of type {type(module).__name__}, is a generator or coroutine: it would "
            "compute after it has returned, when sharded weights are freed again; return a list, say"
        )
    return None


def _registered(module: nn.Module) -> Iterator[str]:
    if not isinstance(module, torch.jit.ScriptModule):
        yield from (*module._modules, *module._parameters, *module._buffers)


def _runs_late(module: nn.Module) -> bool:
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(runs_late(module.forward) for runs_late in kinds)


def sharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the tensor-parallel modules of ``model``, including replicated ones."""
    parts = (module for module in model.modules() if "part" in module.__dict__)
    return [parameter for module in parts for parameter in module.parameters(recurse=False)]
