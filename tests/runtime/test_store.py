from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistStoreError

from morph.contract.errors import GenerationAborted, PeerLost
from morph.runtime.groups.channels import GroupSet, GroupSpec, connect_store
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.store import StoreHost


def test_the_store_serves_on_its_own_address_and_on_no_other() -> None:
    before = {entry.laddr for entry in psutil.Process().net_connections("tcp") if entry.status == psutil.CONN_LISTEN}
    host = StoreHost("127.0.0.1")
    after = {entry.laddr for entry in psutil.Process().net_connections("tcp") if entry.status == psutil.CONN_LISTEN}
    assert [(new.ip, new.port) for new in after - before] == [("127.0.0.1", host.port())]
    client = TCPStore("127.0.0.1", host.port(), is_master=False, timeout=timedelta(seconds=100))
    client.set("key", "value")
    assert client.get("key") == b"value"


def test_another_runs_workers_at_the_port_meet_nobody() -> None:
    host = StoreHost("127.0.0.1")
    ours, also_ours = (connect_store("127.0.0.1", host.port(), "of our run") for _ in range(2))
    theirs, nobodys = connect_store("127.0.0.1", host.port(), "of another"), connect_store("127.0.0.1", host.port())
    ours.set("g1/r0/b0/act/0", b"ours")
    assert also_ours.get("g1/r0/b0/act/0") == b"ours"
    for stray in (theirs, nobodys):
        assert not stray.check(["g1/r0/b0/act/0"])
        stray.set("g1/r0/b0/act/0", b"stray")
    assert also_ours.get("g1/r0/b0/act/0") == b"ours"
    with pytest.raises(DistStoreError):
        theirs.wait(["g1/r0/b0/act/1"], timedelta(seconds=0.1))


def test_the_prefix_of_a_runs_keys_does_not_reveal_its_secret() -> None:
    host = StoreHost("127.0.0.1")
    connect_store("127.0.0.1", host.port(), "of our run").set("key", b"value")
    keys = TCPStore("127.0.0.1", host.port(), is_master=False, timeout=timedelta(seconds=100)).list_keys()
    assert any(key.endswith("/key") for key in keys)  # whoever is let to the port sees them: docs/safety.md says so
    assert "of our run" not in str(keys)


def test_an_older_generations_worker_is_in_no_newer_group() -> None:
    host = StoreHost("127.0.0.1")
    store = partial(connect_store, "127.0.0.1", host.port(), "of our run")
    groups = {worker: GroupSet(Interrupt(2)) for worker in ("a", "b")}
    stray = GroupSet(Interrupt(1))

    def stray_forms() -> None:
        with suppress(PeerLost, GenerationAborted):
            stray.form([GroupSpec("g1/ring", ("a", "b"))], "b", "127.0.0.1", store)

    wandering = threading.Thread(target=stray_forms, daemon=True)
    wandering.start()
    spec = GroupSpec("g2/ring", ("a", "b"))
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(groups[me].form, [spec], me, "127.0.0.1", store) for me in groups]:
            done.result(timeout=60)
    sums = {me: torch.full((1,), number + 1, dtype=torch.int64) for number, me in enumerate(groups)}
    rings = {me: groups[me].ring("g2/ring") for me in groups}
    for pending in [ring.reduce(sums[me], dist.ReduceOp.SUM) for me, ring in rings.items() if ring is not None]:
        pending.wait("the sum", 60.0)
    assert {int(value) for value in sums.values()} == {3}
    assert wandering.is_alive()  # it met nobody
