"""Writes the first boot of a cloud VM: it gets Morph from the manager, joins the Ray cluster, and watches for notices.

At each boot a watchdog starts first, which needs nothing that is installed later; it ends a forgotten VM.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from pydantic import Field, SecretStr

from manager.host.ports import RAY_SETTINGS, VM_RESOURCE, Ports
from manager.providers.boot.first_boot import program
from manager.providers.boot.own_wheel import python_version, requirements
from manager.providers.interface.provider import Misconfigured
from morph.contract.base import Value
from morph.contract.cluster import CloudVms, ProvidedVms
from morph.link.authority import authority_of

DIRECTORY = "/etc/morph"
TOKEN_PATH = f"{DIRECTORY}/ray-token"
IN_MEMORY = "/run/morph"
"""A folder in memory, made at each boot, so that its files need no disk."""
SECRET_PATH = f"{IN_MEMORY}/node-secret"
STAY_PATH = f"{IN_MEMORY}/stay"
AUTHORITY_PATH = f"{DIRECTORY}/authority.pem"
TLS_DIRECTORY = f"{DIRECTORY}/tls"
BOOT_PATH = f"{IN_MEMORY}/boot"
CODE_DIRECTORY = f"{DIRECTORY}/code"
OBJECT_STORE_BYTES = 256 * 1024 * 1024
"""Bytes of Ray's object store. By default Ray takes 30 % of the memory, but it transports only the job's files and
orders.
"""
MAX_CUSTOM_DATA_BYTES = 65535
"""Azure's limit in bytes, after encoding."""
MAX_USER_DATA_BYTES = 16384
"""AWS's limit in bytes, before encoding."""


class NodeStart(Value):
    """The data with which a node finds its cluster. The two secrets are kept only in files that only root can read."""

    ray_address: str = Field(
        default="",
        pattern=r"^([A-Za-z0-9._-]+:\d+)?$",
        description="host:port of the head node; empty: none",
    )
    manager_address: str = Field(pattern=r"^[A-Za-z0-9._-]+:\d+$", description="host:port that takes notices")
    ray_token: SecretStr = SecretStr("")
    node_secret: SecretStr
    setup: tuple[str, ...] = Field(default=(), description="shell lines run once, as root, before anything else")
    python: str = Field(default="/usr/bin/python3", description="the interpreter, which exists after ``setup`` has run")
    python_version: str = Field(pattern=r"^\d+\.\d+\.\d+\S*$", description="the interpreter's required version")
    wheel_sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="digest of Morph's wheel, which the manager sends")
    requirements: tuple[str, ...] = Field(default=(), description="requirements of the wheel and the user, as for pip")
    uid: int = Field(default=0, ge=0, description="id of the user that runs the job's code; 0: the user that starts it")
    metadata: bool = Field(default=True, description="that user may access the metadata service")
    gpus: bool = Field(default=True, description="its devices are GPUs, and each worker sees only one of them")
    first_port: int = Field(default=0, description="first port on which the node listens; 0: any free ones")
    lonely_s: float = Field(default=900.0, gt=0, description="a VM ends itself after this long without the manager")
    authority: str = Field(default="", description="authority of Ray's certificates, in PEM; empty: no encryption")
    management_url: str = Field(
        default="", pattern=r"^(https?://[^\s'\"]+)?$", description="URL of the resource manager; empty: public Azure's"
    )


def node_start(vms: ProvidedVms, port: int, secret: str, wheel: bytes, management_url: str, **of_ray: Any) -> NodeStart:
    """Return how the VMs of a cluster file start; ``secret``: that of all nodes, for their credentials.

    ``of_ray``: the fields about the Ray cluster; none: nodes run without Ray.
    """
    return NodeStart(
        manager_address=f"{vms.address}:{port}",
        node_secret=SecretStr(authority_of(secret).credential("node")),
        setup=vms.environment.setup,
        python=vms.environment.python,
        python_version=python_version(),
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        requirements=wanted_on(vms),
        uid=vms.uid if isinstance(vms, CloudVms) else 0,
        metadata=not isinstance(vms, CloudVms) or vms.metadata,
        lonely_s=vms.lonely_s,
        management_url=management_url,
        **of_ray,
    )


def wanted_on(vms: ProvidedVms) -> tuple[str, ...]:
    """Return the requirements of Morph and of the user on the VMs of a cluster file."""
    return (*requirements(any_build=vms.device == "cuda"), *vms.environment.packages)


