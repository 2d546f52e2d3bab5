"""Write the profiles of published models to configs/profiles, bit for bit the same each time.

    python -m benchmarks published.profiles

A changed figure in benchmarks/published changes a file here; a test holds the two together.
"""

from __future__ import annotations

from benchmarks.harness import PROFILES, ROOT
from benchmarks.published import SHIPPED, published_profile


def profile_text(model: str) -> str:
    return published_profile(model).model_dump_json(indent=1, exclude_unset=True) + "\n"


def main() -> None:
    for model in SHIPPED:
        path = PROFILES / f"{model}.json"
        path.write_text(profile_text(model), encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB")
