"""Write the estimated profiles of Llama 3 to configs/profiles, bit for bit the same each time.

    python -m benchmarks published.estimated

The models are made from their configurations (configs/jobs/llama.py), without weights; a test holds the files to this.
"""

from __future__ import annotations

from benchmarks.harness import JOBS, PROFILES, ROOT
from calibrate.estimating.estimate import estimate_profile

_LARGE, _SMALL = ("h100", "a100"), ("l4", "v100", "t4")
ESTIMATED = {
    "llama-3-8b": ("llama_8b", _LARGE),
    "llama-3-8b-small": ("llama_8b_small", _SMALL),
    "llama-3-70b": ("llama_70b", _LARGE),
    "mixtral-8x7b": ("mixtral_8x7b", _LARGE),
}
"""Files, each with its job and types of GPU."""
MICRO_BATCH_SIZES = (1, 2, 4)


def estimated_text(name: str) -> str:
    """Return a file's contents."""
    job, devices = ESTIMATED[name]
    profile = estimate_profile(f"{JOBS / 'llama.py'}:{job}", devices, micro_batch_sizes=MICRO_BATCH_SIZES)
    return profile.model_dump_json(exclude_defaults=True) + "\n"


def main() -> None:
    for name in ESTIMATED:
        path = PROFILES / f"{name}.json"
        path.write_text(estimated_text(name), encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB", flush=True)
