"""The agent of a node and the manager's notice server, over real connections."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from manager.controller.state.events import NoticeGiven, NoticeWithdrawn
from manager.engine.joining.notice_server import NoticeServer
from manager.engine.loop.event_queue import EventQueue
from manager.host.processes import wait_gone
from manager.journal.records import Fact
from manager.notices import end as end_module
from manager.notices.agent import Agent
from manager.notices.call import AGENT, ERRAND, called
from manager.notices.end import end_on_azure, end_vm
from manager.notices.source import NoticeUnavailable, Standing
from morph.link.authority import authority_of
from morph.link.session import LinkSession
from morph.link.wire import SIZE, Wire
from tests.notices.metadata_server import MetadataServer, Reply, json_reply
from tests.waiting import BOUND_S

SECRET = "s3cret-of-this-run"
ROOT = Path(__file__).resolve().parents[2]


def credential(secret: str = SECRET) -> str:
    return authority_of(secret).credential("node")


class FakeSource:
    """A source whose standing notices are set by the test."""

    name = "fake"

    def __init__(self) -> None:
        self.now: tuple[Standing, ...] = ()
        self.error = ""
        self.left: list[str] = []
        self.acknowledged = threading.Event()
        self.asked = threading.Semaphore(0)

    def polled(self) -> None:
        """Wait for the end of a poll that began after this call."""
        while self.asked.acquire(blocking=False):
            pass
        for _ in range(2):  # the second one begins after this call
            assert self.asked.acquire(timeout=BOUND_S)

    def standing(self) -> tuple[Standing, ...]:
        self.asked.release()
        if self.error:
            raise NoticeUnavailable(self.error)
        return self.now

    def acknowledge(self, notice: str) -> None:
        self.left.append(notice)
        self.acknowledged.set()


class World:
    def __init__(self) -> None:
        self.event_queue, self.source = EventQueue(), FakeSource()
        self.server = NoticeServer(self.event_queue, SECRET)
        self.ended = threading.Event()
        self.agents: list[tuple[Agent, threading.Thread]] = []

    def agent(self, node: str = "n1", secret: str = SECRET, lonely_s: float = 600, num_devices: int = 1) -> None:
        address = (self.server.host, self.server.port)
        end, shown = self.ended.set, credential(secret)
        agent = Agent(
            address, node, shown, [self.source], lonely_s=lonely_s, end=end, every_s=0.02, num_devices=num_devices
        )
        thread = threading.Thread(target=agent.run)
        thread.start()
        self.agents.append((agent, thread))

    def next(self) -> object:
        stamped = self.event_queue.get(BOUND_S)
        assert stamped is not None, "nothing came"
        return stamped.item

    def close(self) -> None:
        for agent, _ in self.agents:
            agent.close()
        self.server.close()
        for _, thread in self.agents:
            thread.join(BOUND_S)
            assert not thread.is_alive()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def test_a_node_whose_name_cannot_be_shown_is_sent_away(world: World) -> None:
    for name in ("\x1b[2J", "n 1", "", "n1\nn2"):
        with (
            pytest.raises(OSError),
            called((world.server.host, world.server.port), credential(), name, ERRAND),
        ):
            pass
    with called((world.server.host, world.server.port), credential(), "n1", ERRAND) as session:
        session.tell({"kind": "unfit", "why": "\x1b]52;c;AAAA\x07"})
        session.hear(BOUND_S)
    assert world.next() == Fact(name="vm_unfit", worker="n1", detail=r"\x1b]52;c;AAAA\x07")


def notice(name: str = "E-1", lead_s: float | None = 30.0, *, certain: bool = True) -> Standing:
    return Standing(notice=name, lead_s=lead_s, certain=certain)


def test_a_notice_becomes_an_event_of_the_node_once(world: World) -> None:
    world.source.now = (notice(lead_s=600.0),)
    world.agent()
    given = world.next()
    assert isinstance(given, NoticeGiven)
    assert (given.worker, given.notice) == ("n1", "E-1")
    assert 600 - BOUND_S < given.lead_s <= 600
    world.source.now = ()
    told = [world.next(), world.next()]
    assert NoticeWithdrawn(worker="n1") in told
    assert not [item for item in told if isinstance(item, NoticeGiven)]


def test_a_notice_for_a_vm_is_one_for_each_of_its_workers(
    world: World,
) -> None:
    world.source.now = (notice(),)
    world.agent("vm", num_devices=2)
    assert [(item.worker, item.notice) for item in (world.next(), world.next())] == [  # type: ignore[attr-defined]
        ("vm.d0", "E-1"),
        ("vm.d1", "E-1"),
    ]
    assert world.server.left("vm.d1", "E-1")
    assert world.source.acknowledged.wait(BOUND_S)
    world.source.now = ()
    told = [world.next(), world.next(), world.next()]
    assert [item for item in told if isinstance(item, NoticeWithdrawn)] == [
        NoticeWithdrawn(worker="vm.d0"),
        NoticeWithdrawn(worker="vm.d1"),
    ]


def test_a_notice_is_acknowledged_once_the_manager_says_that_nothing_is_left(world: World) -> None:
    world.source.now = (notice(),)
    world.agent()
    world.next()
    assert world.source.left == []
    assert world.server.left("n1", "E-1")
    assert world.source.acknowledged.wait(BOUND_S)
    assert world.source.left == ["E-1"]
    assert not world.server.left("another", "E-1")


def test_a_recommendation_drains_no_worker(world: World) -> None:
    world.source.now = (notice("rebalance", None, certain=False),)
    world.agent()
    assert world.next() == Fact(name="notice_recommended", worker="n1", detail="rebalance")
    world.source.now = (notice(),)
    told = [world.next(), world.next()]
    assert Fact(name="notice_withdrawn", worker="n1", detail="rebalance") in told
    assert any(isinstance(item, NoticeGiven) for item in told)


def test_a_source_without_replies_is_recorded_as_a_fact(world: World) -> None:
    world.source.error = "status 500"
    world.agent()
    assert world.next() == Fact(name="notice_trouble", worker="n1", detail="fake: status 500")


def test_another_manager_learns_of_standing_and_withdrawn_notices(world: World) -> None:
    world.source.now = (notice("E-1"), notice("E-2"))
    world.agent()
    assert {world.next().notice, world.next().notice} == {"E-1", "E-2"}  # type: ignore[attr-defined]
    port = world.server.port
    world.server.close()
    for thread in threading.enumerate():
        if thread.name == "morph-agent-listen":  # messages may be lost until the agent notices the end
            thread.join(BOUND_S)
    world.source.now = (notice("E-2"),)
    world.source.polled()
    world.server = NoticeServer(world.event_queue, SECRET, port=port)
    told = [world.next() for _ in range(3)]
    assert [item.notice for item in told if isinstance(item, NoticeGiven)] == ["E-2"]
    assert Fact(name="notice_withdrawn", worker="n1", detail="E-1") in told


def test_a_node_without_the_secret_is_not_heard(world: World) -> None:
    world.source.now = (notice(),)
    world.agent("stranger", "wrong", lonely_s=0.3)
    assert world.ended.wait(BOUND_S)  # to the agent, the manager seems gone
    assert world.event_queue.get(0.05) is None


@pytest.mark.parametrize("said", [b"", b"\xff" * 70000, b'["n1", "1", "agent"]', b"\x16\x03\x01\x40\x00"])
def test_a_stranger_is_sent_away_and_others_are_served(world: World, said: bytes) -> None:
    with socket.create_connection((world.server.host, world.server.port), BOUND_S) as stranger:
        with contextlib.suppress(OSError):  # the server may close the connection before all is sent
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(BOUND_S)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(100):
                pass
    check_served(world)


@pytest.mark.parametrize("hello", [b"", b"[1]", b"[" * 4000, b'["n1", "1"]', b'["n1", "1", 1]', b'{"n1": 1}'])
def test_a_node_without_a_name_is_rejected_while_others_are_served(world: World, hello: bytes) -> None:
    with socket.create_connection((world.server.host, world.server.port), BOUND_S) as connection:
        session = LinkSession(connection, Wire(credential(), listens=False))
        connection.sendall(session._wire.shake())
        session.send(hello)
        with pytest.raises(OSError):
            session.receive(BOUND_S)
    check_served(world)


def check_served(world: World) -> None:
    world.source.now = (notice(),)
    world.agent()
    assert isinstance(world.next(), NoticeGiven)


@pytest.mark.parametrize(("num_devices", "role"), [(0, AGENT), (10**9, AGENT), (1, "manager")])
def test_a_client_with_the_secret_that_is_not_a_node_is_rejected(world: World, num_devices: int, role: str) -> None:
    address = world.server.host, world.server.port
    with pytest.raises(ConnectionError), called(address, credential(), "n1", role, num_devices):
        pass


@pytest.mark.parametrize("message", [{"kind": "certificate", "request": "CSR"}, {"kind": "more"}, {}])
def test_a_message_that_the_manager_does_not_know_ends_the_connection(world: World, message: dict[str, str]) -> None:
    with called((world.server.host, world.server.port), credential(), "n1", ERRAND) as session:
        session.tell(message)
        with pytest.raises(ConnectionError):
            session.hear(BOUND_S)
    world.source.now = (notice(),)
    world.agent()
    assert isinstance(world.next(), NoticeGiven)


def test_an_errand_of_a_node_does_not_end_its_agents_connection(world: World) -> None:
    address = world.server.host, world.server.port
    with called(address, credential(), "n1", AGENT) as agent, called(address, credential(), "n1", ERRAND) as errand:
        errand.tell({"kind": "beat"})
        assert errand.hear(BOUND_S) == {"heard": True}
        agent.tell({"kind": "beat"})
        assert agent.hear(BOUND_S) == {"heard": True}  # it was accepted before it was noted
        assert world.server.left("n1", "E-1")
        assert agent.hear(BOUND_S) == {"left": "E-1"}
        with called(address, credential(), "n1", AGENT) as again:
            with pytest.raises(ConnectionError):
                agent.hear(BOUND_S)
            assert world.server.left("n1", "E-2")
            assert again.hear(BOUND_S) == {"left": "E-2"}


Speak = Callable[[socket.socket], None]


@contextlib.contextmanager
def impostor(world: World, speak: Speak, lonely_s: float = 600.0) -> Iterator[None]:
    """Stand in for a manager without the secret; ``speak`` is called for each agent that connects."""
    listener, over = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def serve() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                connection.settimeout(BOUND_S)
                speak(connection)
                while connection.recv(1 << 16):  # until the agent closes the connection
                    pass

    server = threading.Thread(target=serve, daemon=True)
    agent = Agent(
        listener.getsockname(), "n1", credential(), [world.source], lonely_s=lonely_s, end=world.ended.set, every_s=0.02
    )
    thread = threading.Thread(target=agent.run)
    thread.start()
    server.start()
    try:
        yield
    finally:
        over.set()
        agent.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(BOUND_S)
        server.join(BOUND_S)


def plainly(connection: socket.socket) -> None:
    connection.sendall(SIZE.pack(7) + b"welcome" + SIZE.pack(15) + b'{"left": "E-1"}')


def as_the_manager_of_another_run(connection: socket.socket) -> None:
    tell_left(connection, authority_of("guessed").credential())


def as_another_vm_of_the_run(connection: socket.socket) -> None:
    tell_left(connection, credential())


def tell_left(connection: socket.socket, shown: str) -> None:
    session = LinkSession(connection, Wire(shown, listens=True))
    session.welcome(3, BOUND_S)
    session.let_in()
    session.tell({"left": "E-1"})


@pytest.mark.parametrize("speak", [plainly, as_the_manager_of_another_run, as_another_vm_of_the_run])
def test_an_impostor_without_the_secret_gets_no_early_eviction(world: World, speak: Speak) -> None:
    world.source.now = (notice(),)
    with impostor(world, speak, lonely_s=0.5):
        assert world.ended.wait(BOUND_S)  # it had long enough to act on it
        assert not world.source.acknowledged.is_set()


def test_a_vm_ends_itself_only_after_long_loneliness(world: World) -> None:
    world.agent(lonely_s=1.5)
    assert not world.ended.wait(2.0)  # the manager is there
    world.server.close()
    assert world.ended.wait(BOUND_S)


def test_a_node_that_does_not_end_is_killed(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "of-ray", tmp_path / "node"
    (folder / "tmp").mkdir(parents=True)
    elsewhere.mkdir()
    for name, content in {"elsewhere": str(elsewhere), "node-secret": SECRET, "log": "told"}.items():
        (folder / name).write_text(content, encoding="utf-8")
    program = (
        "from pathlib import Path; from manager.notices.agent import end_group\n"
        f"end_group(Path({str(folder)!r}), grace_s=0.3)"
    )
    script = f"trap '' TERM; {shlex.join([sys.executable, '-c', program])} & exec sleep 100"
    with subprocess.Popen(["sh", "-c", script], start_new_session=True, cwd=ROOT) as node:
        assert node.wait(BOUND_S) == -signal.SIGKILL
        agent = [
            process for process in psutil.process_iter() if process.pid != node.pid and _group(process) == node.pid
        ]
        left = wait_gone(agent, BOUND_S)
    assert not elsewhere.exists()
    assert [path.name for path in folder.iterdir()] == ["log"]
    assert left == []


def _group(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return 0


ID = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/tiny-1-0"


def described(name: str = "tiny-1-0", **tags: str) -> Reply:
    """Return the metadata service's description of a VM."""
    told = {"morph-run": "tiny", "morph-job": "tiny", "morph-request": "tiny-1", **tags}
    listed = [{"name": tag, "value": value} for tag, value in told.items() if value]
    return json_reply({"name": name, "resourceId": ID, "tagsList": listed})


