"""Each case in a process of its own: the environment is set once, and Ray must not be imported before."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

PREPARE = """
import json, os, sys
os.environ["RAY_AUTH_TOKEN"] = "of another cluster"
from pathlib import Path
from manager.engine.on_ray.ray_environment import prepare

directory = prepare()
assert prepare() == directory
token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
print(json.dumps({
    "directory": str(directory),
    "exists": directory.is_dir(),
    "mode": os.environ["RAY_AUTH_MODE"],
    "in_the_environment": [key for key in os.environ if os.environ[key] in ("of another cluster", token.read_text())],
    "token_mode": token.stat().st_mode,
    "directory_mode": directory.parent.stat().st_mode,
    "token_length": len(token.read_text()),
    "temporary": os.environ["RAY_TMPDIR"],
    "ray_imported": "ray" in sys.modules,
}))
"""

WITH_TLS = """
import json, os, stat, subprocess
from pathlib import Path
from manager.engine.joining.certificates import Tls
from manager.engine.on_ray.ray_environment import prepare
from morph.contract.errors import ClusterError

directory = prepare(Tls())
assert prepare(Tls()) == directory
for other in (None, Tls("127.0.0.2"), Tls(enrols=True)):
    try:
        prepare(other)
    except ClusterError:
        print("asked again otherwise: refused")
names = {key: Path(os.environ[f"RAY_TLS_{key}"]) for key in ("SERVER_CERT", "SERVER_KEY", "CA_CERT")}
assert os.environ["RAY_USE_TLS"] == "1"
folder = names["CA_CERT"].parent
assert set(names.values()) == set(folder.iterdir())
assert {stat.S_IMODE(path.stat().st_mode) for path in names.values()} == {0o600}
assert stat.S_IMODE(folder.stat().st_mode) == 0o700
assert [path.name for path in folder.iterdir() if "PRIVATE KEY" in path.read_text()] == [names["SERVER_KEY"].name]

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

authority, node = (x509.load_pem_x509_certificate(names[key].read_bytes()) for key in ("CA_CERT", "SERVER_CERT"))
node.verify_directly_issued_by(authority)
key = load_pem_private_key(names["SERVER_KEY"].read_bytes(), None)
assert key.public_key() == node.public_key() != authority.public_key()  # the authority's own key is gone
names = node.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
print(folder)
"""

ADOPTED = """
import os, sys, tempfile
from pathlib import Path
from manager.engine.joining.certificates import Tls, certificates_of, make_certificates
from manager.engine.on_ray.ray_environment import adopt

left = Path(tempfile.mkdtemp())
(left / "token").write_text("of the killed manager")
tls = Tls("127.0.0.2", enrols=True) if sys.argv[1] == "with" else None
if tls is not None:
    made = make_certificates(left, tls)
    assert made.authority_key.stat().st_mode & 0o777 == 0o600
assert adopt(left / "ray", tls) == left / "ray"
assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(left / "token")
key = str(certificates_of(left).key)
print(os.environ.get("RAY_USE_TLS"), os.environ.get("RAY_TLS_SERVER_KEY") == key)
"""

TOO_LATE = """
import sys, types
sys.modules["ray"] = types.ModuleType("ray")
from manager.engine.on_ray.ray_environment import prepare
from morph.contract.errors import ClusterError

try:
    prepare()
except ClusterError as error:
    print(error)
"""


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout


def test_the_token_is_the_users_alone_and_goes_with_the_process() -> None:
    import json

    facts = json.loads(run(PREPARE))
    assert facts["mode"] == "token"
    assert facts["exists"]
    assert facts["in_the_environment"] == []
    assert stat.S_IMODE(facts["token_mode"]) == 0o600
    assert stat.S_IMODE(facts["directory_mode"]) == 0o700
    assert facts["token_length"] >= 32
    assert facts["temporary"] == str(Path(facts["directory"]).parent)
    assert not facts["ray_imported"]
    assert not Path(facts["temporary"]).exists()


def test_certificates_are_the_users_alone_and_the_key_that_signed_them_is_nowhere() -> None:
    *refused, folder = run(WITH_TLS).splitlines()
    assert refused == ["asked again otherwise: refused"] * 3
    assert not Path(folder).exists()  # it went with the process


@pytest.mark.parametrize(("tls", "expected"), [("with", "1 True\n"), ("without", "None False\n")])
def test_who_takes_over_uses_what_the_killed_manager_made(tls: str, expected: str) -> None:
    assert run(ADOPTED, tls) == expected


def test_preparing_after_ray_was_imported_is_refused() -> None:
    assert "Ray was imported before" in run(TOO_LATE)
