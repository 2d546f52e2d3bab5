from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest

from manager.providers.azure_prices import retail_price
from tests.notices.metadata_server import MetadataServer, Reply, json_reply, served

PATH = "/api/retail/prices"


@pytest.fixture
def prices() -> Iterator[MetadataServer]:
    with served() as server:
        yield server


def item(price: float, sku: str = "NC6 Spot", product: str = "Virtual Machines NC Series", **fields: object) -> object:
    figures = {"currencyCode": "USD", "retailPrice": price, "unitOfMeasure": "1 Hour", "skuName": sku}
    return {**figures, "meterName": sku, "productName": product, **fields}


def test_the_spot_price_is_told_apart_from_others_over_all_pages(prices: MetadataServer) -> None:
    url = prices.url + PATH
    first = [item(0.9, "NC6"), item(0.7, "NC6 Low Priority"), item(0.5, product="NC Series Windows"), item(0.2)]
    second = [item(0.25), item(99.0, unitOfMeasure="1 Month")]
    replies = [
        json_reply({"Items": first, "NextPageLink": f"{url}?$skip=100"}),
        json_reply({"Items": second, "NextPageLink": None}),
    ]
    prices.script("GET", PATH, *replies)
    assert retail_price("westus2", "Standard_NC6", spot=True, url=url) == 0.25
    query = parse_qs(urlsplit(prices.asked[0].path).query)["$filter"][0]
    assert query == "armRegionName eq 'westus2' and armSkuName eq 'Standard_NC6' and priceType eq 'Consumption'"
    prices.script("GET", PATH, *replies)
    assert retail_price("westus2", "Standard_NC6", spot=False, url=url) == 0.9


@pytest.mark.parametrize(
    "reply",
    [Reply(status=500), Reply(body="<html>"), Reply(drop=True), json_reply({"Items": []}), json_reply({"Items": [1]})],
    ids=["500", "no JSON", "dropped", "nothing", "another shape"],
)
def test_a_list_without_an_answer_is_no_price(prices: MetadataServer, reply: Reply) -> None:
    prices.script("GET", PATH, reply)
    assert retail_price("westus2", "Standard_NC6", spot=True, url=prices.url + PATH) is None
