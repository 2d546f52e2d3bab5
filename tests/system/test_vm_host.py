"""The process that owns local Ray nodes: it boots them together, reports their deaths, and cleans up after them.

Also: a client with Ray's token controls every VM, but neither the manager nor anything else on its machine. The tests
of local nodes share one cluster, because each takes long to start; the last of these tests ends it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from manager.engine.joining.link_server import listen
from manager.engine.on_ray import ray_cluster, ray_environment, vm_host
from manager.engine.on_ray.launcher import RayLauncher
from manager.engine.on_ray.ray_cluster import RayCluster
from manager.engine.on_ray.ray_environment import prepare
from manager.host.ports import VM_RESOURCE
from manager.host.processes import lives
from morph.contract.errors import ClusterError, ClusterLost
from morph.link.home import Home
from tests.waiting import BOUND_S, poll_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

STORE_BYTES = 80 * 1024 * 1024
OF_THE_CONFINED = {
    "write": "ENOENT",
    "read": "ENOENT",
    "signal": "ESRCH",
    "control": "ENOENT",
    "metadata": "EACCES",
    "stolen": 0,
}
SECRET_NAME, SECRET = "A_SECRET_OF_THE_CLOUD", "s3cret-of-the-cloud"
ATTACK = """
import errno, json, os, signal, socket, sys
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

address, outside, secret_file, secret, control_socket, manager, bound = sys.argv[1:]
bound_s = float(bound)
ray.init(address=address, namespace="morph", log_to_driver=False, logging_level="ERROR")
is_vm = lambda node: any(name.startswith("morph_vm_") for name in node["Resources"])
(head,) = [node["NodeID"] for node in ray.nodes() if node["Alive"] and not is_vm(node)]

def look():
    def tried(act):
        try:
            act()
            return "done"
        except OSError as error:
            return errno.errorcode[error.errno]

    def environments():
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                yield open(f"/proc/{pid}/environ").read()
            except OSError:
                pass

    return {
        "write": tried(lambda: open(outside + "/ran", "w")),
        "read": tried(lambda: open(secret_file)),
        "signal": tried(lambda: os.kill(int(manager), 0)),
        "control": tried(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(control_socket)),
        "metadata": tried(lambda: socket.create_connection(("127.0.0.1", 80), 5)),
        "stolen": sum(secret in text for text in environments()),
    }

class Looking:
    def look(self):
        return look()

class Hostile:
    def serve_home(self, home):
        class Bomb:
            def __reduce__(self):
                return exec, (self.code,)
        bomb = Bomb()
        bomb.code = "import os; open(os.environ['TMPDIR'] + '/read', 'a').write(os.readlink('/proc/self/ns/pid') + ' ')"
        bomb.code += f"\\ntry: open({outside!r} + '/unpickled', 'w')\\nexcept OSError: pass"
        if self.ends:
            bomb.code += "\\nos._exit(1)"
        return bomb
    def __init__(self, ends):
        self.ends = ends

place = NodeAffinitySchedulingStrategy(head, soft=False)
shell = {"py_executable": f"sh -c 'echo ran >{outside}/shell' #"}
calls = [
    ray.remote(look).options(num_cpus=0, scheduling_strategy=place).remote(),
    ray.remote(Looking).options(num_cpus=0, scheduling_strategy=place).remote().look.remote(),
    ray.remote(look).options(num_cpus=0, scheduling_strategy=place, runtime_env=shell).remote(),
]
found = ray.get(calls[:2], timeout=bound_s)
ray.wait(calls[2:], timeout=10)
for name in ("bomb", "crash"):
    options = {"name": name, "lifetime": "detached", "resources": {"morph_vm_vm9": 0.01}, "num_cpus": 0}
    ray.get(ray.remote(Hostile).options(**options).remote(name == "crash").__ray_ready__.remote(), timeout=bound_s)
