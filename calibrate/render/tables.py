"""The tables in which a profile is shown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from morph.contract.profile import Contention, Profile, SectionProfile, Timing
from morph.tables import table
from morph.words import count_text, size_text, time_text

WIDTH = 132


def spread_text(timing: Timing) -> str:
    """Return the median and the median absolute deviation, in a unit that fits the median."""
    text = time_text(timing.median_s)
    number, unit = text.split()
    scale = timing.median_s / float(number) if timing.median_s and float(number) else 1.0
    return f"{number} ±{float(f'{timing.mad_s / scale:.1g}'):g} {unit}"


def kinds_of(profile: Profile) -> list[list[SectionProfile]]:
    """Group the sections that were measured as one kind; the last section stands alone."""
    groups: list[list[SectionProfile]] = []
    for section in profile.sections:
        known = next((group for group in groups if _alike(group[0], section)), None)
        if known is None:
            groups.append([section])
        else:
            known.append(section)
    return groups


def _alike(section: SectionProfile, other: SectionProfile) -> bool:
    return (section.forward, section.backward, section.output_bytes_per_sample) == (
        other.forward,
        other.backward,
        other.output_bytes_per_sample,
    )


def places_text(sections: Sequence[SectionProfile]) -> str:
    """Return the numbers of ascending sections: ``1-3, 5``."""
    runs: list[list[int]] = []
    for section in sections:
        if runs and section.index == runs[-1][-1] + 1:
            runs[-1].append(section.index)
        else:
            runs.append([section.index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def section_table(profile: Profile) -> Table:
    """Return a table with one row for each kind of section and each micro-batch size."""
    rows: list[list[object]] = []
    for group in kinds_of(profile):
        first = group[0]
        parameters = first.gradient_bytes // profile.accumulator_bytes_per_parameter
        facts = [places_text(group), first.label, f"{parameters:,}", f"{first.output_bytes_per_sample:,}"]
        for m in profile.micro_batch_sizes:
            forward, peak = first.forward[m], first.peak_bytes.get(m)
            times = (spread_text(forward), spread_text(first.backward[m]), time_text(forward.median_s / m))
            rows.append([*facts, m, *times, "-" if peak is None else size_text(peak)])
            facts = ["", "", "", ""]
    columns = ("sections", "begins in", "parameters", "bytes out", "m", "forward", "backward", "forward/m", "peak")
    return table(f"{profile.job.name}: {profile.num_sections} sections", columns, rows, left=2)


def whole_model_lines(profile: Profile) -> list[str]:
    """Return lines that explain the table, with a sample's times in the whole model, and with its tied weights."""
    lines = ["m: samples in a micro-batch; bytes out: sent to the next section for each sample; peak: memory"]
    for m in profile.micro_batch_sizes:
        forward_s, backward_s = _whole_s(profile, m)
        lines.append(f"m={m}: forward {time_text(forward_s / m)}, backward {time_text(backward_s / m)} per sample")
    tied = [unit.id for unit in profile.units if len(unit.sections) > 1]
    lines.append(
        f"parameters: {profile.job.num_parameters:,}; tied weights between sections: {', '.join(tied) or 'none'}"
    )
    return lines


def _whole_s(profile: Profile, m: int) -> tuple[float, float]:
    """Return F(m) and B(m) of the whole model."""
    forward_s = sum(section.forward[m].median_s for section in profile.sections)
    return forward_s, sum(section.backward[m].median_s for section in profile.sections)


def contention_text(entries: Sequence[Contention]) -> str:
    """Return how much slower a task is while others run on the same machine."""
    if not entries:
        return "not measured, or none"
    return ", ".join(f"x{entry.factor:.2f} with {entry.num_busy} at once" for entry in entries)


