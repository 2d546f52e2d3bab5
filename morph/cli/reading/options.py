"""Options and arguments that several commands have, each declared once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


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

StagesOption = Annotated[int, typer.Option("-P", help="Stages of a pipeline.", show_default=False)]
ReplicasOption = Annotated[int, typer.Option("-D", help="Replicas of the pipeline.")]
KneeOption = Annotated[
    int | None, typer.Option("--m", help="Micro-batch size. Default: the job's, else the smallest efficient one.")
]
ScheduleOption = Annotated[ScheduleName, typer.Option("--schedule", help="Pipeline schedule.")]
AnyScheduleOption = Annotated[
    ScheduleName | None,
    typer.Option(
        "--schedule",
        help="Pipeline schedule; the weights do not depend on it. Default: whichever is faster.",
        show_default=False,
    ),
]
RecomputeOption = Annotated[
    bool | None,
    typer.Option(
        "--recompute/--no-recompute",
        help="Run forwards again, or keep activations, which takes more memory. Default: whichever is faster.",
        show_default=False,
    ),
]
SlopeOption = Annotated[
    int | None,
    typer.Option(
        "--slope", min=1, help="Micro-batches in flight: slope * (P - 1 - s) + 1. Default: the smallest that pays."
    ),
]
SlotsOption = Annotated[
    int | None,
    typer.Option("--compute-slots", help="Tasks that can run at once when workers share one machine's cores."),
]
GpusPerNodeOption = Annotated[
    int | None, typer.Option("--gpus-per-node", help="GPUs of each node. Default: every GPU has a node of its own.")
]
NodeTypeOption = Annotated[
    str | None, typer.Option("--node-type", help="Which of the node types in the profile. Default: the first.")
]
OwnLinksOption = Annotated[
    bool, typer.Option("--own-links", help="Let no two messages share the bandwidth of a node's link.")
]
SlowOption = Annotated[
    list[str] | None,
    typer.Option("--slow", metavar="STAGE[/REPLICA]:FACTOR", help="A slow worker, or stage. Repeatable."),
]
DrawsOption = Annotated[int | None, typer.Option("--draws", help="Mini-batches to draw for each shape. Default: 20.")]

PriceOption = Annotated[
    float | None,
    typer.Option(
        "--price",
        min=0,
        help="Dollars per VM and hour that are paid, for all VMs; else what is known of each.",
        show_default=False,
    ),
]
OnDemandOption = Annotated[
    float | None,
    typer.Option("--on-demand-price", min=0, help="What such a VM costs on demand, to compare.", show_default=False),
]
