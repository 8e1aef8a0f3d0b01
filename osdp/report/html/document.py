"""A self-contained HTML file with tabs, tables that sort and charts; what it says is the caller's."""

import base64
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources

from osdp.report.html.charts import Chart


def html_document(
    title: str, first_screen: str, tabs: Sequence[tuple[str, str]], charts: Mapping[str, Chart]
) -> str:
    """One HTML file that needs no network.

    Args:
        title: Its title, as plain text.
        first_screen: HTML above the tabs.
        tabs: Name and HTML of each tab.
        charts: Charts by the names that :func:`chart` puts into the tabs.

    Raises:
        ImportError: plotly is not installed.
    """
    return "".join(
        [
            '<!doctype html><html lang="en" style="color-scheme: light dark"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<title>{escape(title)}</title><style>{style()}</style></head><body class="osdp">',
            f"<h1>{escape(title)}</h1>",
            first_screen,
            _tabs(tabs),
            f'<script type="application/json" id="charts">{_json(charts)}</script>',
            f'<script type="text/plain" id="plotly">{_plotly()}</script>',
            f"<script>{_resource('page.js')}</script></body></html>\n",
        ]
    )


def style() -> str:
    """The style sheet of all pages."""
    return _resource("page.css")


def cards(facts: Iterable[tuple[str, str]]) -> str:
    """Cards of the first screen, from their heads and HTML."""
    found = "".join(f'<div class="fact"><span class="soft">{head}</span>{body}</div>' for head, body in facts)
    return f'<div class="facts">{found}</div>'


def chart(name: str) -> str:
    """The place of a chart."""
    return f'<div class="chart" data-chart="{name}"></div>'


def table(heads: Iterable[tuple[str, bool]], rows: Iterable[Sequence[tuple[str, str | None]]]) -> str:
    """A table that sorts; a cell is HTML and, where it is a number, that number."""
    head = "".join(
        f"<th data-sort{' class=number' if numeric else ''}>{name}</th>" for name, numeric in heads
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td>{text}</td>" if value is None else f'<td class="number" data-value="{value}">{text}</td>'
            for text, value in row
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _tabs(tabs: Sequence[tuple[str, str]]) -> str:
    heads, panels = [], []
    for index, (name, content) in enumerate(tabs):
        selected = "true" if index == 0 else "false"
        heads.append(
            f'<button role="tab" id="tab{index}" aria-controls="panel{index}" aria-selected="{selected}" '
            f'tabindex="{-1 if index else 0}" data-name="{name.lower().replace(" ", "-")}">{name}</button>'
        )
        hidden = "" if index == 0 else " hidden"
        panels.append(
            f'<section role="tabpanel" id="panel{index}" aria-labelledby="tab{index}"{hidden}>'
            f"{content}</section>"
        )
    return f'<div role="tablist">{"".join(heads)}</div>{"".join(panels)}'


def _json(charts: Mapping[str, Chart]) -> str:
    # A name in the model must not end the script.
    return json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _resource(name: str) -> str:
    return resources.files("osdp.report.html").joinpath(name).read_text(encoding="utf8")


def _plotly() -> str:
    """The source of plotly.js, packed: it is most of the file."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("HTML reports need plotly: pip install 'osdp[report]'", name="plotly") from error
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 6, mtime=0)).decode()
