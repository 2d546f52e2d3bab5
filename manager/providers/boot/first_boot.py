"""What a VM runs before anything else of Morph: it installs the manager's own wheel and its requirements.

``python -I boot --manager HOST:PORT --node NAME --devices N --secret-file PATH --folder PATH --python PATH
--python-version X.Y.Z --sha256 DIGEST --patience-s S --end azure|group| [--management-url URL] [--uid N
[--close-metadata]] [--stay PATH] [--only PART] -- REQUIREMENT...``

``--only`` does one part, without preparing the VM:

* ``watch`` starts first at each boot of a cloud VM. It ends the VM once PATH has not been written to for a while. The
  processes that hear the manager write to it: this program while it prepares the VM, and then the agent.
* ``setup`` runs the user's lines, which take the place of requirements; a line that hangs is ended.
* ``close-metadata`` closes the metadata service again after a reboot.
* ``ended`` reports to the manager that the node ended by itself, with the end of its ``--log``.

After any error, this program reports it to the manager, and the VM is ended.

``--uid`` makes that user if it does not exist, and ``--close-metadata`` keeps it from the VM's identity.

``program`` returns this file with the few modules that it imports; it is sent together with the secrets. Because a VM
may have nothing but an old Python, it needs only the standard library of Python 3.8.

It calls the manager at the port for notices, as the node's agent does later (``manager.notices.call``).
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import io
import os
import platform
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Callable  # noqa: UP035 (a VM that boots may have Python 3.8)

from manager.notices.call import ERRAND, called
from manager.notices.end import MANAGEMENT_URL, end_vm
from morph.contract.errors import MorphError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from morph.link.session import LinkSession

MODULES = (
    "manager/__init__.py", "manager/host/__init__.py", "manager/host/plain_http.py",
    "manager/notices/__init__.py", "manager/notices/call.py", "manager/notices/end.py",
    "manager/providers/__init__.py", "manager/providers/boot/__init__.py", "manager/providers/boot/first_boot.py",
    "morph/__init__.py", "morph/contract/__init__.py", "morph/contract/errors.py",
    "morph/link/__init__.py", "morph/link/session.py", "morph/link/wire.py",
)  # fmt: skip
ANSWER_TIMEOUT_S = 120.0
RETRY_S = 2.0
TELL_EVERY_S = 10.0
PIP_TIMEOUT_S = 3600.0
LOCK_TIMEOUT_S = 900.0
"""Seconds to wait for a file from the manager, which may have to make it first."""
SETUP_TIMEOUT_S = 1800.0
STAY_EVERY_S = 20.0
WATCH_EVERY_S = 5.0
WATCH_GRACE_S = 60.0
"""Seconds that the watchdog waits longer than others for the manager, so that they can end the VM before it."""
RETRY_END_S = 60.0
MAX_WHY_CHARACTERS = 600
NUM_LAST_LINES = 3
MAX_LOG_BYTES = 1 << 14
BOOT_LOG = Path("/var/log/cloud-init-output.log")
METADATA = "169.254.169.254"
CLOSED = (
    [METADATA],
    ["168.63.129.16", "ipproto", "tcp", "dport", "80"],
    ["168.63.129.16", "ipproto", "tcp", "dport", "32526"],
)
"""Addresses of services with the VM's identity and settings; the second is Azure's, which also resolves names."""
PROBE = f"""
import socket, sys
try:
    socket.create_connection(({METADATA!r}, 80), 3).close()
except OSError:
    sys.exit(3)
"""
TOOL_TIMEOUT_S = 60.0


class Unfit(MorphError):
    """This VM cannot be used; the message says why."""


class Unheard(Unfit):
    """The manager did not answer within the time that a VM waits for it."""


@lru_cache(maxsize=1)  # every VM of a run gets it
def program() -> dict[str, str]:
    """Return this program's files by path, without docstrings and comments, since clouds limit boot data."""
    root = Path(__file__).resolve().parents[3]
    main = {"__main__.py": "from manager.providers.boot.first_boot import main\nmain()\n"}
    return main | {name: _without_docstrings((root / name).read_text(encoding="utf-8")) for name in MODULES}


