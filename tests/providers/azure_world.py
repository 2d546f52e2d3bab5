"""An Azure provider on the fake resource manager, with the real SDK."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from azure.core.credentials import AccessToken
from azure.core.pipeline.policies import SansIOHTTPPolicy
from pydantic import SecretStr

from manager.providers.azure.client import azure_client
from manager.providers.azure.provider import AzureProvider
from manager.providers.azure.spec import AzureSize, AzureSpec
from manager.providers.boot.cloud_init import NodeStart, cloud_init, custom_data
from manager.providers.interface.cloud import Bounds, Identity
from manager.providers.interface.operations import Operations
from manager.providers.interface.provider import Granted, Provider, ProviderError
from tests.providers.fake_arm import FakeArm

SUBSCRIPTION = "00000000-0000-0000-0000-000000000001"
GROUP = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/train"
RAY_TOKEN, NODE_SECRET = "ray-t0ken-51c2", "n0de-secret-77aa"
SPEC = AzureSpec(
    subscription_id=SUBSCRIPTION,
    resource_group="train",
    location="westus2",
    zones=("1", "2", "3"),
    sizes=(
        AzureSize(name="Standard_NC24", num_gpus=4, usd_per_h=1.4),
        AzureSize(name="Standard_NC6", num_gpus=1, usd_per_h=0.3),
    ),
    image="microsoft-dsvm:ubuntu-hpc:2204:latest",
    subnet_id=f"{GROUP}/providers/Microsoft.Network/virtualNetworks/net/subnets/nodes",
    identity_id=f"{GROUP}/providers/Microsoft.ManagedIdentity/userAssignedIdentities/nodes",
    ssh_public_key="ssh-ed25519 AAAAC3Nz me",
)
BOUNDS = Bounds(make_s=30, delete_s=30, poll_s=0.02)
START = NodeStart(
    ray_address="10.0.0.4:6379",
    manager_address="10.0.0.4:7070",
    ray_token=SecretStr(RAY_TOKEN),
    node_secret=SecretStr(NODE_SECRET),
    setup=("mount /data",),
    python_version="3.12.3",
    wheel_sha256="5c" * 32,
    requirements=("ray==2.60.0", "numpy>=1.26"),
)


class Credential:
    """A credential that keeps its token for its whole life, as azure-identity's do."""

    def __init__(self, next_token: Callable[[], str] = lambda: "fake") -> None:
        self._next_token, self._kept = next_token, ""

    def get_token(self, *_scopes: str, **_options: Any) -> AccessToken:
        self._kept = self._kept or self._next_token()
        return AccessToken(self._kept, 2_000_000_000)


class Killed(Exception):
    """The manager's process has ended; no BaseException, which the SDK's polling threads would not pass on."""


class Line(SansIOHTTPPolicy):  # type: ignore[type-arg]
    """Allows plain HTTP; kills the manager before or after the call with this number."""

    def __init__(self, kill_at: int | None = None, *, after: bool = False) -> None:
        self.kill_at, self.after, self.dead = kill_at, after, False
        self.num_calls = self.num_answers = 0
        self.lock = threading.Lock()

    def on_request(self, request: Any) -> None:
        request.context.options.setdefault("enforce_https", False)
        with self.lock:
            self.num_calls += 1
            if self.num_calls - 1 == self.kill_at and not self.after:
                self.dead = True
            if self.dead:
                raise Killed

    def on_response(self, request: Any, response: Any) -> None:
        with self.lock:
            self.num_answers += 1
            if self.num_answers - 1 == self.kill_at and self.after:
                self.dead = True
            if self.dead:
                raise Killed


class Hasty(Line):
    """Does not wait for the answer to the first request for a VM, but waits for any other."""

    def __init__(self) -> None:
        super().__init__()
        self.gave_up = False

    def on_request(self, request: Any) -> None:
        super().on_request(request)
        asked = request.http_request
        if not self.gave_up and asked.method == "PUT" and "/virtualMachines/" in asked.url:
            self.gave_up = True
            request.context.options["read_timeout"] = 0.4


def trouble(market: Provider, request: str, count: int) -> ProviderError | None:
    """Return why a request got fewer VMs than it asked for, whether or not it got any."""
    try:
        granted = market.request(request, count)
    except ProviderError as error:
        return error
    return granted.missing if isinstance(granted, Granted) else None


def client_of(
    arm: FakeArm,
    line: Line | None = None,
    spec: AzureSpec = SPEC,
    *,
    next_token: Callable[[], str] = lambda: "fake",
    pause: Callable[[float], object] = lambda _s: None,
) -> Any:
    return azure_client(
        spec.subscription_id,
        open_credential=lambda: Credential(next_token),
        base_url=arm.url,
        policies=[line or Line()],
        pause=pause,
    )


def provider(
    arm: FakeArm,
    directory: Path,
    line: Line | None = None,
    *,
    spec: AzureSpec = SPEC,
    run: str = "tiny-1",
    make_s: float = 30,
    next_token: Callable[[], str] = lambda: "fake",
    pause: Callable[[float], object] = lambda _s: None,
    **options: Any,
) -> AzureProvider:
    return AzureProvider(
        client_of(arm, line, spec, next_token=next_token, pause=pause),
        spec,
        Identity(run=run, job="tiny"),
        Operations(directory / f"operations-{run}.json"),
        lambda node, num_devices: custom_data(cloud_init(START, node, "azure", num_devices)),
        bounds=replace(BOUNDS, make_s=make_s),
        ending=f"morph cloud reconcile azure.yaml --run {run} --job tiny",
        **options,
    )
