from __future__ import annotations

from datetime import timedelta

import psutil
from torch._C._distributed_c10d import TCPStore

from morph.runtime.store import StoreHost


def test_the_store_serves_on_its_own_address_and_on_no_other() -> None:
    before = {entry.laddr for entry in psutil.Process().net_connections("tcp") if entry.status == psutil.CONN_LISTEN}
    host = StoreHost("127.0.0.1")
    after = {entry.laddr for entry in psutil.Process().net_connections("tcp") if entry.status == psutil.CONN_LISTEN}
    assert [(new.ip, new.port) for new in after - before] == [("127.0.0.1", host.port())]
    client = TCPStore("127.0.0.1", host.port(), is_master=False, timeout=timedelta(seconds=10))
    client.set("key", "value")
    assert client.get("key") == b"value"
