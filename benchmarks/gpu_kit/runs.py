"""Managed runs on this machine's device, as a user starts them; ends with the bits of each, unit by unit.

    python -m benchmarks.gpu_kit.runs --device cuda --job JOB --profile FILE --folder DIR NAME..

NAME: one (1x1, undisturbed), pair (two workers, P=2), killed (three workers; one is killed in the middle), and the same
with -ipc (mailboxes); salvage (three workers, partial sums are copied, one is killed).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from morph.checkpoint.manifest import complete_versions, read_manifest

HOST = "manager.engine.on_processes.process_host"
parser = argparse.ArgumentParser()
for name in ("device", "job", "profile", "folder"):
    parser.add_argument(f"--{name}", required=True)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--memory", default="20000000000")
parser.add_argument("names", nargs="+")
options = parser.parse_args()


def workers(of: int) -> list[psutil.Process]:
    """Those that were forked for a run, who have computed something."""
    found = []
    for host in psutil.Process(of).children(recursive=True):
        try:
            if HOST in " ".join(host.cmdline()):
                found += [one for one in host.children() if one.num_threads() > 4]
        except psutil.Error:
            continue
    return sorted({one.pid: one for one in found}.values(), key=lambda one: one.cpu_times().user)


def run(name: str) -> dict[str, str] | None:
    folder = Path(options.folder) / name
    folder.mkdir(parents=True, exist_ok=True)
    ipc = name.endswith("-ipc")
    kind = name.removesuffix("-ipc")
    number = {"one": 1, "pair": 2, "killed": 3, "salvage": 3}[kind]
    cluster = folder / "cluster.yaml"
    cluster.write_text(
        f"vms: {{kind: local, num_vms: {number}, keep: {number}, device: {options.device}, links: "
        f"{'ipc' if ipc else 'staged'}, "
        f"memory_bytes: {options.memory}}}\n"
        f"policy: {{checkpoint_every_steps: 10, redundancy: {'salvage' if kind == 'salvage' else 'off'}, "
        f"heartbeat_timeout_s: 15}}\n"
    )
    shape = {"one": ["-P", "1", "-D", "1"], "pair": ["-P", "2", "-D", "1"]}.get(
        kind, ["-P", "2"] if kind == "salvage" else []
    )
    command = [
        sys.executable,
        "-m",
        "morph.cli.main",
        "run",
        options.job,
        "--profile",
        options.profile,
        "--cluster",
        str(cluster),
        "--steps",
        str(options.steps),
        "--run-dir",
        str(folder / "run"),
        "--log-format",
        "json",
        "--no-page",
        *shape,
    ]
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    killed = threading.Event()

    def kill() -> None:
        found = workers(process.pid)
        if found:
            victim = found[len(found) // 2]
            print(
                f"  {name}: SIGKILL to worker {victim.pid} of {[one.pid for one in found]} at "
                f"{time.monotonic() - begun:.1f} s",
                flush=True,
            )
            os.kill(victim.pid, signal.SIGKILL)

    assert process.stdout is not None
    shown = 0
    for line in process.stdout:
        lines.append(line.rstrip())
        try:
            told = json.loads(line)
        except ValueError:
            told = {}
        step = told.get("step", told.get("version"))
        if (
            kind in ("killed", "salvage")
            and isinstance(step, int)
            and step >= options.steps // 3
            and not killed.is_set()
        ):
            killed.set()
            kill()
        if shown < 400:
            shown += 1
    rc = process.wait()
    took = time.monotonic() - begun
    (folder / "lines.txt").write_text("\n".join(lines))
    url = str(folder / "run" / "checkpoints")
    versions = complete_versions(url)
    print(f"{name}: rc {rc}, {took:.1f} s, versions {versions[-3:]}", flush=True)
    if rc or not versions or versions[-1] != options.steps:
        log = folder / "run" / "workers.log"
        print("\n".join(lines[-15:]))
        print(log.read_text()[-3000:] if log.exists() else "no workers.log")
        if not versions or versions[-1] != options.steps:
            return None
    log = folder / "run" / "workers.log"
    if log.exists() and log.read_text().strip():
        print(f"  workers.log ends: {log.read_text().strip()[-600:]}")
    shapes = [json.loads(line).get("shape") for line in lines if line.startswith("{") and '"shape"' in line]
    print(
        f"  shapes: {list(dict.fromkeys(one for one in shapes if one))}; lines: {len(lines)}; last: "
        f"{lines[-1][:150] if lines else ''}"
    )
    return {unit.unit: unit.sha256 for unit in read_manifest(url, options.steps).units}


found = {name: run(name) for name in options.names}
first = next((one for one in found.values() if one), None)
for name, digests in found.items():
    if digests is None:
        print(f"RESULT {name}: did not come to its end")
    else:
        other = [unit for unit in digests if first is not None and digests[unit] != first.get(unit)]
        print(
            f"RESULT {name}: {len(digests)} units; {'bits as the first' if not other else f'OTHER BITS in {other[:6]}'}"
        )
sys.exit(0 if all(one == first and one for one in found.values()) else 1)
