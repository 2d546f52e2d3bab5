"""Morph's simulator compared with real runs of others: those in the artifact of Sailor (SOSP 2025).

    python -m benchmarks sailor CHECKOUT             # every run
    python -m benchmarks sailor CHECKOUT --summary   # the mean and the worst error of each group of runs

CHECKOUT is a checkout of github.com/eth-easl/sailor. It has times of each layer on each type of GPU, fitted links
between them, and iteration times of DeepSpeed (1F1B, blocking sends, reductions after the backwards) that were really
measured: OPT-350 and GPT-Neo 2.7B on 1 to 64 nodes of four GH200s, and OPT-350 on nodes of eight RTX 2080, 3090 and
Titan mixed. Each is simulated from these profiles by Morph, and by Sailor's own simulator, which is imported from the
checkout.

A node with tensor parallelism inside is one worker here. Nothing is fitted to the measured iterations.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import head, option, row
from morph.contract.profile import Environment, JobFacts, LinkProfile, Profile, SectionProfile, SendTime, Timing
from simulator import simulate

PLANNER = "sailor/Planner"
GROUPS = {
    "OPT-350 on GH200 nodes": ("clariden/OPT-350", "opt_350"),
    "GPT-Neo 2.7B on GH200 nodes": ("clariden/GPT-NEO", "gpt_neo27"),
    "OPT-350 on mixed RTX nodes": ("mit", "opt_350"),
}
FLOAT_BYTES = 4
LINK_BYTES_PER_S = 10**9
"""Bytes per second of the link in our profiles, in which sizes encode seconds (see :meth:`Run.profile`)."""
Worker = tuple[str, int]
"""A node, as one worker: its type of GPU, and how many of them share each layer."""


def read(path: Path) -> Any:
    """A JSON file of the checkout.

    Raises:
        typer.BadParameter: there is none.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"no checkout of eth-easl/sailor: {error}") from None


@dataclass(frozen=True)
class Artifact:
    """The files of the checkout that are read."""

    root: Path

    @cached_property
    def layer_times_s(self) -> Any:
        """Forward, backward and optimizer step, by model, type, m, GPUs that share a layer, and layer."""
        return read(self.root / PLANNER / "simulations/profiles_tmp.json")

    @cached_property
    def layers(self) -> Any:
        """Sizes of layers, by model, GPUs that share a layer, and layer."""
        return read(self.root / PLANNER / "llm_info.json")

    @cached_property
    def links(self) -> Any:
        """Links by zone, type and GPUs of the sender, and zone, type and GPUs of the receiver."""
        return read(self.root / "sailor/providers/multizone_bandwidths_het.json")

    def message_s(self, size_bytes: float, sender: Worker, receiver: Worker, zone: str) -> float:
        """One message between two nodes, over all of their GPUs, each of which sends its part.

        The bandwidth was fitted for several numbers of GPUs at once. More are never slower together, so the best one
        counts: 8 pairs of RTX 2080 and Titan are given 1 Gbit/s, and 4 of them 25.
        """
        found = []
        for count in range(1, min(sender[1], receiver[1]) + 1):
            fitted = self.links[zone][sender[0]].get(str(count), {}).get(zone, {}).get(receiver[0], {}).get(str(count))
            if fitted is not None:
                power = math.log2(size_bytes / 1e6)
                found.append(sum(c * power**n for n, c in enumerate(reversed(fitted[0]))))
        return size_bytes / 1e9 / float(max(found))


