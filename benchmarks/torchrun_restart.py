"""How long a job under torchrun's elastic agent pauses after a kill.

    python -m benchmarks torchrun_restart process          one agent; a worker process is killed
    python -m benchmarks torchrun_restart vm               an agent per VM; one is killed, one comes; tuned time-outs
    python -m benchmarks torchrun_restart vm --defaults    the same with torchrun's own rendezvous time-outs

Prints a table. Ends everything that it started, also when it is interrupted or reaches its time limit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
from torch._C._distributed_c10d import TCPStore

from benchmarks.harness import LOOPBACK, ROOT, TINY_JOB, head, machine, option, row, worst_cases

TRAIN = ROOT / "benchmarks/torchrun_worker.py"
# An agent's keep-alive is due each interval and often comes one interval late, so that two attempts would let healthy
# agents expire.
TUNED = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1"
MIN_STEPS = 20  # of a new group before the next kill; a random number up to one checkpoint interval comes on top
WAIT_S = 120.0


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


class OutOfTimeError(Exception):
    """The benchmark's own time limit was reached."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What one kill cost, from just before the SIGKILL."""

    next_step_s: float  # until any step is applied again by the new group
    caught_up_s: float  # until a step is applied that had not been applied before the kill
    redone_steps: int


@dataclass
class Outcome:
    """All kills of one scenario; ``rejoin_s``: start of a new agent until a step of the full group."""

    recoveries: list[Recovery] = field(default_factory=list)
    rejoin_s: list[float] = field(default_factory=list)
    finished: bool = False


