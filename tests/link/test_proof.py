from __future__ import annotations

import pytest
from pydantic import ValidationError

from morph.contract.messages import WorkerSetup
from morph.link.home import Home
from morph.link.proof import is_proven, new_secret, proof


def test_a_proof_holds_for_its_parts_and_its_secret_alone() -> None:
    secret = new_secret()
    given = proof(secret, "worker", "nonce", "vm0")
    assert is_proven(given, secret, "worker", "nonce", "vm0")
    assert not is_proven(given, new_secret(), "worker", "nonce", "vm0")
    assert not is_proven(given, secret, "worker", "nonce", "vm1")
    assert not is_proven(given, secret, "worker", "noncevm0")
    assert not is_proven(given, secret, "worker", "nonc", "evm0")  # the positions at which parts end matter too


@pytest.mark.parametrize("given", ["", "é", "\ud800", "x" * 10_000])
def test_anything_else_is_not_a_proof_and_raises_no_error(given: str) -> None:
    assert not is_proven(given, "secret", "part")


def test_a_workers_setup_shows_no_secret_even_in_errors() -> None:
    home = {"worker": "vm0", "host": "127.0.0.1", "port": 7, "secret": "s3cret-of-the-worker"}
    given = {
        "worker": "vm0",
        "job_path": "job.py:job",
        "fingerprint": "f",
        "num_sections": 1,
        "micro_batch_size": 1,
        "checkpoint_url": "checkpoints",
        "store_host": "127.0.0.1",
        "store_port": 1,
        "listen_host": "127.0.0.1",
        "secret": "s3cret-of-the-run",
    }
    assert "s3cret" not in repr(Home.model_validate(home))
    assert "s3cret" not in repr(WorkerSetup.model_validate(given))
    for wrong in ({**given, "job_path": None}, {**given, "store_port": -1}, [given]):
        with pytest.raises(ValidationError) as caught:
            WorkerSetup.model_validate(wrong)
        assert "s3cret" not in str(caught.value)
    with pytest.raises(ValidationError) as caught:
        Home.model_validate({**home, "extra": 1, "secret": ["s3cret"]})
    assert "s3cret" not in str(caught.value)