print(json.dumps(found))
"""
"""Attacks by everything that Ray offers a client with its token: tasks and an actor on the head node, one with an
environment, and actors in place of workers, which answer with a bomb."""


@dataclass
class Owned:
    """A cluster. ``gone``: the VMs whose end it reported. ``first_head``: a raylet that was killed while it started."""

    cluster: RayCluster
    gone: list[str]
    first_head: list[psutil.Process] = field(default_factory=list)

    @property
    def host(self) -> psutil.Process:
        assert self.cluster._line is not None
        return psutil.Process(self.cluster._line.pid)

    def agent_of_head(self) -> psutil.Process:
        (agent,) = [
            process
            for process in self.host.children(recursive=True)
            if process.name() == "ray::RuntimeEnvAgent" and "--head" in process.parent().cmdline()  # type: ignore[union-attr]
        ]
        return agent

    def vm(self) -> str:
        if not self.cluster._vms:
            self.cluster.add_vm("vm9")
        return next(iter(self.cluster._vms))


@pytest.fixture(scope="module")
def owned() -> Iterator[Owned]:
    gone: list[str] = []
    owned = Owned(RayCluster(prepare(), gone=gone.append), gone)
    session_of = ray_cluster.session_of

    def slowly(host: psutil.Process) -> list[psutil.Process]:
        found = session_of(host)
        host.wait(BOUND_S)  # by itself, before this process ends it
        return found

    patched = pytest.MonkeyPatch()
    patched.setattr(ray_cluster, "session_of", slowly)
    try:
        with listen("127.0.0.1") as workers:  # the host keeps it open
            starting = threading.Thread(target=owned.cluster.start, args=(workers,))
            starting.start()

            def found() -> bool:
                owned.first_head.extend(_raylets(owned.cluster))
                return bool(owned.first_head)

            poll_until(found, "a head node")
            owned.first_head[0].kill()
            starting.join(2 * BOUND_S)
        patched.undo()
        yield owned
    finally:
        patched.undo()
        owned.cluster.close()


def test_a_head_node_that_dies_while_it_starts_is_started_once_more(owned: Owned) -> None:
    """The process that failed to start it ends by itself, before the manager ends it."""
    assert owned.cluster.address
    pids = {raylet.pid for raylet in _raylets(owned.cluster)}
    assert pids & set(owned.cluster._head)
    assert owned.first_head[0].pid not in pids


def test_vms_boot_together_and_deaths_while_booting_or_up_are_reported_immediately(owned: Owned) -> None:
    """The dead leave no zombies."""
    cluster = owned.cluster
    outcomes: dict[str, str] = {}

    def boot(name: str) -> None:
        try:
            cluster.add_vm(name)
            outcomes[name] = "up"
        except ClusterError as error:
            outcomes[name] = str(error)

    names = ("vm0", "vm1", "vm2")
    boots = [threading.Thread(target=boot, args=(name,)) for name in names]
    for thread in boots:
        thread.start()
    raylets: dict[str, psutil.Process] = {}
    sockets: dict[str, str] = {}

    def found() -> bool:
        for name, raylet in _booting(cluster, names):
            if name not in sockets:
                (sockets[name],) = [part for part in raylet.cmdline() if part.startswith("--raylet_socket_name=")]
            if name != "vm0" and name not in raylets:
                raylet.suspend()  # neither is up before both are found
            raylets[name] = raylet
        return {"vm1", "vm2"} <= raylets.keys()

    poll_until(found, "raylets")
    assert len({*sockets.values()}) == len(sockets), "a raylet that finds its socket taken dies"
    raylets["vm1"].kill()
    raylets["vm2"].resume()  # Ray itself may detect the other one's death only after 30 s
    for thread in boots:
        thread.join(2 * BOUND_S)
    assert outcomes.get("vm1", "").startswith("VM vm1 did not come up: "), "whoever saw it first: its owner, or Ray"
    assert (outcomes["vm0"], outcomes["vm2"]) == ("up", "up")
    assert set(cluster.joined()) >= {"vm0", "vm2"}
    psutil.Process(cluster.vm_pids("vm0")[0]).kill()
    poll_until(lambda: owned.gone == ["vm0"], "its end to be told")
    (raylet, *_) = cluster.vm_pids("vm2")
    cluster.prepare_kill(["vm2"])()
    poll_until(lambda: not psutil.pid_exists(raylet), "it to be killed")
    for name in ("vm3", "vm4"):
        cluster.add_vm(name)
    zombies = [child.pid for child in owned.host.children() if child.status() == psutil.STATUS_ZOMBIE]
    assert set(zombies) <= {raylets["vm1"].pid}  # Ray still waits for this one
    assert owned.gone == ["vm0"]


def test_the_end_of_a_raylet_is_told_with_the_last_error_of_a_long_log(tmp_path: Path) -> None:
    log = tmp_path / "raylet.out"
    log.write_text("[2026-01-01 10:00:00,1 E 1 1] (raylet) a.cc:1: before\n" + "[2026 I 1 1] fine\n" * 9_999, "utf-8")
    with subprocess.Popen(["sleep", "600"]) as killed:
        killed.kill()
        ended = os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    assert vm_host._why(ended, log) == "by signal 9", "what is far from the end of the log is not why"
    with log.open("a", encoding="utf-8") as file:
        file.write("[2026-01-01 10:00:09,1 C 1 1] (raylet) b.cc:2: no port\n")
    assert vm_host._why(ended, log) == "by signal 9: (raylet) b.cc:2: no port"


def test_a_head_node_dies_with_its_agent_or_owner(
    owned: Owned,
) -> None:
    """``test_interrupt`` kills the owner together with a process of the head node. No test may follow this one."""
    owned.vm()
    nodes = owned.host.children(recursive=True)
    owned.cluster.check_head()
    owned.agent_of_head().kill()

    def is_gone() -> bool:
        with suppress(ClusterLost):
            owned.cluster.check_head()
            return False
        return True

    poll_until(is_gone, "its end to be seen")
    owned.host.kill()
    poll_until(lambda: not any(map(lives, nodes)), "the end of the nodes")


def test_code_run_with_rays_token_reaches_neither_manager_nor_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killing the driver only costs a new one. Like a provider's VM, the node is outside the head node's host."""
    secret = tmp_path / "credentials"
    secret.write_text(SECRET, encoding="utf-8")
    monkeypatch.setenv(SECRET_NAME, SECRET)
    directory, ended = prepare(), list[str]()
    cluster, vm = RayCluster(directory, host="127.0.0.1"), None
    environment = ray_environment.environment(directory, on_loopback=False)
    try:
        with listen("127.0.0.1") as workers:
            cluster.start(workers)
        if cluster.driver.lacks:
            pytest.skip(f"not to be had here: {cluster.driver.lacks}")
        launcher = RayLauncher(cluster.driver, _home, tuple, lambda worker, _: ended.append(worker))
        node = (sys.executable, "-m", "manager.engine.on_ray.node", "start", "--block", f"--address={cluster.address}")
        options = (f'--resources={{"{VM_RESOURCE}vm9": 1}}', "--num-cpus=1", f"--object-store-memory={STORE_BYTES}")
        until_s = time.monotonic() + 2 * BOUND_S
        while vm is None or not cluster.driver.wait_for_nodes(lambda nodes: "vm9" in (nodes or {}), 5.0):
            assert time.monotonic() < until_s, "the node does not join"
            if vm is None or vm.poll() is not None:  # on a busy machine its raylet may end while it starts
                vm = subprocess.Popen([*node, *options], env=environment, start_new_session=True)
        given = (cluster.address, tmp_path, secret, SECRET, cluster.control_socket, os.getpid(), BOUND_S)
        done = subprocess.run(
            [sys.executable, "-c", ATTACK, *map(str, given)],
            capture_output=True, text=True, timeout=3 * BOUND_S, check=False, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
        assert found == [OF_THE_CONFINED] * 2
        driver = _driver(cluster)
        own = set(_confined(cluster))
        assert {process.name() for process in own} >= {"gcs_server", "raylet", "ray::RuntimeEnvAgent"}
        assert driver in own
        namespace = str(Path(f"/proc/{driver.pid}/ns/pid").readlink())
        assert not any(_shares_mounts(process) or not _has_no_privileges(process) for process in own)
        launcher.start_worker("bomb", "vm9")
        poll_until(lambda: ended == ["bomb"], "the worker's end to be told")
        launcher.start_worker("crash", "vm9")
        poll_until(lambda: not lives(driver), "the driver to read what the VM sent")
        assert cluster.driver.wait_for_nodes(lambda nodes: nodes is None, BOUND_S)
        assert cluster.driver.wait_for_nodes(lambda nodes: "vm9" in (nodes or {}), BOUND_S)
        assert _driver(cluster) != driver
        assert (directory / "tmp" / "read").read_text().split() == [namespace] * 2
        assert {path.name for path in tmp_path.iterdir()} == {secret.name}
        cluster.check_head()
    finally:
        if vm is not None:
            for process in [*psutil.Process(vm.pid).children(recursive=True), vm]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            vm.wait(BOUND_S)
        cluster.close()


def _home(worker: str) -> Home:
    return Home(worker=worker, host="127.0.0.1", port=1, secret="s" * 32)


def _driver(cluster: RayCluster) -> psutil.Process:
    """Return the driver itself, which is the last of the processes that its namespace needs."""
    named = [process for process in _family(cluster) if "manager.engine.on_ray.driver" in process.cmdline()]
    (last,) = (one for one in named if not any(child in named for child in one.children()))
    return last


def _confined(cluster: RayCluster) -> Iterator[psutil.Process]:
    """Return the head node's processes and the driver."""
    for process in _family(cluster):
        line = process.cmdline()
        if "manager.engine.on_ray.node" in line or "manager.engine.on_ray.driver" in line:
            yield from (process, *process.children(recursive=True))


def _family(cluster: RayCluster) -> list[psutil.Process]:
    assert cluster._line is not None
    return psutil.Process(cluster._line.pid).children(recursive=True)


def _shares_mounts(process: psutil.Process) -> bool:
    return Path(f"/proc/{process.pid}/ns/mnt").readlink() == Path("/proc/self/ns/mnt").readlink()


def _has_no_privileges(process: psutil.Process) -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    facts = dict(line.split(":", 1) for line in status.splitlines())
    return int(facts["NoNewPrivs"]) == 1 and int(facts["CapEff"], 16) == int(facts["CapBnd"], 16) == 0


def _raylets(cluster: RayCluster) -> Iterator[psutil.Process]:
    if cluster._line is not None:
        for child in psutil.Process(cluster._line.pid).children():
            with suppress(psutil.NoSuchProcess):
                if child.name() == "raylet":
                    yield child


def _booting(cluster: RayCluster, names: Iterable[str]) -> Iterator[tuple[str, psutil.Process]]:
    for raylet in _raylets(cluster):
        with suppress(psutil.NoSuchProcess):
            line = " ".join(raylet.cmdline())
            yield from ((name, raylet) for name in names if f"{VM_RESOURCE}{name}," in f"{line},")
