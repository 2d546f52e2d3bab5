"""Write the profiles of published models to configs/profiles, bit for bit the same each time.

    python -m benchmarks.published.profiles

A changed figure in simulator/published changes a file here; a test holds the two together.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.published import SHIPPED, published_profile

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "profiles"


def profile_text(model: str) -> str:
    return published_profile(model).model_dump_json(indent=1, exclude_unset=True) + "\n"


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for model in SHIPPED:
        path = FOLDER / f"{model}.json"
        path.write_text(profile_text(model), encoding="utf-8")
        print(f"{path.relative_to(FOLDER.parents[1])}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
