"""Write the profiles of published models to configs/profiles, bit for bit the same each time.

    python -m benchmarks published.profiles

A changed figure in benchmarks/published changes a file here; a test holds the two together.
"""

from __future__ import annotations

from benchmarks.harness import PROFILES, ROOT
from benchmarks.published import GPU_MEMORY_BYTES, SHIPPED, published_profile
from morph.contract.profile import Profile
from simulator.inputs.synthetic import with_type

WITH_T4 = "gpt2-2.5b-t4"
"""GPT-2 2.5B on V100s and on T4s: a profile for pools of two types."""
_V100_TFLOPS, _T4_TFLOPS = 125, 65
"""NVIDIA's data sheets, with tensor cores."""


def shipped_profile(name: str) -> Profile:
    """Return a profile of ``configs/profiles``."""
    if name != WITH_T4:
        return published_profile(name)
    slower = _V100_TFLOPS / _T4_TFLOPS
    profile = with_type(published_profile("gpt2-2.5b"), "t4", slower, GPU_MEMORY_BYTES)
    source = (
        f"the V100's times, {slower:.3g} times as long, as NVIDIA states {_V100_TFLOPS} and {_T4_TFLOPS} TFLOPS with "
        "tensor cores; as much memory and the same links"
    )
    (t4,) = profile.node_types
    assumed = t4.model_copy(update={"environment": t4.environment.model_copy(update={"estimated": source})})
    return profile.model_copy(update={"node_types": (assumed,)})


def profile_text(name: str) -> str:
    return shipped_profile(name).model_dump_json(indent=1, exclude_unset=True) + "\n"


def main() -> None:
    for model in (*SHIPPED, WITH_T4):
        path = PROFILES / f"{model}.json"
        path.write_text(profile_text(model), encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB")
