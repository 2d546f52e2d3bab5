"""Whoever has Ray's token has every VM. What he cannot have with it: the manager, nor anything on its machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from manager.engine.joining.link_server import listen
from manager.engine.on_ray.ray_environment import prepare, stay_on_loopback
from manager.machine.ports import VM_RESOURCE

if TYPE_CHECKING:
    from manager.engine.on_ray.ray_cluster import RayCluster

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

BOUND_S = 150.0
SECRET_NAME, SECRET = "A_SECRET_OF_THE_CLOUD", "s3cret-of-the-cloud"
ATTACK = """
import json, os, sys, time
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

address, marker = sys.argv[1:3]
ray.init(address=address, namespace="morph", log_to_driver=False, logging_level="ERROR")
is_vm = lambda node: any(name.startswith("morph_vm_") for name in node["Resources"])
(head,) = [node["NodeID"] for node in ray.nodes() if not is_vm(node)]

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
on_vm = ray.remote(lambda: os.getpid()).options(num_cpus=0, resources={"morph_vm_vm0": 0.001}).remote()
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


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    os.environ[SECRET_NAME] = SECRET
    directory = prepare()
    stay_on_loopback()
    from manager.engine.on_ray.ray_cluster import RayCluster  # Ray is imported with it, in the environment made for it

    cluster = RayCluster(directory)
    try:
        with listen("127.0.0.1") as workers:  # the host keeps it
            cluster.start(workers)
        cluster.add_vm("vm0")
        yield cluster
    finally:
        del os.environ[SECRET_NAME]
        cluster.close()


def test_nothing_of_a_client_with_the_token_runs_on_the_head_node(cluster: RayCluster, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    done = subprocess.run(
        [sys.executable, "-c", ATTACK, cluster.address, str(marker), SECRET],
        capture_output=True, text=True, timeout=400, check=False,
        env={name: value for name, value in os.environ.items() if name != SECRET_NAME},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["on_vm"], "the attack had no way in at all"
    assert found["stolen"] == 0
    assert not marker.exists()


def test_the_agent_of_the_head_node_makes_no_environment_for_whoever_asks_it_himself(
    cluster: RayCluster, tmp_path: Path
) -> None:
    from ray.core.generated import runtime_env_agent_pb2

    assert cluster._line is not None
    agents = [
        connection.laddr.port
        for process in psutil.Process(cluster._line.pid).children(recursive=True)
        if process.name() == "ray::RuntimeEnvAgent" and "--head" in process.parent().cmdline()  # type: ignore[union-attr]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(agents) == 1
    package = tmp_path / "evil"
    package.mkdir()
    (package / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('ran')\n", encoding="utf-8")
    messages: Any = runtime_env_agent_pb2
    request = messages.GetOrCreateRuntimeEnvRequest(
        serialized_runtime_env=json.dumps({"pip": {"packages": [str(package)], "pip_check": False}}), job_id=b"\1\0\0\0"
    )
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text(encoding="utf-8")
    asked = urllib.request.Request(
        f"http://127.0.0.1:{agents[0]}/get_or_create_runtime_env",
        data=request.SerializeToString(),
        headers={"Authorization": f"Bearer {token}", "x-ray-authorization": f"Bearer {token}"},
    )
    with urllib.request.urlopen(asked, timeout=BOUND_S) as answer:
        reply = messages.GetOrCreateRuntimeEnvReply.FromString(answer.read())
    assert reply.error_message == "the head node has no environments"
    assert not (tmp_path / "ran").exists()


def test_what_a_worker_returns_or_raises_is_not_unpickled_here(cluster: RayCluster, tmp_path: Path) -> None:
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
    actor = remote(Hostile).options(resources={VM_RESOURCE + "vm0": 0.01}, name="hostile", num_cpus=0).remote()
    assert actor.answer.remote("bytes").future().result(BOUND_S) == b"plain"
    for how in ("returned", "inside", "raised"):
        assert isinstance(actor.answer.remote(how).future().exception(BOUND_S), RayError)
    pids = set(marker.read_text().split()) if marker.exists() else set()
    assert str(os.getpid()) not in pids
    ray.actor._ActorClassMethodMetadata.reset_cache()  # as in a manager that takes over
    found: Any = ray.get_actor("hostile")  # whose class a stranger may have put there
    assert not hasattr(found, "answer")
    assert hasattr(found, "serve_home")
