"""Selects the known, harmless part of the manager's environment, which its local VMs and all processes of Ray get.

A credential may have any name in an environment, so only listed variables are passed on. Variables that are listed by a
prefix are not passed on if their name hints at a secret. The user names further variables that a job needs
(``vms.pass_variables``); only workers get these, with their setup.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from morph.contract.errors import ConfigError

NAMES = frozenset({
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "PWD", "HOSTNAME"),
    *("VIRTUAL_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("CURL_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
    *("RAY_AUTH_TOKEN_PATH", "RAY_TLS_SERVER_KEY"),
})  # fmt: skip
PREFIXES = (
    *("LC_", "XDG_", "PYTHON", "MORPH_", "RAY_", "TORCH", "PYTORCH_", "TRITON_", "HF_", "TRANSFORMERS_", "TOKENIZERS_"),
    *("CUDA", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "NUMBA_", "NUMEXPR_"),
    "MALLOC_",
)
_SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|(^|_)(KEY|PWD|PASS|SAS)($|_)")
_WITH_LOGIN = re.compile(r"//[^/@]*@")


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that is passed on."""
    return {
        name: value
        for name, value in environment.items()
        if _is_known(name.upper()) and not _WITH_LOGIN.search(value)  # a proxy's address may hold a password
    }


def variables(names: Sequence[str]) -> dict[str, str]:
    """Return the variables of this environment that workers get; ConfigError if one is not set."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigError("is not set in this environment", field="vms.pass_variables", value=missing[0])
    return {name: os.environ[name] for name in names}


def _is_known(name: str) -> bool:
    return name in NAMES or (name.startswith(PREFIXES) and not _SECRET.search(name))
