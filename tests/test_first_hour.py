"""A stranger's first hour: train under torchrun, Ctrl-C, resume on other ranks, export, open elsewhere."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.pretrain.data import Text
from examples.pretrain.model import build
from osdp.cli.main import main as cli
from tests.helpers.load import slowdown

ROOT = Path(__file__).resolve().parents[1]
STEPS, SAVED, SAMPLES = 12, 4, 8
_LINE = re.compile(r"step (\d+): loss ([\d.]+)")


def started(folder: Path, ranks: int) -> "subprocess.Popen[str]":
    """The example under torchrun, as a person starts it."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words += ["-m", "examples.pretrain.train", "--text", str(ROOT / "README.md"), "--folder", str(folder)]
    words += [f"--steps={STEPS}", f"--save-every={SAVED}", f"--samples={SAMPLES}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder.parent)}
    return subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def losses_of(process: "subprocess.Popen[str]", interrupt_after: int | None = None) -> dict[int, float]:
    """The loss of each step, until the process ends; Ctrl-C after a step."""
    found: dict[int, float] = {}
    said = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            said.append(line)
            if (met := _LINE.search(line)) is not None:
                found[int(met[1])] = float(met[2])
                if int(met[1]) == interrupt_after:
                    os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=60 * slowdown())
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
    if interrupt_after is None:
        assert process.returncode == 0, "".join(said)[-3000:]
    else:
        assert process.returncode != 0
    return found


def osdp_command(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli(words)
    assert not ended.value.code


def plain_losses() -> dict[int, float]:
    """The same training in one process, without this library."""
    model, text = build(), Text(ROOT / "README.md", SAMPLES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    found = {}
    for step in range(STEPS):
        loss = model(**text.batch(step, 0, 1)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        found[step + 1] = float(loss.detach())
    return found


def test_train_interrupt_resume_on_other_ranks_export_and_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    before = losses_of(started(folder, 2), interrupt_after=6)
    assert 6 <= max(before) < STEPS
    after = losses_of(started(folder, 1))
    # It goes on from the last checkpoint before the interruption.
    assert min(after) in (SAVED + 1, 2 * SAVED + 1) and max(after) == STEPS
    wanted = plain_losses()
    for step, loss in (before | after).items():
        assert loss == pytest.approx(wanted[step], rel=1e-4), step

    model = AutoModelForCausalLM.from_pretrained(folder / "exported").eval()
    osdp_command(["checkpoint", "verify", str(folder / "checkpoints")])
    osdp_command(["checkpoint", "show", str(folder / "checkpoints")])
    exported = tmp_path / "again"
    (tmp_path / "again.partial").mkdir()  # as of an export that was killed
    words = ["checkpoint", "export", str(folder / "checkpoints"), str(exported)]
    osdp_command([*words, "--config", str(folder / "exported")])
    said = capsys.readouterr().out
    assert "every byte is what was saved" in said and f"step {STEPS}, saved by 1 rank, with scheduler" in said
    again = AutoModelForCausalLM.from_pretrained(exported).eval()
    osdp_command(["checkpoint", "export", str(folder / "checkpoints"), str(tmp_path / "weights.pt")])
    assert not list(tmp_path.glob("*.partial-*"))
    plain = build().eval()
    plain.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    tokens = Text(ROOT / "README.md", 2).batch(0, 0, 1)["input_ids"]
    with torch.no_grad():
        logits = [net(tokens).logits for net in (model, again, plain)]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
