"""Translates Azure's errors to a provider's errors: by the error's code or, if the code is unknown, by its status.

Sources: https://learn.microsoft.com/azure/virtual-machines/error-codes-spot and
https://learn.microsoft.com/azure/azure-resource-manager/troubleshooting/common-deployment-errors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime

from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError

from manager.providers.interface.provider import (
    MESSAGE_CHARACTERS,
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
    "AvailabilityZoneNotSupported",
}
"""Codes: another zone may have the size, or another size may be available."""
SIZE = {"SpotPriceGreaterThanProvidedMaxPrice", "AzureSpotIsNotSupportedForThisVMSize", "NotAvailableForSubscription"}
"""Codes: no zone offers this size to the subscription."""
QUOTA = {"QuotaExceeded", "LowPriorityQuotaExceeded", "ResourceQuotaExceeded"}
THROTTLED = {"TooManyRequests", "SubscriptionRequestsThrottled", "ResourceRequestsThrottled"}
USERS = {
    "AuthorizationFailed",
    "AzureSpotFeatureNotEnabledForSubscription",
    "LinkedAuthorizationFailed",
    "MaxPriceValueInvalid",
    "MissingRegistrationForType",
    "MissingSubscriptionRegistration",
    "ReadOnlyDisabledSubscription",
    "RequestDisallowedByPolicy",
    "ResourceGroupBeingDeleted",
    "ResourceGroupNotFound",
    "ResourceTypeNotSupportAvailabilityZones",
    "ScopeLocked",
    "SubscriptionNotFound",
    "SubscriptionNotRegistered",
}
"""Codes of errors that the user must fix, whatever their status, which is often 409."""
SOON = {"NicReservedForAnotherVm"}
"""A code that is returned for three minutes after a VM failed; it is transient, although its status is 400."""
GONE = {"ResourceNotFound", "NotFound"}
"""Codes: the resource does not exist. With other codes of status 404, its group or subscription does not exist."""


class SizeRefused(CapacityShort):
    """No zone has a VM of this size: its price is above ``max_usd_per_h``, or it has no spot VMs."""


@contextmanager
def translating(what: str) -> Iterator[None]:
    """Raise a ProviderError in place of the SDK's error; ``what``: the beginning of its message, or ""."""
    try:
        yield
    except AzureError as error:
        raise translated(error, f"{what}: " if what else "") from error


def is_gone(error: HttpResponseError) -> bool:
    """Whether a 404 says that the resource itself does not exist, rather than its group or subscription."""
    return str(getattr(error.error, "code", None) or "ResourceNotFound") in GONE


def translated(error: AzureError, begin: str) -> ProviderError:
    """Return a provider's error for one of the SDK's."""
    text = f"{begin}{' '.join(str(error.message).split())[:MESSAGE_CHARACTERS]}"
    if not isinstance(error, HttpResponseError):  # no answer at all
        return Transient(text)
    code, target = str(getattr(error.error, "code", None) or ""), str(getattr(error.error, "target", None) or "")
    if code:  # the SDK's own message repeats everything
        text = f"{begin}{code}: {' '.join(str(error.error.message).split())[:MESSAGE_CHARACTERS]}"
    if isinstance(error, ClientAuthenticationError) and error.response is None:  # no way to log in worked
        first = str(error.message).strip().partition("\n")[0][:MESSAGE_CHARACTERS]
        return Misconfigured(f"{begin}no login to Azure (`az login`, or an identity of this VM): {first}")
    status = int(error.status_code or 0)
    after_s = retry_after_s(error.response.headers) if error.response is not None else None
    if status == 429 or code in THROTTLED:
        return Throttled(text, after_s)
    not_allowed = text.lower() if code == "OperationNotAllowed" else ""
    if code in QUOTA or "quota" in not_allowed:
        return QuotaExceeded(text)
    if code in SIZE or "max price" in not_allowed or (code == "InvalidParameter" and target == "vmSize"):
        return SizeRefused(text)
    if code in CAPACITY:
        return CapacityShort(text)
    # below 400: an operation that failed in the end; 401: a new token may be accepted later
    if code in SOON:
        return Transient(text, after_s)
    if (
        code not in USERS
        and "offer type" not in not_allowed
        and (status < 400 or status in (401, 408, 409, 412) or status >= 500)
    ):
        return Transient(text, after_s)
    return Misconfigured(text)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return how long (seconds) Azure asks to wait; a date is compared with the ``Date`` of the answer."""
    text = str(headers.get("Retry-After", ""))
    if text.isdigit():
        return float(text)
    try:
        now_s = parsedate_to_datetime(headers["Date"]).timestamp() if "Date" in headers else time.time()
        return max(0.0, parsedate_to_datetime(text).timestamp() - now_s)
    except ValueError:
        return None
