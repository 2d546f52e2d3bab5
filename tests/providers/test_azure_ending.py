"""What is ended on Azure, what is left alone, and what an answer that says nothing must not do."""

from __future__ import annotations

from pathlib import Path

import pytest

from manager.providers.interface.provider import Misconfigured, ProviderError, Transient
from tests.providers.azure_world import Line, provider
from tests.providers.fake_arm import FakeArm, Fault

pytestmark = pytest.mark.slow

UNKNOWN = {
    "404 of the group": Fault("GET", "virtualMachines", 404, "ResourceGroupNotFound", times=9),
    "404": Fault("GET", "virtualMachines", 404, "ResourceNotFound", times=9),
    "401": Fault("GET", "virtualMachines", 401, "InvalidAuthenticationToken", times=9),
    "403": Fault("GET", "virtualMachines", 403, "AuthorizationFailed", times=9),
    "503": Fault("GET", "virtualMachines", 503, times=9),
    "a page of a proxy": Fault("GET", "virtualMachines", text="<html>Sign in</html>", carried_out=True, times=9),
    "no list": Fault("GET", "virtualMachines", text="{}", carried_out=True, times=9),
    "a list of something else": Fault("GET", "virtualMachines", text='{"value": [1]}', carried_out=True, times=9),
    "a VM without tags that say what it is": Fault(
        "GET",
        "virtualMachines",
        text='{"value": [{"name": "a-0", "tags": {"morph-run": "tiny-1", "morph-job": "tiny", "morph-devices": "x"}}]}',
        carried_out=True,
        times=9,
    ),
}


@pytest.mark.parametrize("fault", UNKNOWN)
def test_an_answer_that_does_not_list_the_vms_is_an_error_and_never_no_vms(
    arm: FakeArm, tmp_path: Path, fault: str
) -> None:
    azure = provider(arm, tmp_path)
    azure.request("a", 2)
    known = UNKNOWN[fault]
    arm.faults = [Fault(**{**known.__dict__})]
    for ask in (azure.list, azure.dismantle, lambda: azure.delete(["a-0", "a-1"])):
        with pytest.raises(ProviderError):
            ask()
    arm.faults = []
    assert set(arm.machines) == {"a-0", "a-1"}
    assert len(azure.list()) == 2


def test_a_second_page_that_fails_makes_the_whole_list_unknown(arm: FakeArm, tmp_path: Path) -> None:
    azure = provider(arm, tmp_path)
    azure.request("a", 5)
    first = Fault("GET", "virtualMachines", carried_out=True)
    arm.faults = [first, Fault("GET", "virtualMachines", 404, "ResourceNotFound")]
    with pytest.raises(ProviderError):
        azure.list()
    assert len(azure.list()) == 5


def test_a_scale_set_of_the_runs_name_that_the_run_did_not_make_is_left_alone(arm: FakeArm, tmp_path: Path) -> None:
    arm.put_by_others("web-1", scale_set="tiny-1")
    arm.put_by_others("web-2", scale_set="tiny-1")
    azure = provider(arm, tmp_path)
    azure.dismantle()
    assert set(arm.machines) == {"web-1", "web-2"}
    assert set(arm.sets) == {"tiny-1"}
    with pytest.raises(Misconfigured, match="tiny-1 is there without the tags of this run"):
        azure.request("a", 1)
    assert not any(call.startswith(("PUT", "DELETE")) for call in arm.calls)


def test_a_vm_in_the_runs_scale_set_that_is_not_the_runs_lives_on_and_keeps_the_set(
    arm: FakeArm, tmp_path: Path
) -> None:
    azure = provider(arm, tmp_path)
    azure.request("a", 2)
    arm.put_by_others("stranger", scale_set="tiny-1")
    arm.put_by_others("cousin", run="tiny-2", scale_set="tiny-1")
    with pytest.raises(Misconfigured, match="scale set tiny-1 is left: it holds cousin, stranger"):
        azure.dismantle()
    assert set(arm.machines) == {"cousin", "stranger"}
    assert set(arm.sets) == {"tiny-1"}
    for name in ("cousin", "stranger"):
        del arm.machines[name]
    azure.dismantle()
    assert arm.sets == {}


