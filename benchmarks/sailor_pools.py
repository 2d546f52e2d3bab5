"""Mixed pools of A100s and V100s: plans of Sailor (SOSP 2025) and of Morph, judged by one simulator.

    python -m benchmarks sailor_pools CHECKOUT --planner FOLDER

CHECKOUT is as of ``benchmarks sailor``. The pools and the job are those of figure 8b of Sailor's paper: OPT-350, 1,024
samples a mini-batch. The checkout has no plans, only the planner that makes them, in C++. FOLDER holds it, built for
this Python as the extension ``libplanner`` from ``sailor/Planner/sailor_planner/cpp_src`` (with jsoncpp and pybind11);
without it only Morph's plans are printed.

Sailor splits layers among the GPUs of a node (tensor parallelism), which Morph does not do by itself. So Morph plans
twice: for single V100s, and for nodes of four V100s that are one worker each, with the times that the checkout has of
them. Links, layers and memory are the checkout's. Plans are judged under two conditions: as DeepSpeed runs (sends that
block, reductions at the end), and as Morph does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import head, row
from benchmarks.sailor import FLOAT_BYTES, PLANNER, Artifact, Run, Worker, exactly, read, their_simulator
from morph.contract.plan import Plan
from morph.contract.profile import (
    Environment,
    JobFacts,
    LinkProfile,
    NodeTypeProfile,
    Profile,
    SectionProfile,
    SendTime,
)
from simulator import PlanRequest, plan, simulate_plan

POOLS = ((32, 96), (80, 240), (128, 384))
MODEL, ZONE, BATCH = "OPT-350", "us-central1-a", 1024
A100, V100 = "A100-40", "V100-16"
FAST: Worker = (A100, 1)
KINDS = {"V100s alone": (V100, 1), "nodes of four V100s": (V100, 4)}
MEMORY_GB = {A100: 40, V100: 16}
SIZES = (1, 2, 4)
"""Micro-batch sizes that the checkout has of all workers."""
OTHER_BYTES = {1: 2.0e9, 4: 3.0e9}
"""What Sailor's planner takes a GPU to hold besides, alone or one of four that share layers."""
AS_DEEPSPEED = PlanRequest(overlap="none", all_reduce="late")


def profile_of(artifact: Artifact, slower: Worker) -> Profile:
    """The job on A100s, and on V100s as workers of the given kind."""
    sizes = [artifact.layers[MODEL]["1"][str(layer)] for layer in range(len(artifact.layers[MODEL]["1"]))]

    def times(worker: Worker, place: int) -> list[dict[int, Any]]:
        kind, shared = worker
        by_size = {m: artifact.layer_times_s[MODEL][kind][str(m)][str(shared)] for m in SIZES}
        return [{m: exactly(float(by_size[m][str(layer)][place])) for m in SIZES} for layer in range(len(sizes))]

    def steps(worker: Worker) -> list[Any]:
        return [exactly(each[1].median_s / len(sizes)) for each in times(worker, 2)]  # theirs is of all layers

    forward, backward, step = times(FAST, 0), times(FAST, 1), steps(FAST)
    sections = []
    for layer, size in enumerate(sizes):
        parameters = size["params_floats"]
        before = sizes[layer - 1]["act_output_floats"] if layer else 0
        sections.append(
            SectionProfile(
                index=layer,
                label=f"layer {layer}",
                forward=forward[layer],
                backward=backward[layer],
                parameter_bytes=4 * parameters,
                optimizer_bytes=8 * parameters,
                gradient_bytes=4 * parameters,
                input_bytes_per_sample=FLOAT_BYTES * before,
                activation_bytes_per_sample=FLOAT_BYTES * size["act_mem_floats"],
                output_bytes_per_sample=FLOAT_BYTES * size["act_output_floats"] if layer + 1 < len(sizes) else 0,
                optimizer_step=step[layer],
            )
        )
    link = _link(artifact, FAST)
    return Profile(
        job=JobFacts(
            name=MODEL,
            fingerprint=MODEL,
            batch_size=BATCH,
            num_parameters=sum(size["params_floats"] for size in sizes),
        ),
        environment=_environment(FAST),
        sections=tuple(sections),
        intra_node=link,
        inter_node=link,
        accumulator_bytes_per_parameter=4,
        commit=exactly(0.0),
        checkpoint_write_bytes_per_s=1e9,
        node_types=(
            NodeTypeProfile(
                name="v100",
                environment=_environment(slower),
                forward=tuple(times(slower, 0)),
                backward=tuple(times(slower, 1)),
                optimizer_step=tuple(steps(slower)),
                inter_node=_link(artifact, slower),
            ),
        ),
    )


def _link(artifact: Artifact, worker: Worker) -> LinkProfile:
    sent = tuple(
        SendTime(size_bytes=size, time=exactly(artifact.message_s(size, worker, worker, ZONE)))
        for size in (2**power for power in range(20, 31))
    )
    return LinkProfile(activation=sent, gradient=sent)


