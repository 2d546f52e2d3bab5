"""Rehearsals with real processes: the same weights in every shape, the expected time, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from manager.controller.state.state import Phase
from manager.engine.local_vms.namespaces import DIRECTORY, remove_stale
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observed
from manager.host.processes import wait_gone
from manager.rehearsal import RehearsalSpec, Rehearsed, plan_rehearsal, rehearse, rehearse_changes, run_facts
from manager.rehearsal.planning import Planned
from manager.run_dir import RunDir
from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.contract.errors import TrainingStopped
from morph.contract.profile import LinkProfile, Timing
from morph.contract.trace import Trace, TraceEvent
from simulator import simulate_plan, synthetic_profile
from simulator.inputs.synthetic import with_type
from tests.engine.test_namespaces import permitted
from tests.system.commands import COMMAND, ROOT
from tests.system.harness import together
from tests.waiting import BOUND_S, poll_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def _spread(timing: Timing) -> Timing:
    quantiles_s = tuple(timing.median_s * factor for factor in (0.5, 1.0, 2.5))
    return timing.model_copy(update={"quantiles_s": quantiles_s})


PROFILE = synthetic_profile(num_sections=6, forward_s=0.004, batch_size=32, micro_batch_size=4, tied=True)
JITTERY = PROFILE.model_copy(
    update={
        "sections": tuple(
            section.model_copy(update={"forward": {m: _spread(timing) for m, timing in section.forward.items()}})
            for section in PROFILE.sections
        )
    }
)


def spec_of(stages: int, replicas: int, **fields: Any) -> RehearsalSpec:
    return RehearsalSpec(
        **{
            "profile": PROFILE,
            "num_stages": stages,
            "num_replicas": replicas,
            "num_hosts": stages * replicas,
            "steps": 2,
            "time_scale": 1.0,
            **fields,
        }
    )


def rehearsed(spec: RehearsalSpec, directory: Path) -> tuple[Rehearsed, dict[str, str]]:
    """Return the figures, and the sha256 of every unit's final state."""
    return run_planned(plan_rehearsal(spec), directory)


def run_planned(planned: Planned, directory: Path) -> tuple[Rehearsed, dict[str, str]]:
    with RunDir(directory, run_facts(planned)) as run_dir:
        result = rehearse(planned, run_dir)
    return result, weights_of(directory)


def weights_of(directory: Path) -> dict[str, str]:
    url = str(directory / "checkpoints")
    manifest = read_manifest(url, complete_versions(url)[-1])
    return {entry.unit: entry.sha256 for entry in manifest.units}


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_two_shapes_end_with_the_same_weights_and_leave_nothing(tmp_path: Path) -> None:
    before = {process.pid for process in descendants()}
    square, weights = rehearsed(spec_of(2, 2, profile=JITTERY, jitter_seed=1), tmp_path / "square")
    line, others = rehearsed(spec_of(3, 1, slow={1: 1.5}), tmp_path / "line")
    assert weights == others
    assert len(weights) == 7
    for result in (square, line):
        assert len(result.mini_batches_s) == 2
        assert result.measured_s > 0.9 * result.planned.simulation.expected.lower_bound_s
    assert [process for process in descendants() if process.pid not in before] == []


class Losses:
    """Takes a fast VM, and some steps later a slow one; pipelines over both types are then best.

    Each worker of a shape must be of the type for which its stage was planned.
    """

    def __init__(self, fleet: VmFleet) -> None:
        self._fleet, self._at, self._left = fleet, AT, ["fast0", "slow0"]

    def __call__(self, observed: Observed) -> None:
        state = observed.decision.state
        if state.phase is not Phase.TRAINING or state.plan is None:
            return
        for slot in state.slots:
            assert state.workers[slot.worker].facts.node_type == state.plan.stages[slot.stage].node_type
        if self._left and state.version >= self._at:
            self._at = state.version + AT
            self._fleet.revoke(self._left.pop(0))


AT = 3
FAST, SLOW = "synthetic@a", "slow@b"


