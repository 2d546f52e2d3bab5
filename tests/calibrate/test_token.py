from __future__ import annotations

from pathlib import Path

import pytest

from calibrate.helpers.token import find_token
from morph.contract.errors import ConfigError


def test_a_secret_is_made_once_and_then_read(tmp_path: Path) -> None:
    path = tmp_path / "peer.token"
    made = find_token(path, None, make=True)
    assert len(made) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert find_token(path, "what the environment says", make=True) == made
    assert find_token(path, None) == made


def test_the_environment_is_asked_where_there_is_no_file() -> None:
    assert find_token(None, " sixteen letters at least\n") == "sixteen letters at least"


def test_a_secret_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    open_to_all, short = tmp_path / "open", tmp_path / "short"
    open_to_all.write_text("sixteen letters at least", encoding="utf-8")
    open_to_all.chmod(0o644)
    short.write_text("short", encoding="utf-8")
    short.chmod(0o600)
    for path, error in (
        (open_to_all, r"open: --token-file: others can read the secret \(got '0644'\); allowed: mode 0600"),
        (short, "short: the secret has 5 characters; allowed: at least 16"),
        (tmp_path / "none", "none: --token-file: cannot be read: No such file"),
    ):
        with pytest.raises(ConfigError, match=error):
            find_token(path, None)
    with pytest.raises(ConfigError, match="MORPH_PEER_TOKEN: the secret has 3 characters"):
        find_token(None, "abc")
    with pytest.raises(ConfigError, match="--token-file: the other node must be told from strangers"):
        find_token(None, None)
