"""Ray's folder, token and certificates of a run, and the environment of its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manager.engine.on_ray.ray_environment import environment
from tests.waiting import BOUND_S

PREPARED = """
import json, os, stat, sys
from pathlib import Path
from manager.engine.joining.certificates import Tls
from manager.engine.on_ray.ray_environment import environment, prepare

directory = prepare(Tls() if sys.argv[1] == "with" else None)
found = environment(directory, on_loopback=True)
files = [path for path in directory.parent.rglob("*") if path.is_file()]
print(json.dumps({
    "folder": str(directory.parent),
    "folder_mode": stat.S_IMODE(directory.parent.stat().st_mode),
    "file_modes": {path.name: stat.S_IMODE(path.stat().st_mode) for path in files},
    "token": Path(found["RAY_AUTH_TOKEN_PATH"]).read_text(),
    "environment": found,
    "keys": [path.name for path in files if "PRIVATE KEY" in path.read_text()],
}))
"""
"""This runs in a process of its own, at whose end the folder is removed."""

ADOPTED = """
import sys, tempfile
from pathlib import Path
from manager.engine.joining.certificates import Tls, make_certificates
from manager.engine.on_ray.ray_environment import adopt, environment

left = Path(tempfile.mkdtemp())
(left / "token").write_text("of the killed manager")
tls = Tls("127.0.0.2", enrols=True) if sys.argv[1] == "with" else None
if tls is not None:
    made = make_certificates(left, tls)
    assert made.authority_key.stat().st_mode & 0o777 == 0o600
assert adopt(left / "ray", tls) == left / "ray"
found = environment(left / "ray", on_loopback=False)
assert found["RAY_AUTH_TOKEN_PATH"] == str(left / "token")
assert str(made.authority_key if tls else left / "tls") not in found.values()
print("RAY_USE_TLS" in found)
"""


def run(code: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=BOUND_S, check=True
    ).stdout


@pytest.mark.parametrize("tls", ["with", "without"])
def test_the_token_and_certificates_are_the_users_alone_and_go_with_the_process(tls: str) -> None:
    facts = json.loads(run(PREPARED, tls))
    assert facts["folder_mode"] == 0o700
    assert {mode for name, mode in facts["file_modes"].items() if name != "lock"} == {0o600}
    assert len(facts["token"]) >= 32
    assert facts["token"] not in facts["environment"].values()
    assert facts["environment"]["RAY_AUTH_MODE"] == "token"
    assert facts["environment"]["RAY_TMPDIR"] == facts["folder"]
    assert facts["keys"] == (["key.pem"] if tls == "with" else []), "the authority's own key is gone"
    assert not Path(facts["folder"]).exists()


@pytest.mark.parametrize(("tls", "expected"), [("with", "True\n"), ("without", "False\n")])
def test_a_manager_that_takes_over_uses_the_killed_ones_files(tls: str, expected: str) -> None:
    assert run(ADOPTED, tls) == expected


def test_the_environment_of_rays_processes_is_what_is_known_to_be_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")  # these would take precedence over the path
    monkeypatch.setenv("CLOUD_PASSPHRASE", "s3cret")
    found = environment(tmp_path / "ray", on_loopback=False)
    assert {"of another cluster", "s3cret"} & set(found.values()) == set()
    assert found["PATH"] == os.environ["PATH"]
