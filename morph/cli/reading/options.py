"""Declares the options and arguments that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from morph.contract import ranges


class ScheduleName(StrEnum):
    """Schedules that the executor can run."""

    VARUNA = "varuna"
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"


JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="path/to/file.py:name", show_default=False)]
RunDirArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")]
StoredArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN_DIR_OR_URL",
        help="The run's directory, or the fsspec URL or folder with its checkpoints.",
        show_default=False,
    ),
]
ProfileArgument = Annotated[
    Path, typer.Argument(help="Profile that `morph calibrate` wrote.", metavar="PROFILE", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
PlainOption = Annotated[bool, typer.Option("--plain", help="Plain lines even in a terminal.")]

StagesOption = Annotated[int | None, typer.Option("-P", help="Stages of a pipeline.", show_default=False)]
PlanFileOption = Annotated[
    Path | None,
    typer.Option("--plan", help="Plan from `morph plan -o`, in place of -P and -D. Its pipelines may be unequal."),
]
ReplicasOption = Annotated[int, typer.Option("-D", help="Replicas of the pipeline.")]
SectionsOption = Annotated[
    int | None, typer.Option("-k", "-K", min=1, help="Number of sections. Default: the job's, else Morph chooses one.")
]
MicroBatchOption = Annotated[
    int | None, typer.Option("--m", min=1, help="Micro-batch size. Default: the job's, else Morph chooses one.")
]
ScheduleOption = Annotated[ScheduleName, typer.Option("--schedule", metavar="NAME", help="varuna, gpipe or 1f1b.")]
AnyScheduleOption = Annotated[
    ScheduleName | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="varuna, gpipe or 1f1b; default: the fastest. The weights do not depend on the schedule.",
        show_default=False,
    ),
]
RecomputeOption = Annotated[
    bool | None,
    typer.Option(
        "--recompute/--no-recompute",
        help="Recompute activations, or keep them in memory. Default: the faster of the two that fits the memory.",
        show_default=False,
    ),
]
GpusPerNodeOption = Annotated[int | None, typer.Option("--gpus-per-node", help="GPUs of each node. Default: 1.")]
NodeTypeOption = Annotated[
    str | None, typer.Option("--node-type", help="A node type of the profile. Default: the first.")
]
SlowOption = Annotated[
    list[str] | None,
    typer.Option("--slow", metavar="STAGE[/REPLICA]:FACTOR", help="Slow down a worker or a stage. Repeatable."),
]
JitterOption = Annotated[
    int | None,
    typer.Option("--jitter-seed", min=0, help="Draw times at random from the measured spread."),
]
PngOption = Annotated[Path | None, typer.Option("--png", help="Draw a picture into this PNG file.")]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one of the settings below. Repeatable."),
]
FileSettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set a key of the YAML file. For example policy.redundancy=off. Repeatable."
    ),
]

PriceOption = Annotated[
    float | None,
    typer.Option(
        "--price",
        min=0,
        max=ranges.USD_PER_HOUR.high,
        help="Dollars per hour of each VM. Default: each VM's known price.",
        show_default=False,
    ),
]
OnDemandOption = Annotated[
    float | None,
    typer.Option(
        "--on-demand-price",
        min=0,
        max=ranges.USD_PER_HOUR.high,
        help="Dollars per hour of such a VM on demand, to compare.",
        show_default=False,
    ),
]
