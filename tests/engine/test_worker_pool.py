"""Silence, told from the manager's own deafness. No Ray: the pool is given handles whose beats do not come."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import time
import manager.engine.ray_environment as environment
environment.prepare()
from manager.controller.events import NobodyHeard, WorkerLost
from manager.engine import worker_pool
from manager.engine.inbox import Inbox

clock = [100.0]
worker_pool.time.monotonic = lambda: clock[0]
inbox = Inbox()
killed = []
worker_pool.ray.kill = lambda actor, no_restart: killed.append(actor)
pool = worker_pool.WorkerPool(inbox, lambda worker: None, heartbeat_timeout_s=5.0)
handle = pool._handles["vm0"] = worker_pool._Handle(actor="vm0's")
handle.ready, handle.beat_sent_s = True, clock[0]

def watch_for(seconds, step=0.5):
    for _ in range(int(seconds / step)):
        clock[0] += step
        pool.watch()

watch_for(5.0)
assert len(inbox) == 0, "lost before its time"
clock[0] += 60.0  # this process stood still
assert not pool.watch(), "waits were judged although nobody could be heard"
deaf = inbox.get(0.0)
assert deaf is not None and deaf.item == NobodyHeard(lasted_s=60.0)
assert len(inbox) == 0, "taken for silent while the manager was deaf"
watch_for(0.5)
assert len(inbox) == 0
watch_for(1.0)
lost = inbox.get(0.0)
assert lost is not None and isinstance(lost.item, WorkerLost) and "silent" in lost.item.cause
assert killed == ["vm0's"], "one that wakes would go on"
print("ok")
"""


def test_a_worker_is_lost_when_it_is_silent_but_not_for_the_time_in_which_the_manager_stood_still() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False)
    assert run.stdout.strip() == "ok", run.stderr
