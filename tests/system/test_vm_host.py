"""The process that owns local Ray nodes: boots them together, tells of their deaths, and keeps nothing of the dead.

And whoever has Ray's token has every VM. What he cannot have with it: the manager, nor anything on its machine. All of
these have one cluster, for each takes long to start; the last test ends it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from manager.engine.joining.link_server import listen
from manager.engine.on_ray.ray_environment import prepare, stay_on_loopback
from manager.host.gone import lives
from manager.host.ports import VM_RESOURCE
from morph.contract.errors import ClusterError, ClusterLost

if TYPE_CHECKING:
    from manager.engine.on_ray.ray_cluster import RayCluster

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

GONE_S = 120.0
BOUND_S = 150.0
SECRET_NAME, SECRET = "A_SECRET_OF_THE_CLOUD", "s3cret-of-the-cloud"
ATTACK = """
import json, os, sys, time
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

address, marker = sys.argv[1:3]
ray.init(address=address, namespace="morph", log_to_driver=False, logging_level="ERROR")
is_vm = lambda node: any(name.startswith("morph_vm_") for name in node["Resources"])
(head,) = [node["NodeID"] for node in ray.nodes() if node["Alive"] and not is_vm(node)]

def look():
    with open(marker, "a") as file:
        file.write("ran\\n")
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found[pid] = open(f"/proc/{pid}/environ").read()
        except OSError:
            pass
    return found

class Looking:
    def look(self):
        return look()

place = NodeAffinitySchedulingStrategy(head, soft=False)
with_environment = {"env_vars": {"X": "1"}, "py_executable": f"sh -c 'echo ran >>{marker}' #"}
calls = [
    ray.remote(look).options(num_cpus=0, scheduling_strategy=place).remote(),
    ray.remote(look).options(num_cpus=0, scheduling_strategy=place, runtime_env=with_environment).remote(),
    ray.remote(Looking).options(num_cpus=0, scheduling_strategy=place).remote().look.remote(),
    ray.remote(look).options(num_cpus=0, resources={"node:__internal_head__": 0.001}).remote(),
]
done, _ = ray.wait(calls, num_returns=len(calls), timeout=15)
stolen = []
for call in done:
    try:
        stolen += ray.get(call).values()
    except Exception as error:
        print("refused:", type(error).__name__, file=sys.stderr)
on_vm = ray.remote(lambda: os.getpid()).options(num_cpus=0, resources={sys.argv[4]: 0.001}).remote()
print(json.dumps({"stolen": sum(sys.argv[3] in text for text in stolen), "on_vm": ray.get(on_vm, timeout=200)}))
"""
"""By all that Ray offers a client with its token: tasks and an actor on the head node, one with an environment."""


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        code = f"open({str(self.marker)!r}, 'a').write(str(__import__('os').getpid()) + chr(10))"
        return exec, (code,)


@dataclass
class Owned:
    """A cluster; ``gone``: the VMs of whose end it told. ``first_head``: a raylet that was killed while it started."""

    cluster: RayCluster
    gone: list[str]
    first_head: list[psutil.Process] = field(default_factory=list)

    @property
    def host(self) -> psutil.Process:
        """The process that owns the nodes."""
        assert self.cluster._line is not None
        return psutil.Process(self.cluster._line.pid)

    def agent_of_head(self) -> psutil.Process:
        """The head node's agent for environments."""
        (agent,) = [
            process
            for process in self.host.children(recursive=True)
            if process.name() == "ray::RuntimeEnvAgent" and "--head" in process.parent().cmdline()  # type: ignore[union-attr]
        ]
        return agent

    def vm(self) -> str:
        """A VM that is up."""
        if not self.cluster._vms:
            self.cluster.add_vm("vm9")
        return next(iter(self.cluster._vms))


@pytest.fixture(scope="module")
def owned() -> Iterator[Owned]:
    os.environ[SECRET_NAME] = SECRET
    directory = prepare()
    stay_on_loopback()
    from manager.engine.on_ray.ray_cluster import RayCluster  # Ray is imported with it, in the environment made for it

    gone: list[str] = []
    owned = Owned(RayCluster(directory, gone=gone.append), gone)
    try:
        with listen("127.0.0.1") as workers:  # the host keeps it
            starting = threading.Thread(target=owned.cluster.start, args=(workers,))
            starting.start()

            def found() -> bool:
                owned.first_head.extend(_raylets(owned.cluster))
                return bool(owned.first_head)

            _wait_until(found, "no head node was started")
            owned.first_head[0].kill()
            starting.join(2 * GONE_S)
        yield owned
    finally:
        del os.environ[SECRET_NAME]
        owned.cluster.close()


def test_a_head_node_that_dies_while_it_starts_is_started_once_more(owned: Owned) -> None:
    assert owned.cluster.address
    pids = [raylet.pid for raylet in _raylets(owned.cluster)]
    assert owned.cluster._head["raylet"] in pids
    assert owned.first_head[0].pid not in pids


