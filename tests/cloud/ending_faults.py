"""Faults while VMs are ended or listed: each is injected, and Morph's reaction is recorded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from manager.providers.azure.provider import end_run
from manager.providers.interface.provider import ProviderError
from tests.cloud.fault_world import Cases, World, whole
from tests.cloud.provider_faults import killed
from tests.providers.azure_world import BOUNDS, SPEC, client_of
from tests.providers.fake_arm import FakeArm, Fault

CASES = Cases()
NAMES = {"tiny-1-0", "tiny-1-1"}
LOOK_S = 0.05


def reconcile(arm: FakeArm, run: str = "tiny-1", job: str = "tiny", **where: str) -> list[str]:
    told: list[str] = []
    spec = SPEC.model_copy(update=where)
    try:
        ended = end_run(spec, run, job, client_of(arm, spec=spec), told.append, BOUNDS)
    except ProviderError as error:
        return [*told, f"{error} (exit status 1)"]
    return [*told, f"ended, by their tags: {', '.join(vm.name for vm in ended)} and the scale set"]


@CASES("the manager is killed between request and answer, for good; `morph cloud reconcile`")
def reconciled(arm: FakeArm, directory: Path) -> list[str]:
    with killed(arm, directory):
        arm.settle_all()
        assert set(arm.machines) == {"tiny-1-0"}
        told = reconcile(arm)
    assert (arm.machines, arm.sets) == ({}, {})
    return told


@CASES("a scale set with the name that is given to `reconcile`, which Morph did not make")
def of_others(arm: FakeArm, _directory: Path) -> list[str]:
    for name in ("web-1", "web-2"):
        arm.put_by_others(name, scale_set="web")
    told = reconcile(arm, run="web")
    assert set(arm.machines) == {"web-1", "web-2"}
    assert set(arm.sets) == {"web"}
    return told


@CASES("a VM of somebody else's in the run's scale set; `reconcile`")
def guest(arm: FakeArm, directory: Path) -> list[str]:
    with killed(arm, directory):
        arm.settle_all()
        arm.put_by_others("web-1", scale_set="tiny-1")
        told = reconcile(arm)
    assert set(arm.machines) == {"web-1"}
    assert set(arm.sets) == {"tiny-1"}
    return told


@CASES("the name of the run is misspelt for `reconcile`")
def misspelt_run(arm: FakeArm, directory: Path) -> list[str]:
    with whole(arm, directory):
        told = reconcile(arm, run="tiny-l")
        assert set(arm.machines) == NAMES
    return told


@CASES("the name of the resource group is misspelt for `reconcile`")
def misspelt_group(arm: FakeArm, directory: Path) -> list[str]:
    with whole(arm, directory):
        arm.group = "train"
        told = reconcile(arm, resource_group="trian")
        assert set(arm.machines) == NAMES
    return told


def _unknown(arm: FakeArm, directory: Path, fault: Fault) -> list[str]:
    """Check that five unreadable lists in a row make Morph neither give up nor end a VM."""
    with whole(arm, directory, look_every_s=LOOK_S) as run:
        arm.faults = [replace(fault, times=5)]
        run.until(lambda: not arm.faults, "the looks")
        before = len(arm.calls)
        run.until(lambda: arm.calls[before:].count("GET virtualMachines") > 2, "looks that are answered")
        assert run.ready() == sorted(NAMES)
        assert set(arm.machines) == NAMES
        assert not any(call.startswith("DELETE") for call in arm.calls)
        return run.told


LIST = ("GET", "virtualMachines")
EXPIRED = Fault(*LIST, 401, "ExpiredAuthenticationToken")
CASES |= {
    "404 to the list of VMs, five times, while they train": partial(
        _unknown, fault=Fault(*LIST, 404, "ResourceNotFound")
    ),
    "401, five times": partial(_unknown, fault=EXPIRED),
    "a proxy's page in the place of the list": partial(
        _unknown, fault=Fault(*LIST, text="<html>Sign in</html>", carried_out=True)
    ),
    "an answer to the list of VMs that holds no list": partial(
        _unknown, fault=Fault(*LIST, text="{}", carried_out=True)
    ),
}


@CASES("one VM is locked when the run ends; `reconcile` later")
def locked(arm: FakeArm, directory: Path) -> list[str]:
    run = World(arm, directory)
    run.begin()
    run.until_whole()
    arm.locked = {"tiny-1-0"}
    run.end()
    assert set(arm.machines) == {"tiny-1-0"}
    assert run.has("morph cloud reconcile azure.yaml --run tiny-1 --job tiny")
    arm.locked = set()
    told = [*run.told, "the lock is taken away", *reconcile(arm)]
    assert (arm.machines, arm.sets) == ({}, {})
    return told


def _ended(arm: FakeArm, directory: Path, fault: Fault) -> list[str]:
    """Check that a run that ends during a transient fault leaves nothing."""
    with whole(arm, directory) as run:
        arm.faults = [replace(fault)]
        run.end()
        assert arm.faults == []
        assert not run.has("vms left")
        return run.told


@CASES("429 with Retry-After 600 s to the ends of the VMs when the run ends")
def throttled(arm: FakeArm, directory: Path) -> list[str]:
    fault = Fault("DELETE", "virtualMachines/", 429, "TooManyRequests", {"Retry-After": "600"}, times=2)
    told = _ended(arm, directory, fault)
    assert told[-1].endswith("again in 600 s")
    return told


CASES["401 when the run ends: the token expired"] = partial(_ended, fault=EXPIRED)
CASES["409 to the end of one VM, three times"] = partial(
    _ended, fault=Fault("DELETE", "virtualMachines/tiny-1-0", 409, "Conflict", times=3)
)


@CASES("503 to whatever is asked, for longer than the end is tried")
def never(arm: FakeArm, directory: Path) -> list[str]:
    run = World(arm, directory)
    run.begin()
    run.until_whole()
    arm.faults = [Fault("GET", "virtualMachines", 503, "ServerBusy", {"Retry-After": "400"}, times=99)]
    run.end()
    assert set(arm.machines) == NAMES
    assert run.has("tiny-1-0, tiny-1-1 may exist")
    assert run.has("what ends them: morph cloud reconcile azure.yaml --run tiny-1 --job tiny")
    arm.faults = []
    told = [*run.told, "Azure answers again", *reconcile(arm)]
    assert (arm.machines, arm.sets) == ({}, {})
    return told
