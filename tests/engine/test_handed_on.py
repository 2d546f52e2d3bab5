from __future__ import annotations

import pytest

from manager.host.environment import handed_on


@pytest.mark.parametrize(
    "name",
    [
        *("AZURE_CLIENT_SECRET", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_CONNECTION_STRING"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "NETRC"),
        *("HF_TOKEN", "HF_HUB_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN", "RAY_REDIS_PASSWORD", "MORPH_PEER_TOKEN"),
        *("GITHUB_PAT", "DATABASE_URL", "MY_OWN_THING", "SSH_AUTH_SOCK", "PYTHON_KEYRING_PASSWORD", "hf_token"),
    ],
)  # fmt: skip
def test_variables_that_may_hold_secrets_are_not_passed_on(name: str) -> None:
    assert handed_on({name: "s3cret", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "HOME", "LC_ALL", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
        *("HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "TORCH_LOGS", "NCCL_DEBUG", "RAY_AUTH_TOKEN_PATH"),
        *("RAY_AUTH_MODE", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT", "RAY_TMPDIR", "https_proxy"),
    ],
)  # fmt: skip
def test_variables_that_processes_need_are_passed_on(name: str) -> None:
    assert handed_on({name: "x"}) == {name: "x"}


def test_a_proxy_with_a_login_is_not_passed_on() -> None:
    assert handed_on({"https_proxy": "http://me:s3cret@proxy:80", "http_proxy": "http://proxy:80"}) == {
        "http_proxy": "http://proxy:80"
    }