def test_vms_boot_together_and_the_death_of_one_is_told_at_once_while_it_boots_and_when_it_is_up(owned: Owned) -> None:
    """And nothing is left of the dead: no zombie, and no thread."""
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

    def found() -> bool:
        for name, raylet in _booting(cluster, names):
            if name != "vm0" and name not in raylets:
                raylet.suspend()  # neither is up before the other is found
            raylets[name] = raylet
        return {"vm1", "vm2"} <= raylets.keys()

    _wait_until(found, "no raylets were started")
    raylets["vm1"].kill()
    boots[1].join(GONE_S)
    assert outcomes.get("vm1") == "VM vm1 did not come up: its raylet ended while it booted"
    assert "vm2" not in outcomes, "it booted only behind the others"
    raylets["vm2"].resume()
    for thread in boots:
        thread.join(2 * GONE_S)
    assert (outcomes["vm0"], outcomes["vm2"]) == ("up", "up")
    assert set(cluster.joined()) >= {"vm0", "vm2"}
    num_threads = owned.host.num_threads()
    psutil.Process(cluster.vm_pids("vm0")[0]).kill()
    _wait_until(lambda: owned.gone == ["vm0"], "nobody told of its end")
    (raylet, *_) = cluster.vm_pids("vm2")
    cluster.prepare_kill(["vm2"])()
    _wait_until(lambda: not psutil.pid_exists(raylet), "it was not killed")
    for name in ("vm3", "vm4"):
        cluster.add_vm(name)
    zombies = [child.pid for child in owned.host.children() if child.status() == psutil.STATUS_ZOMBIE]
    assert set(zombies) <= {raylets["vm1"].pid}  # for which Ray waits on
    assert owned.host.num_threads() - num_threads < 2  # one for each lost node would be 2; Ray starts one now and then
    assert owned.gone == ["vm0"]


def test_nothing_of_a_client_with_the_token_runs_on_the_head_node(owned: Owned, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    done = subprocess.run(
        [sys.executable, "-c", ATTACK, owned.cluster.address, str(marker), SECRET, VM_RESOURCE + owned.vm()],
        capture_output=True, text=True, timeout=400, check=False,
        env={name: value for name, value in os.environ.items() if name != SECRET_NAME},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))  # Ray tells of the dead
    assert found["on_vm"], "the attack had no way in at all"
    assert found["stolen"] == 0
    assert not marker.exists()


def test_the_agent_of_the_head_node_makes_no_environment_for_whoever_asks_it_himself(
    owned: Owned, tmp_path: Path
) -> None:
    from ray.core.generated import runtime_env_agent_pb2

    ports = [found.laddr.port for found in owned.agent_of_head().net_connections("tcp") if found.status == "LISTEN"]
    assert len(ports) == 1
    package = tmp_path / "evil"
    package.mkdir()
    (package / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('ran')\n", encoding="utf-8")
    messages: Any = runtime_env_agent_pb2
    request = messages.GetOrCreateRuntimeEnvRequest(
        serialized_runtime_env=json.dumps({"pip": {"packages": [str(package)], "pip_check": False}}), job_id=b"\1\0\0\0"
    )
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text(encoding="utf-8")
    asked = urllib.request.Request(
        f"http://127.0.0.1:{ports[0]}/get_or_create_runtime_env",
        data=request.SerializeToString(),
        headers={"Authorization": f"Bearer {token}", "x-ray-authorization": f"Bearer {token}"},
    )
    with urllib.request.urlopen(asked, timeout=BOUND_S) as answer:
        reply = messages.GetOrCreateRuntimeEnvReply.FromString(answer.read())
    assert reply.error_message == "the head node has no environments"
    assert not (tmp_path / "ran").exists()


def test_what_a_worker_returns_or_raises_is_not_unpickled_here(owned: Owned, tmp_path: Path) -> None:
    import ray
    from ray.exceptions import RayError

    marker = tmp_path / "unpickled"
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    class Hostile:
        def answer(self, how: str) -> Any:
            bomb = Bomb(marker)
            if how == "raised":
                raise ValueError(bomb)
            return {"returned": bomb, "inside": [1, {"x": bomb}], "bytes": b"plain"}[how]

    remote: Any = ray.remote
    actor = remote(Hostile).options(resources={VM_RESOURCE + owned.vm(): 0.01}, name="hostile", num_cpus=0).remote()
    assert actor.answer.remote("bytes").future().result(BOUND_S) == b"plain"
    for how in ("returned", "inside", "raised"):
        assert isinstance(actor.answer.remote(how).future().exception(BOUND_S), RayError)
    pids = set(marker.read_text().split()) if marker.exists() else set()
    assert str(os.getpid()) not in pids
    ray.actor._ActorClassMethodMetadata.reset_cache()  # as in a manager that takes over
    found: Any = ray.get_actor("hostile")  # whose class a stranger may have put there
    assert not hasattr(found, "answer")
    assert hasattr(found, "serve_home")


def test_without_an_agent_of_its_own_the_head_node_is_known_to_be_gone_and_without_its_owner_all_ends(
    owned: Owned,
) -> None:
    """With the owner a node of the head's, as ``gcs_server``, dies in ``test_interrupt``. No test follows this one."""
    owned.vm()
    nodes = owned.host.children(recursive=True)
    owned.cluster.check_head()
    owned.agent_of_head().kill()

    def is_gone() -> bool:
        with suppress(ClusterLost):
            owned.cluster.check_head()
            return False
        return True

    _wait_until(is_gone, "nobody saw its end")
    import ray

    ray.shutdown()  # or it would end this process
    owned.host.kill()
    _wait_until(lambda: not any(map(lives, nodes)), "nodes outlive their owner")


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


def _wait_until(reached: Callable[[], bool], otherwise: str) -> None:
    until_s = time.monotonic() + GONE_S
    while not reached():
        assert time.monotonic() < until_s, otherwise
        time.sleep(0.01)
