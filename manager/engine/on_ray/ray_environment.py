"""Environment that Ray reads once, when it is imported: token authentication, time-outs, one thread a worker.

``prepare`` must run before the first ``import ray`` of the process; the other modules here import Ray
at their top, so whoever starts a cluster calls ``prepare`` and only then imports them.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from manager.engine.joining.certificates import Tls, certificates_of, make_certificates
from manager.host.folders import RAYS_SOCKET, hold, make_folder, remove_at_exit
from manager.host.ports import RAY_SETTINGS
from morph.contract.errors import ClusterError

_ENVIRONMENT = {
    **RAY_SETTINGS,
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a call before or after the session must fail, not find some other cluster
    "RAY_task_events_report_interval_ms": "0",  # else the head keeps a record of each of the last 100,000 orders
}


_MAY_LEAVE_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_prepared: tuple[Path, Tls | None] | None = None


def prepare(tls: Tls | None = None) -> Path:
    """Make this process's Ray directory and token (readable by the user alone), set Ray's environment; once.

    Returns the directory, below which Ray keeps its sessions; it goes when the process exits.

    Args:
        tls: Ray's processes encrypt what they send and take nobody without a certificate, which are made here too;
            None: they do not.

    Raises:
        ClusterError: when Ray was imported before, without the token, or prepared before with another ``tls``.
        ConfigError: certificates cannot be made.
    """
    if _prepared is not None:
        if tls != _prepared[1]:
            raise ClusterError("Ray reads whether to use TLS once: another process is needed to change it")
        return _prepared[0]
    _check_not_imported()
    directory = make_folder(RAYS_SOCKET)
    token = _token(directory)
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="utf-8")
    (directory / "ray").mkdir()
    if tls is not None:
        make_certificates(directory, tls)
    return _use(directory, tls)


def adopt(ray_directory: Path, tls: Tls | None = None) -> Path:
    """Instead of ``prepare``: use the directory, token and certificates of a manager that was killed; removed at exit.

    Raises:
        ClusterError: there are none, or Ray was imported before.
    """
    _check_not_imported()
    if not _token(ray_directory.parent).is_file():
        raise ClusterError("Ray's token is gone")
    if tls is not None and not certificates_of(ray_directory.parent).key.is_file():
        raise ClusterError("the run's certificates are gone")
    hold(ray_directory.parent)
    return _use(ray_directory.parent, tls)


def stay_on_loopback() -> None:
    """Let every process of Ray listen on 127.0.0.1 alone: for a cluster whose nodes are all of this machine.

    Without this Ray replaces 127.0.0.1 by the address of a real interface, and with any other address it listens on
    all of them. What it does by default on desktop systems is asked for by a variable whose name tells only that.
    """
    os.environ[_MAY_LEAVE_LOOPBACK] = "0"
    _tell_ray(may_leave=False)


def leave_loopback() -> None:
    """The opposite, for a cluster with nodes elsewhere."""
    os.environ.pop(_MAY_LEAVE_LOOPBACK, None)
    _tell_ray(may_leave=True)


def _tell_ray(*, may_leave: bool) -> None:
    """Ray reads the variable when it is imported, which it was where this process had a cluster before."""
    constants = sys.modules.get("ray._private.ray_constants")
    if constants is not None:
        vars(constants)["ENABLE_RAY_CLUSTER"] = may_leave


def _check_not_imported() -> None:
    if "ray" in sys.modules:
        raise ClusterError("Ray was imported before Morph could switch its token authentication on")


def _token(directory: Path) -> Path:
    return directory / "token"


def _use(directory: Path, tls: Tls | None) -> Path:
    global _prepared
    remove_at_exit(directory)
    if tls is not None:
        os.environ.update(certificates_of(directory).ray_environment)
    os.environ.pop("RAY_AUTH_TOKEN", None)  # of another cluster: it would go before the path, and to every process
    os.environ.update(_ENVIRONMENT, RAY_AUTH_TOKEN_PATH=str(_token(directory)), RAY_TMPDIR=str(directory))
    _prepared = (directory / "ray", tls)
    return _prepared[0]
