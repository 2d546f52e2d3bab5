"""What was counted as rows of two tables: by job and stage, and by who asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.device_steps.cases import Case
from benchmarks.device_steps.counting import Counts, Site
from benchmarks.device_steps.steps import ShapeJob

HEAD = (
    "| job | stage | each micro-batch: copies in, out (bytes); pageable; syncs | each step: the same |",
    "|---|---|---|---|",
)
SITES_HEAD = ("| what | where | jobs |", "|---|---|---|")


@dataclass(frozen=True)
class Both:
    """Of one stage: what each micro-batch asks, and what each step does beside."""

    each_micro_batch: Mapping[Site, int]
    each_step: Mapping[Site, int]
    micro_batch_bytes: Mapping[Site, int]
    step_bytes: Mapping[Site, int]


def split(one: Counts, two: Counts) -> Both:
    """Tell a micro-batch's part from a step's by counts with one and with two micro-batches."""

    def parts(first: Counter[Site], second: Counter[Site]) -> tuple[dict[Site, int], dict[Site, int]]:
        every = sorted({*first, *second})
        each = {site: second[site] - first[site] for site in every}
        return each, {site: first[site] - each[site] for site in every}

    counted, sized = parts(one.sites, two.sites), parts(one.site_bytes, two.site_bytes)
    return Both(counted[0], counted[1], sized[0], sized[1])


def count_case(case: Case) -> tuple[list[str], set[Site]]:
    """Count a case; its rows, and all sites."""
    job = ShapeJob(case.job_path, case.shape)
    last = case.shape.pipeline_depth - 1
    rows, sites = [], set()
    for stage in sorted({0, min(1, last), last}):
        both = split(job.count(stage, 1), job.count(stage, 2))
        sites |= {site for site in both.each_micro_batch if both.each_micro_batch[site] or both.each_step[site]}
        name = "first" if stage == 0 else "last" if stage == last else "middle"
        cells = _cell(both.each_micro_batch, both.micro_batch_bytes), _cell(both.each_step, both.step_bytes)
        rows.append(f"| {case.title} | {name} | {cells[0]} | {cells[1]} |")
    return rows, sites


def _cell(counted: Mapping[Site, int], sized: Mapping[Site, int]) -> str:
    def total(numbers: Mapping[Site, int], kind: str) -> int:
        return sum(number for site, number in numbers.items() if site.kind == kind)

    pageable = sum(number for site, number in counted.items() if site.kind != "sync" and not site.pinned)
    copies = ", ".join(f"{total(counted, kind)} ({total(sized, kind):,})" for kind in ("to device", "to host"))
    return f"{copies}; {pageable}; {total(counted, 'sync')}"


def site_rows(found: Mapping[Site, set[str]]) -> list[str]:
    """One row for each place that asks the device for something."""
    rows = []
    for site, names in sorted(found.items()):
        what = "sync" if site.kind == "sync" else f"{site.kind}, {'pinned' if site.pinned else 'pageable'}"
        rows.append(f"| {what} | `{site.file}`, `{site.function}` | {', '.join(sorted(names))} |")
    return rows
