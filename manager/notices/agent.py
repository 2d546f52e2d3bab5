"""Runs on each cloud VM from boot: polls for notices, reports them to the manager, and ends a forgotten VM.

``python -m manager.notices.agent --manager HOST:PORT --node NAME --devices N --secret-file PATH --lonely-s S
--source SOURCE --end WAY [--management-url URL] [--stay PATH]``
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil

from manager.host.processes import wait_gone
from manager.notices.aws import AwsInterruptions, AwsMetadata, AwsRebalance
from manager.notices.azure import AzureNotices
from manager.notices.call import AGENT, arguments_of_node, called, secret_in
from manager.notices.end import MANAGEMENT_URL, end_vm
from manager.notices.gcp import GcpNotices
from manager.notices.slurm import SlurmNotices
from manager.notices.source import NoticeSource
from manager.notices.watch import Given, NoticeWatch, Told, Trouble, Withdrawn
from morph.link.session import LinkSession

BEAT_S = 5.0
RETRY_S = 2.0
RETRY_END_S = 60.0
GROUP_GRACE_S = 10.0


def sources_of(name: str, folder: Path = Path()) -> list[NoticeSource]:
    """Return the sources to poll on a cloud; none for a cloud without notices. ``folder``: the node's folder."""
    metadata = AwsMetadata()
    known: dict[str, list[NoticeSource]] = {
        "azure": [AzureNotices()],
        "aws": [AwsInterruptions(metadata), AwsRebalance(metadata)],
        "gcp": [GcpNotices()],
        "slurm": [SlurmNotices(folder)],
        "": [],
    }
    return known[name]


class Agent:
    """Reports notices to the manager, and repeats valid ones after each new connection.

    A process at the manager's address that cannot authenticate gets no notices, and does not count as the manager.
    ``lonely_s``: seconds without the manager after which ``end``, which ends this VM, is called again and again.
    ``every_s``: the time between two polls, and between two attempts to connect. ``num_devices``: the number of this
    VM's devices, each of which has a worker. ``stay``: called while the manager answers, so that the VM's watchdog lets
    it live on.
    """

    def __init__(
        self,
        address: tuple[str, int],
        node: str,
        secret: str,
        sources: Sequence[NoticeSource],
        *,
        lonely_s: float,
        end: Callable[[], None],
        every_s: float = RETRY_S,
        num_devices: int = 1,
        stay: Callable[[], object] = lambda: None,
    ) -> None:
        self._num_devices, self._stay = num_devices, stay
        self._address, self._node, self._secret = address, node, secret
        self._patience_s, self._end, self._every_s = lonely_s, end, every_s
        self._standing: dict[str, tuple[Given, float]] = {}
        self._news: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._watches = [NoticeWatch(source, self._take, min(every_s, 1.0)) for source in sources]

    def close(self) -> None:
        """End ``run``."""
        self._over.set()

    def run(self) -> None:
        """Block until ``close``."""
        for watch in self._watches:
            watch.start()
        heard_s = time.monotonic()
        while not self._over.is_set():
            try:
                with called(self._address, self._secret, self._node, AGENT, self._num_devices) as session:
                    heard_s = self._talk(session)
            except OSError:
                pass  # no manager: tried again until the VM has been without one for too long
            if time.monotonic() - heard_s >= self._patience_s and not self._over.is_set():
                self._end()
                heard_s = time.monotonic() - self._patience_s + RETRY_END_S
            self._over.wait(self._every_s)
        for watch in self._watches:
            watch.close()

    def _talk(self, session: LinkSession) -> float:
        """Report everything to the manager until it is gone; return when it last answered, on the monotonic clock."""
        heard_s = time.monotonic()
        news: Told | None = None
        reader = threading.Thread(target=self._listen, args=(session,), name="morph-agent-listen", daemon=True)
        reader.start()
        try:
            for given in self._still_standing():
                session.tell(_message(given))
            while reader.is_alive() and not self._over.is_set():
                news = None
                with contextlib.suppress(queue.Empty):
                    news = self._news.get(timeout=min(BEAT_S, self._every_s))
                if news is None:
                    session.tell({"kind": "beat"})
                elif not isinstance(news, Given) or news.notice in self._standing:
                    session.tell(_message(news))
                if reader.is_alive():
                    heard_s = time.monotonic()
                    self._stay()
        except OSError:
            if news is not None:
                self._news.put(news)  # the report may not have arrived
        finally:
            session.close()
            reader.join(2 * BEAT_S)
        return heard_s

    def _listen(self, session: LinkSession) -> None:
        """Handle the manager's messages. It answers each beat, so that its silence is noticed."""
        try:
            while True:
                left = session.hear(3 * BEAT_S).get("left")
                if isinstance(left, str):
                    for watch in self._watches:
                        watch.left(left)
        except OSError:
            session.close()

    def _take(self, news: Told) -> None:
        with self._lock:
            if isinstance(news, Given):
                self._standing[news.notice] = (news, time.monotonic())
            elif isinstance(news, Withdrawn):
                self._standing.pop(news.notice, None)
            self._news.put(news)

    def _still_standing(self) -> list[Given]:
        """Return valid notices, with lead times from now on; waiting reports that are no longer true are dropped."""
        with self._lock:
            now_s = time.monotonic()
            waiting = [self._news.get() for _ in range(self._news.qsize())]
            for news in waiting:
                if isinstance(news, Trouble) or (isinstance(news, Withdrawn) and news.notice not in self._standing):
                    self._news.put(news)
            return [
                given.model_copy(
                    update={"lead_s": None if given.lead_s is None else max(0.0, given.lead_s - (now_s - since_s))}
                )
                for given, since_s in self._standing.values()
            ]