def test_a_vm_of_somebody_elses_under_a_name_of_ours_is_neither_changed_nor_ended(arm: FakeArm, tmp_path: Path) -> None:
    arm.put_by_others("a-0")
    azure = provider(arm, tmp_path)
    with pytest.raises(Misconfigured, match="a-0 is there without the tags of this run"):
        azure.request("a", 2)
    azure.delete(["a-0", "a-1"])
    assert arm.machines["a-0"]["tags"] == {"owner": "somebody"}


def test_vms_of_the_same_run_name_and_another_job_are_left_alone(arm: FakeArm, tmp_path: Path) -> None:
    azure = provider(arm, tmp_path)
    azure.request("a", 1)
    arm.put_by_others("other", run="tiny-1")
    arm.machines["other"]["tags"]["morph-job"] = "another"
    azure.delete(["a-0", "other"])
    assert set(arm.machines) == {"other"}


@pytest.mark.parametrize(
    ("status", "code", "again"),
    [(409, "ScopeLocked", False), (403, "AuthorizationFailed", False), (409, "Conflict", True), (503, "Busy", True)],
)
def test_a_vm_that_may_not_be_ended_keeps_none_of_the_others(
    arm: FakeArm, tmp_path: Path, status: int, code: str, again: bool
) -> None:
    azure = provider(arm, tmp_path)
    azure.request("a", 4)
    for end in (lambda: azure.delete(["a-0", "a-1"]), azure.dismantle):
        arm.faults = [Fault("DELETE", "virtualMachines/a-0", status, code)]
        with pytest.raises(Transient if again else Misconfigured, match=f"a-0 is left: {code}: injected") as raised:
            end()
        assert "a-1" not in str(raised.value)
    assert set(arm.machines) == {"a-0"}
    assert set(arm.sets) == {"tiny-1"}
    azure.dismantle()
    assert (arm.machines, arm.sets) == ({}, {})


def test_every_end_is_begun_before_any_is_waited_for(arm: FakeArm, tmp_path: Path) -> None:
    azure = provider(arm, tmp_path)
    azure.request("a", 4)
    arm.calls.clear()
    arm.num_polls = 3
    azure.delete([f"a-{index}" for index in range(4)])
    deletes = [index for index, call in enumerate(arm.calls) if call.startswith("DELETE")]
    assert len(deletes) == 4
    assert arm.machines == {}
    assert not any("virtualMachines/" in call for call in arm.calls[deletes[-1] + 1 :])


def test_how_long_to_wait_for_an_end_is_the_longest_that_azure_asks_for(arm: FakeArm, tmp_path: Path) -> None:
    azure = provider(arm, tmp_path)
    azure.request("a", 3)
    arm.faults = [
        Fault("DELETE", "virtualMachines/a-0", 429, "TooManyRequests", {"Retry-After": "600"}),
        Fault("DELETE", "virtualMachines/a-1", 429, "TooManyRequests", {"Retry-After": "7"}),
    ]
    with pytest.raises(Transient) as raised:
        azure.dismantle()
    assert raised.value.retry_after_s == 600
    assert set(arm.machines) == {"a-0", "a-1"}


def test_a_token_that_expired_is_followed_by_a_new_one(arm: FakeArm, tmp_path: Path) -> None:
    tokens = iter(["old", "new"])
    azure = provider(arm, tmp_path, Line(), next_token=lambda: next(tokens))
    azure.request("a", 1)
    arm.expired = {"old"}
    with pytest.raises(Transient, match="ExpiredAuthenticationToken"):
        azure.dismantle()
    azure.dismantle()
    assert arm.machines == {}
