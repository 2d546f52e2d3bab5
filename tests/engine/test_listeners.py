"""Every listener of Morph under the same abuse: many silent strangers, invalid data, and no file descriptors left."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from calibrate.helpers.proven_connection import call
from calibrate.links.peer_node import PeerNode
from manager.dashboard.server import serving
from manager.engine.joining.certificates import Tls, load_authority, make_certificates
from manager.engine.joining.enrolment_desk import EnrolmentDesk
from manager.engine.joining.notice_server import NoticeServer
from manager.engine.loop.event_queue import EventQueue
from manager.enrolment.authority import signing_request
from manager.enrolment.node import ManagerContact, ask
from manager.journal.records import Fact
from manager.notices.agent import Agent
from manager.notices.source import NoticeUnavailable
from manager.report.live import LiveRun
from morph.link import listener as listener_module
from morph.link.authority import authority_of, new_key
from morph.link.caller import TALK, Call
from morph.link.listener import HELLO_TIMEOUT_S, MOST_OF_SOURCE, PendingCallers
from morph.runtime.attendants.incoming import Incoming
from morph.runtime.attendants.wire import Frame, StreamContext, send_frame
from morph.runtime.groups.faults import FaultPlan
from tests.engine.link_scene import LinkScene
from tests.waiting import BOUND_S

SECRET = "s3cret-of-this-run"
CREDENTIAL = authority_of(SECRET).credential("node")
NUM_PENDING = 1024
FEW = 8
"""File descriptors of a listener itself, and of connections that it is about to close."""
CROWD = """
import resource, socket, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
host, port, number, said = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])
held = []
for _ in range(number):
    held.append(socket.create_connection((host, port), 30))
    try:
        held[-1].sendall(said)
    except OSError:
        pass
print("there", flush=True)
sys.stdin.read()
"""
"""Connects many times, sends the same each time, and stays."""


@dataclass
class Scene:
    """A listener, and what a genuine client does with it."""

    address: tuple[str, int]
    come: Callable[[], None]


class Silent:
    """A source that never answers: the report about this shows that the manager heard the agent."""

    name = "fake"

    def standing(self) -> tuple[()]:
        raise NoticeUnavailable("silent")

    def acknowledge(self, notice: str) -> None:
        """Do nothing."""


@contextmanager
def workers(_: Path) -> Iterator[Scene]:
    opened = LinkScene()

    def come() -> None:
        call = Call(opened.home("vm0"), TALK)
        assert opened.told.next() == ("came", "vm0")
        call.reset()

    yield Scene(opened.address, come)
    opened.close()


@contextmanager
def notices(_: Path) -> Iterator[Scene]:
    event_queue = EventQueue()
    server = NoticeServer(event_queue, SECRET)

    def come() -> None:
        address = (server.host, server.port)
        agent = Agent(
            address,
            "n1",
            CREDENTIAL,
            [Silent()],
            lonely_s=600,
            end=lambda: None,
            every_s=0.02,
        )
        thread = threading.Thread(target=agent.run)
        thread.start()
        told = event_queue.get(BOUND_S)
        agent.close()
        thread.join(BOUND_S)
        assert told.item == Fact(name="notice_trouble", worker="n1", detail="fake: silent")

    yield Scene((server.host, server.port), come)
    server.close()


@contextmanager
def enrolment(folder: Path) -> Iterator[Scene]:
    make_certificates(folder, Tls(enrols=True))
    event_queue, key = EventQueue(), new_key()
    server = NoticeServer(event_queue, SECRET, desk=EnrolmentDesk(event_queue, load_authority(folder)))

    def come() -> None:
        place = ManagerContact((server.host, server.port), "tiny-1-0", CREDENTIAL)
        assert ask(place, lambda address: signing_request(key, "tiny-1-0", address)).certificate

    yield Scene((server.host, server.port), come)
    server.close()


class Keys(dict[str, bytes]):
    """A rendezvous store of one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()


