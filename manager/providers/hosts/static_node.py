"""What runs on a user's host during its lease: the node, and the agent that ends it when the manager is gone."""

from __future__ import annotations

import shlex

from manager.host.ports import RAY_SETTINGS
from manager.providers.boot.cloud_init import (
    NodeStart,
    agent_command,
    boot_command,
    boot_line,
    enrol_command,
    ray_command,
    script_command,
)
from manager.providers.boot.first_boot import SETUP_TIMEOUT_S, packed

NODE = "{node}"
DEVICES = "{devices}"
FOLDER = "FOLDER/"
"""The node's folder, known only to its shell."""
OWN_FILES = (
    "tmp",
    "tls",
    "code",
    "boot.pyz",
    "authority.pem",
    "ray-token",
    "node-secret",
    "secret",
    "elsewhere",
    "pid",
)
"""Files that a node removes from its folder when it ends by itself."""


def static_node(start: NodeStart, source: str = "") -> tuple[str, ...]:
    """Return the command of ``StaticSpec``: a shell that ends with its node, in a process group of its own.

    ``source``: the notice source of the node's agent, if any. A node that ends by itself reports to the manager until
    the manager ends it. Files are in the node's folder, Ray's in a new folder below /tmp, because its sockets' names
    must be short. In the end only the log is left, until the host is given back.
    """
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in RAY_SETTINGS.items())
    agent = agent_command(start, NODE, source, DEVICES, "group", f"{FOLDER}node-secret")
    options = boot_command(start, NODE, DEVICES, "group", f"{FOLDER}node-secret", f"{FOLDER}code")
    boot = boot_line(start, [*options, "--", *start.requirements], '"$d/boot.pyz"')
    ended = boot_line(start, ["--only=ended", f"--log={FOLDER}log", *options], '"$d/boot.pyz"')
    late = f"vms.environment.setup did not end within {SETUP_TIMEOUT_S:g} s"
    ray = shlex.join(ray_command(start, NODE, DEVICES)) + ' --temp-dir="$t"'
    if not start.ray_address:
        node = _in_folder(script_command(start, NODE, f"{FOLDER}node-secret"))
    elif start.authority:
        enrol = enrol_command(start, NODE, f"{FOLDER}node-secret", f"{FOLDER}authority.pem", f"{FOLDER}tls")
        node = f'{_in_folder(enrol)} ${{ip:+--address="$ip"}} -- {ray}'
    else:
        node = ray + ' ${ip:+--node-ip-address="$ip"}'
    lines = [
        "umask 077",
        'd=$(dirname "$MORPH_SECRET_FILE")',
        'sed -n 1p "$MORPH_SECRET_FILE" >"$d/ray-token"; sed -n 2p "$MORPH_SECRET_FILE" >"$d/node-secret"',
        'sed -n 3p "$MORPH_SECRET_FILE" | base64 -d >"$d/boot.pyz"',
        *(['sed 1,3d "$MORPH_SECRET_FILE" >"$d/authority.pem"'] if start.authority else []),
        ': >"$MORPH_SECRET_FILE"',
        'mkdir -p "$d/tmp"; t=$(mktemp -d /tmp/morph-XXXXXX); printf %s "$t" >"$d/elsewhere"',
        f'trap \'cd "$d" && rm -rf "$t" {" ".join(OWN_FILES)}\' EXIT; trap "exit 143" TERM',
        f'export {settings} RAY_AUTH_TOKEN_PATH="$d/ray-token" TMPDIR="$d/tmp"',
        *_bounded(start.setup, f"echo {late}; {_placed(ended)}"),
        f"{{ {_placed(boot)}; }} || exit 1",
        'export PYTHONPATH="$d/code${PYTHONPATH:+:$PYTHONPATH}"',
        f"{_in_folder(agent)} &",
        "ip={address}",
        node,
        _placed(ended),
        "kill -s TERM 0",
    ]
    return ("sh", "-c", "\n".join(lines))


def _bounded(setup: tuple[str, ...], late: str) -> tuple[str, ...]:
    """Return the setup lines, which may change this shell, as ``module load`` does, with a time limit on them."""
    if not setup:
        return ()
    return (f"(sleep {SETUP_TIMEOUT_S:g}; {late}; kill -s TERM 0) & w=$!", *setup, 'kill "$w"')


def secret_of(start: NodeStart) -> str:
    """Return the node's standard input: its secrets, and the authority's certificate, which must be the run's own."""
    return (
        f"{start.ray_token.get_secret_value()}\n{start.node_secret.get_secret_value()}\n{packed()}\n{start.authority}"
    )


def _in_folder(command: list[str]) -> str:
    """Return a command with files in the node's folder as a line of the shell."""
    return _placed(shlex.join(command))


def _placed(line: str) -> str:
    return line.replace(FOLDER, '"$d"/')
