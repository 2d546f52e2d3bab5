"""The user's own hosts, started over a stand-in for ssh that runs the remote command on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr, ValidationError

from manager.controller.state.events import WorkerLost
from manager.engine.joining.notice_server import NoticeServer
from manager.engine.loop.event_queue import EventQueue
from manager.host.processes import wait_gone
from manager.journal.records import Fact
from manager.providers.boot.cloud_init import NodeStart
from manager.providers.hosts.ssh import SshHost, Unanswered, run_ssh, ssh_command
from manager.providers.hosts.static import LOOK_AGAIN_S, Hosts, StaticProvider, StaticSpec
from manager.providers.hosts.static_node import secret_of, static_node
from manager.providers.interface.provider import CapacityShort, Misconfigured, ProviderError, Transient
from morph.link.authority import authority_of
from tests.waiting import BOUND_S, poll_until

pytestmark = pytest.mark.slow

SECRET = "s3cr3t-8810"
FAKE_SSH = """#!/bin/sh
# arguments: options, --, host, remote line
while [ "$1" != -- ]; do shift; done
host=$2
echo "$*" >> "$FAKE_ROOT/calls"
[ -e "$FAKE_ROOT/down-$host" ] && { echo "connect to host $host: refused" >&2; exit 255; }
HOME="$FAKE_ROOT/$host"; export HOME; mkdir -p "$HOME"; cd "$HOME"
exec sh -c "$3"
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    program = tmp_path / "ssh"
    program.write_text(FAKE_SSH)
    program.chmod(0o755)
    monkeypatch.setenv("FAKE_ROOT", str(tmp_path))
    yield tmp_path
    for path in tmp_path.glob("*/.morph/nodes/*/pid"):
        os.killpg(int(path.read_text()), 9)


def provider(world: Path, *hosts: str, command: tuple[str, ...] = ("sleep", "600")) -> StaticProvider:
    spec = StaticSpec(hosts=tuple(SshHost(address=host) for host in hosts), command=command)
    shell = partial(run_ssh, program=[str(world / "ssh")])
    return StaticProvider(spec, "tiny", world / "leases" / "leases.json", SECRET, shell)


def node_pid(world: Path, host: str, node: str) -> int:
    return int((world / host / ".morph/nodes" / node / "pid").read_text())


def ended(pid: int) -> bool:
    try:
        return not wait_gone([psutil.Process(pid)], BOUND_S)
    except psutil.NoSuchProcess:
        return True


def test_a_node_runs_after_the_request_and_not_after_the_deletion(world: Path) -> None:
    static = provider(world, "h1", "h2")
    (vm,) = static.request("a", 1)
    pid = node_pid(world, "h1", vm.name)
    assert psutil.Process(pid).cmdline()[-2:] == ["sleep", "600"]
    static.delete([vm.name])
    assert ended(pid)
    assert not (world / "h1/.morph/nodes" / vm.name).exists()
    assert static.list() == ()


def test_the_secret_reaches_the_node_and_no_command_line(world: Path) -> None:
    show = 'import os, sys; open(sys.argv[1], "w").write(open(os.environ["MORPH_SECRET_FILE"]).read())'
    static = provider(world, "h1", command=("python3", "-c", show, "{node}.seen"))
    (vm,) = static.request("a", 1)
    seen = world / "h1" / f"{vm.name}.seen"
    poll_until(lambda: seen.exists() and seen.read_text(), "the node to write")
    assert seen.read_text() == SECRET
    assert ((world / "h1/.morph/nodes" / vm.name / "secret").stat().st_mode & 0o077) == 0
    assert SECRET not in (world / "calls").read_text()
    assert SECRET not in (world / "leases/leases.json").read_text()
    (world / "h1/.morph/nodes" / vm.name / "pid").unlink()  # it ended by itself


