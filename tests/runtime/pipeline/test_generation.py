"""Generation through stages against transformers' own."""

from typing import Any

import pytest
import torch

from osdp import OSDP
from osdp.plan.dims import ParallelDims
from osdp.plan.sharding import Mode
from osdp.runtime.pipeline.generation import Sampling
from tests.helpers import distributed
from tests.runtime.token_slices.test_slicing import decoder, plan_of, staged, wrapped

SAMPLES, LENGTH, NEW = 3, 5, 12


def prompts(*, padded: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, 257, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(tokens)
    if padded:
        tokens[1, :2], mask[1, :2] = 0, 0
    return tokens, mask


def wanted(name: str, *, padded: bool = False, **options: Any) -> torch.Tensor:
    tokens, mask = prompts(padded=padded)
    model: Any = decoder(name).eval()
    found: torch.Tensor = model.generate(
        tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, use_cache=True, **options
    )
    return found


def generated(model: OSDP, *, padded: bool = False, **options: Any) -> torch.Tensor:
    tokens, mask = prompts(padded=padded)
    return model.eval().generate(tokens, NEW, attention_mask=mask, **options)


def in_two_stages(plans: dict[str, str]) -> None:
    for name, plan in plans.items():
        model = staged(name, plan)
        for padded in (False, True):
            want = wanted(name, padded=padded)
            assert torch.equal(generated(model, padded=padded), want), (name, padded)
            assert torch.equal(generated(model, padded=padded, num_microbatches=3), want), (name, padded)
    model, last = staged("gpt2", plans["gpt2"]), wanted("gpt2")[:, LENGTH:]
    # Sequences that end at different times, the first one long before the last.
    for ends in ([int(last[0, 2])], [int(last[0, 2]), int(last[1, 6]), int(last[2, 4])]):
        want = wanted("gpt2", eos_token_id=ends, pad_token_id=0)
        assert torch.equal(generated(model, eos_token_id=ends, pad_token_id=0), want)
    drawn = [
        generated(
            model, do_sample=True, temperature=2.0, top_k=20, top_p=0.9,
            generator=torch.Generator().manual_seed(5),
        )
        for _ in range(2)
    ]  # fmt: skip
    assert torch.equal(*drawn) and not torch.equal(drawn[0], wanted("gpt2"))
    with pytest.raises(ValueError, match="a prompt ends with padding"):
        model.generate(*[prompts()[0], NEW], attention_mask=prompts(padded=True)[1].flip(1))
    assert model.generate(prompts()[0], 28, eos_token_id=()).shape == (SAMPLES, LENGTH + 28)
    with pytest.raises(ValueError, match="more than the 32 positions"):
        model.generate(prompts()[0], 29)
    with pytest.raises(ValueError, match="temperature has an effect only when sampling: pass do_sample=True"):
        generated(model, temperature=0.5)
    with pytest.raises(
        TypeError, match=r"generate\(\) does not take num_beams; it takes do_sample, temperature"
    ):
        generated(model, num_beams=2)
    with pytest.raises(TypeError, match=r"a prompt is a tensor of tokens .* got dict"):
        model.generate({"input_ids": prompts()[0]}, NEW)
    with pytest.raises(ValueError, match=r"must have the shape of the prompt, \(\d+, \d+\), got \(\d+, 3\)"):
        model.generate(prompts()[0], NEW, attention_mask=torch.ones(SAMPLES, 3))
    plain: Any = model.module
    plain.generation_config.repetition_penalty = 1.5
    with pytest.raises(ValueError, match=r"generate with repetition_penalty=1.5, which is not supported"):
        generated(model)


def test_stages_generate_what_transformers_does() -> None:
    plans = {name: plan_of(name, ParallelDims(2, 1, 1)) for name in ("gpt2", "opt", "mistral")}
    distributed.run(2, in_two_stages, plans, timeout=120)


def in_four_ranks(plan: str) -> None:
    model = staged("gpt2", plan).eval()
    tokens = prompts()[0].roll(model.mesh["dp"].get_local_rank(), 0)[:1]
    for end in (None, int(wanted("gpt2")[0, LENGTH + 2])):
        # One data-parallel rank's prompt ends early, the other's goes on.
        plain: Any = decoder("gpt2").eval()
        want = plain.generate(tokens, max_new_tokens=NEW, do_sample=False, eos_token_id=end, pad_token_id=0)
        got = model.generate(tokens, NEW, eos_token_id=() if end is None else end, pad_token_id=0)
        assert torch.equal(got, want), end
    for layout in ({"pp": 2, "tp": 2, "schedule": "1f1b"}, {"tp": 2, "strategy": "FULL_SHARD"}):
        model = wrapped("qwen2", **layout)
        assert torch.equal(generated(model), wanted("qwen2")), layout


def interleaved() -> None:
    model = wrapped("gpt2", pp=2, schedule="interleaved")
    assert len(model.plan.stages) == 4
    assert torch.equal(generated(model), wanted("gpt2"))
    assert torch.equal(generated(model, padded=True, num_microbatches=3), wanted("gpt2", padded=True))


def test_data_and_tensor_parallel_ranks_generate_the_same() -> None:
    distributed.run(4, in_four_ranks, plan_of("gpt2", ParallelDims(2, 2, 1), Mode.FULL_SHARD), timeout=120)
    distributed.run(2, interleaved, timeout=120)


def test_the_model_is_sampled_as_it_is_configured() -> None:
    """Its temperature was ignored."""
    # Needs transformers, without which the tests of this file are skipped where they import others.
    from osdp.integrations.huggingface.token_step import Slicer

    model: Any = decoder("gpt2")
    configured = model.generation_config
    configured.temperature, configured.top_k, configured.top_p = 0.6, 0, 0.9
    found = Slicer(model).choice((), 0, {"do_sample": True, "top_p": 0.5})
    assert found == Sampling(do_sample=True, temperature=0.6, top_p=0.5)
    assert Slicer(model).choice((), 0, {}) == Sampling()
    configured.min_p = 0.1
    with pytest.raises(ValueError, match=r"generate with min_p=0\.1, which is not supported"):
        Slicer(model).choice((), 0, {"do_sample": True})
