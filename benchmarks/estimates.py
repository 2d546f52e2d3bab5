"""Estimated times of layers compared with measured ones: those in the artifact of Sailor (SOSP 2025).

    python -m benchmarks estimates CHECKOUT

CHECKOUT is a checkout of github.com/eth-easl/sailor, whose profiles_tmp.json has the forward and backward of a layer of
OPT-350 and GPT-Neo 2.7B on several types of GPU. The same layers (benchmarks/published/layer_jobs.py) are estimated
from data sheets with the default shares of their speeds; nothing is fitted to the measurements. Beside them, the share
of the peak that the shipped profiles of Llama expect while computing, and published ones of whole trainings.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import PROFILES, ROOT, head, row
from benchmarks.sailor import Artifact
from calibrate.estimating.data_sheets import DATA_SHEETS
from calibrate.estimating.estimate import estimate_profile
from morph.contract.profile import Profile, load_profile

JOBS = ROOT / "benchmarks/published/layer_jobs.py"
MODELS = {"OPT-350": "opt_350", "GPT-Neo-2.7": "gpt_neo_2_7"}
GPUS = {"GH-96": "gh200", "A100-80": "a100", "A100-40": "a100-40", "V100-16": "v100"}
ALONE, LAYER = "1", "2"
"""In the artifact: one GPU for each layer; a layer in the middle."""
Times = tuple[float, float]
TRAININGS = (
    ("llama-3-8b", "a100", 0.57, "Llama 2 7B, 128 A100s: IBM and Meta, PyTorch blog, March 2024"),
    ("llama-3-8b", "h100", 0.43, "Llama 3 405B, 8,192 H100s: Dubey et al. 2024, table 4"),
)


def measured(artifact: Artifact, model: str, gpu: str) -> dict[int, Times]:
    """Return seconds of the forward and backward of one layer by m, where one GPU computes it."""
    by_size = artifact.layer_times_s[model].get(gpu, {})
    found = {int(m): by_size[m][ALONE][LAYER] for m in by_size if ALONE in by_size[m]}
    return {m: (float(times[0]), float(times[1])) for m, times in sorted(found.items())}


def estimated(model: str, sizes: list[int]) -> dict[str, dict[int, Times]]:
    """Return by type of GPU and m what one more layer takes."""
    names = tuple(GPUS.values())
    fewer, more = (
        estimate_profile(f"{JOBS}:{MODELS[model]}(num_layers={num})", names, micro_batch_sizes=sizes) for num in (2, 3)
    )
    found: dict[str, dict[int, Times]] = {}
    for gpu, name in GPUS.items():
        one, other = (_of(each, name) for each in (fewer, more))
        found[gpu] = {m: (whole[0] - one[m][0], whole[1] - one[m][1]) for m, whole in other.items()}
    return found


def _of(profile: Profile, name: str) -> dict[int, Times]:
    there = profile if name == next(iter(GPUS.values())) else profile.for_node_type(name)
    return {
        m: (
            sum(section.forward[m].median_s for section in there.sections),
            sum(section.backward[m].median_s for section in there.sections),
        )
        for m in profile.micro_batch_sizes
    }


def share_of_peak(profile: Profile, gpu: str, length: int = 4096) -> float:
    """Return the share of the peak in bfloat16 while computing, of 6 operations a parameter and token (MFU)."""
    there = profile if gpu == "h100" else profile.for_node_type(gpu)
    per_sample_s = min(
        sum(one.forward[m].median_s + one.backward[m].median_s for one in there.sections) / m for m in (1, 2, 4)
    )
    return 6 * profile.job.num_parameters * length / per_sample_s / DATA_SHEETS[gpu].flops_per_s["bfloat16"]


def main(checkout: Annotated[Path, typer.Argument(help="of github.com/eth-easl/sailor")]) -> None:
    artifact = Artifact(checkout)
    head("one layer | m | forward: measured, estimated ms | error | backward: measured, estimated ms | error")
    errors: dict[tuple[str, str], list[float]] = {}
    for model in MODELS:
        known = {gpu: measured(artifact, model, gpu) for gpu in GPUS}
        times = estimated(model, sorted({m for by_size in known.values() for m in by_size}))
        for gpu, by_size in known.items():
            for m, real in by_size.items():
                found = times[gpu][m]
                off = [guess / true - 1 for guess, true in zip(found, real, strict=True)]
                errors.setdefault((model, gpu), []).append(sum(found) / sum(real) - 1)
                cells = [f"{1e3 * true:.2f}, {1e3 * guess:.2f}" for true, guess in zip(real, found, strict=True)]
                row(f"{model}, {gpu}", m, cells[0], f"{100 * off[0]:+.0f} %", cells[1], f"{100 * off[1]:+.0f} %")
    head("forward and backward | sizes | mean error, without sign | worst")
    for (model, gpu), found_errors in errors.items():
        mean = statistics.mean(map(abs, found_errors))
        row(f"{model}, {gpu}", len(found_errors), f"{100 * mean:.0f} %", f"{100 * max(found_errors, key=abs):+.0f} %")
    head("estimated | share of peak while computing | published, whole training | of")
    for name, gpu, published, source in TRAININGS:
        share = share_of_peak(load_profile(PROFILES / f"{name}.json"), gpu)
        row(f"{name}, {gpu}", f"{share:.0%}", f"{published:.0%}", source)