def test_hosts_are_chosen_by_need_and_nodes_know_their_devices(world: Path) -> None:
    hosts = tuple(SshHost(address=f"h{number}", num_gpus=number) for number in (1, 2, 4))
    spec = StaticSpec(hosts=hosts, command=("sh", "-c", "echo {devices} >{node}; sleep 600"))
    shell = partial(run_ssh, program=[str(world / "ssh")])
    static = StaticProvider(spec, "tiny", world / "leases.json", SECRET, shell)
    vms = static.request("a", 3)
    assert [vm.num_devices for vm in vms] == [2, 1]
    assert static.request("b", 1)[0].num_devices == 4  # there is no smaller one
    told = [world / host / node for host, node in (("h2", "a-0"), ("h1", "a-1"), ("h4", "b-0"))]
    poll_until(lambda: all(path.exists() and path.read_text() for path in told), "the nodes to write")
    assert [path.read_text() for path in told] == ["2\n", "1\n", "4\n"]


def test_another_manager_starts_nothing_twice(world: Path) -> None:
    (vm,) = provider(world, "h1", "h2").request("a", 1)
    pid = node_pid(world, "h1", vm.name)
    assert provider(world, "h1", "h2").request("a", 1) == (vm,)
    assert node_pid(world, "h1", vm.name) == pid
    assert not (world / "h2").exists()


def test_a_host_costs_what_it_or_the_file_says(world: Path) -> None:
    hosts = (SshHost(address="h1", usd_per_h=0.4), SshHost(address="h2"))
    spec = StaticSpec(hosts=hosts, usd_per_h=0.1, command=("true",))
    path = world / "leases.json"
    static = StaticProvider(spec, "tiny", path, SECRET, lambda host, remote, secret="": None)
    granted = static.request("a", 2)
    assert [vm.usd_per_h for vm in granted] == [0.4, 0.1]
    assert set(static.list()) == set(granted)
    assert "usd_per_h" not in path.read_text(), "the file of hosts says it"
    assert (price := static.price()) is not None
    assert price.usd_per_h == 0.4
    assert Hosts(hosts=hosts).dearest_usd_per_h is None, "one has no price"
    assert spec.at(0.7).dearest_usd_per_h == 0.7
    assert {host.usd_per_h for host in spec.at(0.7).hosts} == {None}


def test_a_host_that_cannot_be_reached_is_skipped(world: Path) -> None:
    (world / "down-h1").touch()
    static = provider(world, "h1", "h2")
    (vm,) = static.request("a", 2)
    assert node_pid(world, "h2", vm.name)
    assert list(json.loads((world / "leases/leases.json").read_text())) == ["h2:22"]
    with pytest.raises(CapacityShort, match="h1 cannot be reached: connect to host h1: refused") as raised:
        static.request("b", 1)
    assert raised.value.retry_after_s == LOOK_AGAIN_S


def test_a_host_where_the_start_fails_costs_none_of_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def shell(host: SshHost, remote: str, secret: str = "") -> str:
        if host.address in broken:
            raise Misconfigured(f"{host.address}: the command failed with 1")
        return "no space left\n" if remote.startswith("tail") else ""

    hosts, broken = tuple(SshHost(address=f"h{index}") for index in range(4)), {"h1"}
    static = StaticProvider(StaticSpec(hosts=hosts, command=("true",)), "tiny", tmp_path / "l.json", SECRET, shell)
    vms = static.request("a", 4)
    assert [vm.zone for vm in vms] == ["h0:22", "h2:22", "h3:22"]
    assert caplog.messages == ["the host h1:22 is not used: h1: the command failed with 1"]
    assert set(static.list()) == set(vms)
    assert static.boot_log(vms[0].name) == "no space left\n"
    broken |= {"h2"}  # for another manager, which repeats the request under its name
    assert [vm.zone for vm in static.request("a", 4)] == ["h0:22", "h3:22"]
    broken -= {"h2"}
    static.dismantle()
    broken |= {"h0", "h2", "h3"}
    with pytest.raises(Misconfigured, match="h0: the command failed"):
        static.request("b", 1)
    assert static.list() == ()