def test_a_forgotten_vm_deletes_itself_by_its_identity(metadata: MetadataServer) -> None:
    metadata.script("GET", "/metadata/instance/compute", described())
    metadata.script("GET", "/metadata/identity/oauth2/token", json_reply({"access_token": "t0k"}))
    metadata.script("DELETE", ID, Reply(status=202))
    assert end_on_azure("tiny-1-0", metadata.url, metadata.url)
    deletion = metadata.asked[-1]
    assert deletion.headers["authorization"] == "Bearer t0k"
    assert "api-version=" in deletion.path
    assert all(asked.headers.get("metadata") == "true" for asked in metadata.asked[:-1])
    assert f"resource={quote(metadata.url + '/', safe='')}" in metadata.asked[1].path


@pytest.mark.parametrize(
    "reply",
    [described("web-1"), described(**{"morph-run": ""}), described(**{"morph-job": ""})],
    ids=["another VM", "no run", "no job"],
)
def test_a_copied_agent_does_not_delete_a_foreign_vm(metadata: MetadataServer, reply: Reply) -> None:
    metadata.script("GET", "/metadata/instance/compute", reply)
    assert end_on_azure("tiny-1-0", metadata.url, metadata.url) is None
    assert [asked.method for asked in metadata.asked] == ["GET"]