def _message(news: Told) -> dict[str, object]:
    kind = {Given: "given", Withdrawn: "withdrawn", Trouble: "trouble"}[type(news)]
    return {"kind": kind, **news.model_dump()}


def end_group(folder: Path, grace_s: float = GROUP_GRACE_S) -> None:
    """End this process group, which is a node on a host that stays up; after ``grace_s``, kill what still runs.

    ``folder``: the node's folder, of which only the log is kept; the file ``elsewhere`` in it names another folder to
    remove.
    """
    named = folder / "elsewhere"
    elsewhere = named.read_text(encoding="utf-8") if named.exists() else ""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    for process in wait_gone(_others_of_group(), grace_s):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    left_behind = [path for path in folder.iterdir() if path.name != "log"]  # these exist only if the node was killed
    for path in [*left_behind, Path(elsewhere)] if elsewhere else left_behind:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    os.killpg(0, signal.SIGKILL)


def _others_of_group() -> list[psutil.Process]:
    others, mine = [], os.getpgid(0)
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if process.pid != os.getpid() and os.getpgid(process.pid) == mine:
                others.append(process)
    return others


def _end(kind: str, node: str, management_url: str, folder: Path) -> None:
    if kind == "group":
        end_group(folder)
    else:
        end_vm(kind, node, management_url)


def _stay(path: Path) -> None:
    with contextlib.suppress(OSError):  # the watchdog then ends the VM
        path.touch()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until the VM ends."""
    parser = arguments_of_node("manager.notices.agent")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--lonely-s", required=True, type=float)
    parser.add_argument("--source", default="", choices=["azure", "aws", "gcp", "slurm", ""])
    parser.add_argument("--end", default="", choices=["azure", "aws", "gcp", "group", ""])
    parser.add_argument("--management-url", default=MANAGEMENT_URL)
    parser.add_argument("--stay", type=Path)
    given = parser.parse_args(arguments)
    agent = Agent(
        given.manager,
        given.node,
        secret_in(given),
        sources_of(given.source, given.secret_file.parent),
        lonely_s=given.lonely_s,
        end=lambda: _end(given.end, given.node, given.management_url, given.secret_file.parent),
        num_devices=given.devices,
        stay=partial(_stay, given.stay) if given.stay else lambda: None,
    )
    agent.run()


if __name__ == "__main__":
    main()
