"""Ends this VM: on Azure by its managed identity, because a VM that is only switched off still costs money.

It first asks Azure whether the VM is Morph's: this program may have been copied with the disk of a VM of Morph.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from manager.host.plain_http import HttpFailed, fetch

if TYPE_CHECKING:
    from collections.abc import Callable

METADATA_URL = "http://169.254.169.254"
MANAGEMENT_URL = "https://management.azure.com"
COMPUTE_API_VERSION = "2024-07-01"
COMPUTE_PATH = "/metadata/instance/compute?api-version=2021-02-01&format=json"
TAGS = ("morph-run", "morph-job", "morph-request")
TOKEN_PATH = "/metadata/identity/oauth2/token?api-version=2018-02-01&resource="
TIMEOUT_S = 30.0
NUM_AGAIN, AGAIN_S = 4, 30.0


def end_vm(
    cloud: str, node: str, management_url: str = MANAGEMENT_URL, pause: Callable[[float], object] = time.sleep
) -> None:
    """End this VM as its cloud requires, or switch it off; some clouds still bill a VM that is off.

    On Azure a VM that is not ``node``, or not Morph's, lives on. Azure is asked a few times before the VM is switched
    off, because a VM that is off cannot ask. ``pause``: waits some seconds.
    """
    taken = end_on_azure(node, management_url=management_url) if cloud == "azure" else False
    for _ in range(NUM_AGAIN if cloud == "azure" else 0):
        if taken is not False:
            break
        pause(AGAIN_S)
        taken = end_on_azure(node, management_url=management_url)
    if taken is None:
        print(f"this VM is not {node} of Morph: it lives on", file=sys.stderr, flush=True)
    elif not taken:
        subprocess.run(["systemctl", "poweroff"], check=False, timeout=60)


def end_on_azure(node: str, metadata_url: str = METADATA_URL, management_url: str = MANAGEMENT_URL) -> bool | None:
    """Ask Azure to delete this VM, which Morph named ``node``; return whether Azure accepted.

    False without an identity or permission, or if Azure does not describe this VM; None: the VM is not the node, or has
    no tags of Morph, and no deletion was requested.
    """
    headers = {"Metadata": "true"}
    try:
        said = fetch(metadata_url + COMPUTE_PATH, timeout_s=TIMEOUT_S, headers=headers)
        if said.status != 200:
            return False
        vm = json.loads(said.body)
        tags = {tag["name"]: tag["value"] for tag in vm["tagsList"]}
        if vm["name"] != node or not all(tags.get(name) for name in TAGS):
            return None
        token_url = metadata_url + TOKEN_PATH + quote(f"{management_url.rstrip('/')}/", safe="")
        token = fetch(token_url, timeout_s=TIMEOUT_S, headers=headers)
        if token.status != 200:
            return False
        bearer = str(json.loads(token.body)["access_token"])
        url = f"{management_url.rstrip('/')}{vm['resourceId']}?api-version={COMPUTE_API_VERSION}&forceDeletion=true"
        done = fetch(url, timeout_s=TIMEOUT_S, method="DELETE", headers={"Authorization": f"Bearer {bearer}"})
        return done.status in (200, 202, 204)
    except (HttpFailed, ValueError, KeyError, TypeError):
        return False