class Log:
    """The lines that the workers have written so far."""

    def __init__(self, path: Path, deadline_s: float, check: Callable[[], None]) -> None:
        self._path, self._deadline_s, self._check, self._read = path, deadline_s, check, 0
        self.entries: list[dict[str, Any]] = []

    def wait(self, what: str, found: Callable[[], Any]) -> Any:
        """Read on until ``found()`` is not None; polls each 5 ms, gives up after WAIT_S or at the deadline."""
        until_s = time.monotonic() + WAIT_S
        while True:
            self._poll()
            result = found()
            if result is not None:
                return result
            self._check()
            now_s = time.monotonic()
            if now_s > self._deadline_s:
                raise OutOfTimeError
            if now_s > until_s:
                raise RuntimeError(f"waited {WAIT_S:.0f} s for {what}")
            time.sleep(0.005)

    def _poll(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as lines:
            lines.seek(self._read)
            whole, _, _ = lines.read().rpartition(b"\n")
        if whole:
            self._read += len(whole) + 1
            self.entries += [json.loads(line) for line in whole.splitlines()]

    def settled(self, world: int, after: int, num_steps: int) -> int | None:
        """Return rank 0's process id once it has applied so many steps with ``world`` workers."""
        steps = [e for e in self.entries[after:] if e["event"] == "step"]
        last = steps[-1] if steps else None
        if last is None or last["world"] != world:
            return None
        return last["pid"] if sum(e["pid"] == last["pid"] for e in steps) >= num_steps else None

    def first_step(self, after: int, not_pid: int, above: int = -1) -> dict[str, Any] | None:
        """Return the first step that another process than ``not_pid`` applied, numbered above ``above``."""
        for entry in self.entries[after:]:
            if entry["event"] == "step" and entry["pid"] != not_pid and entry["step"] > above:
                return entry
        return None

    def recovery(self, mark: int, old_pid: int, killed_s: float) -> Recovery:
        """Wait for the group to come back after a kill."""
        before = max(e["step"] for e in self.entries[:mark] if e["event"] == "step")
        step = self.wait("a step after the kill", partial(self.first_step, mark, old_pid))
        # Steps that were under way at the kill may still have been applied by the old group.
        before = max(
            [before, *(e["step"] for e in self.entries[mark:] if e["event"] == "step" and e["pid"] == old_pid)]
        )
        caught_up = self.wait("the step that was lost", partial(self.first_step, mark, old_pid, before))
        return Recovery(
            next_step_s=step["time_s"] - killed_s,
            caught_up_s=caught_up["time_s"] - killed_s,
            redone_steps=before + 1 - step["step"],
        )


def lose(setting: Setting, num_workers: int, num_kills: int, deadline_s: float, outcome: Outcome, *, vms: bool) -> None:
    """Kill a random worker each time, after which torchrun starts the group again.

    Without ``vms`` there is one agent. With them each worker has one, which is killed with it; the rest go on, and then
    a new agent joins.
    """
    if vms:  # the rendezvous store lives here, so that losing any VM leaves it standing
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        arguments = (*setting.elastic_arguments, f"--rdzv-endpoint=127.0.0.1:{store.port}")
        setting = Setting(**{**vars(setting), "elastic_arguments": arguments})
    agents = [start_agent(setting, f"vm{index}" if vms else "agent") for index in range(num_workers if vms else 1)]

    def check() -> None:
        for agent in agents:
            if agent.poll() is not None:
                raise RuntimeError(f"an agent ended with {agent.returncode}; see {setting.run_dir}")

    log, choose, mark = Log(setting.run_dir / "log.jsonl", deadline_s, check), random.Random(0), 0
    try:
        for kill in range(num_kills):
            steps = MIN_STEPS + choose.randrange(setting.checkpoint_every)
            old_pid = log.wait("the group to settle", partial(log.settled, num_workers, mark, steps))
            group = [e["pid"] for e in log.entries if e["event"] == "start"][-num_workers:]
            mark, killed_s = len(log.entries), time.monotonic()
            if vms:
                kill_vm(agents.pop(choose.randrange(num_workers)))
            else:
                os.kill(choose.choice(group), signal.SIGKILL)
            outcome.recoveries.append(log.recovery(mark, old_pid, killed_s))
            if vms:
                mark, started_s = len(log.entries), time.monotonic()
                agents.append(start_agent(setting, f"vm{num_workers + kill}"))
                full = log.wait("the new VM to take part", partial(_full_step, log, mark, num_workers))
                outcome.rejoin_s.append(full["time_s"] - started_s)
        outcome.finished = True
    except OutOfTimeError:
        pass
    finally:
        for agent in agents:
            kill_vm(agent)


def _full_step(log: Log, after: int, world: int) -> dict[str, Any] | None:
    return next((e for e in log.entries[after:] if e["event"] == "step" and e["world"] == world), None)


def elastic_arguments(scenario: str, workers: int, defaults: bool) -> tuple[str, ...]:
    common = ("--max-restarts=1000", f"--local-addr={LOOPBACK}")
    if scenario == "process":
        return (*common, "--standalone", f"--nproc-per-node={workers}")
    conf = "is_host=false" if defaults else f"is_host=false,{TUNED}"
    nodes = f"--nnodes={workers - 2}:{workers}"
    return (*common, nodes, "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=benchmark", f"--rdzv-conf={conf}")


def main(
    scenario: Literal["process", "vm"],
    defaults: Annotated[bool, option("keep torchrun's rendezvous time-outs")] = False,
    kills: int = 20,
    workers: int = 6,
    job: str = TINY_JOB,
    checkpoint_every: Annotated[int, option("steps")] = 20,
    limit_s: Annotated[float, option("stop after this time with the kills so far")] = 540.0,
) -> None:
    outcome, begin_s, told = Outcome(), time.monotonic(), machine()
    with tempfile.TemporaryDirectory(prefix="torchrun_restart_") as folder:
        setting = Setting(
            job=job,
            run_dir=Path(folder),
            checkpoint_every=checkpoint_every,
            elastic_arguments=elastic_arguments(scenario, workers, defaults),
        )
        try:
            lose(setting, workers, kills, begin_s + limit_s, outcome, vms=scenario == "vm")
        except RuntimeError:
            for path in sorted(Path(folder).glob("*.log")):
                print(f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-15:], sep="\n")
            raise
    time_outs = "torchrun's time-outs" if defaults or scenario == "process" else TUNED
    print(f"{scenario}, {workers} workers, {Path(job).name}, a checkpoint every {checkpoint_every} steps, {time_outs}")
    print(f"{told}; {len(outcome.recoveries)} kills{'' if outcome.finished else ' (stopped at the time limit)'}")
    figures = {
        "kill to next step, s": [one.next_step_s for one in outcome.recoveries],
        "kill to a step that is new, s": [one.caught_up_s for one in outcome.recoveries],
        "steps run again": [float(one.redone_steps) for one in outcome.recoveries],
        "new VM to a step of the full group, s": outcome.rejoin_s,
    }
    head("| median | p95 | worst")
    for name, values in figures.items():
        if values:
            row(name, *(f"{value:.3f}" for value in worst_cases(values)))
