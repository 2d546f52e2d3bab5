"""Azure's public price list: https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices."""

from __future__ import annotations

import json
from urllib.parse import urlencode

from manager.plain_http import HttpFailed, fetch

PRICES_URL = "https://prices.azure.com/api/retail/prices"
TIMEOUT_S = 20.0
MAX_PAGES = 10


def retail_price(location: str, size: str, *, spot: bool, url: str = PRICES_URL) -> float | None:
    """Return what one hour of a Linux VM costs in USD, at most; None when the list does not say or answer."""
    query = f"armRegionName eq '{location}' and armSkuName eq '{size}' and priceType eq 'Consumption'"
    page = f"{url}?{urlencode({'api-version': '2023-01-01-preview', '$filter': query})}"
    figures: list[float] = []
    for _ in range(MAX_PAGES):
        try:
            answer = fetch(page, timeout_s=TIMEOUT_S)
            document = json.loads(answer.body) if answer.status == 200 else {}
            figures += [float(item["retailPrice"]) for item in document.get("Items", []) if _fits(item, spot)]
        except (HttpFailed, ValueError, TypeError, KeyError, AttributeError):
            return None
        page = document.get("NextPageLink") or ""
        if not page.startswith(url):
            break
    return max(figures, default=None)


def _fits(item: dict[str, object], spot: bool) -> bool:
    name = f"{item.get('skuName', '')} {item.get('meterName', '')}"
    windows = "Windows" in str(item.get("productName", ""))
    hourly = item.get("unitOfMeasure") == "1 Hour" and item.get("currencyCode") == "USD"
    return hourly and not windows and ("Spot" in name) is spot and "Low Priority" not in name
