"""Starting torchrun's elastic agents, and ending them with everything they started, by process id alone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

TRAIN = Path(__file__).with_name("train.py")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One job under torchrun."""

    job: str
    run_dir: Path
    checkpoint_every: int
    elastic_arguments: tuple[str, ...]


def start_agent(setting: Setting, name: str) -> psutil.Popen:
    """Start one agent; its output and its workers' go to ``<run_dir>/<name>.log``."""
    command = [
        sys.executable, "-m", "torch.distributed.run", *setting.elastic_arguments, str(TRAIN),
        "--job", setting.job, "--run-dir", str(setting.run_dir), "--checkpoint-every", str(setting.checkpoint_every),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # A store shared by all rounds still holds the addresses of the dead workers, and the restarted group connects to
    # those (pytorch issue 135712): without this, torchrun restarts for ever.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (setting.run_dir / f"{name}.log").open("wb") as output:
        return psutil.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )


def kill_vm(agent: psutil.Popen) -> None:
    """SIGKILL an agent and all it started, as when a VM is taken. Returns when they are gone, or after 10 s."""
    try:
        processes = [agent, *agent.children(recursive=True)]
    except psutil.NoSuchProcess:
        processes = [agent]
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=10)
