from __future__ import annotations

import subprocess
import sys


def test_no_cloud_sdk_is_loaded_before_its_provider() -> None:
    code = (
        "import sys, manager.providers.local, manager.providers.hosts.static, manager.providers.azure.spec, "
        "manager.providers.boot.cloud_init, manager.notices.azure, morph.cli.main; "
        "print([name for name in ('azure.core', 'azure.mgmt.compute', 'ray', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