@lru_cache(maxsize=1)
def packed() -> str:
    """Return the program as one file for Python to run, in base 64; the same modules give the same text."""
    from morph.contract import files  # does not exist on the VM

    return base64.b64encode(files.packed({name: text.encode() for name, text in program().items()})).decode()


def _without_docstrings(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            node.body = node.body[1:] if isinstance(node, ast.Module) else node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


class Caller:
    """Calls the manager for one VM. Raises OSError if the manager is absent or slow, or another process answers."""

    def __init__(self, manager: str, node: str, num_devices: int, secret: str) -> None:
        host, _, port = manager.rpartition(":")
        self._manager, self._node, self._num_devices, self._secret = (host, int(port)), node, num_devices, secret

    def file(self, name: str, timeout_s: float = ANSWER_TIMEOUT_S) -> bytes:
        """Return the manager's file of this name."""
        with self._called() as session:
            session.tell({"kind": name})
            return session.receive(timeout_s)

    def tell_unfit(self, why: str) -> None:
        """Report why this VM cannot be used."""
        with self._called() as session:
            session.tell({"kind": "unfit", "why": why[:MAX_WHY_CHARACTERS]})
            session.hear(ANSWER_TIMEOUT_S)

    def beat(self) -> None:
        """Check that the manager answers."""
        with self._called() as session:
            session.tell({"kind": "beat"})
            session.hear(ANSWER_TIMEOUT_S)

    def _called(self) -> AbstractContextManager[LinkSession]:
        return called(self._manager, self._secret, self._node, ERRAND, self._num_devices, timeout_s=ANSWER_TIMEOUT_S)


def check_python(python: str, wanted: str) -> None:
    """Check that the wanted interpreter, which then runs this program, has the manager's version, or raise Unfit."""
    if not os.access(python, os.X_OK):
        raise Unfit(f"there is no {python}: vms.environment.python must name one that the image or setup provides")
    if platform.python_version() != wanted:
        raise Unfit(
            f"{python} is Python {platform.python_version()}, and Ray needs the manager's {wanted}: use the manager's "
            "own image, or install that version with vms.environment.setup"
        )


def bring(caller: Caller, sha256: str, folder: Path, patience_s: float) -> None:
    """Unpack the manager's wheel, all of it or nothing. Unheard: not sent in ``patience_s``. Unfit: another digest."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            wheel = caller.file("wheel")
            break
        except (OSError, ValueError) as error:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise Unheard(f"no wheel came from the manager within {patience_s:g} s: {error}") from error
            time.sleep(min(RETRY_S, left_s))
    digest = hashlib.sha256(wheel).hexdigest()
    if digest != sha256:
        raise Unfit(f"the received wheel has the digest {digest}, not the run's {sha256}")
    temporary = folder.with_name(f"{folder.name}.new")
    for stale in (temporary, folder):
        shutil.rmtree(stale, ignore_errors=True)
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:  # as pip does with a wheel of pure Python
        archive.extractall(temporary)
    temporary.rename(folder)


def make_user(uid: int) -> None:
    """Make a user with this id, unless it exists. Unfit: it cannot be made, or may not run this interpreter."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        options = [f"--uid={uid}", "--user-group", "--create-home", "--shell=/usr/sbin/nologin"]
        _run_tool(["useradd", *options, "morph"], f"the user {uid} for the job's code cannot be made")
    if code := _run_as(uid, "pass"):
        raise Unfit(f"{sys.executable}, run as the user {uid} for the job's code, ends with {code}")


def close_metadata(uid: int) -> None:
    """Block a user's packets to the metadata service. Unfit: the user still reaches the service."""
    failed = "the metadata service cannot be closed to the job's code (vms.metadata: true leaves it open)"
    for where in CLOSED:
        rule = ["priority", "5", "to", *where, "uidrange", f"{uid}-{uid}", "prohibit"]
        _run_tool(["ip", "rule", "add", *rule], failed, but="File exists")
    code = _run_as(uid, PROBE)
    if code != 3:
        raise Unfit(f"{failed}: the check failed" if code else f"{failed}: it still answers that user")


def _run_as(uid: int, program: str) -> int:
    command, gid = [sys.executable, "-I", "-c", program], pwd.getpwuid(uid).pw_gid
    try:
        done = subprocess.run(command, user=uid, group=gid, extra_groups=[], timeout=TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unfit(f"the user {uid} for the job's code cannot run Python: {error}") from error
    return done.returncode


def _run_tool(command: list[str], failed: str, but: str = "") -> None:
    """Run a program. ``but``: the error message that means that nothing is left to do."""
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unfit(f"{failed}: {error}") from error
    if done.returncode and not (but and but in done.stderr):
        raise Unfit(f"{failed}: {' '.join(done.stderr.split()) or f'{command[0]} ended with {done.returncode}'}")


def lacking(requirements: list[str]) -> list[str]:
    """Return the requirements (NAME, NAME==VERSION, NAME>=VERSION) that this interpreter's packages do not meet."""
    missing = []
    for given in requirements:
        read = re.fullmatch(r"([A-Za-z0-9._-]+)(?:(==|>=)([0-9][0-9A-Za-z.+!_-]*))?", given)
        try:
            installed = metadata.version(read[1]) if read else ""
        except metadata.PackageNotFoundError:
            installed = ""
        if read is not None and "+" not in (read[3] or ""):
            installed = installed.partition("+")[0]
        fits = read is not None and (
            read[2] is None or (installed == read[3] if read[2] == "==" else _numbers(installed) >= _numbers(read[3]))
        )
        if not installed or not fits:
            missing.append(given)
    return missing


def install(requirements: list[str], lock: Callable[[], str]) -> None:
    """Install missing requirements with pip; ``lock``: asks the manager for versions and hashes.

    Unfit: pip fails, or the manager does not answer.
    """
    missing = lacking(requirements)
    if not missing:
        return
    print(f"missing: {', '.join(missing)}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-cache-dir"]
    try:
        locked = lock()
    except (OSError, ValueError) as error:
        raise Unfit(f"the manager did not say which versions of {', '.join(missing)} to install: {error}") from error
    hashed = ["--require-hashes", "--no-deps"] if "--hash=" in locked else []
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(locked)
            file.flush()
            command += [
                "--disable-pip-version-check",
                *hashed,
                "-r",
                file.name,
            ]  # all requirements: else pip may change installed packages
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unfit(f"pip did not install {', '.join(missing)} within {PIP_TIMEOUT_S:g} s") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["it says nothing"]
        said = next((line for line in lines if line.lower().startswith("error")), lines[-1])
        raise Unfit(f"pip cannot install {', '.join(missing)}: {said}")


def tell(caller: Caller, why: str, patience_s: float) -> None:
    """Report why this VM is unfit, repeatedly, until the manager ends it or ``patience_s`` has passed."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            caller.tell_unfit(why)
        except (OSError, ValueError) as error:
            print(f"the manager is not told: {error}", file=sys.stderr, flush=True)
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(TELL_EVERY_S, left_s))


def ended(log: str) -> str:
    """Return the sentence that the node ended by itself, with the end of its log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it says nothing"]
    return f"its node ended by itself: {' | '.join(lines[-NUM_LAST_LINES:])[-MAX_WHY_CHARACTERS // 2 :]}"


def last_words(path: Path) -> str:
    """Return the end of a log; empty: there is none."""
    try:
        lines = path.read_bytes()[-MAX_LOG_BYTES:].decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return " | ".join(said[-NUM_LAST_LINES:])[-MAX_WHY_CHARACTERS // 2 :]


def run_setup(lines: list[str], timeout_s: float = SETUP_TIMEOUT_S) -> None:
    """Run the user's lines in order; a failing line is ignored. Unfit: a line did not end in time, and was killed."""
    for line in lines:
        process = subprocess.Popen(["sh", "-c", line], stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise Unfit(f"vms.environment.setup: {line!r} did not end within {timeout_s:g} s") from error
        if code:
            print(f"vms.environment.setup: {line!r} ended with {code}", file=sys.stderr, flush=True)


def stay(path: Path) -> None:
    """Tell the watchdog to let the VM live for a while."""
    path.touch()


def keep_staying(caller: Caller, path: Path, patience_s: float) -> None:
    """In a thread of its own, keep the watchdog from ending the VM while the manager answers."""

    def run() -> None:
        while True:
            try:
                caller.beat()
                stay(path)
            except (OSError, ValueError):
                pass  # the watchdog measures how long the manager does not answer
            time.sleep(min(STAY_EVERY_S, patience_s / 4))

    threading.Thread(target=run, name="morph-stay", daemon=True).start()


def watch(
    path: Path,
    patience_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Block until ``path`` has not been written to for ``patience_s``."""
    seen, since_s = -1, clock()
    while True:
        try:
            changed_s = path.stat().st_mtime_ns
        except OSError:
            changed_s = -1
        if changed_s != seen:
            seen, since_s = changed_s, clock()
        elif clock() - since_s >= patience_s:
            return
        pause(min(WATCH_EVERY_S, patience_s))


def _watch_for_ever(given: argparse.Namespace, caller: Caller) -> None:
    patience_s = given.patience_s + min(WATCH_GRACE_S, given.patience_s)
    while True:
        watch(Path(given.stay), patience_s)
        words = last_words(BOOT_LOG)
        heard = f"nothing on this VM has heard the manager for {patience_s:g} s"
        try:
            tell(caller, f"{heard}; the last output of its first boot: {words}" if words else heard, 0.0)
        except Exception as error:  # after any error the VM is ended without another wait
            print(f"the manager is not told: {error}", file=sys.stderr, flush=True)
        end_vm(given.end, given.node, given.management_url)
        time.sleep(RETRY_END_S)


def main() -> None:
    """Prepare this VM, or report why that failed and end it; or do another part; see the module."""
    parser = argparse.ArgumentParser(prog="boot.pyz")
    for name in ("manager", "node", "secret-file", "folder", "python", "python-version", "sha256"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--devices", required=True, type=int)
    parser.add_argument("--patience-s", required=True, type=float)
    parser.add_argument("--end", required=True)
    parser.add_argument("--management-url", default=MANAGEMENT_URL)
    parser.add_argument("--uid", default=0, type=int)
    parser.add_argument("--close-metadata", action="store_true")
    parser.add_argument("--stay", default="")
    parser.add_argument("--only", default="", choices=["watch", "setup", "close-metadata", "ended", ""])
    parser.add_argument("--log", default="")
    parser.add_argument("requirements", nargs="*")
    given = parser.parse_args()
    try:
        secret = Path(given.secret_file).read_text(encoding="utf-8").strip()
    except OSError as error:  # nothing is reported, but the watchdog ends the VM
        print(f"error: {error}", file=sys.stderr, flush=True)
        secret = ""
    caller = Caller(given.manager, given.node, given.devices, secret)
    if given.only == "watch":
        _watch_for_ever(given, caller)
    try:
        if given.stay:
            keep_staying(caller, Path(given.stay), given.patience_s)
        _do(given, caller)
    except Exception as error:  # a full disk, a damaged file, ...: report any error
        why = str(error) if isinstance(error, Unfit) else f"{type(error).__name__}: {error}"
        print(f"error: {why}", file=sys.stderr, flush=True)
        tell(caller, why, 0.0 if isinstance(error, Unheard) else given.patience_s)
        if given.end != "group":  # on a user's host the shell ends, and its process group with it
            end_vm(given.end, given.node, given.management_url)
        sys.exit(1)


def _do(given: argparse.Namespace, caller: Caller) -> None:
    if given.only == "ended":
        raise Unfit(ended(Path(given.log).read_text(encoding="utf-8", errors="replace")))
    if given.only == "setup":
        return run_setup(given.requirements)
    if given.only == "close-metadata":
        return close_metadata(given.uid)
    check_python(given.python, given.python_version)
    if given.uid:
        make_user(given.uid)
    if given.close_metadata:
        close_metadata(given.uid)
    bring(caller, given.sha256, Path(given.folder), given.patience_s)
    return install(given.requirements, lambda: caller.file("lock", LOCK_TIMEOUT_S).decode())


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]
