from __future__ import annotations

import pytest

from manager.host.handed_on import variables
from morph.contract.errors import ConfigError


def test_the_variables_that_are_named_are_read_and_one_that_is_not_set_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMED", "s3cret")
    monkeypatch.delenv("NOT_SET", raising=False)
    assert variables(["NAMED"]) == {"NAMED": "s3cret"}
    with pytest.raises(ConfigError, match=r"vms\.pass_variables.*NOT_SET") as error:
        variables(["NAMED", "NOT_SET"])
    assert "s3cret" not in str(error.value)