def cloud_init(start: NodeStart, node: str, source: str, num_devices: int = 1) -> str:
    """Return the cloud-config of one node. ValueError: a name has characters that are not safe in the unit file."""
    if not re.fullmatch(r"[a-z0-9-]+", node) or not re.fullmatch(r"[a-z]*", source):
        raise ValueError(f"{node!r} and {source!r} are not names of a node and a notice source")
    options = [*boot_command(start, node, num_devices, source), f"--stay={STAY_PATH}"]
    node_unit = _unit(
        "morph-node",
        node_command(start, node, num_devices),
        RAY_SETTINGS | {"RAY_AUTH_TOKEN_PATH": TOKEN_PATH, "PYTHONPATH": CODE_DIRECTORY},
        before=[start.python, "-I", BOOT_PATH, "--only=close-metadata", *options] if is_closed(start) else (),
    )
    agent = [*agent_command(start, node, source, num_devices), f"--stay={STAY_PATH}"]
    setup = [boot_line(start, ["--only=setup", *options, "--", *start.setup], BOOT_PATH)] if start.setup else []
    ready = boot_line(start, [*options, "--", *start.requirements], BOOT_PATH)
    units = "systemctl daemon-reload && systemctl enable --now morph-agent.service morph-node.service"
    config = {
        "bootcmd": [_watchdog(start, options)],
        "write_files": [
            _file(TOKEN_PATH, start.ray_token.get_secret_value(), "0600"),
            *([_file(AUTHORITY_PATH, start.authority, "0644")] if start.authority else []),
            node_unit,
            _unit("morph-agent", agent, {"PYTHONPATH": CODE_DIRECTORY}),
        ],
        "runcmd": [["sh", "-c", " && ".join([*map(_grouped, setup), _grouped(ready), units])]],
    }
    return "#cloud-config\n" + json.dumps(config, indent=1) + "\n"  # JSON is YAML


def _watchdog(start: NodeStart, options: list[str]) -> str:
    """Return the lines that run first at each boot: one text, in a file, so that no secret is on a command line."""
    watch = boot_line(start, ["--only=watch", *options], BOOT_PATH)
    unit = _unit("morph-watchdog", ["/bin/sh", "-c", watch], {}, early=True)
    lines = [
        f"umask 077; mkdir -p {IN_MEMORY} /run/systemd/system",
        _here(SECRET_PATH, start.node_secret.get_secret_value()),
        f"mkdir -p {shlex.join(sorted({str(PurePosixPath(BOOT_PATH, name).parent) for name in program()}))}",
        *(_here(f"{BOOT_PATH}/{name}", text) for name, text in program().items()),
        _here("/run/systemd/system/morph-watchdog.service", unit["content"]),
        "systemctl daemon-reload; systemctl --no-block start morph-watchdog.service",
    ]
    return "\n".join(lines)


def _here(path: str, content: str) -> str:
    return f"cat >{path} <<'END-OF-FILE'\n{content.rstrip()}\nEND-OF-FILE"


def _grouped(line: str) -> str:
    return f"{{ {line}; }}"


def is_closed(start: NodeStart) -> bool:
    """Whether the job's code is kept from the metadata service."""
    return bool(start.uid) and not start.metadata


def custom_data(text: str) -> str:
    """Encode a cloud-config for Azure, compressed. ValueError: the encoded text is too long."""
    encoded = base64.b64encode(_compressed(text)).decode()
    if len(encoded) > MAX_CUSTOM_DATA_BYTES:
        raise ValueError(f"the cloud-config has {len(encoded)} bytes, at most {MAX_CUSTOM_DATA_BYTES} are taken")
    return encoded


def user_data(text: str) -> str:
    """Encode a cloud-config for AWS, compressed. Misconfigured: it is too long, because the user's part is."""
    compressed = _compressed(text)
    if len(compressed) > MAX_USER_DATA_BYTES:
        raise Misconfigured(
            f"a VM's cloud-config has {len(compressed)} bytes, compressed, and AWS takes {MAX_USER_DATA_BYTES}: "
            "vms.environment.setup is too long; have it fetch the rest from storage"
        )
    return base64.b64encode(compressed).decode()


def _compressed(text: str) -> bytes:
    return gzip.compress(text.encode(), 9, mtime=0)  # the same text gives the same bytes


def boot_command(
    start: NodeStart,
    node: str,
    num_devices: int | str,
    end: str,
    secret_path: str = SECRET_PATH,
    code_directory: str = CODE_DIRECTORY,
) -> list[str]:
    """Return the options of ``manager.providers.boot.first_boot``; ``end``: as for ``agent_command``."""
    options = [
        f"--manager={start.manager_address}", f"--node={node}", f"--devices={num_devices}",
        f"--secret-file={secret_path}", f"--folder={code_directory}", f"--python={start.python}",
        f"--python-version={start.python_version}", f"--sha256={start.wheel_sha256}",
        f"--patience-s={start.lonely_s:g}", f"--end={end}",
    ]  # fmt: skip
    options += [f"--management-url={start.management_url}"] if start.management_url else []
    options += [f"--uid={start.uid}"] if start.uid else []
    return [*options, "--close-metadata"] if is_closed(start) else options


