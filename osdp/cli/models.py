"""Models on the command line: a name, a file, a function, or a folder written by ``osdp profile``."""

import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osdp import codec
from osdp.cluster.infer_shape import shape_of_desc, stream_of
from osdp.cluster.known_transformers import SHAPES, shape_from_config, shape_of, with_fields
from osdp.cluster.layer_profile import LayerProfile, layer_profile
from osdp.cluster.transformer import TransformerShape
from osdp.codec import parse_json, quote, read_json
from osdp.hardware.profile import Profile
from osdp.model.description import ModelDesc
from osdp.model.training import Training

if TYPE_CHECKING:
    from torch import nn

#: How the model of a folder was made; stages are found by tracing it again.
SOURCE = "source.json"
#: The configuration that it was made from, where that was a file.
CONFIGURATION = "source_config.json"
MODEL, DEVICE, PROFILE, TRAINING = (
    f"{name}.json" for name in ("model_desc", "device", "profile", "training")
)

#: Maximum number of tokens in the batch that a model is traced with.
_MOST_TOKENS = 2**28

#: Fields of a shape that cannot be inferred from the weights.
_NOT_IN_WEIGHTS = {"heads", "causal"}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The arguments of ``osdp profile`` that a model was described with.

    Attributes:
        model: Its ``MODEL``.
        fields: Its ``--set`` options.
        batch: Samples in the batch.
        seq: Tokens per sample.
        tp: Tensor-parallel degree; if above 1, the folder describes one rank's part.
    """

    model: str
    fields: tuple[str, ...]
    batch: int
    seq: int
    tp: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1 or self.seq < 1 or self.tp < 1 or self.batch * self.seq > _MOST_TOKENS:
            raise ValueError(
                f"batch={self.batch}, seq={self.seq} and tp={self.tp} must be at least 1, and a batch "
                f"may have at most {_MOST_TOKENS} tokens"
            )

    @property
    def is_from_function(self) -> bool:
        """Whether the model and its batch come from a function."""
        return ":" in self.model


#: Tokens per sample where they are not given.
TOKENS = 1024


def build(name: str, fields: dict[str, Any], batch: int, seq: int | None) -> "tuple[nn.Module, Any]":
    """The model called ``name`` and a sample batch for it.

    Args:
        name: As the ``MODEL`` of ``osdp profile``.
        fields: Configuration fields to override.
        batch: Samples in the batch; that of a function's model is its own.
        seq: Tokens per sample, by default :data:`TOKENS`.

    Raises:
        ValueError: The model or a field is unknown, or fields or tokens were given for a function's model.
    """
    from osdp.integrations.huggingface.models import language_model, token_batch

    module, _, factory = name.partition(":")
    if factory:
        if fields:
            raise ValueError(
                f"{name} creates its own configuration: --set {', '.join(fields)} would have no effect"
            )
        if seq is not None:
            raise ValueError(f"{name} creates its own batch: --seq {seq} would have no effect")
        # Python does not search the current folder for a console script.
        sys.path.insert(0, os.getcwd())
        return _call_factory(name, getattr(importlib.import_module(module), factory, None))
    if name.endswith(".json"):
        content = read_json(name)
        if not isinstance(content, dict):
            raise ValueError(f"{name}: must be a JSON object with a configuration, got {quote(content)}")
        kind = {**content, **fields}.get("model_type")
        if not kind:
            raise ValueError(f"{name}: has no model_type, which says what model of transformers it is")
        published = {key: value for key, value in content.items() if key != "model_type"}
        fields = {key: value for key, value in fields.items() if key != "model_type"}
        return language_model(str(kind), fields, published), token_batch(batch, seq or TOKENS)
    return language_model(name, fields), token_batch(batch, seq or TOKENS)


def _call_factory(name: str, factory: Any) -> "tuple[nn.Module, Any]":
    """Call ``factory``, which is called ``name`` in messages, and check what it returns."""
    if not callable(factory):
        raise ValueError(f"{name} is not a function: module:function must return (model, sample batch)")
    made = factory()
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(f"{name}() returned {quote(made)}; it must return (model, sample batch)")
    return made


def parse_fields(texts: Sequence[str]) -> dict[str, Any]:
    """Parse pairs of ``name=value``; a value that is not JSON is text."""
    pairs = [text.partition("=") for text in texts]
    if wrong := [text for text, (_, equals, _) in zip(texts, pairs, strict=True) if not equals]:
        raise ValueError(f"--set takes name=value, got {', '.join(wrong)}")
    return {name: _parse_value(value) for name, _, value in pairs}


def _parse_value(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return text


def load_described_model(
    described: Path, batch: int | None = None, seq: int | None = None, *, trust_code: bool = False
) -> "tuple[nn.Module, Any]":
    """Build the model described in a folder, and a sample batch, by default of the described size.

    Args:
        described: A folder written by ``osdp profile``.
        batch: Samples in the batch.
        seq: Tokens per sample.
        trust_code: Whether code that the folder names may be imported and run.

    Raises:
        ValueError: The folder does not record how the model was made, its function makes batches of another
            size, or it names code that is not trusted.
    """
    require_whole(described)
    source = described_source(described)
    if not trust_code:
        require_no_code(described)
    if source.is_from_function:
        samples, tokens = stream_of(ModelDesc.load(described / MODEL)).shape[:2]
        if (batch or samples, seq or tokens) != (samples, tokens):
            raise ValueError(
                f"{source.model} makes batches of {samples} x {tokens} tokens, but the plan is for "
                f"{batch or samples} x {seq or tokens}: pass --micro-batch {samples} --seq {tokens}, or "
                "change the function"
            )
        return build(source.model, parse_fields(source.fields), samples, None)
    name = _name_in(described, source)
    return build(name, parse_fields(source.fields), batch or source.batch, seq or source.seq)


def _name_in(described: Path, source: ModelSource) -> str:
    """The ``MODEL`` of a folder: its copy of a configuration, whose file may be elsewhere, or another."""
    copy = Path(described, CONFIGURATION)
    return str(copy) if source.model.endswith(".json") and copy.is_file() else source.model


def require_no_code(described: Path) -> None:
    """Refuse a folder whose model cannot be built without running code that the folder names.

    Raises:
        ValueError: It names a function, or code to download; the message names it and how to allow it.
    """
    source = described_source(described)
    if source.is_from_function:
        code = f"the function {source.model}, imported from the current folder or the Python path"
    else:
        # Transformers downloads kernels for attention and experts from the address in such a field.
        fetched = [field for field in source.fields if _is_address(parse_fields([field]))]
        name = _name_in(described, source)
        if name.endswith(".json") and _is_address(read_json(name)):
            fetched.append(Path(name).name)
        if not fetched:
            return
        code = f"code that transformers downloads for {quote(fetched[0])}"
    raise ValueError(
        f"building the model of {described} runs {code}: if you trust that code, pass --trust-code (in "
        "Python: trust_code=True)"
    )


def _is_address(value: Any, name: str = "") -> bool:
    """Whether a field of a configuration, or one inside it, is the address of an implementation."""
    if isinstance(value, dict):
        return any(_is_address(inner, str(key) or name) for key, inner in value.items())
    return isinstance(value, str) and "implementation" in name and bool(set(value) & set("/:"))


def is_folder(name: str) -> bool:
    """Whether ``name`` is a folder with a described model; names of published models take precedence."""
    return name not in SHAPES and Path(name).is_dir()


def model_label(name: str) -> str:
    """Name of the shape of the model given as ``--model``."""
    if is_folder(name):
        return described_source(Path(name)).model
    return Path(name).stem if name.endswith(".json") else name


def changed_fields(name: str, fields: Iterable[str]) -> set[str]:
    """The fields that change the model; those that only add what the weights leave open do not."""
    free = _NOT_IN_WEIGHTS if is_folder(name) and described_source(Path(name)).is_from_function else set()
    return set(fields) - free


def require_described(folder: Path, names: Sequence[str]) -> None:
    """Refuse a path that is not a folder with all files in ``names``."""
    missing = [name for name in names if not Path(folder, name).is_file()]
    if missing:
        raise ValueError(f"{folder} is not a folder written by osdp profile: it has no {', '.join(missing)}")


def require_whole(described: Path) -> None:
    """Refuse a folder that describes the part of one tensor-parallel rank."""
    tp = described_source(described).tp
    if tp > 1:
        raise ValueError(
            f"{described} describes the part of one of {tp} tensor-parallel ranks, which only osdp cluster "
            "layers reads: to plan for the whole model, profile it without --tp"
        )


def load_layer_profile(described: Path, gpu: str, model: str) -> LayerProfile:
    """Load the measured times of layers of the model described in a folder.

    See :func:`osdp.cluster.layer_profile.layer_profile`.
    """
    require_described(described, (MODEL, PROFILE, TRAINING))
    training = codec.load(Training, described / TRAINING)
    return layer_profile(
        ModelDesc.load(described / MODEL),
        Profile.load(described / PROFILE),
        gpu,
        model,
        tp=described_source(described).tp,
        dtype=training.param_dtype,
    )


def described_source(described: Path) -> ModelSource:
    """How the model of a folder was made.

    Raises:
        ValueError: The folder does not record it.
    """
    if not Path(described, SOURCE).exists():
        raise ValueError(f"{described} does not record how its model was made: run osdp profile again")
    return codec.load(ModelSource, described / SOURCE)


def resolve_shape(name: str, overrides: Mapping[str, Any], *, trust_code: bool = False) -> TransformerShape:
    """The shape of a model described in a folder, or as :func:`osdp.cluster.known_transformers.shape_of`.

    Args:
        name: A folder written by ``osdp profile``, a name or a JSON file.
        overrides: Fields of the shape to change; for a function's model also ``heads`` and ``causal``, which
            its weights leave open.
        trust_code: Whether code that a folder names may be run if needed.

    Raises:
        ValueError: The model or a field is unknown, a field is missing, or code is not trusted.
    """
    if not is_folder(name):
        return shape_of(name, overrides)
    folder = Path(name)
    require_described(folder, (MODEL,))
    require_whole(folder)
    source = described_source(folder)
    if not source.is_from_function:
        model, _ = load_described_model(folder, trust_code=trust_code)
        config: Any = model.config
        shape = shape_from_config(config.to_dict(), source.model, source.seq)
        return with_fields(shape, {"sequence": source.seq, **overrides})
    if missing := [f"--set {field}=..." for field in sorted(_NOT_IN_WEIGHTS) if field not in overrides]:
        raise ValueError(
            f"the weights of {source.model} do not determine its whole shape, and nothing is assumed: pass "
            f"{' and '.join(missing)}"
        )
    heads, causal = overrides["heads"], overrides["causal"]
    if type(heads) is not int or type(causal) is not bool:
        raise ValueError(f"heads must be an integer and causal true or false, got {heads!r} and {causal!r}")
    desc = ModelDesc.load(folder / MODEL)
    shape = shape_of_desc(desc, heads=heads, causal=causal, name=source.model)
    return with_fields(shape, {key: value for key, value in overrides.items() if key not in _NOT_IN_WEIGHTS})
