"""How a VM ends itself. On Azure by its managed identity: one that is only switched off is still paid for."""

from __future__ import annotations

import json
import subprocess
from urllib.parse import quote

from manager.plain_http import HttpFailed, fetch

METADATA_URL = "http://169.254.169.254"
MANAGEMENT_URL = "https://management.azure.com"
COMPUTE_API_VERSION = "2024-07-01"
ID_PATH = "/metadata/instance/compute/resourceId?api-version=2021-02-01&format=text"
TOKEN_PATH = "/metadata/identity/oauth2/token?api-version=2018-02-01&resource="
TIMEOUT_S = 30.0


def end_vm(cloud: str, management_url: str = MANAGEMENT_URL) -> None:
    """End this VM as its cloud wants it, or switch it off, which some clouds go on billing."""
    if not (cloud == "azure" and end_on_azure(management_url=management_url)):
        subprocess.run(["systemctl", "poweroff"], check=False, timeout=60)


def end_on_azure(metadata_url: str = METADATA_URL, management_url: str = MANAGEMENT_URL) -> bool:
    """Ask Azure to delete this VM; returns whether it took that. False without an identity or the right to."""
    headers = {"Metadata": "true"}
    try:
        vm = fetch(metadata_url + ID_PATH, timeout_s=TIMEOUT_S, headers=headers)
        token_url = metadata_url + TOKEN_PATH + quote(f"{management_url.rstrip('/')}/", safe="")
        token = fetch(token_url, timeout_s=TIMEOUT_S, headers=headers)
        if vm.status != 200 or token.status != 200:
            return False
        bearer = str(json.loads(token.body)["access_token"])
        url = f"{management_url.rstrip('/')}{vm.text.strip()}?api-version={COMPUTE_API_VERSION}&forceDeletion=true"
        done = fetch(url, timeout_s=TIMEOUT_S, method="DELETE", headers={"Authorization": f"Bearer {bearer}"})
        return done.status in (200, 202, 204)
    except (HttpFailed, ValueError, KeyError, TypeError):
        return False
