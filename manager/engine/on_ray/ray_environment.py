"""Ray's folder, token and settings in a run, and the confinement of the processes beside the manager."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from manager.engine.joining.certificates import Tls, certificates_of, make_certificates
from manager.engine.on_ray.confinement import Confined, confine
from manager.host.environment import handed_on
from manager.host.folders import RAYS_SOCKET, hold, make_folder, remove_at_exit
from manager.host.ports import RAY_SETTINGS
from morph.contract.errors import ClusterError

SETTINGS = {
    **RAY_SETTINGS,
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a call before or after the session must fail, not find another cluster
    "RAY_gcs_server_port_wait_time_s": "60",  # Ray's own 15 s are too few on a busy machine
    "RAY_task_events_report_interval_ms": "0",  # otherwise the head keeps records of the last 100,000 orders
}
MAY_LEAVE_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""If this variable is 0, Ray listens on 127.0.0.1 if that is a node's address; otherwise it uses a real interface."""


def prepare(tls: Tls | None = None) -> Path:
    """Make Ray's directory of a run, with its sessions, and its token; removed at exit, and readable by the user alone.

    ``tls``: Ray's processes encrypt their traffic and accept only peers with a certificate; the certificates are made
    here too, or ConfigError is raised. None: no encryption.
    """
    directory = make_folder(RAYS_SOCKET)
    remove_at_exit(directory)
    token = token_of(directory)
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="utf-8")
    (directory / "ray" / "tmp").mkdir(parents=True)
    if tls is not None:
        make_certificates(directory, tls)
    return directory / "ray"


def adopt(ray_directory: Path, tls: Tls | None = None) -> Path:
    """Use a killed manager's directory, token and certificates, instead of ``prepare``.

    They are removed at exit. ClusterError if the token or the certificates are gone.
    """
    directory = ray_directory.parent
    if not token_of(directory).is_file():
        raise ClusterError("Ray's token is gone")
    if tls is not None and not certificates_of(directory).key.is_file():
        raise ClusterError("the run's certificates are gone")
    hold(directory)
    remove_at_exit(directory)
    return ray_directory


def environment(ray_directory: Path, *, on_loopback: bool) -> dict[str, str]:
    """Return the whole environment of Ray's processes on this machine. ``on_loopback``: whether they listen there."""
    directory = ray_directory.parent
    kept = {name: value for name, value in handed_on(os.environ).items() if name != MAY_LEAVE_LOOPBACK}
    certificates = certificates_of(directory)
    return {
        **kept,
        **SETTINGS,
        **(certificates.ray_environment if certificates.key.is_file() else {}),
        **({MAY_LEAVE_LOOPBACK: "0"} if on_loopback else {}),
        "RAY_AUTH_TOKEN_PATH": str(token_of(directory)),
        "RAY_TMPDIR": str(directory),
    }


def confine_to(directory: Path) -> Confined:
    """Confine this process, as far as the machine allows, to Ray's part of a run's directory, which has the token."""
    own, certificates = directory / "ray", certificates_of(directory)
    os.environ["TMPDIR"] = str(own / "tmp")
    public = (certificates.authority, certificates.certificate, certificates.key)
    return confine(reads=[token_of(directory), *public], writes=[own])


def token_of(directory: Path) -> Path:
    """Return where the token of a run is."""
    return directory / "token"
