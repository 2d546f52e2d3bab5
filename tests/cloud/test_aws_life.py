"""A whole run on instances of moto's AWS, until nothing is left: real workers; one instance is taken, one is warned."""

from __future__ import annotations

from pathlib import Path

import pytest

from manager.accounting.spent import NOTHING
from manager.controller.state.events import NodeAppeared, NodesGranted, NoticeGiven, Tick
from manager.engine.loop.driver import Observed
from manager.engine.loop.event_queue import EventQueue
from manager.engine.vms.budget import Spending
from manager.engine.vms.provisioning import Provisioner
from manager.providers.interface import cloud
from morph.checkpoint.manifest import read_manifest
from morph.contract.cluster import Limits
from tests.cloud.accounts import booked
from tests.crew import ManagedCrew
from tests.providers.fake_ec2 import NOTHING as NOTHING_LEFT
from tests.providers.fake_ec2 import PRICES, ec2_region
from tests.system.harness import load_tiny_job

NUM_STEPS, INTERRUPTED_AT, WARNED_AT = 24, 6, 12
SHAPES = {2: "2x1"}
"""With one worker the run waits for the replacement of a VM that was taken."""
pytestmark = pytest.mark.system


def test_a_run_on_instances_adds_up_with_undisturbed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud, "AGREE_S", 100.0)
    crew = ManagedCrew(load_tiny_job(2, 2))
    crew.fork(5)
    shells: list[Provisioner] = []
    taken: list[str] = []
    with ec2_region() as ec2:

        def market(event_queue: EventQueue) -> Provisioner:
            shells.append(Provisioner(ec2.provider(tmp_path, run="job"), event_queue, Spending(Limits())))
            event_queue.put(Tick())  # no VM is up yet
            return shells[-1]

        def watch(crew: ManagedCrew, observed: Observed) -> None:
            """Let granted VMs come up at once; when two train, take one, and later give another one a notice."""
            state, event = observed.decision.state, observed.event
            if isinstance(event, NodesGranted):
                for node in event.nodes:
                    crew.put(NodeAppeared(node=node, request=event.request))
            train = [slot.worker for slot in state.slots]
            due = (INTERRUPTED_AT, WARNED_AT)[len(taken)] if len(taken) < 2 else NUM_STEPS
            if len(train) < 2 or state.version < due or due == NUM_STEPS:
                return
            taken.append(train[-1])
            if due == INTERRUPTED_AT:
                ec2.take(ec2.living()[train[-1]])
                crew.end(train[-1])
            else:
                crew.put(NoticeGiven(worker=train[-1], lead_s=120.0, notice="aws terminate"))

        try:
            finish, report, url = crew.train(tmp_path / "run", SHAPES, NUM_STEPS, watch, market=market)
            shells[0].close()
            told = ec2.real.describe_instances()["Reservations"]
            assert ec2.left() == NOTHING_LEFT
            _, _, undisturbed = crew.train(tmp_path / "alone", {1: "1x1"}, NUM_STEPS)
        finally:
            crew.close()
    assert (finish.outcome, report.version, len(taken)) == ("finished", NUM_STEPS, 2)
    weights = [
        {entry.unit: entry.sha256 for entry in read_manifest(path, NUM_STEPS).units} for path in (url, undisturbed)
    ]
    assert weights[0] == weights[1]
    instances = [instance for reservation in told for instance in reservation["Instances"]]
    names = [{tag["Key"]: tag["Value"] for tag in instance["Tags"]}["Name"] for instance in instances]
    assert len(names) == len(set(names)), "no VM came twice"
    lives = booked(tmp_path / "run")
    assert set(taken) <= set(lives) <= set(names)
    launched = {name: one["LaunchTime"].timestamp() for name, one in zip(names, instances, strict=True)}
    assert {name: life.since_s for name, life in lives.items()} == pytest.approx(
        {name: launched[name] for name in lives}
    )
    lived_s = sum((life.gone_s or 0.0) - (life.since_s or 0.0) for life in lives.values())
    assert report.account.total_s == pytest.approx(lived_s, abs=0.01)
    assert sum(report.account.parts.values(), NOTHING) == report.account.total
    bill = report.account.bill()
    assert bill is not None
    assert bill.total_usd == pytest.approx(report.account.total_s * PRICES["g4dn.xlarge"] / 3600, rel=1e-9)
