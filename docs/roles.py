"""For mkdocstrings: cross-references and literal blocks of docstrings, from Sphinx's notation to Markdown."""

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(~?)([\w.]+)`")
_LITERAL = re.compile(r"(?m)[ ]?::$")


def _reference(role: re.Match[str]) -> str:
    """A link where the page has the object, else its name as code."""
    short, name = role.groups()
    shown = name.rpartition(".")[2] if short else name
    return f'<autoref identifier="{name}" optional><code>{shown}</code></autoref>'


class Roles(Extension):
    """Rewrites the docstring of every object that is loaded."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _LITERAL.sub(":", _ROLE.sub(_reference, obj.docstring.value))
