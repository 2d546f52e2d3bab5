from __future__ import annotations

import os

import pytest

from manager.providers.boot import first_boot


def test_an_interpreter_that_the_job_s_user_may_not_run_makes_a_vm_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(first_boot.subprocess, "run", refused)
    with pytest.raises(first_boot.Unfit, match=r"as whom the job's code is to run, cannot run .*Permission denied"):
        first_boot.make_user(os.getuid())
