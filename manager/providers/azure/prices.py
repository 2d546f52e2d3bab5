"""Reads Azure's public price list,
https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from urllib.parse import urlencode

from manager.host.plain_http import HttpFailed, fetch
from manager.providers.azure.spec import AzureSize, AzureSpec
from manager.providers.interface.cloud import Remembered

PRICES_URL = "https://prices.azure.com/api/retail/prices"
TIMEOUT_S = 20.0
MAX_PAGES = 10
DISK_TIERS = {"Premium_LRS": "P", "StandardSSD_LRS": "E", "Standard_LRS": "S"}
DISK_GIB = {4: 1, 8: 2, 16: 3, 32: 4, 64: 6, 128: 10, 256: 15, 512: 20, 1024: 30, 2048: 40, 4096: 50}
"""Number of a disk's tier by its largest size (GiB): https://azure.microsoft.com/pricing/details/managed-disks/."""
HOURS_OF_A_MONTH = 730.0


def retail_prices(spec: AzureSpec) -> Remembered[AzureSize, float]:
    """Return the list's prices of a spec's sizes."""
    return Remembered(lambda size: retail_price(spec.location, size.name, spot=spec.spot))


def retail_price(location: str, size: str, *, spot: bool, url: str = PRICES_URL) -> float | None:
    """Return the highest price of one hour of a Linux VM (USD); None when the list has none or does not answer."""
    query = f"armRegionName eq '{location}' and armSkuName eq '{size}' and priceType eq 'Consumption'"
    return _highest(query, lambda item: _fits(item, spot), url)


def _highest(query: str, fits: Callable[[dict[str, object]], bool], url: str) -> float | None:
    page = f"{url}?{urlencode({'api-version': '2023-01-01-preview', '$filter': query})}"
    figures: list[float] = []
    for _ in range(MAX_PAGES):
        try:
            answer = fetch(page, timeout_s=TIMEOUT_S)
            if answer.status != 200:  # the highest price may be on the missing page
                return None
            document = json.loads(answer.body)
            figures += [float(item["retailPrice"]) for item in document["Items"] if fits(item)]
        except (HttpFailed, ValueError, TypeError, KeyError, AttributeError):
            return None
        page = document.get("NextPageLink") or ""
        if not page.startswith(url):
            break
    return max(figures, default=None)


def disk_price(location: str, sku: str, gib: int, url: str = PRICES_URL) -> float | None:
    """Return the price of one hour of a disk (USD); None when the list has none or does not answer."""
    number = next((number for most, number in DISK_GIB.items() if gib <= most), None)
    if sku not in DISK_TIERS or number is None:
        return None
    tier = f"{DISK_TIERS[sku]}{number} LRS"
    query = f"armRegionName eq '{location}' and skuName eq '{tier}' and priceType eq 'Consumption'"
    monthly = _highest(query, lambda item: item.get("meterName") == f"{tier} Disk", url)
    return None if monthly is None else monthly / HOURS_OF_A_MONTH


def _fits(item: dict[str, object], spot: bool) -> bool:
    name = f"{item.get('skuName', '')} {item.get('meterName', '')}"
    windows = "Windows" in str(item.get("productName", ""))
    hourly = item.get("unitOfMeasure") == "1 Hour" and item.get("currencyCode") == "USD"
    return hourly and not windows and ("Spot" in name) is spot and "Low Priority" not in name
