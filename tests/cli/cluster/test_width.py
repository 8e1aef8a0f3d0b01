"""What ``osdp cluster`` prints is at most 110 columns wide: commands of the documentation, and wider ones."""

import re
import shlex
from pathlib import Path

import pytest

from osdp.text import WIDTH
from tests.cli.test_main import run

_PAGE = Path(__file__).resolve().parents[3] / "docs" / "cluster_planner.md"
_TEXT = _PAGE.read_text(encoding="utf8")
_CLUSTER = re.findall(r"^```yaml\n(.*?)^```$", _TEXT, re.M | re.S)[0]
#: The commands that need no file but the cluster's.
COMMANDS = [
    line
    for line in re.findall(r"^    osdp (cluster (?:plan|estimate) .*)$", _TEXT, re.M)
    if "..." not in line
]
#: Names and layouts that the documentation does not show; the last one does not fit.
_WIDE = """
nodes:
  - {gpu: A100-80GB, count: 3, devices: 8, network: 100 Gbit/s, name: the-large-ones-on-the-second-floor}
  - {gpu: A10, count: 2, devices: 4, network: 40 Gbit/s, name: spot}
"""
OTHERS = [
    "cluster plan --model llama2-13b --cluster wide.yaml --global-batch 64 --micro-batch 1 --top 4",
    "cluster plan --model gpt2 --cluster wide.yaml --global-batch 64 --tp 1 --zero mixed --top 3",
    "cluster estimate --model llama2-13b --cluster wide.yaml --global-batch 64 --tp 4 --pp 4 --dp 2 "
    "--micro-batch 2 --zero mixed --recomputation mixed --reserve 4GiB",
    "cluster estimate --model llama2-13b --cluster wide.yaml --global-batch 1024 --tp 1 --pp 8 --dp 4 "
    "--micro-batch 2 --token-slices 16",
]


def test_the_documentation_has_commands() -> None:
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("command", [*COMMANDS, *OTHERS])
def test_no_line_is_wider_than_a_terminal(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cluster.yaml").write_text(_CLUSTER, encoding="utf8")
    (tmp_path / "wide.yaml").write_text(_WIDE, encoding="utf8")
    monkeypatch.chdir(tmp_path)
    run(*shlex.split(command, comments=True))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10
    assert [line for line in lines if len(line) > WIDTH] == []
