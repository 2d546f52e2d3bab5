"""``morph inject``: take VMs of an active run, to test how it handles preemptions."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.reading.errors import EXIT_INTERRUPTED
from morph.cli.reading.options import RunDirArgument
from morph.contract import ranges
from morph.contract.errors import InputError

if TYPE_CHECKING:
    from morph.contract.lives import Lives
import re

from morph.contract.ranges import Range

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+|\d+(?:\.\d+)?", re.ASCII)


def seconds_of(option: str, text: str, allowed: Range) -> float:
    """Return the duration of an option (seconds); InputError: the text is not a duration, or is out of range."""
    if _WHOLE.fullmatch(text) is None:
        raise InputError("is not a duration", field=option, value=text, allowed="such as 30s, 10m, 3h or 1h30m")
    parts = _PART.findall(text)
    duration_s = sum(float(number) * _SECONDS[unit] for number, unit in parts) if parts else float(text)
    if duration_s not in allowed:
        raise InputError("is out of range", field=option, value=text, allowed=f"{allowed}, in seconds")
    return duration_s


def inject_command(
    run_dir: RunDirArgument,
    mttp: Annotated[
        str | None,
        typer.Option(help="Mean time to preemption of each VM, such as 3h; lifetimes are exponential.", metavar="TIME"),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Spot trace (CSV): take as many VMs as it removes, at the same times.")
    ] = None,
    trace_speed: Annotated[
        float, typer.Option(min=0.001, help="Play the trace this many times faster than it was recorded.")
    ] = 1.0,
    vm: Annotated[str | None, typer.Option(help="Take this VM now, and no other.", metavar="NAME")] = None,
    notice: Annotated[
        str, typer.Option(help="Time from notice to loss of a VM; 0s: no notice.", metavar="TIME")
    ] = "30s",
    seed: Annotated[int, typer.Option(help="Seed; the same seed and VM names give the same lifetimes.")] = 0,
    count: Annotated[int | None, typer.Option(min=1, help="End after taking this many VMs.")] = None,
    min_vms: Annotated[int, typer.Option(min=0, help="Always leave this many VMs.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print when each present VM would be taken.")] = False,
) -> None:
    """Take VMs of an active run, as their provider would: by lifetimes, by a trace, or one by name.

    The command continues until the run ends, or until Ctrl-C, which does not end the run: a VM that was given notice is
    still taken, unless the run ends first. Only VMs of this run are taken. On Azure, Azure itself evicts spot VMs with
    a notice and decides the length of the notice.

    \b
    Example:
      morph inject runs/tiny --mttp 3h --notice 30s --seed 1
      morph inject runs/tiny --trace trace.csv --notice 0s --min-vms 2
      morph inject runs/tiny --vm tiny-gpt-1-3
    """
    from manager.engine.machines.preemption import PreemptionRequest
    from manager.injection.injector import Injection, first_answer, inject, lines_of, planned_line
    from manager.run_dir import read_facts
    from morph.contract.lives import Lifetimes, Removals, by_name
    from morph.contract.trace import load_trace

    given = [name for name, value in (("--mttp", mttp), ("--trace", trace), ("--vm", vm)) if value is not None]
    if len(given) != 1:
        raise InputError(
            "exactly one option chooses the VMs", value=" ".join(given) or None, allowed="--mttp, --trace or --vm"
        )
    if dry_run and vm is not None:
        raise InputError("takes a VM now, so there is nothing to predict", field="--vm", allowed="no --dry-run")
    ranges.SEED.check("--seed", seed)
    ranges.TRACE_SPEED.check("--trace-speed", trace_speed)
    lead_s = seconds_of("--notice", notice, ranges.SECONDS)
    mttp_s = seconds_of("--mttp", mttp, ranges.MTTP_S) if mttp is not None else 0.0
    played = load_trace(trace).from_first_event().scaled(1 / trace_speed) if trace is not None else None
    read_facts(run_dir)

    def lives(start_s: float) -> Lives:
        return Lifetimes(by_name(seed, mttp_s), start_s) if played is None else Removals(seed, played, start_s)

    def say(line: str) -> None:
        print(line, flush=True)

    by = f"lifetimes of {mttp} on average" if mttp is not None else f"trace {trace}"
    injection = Injection(lead_s, min_vms, "by name" if vm is not None else f"{by}, seed {seed}", count)
    try:
        if vm is not None:
            answer = first_answer(run_dir, injection.taking(vm), say)
            if vm in answer.left:
                raise InputError(f"is not taken: {answer.left[vm]}", source=str(run_dir), field="--vm", value=vm)
            for line in lines_of(answer, injection):
                say(line)
        elif dry_run:
            answer = first_answer(run_dir, PreemptionRequest(), say)
            for taken in lives(answer.now_s).between(answer.vms, answer.now_s, math.inf):
                say(planned_line(taken, answer.now_s))
        else:
            say(inject(run_dir, injection, lives, say))
    except KeyboardInterrupt as error:
        print("no further VM is taken, except VMs that were given notice", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from error