@dataclass(frozen=True, eq=False)
class Run:
    """One measured configuration. ``workers[s][d]`` of stage s and replica d; ``doubt``: why it is not counted."""

    artifact: Artifact
    name: str
    training: Mapping[str, Any]
    plan: Mapping[str, Any]
    doubt: str = ""

    @property
    def pipeline(self) -> Mapping[str, Any]:
        """The one pipeline that the configuration describes, with all replicas."""
        found: Mapping[str, Any] = self.plan["pipeline_list"][0]
        return found

    @property
    def measured_s(self) -> float:
        """Measured seconds of an iteration."""
        return float(self.plan["real"])

    @cached_property
    def workers(self) -> tuple[tuple[Worker, ...], ...]:
        """Workers by stage and replica."""
        stages = self.pipeline["tmp_per_stage"]
        return tuple(tuple((vms[0][0], shared) for vms, shared in stage) for stage in stages)

    @property
    def num_replicas(self) -> int:
        """D."""
        return len(self.workers[0])

    def profile(self, replica: int) -> Profile:
        """The profile of a job on the nodes of one replica: every layer is a section, with the times of its node.

        Links differ between cuts and rings, but a profile has only one kind between nodes. So its link carries a byte
        per nanosecond, and a message has as many bytes as it really takes nanoseconds over its own link.
        """
        m, zone, model = int(self.plan["mbs"]), self.plan["zone"], self.training["model"]
        sizes, stages = self.artifact.layers[model]["1"], self.pipeline["layers_per_stage"]
        sections: list[SectionProfile] = []
        for stage, layers in enumerate(stages):
            mine = self.workers[stage][replica]
            reduced = round(LINK_BYTES_PER_S * self._ring_s(stage) / len(layers))
            for layer in layers:
                forward_s, backward_s, step_s = self._times_s(layer, mine)
                sent_s = 0.0
                if layer == layers[-1] and stage + 1 < len(stages):
                    next_one = self.workers[stage + 1][replica]
                    sent_bytes = m * FLOAT_BYTES * sizes[str(layer)]["act_output_floats"]
                    sent_s = self.artifact.message_s(sent_bytes, mine, next_one, zone)
                sections.append(
                    SectionProfile(
                        index=len(sections),
                        label=f"layer {layer}",
                        forward={m: exactly(forward_s)},
                        backward={m: exactly(backward_s)},
                        parameter_bytes=reduced,
                        optimizer_bytes=0,
                        gradient_bytes=reduced,
                        input_bytes_per_sample=0,
                        activation_bytes_per_sample=0,
                        output_bytes_per_sample=round(LINK_BYTES_PER_S * sent_s / m),
                        optimizer_step=exactly(step_s / len(layers)),  # theirs is that of a whole stage
                    )
                )
        return Profile(
            job=JobFacts(
                name=model, fingerprint=model, batch_size=self.plan["gbs"], num_parameters=0, micro_batch_size=m
            ),
            environment=_ENVIRONMENT,
            sections=tuple(sections),
            intra_node=_LINK,
            inter_node=_LINK,
            accumulator_bytes_per_parameter=4,
            commit=exactly(0.0),
            checkpoint_write_bytes_per_s=1e9,
        )

    def _times_s(self, layer: int, worker: Worker) -> tuple[float, float, float]:
        kind, shared = worker
        found = self.artifact.layer_times_s[self.training["model"]][kind][str(self.plan["mbs"])][str(shared)][
            str(layer)
        ]
        return float(found[0]), float(found[1]), float(found[2])

    def _ring_s(self, stage: int) -> float:
        """Seconds a replica's part of a stage's reduction takes, at the slowest pair of neighbours of the ring."""
        ring, sizes = self.workers[stage], self.artifact.layers[self.training["model"]]["1"]
        if len(ring) == 1:
            return 0.0
        part = sum(sizes[str(layer)]["params_floats"] for layer in self.pipeline["layers_per_stage"][stage])
        part_bytes = FLOAT_BYTES * part / len(ring)
        neighbours = zip(ring, (*ring[1:], ring[0]), strict=True)
        slowest_s = max(self.artifact.message_s(part_bytes, one, other, self.plan["zone"]) for one, other in neighbours)
        return slowest_s * len(ring)  # of which each of the 2 (D - 1) messages is a D-th

    def simulated_s(self, overlap: str, all_reduce: str = "late") -> float:
        """Return Morph's time of the slowest replica, for which the others wait before they reduce."""
        first = [layers[0] for layers in self.pipeline["layers_per_stage"]]
        kinds = {tuple(stage[replica] for stage in self.workers): replica for replica in range(self.num_replicas)}
        return max(
            simulate(
                self.profile(replica),
                boundaries=first,
                num_replicas=self.num_replicas,
                schedule="1f1b",
                window_slope=1,
                recompute=False,
                all_reduce=all_reduce,
                overlap=overlap,
            ).expected.mini_batch_s
            for replica in kinds.values()
        )


def runs(artifact: Artifact, group: str) -> list[Run]:
    """The measured configurations of a group, those that cannot be right with the reason."""
    folder, training_name = GROUPS[group]
    training = read(artifact.root / PLANNER / f"simulations/configs/training_config_{training_name}.json")
    paths = (artifact.root / PLANNER / "simulations/validation" / folder).rglob("*.json")
    found: list[Run] = []
    for path in sorted(paths, key=lambda path: (len(path.parent.name), path.parent.name, path.name)):
        plan = read(path)
        num_layers = sum(map(len, plan["pipeline_list"][0]["layers_per_stage"]))
        twin = [
            run.name for run in found if (run.measured_s, run.plan["red_grads"]) == (plan["real"], plan["red_grads"])
        ]
        doubt = f"the same times as {twin[0]}" if twin else ""
        if num_layers != training["num_all_layers"]:
            doubt = f"{num_layers} of {training['num_all_layers']} layers"
        found.append(Run(artifact, path.stem.removeprefix("plan_config_").replace("_", " "), training, plan, doubt))
    return found


