"""Google Cloud: waits for the ``preempted`` entry of the metadata server.

https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption
"""

from __future__ import annotations

from manager.host.plain_http import HttpFailed, fetch
from manager.notices.source import NoticeUnavailable, Standing, checked

METADATA_URL = "http://metadata.google.internal"
PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
WAIT_S = 20
MARGIN_S = 10.0
LEAD_S = 30.0
"""A Spot VM has up to 30 s after the signal."""


class GcpNotices:
    """Asks whether this VM was preempted. The call blocks until the answer changes, for at most ``wait_s``.

    ``wait_s`` is whole; ``margin_s`` further seconds later, the call is given up.
    """

    name = "gcp"

    def __init__(self, metadata_url: str = METADATA_URL, wait_s: int = WAIT_S, margin_s: float = MARGIN_S) -> None:
        self._url = metadata_url + PREEMPTED_PATH
        self._wait_s = wait_s
        self._margin_s = margin_s
        self._etag = ""

    def standing(self) -> tuple[Standing, ...]:
        query = f"?wait_for_change=true&timeout_sec={self._wait_s}&last_etag={self._etag}" if self._etag else ""
        timeout_s = self._margin_s + (self._wait_s if query else 0)
        try:
            answer = fetch(self._url + query, timeout_s=timeout_s, headers={"Metadata-Flavor": "Google"})
        except HttpFailed as error:
            raise NoticeUnavailable(str(error)) from error
        text = checked(answer, "preempted").text.strip()
        if text not in ("TRUE", "FALSE"):
            raise NoticeUnavailable(f"preempted: the answer is {text[:40]!r}, not TRUE or FALSE")
        self._etag = answer.headers.get("etag", "")
        return (Standing(notice="gcp preempted", lead_s=LEAD_S),) if text == "TRUE" else ()

    def acknowledge(self, notice: str) -> None:
        """Do nothing: Google Cloud has no acknowledgement."""
