"""Looks up AWS's prices: in the history of spot prices, and in the price list for everything else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from manager.providers.aws.client import Aws, reading
from manager.providers.aws.spec import AwsSpec, AwsType
from manager.providers.interface.cloud import Remembered
from manager.providers.interface.provider import ProviderError

KEEP_S = 3600.0
"""Seconds for which a price is kept: spot prices change a few times a day."""
HOURS_OF_A_MONTH = 730.0
LINUX = "Linux/UNIX"


class Prices:
    """Prices of a spec's types, each remembered for a while, and of volumes. Thread-safe; never fails."""

    def __init__(self, spec: AwsSpec, ec2: Aws, pricing: Aws) -> None:
        self._spec, self._ec2, self._pricing = spec, ec2, pricing
        self._remembered: Remembered[str, dict[str, float]] = Remembered(
            self._spot if spec.spot else self._on_demand, KEEP_S
        )

    def dearest(self, known: AwsType) -> float | None:
        """Return the dollars an hour of a type in its most expensive zone; None: not known."""
        prices = self._remembered(known.name) or {}
        return max((price for zone, price in prices.items() if known.may_be_in(zone)), default=None)

    def of(self, size: str, zone: str) -> float | None:
        """Return the dollars an hour of a type in a zone; None: not known."""
        known = self._spec.type_of(size, zone)
        if known is not None and known.usd_per_h is not None:
            return known.usd_per_h
        return (self._remembered(size) or {}).get(zone) if size else None

    def volume(self, kind: str, gib: int) -> float | None:
        """Return the dollars an hour of a volume; None: not known."""
        wanted = {"productFamily": "Storage", "volumeApiName": kind}
        monthly = self._listed(wanted, "GB-Mo")
        return None if monthly is None else monthly * gib / HOURS_OF_A_MONTH

    def _spot(self, size: str) -> dict[str, float] | None:
        now, newest = datetime.now(UTC), dict[str, tuple[datetime, float]]()
        wanted = {"InstanceTypes": [size], "ProductDescriptions": [LINUX], "StartTime": now, "EndTime": now}
        try:
            with reading("the history of spot prices"):
                for price_there, _ in self._ec2.pages("describe_spot_price_history", "SpotPriceHistory", "", **wanted):
                    zone, since = price_there["AvailabilityZone"], price_there["Timestamp"]
                    fits = price_there["InstanceType"] == size and price_there["ProductDescription"].startswith(LINUX)
                    if fits and zone in self._spec.subnets and (zone not in newest or since > newest[zone][0]):
                        newest[zone] = (since, float(price_there["SpotPrice"]))
        except ProviderError:
            return None
        return {zone: price for zone, (_, price) in newest.items()} or None

    def _on_demand(self, size: str) -> dict[str, float] | None:
        wanted = {"instanceType": size, "operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA"}
        price = self._listed(wanted | {"capacitystatus": "Used"}, "Hrs")
        return None if price is None else dict.fromkeys(self._spec.subnets, price)

    def _listed(self, wanted: dict[str, str], unit: str) -> float | None:
        """Return the highest fitting price in the list; None: there is none, or the list did not answer."""
        filters = [
            {"Type": "TERM_MATCH", "Field": field, "Value": value}
            for field, value in {"regionCode": self._spec.region, **wanted}.items()
        ]
        try:
            with reading("the price list"):
                figures = [
                    price
                    for product, _ in self._pricing.pages(
                        "get_products", "PriceList", "", ServiceCode="AmazonEC2", Filters=filters
                    )
                    for price in _figures(json.loads(str(product)), unit)
                ]
        except ProviderError:
            return None
        return max(figures, default=None)


def _figures(product: dict[str, Any], unit: str) -> Iterator[float]:
    for term in product["terms"]["OnDemand"].values():
        for dimension in term["priceDimensions"].values():
            if dimension["unit"] == unit and float(dimension["pricePerUnit"].get("USD", 0)) > 0:
                yield float(dimension["pricePerUnit"]["USD"])


def prices_of(spec: AwsSpec, open_client: Callable[[str], Any]) -> Prices:
    """Return the prices of a spec's types; ``open_client``: opens the client of the named service."""
    return Prices(spec, Aws(lambda: open_client("ec2")), Aws(lambda: open_client("pricing")))
