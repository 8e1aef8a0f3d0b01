"""Models as the command line names them: a name, a file, a function, or a folder of ``osdp profile``."""

import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osdp import codec
from osdp.cluster.infer_shape import shape_of_desc, stream_of
from osdp.cluster.known_transformers import SHAPES, changed, shape_from_config, shape_of
from osdp.cluster.layer_profile import LayerProfile, layer_profile
from osdp.cluster.transformer import TransformerShape
from osdp.codec import parse_json, quote, read_json
from osdp.hardware.profile import Profile
from osdp.model.description import ModelDesc
from osdp.model.training import Training

if TYPE_CHECKING:
    from torch import nn

#: Where the model of a folder came from: stages are cut by following it once more.
SOURCE = "source.json"
MODEL, DEVICE, PROFILE, TRAINING = (
    f"{name}.json" for name in ("model_desc", "device", "profile", "training")
)

#: Tokens of a batch that is made to follow a model through.
_MOST_TOKENS = 2**28

#: Fields of a shape that a description does not tell.
_TOLD = {"heads", "causal"}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What ``osdp profile`` was asked to describe.

    Attributes:
        model: As its ``MODEL``.
        fields: As its ``--set``.
        batch: Samples of the batch.
        seq: Tokens of a sample.
        tp: Of how many ranks that compute a layer together one was described.
    """

    model: str
    fields: tuple[str, ...]
    batch: int
    seq: int
    tp: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1 or self.seq < 1 or self.tp < 1 or self.batch * self.seq > _MOST_TOKENS:
            raise ValueError(
                f"a batch of {self.batch} x {self.seq} tokens on tp={self.tp} cannot be; each is at least 1, "
                f"and there are at most {_MOST_TOKENS} tokens"
            )

    @property
    def is_made(self) -> bool:
        """Whether a function made the model, and its batch."""
        return ":" in self.model


def build(name: str, fields: dict[str, Any], batch: int, seq: int) -> "tuple[nn.Module, Any]":
    """The model called ``name`` and a sample batch for it.

    Args:
        name: As the ``MODEL`` of ``osdp profile``.
        fields: Configuration fields to override.
        batch: Samples of the batch.
        seq: Tokens of a sample.

    Raises:
        ValueError: The model or a field is unknown, or a factory was given fields.
    """
    from osdp.integrations.huggingface.models import language_model, token_batch

    module, _, factory = name.partition(":")
    if factory:
        if fields:
            raise ValueError(
                f"{name} makes its own configuration; --set {', '.join(fields)} has no effect on it"
            )
        # A console script does not search the current folder.
        sys.path.insert(0, os.getcwd())
        return _made(name, getattr(importlib.import_module(module), factory, None))
    if name.endswith(".json"):
        content = read_json(name)
        if not isinstance(content, dict):
            raise ValueError(f"{name}: must be an object with a configuration, got {quote(content)}")
        fields = {**content, **fields}
        name = str(fields.pop("model_type", ""))
    return language_model(name, fields), token_batch(batch, seq)


def _made(name: str, factory: Any) -> "tuple[nn.Module, Any]":
    """What the function called ``name`` makes."""
    if not callable(factory):
        raise ValueError(f"{name} is no function: MODEL is module:function, which returns (model, batch)")
    made = factory()
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(f"{name}() returned {quote(made)}; it is to return (model, sample batch)")
    return made


def parse_fields(texts: Sequence[str]) -> dict[str, Any]:
    """Pairs of ``name=value``, whose values are JSON or else text."""
    pairs = [text.partition("=") for text in texts]
    if wrong := [text for text, (_, equals, _) in zip(texts, pairs, strict=True) if not equals]:
        raise ValueError(f"--set takes name=value, got {', '.join(wrong)}")
    return {name: _parse_value(value) for name, _, value in pairs}


def _parse_value(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return text


def described_model(
    described: Path, batch: int | None = None, seq: int | None = None, *, trust_code: bool = False
) -> "tuple[nn.Module, Any]":
    """The model that was described in a folder, and a sample batch, by default the one it was described with.

    Args:
        described: A folder that ``osdp profile`` wrote.
        batch: Samples of the batch.
        seq: Tokens of a sample.
        trust_code: Whether code that the folder names may be imported and run.

    Raises:
        ValueError: The folder does not say where the model came from, its own function makes the batch and
            another was asked for, or it names code that is not trusted.
    """
    require_whole(described)
    source = _source(described)
    if not trust_code:
        require_no_code(described)
    if source.is_made:
        samples, tokens = stream_of(ModelDesc.load(described / MODEL)).shape[:2]
        if (batch or samples, seq or tokens) != (samples, tokens):
            raise ValueError(
                f"{source.model} makes batches of {samples} x {tokens} tokens itself, and "
                f"{batch or samples} x {seq or tokens} were planned: say --micro-batch {samples} "
                f"--seq {tokens}, or let it make those"
            )
    return build(source.model, parse_fields(source.fields), batch or source.batch, seq or source.seq)


def require_no_code(described: Path) -> None:
    """Refuse a folder whose model cannot be built without running code that the folder names.

    Raises:
        ValueError: It names a function, or code to fetch; says which, and how to trust it.
    """
    source = _source(described)
    if source.is_made:
        code = f"the function {source.model}, imported from the current folder or where Python finds it"
    else:
        # Transformers fetches kernels for attention and experts from wherever such a field says.
        fetched = [field for field in source.fields if _is_address(parse_fields([field]))]
        if not fetched:
            return
        code = f"code that transformers fetches for {quote(fetched[0])}"
    raise ValueError(
        f"building the model of {described} runs {code}: if you trust that code say --trust-code, in Python "
        "trust_code=True"
    )


def _is_address(value: Any, name: str = "") -> bool:
    """Whether a field of a configuration, or one inside it, says where an implementation is to come from."""
    if isinstance(value, dict):
        return any(_is_address(inner, str(key) or name) for key, inner in value.items())
    return isinstance(value, str) and "implementation" in name and bool(set(value) & set("/:"))


def is_folder(name: str) -> bool:
    """Whether a model is one that was described in a folder; published names come first."""
    return name not in SHAPES and Path(name).is_dir()


def model_label(name: str) -> str:
    """What the shape of a model is called that ``--model`` names."""
    if is_folder(name):
        return _source(Path(name)).model
    return Path(name).stem if name.endswith(".json") else name


def changed_fields(name: str, fields: Iterable[str]) -> set[str]:
    """Which of the fields make another model: what its weights do not tell of a described one does not."""
    told = _TOLD if is_folder(name) and _source(Path(name)).is_made else set()
    return set(fields) - told


def require_described(folder: Path, names: Sequence[str]) -> None:
    """Refuse a path that is no folder with the files that are needed of it."""
    missing = [name for name in names if not Path(folder, name).is_file()]
    if missing:
        raise ValueError(f"{folder} is no folder that osdp profile wrote: it has no {', '.join(missing)}")


def require_whole(described: Path) -> None:
    """Refuse a folder with what one of several tensor-parallel ranks computes."""
    tp = _source(described).tp
    if tp > 1:
        raise ValueError(
            f"{described} has the part of one of {tp} tensor-parallel ranks, for osdp cluster layers: "
            "to plan for the model describe all of it, without --tp"
        )


def measured_layers(described: Path, gpu: str, model: str) -> LayerProfile:
    """What was measured of the layers of a folder's model.

    See :func:`osdp.cluster.layer_profile.layer_profile`.
    """
    require_described(described, (MODEL, PROFILE, TRAINING))
    training = codec.load(Training, described / TRAINING)
    return layer_profile(
        ModelDesc.load(described / MODEL),
        Profile.load(described / PROFILE),
        gpu,
        model,
        tp=_source(described).tp,
        dtype=training.param_dtype,
    )


def _source(described: Path) -> ModelSource:
    if not Path(described, SOURCE).exists():
        raise ValueError(f"{described} does not say where its model came from; run osdp profile again")
    return codec.load(ModelSource, described / SOURCE)


def named_shape(name: str, overrides: Mapping[str, Any], *, trust_code: bool = False) -> TransformerShape:
    """The shape of a model described in a folder, or as :func:`osdp.cluster.known_transformers.shape_of`.

    Args:
        name: A folder that ``osdp profile`` wrote, a name or a JSON file.
        overrides: Fields of the shape to change; of a model that a function made ``heads`` and ``causal``,
            which its description does not tell.
        trust_code: Whether code that a folder names may be run, where that is needed.

    Raises:
        ValueError: The model or a field is unknown, a field is needed, or code is not trusted.
    """
    if not is_folder(name):
        return shape_of(name, overrides)
    folder = Path(name)
    require_described(folder, (MODEL,))
    require_whole(folder)
    source = _source(folder)
    if not source.is_made:
        model, _ = described_model(folder, trust_code=trust_code)
        config: Any = model.config
        shape = shape_from_config(config.to_dict(), source.model, source.seq)
        return changed(shape, {"sequence": source.seq, **overrides})
    if missing := [f"--set {field}=..." for field in sorted(_TOLD) if field not in overrides]:
        raise ValueError(
            f"the weights of {source.model} do not tell all, and nothing is assumed: say "
            f"{' and '.join(missing)}"
        )
    heads, causal = overrides["heads"], overrides["causal"]
    if type(heads) is not int or type(causal) is not bool:
        raise ValueError(f"heads is a number and causal true or false, got {heads!r} and {causal!r}")
    desc = ModelDesc.load(folder / MODEL)
    shape = shape_of_desc(desc, heads=heads, causal=causal, name=source.model)
    return changed(shape, {key: value for key, value in overrides.items() if key not in _TOLD})
