"""A page in headless Chromium, as a person would look at it."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt-get install --no-install-recommends chromium"
)


_FRAME = """<!doctype html><html><body style="margin:0">
<iframe src="{page}" style="border:0;width:{width}px;height:1600px"></iframe>
<script>
window.addEventListener("message", (event) => {{
  const place = document.createElement("pre");
  place.id = "answer";
  place.textContent = event.data;
  document.body.append(place);
}});
</script></body></html>"""


def look_at(page: Path, script: str, width: int = 1400, *, dark: bool = False) -> Any:
    """What ``script`` returns in ``page``, once its charts are there; with what the console was told.

    Args:
        page: The file.
        script: Body of an asynchronous function in JavaScript that returns plain data.
        width: Width of the window.
        dark: Whether the reader prefers the dark.

    Returns:
        ``{"answer": ..., "errors": [...]}``.
    """
    assert CHROMIUM is not None
    # The script runs inside a copy of the page, and leaves its answer in the document that is dumped.
    probe = """
    <script>
    const osdpErrors = [];
    window.addEventListener("error", (event) => osdpErrors.push(event.message));
    window.addEventListener("unhandledrejection", (event) => osdpErrors.push(String(event.reason)));
    const osdpTold = console.error;
    console.error = (...words) => { osdpErrors.push(words.join(" ")); osdpTold(...words); };
    </script>
    """
    ask = """
    <script>
    (async () => {
      const wait = () => new Promise((go) => setTimeout(go, 20));
      while (!document.body.dataset.ready && !osdpErrors.length) await wait();
      let answer = null;
      try { answer = await (async () => { %s })(); } catch (error) { osdpErrors.push(String(error)); }
      window.parent.postMessage(JSON.stringify({ answer, errors: osdpErrors }), "*");
    })();
    </script>
    """
    html = page.read_text(encoding="utf8")
    head, body, rest = html.partition('<body class="osdp">')
    # Windows of Chromium are 500 pixels wide at least, frames in them are not.
    frame = page.with_name(f"frame-{page.name}")
    frame.write_text(_FRAME.format(width=width, page=f"asked-{page.name}"), encoding="utf8")
    asked = page.with_name(f"asked-{page.name}")
    asked.write_text(head + probe + body + rest.replace("</body>", ask % script + "</body>"), encoding="utf8")
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
        f"--window-size={max(width, 500)},1600", "--virtual-time-budget=20000",
        f"--user-data-dir={page.parent / 'profile'}",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []), frame.absolute().as_uri(),
    ]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    told = found.rpartition('<pre id="answer">')[2].partition("</pre>")[0]
    plain = told.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")
    return json.loads(plain)
