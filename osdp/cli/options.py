"""Options that several commands share, each declared once: alone, or as the fields of a dataclass."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Option

Out = Annotated[Path, Option(help="where to write the result")]
TrustCode = Annotated[
    bool,
    Option("--trust-code", help="allow running the code that a described folder names to build its model"),
]


def flat_options(command: Callable[..., None]) -> Callable[..., None]:
    """Expand each parameter of ``command`` that is a dataclass into one option per field.

    typer derives options from the signature, so the returned function has the expanded one; ``command`` still
    receives the dataclass.
    """
    hints = get_type_hints(command, include_extras=True)
    values = {name: fields(kind) for name, kind in hints.items() if is_dataclass(kind)}
    options = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in values:
            kinds = get_type_hints(hints[name], include_extras=True)
            options += [_option(field.name, _default(field), kinds[field.name]) for field in values[name]]
        else:
            options.append(_option(name, parameter.default, hints[name]))

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        made = {
            name: hints[name](**{field.name: given.pop(field.name) for field in of_value})
            for name, of_value in values.items()
        }
        command(**made, **given)

    flat.__annotations__ = {option.name: option.annotation for option in options}
    flat.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return flat


def _option(name: str, default: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _default(field: "Field[Any]") -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default
