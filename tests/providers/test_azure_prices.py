from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest

from manager.providers.azure.prices import AGAIN_S, RetailPrices, retail_price
from manager.providers.azure.spec import AzureSize
from manager.providers.interface.provider import Price
from tests.notices.metadata_server import MetadataServer, Reply, json_reply, served
from tests.providers.azure_world import SPEC

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


@pytest.mark.parametrize("reply", [Reply(status=429), json_reply({}), Reply(drop=True)], ids=["429", "{}", "dropped"])
def test_a_list_of_which_a_page_is_missing_is_no_price(prices: MetadataServer, reply: Reply) -> None:
    url = prices.url + PATH
    prices.script("GET", PATH, json_reply({"Items": [item(0.2)], "NextPageLink": f"{url}?$skip=100"}), reply)
    assert retail_price("westus2", "Standard_NC6", spot=True, url=url) is None


def test_a_price_that_the_list_did_not_say_is_asked_for_again_after_a_while_and_a_known_one_never() -> None:
    now_s, asked = [5.0], list[tuple[str, float]]()
    said: dict[str, float] = {"known": 0.3}

    def find(size: str) -> float | None:
        asked.append((size, now_s[0]))
        return said.get(size)

    prices, sizes = RetailPrices(SPEC, find, lambda: now_s[0]), [AzureSize(name="known"), AzureSize(name="silent")]

    def look(at_s: float) -> list[float | None]:
        now_s[0] = at_s
        return [prices(size) for size in sizes]

    for at_s in (5.0, 65.0, 4.9 + AGAIN_S, 5.0 + AGAIN_S, 65.0 + AGAIN_S):
        assert look(at_s) == [0.3, None]
    assert asked == [("known", 5.0), ("silent", 5.0), ("silent", 5.0 + AGAIN_S)]
    said["silent"] = 1.4
    assert look(65.0 + AGAIN_S) == [0.3, None]
    assert look(5.0 + 2 * AGAIN_S) == [0.3, 1.4]
    assert look(5.0 + 9 * AGAIN_S) == [0.3, 1.4]
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("listed", "price"),
    [
        ({}, None),
        ({"b": 0.2}, Price(usd_per_h=0.5, source="Azure's retail price list")),
        ({"b": 0.7}, Price(usd_per_h=0.7, source="Azure's retail price list")),
    ],
)
def test_the_price_is_that_of_the_dearest_size_and_unknown_while_one_is(
    listed: dict[str, float], price: Price | None
) -> None:
    sizes = (AzureSize(name="a", usd_per_h=0.5), AzureSize(name="b"))
    assert SPEC.model_copy(update={"sizes": sizes}).price(lambda size: listed.get(size.name)) == price
    own = SPEC.model_copy(update={"sizes": sizes[:1]}).price(lambda _size: None)
    assert own == Price(usd_per_h=0.5, source="the cluster file")
