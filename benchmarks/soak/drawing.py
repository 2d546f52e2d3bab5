"""The picture of a soak: VMs, shape, memory and file handles over one time axis."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from sampling import Process, Sampler

COLOURS = {"manager": "#c8372d", "worker": "#2f6db3", "host": "#8795a1"}


def draw(sampler: Sampler, path: Path, title: str) -> None:
    """Write the picture, 1600 x 1200 pixels."""
    figure = Figure(figsize=(16, 12), dpi=100)
    vms, workers, memory, handles = figure.subplots(4, 1, sharex=True)
    figure.suptitle(title)
    start_s = sampler.notes[0][0]
    minutes = [(time_s - start_s) / 60 for time_s, *_ in sampler.notes]
    vms.step(minutes, [ready for _, ready, _, _ in sampler.notes], where="post", color=COLOURS["worker"])
    vms.set_ylabel("workers ready")
    for index, label in enumerate(("P", "D")):
        sizes = [int(shape.split("x")[index]) if shape else 0 for _, _, shape, _ in sampler.notes]
        workers.step(minutes, sizes, where="post", label=label)
    workers.set_ylabel("shape")
    workers.legend(loc="upper right")
    for process in sampler.processes.values():
        _line(memory, process, start_s, [sample.rss_mib for sample in process.samples])
        _line(handles, process, start_s, [float(sample.num_handles) for sample in process.samples])
    memory.set_ylabel("RSS, MiB")
    handles.set_ylabel("file handles")
    handles.set_xlabel("minutes")
    for role, colour in COLOURS.items():
        memory.plot([], [], color=colour, label=role)
    memory.legend(loc="upper right")
    for panel in (vms, workers, memory, handles):
        panel.grid(axis="y", color="#e4e8ec")
        panel.set_ylim(bottom=0)
    temporary = path.with_name(f"{path.name}.new")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def _line(panel: object, process: Process, start_s: float, values: list[float]) -> None:
    times = [(sample.time_s - start_s) / 60 for sample in process.samples]
    panel.plot(times, values, color=COLOURS[process.role], linewidth=0.9, alpha=0.8)  # type: ignore[attr-defined]