def fact_table(profile: Profile) -> Table:
    """Return a table with the job, the environment, and everything that is a single number."""
    job, place = profile.job, profile.environment
    m = "the planner picks it" if job.micro_batch_size is None else str(job.micro_batch_size)
    rows = {
        "job": f"{job.name}, {count_text(job.num_parameters)} parameters, fingerprint {job.fingerprint[:12]}",
        "global batch M, micro-batch m": f"{job.batch_size}, {m}",
        "accumulation": "exact" if profile.accumulator_bytes_per_parameter == 8 else "fast",
        **(
            {"NOT MEASURED, but estimated": place.estimated, "for": place.device}
            if place.estimated
            else {
                "measured on": f"{place.device}, {place.num_cores} cores, {place.threads_per_worker} threads a worker"
            }
        ),
        "memory of one device": "not known"
        if place.device_memory_bytes is None
        else f"{place.device_memory_bytes / 2**30:.4g} GiB",
        "with": f"Python {place.python}, torch {place.torch}, {place.platform}",
        "at": place.created,
        "times while others compute here": contention_text(profile.contention),
        "commit": spread_text(profile.commit),
        "optimizer, all sections": time_text(sum(section.optimizer_step.median_s for section in profile.sections)),
        "parameters and optimizer state": size_text(
            sum(section.parameter_bytes + section.optimizer_bytes for section in profile.sections)
        ),
        "checkpoint write, upload": f"{_speed(profile.checkpoint_write_bytes_per_s)}, "
        f"{_speed(profile.checkpoint_upload_bytes_per_s)}",
        "device to host": _speed(profile.host_copy_bytes_per_s),
    }
    made = table(f"{job.name}: job and machine", ("", ""), rows.items(), left=2)
    made.show_header = False
    return made


def link_table(profile: Profile) -> Table:
    """Return a table of send times by size, for each kind of link and each direction."""
    same = profile.inter_node == profile.intra_node
    links = {"same node": profile.intra_node} | ({} if same else {"between nodes": profile.inter_node})
    links |= {} if profile.between_zones is None else {"between zones": profile.between_zones}
    columns: dict[str, dict[int, str]] = {}
    for name, link in links.items():
        for kind, entries in (("activation", link.activation), ("gradient", link.gradient)):
            columns[f"{kind}, {name}"] = {entry.size_bytes: spread_text(entry.time) for entry in entries}
    sizes = sorted({size for column in columns.values() for size in column})
    rows = [(f"{size:,}", *(column.get(size, "-") for column in columns.values())) for size in sizes]
    return table("send times" + (" (between nodes as on the same node)" if same else ""), ("bytes", *columns), rows)


def all_reduce_table(profile: Profile) -> Table:
    """Return a table of AR by ring and size, with one column for each number in flight."""
    counts = sorted({entry.in_flight for entry in profile.all_reduce})
    known = {(entry.ring_size, entry.size_bytes, entry.in_flight): entry.time for entry in profile.all_reduce}
    rows = []
    for ring, size in sorted({(ring, size) for ring, size, _ in known}):
        times = [known.get((ring, size, count)) for count in counts]
        rows.append((ring, f"{size:,}", *("-" if time is None else spread_text(time) for time in times)))
    return table("all-reduce", ("ring D", "bytes", *(f"{count} in flight" for count in counts)), rows)


def node_type_table(profile: Profile) -> Table:
    """Return a table of the times for the whole model on the profile's own and on other types of node."""
    shown = {"(this profile)": profile} | {each.name: profile.for_node_type(each.name) for each in profile.node_types}
    rows: list[list[object]] = []
    for name, there in shown.items():
        links = "own" if there is profile or there.intra_node != profile.intra_node else "as in the profile"
        device = there.environment.device + (" (estimated)" if there.environment.estimated else "")
        facts = [name, device, links, contention_text(there.contention)]
        for m in profile.micro_batch_sizes:
            rows.append([*facts, m, *map(time_text, _whole_s(there, m))])
            facts = ["", "", "", ""]
    columns = ("type", "device", "links", "beside others", "m", "forward", "backward")
    return table("node types", columns, rows, left=4)


def _speed(bytes_per_s: float | None) -> str:
    return "not measured" if bytes_per_s is None else f"{size_text(bytes_per_s)}/s"
