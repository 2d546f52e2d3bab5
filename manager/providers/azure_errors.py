"""Azure's errors in the words of a provider: by the error's code first, by its status where that says nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError

from manager.providers.provider import (
    CapacityShort,
    Misconfigured,
    ProviderError,
    QuotaExceeded,
    Throttled,
    Transient,
)

CAPACITY = {
    "AllocationFailed",
    "ZonalAllocationFailed",
    "SkuNotAvailable",
    "OverconstrainedAllocationRequest",
    "OverconstrainedZonalAllocationRequest",
    "SpotAllocationFailed",
}
QUOTA = {"QuotaExceeded", "LowPriorityQuotaExceeded", "ResourceQuotaExceeded"}
THROTTLED = {"TooManyRequests", "SubscriptionRequestsThrottled", "ResourceRequestsThrottled"}
MESSAGE_CHARACTERS = 300


@contextmanager
def translating(what: str) -> Iterator[None]:
    """Raise a ProviderError in the place of what the SDK raises."""
    try:
        yield
    except AzureError as error:
        raise translated(error, what) from error


def translated(error: AzureError, what: str) -> ProviderError:
    """Return the error of ours for one of the SDK's."""
    text = f"{what}: {' '.join(str(error.message).split())[:MESSAGE_CHARACTERS]}"
    if isinstance(error, ClientAuthenticationError):
        return Misconfigured(text)
    if not isinstance(error, HttpResponseError):  # no answer at all
        return Transient(text)
    code = str(getattr(error.error, "code", None) or "")
    if code:  # the SDK's own message says everything twice
        text = f"{what}: {code}: {' '.join(str(error.error.message).split())[:MESSAGE_CHARACTERS]}"
    status = int(error.status_code or 0)
    if status == 429 or code in THROTTLED:
        return Throttled(text, _retry_after_s(error))
    if code in QUOTA or (code == "OperationNotAllowed" and "quota" in text.lower()):
        return QuotaExceeded(text)
    if code in CAPACITY:
        return CapacityShort(text)
    if status < 400 or status in (408, 409, 412) or status >= 500:  # below 400: an operation that failed in the end
        return Transient(text)
    return Misconfigured(text)


def _retry_after_s(error: HttpResponseError) -> float | None:
    text = str(error.response.headers.get("Retry-After", "")) if error.response is not None else ""
    return float(text) if text.isdigit() else None
