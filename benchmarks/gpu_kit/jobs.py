"""Jobs of the first run on a device: those of benchmarks/device_speed under other settings, and small ones for bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.device_speed import jobs
from morph import Job

gpt2_355m = jobs.gpt2_355m
gpt2_355m_fast = replace(gpt2_355m, name="gpt2-355m-fast", accumulation="fast")
gpt2_355m_compiled = replace(gpt2_355m, name="gpt2-355m-compiled", compile=True)
gpt2_355m_clipped = replace(gpt2_355m, name="gpt2-355m-clipped", clip_grad_norm=1.0)
gpt2_355m_m16 = replace(gpt2_355m, name="gpt2-355m-m16", micro_batch_size=16)


def _dropped(width: int, layers: int, length: int) -> GPT2LMHeadModel:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": max(2, width // 64), "n_positions": length}
    return GPT2LMHeadModel(GPT2Config(vocab_size=4096, use_cache=False, bos_token_id=None, eos_token_id=None, **sizes))


def _job(name: str, width: int, layers: int, length: int) -> Job:
    return replace(
        jobs.gpt2_355m,
        name=name,
        model=partial(_dropped, width, layers, length),
        dataset=partial(jobs.CountingText, length, 4096),
        num_sections=layers,
        batch_size=32,
        micro_batch_size=4,
    )


# dropout of 0.1 and flash attention in bf16: what recompute, random streams and kernels have to agree on
bits = _job("bits", 512, 6, 256)
tiny = _job("tiny", 32, 3, 16)
