"""What trainers of other libraries take for granted: every rank is a data-parallel one that they know of."""

from osdp.wrapper import OSDP


def require_data_parallel(model: OSDP, num_processes: int, trainer: str) -> None:
    """Raise unless the plan of ``model`` has as many ranks as ``trainer`` gives batches to.

    Args:
        model: The wrapped model.
        num_processes: How many processes the trainer sees.
        trainer: Its name, for messages.

    Raises:
        ValueError: The plan has stages or tensor parallelism, whose ranks need the same batches; or another
            number of ranks.
    """
    dims = model.plan.dims
    if dims.pp > 1 or dims.tp > 1:
        raise ValueError(
            f"{trainer} gives each rank batches of its own and calls the whole model; this plan has "
            f"pp={dims.pp} and tp={dims.tp}: plan for data parallelism alone, or use model.train_step"
        )
    if model.plan.dp != num_processes:
        # They would all train on the same batches, or some batches would be nobody's.
        raise ValueError(
            f"{trainer} sees {num_processes} process{'es' * (num_processes != 1)}, and the plan is for "
            f"{model.plan.dp} ranks: launch it by torchrun, and on CPUs tell it so (use_cpu=True of "
            "TrainingArguments, cpu=True of OSDPAccelerator)"
        )