def boot_line(start: NodeStart, options: list[str], path: str) -> str:
    """Return the shell line that prepares a VM, with its interpreter, or any other if that is missing."""
    python = shlex.quote(start.python)
    return f'p={python}; [ -x "$p" ] || p=python3; "$p" -I {path} {shlex.join(options)}'


def ray_command(start: NodeStart, node: str, num_devices: int | str) -> list[str]:
    """Return the command that joins a node to the cluster; ``num_devices``: the number, or a placeholder for it."""
    resources = f'{{"{VM_RESOURCE}{node}": {num_devices}}}'
    return [
        start.python, "-m", "manager.engine.on_ray.node", "start", "--block", f"--address={start.ray_address}",
        f"--object-store-memory={OBJECT_STORE_BYTES}", f"--num-cpus={num_devices}",
        f"--num-gpus={num_devices if start.gpus else 0}", f"--resources={resources}", "--disable-usage-stats",
        "--include-log-monitor=false",  # it would collect the workers' output, which the manager does not use
        *Ports(start.first_port).options(),
    ]  # fmt: skip


def node_command(start: NodeStart, node: str, num_devices: int) -> list[str]:
    """Return a node's command: Ray's, run as the job's user, or without Ray the script of ``morph spot-run``."""
    if not start.ray_address:
        return script_command(start, node, SECRET_PATH)
    ray = ray_command(start, node, num_devices)
    if start.uid:
        own = [TOKEN_PATH, *([TLS_DIRECTORY] if start.authority else [])]
        ray = [start.python, "-m", "manager.providers.boot.as_user", str(start.uid), *own, "--", *ray]
    if not start.authority:
        return ray
    return [*enrol_command(start, node, SECRET_PATH, AUTHORITY_PATH, TLS_DIRECTORY), "--", *ray]


def script_command(start: NodeStart, node: str, secret_path: str) -> list[str]:
    """Return the command that runs the script of ``morph spot-run``."""
    return [
        start.python, "-m", "manager.spot.agent", f"--manager={start.manager_address}", f"--node={node}",
        f"--secret-file={secret_path}", f"--uid={start.uid}",
    ]  # fmt: skip


def enrol_command(start: NodeStart, node: str, secret_path: str, authority_path: str, directory: str) -> list[str]:
    """Return the prefix, up to ``--``, for the command of a node that is encrypted."""
    return [
        start.python, "-m", "manager.enrolment.node", f"--manager={start.manager_address}", f"--node={node}",
        f"--secret-file={secret_path}", f"--authority={authority_path}", f"--directory={directory}",
        f"--patience-s={start.lonely_s:g}",
    ]  # fmt: skip


def agent_command(
    start: NodeStart,
    node: str,
    source: str,
    num_devices: int | str,
    end: str | None = None,
    secret_path: str = SECRET_PATH,
) -> list[str]:
    """Return the command of a node's agent. ``end``: how a forgotten VM ends itself; None: as for ``source``."""
    command = [
        start.python, "-m", "manager.notices.agent", f"--manager={start.manager_address}", f"--node={node}",
        f"--devices={num_devices}", f"--secret-file={secret_path}", f"--lonely-s={start.lonely_s:g}",
        f"--source={source}", f"--end={source if end is None else end}",
    ]  # fmt: skip
    return [*command, f"--management-url={start.management_url}"] if start.management_url else command


def _file(path: str, content: str, permissions: str) -> dict[str, Any]:
    return {"path": path, "permissions": permissions, "owner": "root:root", "content": content}


def _unit(
    name: str, command: list[str], environment: dict[str, str], *, before: Sequence[str] = (), early: bool = False
) -> dict[str, Any]:
    """Return the unit file of a service that is restarted whenever it ends.

    ``early``: it does not wait for the rest of the boot, and the VM is switched off if it cannot run. Others leave that
    to the watchdog, because a VM that is only switched off is still billed.
    """
    settings = "".join(f"Environment={key}={value}\n" for key, value in environment.items())
    first = f"ExecStartPre={_line_of(before)}\n" if before else ""
    order = "Wants=network-online.target\nAfter=network-online.target\nStartLimitIntervalSec=0\n"
    if early:
        limit = "StartLimitIntervalSec=900\nStartLimitBurst=20\nStartLimitAction=poweroff-force\n"
        order = f"DefaultDependencies=no\n{limit}"
    text = (
        f"[Unit]\n{order}"
        f"[Service]\nUMask=0077\n{settings}{first}ExecStart={_line_of(command)}\nRestart=always\nRestartSec=10\n"
        + ("" if early else "[Install]\nWantedBy=multi-user.target\n")
    )
    return {"path": f"/etc/systemd/system/{name}.service", "permissions": "0644", "content": text}


def _line_of(command: Sequence[str]) -> str:
    return " ".join(shlex.quote(part).replace("%", "%%").replace("$", "$$") for part in command)
