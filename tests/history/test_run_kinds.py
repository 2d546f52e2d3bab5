"""What a run knows of its VMs beforehand is what the history is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from manager.controller.state.events import NodeFacts
from manager.providers.azure.spec import AzureSpec
from manager.providers.hosts.ssh import SshHost
from manager.providers.hosts.static import Hosts
from manager.run.cloud import Cloud
from morph.contract.cluster import AzureVms, StaticVms
from tests.providers.azure_world import SPEC

COMMON = {"cloud": "cloud.yaml", "keep": 2, "memory_bytes": 2**30}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, NodeFacts(provider="azure", region="westus2")),
        ({"sizes": SPEC.sizes[1:]}, NodeFacts(provider="azure", size="Standard_NC6", region="westus2")),
        (
            {"sizes": SPEC.sizes[1:], "zones": ("2",)},
            NodeFacts(provider="azure", size="Standard_NC6", region="westus2", zone="2"),
        ),
        ({"resource_manager": "http://127.0.0.1:9"}, NodeFacts(provider="local", region="westus2")),
    ],
)
def test_on_azure_it_is_what_the_cloud_file_leaves_open_to_no_choice(
    change: dict[str, object], kind: NodeFacts
) -> None:
    vms = AzureVms.model_validate({"kind": "azure", "address": "10.0.0.4", **COMMON})
    spec = AzureSpec.model_validate({**SPEC.model_dump(), **change})
    assert Cloud(vms, Path("cloud.yaml"), spec).vm_kind == kind


def test_hosts_are_all_one_kind() -> None:
    vms = StaticVms.model_validate({"kind": "static", "address": "10.0.0.4", **COMMON})
    hosts = Hosts(hosts=(SshHost(address="h1"), SshHost(address="h2")))
    assert Cloud(vms, Path("hosts.yaml"), hosts).vm_kind == NodeFacts(provider="static")