@pytest.mark.parametrize("reply", [Reply(status=500), Reply(body="no"), Reply(body="{}"), Reply(drop=True)])
def test_a_vm_without_an_answer_from_azure_is_not_deleted(metadata: MetadataServer, reply: Reply) -> None:
    metadata.script("GET", "/metadata/instance/compute", reply)
    assert end_on_azure("tiny-1-0", metadata.url, metadata.url) is False
    assert not [asked for asked in metadata.asked if asked.method == "DELETE"]


@pytest.mark.parametrize(
    ("answers", "num_pauses", "is_switched_off"),
    [([False, False, True], 2, False), ([False, None], 1, False), ([False] * 5, 4, True)],
    ids=["taken in the end", "a copy of its disk", "never"],
)
def test_azure_is_asked_again_before_a_vm_is_switched_off(
    answers: list[bool | None], num_pauses: int, is_switched_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses, ran = list[float](), list[list[str]]()
    monkeypatch.setattr(end_module, "end_on_azure", lambda *_, **__: answers.pop(0))
    monkeypatch.setattr(end_module.subprocess, "run", lambda command, **_: ran.append(command))
    end_vm("azure", "tiny-1-0", pause=pauses.append)
    assert (answers, len(pauses)) == ([], num_pauses)
    assert ran == [["systemctl", "poweroff"]] * is_switched_off


@pytest.mark.parametrize("token", [Reply(status=400), Reply(body="{}"), Reply(body="no"), Reply(drop=True)])
def test_without_an_identity_it_says_so(metadata: MetadataServer, token: Reply) -> None:
    metadata.script("GET", "/metadata/instance/compute", described())
    metadata.script("GET", "/metadata/identity/oauth2/token", token)
    assert end_on_azure("tiny-1-0", metadata.url, metadata.url) is False
    assert not [asked for asked in metadata.asked if asked.method == "DELETE"]