def test_an_unreachable_host_stays_leased_until_its_node_ended(world: Path) -> None:
    static = provider(world, "h1")
    (vm,) = static.request("a", 1)
    (world / "down-h1").touch()
    with pytest.raises(Transient):
        static.delete([vm.name])
    assert static.list() == (vm,)
    (world / "down-h1").unlink()
    static.delete([vm.name])
    assert static.list() == ()


def test_a_host_whose_node_cannot_be_ended_keeps_none_of_the_others(tmp_path: Path) -> None:
    def shell(host: SshHost, remote: str, secret: str = "") -> None:
        if "setsid" not in remote and host.address in broken:
            raise broken[host.address]

    broken = {"h1": Misconfigured("h1: the command failed with 1"), "h2": Transient("h2 cannot be reached")}
    hosts = tuple(SshHost(address=f"h{index}") for index in range(1, 6))
    path, spec = tmp_path / "leases.json", StaticSpec(hosts=hosts, command=("true",))
    StaticProvider(spec, "tiny", path, SECRET, shell).request("a", 5)
    fewer = spec.model_copy(update={"hosts": hosts[:4]})  # the node on the fifth host may continue
    static = StaticProvider(fewer, "tiny", path, SECRET, shell)
    with pytest.raises(
        Transient, match="a-0 is left: h1: the command failed with 1; a-1 is left: h2 cannot be reached"
    ) as raised:
        static.dismantle()
    assert "a-4 is left: h5:22 is not in the file of hosts any more" in str(raised.value)
    assert [vm.name for vm in static.list()] == ["a-0", "a-1", "a-4"]
    broken.clear()
    StaticProvider(spec, "tiny", path, SECRET, shell).dismantle()
    assert static.list() == ()


def test_unreadable_leases_are_not_taken_for_missing_ones(tmp_path: Path) -> None:
    path = tmp_path / "leases.json"
    path.mkdir()
    static = StaticProvider(StaticSpec(hosts=(SshHost(address="h1"),), command=("true",)), "tiny", path)
    with pytest.raises(Transient, match="cannot be read"):
        static.list()


@pytest.mark.parametrize("ends", [True, False])
def test_a_node_that_may_have_started_shares_its_name_with_no_other(world: Path, ends: bool) -> None:
    hosts = (SshHost(address="h1"), SshHost(address="h2"))
    done: list[tuple[str, str]] = []

    def shell(host: SshHost, remote: str, secret: str = "") -> None:
        kind = "start" if "setsid" in remote else "end"
        done.append((host.address, kind))
        if host.address == "h1" and (kind == "start" or not ends):
            raise Unanswered("h1 did not answer within 120 s")

    path = world / "leases.json"
    static = StaticProvider(StaticSpec(hosts=hosts, command=("true",)), "tiny", path, SECRET, shell)
    (vm,) = static.request("a", 1)
    assert done == [("h1", "start"), ("h1", "end"), ("h2", "start")]
    assert vm.name == ("a-0" if ends else "a-1")
    assert [one.name for one in static.list()] == (["a-0"] if ends else ["a-0", "a-1"])
    ends = True  # from now on
    static.delete([one.name for one in static.list()])
    assert static.list() == ()


def test_a_node_that_ends_by_itself_leaves_its_log_alone(world: Path) -> None:
    python = world / "python"
    python.write_text(
        '#!/bin/sh\nfor a in "$@"; do case "$a" in --directory=*) d="${a#--directory=}";; esac; done\n'
        'if [ "$2" = manager.enrolment.node ]; then mkdir -p "$d"; echo KEY >"$d/key.pem"; fi\n'
    )
    python.chmod(0o755)
    start = NodeStart(
        ray_address="127.0.0.1:1",
        manager_address="127.0.0.1:2",
        ray_token=SecretStr("token"),
        node_secret=SecretStr("secret"),
        python=str(python),
        python_version="3.12.3",
        wheel_sha256="5c" * 32,
        authority="PEM",
    )
    spec = StaticSpec(hosts=(SshHost(address="h1"),), command=static_node(start))
    shell = partial(run_ssh, program=[str(world / "ssh")])
    static = StaticProvider(spec, "tiny", world / "leases.json", secret_of(start), shell)
    (vm,) = static.request("a", 1)
    folder = world / "h1" / ".morph/nodes" / vm.name
    poll_until(lambda: [file.name for file in folder.iterdir()] == ["log"], "the node to leave its log alone")


