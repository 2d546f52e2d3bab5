"""How long a job under torchrun's elastic agent stands still after a kill.

    python benchmarks/torchrun_restart process          one agent; a worker process is killed
    python benchmarks/torchrun_restart vm               one agent per VM; a VM is killed, another comes; tuned time-outs
    python benchmarks/torchrun_restart vm --defaults    the same with torchrun's own rendezvous time-outs

Prints a table and JSON. Ends everything it started, also when it is interrupted or reaches its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from agents import Setting
from scenarios import Outcome, lose_processes, lose_vms

REPOSITORY = Path(__file__).parents[2]
# An agent's keep-alive is due each interval and often comes one interval late, so that two attempts would let healthy
# agents expire.
TUNED = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1"


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def summary(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "p95": round(percentile(values, 0.95), 3),
        "worst": round(max(values), 3),
    }


def elastic_arguments(arguments: argparse.Namespace) -> tuple[str, ...]:
    common = ("--max-restarts=1000", "--local-addr=127.0.0.1")
    if arguments.scenario == "process":
        return (*common, "--standalone", f"--nproc-per-node={arguments.workers}")
    conf = "is_host=false" if arguments.defaults else f"is_host=false,{TUNED}"
    nodes = f"--nnodes={arguments.workers - 2}:{arguments.workers}"
    return (*common, nodes, "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=benchmark", f"--rdzv-conf={conf}")


def report(arguments: argparse.Namespace, outcome: Outcome, total_s: float, load_before: float) -> dict[str, Any]:
    conditions = {
        "scenario": arguments.scenario,
        "time_outs": "torchrun's defaults" if arguments.defaults or arguments.scenario == "process" else TUNED,
        "job": Path(arguments.job).name,
        "workers": arguments.workers,
        "checkpoint_every_steps": arguments.checkpoint_every,
        "num_cores": os.cpu_count(),
        "load_before": round(load_before, 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    figures: dict[str, Any] = {"kills": len(outcome.recoveries), "finished": outcome.finished}
    if outcome.recoveries:
        figures["kill_to_next_step_s"] = summary([one.next_step_s for one in outcome.recoveries])
        figures["kill_to_new_step_s"] = summary([one.caught_up_s for one in outcome.recoveries])
        figures["redone_steps"] = summary([float(one.redone_steps) for one in outcome.recoveries])
    if outcome.rejoin_s:
        figures["new_vm_to_step_of_full_group_s"] = summary(outcome.rejoin_s)
    return {"conditions": conditions, "total_s": round(total_s, 1), "figures": figures, "raw": outcome.as_json()}


def print_table(figures: dict[str, Any]) -> None:
    print(f"{figures['kills']} kills{'' if figures['finished'] else ' (stopped at the time limit)'}")
    print(f"{'':34}{'median':>10}{'p95':>10}{'worst':>10}")
    for name, row in figures.items():
        if isinstance(row, dict):
            print(f"{name:34}" + "".join(f"{row[key]:10.3f}" for key in ("median", "p95", "worst")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=["process", "vm"])
    parser.add_argument("--defaults", action="store_true", help="keep torchrun's rendezvous time-outs")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--job", default=f"{REPOSITORY / 'configs/jobs/tiny_gpt.py'}:job")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps")
    parser.add_argument("--limit-s", type=float, default=540.0, help="stop after this time with the kills so far")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()

    outcome, begin_s, load_before = Outcome(), time.monotonic(), os.getloadavg()[0]
    scenario = lose_processes if arguments.scenario == "process" else lose_vms
    with tempfile.TemporaryDirectory(prefix="torchrun_restart_") as folder:
        setting = Setting(
            job=arguments.job,
            run_dir=Path(folder),
            checkpoint_every=arguments.checkpoint_every,
            elastic_arguments=elastic_arguments(arguments),
        )
        try:
            scenario(setting, arguments.workers, arguments.kills, begin_s + arguments.limit_s, outcome)
        except RuntimeError:
            for path in sorted(Path(folder).glob("*.log")):
                print(f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-15:], sep="\n")
            raise
    result = report(arguments, outcome, time.monotonic() - begin_s, load_before)
    print_table(result["figures"])
    print(json.dumps({key: value for key, value in result.items() if key != "raw"}))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