def test_losses_of_either_type_and_zone_re_shape_mixed_plans_and_change_no_bit(tmp_path: Path) -> None:
    """A given plan takes at least the simulated time, and has the weights of equal pipelines on one type."""
    link = LinkProfile.of(0.002, 1e9)
    profile = with_type(PROFILE, "slow", 2.0).model_copy(update={"between_zones": link})
    deep, shallow = (plan_rehearsal(spec_of(stages, 1)).plan for stages in (3, 2))
    slow = tuple(
        stage.model_copy(update={"node_type": of}) for stage, of in zip(shallow.stages, ("", "slow@b"), strict=True)
    )
    plan = together([deep, shallow.model_copy(update={"stages": slow})])
    assert plan.shape == "3x1 + 2x1"
    spec = spec_of(1, 1, profile=profile, plan=plan, num_hosts=5, steps=3 * AT)
    mixed, weights = rehearsed(spec, tmp_path / "mixed")
    _, others = rehearsed(spec_of(2, 2, steps=3 * AT), tmp_path / "equal")
    assert weights == others
    assert mixed.measured_s > 0.9 * mixed.planned.simulation.expected.lower_bound_s
    fast = simulate_plan(PROFILE, together([deep, shallow]))
    assert mixed.planned.simulation.expected.mini_batch_s > 1.2 * fast.expected.mini_batch_s

    trace = Trace(
        events=tuple(
            TraceEvent(time_s=0, event="add", node_id=f"{name}{number}", instance_type=kind)
            for name, kind in (("fast", FAST), ("slow", SLOW))
            for number in range(3)
        )
    )
    given = {"num_stages": None, "num_hosts": 6, "trace": trace, "memory_bytes": 250_000_000, "steps": 3 * AT}
    planned = plan_rehearsal(spec_of(1, 1, profile=profile, **given))
    with RunDir(tmp_path / "changes", run_facts(planned)) as run_dir:
        changed = rehearse_changes(planned, run_dir, attend=Losses)
    assert [f"{shape} on {pool}" for _, shape, pool in changed.changes] == [
        f"2x1 + 4x1 on {SLOW}=3,{FAST}=3",
        f"2x1 + 3x1 on {SLOW}=3,{FAST}=2",
        f"2x2 on {SLOW}=2,{FAST}=2",
    ]
    assert changed.lost == (FAST, SLOW)
    assert weights_of(tmp_path / "changes") == weights
    for one in changed.plans:
        assert one.measured_s > 0.9 * one.planned.simulation.expected.lower_bound_s, one.planned.plan.shape


def test_a_device_without_the_memory_ends_the_rehearsal_as_out_of_memory(tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped, match="OutOfMemoryError: the emulated device is out of memory"):
        rehearsed(spec_of(2, 1, memory_bytes=1000), tmp_path / "run")


@pytest.fixture(scope="module")
def profile_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_text(PROFILE.model_dump_json(), encoding="utf-8")
    return path


class Command:
    """``morph rehearse`` in its own session, with its own temporary directory, as on batch systems."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.temporary = folder / ("long" * 20)
        self.temporary.mkdir()
        self.process = subprocess.Popen(
            [*COMMAND, "rehearse", *map(str, arguments), "--plain"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.family: list[psutil.Process] = []

    def wait_until_it_trains(self) -> None:
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if "workers, from step 0" in line:
                self.family = psutil.Process(self.process.pid).children(recursive=True)
                assert len(self.family) >= 4
                return
        raise AssertionError("".join(seen))

    def check_that_nothing_is_left(self) -> int:
        output, _ = self.process.communicate(timeout=BOUND_S)
        assert wait_gone(self.family, BOUND_S) == [], output
        poll_until(lambda: not list(self.temporary.glob("morph-*")), f"the end of folders in {self.temporary}")
        return self.process.returncode


LONG = ("-P", 2, "-D", 2, "--steps", 500, "--set", "time_scale=3")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_outlives_an_end_by_signal(profile_path: Path, tmp_path: Path, number: int, code: int) -> None:
    command = Command(tmp_path, profile_path, *LONG)
    command.wait_until_it_trains()
    if number == signal.SIGINT:
        os.killpg(command.process.pid, number)  # as a terminal does
    else:
        command.process.send_signal(number)
    assert command.check_that_nothing_is_left() == code


def namespaces_of(pid: int) -> list[str]:
    return [entry.name for entry in DIRECTORY.glob(f"morph-{pid}-*")] if DIRECTORY.is_dir() else []


@pytest.mark.skipif(not permitted(), reason="network namespaces need Linux, root, ip and tc")
def test_hosts_as_namespaces_end_with_the_same_weights_and_are_removed(profile_path: Path, tmp_path: Path) -> None:
    _, plain = rehearsed(spec_of(2, 1), tmp_path / "plain")
    _, joined = rehearsed(spec_of(2, 1, network="namespaces"), tmp_path / "joined")
    assert joined == plain
    assert namespaces_of(os.getpid()) == []
    command = Command(tmp_path, profile_path, *LONG, "--set", "network=namespaces")
    command.wait_until_it_trains()
    assert len(namespaces_of(command.process.pid)) == 5
    command.process.kill()
    command.check_that_nothing_is_left()
    assert namespaces_of(command.process.pid) == []


@pytest.mark.skipif(not permitted(), reason="network namespaces need Linux, root, ip and tc")
def test_namespaces_of_a_process_that_is_gone_are_removed_by_the_next_one() -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    pid = int(gone.stdout)
    subprocess.run(["ip", "netns", "add", f"morph-{pid}-0"], check=True)
    remove_stale()
    assert namespaces_of(pid) == []