def test_a_node_whose_ray_fails_is_lost_with_its_last_words(world: Path) -> None:
    python = world / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *--only=ended*) exec {sys.executable} "$@";; '
        "*on_ray.node*) echo Starting; echo; echo 'RuntimeError: no GCS is there'; exit 1;; esac\n"
    )
    python.chmod(0o755)
    event_queue = EventQueue()
    server = NoticeServer(event_queue, "secret")
    start = NodeStart(
        ray_address="127.0.0.1:1",
        manager_address=f"127.0.0.1:{server.port}",
        ray_token=SecretStr("token"),
        node_secret=SecretStr(authority_of("secret").credential("node")),
        python=str(python),
        python_version="3.12.3",
        wheel_sha256="5c" * 32,
    )
    spec = StaticSpec(hosts=(SshHost(address="h1", num_gpus=2),), command=static_node(start))
    static = StaticProvider(
        spec, "tiny", world / "leases.json", secret_of(start), partial(run_ssh, program=[str(world / "ssh")])
    )
    try:
        (vm,) = static.request("a", 2)
        heard = [stamped.item for _ in range(3) if (stamped := event_queue.get(BOUND_S)) is not None]
        pid = node_pid(world, "h1", vm.name)
        static.delete([vm.name])
    finally:
        server.close()
    why = "its node ended by itself: Starting | RuntimeError: no GCS is there"
    assert heard == [
        Fact(name="vm_unfit", worker=vm.name, detail=why),
        *(WorkerLost(worker=worker, cause=why, unfit=True) for worker in vm.workers),
    ]
    assert ended(pid)
    assert not (world / "h1/.morph/nodes" / vm.name).exists()


def test_a_host_leased_by_another_run_is_not_taken(world: Path) -> None:
    hosts = (SshHost(address="h1"),)
    spec, path = StaticSpec(hosts=hosts, command=("true",)), world / "leases.json"
    other = StaticProvider(spec, "other", path, SECRET, lambda host, remote, secret="": None)
    both: list[StaticProvider] = []

    def shell(host: SshHost, remote: str, secret: str = "") -> None:
        if both:  # while its node is being ended, another thread of the run ends it too, and another run gets the host
            both.pop().delete(["a-0"])
            other.request("b", 1)

    static = StaticProvider(spec, "tiny", path, SECRET, shell)
    static.request("a", 1)
    both.append(static)
    static.delete(["a-0"])
    assert static.list() == ()
    assert [vm.name for vm in other.list()] == ["b-0"]


def test_a_program_that_is_not_there_is_the_users_to_mend(world: Path) -> None:
    with pytest.raises(Misconfigured, match="cannot be run"):
        run_ssh(SshHost(address="h1"), "true", program=[str(world / "no-such")])
    with pytest.raises(Misconfigured, match="failed with 3"):
        run_ssh(SshHost(address="h1"), "exit 3", program=[str(world / "ssh")])


CHANGED = (
    "@" * 58 + "\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n" + "@" * 58 + "\n"
    "IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!\n" + 20 * "Someone could be eavesdropping on you. \n"
    "Host key verification failed.\n"
)


