"""VMs of the fake Azure that are taken on purpose: evicted with Azure's notice, or ended without one, and replaced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from manager.controller.state.nodes import NodeState
from manager.engine.machines.preemption import PreemptionRequest, PreemptionServer
from manager.host.folders import make_folder, remove
from tests.cloud.fault_world import BOUND_S, World, whole
from tests.cloud.notice_faults import EVENTS, OTHER, VM, agent, nothing, preempt
from tests.notices.metadata_server import Reply
from tests.notices.metadata_server import served as metadata_served
from tests.providers.azure_world import provider
from tests.providers.fake_arm import served


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[World, PreemptionServer]]:
    folder = make_folder()
    with served() as arm, whole(arm, tmp_path) as opened:
        desk = PreemptionServer(folder, lambda: opened.state.workers, opened.event_queue, opened.shell)
        yield opened, desk
        desk.close()
    remove(folder)


def test_an_eviction_is_azures_with_its_own_notice_and_another_vm_comes(run: tuple[World, PreemptionServer]) -> None:
    opened, desk = run
    with metadata_served() as metadata:
        metadata.script("GET", "/metadata/instance/compute/name", Reply(body=VM))
        metadata.script("GET", EVENTS, nothing())
        metadata.script("POST", EVENTS, Reply())
        with agent(opened, metadata):
            assert desk.answer(PreemptionRequest(vms=(VM,), lead_s=2.0, why="a test")).taken == (VM,)
            metadata.script("GET", EVENTS, preempt())
            opened.until(lambda: opened.state.workers[VM].node is NodeState.DRAINING, "Azure's notice")
            opened.until_whole(without=VM)
    assert f"POST virtualMachines/{VM}/simulateEviction" in opened.arm.calls
    assert "preemption injected: a test, evicted by the provider, with its notice" in opened.told
    assert VM not in opened.arm.machines
    assert not any(call == f"DELETE virtualMachines/{VM}" for call in opened.arm.calls)
    assert desk.answer(PreemptionRequest(vms=(VM,))).left == {VM: "it is being preempted already"}


def test_without_a_notice_the_vm_is_deleted_and_nobody_elses(
    run: tuple[World, PreemptionServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, desk = run
    ended = threading.Event()
    delete = opened.provider.delete

    def told(names: list[str]) -> None:
        delete(names)
        ended.set()

    monkeypatch.setattr(opened.provider, "delete", told)
    (tmp_path / "other").mkdir()
    stranger = provider(opened.arm, tmp_path / "other", run="tiny-2")
    (foreign,) = stranger.request("b", 1)
    answer = desk.answer(PreemptionRequest(vms=(OTHER, foreign.name), why="a test"))
    assert (answer.taken, sorted(answer.left)) == ((OTHER,), [foreign.name])
    assert ended.wait(BOUND_S)
    opened.lose(OTHER)
    opened.until_whole(without=OTHER)
    assert foreign.name in opened.arm.machines
    assert not any("simulateEviction" in call for call in opened.arm.calls)
    assert opened.has("preemption injected: a test, no notice")
    stranger.dismantle()
