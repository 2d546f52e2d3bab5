"""Starts and ends a node on a host over ssh, by command lines, with secrets only on standard input."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence

from pydantic import Field

from manager.providers.interface.provider import MESSAGE_CHARACTERS, Misconfigured, Transient
from morph.contract.base import Value
from morph.contract.cluster import NodeType, UsdPerHour
from morph.contract.vm_names import MAX_DEVICES

CONNECT_TIMEOUT_S = 10
RUN_TIMEOUT_S = 120.0
OPTIONS = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    f"ConnectTimeout={CONNECT_TIMEOUT_S}",
    "ForwardAgent=no",
    "ForwardX11=no",
    "ClearAllForwardings=yes",
    "Tunnel=no",
    "PermitLocalCommand=no",
    "RequestTTY=no",
)
_USERS = re.compile(
    "host key verification failed|permission denied|no matching|bad configuration option", re.IGNORECASE
)
"""What ssh says of errors that only the user can mend, such as a changed host key."""
_FRAME = re.compile("@{5,}")
"""ssh draws a frame around the warning of a changed host key."""
SSH_FAILED = 255
"""The exit status of ssh's own errors; any other status is that of the remote command."""


class Unanswered(Transient):
    """A host did not answer in time; the remote command may still be running."""


class SshHost(Value):
    """A host of the user."""

    address: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$", description="name or IP address")
    user: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9._-]*$")
    port: int = Field(default=22, ge=1, le=65535)
    identity_file: str | None = None
    usd_per_h: UsdPerHour | None = Field(default=None, description="absent: the file's price for each host")
    node_address: str | None = Field(
        default=None,
        pattern=r"^\d+\.\d+\.\d+\.\d+$",
        description="address for other nodes; absent: its address towards the manager",
    )
    num_gpus: int = Field(
        default=1, ge=0, le=MAX_DEVICES, description="devices that Morph uses, each with a worker; 0: the processor"
    )
    node_type: NodeType | None = Field(
        default=None, description="type of these devices, by its name in the profile; absent: all hosts are alike"
    )

    @property
    def num_devices(self) -> int:
        """The number of devices, each of which has a worker."""
        return max(1, self.num_gpus)

    @property
    def is_here(self) -> bool:
        """Whether the host is this machine, judged by its addresses."""
        return "localhost" in (known := (self.address, self.node_address or "")) or any(
            address.startswith("127.") or address == "::1" for address in known
        )

    @property
    def shown(self) -> str:
        """The host as a user would write it."""
        return f"{self.user}@{self.address}" if self.user else self.address


def ssh_command(host: SshHost, remote: str, program: Sequence[str] = ("ssh",)) -> list[str]:
    """Build the command line that runs ``remote`` on a host: ssh asks nothing, and lends the host no keys or ports."""
    options = [part for option in OPTIONS for part in ("-o", option)] + ["-p", str(host.port)]
    if host.identity_file:
        options += ["-i", host.identity_file]
    return [*program, *options, "--", host.shown, remote]


def start_script(node: str, command: Sequence[str], directory: str = ".morph/nodes") -> str:
    """Build the remote shell line that starts a node in the background, once, and stores its process group.

    Standard input is the node's secret, kept in a file for the user alone (``MORPH_SECRET_FILE``).
    """
    place = f'"$HOME"/{shlex.quote(f"{directory}/{node}")}'
    line = shlex.join(command)
    return (
        f"umask 077; d={place}; mkdir -p $d && cat > $d/secret && "
        'if [ -s $d/pid ] && kill -s 0 -- -"$(cat $d/pid)" 2>/dev/null; then exit 0; fi; '
        f"MORPH_SECRET_FILE=$d/secret setsid {line} >$d/log 2>&1 </dev/null & echo $! > $d/pid; "
        # wait until it has its own process group, by which it is ended
        "i=0; while [ $i -lt 100 ] && kill -s 0 $! 2>/dev/null && ! kill -s 0 -- -$! 2>/dev/null; "
        "do i=$((i+1)); sleep 0.1; done"
    )


def end_script(node: str, directory: str = ".morph/nodes") -> str:
    """Build the remote shell line that ends a node's process group, and removes its files and ``elsewhere``."""
    place = f'"$HOME"/{shlex.quote(f"{directory}/{node}")}'
    return (
        f'd={place}; if [ -s $d/pid ]; then g=$(cat $d/pid); kill -s TERM -- -"$g" 2>/dev/null; '
        'for i in 1 2 3 4 5; do kill -s 0 -- -"$g" 2>/dev/null || break; sleep 1; done; '
        'kill -s KILL -- -"$g" 2>/dev/null; fi; '
        't=$(cat $d/elsewhere 2>/dev/null); rm -rf $d ${t:+"$t"}'
    )


def log_script(node: str, directory: str = ".morph/nodes") -> str:
    """Build the remote shell line that writes the end of a node's log."""
    return f'tail -c 2000 "$HOME"/{shlex.quote(f"{directory}/{node}/log")}'


def run_ssh(
    host: SshHost, remote: str, secret: str = "", program: Sequence[str] = ("ssh",), timeout_s: float = RUN_TIMEOUT_S
) -> str:
    """Run a remote line and return its output; blocks for at most ``timeout_s``. Ctrl-C does not reach it.

    Unanswered: the host did not answer in time, or the program was killed. Transient: the host was not reached.
    Misconfigured: there is no ssh, a host or login is refused, or the remote line failed.
    """
    try:
        done = subprocess.run(
            ssh_command(host, remote, program),
            input=secret,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            process_group=0,
        )
    except subprocess.TimeoutExpired as error:
        raise Unanswered(f"{host.shown} did not answer within {timeout_s:g} s") from error
    except OSError as error:
        raise Misconfigured(f"{program[0]} cannot be run: {error.strerror}") from error
    said = " ".join(_FRAME.sub("", done.stderr if not secret else done.stderr.replace(secret, "...")).split())
    said = said[:MESSAGE_CHARACTERS]
    if done.returncode < 0:
        raise Unanswered(f"{host.shown} did not answer before {program[0]} was killed by signal {-done.returncode}")
    if done.returncode == SSH_FAILED:
        if _USERS.search(done.stderr):
            raise Misconfigured(f"{host.shown} cannot be used: {said}")
        raise Transient(f"{host.shown} cannot be reached: {said}")
    if done.returncode:
        raise Misconfigured(f"{host.shown}: the command failed with {done.returncode}: {said}")
    return done.stdout