@pytest.mark.parametrize(
    ("said", "kind", "told"),
    [
        (CHANGED, Misconfigured, "h1 cannot be used: @ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @ IT IS"),
        ("me@h1: Permission denied (publickey).\n", Misconfigured, "h1 cannot be used: me@h1: Permission denied"),
        ("ssh: connect to host h1 port 22: Connection refused\n", Transient, "h1 cannot be reached: ssh: connect to"),
        ("something new\n", Transient, "h1 cannot be reached: something new"),
    ],
)
def test_what_ssh_refuses_is_the_users_to_mend_and_told_from_its_beginning(
    tmp_path: Path, said: str, kind: type[ProviderError], told: str
) -> None:
    (tmp_path / "said").write_text(said, encoding="utf-8")
    program = ["sh", "-c", f"cat {tmp_path}/said >&2; exit 255"]
    with pytest.raises(kind) as raised:
        run_ssh(SshHost(address="h1"), "true", "a secret", program=program)
    assert str(raised.value).startswith(told)


def test_hosts_without_gpus_have_one_worker_each(tmp_path: Path) -> None:
    hosts = (SshHost(address="h0", num_gpus=0),)
    shell = lambda host, remote, secret="": ""  # noqa: E731
    static = StaticProvider(StaticSpec(hosts=hosts, command=("true",)), "tiny", tmp_path / "l.json", SECRET, shell)
    assert [vm.num_devices for vm in static.request("a", 1)] == [1]


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
def test_a_host_gets_no_way_back_whatever_the_users_configuration_says(tmp_path: Path) -> None:
    theirs = {
        "forwardagent": "yes", "forwardx11": "yes", "localforward": "7000 127.0.0.1:22", "dynamicforward": "7001",
        "remoteforward": "7002 127.0.0.1:22", "tunnel": "yes", "permitlocalcommand": "yes", "requesttty": "yes",
        "stricthostkeychecking": "no", "batchmode": "no",
    }  # fmt: skip
    config = tmp_path / "config"
    config.write_text("Host *\n" + "".join(f"  {name} {value}\n" for name, value in theirs.items()))

    def effective(*command: str) -> dict[str, str]:
        asked = [command[0], "-G", "-F", str(config), *command[1:]]
        told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=BOUND_S).stdout
        return {line.partition(" ")[0]: line.partition(" ")[2] for line in told.splitlines()}

    plain = effective("ssh", "--", "h1", "true")
    assert plain["forwardagent"] == "yes"  # this configuration would allow it
    found = effective(*ssh_command(SshHost(address="h1"), "true"))
    assert {found[name] for name in ("forwardagent", "forwardx11", "permitlocalcommand")} == {"no"}
    assert (found["clearallforwardings"], found["batchmode"]) == ("yes", "yes")
    assert (found["tunnel"], found["requesttty"], found["stricthostkeychecking"]) == ("false", "false", "true")


def test_the_command_line_asks_nothing_and_holds_no_option_of_the_hosts() -> None:
    host = SshHost(address="10.0.0.7", user="me", port=2222, identity_file="~/.ssh/id")
    command = ssh_command(host, "true")
    assert command[0] == "ssh"
    assert command[-3:] == ["--", "me@10.0.0.7", "true"]
    assert "BatchMode=yes" in command
    assert command[command.index("-p") + 1] == "2222"
    with pytest.raises(ValidationError):
        SshHost(address="-oProxyCommand=evil")
    with pytest.raises(ValidationError, match="listed twice"):
        StaticSpec(hosts=(SshHost(address="a"), SshHost(address="a")), command=("x",))


def test_ctrl_c_does_not_reach_the_starter_of_a_node(
    tmp_path: Path,
) -> None:
    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/sh\nps -o pgid= -p $$ >{tmp_path}/group\nkill -s INT $$\n")
    program.chmod(0o755)
    with pytest.raises(Unanswered, match=r"h1 did not answer before .*ssh was killed by signal 2"):
        run_ssh(SshHost(address="h1"), "true", program=[str(program)])
    assert int((tmp_path / "group").read_text()) != os.getpgrp()
