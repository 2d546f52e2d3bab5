"""Each case in a process of its own: the environment is set once, and Ray must not be imported before."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

PREPARE = """
import json, os, sys
from pathlib import Path
from manager.engine.ray_environment import prepare

directory = prepare()
assert prepare() == directory
token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
print(json.dumps({
    "directory": str(directory),
    "exists": directory.is_dir(),
    "mode": os.environ["RAY_AUTH_MODE"],
    "token_mode": token.stat().st_mode,
    "directory_mode": directory.parent.stat().st_mode,
    "token_length": len(token.read_text()),
    "temporary": os.environ["RAY_TMPDIR"],
    "ray_imported": "ray" in sys.modules,
}))
"""

TOO_LATE = """
import sys, types
sys.modules["ray"] = types.ModuleType("ray")
from manager.engine.ray_environment import prepare
from morph.contract.errors import ClusterError

try:
    prepare()
except ClusterError as error:
    print(error)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    return done.stdout


def test_the_token_is_the_users_alone_and_goes_with_the_process() -> None:
    import json

    facts = json.loads(run(PREPARE))
    assert facts["mode"] == "token"
    assert facts["exists"]
    assert stat.S_IMODE(facts["token_mode"]) == 0o600
    assert stat.S_IMODE(facts["directory_mode"]) == 0o700
    assert facts["token_length"] >= 32
    assert facts["temporary"] == str(Path(facts["directory"]).parent)
    assert not facts["ray_imported"]
    assert not Path(facts["temporary"]).exists()


def test_preparing_after_ray_was_imported_is_refused() -> None:
    assert "Ray was imported before" in run(TOO_LATE)
