"""Translates AWS's errors to a provider's: by the error's code first, by its status where the code is unknown.

Sources: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html and
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/troubleshooting-launch-fleet.html.
"""

from __future__ import annotations

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
    "InsufficientCapacity",
    "InsufficientCapacityOnOutpost",
    "InsufficientFreeAddressesInSubnet",
    "InsufficientHostCapacity",
    "InsufficientInstanceCapacity",
    "InsufficientReservedInstanceCapacity",
    "SpotMaxPriceTooLow",
    "UnfulfillableCapacity",
    "Unsupported",
}
"""No type of the fleet is available now, in any zone; ``Unsupported``: a zone that never has a type."""
QUOTA = {"MaxSpotInstanceCountExceeded", "MaxSpotFleetRequestCountExceeded", "MaxFleetCountExceeded"}
"""Also every code that ends with LimitExceeded."""
THROTTLED = {
    "BandwidthLimitExceeded",
    "EC2ThrottledException",
    "PriorRequestNotComplete",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestThrottledException",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
}
EXPIRED = {
    "AuthFailure",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
"""New credentials may be accepted: they are looked up again, and the user may have logged in by then."""
NOT_YET = {
    "IncorrectInstanceState",
    "InvalidInstanceID.NotFound",
    "InvalidLaunchTemplateId.NotFound",
    "InvalidLaunchTemplateId.VersionNotFound",
    "InvalidLaunchTemplateName.NotFoundException",
    "InvalidNetworkInterfaceID.NotFound",
    "InvalidVolume.NotFound",
    "VolumeInUse",
}
"""Resources made or ended a moment ago are not known to all of AWS's servers yet."""
USERS = (
    "AccessDenied",
    "Invalid",
    "Missing",
    "OperationNotPermitted",
    "OptInRequired",
    "Unauthorized",
    "Unknown",
    "Valid",
)
"""Beginnings of codes of errors that only the user can mend. The meaning of any other code is not known."""
MISMATCH = "IdempotentParameterMismatch"
TEMPLATE_EXISTS = "InvalidLaunchTemplateName.AlreadyExistsException"
DRY_RUN = "DryRunOperation"
_ITS_OWN = ("InstanceInitiatedShutdown", "UserInitiatedShutdown", "UserInitiatedHibernate")


def provider_error(code: str, message: str, status: int, begin: str = "") -> ProviderError:
    """Return a provider's error for one of AWS's."""
    text = f"{begin}{': ' if begin else ''}{code}: {' '.join(message.split())[:MESSAGE_CHARACTERS]}"
    if code in THROTTLED or status == 429:
        return Throttled(text)
    if code in QUOTA or code.endswith("LimitExceeded"):
        return QuotaExceeded(text)
    if code in CAPACITY:
        return CapacityShort(text)
    if code == "AuthFailure" and message.startswith("Not authorized"):  # about an image or a network, not the login
        return Misconfigured(text)
    if code in EXPIRED or code in NOT_YET or code == MISMATCH or status >= 500:
        return Transient(text)
    if status in (401, 403) or code.startswith(USERS):
        return Misconfigured(text)
    return Transient(text)


def fleet_error(code: str, message: str, begin: str) -> ProviderError:
    """Return a provider's error for one of a fleet, which has no status: unknown ones count as transient."""
    internal = code.startswith(("Internal", "Unavailable", "ServiceUnavailable"))
    return provider_error(code, message, 500 if internal else 400, begin)


def state_error(code: str, message: str, begin: str) -> ProviderError:
    """Return a provider's error for the StateReason of an instance that ended, as ``Server.SpotInstanceTermination``.

    Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html.
    """
    side, _, name = code.rpartition(".")
    status = 500 if side == "Server" or name in _ITS_OWN else 403
    return provider_error(name, message.removeprefix(f"{code}: "), status, f"{begin} was made and ended")