@contextmanager
def units_sent_ahead(_: Path) -> Iterator[Scene]:
    store: Any = Keys()
    context = StreamContext(
        worker="b",
        secret=SECRET,
        listen_host="127.0.0.1",
        open_store=lambda: nullcontext(store),
        faults=FaultPlan([], []),
        occasion="1",
    )
    incoming = Incoming(
        context, {f"s{number}": f"a{number}" for number in range(9)},
        make_unit_copy=lambda unit: pytest.fail(unit), arrive=lambda _: None,
        news=lambda: None,
    )  # fmt: skip
    senders = iter(range(9))

    def come() -> None:
        sender, rendezvous = f"a{next(senders)}", context.rendezvous("b")
        with socket.create_connection(incoming._listener.address, BOUND_S) as connection:
            # this returns once the receiver has taken the frame
            send_frame(connection, Frame(rendezvous.hello(incoming._told, sender), {}))

    yield Scene(incoming._listener.address, come)
    incoming.end()


@contextmanager
def calibrate_peer(_: Path) -> Iterator[Scene]:
    with PeerNode("127.0.0.1", 0, SECRET, lambda _: None) as node:
        yield Scene((node.host, node.port), lambda: call(node.host, node.port, SECRET).close())


@contextmanager
def page(folder: Path) -> Iterator[Scene]:
    with serving(LiveRun("gpt2-stdlib", 12, 8), folder) as address:
        host, _, port = address.url.removeprefix("http://").rstrip("/").partition(":")

        def come() -> None:
            with urllib.request.urlopen(address.url, timeout=BOUND_S) as answer:
                assert answer.status == 200

        yield Scene((host, int(port)), come)


SCENES = [workers, notices, enrolment, units_sent_ahead, calibrate_peer, page]


@pytest.fixture(params=SCENES, ids=lambda scene: scene.__name__)
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    with request.param(tmp_path) as opened:
        yield opened


@contextmanager
def crowd(address: tuple[str, int], number: int = NUM_PENDING, said: bytes = b"") -> Iterator[None]:
    arguments = [sys.executable, "-c", CROWD, address[0], str(address[1]), str(number), said.hex()]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"there\n"
        yield
        process.stdin.close()
        process.wait(BOUND_S)


@pytest.mark.slow
def test_a_crowd_of_silent_strangers_blocks_no_one_and_is_dropped(scene: Scene) -> None:
    scene.come()
    before = psutil.Process().num_fds()
    with crowd(scene.address):
        # rejected connections end a little later; all have ended by then
        until_s = time.monotonic() + HELLO_TIMEOUT_S / 2
        while (held := psutil.Process().num_fds() - before) > MOST_OF_SOURCE + FEW:  # all come from one address
            assert time.monotonic() < until_s, f"{held} are held"
            time.sleep(0.01)
        scene.come()


@pytest.mark.parametrize("said", [b"\n", b"\xff" * 5000, b'{"node": []}\n' * 50], ids=["nothing", "noise", "objects"])
def test_strangers_that_send_rubbish_keep_no_client_out(scene: Scene, said: bytes) -> None:
    with crowd(scene.address, 200, said):
        scene.come()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_listener_continues_after_descriptors_ran_out(scene: Scene) -> None:
    scene.come()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as held:
        held.enter_context(crowd(scene.address, 10))
        lowest = max(int(name.name) for name in Path("/proc/self/fd").iterdir()) + 1
        more = subprocess.Popen(
            [sys.executable, "-c", CROWD, scene.address[0], str(scene.address[1]), "5", ""],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert more.stdout is not None
        assert more.stdin is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(3, lowest), hard))
        try:
            assert more.stdout.readline() == b"there\n"  # the kernel accepted them, whether or not the process did
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        scene.come()
        more.stdin.close()
        more.wait(BOUND_S)
        more.stdout.close()


def test_strangers_are_bounded_of_one_address_in_all_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(listener_module.time, "monotonic", lambda: now[0])
    gone: list[str] = []
    pending = PendingCallers(most=4, most_of_source=2)

    def add(name: str) -> None:
        pending.add(name, name[0], lambda: gone.append(name))

    for name in ("a1", "a2", "a3"):
        add(name)
    assert gone == ["a1"]  # the oldest one from its address
    for name in ("b1", "b2", "c1"):
        add(name)
    assert gone == ["a1", "a2"]  # the oldest one of all
    assert pending.remove("b1")
    assert not pending.remove("a2")  # it took too long
    now[0] += 5.0
    add("d1")
    now[0] += 6.0
    pending.expire(10.0)
    assert gone == ["a1", "a2", "a3", "b2", "c1"]
    assert len(pending) == 1
