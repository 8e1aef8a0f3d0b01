"""A model with its devices on the command line: a described folder, or a name and ``--devices``."""

import difflib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from osdp import codec
from osdp.cli.models import (
    DEVICE,
    MODEL,
    PROFILE,
    TRAINING,
    build,
    parse_fields,
    require_described,
    require_whole,
)
from osdp.cluster.known_transformers import SHAPES
from osdp.hardware.device_info import DeviceInfo
from osdp.hardware.profile import Profile
from osdp.model.description import ModelDesc
from osdp.model.training import Training
from osdp.text import parse_bytes


@dataclass(frozen=True, kw_only=True)
class DescribeOptions:
    """Options of a model that is described on the spot, for devices that are not at hand."""

    devices: Annotated[
        str | None,
        Option(help='devices to plan for: "8 x A100-80GB", or "4 x 8 x H100, 400 Gbit/s" with the network'),
    ] = None
    batch: Annotated[int | None, Option(min=1, help="samples per device in a microbatch, 1 by default")] = (
        None
    )
    seq: Annotated[int | None, Option(min=1, help="tokens per sample; by default the model's own")] = None
    fields: Annotated[list[str], Option("--set", help="set a configuration field, for example n_layer=4")] = (
        field(default_factory=list)
    )
    optimizer: Annotated[str | None, Option(help="a class in torch.optim; by default AdamW")] = None
    param_dtype: Annotated[
        str | None, Option(help="dtype to compute in; by default bfloat16, or float16 where GPUs lack it")
    ] = None
    memory_limit: Annotated[str | None, Option(help="memory limit per device, for example 8GiB")] = None

    def given(self) -> list[str]:
        """Options that only a model that is described on the spot takes."""
        found = {"--devices": self.devices, "--batch": self.batch, "--seq": self.seq, "--set": self.fields}
        found |= {"--optimizer": self.optimizer, "--param-dtype": self.param_dtype}
        return [name for name, value in found.items() if value]


@dataclass(frozen=True)
class Described:
    """What a plan is searched from.

    Attributes:
        model_desc: The model.
        device: The devices.
        training: The training.
        profile: Its measured profile; ``None`` if times are to be estimated.
    """

    model_desc: ModelDesc
    device: DeviceInfo
    training: Training
    profile: Profile | None


def from_folder(folder: Path, device: Path | None, memory_limit: str | None) -> Described:
    """A model described in a folder, for the devices described there or in a file.

    Raises:
        ValueError: The folder lacks a file.
    """
    require_described(folder, (MODEL, DEVICE, PROFILE, TRAINING))
    require_whole(folder)
    device_info = DeviceInfo.load(device or folder / DEVICE)
    if memory_limit is not None:
        device_info = replace(device_info, memory_limit=parse_bytes(memory_limit))
    return Described(
        ModelDesc.load(folder / MODEL),
        device_info,
        codec.load(Training, folder / TRAINING),
        Profile.load(folder / PROFILE),
    )


def on_the_spot(name: str, options: DescribeOptions) -> Described:
    """A model by name, described now, for devices that are not at hand.

    Raises:
        ValueError: The model or the devices are unknown, or a sequence is longer than the model's positions.
    """
    from osdp.cluster.devices import device_info_of, parse_devices
    from osdp.tracing.computed_in import describe_computed_in

    if options.devices is None:
        raise ValueError(
            f"{name} is no folder written by osdp profile; to plan for devices that are not at hand, say "
            'which: --devices "8 x A100-80GB"'
        )
    cluster = parse_devices(options.devices)
    device = device_info_of(cluster, options.memory_limit)
    dtype = options.param_dtype or cluster.half
    # What is wrong with these is told before the model is traced.
    training = Training.stepped_by(options.optimizer or "AdamW", param_dtype=dtype)
    module, sample = model_called(name, parse_fields(options.fields), options.batch or 1, options.seq)
    desc = describe_computed_in(module, sample, dtype)
    # The batch of a function's model is its own.
    training = replace(training, local_batch=options.batch or desc.local_batch)
    return Described(desc, device, training, None)


def model_called(name: str, fields: dict[str, Any], batch: int, seq: int | None) -> tuple[Any, Any]:
    """A model on ``meta`` and a sample batch, by a name, a configuration, or a function.

    Args:
        name: As the ``MODEL`` of ``osdp profile``, a folder with a ``config.json``, or a name of the cluster
            planner such as ``llama3-8b``.
        fields: Fields of the configuration to change.
        batch: Samples.
        seq: Tokens per sample; by default as many as the model has positions.

    Raises:
        ValueError: It is unknown; suggests the nearest. Or ``seq`` is longer than the model's positions.
    """
    from transformers import CONFIG_MAPPING

    from osdp.integrations.huggingface.models import GPT2_SIZES, token_batch
    from osdp.integrations.huggingface.shaped_models import model_of_shape

    if Path(name).is_dir():
        name = str(Path(name, "config.json"))
    if ":" in name:
        return build(name, fields, batch, seq)
    if not name.endswith(".json") and name not in GPT2_SIZES and name not in CONFIG_MAPPING:
        if name not in SHAPES:
            known = [*SHAPES, *GPT2_SIZES, *CONFIG_MAPPING]
            nearest = difflib.get_close_matches(name, known, n=3)
            hint = f"; did you mean {' or '.join(nearest)}?" if nearest else "."
            raise ValueError(
                f"unknown model {name!r}{hint} There are {', '.join(SHAPES)}, model types of transformers, "
                "folders with a config.json, and module:function"
            )
        if fields:
            raise ValueError(f"--set changes fields of a configuration, and {name} is a shape: use its type")
        module: Any = model_of_shape(SHAPES[name])
        _check_positions(name, module.config, seq, "")
        return module, token_batch(batch, seq or SHAPES[name].sequence)
    module, _ = build(name, fields, 1, None)
    more = f", or pass --set max_position_embeddings={seq} if the model is to have more"
    positions = _check_positions(name, module.config, seq, more)
    return module, token_batch(batch, seq or positions or 1024)


def _check_positions(name: str, config: Any, seq: int | None, more: str) -> int | None:
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if seq is not None and positions is not None and seq > positions:
        raise ValueError(f"--seq {seq} is longer than the {positions} positions of {name}: shorten it{more}")
    return positions
