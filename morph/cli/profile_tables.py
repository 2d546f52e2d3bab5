"""The tables in which a profile is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from morph.cli.cut_picture import size_text
from morph.cli.plan import count_text, time_text
from morph.contract.profile import Contention, LinkProfile, Profile, SectionProfile, SendTime, Timing

WIDTH = 132


def console() -> Console:
    """Return a console wide enough for the tables, also where there is no terminal."""
    found = Console()
    return found if found.is_terminal else Console(width=WIDTH)


def spread_text(timing: Timing) -> str:
    """Median and median absolute deviation, in a unit that fits the median."""
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


def _alike(one: SectionProfile, other: SectionProfile) -> bool:
    return (one.forward, one.backward, one.output_bytes_per_sample) == (
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
    """One row for each kind of section and each micro-batch size."""
    table = Table(title=f"{profile.job.name}: {profile.num_sections} sections", title_justify="left")
    table.add_column("sections")
    table.add_column("begins in", overflow="fold")
    for name in ("parameters", "bytes out", "m", "F(m)", "B(m)", "F(m)/m", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in kinds_of(profile):
        first = group[0]
        parameters = first.gradient_bytes // profile.accumulator_bytes_per_parameter
        facts = [places_text(group), first.label, f"{parameters:,}", f"{first.output_bytes_per_sample:,}"]
        for m in profile.micro_batch_sizes:
            forward, peak = first.forward[m], first.peak_bytes.get(m)
            times = (spread_text(forward), spread_text(first.backward[m]), time_text(forward.median_s / m))
            table.add_row(*facts, str(m), *times, "-" if peak is None else size_text(peak))
            facts = ["", "", "", ""]
    return table


def whole_model_lines(profile: Profile) -> list[str]:
    """F(m)/m and B(m)/m of the whole model, and its tied weights."""
    lines = []
    for m in profile.micro_batch_sizes:
        forward_s = sum(section.forward[m].median_s for section in profile.sections)
        backward_s = sum(section.backward[m].median_s for section in profile.sections)
        lines.append(f"m={m}: forward {time_text(forward_s / m)}, backward {time_text(backward_s / m)} per sample")
    tied = [unit.id for unit in profile.units if len(unit.sections) > 1]
    lines.append(
        f"parameters: {profile.job.num_parameters:,}; tied weights between sections: {', '.join(tied) or 'none'}"
    )
    return lines


def contention_text(entries: Sequence[Contention]) -> str:
    """How much slower a task gets beside others."""
    if not entries:
        return "not measured, or none"
    return ", ".join(f"{entry.num_busy} at once: x{entry.factor:.2f}" for entry in entries)


def fact_table(profile: Profile) -> Table:
    """Job, environment, and what is one number."""
    job, place = profile.job, profile.environment
    table = Table(title=f"{job.name}: job and machine", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    m = "the planner picks it" if job.micro_batch_size is None else str(job.micro_batch_size)
    rows = {
        "job": f"{job.name}, {count_text(job.num_parameters)} parameters, fingerprint {job.fingerprint[:12]}",
        "global batch M, micro-batch m": f"{job.batch_size}, {m}",
        "accumulation": "exact" if profile.accumulator_bytes_per_parameter == 8 else "fast",
        "measured on": f"{place.device}, {place.num_cores} cores, {place.threads_per_worker} threads a worker",
        "memory of one device": "not known"
        if place.device_memory_bytes is None
        else f"{place.device_memory_bytes / 2**30:.4g} GiB",
        "with": f"Python {place.python}, torch {place.torch}, {place.platform}",
        "at": place.created,
        "slower beside busy neighbours": contention_text(profile.contention),
        "commit": spread_text(profile.commit),
        "optimizer, all sections": time_text(sum(section.optimizer_step.median_s for section in profile.sections)),
        "parameters and optimizer state": size_text(
            sum(section.parameter_bytes + section.optimizer_bytes for section in profile.sections)
        ),
        "checkpoint write, upload": f"{_speed(profile.checkpoint_write_bytes_per_s)}, "
        f"{_speed(profile.checkpoint_upload_bytes_per_s)}",
        "device to host": _speed(profile.host_copy_bytes_per_s),
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def link_table(profile: Profile) -> Table:
    """Send times by size, of each kind of link and direction."""
    same = profile.inter_node == profile.intra_node
    links = {"same node": profile.intra_node} | ({} if same else {"between nodes": profile.inter_node})
    table = Table(title="send times" + (" (between nodes as on the same node)" if same else ""), title_justify="left")
    table.add_column("bytes", justify="right")
    for name in links:
        for kind in ("activation", "gradient"):
            table.add_column(f"{kind}, {name}", justify="right")
    for size in sorted({entry.size_bytes for link in links.values() for _, entry in _entries(link)}):
        row = []
        for link in links.values():
            for kind in ("activation", "gradient"):
                found = next((e.time for k, e in _entries(link) if (k, e.size_bytes) == (kind, size)), None)
                row.append("-" if found is None else spread_text(found))
        table.add_row(f"{size:,}", *row)
    return table


def all_reduce_table(profile: Profile) -> Table:
    """AR by ring and size, one column for each number in flight."""
    counts = sorted({entry.in_flight for entry in profile.all_reduce})
    table = Table(title="all-reduce", title_justify="left")
    table.add_column("ring D", justify="right")
    table.add_column("bytes", justify="right")
    for count in counts:
        table.add_column(f"{count} in flight", justify="right")
    known = {(entry.ring_size, entry.size_bytes, entry.in_flight): entry.time for entry in profile.all_reduce}
    for ring, size in sorted({(ring, size) for ring, size, _ in known}):
        times = [known.get((ring, size, count)) for count in counts]
        table.add_row(str(ring), f"{size:,}", *("-" if time is None else spread_text(time) for time in times))
    return table


def node_type_table(profile: Profile) -> Table:
    """What other types of node need for the whole model, beside the profile's own."""
    table = Table(title="node types", title_justify="left")
    for name in ("type", "device"):
        table.add_column(name, overflow="fold")
    for name in ("m", "forward", "backward"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("links", "beside busy neighbours"):
        table.add_column(name)
    shown = {"(this profile)": profile} | {
        node_type.name: profile.for_node_type(node_type.name) for node_type in profile.node_types
    }
    for name, there in shown.items():
        own_links = there is profile or there.intra_node != profile.intra_node
        last = ["own" if own_links else "as in the profile", contention_text(there.contention)]
        first = [name, there.environment.device]
        for m in profile.micro_batch_sizes:
            forward_s = sum(section.forward[m].median_s for section in there.sections)
            backward_s = sum(section.backward[m].median_s for section in there.sections)
            table.add_row(*first, str(m), time_text(forward_s), time_text(backward_s), *last)
            first, last = ["", ""], ["", ""]
    return table


def source_table(profile: Profile) -> Table:
    """Where values come from that nobody measured here."""
    table = Table(title="not measured here", title_justify="left")
    table.add_column("field", overflow="fold")
    table.add_column("source", overflow="fold")
    for field, source in sorted(profile.sources.items()):
        table.add_row(field, source)
    return table


def _entries(link: LinkProfile) -> Iterator[tuple[str, SendTime]]:
    for entry in link.activation:
        yield "activation", entry
    for entry in link.gradient:
        yield "gradient", entry


def _speed(bytes_per_s: float | None) -> str:
    return "not measured" if bytes_per_s is None else f"{size_text(bytes_per_s)}/s"
