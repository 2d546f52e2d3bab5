"""What runs on a host of the user's while a run has it: the node, and the agent that ends it when it is forgotten."""

from __future__ import annotations

import shlex

from manager.engine.names import RAY_SETTINGS
from manager.providers.cloud_init import NodeStart, agent_command, ray_command

NODE = "{node}"
DEVICES = "{devices}"


def static_node(start: NodeStart) -> tuple[str, ...]:
    """Write the command of ``StaticSpec``: a shell that ends with its node, in a process group of its own.

    Files that hold secrets, and the job's, lie in the node's folder; Ray's in a new one below /tmp, for the names of
    its sockets must be short. When the node ends by itself, its log alone is left, until its host is given back.
    """
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in RAY_SETTINGS.items())
    agent = agent_command(start, NODE, "", DEVICES, "group", "SECRET")
    ray = ray_command(start, NODE, DEVICES)
    lines = [
        "umask 077",
        'd=$(dirname "$MORPH_SECRET_FILE")',
        'sed -n 1p "$MORPH_SECRET_FILE" >"$d/ray-token"; sed -n 2p "$MORPH_SECRET_FILE" >"$d/node-secret"',
        ': >"$MORPH_SECRET_FILE"',
        'mkdir -p "$d/tmp"; t=$(mktemp -d /tmp/morph-XXXXXX); printf %s "$t" >"$d/elsewhere"',
        'trap \'cd "$d" && rm -rf "$t" tmp ray-token node-secret secret elsewhere pid\' EXIT; trap "exit 143" TERM',
        f'export {settings} RAY_AUTH_TOKEN_PATH="$d/ray-token" TMPDIR="$d/tmp"',
        *start.setup,
        shlex.join(agent).replace("--secret-file=SECRET", '--secret-file="$d/node-secret"') + " &",
        "ip={address}",
        shlex.join(ray) + ' --temp-dir="$t" ${ip:+--node-ip-address="$ip"}',
        "kill -s TERM 0",
    ]
    return ("sh", "-c", "\n".join(lines))


def secret_of(start: NodeStart) -> str:
    """Return what goes to the node's standard input."""
    return f"{start.ray_token.get_secret_value()}\n{start.node_secret.get_secret_value()}\n"
