"""The user's command on the virtual Azure: VMs come, are taken with or without a notice, and none is left."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from manager.accounting.spent import NOTHING
from manager.providers.boot.cloud_init import STAY_PATH
from tests.cloud.accounts import BEGIN_S, facts, requests, saved_before_loss, splits
from tests.cloud.exposed import LOGIN, Watch
from tests.cloud.hosts import CACHE, ROOT, Host, not_permitted
from tests.cloud.life import JOB, Life, Taking, digests
from tests.cloud.virtual_azure import USD_PER_H, VirtualAzure
from tests.system.commands import calibrated_once, of_all_workers
from tests.system.harness import uninterrupted

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(not_permitted()), reason=not_permitted() or "-"),
]
KEEP, NOTICE_S, NUM_SECTIONS, FIRST_PORT, UID = 2, 120.0, 6, 20000, 50506
STEP_S = 0.8


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated_once(of_all_workers(tmp_path_factory) / "calibrated", f"{JOB}:job", "--samples", 5, "-m", 2)


def run_by(uid: int, host: Host) -> list[str]:
    """Return the command lines of this user's processes on a host."""
    found = []
    for process in host.processes():
        with suppress(psutil.NoSuchProcess):
            found += [" ".join(process.cmdline())] if process.uids().real == uid else []
    return found


def caches_of(uid: int, folder: Path) -> dict[str, str]:
    """Return an environment with a user's own caches, which contain the compiled loops of the simulator."""
    (folder / "numba").mkdir(parents=True)
    for found in [*(ROOT / "simulator").rglob("*.nb[ic]"), *(ROOT / "simulator").rglob("morph-loops.json")]:
        source = str(found.parents[1])
        place = folder / "numba" / f"{found.parents[1].name}_{hashlib.sha1(source.encode()).hexdigest()}"
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(found, place)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, uid)
    return {CACHE: str(folder), "NUMBA_CACHE_DIR": str(folder / "numba")}


@pytest.fixture(scope="module")
def user(profile: Path) -> dict[str, str]:
    """Return the environment of a user other than root who can read the profile."""
    profile.parent.chmod(0o755)
    return {"HOME": "/tmp", "USER": "trainer", LOGIN: secrets.token_hex(16), **caches_of(UID, profile.parent / "cache")}


def a_life(azure: VirtualAzure, directory: Path, profile: Path, user: dict[str, str], keep: int) -> Life:
    """Run as the user of the VMs' job, with the job's code in the folder of earlier runs."""
    code, vms = profile.parent / "code", dict[str, Any](pass_variables=[CACHE])
    life = Life(azure, directory, profile, 100_000, keep, [], steps_after=3, uid=UID, step_s=STEP_S, code=code)
    life.checkpoint_every = 5
    life.environment, life.vms = dict(user), vms
    return life


def test_vms_are_asked_for_taken_replaced_and_all_gone_in_the_end(
    profile: Path, user: dict[str, str], tmp_path: Path
) -> None:
    """``morph inject`` has Azure evict the first VM; Azure alone takes the second one.

    Only agents and watchdogs run as root.
    """
    takings = [Taking(10, NOTICE_S, injected=True), Taking(20, None)]
    with VirtualAzure(profile.parent, tmp_path) as azure:
        life = a_life(azure, tmp_path, profile, user, KEEP)
        life.takings, life.whole, life.secrets_path = takings, False, tmp_path / "made"
        life.vms["first_port"] = FIRST_PORT
        watch = Watch(azure, life, FIRST_PORT)
        watched, roots, users = life.on_line, list[str](), list[str]()

        def look(line: dict[str, Any]) -> None:
            watched(line)
            if watch.shown and not users:
                for name, host in azure.hosts.living.items():
                    roots.extend(run_by(0, host) if name != "manager" else [])
                    users.extend(run_by(UID, host) if name != "manager" else [])

        life.on_line = look
        report = life.live()
        watch.check()
        assert [taken.taking for taken in life.taken] == takings
        assert azure.processes() == []
        assert azure.region.left() == {"VMs": [], "scale sets": [], "NICs": [], "disks": []}
        assert (azure.region.troubles, azure.region.wrong) == ([], [])
        assert list(azure.hosts.living) == ["manager"]
        bill, dollars = azure.region.bill, azure.region.dollars()
    expected = ("tests.cloud.guest", "manager.notices.agent", STAY_PATH)  # the last one is the watchdog's
    assert [line for line in roots if not any(part in line for part in expected)] == []
    assert sum(line.startswith("ray::WorkerActor") for line in users) == KEEP
    assert sum("/raylet/raylet " in line for line in users) >= KEEP
    noticed, killed = (taken.vm for taken in life.taken)
    ends = {entry.name: entry.end for entry in bill}
    assert (ends.pop(noticed), ends.pop(killed)) == ("evicted, acknowledged", "evicted")
    (injected,) = facts(life.run_dir, "preemption_injected")
    assert injected == "by name, evicted by the provider, with its notice"
    assert [change.injected for change in report.morphs if change.injected] == [(noticed,)]
    assert set(ends.values()) == {"deleted"}
    planned = [morph for morph in report.morphs if noticed in morph.cause]
    assert [(morph.planned, morph.steps_redone) for morph in planned] == [(True, 0)]
    forced = [morph for morph in report.morphs if killed in morph.cause]
    saved = saved_before_loss(life.run_dir, killed)  # the newest save may still have been under way
    assert report.steps_redone == sum(morph.steps_redone for morph in forced)
    # no units are missing if another worker had all of them
    assert all(morph.steps_redone <= morph.version - saved for morph in forced)
    asked = requests(life.run_dir)
    assert asked.asked == KEEP + 2
    assert KEEP + 1 <= asked.granted <= len(bill) <= KEEP + 2  # the run ends while the last VM is requested
    parts = splits(bill, life.run_dir)
    assert [part for part in parts if not part.fits] == []
    assert sum(report.account.parts.values(), NOTHING) == report.account.total
    assert sum(part.booked_s for part in parts) == pytest.approx(report.account.total_s, abs=0.01)
    whole_s = sum(part.before_s + part.after_s for part in parts) + report.account.total_s
    assert whole_s * USD_PER_H["Standard_NC6"] / 3600 == pytest.approx(dollars, rel=1e-3)
    paid = report.account.bill()
    assert paid is not None
    assert paid.total_usd == pytest.approx(report.account.total_s * USD_PER_H["Standard_NC6"] / 3600, rel=1e-9)
    assert sum(paid.parts.values()) == paid.total
    later_s = sum(part.after_s if part.granted else part.before_s for part in parts)
    after_usd = later_s * USD_PER_H["Standard_NC6"] / 3600  # until Azure has deleted the VMs that Morph gave back
    assert paid.total_usd + after_usd == pytest.approx(dollars, abs=len(parts) * BEGIN_S * 0.3 / 3600)
    assert digests(life.run_dir) == uninterrupted(report.version, tmp_path / "undisturbed", NUM_SECTIONS)
    assert not azure.hosts.directory.exists()
    assert not list(Path("/run/netns").glob(f"morph-{os.getpid()}-*"))
