"""Train a language model on a text; end it at any time, and go on with as many ranks as there are then.

torchrun --nproc-per-node=2 -m examples.pretrain.train --text README.md --folder run
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import CosineAnnealingLR

from examples.pretrain.data import Text
from examples.pretrain.model import build
from osdp import OSDP
from osdp.runtime import checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints, and what is exported")
    parser.add_argument("--limit", default="1GiB", help="memory of a rank")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=8, help="of all ranks, in a step")
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()

    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = Text(options.text, options.samples)
    # 1. Plan and wrap. All ranks start from rank 0's weights.
    model = OSDP(build(), text.batch(0, rank, ranks), options.limit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = CosineAnnealingLR(optimizer, options.steps)
    # 2. Go on from the latest checkpoint, whatever it was saved by.
    first, saved = 0, options.folder / "checkpoints"
    if checkpoint.exists(saved):
        first = checkpoint.load(saved, model, optimizer, scheduler=schedule).step or 0
    # 3. Train.
    for step in range(first, options.steps):
        loss = model(**text.batch(step, rank, ranks)).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1}: loss {float(mean):.6f}", flush=True)
        if (step + 1) % options.save_every == 0:
            checkpoint.save(saved, model, optimizer, scheduler=schedule, step=step + 1, keep_last=2)
    # 4. A folder for AutoModelForCausalLM.from_pretrained.
    model.save_pretrained(options.folder / "exported")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
