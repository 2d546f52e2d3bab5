"""``morph calibrate``: measure a job once on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from morph.contract.profile import Profile, SectionProfile, Timing

CALIBRATE_HELP = """Measure a job once on this machine, section by section, and write its profile.

    The profile does not depend on how many GPUs the job will get; another machine can read it.

    \b
    Example:
      morph calibrate configs/jobs/tiny_gpt.py:job -o profile.json
"""


def calibrate_command(
    job: Annotated[str, typer.Argument(metavar="JOB", help="path/to/file.py:name")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the profile goes.")] = Path("profile.json"),
    micro_batch: Annotated[
        list[int] | None,
        typer.Option(
            "--micro-batch",
            "-m",
            min=1,
            help="Micro-batch size to measure, repeatable; default: the job's, or growing.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=5, help="Samples of each time.")] = 20,
) -> None:
    """Its help is CALIBRATE_HELP."""
    from rich.console import Console

    from calibrate.output import check_output
    from morph.cli.checks import users_code

    check_output(output)
    terminal = Console(file=sys.stderr)
    with users_code(job):
        profile = _measure(job, tuple(micro_batch) if micro_batch else None, samples, terminal)

    from calibrate import write_profile

    write_profile(profile, output)
    console = Console()
    console.print(_table(profile))
    console.print(_summary(profile))
    console.print(f"written: {output}", soft_wrap=True)


calibrate_command.__doc__ = CALIBRATE_HELP


def _measure(job: str, micro_batch_sizes: tuple[int, ...] | None, num_samples: int, terminal: Console) -> Profile:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from calibrate import calibrate

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, console=terminal, transient=True, redirect_stderr=False, disable=not terminal.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=1.0)
        return calibrate(
            job,
            micro_batch_sizes=micro_batch_sizes,
            num_samples=num_samples,
            progress=lambda what, share: bar.update(task, description=what, completed=share),
        )


def _table(profile: Profile) -> Table:
    """One row for each run of equal sections and each micro-batch size."""
    from rich.table import Table

    table = Table(title=f"{profile.job.name}: {profile.num_sections} sections")
    table.add_column("sections", no_wrap=True)
    table.add_column("begins in", overflow="fold")
    for name in ("parameters", "bytes out", "m", "F(m) ms", "B(m) ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in _runs(profile):
        first, last = group[0], group[-1]
        place = str(first.index) if first is last else f"{first.index}-{last.index}"
        parameters = first.gradient_bytes // profile.accumulator_bytes_per_parameter
        facts = [place, first.label, f"{parameters:,}", f"{first.output_bytes_per_sample:,}"]
        for m in profile.micro_batch_sizes:
            table.add_row(*facts, str(m), _milliseconds(first.forward[m]), _milliseconds(first.backward[m]))
            facts = ["", "", "", ""]
    return table


def _runs(profile: Profile) -> list[list[SectionProfile]]:
    """Group neighbouring sections that were measured as one kind; the last section stands alone."""
    groups: list[list[SectionProfile]] = []
    for section in profile.sections:
        before = groups[-1][-1] if groups else None
        if before is not None and (before.forward, before.backward, before.output_bytes_per_sample) == (
            section.forward,
            section.backward,
            section.output_bytes_per_sample,
        ):
            groups[-1].append(section)
        else:
            groups.append([section])
    return groups


def _summary(profile: Profile) -> str:
    """Return F(m)/m of the whole model, tied units, and the figures of the machine."""
    lines = []
    for m in profile.micro_batch_sizes:
        forward_s = sum(section.forward[m].median_s for section in profile.sections)
        backward_s = sum(section.backward[m].median_s for section in profile.sections)
        lines.append(f"m={m}: forward {forward_s / m * 1e3:.3g}, backward {backward_s / m * 1e3:.3g} ms per sample")
    tied = [unit.id for unit in profile.units if len(unit.sections) > 1]
    lines.append(
        f"parameters: {profile.job.num_parameters:,}; tied weights between sections: {', '.join(tied) or 'none'}"
    )
    lines.append(f"checkpoints: {profile.checkpoint_write_bytes_per_s / 1e6:.0f} MB/s; {profile.environment.device}")
    return "\n".join(lines)


def _milliseconds(timing: Timing) -> str:
    return f"{timing.median_s * 1e3:.3g} ±{timing.mad_s * 1e3:.1g}"