def _environment(worker: Worker) -> Environment:
    kind, shared = worker
    return Environment(
        python="3",
        torch="DeepSpeed",
        platform="Sailor's artifact",
        device=kind,
        num_cores=1,
        threads_per_worker=1,
        created="2025-10-13T00:00:00Z",
        device_memory_bytes=round(shared * (MEMORY_GB[kind] * 2**30 - OTHER_BYTES[shared])),
    )


def their_plans(artifact: Artifact, folder: Path, pool: tuple[int, int]) -> list[Mapping[str, Any]]:
    """Plans of Sailor's planner for a pool, the best first. It runs in a process of its own, for it prints a lot."""
    script = "import sys; from benchmarks.sailor_pools import print_plans; print_plans(*sys.argv[1:])"
    given = [str(artifact.root), str(folder), *map(str, pool)]
    done = subprocess.run(
        [sys.executable, "-c", script, *given], capture_output=True, text=True, check=True, timeout=3600
    )
    found: list[Mapping[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_plans(root: str, folder: str, *pool: str) -> None:
    """The plans as one line of JSON, in the form that Sailor's simulator takes."""
    sys.path.insert(0, folder)
    import libplanner  # type: ignore[import-not-found]

    checkout = Path(root)
    files = [
        f"{PLANNER}/sailor_planner/profiles/{MODEL}/",
        "sailor/providers/multizone_bandwidths_het.json",
        f"{PLANNER}/simulations/configs/training_config_opt_350.json",
        f"{PLANNER}/llm_info.json",
        "sailor/providers/gcp/communication_cost.json",
    ]
    quotas = str(checkout / PLANNER / "sailor_planner/dummy_quotas_dict.json")
    paths = [str(checkout / path) + "/" * path.endswith("/") for path in files]
    planner = libplanner.SailorPlanner(*paths, True, False, quotas, "throughput")
    names, numbers = sorted(read(Path(quotas))), dict(zip((A100, V100), map(int, pool), strict=True))
    found = []
    for config in planner.get_sorted_plans({ZONE: numbers}, 0.0, 0.0):
        stages = [
            [([(names[kind], shared, ZONE)], shared) for kind, shared, _ in stage]
            for stage in config.get_config_per_stage()
        ]
        layers = [list(each) for each in config.get_stages()]
        pipeline = {"num_stages": len(stages), "layers_per_stage": layers, "tmp_per_stage": stages}
        found.append({"pipeline_list": [pipeline | {"dp": [len(each) for each in stages]}], "mbs": config.get_mbs()})
    print(f"\n{json.dumps(found)}")


def _their_run(artifact: Artifact, plan: Mapping[str, Any]) -> Run:
    training = read(artifact.root / PLANNER / "simulations/configs/training_config_opt_350.json")
    return Run(artifact, "", training, {**plan, "gbs": BATCH, "zone": ZONE, "real": 0.0})


def _words(stages: Sequence[Sequence[Worker]]) -> str:
    """Stages by the GPUs of their replicas; 4 V100 is a node whose GPUs share layers."""
    return ", then ".join(
        " + ".join(
            f"{number} of {shared} {kind.split('-')[0]}" if shared > 1 else f"{number} {kind.split('-')[0]}"
            for (kind, shared), number in sorted(Counter(stage).items())
        )
        for stage in stages
    )


def _shape(found: Plan) -> str:
    """Pipelines by type."""
    kinds = []
    for replica in range(found.num_replicas):
        stages = found.stages_of(replica)
        kinds.append((len(stages), "V100" if found.stages[stages[0]].node_type == "v100" else "A100"))
    return " + ".join(f"{depth}x{len(list(each))} {name}" for (depth, name), each in groupby(kinds))


def main(
    checkout: Annotated[Path, typer.Argument(help="of github.com/eth-easl/sailor")],
    planner: Annotated[Path | None, typer.Option(help="folder with Sailor's planner, built as libplanner")] = None,
) -> None:
    artifact = Artifact(checkout)
    head("pool | plan of | stages | m | Sailor's simulator, s | as DeepSpeed, s | as Morph, s")
    with their_simulator(artifact) as theirs:
        for pool in POOLS:
            name = f"{pool[0]} A100 + {pool[1]} V100"
            if planner is not None:
                run = _their_run(artifact, their_plans(artifact, planner, pool)[0])
                judged = (theirs(run), run.simulated_s("none"), run.simulated_s("full", all_reduce="overlapped"))
                row(name, "Sailor", _words(run.workers), run.plan["mbs"], *(f"{each:.2f}" for each in judged))
            for workers, kind in KINDS.items():
                profile = profile_of(artifact, kind)
                counts = {"a100": pool[0], "v100": pool[1] // kind[1]}
                found = plan(profile, PlanRequest(changes=False), pool=counts, num_runners_up=0).best
                blocking = simulate_plan(profile, found, AS_DEEPSPEED).expected.mini_batch_s
                row(
                    name,
                    f"Morph, {workers}",
                    _shape(found),
                    found.micro_batch_size,
                    "-",
                    f"{blocking:.2f}",
                    f"{found.expected.mini_batch_s:.2f}",
                )
