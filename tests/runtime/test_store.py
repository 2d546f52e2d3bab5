from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistStoreError

from morph.contract.errors import GenerationAborted, PeerLost
from morph.runtime.groups import channels
from morph.runtime.groups.channels import GroupSet, GroupSpec, KeptConnections, connect_store
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.store import StoreHost
from tests.waiting import BOUND_S, poll_until


def test_the_store_serves_on_its_own_address_and_on_no_other() -> None:
    before = {entry.laddr for entry in psutil.Process().net_connections("tcp") if entry.status == psutil.CONN_LISTEN}
    host = StoreHost("127.0.0.1")
    after = {entry.laddr for entry in psutil.Process().net_connections("tcp") if entry.status == psutil.CONN_LISTEN}
    assert [(new.ip, new.port) for new in after - before] == [("127.0.0.1", host.port())]
    client = TCPStore("127.0.0.1", host.port(), is_master=False, timeout=timedelta(seconds=100))
    client.set("key", "value")
    assert client.get("key") == b"value"


def test_another_runs_workers_at_the_port_meet_no_peer() -> None:
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
    assert any(key.endswith("/key") for key in keys)  # docs/how-it-works/safety.md says that they are readable
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
            done.result(timeout=BOUND_S)
    sums = {me: torch.full((1,), number + 1, dtype=torch.int64) for number, me in enumerate(groups)}
    rings = {me: groups[me].ring("g2/ring") for me in groups}
    for pending in [ring.reduce(sums[me], dist.ReduceOp.SUM) for me, ring in rings.items() if ring is not None]:
        pending.wait("the sum", 60.0)
    assert {int(value) for value in sums.values()} == {3}
    assert wandering.is_alive()  # it met no other member


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Record every connection that is opened; for each, torch may ask a name server."""
    made: list[object] = []

    def connect(*arguments: Any, **options: Any) -> TCPStore:
        made.append(TCPStore(*arguments, **options))
        return made[-1]  # type: ignore[return-value]

    monkeypatch.setattr(channels, "TCPStore", connect)
    return made


def test_one_generation_after_the_other_meets_over_the_same_connections(opened: list[object]) -> None:
    host, workers = StoreHost("127.0.0.1"), ("a", "b", "c")
    kept = {worker: KeptConnections("127.0.0.1", host.port(), "of our run") for worker in workers}
    for generation in range(1, 5):
        groups = {worker: GroupSet(Interrupt(generation)) for worker in workers}
        lent = {worker: kept[worker].lend(60.0 + generation) for worker in workers}
        spec = GroupSpec(f"g{generation}/ring", workers)
        with ThreadPoolExecutor(3) as threads:
            forming = [threads.submit(groups[me].form, [spec], me, "127.0.0.1", lent[me].open) for me in workers]
            for done in forming:
                done.result(timeout=BOUND_S)
        for each in lent.values():
            each.give_back()
    assert len(opened) == len(workers)
    assert {store.timeout.total_seconds() for store in opened} == {64.0}  # type: ignore[attr-defined]
    for _ in range(3):
        with kept["a"].borrow(60.0) as store:
            store.set("where a listens", b"here")
    assert len(opened) == len(workers)
    with pytest.raises(DistStoreError), kept["a"].borrow(0.1) as store:
        store.get("never written")
    kept["a"].lend(60.0).open().set("key", b"value")
    assert len(opened) == len(workers) + 1, "a call on the other one may go on"


def test_a_connection_that_is_opened_beforehand_is_the_first_one_used(opened: list[object]) -> None:
    host = StoreHost("127.0.0.1")
    kept = KeptConnections("127.0.0.1", host.port())
    kept.prepare()
    poll_until(lambda: not kept._idle.empty(), "a connection")
    kept.lend(60.0).open().set("key", b"value")
    assert len(opened) == 1


def test_a_connection_of_an_aborted_generation_is_left_behind(opened: list[object]) -> None:
    """Its thread may be blocked in a call of the store, for which other users of the store would wait."""
    host = StoreHost("127.0.0.1")
    kept = KeptConnections("127.0.0.1", host.port())
    aborted, next_one = kept.lend(60.0), kept.lend(60.0)
    blocked = threading.Thread(target=lambda: aborted.open().get("never written"), daemon=True)
    blocked.start()
    poll_until(lambda: len(opened) == 1, "the connection")
    next_one.open().set("key", b"value")
    next_one.give_back()
    kept.lend(60.0).open()
    assert len(opened) == 2
    kept.lend(60.0).open().set("never written", b"now")
    blocked.join(BOUND_S)


class Odd:
    """A connection whose store was restarted, or whose path was closed by a firewall."""

    def __init__(self, check: Callable[[list[str]], object]) -> None:
        self.check = check


def broken(_: list[str]) -> object:
    raise dist.DistNetworkError("Broken pipe")


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_connection_that_does_not_answer_any_more_is_replaced(
    is_silent: bool, opened: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "CHECK_S", 0.01 if is_silent else 60.0)
    over = threading.Event()
    host = StoreHost("127.0.0.1")
    kept = KeptConnections("127.0.0.1", host.port())
    kept.give_back([Odd((lambda _: over.wait(BOUND_S)) if is_silent else broken)])  # type: ignore[list-item]
    kept.lend(60.0).open().set("key", b"value")
    over.set()
    assert len(opened) == 1