@contextlib.contextmanager
def their_simulator(artifact: Artifact) -> Iterator[Callable[[Run], float]]:
    """Sailor's own simulator: seconds of an iteration. It wants to lie in a folder named sailor, and prints a lot."""
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as packages:
        (Path(place) / "sailor").symlink_to(artifact.root.resolve())
        (Path(packages) / "sailor").symlink_to(artifact.root.resolve() / "sailor")
        sys.path.insert(0, packages)
        module = importlib.import_module("sailor.Planner.simulations.runtime_simulator")

        def seconds(run: Run) -> float:
            training = {**run.training, "global_batch_size": run.plan["gbs"]}
            given = (place, training, artifact.layers, False, artifact.layer_times_s, run.plan["zone"])
            with contextlib.redirect_stdout(io.StringIO()):
                plan = {"pipeline_list": run.plan["pipeline_list"], "mbs": run.plan["mbs"]}
                return float(module.Simulator(*given).simulate_iteration_time(plan)[0])

        try:
            yield seconds
        finally:
            sys.path.remove(packages)
            for name in [name for name in sys.modules if name.partition(".")[0] == "sailor"]:
                del sys.modules[name]


def exactly(time_s: float) -> Timing:
    """A time without spread."""
    return Timing(median_s=time_s, mad_s=0.0, num_samples=1)


def _nodes(run: Run) -> str:
    """Return by stage the types of its replicas, where there are several."""
    if len({worker for stage in run.workers for worker in stage}) == 1:
        return ""
    short = {"RTX-2080": "2080", "RTX-3090": "3090", "Titan-RTX": "Titan"}
    return "/".join(" ".join(short.get(kind, kind) for kind, _ in stage) for stage in run.workers)


_LINK_TIMES = tuple(SendTime(size_bytes=size, time=exactly(size / LINK_BYTES_PER_S)) for size in (0, LINK_BYTES_PER_S))
_LINK = LinkProfile(activation=_LINK_TIMES, gradient=_LINK_TIMES)
_ENVIRONMENT = Environment(
    python="3",
    torch="DeepSpeed",
    platform="Sailor's artifact",
    device="GPU",
    num_cores=1,
    threads_per_worker=1,
    created="2025-10-13T00:00:00Z",
)


def show_runs(group: str, errors: Mapping[Run, tuple[float, ...]]) -> None:
    """Print the errors of each run of a group, and their means over the runs that count."""
    head(f"{group} | P x D, m, batch | measured s | Sailor's | ours | ours, sends overlapped")
    for run, given in errors.items():
        shape = f"{len(run.workers)}x{run.num_replicas}, {run.plan['mbs']}, {run.plan['gbs']}"
        label = " ".join(filter(None, (run.name, _nodes(run), f"({run.doubt})" if run.doubt else "")))
        row(label, shape, f"{run.measured_s:.3f}", *(f"{100 * error:+.1f} %" for error in given))
    counted = [given for run, given in errors.items() if not run.doubt]
    means = (f"{100 * statistics.mean(map(abs, each)):.1f} %" for each in zip(*counted, strict=True))
    row(f"mean of {len(counted)}, without sign", "", "", *means)


def main(
    checkout: Annotated[Path, typer.Argument(help="of github.com/eth-easl/sailor")],
    summary: Annotated[bool, option("print only the mean and the worst error of each group of runs")] = False,
) -> None:
    artifact = Artifact(checkout)
    if summary:
        head("group of runs | counted | Sailor's: mean, worst | ours | ours, sends overlapped")
    with their_simulator(artifact) as theirs:
        for group in GROUPS:
            errors = {
                run: tuple(
                    value / run.measured_s - 1
                    for value in (theirs(run), run.simulated_s("none"), run.simulated_s("full"))
                )
                for run in runs(artifact, group)
            }
            if not summary:
                show_runs(group, errors)
                continue
            counted = [given for run, given in errors.items() if not run.doubt]
            cells = (
                f"{100 * statistics.mean(map(abs, each)):.1f} %, {100 * max(each, key=abs):+.1f} %"
                for each in zip(*counted, strict=True)
            )
            row(group, len(counted), *cells)
